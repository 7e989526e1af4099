"""Masks as spans: of each query's keys, and of each key's queries, against the mask itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from random_variants import Written, masks, positions

from cutedsl_fa3 import Variant
from cutedsl_fa3 import masks as shipped
from cutedsl_fa3.variant.bounds import PythonIntegers, classify
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
    again = exchanged(exchanged(variant.mask))
    if again is not None:
        assert again == variant.mask
        assert [n.depends for n in again.nodes] == [n.depends for n in variant.mask.nodes]


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


def test_a_mask_of_many_spans_is_asked() -> None:
    def islands(b, h, q, k):
        found = k == 3
        for first in range(10, 10 * (MOST_SPANS + 1), 10):
            found = found | (k == first)
        return found

    mask = Variant(mask=islands).mask
    assert solve(mask).exact and not in_spans(mask)


# Products of positions within 32 bits, but not within what bounds are held in.
LARGE = {
    "k * 65536 <= q * 58982": 25000,
    "k * 65536 >= q * 58983": 25000,
    "k * 1000000 <= q * 999999": 1000,
    "k * 1000000 >= q * 999999": 1000,
    "k // 65536 >= q - 10000": 10001,
    "k // 65536 <= q - 8200": 9000,
    "k < h * 2**27 - 2**30": 5,
    "k < q * 2**20 - 2**30 + q": 1030,
    "k // 65536 <= q + seqlen_q + seqlen_k + 10000": 10001,
}


@pytest.mark.parametrize("text", LARGE)
def test_bounds_of_large_products_hide_nothing_that_is_seen(text):
    first, heads, lengths = LARGE[text], 10, (20000, 30000)

    def mask(b, h, q, k):
        names = {"b": b, "h": h, "q": q, "k": k, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
        return eval(text, names)

    graph = Variant(mask=mask).mask
    assert not in_spans(graph)
    for each in (graph, exchanged(graph)):
        for h, q in ((0, first), (heads - 1, first)):
            tile, keys = QueryTile(q, q, 0, h, *lengths), torch.arange(0, 30000, 7)
            at = {"b": 0, "h": h, "q": q, "k": keys, "seqlen_q": 20000, "seqlen_k": 30000}
            shows = torch.broadcast_to(evaluate(each, at, ()), keys.shape)
            for n in (keys[shows][::500]).tolist():
                assert classify(each, tile, (n, n)) != "empty"
            if not shows.all():
                assert classify(each, tile, (0, 29999)) != "full"
            if in_spans(each):
                spans = key_spans(each, q, tile, PythonIntegers(()))
                inside = [(low or 0, 30000 if high is None else high) for low, high in spans]
                found = [any(low <= n < high for low, high in inside) for n in keys.tolist()]
                assert found == shows.tolist()
