"""Turns a mask into unions of key ranges whose ends are functions of the query, without values.

The mask is brought into disjunctive form: a list of conjunctions, each a set of literals that can
be solved. Bounds on k lie relative to an *anchor*, a function of q alone (nothing, q itself, or
such as `(q // 64) * 64`), so that `k <= q + c` bounds k - q, and bounds on one anchor can be
compared before any tile is known. What cannot be solved is left out: sets may only become larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Literal as Words

from .graph import Graph, Node, Ref
from .ops import OPS

MOST_CONJUNCTIONS = 32
LARGEST = 1 << 29  # beyond every position, and small enough that a few of them add up in 32 bits
# Products are held within it (keys.py): a bound with a larger factor could come to lie elsewhere at
# positions from 2^20 on, so it is left out; one with a factor up to `EXACT` is right up to 2^25.
MOST, EXACT, TERMS = 512, 16, 3

Side = Words["low", "high"]


@dataclass(frozen=True)
class Linear:
    """A sum of integer nodes times numbers, plus a number."""

    terms: tuple[tuple[int, int], ...] = ()  # (node id, factor), by id, no factor 0
    const: int = 0

    def __add__(self, other: Linear) -> Linear:
        total = dict(self.terms)
        for term, factor in other.terms:
            total[term] = total.get(term, 0) + factor
        return _linear(total, self.const + other.const)

    def __mul__(self, factor: int) -> Linear:
        return _linear({t: f * factor for t, f in self.terms}, self.const * factor)

    def __sub__(self, other: Linear) -> Linear:
        return self + other * -1

    def plus(self, number: int) -> Linear:
        return Linear(self.terms, self.const + number)


def _linear(terms: dict[int, int], const: int) -> Linear:
    return Linear(tuple(sorted((t, f) for t, f in terms.items() if f)), const)


@dataclass(frozen=True)
class Bound:
    """k (or q, if `of_row`) is at least, or less than, anchor + offset.

    The anchor is a sum of functions of q, divided (rounding down) by `divisor`; the offset is the
    same for the whole tile.
    """

    side: Side
    anchor: Linear
    divisor: int
    offset: Linear
    of_row: bool = False

    def implies(self, other: Literal) -> bool:
        """Whether this bound is known to be as tight as the other for every query."""
        distance = self.distance(other)
        if distance is None or not isinstance(other, Bound) or self.side != other.side:
            return False
        return distance >= 0 if self.side == "low" else distance <= 0

    def distance(self, other: Literal) -> int | None:
        """This offset minus the other's, where that is a number."""
        if not isinstance(other, Bound) or (self.anchor, self.divisor, self.of_row) != (
            other.anchor,
            other.divisor,
            other.of_row,
        ):
            return None
        difference = self.offset - other.offset
        return None if difference.terms else difference.const


@dataclass(frozen=True)
class Holds:
    """A sum of functions of q is at most 0 for some query of the tile."""

    value: Linear

    def implies(self, other: Literal) -> bool:
        return self == other


@dataclass(frozen=True)
class Flag:
    """A bool that is the same for the whole tile has this value."""

    node: int
    expected: bool

    def implies(self, other: Literal) -> bool:
        return self == other


Literal = Bound | Holds | Flag
Conjunction = frozenset[Literal]
Formula = tuple[Conjunction, ...]  # any of these holds

TRUE: Formula = (frozenset(),)
FALSE: Formula = ()


@dataclass(frozen=True)
class Solution:
    """Which keys some row may see, and which keys some row may not see.

    `exact`: nothing was left out of `possible`, so that for one query it is what the mask shows.
    """

    possible: Formula
    hidden: Formula
    exact: bool


@lru_cache(maxsize=256)
def solve(mask: Graph | None) -> Solution:
    """The mask and its negation in solved form; `None` shows every key."""
    if mask is None:
        return Solution(TRUE, FALSE, True)
    solver = _Solver(mask)
    possible, exact = solver.formula(mask.output, True), solver.exact
    return Solution(possible, solver.formula(mask.output, False), exact)


class _Solver:
    """`exact` until something is left out."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.exact = True
        self._formulas: dict[tuple[int, bool], Formula] = {}
        self._sums: dict[int, Linear] = {}

    def formula(self, number: int | bool, positive: bool) -> Formula:
        """A condition, or its negation, in disjunctive form."""
        if isinstance(number, bool):
            return TRUE if number == positive else FALSE
        if (number, positive) not in self._formulas:
            self._formulas[number, positive] = self._solved(number, positive)
        return self._formulas[number, positive]

    def _solved(self, number: int, positive: bool) -> Formula:
        node = self.nodes[number]
        if node.op == "const":
            return TRUE if node.args[0] == positive else FALSE
        args = [a.id if isinstance(a, Ref) else a for a in node.operands]
        match node.op:
            case "not":
                return self.formula(args[0], not positive)
            case "and" | "or":
                join = self.both if (node.op == "and") == positive else self.either
                return join(self.formula(args[0], positive), self.formula(args[1], positive))
            case "xor":
                return self.choice(args[0], (args[1], not positive), (args[1], positive))
            case "where":
                return self.choice(args[0], (args[1], positive), (args[2], positive))
            case "lt" | "le" | "gt" | "ge" | "eq" | "ne" if self.is_integer(node):
                return self.comparison(node, positive)
        if _uniform(node) and self.computable(number):
            return (frozenset({Flag(number, positive)}),)
        return self.left_out()

    def left_out(self) -> Formula:
        """What covers whatever cannot be solved."""
        self.exact = False
        return TRUE

    def either(self, a: Formula, b: Formula) -> Formula:
        """The disjunction; everything where it grows too long."""
        found = _simplest((*a, *b))
        return found if len(found) <= MOST_CONJUNCTIONS else self.left_out()

    def both(self, a: Formula, b: Formula) -> Formula:
        """The conjunction; where it grows too long, one side alone, which covers more."""
        if len(a) * len(b) <= MOST_CONJUNCTIONS**2:
            found = _simplest(_tightened(x | y) for x, y in itertools.product(a, b))
            if len(found) <= MOST_CONJUNCTIONS:
                return found
        self.exact = False
        return min(a, b, key=len)

    def choice(self, condition: int, if_true: tuple, if_false: tuple) -> Formula:
        return self.either(
            self.both(self.formula(condition, True), self.formula(*if_true)),
            self.both(self.formula(condition, False), self.formula(*if_false)),
        )

    def is_integer(self, node: Node) -> bool:
        return all(
            self.nodes[a.id].dtype == "int" if isinstance(a, Ref) else isinstance(a, int)
            for a in node.args
        )

    def comparison(self, node: Node, positive: bool) -> Formula:
        difference = self.linear(node.args[0]) - self.linear(node.args[1])
        op = node.op
        if not positive:
            op = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}[op]
        match op:
            case "lt":
                return self.at_most_zero(difference.plus(1))
            case "le":
                return self.at_most_zero(difference)
            case "gt":
                return self.at_most_zero((difference * -1).plus(1))
            case "ge":
                return self.at_most_zero(difference * -1)
            case "eq":
                return self.both(self.at_most_zero(difference), self.at_most_zero(difference * -1))
        less, more = difference.plus(1), (difference * -1).plus(1)
        return self.either(self.at_most_zero(less), self.at_most_zero(more))

    def linear(self, value: Ref | int) -> Linear:
        """An integer value as a sum; operations that are not sums are terms of their own."""
        if not isinstance(value, Ref):
            return Linear((), int(value))
        if value.id not in self._sums:
            self._sums[value.id] = self._summed(value)
        return self._sums[value.id]

    def _summed(self, value: Ref) -> Linear:
        node = self.nodes[value.id]
        match node.op:
            case "add":
                return self.linear(node.args[0]) + self.linear(node.args[1])
            case "sub":
                return self.linear(node.args[0]) - self.linear(node.args[1])
            case "neg":
                return self.linear(node.args[0]) * -1
            case "mul" | "shl":
                a, b = self.linear(node.args[0]), self.linear(node.args[1])
                if not b.terms:
                    return a * (b.const if node.op == "mul" else 1 << b.const)
                if not a.terms and node.op == "mul":
                    return b * a.const
        return Linear(((value.id, 1),))

    def at_most_zero(self, value: Linear) -> Formula:
        """`value <= 0`, solved for k, else for q, else left as a question about the tile."""
        divisor = gcd(*(factor for _, factor in value.terms))
        if divisor == 0:
            return TRUE if value.const <= 0 else FALSE
        value = Linear(tuple((t, f // divisor) for t, f in value.terms), -(-value.const // divisor))
        for variable in ("k", "q"):
            terms = [t for t, _ in value.terms if variable in self.nodes[t].depends]
            if len(terms) == 1:
                solved = self.isolated(value, terms[0], variable)
                if solved is not None:
                    return solved
            if terms and variable == "k":
                return self.left_out()
        if all(self.computable(t) for t, _ in value.terms) and self.within(value):
            return (frozenset({Holds(value)}),)
        return self.left_out()

    def within(self, value: Linear) -> bool:
        """Whether a sum is what it says in spite of the limits of its products; see `MOST`."""
        factors = [_growth(self.nodes[number], abs(factor)) for number, factor in value.terms]
        largest = max(factors, default=1)
        few = len(value.terms) <= TERMS and abs(value.const) <= LARGEST // 2
        self.exact = self.exact and few and largest <= EXACT
        return largest <= MOST

    def isolated(self, value: Linear, term: int, variable: str) -> Formula | None:
        """`value <= 0` as a condition on its one term with the variable; None if unsolved."""
        factor = dict(value.terms)[term]
        rest = value - Linear(((term, factor),))
        side: Side = "high" if factor > 0 else "low"
        if self.nodes[term].op == "input":
            return self.bound(side, rest * (-1 if factor > 0 else 1), abs(factor), variable)
        if abs(factor) != 1:
            return None
        return self.unwrapped(self.nodes[term], side, rest * -factor)

    def bound(self, side: Side, limit: Linear, divisor: int, variable: str) -> Formula:
        """`variable <= limit / divisor` or `variable >= limit / divisor`."""
        limit = limit.plus(divisor if side == "high" else divisor - 1)
        if not all(self.computable(t) for t, _ in limit.terms) or not self.within(limit):
            return self.left_out()
        if divisor != 1 and abs(limit.const) > LARGEST:
            return self.left_out()
        anchor = Linear(tuple((t, f) for t, f in limit.terms if not _uniform(self.nodes[t])))
        if divisor != 1:
            found = Bound(side, limit, divisor, Linear(), variable == "q")
        else:
            found = Bound(side, anchor, 1, limit - anchor, variable == "q")
        return (frozenset({found}),)

    def unwrapped(self, node: Node, side: Side, limit: Linear) -> Formula | None:
        """`node <= limit` or `node >= limit` by what the node computes; None if unsolved."""
        high = side == "high"

        def beyond(value: Linear, at_most: bool) -> Formula:
            return self.at_most_zero(value - limit if at_most else limit - value)

        match node.op:
            case "floordiv" | "shr" if _literal_above(node, 0 if node.op == "floordiv" else -1):
                divisor = node.args[1] if node.op == "floordiv" else 1 << node.args[1]
                inner = self.linear(node.args[0])
                scaled = limit * divisor
                if high:
                    return self.at_most_zero(inner - scaled.plus(divisor - 1))
                return self.at_most_zero(scaled - inner)
            case "abs":
                inner = self.linear(node.args[0])
                join = self.both if high else self.either
                return join(beyond(inner, high), beyond(inner * -1, high))
            case "minimum" | "maximum":
                join = self.either if (node.op == "minimum") == high else self.both
                return join(*(beyond(self.linear(a), high) for a in node.args))
            case "where":
                condition = node.args[0].id if isinstance(node.args[0], Ref) else node.args[0]
                a, b = (beyond(self.linear(value), high) for value in node.args[1:])
                return self.either(
                    self.both(self.formula(condition, True), a),
                    self.both(self.formula(condition, False), b),
                )
            case "to_int" if self.nodes[node.args[0].id].dtype == "bool":
                condition = node.args[0].id
                one, zero = beyond(Linear((), 1), high), beyond(Linear(), high)
                return self.either(
                    self.both(self.formula(condition, True), one),
                    self.both(self.formula(condition, False), zero),
                )
        return None

    def computable(self, number: int) -> bool:
        """Whether the key arithmetic can compute this node, or its range over the tile's rows."""
        node = self.nodes[number]
        if node.op == "input":
            return node.args[0] != "score"
        if node.op == "load":
            known = _uniform(node) and node.dtype != "float"
        elif node.op in ("floordiv", "mod"):
            known = _literal_above(node, 0)
        elif node.op in ("shl", "shr"):
            known = _literal_above(node, -1)
        elif node.op == "mul":
            known = _uniform(node) or not all(isinstance(a, Ref) for a in node.args)
        else:
            known = OPS[node.op].interval is not None
        return (
            known
            and (node.dtype == "int" or node.op == "load")
            and all(self.computable(a.id) for a in node.operands if isinstance(a, Ref))
        )


def _uniform(node: Node) -> bool:
    return node.depends.isdisjoint({"q", "k", "score"})


def rounds_down(node: Node, factor: int) -> bool:
    """Whether a node times a factor is its operand rounded down, and so no larger."""
    return node.op == "floordiv" and node.args[1] == factor


def _growth(node: Node, factor: int) -> int:
    """How many times larger than a position a node times a factor may be; 1 where it has limits."""
    if node.op == "floordiv" and _literal_above(node, 0):
        return -(-factor // node.args[1])
    if node.op == "mod" and _literal_above(node, 0) and factor * node.args[1] <= LARGEST // 2:
        return 1
    return factor


def _literal_above(node: Node, least: int) -> bool:
    return isinstance(node.args[1], int) and node.args[1] > least


def _tightened(literals: Conjunction) -> Conjunction | None:
    """Without literals that others imply; None if two contradict each other."""
    kept = dict.fromkeys(literals)
    for literal in literals:
        if any(o != literal and o in kept and o.implies(literal) for o in literals):
            del kept[literal]
    for a, b in itertools.product(kept, kept):
        if isinstance(a, Bound) and isinstance(b, Bound) and (a.side, b.side) == ("low", "high"):
            distance = a.distance(b)
            if distance is not None and distance >= 0:
                return None
        if isinstance(a, Flag) and Flag(a.node, not a.expected) in kept:
            return None
    return frozenset(kept)


def _simplest(conjunctions: Iterable[Conjunction | None]) -> Formula:
    """Without conjunctions that are contained in another."""
    kept: list[Conjunction] = []
    for new in conjunctions:
        if new is None or any(_contains(old, new) for old in kept):
            continue
        kept = [old for old in kept if not _contains(new, old)] + [new]
    return tuple(kept)


def _contains(large: Conjunction, small: Conjunction) -> bool:
    return all(any(s.implies(literal) for s in small) for literal in large)
