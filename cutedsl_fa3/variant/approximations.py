"""Functions of a float from the few that the special-function unit has, on any arithmetic.

Each is within 2e-5 of its value, relatively, wherever fp32 holds that normally, and passes NaN and
infinities on as torch does. They are written on `Unit`, so that Python, torch and device values
all do.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)

# erfc(t) * exp(t * t) = z * polynomial(z) at z = 1 / (1 + 0.33 t), for t from 0 to 10.5: fitted to
# the least largest relative error, which is 1.2e-7.
_SLOPE = 0.33
_ERFC = (
    0.186345813, 0.183129138, 0.200193666, 0.0504955268,
    0.402481197, -0.344740628, 0.456567362, -0.134471996,
)  # fmt: skip
_FARTHEST = 16.0  # erfc is 0 in fp32 from 10.1 on

# Taylor series: erf(x) / x in x^2, and (exp(x) - 1) / x in x.
_ERF = tuple(
    2.0 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(6)
)
_EXPM1 = tuple(1.0 / math.factorial(n + 1) for n in range(8))
_ATANH = (2.0, 2.0 / 3.0, 2.0 / 5.0, 2.0 / 7.0)


class Unit(Protocol):
    """What a float can do beside arithmetic and comparisons."""

    def exp2(self, a: Any) -> Any: ...
    def log2(self, a: Any) -> Any: ...
    def reciprocal(self, a: Any) -> Any: ...
    def absolute(self, a: Any) -> Any: ...
    def select(self, condition: Any, yes: Any, no: Any) -> Any: ...


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    value = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * x + coefficient
    return value


def expm1(a: Any, unit: Unit) -> Any:
    """exp(a) - 1; near 0, where that cancels, from the series."""
    near = a * _polynomial(a, _EXPM1)
    return unit.select(unit.absolute(a) < 0.5, near, unit.exp2(a * LOG2_E) - 1.0)


def log1p(a: Any, unit: Unit) -> Any:
    """log(1 + a); near 0, where the sum loses a's digits, as 2 atanh(a / (2 + a))."""
    z = a * unit.reciprocal(a + 2.0)
    near = z * _polynomial(z * z, _ATANH)
    return unit.select(unit.absolute(a) < 0.25, near, unit.log2(a + 1.0) * LN_2)


def _erfc(t: Any, unit: Unit) -> Any:
    """1 - erf(t) of t >= 0, to the same relative error however small it is."""
    t = unit.select(t > _FARTHEST, _FARTHEST, t)
    z = unit.reciprocal(t * _SLOPE + 1.0)
    # t * t in two parts, the first exact: its rounding would be multiplied by the exponential.
    spread = t * 4097.0
    high = spread - (spread - t)
    rest = (t - high) * (t + high)
    exponential = unit.exp2(high * high * -LOG2_E) * unit.exp2(rest * -LOG2_E)
    return exponential * (z * _polynomial(z, _ERFC))


def erf(a: Any, unit: Unit) -> Any:
    """The error function."""
    size = unit.absolute(a)
    far = 1.0 - _erfc(size, unit)
    far = unit.select(a < 0.0, far * -1.0, far)
    return unit.select(size < 0.5, a * _polynomial(a * a, _ERF), far)


def gelu(a: Any, unit: Unit) -> Any:
    """a times the normal distribution's integral up to a."""
    beyond = _erfc(unit.absolute(a) * math.sqrt(0.5), unit) * 0.5
    return a * unit.select(a < 0.0, beyond, 1.0 - beyond)


def _gated(a: Any, gate: Any, unit: Unit) -> Any:
    """a * sigmoid(gate), from the exponential that does not overflow; a has the gate's sign."""
    exponential = unit.exp2(unit.absolute(gate) * -LOG2_E)
    above = unit.select(gate < 0.0, a * exponential, a)
    return above * unit.reciprocal(exponential + 1.0)


def gelu_tanh(a: Any, unit: Unit) -> Any:
    """gelu with the integral taken for (1 + tanh(u)) / 2, which is sigmoid(2 u)."""
    return _gated(a, 2.0 * math.sqrt(2.0 / math.pi) * (a + 0.044715 * a * a * a), unit)


def silu(a: Any, unit: Unit) -> Any:
    """a times sigmoid(a)."""
    return _gated(a, a, unit)


def softplus(a: Any, unit: Unit) -> Any:
    """log(1 + exp(a)), from the exponential that does not overflow."""
    rest = log1p(unit.exp2(unit.absolute(a) * -LOG2_E), unit)
    return unit.select(a < 0.0, rest, a + rest)
