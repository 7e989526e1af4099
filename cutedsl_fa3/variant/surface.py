"""What may be written in a variant: torch functions and operators, each as graph operations.

Every entry takes the builder and values and returns a value; compositions (clamp, relu, square) are
spelled out here once, so that readers of a graph only meet the operations of `ops.OPS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from cutedsl_fa3.errors import VariantError

from .activations import ACTIVATIONS
from .graph import Builder, Ref, Value
from .ops import DType

Entry = Callable[..., Value]

LARGEST_POWER = 16

CASTS: dict[Any, DType] = {
    torch.float32: "float",
    torch.int32: "int",
    torch.int64: "int",
    torch.bool: "bool",
    float: "float",
    int: "int",
    bool: "bool",
}


def _plain(op: str) -> Entry:
    def entry(b: Builder, *values: Value) -> Value:
        return b.emit(op, *values)

    return entry


def _swapped(entry: Entry) -> Entry:
    return lambda b, x, y: entry(b, y, x)


def _add(b: Builder, x: Value, other: Value, *, alpha: Value = 1) -> Value:
    other = other if alpha == 1 else _mul(b, other, alpha)
    return b.emit("add" if b.promoted(x, other) != "bool" else "or", x, other)


def _sub(b: Builder, x: Value, other: Value, *, alpha: Value = 1) -> Value:
    other = other if alpha == 1 else _mul(b, other, alpha)
    if b.promoted(x, other) == "bool":
        raise VariantError("`-` of two bools is not defined; use `^` or `x & ~y`")
    return b.emit("sub", x, other)


def _mul(b: Builder, x: Value, other: Value) -> Value:
    return b.emit("mul" if b.promoted(x, other) != "bool" else "and", x, other)


def _refuse_zero(b: Builder, name: str, divisor: Value) -> None:
    """Refuses the integer 0 as divisor; a float 0 gives infinities and NaN, as in torch.

    Raises: VariantError.
    """
    if isinstance(divisor, Ref) and b.nodes[divisor.id].op == "const":
        divisor = b.nodes[divisor.id].args[0]
    if not isinstance(divisor, Ref) and divisor == 0:
        raise VariantError(
            f"{name} of integers by {divisor!r} has no value; valid are other divisors, and "
            "floats, as in `x / 0.0`"
        )


def _div(b: Builder, x: Value, other: Value, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return b.emit("div", x, other)
    if rounding_mode == "floor":
        return _floordiv(b, x, other)
    if rounding_mode != "trunc":
        raise VariantError(f"rounding_mode {rounding_mode!r} is not one of None, 'floor', 'trunc'")
    if b.promoted(x, other) == "float":
        return b.emit("trunc", b.emit("div", x, other))
    _refuse_zero(b, "a division", other)
    return b.emit("truncdiv", x, other)


def _floordiv(b: Builder, x: Value, other: Value) -> Value:
    if b.promoted(x, other) == "float":
        return b.emit("floor", b.emit("div", x, other))
    _refuse_zero(b, "`//`", other)
    return b.emit("floordiv", x, other)


def _remainder(b: Builder, x: Value, other: Value) -> Value:
    """The remainder with the divisor's sign; for floats fmod, moved over where the signs differ."""
    if b.promoted(x, other) != "float":
        _refuse_zero(b, "`%`", other)
        return b.emit("mod", x, other)
    rest = b.emit("fmod", x, other)
    differ = b.emit("xor", b.emit("lt", other, 0.0), b.emit("lt", rest, 0.0))
    moved = b.emit("and", b.emit("ne", rest, 0.0), differ)
    return b.emit("where", moved, b.emit("add", rest, other), rest)


def _fmod(b: Builder, x: Value, other: Value) -> Value:
    if b.promoted(x, other) != "float":
        _refuse_zero(b, "torch.fmod", other)
    return b.emit("fmod", x, other)


def _pow(b: Builder, x: Value, exponent: Value) -> Value:
    if isinstance(exponent, Ref):
        return _power_of_number(b, x, exponent)
    if exponent == 0.5:
        return b.emit("sqrt", x)
    if exponent == -0.5:
        return b.emit("rsqrt", x)
    if exponent != int(exponent) or abs(exponent) > LARGEST_POWER:
        raise VariantError(
            f"a power of {exponent!r} is not supported; valid are integers from "
            f"-{LARGEST_POWER} to {LARGEST_POWER}, 0.5 and -0.5; "
            "else write torch.exp2(exponent * torch.log2(x))"
        )
    if b.dtype(x) == "int" and (exponent < 0 or isinstance(exponent, float)):
        x = b.convert(x, "float")
    if b.dtype(x) == "bool":
        x = b.convert(x, "int")
    product: Value = b.convert(1, b.dtype(x))
    for i in range(abs(int(exponent))):
        product = x if i == 0 else b.emit("mul", product, x)
    return product if exponent >= 0 else b.emit("div", 1.0, product)


def _power_of_number(b: Builder, base: Value, exponent: Ref) -> Value:
    if isinstance(base, Ref) or base <= 0:
        raise VariantError(
            "a traced exponent needs a positive number as base, as in 2.0 ** x; "
            "else write torch.exp2(exponent * torch.log2(base))"
        )
    if isinstance(base, int) and b.dtype(exponent) == "int":
        if base != 2:
            raise VariantError(f"{base} ** int is not supported; write {float(base)} ** x")
        return b.emit("shl", 1, exponent)
    power = b.convert(exponent, "float")
    return b.emit("exp2", power if base == 2 else b.emit("mul", power, math.log2(base)))


def _bound(op: str, joined: str) -> Entry:
    def entry(b: Builder, x: Value, *other: Value) -> Value:
        if len(other) != 1:
            raise VariantError(f"torch.{op} reduces a tensor; of two values write torch.{op}imum")
        if b.promoted(x, *other) == "bool":
            return b.emit(joined, x, *other)
        return b.emit(f"{op}imum", x, *other)

    return entry


_minimum, _maximum = _bound("min", "and"), _bound("max", "or")


def _clamp(b: Builder, x: Value, min: Value | None = None, max: Value | None = None) -> Value:
    x = x if min is None else b.mark("clamp_min", x, min)
    return x if max is None else b.mark("clamp_max", x, max)


def _rounded(op: str) -> Entry:
    return lambda b, x: x if b.dtype(x) == "int" else b.emit(op, x)


def _sign(b: Builder, x: Value) -> Value:
    """-1, 0 or 1, of the value's type; 0 of NaN, as in torch."""
    above, below = b.emit("gt", x, 0), b.emit("lt", x, 0)
    return b.emit("sub", *(b.convert(side, b.dtype(x)) for side in (above, below)))


def _where(b: Builder, condition: Value, *values: Value) -> Value:
    if len(values) != 2:
        raise VariantError("torch.where needs three arguments: condition, value, other value")
    if b.dtype(condition) != "bool":
        raise VariantError(f"the condition of torch.where is {b.dtype(condition)}, not bool")
    return b.emit("where", condition, *values)


def _masked_fill(b: Builder, x: Value, mask: Value, value: Value) -> Value:
    return _where(b, mask, b.convert(value, b.dtype(x)), x)


def _equality(op: str) -> Entry:
    def entry(b: Builder, x: Value, other: Value) -> Value:
        if b.promoted(x, other) != "bool":
            return b.emit(op, x, other)
        differs = b.emit("xor", x, other)
        return differs if op == "ne" else b.emit("not", differs)

    return entry


def _order(op: str) -> Entry:
    def entry(b: Builder, x: Value, other: Value) -> Value:
        if b.promoted(x, other) == "bool":
            x = b.convert(x, "int")
        return b.emit(op, x, other)

    return entry


def _logical(op: str) -> Entry:
    return lambda b, *values: b.emit(op, *(b.convert(value, "bool") for value in values))


def _bitwise(op: str) -> Entry:
    def entry(b: Builder, *values: Value) -> Value:
        common = b.promoted(*values)
        if common == "float":
            symbol = {"and": "&", "or": "|", "xor": "^", "not": "~"}[op]
            raise VariantError(f"`{symbol}` takes bool or int values, not float; compare first")
        return b.emit(op if common == "bool" else f"bit_{op}", *values)

    return entry


def _shift(op: str) -> Entry:
    def entry(b: Builder, x: Value, count: Value) -> Value:
        if not isinstance(count, Ref) and not 0 <= count < 32:
            raise VariantError(f"a shift by {count!r} is not defined; valid are 0 to 31")
        return b.emit(op, x, count)

    return entry


def _to(b: Builder, x: Value, *args: Any, dtype: Any = None, **where: Any) -> Value:
    """A conversion to a dtype or to that of another value; where values lie does not matter."""
    for arg in args:
        if isinstance(arg, Ref):
            return b.convert(x, b.dtype(arg))
        if not isinstance(arg, str | torch.device | bool):
            dtype = arg
    known = {"device", "non_blocking", "copy", "memory_format"}
    if (dtype is not None and dtype not in CASTS) or set(where) - known:
        given = dtype if set(where) <= known else ", ".join(set(where) - known)
        raise VariantError(
            f"a conversion to {given} is not supported: scores are torch.float32, indices "
            "torch.int32; valid are torch.float32, torch.int32, torch.int64 and torch.bool"
        )
    return x if dtype is None else b.convert(x, CASTS[dtype])


def _cast(dtype: DType) -> Entry:
    return lambda b, x: b.convert(x, dtype)


def _filled(number: float | None) -> Entry:
    """`torch.zeros_like(x)` and `x.new_ones(())`: a constant of x's type, or of `dtype`."""

    def entry(b: Builder, x: Value, *args: Any, dtype: Any = None, **where: Any) -> Value:
        sizes, values = (args, (number,)) if number is not None else (args[:-1], args[-1:])
        size = where.pop("size", sizes[0] if sizes else ())
        if tuple(size) != () or set(where) - {"device"}:
            raise VariantError("a tensor made inside must be 0-d; make others outside")
        target = b.dtype(x) if dtype is None else CASTS.get(dtype)
        if target is None:
            raise VariantError(f"dtype {dtype} is not supported; use float32, int32, int64 or bool")
        return b.emit_const(values[0], target)

    return entry


def _as_is(b: Builder, x: Value, *args: Any, **options: Any) -> Value:
    """What only concerns memory: `.clone()`, `.contiguous()`, `.cuda()`."""
    return x


def _alias(*names: str, entry: Entry) -> dict[str, Entry]:
    return dict.fromkeys(names, entry)


_FLOAT_FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt"),
    *("sin", "cos", "tanh", "sigmoid", "erf"),
)

# By the name that torch or the operator module gives the function, without underscores around it.
SURFACE: dict[str, Entry] = {
    **_alias("add", entry=_add),
    **_alias("sub", "subtract", entry=_sub),
    **_alias("mul", "multiply", entry=_mul),
    **_alias("div", "divide", "true_divide", "truediv", entry=_div),
    **_alias("floordiv", "floor_divide", entry=_floordiv),
    **_alias("mod", "remainder", entry=_remainder),
    **_alias("fmod", entry=_fmod),
    **_alias("pow", entry=_pow),
    **_alias("neg", "negative", entry=_plain("neg")),
    **_alias("pos", "positive", entry=lambda b, x: x),
    **_alias("abs", "absolute", entry=_plain("abs")),
    **_alias("square", entry=lambda b, x: _mul(b, x, x)),
    **_alias("reciprocal", entry=lambda b, x: b.emit("div", 1.0, x)),
    **{name: _plain(name) for name in _FLOAT_FUNCTIONS},
    **_alias("expit", entry=_plain("sigmoid")),
    **{name: _rounded(name) for name in ("floor", "ceil", "trunc")},
    **_alias("frac", entry=lambda b, x: b.emit("sub", x, b.emit("trunc", x))),
    **_alias("isnan", entry=lambda b, x: b.emit("ne", x, x)),
    **_alias("isinf", entry=lambda b, x: b.emit("eq", b.emit("abs", x), math.inf)),
    **_alias("isfinite", entry=lambda b, x: b.emit("lt", b.emit("abs", x), math.inf)),
    **_alias("sign", "sgn", entry=_sign),
    **_alias("min", "minimum", entry=_minimum),
    **_alias("max", "maximum", entry=_maximum),
    **_alias("clamp", "clip", entry=_clamp),
    **_alias("clamp_min", entry=lambda b, x, min: _clamp(b, x, min)),
    **_alias("clamp_max", entry=lambda b, x, max: _clamp(b, x, None, max)),
    **_alias("where", entry=_where),
    **_alias("masked_fill", entry=_masked_fill),
    **_alias("eq", entry=_equality("eq")),
    **_alias("ne", "not_equal", entry=_equality("ne")),
    **_alias("lt", "less", entry=_order("lt")),
    **_alias("le", "less_equal", entry=_order("le")),
    **_alias("gt", "greater", entry=_order("gt")),
    **_alias("ge", "greater_equal", entry=_order("ge")),
    **{f"logical_{op}": _logical(op) for op in ("and", "or", "xor", "not")},
    **{f"bitwise_{op}": _bitwise(op) for op in ("and", "or", "xor", "not")},
    **{op: _bitwise(op) for op in ("and", "or", "xor")},
    **_alias("invert", entry=_bitwise("not")),
    **_alias("lshift", "bitwise_left_shift", entry=_shift("shl")),
    **_alias("rshift", "bitwise_right_shift", entry=_shift("shr")),
    **_alias("to", "type", "type_as", entry=_to),
    **_alias("clone", "contiguous", "cpu", "cuda", entry=_as_is),
    **_alias("detach", entry=lambda b, x: b.mark("detach", x)),
    **_alias("float", entry=_cast("float")),
    **_alias("int", "long", entry=_cast("int")),
    **_alias("bool", entry=_cast("bool")),
    **_alias("zeros_like", "new_zeros", entry=_filled(0)),
    **_alias("ones_like", "new_ones", entry=_filled(1)),
    **_alias("full_like", "new_full", entry=_filled(None)),
    **ACTIVATIONS,
}

_REFLECTED = ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "lshift", "rshift")
SURFACE |= {f"r{name}": _swapped(SURFACE[name]) for name in _REFLECTED}
SURFACE |= {f"r{name}": SURFACE[name] for name in ("and", "or", "xor")}

# Operators as they are written.
WRITTEN = {
    "add": "`+`",
    "sub": "`-`",
    "mul": "`*`",
    "truediv": "`/`",
    "floordiv": "`//`",
    "mod": "`%`",
    "pow": "`**`",
    "and": "`&`",
    "or": "`|`",
    "xor": "`^`",
    "invert": "`~`",
    "lshift": "`<<`",
    "rshift": "`>>`",
    "lt": "`<`",
    "le": "`<=`",
    "gt": "`>`",
    "ge": "`>=`",
    "eq": "`==`",
    "ne": "`!=`",
    "neg": "unary `-`",
    "matmul": "`@`",
}

# The same words for an error message: what a user would type.
SUPPORTED = (
    "+ - * / // % ** abs & | ^ ~ << >> < <= > >= == !=, torch."
    + " torch.".join(
        sorted(
            name
            for name in SURFACE
            if hasattr(torch, name) and not isinstance(getattr(torch, name), torch.dtype)
        )
    )
    + ", torch.nn.functional."
    + " torch.nn.functional.".join(sorted(ACTIVATIONS))
    + ", .to() .float() .int() .long() .bool() .masked_fill(), tensor[index, ...], and of the rows "
    "that tensor[index] is: sum mean prod any all amax amin dot unsqueeze squeeze reshape"
)
