"""The torch reader of derivatives: values, factors, and what captured tensors get of a gradient.

Everything here runs on any device and waits for none. Sums are made in an order that depends on
sizes alone, so that equal inputs give equal bits: first over the dimensions that an index does not
depend on, then element by element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from .derive import Derivatives
from .evaluate import evaluate_each
from .graph import Ref

APART = 1 << 20  # sums that elements of one place are spread over, before those are added up


class Load(NamedTuple):
    """One load of a captured tensor: `factor` times the gradient goes to `indices`."""

    capture: int
    factor: torch.Tensor
    indices: list[torch.Tensor]


class Shares(NamedTuple):
    """A function's value, d value / d input by name, and the loads that were asked for.

    Shape: each the broadcast of the inputs that it depends on.
    """

    value: torch.Tensor
    inputs: dict[str, torch.Tensor]
    loads: list[Load]


def evaluate_shares(
    derived: Derivatives,
    inputs: Mapping[str, torch.Tensor | int | float],
    captures: Sequence[torch.Tensor],
    wanted: Collection[int],
    dtype: torch.dtype,
) -> Shares:
    """A function and its derivatives for these inputs, floats computed in `dtype`.

    `wanted` are the numbers of the captured tensors whose loads are asked for.
    """
    loads = [load for load in derived.loads if load.capture in wanted]
    values = [Ref(derived.value.output), *(Ref(g.output) for g in derived.inputs.values())]
    values += [Ref(load.factor.output) for load in loads]
    places = [i for load in loads for i in load.indices]
    nodes = derived.value.nodes
    found = iter(evaluate_each(nodes, [*values, *places], inputs, captures, dtype=dtype))
    value = next(found)
    by_input = {name: next(found) for name in derived.inputs}
    factors = [next(found) for _ in loads]
    indices = [[next(found) for _ in load.indices] for load in loads]
    numbers = [load.capture for load in loads]
    return Shares(value, by_input, list(map(Load, numbers, factors, indices)))


def add_loads(
    totals: Mapping[int, torch.Tensor],
    loads: Sequence[Load],
    gradient: torch.Tensor,
    seen: torch.Tensor | None = None,
) -> None:
    """Add what the gradient of a value hands on to captured tensors, where `seen`.

    Shape: gradient and seen as the value's inputs; totals by number, as the captured tensors.
    """
    for number, factor, indices in loads:
        share = gradient * factor
        share = share if seen is None else torch.where(seen, share, 0.0)
        total = totals[number]
        shape = torch.broadcast_shapes(*(index.shape for index in indices))
        share = share.sum_to_size((1,) * (share.dim() - len(shape)) + tuple(shape))
        place = torch.zeros((), dtype=torch.int64, device=share.device)
        for index, size in zip(indices, total.shape, strict=True):
            place = place * size + index.clamp(0, size - 1)
        _add_each(total.view(-1), torch.broadcast_to(place, share.shape).flatten(), share.flatten())


def _add_each(total: torch.Tensor, place: torch.Tensor, share: torch.Tensor) -> None:
    """total[place] += share, in an order that is the same each time.

    On the CPU `index_add_` adds one by one, and `index_put_` differs from run to run; on a GPU it
    is the other way round: `index_put_` sorts, and adds up what goes to one place a few at a time.
    Source: torch.use_deterministic_algorithms.
    """
    if total.device.type == "cpu":
        total.index_add_(0, place, share)
    else:
        _add_apart(total, place, share)


def _add_apart(total: torch.Tensor, place: torch.Tensor, share: torch.Tensor) -> None:
    """The same by several sums for each place, where `total` is small enough, and their sum."""
    size = total.numel()
    apart = max(1, min(APART // max(1, size), share.numel() // 32))
    parts = total
    if apart > 1:
        parts = torch.zeros(apart * size, dtype=total.dtype, device=total.device)
        place = place + size * (torch.arange(share.numel(), device=total.device) % apart)
    parts.index_put_((place,), share, accumulate=True)
    if apart > 1:
        total += parts.view(apart, size).sum(0)
