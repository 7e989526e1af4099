"""The consumers' steps where S of the next tile of queries is multiplied at the end of this one.

dP^T = V dO^T                        of this tile; its S is there since the step before
P = 2^(S - LSE)                      while dP runs
dS = P * (dP - delta)                to shared memory
dV += P^T dO                         from registers; all warpgroups meet
dQ = dS K
dK += dS^T Q                         meanwhile dQ goes to where it is summed
S^T = K Q^T                          of the next tile

So S and dP do not have to be held side by side with what the weights of both need, and 128 queries
of 64 columns fit in one part. What is summed is the same, in the same order.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines import take

from .mainloop import END, again
from .operands import rounded
from .weights import numbers


class Ahead:
    """What `BackwardSm90.consumer` does with `schedule.ahead`; mixed in beside `MainLoop`."""

    @cute.jit
    def begin(self, f, ring, word):
        """S of the first tile, if there is one."""
        if word != END:
            self.start(f, ring.wait())
            warpgroup.wait_group(0)

    def start(self, f, slot) -> None:
        """Issue S of the tile in this slot; a call of `f` would make a branch carry it."""
        f.multiply_into(f.acc_s, f.k, f.q[0], slot)

    def clear(self, f) -> None:
        """Nothing in the registers of S."""
        f.acc_s.fill(0.0)

    @cute.jit
    def step_ahead(self, io, smem, f, w, ring, visits, word, head, place, thread,
                   masked: cutlass.Constexpr):  # fmt: skip
        """One tile of queries, but for its S, and S of the next.

        `ring` is at this tile's slot. Returns the rings' ends, the next place of dS and the next
        tile.
        """
        s = self.schedule
        thread = again(thread)
        (places,) = f.places(thread)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        slot = ring.current_handle()
        lse = numbers(smem.lse, slot.index, places)
        acc_dp = f.multiply_scores(f.v, f.do[0], slot)
        weigher = self.weigher(io, head, w.batch)
        at = (places, (word // 2 * s.tile_m, w.n_block * s.tile_n))
        raw = self.kept(weigher, f.acc_s)
        weigher.weigh(f.acc_s, f.p16[0], *at, lse, masked)
        warpgroup.wait_group(0)
        delta = numbers(smem.delta, slot.index, places)
        lse = self.once_more(smem, weigher, slot, places)
        weigher.differ(f.acc_s, acc_dp, *at, delta, masked, raw, lse)
        rounded(acc_dp, f.ds16[0])
        f.store_ds(smem.ds, 0, place, thread)
        f.multiply_dv(slot, 0, place)
        cute.arch.fence_view_async_shared()
        self.meet(group)
        acc_dq = f.multiply_dq(place)
        f.multiply_dk(slot, 0, place)
        visits, following, head_after = take(visits, smem.visits)
        warpgroup.wait_group(1)
        self.give(io, smem, w, acc_dq, word, head, thread)
        if following != END:
            next_end = ring.clone()
            next_end.advance()
            self.start(f, next_end.wait())
            warpgroup.wait_group(1)
            slot.release()
            warpgroup.wait_group(0)
        else:
            warpgroup.wait_group(0)
            slot.release()
            self.clear(f)  # so that what was there is not kept until here
        ring.advance()
        return ring, place ^ (s.places - 1), visits, following, head_after
