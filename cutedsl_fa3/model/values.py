"""Pointers, views and atoms of the interpreted program, and the bytes that they cover."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .events import CTA_BYTES, Region, merged
from .lanes import UNKNOWN
from .shapes import Layout, leaves, size, swizzle_span


@dataclass(frozen=True)
class Pointer:
    """An address: bytes in shared memory, or bits from the start of `buffer` in global memory.

    `whole`: the tensor that it points into, where a thread's place in it is not computed.
    """

    space: str
    address: Any
    bits: int
    swizzle: str = ""
    buffer: Any = None
    whole: View | None = None

    def moved(self, elements: Any) -> Pointer:
        """So many elements further."""
        if elements is UNKNOWN or self.address is UNKNOWN or elements is None:
            return replace(self, address=UNKNOWN)
        step = elements * self.bits
        if self.space == "smem":
            return replace(self, address=self.address + step // 8)
        return replace(self, address=self.address + step)


@dataclass(frozen=True)
class View:
    """A tensor: where it begins and how it is laid out.

    `cover`: of a WGMMA operand, the elements of one instruction and their bits.
    """

    at: Any
    layout: Layout
    cover: tuple[Layout, int] | None = None


@dataclass(frozen=True)
class Atom:
    """A copy or product instruction with the fields that were set."""

    text: str
    fields: tuple[tuple[str, Any], ...] = ()

    def field(self, name: str) -> Any:
        """The value set last, or None."""
        return next((value for key, value in reversed(self.fields) if key == name), None)


@functools.lru_cache(maxsize=4096)
def offsets(layout: Layout) -> np.ndarray:
    """Every offset of a layout."""
    found = np.zeros(1, dtype=np.int64)
    for extent, stride in zip(leaves(layout.shape), leaves(layout.stride), strict=True):
        if extent != 1 and stride != 0:
            steps = np.arange(extent, dtype=np.int64) * stride
            found = (steps[:, None] + found[None, :]).ravel()
    return found


@functools.lru_cache(maxsize=65536)
def _blocks(layout: Layout, bits: int, span: int, phase: int) -> Region:
    starts = np.unique((phase + offsets(layout) * bits // 8) // span)
    cuts = np.flatnonzero(np.diff(starts) > 1) + 1
    return tuple((int(run[0]) * span, (int(run[-1]) + 1) * span) for run in np.split(starts, cuts))


def region(view: View) -> tuple[Region, bool]:
    """The bytes of shared memory that a view covers, and whether it is exactly those.

    A swizzle moves chunks within a span, so a swizzled view covers whole spans.
    """
    if view.at.whole is not None:
        return region(view.at.whole)[0], False
    layout, bits, swizzle = view.layout, view.at.bits, view.at.swizzle
    if view.cover is not None:
        layout, bits = view.cover
        if size(view.layout.shape) != 1:  # several instructions
            step = 128 // bits
            more = Layout(view.layout.shape, _scaled(view.layout.stride, step))
            layout = Layout((layout.shape, more.shape), (layout.stride, more.stride))
    span = swizzle_span(swizzle) if swizzle else max(1, bits // 8)
    if not swizzle and _contiguous(layout):
        span = max(1, bits // 8)
    parts = []
    for address in set(np.atleast_1d(view.at.address).tolist()):
        base, phase = address // span * span, address % span
        parts += [(lo + base, hi + base) for lo, hi in _blocks(layout, bits, span, phase)]
    return merged(parts), True


def _contiguous(layout: Layout) -> bool:
    return all(isinstance(s, int) for s in leaves(layout.stride))


def _scaled(stride: Any, factor: int) -> Any:
    if isinstance(stride, tuple):
        return tuple(_scaled(s, factor) for s in stride)
    return stride * factor


def scalar_region(address: Any, byte_count: int) -> Region:
    """The bytes at one address or several, `byte_count` each."""
    if isinstance(address, np.ndarray):
        return merged([(int(a), int(a) + byte_count) for a in set(address.tolist())])
    return ((int(address), int(address) + byte_count),)


def in_cta(address: int, cta: int) -> int:
    """The same place in another CTA's shared memory."""
    return address % CTA_BYTES + (cta + 1) * CTA_BYTES
