"""The consumers' steps where dQ and dK of a tile of queries wait for the next one.

S^T = K Q^T    dP^T = V dO^T         of this tile
dQ = dS K      dK += dS^T Q          of the tile before, issued at once with these
P = 2^(S - LSE)                      while the other three run
dS = P * (dP - delta)                while dQ and dK run
dV += P^T dO                         meanwhile dQ goes to the warp that adds it
dS -> shared memory, all warpgroups meet

So the tensor cores have products to work on under the weights, which they have not where a step
ends with the products that need all of it. It costs the registers of dQ and dS beside S and dP, and
a slot of Q and dO that stays for a step more. The first tile has none before it, and after the last
one its dQ and dK are made alone.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines import take

from .mainloop import END, again
from .operands import rounded
from .weights import rounded_before


class Lagging:
    """What `BackwardSm90.consumer` does with `schedule.lag`; mixed in beside `MainLoop`."""

    @cute.jit
    def along_lagging(self, io, smem, f, w, ports, thread):
        """All tiles of queries that the producer names."""
        visits, ring = ports.visits, ports.rows
        visits, word, head = take(visits, smem.visits)
        if word != END:
            behind, place = ring.clone(), Int32(0)
            last, of_head = word, head  # the tile whose dQ is still to come
            first = ((word, head), None, place, thread)
            ring, behind = self.tile(io, smem, f, w, ring, behind, *first, True)
            visits, word, head = take(visits, smem.visits)
            place = place ^ 1
            if cutlass.const_expr(self.plan.deterministic):
                while word != END:
                    before = (last, of_head)
                    at = ((word, head), before, place, thread)
                    if word % 2 == 1:
                        ring, behind = self.tile(io, smem, f, w, ring, behind, *at, True)
                    else:
                        ring, behind = self.tile(io, smem, f, w, ring, behind, *at, False)
                    last, of_head, place = word, head, place ^ 1
                    visits, word, head = take(visits, smem.visits)
            else:
                while word != END and word % 2 == 1:
                    before = (last, of_head)
                    at = ((word, head), before, place, thread)
                    ring, behind = self.tile(io, smem, f, w, ring, behind, *at, True)
                    last, of_head, place = word, head, place ^ 1
                    visits, word, head = take(visits, smem.visits)
                if cutlass.const_expr(self.ever_full):
                    while word != END:
                        before = (last, of_head)
                        at = ((word, head), before, place, thread)
                        ring, behind = self.tile(io, smem, f, w, ring, behind, *at, False)
                        last, of_head, place = word, head, place ^ 1
                        visits, word, head = take(visits, smem.visits)
            self.last(io, smem, f, w, behind, (last, of_head), place, thread)

    @cute.jit
    def last(self, io, smem, f, w, behind, before, place, thread):
        """dQ and dK of the last tile of queries."""
        slot = behind.current_handle()
        acc_dq = f.multiply_dq(place ^ 1)
        f.multiply_dk(slot, 0, place ^ 1)
        warpgroup.wait_group(1)
        self.give(io, smem, w, acc_dq, *before, thread)
        warpgroup.wait_group(0)
        slot.release()

    @cute.jit
    def tile(self, io, smem, f, w, ring, behind, at, before, place, thread,
             masked: cutlass.Constexpr):  # fmt: skip
        """S, dP and dV of one tile of queries, dQ and dK of the one before, if there is one."""
        s = self.schedule
        word, head = at
        thread = again(thread)
        (places,) = f.places(thread)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        slot = ring.wait_and_advance()
        acc_s = f.multiply_scores(f.k, f.q[0], slot)
        if cutlass.const_expr(before is None):
            warpgroup.wait_group(0)  # ptxas would put it here, with an advisory
        acc_dp = f.multiply_scores(f.v, f.do[0], slot)
        under = 0  # products that run under the weights
        if cutlass.const_expr(before is not None):
            earlier = behind.current_handle()
            acc_dq = f.multiply_dq(place ^ 1)
            f.multiply_dk(earlier, 0, place ^ 1)
            under = 2
        weigher = self.weigher(io, head, w.batch)
        where = (places, (word // 2 * s.tile_m, w.n_block * s.tile_n))
        warpgroup.wait_group(under + 1)
        raw = self.kept(weigher, acc_s)
        weigher.weigh(acc_s, f.p16[0], *where, smem.lse, slot.index, masked)
        if cutlass.const_expr(s.early and not weigher.is_weight):
            rounded_before(f.p16[0])
        warpgroup.wait_group(under)
        weigher.differ(acc_s, acc_dp, *where, smem.delta, slot.index, masked, raw, smem.lse)
        f.multiply_dv(slot, 0, place)
        if cutlass.const_expr(before is not None):
            warpgroup.wait_group(2)
            self.give(io, smem, w, acc_dq, *before, thread)
            warpgroup.wait_group(1)
            earlier.release()
            behind.advance()
        rounded(acc_dp, f.ds16[0])
        wgmma.to_smem(f.ds16[0], smem.ds[None, None, place], f.scores, thread)
        cute.arch.fence_view_async_shared()
        self.meet(group)
        warpgroup.wait_group(0)
        return ring, behind
