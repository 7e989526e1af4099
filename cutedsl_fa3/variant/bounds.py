"""Which keys a tile of queries must visit, and which of them need no element mask.

A mask in solved form (`solve.py`) gives, for the queries q0 to q1 of one tile, the keys that some
row may see and the keys that some row may not see. Rounded to key tiles they become runs: a tile is
visited if it meets the first set, and is full if it does not meet the second. All of it is written
on `Integers`, so the same lines run on Python ints, inside a kernel and on text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch

from .graph import Graph, Ref
from .ops import OPS, Integers, Range
from .solve import LARGEST, Bound, Conjunction, Flag, Formula, Holds, Linear, solve

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
        ints, (q0, q1) = self.ints, self.tile[:2]
        if not bounds:
            return (q0, q1), True
        for bound in bounds:
            end = self.end(bound, (q0, q1))
            if bound.side == "low":
                q0 = ints.maximum(q0, end)
            else:
                q1 = ints.minimum(q1, ints.sub(end, 1))
        return (q0, q1), ints.not_(ints.less(q1, q0))

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
        rounds_down = node.op == "floordiv" and node.args[1] == factor  # no larger than its operand
        if self.reads_memory(number) or (factor != 1 and not rounds_down):
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


@dataclass(frozen=True)
class Runs:
    """Key tiles to visit, as (first tile, count): `partial` ones need the element mask."""

    partial: tuple[Span, ...]
    full: tuple[Span, ...]
    ints: Integers

    @property
    def n_partial(self) -> Any:
        return _sum(self.ints, self.partial)

    @property
    def n_full(self) -> Any:
        return _sum(self.ints, self.full)

    @property
    def n_total(self) -> Any:
        return self.ints.add(self.n_partial, self.n_full)

    def n_block(self, j: Any) -> Any:
        """The j-th tile to visit: the partial ones first, each kind from left to right."""
        ints = self.ints
        before: Any = 0
        block: Any = None
        for start, count in (*self.partial, *self.full):
            here = ints.add(start, ints.sub(j, before))
            block = here if block is None else ints.where(ints.less(j, before), block, here)
            before = ints.add(before, count)
        return 0 if block is None else block


def _sum(ints: Integers, runs: Sequence[Span]) -> Any:
    total: Any = 0
    for _, count in runs:
        total = ints.add(total, count)
    return total


def visit_runs(keys: Keys, tile_n: int, seqlen_k: Any, ints: Integers) -> Runs:
    """The key tiles that meet `keys.possible`, each once; full ones do not meet `keys.hidden`.

    A tile that reaches past the sequence is partial. Runs may have count 0.
    """
    tiles = _Tiles(tile_n, seqlen_k, ints)
    visited = tiles.visited(keys.possible)
    masked = tiles.masked(keys.hidden)
    partial = [tiles.common(v, m) for v in visited for m in masked]
    full = tiles.gaps(masked)
    return Runs(_not_empty(partial), _not_empty(full), ints)


def _not_empty(runs: Sequence[Span]) -> tuple[Span, ...]:
    """Without runs whose count is known to be 0."""
    return tuple(run for run in runs if not _is_zero(run[1]))


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


class _Tiles:
    """Key sets rounded to tiles; a run here is (first, end)."""

    def __init__(self, tile_n: int, seqlen_k: Any, ints: Integers) -> None:
        self.tile_n = tile_n
        self.seqlen_k = seqlen_k
        self.ints = ints
        self.whole = ints.floordiv(seqlen_k, tile_n)  # tiles inside the sequence

    def above(self, key: Any) -> Any:
        """The first tile that lies at or after this key with all of its own."""
        return self.ints.floordiv(self.ints.add(key, self.tile_n - 1), self.tile_n)

    def below(self, key: Any) -> Any:
        """The tile that holds this key."""
        return self.ints.floordiv(key, self.tile_n)

    def visited(self, keys: KeySet) -> list[Span]:
        """Disjoint runs in order: every tile with a key of the set inside the sequence."""
        ints, end = self.ints, 0
        runs: list[Span] = []
        spans = [(low, ints.minimum(high, self.seqlen_k)) for low, high in keys.middles]
        if keys.left is self.seqlen_k:
            return [(0, self.above(self.seqlen_k))]
        if keys.left is not None:
            end = self.above(ints.maximum(ints.minimum(keys.left, self.seqlen_k), 0))
            runs.append((0, end))
        if keys.right is not None:
            spans.append((keys.right, self.seqlen_k))
        self.append_merged(runs, [self.rounded(span) for span in spans], end)
        return runs

    def masked(self, keys: KeySet) -> list[Span]:
        """Disjoint runs in order that hold every tile with a key of the set or past the end.

        The last has no end (None).
        """
        ints, end = self.ints, 0
        runs: list[Span] = []
        if keys.left is self.seqlen_k:
            return [(0, None)]
        if keys.left is not None:
            end = self.above(ints.maximum(keys.left, 0))
            runs.append((0, end))
        tail = self.whole
        if keys.right is not None:
            tail = ints.minimum(self.below(ints.maximum(keys.right, 0)), tail)
        # A span that begins behind the tail's begin is part of it, and must leave no gap.
        rounded = [self.rounded(span) for span in keys.middles]
        end = self.append_merged(runs, [(ints.minimum(a, tail), b) for a, b in rounded], end)
        runs.append((tail if _is_zero(end) else ints.maximum(tail, end), None))
        return runs

    def append_merged(self, runs: list[Span], more: list[Span], end: Any) -> Any:
        """Appends runs in order, without what lies before `end`; returns the new end."""
        for start, last in self.sorted(more):
            start = start if _is_zero(end) else self.ints.maximum(start, end)
            end = self.ints.maximum(last, start)
            runs.append((start, end))
        return end

    def rounded(self, span: Span) -> Span:
        """The tiles that a span of keys meets; an empty span meets none."""
        low, high = self.ints.maximum(span[0], 0), span[1]
        first = self.below(low)
        return first, self.ints.where(self.ints.less(low, high), self.above(high), first)

    def sorted(self, runs: list[Span]) -> list[Span]:
        """By first tile, with a fixed sequence of compare and swap."""
        ints, runs = self.ints, list(runs)
        for last in range(len(runs) - 1, 0, -1):
            for i in range(last):
                a, b = runs[i], runs[i + 1]
                swap = ints.less(b[0], a[0])
                runs[i] = tuple(ints.where(swap, y, x) for x, y in zip(a, b, strict=True))
                runs[i + 1] = tuple(ints.where(swap, x, y) for x, y in zip(a, b, strict=True))
        return runs

    def common(self, a: Span, b: Span) -> Span:
        """(first tile, count) of what two runs share."""
        ints, start = self.ints, a[0]
        if not _is_zero(b[0]):
            start = b[0] if _is_zero(start) else ints.maximum(start, b[0])
        end = a[1] if b[1] is None else self.ints.minimum(a[1], b[1])
        return start, self.ints.maximum(self.ints.sub(end, start), 0)

    def gaps(self, masked: list[Span]) -> list[Span]:
        """(first tile, count) of the tiles between runs, all inside the sequence."""
        found, end = [], 0
        for start, after in masked:  # each start lies inside the sequence or meets the last end
            if not _is_zero(start):
                count = start if _is_zero(end) else self.ints.sub(start, end)
                found.append((end, self.ints.maximum(count, 0)))
            end = after
        return found


class PythonIntegers:
    """Key arithmetic on Python ints: what the kernel does, step by step, on the CPU."""

    def __init__(self, captures: Sequence[torch.Tensor] = ()) -> None:
        self.captures = captures

    def add(self, a: int, b: int) -> int:
        return a + b

    def sub(self, a: int, b: int) -> int:
        return a - b

    def mul(self, a: int, b: int) -> int:
        return a * b

    def floordiv(self, a: int, b: int) -> int:
        return a // b

    def minimum(self, a: int, b: int) -> int:
        return min(a, b)

    def maximum(self, a: int, b: int) -> int:
        return max(a, b)

    def less(self, a: int, b: int) -> bool:
        return a < b

    def and_(self, a: bool, b: bool) -> bool:
        return a and b

    def or_(self, a: bool, b: bool) -> bool:
        return a or b

    def not_(self, a: bool) -> bool:
        return not a

    def where(self, condition: bool, a: int, b: int) -> int:
        return a if condition else b

    def load(self, capture: int, indices: tuple[int, ...]) -> Any:
        """An element, its indices clamped into the tensor as in the kernel."""
        tensor = self.captures[capture]
        inside = [max(0, min(i, n - 1)) for i, n in zip(indices, tensor.shape, strict=True)]
        return tensor[tuple(inside)].item()


def spans(keys: KeySet, seqlen_k: int) -> tuple[Span, ...]:
    """A key set as disjoint half-open spans inside the sequence, in order, of Python ints."""
    parts = [(0, keys.left)] if keys.left is not None else []
    parts += keys.middles
    parts += [(keys.right, seqlen_k)] if keys.right is not None else []
    merged: list[Span] = []
    for low, high in sorted((max(low, 0), min(high, seqlen_k)) for low, high in parts):
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def classify(
    mask: Graph | None,
    tile: QueryTile,
    keys: tuple[int, int],
    captures: Sequence[torch.Tensor] = (),
) -> str:
    """What the rows of a tile see of the keys first to last (inclusive): full, partial, empty."""
    found = key_sets(mask, tile, PythonIntegers(captures))
    first, last = keys

    def meets(part: KeySet) -> bool:
        return any(low <= last and first < high for low, high in spans(part, tile.seqlen_k))

    if not meets(found.possible):
        return "empty"
    return "partial" if meets(found.hidden) or last >= tile.seqlen_k else "full"
