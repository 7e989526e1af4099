"""Smallest and largest values of what a mask reads by one position, found on the device.

One warp has one block of queries and one block of keys, of one batch entry and head:

    each lane evaluates a summary at every 32nd position  ->  warp minimum and maximum  ->  table

It is launched before the forward on the same stream, so that a replayed graph reads the captured
tensors anew. The table is that of variant/summaries.py, bit for bit; variant/tiles.py reads it.
"""

from __future__ import annotations

from functools import reduce

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutedsl_fa3.pipelines.roles import WARP
from cutedsl_fa3.variant import Graph
from cutedsl_fa3.variant.device import Lowering
from cutedsl_fa3.variant.intervals import HIGHEST, LOWEST
from cutedsl_fa3.variant.lower import select
from cutedsl_fa3.variant.summaries import summaries

WARPS = 4  # of a CTA; each works alone


class Summarise:
    """The pass over one mask's captured tensors, for blocks of tile_m queries and tile_n keys.

    A kernel whose `host` calls `launch` names `blocks` as an attribute of its class, so that the
    code of both carries one name.
    """

    def __init__(self, mask: Graph, tile_m: int, tile_n: int) -> None:
        self.summaries = summaries(mask)
        self.sizes = {"q": tile_m, "k": tile_n}

    def launch(
        self,
        captures: tuple[cute.Tensor, ...],
        table: cute.Tensor,
        seqlen_q: Int32,
        seqlen_k: Int32,
        stream,
    ) -> None:
        """Fill the table, whose extents say how many blocks, heads and batch entries there are."""
        batches, heads, count, _ = table.shape
        groups = cute.ceil_div(count * heads * batches, WARPS)
        self.blocks(captures, table, seqlen_q, seqlen_k).launch(
            grid=(cutlass.max(groups, 1), 1, 1), block=(WARPS * WARP, 1, 1), stream=stream
        )

    @cute.kernel
    def blocks(self, captures, table, seqlen_q, seqlen_k):
        """One warp's block; warps behind the last have none."""
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        batches, heads, count, _ = table.shape
        warp = cute.arch.make_warp_uniform(thread // WARP)
        index = group * WARPS + warp
        if index < count * heads * batches:
            head_of_all = index // count
            batch = head_of_all // heads
            place = (batch, head_of_all - batch * heads, index - head_of_all * count)
            found = self.extremes(captures, (seqlen_q, seqlen_k), place, thread % WARP)
            if thread % WARP == 0:
                for i in cutlass.range_constexpr(len(found)):
                    for end in cutlass.range_constexpr(2):
                        table[(*place, 2 * i + end)] = found[i][end]

    def extremes(
        self,
        captures: tuple[cute.Tensor, ...],
        seqlens: tuple[Int32, Int32],
        place: tuple[Int32, Int32, Int32],
        lane: Int32,
    ) -> list[tuple[Int32, Int32]]:
        """Smallest and largest value of each summary in the block at `place`, in every lane."""
        batch, head, block = place
        lengths = dict(zip(("q", "k"), seqlens, strict=True))
        uniform = {"b": batch, "h": head, "seqlen_q": seqlens[0], "seqlen_k": seqlens[1]}
        values: list[list[Int32]] = []
        found: list[tuple[Int32, Int32]] = []
        for summary in self.summaries:
            size = self.sizes[summary.position]
            offsets = [lane + step for step in range(0, size, WARP)]
            positions = [block * size + offset for offset in offsets]
            counts = [at < lengths[summary.position] for at in positions]
            if size % WARP:
                counts[-1] = counts[-1] & (offsets[-1] < size)
            if summary.given is None:
                values.append(self.evaluated(summary, captures, uniform, positions))
                here = values[-1]
            else:
                key, end = summary.given
                extreme = found[key][end == "high"]
                counts = [c & (v == extreme) for c, v in zip(counts, values[key], strict=True)]
                here = values[self.whole(summary)]
            low = reduce(cutlass.min, _where(counts, here, HIGHEST))
            high = reduce(cutlass.max, _where(counts, here, LOWEST))
            found.append(
                (cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max"))
            )
        return found

    def whole(self, summary) -> int:
        """The number of the same summary over all positions of the block."""
        return next(i for i, s in enumerate(self.summaries) if s.node == summary.node)

    @staticmethod
    def evaluated(summary, captures, uniform, positions: list[Int32]) -> list[Int32]:
        """A summary at this lane's positions, conditions as 0 and 1."""
        function = Lowering(summary.graph, captures, uniform)
        memo: dict = {}
        found = [
            function.at({summary.position: at, **uniform}, n, n, memo)
            for n, at in enumerate(positions)
        ]
        if summary.graph.result.dtype == "bool":
            return [select(value, Int32(1), Int32(0)) for value in found]
        return found


def _where(counts: list, values: list[Int32], empty: int) -> list[Int32]:
    return [select(c, v, Int32(empty)) for c, v in zip(counts, values, strict=True)]
