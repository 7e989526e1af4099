"""C = A @ B^T on SM90: the smallest kernel that uses every piece.

    producer    A and B tiles by TMA -> ring "ab"          (B multicast to the CTAs of a cluster)
    consumer    ring "ab" -> WGMMA -> registers -> shared memory -> TMA store

A is (m, k), B is (n, k), C is (m, n), all with contiguous rows; ragged edges are filled with zeros
by the loads and clipped by the store.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutedsl_fa3.layouts import Tile, wgmma
from cutedsl_fa3.pipelines import (
    TMA_BUDGETS,
    Barrier,
    Barriers,
    Expect,
    Ring,
    Role,
    Schedule,
    WarpSpecialized,
)


@dataclass(frozen=True)
class Io:
    """What the kernel reads and writes: a TMA atom and a coordinate tensor per matrix."""

    a: tuple[cute.CopyAtom, cute.Tensor]
    b: tuple[cute.CopyAtom, cute.Tensor]
    c: tuple[cute.CopyAtom, cute.Tensor]


class GemmSm90(WarpSpecialized):
    """A GEMM at any ring depth: `schedule` gives tile_m, tile_n, stages, consumers and cluster."""

    arch = "sm_90a"
    tile_k = 64

    def __init__(self, schedule: Schedule, dtype: type = cutlass.BFloat16) -> None:
        m, n = schedule.tile_m, schedule.tile_n
        producer, consumer = TMA_BUDGETS[schedule.consumers]
        self.schedule, self.dtype, self.cluster = schedule, dtype, schedule.cluster
        self.tiles = {
            "a": Tile(m, self.tile_k, dtype),
            "b": Tile(n, self.tile_k, dtype),
            "c": Tile(m, n, dtype),
        }
        self.rings = {"ab": Ring(("a", "b"), schedule.stages, multicast={"a": "n", "b": "m"})}
        self.roles = {
            "producer": Role(warps=4, registers=producer),
            "consumer": Role(warps=4 * schedule.consumers, registers=consumer),
        }
        self.barriers = Barriers({"written": Barrier(128 * schedule.consumers)})
        if self.tiles["c"].bytes <= self.tiles["b"].bytes * schedule.stages:
            self.aliases = {"c": "b"}  # B is dead once every consumer has multiplied
        self.check()

    @property
    def name(self) -> str:
        """The kernel's symbol prefix."""
        return "gemm_sm90"

    @property
    def key_text(self) -> str:
        """Everything that affects the code."""
        return f"{self.name} {self.dtype.__name__} {self.schedule}"

    def expected(self) -> tuple[Expect, ...]:
        """What the tables promise about the machine code: one load and two products a k tile."""
        s = self.schedule
        opcode, count = wgmma.instructions(s.tile_m, s.tile_n, self.tile_k, s.consumers)
        return (
            *self.common_expectations({"a": 1, "b": 1}, {"c": self.tiles["c"]}),
            Expect(opcode, "exactly", 2 * count, "the first k tile, and the loop over the others"),
        )

    def fake_args(self) -> tuple:
        """(a, b, c, stream) of any size with rows of 16-byte multiples."""

        def matrix(rows: cute.SymInt, cols: cute.SymInt) -> cute.Tensor:
            stride = cute.sym_int64(divisibility=16 // (self.dtype.width // 8))
            return make_fake_tensor(self.dtype, (rows, cols), (stride, 1), assumed_align=16)

        m, n, k = (cute.sym_int() for _ in range(3))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return matrix(m, k), matrix(n, k), matrix(m, n), stream

    @cute.jit
    def host(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        m, n = self.cluster
        io = Io(
            tuple(self.tiles["a"].load_atom(a, multicast=n)),
            tuple(self.tiles["b"].load_atom(b, multicast=m)),
            tuple(self.tiles["c"].store_atom(c)),
        )
        tiles = cute.ceil_div(c.shape, (self.schedule.tile_m, self.schedule.tile_n))
        grid = cute.round_up(tiles, self.cluster)
        self.kernel(io).launch(
            grid=(*grid, 1),
            block=(self.threads, 1, 1),
            cluster=(*self.cluster, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.jit
    def producer(self, io, smem, ports, thread):
        m_block, n_block, _ = cute.arch.block_idx()
        load_a = self.load("a", io.a, smem.a, row=m_block)
        load_b = self.load("b", io.b, smem.b, row=n_block)
        ring = ports.ab
        if thread < 32:
            for k in cutlass.range(cute.ceil_div(io.a[1].shape[1], self.tile_k), unroll=1):
                slot = ring.acquire_and_advance()
                load_a(k, slot)
                load_b(k, slot)
                slot.commit()
            ring.tail()

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        m_block, n_block, _ = cute.arch.block_idx()
        s = self.schedule
        mma = wgmma.tiled_mma(self.dtype, s.tile_n, s.consumers)
        part = mma.get_slice(thread)
        a = mma.make_fragment_A(part.partition_A(smem.a))
        b = mma.make_fragment_B(part.partition_B(smem.b))
        acc = wgmma.accumulator(mma, s.tile_m, s.tile_n)
        ring = ports.ab
        done = ring.clone()  # the slot to release next: one multiplication stays in flight
        k_tiles = cute.ceil_div(io.a[1].shape[1], self.tile_k)
        slot = ring.wait_and_advance()
        self.multiply(mma, acc, a, b, slot, accumulate=False)
        for _ in cutlass.range(k_tiles - 1):
            if cutlass.const_expr(s.stages == 1):  # one slot: read it before it is refilled
                warpgroup.wait_group(0)
                done.release()
                done.advance()
            slot = ring.wait_and_advance()
            self.multiply(mma, acc, a, b, slot, accumulate=True)
            if cutlass.const_expr(s.stages > 1):
                warpgroup.wait_group(1)
                done.release()
                done.advance()
        warpgroup.wait_group(0)
        done.release()
        self.barriers["written"].arrive_and_wait()  # all have read B, which C overwrites
        wgmma.to_smem(acc, smem.c, mma, thread)
        cute.arch.fence_view_async_shared()
        self.barriers["written"].arrive_and_wait()
        if thread < 32:
            self.store(self.tiles["c"], io.c, smem.c, (m_block, n_block))

    def multiply(self, mma, acc, a, b, slot, *, accumulate):
        """Issue the product of one slot's tiles."""
        at = (None, None, None, slot.index)
        warpgroup.fence()
        wgmma.issue(mma, acc, a[at], b[at], accumulate=accumulate)
