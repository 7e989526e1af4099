"""Which key tiles a tile of queries must visit, and which of them need no element mask.

The keys that some row may see and those that some row may not see (`keys.py`), rounded to key
tiles, become runs: a tile is visited if it meets the first set, and full if it does not meet the
second. Written on `Integers`, so the same lines run on Python ints, inside a kernel and on text.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .graph import LARGEST, Graph
from .keys import Keys, KeySet, QueryTile, Span, key_sets
from .ops import Integers


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
        """The j-th tile to visit: the partial ones first, each kind from right to left.

        So the first rows of a tile of queries, which see the fewest keys to the right, are spared
        the first tiles.
        """
        ints = self.ints
        before: Any = 0
        block: Any = None
        for start, count in (*reversed(self.partial), *reversed(self.full)):
            last = ints.sub(ints.add(start, count), 1)
            here = ints.sub(last, ints.sub(j, before))
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
        """An element, its indices clamped into the tensor and int64 saturated as in the kernel."""
        tensor = self.captures[capture]
        inside = [max(0, min(i, n - 1)) for i, n in zip(indices, tensor.shape, strict=True)]
        value = tensor[tuple(inside)].item()
        return max(-LARGEST, min(value, LARGEST)) if tensor.dtype == torch.int64 else value


class TorchIntegers:
    """Key arithmetic on many tiles at once: values are ints or int64 tensors that broadcast."""

    def __init__(self, captures: Sequence[torch.Tensor] = ()) -> None:
        self.captures = captures

    add = staticmethod(operator.add)
    sub = staticmethod(operator.sub)
    mul = staticmethod(operator.mul)
    floordiv = staticmethod(operator.floordiv)
    less = staticmethod(operator.lt)

    def minimum(self, a: Any, b: Any) -> Any:
        return self.where(a < b, a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return self.where(a < b, b, a)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, bool):
            return a if condition else b
        return torch.where(condition, a, b)

    def and_(self, a: Any, b: Any) -> Any:
        if isinstance(a, bool):
            return b if a else False
        return self.and_(b, a) if isinstance(b, bool) else a & b

    def or_(self, a: Any, b: Any) -> Any:
        return self.not_(self.and_(self.not_(a), self.not_(b)))

    def not_(self, a: Any) -> Any:
        return not a if isinstance(a, bool) else ~a

    def load(self, capture: int, indices: tuple[Any, ...]) -> Any:
        """Elements, indices clamped and int64 saturated as in the kernel."""
        tensor = self.captures[capture].detach()
        inside = tuple(
            torch.as_tensor(i, device=tensor.device).clamp(0, n - 1)
            for i, n in zip(indices, tensor.shape, strict=True)
        )
        value = tensor[inside] if inside else tensor
        return value if value.dtype == torch.bool else value.long().clamp(-LARGEST, LARGEST)


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
    ints = PythonIntegers(captures)
    found = key_sets(mask, tile, ints)
    first, last = keys
    seen, unseen = (
        part.meets(first, last + 1, tile.seqlen_k, ints) for part in (found.possible, found.hidden)
    )
    if not seen:
        return "empty"
    return "partial" if unseen or last >= tile.seqlen_k else "full"
