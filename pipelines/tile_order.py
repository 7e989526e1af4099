"""Which CTA computes which tile: one launch dimension, cut so that neighbours share K and V.

CTAs start in the order of their index. Within a group of heads the last rows come first, because
under causality they see the most keys and a long tile that starts late leaves the GPU waiting; the
heads of a group alternate, so that what runs at one time reads few heads' K and V, which then stay
in L2.

    index:   0          1          2       ...
    (m, h):  (last, 0)  (last, 1)  (last, 2) ... (last - 1, 0) ...      heads of a group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Int = TypeVar("Int")

# CTAs along x may be 2^31 - 1 (CUDA programming guide, capability 9.0); tiles are fewer, since CTAs
# that draw them and groups of heads add to their numbers in 32 bits.
MAX_GRID = 2**31 - 2**12


@dataclass(frozen=True)
class TileOrder:
    """Order of (m_block, head) tiles with at most `head_group` heads side by side, last rows first.

    The heads are cut into as few groups as that allows, all but the last of one width: two heads
    left over would be a group of few tiles, the longest first again. `head` counts heads of all
    batches: batch * heads + head. Works on Python and device integers.
    """

    head_group: int

    def tiles(self, m_blocks: Int, heads: Int) -> Int:
        """Number of tiles, which is the grid's x extent."""
        return m_blocks * heads

    def at(self, index: Int, m_blocks: Int, heads: Int, smaller: object = min) -> tuple[Int, Int]:
        """The (m_block, head) of the CTA `index`; `smaller` is the minimum of two such integers."""
        groups = (heads + self.head_group - 1) // self.head_group
        widest = (heads - 1) // groups + 1
        group = index // (m_blocks * widest)
        inside = index - group * m_blocks * widest
        first = group * widest
        width = smaller(heads - first, widest)  # the last group may be narrower
        row = inside // width
        return m_blocks - 1 - row, first + inside - row * width
