"""Integers of a warp: one for all lanes, one a lane, or not known.

A value that hangs on floating-point data is `UNKNOWN`: it may be stored and passed on, but nothing
that decides which barrier is touched may hang on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

WARP = 32


class Unknown:
    """A value that the model does not compute."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


def uniform(value: Any, mask: np.ndarray | None = None) -> Any:
    """The one value of all (active) lanes as an int, or the value as it is where they differ."""
    if isinstance(value, np.ndarray):
        chosen = value if mask is None else value[mask]
        if len(chosen) and (chosen == chosen[0]).all():
            return int(chosen[0])
    return value


def spread(value: Any) -> np.ndarray:
    """One integer a lane."""
    if isinstance(value, np.ndarray):
        return value
    return np.full(WARP, value, dtype=np.int64)


def wrap(value: Any, bits: int) -> Any:
    """Two's complement in `bits` bits; a bit is 0 or 1."""
    if bits == 1:
        return value & 1
    if bits >= 64:
        return value if isinstance(value, np.ndarray) else (value + 2**63) % 2**64 - 2**63
    half = 1 << (bits - 1)
    return ((value + half) & ((1 << bits) - 1)) - half


def unsigned(value: Any, bits: int) -> Any:
    """The same bits, read without a sign."""
    if bits >= 64:
        if isinstance(value, np.ndarray):
            return value  # lanes of 64 bits are addresses and lengths, never negative
        return value % 2**64
    return value & ((1 << bits) - 1)


def truncated(a: Any, b: Any) -> Any:
    """Division towards zero."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        a, b = spread(a), spread(b)
        safe = np.where(b == 0, 1, b)
        return np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe))
    if b == 0:
        return UNKNOWN
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def floored(a: Any, b: Any) -> Any:
    """Division towards minus infinity."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        b = spread(b)
        return spread(a) // np.where(b == 0, 1, b)
    return UNKNOWN if b == 0 else a // b


def remainder(a: Any, b: Any) -> Any:
    """The remainder with the sign of the dividend."""
    quotient = truncated(a, b)
    return UNKNOWN if quotient is UNKNOWN else a - b * quotient


def select(condition: Any, a: Any, b: Any) -> Any:
    """`a` in the lanes where the condition holds, else `b`."""
    if condition is UNKNOWN:
        return a if a is b else UNKNOWN
    if isinstance(condition, np.ndarray):
        if (condition != 0).all():
            return a
        if (condition == 0).all():
            return b
        if a is UNKNOWN or b is UNKNOWN or not _number(a) or not _number(b):
            return UNKNOWN
        return np.where(condition != 0, a, b)
    return a if condition else b


def _number(value: Any) -> bool:
    return isinstance(value, int | np.integer | np.ndarray)


def both(a: Any, b: Any) -> Any:
    """Bitwise and, where a zero decides without the other side."""
    for known, other in ((a, b), (b, a)):
        if other is UNKNOWN:
            return (
                0
                if known is not UNKNOWN and not isinstance(known, np.ndarray) and known == 0
                else UNKNOWN
            )
    return a & b


def either(a: Any, b: Any) -> Any:
    """Bitwise or of two known values."""
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else a | b


def compare(predicate: str, a: Any, b: Any, bits: int) -> Any:
    """An arith.cmpi."""
    if predicate.startswith("u"):
        a, b = unsigned(a, bits), unsigned(b, bits)
    found = _COMPARE[predicate.lstrip("us") if len(predicate) > 2 else predicate](a, b)
    return found.astype(np.int64) if isinstance(found, np.ndarray) else int(found)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def minimum(a: Any, b: Any) -> Any:
    """The smaller, lane by lane."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger, lane by lane."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)


def population(value: Any, bits: int) -> Any:
    """How many bits are set."""
    if isinstance(value, np.ndarray):
        return np.array([bin(int(v) & ((1 << bits) - 1)).count("1") for v in value], dtype=np.int64)
    return bin(value & ((1 << bits) - 1)).count("1")
