"""A variant's functions on the elements of one tile, and the key tiles to visit.

This is where a researcher's functions enter the kernel: `apply` turns raw products into scores (or,
with an `Elementwise` softmax, into weights) in the registers of the accumulator and sets what the
mask excludes to -inf (0); `finish` is the epilogue function on the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.variant import Variant, shared
from cutedsl_fa3.variant.bounds import Runs
from cutedsl_fa3.variant.device import Lowering
from cutedsl_fa3.variant.fusion import composed, with_known_signs
from cutedsl_fa3.variant.keys import KeySet, QueryTile, Span, key_sets, key_spans
from cutedsl_fa3.variant.limits import in_base_2
from cutedsl_fa3.variant.linear import UNITS
from cutedsl_fa3.variant.lower import (
    CAPTURE_ELEMENTS,
    LOG2_E,
    DeviceIntegers,
    load,
    scan,
    select,
    visits,
)
from cutedsl_fa3.variant.pairs import dense
from cutedsl_fa3.variant.spans import exchanged, in_spans
from cutedsl_fa3.variant.tiles import Scan

from .bits import Bits, in_pairs
from .bounded import BoundedSoftmax
from .softmax import OnlineSoftmax, Weights
from .units import Growth, Units

Memo = tuple[dict, dict]  # values that elements of a tile share: of the score, of the mask
Memos = dict["Elements", Memo]  # of each head whose rows a thread has


class Elements:
    """A variant at one (batch, head): its functions with everything uniform already computed.

    `head` is that, or of several heads one for each row that a thread holds; those of the rows
    behind the first are `others`. The mask and the key tiles are the same for all of them.

    `scale_log2` turns what `apply` leaves in the accumulator into a base-2 logarithm: raw products
    are left as they are when there is no score function, so that the scale costs nothing;
    `bounded` scores (see bounded.py) are base-2 logarithms already, and scores that grow evenly
    with the key may have `units` of their own (see units.py). Without `bits` a mask is asked for
    each element even where spans say all of it (bits.py): that takes fewer registers.
    """

    def __init__(
        self,
        variant: Variant,
        captures: tuple[cute.Tensor, ...],
        scale: Float32,
        head: tuple[Int32, Int32 | tuple[Int32, ...]],
        seqlens: tuple[Int32, Int32],
        pairs: frozenset[int] = frozenset(),
        bounded: bool = False,
        bits: bool = True,
        units: Units | None = None,
    ) -> None:
        self.variant = variant
        self.takes_bits = bits and in_spans(variant.mask)
        self.scale = scale
        self.seqlen_q, self.seqlen_k = seqlens
        batch, heads = head
        first, *others = heads if isinstance(heads, tuple) else (heads,)
        self.of_head = lambda h: Elements(
            variant, captures, scale, (batch, (h,)), seqlens, pairs, bounded, bits, units
        )
        self.others = tuple(self.of_head(h) for h in others)
        uniform = {"b": batch, "h": first, "seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k}
        self.uniform, self.captures = uniform, captures
        self.has_weight = variant.weight is not None
        changed = composed(variant.score, variant.weight)
        self.changes = None  # what stands in the accumulator, of the score; None: the raw product
        self.bounded = bounded
        if changed is not None:
            changed = in_base_2(changed) if bounded else changed
            known, given = with_known_signs(changed, variant.mask), uniform
            if units is not None:
                known, given = units.linear.whole, {**uniform, UNITS: units.in_one}
            self.changes = Lowering(
                known, captures, given, pairs,
                exponent=not self.has_weight, coarse=bounded,
                by_row=frozenset({"h"} if isinstance(heads, tuple) else ()),
            )  # fmt: skip
        lowered = {
            role: Lowering(graph, captures, uniform, pairs)
            for role, graph in variant.graphs.items()
            if role in ("mask", "epilogue")
        }
        self.mask, self.epilogue = lowered.get("mask"), lowered.get("epilogue")
        self.hidden = Float32(0.0) if self.has_weight else -Float32.inf
        self.scale_log2 = Float32(1.0 if bounded else LOG2_E)
        if self.changes is None:
            self.scale_log2 = scale * LOG2_E
        # Units of acc_s: what a raw product is before `changes`, and what 1 is naturally behind it.
        self.of_product, self.unit = scale, scale if self.changes is None else Float32(1.0)
        self.units, self.growth = units, None
        if units is not None:
            self.growth = Growth(units, captures, uniform)
            self.of_product, self.unit = units.of_product, units.size
            self.scale_log2 = units.size * LOG2_E

    @staticmethod
    def fake_captures(variant: Variant) -> tuple[tuple, ...] | None:
        """Stand-ins for what is launched of captured tensors, as `inputs.as_numbers` has it."""
        ranks = [max(1, tensor.dim()) for tensor in variant.captures]
        given = tuple((Int64(1), *[Int32(1)] * rank, *[Int64(1)] * rank) for rank in ranks)
        return given or None

    @staticmethod
    def given_captures(
        variant: Variant, pairs: frozenset[int], numbers: tuple[tuple, ...] | None
    ) -> tuple[cute.Tensor, ...] | None:
        """The captured tensors from what is launched of them: any extent, rank and type as now.

        Those of `pairs` can be read two neighbours at a time; those that are read by query or key
        and have dense rows keep these.
        """
        made, adjacent = [], dense(variant)
        for number, (address, *layout) in enumerate(numbers or ()):
            tensor = variant.captures[number]
            shape, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
            align = tensor.element_size()
            if number in adjacent:
                strides[-1] = 1
            if number in pairs:
                align *= 2
                shape[-1] = cute.assume(shape[-1], divby=2)
                strides = [*(cute.assume(stride, divby=2) for stride in strides[:-1]), 1]
            element = CAPTURE_ELEMENTS[tensor.dtype]
            memory = cute.make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=align)
            layout = cute.make_layout(tuple(shape), stride=tuple(strides))
            # A pointer's tensor forgets that its elements have no sign; a recast one does not.
            made.append(cute.recast_tensor(cute.make_tensor(memory, layout), element))
        return tuple(made) or None

    def of_row(self, r: int) -> Elements:
        """The variant at the head of a thread's row r."""
        return self.others[r - 1] if r and self.others else self

    def query_tile(self, m_block: Int32, queries: int) -> QueryTile:
        """The queries of one tile, inside the sequence."""
        first = m_block * queries
        last = cutlass.min(first + queries, self.seqlen_q) - 1
        return QueryTile(first, last, **self.uniform)

    def runs(self, m_block: Int32, queries: int, tile_n: int) -> Runs:
        """The key tiles of one tile of queries: those that need the element mask, then the rest."""
        tile = self.query_tile(m_block, queries)
        return visits(self.variant.mask, tile, tile_n, self.captures)

    def keys(self, m_block: Int32, queries: int) -> KeySet:
        """The keys that some row of one tile of queries may see."""
        ints = DeviceIntegers(self.captures, self.variant.mask)
        return key_sets(self.variant.mask, self.query_tile(m_block, queries), ints).possible

    def meets(self, keys: KeySet, first: Int32, end: Int32) -> Boolean:
        """Whether a key from `first` to below `end` is among these."""
        ints = DeviceIntegers(self.captures, self.variant.mask)
        return Boolean(keys.meets(first, end, self.seqlen_k, ints))

    def scan(self, m_block: Int32, queries: int, tile_n: int, table: cute.Tensor | None) -> Scan:
        """Decides key tiles one by one for one tile of queries."""
        tile = self.query_tile(m_block, queries)
        return scan(self.variant.mask, tile, m_block, tile_n, self.captures, table)

    def softmax(self, rows: int, lazy: bool = False) -> OnlineSoftmax | Weights:
        """What makes weights of the scores of the rows that one thread holds.

        `lazy`: a running maximum moves only when it has grown enough; see softmax.py.
        """
        if self.has_weight:
            return Weights()
        if self.bounded:
            return BoundedSoftmax(rows, self.sinks(rows))
        return OnlineSoftmax(rows, self.unit, self.scale_log2, self.sinks(rows), lazy)

    def sinks(self, rows: int) -> list[Float32] | None:
        """The sink of each row."""
        if self.variant.sink is None:
            return None
        found = [each.sink() for each in (self, *self.others)]
        return found if self.others else found * rows

    def sink(self) -> Float32 | None:
        """This head's sink, natural."""
        number = self.variant.sink
        if number is None:
            return None
        index = [self.uniform["h"]] if self.variant.captures[number].dim() else []
        return load(self.captures[number], index, "float")

    def inside(self, m_block: Int32, queries: int, tile_n: int, span: Span) -> Boolean | bool:
        """Whether tiles of a span can do without care if they need no mask.

        What the score function reads evenly lies in its tensors, and its units fit; True where it
        has neither. Rows past the sequence count: they are computed as well.
        """
        if self.growth is not None:
            return self.units.fits
        if self.changes is None or not self.changes.unclamped:
            return True
        first, end = span
        corner = m_block * queries, Int32(first * tile_n)
        found = self.changes.inside(corner, queries, Int32(end - first) * tile_n)
        for other in self.others:
            found = found & other.inside(m_block, queries, tile_n, span)
        return found

    def ahead(self, places: wgmma.Places, corner: tuple[Int32, Int32], masked: bool) -> Memos:
        """What the score function reads for a tile's elements, before their products are there.

        Elements at equal distances share it: few enough registers to hold it while products run.
        Where the tile is not `masked`, and `inside` holds, an address is a number behind another.
        """
        memos: Memos = {each: ({}, {}) for each in (self, *self.others)}
        positions = positions_of(places, corner)
        if self.changes is not None and self.changes.evenly_indexed:
            for r in range(len(places.row_offsets)):
                of_row = self.of_row(r)
                for c in range(len(places.col_offsets)):
                    at = {**positions(r, c), **of_row.uniform, "inside": not masked}
                    of_row.changes.read(at, r, c, memos[of_row][0])
        return memos

    def apply(
        self,
        acc_s: cute.Tensor,
        places: wgmma.Places,
        corner: tuple[Int32, Int32],
        masked: bool,
        memos: Memos,
    ) -> None:
        """Scores or weights in place of raw products; with `masked`, nothing for hidden keys.

        Shape: acc_s (rows, cols) of this thread, at `places`, in queries and keys, within the tile
        whose first query and key are `corner`; `memos` of the same tile, from `ahead`.
        """
        if not masked and self.changes is None:
            return
        memos = {each: (dict(a), dict(b)) for each, (a, b) in memos.items()}  # two branches read it
        together = 1 if masked else shared.TOGETHER  # a hidden key's NaN must not reach another
        n_rows, n_cols = len(places.row_offsets), len(places.col_offsets)
        positions = positions_of(places, corner)
        in_bits = masked and self.takes_bits and in_pairs(places.col_offsets)
        # Behind all scores of a row its bits become predicates together. Where a function makes the
        # scores, that spills, so each is selected as it is made.
        after = in_bits and (self.changes is None or self.has_weight)
        rows = []
        if in_bits and not after:
            rows = [self.keys_of_row(places, positions(r, 0)) for r in range(n_rows)]
        for first in range(0, n_cols, together):
            columns = range(first, min(first + together, n_cols))
            for r in range(n_rows):
                of_row = self.of_row(r)
                memo = memos[of_row]
                elements = [({**positions(r, c), **of_row.uniform}, r, c) for c in columns]
                raw = [acc_s[r, c] for c in columns]
                values = of_row.changed_together(raw, elements, memo, in_pairs=True)
                for value, (at, _, c) in zip(values, elements, strict=True):
                    if rows:
                        value = select(rows[r][c], value, self.hidden)
                    elif masked and not after:
                        visible = self.visible(at, r, c, memos[self], in_pairs=True)
                        value = select(visible, value, self.hidden)
                    acc_s[r, c] = value
        for r in range(n_rows) if after else ():
            seen = self.keys_of_row(places, positions(r, 0))
            for c in range(n_cols):
                acc_s[r, c] = select(seen[c], acc_s[r, c], self.hidden)

    def grown(
        self, acc_s: cute.Tensor, places: wgmma.Places, corner: tuple[Int32, Int32]
    ) -> list[Float32]:
        """Scores but for a base of each row in place of raw products, where units fit; the bases.

        Shape: as for `apply`, of a tile without mask.
        """
        positions, bases = positions_of(places, corner), []
        memos: dict[Elements, dict] = {each: {} for each in (self, *self.others)}
        for r in range(len(places.row_offsets)):
            of_row = self.of_row(r)
            at = {**positions(r, 0), **of_row.uniform}
            bases.append(of_row.growth.base(at, r, memos[of_row]))
            of_row.growth.along(acc_s, r, places)
        return bases

    def keys_of_row(self, places: wgmma.Places, at: dict[str, Any]) -> Bits:
        """The keys that a row of a thread sees, if the mask is `in_spans`.

        Shape: elements at `places`, of which `at` is the row's first.
        """
        graph, ints = self.variant.mask, DeviceIntegers((), self.variant.mask)
        spans = key_spans(graph, at["q"], QueryTile(0, 0, **self.uniform), ints)
        spans = tuple(_within(span, self.seqlen_k) for span in spans)
        return Bits(spans, at["k"], len(places.col_offsets))

    def queries_of_keys(
        self, places: wgmma.Places, corner: tuple[Int32, Int32]
    ) -> list[Bits] | None:
        """The queries of the sequence that see each of a thread's keys.

        None where the mask is to be asked for each element.

        Shape: `places` as (queries, keys) of an accumulator whose rows are keys.
        """
        graph = exchanged(self.variant.mask)
        if not in_spans(graph) or not in_pairs(places.row_offsets):
            return None
        first_q, first_k = corner[0] + places.row, corner[1] + places.col
        lengths = {"seqlen_q": self.seqlen_k, "seqlen_k": self.seqlen_q}
        tile, ints = QueryTile(0, 0, **{**self.uniform, **lengths}), DeviceIntegers((), graph)
        found = []
        for offset in places.col_offsets:
            key = first_k + offset
            spans = key_spans(graph, key, tile, ints)
            spans = tuple(_within(span, self.seqlen_q) for span in spans)
            bits = Bits(spans, first_q, len(places.row_offsets))
            found.append(bits.but_for(key < self.seqlen_k))
        return found

    def changed(self, raw: Float32, at: dict) -> Float32:
        """What the score and the weight function make of a raw product."""
        return self.changed_together([raw], [(at, 0, 0)], ({}, {}))[0]

    def changed_together(
        self,
        raw: list[Float32],
        elements: list[tuple[dict, int, int]],
        memo: Memo,
        in_pairs: bool = False,
    ) -> list[Float32]:
        """That of neighbours in a row whose keys are all visible: each has positions, row, col."""
        if self.changes is None:
            return raw
        factor = self.of_product
        scored = [
            ({**at, "score": product * factor, "product": (product, factor)}, r, c)
            for product, (at, r, c) in zip(raw, elements, strict=True)
        ]
        return self.changes.together(scored, memo[0], in_pairs)

    def visible(
        self, at: dict, r: int = 0, c: int = 0, memo: Memo | None = None, in_pairs: bool = False
    ) -> Boolean:
        """Whether the key lies inside the sequence and the mask shows it."""
        inside = at["k"] < self.seqlen_k
        if self.mask is None:
            return inside
        return inside & self.mask.at(at, r, c, {} if memo is None else memo[1], in_pairs)

    def finish(
        self, acc_o: cute.Tensor, lse: list[Float32] | None, first_q: Int32, places: wgmma.Places
    ) -> None:
        """The epilogue function on each output element, in place.

        Shape: acc_o (rows, cols) of this thread, normalised; its rows at `places`, in queries,
        below `first_q`.
        """
        if self.epilogue is None:
            return
        of_rows = [self.of_row(r) for r in range(cute.size(acc_o, mode=[0]))]
        memos: dict[Elements, dict] = {each: {} for each in of_rows}
        for c in range(cute.size(acc_o, mode=[1])):
            for r, of_row in enumerate(of_rows):
                row = first_q + places.row + places.row_offsets[r]
                at = {"o": acc_o[r, c], "q": row, **of_row.uniform}
                if lse is not None:
                    at["lse"] = lse[r]
                acc_o[r, c] = of_row.epilogue.at(at, r, c, memos[of_row])


def _within(span: tuple, length: Int32) -> tuple:
    """A span's part of a sequence."""
    low, high = span
    return low, length if high is None else cutlass.min(Int32(high), length)


def positions_of(
    places: wgmma.Places, corner: tuple[Int32, Int32]
) -> Callable[[int, int], dict[str, Any]]:
    """The positions of this thread's elements by row and column, as `Lowering.at` wants them."""
    first_q, first_k = corner[0] + places.row, corner[1] + places.col
    queries = [first_q + offset for offset in places.row_offsets]
    keys = [first_k + offset for offset in places.col_offsets]

    def at(r: int, c: int) -> dict[str, Any]:
        origin = (first_q, first_k, places.row_offsets[r], places.col_offsets[c])
        return {"q": queries[r], "k": keys[c], "origin": origin}

    return at
