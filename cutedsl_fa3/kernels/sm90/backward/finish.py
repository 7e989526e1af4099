"""dQ from its fp32 sums: times the scale, rounded, in rows; launched after the backward.

Rows of dQ, dK and dV that are not finite are computed again here (again.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines.roles import WARP

from .again import VECTOR, Again, Given, spoilt_rows
from .operands import dq_mma, store_rows
from .schedule import WORDS
from .sums import read, strip

if TYPE_CHECKING:
    from cutedsl_fa3.plans_backward import BackwardPlan


class Finish:
    """The pass over dQ, for tiles of one schedule and head sizes; a CTA has a tile of queries.

    A kernel whose `host` calls `launch` names `tiles_of_dq` as an attribute of its class.
    """

    def __init__(self, plan: BackwardPlan, d: int) -> None:
        problem, s = plan.problem, plan.schedule
        self.schedule, self.dtype, self.d = s, problem.element, d
        self.whole = problem.head_dim == d
        self.strip = strip(s, d)
        self.again = Again(plan)

    def launch(self, sums, dq, given: Given, stream) -> None:
        """sums as `sums.py` has it; dq (seqlen, dim, heads, batch)."""
        seqlen, _, heads, batches = dq.shape
        blocks = cute.ceil_div(seqlen, self.schedule.tile_m)
        self.tiles_of_dq(sums, dq, given).launch(
            grid=(blocks * heads * batches, 1, 1),
            block=(self.schedule.consumers * wgmma.WARPGROUP, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def tiles_of_dq(self, sums, dq, given):
        """One tile of dQ."""
        s = self.schedule
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        seqlen, _, heads, _ = dq.shape
        blocks = cute.ceil_div(seqlen, s.tile_m)
        head_of_all = index // blocks
        batch = head_of_all // heads
        head, block = head_of_all - batch * heads, index - head_of_all * blocks
        group = thread // wgmma.WARPGROUP
        mma = dq_mma(s, self.dtype, self.d)
        acc = wgmma.accumulator(mma, s.tile_m, self.d)
        at = (index * s.consumers + group, 0)
        mine = cute.local_tile(sums, (self.strip.rows, WORDS), at)
        read(mine, acc, thread % wgmma.WARPGROUP)
        places = wgmma.places(mma, s.tile_m, self.d, thread)
        out = dq[None, None, head, batch]
        first = block * s.tile_m
        store_rows(acc, places, out, first, given.scale, self.whole)
        columns = (places.col // VECTOR, self.d // (VECTOR * s.beside))
        for offset, spoilt in zip(places.row_offsets, spoilt_rows(acc), strict=True):
            row = first + places.row + offset
            self.again.queries(given, spoilt & (row < seqlen), row, head, batch, out, columns)
        warps = s.consumers * (wgmma.WARPGROUP // WARP)
        warp = index * warps + cute.arch.make_warp_uniform(thread // WARP)
        self.again.keys(given, warp, warps * blocks * heads * dq.shape[3])
