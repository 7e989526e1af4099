"""The device reader of a graph: values of its nodes as CuTe scalars, at trace time.

int is Int32, float is Float32, bool is Boolean; rounding and signs follow torch (`//` rounds down,
`%` has the divisor's sign, minimum and maximum pass NaN on). `Lowering` evaluates a graph at the
positions that a thread holds and computes nothing twice: what depends on neither query nor key is
computed once per work tile, what depends on one of them once per row or column of the fragment.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Boolean, Float16, Float32, Float64, Int8, Int16, Int32, Int64, Uint8
from cutlass._mlir.dialects import arith

from . import approximations, shared
from .bounds import QueryTile, Runs, key_sets, visit_runs
from .distances import COLUMN, ELEMENT, ROW, Steps, distances, evenly_indexed
from .fusion import Capped, capped, lines, multiples, spoils_row, varies
from .graph import LARGEST, Graph, Node, Ref, Value
from .ops import Range
from .pairs import offset_from_k, read_along_k
from .summaries import Read, per
from .tiles import Scan

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)

KINDS = {"bool": Boolean, "int": Int32, "float": Float32}


def select(condition: Boolean, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`; both of one type."""
    kind = next((type(v) for v in (yes, no) if not isinstance(v, (bool, int, float))), None)
    if isinstance(condition, bool):
        return yes if condition else no
    if kind is None:
        kind = Float32 if isinstance(yes, float) or isinstance(no, float) else Int32
    return kind(cutlass.select_(condition, kind(yes), kind(no)))


def truncdiv(a: Int32, b: Int32) -> Int32:
    """Quotient rounded towards zero; `//` rounds down, and `%` has the dividend's sign."""
    quotient = a // b
    return select((quotient < 0) & (quotient * b != a), quotient + 1, quotient)


def absolute(a: Any) -> Any:
    """Magnitude."""
    return cute.math.absf(a) if isinstance(a, Float32) else select(a < 0, -a, a)


def fmod(a: Any, b: Any) -> Any:
    """Remainder with the dividend's sign."""
    if isinstance(a, Float32):
        return cute.math.rem(a, b)
    return a % b


def minimum(a: Any, b: Any) -> Any:
    """The smaller; NaN if either is NaN."""
    return _of_two(arith.minimumf, cutlass.min, a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger; NaN if either is NaN."""
    return _of_two(arith.maximumf, cutlass.max, a, b)


def _of_two(of_floats: Callable, of_ints: Callable, a: Any, b: Any) -> Any:
    if isinstance(a, Float32) or isinstance(b, Float32):
        return Float32(of_floats(Float32(a).ir_value(), Float32(b).ir_value()))
    return of_ints(a, b)


def fma(a: Any, b: Any, c: Any) -> Float32:
    """a * b + c, rounded once."""
    return cute.math.fma(Float32(a), Float32(b), Float32(c))


def _truncate(a: Float32) -> Float32:
    return select(a < 0.0, cute.math.ceil(a), cute.math.floor(a))


def exp2(a: Float32) -> Float32:
    """2^a on the special-function unit."""
    return cute.math.exp2(a, approx=True, ftz=True)


def log2(a: Float32) -> Float32:
    """Base-2 logarithm on the special-function unit."""
    return cute.math.log2(a, approx=True, ftz=True)


def divide(a: Float32, b: Float32) -> Float32:
    """Quotient within 2 units in the last place, without the slow path of exact rounding."""
    return cute.math.div(a, b, full=True)


def reciprocal(a: Float32) -> Float32:
    """1 / a on the special-function unit."""
    return cute.math.rcp(a, approx=True, ftz=True)


def _has_reciprocal(number: float) -> bool:
    """Whether 1 / number is a normal fp32 number, so that multiplying by it divides."""
    return 2.0**-126 <= abs(number) <= 2.0**126


APPROXIMATED = ("expm1", "log1p", "erf", "gelu", "gelu_tanh", "silu", "softplus")
_UNIT = SimpleNamespace(
    exp2=exp2,
    log2=log2,
    reciprocal=reciprocal,
    absolute=absolute,
    select=select,
    fma=fma,
    lesser=minimum,
)


def _from_the_unit(name: str) -> Callable:
    function = getattr(approximations, name)
    return lambda a: function(a, _UNIT)


def _tanhs(arguments: list[Float32], exponents: list[Float32]) -> list[Float32]:
    """From exponentials: the unit's own tanh keeps 11 bits, too few for a score's exponent.

    Near 0, where 1 - 2 / (e^2a + 1) cancels, from the series; both are within 1e-5 of the value.
    """
    found = []
    for a, far in zip(arguments, shared.steps(exponents, -1.0, 1.0, _UNIT), strict=True):
        near = a * fma(a * a, -1.0 / 3.0, 1.0)
        found.append(select(absolute(a) < 0.04, near, far))
    return found


def _tanh(a: Float32) -> Float32:
    return _tanhs([a], [a * (2.0 * LOG2_E)])[0]


def _sigmoid(a: Float32) -> Float32:
    return shared.sigmoids([a * LOG2_E], _UNIT)[0]


def _approximate(function: Callable) -> Callable:
    return lambda a: function(a, approx=True)


def _to_int(a: Any) -> Int32:
    return select(a, Int32(1), Int32(0)) if isinstance(a, Boolean) else Int32(a)


def _to_float(a: Any) -> Float32:
    return select(a, Float32(1.0), Float32(0.0)) if isinstance(a, Boolean) else Float32(a)


LOWER: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": divide,
    "floordiv": operator.floordiv,
    "truncdiv": truncdiv,
    "mod": lambda a, b: a - (a // b) * b,
    "fmod": fmod,
    "minimum": minimum,
    "maximum": maximum,
    "neg": operator.neg,
    "abs": absolute,
    "exp": lambda a: exp2(a * LOG2_E),
    "exp2": exp2,
    "log": lambda a: log2(a) * LN_2,
    "log2": log2,
    "sqrt": _approximate(cute.math.sqrt),
    "rsqrt": _approximate(cute.math.rsqrt),
    "sin": _approximate(cute.math.sin),
    "cos": _approximate(cute.math.cos),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    **{name: _from_the_unit(name) for name in APPROXIMATED},
    "floor": cute.math.floor,
    "ceil": cute.math.ceil,
    "trunc": _truncate,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": lambda a: a ^ Boolean(True),
    "bit_and": operator.and_,
    "bit_or": operator.or_,
    "bit_xor": operator.xor,
    "bit_not": lambda a: a ^ Int32(-1),
    "shl": operator.lshift,
    "shr": operator.rshift,
    "where": select,
    "to_int": _to_int,
    "to_float": _to_float,
}

# How a captured tensor's elements are read from memory; bools are passed as bytes.
CAPTURE_ELEMENTS = {
    torch.float64: Float64,
    torch.float32: Float32,
    torch.float16: Float16,
    torch.bfloat16: BFloat16,
    torch.int64: Int64,
    torch.int32: Int32,
    torch.int16: Int16,
    torch.int8: Int8,
    torch.uint8: Uint8,
    torch.bool: Uint8,
}


class Lowering:
    """One graph over the captured tensors of its variant, ready to be evaluated at positions.

    `uniform` holds the inputs that are one value for the whole work tile (b, h, the lengths). What
    follows from them alone is computed here, so create it where the work tile begins. `pairs` are
    the captured tensors that can be read two keys at a time (see pairs.py). `exponent` says that
    the result is a score of an online softmax, so that its absolute error counts.
    """

    def __init__(
        self,
        graph: Graph,
        captures: tuple[cute.Tensor, ...],
        uniform: Mapping[str, Int32],
        pairs: frozenset[int] = frozenset(),
        exponent: bool = False,
    ) -> None:
        self.graph = graph
        self.captures = captures
        self.paired = {i for i in read_along_k(graph) if graph.nodes[i].args[0] in pairs}
        self.distances, self.evenly_indexed = distances(graph), evenly_indexed(graph)
        self.multiples, self.lines = multiples(graph), lines(graph) if exponent else {}
        self.capped = capped(graph) if exponent else {}
        self.functions = functions_of_one(graph, self.capped)
        self.uniform: dict[int, Any] = {}
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
        multiplies it, is worked into an FMA.
        """
        return Element(self, positions, row, column, memo, in_pairs).value(self.graph.output)

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
            if varies(self.graph, Ref(number)):
                for element, found in zip(there, self.function(number, there), strict=True):
                    memo[element.key(number)] = found
        return [element.value(self.graph.output) for element in there]

    def function(self, number: int, elements: Sequence[Element]) -> list[Float32]:
        """One of the functions of one value that may share a reciprocal, at several elements."""
        node, cap = self.graph.nodes[number], self.capped.get(number)
        argument = cap.argument if cap else node.args[0]
        factor = LOG2_E if node.op == "sigmoid" else 2.0 * LOG2_E
        exponents = [element.times(argument, factor) for element in elements]
        if cap:
            return shared.steps(exponents, -cap.cap, cap.cap, _UNIT)
        if node.op == "sigmoid":
            return shared.sigmoids(exponents, _UNIT)
        return _tanhs([element.operand(argument) for element in elements], exponents)


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
                return self.read_evenly(node, self.of.evenly_indexed[number])
        if node.op == "input":
            return self.positions[node.args[0]]
        if node.op == "const":
            return KINDS[node.dtype](node.args[0])
        if "product" in self.positions and (found := self.with_product(number)) is not None:
            return found
        if number in self.of.functions:
            return self.of.function(number, [self])[0]
        if node.op == "div" and isinstance(node.args[1], float) and _has_reciprocal(node.args[1]):
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
            if isinstance(number, float) and _has_reciprocal(number):
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

    def read_evenly(self, node: Node, grows: tuple[tuple[int, int], ...]) -> Any:
        """An element whose indices grow evenly: read once for all that have the same ones."""
        ahead_q, ahead_k = self.positions["origin"][2:]
        steps = tuple(q * ahead_q + k * ahead_k for q, k in grows)
        key = ("read", node, steps)
        if key not in self.memo:
            indices = [
                self.first_value(a.id) + step if isinstance(a, Ref) else constant(a)
                for a, step in zip(node.operands, steps, strict=True)
            ]
            self.memo[key] = load(self.of.captures[node.args[0]], indices, node.dtype)
        return self.memo[key]

    def pair(self, number: int) -> tuple[Any, Any]:
        """A load at an even k and at the next, of which this element is one."""
        node, ahead = self.nodes[number], self.column % 2
        indices = [self.operand(a) for a in node.operands]
        offset = offset_from_k(self.of.graph, node.args[-1])
        indices[-1] = indices[-1] - ahead if ahead else indices[-1]
        below = offset is not None and offset < 0
        return load_pair(self.of.captures[node.args[0]], indices, node.dtype, below)


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


def constant(number: bool | int | float) -> Any:
    """A Python number as a scalar of its own type."""
    return KINDS[type(number).__name__](number)


def load(capture: cute.Tensor, indices: list[Int32], dtype: str) -> Any:
    """One element of a captured tensor, the indices clamped into it.

    Tiles reach past the ends of the sequences, and masked positions may index anywhere; neither may
    read outside the tensor.
    """
    clamped = _clamped(capture, indices)
    if clamped and isinstance(capture.stride[-1], int):  # the row's address first, then its element
        row = capture[(*clamped[:-1], None)]
        return _typed(row[clamped[-1]], dtype)
    return _typed(capture[clamped] if clamped else capture[0], dtype)


def _clamped(capture: cute.Tensor, indices: list[Int32]) -> tuple[Int32, ...]:
    extents = capture.shape[: len(indices)]  # a scalar is passed as one element
    return tuple(
        maximum(minimum(i, size - 1), Int32(0)) for i, size in zip(indices, extents, strict=True)
    )


def load_pair(
    capture: cute.Tensor, indices: list[Int32], dtype: str, below: bool
) -> tuple[Any, Any]:
    """The elements at an even last index and at the next, by one load; clamped as `load` clamps.

    The last extent is even (see pairs.py); `below` says that the last index may be negative.
    """
    first, size = indices[-1], capture.shape[-1]
    inside = select(first < size, first, size - 2)
    if below:
        inside = select(first < 0, Int32(0), inside)
    row = capture[(*_clamped(capture, indices[:-1]), None)]
    two = cute.make_tensor(row.iterator + cute.assume(inside, divby=2), cute.make_layout(2)).load()
    element = capture.element_type  # a loaded vector forgets that its elements have no sign
    a, b = (_typed(element(two[n]), dtype) for n in range(2))
    # Beyond an end both are the element there.
    second = select(first < 0, a, b) if below else b
    return select(first < size, a, b), second


def _typed(element: Any, dtype: str) -> Any:
    """What an element of memory is in the graph."""
    if dtype == "bool":
        return element != 0
    if isinstance(element, Int64):  # integers are 32-bit: what is beyond them stays beyond
        element = select(element < -LARGEST, -LARGEST, element)
        element = select(element > LARGEST, LARGEST, element)
    return KINDS[dtype](element)


class DeviceIntegers:
    """Key arithmetic inside a kernel: what is a Python number stays one, the rest is Int32.

    `mask` tells which captured tensors hold bools, since these are passed as bytes.
    """

    def __init__(self, captures: tuple[cute.Tensor, ...], mask: Graph | None) -> None:
        self.captures = captures
        loads = (node for node in mask.nodes if node.op == "load") if mask else ()
        self.dtypes = {node.args[0]: node.dtype for node in loads}

    add = staticmethod(operator.add)
    sub = staticmethod(operator.sub)
    mul = staticmethod(operator.mul)
    floordiv = staticmethod(operator.floordiv)
    less = staticmethod(operator.lt)
    where = staticmethod(select)

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.min(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.max(a, b)

    @staticmethod
    def and_(a: Any, b: Any) -> Any:
        if isinstance(a, bool):
            return b if a else False
        if isinstance(b, bool):
            return a if b else False
        return a & b

    @staticmethod
    def not_(a: Any) -> Any:
        return not a if isinstance(a, bool) else a ^ Boolean(True)

    @classmethod
    def or_(cls, a: Any, b: Any) -> Any:
        return cls.not_(cls.and_(cls.not_(a), cls.not_(b)))

    def load(self, capture: int, indices: tuple[Any, ...]) -> Any:
        return load(self.captures[capture], [Int32(i) for i in indices], self.dtypes[capture])


def visits(
    mask: Graph | None, tile: QueryTile, tile_n: int, captures: tuple[cute.Tensor, ...]
) -> Runs:
    """The key tiles that one tile of queries visits, from a few integers; see `bounds`."""
    ints = DeviceIntegers(captures, mask)
    return visit_runs(key_sets(mask, tile, ints), tile_n, tile.seqlen_k, ints)


def table_reader(table: cute.Tensor | None, mask: Graph | None, b: Int32, h: Int32) -> Read:
    """Reads `summaries.table_shape`'s table for one batch entry and head, blocks clamped into it.

    Lanes that look past the last block read the last one, and must not use what they find.
    """
    batch, head = b if per(mask, "b") else 0, h if per(mask, "h") else 0

    def read(i: int, block: Int32) -> Range:
        inside = cutlass.min(block, table.shape[2] - 1)
        low, high = (table[batch, head, inside, word] for word in (2 * i, 2 * i + 1))
        return low, high

    return read


def scan(
    mask: Graph | None,
    tile: QueryTile,
    q_block: Int32,
    tile_n: int,
    captures: tuple[cute.Tensor, ...],
    table: cute.Tensor | None,
) -> Scan:
    """The key tiles of one tile of queries, to be decided one by one; see `tiles.Scan`.

    `table` may be None where the mask has no summaries.
    """
    ints = DeviceIntegers(captures, mask)
    return Scan(mask, tile, q_block, tile_n, ints, table_reader(table, mask, tile.b, tile.h))
