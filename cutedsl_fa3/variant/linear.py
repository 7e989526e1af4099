"""Scores that grow evenly with the key: score + slope * k + what all keys of a row have in common.

    form                                   slope                 the rest
    s + slopes[h] * (k - q)                slopes[h]             slopes[h] * (k - q)
    s - slopes[h] * (q + c - k) + t[h]     -slopes[h] * -1       t[h] - slopes[h] * (q + c - k)
    s + t[h]                               0                     t[h]
    s + t[q], s * t[h] + k, s + k * k      (not linear: what is added must be uniform factors of
                                            integers in q and k, and the score must stand alone)

So a kernel can work on the raw product: within a tile a score differs from it by slope * k, one FMA
with a number, and the rest is one value a row and tile (kernels/sm90/units.py). Everything added
comes in `units`, an input of these graphs besides those of the variant: how many units of the
product a natural score of 1 is. `most`, natural, limits the rest for positions in the sequences; it
is NaN or infinite where a factor is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .distances import COLUMN, ELEMENT, ROW
from .graph import Builder, Graph, Ref, Value
from .normalise import normalise

UNITS = "units"
VARIES = ROW | COLUMN | ELEMENT


class Linear(NamedTuple):
    """A score function apart: its value is score + `rest`, which grows by `slope` with each key.

    Units: the score as given, the others times `units`, `most` natural.
    """

    whole: Graph  # score + rest
    slope: Graph
    rest: Graph
    most: Graph

    @property
    def is_level(self) -> bool:
        """Whether the score does not depend on the key."""
        return self.slope.result.op == "const"


class _Part(NamedTuple):
    """A float of the graph: score (if `scored`) + rest, as values of the builder.

    `slope` is what it grows by with each key, 0.0 for nothing; `rest` None is none.
    """

    scored: bool
    slope: Value
    rest: Value | None
    most: Value


class _Whole(NamedTuple):
    """An integer that grows by the number `slope` with each key, no further from 0 than `most`."""

    slope: int
    most: Value


@lru_cache(maxsize=256)
def linear(graph: Graph) -> Linear | None:
    """A score function apart, None if it is no linear one."""
    reader = _Reader(graph)
    found = reader.part(Ref(graph.output))
    if found is None or not found.scored or found.rest is None:
        return None
    b, captures = reader.builder, [*range(max(graph.captures, default=-1) + 1)]
    units = b.append("input", (UNITS,), "float")
    rest = b.emit("mul", found.rest, units)
    level = found.slope == 0.0
    slope = b.const(0.0) if level else b.emit("mul", found.slope, units)
    whole = b.emit("add", b.input("score"), rest)
    most = found.most if isinstance(found.most, Ref) else b.const(found.most)
    made = (whole, slope, rest, most)
    return Linear(*(normalise(Graph(tuple(b.nodes), one.id), list(captures)) for one in made))


class _Reader:
    """Reads a graph's nodes as parts, and writes these with a builder."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.builder = graph, Builder()
        self.copies: dict[int, Ref] = {}

    def copy(self, value: Value) -> Value:
        """A value as the builder has it."""
        if not isinstance(value, Ref):
            return value
        if value.id not in self.copies:
            node = self.graph.nodes[value.id]
            args = tuple(self.copy(a) if isinstance(a, Ref) else a for a in node.args)
            self.copies[value.id] = self.builder.append(node.op, args, node.dtype)
        return self.copies[value.id]

    def is_uniform(self, value: Value) -> bool:
        """Whether a value is the same in the whole tile."""
        return not isinstance(value, Ref) or VARIES.isdisjoint(self.graph.nodes[value.id].depends)

    def size(self, value: Value) -> Value:
        """The magnitude of a uniform value, as a float."""
        as_float = self.builder.convert(self.copy(value), "float")
        return self.builder.emit("abs", as_float) if isinstance(as_float, Ref) else abs(as_float)

    def part(self, value: Value) -> _Part | None:
        """A float as a part; None if it is none."""
        if self.is_uniform(value):
            return _Part(False, 0.0, self.copy(value), self.size(value))
        node = self.graph.nodes[value.id]
        if node.op == "input" and node.args == ("score",):
            return _Part(True, 0.0, None, 0.0)
        if node.op == "to_float":
            whole = self.whole(node.args[0])
            return whole and _Part(False, float(whole.slope), self.copy(value), whole.most)
        if node.op == "neg":
            return self.difference(_Part(False, 0.0, None, 0.0), self.part(node.args[0]))
        if node.op in ("add", "sub"):
            a, b = map(self.part, node.args)
            return self.sum(a, b) if node.op == "add" else self.difference(a, b)
        if node.op in ("mul", "div"):
            return self.multiple(node.op, *node.args)
        return None

    def sum(self, a: _Part | None, b: _Part | None) -> _Part | None:
        if a is None or b is None or (a.scored and b.scored):
            return None
        parts = (_added(self.builder, x, y) for x, y in zip(a[1:], b[1:], strict=True))
        return _Part(a.scored or b.scored, *parts)

    def difference(self, a: _Part | None, b: _Part | None) -> _Part | None:
        if b is None or b.scored:
            return None
        slope, rest = (_negated(self.builder, value) for value in b[1:3])
        return self.sum(a, _Part(False, slope, rest, b.most))

    def multiple(self, op: str, a: Value, b: Value) -> _Part | None:
        if op == "mul" and self.is_uniform(a):
            a, b = b, a
        of = self.part(a) if self.is_uniform(b) else None
        if of is None or of.scored:
            return None
        factor = self.copy(b)
        slope = 0.0 if of.slope == 0.0 else self.builder.emit(op, of.slope, factor)
        rest = self.builder.emit(op, of.rest, factor)
        return _Part(False, slope, rest, self.builder.emit(op, of.most, self.size(b)))

    def whole(self, value: Value) -> _Whole | None:
        """An integer that grows evenly with query and key; None if it is none."""
        if self.is_uniform(value):
            return _Whole(0, self.size(value))
        node, b = self.graph.nodes[value.id], self.builder
        if node.op == "input":
            return _Whole(
                int(node.args == ("k",)), b.convert(b.input(f"seqlen_{node.args[0]}"), "float")
            )
        parts = [self.whole(a) for a in node.operands]
        if node.op not in ("add", "sub", "neg", "mul") or None in parts:
            return None
        if node.op == "neg":
            return _Whole(-parts[0].slope, parts[0].most)
        if node.op == "mul":
            numbers = [a for a in node.args if not isinstance(a, Ref)]
            if not numbers:
                return None
            moving = next(p for p, a in zip(parts, node.args, strict=True) if isinstance(a, Ref))
            return _Whole(
                moving.slope * numbers[0], b.emit("mul", moving.most, float(abs(numbers[0])))
            )
        sign = 1 if node.op == "add" else -1
        return _Whole(
            parts[0].slope + sign * parts[1].slope, _added(b, parts[0].most, parts[1].most)
        )


def _added(builder: Builder, a: Value | None, b: Value | None) -> Value | None:
    """A sum of floats, where None and 0.0 are nothing."""
    if a is None or a == 0.0:
        return b
    if b is None or b == 0.0:
        return a
    return builder.emit("add", a, b) if isinstance(a, Ref) or isinstance(b, Ref) else a + b


def _negated(builder: Builder, value: Value | None) -> Value | None:
    if value is None or not isinstance(value, Ref):
        return None if value is None else -value
    return builder.emit("neg", value)
