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
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.variant.lower import exp2

from .operands import by_query, rounded
from .sums import add, write


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
        elements = self.elements(io, head, w.batch)
        corner = (m_block * s.tile_m, w.n_block * s.tile_n)
        elements.apply(by_query(acc_s), f.places, corner, masked)
        probabilities(acc_s, smem.lse, slot_q.index, f.places, elements.scale_log2)
        rounded(acc_s, f.p16)
        warpgroup.wait_group(0)
        differences(acc_s, acc_dp, smem.delta, slot_do.index, f.places)
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


def row_pair(rows: cute.Tensor, slot: Int32, pair: Int32) -> cute.Tensor:
    """Two neighbouring rows' numbers, by one load."""
    return cute.local_tile(rows[None, slot], (2,), (pair,)).load()


def probabilities(
    acc_s: cute.Tensor, lse: cute.Tensor, slot: Int32, places: wgmma.Places, scale_log2: Float32
) -> None:
    """Probabilities in place of scores: 2^(x * scale_log2 - LSE of the row)."""
    x = by_query(acc_s)
    for r in range(0, len(places.row_offsets), 2):
        both = row_pair(lse, slot, places.row // 2 + places.row_offsets[r] // 2)
        for n in range(2):
            for c in range(len(places.col_offsets)):
                x[r + n, c] = exp2(cute.math.fma(x[r + n, c], scale_log2, -both[n]))


def differences(
    acc_p: cute.Tensor, acc_dp: cute.Tensor, delta: cute.Tensor, slot: Int32, places: wgmma.Places
) -> None:
    """dS = P * (dP - delta) in place of dP."""
    p, dp = by_query(acc_p), by_query(acc_dp)
    for r in range(0, len(places.row_offsets), 2):
        both = row_pair(delta, slot, places.row // 2 + places.row_offsets[r] // 2)
        for n in range(2):
            for c in range(len(places.col_offsets)):
                dp[r + n, c] = p[r + n, c] * (dp[r + n, c] - both[n])
