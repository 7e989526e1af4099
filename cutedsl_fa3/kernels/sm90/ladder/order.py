"""The plainest order of tiles: first rows first, head after head."""

from __future__ import annotations

from cutedsl_fa3.pipelines import TileOrder
from cutedsl_fa3.pipelines.tile_order import Int


class FirstRowsFirst(TileOrder):
    """As TileOrder, from the first rows on: under causality what takes longest starts last."""

    def at(self, index: Int, m_blocks: Int, heads: Int, smaller: object = min) -> tuple[Int, Int]:
        """The (m_block, head) of the CTA `index`."""
        m_block, head = super().at(index, m_blocks, heads, smaller)
        return m_blocks - 1 - m_block, head


IN_ORDER = FirstRowsFirst(head_group=1)
