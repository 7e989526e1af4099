"""C = A @ B^T on SM90: the smallest kernel that uses every piece.

    producer    A and B tiles by TMA -> ring "ab"          (shared by the CTAs of a cluster)
    consumer    ring "ab" -> WGMMA -> registers -> shared memory -> TMA store

The arguments, the tiles and the producer are those of every GEMM (kernels/gemm.py).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines import (
    TMA_BUDGETS,
    Barrier,
    Barriers,
    Expect,
    Ring,
    Role,
    Schedule,
)

from ..gemm import Gemm


class GemmSm90(Gemm):
    """A GEMM at any ring depth: `schedule` gives tile_m, tile_n, stages, consumers and cluster."""

    arch = "sm_90a"
    name = "gemm_sm90"

    def __init__(self, schedule: Schedule, dtype: type = cutlass.BFloat16) -> None:
        super().__init__(schedule, dtype)
        producer, consumer = TMA_BUDGETS[schedule.consumers]
        self.rings = {"ab": Ring(("a", "b"), schedule.stages, multicast=self.multicast)}
        self.roles = {
            "producer": Role(warps=4, registers=producer),
            "consumer": Role(warps=4 * schedule.consumers, registers=consumer),
        }
        self.barriers = Barriers({"written": Barrier(128 * schedule.consumers)})
        self.check()

    def expected(self) -> tuple[Expect, ...]:
        """What the tables promise about the machine code: two products, before and in the loop."""
        s = self.schedule
        opcode, count = wgmma.instructions(s.tile_m, s.tile_n, self.tile_k, s.consumers)
        products = Expect(opcode, "exactly", 2 * count, "the first k tile, and the loop's")
        return (*super().expected(), products)

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
        k_tiles = self.k_tiles(io)
        slot = ring.wait_and_advance()
        self.multiply(mma, acc, a, b, slot, accumulate=False)
        for _ in cutlass.range(k_tiles - 1, unroll=1):
            if cutlass.const_expr(s.stages == 1):  # one slot: read it before it is refilled
                self.complete("product")
                done.release()
                done.advance()
            slot = ring.wait_and_advance()
            self.multiply(mma, acc, a, b, slot, accumulate=True)
            if cutlass.const_expr(s.stages > 1):
                self.complete("product", running=1)
                done.release()
                done.advance()
        self.complete("product")
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
