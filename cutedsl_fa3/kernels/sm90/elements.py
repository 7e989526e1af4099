"""Score and mask of a variant on the elements of one score tile, and the key tiles to visit.

This is where a researcher's two functions enter the kernel: `apply` turns raw products into scores
and sets what the mask excludes to -inf, in the registers of the accumulator.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.bounds import QueryTile, Runs
from cutedsl_fa3.variant.lower import CAPTURE_ELEMENTS, LOG2_E, Lowering, select, visits


class Elements:
    """A variant at one (batch, head): its functions with everything uniform already computed.

    `scale_log2` turns what `apply` leaves in the accumulator into a base-2 logarithm: raw products
    are left as they are when there is no score function, so that the scale costs nothing.
    """

    def __init__(
        self,
        variant: Variant,
        captures: tuple[cute.Tensor, ...],
        scale: Float32,
        head: tuple[Int32, Int32],
        seqlens: tuple[Int32, Int32],
    ) -> None:
        self.variant = variant
        self.scale = scale
        self.seqlen_q, self.seqlen_k = seqlens
        uniform = {"b": head[0], "h": head[1], "seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k}
        self.uniform, self.captures = uniform, captures
        self.score = variant.score and Lowering(variant.score, captures, uniform)
        self.mask = variant.mask and Lowering(variant.mask, captures, uniform)
        self.scale_log2 = Float32(LOG2_E) if variant.score else scale * LOG2_E

    @staticmethod
    def fake_captures(variant: Variant) -> tuple[cute.Tensor, ...]:
        """Stand-ins for the captured tensors, for compilation: rank and type, any extent."""
        return tuple(
            make_fake_tensor(
                CAPTURE_ELEMENTS[tensor.dtype],
                tuple(cute.sym_int() for _ in range(max(1, tensor.dim()))),
                tuple(cute.sym_int64() for _ in range(max(1, tensor.dim()))),
                assumed_align=tensor.element_size(),
            )
            for tensor in variant.captures
        )

    def runs(self, m_block: Int32, tile_m: int, tile_n: int) -> Runs:
        """The key tiles of one tile of queries: those that need the element mask, then the rest."""
        first = m_block * tile_m
        last = cutlass.min(first + tile_m, self.seqlen_q) - 1
        tile = QueryTile(first, last, **self.uniform)
        return visits(self.variant.mask, tile, tile_n, self.captures)

    def apply(
        self, acc_s: cute.Tensor, places: wgmma.Places, corner: tuple[Int32, Int32], masked: bool
    ) -> None:
        """Scores in place of raw products; with `masked`, -inf where the mask or the end says so.

        Shape: acc_s (rows, cols) of this thread, at `places` within the tile whose first query and
        key are `corner`.
        """
        if not masked and self.score is None:
            return
        score_memo, mask_memo = {}, {}
        first_q, first_k = corner[0] + places.row, corner[1] + places.col
        queries = [first_q + offset for offset in places.row_offsets]
        keys = [first_k + offset for offset in places.col_offsets]
        for c in range(len(keys)):
            for r in range(len(queries)):
                at = {"q": queries[r], "k": keys[c], **self.uniform}
                value = acc_s[r, c]
                if self.score:
                    at["score"] = value * self.scale
                    value = self.score.at(at, r, c, score_memo)
                if masked:
                    visible = keys[c] < self.seqlen_k
                    if self.mask:
                        visible = visible & self.mask.at(at, r, c, mask_memo)
                    value = select(visible, value, -Float32.inf)
                acc_s[r, c] = value
