"""The CPU twin's gradients against the reference's in fp64, and against finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gradients import F64, Parts, by_autograd, of_reference, of_twin, upstream_of
from hypothesis import given, settings
from hypothesis import strategies as st
from twin_cases import BATCH, HEADS, KV_HEADS, drawn, plain, variants

from cutedsl_fa3 import OnlineSoftmax, Variant, backward, masks, reference, scores
from cutedsl_fa3.gallery_page import EXAMPLES
from cutedsl_fa3.variant import Elementwise

NAN, INF = math.nan, math.inf
SMALL = (16, 24)  # tiles of queries and keys


def wide(*sizes: int, dtype: torch.dtype = F64, seed: int = 3) -> tuple[torch.Tensor, ...]:
    """q, k, v of (batch, seqlen_q, seqlen_k, heads, kv_heads, dim, dim_v)."""
    batch, seqlen_q, seqlen_k, heads, kv_heads, dim, dim_v = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, seqlen_q, heads, dim),
        (batch, seqlen_k, kv_heads, dim),
        (batch, seqlen_k, kv_heads, dim_v),
    )
    return tuple(torch.randn(s, generator=generator, dtype=F64).to(dtype) for s in shapes)


def hold_equal(found: Parts, wanted: Parts) -> None:
    """In fp64 to rounding."""
    assert set(wanted) == set(found)
    for name, right in wanted.items():
        # Captured tensors are leaves of fp32, in which torch adds up their gradients.
        relative = 1e-6 if name[0] == "t" else 1e-10
        tolerance = relative * (1 + right.abs().max().item() if right.numel() else 1)
        torch.testing.assert_close(
            found[name].double(), right.double(), rtol=relative, atol=tolerance
        )


def check_exactly(variant: Variant, *sizes: int, tile: tuple[int, int] = SMALL) -> None:
    q, k, v = wide(*sizes)
    upstream = upstream_of(q, v, variant)
    found = of_twin(q, k, v, variant, upstream, tile)
    hold_equal(found, of_reference(q, k, v, variant, upstream))


# In fp64 the twin is the reference's derivative.


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_every_shipped_function_has_the_references_gradients(example):
    check_exactly(example.variant(70), 1, 61, 70, 1, 1, 8, 16)


@pytest.mark.parametrize("name", variants())
def test_every_kind_of_variant_has_the_references_gradients(name):
    check_exactly(variants()[name], BATCH, 50, 75, HEADS, KV_HEADS, 8, 8)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_query_heads_that_share_a_key_head_add_up(group):
    check_exactly(Variant(mask=masks.causal), 2, 40, 33, 2 * group, 2, 8, 24)


LENGTHS = st.integers(1, 60)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(variants())),
    LENGTHS,
    LENGTHS,
    st.sampled_from([(8, 8), (16, 24), (7, 64), (64, 5)]),
)
def test_gradients_are_right_at_any_lengths_in_any_tiles(name, seqlen_q, seqlen_k, tile):
    check_exactly(variants()[name], BATCH, seqlen_q, seqlen_k, HEADS, KV_HEADS, 8, 8, tile=tile)


def test_a_captured_tensor_read_in_several_places_gets_all_of_its_gradient():
    t = torch.randn(4)
    variant = Variant(
        lambda s, b, h, q, k: s * t[h] + t[(q + k) % 4],
        masks.causal,
        OnlineSoftmax(t),
        lambda o, lse, b, h, q: o * t[0] + torch.sigmoid(lse * t[b]),
    )
    check_exactly(variant, 2, 40, 50, 4, 2, 8, 8)


def test_of_captured_tensors_only_those_asked_for_are_added_up():
    a, b_ = torch.randn(4), torch.randn(4)
    variant = Variant(lambda s, b, h, q, k: s * a[h] + b_[h])
    q, k, v = wide(1, 5, 6, 4, 4, 8, 8)
    o, lse = reference.attention_with_lse(q, k, v, variant, dtype=F64)
    found = backward.run(q, k, v, variant, o, lse, o, scale=1.0, wanted=[1])
    assert set(found.captures) == {1}
    assert backward.run(q, k, v, variant, o, lse, o, scale=1.0).captures == {}


def test_which_captured_tensors_have_a_gradient_is_known_without_running():
    sink, slopes, ids = torch.zeros(4), torch.rand(4), torch.arange(9)
    limit = torch.tensor(3.0)
    variant = Variant(
        lambda s, b, h, q, k: torch.where(s > limit, s, s + slopes[h] * ids[k]),
        lambda b, h, q, k: ids[q] >= ids[k],
        OnlineSoftmax(sink),
    )
    names = {0: limit, 1: slopes}
    numbers = {i for i, t in enumerate(variant.captures) if t is sink or t is names[1]}
    assert backward.differentiable(variant) == numbers and len(numbers) == 2
    assert backward.differentiable(Variant()) == frozenset()


# Finite differences.


class Twin(torch.autograd.Function):
    """The reference forwards, the twin backwards, both in fp64."""

    @staticmethod
    def forward(ctx: Any, variant: Variant, *given: torch.Tensor) -> Any:
        q, k, v = (t.detach() for t in given[:3])
        ctx.variant = variant
        raw = variant.without_epilogue()
        lse = None
        if variant.has_lse:
            o, lse = reference.attention_with_lse(q, k, v, raw, dtype=F64)
        else:
            o = reference.attention(q, k, v, raw, dtype=F64)
        ctx.save_for_backward(q, k, v, o, lse)
        out = reference.attention(q, k, v, variant, dtype=F64)
        return (out, lse) if variant.has_lse else out

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor | None = None) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        scale = q.shape[3] ** -0.5
        found = backward.run(q, k, v, ctx.variant, o, lse, do, dlse, scale=scale, tile=(4, 4))
        return None, *found[:3]


def twin(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> Any:
    return Twin.apply(variant, q, k, v)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_finite_differences_of_every_shipped_function(example):
    variant = example.variant(9)
    given = [t.requires_grad_() for t in wide(1, 7, 9, 1, 1, 8, 8)]
    if variant.has_lse:  # rows that see nothing have an LSE of -inf, which has no difference
        empty = reference.attention_with_lse(*given, variant)[1] == -INF

        def function(*given: torch.Tensor) -> Any:
            out, lse = twin(*given, variant)
            return out, lse.masked_fill(empty, 0.0)
    else:

        def function(*given: torch.Tensor) -> Any:
            return twin(*given, variant)

    assert torch.autograd.gradcheck(function, given, fast_mode=True, atol=1e-6)


def test_finite_differences_in_full_of_gradients_of_all_kinds():
    sink, gate = torch.tensor([0.5, -1.0]), torch.tensor([1.5, 0.5])
    variant = Variant(
        lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0) * gate[h],
        masks.causal,
        OnlineSoftmax(sink),
        lambda o, lse, b, h, q: o * torch.sigmoid(lse) + o * o,
    )
    given = [t.requires_grad_() for t in wide(1, 3, 4, 2, 1, 8, 8)]
    assert torch.autograd.gradcheck(lambda *t: twin(*t, variant), given)


# At the input types: at most twice torch's error, plus one rounding.


def hold_to_torch(found: Parts, exact: Parts, torchs: Parts, dtype: torch.dtype) -> None:
    for name, right in exact.items():
        error = (torchs[name].double() - right.double()).abs().max()
        allowed = 2 * error + torch.finfo(dtype).eps * right.abs().max()
        assert (found[name].double() - right.double()).abs().max() <= allowed, name


ROUNDED = [(name, torch.bfloat16) for name in variants()]
ROUNDED += [(name, torch.float16) for name in ("plain", "alibi", "gated output", "relu weights")]


@pytest.mark.parametrize(("name", "dtype"), ROUNDED, ids=str)
def test_rounded_inputs_give_at_most_twice_torchs_error(name, dtype):
    variant = variants()[name]
    q, k, v = drawn(BATCH, 60, 85, HEADS, KV_HEADS, 32, dtype=dtype)
    upstream = upstream_of(q, v, variant)[0], None
    exact = of_reference(q, k, v, variant, upstream)
    found = of_twin(q, k, v, variant, upstream, (32, 40))
    torchs = by_autograd(plain, q, k, v, variant, upstream)
    hold_to_torch(found, exact, torchs, dtype)


# What takes no part.


def finite(found: Parts) -> bool:
    return all(bool(t.isfinite().all()) for t in found.values())


def test_rows_that_see_nothing_and_keys_that_nobody_sees_get_exactly_0():
    """Causal with more queries than keys; then keys behind the last query of a window."""
    q, k, v = drawn(2, 300, 100, 4, 2, 64)
    variant = Variant(mask=masks.causal)
    found = of_twin(q, k, v, variant, upstream_of(q, v, variant))
    assert finite(found) and (found["q"][:, :200] == 0).all() and found["q"][:, 201:].any()
    q, k, v = drawn(1, 100, 300, 2, 1, 64)
    variant = Variant(mask=lambda b, h, q, k: k == q)
    found = of_twin(q, k, v, variant, upstream_of(q, v, variant))
    assert finite(found)
    assert (found["k"][:, 100:] == 0).all() and (found["v"][:, 100:] == 0).all()
    assert (found["v"][:, :100] != 0).any(-1).all()


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5), (1, 0, 0)])
def test_without_queries_keys_or_batch_entries_gradients_are_0(sizes):
    sink, gate = torch.zeros(4), torch.ones(4)
    variant = Variant(
        mask=masks.causal,
        softmax=OnlineSoftmax(sink),
        epilogue=lambda o, lse, b, h, q: o + gate[h] * lse,
    )
    batch, seqlen_q, seqlen_k = sizes
    q, k, v = wide(batch, seqlen_q, seqlen_k, 4, 2, 8, 8)
    upstream = upstream_of(q, v, variant)
    found = of_twin(q, k, v, variant, upstream)
    hold_equal(found, of_reference(q, k, v, variant, upstream))
    assert all((found[name] == 0).all() and found[name].shape == t.shape
               for name, t in zip("qkv", (q, k, v), strict=True))  # fmt: skip


VALUES = pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)


def spoilt(value: float, *places: tuple[torch.Tensor, Any]) -> None:
    for t, at in places:
        t[at] = value


@VALUES
@pytest.mark.parametrize("dtype", [torch.bfloat16, F64], ids=str)
@pytest.mark.parametrize("softmax", [OnlineSoftmax(), Elementwise(torch.sigmoid)], ids=str)
def test_what_a_mask_hides_changes_no_gradient(value, dtype, softmax):
    """Documents, of which the second is spoilt; and rows that see nothing."""
    of = torch.arange(128, dtype=torch.int32) // 50
    slopes = torch.rand(2)
    variant = Variant(
        lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0) + slopes[h] * s,
        lambda b, h, q, k: (of[q] == of[k]) & (of[k] != 1) & (k <= q),
        softmax,
    )
    q, k, v = wide(1, 128, 128, 2, 1, 8, 8, dtype=dtype)
    do, dlse = upstream_of(q, v, variant)
    clean = of_twin(q, k, v, variant, (do, dlse), SMALL)
    hidden = (slice(None), slice(50, 100))
    spoilt(value, *((t, hidden) for t in (q, k, v, do)))
    found = of_twin(q, k, v, variant, (do, dlse), SMALL)
    assert finite(found)
    for name, t in clean.items():
        assert torch.equal(found[name], t), name


@VALUES
@pytest.mark.parametrize("at", "qkv")
def test_what_is_not_finite_reaches_the_rows_and_keys_it_is_seen_with(at, value):
    """The middle of three documents."""
    of = torch.arange(90, dtype=torch.int32) // 30
    variant = Variant(mask=lambda b, h, q, k: of[q] == of[k])
    q, k, v = wide(1, 90, 90, 1, 1, 8, 8)
    {"q": q, "k": k, "v": v}[at][0, 40, 0, 3] = value
    found = of_twin(q, k, v, variant, upstream_of(q, v, variant), SMALL)
    for t in found.values():
        assert t[:, :30].isfinite().all() and t[:, 60:].isfinite().all()
    reached = ("q", "k", "v") if at != "v" else ("q", "k")  # P is finite whatever V is
    assert not any(found[name][:, 30:60].isfinite().all() for name in reached)


def test_a_key_of_score_minus_infinity_gets_no_gradient():
    q, k, v = wide(1, 40, 50, 1, 1, 8, 8)
    low = torch.tensor(7)
    variant = Variant(lambda s, b, h, q, k: torch.where(k == low, -INF, s))
    upstream = upstream_of(q, v, variant)
    v[0, 7] = NAN
    found = of_twin(q, k, v, variant, upstream, SMALL)
    assert finite(found) and not found["k"][0, 7].any() and not found["v"][0, 7].any()
    hidden = of_twin(q, k, v, Variant(mask=lambda b, h, q, k: k != low), upstream, SMALL)
    for name, t in hidden.items():
        torch.testing.assert_close(found[name], t)


def test_a_derivative_that_is_not_finite_at_hidden_pairs_goes_no_further():
    """sqrt of what is negative above the diagonal."""
    variant = Variant(
        lambda s, b, h, q, k: s * torch.sqrt((q - k).float()) + torch.log(1.0 + q - k),
        lambda b, h, q, k: k < q,
    )
    check_exactly(variant, 1, 40, 40, 2, 1, 8, 8)


@pytest.mark.parametrize("sink", [INF, -INF, 100.0, -100.0])
def test_a_sink_of_any_size_gets_a_finite_gradient(sink):
    t = torch.tensor([sink, 0.5])
    variant = Variant(mask=masks.causal, softmax=OnlineSoftmax(t))
    q, k, v = wide(1, 40, 30, 2, 2, 8, 8)
    upstream = upstream_of(q, v, variant)
    found = of_twin(q, k, v, variant, upstream, SMALL)
    assert finite(found)
    if abs(sink) < INF:
        hold_equal(found, of_reference(q, k, v, variant, upstream))


def test_a_shared_memory_of_fp16_holds_large_gradients_of_captured_tensors():
    """8,192 pairs of gradient about 1: fp16 sums would stop at 2,048."""
    shift = torch.zeros(())
    variant = Variant(lambda s, b, h, q, k: s + shift, softmax=Elementwise(lambda s: s))
    ones = torch.ones(1, 64, 1, 8, dtype=torch.float16)
    found = of_twin(ones, ones.repeat(1, 2, 1, 1), ones.repeat(1, 2, 1, 1), variant, (ones, None))
    assert found["t0"].item() == 64 * 128 * 8


def test_softcap_scores_of_10_have_the_slope_of_tanh():
    cap = Variant(scores.softcap(10.0), softmax=Elementwise(lambda s: s))
    q = torch.full((1, 1, 1, 8), 10.0, dtype=F64)
    k = torch.zeros_like(q)
    k[..., 0] = 8**0.5  # the score is 10
    found = of_twin(q, k, torch.ones_like(q), cap, (torch.ones_like(q), None))
    slope = 1 - math.tanh(1.0) ** 2
    assert found["q"][..., 0].item() == pytest.approx(8 * slope)
