"""The functions of `torch.nn.functional` that apply to one value, as graph operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutedsl_fa3.errors import VariantError

from .graph import Builder, Value

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _not_in_place(entry: Callable[..., Value]) -> Callable[..., Value]:
    def checked(b: Builder, x: Value, *args: Any, inplace: bool = False, **options: Any) -> Value:
        if inplace:
            raise VariantError("inplace=True changes a value in place; leave it out")
        return entry(b, x, *args, **options)

    return checked


def _relu(b: Builder, x: Value) -> Value:
    return b.mark("threshold_min", x, b.convert(0, b.dtype(x)))


def _gelu(b: Builder, x: Value, *, approximate: str = "none") -> Value:
    if approximate not in ("none", "tanh"):
        raise VariantError(f"approximate is {approximate!r}; valid are 'none' and 'tanh'")
    return b.emit("gelu" if approximate == "none" else "gelu_tanh", x)


def _softplus(b: Builder, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    if (beta, threshold) == (1, 20):
        return b.emit("softplus", x)
    scaled = b.emit("mul", x, float(beta))
    soft = b.emit("div", b.emit("log1p", b.emit("exp", scaled)), float(beta))
    return b.emit("where", b.emit("gt", scaled, float(threshold)), x, soft)


def _logsigmoid(b: Builder, x: Value) -> Value:
    return b.emit("neg", b.emit("softplus", b.emit("neg", x)))


def _mish(b: Builder, x: Value) -> Value:
    return b.emit("mul", x, b.emit("tanh", b.emit("softplus", x)))


def _exponential(b: Builder, x: Value, positive: float, negative: float, inside: float) -> Value:
    """positive * x above 0, negative * (exp(inside * x) - 1) below."""
    below = b.emit("mul", b.emit("expm1", b.emit("mul", x, inside)), negative)
    return b.emit("where", b.emit("gt", x, 0.0), b.emit("mul", x, positive), below)


def _elu(b: Builder, x: Value, alpha: float = 1.0) -> Value:
    return _exponential(b, x, 1.0, float(alpha), 1.0)


def _celu(b: Builder, x: Value, alpha: float = 1.0) -> Value:
    return _exponential(b, x, 1.0, float(alpha), 1.0 / alpha)


def _selu(b: Builder, x: Value) -> Value:
    return _exponential(b, x, SELU_SCALE, SELU_ALPHA * SELU_SCALE, 1.0)


def _leaky_relu(b: Builder, x: Value, negative_slope: float = 0.01) -> Value:
    below = b.emit("mul", x, float(negative_slope))
    return b.emit("where", b.emit("gt", x, 0.0), x, below)


def _hardtanh(b: Builder, x: Value, min_val: float = -1.0, max_val: float = 1.0) -> Value:
    return b.mark("threshold_max", b.mark("threshold_min", x, float(min_val)), float(max_val))


def _hardsigmoid(b: Builder, x: Value) -> Value:
    return b.emit("div", _hardtanh(b, b.emit("add", x, 3.0), 0.0, 6.0), 6.0)


def _hardswish(b: Builder, x: Value) -> Value:
    raised = _hardtanh(b, b.emit("add", x, 3.0), 0.0, 6.0)
    return b.emit("div", b.emit("mul", x, raised), 6.0)


def _softsign(b: Builder, x: Value) -> Value:
    return b.emit("div", x, b.emit("add", b.emit("abs", x), 1.0))


def _tanhshrink(b: Builder, x: Value) -> Value:
    return b.emit("sub", x, b.emit("tanh", x))


def _threshold(b: Builder, x: Value, threshold: float, value: float) -> Value:
    return b.emit("where", b.emit("le", x, float(threshold)), float(value), x)


# By the name that torch gives the function.
ACTIVATIONS: dict[str, Callable[..., Value]] = {
    "celu": _not_in_place(_celu),
    "elu": _not_in_place(_elu),
    "gelu": _gelu,
    "hardsigmoid": _not_in_place(_hardsigmoid),
    "hardswish": _not_in_place(_hardswish),
    "hardtanh": _not_in_place(_hardtanh),
    "leaky_relu": _not_in_place(_leaky_relu),
    "log_sigmoid": _logsigmoid,
    "logsigmoid": _logsigmoid,
    "mish": _not_in_place(_mish),
    "relu": _not_in_place(_relu),
    "relu6": _not_in_place(lambda b, x: _hardtanh(b, x, 0.0, 6.0)),
    "selu": _not_in_place(_selu),
    "silu": _not_in_place(lambda b, x: b.emit("silu", x)),
    "softplus": _softplus,
    "softsign": _softsign,
    "tanhshrink": _tanhshrink,
    "threshold": _not_in_place(_threshold),
}
