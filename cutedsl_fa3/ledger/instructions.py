"""How many instructions a variant's functions are, counted as the compiler shares them.

A graph is evaluated at each score that a thread holds, on names instead of numbers: two evaluations
with the same name are one instruction. Integers are sums of positions and a number, so that k - q
has the same name wherever it has the same value; with it, a bias read by distance is loaded once
for both rows of a thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.distances import COLUMN, ELEMENT, ROW, distances
from cutedsl_fa3.variant.graph import Graph, Node, Ref
from cutedsl_fa3.variant.pairs import read_along_k

from .rates import (
    ADDED,
    CLAMPED,
    CLAMPED_PAIR,
    DISTANCE,
    DIVISOR,
    HIDDEN,
    INSIDE,
    LOADED,
    LOADED_PAIR,
    NARROWED,
    OPS,
    POSITION,
    SCALED,
    WIDENED,
    Counts,
)  # fmt: skip

ROWS = (0, 8)  # of a thread, below its first one; source: layouts/wgmma.py
VARIES = ROW | COLUMN | ELEMENT
_INVERTED = 2.0**-126, 2.0**126  # divisors whose inverse multiplies; source: variant/lower.py


def columns(tile_n: int) -> tuple[int, ...]:
    """The columns of a thread, beyond its first one: pairs of neighbours in every eight."""
    return tuple(c for first in range(0, tile_n, 8) for c in (first, first + 1))


@dataclass(frozen=True)
class Sum:
    """An integer: named terms with their factors, plus a number."""

    terms: frozenset[tuple[Any, int]]
    number: int

    def plus(self, other: Sum, factor: int = 1) -> Sum:
        terms = Counter(dict(self.terms))
        for name, times in other.terms:
            terms[name] += factor * times
        kept = frozenset((name, times) for name, times in terms.items() if times)
        return Sum(kept, self.number + factor * other.number)

    def times(self, factor: int) -> Sum:
        return Sum(frozenset(), 0).plus(self, factor)


def _named(name: Any) -> Sum:
    return Sum(frozenset({(name, 1)}), 0)


class Place(NamedTuple):
    """A score of a thread: row and column of its share, and how far it lies beyond the first."""

    row: int
    column: int
    ahead_q: int
    ahead_k: int


@dataclass
class Tally:
    """Instructions of one warp for a whole tile, each named value once."""

    counts: Counter[str] = field(default_factory=Counter)
    numbers: dict[Any, int] = field(default_factory=dict)

    def once(self, name: Any, counts: Counts) -> Any:
        """Count these instructions if nothing of this name was counted before; a short name."""
        if name not in self.numbers:
            self.numbers[name] = len(self.numbers)
            self.counts.update(counts)
        return "value", self.numbers[name]


def score_instructions(variant: Variant, tile_n: int, pairs: frozenset[int]) -> Counter[str]:
    """What the score and the weight function of a variant add to a full tile, for one warp."""
    tally = Tally()
    _scores(variant, tile_n, pairs, tally)
    return tally.counts


def mask_instructions(variant: Variant, tile_n: int, pairs: frozenset[int]) -> Counter[str]:
    """What a tile that needs the element mask costs beyond a full one, for one warp."""
    tally = Tally()
    _scores(variant, tile_n, pairs, tally)
    before = Counter(tally.counts)
    _masked(variant, tile_n, pairs, tally)
    tally.counts.subtract(before)
    return +tally.counts


def reads_elements(graphs: Iterable[Graph | None]) -> bool:
    """Whether any of these graphs loads from a captured tensor within a tile."""
    return any(
        node.op == "load" and node.depends & VARIES
        for graph in graphs
        if graph is not None
        for node in graph.nodes
    )


def _places(tile_n: int) -> Iterator[Place]:
    for c, ahead_k in enumerate(columns(tile_n)):
        for r, ahead_q in enumerate(ROWS):
            yield Place(r, c, ahead_q, ahead_k)


def _scores(variant: Variant, tile_n: int, pairs: frozenset[int], tally: Tally) -> None:
    if variant.score is None and variant.weight is None:
        return
    score, weight = (
        graph and _Reader(graph, (Ref(graph.output),), variant, pairs, tally, is_product)
        for graph, is_product in ((variant.score, True), (variant.weight, False))
    )
    for place in _places(tile_n):
        raw = ("raw", place.row, place.column)
        if score:
            (value,) = score.names(place, raw)
        else:
            value = tally.once(("scaled", raw), SCALED)
        if weight:
            weight.names(place, value)


def _masked(variant: Variant, tile_n: int, pairs: frozenset[int], tally: Tally) -> None:
    mask = variant.mask
    conditions = _conditions(mask) if mask else ()
    reader = mask and _Reader(mask, conditions, variant, pairs, tally)
    for place in _places(tile_n):
        key = _held(Sum(frozenset({("k", 1)}), place.ahead_k), tally)
        tally.once(("inside", key), INSIDE)
        tally.once(("hidden", place), HIDDEN)
        if reader:
            reader.names(place, None)
            for condition in conditions:
                tally.once(("hidden", place, condition), HIDDEN)


def _conditions(mask: Graph) -> tuple[Ref, ...]:
    """What must all hold for a key to be seen: each is a selection of its own."""
    found, todo = [], [Ref(mask.output)]
    while todo:
        value = todo.pop()
        node = mask.nodes[value.id]
        if node.op == "and":
            todo += [a for a in node.args if isinstance(a, Ref)]
        else:
            found.append(value)
    return tuple(dict.fromkeys(found))


def _held(value: Any, tally: Tally) -> Any:
    """The name of a value in a register: an integer beyond a name of its own costs an addition."""
    if not isinstance(value, Sum):
        return value
    alone = len(value.terms) == 1 and next(iter(value.terms))[1] == 1
    if not value.terms or (alone and value.number == 0):
        return value
    return tally.once(value, POSITION)


class _Reader:
    """Evaluates a graph on names; counts into a tally what each new name costs."""

    def __init__(
        self,
        graph: Graph,
        outputs: tuple[Ref, ...],
        variant: Variant,
        pairs: frozenset[int],
        tally: Tally,
        is_product: bool = False,
    ) -> None:
        self.graph, self.outputs, self.tally = graph, outputs, tally
        self.is_product = is_product  # whether the score comes as a product yet to be scaled
        self.captures = variant.captures
        self.paired = {i for i in read_along_k(graph) if graph.nodes[i].args[0] in pairs}
        self.distances = distances(graph)
        self.uses: Counter[int] = Counter()
        for node in graph.nodes:
            self.uses.update(a.id for a in node.operands if isinstance(a, Ref))
        self.known: dict[int, Any] = {}

    def names(self, place: Place, score: Any) -> tuple[Any, ...]:
        """The names of the outputs at one score."""
        self.known = {}
        for number in self._order:
            self.known[number] = self._name(number, place, score)
        return tuple(self._value(output) for output in self.outputs)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """The nodes whose values are needed, each after its operands."""
        needed: set[int] = set()
        todo = [output.id for output in self.outputs]
        while todo:
            number = todo.pop()
            if number not in needed:
                needed.add(number)
                todo += [a.id for a in self._reads(number) if isinstance(a, Ref)]
        return tuple(sorted(needed))

    def _reads(self, number: int) -> tuple[Any, ...]:
        """The operands of a node as an instruction has them."""
        node = self.graph.nodes[number]
        if self._uniform(node):
            return ()
        if number in self.distances:
            return (Ref(self.distances[number].node),)
        if (fused := self._fused(node)) is not None:
            return fused
        return node.operands

    def _uniform(self, node: Node) -> bool:
        return node.depends.isdisjoint(VARIES)

    def _fused(self, node: Node) -> tuple[Any, ...] | None:
        """Factors and addend of a sum that is one FMA: a product that nothing else reads is in it.

        The first factor is None where it is the raw product of the score.
        """
        if node.op not in ("add", "sub") or node.dtype != "float":
            return None
        for mine, other in (node.args, node.args[::-1]):
            if not isinstance(mine, Ref):
                continue
            of = self.graph.nodes[mine.id]
            if of.op == "input" and of.args[0] == "score" and self.is_product:
                if mine != other:
                    return None, "scale", other
            elif of.op == "mul" and self.uses[mine.id] == 1 and not self._uniform(of):
                return *of.args, other
        return None

    def _value(self, value: Any) -> Any:
        """The name of an operand; integers are sums."""
        if isinstance(value, Ref):
            return self.known[value.id]
        whole = isinstance(value, int) and not isinstance(value, bool)
        return Sum(frozenset(), value) if whole else value

    def _name(self, number: int, place: Place, score: Any) -> Any:
        node = self.graph.nodes[number]
        if self._uniform(node):
            name = ("uniform", id(self.graph), number)
            return _named(name) if node.dtype == "int" else name
        if node.op == "input":
            return self._input(node.args[0], place, score)
        if node.op == "load":
            return self._load(number, node, place)
        if number in self.distances:
            moved = self._value(Ref(self.distances[number].node))
            return self.tally.once(("float", moved), DISTANCE)
        if (fused := self._fused(node)) is not None:
            first, *rest = fused
            names = (score if first is None else self._value(first), *map(self._value, rest))
            return self.tally.once((node.op, "fma", *names), ADDED)
        parts = [self._value(a) for a in node.operands]
        if node.dtype == "int" and (found := _sum(node.op, parts)) is not None:
            return found
        return self._operation(node, parts, place)

    def _input(self, name: str, place: Place, score: Any) -> Any:
        if name == "score":
            return self.tally.once(("scaled", score), SCALED) if self.is_product else score
        return Sum(frozenset({(name, 1)}), place.ahead_q if name == "q" else place.ahead_k)

    def _operation(self, node: Node, parts: list[Any], place: Place) -> Any:
        operands = [_held(part, self.tally) for part in parts]
        kind = self._kind(node)
        name, op = (node.op, kind, *operands), node.op
        if any(_of_both(part) for part in parts):
            name = (*name, place)  # the compiler does not see that k - q is the same elsewhere
        if op == "div":
            divisor = node.args[1]
            if isinstance(divisor, float) and _INVERTED[0] <= abs(divisor) <= _INVERTED[1]:
                op = "mul"
            elif isinstance(divisor, Ref) and not self._uniform(self.graph.nodes[divisor.id]):
                self.tally.once(("divisor", operands[1]), DIVISOR)
        self.tally.once(name, OPS[op, kind])
        return _named(name) if node.dtype == "int" else name

    def _kind(self, node: Node) -> str:
        """The type that an operation works on: that of its last operand."""
        last = node.operands[-1]
        if isinstance(last, Ref):
            return self.graph.nodes[last.id].dtype
        return type(last).__name__

    def _load(self, number: int, node: Node, place: Place) -> Any:
        capture, tally = node.args[0], self.tally
        paired = number in self.paired
        ahead = place.column % 2 if paired else 0
        indices: list[Any] = []
        for n, index in enumerate(node.operands):
            name = self._value(index)
            if isinstance(index, Ref) and not self._uniform(self.graph.nodes[index.id]):
                along_k = paired and n == len(node.operands) - 1
                name = Sum(name.terms, name.number - ahead) if along_k else name
                _held(name, tally)
                clamped = ("clamped", n, capture, name)
                name = tally.once(clamped, CLAMPED_PAIR if along_k else CLAMPED)
            indices.append(name)
        address = ("load", capture, *indices)
        tally.once(address, LOADED_PAIR if paired else LOADED)
        element = (*address, ahead)
        dtype = self.captures[capture].dtype
        if dtype in (torch.bfloat16, torch.float16):
            tally.once(("widened", element), WIDENED)
        elif dtype is torch.int64:
            tally.once(("narrowed", element), NARROWED)
        return _named(element) if node.dtype == "int" else element


def _of_both(value: Any) -> bool:
    """Whether an integer is made of a query's and a key's position."""
    return isinstance(value, Sum) and {"q", "k"} <= {name for name, _ in value.terms}


def _sum(op: str, parts: list[Sum]) -> Sum | None:
    """An integer made of others by additions and products with a number; None otherwise."""
    if op == "neg":
        return parts[0].times(-1)
    if op in ("add", "sub"):
        return parts[0].plus(parts[1], 1 if op == "add" else -1)
    if op == "mul":
        for one, other in (parts, parts[::-1]):
            if not other.terms:
                return one.times(other.number)
    return None
