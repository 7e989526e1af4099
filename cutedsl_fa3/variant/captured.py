"""The captured tensors of a trace: which may be captured, and how they are indexed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .graph import CAPTURE_DTYPES, Builder, Ref, Value
from .rows import LONGEST, Partial, Place, Row, broadcast, value_of


class Captures:
    """The captured tensors by number, each once, and loads of their elements.

    `refuse` raises the error of the trace with the user's line; `value` makes an index a graph
    value, or hands it back as it is.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        builder: Builder,
        refuse: Callable[[str], NoReturn],
        value: Callable[[Any, str], Any],
    ) -> None:
        self.tensors = tensors
        self.builder = builder
        self.refuse = refuse
        self.value = value
        self.numbers = {id(tensor): i for i, tensor in enumerate(tensors)}

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a captured tensor, the same each time it is used."""
        if id(tensor) not in self.numbers:
            self._check_storage(tensor)
            if tensor.dtype not in CAPTURE_DTYPES:
                allowed = ", ".join(str(dtype)[6:] for dtype in CAPTURE_DTYPES)
                self.refuse(
                    f"a captured tensor has dtype {str(tensor.dtype)[6:]}; convert it outside to "
                    f"one of {allowed}"
                )
            self.numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self.numbers[id(tensor)]

    def _check_storage(self, tensor: torch.Tensor) -> None:
        """Raises: VariantError for a tensor that has no elements to read."""
        if tensor.is_nested:
            self.refuse("a captured tensor is nested; valid are dense ones: pad it outside")
        shape = tuple(tensor.shape)
        if tensor.layout != torch.strided:
            layout = str(tensor.layout)[6:]
            self.refuse(
                f"a captured tensor of shape {shape} has layout {layout}; valid is a dense "
                "(strided) one: convert it outside, as with t.to_dense()"
            )
        if tensor.device.type == "meta":
            self.refuse(
                f"a captured tensor of shape {shape} is on device meta and holds no values; valid "
                "are tensors on a GPU, and on the CPU for the reference"
            )

    def whole(self, tensor: torch.Tensor) -> Partial:
        """The tensor before it is indexed."""
        return Partial(self.number(tensor), tuple(map(range, tensor.shape)))

    def load(self, number: int, indices: tuple[Value, ...]) -> Ref:
        return self.builder.load(number, indices, CAPTURE_DTYPES[self.tensors[number].dtype])

    def row(self, partial: Partial) -> Value | Row:
        """The elements of the dimensions that are not indexed."""
        count = torch.Size(partial.shape).numel()
        if count > LONGEST:
            self.refuse(
                f"{count} elements of a captured tensor (shape {partial.shape}) are used together; "
                f"operations on rows are unrolled, up to {LONGEST} elements: give one index for "
                "each dimension, as in t[b, h], or compute it outside"
            )
        loads = [self.load(partial.number, indices) for indices in partial.elements()]
        return value_of(partial.shape, loads)

    def indexed(self, partial: Partial, index: Any) -> Ref | Row | Partial:
        """What an index makes of a captured tensor; `t[b][h]` is `t[b, h]`."""
        given = self._without_ellipsis(index, len(partial.shape))
        rank, free = len(partial.places), len(partial.shape)
        if len(given) > free:
            self.refuse(
                f"a captured tensor of {rank} dimensions is indexed with {rank - free + len(given)}"
            )
        rest = iter(given)
        places: list[Any] = []
        for place in partial.places:
            one = next(rest, None) if isinstance(place, range) else None
            places.append(place if one is None else self._placed(one, place))
        rows = [place for place in places if isinstance(place, Row)]
        if rows:
            return self._gathered(partial.number, places, rows)
        if any(isinstance(place, range) for place in places):
            return Partial(partial.number, tuple(places))
        return self.load(partial.number, tuple(places))

    def _without_ellipsis(self, index: Any, free: int) -> list[Any]:
        given = list(index) if isinstance(index, tuple) else [index]
        if any(one is None for one in given):
            self.refuse(
                "None in an index of a captured tensor is not supported; use .unsqueeze(dim) on "
                "what is indexed"
            )
        at = next((i for i, one in enumerate(given) if one is Ellipsis), None)
        if at is not None:
            given[at : at + 1] = [slice(None)] * (free - len(given) + 1)
        return given

    def _placed(self, index: Any, span: range) -> Place | Row:
        """One index in a dimension of which `span` is left; negative numbers count from its end."""
        if isinstance(index, slice):
            return self._slice(index, span)
        value = self.value(index, "an index")
        values = value.values if isinstance(value, Row) else (value,)
        if not all(isinstance(one, Ref | bool | int | float) for one in values):
            self.refuse(f"{index!r} is not an index; use traced integers or Python ints")
        for one in values:
            if self.builder.dtype(one) != "int":
                self.refuse(
                    f"an index is {self.builder.dtype(one)}, not int; convert it with .int()"
                )
        found = tuple(self._position(one, span) for one in values)
        return Row(value.shape, found) if isinstance(value, Row) else found[0]

    def _position(self, index: Ref | int, span: range) -> Value:
        if isinstance(index, int):
            if not -len(span) <= index < len(span):
                self.refuse(f"index {index} is out of range for a dimension of size {len(span)}")
            return span[index]
        scaled = index if span.step == 1 else self.builder.emit("mul", index, span.step)
        return scaled if span.start == 0 else self.builder.emit("add", scaled, span.start)

    def _slice(self, index: slice, span: range) -> range:
        parts = [index.start, index.stop, index.step]
        if not all(part is None or type(part) is int for part in parts):
            self.refuse("a slice with a traced value in it has no fixed size; use Python ints")
        if index.step is not None and index.step <= 0:
            self.refuse(f"a slice has step {index.step}; valid are positive ones")
        found = span[index]
        if not found:
            self.refuse(f"a slice of a dimension of size {len(span)} is empty")
        return found

    def _gathered(self, number: int, places: list[Any], rows: list[Row]) -> Row | Ref:
        if any(isinstance(place, range) for place in places):
            self.refuse(
                "a captured tensor that is indexed with a row needs one index for each dimension"
            )
        shape = broadcast([row.shape for row in rows])
        loads = []
        for at in itertools.product(*map(range, shape)):
            indices = (place.at(at, shape) if isinstance(place, Row) else place for place in places)
            loads.append(self.load(number, tuple(indices)))
        return value_of(shape, loads)
