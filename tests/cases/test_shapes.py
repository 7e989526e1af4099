"""Empty, short, odd and very many: every shape is right or refused by name, none faults."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, masks, scores
from cutedsl_fa3.compile import Compiled

from .alone import alone
from .oracles import drawn, exact, hold, hold_ramp, positions, ramp, same

MASKS = {
    "full": None,
    "causal": masks.causal,
    "window": masks.window(20, 3),
    "prefix": masks.or_masks(masks.prefix(7), masks.causal),
    "none": masks.none,
}


# No keys, no queries, no batch entries.


@pytest.fixture
def nothing_is_launched(monkeypatch):
    """A launch fails the test."""
    monkeypatch.setattr(
        Compiled, "launch", property(lambda self: lambda *args: pytest.fail("launched"))
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (40, 72), (192, 128)], ids=str)
def test_without_keys_outputs_are_0_and_lses_minus_infinity(device, mask, dims):
    """Source: Dao-AILab/flash-attention#2470 and #978."""
    q, k, v = drawn(device, (2, 128, 0, 4, 4), *dims)
    out, lse = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=MASKS[mask]))
    assert out.shape == (2, 128, 4, dims[1]) and out.dtype == q.dtype and (out == 0).all()
    assert lse.shape == (2, 4, 128) and lse.dtype == torch.float32 and (lse == -math.inf).all()


def test_a_part_without_keys_merges_into_another_without_a_trace(device):
    sizes = (2, 100, 200, 4, 2)
    q, k, v = drawn(device, sizes)
    none, none_lse = fa3.attention_with_lse(q, k[:, :0], v[:, :0])
    some, some_lse = fa3.attention_with_lse(q, k, v)
    joined = torch.logaddexp(none_lse, some_lse)
    assert torch.equal(joined, some_lse)
    parts = ((none, none_lse), (some, some_lse))
    merged = sum(o * torch.exp(l - joined).transpose(1, 2)[..., None] for o, l in parts)
    assert torch.equal(merged.to(q.dtype), some)


def test_a_sink_takes_all_of_a_row_without_keys(device):
    """Source: Dao-AILab/flash-attention#2752."""
    sink = torch.tensor([0.5, -2.0, 100.0], device=device)
    for keys, mask in ((0, None), (64, masks.none), (0, masks.causal)):
        q, k, v = drawn(device, (2, 70, keys, 3, 3))
        variant = fa3.Variant(mask=mask, softmax=OnlineSoftmax(sink=sink))
        out, lse = fa3.attention_with_lse(q, k, v, variant)
        assert (out == 0).all()
        assert torch.equal(lse, sink[None, :, None].expand(2, 3, 70))


def test_an_epilogue_is_applied_to_rows_without_keys_too(device):
    bias = torch.tensor([1.0, -3.0], device=device)
    for keys, mask in ((0, None), (64, masks.none)):
        q, k, v = drawn(device, (1, 70, keys, 2, 2))
        variant = fa3.Variant(
            mask=mask, epilogue=lambda o, lse, b, h, q: o + bias[h] + torch.exp(lse)
        )
        out = fa3.attention(q, k, v, variant)
        assert torch.equal(out, bias.to(q.dtype)[None, None, :, None].expand_as(out))


def test_weights_that_are_not_normalised_give_0_without_keys(device):
    variant = fa3.Variant(softmax=Elementwise(torch.sigmoid))
    q, k, v = drawn(device, (1, 70, 0, 2, 2))
    assert (fa3.attention(q, k, v, variant) == 0).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "sizes",
    [
        (0, 3952, 16, 10, 10),
        (2, 0, 16, 4, 2),
        (2, 0, 0, 4, 4),
        (0, 0, 0, 1, 1),
        (3, 16, 16, 0, 0),
    ],
    ids=str,
)
def test_nothing_to_compute_is_nothing_launched(device, nothing_is_launched, sizes, mask):
    """Source: Dao-AILab/flash-attention#1159, MoonshotAI/FlashKDA#32."""
    q, k, v = drawn(device, sizes, 64, 128)
    out, lse = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=MASKS[mask]))
    assert out.shape == (*q.shape[:3], 128) and out.dtype == q.dtype and out.device == q.device
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.dtype == torch.float32


# Where a value comes from.


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_a_query_that_sees_one_key_gets_the_value_of_its_entry_head_and_position(
    device, heads, kv_heads
):
    """A copy from a wrong coordinate inside of a tensor is no error; its values tell."""
    batch, seqlen = 3, 300
    q, k, _ = drawn(device, (batch, seqlen, seqlen, heads, kv_heads), dtype=torch.bfloat16)
    b, n, h = torch.meshgrid(*map(torch.arange, (batch, seqlen, kv_heads)), indexing="ij")
    said = torch.stack((b, h, n // 128, n % 128), dim=-1).repeat(1, 1, 1, 16)
    v = said.to(device, torch.bfloat16)
    out = fa3.attention(q, k, v, fa3.Variant(mask=lambda b, h, q, k: k == q))
    assert torch.equal(out, v.repeat_interleave(heads // kv_heads, dim=2))


# More queries than keys.


def test_leading_rows_of_a_short_causal_key_sequence_are_empty(device):
    """Source: Dao-AILab/flash-attention#1778, pytorch/pytorch#41508."""
    q, k, v = ramp(device, (1, 5, 2, 1, 1))
    out, lse = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
    assert out[0, :, 0, 0].tolist() == [0, 0, 0, 0, 0.5]
    assert lse[0, 0].tolist() == pytest.approx([-math.inf] * 3 + [0.0, 0.6931], abs=1e-4)


def test_two_thousand_queries_over_one_thousand_keys(device):
    q, k, v = ramp(device, (1, 2048, 1024, 1, 1))
    result = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
    at, key = positions(2048, 1024)
    hold_ramp(result, key <= at - 1024)


LENGTHS = st.one_of(
    st.integers(1, 400), st.sampled_from((1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257))
)
SEEN = {  # by aligned position p = q + seqlen_k - seqlen_q
    "full": lambda p, k: (k >= 0) & (p == p),
    "causal": lambda p, k: k <= p,
    "window": lambda p, k: (k >= p - 20) & (k <= p + 3),
    "prefix": lambda p, k: (k < 7) | (k <= p),
    "none": lambda p, k: (k < 0) & (p == p),
}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
@settings(max_examples=25)
@given(seqlen_q=LENGTHS, seqlen_k=LENGTHS)
def test_every_row_of_any_two_lengths_sees_just_its_keys(device, mask, dim, seqlen_q, seqlen_k):
    q, k, v = ramp(device, (1, seqlen_q, seqlen_k, 1, 1), dim)
    result = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=MASKS[mask]))
    at, key = positions(seqlen_q, seqlen_k)
    hold_ramp(result, SEEN[mask](at + seqlen_k - seqlen_q, key))


# Head sizes.

HEAD_DIMS = (8, 16, 24, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_multiple_of_8_up_to_256_is_a_head_size(device, dim, dtype):
    """Source: flashinfer-ai/flashinfer#4299."""
    hold(*drawn(device, (1, 65, 65, 2, 2), dim, dtype=dtype), fa3.Variant(mask=masks.causal))
    hold(*drawn(device, (2, 130, 300, 2, 1), dim, dtype=dtype), fa3.Variant())


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (192, 128), (8, 256), (256, 8), (72, 40)])
def test_values_may_have_a_head_size_of_their_own(device, dims):
    hold(*drawn(device, (2, 130, 300, 2, 1), *dims), fa3.Variant(mask=masks.causal))


@pytest.mark.parametrize("dims", list(itertools.product((8, 40, 72, 120, 200, 248), repeat=2))[::7])
def test_columns_beyond_the_head_size_are_zeros_whatever_lies_there(device, dims):
    """A head is a slice of a wider one whose other columns are NaN."""
    dim, dim_v = dims
    wide = drawn(device, (1, 100, 200, 2, 2), 256)
    there = []
    for fill in (0.0, math.nan):
        filled = [t.clone() for t in wide]
        for t, width in zip(filled, (dim, dim, dim_v), strict=True):
            t[..., width:] = fill
        q, k, v = (t[..., :w] for t, w in zip(filled, (dim, dim, dim_v), strict=True))
        there.append(fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal)))
    assert same(*there)
    assert there[0][0].isfinite().all()


@pytest.mark.parametrize("dim", [0, 1, 4, 12, 20, 63, 100, 257, 264, 512])
def test_other_head_sizes_are_refused_by_name_with_those_that_are_served(device, dim):
    q, k, v = (torch.zeros(1, 65, 2, dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    for call in (fa3.attention, fa3.plan):
        with pytest.raises(fa3.Unsupported, match=rf"^head_dim = {dim}: .*\b8\b.*\b256\b"):
            call(q, k, v)
    good = torch.zeros(1, 65, 2, 64, device=device, dtype=torch.bfloat16)
    for call in (fa3.attention, fa3.plan):
        with pytest.raises(fa3.Unsupported, match=rf"^head_dim_v = {dim}: .*\b8\b.*\b256\b"):
            call(good, good, v)


# Query heads that share key heads.

RATIOS = ((12, 1), (96, 8), (5, 1), (7, 1), (9, 3), (64, 1))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("heads", RATIOS, ids=str)
def test_any_whole_number_of_query_heads_shares_a_key_head(device, heads, queries):
    """Source: Dao-AILab/flash-attention#2186 and #1940."""
    q, k, v = drawn(device, (1, queries, 300, *heads), 128)
    variant = fa3.Variant(mask=masks.causal)
    hold(q, k, v, variant)
    repeated = (t.repeat_interleave(heads[0] // heads[1], 2) for t in (k, v))
    assert same(
        fa3.attention_with_lse(q, k, v, variant), fa3.attention_with_lse(q, *repeated, variant)
    )


@settings(max_examples=8)
@given(group=st.integers(1, 20), kv_heads=st.integers(1, 4), queries=st.integers(1, 140))
def test_grouped_heads_equal_repeated_keys_and_values(device, group, kv_heads, queries):
    q, k, v = drawn(device, (2, queries, 140, group * kv_heads, kv_heads))
    slopes = torch.linspace(0.1, 1.0, 160, device=device)
    variant = fa3.Variant(lambda s, b, h, q, k: s - slopes[h] * (q - k), masks.causal)
    repeated = (t.repeat_interleave(group, 2) for t in (k, v))
    assert same(
        fa3.attention_with_lse(q, k, v, variant), fa3.attention_with_lse(q, *repeated, variant)
    )


@pytest.mark.parametrize("heads", [(6, 4), (4, 6), (1, 2), (7, 3), (4, 0)], ids=str)
def test_heads_that_cannot_be_shared_evenly_are_refused(device, heads):
    q, k, v = drawn(device, (1, 3, 300, *heads), 128)
    for call in (fa3.attention, fa3.plan):
        with pytest.raises(fa3.Unsupported, match=rf"{heads[0]} heads.*{heads[1]}"):
            call(q, k, v)


# Very many.


def many(device: str, batch: int, heads: int) -> None:
    """The last entries of a grid, whose output's memory held NaN before."""
    q, k, v = drawn(device, (batch, 1, 16, heads, heads))
    for shape, dtype in ((q.shape, q.dtype), ((batch, heads, 1), torch.float32)):
        torch.full(shape, math.nan, dtype=dtype, device=device)  # freed: the next one's memory
    out, lse = fa3.attention_with_lse(q, k, v)
    if device == "cuda":
        torch.cuda.synchronize()
    assert out.isfinite().all() and lse.isfinite().all()
    last = slice(-4, None)
    wanted, wanted_lse = exact(*(t[last, :, last] for t in (q, k, v)))
    assert (out[last, :, last].double() - wanted).abs().max() < 2e-2
    assert (lse[last, last].double() - wanted_lse).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("count", [65535, 65536, 65537])
def test_a_grid_may_pass_65535_batch_entries_or_heads(count):
    """Source: flashinfer-ai/flashinfer#3125."""
    alone(many, "cuda", count, 1)
    alone(many, "cuda", 1, count)


@pytest.mark.parametrize("sizes", [(100, 1, 16, 3, 1), (1, 1, 16, 300, 100)], ids=str)
def test_hundreds_of_batch_entries_and_heads(device, sizes):
    hold(*drawn(device, sizes), fa3.Variant(scores.softcap(30.0)))


def test_more_tiles_than_a_grid_holds_are_refused_before_any_launch(device, nothing_is_launched):
    one = torch.zeros(1, 1, 1, 64, device=device, dtype=torch.bfloat16)
    q, k = one.expand(2**16, 1, 2**15, 64), one.expand(2**16, 16, 2**15, 64)
    with pytest.raises(fa3.Unsupported, match=r"q has 2147483648 tiles.*at most 2147479552"):
        fa3.attention(q, k, k)
