"""From products to weights and to what dP - delta is multiplied by, in a thread's registers.

    x  raw product -> score' = score(x * scale)          the variant's functions
    p  = 2^(score' * log2(e) - LSE), or the weight f(score') of an Elementwise softmax
    m  = p * d score' / d score, or f'(score')

P, rounded, is what dV takes; m stays in fp32 where the products were, for dS = m * (dP - delta). A
few elements are worked on at a time, so that no more registers are held than those of the products.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cutedsl_fa3.kernels.sm90.elements import Elements
from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines.roles import WARP
from cutedsl_fa3.variant import Ref, Variant
from cutedsl_fa3.variant.derive import number, of_element
from cutedsl_fa3.variant.device import Element, Lowering
from cutedsl_fa3.variant.lower import exp2, select

from .captured import Collector, needs_products
from .operands import AT_ONCE, LANES, by_query, rounded

PAIR = 2  # neighbouring columns of an accumulator that a thread holds: here queries


def changes_products(variant: Variant) -> bool:
    """Whether a function of the variant meets the products: padded rows may give NaN there."""
    return variant.score is not None or variant.weight is not None


class Weigher:
    """A variant's functions and their derivative at one head of queries.

    `at_once` elements are worked on together. `scale_log2` turns what the functions make of a
    product into a base-2 logarithm.
    """

    def __init__(
        self,
        elements: Elements,
        variant: Variant,
        sums: dict[int, cute.Tensor] | None = None,
        at_once: int = AT_ONCE,
    ) -> None:
        # Of an accumulator, which lies in memory by pairs of queries, then keys.
        if at_once % (PAIR * wgmma.ROWS_HELD):
            raise ValueError(
                f"at_once = {at_once}: a multiple of {PAIR * wgmma.ROWS_HELD}, the neighbours in "
                "registers that are rounded together"
            )
        self.rows_at_once = at_once // wgmma.ROWS_HELD
        self.elements, self.scale_log2 = elements, elements.scale_log2
        self.is_weight = variant.weight is not None
        self.value_and_factor, self.factor, self.constant = None, None, None
        self.tanhs: dict[int, tuple[int, float]] = {}
        self.derived = derived = of_element(variant)
        self.sums = sums or {}
        self.keeps_products = needs_products(derived, tuple(self.sums))
        if derived is None:
            return
        graph = derived.inputs.get("score")
        self.constant = 0.0 if graph is None else number(graph)
        if self.constant is None or self.sums:
            self.factor = None if self.constant is not None else graph.output
            uniform = elements.uniform
            exponent = not self.is_weight
            lowering = Lowering(derived.value, elements.captures, uniform, exponent=exponent)
            self.value_and_factor = lowering
            # Where cap * tanh(x) is known, tanh(x) need not be computed for the derivative.
            nodes = derived.value.nodes
            self.tanhs = {
                a.id: (number, cap.cap)
                for number, cap in lowering.capped.items()
                for a in nodes[number].args
                if isinstance(a, Ref) and nodes[a.id].op == "tanh"
            }

    @property
    def changes(self) -> bool:
        return self.elements.changes is not None

    def visible(self, at: dict, r: int, c: int, memo: tuple[dict, dict]) -> Boolean:
        """Whether the mask shows the key, and the query is one of the sequence."""
        seen = self.elements.visible(at, r, c, memo)
        if self.changes:
            seen = seen & (at["q"] < self.elements.seqlen_q)
        return seen

    def places(
        self, places: wgmma.Places, corner: tuple[Int32, Int32], r: int, c: int
    ) -> dict[str, object]:
        """The positions of an element, as the functions take them."""
        first_q, first_k = corner[0] + places.row, corner[1] + places.col
        ahead = (places.row_offsets[r], places.col_offsets[c])
        at = {"q": first_q + ahead[0], "k": first_k + ahead[1]}
        return {**at, "origin": (first_q, first_k, *ahead), **self.elements.uniform}

    def values(
        self, raw: list[Float32], there: list[tuple[dict, int, int]], memo: tuple[dict, dict]
    ) -> tuple[list[Float32], list[Float32 | None]]:
        """What the functions make of neighbours' products, and the derivatives; None is 1."""
        constant = None if self.constant in (None, 1.0) else Float32(self.constant)
        if self.value_and_factor is None:
            found = self.elements.changed_together(raw, there, memo)
            return found, [constant] * len(raw)
        scale = self.elements.scale
        scored = [
            ({**at, "score": x * scale, "product": (x, scale)}, r, c)
            for x, (at, r, c) in zip(raw, there, strict=True)
        ]
        found = self.value_and_factor.together(scored, memo[0])
        elements = [Element(self.value_and_factor, *one, memo[0], False) for one in scored]
        for element in elements:
            for tanh, (product, cap) in self.tanhs.items():
                memo[0][element.key(tanh)] = element.value(product) * (1.0 / cap)
        if self.factor is None:
            return found, [constant] * len(raw)
        return found, [element.value(self.factor) for element in elements]

    def weigh(
        self,
        acc: cute.Tensor,
        p16: cute.Tensor,
        places: wgmma.Places,
        corner: tuple[Int32, Int32],
        lse: Numbers,
        masked: bool,
    ) -> None:
        """m in place of products, and P rounded.

        Shape: acc, p16 accumulators of keys x queries; lse in base 2.
        """
        memo: tuple[dict, dict] = ({}, {})
        x = by_query(acc)
        bits = self.elements.queries_of_keys(places, corner) if masked else None
        columns = range(len(places.col_offsets))
        rows_at_once = self.rows_at_once
        if bits and self.value_and_factor is None:  # so many neighbours' bits are side by side
            rows_at_once = len(places.row_offsets)
        for first in range(0, len(places.row_offsets), rows_at_once):
            factors = {}
            seen = {}
            for r in range(first, first + rows_at_once):
                there = [(self.places(places, corner, r, c), r, c) for c in columns]
                found, slopes = self.values([x[r, c] for c in columns], there, memo)
                for c, value in zip(columns, found, strict=True):
                    p = value
                    if not self.is_weight:
                        p = exp2(cute.math.fma(value, self.scale_log2, -lse[r]))
                    if masked:
                        at = there[c][0]
                        seen[r, c] = bits[c][r] if bits else self.visible(at, r, c, memo)
                    x[r, c] = p
                    factors[r, c] = slopes[c]
            for r, c in sorted(seen, key=lambda at: at[::-1]):  # neighbours' bits side by side
                x[r, c] = select(seen[r, c], x[r, c], Float32(0.0))
            part = cute.make_layout(rows_at_once * wgmma.ROWS_HELD)
            at = first * wgmma.ROWS_HELD
            rounded(
                cute.make_tensor(acc.iterator + at, part),
                cute.make_tensor(p16.iterator + at, part),
            )
            for (r, c), factor in factors.items():
                if self.is_weight:
                    m = Float32(1.0) if factor is None else factor
                elif factor is None:
                    continue
                else:
                    m = x[r, c] * factor
                x[r, c] = select(seen[r, c], m, Float32(0.0)) if masked else m

    def differ(
        self,
        acc_m: cute.Tensor,
        acc_dp: cute.Tensor,
        places: wgmma.Places,
        corner: tuple[Int32, Int32],
        delta: Numbers,
        masked: bool,
        products: cute.Tensor | None = None,
        lse: Numbers | None = None,
    ) -> None:
        """dS = m * (dP - delta) in place of dP; 0 where the mask hides, whatever dP is.

        Keys past the end, of which nothing is stored, are left to their m, which is 0.

        With sums to add to, what captured tensors get; `products` and `lse` where that is a
        function of the raw score.
        """
        collector = Collector(self.derived, self.sums) if self.sums else None
        hides = masked and (self.elements.mask is not None or self.changes)
        memo: tuple[dict, dict] = ({}, {})
        m, dp = by_query(acc_m), by_query(acc_dp)
        bits = self.elements.queries_of_keys(places, corner) if hides else None
        for r in range(len(places.row_offsets)):
            of_row = delta[r]
            for c in range(len(places.col_offsets)):
                ds = m[r, c] * (dp[r, c] - of_row)
                if hides:
                    at = self.places(places, corner, r, c)
                    seen = bits[c][r] if bits else self.visible(at, r, c, memo)
                    ds = ds if bits else select(seen, ds, Float32(0.0))
                if collector is not None:
                    at = self.places(places, corner, r, c)
                    gradient, at = ds, {**at, "score": Float32(0.0)}
                    if products is not None:
                        x = by_query(products)[r, c]
                        scale = self.elements.scale
                        at = {**at, "score": x * scale, "product": (x, scale)}
                        gradient = dp[r, c] - of_row
                        if not self.is_weight:
                            value = Element(self.value_and_factor, at, r, c, memo[0], False)
                            shift = lse[r]
                            value = value.value(self.value_and_factor.graph.output)
                            p = exp2(cute.math.fma(value, self.scale_log2, -shift))
                            gradient = p * gradient
                    element = Element(self.value_and_factor, at, r, c, memo[0], False)
                    collector.take(element, gradient, seen if hides else None)
                dp[r, c] = ds
        for c, seen in enumerate(bits or ()):  # neighbours' bits become predicates together
            for r in range(len(places.row_offsets)):
                dp[r, c] = select(seen[r], dp[r, c], Float32(0.0))
        if collector is not None:
            collector.add()


class Numbers:
    """LSE or delta of a thread's queries: `numbers[r]` is that of its r-th.

    Read by pairs of neighbours, and kept; or, `spread`, each lane keeps a pair of every 64 queries
    and the others ask for it when they need it: so 16 registers of a thread become 2.

    Shape: rows (tile_m, stages) in shared memory.
    """

    def __init__(
        self, rows: cute.Tensor, slot: Int32, places: wgmma.Places, spread: bool = False
    ) -> None:
        self.spread, self.asked = spread, {}
        if spread:
            lane = cute.arch.lane_idx()
            self.holder = lane % LANES
            pairs = [lane + n for n in range(0, 2 * len(places.row_offsets), WARP)]
        else:
            pairs = [places.row // PAIR + offset // PAIR for offset in places.row_offsets[::PAIR]]
        self.held = [cute.local_tile(rows[None, slot], (PAIR,), (pair,)).load() for pair in pairs]

    def __getitem__(self, r: int) -> Float32:
        pair, of_pair = divmod(r, PAIR)
        if not self.spread:
            return self.held[pair][of_pair]
        if r not in self.asked:
            held, lane = divmod(LANES * pair, WARP)
            self.asked[r] = cute.arch.shuffle_sync(self.held[held][of_pair], self.holder + lane)
        return self.asked[r]
