"""The operations of a variant's graph: one row each says how it is typed, computed and bounded.

Every reader of a graph (torch evaluation, key bounds, device code, text) works from this table, so
an operation that is missing here exists nowhere, and one that is here must be read by all of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F

DType = Literal["bool", "int", "float"]
Range = tuple[Any, Any]  # inclusive bounds of an integer: Python ints or whatever Integers works on


class Integers(Protocol):
    """Integer arithmetic that key bounds are written on: Python, device code or text implement it.

    Values are Python ints or the implementation's own kind; conditions are Python bools or its own.
    """

    def add(self, a: Any, b: Any) -> Any: ...
    def sub(self, a: Any, b: Any) -> Any: ...
    def mul(self, a: Any, b: Any) -> Any: ...
    def floordiv(self, a: Any, b: int) -> Any: ...
    def minimum(self, a: Any, b: Any) -> Any: ...
    def maximum(self, a: Any, b: Any) -> Any: ...
    def less(self, a: Any, b: Any) -> Any: ...
    def where(self, condition: Any, a: Any, b: Any) -> Any: ...
    def and_(self, a: Any, b: Any) -> Any: ...
    def or_(self, a: Any, b: Any) -> Any: ...
    def not_(self, a: Any) -> Any: ...
    def load(self, capture: int, indices: tuple[Any, ...]) -> Any: ...


# (ints, *argument ranges) -> range. A divisor, a shift and the factor of a range are numbers of the
# graph; two ends of a range are the same object where the value is one.
Interval = Callable[..., Range]


@dataclass(frozen=True)
class Op:
    """One operation: argument types, result type, its torch reader and its interval rule.

    `accepts` lists argument types after promotion; `result` is a type, or "same" for the common
    type of the arguments. `where` alone takes a condition first, outside the promotion.
    """

    name: str
    arity: int
    accepts: tuple[DType, ...]
    result: DType | Literal["same"]
    torch: Callable[..., torch.Tensor]
    interval: Interval | None = None

    def dtype(self, *arguments: DType) -> DType:
        """The result's type for arguments of these (already promoted) types."""
        if self.result != "same":
            return self.result
        return arguments[-1]


def _floordiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _truncdiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _i_add(ints: Integers, a: Range, b: Range) -> Range:
    return ints.add(a[0], b[0]), ints.add(a[1], b[1])


def _i_sub(ints: Integers, a: Range, b: Range) -> Range:
    return ints.sub(a[0], b[1]), ints.sub(a[1], b[0])


def _i_neg(ints: Integers, a: Range) -> Range:
    return ints.sub(0, a[1]), ints.sub(0, a[0])


def _i_mul(ints: Integers, a: Range, b: Range) -> Range:
    """A product of two single values, or of a range and a number of the graph."""
    if a[0] is a[1] and b[0] is b[1]:
        product = ints.mul(a[0], b[0])
        return product, product
    (low, high), factor = (a, b[0]) if b[0] is b[1] else (b, a[0])
    ends = ints.mul(low, factor), ints.mul(high, factor)
    return ends if factor >= 0 else ends[::-1]


def _i_floordiv(ints: Integers, a: Range, b: Range) -> Range:
    return ints.floordiv(a[0], b[0]), ints.floordiv(a[1], b[0])


def _i_mod(ints: Integers, a: Range, b: Range) -> Range:
    first, last = ints.floordiv(a[0], b[0]), ints.floordiv(a[1], b[0])
    base = ints.mul(first, b[0])
    wraps = ints.less(first, last)
    low = ints.where(wraps, 0, ints.sub(a[0], base))
    high = ints.where(wraps, b[0] - 1, ints.sub(a[1], base))
    return low, high


def _i_minimum(ints: Integers, a: Range, b: Range) -> Range:
    return ints.minimum(a[0], b[0]), ints.minimum(a[1], b[1])


def _i_maximum(ints: Integers, a: Range, b: Range) -> Range:
    return ints.maximum(a[0], b[0]), ints.maximum(a[1], b[1])


def _i_abs(ints: Integers, a: Range) -> Range:
    low, high = a
    beyond = ints.sub(0, high)
    nearest = ints.maximum(ints.maximum(low, beyond), 0)
    return nearest, ints.maximum(ints.sub(0, low), high)


def _i_shl(ints: Integers, a: Range, b: Range) -> Range:
    return _i_mul(ints, a, (1 << b[0],) * 2)


def _i_shr(ints: Integers, a: Range, b: Range) -> Range:
    return _i_floordiv(ints, a, (1 << b[0],) * 2)


_BOOL: tuple[DType, ...] = ("bool",)
_INT: tuple[DType, ...] = ("int",)
_FLOAT: tuple[DType, ...] = ("float",)
_NUMBER: tuple[DType, ...] = ("int", "float")
_ANY: tuple[DType, ...] = ("bool", "int", "float")

_ROWS = (
    # arithmetic: both arguments have one type
    Op("add", 2, _NUMBER, "same", torch.add, _i_add),
    Op("sub", 2, _NUMBER, "same", torch.sub, _i_sub),
    Op("mul", 2, _NUMBER, "same", torch.mul, _i_mul),
    Op("div", 2, _FLOAT, "float", torch.div),
    Op("floordiv", 2, _INT, "int", _floordiv, _i_floordiv),  # rounds to -inf
    Op("truncdiv", 2, _INT, "int", _truncdiv),  # rounds to 0
    Op("mod", 2, _INT, "int", torch.remainder, _i_mod),  # the divisor's sign
    Op("fmod", 2, _NUMBER, "same", torch.fmod),  # the dividend's sign
    Op("minimum", 2, _NUMBER, "same", torch.minimum, _i_minimum),  # NaN if either is NaN
    Op("maximum", 2, _NUMBER, "same", torch.maximum, _i_maximum),
    Op("neg", 1, _NUMBER, "same", torch.neg, _i_neg),
    Op("abs", 1, _NUMBER, "same", torch.abs, _i_abs),
    # functions of a float
    Op("exp", 1, _FLOAT, "float", torch.exp),
    Op("exp2", 1, _FLOAT, "float", torch.exp2),
    Op("log", 1, _FLOAT, "float", torch.log),
    Op("log2", 1, _FLOAT, "float", torch.log2),
    Op("sqrt", 1, _FLOAT, "float", torch.sqrt),
    Op("rsqrt", 1, _FLOAT, "float", torch.rsqrt),
    Op("sin", 1, _FLOAT, "float", torch.sin),
    Op("cos", 1, _FLOAT, "float", torch.cos),
    Op("tanh", 1, _FLOAT, "float", torch.tanh),
    Op("sigmoid", 1, _FLOAT, "float", torch.sigmoid),
    Op("expm1", 1, _FLOAT, "float", torch.expm1),
    Op("log1p", 1, _FLOAT, "float", torch.log1p),
    Op("erf", 1, _FLOAT, "float", torch.erf),
    # activations that torch computes in one go, and so rounds as no composition does
    Op("gelu", 1, _FLOAT, "float", F.gelu),  # x / 2 * (1 + erf(x / sqrt(2)))
    Op("gelu_tanh", 1, _FLOAT, "float", functools.partial(F.gelu, approximate="tanh")),
    Op("silu", 1, _FLOAT, "float", F.silu),  # x * sigmoid(x)
    Op("softplus", 1, _FLOAT, "float", F.softplus),  # log(1 + exp(x)); x above 20
    Op("floor", 1, _FLOAT, "float", torch.floor),
    Op("ceil", 1, _FLOAT, "float", torch.ceil),
    Op("trunc", 1, _FLOAT, "float", torch.trunc),
    # comparisons; equality of bools is xor
    Op("lt", 2, _NUMBER, "bool", torch.lt),
    Op("le", 2, _NUMBER, "bool", torch.le),
    Op("gt", 2, _NUMBER, "bool", torch.gt),
    Op("ge", 2, _NUMBER, "bool", torch.ge),
    Op("eq", 2, _NUMBER, "bool", torch.eq),
    Op("ne", 2, _NUMBER, "bool", torch.ne),
    # logic
    Op("and", 2, _BOOL, "bool", torch.logical_and),
    Op("or", 2, _BOOL, "bool", torch.logical_or),
    Op("xor", 2, _BOOL, "bool", torch.logical_xor),
    Op("not", 1, _BOOL, "bool", torch.logical_not),
    # bits of an int
    Op("bit_and", 2, _INT, "int", torch.bitwise_and),
    Op("bit_or", 2, _INT, "int", torch.bitwise_or),
    Op("bit_xor", 2, _INT, "int", torch.bitwise_xor),
    Op("bit_not", 1, _INT, "int", torch.bitwise_not),
    Op("shl", 2, _INT, "int", torch.bitwise_left_shift, _i_shl),
    Op("shr", 2, _INT, "int", torch.bitwise_right_shift, _i_shr),  # keeps the sign
    # choice and conversion
    Op("where", 3, _ANY, "same", torch.where),
    Op("to_int", 1, ("bool", "float"), "int", operator.methodcaller("long")),  # rounds to 0
    Op("to_float", 1, ("bool", "int"), "float", operator.methodcaller("float")),
)

OPS: dict[str, Op] = {row.name: row for row in _ROWS}

# What a traced graph says of derivatives alone, and the operation that every other reader sees in
# its place (None: the value itself). Where a float meets a bound the derivative of torch.maximum
# goes to both in halves, that of a clamp to the value, and that of relu and hardtanh to neither.
MARKS: dict[str, str | None] = {
    "clamp_min": "maximum",
    "clamp_max": "minimum",
    "threshold_min": "maximum",
    "threshold_max": "minimum",
    "detach": None,
}

# Nodes that are not operations on values.
SOURCES = ("input", "load", "const")
