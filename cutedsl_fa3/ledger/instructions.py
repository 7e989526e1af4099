"""How many instructions a variant's functions are, counted as the compiler shares them.

A graph is evaluated at each score that a thread holds, on names instead of numbers: two evaluations
with the same name are one instruction. Integers are sums of positions and a number, so that k - q
has the same name wherever it has the same value; with it, a bias read by distance is loaded once
for both rows of a thread. Where several heads share a tile, rows of other heads have names of their
own for what depends on the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cutedsl_fa3.variant.distances import (
    COLUMN,
    ELEMENT,
    ROW,
    along_last,
    distances,
    evenly_indexed,
)
from cutedsl_fa3.variant.fusion import (
    capped,
    composed,
    lines,
    multiples,
    spoils_row,
    varies,
    with_known_signs,
)
from cutedsl_fa3.variant.graph import Graph, Node, Ref
from cutedsl_fa3.variant.limits import in_base_2
from cutedsl_fa3.variant.pairs import read_along_k
from cutedsl_fa3.variant.solve import Bound, solve
from cutedsl_fa3.variant.spans import in_spans

from .rates import (
    ADDED,
    ADDRESS,
    ALONE,
    BASE,
    BIT,
    BITS,
    CLAMPED,
    CLAMPED_PAIR,
    COARSE,
    DISTANCE,
    DIVISOR,
    END_OF_SPAN,
    FIRST_OF_PAIR,
    HALF,
    HALF_OF_WORD,
    HIDDEN,
    INSIDE,
    LIMITED,
    LOADED,
    LOADED_BEHIND,
    LOADED_DENSE,
    LOADED_PAIR,
    NARROWED,
    NEAR_ZERO,
    OPS,
    POSITION,
    SCALED,
    SHARED,
    WIDENED,
    Counts,
)

if TYPE_CHECKING:
    from cutedsl_fa3.pipelines import Schedule
    from cutedsl_fa3.plans import Plan
    from cutedsl_fa3.variant.linear import Linear

ROWS = (0, 8)  # of a thread, below its first one; source: layouts/wgmma.py
VARIES = ROW | COLUMN | ELEMENT
WORD, EIGHT = 32, 8  # bits of a row, and those that become predicates together but for the last
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
    """A score of a thread: row and column of its share, and how far it lies beyond the first.

    `head`: which of the thread's heads it is of.
    """

    row: int
    column: int
    ahead_q: int
    ahead_k: int
    head: int


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


def score_instructions(plan: Plan, masked: bool = False) -> Counter[str]:
    """What the score and the weight function of a variant add to a tile, for one warp.

    Elements that a mask may hide share no reciprocal with others, and what is read for them may lie
    outside its tensor.
    """
    tally = Tally()
    _scores(plan, tally, masked)
    return tally.counts


def mask_instructions(plan: Plan) -> Counter[str]:
    """What the element mask adds to a tile that needs it, for one warp."""
    tally = Tally()
    _scores(plan, tally, masked=True)
    before = Counter(tally.counts)
    _masked(plan, tally)
    tally.counts.subtract(before)
    return +tally.counts


def reads(graph: Graph | None) -> frozenset[int]:
    """The loads (node numbers) from captured tensors that differ within a tile."""
    nodes = graph.nodes if graph is not None else ()
    return frozenset(i for i, n in enumerate(nodes) if n.op == "load" and n.depends & VARIES)


def score_graph(plan: Plan) -> Graph | None:
    """The score and the weight function as one graph, as the kernel has it."""
    variant = plan.variant
    graph = composed(variant.score, variant.weight)
    if graph is None:
        return None
    return with_known_signs(in_base_2(graph) if plan.bounded else graph, variant.mask)


def _places(schedule: Schedule) -> Iterator[Place]:
    pack = schedule.pack
    for c, ahead_k in enumerate(columns(schedule.tile_n)):
        for r, ahead in enumerate(ROWS):
            yield Place(r, c, ahead // pack, ahead_k, ahead % pack)


def _scores(plan: Plan, tally: Tally, masked: bool) -> None:
    graph = score_graph(plan)
    if graph is None:
        return
    if plan.linear is not None and not masked:
        _grown(plan.schedule, plan.linear, tally)
        return
    reader = _Reader(graph, (Ref(graph.output),), plan, tally, of_score=True, masked=masked)
    for place in _places(plan.schedule):
        reader.names(place)


def _grown(schedule: Schedule, linear: Linear, tally: Tally) -> None:
    """An FMA a score but in the first column, and a base a row."""
    for place in _places(schedule):
        tally.once(("base", place.row), BASE)
        if place.ahead_k and not linear.is_level:
            tally.once(("grown", place), ADDED)


def _masked(plan: Plan, tally: Tally) -> None:
    mask = plan.variant.mask
    if in_spans(mask):
        _bits(plan, tally)
        return
    conditions = _conditions(mask) if mask else ()
    reader = mask and _Reader(mask, conditions, plan, tally)
    # Rows of one query share their conditions, so these are joined before the selection.
    selections = () if plan.schedule.pack > ROWS[-1] else conditions
    for place in _places(plan.schedule):
        key = _held(Sum(frozenset({("k", 1)}), place.ahead_k), tally)
        tally.once(("inside", key), INSIDE)
        tally.once(("hidden", place), HIDDEN)
        if reader:
            reader.names(place)
            for condition in selections:
                tally.once(("hidden", place, condition), HIDDEN)


def _bits(plan: Plan, tally: Tally) -> None:
    """The bits of each row, or of all rows if they see the same, and a selection an element."""
    mask = plan.variant.mask
    by_row = mask is not None and "q" in mask.inputs
    formula = solve(mask).possible
    # Each span has an end, that of the sequence if no other, and some have a begin.
    begins = sum(
        any(isinstance(one, Bound) and one.side == "low" and not one.of_row for one in literals)
        for literals in formula
    )
    weight = plan.variant.weight is not None
    scored = score_graph(plan) is not None and not weight
    halves = weight and plan.problem.dtype == "fp16"
    in_words = len(columns(plan.schedule.tile_n)) // WORD * WORD
    for place in _places(plan.schedule):
        row = place.ahead_q if by_row else None  # rows of several heads can be of one query
        shifted = halves and place.column < in_words
        selected = HALF_OF_WORD if shifted else HALF if halves else HIDDEN
        tally.once(("hidden", place), selected)
        if scored:
            tally.once(("bit", row, place.column), BIT)
        elif not shifted:
            tally.once(("bits", row, place.column // EIGHT), BITS)
        for end in range(len(formula) + begins):
            tally.once(("end", row, end), END_OF_SPAN)


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
    """Evaluates a graph on names, by the rules of `Lowering`; counts what each new name costs.

    `of_score`: the graph starts from the raw product; of a tile that is not `masked` neighbours in
    a row may share reciprocals, and what is read evenly lies in its tensors.
    """

    def __init__(
        self,
        graph: Graph,
        outputs: tuple[Ref, ...],
        plan: Plan,
        tally: Tally,
        of_score: bool = False,
        masked: bool = True,
    ) -> None:
        self.graph, self.outputs, self.tally = graph, outputs, tally
        self.captures, self.dense = plan.variant.captures, plan.dense
        self.paired = {i for i in read_along_k(graph) if graph.nodes[i].args[0] in plan.pairs}
        self.distances = distances(graph)
        self.multiples = multiples(graph) if of_score else frozenset()
        exponent = of_score and plan.variant.weight is None
        self.lines = lines(graph) if exponent else {}
        self.capped = capped(graph) if exponent else {}
        self.sharing = frozenset() if masked else spoils_row(graph)
        self.unclamped = frozenset() if masked else self._unclamped()
        self.coarse = exponent and plan.bounded
        self.uses: Counter[int] = Counter()
        for node in graph.nodes:
            self.uses.update(a.id for a in node.operands if isinstance(a, Ref))
        self.known: dict[int, Any] = {}

    def _unclamped(self) -> frozenset[int]:
        """Loads that grow evenly along a dense last dimension alone."""
        return frozenset(
            number
            for number, grows in evenly_indexed(self.graph).items()
            if along_last(grows) and self.graph.nodes[number].args[0] in self.dense
        )

    def names(self, place: Place) -> tuple[Any, ...]:
        """The names of the outputs at one score."""
        self.known = {}
        for number in self._order:
            self.known[number] = self._name(number, place)
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
        if self._uniform(node) or number in self.multiples:
            return ()
        if number in self.distances:
            return (Ref(self.distances[number].node),)
        if (function := self._function(number)) is not None:
            kind, argument = function
            is_multiple = isinstance(argument, Ref) and argument.id in self.multiples
            return (argument,) if kind == "tanh" or not is_multiple else ()
        if (added := self._added_to_multiple(node)) is not None:
            other = added[1]
            return () if self._line(other) is not None else (other,)
        if (fused := self._fused(node)) is not None:
            return fused
        return node.operands

    def _uniform(self, node: Node) -> bool:
        return node.depends.isdisjoint(VARIES)

    def _function(self, number: int) -> tuple[str, Any] | None:
        """(kind, argument) of a function that may share its reciprocal; None for other nodes."""
        node = self.graph.nodes[number]
        if number in self.capped:
            return "capped", self.capped[number].argument
        return (node.op, node.args[0]) if node.op in ("tanh", "sigmoid") else None

    def _added_to_multiple(self, node: Node) -> tuple[Ref, Any] | None:
        """(multiple of the score, what is added to it) of a sum of floats; None for others."""
        if node.op not in ("add", "sub") or node.dtype != "float":
            return None
        for mine, other in (node.args, node.args[::-1]):
            if isinstance(mine, Ref) and mine.id in self.multiples and mine != other:
                return mine, other
        return None

    def _fused(self, node: Node) -> tuple[Any, ...] | None:
        """Factors and addend of a sum of floats with a product that nothing else reads: one FMA."""
        if node.op not in ("add", "sub") or node.dtype != "float":
            return None
        for mine, other in (node.args, node.args[::-1]):
            if not isinstance(mine, Ref):
                continue
            of = self.graph.nodes[mine.id]
            alone = self.uses[mine.id] == 1 and not self._uniform(of)
            if of.op == "mul" and alone and mine.id not in self.capped:
                return *of.args, other
        return None

    def _line(self, value: Any) -> Any:
        return self.lines.get(value.id) if isinstance(value, Ref) else None

    def _value(self, value: Any) -> Any:
        """The name of an operand; integers are sums."""
        if isinstance(value, Ref):
            return self.known[value.id]
        whole = isinstance(value, int) and not isinstance(value, bool)
        return Sum(frozenset(), value) if whole else value

    def _name(self, number: int, place: Place) -> Any:
        node = self.graph.nodes[number]
        if self._uniform(node):
            head = place.head if "h" in node.depends else 0
            name = ("uniform", id(self.graph), number, head)
            return _named(name) if node.dtype == "int" else name
        if number in self.multiples:
            return self._multiple(number, place)
        if node.op == "input":
            ahead = place.ahead_q if node.args[0] == "q" else place.ahead_k
            return Sum(frozenset({(node.args[0], 1)}), ahead)
        if node.op == "load":
            return self._load(number, node, place)
        if number in self.distances:
            moved = self._value(Ref(self.distances[number].node))
            return self.tally.once(("float", moved), DISTANCE)
        if (function := self._function(number)) is not None:
            return self._of_one(number, *function, place)
        if (added := self._added_to_multiple(node)) is not None:
            return self._sum_with_multiple(number, *added, place)
        if (fused := self._fused(node)) is not None:
            return self.tally.once((node.op, "fma", *map(self._value, fused)), ADDED)
        parts = [self._value(a) for a in node.operands]
        if node.dtype == "int" and (found := _sum(node.op, parts)) is not None:
            return found
        return self._operation(node, parts, place)

    def _multiple(self, number: int, place: Place, factor: str = "") -> Any:
        """The raw product times a factor, with an offset if there is one: one instruction."""
        name = ("multiple", number, factor, place)
        return self.tally.once(name, ADDED if self._has_offset(number) else SCALED)

    def _has_offset(self, number: int) -> bool:
        node = self.graph.nodes[number]
        if node.op == "input":
            return False
        moving = next(a for a in node.args if varies(self.graph, a))
        return node.op in ("add", "sub") or self._has_offset(moving.id)

    def _sum_with_multiple(self, number: int, multiple: Ref, other: Any, place: Place) -> Any:
        """An FMA of the raw product, with what is added to it."""
        line, tally = self._line(other), self.tally
        if line is not None:
            step = line.steps.ahead(place.ahead_q, place.ahead_k)
            cost = ADDED if line.factors else DISTANCE
            head = place.head if self._by_head(other) else 0
            tally.once(("line", other.id, step, head), cost if step else {})
        if self._has_offset(multiple.id):
            tally.once(("offset", number, place), OPS["add", "float"])
        return tally.once(("fma", number, place), ADDED)

    def _of_one(self, number: int, kind: str, argument: Any, place: Place) -> Any:
        """A function of one value, from a power of 2 of a multiple of its argument."""
        coarse = kind == "capped" and self.coarse
        if isinstance(argument, Ref) and argument.id in self.multiples:
            self._multiple(argument.id, place, kind)
        elif not coarse:
            self.tally.once(("exponent", number, place), SCALED)
        if coarse:
            return self.tally.once((kind, number, place), COARSE)
        if kind == "tanh":
            self.tally.once(("near", number, place), NEAR_ZERO)
        costs = SHARED if number in self.sharing else ALONE
        return self.tally.once((kind, number, place), costs[kind])

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
        limited = op in ("minimum", "maximum") and any(type(a) is float for a in node.args)
        self.tally.once(name, LIMITED if limited else OPS[op, kind])
        return _named(name) if node.dtype == "int" else name

    def _kind(self, node: Node) -> str:
        """The type that an operation works on: that of its last operand."""
        last = node.operands[-1]
        if isinstance(last, Ref):
            return self.graph.nodes[last.id].dtype
        return type(last).__name__

    def _load(self, number: int, node: Node, place: Place) -> Any:
        if number in self.unclamped:
            return self._load_behind(number, node, place)
        capture, tally = node.args[0], self.tally
        paired = number in self.paired
        ahead = place.column % 2 if paired else 0
        indices: list[Any] = []
        for n, index in enumerate(node.operands):
            name = self._value(index)
            if isinstance(index, Ref) and not self._uniform(self.graph.nodes[index.id]):
                along_k = paired and n == len(node.operands) - 1
                name = Sum(name.terms, name.number - ahead) if along_k else name
                name = tally.once(
                    ("clamped", n, capture, name), CLAMPED_PAIR if along_k else CLAMPED
                )
            indices.append(name)
        address = ("load", capture, *indices)
        dense = LOADED_DENSE if capture in self.dense else LOADED
        tally.once(address, LOADED_PAIR if paired else dense)
        if paired:
            is_float = node.dtype == "float"
            tally.once(("first", *address), FIRST_OF_PAIR if is_float else {"SEL": 1})
        return self._typed(node, (*address, ahead))

    def _load_behind(self, number: int, node: Node, place: Place) -> Any:
        """What is read evenly, inside its tensor: at numbers behind one address of the tile."""
        element = ("load", node.args[0], *map(self._value, node.operands))
        head = place.head if any(self._by_head(index) for index in node.operands) else 0
        self.tally.once(("address", number, head), ADDRESS)
        self.tally.once(element, LOADED_BEHIND)
        return self._typed(node, element)

    def _by_head(self, value: Any) -> bool:
        return isinstance(value, Ref) and "h" in self.graph.nodes[value.id].depends

    def _typed(self, node: Node, element: tuple) -> Any:
        """An element of a captured tensor as the graph has it."""
        dtype = self.captures[node.args[0]].dtype
        if dtype in (torch.bfloat16, torch.float16):
            self.tally.once(("widened", element), WIDENED)
        elif dtype is torch.int64:
            self.tally.once(("narrowed", element), NARROWED)
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
