"""The twin's visit trace against masks evaluated at every element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twin_cases import BATCH, HEADS, drawn, variants

from cutedsl_fa3 import Plan, Problem, Schedule, Variant, emulate, masks, reference
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.tiles import by_tile as decided_one_by_one

VARIANTS = variants()
LONGEST = 300  # of the random masks' tables


def traced(variant: Variant, batch: int, heads: int, lengths: tuple, tile: tuple) -> torch.Tensor:
    """The visit trace for sequences of these lengths, with tiles of tile_m x tile_n."""
    schedule = Schedule(tile[0], tile[1], 2, tile[0] // 64, "intra")
    q, k, v = drawn(batch, *lengths, heads, heads, 8)
    return emulate.run(Plan(variant, Problem("bf16", 8, 8), schedule), q, k, v, 1.0).visits


def visible(variant: Variant, batch: int, heads: int, lengths: tuple) -> torch.Tensor:
    """Whether a query sees a key: (batch, heads, seqlen_q, seqlen_k)."""
    shape = batch, heads, *lengths
    if variant.mask is None:
        return torch.ones(shape, dtype=torch.bool)
    b, h, q, k = (torch.arange(n).view([-1 if i == j else 1 for j in range(4)])
                  for i, n in enumerate(shape))  # fmt: skip
    at = {"b": b, "h": h, "q": q, "k": k, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    return torch.broadcast_to(evaluate(variant.mask, at, variant.captures), shape)


def by_tile(seen: torch.Tensor, tile: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a tile has a visible element, and whether all of its elements are visible keys.

    Shape: both (batch, heads, m_blocks, n_blocks).
    """
    rows, cols = -seen.shape[2] % tile[0], -seen.shape[3] % tile[1]

    def tiles(padding: bool) -> torch.Tensor:
        whole = torch.nn.functional.pad(seen, (0, cols), value=False)
        whole = torch.nn.functional.pad(whole, (0, 0, 0, rows), value=padding)
        return whole.unflatten(3, (-1, tile[1])).unflatten(2, (-1, tile[0]))

    return tiles(False).any(5).any(3), tiles(True).all(5).all(3)


def check_trace(variant: Variant, batch: int, heads: int, lengths: tuple, tile: tuple) -> None:
    """Each tile with a visible element once, masked unless full; partial before full.

    Within each kind, runs go from right to left, tiles decided one by one from left to right.
    """
    visits = traced(variant, batch, heads, lengths, tile)
    needed, full = by_tile(visible(variant, batch, heads, lengths), tile)
    m_blocks, n_blocks = (-(-n // size) for n, size in zip(lengths, tile, strict=True))
    assert visits.shape == (batch, heads, m_blocks, n_blocks + 1) and visits.dtype == torch.int32
    for b, h, m in torch.cartesian_prod(*map(torch.arange, visits.shape[:3])).tolist():
        entries = visits[b, h, m].tolist()
        count = sum(e >= 0 for e in entries)
        assert entries[count:] == [-1] * (n_blocks + 1 - count)
        partial = [e // 2 for e in entries[:count] if e % 2]
        unmasked = [e // 2 for e in entries[:count] if not e % 2]
        assert [e % 2 for e in entries[:count]] == [1] * len(partial) + [0] * len(unmasked)
        for kind in (partial, unmasked):
            assert kind == sorted(set(kind), reverse=not decided_one_by_one(variant.mask))
        visited = {*partial, *unmasked}
        assert len(visited) == count
        assert visited <= set(range(n_blocks))
        assert set(needed[b, h, m].nonzero().flatten().tolist()) <= visited
        assert all(full[b, h, m, n] for n in unmasked)


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("lengths", [(300, 900), (900, 300), (130, 130)])
def test_every_tile_with_a_visible_element_is_visited_once_and_unmasked_ones_are_full(
    name, lengths
):
    check_trace(VARIANTS[name], BATCH, HEADS, lengths, (128, 64))


def _documents(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(LONGEST, generator=generator) < 0.03).cumsum(0)


DOCUMENTS = st.integers(0, 99).map(_documents)
LEAVES = st.one_of(
    st.just(masks.causal),
    st.builds(masks.window, st.integers(0, 150), st.integers(0, 150)),
    st.integers(0, 300).map(masks.prefix),
    st.lists(st.integers(0, 300), min_size=2, max_size=2).map(
        lambda ends: masks.prefix(torch.tensor(ends))
    ),
    st.integers(1, 200).map(lambda size: lambda b, h, q, k: q // size == k // size),
    st.integers(2, 5).map(lambda step: lambda b, h, q, k: (q - k) % step == 0),
    st.integers(1, 60).map(lambda size: lambda b, h, q, k: k - q < size * (h + 1)),
    DOCUMENTS.map(masks.documents),
    DOCUMENTS.map(lambda doc: lambda b, h, q, k: doc[q] <= doc[k]),
    DOCUMENTS.map(lambda doc: lambda b, h, q, k: doc[k] % 2 == 0),
)
MASKS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: masks.and_masks(*pair)),
        st.tuples(inner, inner).map(lambda pair: masks.or_masks(*pair)),
        inner.map(masks.not_mask),
    ),
    max_leaves=4,
)
LENGTHS = st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST))
TILES = st.tuples(st.sampled_from([64, 128, 192]), st.sampled_from([16, 48, 64, 128]))


@given(MASKS, LENGTHS, TILES)
@settings(max_examples=150)
def test_random_masks_are_visited_where_they_show_something(mask, lengths, tile):
    check_trace(Variant(mask=mask), 2, 2, lengths, tile)


@given(MASKS, LENGTHS, TILES)
@settings(max_examples=75)
def test_random_masks_give_the_outputs_of_the_reference(mask, lengths, tile):
    variant = Variant(mask=mask)
    schedule = Schedule(tile[0], tile[1], 2, tile[0] // 64, "intra")
    q, k, v = drawn(2, *lengths, 2, 1, 16)
    plan = Plan(variant, Problem("bf16", 16, 16), schedule)
    found = emulate.run(plan, q, k, v, 0.25)
    out, lse = reference.attention_with_lse(q, k, v, variant, dtype=torch.float64)
    spread = reference.attention(q, k, v.abs(), variant, dtype=torch.float64)
    # P and the output are rounded to bf16, by half of 2^-7 each; 1e-4: sums in fp32.
    allowed = (2.0**-8 + 1e-4) * (spread + out.abs())
    assert ((found.out.double() - out).abs() <= allowed).all()
    empty = lse == -math.inf
    assert torch.equal(found.lse == -math.inf, empty)
    assert torch.allclose(found.lse.double()[~empty], lse[~empty], rtol=1e-5, atol=1e-5)


@given(MASKS, LENGTHS, TILES, st.integers(0, 18))
@settings(max_examples=75)
def test_a_tile_changes_no_bit_of_rows_that_do_not_visit_it(mask, lengths, tile, block):
    variant = Variant(mask=mask)
    schedule = Schedule(tile[0], tile[1], 2, tile[0] // 64, "intra")
    q, k, v = drawn(1, *lengths, 2, 2, 16)
    plan = Plan(variant, Problem("bf16", 16, 16), schedule)
    clean = emulate.run(plan, q, k, v, 0.25)
    for t in (k, v):
        t[:, block * tile[1] : (block + 1) * tile[1]] = math.nan
    again = emulate.run(plan, q, k, v, 0.25)
    assert torch.equal(clean.visits, again.visits)
    visiting = (clean.visits // 2 == block).any(-1).repeat_interleave(tile[0], 2)
    others = ~visiting[:, :, : lengths[0]]
    assert torch.equal(clean.out.transpose(1, 2)[others], again.out.transpose(1, 2)[others])
    assert torch.equal(clean.lse[others], again.lse[others])


@pytest.mark.parametrize("tile", [(128, 128), (64, 48)])
def test_causal_tiles_are_visited_only_where_needed_and_masked_only_on_the_diagonal(tile):
    lengths = (700, 1000)
    visits = traced(VARIANTS["causal"], 1, 1, lengths, tile)
    needed, full = by_tile(visible(VARIANTS["causal"], 1, 1, lengths), tile)
    assert torch.equal((visits >= 0).sum(-1), needed.sum(-1))
    assert torch.equal(((visits >= 0) & (visits % 2 == 0)).sum(-1), full.sum(-1))


def test_a_captured_vector_is_read_at_each_call():
    documents = torch.zeros(300, dtype=torch.int32)
    variant = Variant(mask=masks.documents(documents))
    before = traced(variant, 1, 1, (300, 300), (64, 64))
    documents.copy_(torch.arange(300) // 64)
    after = traced(variant, 1, 1, (300, 300), (64, 64))
    assert (before >= 0).sum() == 25 and (after >= 0).sum() == 5


def test_heads_and_batch_entries_have_visits_of_their_own_where_the_mask_reads_them():
    prefixes = torch.tensor([[64, 128], [0, 300]])
    variant = Variant(mask=lambda b, h, q, k: k < prefixes[b, h])
    visits = traced(variant, 2, 2, (10, 300), (64, 64))
    assert (visits >= 0).sum((2, 3)).tolist() == [[1, 2], [0, 5]]
    assert visits[1, 1, 0].tolist() == [9, 6, 4, 2, 0, -1]
