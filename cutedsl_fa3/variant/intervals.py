"""Interval arithmetic on a graph's integers and conditions, three-valued and safe in 32 bits.

A range that is not known is None, a condition that is not known may be both. What is decided before
any value is known depends on the graph alone, so every `Integers` comes to the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .bounds import PythonIntegers
from .ops import OPS, Integers
from .solve import LARGEST

LOWEST, HIGHEST = -(2**31), 2**31 - 1

Condition = tuple[Any, Any]  # (may be true, may be false)
UNKNOWN: Condition = (True, True)

_PYTHON = PythonIntegers()


class Interval(NamedTuple):
    """An integer between `low` and `high`, which lie between the numbers `least` and `most`.

    `single` says that low and high are one value, whatever the tile.
    """

    low: Any
    high: Any
    least: int = LOWEST
    most: int = HIGHEST
    single: bool = False

    @property
    def literal(self) -> int | None:
        """The number of the graph that this is, if it is one."""
        return self.least if self.least == self.most else None


def number(value: int) -> Interval:
    """A number of the graph."""
    return Interval(value, value, value, value, True)


def position(low: Any, high: Any, single: bool = False) -> Interval:
    """Positions, lengths, batch entries and heads: not negative, and never beyond LARGEST."""
    return Interval(low, high, 0, LARGEST, single)


Rule = Callable[..., "tuple[Any, Any] | None"]


def _table_rule(name: str) -> Rule:
    interval = OPS[name].interval
    assert interval is not None
    return lambda ints, *args: interval(ints, *((a.low, a.high) for a in args))


def _mul(ints: Integers, a: Interval, b: Interval) -> tuple[Any, Any]:
    if a.literal is not None:
        a, b = b, a
    if (factor := b.literal) is not None:
        ends = ints.mul(a.low, factor), ints.mul(a.high, factor)
        return ends if factor >= 0 else ends[::-1]
    if a.least >= 0 and b.least >= 0:
        return ints.mul(a.low, b.low), ints.mul(a.high, b.high)
    corners = [ints.mul(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    low = high = corners[0]
    for corner in corners[1:]:
        low, high = ints.minimum(low, corner), ints.maximum(high, corner)
    return low, high


def _divisor(b: Interval) -> int | None:
    return b.literal if b.literal is not None and b.literal > 0 else None


def _floordiv(ints: Integers, a: Interval, b: Interval) -> tuple[Any, Any] | None:
    divisor = _divisor(b)
    if divisor is None:
        return None
    return ints.floordiv(a.low, divisor), ints.floordiv(a.high, divisor)


def _truncdiv(ints: Integers, a: Interval, b: Interval) -> tuple[Any, Any] | None:
    divisor = _divisor(b)
    if divisor is None or a.least >= 0:
        return _floordiv(ints, a, b)

    def end(x: Any) -> Any:
        raised = ints.where(ints.less(x, 0), ints.add(x, divisor - 1), x)
        return ints.floordiv(raised, divisor)

    return end(a.low), end(a.high)


def _mod(ints: Integers, a: Interval, b: Interval) -> tuple[Any, Any] | None:
    divisor = _divisor(b)
    if divisor is None:
        return None
    if a.least >= 0 and a.most < divisor:
        return a.low, a.high
    first, last = ints.floordiv(a.low, divisor), ints.floordiv(a.high, divisor)
    wraps = ints.less(first, last)
    low = ints.where(wraps, 0, ints.sub(a.low, ints.mul(first, divisor)))
    return low, ints.where(wraps, divisor - 1, ints.sub(a.high, ints.mul(last, divisor)))


def _fmod(ints: Integers, a: Interval, b: Interval) -> tuple[Any, Any] | None:
    found = _mod(ints, a, b)
    if found is None or a.least >= 0:
        return found
    most = b.least - 1
    negative = ints.less(a.low, 0)
    above = ints.maximum(ints.minimum(a.high, most), 0)
    low = ints.where(negative, ints.maximum(a.low, -most), found[0])
    return low, ints.where(negative, above, found[1])


def _shift(rule: Rule) -> Rule:
    def shifted(ints: Integers, a: Interval, b: Interval) -> tuple[Any, Any] | None:
        if b.literal is None or not 0 <= b.literal <= 30:
            return None
        return rule(ints, a, number(1 << b.literal))

    return shifted


def _bit_not(ints: Integers, a: Interval) -> tuple[Any, Any]:
    return ints.sub(-1, a.high), ints.sub(-1, a.low)


def _bit_and(ints: Integers, a: Interval, b: Interval) -> tuple[Any, Any]:
    if a.literal is not None:
        a, b = b, a
    mask = b.literal
    if mask is not None and 0 < mask < HIGHEST and mask & (mask + 1) == 0:
        return _mod(ints, a, number(mask + 1))  # type: ignore[return-value]
    if mask is not None and LOWEST < mask < 0 and -mask & (-mask - 1) == 0:
        steps = _floordiv(ints, a, number(-mask))
        assert steps is not None
        return ints.mul(steps[0], -mask), ints.mul(steps[1], -mask)
    low, high = LOWEST, HIGHEST
    for part in (a, b):  # neither sign bit nor a bit above survives one that has none
        bounded = ints.not_(ints.less(part.low, 0)) if part.least < 0 else True
        low = ints.where(bounded, 0, low)
        high = ints.where(bounded, ints.minimum(high, part.high), high)
    return low, high


def _bit_join(least: Callable[[Integers, Interval, Interval], Any]) -> Rule:
    """`|` and `^` of two that are not negative have no bit that the sum cannot reach."""

    def joined(ints: Integers, a: Interval, b: Interval) -> tuple[Any, Any]:
        known: Any = True
        for part in (a, b):
            if part.least < 0:
                known = ints.and_(known, ints.not_(ints.less(part.low, 0)))
        # Beyond 32 bits the sum would wrap, and no bit is beyond them.
        beyond = ints.less(ints.sub(HIGHEST, a.high), b.high)
        top = ints.where(beyond, HIGHEST, ints.add(a.high, b.high))
        return ints.where(known, least(ints, a, b), LOWEST), ints.where(known, top, HIGHEST)

    return joined


RULES: dict[str, Rule] = {
    **{name: _table_rule(name) for name in ("add", "sub", "neg", "abs", "minimum", "maximum")},
    "mul": _mul,
    "floordiv": _floordiv,
    "truncdiv": _truncdiv,
    "mod": _mod,
    "fmod": _fmod,
    "shl": _shift(_mul),
    "shr": _shift(_floordiv),
    "bit_not": _bit_not,
    "bit_and": _bit_and,
    "bit_or": _bit_join(lambda ints, a, b: ints.maximum(a.low, b.low)),
    "bit_xor": _bit_join(lambda ints, a, b: 0),
}

# Rules that give one value for single values.
_EXACT = frozenset(RULES) - {"fmod", "bit_and", "bit_or", "bit_xor"}


def _limit(op: str, args: tuple[Interval, ...]) -> int:
    """How large operands may be so that the result of `op` fits 32 bits."""
    if op in ("add", "sub"):
        return 2**30 - 1
    if op == "shl":
        return HIGHEST >> args[1].least
    if op == "mul":
        factor = next((a.least for a in args if a.literal is not None), None)
        return 46340 if factor is None else HIGHEST // abs(factor)
    return HIGHEST  # neg and abs, which the lowest integer alone leaves


def combined(ints: Integers, op: str, args: tuple[Interval | None, ...]) -> Interval | None:
    """The range of an operation on integers; beyond 32 bits, where it would wrap, all integers."""
    if op not in RULES or any(a is None for a in args):
        return None
    known = tuple(a for a in args if a is not None)
    static = RULES[op](_PYTHON, *(Interval(a.least, a.most, a.least, a.most) for a in known))
    found = RULES[op](ints, *known)
    if static is None or found is None:
        return None
    low, high = found
    if LOWEST <= static[0] and static[1] <= HIGHEST:
        single = op in _EXACT and all(a.single for a in known)
        return Interval(low, low if single else high, *static, single)
    limit, fits = _limit(op, known), True
    for a in known:
        if a.literal is None or op not in ("mul", "shl"):
            fits = _within(ints, a, limit, fits)
    return Interval(ints.where(fits, low, LOWEST), ints.where(fits, high, HIGHEST))


def _within(ints: Integers, a: Interval, limit: int, also: Any) -> Any:
    if a.least < -limit:
        also = ints.and_(also, ints.not_(ints.less(a.low, -limit)))
    if a.most > limit:
        also = ints.and_(also, ints.not_(ints.less(limit, a.high)))
    return also


def chosen(
    ints: Integers, condition: Condition, a: Interval | None, b: Interval | None
) -> Interval | None:
    """The range of `where(condition, a, b)`."""
    if a is None or b is None:
        return None
    yes, no = condition

    def end(join: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
        return ints.where(yes, ints.where(no, join(x, y), x), y)

    low, high = end(ints.minimum, a.low, b.low), end(ints.maximum, a.high, b.high)
    return Interval(low, high, min(a.least, b.least), max(a.most, b.most))


def counted(ints: Integers, condition: Condition) -> Interval:
    """A condition as 0 or 1."""
    yes, no = condition
    return Interval(ints.where(no, 0, 1), ints.where(yes, 1, 0), 0, 1)


def compared(ints: Integers, op: str, a: Interval | None, b: Interval | None) -> Condition:
    """What a comparison of two ranges may be."""
    if a is None or b is None:
        return UNKNOWN
    match op:
        case "gt":
            return _less(ints, b, a)
        case "ge":
            return _less(ints, a, b)[::-1]
        case "le":
            return _less(ints, b, a)[::-1]
        case "ne":
            return _equal(ints, a, b)[::-1]
        case "eq":
            return _equal(ints, a, b)
    return _less(ints, a, b)


def _less(ints: Integers, a: Interval, b: Interval) -> Condition:
    if a.most < b.least:
        return True, False
    if a.least >= b.most:
        return False, True
    return ints.less(a.low, b.high), ints.not_(ints.less(a.high, b.low))


def _equal(ints: Integers, a: Interval, b: Interval) -> Condition:
    """Two ranges are one and the same value where neither's low is below the other's high."""
    if a.most < b.least or b.most < a.least:
        return False, True
    apart = ints.or_(ints.less(a.high, b.low), ints.less(b.high, a.low))
    return ints.not_(apart), ints.or_(ints.less(a.low, b.high), ints.less(b.low, a.high))


def joined(ints: Integers, op: str, args: tuple[Condition, ...]) -> Condition:
    """What a logical operation on conditions may be."""
    if op == "not":
        return args[0][::-1]
    (a, not_a), (b, not_b) = args[-2:]
    match op:
        case "and":
            return ints.and_(a, b), ints.or_(not_a, not_b)
        case "or":
            return ints.or_(a, b), ints.and_(not_a, not_b)
        case "xor":
            return (
                ints.or_(ints.and_(a, not_b), ints.and_(not_a, b)),
                ints.or_(ints.and_(a, b), ints.and_(not_a, not_b)),
            )
    yes, no = args[0]  # where
    return (
        ints.or_(ints.and_(yes, a), ints.and_(no, b)),
        ints.or_(ints.and_(yes, not_a), ints.and_(no, not_b)),
    )


COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
LOGIC = frozenset({"and", "or", "xor", "not"})
