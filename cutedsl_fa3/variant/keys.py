"""Which keys the rows of a tile may see, and which some row may not see.

A mask in solved form (`solve.py`) is put to the queries q0 to q1 of one tile. All of it is written
on `Integers`, so the same lines run on Python ints, inside a kernel and on text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from .graph import Graph, Ref
from .ops import OPS, Integers, Range
from .solve import LARGEST, Bound, Conjunction, Flag, Formula, Holds, Linear, rounds_down, solve

MOST_MIDDLES = 3

Span = tuple[Any, Any]  # half-open


class QueryTile(NamedTuple):
    """Queries q0 to q1 (inclusive, not empty) of one batch entry and head, and the lengths."""

    q0: Any
    q1: Any
    b: Any
    h: Any
    seqlen_q: Any
    seqlen_k: Any


@dataclass(frozen=True)
class KeySet:
    """Keys below `left`, keys from `right` on, and `middles`; None where there is no such part.

    A middle (low, high) holds low <= key < high and is empty unless low < high. Ends may lie
    outside the sequence, and parts may overlap.
    """

    left: Any = None
    right: Any = None
    middles: tuple[Span, ...] = ()

    def meets(self, first: Any, end: Any, seqlen_k: Any, ints: Integers) -> Any:
        """Whether a key from `first`, 0 or more, to below `end` and `seqlen_k` is in the set."""
        end = ints.minimum(end, seqlen_k)
        found: Any = False
        if self.left is not None:
            found = ints.less(first, ints.minimum(self.left, end))
        for low, high in self.middles:
            inside = ints.less(ints.maximum(low, first), ints.minimum(high, end))
            found = ints.or_(found, inside)
        if self.right is not None:
            found = ints.or_(found, ints.less(ints.maximum(self.right, first), end))
        return found


@dataclass(frozen=True)
class Keys:
    """Keys that some row of the tile may see, and keys that some row may not see."""

    possible: KeySet
    hidden: KeySet


def key_sets(mask: Graph | None, tile: QueryTile, ints: Integers) -> Keys:
    """The tile's key sets under a mask; both may be too large, never too small.

    They are exact for causal masks, windows, prefixes, chunks and conditions on q or k alone, and
    for whatever joins these with `&`, `|` and `~`.
    """
    solution = solve(mask)
    projection = _Projection(mask, tile, ints)
    return Keys(projection.union(solution.possible), projection.union(solution.hidden))


def key_spans(
    mask: Graph | None, query: Any, of_tile: QueryTile, ints: Integers
) -> tuple[tuple[Any | None, Any | None], ...]:
    """The keys that one query sees, if `solve` is exact: from low to below high, which may overlap.

    None is an end that there is not.
    """
    projection = _Projection(mask, of_tile._replace(q0=query, q1=query), ints)
    return tuple(projection.span(conjunction) for conjunction in solve(mask).possible)


class _Projection:
    """Solved conditions to keys, for one tile."""

    def __init__(self, mask: Graph | None, tile: QueryTile, ints: Integers) -> None:
        self.nodes = () if mask is None else mask.nodes
        self.tile = tile
        self.ints = ints
        self._offsets: dict[Linear, Any] = {}
        self._values: dict[tuple[int, int, int], tuple[Range, Range]] = {}

    def union(self, formula: Formula) -> KeySet:
        lefts, rights, middles = [], [], []
        for conjunction in formula:
            low, high = self.span(conjunction)
            if low is None:
                lefts.append(high)
            elif high is None:
                rights.append(low)
            else:
                middles.append((low, high))
        while len(middles) > MOST_MIDDLES:
            middles.append(self.hull(middles.pop(), middles.pop()))
        return KeySet(
            left=reduce(self.ints.maximum, lefts) if lefts else None,
            right=reduce(self.ints.minimum, rights) if rights else None,
            middles=tuple(middles),
        )

    def hull(self, a: Span, b: Span) -> Span:
        """One span over both; an empty one does not widen it."""
        ints = self.ints
        a_low = ints.where(ints.less(a[0], a[1]), a[0], b[0])
        b_low = ints.where(ints.less(b[0], b[1]), b[0], a[0])
        return ints.minimum(a_low, b_low), ints.maximum(a[1], b[1])

    def span(self, conjunction: Conjunction) -> tuple[Any | None, Any | None]:
        """Keys for which all literals hold in some row: from low (None: 0) to below high."""
        ints, bounds = self.ints, [c for c in conjunction if isinstance(c, Bound)]
        rows, met = self.rows([c for c in bounds if c.of_row])
        for literal in conjunction:
            if isinstance(literal, Holds):
                least = self.total(Linear(literal.value.terms), rows)[0]
                met = ints.and_(met, ints.less(least, min(1 - literal.value.const, 2**31 - 1)))
            elif isinstance(literal, Flag):
                flag = self.value(literal.node, rows)[0]
                met = ints.and_(met, flag if literal.expected else ints.not_(flag))
        low = high = None
        on_keys = sorted((c for c in bounds if not c.of_row), key=repr)
        for anchor in dict.fromkeys((c.anchor, c.divisor) for c in on_keys):
            there = [c for c in on_keys if (c.anchor, c.divisor) == anchor]
            first, last, some = self.anchored(there, rows)
            met = ints.and_(met, some)
            low = _joined(ints.maximum, low, first)
            high = _joined(ints.minimum, high, last)
        return self.guarded(low, high, met)

    def rows(self, bounds: Sequence[Bound]) -> tuple[Range, Any]:
        """The queries of the tile that may fulfil conditions on q, and whether there are any."""
        ints, given = self.ints, self.tile[:2]
        q0, q1 = given
        if not bounds:
            return given, True
        for bound in bounds:
            end = self.end(bound, (q0, q1))
            if bound.side == "low":
                q0 = ints.maximum(q0, end)
            else:
                q1 = ints.minimum(q1, ints.sub(end, 1))
        met = ints.not_(ints.less(q1, q0))
        return given if given[0] is given[1] else (q0, q1), met

    def anchored(self, bounds: Sequence[Bound], rows: Range) -> tuple[Any, Any, Any]:
        """Keys within all bounds on one anchor in some row, and whether any row has such keys."""
        ints = self.ints
        ends: dict[str, Any] = {"low": None, "high": None}
        for bound in bounds:
            tighter = ints.maximum if bound.side == "low" else ints.minimum
            ends[bound.side] = _joined(tighter, ends[bound.side], self.uniform(bound.offset))
        low, high = ends["low"], ends["high"]
        some = True
        if low is not None and high is not None and not _ordered(bounds):
            some = ints.less(low, high)
        anchor, divisor = bounds[0].anchor, bounds[0].divisor
        if anchor.terms or divisor != 1:
            first, last = self.total(anchor, rows)
            if divisor != 1:
                first, last = ints.floordiv(first, divisor), ints.floordiv(last, divisor)
            low = None if low is None else ints.add(first, low)
            high = None if high is None else ints.add(last, high)
        return low, high, some

    def end(self, bound: Bound, rows: Range) -> Any:
        """A bound whose anchor does not depend on q."""
        anchor = self.total(bound.anchor, rows)[0]
        anchor = self.ints.floordiv(anchor, bound.divisor) if bound.divisor != 1 else anchor
        return self.ints.add(anchor, self.uniform(bound.offset))

    def guarded(self, low: Any, high: Any, met: Any) -> tuple[Any | None, Any | None]:
        """The span if the condition is met, an empty one of the same form if not."""
        ints = self.ints
        if low is None and high is None:
            high = self.tile.seqlen_k
        if met is True:
            return low, high
        if high is None:
            return ints.where(met, low, self.tile.seqlen_k), None
        return low, ints.where(met, high, 0 if low is None else low)

    def uniform(self, value: Linear) -> Any:
        """A sum that is the same for the whole tile."""
        if value not in self._offsets:
            clamped = Linear(value.terms, _clamped(value.const))
            self._offsets[value] = self.total(clamped, self.tile[:2])[0]
        return self._offsets[value]

    def total(self, value: Linear, rows: Range) -> Range:
        """The range of a sum over rows; one object twice where it has one value."""
        ints = self.ints
        low: Any = None
        high: Any = None
        for number, factor in value.terms:
            first, last = self.term(number, abs(factor), rows)
            if low is None:
                low, high = (first, last) if factor > 0 else (ints.sub(0, last), ints.sub(0, first))
                high = low if first is last else high
                continue
            single = low is high and first is last
            step, (near, far) = (
                (ints.add, (first, last)) if factor > 0 else (ints.sub, (last, first))
            )
            low, top = step(low, near), high
            high = low if single else step(top, far)
        if low is None:
            return value.const, value.const
        if value.const == 0:
            return low, high
        total = ints.add(low, value.const)
        return total, total if low is high else ints.add(high, value.const)

    def term(self, number: int, factor: int, rows: Range) -> Range:
        """The range of a node times a positive factor.

        Values read from memory, and products, are held within +-LARGEST: beyond it they mean
        "without limit", and sums of a few still fit 32 bits.
        """
        ints, node, (low, high) = self.ints, self.nodes[number], self.value(number, rows)
        single = low is high
        if self.reads_memory(number) or (factor != 1 and not rounds_down(node, factor)):
            most = LARGEST // factor
            low = ints.maximum(ints.minimum(low, most), -most)
            high = low if single else ints.maximum(ints.minimum(high, most), -most)
        if factor != 1:
            low, high = ints.mul(low, factor), high if single else ints.mul(high, factor)
        return low, low if single else high

    def reads_memory(self, number: int) -> bool:
        node = self.nodes[number]
        inner = (a.id for a in node.operands if isinstance(a, Ref))
        return node.op == "load" or any(self.reads_memory(i) for i in inner)

    def value(self, number: int, rows: Range) -> Range:
        """The range of a node over rows; one object twice where it has one value."""
        key = (number, id(rows[0]), id(rows[1]))
        if key not in self._values:  # the rows are kept, so that their ids stay theirs
            self._values[key] = (rows, self._computed(number, rows))
        return self._values[key][1]

    def _computed(self, number: int, rows: Range) -> Range:
        node = self.nodes[number]
        if node.op == "input":
            if node.args[0] == "q":
                return rows
            value = getattr(self.tile, node.args[0])
            return value, value
        ranges = [self.value(a.id, rows) if isinstance(a, Ref) else (a, a) for a in node.operands]
        if node.op == "load":
            value = self.ints.load(node.args[0], tuple(low for low, _ in ranges))
            return value, value
        low, high = OPS[node.op].interval(self.ints, *ranges)  # type: ignore[misc]
        single = all(first is last for first, last in ranges)
        return low, low if single else high


def _clamped(number: int) -> int:
    return max(-LARGEST, min(LARGEST, number))


def _joined(join: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Of two ends of which None is no end."""
    return a if b is None else b if a is None else join(a, b)


def _ordered(bounds: Sequence[Bound]) -> bool:
    """Whether each lower bound is known to lie below each upper bound."""
    lows = [b for b in bounds if b.side == "low"]
    highs = [b for b in bounds if b.side == "high"]
    distances = [low.distance(high) for low in lows for high in highs]
    return all(distance is not None and distance < 0 for distance in distances)
