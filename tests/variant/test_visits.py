"""Visit lists: their order, one tile against all at once, and how few tiles documents take."""

from __future__ import annotations

import pytest
import torch

from cutedsl_fa3 import masks
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.keys import QueryTile
from cutedsl_fa3.variant.summaries import summarise
from cutedsl_fa3.variant.tiles import by_tile
from cutedsl_fa3.variant.visits import all_visits, visit_list

SEQLENS = (300, 420)
DOC = torch.tensor([i // 90 for i in range(420)])
PER_HEAD = torch.stack([DOC, DOC.flip(0), torch.arange(420) % 7])
LENGTHS = torch.tensor([17, 400])
FLAGS = torch.arange(420) % 130 < 60

MASKS = {
    "everything": None,
    "nothing": masks.none,
    "causal": masks.causal,
    "window": masks.window(40, 9),
    "prefix and window": lambda b, h, q, k: (k < 20) | ((q - k < 30) & (k <= q)),
    "lengths": masks.prefix(LENGTHS),
    "strided blocks": lambda b, h, q, k: ((k // 16) % 5 == 1) & (k < LENGTHS[b]),
    "documents": lambda b, h, q, k: (DOC[q] == DOC[k]) & (k <= q),
    "documents of each head": lambda b, h, q, k: PER_HEAD[h, q] == PER_HEAD[h, k],
    "flags of keys": lambda b, h, q, k: FLAGS[k] & (h < 2),
}


@pytest.mark.parametrize("sizes", [(64, 32), (48, 16)])
@pytest.mark.parametrize("name", MASKS)
def test_all_tiles_at_once_visit_what_each_does(name, sizes):
    variant = Variant(mask=MASKS[name])
    mask, captures = variant.mask, variant.captures
    table = summarise(mask, captures, 2, 3, *SEQLENS, *sizes)
    found = all_visits(mask, captures, 2, 3, *SEQLENS, *sizes)
    m_blocks, n_blocks = (-(-n // size) for n, size in zip(SEQLENS, sizes, strict=True))
    assert found.shape == (2, 3, m_blocks, n_blocks + 1) and found.dtype == torch.int32
    for b in range(2):
        for h in range(3):
            for m in range(m_blocks):
                last = min((m + 1) * sizes[0], SEQLENS[0]) - 1
                tile = QueryTile(m * sizes[0], last, b, h, *SEQLENS)
                visits = visit_list(mask, tile, *sizes, captures, table)
                entries = [2 * n + masked for n, masked in visits]
                rest = n_blocks + 1 - len(entries)
                assert found[b, h, m].tolist() == entries + [-1] * rest
                direction = 1 if by_tile(mask) else -1
                order = [(not masked, direction * n) for n, masked in visits]
                assert order == sorted(set(order))


@pytest.mark.parametrize("seqlens", [(0, 9), (9, 0), (0, 0)])
@pytest.mark.parametrize("name", MASKS)
def test_empty_sequences_visit_nothing(name, seqlens):
    variant = Variant(mask=MASKS[name])
    found = all_visits(variant.mask, variant.captures, 2, 3, *seqlens, 64, 32)
    assert found.shape == (2, 3, -(-seqlens[0] // 64), -(-seqlens[1] // 32) + 1)
    assert (found == -1).all()


# Documents: visited tiles against those that hold a visible element.


MEANS = {8192: (256, 384, 512, 1024, 4096), 32768: (256, 4096)}


def layouts(seqlen: int) -> dict[str, torch.Tensor]:
    """Document lengths that add up to `seqlen`, by name."""
    found = {}
    for mean in MEANS[seqlen]:
        generator = torch.Generator().manual_seed(mean)
        cuts = torch.randint(1, seqlen, (seqlen // mean - 1,), generator=generator).unique()
        found[f"random, mean {mean}"] = cuts
        found[f"equal {mean}, off the tiles"] = torch.arange(mean - 64, seqlen, mean)
        found[f"equal {mean}, by one"] = torch.arange(mean + 1, seqlen, mean)
        steps = torch.empty(2 * seqlen // mean).exponential_(1 / mean, generator=generator)
        found[f"exponential, mean {mean}"] = (steps + 1).cumsum(0).long()
    return {
        name: torch.cat([torch.tensor([0]), cuts[cuts < seqlen], torch.tensor([seqlen])]).diff()
        for name, cuts in found.items()
    }


def needed(doc: torch.Tensor, tile_m: int, tile_n: int) -> int:
    """Tiles with a key from the begin of a query's document to the query."""
    q = torch.arange(len(doc))
    begin = torch.searchsorted(doc, doc)
    m_blocks, columns = -(-len(doc) // tile_m), -(-len(doc) // tile_n) + 1
    steps = torch.zeros(m_blocks * columns, dtype=torch.int64)
    row = q // tile_m * columns
    steps.index_add_(0, row + begin // tile_n, torch.ones_like(q))
    steps.index_add_(0, row + q // tile_n + 1, -torch.ones_like(q))
    return int((steps.view(m_blocks, columns).cumsum(1) > 0).sum())


def ratio(mask, doc: torch.Tensor, tile_m: int, tile_n: int) -> float:
    variant, seqlen = Variant(mask=mask), len(doc)
    found = all_visits(variant.mask, variant.captures, 1, 1, seqlen, seqlen, tile_m, tile_n)
    return int((found >= 0).sum()) / needed(doc, tile_m, tile_n)


LENGTHS_AND_TILES = [
    (8192, 128),
    (8192, 192),
    *(pytest.param(32768, tile_m, marks=pytest.mark.slow) for tile_m in (128, 192)),
]


@pytest.mark.parametrize(("seqlen", "tile_m"), LENGTHS_AND_TILES)
def test_documents_visit_at_most_a_tenth_more_tiles_than_needed(seqlen, tile_m):
    for name, sizes in layouts(seqlen).items():
        doc = torch.arange(len(sizes)).repeat_interleave(sizes)
        found = ratio(lambda b, h, q, k, doc=doc: (doc[q] == doc[k]) & (k <= q), doc, tile_m, 128)
        assert 1.0 <= found <= 1.10, name


@pytest.mark.parametrize(("seqlen", "tile_m"), LENGTHS_AND_TILES)
def test_packed_documents_visit_at_most_a_tenth_more_tiles_than_needed(seqlen, tile_m):
    """Causality is hidden in positions counted from the begin of each document."""
    for name, sizes in layouts(seqlen).items():
        doc = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(sizes)
        begins = torch.cat([torch.tensor([0]), sizes.cumsum(0)])

        def packed(b, h, q, k, doc=doc, begins=begins):
            inside = q - begins[doc[q]] >= k - begins[doc[k]]
            return (doc[q] == doc[k]) & inside

        found = ratio(packed, doc, tile_m, 128)
        assert 1.0 <= found <= 1.10, name
