"""Functions of several floats that take one reciprocal together, on any arithmetic.

1 / a and 1 / b follow from 1 / (a b) by two multiplications, and the special-function unit gives
one reciprocal in the time of eight of them. Each denominator here is 1 + 2^exponent; exponents are
held below `CEILING`, where the functions have reached their limits, so that no product overflows.
NaN stays NaN, and reaches the values that share its reciprocal: `fusion.spoils_row` says where
that makes no difference. Relative errors are a few units in the last place of fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

MOST = 2  # values a reciprocal; 4 need more multiplications than they save of the unit's time
CEILING = 60.0  # 2^60 + 1 is 2^60, and (2^60)^2 is far from the end of fp32


class Unit(Protocol):
    """What a float can do beside arithmetic; `fma` may round once or twice."""

    def exp2(self, a: Any) -> Any: ...
    def reciprocal(self, a: Any) -> Any: ...
    def fma(self, a: Any, b: Any, c: Any) -> Any: ...
    def lesser(self, a: Any, b: Any) -> Any:
        """The smaller; NaN if either is NaN."""


def _exponentials(exponents: Sequence[Any], unit: Unit) -> list[Any]:
    return [unit.exp2(unit.lesser(e, CEILING)) for e in exponents]


def steps(exponents: Sequence[Any], low: float, high: float, unit: Unit) -> list[Any]:
    """low + (high - low) / (1 + 2^-exponent): from low to high as the exponent grows.

    Absolute errors are relative to the larger of both; high - low is not 0.

    Shape: one or two exponents, and as many results.
    """
    fall = low - high
    if len(exponents) == 1:
        share = unit.reciprocal(unit.exp2(exponents[0]) + 1.0)
        return [unit.fma(share, fall, high)]
    a, b = _exponentials(exponents, unit)
    scaled = unit.fma(b, 1.0 / fall, 1.0 / fall)
    share = unit.reciprocal(unit.fma(a, scaled, scaled))  # fall / ((1 + a) (1 + b))
    base = share + high
    return [unit.fma(share, b, base), unit.fma(share, a, base)]


def sigmoids(exponents: Sequence[Any], unit: Unit) -> list[Any]:
    """1 / (1 + 2^-exponent), to the same relative error however small it is.

    Shape: one or two exponents, and as many results.
    """
    if len(exponents) == 1:
        return [unit.reciprocal(unit.exp2(exponents[0] * -1.0) + 1.0)]
    a, b = _exponentials(exponents, unit)
    more = a + 1.0
    share = unit.reciprocal(unit.fma(more, b, more))
    both = share * (a * b)
    return [unit.fma(share, a, both), unit.fma(share, b, both)]
