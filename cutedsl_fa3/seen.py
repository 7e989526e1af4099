"""Calls that were seen before, and how the next one is known to be the same.

A call is checked once. The next one like it is found by `alike` and `lie_there`, which ask together
whatever can have changed since; also of captured tensors, which are the same objects at each call
but may have got other memory, sizes, strides, signs or gradients behind the variant's back (`.data
=`, `set_`, `resize_`, `requires_grad_`, `swap_tensors`, a freed storage). Nothing here holds a
tensor or a variant: what a launch is given of captured tensors is numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi

from .calls import Call
from .inputs import as_numbers
from .pipelines import Schedule
from .variant import Variant

try:  # what torch.compile asks before each call
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch without it
    TensorGuards = None

MOST = 1024  # calls of one variant that are kept; lengths that grow one by one are as many
RECENT = 8  # calls of one variant that are found fast

Tensors = tuple[torch.Tensor, ...]


class Seen:
    """A call that was checked, for tensors as they were then.

    `alike(q, k, v, *captures)`: whether tensors are like those, but for values, addresses and the
    strides of q, k and v. `numbers`: what a launch is given of the captured tensors.
    """

    __slots__ = ("_addresses", "alike", "call", "numbers", "requires_grad", "schedule")

    def __init__(
        self, call: Call, given: Tensors, captures: Tensors, schedule: Schedule | None
    ) -> None:
        self.call, self.schedule = call, schedule
        self.alike = alike(given, captures)
        self.requires_grad = any(t.requires_grad for t in (*given, *captures))
        self._addresses = [t.data_ptr() for t in captures]
        found = as_numbers(captures)
        self.numbers: Any = None if found is None else tvm_ffi.convert(found)

    def lie_there(self, captures: Tensors) -> bool:
        """Whether captured tensors lie where they lay, and so have the same numbers."""
        addresses, number = self._addresses, 0
        for t in captures:  # two thirds of the time that `zip` or `enumerate` take
            if t.data_ptr() != addresses[number]:
                return False
            number += 1
        return True


class Known:
    """The calls of one variant that were checked; forgotten with the variant.

    `exact`: by whatever the checks and the choice of a kernel depend on. `recent`: those whose
    kernel checks layouts itself, the newest first.
    """

    __slots__ = ("exact", "recent", "variant")

    def __init__(self, variant: Variant, calls: dict[int, Known]) -> None:
        self.exact: dict[tuple, Seen] = {}
        self.recent: tuple[Seen, ...] = ()
        number = id(variant)
        self.variant = weakref.ref(variant, lambda _: calls.pop(number, None))

    def keep(self, signature: tuple, seen: Seen) -> None:
        if signature not in self.exact and len(self.exact) >= MOST:
            self.exact.clear()
        self.exact[signature] = seen
        if seen.call.checks_layouts:
            others = [each for each in self.recent if each.call is not seen.call]
            self.recent = (seen, *others[: RECENT - 1])


def alike(given: Tensors, captures: Tensors) -> Callable[..., bool]:
    """A function of as many tensors: whether they are as these are now, but for their memory.

    That is their Python types, dtypes, devices, sizes, whether torch flips their signs and whether
    they require a gradient; of `captures` also their strides. One call of C++ for all of them takes
    a tenth of a microsecond a tensor. It finds no two of them alike that are one object: such are
    described in Python, which takes five times as long.
    """
    tensors = (*given, *captures)
    free = len(given)
    if TensorGuards is None or len({id(t) for t in tensors}) < len(tensors):
        now = _described(tensors, free)
        return lambda *others: _described(others, free) == now
    strides = [[None] * t.dim() for t in given] + [list(t.stride()) for t in captures]
    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=strides,
    ).check


def _described(tensors: Tensors, free: int) -> list[tuple]:
    return [
        (
            type(t), t.dtype, t.device, t.shape, t.is_neg(), t.requires_grad,
            None if number < free else t.stride(),
        )
        for number, t in enumerate(tensors)
    ]  # fmt: skip


def signature(given: Tensors, captures: Tensors, schedule: Schedule | None) -> tuple:
    """Whatever the checks and the choice of a kernel depend on."""
    return (
        *(
            (t.shape, t.stride(), t.dtype, t.device, _alignment(t), t.is_neg())
            for t in (*given, *captures)
        ),
        schedule,
    )


def _alignment(t: torch.Tensor) -> int:
    """What an address is beyond a multiple of 16 bytes; -1 for a tensor without memory."""
    address = t.data_ptr()
    return address & 15 if address else -1
