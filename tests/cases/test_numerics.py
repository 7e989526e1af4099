"""Scores far from 0, finite stand-ins for -inf, and sinks: no row is lost, nothing overflows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import OnlineSoftmax, masks, scores

from .oracles import drawn, exact, hold_lse, hold_ramp, positions, ramp, same

FP32 = torch.finfo(torch.float32)
THREE = ("full", "causal", "window")
LOW = {-20000.0: -1323.704, -60000.0: -4864.895, -120000.0: -10182.338}  # level -> LSE


@pytest.mark.parametrize("level", LOW)
def test_a_row_whose_scores_all_lie_below_a_usual_sentinel_is_not_empty(device, level):
    """Source: flashinfer-ai/flashinfer#4267."""
    q = torch.ones(1, 1, 16, 128, device=device, dtype=torch.bfloat16)
    k = torch.full((1, 64, 1, 128), level / 128, device=device, dtype=torch.bfloat16)
    k[:, 0] = (level + 5000) / 128
    v = torch.arange(1.0, 65, device=device).bfloat16().view(1, 64, 1, 1)
    out, lse = fa3.attention_with_lse(q, k, v.expand(1, 64, 1, 128).contiguous())
    assert (out == 1).all()
    assert lse.flatten().tolist() == pytest.approx([LOW[level]] * 16, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, masks.causal, masks.window(90, 0)], ids=THREE)
@settings(max_examples=6)
@given(exponent=st.integers(0, 17), negative=st.booleans())
def test_a_number_added_to_all_scores_moves_only_the_lse(device, dtype, mask, exponent, negative):
    """Scores are multiples of 1/8 here, so that the sum with a power of two is exact."""
    shift = (-1.0 if negative else 1.0) * 2**exponent
    q, k, v = drawn(device, (1, 70, 300, 2, 1), dtype=dtype)
    q, k = q.sign(), k.sign()
    moved = torch.tensor(shift, device=device)
    variant = fa3.Variant(lambda s, b, h, q, k: s + moved, mask)
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    wanted, wanted_lse = exact(q, k, v, fa3.Variant(mask=mask))
    assert ((lse.double() - shift - wanted_lse).abs() <= 2**-22 * abs(shift) + 1e-4).all()
    # A weight is exp of a score in fp32, which is off by a few units in the last place of `shift`.
    relative = 2**-21 * abs(shift) + 2 * torch.finfo(dtype).eps
    assert ((out.double() - wanted).abs() <= relative * v.abs().max()).all()


SENTINELS = (-1e4, -5e4, -1e9, -1e30, FP32.min)


@pytest.mark.parametrize("sentinel", SENTINELS)
@pytest.mark.parametrize("seen", [(0, 40), (130, 140), (150, 300), (299, 300)], ids=str)
def test_a_finite_stand_in_for_minus_infinity_hides_keys_where_others_are_seen(
    device, sentinel, seen
):
    """Whole tiles of the stand-in are visited before the first key that counts, and after it.

    Source: flashinfer-ai/flashinfer#4267 and #4450.
    """
    q, k, v = ramp(device, (1, 130, 300, 2, 2))
    start, end = (torch.tensor(at, device=device) for at in seen)
    result = fa3.attention_with_lse(
        q,
        k,
        v,
        fa3.Variant(lambda s, b, h, q, k: torch.where((k >= start) & (k < end), s, sentinel)),
    )
    key = positions(130, 300)[1]
    hold_ramp(result, ((key >= seen[0]) & (key < seen[1])).expand(130, 300))


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_a_row_that_holds_nothing_but_a_finite_stand_in_is_uniform(device, sentinel):
    q, k, v = ramp(device, (1, 70, 300, 1, 1))
    rows = torch.tensor(40, device=device)
    variant = fa3.Variant(lambda s, b, h, q, k: torch.where(q < rows, sentinel, s))
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    assert (out == 149.5).all()
    assert lse[0, 0, :40].tolist() == pytest.approx([sentinel + math.log(300)] * 40, rel=1e-6)
    assert lse[0, 0, 40:].tolist() == pytest.approx([math.log(300)] * 30, abs=1e-5)


@pytest.mark.parametrize("top", [1e4, 1e9, 1e30, FP32.max])
def test_the_one_huge_score_of_a_row_takes_all_of_its_weight(device, top):
    q, k, v = ramp(device, (1, 70, 300, 1, 1))
    at = torch.tensor(211, device=device)
    variant = fa3.Variant(lambda s, b, h, q, k: torch.where(k == at, top, s))
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    assert (out == 211).all()
    assert lse.flatten().tolist() == pytest.approx([top] * 70, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 30.0, 60000.0])
def test_products_of_any_size_that_the_dtype_holds_give_finite_rows(device, dtype, size):
    """With the largest, a score is near 1e5, most rows see one key, and all stay in v's range."""
    q, k, v = drawn(device, (1, 65, 200, 2, 1), dtype=dtype)
    q = (q.sign() * size).to(dtype)
    out, lse = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
    assert out.isfinite().all() and lse.isfinite().all()
    assert (out.abs() <= v.abs().max() * (1 + torch.finfo(dtype).eps)).all()
    hold_lse(lse, exact(q, k, v, fa3.Variant(mask=masks.causal))[1])


# Sinks: one more logit for each head, without a value.


def sunk(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor):
    """What a sink (heads,) or () makes of the output and LSE without one, in fp64."""
    logit = sink.double().to(lse.device).reshape(-1, 1).expand(lse.shape[1], lse.shape[2])
    joined = torch.logaddexp(lse.double(), logit)
    weight = torch.where(lse == -math.inf, 0.0, torch.exp(lse.double() - joined))
    return out.double() * weight.transpose(1, 2)[..., None], joined


@pytest.mark.parametrize(
    ("sink", "out", "lse"), [(2.0, 0.119203, 2.126928), (100.0, 0.0, 100.0)], ids=str
)
def test_a_sink_beside_one_key_takes_its_share_and_cannot_overflow(device, sink, out, lse):
    """Source: Dao-AILab/flash-attention#2752."""
    q = torch.zeros(1, 1, 1, 64, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(1, 1, 1, 64).to(q), torch.ones_like(q)
    variant = fa3.Variant(softmax=OnlineSoftmax(sink=torch.tensor(sink, device=device)))
    result, sums = fa3.attention_with_lse(q, k, v, variant)
    assert result.float().flatten().tolist() == pytest.approx([out] * 64, rel=2**-8)
    assert sums.item() == pytest.approx(lse, abs=1e-5)


def hold_outputs(out: torch.Tensor, wanted: torch.Tensor, v: torch.Tensor) -> None:
    """Both sides round P and the output once: four halves of a unit, of the largest value."""
    assert ((out.double() - wanted).abs() <= 2 * torch.finfo(out.dtype).eps * v.abs().max()).all()


SINKS = (-math.inf, -FP32.max, -1e30, -200.0, -3.0, 0.0, 2.0, 30.0, 100.0, 1e4, 1e30, FP32.max)


@pytest.mark.parametrize("mask", [None, masks.causal, masks.none], ids=["full", "causal", "none"])
@pytest.mark.parametrize("per_head", [True, False], ids=["by head", "one"])
@settings(max_examples=6)
@given(chosen=st.lists(st.sampled_from(SINKS), min_size=4, max_size=4), shift=st.booleans())
def test_a_sink_of_any_size_is_one_more_logit(device, mask, per_head, chosen, shift):
    """Held to the same call without a sink: no exponential of it alone is ever formed.

    Under `causal` the first 30 rows see no key, under `none` all: there the LSE is the sink.
    """
    q, k, v = drawn(device, (1, 100, 70, 4, 2))
    sink = torch.tensor(chosen if per_head else chosen[0], device=device)
    offset = torch.tensor(-50.0 if shift else 0.0, device=device)

    def score(s, b, h, q, k):
        return s + offset

    plain = fa3.attention_with_lse(q, k, v, fa3.Variant(score, mask))
    out, lse = fa3.attention_with_lse(
        q, k, v, fa3.Variant(score, mask, softmax=OnlineSoftmax(sink=sink))
    )
    wanted, wanted_lse = sunk(*plain, sink)
    assert not out.isnan().any()
    hold_outputs(out, wanted, v)
    hold_lse(lse, wanted_lse)
    assert (out.transpose(1, 2)[plain[1] == -math.inf] == 0).all()


@pytest.mark.parametrize("mask", [None, masks.causal, masks.none], ids=["full", "causal", "none"])
@pytest.mark.parametrize("sink", [2.4e38, -2.4e38, FP32.max, FP32.min, math.inf, math.nan], ids=str)
def test_a_sink_at_the_ends_of_fp32_is_what_the_reference_says(device, mask, sink):
    """Its base-2 logarithm overflows; an infinite one takes all weight, NaN all that is seen."""
    q, k, v = drawn(device, (1, 70, 40, 2, 1))
    variant = fa3.Variant(mask=mask, softmax=fa3.OnlineSoftmax(torch.tensor(sink, device=device)))
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    right, right_lse = exact(q, k, v, variant)
    assert torch.allclose(lse.double(), right_lse, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert torch.allclose(out.double(), right, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_a_sink_of_minus_infinity_changes_no_bit_of_a_row_that_sees_keys(device):
    q, k, v = drawn(device, (1, 100, 300, 2, 2))
    sink = torch.full((2,), -math.inf, device=device)
    plain = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
    there = fa3.Variant(mask=masks.causal, softmax=OnlineSoftmax(sink=sink))
    assert same(plain, fa3.attention_with_lse(q, k, v, there))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sink_may_have_any_floating_dtype_and_takes_new_values_at_each_call(device, dtype):
    q, k, v = drawn(device, (2, 64, 200, 4, 4))
    sink = torch.tensor([0.5, -1.0, 2.0, 8.0], device=device, dtype=dtype)
    variant = fa3.Variant(scores.softcap(20.0), softmax=OnlineSoftmax(sink=sink))
    plain = fa3.attention_with_lse(q, k, v, fa3.Variant(scores.softcap(20.0)))
    for values in (sink.clone(), -sink):
        sink.copy_(values)
        out, lse = fa3.attention_with_lse(q, k, v, variant)
        wanted, wanted_lse = sunk(*plain, sink)
        hold_outputs(out, wanted, v)
        hold_lse(lse, wanted_lse)
