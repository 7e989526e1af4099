"""Decides about key tiles one by one, where the visible ones are not a few intervals.

The mask is evaluated once for a whole tile, on ranges in place of numbers and on conditions that
may be true, false, or both. Positions range over the tile; what is read from memory by one position
ranges over what `summaries.py` found in its block. Written on `Integers`, so the same lines run on
Python ints, on torch tensors for many tiles at once, and inside a kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import lru_cache, reduce
from typing import Any

import torch

from . import intervals
from .bounds import Runs, TorchIntegers, visit_runs
from .graph import Graph, Node, Ref
from .intervals import COMPARISONS, HIGHEST, LOGIC, LOWEST, UNKNOWN, Condition, Interval
from .keys import QueryTile, Span, key_sets
from .ops import Integers, Range
from .summaries import POSITIONS, Read, equality, reached, summaries

MOST_WIDE = 2  # indices of an element that are no single value

Ranges = Callable[[int], Range]  # summary number -> its smallest and largest value in the tile


def verdict(
    mask: Graph | None, tile: QueryTile, k0: Any, k1: Any, ints: Integers, ranges: Ranges
) -> Condition:
    """(possible, hidden): whether some query may see some key of k0 to k1, or not see it.

    Both may be true where they are not, never the other way round.
    """
    if mask is None:
        return True, False
    return _Evaluation(mask, tile, ints, ranges).of_keys(k0, k1, ranges)


class _Evaluation:
    """A mask on ranges; what does not depend on the keys is computed at once."""

    def __init__(self, mask: Graph, tile: QueryTile, ints: Integers, ranges: Ranges) -> None:
        self.mask, self.tile, self.ints = mask, tile, ints
        found = summaries(mask)
        self.numbers = {s.node: i for i, s in enumerate(found) if s.given is None}
        self.pair = equality(mask)
        self.given = {(s.node, s.given[1]): i for i, s in enumerate(found) if s.given is not None}
        whole = [i for i, s in enumerate(found) if s.given is None and s.position == "q"]
        self.of_query = {i: ranges(i) for i in whole}
        self.on_keys = [i for i in reached(mask) if "k" in mask.nodes[i].depends]
        self.known: dict[int, Any] = {}
        others = (i for i in reached(mask) if "k" not in mask.nodes[i].depends)
        self.computed(others, self.known, (None, None), self.of_query.__getitem__)

    def of_keys(self, k0: Any, k1: Any, ranges: Ranges) -> Condition:
        # Ends of the queries' are read again at each step: a role that decides has few registers.
        rest = (i for i in range(len(summaries(self.mask))) if i not in self.of_query)
        both = {**self.of_query, **{i: ranges(i) for i in rest}}
        values = self.computed(self.on_keys, dict(self.known), (k0, k1), both.__getitem__)
        possible, hidden = values[self.mask.output]
        if self.given:
            narrow = self.narrowed(both)
            values = self.computed(reached(self.mask), {}, (k0, k1), narrow.__getitem__)
            possible = self.ints.and_(possible, values[self.mask.output][0])
        return possible, hidden

    def narrowed(self, ranges: dict[int, Range]) -> dict[int, Range]:
        """The summaries' ranges over positions at which the equality that the mask asks for holds.

        They are known where the two ranges share one value that is an end of a block's range.
        """
        assert self.pair is not None
        ints, (of_q, of_k) = self.ints, (ranges[i] for i in self.pair)
        low, high = ints.maximum(of_q[0], of_k[0]), ints.minimum(of_q[1], of_k[1])
        one = ints.not_(ints.less(low, high))
        narrow = dict(ranges)
        for (node, end), i in self.given.items():
            of_query = "q" in self.mask.nodes[node].depends
            mine = of_q if of_query else of_k
            inside = ints.less(high, mine[1]) if end == "high" else ints.less(mine[0], low)
            at_end, whole = ints.and_(one, ints.not_(inside)), self.numbers[node]
            ends = zip(ranges[i], narrow[whole], strict=True)
            narrow[whole] = tuple(ints.where(at_end, a, b) for a, b in ends)
        return narrow

    def computed(
        self, numbers: Iterable[int], values: dict[int, Any], keys: Range, ranges: Ranges
    ) -> dict[int, Any]:
        """Adds these nodes' values: a Condition for a bool, an Interval or None for an int."""
        for number in numbers:
            node = self.mask.nodes[number]
            if number in self.numbers:
                low, high = ranges(self.numbers[number])
                if node.dtype == "bool":
                    values[number] = self.ints.less(0, high), self.ints.less(low, 1)
                else:
                    values[number] = Interval(low, high)
            elif node.op == "input":
                values[number] = self.input(node.args[0], keys)
            else:
                values[number] = self.operation(node, [_value(a, values) for a in node.operands])
        return values

    def input(self, name: str, keys: Range) -> Interval:
        if name == "k":
            return intervals.position(*keys)
        if name == "q":
            return intervals.position(self.tile.q0, self.tile.q1)
        value = getattr(self.tile, name)
        return intervals.position(value, value, single=True)

    def operation(self, node: Node, args: list[Any]) -> Any:
        ints, unknown = self.ints, UNKNOWN if node.dtype == "bool" else None
        if node.op == "const":
            return _value(node.args[0], {})
        if node.op == "load":
            return self.loaded(node, args)
        if node.op in COMPARISONS:
            return intervals.compared(ints, node.op, *args)
        if node.op in LOGIC or (node.op == "where" and node.dtype == "bool"):
            return intervals.joined(ints, node.op, tuple(args))
        if node.op == "where" and node.dtype == "int":
            return intervals.chosen(ints, *args)
        if node.op == "to_int":
            return None if args[0] is None else intervals.counted(ints, args[0])
        return unknown if node.dtype != "int" else intervals.combined(ints, node.op, tuple(args))

    def loaded(self, node: Node, indices: list[Interval | None]) -> Any:
        """An element of a tensor: known where each index has one value or two neighbours.

        So blocks of a table are found for tiles no larger than they are.
        """
        ints, near = self.ints, True
        known = [i for i in indices if i is not None]
        wide = [i for i in known if not i.single]
        if node.dtype == "float" or len(known) < len(indices) or len(wide) > MOST_WIDE:
            return UNKNOWN if node.dtype == "bool" else None
        for i in wide:
            low = i.low if i.most < HIGHEST else ints.minimum(i.low, HIGHEST - 1)
            near = ints.and_(near, ints.not_(ints.less(ints.add(low, 1), i.high)))
        ends = itertools.product(*((i.low,) if i.single else (i.low, i.high) for i in known))
        values = [ints.load(node.args[0], corner) for corner in ends]
        if node.dtype == "bool":
            return tuple(
                reduce(ints.or_, map(turned, values), ints.not_(near))
                for turned in (lambda value: value, ints.not_)
            )
        low, high = reduce(ints.minimum, values), reduce(ints.maximum, values)
        if not wide:
            return Interval(low, low, single=True)
        return Interval(ints.where(near, low, LOWEST), ints.where(near, high, HIGHEST))


def _value(operand: Any, values: dict[int, Any]) -> Any:
    """An operand's range; None for a float, of which none is known."""
    if isinstance(operand, Ref):
        return values.get(operand.id)
    if isinstance(operand, bool):
        return operand, not operand
    return intervals.number(operand) if isinstance(operand, int) else None


def candidates(runs: Runs) -> Span:
    """The first key tile that any run visits, and the end behind the last."""
    ints, hull = runs.ints, None
    for start, count in (*runs.partial, *runs.full):
        end = ints.add(start, count)
        if hull is None:
            hull = start, end
            continue
        # An empty run must not widen the hull.
        empty, was_empty = ints.less(count, 1), ints.not_(ints.less(hull[0], hull[1]))
        low = ints.where(empty, hull[0], ints.minimum(hull[0], start))
        high = ints.where(empty, hull[1], ints.maximum(hull[1], end))
        hull = ints.where(was_empty, start, low), ints.where(was_empty, end, high)
    return (0, 0) if hull is None else hull


class Scan:
    """The key tiles of one tile of queries, decided one by one: from `first` to below `end`.

    A key tile is visited if both the runs of the solved mask and the evaluation on ranges say so,
    and needs no element mask if either says so. Create it outside loops: what depends on the
    queries alone is computed here.
    """

    def __init__(
        self,
        mask: Graph | None,
        tile: QueryTile,
        q_block: Any,
        tile_n: int,
        ints: Integers,
        read: Read,
    ) -> None:
        self.mask, self.tile, self.q_block, self.tile_n = mask, tile, q_block, tile_n
        self.ints, self.read = ints, read
        self.runs = visit_runs(key_sets(mask, tile, ints), tile_n, tile.seqlen_k, ints)
        self.first, self.end = candidates(self.runs)
        self.evaluation = mask and _Evaluation(mask, tile, ints, self.ranges(None))

    def decide(self, n_block: Any) -> tuple[Any, Any]:
        """(visited, masked) of one key tile; a tile outside the sequence is not visited.

        `masked` says that a visited tile needs the element mask.
        """
        ints, seqlen_k = self.ints, self.tile.seqlen_k
        partial, full = (self.within(n_block, r) for r in (self.runs.partial, self.runs.full))
        k0 = ints.mul(n_block, self.tile_n)
        end = ints.add(k0, self.tile_n)
        possible, hidden = True, False
        if self.evaluation:
            last = ints.sub(ints.minimum(end, seqlen_k), 1)
            possible, hidden = self.evaluation.of_keys(k0, last, self.ranges(n_block))
        visited = ints.and_(ints.or_(partial, full), possible)
        return visited, ints.and_(partial, ints.or_(hidden, ints.less(seqlen_k, end)))

    def ranges(self, n_block: Any) -> Ranges:
        """The summaries' ranges in this block of queries and that block of keys."""
        blocks = {"q": self.q_block, "k": n_block}
        return lambda i: self.read(i, blocks[summaries(self.mask)[i].position])

    def within(self, n_block: Any, runs: tuple[Span, ...]) -> Any:
        ints, found = self.ints, False
        for start, count in runs:
            here = ints.less(n_block, ints.add(start, count))
            if not (isinstance(start, int) and start == 0):
                here = ints.and_(here, ints.not_(ints.less(n_block, start)))
            found = ints.or_(found, here)
        return found


@lru_cache(maxsize=256)
def by_tile(mask: Graph | None) -> bool:
    """Whether key tiles are decided one by one: something is read from memory by one position or
    by blocks, or evaluation on ranges leaves out tiles that the runs of the solved mask hold.

    The latter is tried on grids of tiles, with numbers in place of captured ones. It decides how
    tiles are found, not which are right.
    """
    if mask is None:
        return False
    if summaries(mask) or any(_by_blocks(mask, mask.nodes[i]) for i in reached(mask)):
        return True
    return any(
        _drops(mask, *probe)
        for probe in ((4096, 4096, 128, 7), (2048, 4096, 128, 3), (2**16, 2**16, 2048, 11))
    )


def _by_blocks(mask: Graph, node: Node) -> bool:
    """Whether a node is an element for a block of queries and a block of keys."""
    indices = [mask.nodes[a.id] for a in node.operands if isinstance(a, Ref)]
    wide = [i for i in indices if i.depends & POSITIONS]
    both = node.op == "load" and node.dtype != "float" and node.depends >= POSITIONS
    return both and all(i.op in ("floordiv", "shr") for i in wide)


class _Pretended(TorchIntegers):
    """Numbers in place of captured ones, spread over the sequence; both of each bool."""

    def __init__(self, mask: Graph, seqlen: int, seed: int) -> None:
        super().__init__()
        loads = (node for node in mask.nodes if node.op == "load")
        self.dtypes = {node.args[0]: node.dtype for node in loads}
        self.seqlen, self.seed = seqlen, seed

    def load(self, capture: int, indices: tuple[Any, ...]) -> Any:
        mixed = self.seed * (capture + 1)
        for n, index in enumerate(indices):
            mixed = mixed + (n + 5) * index
        if self.dtypes[capture] == "bool":
            return torch.as_tensor(mixed % 2 == 0)
        return torch.as_tensor(mixed * (self.seqlen // 13) % self.seqlen)


def _drops(mask: Graph, seqlen_q: int, seqlen_k: int, size: int, seed: int) -> bool:
    """Whether evaluation on ranges leaves out a tile of this grid that the runs hold."""
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    q_block = torch.arange(seqlen_q // size)[:, None]
    n_block = torch.arange(seqlen_k // size)
    q0 = q_block * size
    tile = QueryTile(q0, q0 + size - 1, b, h, seqlen_q, seqlen_k)
    ints = _Pretended(mask, seqlen_k, seed)
    scan = Scan(mask, tile, q_block, size, ints, _no_summary)
    held = ints.or_(*(scan.within(n_block, r) for r in (scan.runs.partial, scan.runs.full)))
    dropped = ints.and_(held, ints.not_(scan.decide(n_block)[0]))
    return bool(torch.as_tensor(dropped).any())


def _no_summary(i: int, block: Any) -> Range:
    raise AssertionError("a mask with summaries is not probed")
