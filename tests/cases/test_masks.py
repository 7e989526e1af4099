"""Windows, causality and ALiBi with the arguments that were misread elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import masks, scores

from .oracles import drawn, hold, hold_ramp, positions, ramp, same

UNBOUNDED = (None, -1)


@pytest.mark.parametrize("seqlen_k", [300, 200, 400])
@pytest.mark.parametrize("right", [None, -1, 0, 5, "not causal"])
@pytest.mark.parametrize("left", UNBOUNDED)
def test_a_causal_window_without_a_left_bound_is_plain_causal(device, left, right, seqlen_k):
    """Source: NVIDIA/TransformerEngine#3528 and #3532."""
    causal = right != "not causal"
    mask = masks.window(left, right if causal else 0, causal=causal)
    q, k, v = drawn(device, (2, 300, seqlen_k, 2, 1))
    plain = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
    assert (plain[0] != 0).any()
    assert same(plain, fa3.attention_with_lse(q, k, v, fa3.Variant(mask=mask)))


@pytest.mark.parametrize("left", UNBOUNDED)
@pytest.mark.parametrize("right", UNBOUNDED)
def test_a_window_without_bounds_is_no_mask(device, left, right):
    q, k, v = drawn(device, (1, 70, 130, 2, 2))
    unbounded = fa3.Variant(mask=masks.window(left, right))
    assert same(fa3.attention_with_lse(q, k, v), fa3.attention_with_lse(q, k, v, unbounded))


@pytest.mark.parametrize("causal", [True, False])
@given(
    size=st.one_of(
        st.integers(max_value=-2),
        st.floats().filter(lambda x: x != -1),
        st.booleans(),
        st.text(max_size=2),
    )
)
def test_other_sizes_of_a_window_are_refused_by_name_and_value(causal, size):
    for name, sides in (("left", (size, 0)), ("right", (0, size))):
        with pytest.raises(fa3.VariantError) as caught:
            masks.window(*sides, causal=causal)
        assert f"{name} is {size!r}" in str(caught.value)


def test_a_window_of_four_tokens_ends_at_the_query_and_holds_four(device):
    """Source: huggingface/transformers#39408."""
    q, k, v = ramp(device, (1, 8, 8, 1, 1))
    out = fa3.attention(q, k, v, fa3.Variant(mask=masks.window(3, 0)))
    assert out[0, :, 0, 0].tolist() == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]
    out = fa3.attention(q, k, v, fa3.Variant(mask=masks.window(4, 0)))
    assert out[0, 4, 0, 0] == 2.0


def test_the_documentation_of_a_window_says_that_its_bounds_are_inclusive():
    assert "inclusive" in masks.window.__doc__
    assert "W tokens" in masks.window.__doc__ and "(W - 1, 0)" in masks.window.__doc__


def seen_in_window(
    seqlen_q: int, seqlen_k: int, left: int | None, right: int | None
) -> torch.Tensor:
    """Which keys a window shows, aligned at the bottom right, by its definition."""
    q, key = positions(seqlen_q, seqlen_k)
    at = q + seqlen_k - seqlen_q
    seen = (key == key) & (at == at)
    if left is not None:
        seen = seen & (key >= at - left)
    return seen if right is None else seen & (key <= at + right)


def hold_window(
    device: str, lengths: tuple[int, int], left: int | None, right: int | None, causal: bool
) -> None:
    q, k, v = ramp(device, (1, *lengths, 1, 1))
    variant = fa3.Variant(mask=masks.window(left, right, causal=causal))
    seen = seen_in_window(*lengths, left, 0 if causal else right)
    hold_ramp(fa3.attention_with_lse(q, k, v, variant), seen)


SIDES = st.one_of(st.none(), st.integers(0, 10), st.sampled_from((63, 64, 127, 128, 129, 1000)))


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(1, 300), SIDES, SIDES, st.booleans())
def test_any_window_over_any_two_lengths_shows_what_it_says(
    seqlen_q, seqlen_k, left, right, causal
):
    hold_window("cpu", (seqlen_q, seqlen_k), left, right, causal)


@pytest.mark.parametrize("lengths", [(1, 300), (300, 1), (200, 200), (150, 333), (333, 150)])
@pytest.mark.parametrize(
    ("left", "right", "causal"),
    [(0, 0, False), (None, 3, False), (64, None, False), (127, 1, False), (128, 500, True)],
)
def test_windows_of_every_kind_show_what_they_say(device, lengths, left, right, causal):
    hold_window(device, lengths, left, right, causal)


# ALiBi.

RAMPED = [0, 0.6225, 1.3202, 2.0846]  # slope 0.5 over keys 0 to 3, causal


@pytest.mark.parametrize("by_batch", [False, True], ids=["heads", "batch and heads"])
def test_alibi_of_a_ramp_is_the_weighted_mean_of_indices(device, by_batch):
    """Source: Dao-AILab/flash-attention#845 and #1585."""
    q, k, v = ramp(device, (2, 4, 4, 12, 12), dtype=torch.bfloat16)
    slopes = torch.full((2, 12) if by_batch else (12,), 0.5, device=device)
    out, lse = fa3.attention_with_lse(q, k, v, fa3.Variant(scores.alibi(slopes), mask=masks.causal))
    for head in range(12):
        assert out[1, :, head, 0].tolist() == pytest.approx(RAMPED, rel=2**-8)
        assert lse[1, head].tolist() == pytest.approx([0, 0.4741, 0.6803, 0.7873], abs=1e-4)


def test_the_form_of_alibi_that_adds_the_key_index_differs_in_the_lse_alone(device):
    q, k, v = drawn(device, (1, 130, 130, 2, 2))
    slopes = torch.tensor([0.5, 0.03], device=device)
    by_distance = fa3.Variant(scores.alibi(slopes), masks.causal)
    by_key = fa3.Variant(lambda s, b, h, q, k: s + slopes[h] * k, masks.causal)
    out, lse = hold(q, k, v, by_distance)
    other, other_lse = hold(q, k, v, by_key)
    assert (out.double() - other.double()).abs().max() <= 2**-7 * v.abs().max()
    moved = slopes[:, None] * torch.arange(130, device=device)
    assert torch.allclose(other_lse[0] - lse[0], moved, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("by_batch", [False, True], ids=["heads", "batch and heads"])
@pytest.mark.parametrize("lengths", [(1, 300), (130, 130), (90, 200), (200, 90)], ids=str)
def test_alibi_matches_its_formula_for_every_batch_entry_and_head(device, lengths, by_batch):
    batch, heads = 3, 12
    q, k, v = drawn(device, (batch, *lengths, heads, 4))
    slopes = torch.rand((batch, heads) if by_batch else (heads,)).to(device)
    hold(q, k, v, fa3.Variant(scores.alibi(slopes), masks.causal))
    written = slopes if by_batch else slopes.expand(batch, heads)
    offset = lengths[1] - lengths[0]
    formula = fa3.Variant(
        lambda s, b, h, q, k: s - written[b, h] * torch.abs(q + offset - k), masks.causal
    )
    here = fa3.attention(q, k, v, fa3.Variant(scores.alibi(slopes), masks.causal))
    there = fa3.attention(q, k, v, formula)
    assert (here.double() - there.double()).abs().max() <= 2**-7 * v.abs().max()


def test_slopes_keep_bits_that_the_model_s_dtype_lacks(device):
    """Two slopes that are one number in bf16 weigh a key 4,000 positions away differently."""
    near = torch.tensor([0.0039062, 0.003915], device=device)
    assert near.bfloat16().unique().numel() == 1
    q, k, v = ramp(device, (1, 1, 2048, 2, 2))
    lse = fa3.attention_with_lse(q, k, v, fa3.Variant(scores.alibi(near)))[1].flatten()
    distance = torch.arange(2047, -1, -1, dtype=torch.float64)
    for found, slope in zip(lse.tolist(), near.tolist(), strict=True):
        assert found == pytest.approx(torch.logsumexp(-slope * distance, 0).item(), abs=1e-4)
    assert not math.isclose(*lse.tolist(), abs_tol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize("shape", [(12,), (2, 12)], ids=str)
def test_slopes_of_another_dtype_are_refused_by_name(dtype, shape):
    with pytest.raises(
        fa3.VariantError, match=rf"slopes (is|are) {str(dtype)[6:]}.*valid (is|are) float32(?!,)"
    ):
        scores.alibi(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("shape", [(), (2, 12, 1), (1, 1, 1, 12)], ids=str)
def test_slopes_of_another_shape_are_refused_with_those_that_are_valid(shape):
    with pytest.raises(fa3.VariantError, match=r"slopes .*of shape.*\(heads,\) .*\(batch, heads"):
        scores.alibi(torch.ones(shape))


@pytest.mark.parametrize("shape", [(11,), (2, 11), (1, 12)], ids=str)
def test_slopes_for_fewer_heads_or_batch_entries_than_there_are_are_refused(device, shape):
    q, k, v = drawn(device, (2, 4, 4, 12, 12))
    variant = fa3.Variant(scores.alibi(torch.ones(shape, device=device)))
    with pytest.raises(fa3.Unsupported, match=r"t0 has shape .*read by [bh]"):
        fa3.attention(q, k, v, variant)
