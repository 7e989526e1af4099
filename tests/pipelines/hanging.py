"""A small kernel with a fault at choice, to be run in a process of its own: it hangs.

python tests/pipelines/hanging.py FAULT [SECONDS]      prints how it ended
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
import filelock
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from drawing import drawing
from faulty_steps import InThreads, TooManyBytes

from cutedsl_fa3 import cache
from cutedsl_fa3.hang import RUNS_ON, Hang, watch
from cutedsl_fa3.kernels.sm90.forward import ForwardSm90
from cutedsl_fa3.layouts import Tile
from cutedsl_fa3.pipelines import Barrier, Barriers, Ring, Role, Turns, WarpSpecialized
from cutedsl_fa3.pipelines.watch import watched
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.variant import Variant

TILES, CTAS = 5, 4  # of each CTA; in the grid


@dataclass(frozen=True)
class Io:
    """What the kernel reads and writes, and how many tiles a CTA copies."""

    x: tuple[cute.CopyAtom, cute.Tensor]
    y: tuple[cute.CopyAtom, cute.Tensor]
    tiles: cutlass.Int32


class Relay(WarpSpecialized):
    """y = x through a ring of two slots, by two warpgroups of consumers that take turns."""

    arch, name = "sm_90a", "relay"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.cluster = (2, 1) if fault == "a CTA of the cluster releases nothing" else (1, 1)
        self.tiles = {"x": Tile(128, 64, cutlass.BFloat16)}
        made = {"a count in threads": InThreads, "too many bytes": TooManyBytes}.get(fault, Ring)
        shared = {"x": "m"} if self.cluster != (1, 1) else {}
        self.rings = {"x": made(("x",), 2, multicast=shared)}
        self.roles = {"producer": Role(4, registers=24), "consumer": Role(8, registers=240)}
        self.barriers = Barriers(
            {"turn": Barrier(256, 2), "written": Barrier(256), "all": Barrier(384)}
        )

    @property
    def key_text(self) -> str:
        return f"relay {self.rings!r} {self.fault}"

    def fake_args(self) -> tuple:
        def matrix() -> cute.Tensor:
            stride = cute.sym_int64(divisibility=8)
            shape = (cute.sym_int(), 64)
            return make_fake_tensor(cutlass.BFloat16, shape, (stride, 1), assumed_align=16)

        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return matrix(), matrix(), cutlass.Int32(1), stream

    @cute.jit
    def host(self, x, y, tiles, stream):
        io = Io(
            tuple(self.tiles["x"].load_atom(x, multicast=self.cluster[0])),
            tuple(self.tiles["x"].store_atom(y)),
            tiles,
        )
        self.launch(io, (CTAS, 1, 1), stream)

    @cute.jit
    def producer(self, io, smem, ports, thread):
        cta, _, _ = cute.arch.block_idx()
        load, ring = self.load("x", io.x, smem.x, col=0), ports.x
        tiles = io.tiles - 1 if cutlass.const_expr(self.fault == "a tile too few") else io.tiles
        if cutlass.const_expr(self.fault == "no idle warp"):
            self.barriers["all"].arrive_and_wait()
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            for j in cutlass.range(tiles, unroll=1):
                slot = ring.acquire_and_advance()
                if cutlass.const_expr(self.fault == "a copy is left out"):
                    if j != 1:
                        load(cta // self.cluster[0] * io.tiles + j, slot)
                else:
                    load(cta // self.cluster[0] * io.tiles + j, slot)
                slot.commit()

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        warp = cute.arch.make_warp_uniform(thread // 32)
        ring, turns = ports.x, Turns(self.barriers, "turn", warp // 4)
        for j in cutlass.range(io.tiles, unroll=1):
            slot = ring.wait_and_advance()
            self.copy_out(io, smem, slot, turns, warp, j)
        if cutlass.const_expr(self.fault == "an endless loop"):
            now = cute.arch.globaltimer()
            while now != 0:
                now = cute.arch.globaltimer()
        if cutlass.const_expr(self.fault == "a warp leaves early"):
            if warp != 7:
                self.barriers["written"].arrive_and_wait()
        else:
            self.barriers["written"].arrive_and_wait()

    @cute.jit
    def copy_out(self, io, smem, slot, turns, warp, j):
        """Store a tile, in turn; release its slot."""
        cta, _, _ = cute.arch.block_idx()
        turns.wait()
        if warp == 0:
            at = (cta * io.tiles + j, 0)
            self.store(self.tiles["x"], io.y, smem.x[None, None, slot.index], at)
        if cutlass.const_expr(self.fault == "a turn is kept"):
            if warp < 4 or j != 1:
                self.barriers["turn", 1 - warp // 4].arrive_unaligned()
        else:
            turns.pass_on()
        if cutlass.const_expr(self.fault == "a warp releases nothing"):
            if warp != 3:
                slot.release()
        elif cutlass.const_expr(self.fault == "a CTA of the cluster releases nothing"):
            if cta % 2 == 0:
                slot.release()
        elif cutlass.const_expr(self.fault != "no release"):
            slot.release()


# What the exception says, in order.
FAULTS: Mapping[str, tuple[str, ...]] = {
    "no release": (
        "producer warp 0 waits for ring x slot 0 to become empty (phase 0): 8 of 8 arrivals are "
        "missing, from consumer warps 4-11",
        "consumer warps 4-11 wait for ring x slot 0 to become full (phase 1): expects 16,384 "
        "bytes, 1 of 1 arrivals are missing, from producer warp 0",
        "producer warps 1-3 have ended",
        "the cycle: producer warp 0 -> consumer warps 4-11 -> producer warp 0",
    ),
    "a warp releases nothing": ("slot 0 to become empty (phase 0): 1 of 8 arrivals are missing",),
    "a count in threads": ("slot 0 to become empty (phase 0): 248 of 256 arrivals are missing",),
    "too many bytes": (
        "producer warp 0 waits for ring x slot 0 to become empty (phase 0): 8 of 8",
        "consumer warps 4-11 wait for ring x slot 0 to become full (phase 0): expects 17,408 "
        "bytes, 1,024 bytes are missing, from producer warp 0",
        "the cycle: producer warp 0 -> consumer warps 4-11 -> producer warp 0",
    ),
    "a copy is left out": (
        "slot 1 to become full (phase 0): expects 16,384 bytes, 16,384 bytes are missing",
    ),
    "a tile too few": (
        "consumer warps 4-11 wait for ring x slot 0 to become full (phase 0): expects 16,384 "
        "bytes, 1 of 1 arrivals are missing, and every producer warp has ended",
        "no cycle",
    ),
    "a turn is kept": (
        "consumer warps 4-7 wait at named barrier turn copy 0 (hardware barrier 1): of 256 "
        "threads that it needs, 128 wait there, from consumer warps 8-11",
        "consumer warps 8-11 wait at named barrier turn copy 1 (hardware barrier 2): of 256 "
        "threads that it needs, 128 wait there, from consumer warps 4-7",
        "the cycle: consumer warps 4-7 -> consumer warps 8-11 -> consumer warps 4-7",
    ),
    "a warp leaves early": (
        "consumer warps 4-10 wait at named barrier written (hardware barrier 3): of 256 threads "
        "that it needs, 224 wait there",
        "consumer warp 11 has ended",
    ),
    "a CTA of the cluster releases nothing": (
        "to become empty (phase 0): 8 of 16 arrivals are missing",
        "the cycle: producer warp 0",
    ),
    "an endless loop": ("consumer warps 4-11 run, at no wait since",),
    "no idle warp": ("no warp is free to watch",),
}


def arguments(kernel: Relay) -> tuple:
    """x, y and the number of tiles of a CTA."""
    rows = 128 * TILES * CTAS
    x = torch.randn(rows // kernel.cluster[0], 64, device="cuda").bfloat16()
    return x, torch.zeros(rows, 64, device="cuda", dtype=torch.bfloat16), TILES


class FaultyForward(ForwardSm90):
    """The forward, whose ring of keys counts threads where warps arrive."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.rings["k"] = InThreads(("k",), plan.schedule.stages)


def faulty_forward() -> FaultyForward:
    """The kernel for the plain variant at head_dim 64."""
    return FaultyForward(Plan.default(Variant(), Problem("bf16", 64, 64)))


def forward_arguments(kernel: FaultyForward) -> tuple:
    """What it is launched with."""
    q, k, v, o = (torch.randn(1, 2000, 4, 64, device="cuda").bfloat16() for _ in range(4))
    lse = torch.zeros(1, 4, 2000, device="cuda")
    drawn_from = drawing(kernel.schedule, "cuda")
    return q, k, v, o, lse, None, None, None, *drawn_from, 0.125


def cuda_works() -> bool:
    """Whether this process can still use the GPU."""
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


def main(fault: str, seconds: float = 0.5) -> None:
    """Print the exception that a fault ends in, and after how many seconds.

    Such processes may compile side by side, but use the GPU one after the other: beside others that
    hung, a kernel has once gone on after its trap.
    """
    whole = fault == "the forward"
    kernel = faulty_forward() if whole else Relay(fault)
    cache.get(watched(kernel))
    filelock.FileLock(Path(tempfile.gettempdir(), "cutedsl_fa3_hanging.lock")).acquire()
    given = forward_arguments(kernel) if whole else arguments(kernel)
    torch.cuda.synchronize()
    start = time.monotonic()
    try:
        watch(kernel, *given, seconds=seconds)
        print("ENDED: nothing hung")
    except Hang as error:
        print(f"Hang: {error}")
        for cta in error.ctas[:2]:
            print("RAW", cta, [f"{word & 0xFFFFFFFF:08x}" for word in cta.raw])
        if RUNS_ON in str(error):
            print("AFTERWARDS: the kernel runs on")  # any call would wait for it
        elif error.ctas:
            print("AFTERWARDS: CUDA", "works" if cuda_works() else "is lost")
    print(f"SECONDS {time.monotonic() - start:.1f}", flush=True)
    os._exit(0)  # a kernel that cannot be stopped must not be waited for


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
