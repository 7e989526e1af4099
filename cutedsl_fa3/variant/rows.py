"""Rows: a few values beside each other for each score, such as `t[b, h, q]` of a 4-d tensor.

Operations on rows are unrolled into operations on their elements, by torch's rules of shapes, so
that a graph only ever holds single values. Sums are taken in pairs; torch does not say in which
order it takes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cutedsl_fa3.errors import VariantError

from .graph import Builder, Value
from .surface import CASTS, SURFACE

LONGEST = 128  # elements of a row: each costs a load and an operation for each score

Place = Value | range


@dataclass(frozen=True)
class Row:
    """Values in row-major order."""

    shape: tuple[int, ...]
    values: tuple[Value, ...]

    def at(self, index: tuple[int, ...], shape: tuple[int, ...]) -> Value:
        """The value at an index of a shape that this one broadcasts to."""
        own = index[len(shape) - len(self.shape) :]
        number = 0
        for i, size in zip(own, self.shape, strict=True):
            number = number * size + (0 if size == 1 else i)
        return self.values[number]


@dataclass(frozen=True)
class Partial:
    """A captured tensor of which some dimensions are not indexed: those whose place is a range."""

    number: int
    places: tuple[Place, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(place) for place in self.places if isinstance(place, range))

    def elements(self) -> Iterator[tuple[Value, ...]]:
        """The indices of each element, in row-major order."""
        free = [place for place in self.places if isinstance(place, range)]
        for chosen in itertools.product(*free):
            rest = iter(chosen)
            yield tuple(next(rest) if isinstance(p, range) else p for p in self.places)


def row_of(value: Value | Row) -> Row:
    """One value as a row of no dimensions."""
    return value if isinstance(value, Row) else Row((), (value,))


def value_of(shape: tuple[int, ...], values: Sequence[Value]) -> Value | Row:
    """A row, or its value if it has no dimensions."""
    return Row(shape, tuple(values)) if shape else values[0]


def elementwise(b: Builder, name: str, values: Sequence[Any], named: dict[str, Any]) -> Any:
    """An operation of `SURFACE` on each element of the rows among its arguments."""
    entry = SURFACE[name]
    rows = [value for value in (*values, *named.values()) if isinstance(value, Row)]
    if name.startswith("new_"):  # of the row's type alone
        return entry(b, rows[0].values[0], *values[1:], **named)
    shape = broadcast([row.shape for row in rows])
    found = []
    for index in itertools.product(*map(range, shape)):

        def one(value: Any, index: tuple[int, ...] = index) -> Any:
            return value.at(index, shape) if isinstance(value, Row) else value

        found.append(entry(b, *map(one, values), **{key: one(v) for key, v in named.items()}))
    return value_of(shape, found)


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Raises: VariantError for shapes that do not go together."""
    sizes = []
    for column in itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        wide = {size for size in column if size != 1}
        if len(wide) > 1:
            said = " and ".join(map(str, shapes))
            raise VariantError(f"rows of shapes {said} do not go together")
        sizes.append(wide.pop() if wide else 1)
    shape = tuple(reversed(sizes))
    if math.prod(shape) > LONGEST:
        raise VariantError(
            f"a row of shape {shape} is too long: operations on rows are unrolled, up to "
            f"{LONGEST} elements"
        )
    return shape


def _axes(row: Row, dim: Any) -> tuple[int, ...]:
    """The dimensions named, all of them by None. Raises: VariantError for others."""
    if dim is None:
        return tuple(range(len(row.shape)))
    rank = max(1, len(row.shape))
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    for one in dims:
        if isinstance(one, bool) or not isinstance(one, int) or not -rank <= one < rank:
            raise VariantError(
                f"dim is {one!r} of a row of shape {row.shape}; valid are numbers from {-rank} to "
                f"{rank - 1}"
            )
    return tuple(one % rank for one in dims if row.shape)


def _tree(join: Callable[[Value, Value], Value], values: list[Value]) -> Value:
    """Values joined in pairs, so that the graph stays shallow and sums exact."""
    while len(values) > 1:
        pairs = [join(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]


def _reduced(
    x: Value | Row, dim: Any, keepdim: bool, fold: Callable[[list[Value]], Value]
) -> Value | Row:
    row = row_of(x)
    axes = _axes(row, dim)
    kept = [range(1) if i in axes else range(size) for i, size in enumerate(row.shape)]
    inner = [range(row.shape[i]) for i in axes]
    found = []
    for outer in itertools.product(*kept):
        values = []
        for chosen in itertools.product(*inner):
            index = list(outer)
            for axis, i in zip(axes, chosen, strict=True):
                index[axis] = i
            values.append(row.at(tuple(index), row.shape))
        found.append(fold(values))
    sizes = [1 if i in axes else size for i, size in enumerate(row.shape)]
    shape = sizes if keepdim else [size for i, size in enumerate(sizes) if i not in axes]
    return value_of(tuple(shape), found)


def _joined(op: str, before: Callable[[Builder, Value], Value]) -> Callable[..., Value | Row]:
    def reduction(
        b: Builder, x: Value | Row, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Value | Row:
        if dtype is not None and dtype not in CASTS:
            raise VariantError(f"dtype {dtype} is not supported; use float32, int32, int64 or bool")

        def fold(values: list[Value]) -> Value:
            typed = [v if dtype is None else b.convert(v, CASTS[dtype]) for v in values]
            return _tree(lambda u, v: b.emit(op, u, v), [before(b, v) for v in typed])

        return _reduced(x, dim, keepdim, fold)

    return reduction


def _number(b: Builder, value: Value) -> Value:
    return b.convert(value, "int") if b.dtype(value) == "bool" else value


def _truth(b: Builder, value: Value) -> Value:
    return b.convert(value, "bool")


_sum = _joined("add", _number)


def _mean(b: Builder, x: Value | Row, dim: Any = None, keepdim: bool = False) -> Any:
    total = _sum(b, x, dim, keepdim)
    count = len(row_of(x).values) // len(row_of(total).values)
    if any(b.dtype(value) != "float" for value in row_of(x).values):
        raise VariantError("torch.mean takes float values; convert them with .float()")
    return elementwise(b, "div", [row_of(total), float(count)], {})


def _dot(b: Builder, x: Any, other: Any) -> Value | Row:
    shapes = row_of(x).shape, row_of(other).shape
    if len(shapes[0]) != 1 or shapes[0] != shapes[1]:
        raise VariantError(
            f"a product of rows of shapes {shapes[0]} and {shapes[1]}; valid are two rows of one "
            "dimension and the same length"
        )
    return _sum(b, elementwise(b, "mul", [x, other], {}))


def _extreme(name: str) -> Callable[..., Value | Row]:
    def entry(b: Builder, x: Value | Row, *other: Any, **named: Any) -> Value | Row:
        if named or (other and isinstance(other[0], int)):
            raise VariantError(f"torch.{name} of a row by dim gives a pair; write torch.a{name}")
        if other:
            return elementwise(b, name, [x, *other], {})
        return REDUCTIONS[f"a{name}"](b, x)

    return entry


def _as_is(b: Builder, value: Value) -> Value:
    return value


# What makes fewer values of a row, by torch's name.
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "prod": _joined("mul", _number),
    "any": _joined("or", _truth),
    "all": _joined("and", _truth),
    "amax": _joined("maximum", _as_is),
    "amin": _joined("minimum", _as_is),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "count_nonzero": lambda b, x, dim=None: _sum(b, elementwise(b, "bool", [row_of(x)], {}), dim),
    **dict.fromkeys(("dot", "vdot", "inner", "matmul", "vecdot"), _dot),
}


def _unsqueeze(b: Builder, x: Value | Row, dim: int) -> Row:
    row = row_of(x)
    (at,) = _axes(Row((*row.shape, 1), ()), dim)
    return Row((*row.shape[:at], 1, *row.shape[at:]), row.values)


def _squeeze(b: Builder, x: Value | Row, dim: Any = None) -> Value | Row:
    row = row_of(x)
    axes = _axes(row, dim)
    kept = [size for i, size in enumerate(row.shape) if size != 1 or i not in axes]
    return value_of(tuple(kept), row.values)


def _reshape(b: Builder, x: Value | Row, *shape: Any) -> Value | Row:
    row = row_of(x)
    sizes = tuple(shape[0]) if shape and not isinstance(shape[0], int) else shape
    known = math.prod(size for size in sizes if size != -1)
    free = sizes.count(-1)
    if free:
        sizes = tuple(len(row.values) // known if size == -1 else size for size in sizes)
    if free > 1 or math.prod(sizes) != len(row.values):
        raise VariantError(f"a row of shape {row.shape} has no shape {shape}")
    return value_of(sizes, row.values)


# What gives the same values another shape.
SHAPES: dict[str, Callable[..., Any]] = {
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "view": _reshape,
    "flatten": lambda b, x: _reshape(b, x, -1),
}


def picked(row: Row, index: Any) -> Value | Row:
    """Elements of a row, by Python ints and slices.

    Raises: VariantError for a traced index, which only captured tensors take.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    if not all(one is Ellipsis or type(one) is int or isinstance(one, slice) for one in given):
        raise VariantError(
            "a row that was computed is indexed with Python ints and slices; a traced index is "
            "for captured tensors, as in t[b, h]"
        )
    if Ellipsis in given:
        at = given.index(Ellipsis)
        given[at : at + 1] = [slice(None)] * (len(row.shape) - len(given) + 1)
    if len(given) > len(row.shape):
        raise VariantError(f"a row of shape {row.shape} is indexed with {len(given)}")
    spans = [range(size) for size in row.shape]
    for axis, (one, span) in enumerate(zip(given, spans, strict=False)):
        if isinstance(one, slice):
            spans[axis] = span[one]
        elif -len(span) <= one < len(span):
            spans[axis] = range(span[one], span[one] + 1)
        else:
            raise VariantError(f"index {one} is out of range for a row of shape {row.shape}")
    kept = [span for span, one in itertools.zip_longest(spans, given) if type(one) is not int]
    if not all(kept):
        raise VariantError(f"a slice of a row of shape {row.shape} is empty")
    values = [row.at(at, row.shape) for at in itertools.product(*spans)]
    return value_of(tuple(map(len, kept)), values)


def entry(name: str, values: Sequence[Any]) -> Callable[..., Any] | None:
    """What a torch function does to these arguments, some of them rows; None if it is unknown."""
    binary = name in ("max", "min") and len(values) == 2 and not isinstance(values[1], int)
    if name in SHAPES:
        return SHAPES[name]
    if name in REDUCTIONS and not (binary and name in SURFACE):
        return REDUCTIONS[name]
    if name in SURFACE:
        return lambda b, *args, **named: elementwise(b, name, args, named)
    return None
