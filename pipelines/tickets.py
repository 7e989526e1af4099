"""Tiles handed out to CTAs that stay: whoever is done draws the next number.

A CTA begins with the tile of its own index; a counter in global memory hands out the others in
order, so that a CTA whose tiles were short takes more of them, and a long tile that comes early
delays nobody. Each CTA draws until it gets a number past the last tile:

    CTAs 132, tiles 1000      first tile: 0 .. 131, by index
    numbers 0 .. 867          tiles 132 .. 999
    numbers 868 .. 999        one a CTA: nothing is left

The number tiles - 1 is the last that anybody draws. Whoever gets it puts the counter back to 0, so
it is ready for the next launch without a launch of its own. Two launches that run at one time need
a counter each.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def draw(counter: cute.Tensor):
    """The next number, in lane 0 of the calling warp; nobody waits for it before `drawn_tile`."""
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
    return number


@cute.jit
def drawn_tile(number, counter: cute.Tensor, tiles: Int32):
    """The tile of a drawn number, in all lanes; past the last where nothing is left."""
    number = cute.arch.shuffle_sync(number, 0)
    if number == tiles - 1:
        if cute.arch.lane_idx() == 0:
            counter[0] = Int32(0)
    ctas, _, _ = cute.arch.grid_dim()
    return cute.arch.make_warp_uniform(number + ctas)
