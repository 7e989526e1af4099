"""The forward on an SM90 GPU, against fp64 and against oracles that are exact."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from twin_cases import hold_to_torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import cache, masks, reference, scores
from cutedsl_fa3.pipelines import Schedule

pytestmark = pytest.mark.gpu

NAN = math.nan


def drawn(batch, seqlen_q, seqlen_k, heads, kv_heads, dim, dim_v=None, dtype=torch.bfloat16):
    """Fresh q, k, v on the GPU."""
    shapes = (
        (batch, seqlen_q, heads, dim),
        (batch, seqlen_k, kv_heads, dim),
        (batch, seqlen_k, kv_heads, dim_v or dim),
    )
    return tuple(torch.randn(s, device="cuda").to(dtype) for s in shapes)


def ramp(keys):
    """Values that say which key they belong to."""
    column = torch.arange(float(keys), device="cuda").bfloat16().view(1, keys, 1, 1)
    return column.expand(1, keys, 1, 64).contiguous()


def check(q, k, v, variant=None, schedule=None, scale=None):
    """The kernel's result, held to torch."""
    found = fa3.attention_with_lse(q, k, v, variant, schedule=schedule, scale=scale)
    hold_to_torch(found, q, k, v, variant, scale)
    return found


SHAPES = [  # batch, seqlen_q, seqlen_k, heads, kv_heads
    (1, 1, 1, 1, 1),
    (2, 127, 129, 4, 4),
    (1, 128, 128, 3, 1),
    (1, 333, 700, 5, 1),
    (2, 700, 333, 6, 2),
    (1, 5, 2, 7, 1),
    (1, 193, 1024, 12, 4),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [None, masks.causal, masks.window(100, 30)])
def test_output_and_lse_match_fp64_on_every_tail_and_ratio(dtype, dim, shape, mask):
    check(*drawn(*shape, dim, dtype=dtype), fa3.Variant(mask=mask))


def schedules(dim):
    """Every overlap and depth that fits this head size."""
    for overlap, stages in itertools.product(("none", "intra", "pingpong", "both"), (1, 2, 3, 4)):
        tile_n = 64 if dim == 128 and stages > 2 else 128
        yield Schedule(128, tile_n, stages, 2, overlap)
    yield Schedule(64, 128, 2, 1, "intra")
    yield Schedule(64, 64, 1, 1, "none")
    yield Schedule(192, 128 if dim == 64 else 80, 2, 3, "both" if dim == 64 else "none")


@pytest.mark.parametrize("dim", [64, 128])
def test_every_overlap_and_depth_gives_the_same_attention(dim):
    q, k, v = drawn(1, 400, 1000, 4, 2, dim)
    for schedule in schedules(dim):
        for mask in (None, masks.causal):
            check(q, k, v, fa3.Variant(mask=mask), schedule)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 128, 257, 1500])
@pytest.mark.parametrize("dim", [64, 128])
def test_ctas_that_share_the_copies_of_keys_give_the_same_bits(dim, seqlen_q, persistent):
    """An odd number of tiles leaves the second CTA of a head's last cluster without queries."""
    q, k, v = drawn(2, seqlen_q, 700, 6, 2, dim)
    apart = Schedule(128, 128, 2, 2, "intra", persistent=persistent)
    alone = fa3.attention_with_lse(q, k, v, schedule=apart)
    shared = check(q, k, v, schedule=replace(apart, cluster=(2, 1)))
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


@pytest.mark.parametrize("overlap", ["none", "intra", "pingpong", "both"])
@pytest.mark.parametrize("dim", [64, 128])
def test_p_from_shared_memory_gives_the_same_bits(dim, overlap):
    q, k, v = drawn(1, 400, 1000, 4, 2, dim)
    schedule = Schedule(128, 128, 2, 2, overlap, store="direct")
    for variant in (fa3.Variant(), fa3.Variant(mask=masks.causal)):
        from_registers = fa3.attention_with_lse(q, k, v, variant, schedule=schedule)
        found = check(q, k, v, variant, replace(schedule, p_from="shared"))
        assert all(torch.equal(a, b) for a, b in zip(from_registers, found, strict=True))


HALVED = {  # masks whose tiles have halves that a warpgroup does not see, at either end
    "none": None,
    "causal": masks.causal,
    "window": masks.window(200, 0),
    "both sides": masks.window(100, 70),
    "prefix": masks.prefix(130),
    "ahead": masks.window(-1, 40),
    "not the first": lambda b, h, q, k: (k > 70) & (k <= q),
}


@pytest.mark.parametrize(
    ("dim", "rows", "keys", "overlap"),
    [(64, 192, 128, "both"), (128, 128, 128, "intra"), (128, 128, 96, "both")],
)
@pytest.mark.parametrize("name", list(HALVED))
def test_halves_of_tiles_give_the_bits_of_whole_ones(name, dim, rows, keys, overlap):
    """What is left out are products with zeros, and sums of zeros."""
    whole = Schedule(rows, keys, 2, rows // 64, overlap, persistent=True)
    variant = fa3.Variant(mask=HALVED[name])
    for seqlen_q, seqlen_k in ((1000, 1000), (130, 1090), (64, 70)):
        q, k, v = drawn(1, seqlen_q, seqlen_k, 4, 1, dim)
        expected = fa3.attention_with_lse(q, k, v, variant, schedule=whole)
        found = check(q, k, v, variant, replace(whole, narrow=True))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("dims", [(64, 128), (128, 64)])
def test_values_may_have_another_head_size(dims):
    check(*drawn(1, 200, 300, 2, 2, *dims), fa3.Variant(mask=masks.causal))


def variants():
    """Named variants of every kind that the language offers."""
    heads = 4
    slopes = torch.rand(heads, device="cuda") / 8
    table = torch.randn(heads, 2048, device="cuda")
    documents = torch.arange(1024, device="cuda", dtype=torch.int32) // 150
    prefixes = torch.tensor([70, 300], device="cuda")
    ends = torch.tensor(37, device="cuda")
    dropped = torch.rand(1024, device="cuda") < 0.3
    parameter = torch.nn.Parameter(torch.randn(heads, device="cuda"))
    return {
        "alibi": fa3.Variant(scores.alibi(slopes), masks.causal),
        "softcap": fa3.Variant(scores.softcap(20.0), masks.causal),
        "bias table": fa3.Variant(lambda s, b, h, q, k: s + table[h, k - q + 1024]),
        "documents": fa3.Variant(mask=lambda b, h, q, k: (documents[q] == documents[k]) & (k <= q)),
        "prefix by batch": fa3.Variant(mask=lambda b, h, q, k: (k <= q) | (k < prefixes[b])),
        "runtime scalar": fa3.Variant(mask=lambda b, h, q, k: k < ends),
        "dropped keys": fa3.Variant(mask=lambda b, h, q, k: ~dropped[k]),
        "parameter": fa3.Variant(lambda s, b, h, q, k: s * torch.sigmoid(parameter[h])),
        "two bands": fa3.Variant(mask=lambda b, h, q, k: ((q - k) < 40) & (k <= q) | (k < 4)),
        "chunks": fa3.Variant(mask=lambda b, h, q, k: (q // 100 == k // 100) & (k <= q)),
        "dilated": fa3.Variant(mask=lambda b, h, q, k: ((q - k) % 3 == 0) & (k <= q)),
        "nothing seen": fa3.Variant(mask=lambda b, h, q, k: k < 0),
        "upper": fa3.Variant(mask=lambda b, h, q, k: k > q),
        "score with -inf": fa3.Variant(
            lambda s, b, h, q, k: torch.where(k <= q, s - 0.1 * (q - k), -math.inf)
        ),
        "many functions": fa3.Variant(
            lambda s, b, h, q, k: (
                torch.exp(-torch.abs(s))
                + torch.sqrt((k + 1.0) / (q + 1.0))
                + torch.cos(s) * torch.log(1.0 + torch.minimum(q, k))
                - torch.clamp(s, -1.0, 1.0)
            )
        ),
    }


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", list(variants()) if torch.cuda.is_available() else [])
def test_a_variant_in_plain_python_matches_its_own_reference(dim, name):
    check(*drawn(2, 300, 900, 4, 2, dim), variants()[name])


def test_uniform_scores_give_the_mean_of_visible_values_exactly():
    q = torch.zeros(1, 300, 1, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn_like(q)
    v = torch.ones_like(q)
    out, lse = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
    assert (out == 1).all()
    counts = torch.arange(1, 301, device="cuda").double()
    assert torch.allclose(lse[0, 0].double(), counts.log(), atol=1e-6)


def test_ramp_shows_the_empty_rows_of_a_short_causal_key_sequence():
    q = torch.zeros(1, 5, 1, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
    out, lse = fa3.attention_with_lse(q, k, ramp(2), fa3.Variant(mask=masks.causal))
    assert out[0, :, 0, 0].tolist() == [0, 0, 0, 0, 0.5]
    assert lse[0, 0, :3].tolist() == [-math.inf] * 3
    assert torch.allclose(lse[0, 0, 3:].cpu(), torch.tensor([0.0, math.log(2)]), atol=1e-6)


def test_window_bounds_are_inclusive():
    q = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    out = fa3.attention(q, q, ramp(8), fa3.Variant(mask=masks.window(3, 0)))
    assert out[0, :, 0, 0].tolist() == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]


@pytest.mark.parametrize("level", [-20000.0, -60000.0, -120000.0])
def test_rows_of_very_low_scores_are_not_taken_for_empty(level):
    q = torch.ones(1, 1, 16, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.full((1, 64, 1, 128), level / 128, device="cuda", dtype=torch.bfloat16)
    k[:, 0] = (level + 5000) / 128
    v = torch.arange(1.0, 65, device="cuda").bfloat16().view(1, 64, 1, 1).expand(1, 64, 1, 128)
    check(q, k, v.contiguous())


@pytest.mark.parametrize("poison", [NAN, math.inf])
def test_rows_past_the_sequence_cannot_poison_the_output(poison):
    q, k, v = drawn(1, 100, 256, 2, 2, 64)
    outputs = []
    for fill in (0.0, poison):
        k[:, 130:], v[:, 130:] = fill, fill
        outputs.append(fa3.attention_with_lse(q, k[:, :130], v[:, :130]))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_tiles_that_the_mask_hides_are_never_read():
    q, k, v = drawn(1, 256, 2048, 2, 2, 128)
    variant = fa3.Variant(mask=lambda b, h, q, k: (k >= 512) & (k < 700 + q - q))
    clean = fa3.attention_with_lse(q, k, v, variant)
    for t in (k, v):
        t[:, :512] = NAN
        t[:, 768:] = NAN
    poisoned = fa3.attention_with_lse(q, k, v, variant)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_an_empty_row_is_zero_even_beside_values_that_are_not_finite():
    q, k, v = drawn(1, 64, 64, 1, 1, 64)
    v[:, 40:] = math.inf
    out, lse = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=lambda b, h, q, k: k <= q - 32))
    assert (out[0, :32] == 0).all() and (lse[0, 0, :32] == -math.inf).all()


def test_a_captured_length_beyond_32_bits_is_without_limit():
    q, k, v = drawn(1, 64, 200, 1, 1, 64)
    ends = torch.tensor([2**40], device="cuda")
    schedule = fa3.plan(q, k, v).schedule
    limited = fa3.Variant(mask=lambda b, h, q, k: k < ends[b])
    out = fa3.attention(q, k, v, limited, schedule=schedule)
    assert torch.equal(out, fa3.attention(q, k, v, schedule=schedule))


@pytest.mark.parametrize("cap", [1.0, 30.0, 1e5])
def test_softcap_is_as_exact_for_wide_caps_as_for_narrow_ones(cap):
    check(*drawn(1, 128, 256, 2, 2, 64), fa3.Variant(scores.softcap(cap)))


def test_nan_in_a_visible_key_reaches_the_rows_that_see_it():
    q, k, v = drawn(1, 300, 300, 1, 1, 64)
    k[0, 200, 0, 0] = NAN
    out, lse = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
    assert out[0, :200].isfinite().all() and lse[0, 0, :200].isfinite().all()
    assert out[0, 200:].isnan().all() and lse[0, 0, 200:].isnan().all()


def test_strided_inputs_equal_their_contiguous_copies():
    packed = torch.randn(2, 200, 3, 4, 64, device="cuda").bfloat16()
    views = [
        packed.unbind(2),
        [t.transpose(1, 2) for t in torch.randn(3, 2, 4, 200, 64, device="cuda").bfloat16()],
        [t[:, ::2] for t in torch.randn(3, 2, 400, 4, 64, device="cuda").bfloat16()],
        [t[:, :1, :1] for t in torch.randn(3, 1, 5, 3, 64, device="cuda").bfloat16()],
        [t.expand(2, 200, 4, 64) for t in torch.randn(3, 1, 200, 1, 64, device="cuda").bfloat16()],
    ]
    for q, k, v in views:
        here = fa3.attention_with_lse(q, k, v)
        there = fa3.attention_with_lse(q.contiguous(), k.contiguous(), v.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_repeated_calls_are_bitwise_equal():
    q, k, v = drawn(2, 777, 777, 4, 2, 128)
    first = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
    for _ in range(10):
        again = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_values_of_captured_tensors_are_read_at_launch_without_recompiling(monkeypatch):
    q, k, v = drawn(1, 64, 64, 2, 2, 64)
    bias = torch.zeros(2, device="cuda")
    limit = torch.tensor(64, device="cuda")
    variant = fa3.Variant(lambda s, b, h, q, k: s + bias[h] * k, lambda b, h, q, k: k < limit)
    fa3.attention(q, k, v, variant)
    monkeypatch.setattr(cache, "get", lambda kernel: pytest.fail("compiled anew"))
    bias.copy_(torch.tensor([0.5, -0.5]))
    limit.fill_(20)
    check(q, k, v, variant)


def test_the_callers_stream_and_graph_are_used():
    q, k, v = drawn(1, 128, 128, 2, 2, 64)
    fa3.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        out = fa3.attention(q, k, v)
    q.copy_(torch.randn_like(q))
    out.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, fa3.attention(q, k, v))


def test_no_keys_and_no_queries_need_no_launch():
    q, k, v = drawn(2, 128, 0, 4, 2, 64)
    out, lse = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=masks.causal))
    assert (out == 0).all() and (lse == -math.inf).all()
    q, k, v = drawn(0, 128, 16, 4, 2, 64)
    assert fa3.attention(q, k, v).shape == (0, 128, 4, 64)


def test_scale_zero_is_uniform_attention():
    q, k, v = drawn(1, 200, 300, 2, 2, 64)
    check(q, k, v, fa3.Variant(mask=masks.causal), scale=0.0)


def test_more_than_65535_heads_and_batches_are_served():
    q, k, v = drawn(65537, 1, 16, 1, 1, 64)
    out = fa3.attention(q, k, v)
    part = slice(65530, None)
    exact = reference.attention(q[part], k[part], v[part], dtype=torch.float64)
    assert (out[part].double() - exact).abs().max() < 2e-2
