"""Checks of what masks and scores are made from; a refusal names function, argument and value."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import torch

from .errors import VariantError

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def integer(function: str, name: str, value: Any, least: int) -> int:
    """The value as an int.

    Raises: VariantError for what is no int, and for one below `least`.
    """
    if not is_int(value) or value < least:
        raise VariantError(f"{function}: {name} is {value!r}; valid are ints from {least}")
    return int(value)


def tensor(
    function: str, name: str, value: Any, dtypes: Iterable[torch.dtype], *shapes: str
) -> torch.Tensor:
    """The value, a tensor of one of these dtypes and, counting dimensions, of these shapes.

    Raises: VariantError for anything else.
    """
    names = [str(dtype)[6:] for dtype in dtypes]
    kinds, forms = _listed(names), _listed(shapes)
    if not isinstance(value, torch.Tensor):
        raise VariantError(
            f"{function}: {name} is {value!r}; valid is a tensor of {kinds} of shape {forms}"
        )
    if str(value.dtype)[6:] not in names or value.ndim not in map(_dimensions, shapes):
        raise VariantError(
            f"{function}: {name} is {str(value.dtype)[6:]} of shape {tuple(value.shape)}; valid "
            f"{'is' if len(names) == 1 else 'are'} {kinds} of shape {forms}"
        )
    return value


def fits_32_bits(function: str, name: str, value: torch.Tensor) -> torch.Tensor:
    """The value, int64 elements of which must be 32-bit numbers when this is called.

    A graph saturates them, so that two which are larger would be equal. Waits for the device.

    Raises: VariantError naming the largest.
    """
    if value.dtype != torch.int64 or value.numel() == 0 or value.device.type == "meta":
        return value
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return value
    low, high = (int(end) for end in torch.aminmax(value))
    worst = low if -low > high else high
    if abs(worst) >= 2**31:
        raise VariantError(
            f"{function}: {name} holds {worst}; valid are 32-bit integers, since larger ones would "
            "count as equal: number them anew, as torch.unique(..., return_inverse=True) does"
        )
    return value


def _dimensions(shape: str) -> int:
    """How many sizes a shape such as "(batch, seqlen)" has."""
    return sum(1 for size in shape.strip("()").split(",") if size.strip())


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
