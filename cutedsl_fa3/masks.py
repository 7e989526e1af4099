"""Masks: which keys a query sees; each is a plain function for `Variant(mask=...)`.

A mask is a function of (b, h, q, k). Those that compare positions are aligned at the bottom right:
the last query sees the last key, whatever the lengths, so that query i stands at key position
i + (seqlen_k - seqlen_q).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch

from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Variant, seqlen_k, seqlen_q

Mask = Callable[[Any, Any, Any, Any], Any]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def full(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Every query sees every key."""
    return True


def none(b: Any, h: Any, q: Any, k: Any) -> Any:
    """No query sees any key: outputs 0, LSE -inf."""
    return False


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A query sees the keys up to its own position, aligned at the bottom right."""
    return k <= q + (seqlen_k - seqlen_q)


def window(left: int | None = None, right: int | None = None, *, causal: bool = False) -> Mask:
    """A query sees the keys from `left` before its position to `right` after it, both inclusive.

    A window of W tokens that ends at the query is (W - 1, 0). None or -1 leaves a side unbounded;
    `causal` caps the right side at 0.

    Raises: VariantError for other negative sizes, and for what is no int or bool.
    """
    if not isinstance(causal, bool):
        raise VariantError(f"masks.window: causal is {causal!r}; valid are True and False")
    before, after = _side("left", left), _side("right", right)
    if causal:
        after = 0

    def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
        position = q + (seqlen_k - seqlen_q)
        seen = True if before is None else k >= position - before
        return seen if after is None else seen & (k <= position + after)

    return windowed


def _side(name: str, size: int | None) -> int | None:
    if size is None or size == -1:
        return None
    if not _is_int(size) or size < 0:
        raise VariantError(
            f"masks.window: {name} is {size!r}; valid are ints from 0, and None or -1 for an "
            "unbounded side"
        )
    return int(size)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def prefix(length: int | torch.Tensor) -> Mask:
    """Every query sees the first `length` keys: one number, or one for each batch entry.

    Shape: int, () or (batch,), integers.
    Raises: VariantError for another type, shape or dtype.
    """
    if not isinstance(length, torch.Tensor):
        if not _is_int(length):
            raise VariantError(
                f"masks.prefix: length is {length!r}; valid are an int, and a tensor of integers "
                "of shape () or (batch,)"
            )
        return lambda b, h, q, k: k < length
    if length.ndim > 1 or length.dtype not in _INTEGERS:
        raise VariantError(
            f"masks.prefix: length is {str(length.dtype)[6:]} of shape {tuple(length.shape)}; "
            "valid are int64, int32, int16, int8 and uint8 of shape () or (batch,)"
        )
    if length.ndim == 0:
        return lambda b, h, q, k: k < length
    return lambda b, h, q, k: k < length[b]


def _check_functions(name: str, masks: tuple[Any, ...]) -> None:
    for i, mask in enumerate(masks):
        if not callable(mask):
            many = isinstance(mask, list | tuple) and name != "not_mask"
            given = "a Variant" if isinstance(mask, Variant) else repr(mask)
            raise VariantError(
                f"masks.{name}: argument {i} is {given}; valid are functions mask(b, h, q, k)"
                + (f", each an argument of its own: {name}(*masks)" if many else "")
            )


def and_masks(*masks: Mask) -> Mask:
    """A query sees the keys that all masks show.

    Raises: VariantError for an argument that is no mask function.
    """
    _check_functions("and_masks", masks)

    def every(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen: Any = True
        for mask in masks:
            seen = seen & mask(b, h, q, k)
        return seen

    return every


def or_masks(*masks: Mask) -> Mask:
    """A query sees the keys that any mask shows.

    Raises: VariantError for an argument that is no mask function.
    """
    _check_functions("or_masks", masks)

    def some(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen: Any = False
        for mask in masks:
            seen = seen | mask(b, h, q, k)
        return seen

    return some


def not_mask(mask: Mask) -> Mask:
    """A query sees the keys that the mask hides.

    Raises: VariantError for an argument that is no mask function.
    """
    _check_functions("not_mask", (mask,))

    def other(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mask(b, h, q, k) ^ True

    return other
