"""Functions of several floats that take one reciprocal together, on any arithmetic.

1 / a and 1 / b follow from 1 / (a b) by two multiplications, and the special-function unit gives
one reciprocal in the time of eight of them. Each denominator here is 1 + 2^exponent; exponents are
held below a ceiling where the functions have reached their limits, so that no product overflows.
NaN stays NaN, and reaches the values that share its reciprocal: `fusion.spoils_row` says where
that makes no difference. Relative errors are a few units in the last place of fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

# Values a reciprocal, by operation: 1, 2 or 4. More save the unit's time and cost instructions.
MOST = {"tanh": 2, "sigmoid": 2}
TOGETHER = max(MOST.values())
CEILINGS = {2: 60.0, 4: 30.0}  # by the number of values: 1 + 2^30 is 2^30, and (2^60)^2 is fp32


class Unit(Protocol):
    """What a float can do beside arithmetic; `fma` may round once or twice."""

    def exp2(self, a: Any) -> Any: ...
    def reciprocal(self, a: Any) -> Any: ...
    def fma(self, a: Any, b: Any, c: Any) -> Any: ...
    def lesser(self, a: Any, b: Any) -> Any:
        """The smaller; NaN if either is NaN."""


Pair = tuple[Any, Any]


def steps(exponents: Sequence[Any], low: float, high: float, unit: Unit) -> list[Any]:
    """low + (high - low) / (1 + 2^-exponent): from low to high as the exponent grows.

    Absolute errors are relative to the larger of both; their distance is at least 1 / 4.

    Shape: one, two or four exponents, and as many results.
    """
    fall = low - high
    if len(exponents) == 1:
        share = unit.reciprocal(unit.exp2(exponents[0]) + 1.0)
        return [unit.fma(share, fall, high)]
    pairs = _exponentials(exponents, unit)
    scaled = [unit.fma(b, 1.0 / fall, 1.0 / fall) for _, b in pairs]
    products = [unit.fma(a, more, more) for (a, _), more in zip(pairs, scaled, strict=True)]
    found = []
    for (a, b), share in zip(pairs, _reciprocals(products, unit), strict=True):
        base = share + high  # share is fall / ((1 + a) (1 + b))
        found += [unit.fma(share, b, base), unit.fma(share, a, base)]
    return found


def sigmoids(exponents: Sequence[Any], unit: Unit) -> list[Any]:
    """1 / (1 + 2^-exponent), to the same relative error however small it is.

    Shape: one, two or four exponents, and as many results.
    """
    if len(exponents) == 1:
        return [unit.reciprocal(unit.exp2(exponents[0] * -1.0) + 1.0)]
    pairs = _exponentials(exponents, unit)
    more = [a + 1.0 for a, _ in pairs]
    products = [unit.fma(m, b, m) for m, (_, b) in zip(more, pairs, strict=True)]
    found = []
    for (a, b), share in zip(pairs, _reciprocals(products, unit), strict=True):
        both = share * (a * b)
        found += [unit.fma(share, a, both), unit.fma(share, b, both)]
    return found


def _exponentials(exponents: Sequence[Any], unit: Unit) -> list[Pair]:
    """2^exponent up to the ceiling, two by two."""
    ceiling = CEILINGS[len(exponents)]
    values = [unit.exp2(unit.lesser(e, ceiling)) for e in exponents]
    return list(zip(values[::2], values[1::2], strict=True))


def _reciprocals(products: Sequence[Any], unit: Unit) -> list[Any]:
    """Of one product, or of two by one reciprocal."""
    if len(products) == 1:
        return [unit.reciprocal(products[0])]
    share = unit.reciprocal(products[0] * products[1])
    return [share * products[1], share * products[0]]
