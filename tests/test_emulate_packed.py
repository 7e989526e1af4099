"""Tiles of several heads give what the reference gives, and what tiles of one head give."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twin_cases import drawn, hold_to_torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, Schedule, Variant, emulate, masks, scores
from cutedsl_fa3.variant.visits import all_visits

LONGEST = 320


@functools.cache
def variants(heads: int) -> dict[str, Variant]:
    """Variants that read the head, or the position, in every role; their masks read no head."""
    generator = torch.Generator().manual_seed(heads)
    slopes, sinks = (torch.rand(heads, generator=generator) for _ in range(2))
    distances = torch.randn(heads, 2 * LONGEST + 1, generator=generator)
    table = torch.randn(heads, LONGEST, LONGEST, generator=generator)
    documents = torch.arange(LONGEST) // 40
    causal = masks.causal
    return {
        "plain": Variant(),
        "causal": Variant(mask=causal),
        "window": Variant(mask=masks.window(30, 5)),
        "documents": Variant(mask=masks.and_masks(causal, masks.documents(documents))),
        "alibi": Variant(scores.alibi(slopes), causal),
        "alibi both ways": Variant(scores.alibi(slopes)),
        "relative bias": Variant(scores.relative_bias(distances), causal),
        "bias": Variant(scores.bias(table), causal),
        "sinks": Variant(mask=causal, softmax=OnlineSoftmax(sinks)),
        "capped, sinks": Variant(scores.softcap(5.0), causal, OnlineSoftmax(sinks)),
        "gated": Variant(
            mask=causal, epilogue=lambda o, lse, b, h, q: o * slopes[h] + torch.sigmoid(lse + q)
        ),
        "weights": Variant(lambda s, b, h, q, k: s - slopes[h], causal, Elementwise(torch.sigmoid)),
    }


def run(q, k, v, variant, schedule):
    return emulate.attention_with_visits(q, k, v, variant, schedule=schedule)


@settings(max_examples=60)
@given(
    st.integers(1, 150),
    st.integers(1, LONGEST),
    st.sampled_from([(64, 1), (128, 2), (192, 3)]),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from(list(variants(1))),
)
def test_packed_heads_are_held_to_torch(seqlen_q, seqlen_k, tile, pack, times, kv_heads, name):
    heads = pack * times * kv_heads
    q, k, v = drawn(1, seqlen_q, seqlen_k, heads, kv_heads, 16)
    variant, schedule = variants(heads)[name], Schedule(tile[0], 64, 2, tile[1], "intra", pack=pack)
    found = run(q, k, v, variant, schedule)
    if variant.has_lse and variant.sink is None and variant.epilogue is None:
        hold_to_torch((found.out, found.lse), q, k, v, variant)
    # Sums are taken over other tiles' rows, each row's in its own order: nothing else differs.
    alone = run(q, k, v, variant, Schedule(tile[0], 64, 2, tile[1], "intra"))
    torch.testing.assert_close(found.out, alone.out, rtol=2**-6, atol=2**-6)
    if variant.has_lse:
        torch.testing.assert_close(found.lse, alone.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", variants(1))
def test_visits_are_those_of_tiles_of_fewer_queries_and_heads(name):
    variant, schedule = variants(8)[name], Schedule(128, 48, 2, 2, "intra", pack=4)
    q, k, v = drawn(2, 150, 200, 8, 2, 16)
    found = run(q, k, v, variant, schedule).visits
    assert found.shape == (2, 2, -(-150 // 32), -(-200 // 48) + 1)
    wanted = all_visits(variant.mask, variant.captures, 2, 2, 150, 200, 32, 48)
    assert torch.equal(found, wanted)
    assert torch.equal(found, fa3.visits(q, k, v, variant, schedule=schedule))


def test_a_hidden_value_that_is_nan_reaches_only_the_rows_that_see_it():
    q, k, v = drawn(1, 20, 60, 8, 1, 16)
    v[0, 50] = math.nan
    out = run(q, k, v, Variant(mask=masks.causal), Schedule(128, 64, 2, 2, "intra", pack=8)).out
    sees = torch.arange(20) + 40 >= 50
    assert torch.equal(out.isnan().all(-1), sees[None, :, None].expand(1, 20, 8))
    assert out[:, ~sees].isfinite().all()


def test_few_queries_are_packed_without_being_asked_and_the_plan_says_so():
    q, k, v = drawn(9, 3, 100, 64, 16, 64)
    made = fa3.plan(q, k, v, Variant(mask=masks.causal))
    assert "2 heads in a tile" in str(made)
    out, lse = fa3.attention_with_lse(q, k, v, Variant(mask=masks.causal))
    hold_to_torch((out, lse), q, k, v, Variant(mask=masks.causal))
