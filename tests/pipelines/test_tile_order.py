"""The order of tiles: nothing left out, nothing twice, last rows first, within 32 bits."""

from __future__ import annotations

import math
from itertools import groupby

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.pipelines import MAX_GRID, MAX_HEAD_GROUP, TileOrder

groups = st.integers(1, MAX_HEAD_GROUP)


def walk(group: int, m_blocks: int, heads: int) -> list[tuple[int, int]]:
    order = TileOrder(group)
    return [order.at(i, m_blocks, heads) for i in range(order.tiles(m_blocks, heads))]


@given(groups, st.integers(1, 20), st.integers(1, 70))
def test_every_tile_of_every_head_is_computed_once(group, m_blocks, heads):
    tiles = walk(group, m_blocks, heads)
    assert sorted(tiles) == [(m, h) for m in range(m_blocks) for h in range(heads)]


def widths(group: int, heads: int) -> list[int]:
    """How wide each group is: as few groups as `group` allows, all but the last of one width."""
    count = math.ceil(heads / group)
    widest = math.ceil(heads / count)
    return [min(widest, heads - first) for first in range(0, heads, widest)]


@given(groups, st.integers(1, 20), st.integers(1, 70))
def test_within_a_group_rows_descend_and_heads_alternate(group, m_blocks, heads):
    tiles = walk(group, m_blocks, heads)
    start = first = 0
    for width in widths(group, heads):
        members = range(first, first + width)
        wanted = [(m, h) for m in reversed(range(m_blocks)) for h in members]
        assert tiles[start : start + len(wanted)] == wanted
        start, first = start + len(wanted), first + width
    assert start == len(tiles)


@given(groups, st.integers(1, 70))
def test_heads_are_cut_into_no_more_groups_than_needed_and_none_is_a_rest(group, heads):
    """The last group is narrower by less than there are groups, so it is no rest of a few heads."""
    rows = groupby(m for m, _ in walk(group, 2, heads))  # 1 1 .. 0 0 .. in each group
    found = [len(list(heads_of)) for m, heads_of in rows if m == 1]
    *others, last = found
    assert sum(found) == heads and max(found) <= group
    assert set(others) <= {max(found)} and 0 < last <= max(found)
    assert len(found) <= math.ceil(heads / group)
    assert max(found) - last < math.ceil(heads / group)


class Int32:
    """An integer that must stay within 32 bits at every step."""

    def __init__(self, value: int) -> None:
        assert -(2**31) <= value < 2**31, f"{value} leaves 32 bits"
        self.value = value

    def __add__(self, other):
        return Int32(self.value + int(other))

    def __sub__(self, other):
        return Int32(self.value - int(other))

    def __mul__(self, other):
        return Int32(self.value * int(other))

    def __floordiv__(self, other):
        return Int32(self.value // int(other))

    def __rsub__(self, other):
        return Int32(int(other) - self.value)

    def __lt__(self, other):
        return self.value < int(other)

    def __gt__(self, other):
        return self.value > int(other)

    def __int__(self) -> int:
        return self.value

    __radd__, __rmul__ = __add__, __mul__


@given(groups, st.integers(1, 2**25), st.data())
def test_the_order_stays_within_32_bits_up_to_the_largest_grid(group, m_blocks, data):
    """2^25 blocks are 2^31 rows of the smallest tile, 64 rows."""
    heads = data.draw(st.integers(1, MAX_GRID // m_blocks))
    index = data.draw(st.integers(0, m_blocks * heads - 1))
    m, h = TileOrder(group).at(Int32(index), Int32(m_blocks), Int32(heads))
    assert (int(m), int(h)) == TileOrder(group).at(index, m_blocks, heads)


@cute.jit
def _walk(
    out: cute.Tensor, m_blocks: cutlass.Int32, heads: cutlass.Int32, order: cutlass.Constexpr
):
    for index in cutlass.range(order.tiles(m_blocks, heads)):
        m, h = order.at(index, m_blocks, heads, cutlass.min)
        out[index, 0] = m
        out[index, 1] = h


def test_device_integers_walk_in_the_same_order():
    for group, m_blocks, heads in ((8, 5, 20), (1, 7, 3), (16, 3, 5)):
        out = torch.full((m_blocks * heads, 2), -1, dtype=torch.int32)
        order = TileOrder(group)
        _walk(from_dlpack(out), cutlass.Int32(m_blocks), cutlass.Int32(heads), order)
        assert [tuple(row) for row in out.tolist()] == walk(group, m_blocks, heads)
