"""dQ from its fp32 sums: times the scale, rounded, in rows; launched after the backward."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from cutedsl_fa3.layouts import wgmma

from .operands import WORDS, dq_mma, store_rows
from .schedule import BackwardSchedule
from .sums import read, strip


class Finish:
    """The pass over dQ, for tiles of one schedule and head sizes; a CTA has a tile of queries.

    A kernel whose `host` calls `launch` names `tiles_of_dq` as an attribute of its class.
    """

    def __init__(self, s: BackwardSchedule, dtype: type, dim: int, d: int) -> None:
        self.schedule, self.dtype, self.d, self.whole = s, dtype, d, dim == d
        self.strip = strip(s, d)

    def launch(self, sums, dq, scale: Float32, stream) -> None:
        """sums as `sums.py` has it; dq (seqlen, dim, heads, batch)."""
        seqlen, _, heads, batches = dq.shape
        blocks = cute.ceil_div(seqlen, self.schedule.tile_m)
        self.tiles_of_dq(sums, dq, scale).launch(
            grid=(blocks * heads * batches, 1, 1),
            block=(self.schedule.consumers * wgmma.WARPGROUP, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def tiles_of_dq(self, sums, dq, scale):
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
        store_rows(acc, places, out, block * s.tile_m, scale, self.whole)
