"""The consumers' step for one tile of queries.

    S^T = K Q^T    dP^T = V dO^T         both issued at once
    P = 2^(S - LSE)                      while dP runs
    dS = P * (dP - delta)
    dV += P^T dO                         from registers
    dS -> shared memory, all warpgroups meet
    dQ = dS K                            each warpgroup its share of the tile
    dK += dS^T Q                         from registers; meanwhile dQ goes to the warp that adds it
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cutedsl_fa3.layouts import wgmma

from .operands import rounded
from .sums import add, write
from .weights import Weigher


class MainLoop:
    """What `BackwardSm90.consumer` does for each tile of queries.

    Mixed into a kernel that has `schedule`, `barriers`, `sums` and `elements`.
    """

    @cute.jit
    def step(self, io, smem, f, w, ring_q, ring_do, word, head, place, thread,
             masked: cutlass.Constexpr):  # fmt: skip
        """One tile of queries; returns the rings' ends and the next place of dS."""
        s = self.schedule
        m_block = word // 2
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        slot_q = ring_q.wait_and_advance()
        acc_s = f.multiply_scores(f.k, f.q, slot_q)
        slot_do = ring_do.wait_and_advance()
        acc_dp = f.multiply_scores(f.v, f.do, slot_do)
        warpgroup.wait_group(1)
        weigher = Weigher(self.elements(io, head, w.batch), self.plan.variant)
        at = (f.places, (m_block * s.tile_m, w.n_block * s.tile_n))
        weigher.weigh(acc_s, f.p16, *at, smem.lse, slot_q.index, masked)
        warpgroup.wait_group(0)
        weigher.differ(acc_s, acc_dp, *at, smem.delta, slot_do.index, masked)
        f.multiply_dv(slot_do)
        rounded(acc_dp, f.ds16)
        if cutlass.const_expr(s.places == 1):
            self.barriers["ds"].arrive_and_wait()
        wgmma.to_smem(f.ds16, smem.ds[None, None, place], f.scores, thread)
        cute.arch.fence_view_async_shared()
        self.barriers["ds"].arrive_and_wait()
        acc_dq = f.multiply_dq(place)
        warpgroup.wait_group(1)
        slot_do.release()
        f.multiply_dk(slot_q)
        warpgroup.wait_group(1)
        if cutlass.const_expr(s.add == "direct"):
            strip = self.first_strip(io, head, w.batch) + m_block * s.consumers + group
            add(acc_dq, io.sums[1], strip, thread % wgmma.WARPGROUP)
        else:
            self.barriers["empty", group].arrive_and_wait()
            strip = cute.local_tile(smem.sums, (self.strip.rows, self.strip.cols), (group, 0))
            write(acc_dq, strip, thread % wgmma.WARPGROUP)
            cute.arch.fence_view_async_shared()
            self.barriers["full", group].arrive_unaligned()
        warpgroup.wait_group(0)
        slot_q.release()
        return ring_q, ring_do, place ^ (s.places - 1)
