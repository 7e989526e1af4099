"""Masks that read a table by blocks of queries and keys: tiles no larger than a block are found."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3 import masks
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.tiles import by_tile
from cutedsl_fa3.variant.visits import all_visits

HEADS, BLOCKS = 2, 7
LENGTHS = st.integers(1, 600)


def by_pairs(
    variant: Variant, h: int, seqlen_q: int, seqlen_k: int, tile: tuple[int, int]
) -> dict[tuple[int, int], bool]:
    """Tiles with a pair that is seen, and whether one in them is not (or past the keys)."""
    q, k = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    inputs = {"b": 0, "h": h, "q": q, "k": k, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    seen = evaluate(variant.mask, inputs, variant.captures).expand(seqlen_q, seqlen_k)
    found = {}
    for m, rows in enumerate(seen.split(tile[0])):
        for n, block in enumerate(rows.split(tile[1], dim=1)):
            if block.any():
                found[m, n] = not (block.all() and block.shape[1] == tile[1])
    return found


def as_visited(
    variant: Variant, h: int, seqlen_q: int, seqlen_k: int, tile: tuple[int, int]
) -> dict[tuple[int, int], bool]:
    entries = all_visits(variant.mask, variant.captures, 1, HEADS, seqlen_q, seqlen_k, *tile)[0, h]
    return {
        (m, entry // 2): bool(entry % 2)
        for m, row in enumerate(entries.tolist())
        for entry in row
        if entry >= 0
    }


def tables(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (HEADS, BLOCKS, BLOCKS), generator=generator, dtype=torch.int32)


@settings(deadline=None, max_examples=40)
@given(
    LENGTHS,
    LENGTHS,
    st.integers(48, 200),
    st.sampled_from([(48, 49), (16, 33)]),
    st.integers(0, 99),
)
def test_blocks_no_smaller_than_tiles_are_visited_where_they_are_marked(
    seqlen_q, seqlen_k, size, tile, seed
):
    table = tables(seed)

    def graded(b, h, q, k):
        return table[h, q // size, k // size] > h

    for mask in (masks.block_sparse(table > 1, size), graded):
        variant = Variant(mask=mask)
        assert by_tile(variant.mask)
        needed = by_pairs(variant, 1, seqlen_q, seqlen_k, tile)
        assert as_visited(variant, 1, seqlen_q, seqlen_k, tile) == needed


@settings(deadline=None, max_examples=40)
@given(LENGTHS, LENGTHS, st.integers(1, 300), st.integers(0, 99), st.integers(0, 2))
def test_smaller_blocks_and_indices_beyond_the_table_cost_time_only(
    seqlen_q, seqlen_k, size, seed, shift
):
    table = tables(seed)
    wide = torch.randint(0, BLOCKS, (700,), generator=torch.Generator().manual_seed(seed))

    def anything(b, h, q, k):
        near = table[h, q // size - shift, k // size + shift] >= 2
        return near | (table[k % 2, wide[q], wide[k]] == 1)

    variant = Variant(mask=anything)
    visited = as_visited(variant, 0, seqlen_q, seqlen_k, (128, 112))
    for tile, masked in by_pairs(variant, 0, seqlen_q, seqlen_k, (128, 112)).items():
        assert tile in visited and visited[tile] >= masked
