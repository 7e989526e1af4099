"""A small persistent kernel that uses every piece: two rings, turns, several work tiles a CTA.

C = A @ B^T for `works` tiles of rows, one after the other:

    producer    A tile -> ring "a", B tile -> ring "b", for each work tile and each k
    consumer    rings -> WGMMA, in turns -> registers -> shared memory -> TMA store

Each step is a method of its own, so that a test can plant a fault in one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutedsl_fa3.layouts import Tile, wgmma
from cutedsl_fa3.pipelines import Barrier, Barriers, Ring, Role, Turns, WarpSpecialized

ROWS, COLS, DEPTH = 64, 64, 64  # of a warpgroup's accumulator, and of one k tile
GROUPS = 2


@dataclass(frozen=True)
class Io:
    """What the kernel reads and writes, and how much of it."""

    a: tuple[cute.CopyAtom, cute.Tensor]
    b: tuple[cute.CopyAtom, cute.Tensor]
    c: tuple[cute.CopyAtom, cute.Tensor]
    works: cutlass.Int32
    k_tiles: cutlass.Int32


class Products(WarpSpecialized):
    """The kernel without a fault; `delay` nanoseconds wherever a subclass calls `pause`."""

    arch, name = "sm_90a", "products"
    ring_type: type[Ring] = Ring

    def __init__(self, stages: int = 2, delay: int = 0) -> None:
        self.depth, self.delay = stages, delay
        dtype = cutlass.BFloat16
        self.tiles = {
            "a": Tile(GROUPS * ROWS, DEPTH, dtype),
            "b": Tile(COLS, DEPTH, dtype),
            "c": Tile(GROUPS * ROWS, COLS, dtype),
        }
        self.rings = {name: self.ring_type((name,), stages) for name in ("a", "b")}
        self.roles = {"producer": Role(4, registers=24), "consumer": Role(8, registers=240)}
        self.barriers = Barriers({"written": Barrier(256), "turn": Barrier(256, copies=GROUPS)})

    @property
    def key_text(self) -> str:
        return f"{type(self).__qualname__} {self.rings!r} {self.barriers} delay {self.delay}"

    def fake_args(self) -> tuple:
        def matrix() -> cute.Tensor:
            shape, stride = (cute.sym_int(), cute.sym_int()), cute.sym_int64(divisibility=8)
            return make_fake_tensor(cutlass.BFloat16, shape, (stride, 1), assumed_align=16)

        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return matrix(), matrix(), matrix(), cutlass.Int32(1), stream

    @cute.jit
    def host(self, a, b, c, works, stream):
        io = Io(
            tuple(self.tiles["a"].load_atom(a)),
            tuple(self.tiles["b"].load_atom(b)),
            tuple(self.tiles["c"].store_atom(c)),
            works,
            cute.ceil_div(a.shape[1], DEPTH),
        )
        self.launch(io, (1, 1, 1), stream)

    def pause(self) -> None:
        """Lose time here, where a fault needs a race."""
        if self.delay:
            delay = cutlass.Int32(self.delay)
            cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[delay])

    # The producer.

    @cute.jit
    def producer(self, io, smem, ports, thread):
        ring_a, ring_b = ports.a, ports.b
        if self.issues(thread):
            for work in cutlass.range(io.works, unroll=1):
                ring_a, ring_b = self.fill(io, smem, ring_a, ring_b, work)

    def issues(self, thread):
        """Whether the thread's warp is the one that copies."""
        return cute.arch.make_warp_uniform(thread // 32) == 0

    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        """The tiles of one work tile."""
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_a = ring_a.acquire_and_advance()
            load_a(k, slot_a)
            slot_b = ring_b.acquire_and_advance()
            load_b(k, slot_b)
        return ring_a, ring_b

    # The consumer.

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        mma = wgmma.tiled_mma(cutlass.BFloat16, COLS, GROUPS)
        part = mma.get_slice(thread)
        tiles = (
            mma.make_fragment_A(part.partition_A(smem.a)),
            mma.make_fragment_B(part.partition_B(smem.b)),
        )
        acc = wgmma.accumulator(mma, GROUPS * ROWS, COLS)
        turns = self.turns(group)
        ring_a, ring_b = ports.a, ports.b
        for work in cutlass.range(io.works, unroll=1):
            acc.fill(0.0)
            for k in cutlass.range(io.k_tiles, unroll=1):
                at = (work, k, thread)
                ring_a, ring_b = self.step(io, mma, acc, tiles, turns, ring_a, ring_b, at)
            self.finish(io, smem, mma, acc, work, thread)

    def turns(self, group):
        """Who takes turns, and at which barriers."""
        return Turns(self.barriers, "turn", group)

    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        """One k tile."""
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait_and_advance()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        turns.pass_on()
        warpgroup.wait_group(0)
        slot_a.release()
        slot_b.release()
        return ring_a, ring_b

    def multiply(self, mma, acc, tiles, index_a, index_b):
        """Issue the product of two slots' tiles."""
        warpgroup.fence()
        a, b = tiles[0][None, None, None, index_a], tiles[1][None, None, None, index_b]
        wgmma.issue(mma, acc, a, b, accumulate=True)

    @cute.jit
    def finish(self, io, smem, mma, acc, work, thread):
        """C of one work tile."""
        self.barriers["written"].arrive_and_wait()  # the store before has read C
        wgmma.to_smem(acc, smem.c, mma, thread)
        cute.arch.fence_view_async_shared()
        self.barriers["written"].arrive_and_wait()
        if thread < 32:
            self.store(self.tiles["c"], io.c, smem.c, (work, 0))
