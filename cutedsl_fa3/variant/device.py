"""The device reader of a graph: values of its nodes as CuTe scalars, at trace time.

`Lowering` evaluates a graph at the positions that a thread holds and computes nothing twice: what
depends on neither query nor key is computed once per work tile, what depends on one of them once
per row or column of the fragment, what depends on their distance once for each distance. What
`fusion.py` found in the graph is computed in fewer instructions here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from . import lower, shared
from .distances import COLUMN, ELEMENT, ROW, Steps, along_last, distances, evenly_indexed
from .fusion import Capped, capped, lines, multiples, spoils_row, varies
from .graph import Graph, Node, Ref, Value
from .lower import (
    LOG2_E,
    LOWER,
    absolute,
    constant,
    divide,
    fma,
    has_reciprocal,
    load,
    load_pair,
    maximum,
    minimum,
)
from .pairs import offset_from_k, read_along_k

FAR_APART = 2**24  # keys; over fewer, indices that grow along the last stay Int32 on their way


class Lowering:
    """One graph over the captured tensors of its variant, ready to be evaluated at positions.

    `uniform` holds the inputs that are one value for the whole work tile (b, h, the lengths). What
    follows from them alone is computed here, so create it where the work tile begins. `pairs` are
    the captured tensors that can be read two keys at a time (see pairs.py). `exponent` says that
    the result is a score of an online softmax, so that its absolute error counts, and `coarse` that
    errors of 1.2e-5 of a cap do no harm. Of `uniform`, `by_row` differ from row to row of a tile:
    warps must agree on whether `inside` holds, so that no read that hangs on these is left
    unclamped.
    """

    def __init__(
        self,
        graph: Graph,
        captures: tuple[cute.Tensor, ...],
        uniform: Mapping[str, Int32],
        pairs: frozenset[int] = frozenset(),
        exponent: bool = False,
        coarse: bool = False,
        by_row: frozenset[str] = frozenset(),
    ) -> None:
        self.graph = graph
        self.captures = captures
        self.paired = {i for i in read_along_k(graph) if graph.nodes[i].args[0] in pairs}
        self.distances, self.evenly_indexed = distances(graph), evenly_indexed(graph)
        self.multiples, self.lines = multiples(graph), lines(graph) if exponent else {}
        self.capped, self.coarse = capped(graph) if exponent else {}, coarse
        self.unclamped = {
            number: grows[-1]
            for number, grows in self.evenly_indexed.items()
            if along_last(grows)
            and _is_dense(captures[graph.nodes[number].args[0]])
            and by_row.isdisjoint(_last_index(graph, number).depends)
        }
        self.functions = functions_of_one(graph, self.capped)
        self.uniform: dict[int, Any] = {}
        self.everywhere = uniform
        everywhere = Element(self, uniform, 0, 0, {}, False)
        for number, node in enumerate(graph.nodes):
            if node.depends <= frozenset(uniform):
                self.uniform[number] = everywhere.compute(number)

    def at(
        self,
        positions: Mapping[str, Any],
        row: int,
        column: int,
        memo: dict,
        in_pairs: bool = False,
    ) -> Any:
        """The result at one element, whose `positions` give score, q and k, or o, lse and q.

        `row` and `column` name the element among those sharing `memo`: values that depend on one of
        q and k only are found there. `in_pairs` says that each even column has an even k, and the
        next column the next. `positions` may hold "origin", as (first q, first k, q's and k's
        distance from them as Python ints): then distances become floats by one addition each, and
        elements at equal distances are read once. They may hold "product", two factors of the
        score, the second the same for all of the tile: then what is added to the score, or
        multiplies it, is worked into an FMA. They may hold "inside", that `inside` holds for the
        tile: then nothing is clamped.
        """
        return Element(self, positions, row, column, memo, in_pairs).value(self.graph.output)

    def read(self, positions: Mapping[str, Any], row: int, column: int, memo: dict) -> None:
        """Read what `at` will need for an element from memory, where its neighbours share it."""
        for number in self.evenly_indexed:
            Element(self, positions, row, column, memo, False).value(number)

    def inside(self, first: tuple[Int32, Int32], queries: int, keys: Int32) -> Boolean | bool:
        """Whether what is read evenly lies in its tensors for all of these queries and keys.

        True where that is not asked of any; `first` are the first query and key.
        """
        found: Boolean | bool = True
        at = {"q": first[0], "k": first[1], **self.everywhere}
        for number, (of_q, of_k) in self.unclamped.items():
            node = self.graph.nodes[number]
            begin = Element(self, at, 0, 0, {}, False).operand(node.operands[-1])
            spread = keys - 1
            ends = of_q * (queries - 1), spread * of_k
            least = minimum(Int32(ends[0]), Int32(0)) + minimum(Int32(ends[1]), Int32(0))
            most = maximum(Int32(ends[0]), Int32(0)) + maximum(Int32(ends[1]), Int32(0))
            size = self.captures[node.args[0]].shape[-1]
            here = (begin >= 0) & (begin < size) & (spread < FAR_APART)
            found = found & here & (least >= -begin) & (most < size - begin)
        return found

    def together(
        self,
        elements: Sequence[tuple[Mapping[str, Any], int, int]],
        memo: dict,
        in_pairs: bool = False,
    ) -> list[Any]:
        """The results at neighbours in one row, each given as to `at`.

        Functions whose NaN spoils all of the row anyway share their reciprocals.
        """
        there = [Element(self, *element, memo, in_pairs) for element in elements]
        for number in sorted(self.functions & spoils_row(self.graph)) if len(there) > 1 else ():
            if not varies(self.graph, Ref(number)):
                continue
            most = shared.MOST["sigmoid" if self.graph.nodes[number].op == "sigmoid" else "tanh"]
            for first in range(0, len(there), most):
                few = there[first : first + most]
                for element, found in zip(few, self.function(number, few), strict=True):
                    memo[element.key(number)] = found
        return [element.value(self.graph.output) for element in there]

    def function(self, number: int, elements: Sequence[Element]) -> list[Float32]:
        """One of the functions of one value that may share a reciprocal, at several elements."""
        node, cap = self.graph.nodes[number], self.capped.get(number)
        argument = cap.argument if cap else node.args[0]
        if cap and self.coarse:
            given = [element.times(argument, 1.0) for element in elements]
            return [lower.tanh_of_the_unit(a) * cap.cap for a in given]
        factor = LOG2_E if node.op == "sigmoid" else 2.0 * LOG2_E
        exponents = [element.times(argument, factor) for element in elements]
        if cap:
            return shared.steps(exponents, -cap.cap, cap.cap, lower.UNIT)
        if node.op == "sigmoid":
            return shared.sigmoids(exponents, lower.UNIT)
        return lower.tanhs([element.operand(argument) for element in elements], exponents)


class Element:
    """The values of a graph's nodes at one element of a tile; `Lowering.at` says of what."""

    def __init__(
        self,
        lowering: Lowering,
        positions: Mapping[str, Any],
        row: int,
        column: int,
        memo: dict,
        in_pairs: bool,
    ) -> None:
        self.of, self.nodes = lowering, lowering.graph.nodes
        self.positions, self.memo, self.in_pairs = positions, memo, in_pairs
        self.row, self.column = row, column

    def key(self, number: int) -> tuple:
        """By what a node's value is remembered among the elements of a tile."""
        depends = self.nodes[number].depends
        row = None if depends.isdisjoint(ROW | ELEMENT) else self.row
        column = None if depends.isdisjoint(COLUMN | ELEMENT) else self.column
        return number, row, column

    def value(self, number: int) -> Any:
        """A node's value, computed at most once."""
        if number in self.of.uniform:
            return self.of.uniform[number]
        key = self.key(number)
        if key not in self.memo:
            if self.in_pairs and number in self.of.paired:
                first = self.column - self.column % 2
                for ahead, element in enumerate(self.pair(number)):
                    self.memo[(*key[:2], first + ahead)] = element
            else:
                self.memo[key] = self.compute(number)
        return self.memo[key]

    def operand(self, value: Value) -> Any:
        """A node's value, or a number as a scalar."""
        return self.value(value.id) if isinstance(value, Ref) else constant(value)

    def compute(self, number: int) -> Any:
        """A node's value from those of its operands."""
        node = self.nodes[number]
        if "origin" in self.positions:
            if number in self.of.distances:
                return self.distance(self.of.distances[number])
            if number in self.of.evenly_indexed:
                return self.read_evenly(number)
        if node.op == "input":
            return self.positions[node.args[0]]
        if node.op == "const":
            return lower.KINDS[node.dtype](node.args[0])
        if "product" in self.positions and (found := self.with_product(number)) is not None:
            return found
        if number in self.of.functions:
            return self.of.function(number, [self])[0]
        if node.op == "div" and isinstance(node.args[1], float) and has_reciprocal(node.args[1]):
            return self.operand(node.args[0]) * (1.0 / node.args[1])
        operands = [self.operand(a) for a in node.operands]
        if node.op == "load":
            return load(self.of.captures[node.args[0]], operands, node.dtype)
        return LOWER[node.op](*operands)

    # What is made of the raw product.

    def with_product(self, number: int) -> Float32 | None:
        """A multiple of the score, or one to which something is added, as an FMA of the product."""
        node = self.nodes[number]
        if (found := self.multiple(number)) is not None:
            return _line(self.positions["product"][0], *found)
        if node.op not in ("add", "sub") or node.dtype != "float":
            return None
        for at, moving in enumerate(node.args):
            other = node.args[1 - at]
            if not isinstance(moving, Ref) or moving == other:
                continue
            if (found := self.multiple(moving.id)) is None:
                continue
            factor, offset = found
            rest = self.term(other)
            if node.op == "sub":
                (factor, offset), rest = (
                    ((factor, offset), -rest) if at == 0 else (_negated(found), rest)
                )
            rest = rest if offset is None else rest + offset
            return fma(self.positions["product"][0], factor, rest)
        return None

    def multiple(self, number: int) -> tuple[Any, Any] | None:
        """(factor, offset) if a node is raw product * factor + offset, both the same in the tile.

        An offset of None is none.
        """
        if number not in self.of.multiples or "product" not in self.positions:
            return None
        key = ("multiple", number)
        if key not in self.memo:
            self.memo[key] = self._multiple(self.nodes[number])
        return self.memo[key]

    def _multiple(self, node: Node) -> tuple[Any, Any]:
        if node.op == "input":
            return self.positions["product"][1], None
        at = next(i for i, a in enumerate(node.args) if varies(self.of.graph, a))
        found = self.multiple(node.args[at].id)
        if node.op == "neg":
            return _negated(found)
        other = self.operand(node.args[1 - at])
        if node.op == "mul":
            return _each(operator.mul, found, other)
        if node.op == "div":
            number = node.args[1]
            if isinstance(number, float) and has_reciprocal(number):
                return _each(operator.mul, found, 1.0 / number)
            return _each(divide, found, other)
        if node.op == "sub":
            found, other = (found, -other) if at == 0 else (_negated(found), other)
        return found[0], other if found[1] is None else found[1] + other

    def times(self, value: Value, factor: float) -> Float32:
        """A value times a number, by one instruction if it is a multiple of the score."""
        found = self.multiple(value.id) if isinstance(value, Ref) else None
        if found is None:
            return self.operand(value) * factor
        return _line(self.positions["product"][0], *_each(operator.mul, found, factor))

    def term(self, value: Value) -> Float32:
        """What is added to the score: a line by one FMA from where the tile begins."""
        if not isinstance(value, Ref) or value.id not in self.of.lines:
            return Float32(self.operand(value))
        if "origin" not in self.positions:
            return Float32(self.operand(value))
        line = self.of.lines[value.id]
        step = line.steps.ahead(*self.positions["origin"][2:])
        key = ("line", value.id, step)
        if key not in self.memo:
            begin = ("line", value.id)
            if begin not in self.memo:
                slope = functools.reduce(operator.mul, map(self.operand, line.factors), 1.0)
                self.memo[begin] = slope, self.first().value(value.id)
            slope, first = self.memo[begin]
            self.memo[key] = fma(slope, float(step), first) if step else first
        return self.memo[key]

    # What grows evenly from the first element of the tile.

    def first(self) -> Element:
        """The first element, whose values are not remembered."""
        first_q, first_k, *_ = self.positions["origin"]
        at = {name: value for name, value in self.positions.items() if name != "origin"}
        return Element(self.of, {**at, "q": first_q, "k": first_k}, 0, 0, {}, False)

    def first_value(self, number: int) -> Any:
        """A node's value there, remembered."""
        key = ("first", number)
        if key not in self.memo:
            self.memo[key] = self.first().value(number)
        return self.memo[key]

    def distance(self, steps: Steps) -> Float32:
        """An integer that grows evenly with q and k, as a float: that of the tile's first, moved.

        The conversion instruction is as slow as an exponential. Beyond 2^24 the result is rounded
        twice.
        """
        key = ("origin", steps.node)
        if key not in self.memo:
            self.memo[key] = Float32(self.first_value(steps.node))
        moved = self.memo[key] + float(steps.ahead(*self.positions["origin"][2:]))
        return absolute(moved) if steps.magnitude else moved

    def read_evenly(self, number: int) -> Any:
        """An element whose indices grow evenly: read once for all that have the same ones."""
        node, grows = self.nodes[number], self.of.evenly_indexed[number]
        ahead_q, ahead_k = self.positions["origin"][2:]
        steps = tuple(q * ahead_q + k * ahead_k for q, k in grows)
        key = ("read", number, steps)
        if key not in self.memo:
            capture = self.of.captures[node.args[0]]
            firsts = [
                self.first_value(a.id) if isinstance(a, Ref) else constant(a) for a in node.operands
            ]
            if number in self.of.unclamped and self.positions.get("inside", False):
                place = ("place", number)
                if place not in self.memo:
                    self.memo[place] = lower.address(capture, firsts)
                self.memo[key] = lower.element(capture, self.memo[place], steps[-1], node.dtype)
            else:
                indices = [first + step for first, step in zip(firsts, steps, strict=True)]
                self.memo[key] = load(capture, indices, node.dtype)
        return self.memo[key]

    def pair(self, number: int) -> tuple[Any, Any]:
        """A load at an even k and at the next, of which this element is one."""
        node, ahead = self.nodes[number], self.column % 2
        indices = [self.operand(a) for a in node.operands]
        offset = offset_from_k(self.of.graph, node.args[-1])
        indices[-1] = indices[-1] - ahead if ahead else indices[-1]
        below = offset is not None and offset < 0
        return load_pair(self.of.captures[node.args[0]], indices, node.dtype, below)


def _last_index(graph: Graph, number: int) -> Node:
    """What computes the last index of a load, which grows."""
    index = graph.nodes[number].operands[-1]
    assert isinstance(index, Ref)
    return graph.nodes[index.id]


def _is_dense(capture: cute.Tensor) -> bool:
    """Whether neighbours in the last dimension are known to be adjacent."""
    return isinstance(capture.stride[-1], int) and capture.stride[-1] == 1


def functions_of_one(graph: Graph, capped: Mapping[int, Capped]) -> frozenset[int]:
    """Nodes that `Lowering.function` computes."""
    own = (i for i, node in enumerate(graph.nodes) if node.op in ("tanh", "sigmoid"))
    return frozenset((*own, *capped))


def _negated(multiple: tuple[Any, Any]) -> tuple[Any, Any]:
    return _each(operator.mul, multiple, -1.0)


def _each(operation: Callable, multiple: tuple[Any, Any], other: Any) -> tuple[Any, Any]:
    """An operation on both parts of a multiple."""
    factor, offset = multiple
    return operation(factor, other), None if offset is None else operation(offset, other)


def _line(product: Float32, factor: Float32, offset: Float32 | None) -> Float32:
    return product * factor if offset is None else fma(product, factor, offset)
