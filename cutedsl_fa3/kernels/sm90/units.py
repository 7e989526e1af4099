"""Units of the raw product for scores that grow evenly with the key (variant/linear.py).

    a tile without mask    x = product + slope * column       one FMA with a number a score
                           base = the rest, for each row      where the thread's columns begin
    any other              x = product + the rest, base = 0   as other score functions have it

x + base is the score in units of the product, so the softmax reads them with `scale` as it does raw
products, and takes `base` into account once a row and tile (softmax.py). Dividing by the scale must
leave fp32 numbers, and rounding x + base must not move exponents by more than rounding x does, so
this holds where `fits` says so for all heads of a work tile: the scale lies within SCALES, and no
score is moved by MOST or more. Elsewhere (slopes that are no numbers, or beyond all use) units are
natural, and no tile is computed the short way: `Elements.inside` says False.
"""

from __future__ import annotations

from collections.abc import Mapping

import cutlass.cute as cute
from cutlass import Float32, Int32

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines.roles import WARP
from cutedsl_fa3.variant.device import Lowering
from cutedsl_fa3.variant.linear import UNITS, Linear
from cutedsl_fa3.variant.lower import LOG2_E, fma, reciprocal, select
from cutedsl_fa3.variant.softmax import FAR

SCALES = 2.0**-64, 1.0  # beyond 1 units are smaller than natural ones, which FAR is not made for
MOST = FAR / LOG2_E / 4  # natural: half of FAR for each of two sums, which keeps errors below 8


class Units:
    """What a unit of acc_s is, for all heads of one work tile.

    `head` counts packs, all of whose heads have the same units: warps take the same way through
    their tiles. All threads of a warp take part.

    `size` is natural; `in_one` are the units in a natural score of 1; `of_product` those in a raw
    product of 1.
    """

    def __init__(
        self,
        linear: Linear,
        captures: tuple[cute.Tensor, ...],
        scale: Float32,
        uniform: Mapping[str, Int32],
        head: Int32,
        pack: int = 1,
    ) -> None:
        self.linear = linear
        self.fits = (scale >= SCALES[0]) & (scale <= SCALES[1])
        heads = [head]
        if pack > 1:  # one of them a lane
            lane = cute.arch.lane_idx()
            heads = [head * pack + (lane + first) % pack for first in range(0, pack, WARP)]
        for each in heads:
            most = Lowering(linear.most, captures, {**uniform, "h": each})
            self.fits = self.fits & (most.uniform[linear.most.output] < MOST)
        self.fits = cute.arch.vote_all_sync(self.fits)
        self.size = _kept(select(self.fits, scale, Float32(1.0)))
        self.in_one = _inverse(self.size)
        self.of_product = select(self.fits, Float32(1.0), scale)


class Growth:
    """How the scores of one head grow along a tile."""

    def __init__(
        self, units: Units, captures: tuple[cute.Tensor, ...], uniform: Mapping[str, Int32]
    ) -> None:
        graphs, known = units.linear, {**uniform, UNITS: units.in_one}
        self.is_level = graphs.is_level
        self.rest = Lowering(graphs.rest, captures, known, exponent=True)
        slope = Lowering(graphs.slope, captures, known)
        self.slope = slope.uniform[graphs.slope.output]

    def along(self, acc_s: cute.Tensor, row: int, places: wgmma.Places) -> None:
        """A row's raw products become x, in place; acc_s (rows, cols) of this thread."""
        for c, offset in enumerate(places.col_offsets):
            if offset and not self.is_level:
                acc_s[row, c] = fma(self.slope, float(offset), acc_s[row, c])

    def base(self, at: Mapping, row: int, memo: dict) -> Float32:
        """The base of a row, whose first element is `at`."""
        return Float32(self.rest.at(at, row, 0, memo))


def _kept(value: Float32) -> Float32:
    """The same value, of which ptxas cannot see how to make it anew in each tile."""
    return cute.arch.shuffle_sync(value, offset=0)


def _inverse(scale: Float32) -> Float32:
    """1 / scale, to the last bit or its neighbour."""
    first = reciprocal(scale)
    return fma(fma(-scale, first, 1.0), first, first)
