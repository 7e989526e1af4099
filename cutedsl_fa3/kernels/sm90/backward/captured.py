"""Gradients of captured tensors: fp32 sums in global memory, added to by each thread.

Each read of a captured tensor says what its element is to get (variant/derive.py): a factor times
the gradient of what the functions make of a product. Elements of a thread's share that read the
same place are summed in registers first; where all of a tile read one place, so are the lanes of a
warp.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cutedsl_fa3.variant import Ref
from cutedsl_fa3.variant.derive import Derivatives
from cutedsl_fa3.variant.device import Element
from cutedsl_fa3.variant.lower import maximum, minimum, select

WARP_DISTANCES = (1, 2, 4, 8, 16)


def needs_products(derived: Derivatives | None, wanted: tuple[int, ...]) -> bool:
    """Whether the factors of these captured tensors are functions of the raw score.

    They are not where the score is as steep as the product and no factor reads it: then dS itself
    is the gradient of what the functions make.
    """
    if derived is None or not wanted:
        return False
    slope = derived.inputs.get("score")
    steep = slope is not None and slope.result.op == "const" and slope.result.args[0] == 1.0
    loads = [load for load in derived.loads if load.capture in wanted]
    return not steep or any("score" in load.factor.inputs for load in loads)


class Collector:
    """What one thread adds to the gradients of captured tensors in one part of a tile.

    `sums`: fp32 tensors by number of the captured tensor, of its shape.
    """

    def __init__(self, derived: Derivatives, sums: dict[int, cute.Tensor]) -> None:
        self.loads = [load for load in derived.loads if load.capture in sums]
        self.sums = sums
        self.found: dict[tuple, tuple[tuple, Float32]] = {}  # place -> (indices, sum)

    def take(self, element: Element, gradient: Float32, seen: Boolean | None) -> None:
        """One element's part; nothing of a pair that is hidden."""
        for number, load in enumerate(self.loads):
            part = gradient * element.value(load.factor.output)
            if seen is not None:
                part = select(seen, part, Float32(0.0))
            place = (number, *(_place(element, index) for index in load.indices))
            if place in self.found:
                indices, total = self.found[place]
                self.found[place] = indices, total + part
            else:
                indices = tuple(Int32(element.operand(index)) for index in load.indices)
                self.found[place] = indices, part

    def add(self) -> None:
        """Add what was found to the sums."""
        for place, (indices, total) in self.found.items():
            lanes = all(where in ((), None) for _, where in place[1:])
            if lanes:
                for distance in WARP_DISTANCES:
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
            first = cute.arch.lane_idx() == 0 if lanes else None
            _add(self.sums[self.loads[place[0]].capture], indices, total, first)


def _place(element: Element, index: Any) -> tuple:
    """By what elements of a thread differ in an index: nothing, their row or their column."""
    if not isinstance(index, Ref):
        return index, ()
    if index.id in element.of.uniform:
        return index.id, ()
    return element.key(index.id)[0], element.key(index.id)[1:]


def _add(sums: cute.Tensor, indices: tuple, value: Float32, only: Boolean | None) -> None:
    """One addition in L2, without a branch; indices are clamped as those of a load."""
    extents = sums.shape[: len(indices)]
    inside = tuple(
        maximum(minimum(i, size - 1), Int32(0)) for i, size in zip(indices, extents, strict=True)
    )
    at = sums.iterator + cute.crd2idx(inside or 0, sums.layout)
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};",
        read_only_args=[at.toint(), value],
        **({} if only is None else {"predicate": only}),
    )
