"""What a graph is made of on the device: CuTe scalars, at trace time.

int is Int32, float is Float32, bool is Boolean; rounding and signs follow torch (`//` rounds down,
`%` has the divisor's sign, minimum and maximum pass NaN on). Here are the operations, the loads of
captured tensors and the integers of key bounds; `device.py` evaluates graphs with them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Boolean, Float16, Float32, Float64, Int8, Int16, Int32, Int64, Uint8
from cutlass._mlir.dialects import arith

from . import approximations, shared
from .bounds import QueryTile, Runs, key_sets, visit_runs
from .graph import LARGEST, Graph
from .ops import Range
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


def has_reciprocal(number: float) -> bool:
    """Whether 1 / number is a normal fp32 number, so that multiplying by it divides."""
    return 2.0**-126 <= abs(number) <= 2.0**126


APPROXIMATED = ("expm1", "log1p", "erf", "gelu", "gelu_tanh", "silu", "softplus")
UNIT = SimpleNamespace(
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
    return lambda a: function(a, UNIT)


def tanh_of_the_unit(a: Float32) -> Float32:
    """By one instruction, within 1.2e-5 of the value relative to it.

    Source: every float from 2^-24 to 16 on an H200; the PTX manual promises 2^-11.
    """
    return cute.math.tanh(a, approx=True)


def tanhs(arguments: list[Float32], exponents: list[Float32]) -> list[Float32]:
    """From exponentials: the unit's own tanh keeps 11 bits, too few for a score's exponent.

    Near 0, where 1 - 2 / (e^2a + 1) cancels, from the series; both are within 1e-5 of the value.
    """
    found = []
    for a, far in zip(arguments, shared.steps(exponents, -1.0, 1.0, UNIT), strict=True):
        near = a * fma(a * a, -1.0 / 3.0, 1.0)
        found.append(select(absolute(a) < 0.04, near, far))
    return found


def _tanh(a: Float32) -> Float32:
    return tanhs([a], [a * (2.0 * LOG2_E)])[0]


def _sigmoid(a: Float32) -> Float32:
    return shared.sigmoids([a * LOG2_E], UNIT)[0]


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


def address(capture: cute.Tensor, indices: list[Int32]) -> cute.Pointer:
    """Where an element lies whose last index is inside the tensor; the others are clamped.

    The tensor's last stride is 1.
    """
    clamped = _clamped(capture, [*indices[:-1], Int32(0)])
    return capture[(*clamped[:-1], None)].iterator + indices[-1]


def element(capture: cute.Tensor, place: cute.Pointer, ahead: int, dtype: str) -> Any:
    """The element so many behind an address: one instruction where `ahead` is a number."""
    read = cute.make_tensor(place + ahead, cute.make_layout(1))[0]
    return _typed(capture.element_type(read), dtype)


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
