"""Masks as spans: of each query's keys, and of each key's queries, against the mask itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from random_variants import Written, masks, positions

from cutedsl_fa3 import Variant
from cutedsl_fa3 import masks as shipped
from cutedsl_fa3.variant import describe
from cutedsl_fa3.variant.bounds import PythonIntegers
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.keys import QueryTile, key_spans
from cutedsl_fa3.variant.solve import solve
from cutedsl_fa3.variant.spans import MOST_SPANS, exchanged, in_spans

LIMITS = torch.tensor([7, 9])
SIZES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70))


def seen_by(graph, captures, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """What spans show of each (b, h, q, k)."""
    batch, heads, seqlen_q, seqlen_k = shape
    ints, keys = PythonIntegers(captures), torch.arange(seqlen_k)
    found = torch.zeros(shape, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for q in range(seqlen_q):
                tile = QueryTile(0, 0, b, h, seqlen_q, seqlen_k)
                for low, high in key_spans(graph, q, tile, ints):
                    inside = keys >= (0 if low is None else low)
                    found[b, h, q] |= inside & (keys < (seqlen_k if high is None else high))
    return found


def shown(graph, captures, shape: tuple[int, int, int, int]) -> torch.Tensor:
    if graph is None:
        return torch.ones(shape, dtype=torch.bool)
    at = {**positions(*shape), "seqlen_q": shape[2], "seqlen_k": shape[3]}
    return torch.broadcast_to(evaluate(graph, at, captures), shape)


@given(written=masks(), shape=SIZES)
@settings(max_examples=400)
def test_spans_are_the_mask_wherever_it_is_solved(written: Written, shape) -> None:
    variant = written.variant()
    graph, captures = variant.mask, variant.captures
    for each, of in ((graph, shape), (exchanged(graph), (*shape[:2], shape[3], shape[2]))):
        exact = solve(each).exact
        event(f"exact {exact}, {min(len(solve(each).possible), MOST_SPANS + 1)} spans")
        if exact:
            assert torch.equal(seen_by(each, captures, of), shown(each, captures, of))


@given(written=masks(), shape=SIZES)
@settings(max_examples=100)
def test_exchanged_shows_what_the_mask_shows_with_both_exchanged(written: Written, shape) -> None:
    variant = written.variant()
    transposed = (*shape[:2], shape[3], shape[2])
    found = shown(exchanged(variant.mask), variant.captures, transposed)
    assert torch.equal(found.mT, shown(variant.mask, variant.captures, shape))
    assert exchanged(exchanged(variant.mask)) == variant.mask


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, True),
        (shipped.causal, True),
        (shipped.window(128, 0), True),
        (shipped.prefix_lm(100), True),
        (lambda b, h, q, k: (k - q) % 2 == 0, False),  # not solved
        (lambda b, h, q, k: LIMITS[h] > k, False),  # read from memory
    ],
)
def test_which_masks_are_spans(mask, expected: bool) -> None:
    graph = Variant(mask=mask).mask
    assert in_spans(graph) == expected
    assert in_spans(exchanged(graph)) == expected


def test_a_mask_of_many_spans_is_none() -> None:
    def islands(b, h, q, k):
        found = k == 3
        for first in range(10, 10 * (MOST_SPANS + 1), 10):
            found = found | (k == first)
        return found

    mask = Variant(mask=islands).mask
    assert solve(mask).exact and not in_spans(mask)
    assert describe.most_spans(mask) <= MOST_SPANS + 1  # tiles see fewer, larger ones
