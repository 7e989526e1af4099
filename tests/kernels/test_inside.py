"""Whether all of a work tile's captured elements lie inside their tensor, as a kernel sees it."""

from __future__ import annotations

import itertools

import pytest
import torch
from cutlass import Float32
from on_cpu import for_each

from cutedsl_fa3 import Variant
from cutedsl_fa3.kernels.sm90.elements import Elements
from cutedsl_fa3.variant.lower import select

TILE_M, TILE_N = 64, 16
BLOCKS, SPANS = range(4), [(0, 0), (0, 1), (0, 3), (1, 2), (2, 6), (5, 6)]
TILES = list(itertools.product(BLOCKS, SPANS))
GROWTHS = [(-1, 1), (1, -1), (1, 1), (-2, 3), (-64, 1)]  # of the index, with q and with k
FIRSTS = (0, 63, 64, 150, 255, 4000)  # the index of the first query and key
SIZE = 320


def indexed(of_q: int, of_k: int, first: int) -> Variant:
    table = torch.randn(2, SIZE)
    return Variant(lambda s, b, h, q, k: s + table[h, of_q * q + of_k * k + first])


def said(variant: Variant) -> list[bool]:
    """`Elements.inside` for every tile."""
    asked = torch.tensor([[m, first, end] for m, (first, end) in TILES], dtype=torch.int32)
    found = torch.zeros(len(TILES), dtype=torch.int32)

    def write(i, given, results):
        tiles, table = given
        zero = i * 0
        head, lengths = (zero, zero + 1), (zero + 256, zero + 96)
        elements = Elements(variant, (table,), Float32(1.0), head, lengths)
        inside = elements.inside(tiles[i, 0], TILE_M, TILE_N, (tiles[i, 1], tiles[i, 2]))
        results[0][i] = select(inside, zero + 1, zero)

    for_each(len(TILES), [asked, variant.captures[0]], [found], write)
    return [bool(n) for n in found.tolist()]


@pytest.mark.parametrize("growth", GROWTHS)
def test_inside_is_said_of_the_tiles_all_of_whose_elements_are(growth):
    of_q, of_k = growth
    seen = set()
    for first in FIRSTS:
        for (m, (low, high)), inside in zip(TILES, said(indexed(*growth, first)), strict=True):
            queries = torch.arange(m * TILE_M, (m + 1) * TILE_M)[:, None]
            keys = torch.arange(low * TILE_N, high * TILE_N)
            index = of_q * queries + of_k * keys + first
            if keys.numel():
                seen.add(inside)
                assert inside == bool(((index >= 0) & (index < SIZE)).all()), (first, m, low, high)
    assert seen == {False, True} or growth == (-64, 1)


def test_an_index_that_leaves_the_integers_on_its_way_is_not_inside():
    many = torch.tensor([[0, 0, 2**27]], dtype=torch.int32)  # 2^31 keys
    found = torch.ones(1, dtype=torch.int32)
    variant = indexed(-1, 2, 100)

    def write(i, given, results):
        tiles, table = given
        zero = i * 0
        elements = Elements(variant, (table,), Float32(1.0), (zero, zero), (zero + 1, zero + 1))
        inside = elements.inside(zero, TILE_M, TILE_N, (tiles[i, 1], tiles[i, 2]))
        results[0][i] = select(inside, zero + 1, zero)

    for_each(1, [many, variant.captures[0]], [found], write)
    assert found.tolist() == [0]
