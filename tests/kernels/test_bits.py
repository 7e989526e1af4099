"""Bits of the keys that a row sees, and of the queries that see a key, are what the mask shows."""

from __future__ import annotations

import pytest
import torch
from cutlass import Float32, Int32
from on_cpu import for_each

from cutedsl_fa3 import Variant, masks
from cutedsl_fa3.kernels.sm90.bits import Bits, in_pairs
from cutedsl_fa3.kernels.sm90.elements import Elements, positions_of
from cutedsl_fa3.layouts.wgmma import Places
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.lower import select
from cutedsl_fa3.variant.spans import in_spans

THREADS = 32
SEQLEN_Q, SEQLEN_K = 150, 170
CORNERS = ((0, 0), (64, 64), (128, 64), (0, 128), (64, 160))  # the first query and key of a tile
MASKS = {
    "none": None,
    "nothing": masks.none,
    "causal": masks.causal,
    "window": masks.window(20, 5),
    "prefix": masks.prefix(70),
    "prefix_lm": masks.prefix_lm(100),
    "streaming": masks.streaming(4, 30),
    "global_window": masks.global_window(3, 10, 10),
    "chunked": masks.chunked(48),
    "all but a window": masks.not_mask(masks.window(9, 9)),
    "by head": lambda b, h, q, k: k <= q + 8 * h,
}
COUNTS = (8, 32, 44)  # elements of a row: part of a word, a word, more than one


def columns(count: int) -> tuple[int, ...]:
    return tuple(8 * (c // 2) + c % 2 for c in range(count))


def shown(variant: Variant, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which pairs of the sequences the mask shows."""
    inside = (queries < SEQLEN_Q) & (keys < SEQLEN_K)
    if variant.mask is None:
        return inside
    at = {"b": 0, "h": 1, "q": queries, "k": keys, "seqlen_q": SEQLEN_Q, "seqlen_k": SEQLEN_K}
    return inside & evaluate(variant.mask, at, ())


def elements(variant: Variant, zero: Int32) -> Elements:
    lengths = (zero + SEQLEN_Q, zero + SEQLEN_K)
    return Elements(variant, (), Float32(1.0), (zero, zero + 1), lengths)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("corner", CORNERS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_row_has_the_keys_that_its_query_sees(name, corner, count):
    variant, rows = Variant(mask=MASKS[name]), (0, 8)
    assert in_spans(variant.mask)
    found = torch.full((THREADS, len(rows), count), -1.0)

    def write(i, given, results):
        zero = i * 0
        mine = Places(i // 4, i % 4 * 2, rows, columns(count))
        positions = positions_of(mine, (zero + corner[0], zero + corner[1]))
        for r in range(len(rows)):
            bits = elements(variant, zero).keys_of_row(mine, positions(r, 0))
            for c in range(count):
                results[0][i, r, c] = select(bits[c], Float32(1.0), Float32(0.0))

    for_each(THREADS, [torch.zeros(1)], [found], write)
    thread = torch.arange(THREADS)[:, None, None]
    queries = corner[0] + thread // 4 + torch.tensor(rows)[:, None]
    keys = corner[1] + thread % 4 * 2 + torch.tensor(columns(count))
    seen = queries < SEQLEN_Q  # what rows past the sequence have is stored nowhere
    assert torch.equal((found == 1.0) & seen, shown(variant, queries, keys))


@pytest.mark.parametrize("corner", CORNERS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_key_has_the_queries_that_see_it(name, corner):
    variant, keys_held, count = Variant(mask=MASKS[name]), (0, 8), 16
    found = torch.full((THREADS, len(keys_held), count), -1.0)

    def write(i, given, results):
        zero = i * 0
        mine = Places(i % 4 * 2, i // 4, columns(count), keys_held)
        bits = elements(variant, zero).queries_of_keys(mine, (zero + corner[0], zero + corner[1]))
        for c in range(len(keys_held)):
            for r in range(count):
                results[0][i, c, r] = select(bits[c][r], Float32(1.0), Float32(0.0))

    for_each(THREADS, [torch.zeros(1)], [found], write)
    thread = torch.arange(THREADS)[:, None, None]
    queries = corner[0] + thread % 4 * 2 + torch.tensor(columns(count))
    keys = corner[1] + thread // 4 + torch.tensor(keys_held)[:, None]
    assert torch.equal(found == 1.0, shown(variant, queries, keys))


def test_elements_that_lie_otherwise_have_no_bits():
    assert in_pairs(columns(44)) and not in_pairs((0, 1, 2, 3)) and not in_pairs((0, 8, 16))


def test_without_spans_no_bit_is_set():
    found = torch.ones(THREADS, 40)

    def write(i, given, results):
        bits = Bits((), i, 40)
        for c in range(40):
            results[0][i, c] = select(bits[c], Float32(1.0), Float32(0.0))

    for_each(THREADS, [torch.zeros(1)], [found], write)
    assert not found.any()
