"""Tiles of several heads on an SM90 GPU: against fp64, into memory that was filled with NaN."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from twin_cases import hold_to_torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, Variant, calls, emulate, masks, scores
from cutedsl_fa3.hang_attention import watched
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem

pytestmark = pytest.mark.gpu

LONGEST = 1024
LENGTHS = (1, 3, 17, 64, 100, 200)
# Query heads for each key head, the heads in a tile.
GROUPS = ((2, 2), (4, 4), (8, 8), (16, 16), (3, 1), (6, 2), (12, 4), (16, 4))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs, LSE and tables of summaries are NaN (and -1) before each launch."""

    def poisoned_like(t):
        fill = -1 if t.dtype == torch.int32 else math.nan
        return torch.full(t.shape, fill, dtype=t.dtype, device=t.device)

    monkeypatch.setattr(calls, "empty_like", poisoned_like)


def drawn(batch, seqlen_q, seqlen_k, heads, kv_heads, dim, dim_v=None, dtype=torch.bfloat16):
    """Fresh q, k, v on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seqlen_q * 1009 + seqlen_k + heads)
    shapes = (
        (batch, seqlen_q, heads, dim),
        (batch, seqlen_k, kv_heads, dim),
        (batch, seqlen_k, kv_heads, dim_v or dim),
    )
    made = (torch.randn(s, generator=generator, device="cuda") for s in shapes)
    return tuple(t.to(dtype) for t in made)


def variants(heads):
    """Variants that read the head in every role but the mask, and every kind of mask."""
    generator = torch.Generator("cuda").manual_seed(heads)

    def table(*shape):
        return torch.rand(shape, generator=generator, device="cuda")

    slopes, sinks, distances = table(heads), table(heads), table(heads, 2 * LONGEST + 1)
    documents = torch.arange(LONGEST, device="cuda", dtype=torch.int32) // 70
    causal = masks.causal
    return {
        "plain": Variant(),
        "causal": Variant(mask=causal),
        "window": Variant(mask=masks.window(100, 30)),
        "documents": Variant(mask=masks.and_masks(causal, masks.documents(documents))),
        "alibi": Variant(scores.alibi(slopes), causal),
        "relative bias": Variant(scores.relative_bias(distances)),
        "sinks": Variant(mask=causal, softmax=OnlineSoftmax(sinks)),
        "capped, sinks": Variant(scores.softcap(20.0), causal, OnlineSoftmax(sinks)),
        "gated": Variant(mask=causal, epilogue=lambda o, lse, b, h, q: o * slopes[h] + q),
        "weights": Variant(lambda s, b, h, q, k: s - slopes[h], causal, Elementwise(torch.sigmoid)),
    }


def scheduled(variant, dims, pack, dtype="bf16", **fields):
    """The table's schedule with so many heads in a tile."""
    base = Plan.default(variant, Problem(dtype, *dims)).schedule
    return replace(base, pack=pack, **fields)


def check(q, k, v, variant, schedule=None):
    """Kernel against fp64 where the reference applies, against the twin in all."""
    there = tuple(t.cpu() for t in (q, k, v))
    twin = emulate.attention_with_visits(*there, on_cpu(variant), schedule=schedule)
    if not variant.has_lse:
        out = fa3.attention(q, k, v, variant, schedule=schedule)
    else:
        out, lse = fa3.attention_with_lse(q, k, v, variant, schedule=schedule)
        if variant.epilogue is None and variant.sink is None:
            hold_to_torch((out, lse), q, k, v, variant)
        torch.testing.assert_close(lse.cpu(), twin.lse, rtol=1e-4, atol=1e-4)
    steps = 4 * torch.finfo(q.dtype).eps * twin.out.float().abs().max().item()
    torch.testing.assert_close(out.cpu().float(), twin.out.float(), rtol=0, atol=steps)
    return out


def on_cpu(variant):
    """The variant with its captured tensors on the CPU."""
    from cutedsl_fa3.reproducer import variant_of

    captures = tuple(t.cpu() for t in variant.captures)
    return variant_of(variant.graphs, captures, variant.sink)


@pytest.mark.parametrize("seqlen_q", LENGTHS)
@pytest.mark.parametrize(("group", "pack"), GROUPS)
def test_few_queries_of_every_group_by_the_table(group, pack, seqlen_q):
    """What a call takes by itself, and packed."""
    variant = Variant(mask=masks.causal)
    for dim in (64, 128):
        q, k, v = drawn(2, seqlen_q, 300, 2 * group, 2, dim)
        check(q, k, v, variant)
        check(q, k, v, variant, scheduled(variant, (dim, dim), pack))


@pytest.mark.parametrize("lengths", [(1, 700), (17, 333), (100, 100), (200, 90)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "pack"), [(8, 2, 4), (32, 2, 16), (64, 1, 64)])
def test_every_kind_of_variant(heads, kv_heads, pack, lengths):
    for name, variant in variants(heads).items():
        q, k, v = drawn(2, *lengths, heads, kv_heads, 64)
        try:
            check(q, k, v, variant, scheduled(variant, (64, 64), pack))
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("store", ["tma", "direct"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("overlap", ["none", "both"])
def test_both_ways_of_the_output_and_of_the_tiles(overlap, persistent, store):
    for name in ("causal", "documents", "alibi"):
        variant = variants(16)[name]
        q, k, v = drawn(3, 150, 400, 16, 1, 128)
        for pack in (2, 16):
            options = {"overlap": overlap, "persistent": persistent, "store": store, "early": 0}
            check(q, k, v, variant, scheduled(variant, (128, 128), pack, **options))


@pytest.mark.parametrize("dims", [(96, 96), (192, 128), (192, 192), (256, 256), (72, 40)], ids=str)
def test_every_head_size(dims):
    for dtype in (torch.bfloat16, torch.float16):
        variant, name = Variant(mask=masks.causal), "bf16" if dtype == torch.bfloat16 else "fp16"
        for group in (8, 16):
            q, k, v = drawn(1, 20, 300, 2 * group, 2, *dims, dtype=dtype)
            check(q, k, v, variant, scheduled(variant, dims, group, name))


@pytest.mark.parametrize("store", ["tma", "direct"])
@pytest.mark.parametrize("pack", [4, 16])
def test_values_that_are_hidden_reach_no_row_and_visible_ones_all_of_theirs(pack, store):
    """NaN and infinity in V; the rows behind the tensors' ends lie in a buffer of NaN."""
    heads, seqlen_q, seqlen_k, dim = 2 * pack, 30, 200, 64
    slopes = torch.rand(heads, device="cuda")
    for variant in (Variant(mask=masks.causal), Variant(scores.alibi(slopes), masks.causal)):
        q, k, v = (
            torch.full((2, seqlen + 40, count, dim), math.nan, device="cuda").bfloat16()[:, :seqlen]
            for seqlen, count in ((seqlen_q, heads), (seqlen_k, 2), (seqlen_k, 2))
        )
        for t, values in zip((q, k, v), drawn(2, seqlen_q, seqlen_k, heads, 2, dim), strict=True):
            t.copy_(values)
        spoilt = v.clone()
        spoilt[:, 185, :, :8], spoilt[:, 190, :, 5] = math.nan, math.inf
        schedule = scheduled(variant, (dim, dim), pack, store=store)
        clean = fa3.attention(q, k, v, variant, schedule=schedule)
        out = fa3.attention(q, k, spoilt, variant, schedule=schedule)
        sees = torch.arange(seqlen_q, device="cuda") + seqlen_k - seqlen_q
        hidden = out[:, sees < 185].float(), clean[:, sees < 185].float()
        assert torch.equal(*(t[..., 8:] for t in hidden))
        torch.testing.assert_close(*hidden, rtol=2**-7, atol=2**-7)  # computed again, one by one
        assert out[:, sees >= 185, :, :8].isnan().all()
        assert torch.equal(out[:, sees >= 185, :, 8:], clean[:, sees >= 185, :, 8:])
        between = (sees >= 185) & (sees < 190)
        assert between.any() and out[:, between, :, 9:].isfinite().all()


def test_strided_and_expanded_tensors_and_outputs_of_other_layouts():
    """Heads before positions, heads of one memory, a slice of a wider row."""
    variant, batch, seqlen_q, seqlen_k = Variant(mask=masks.causal), 2, 9, 130
    wide = torch.randn(batch, 8, seqlen_q, 3, 64, device="cuda").bfloat16()
    k, v = (torch.randn(batch, 2, seqlen_k, 64, device="cuda").bfloat16() for _ in range(2))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    same = torch.randn(batch, seqlen_q, 1, 64, device="cuda").bfloat16()
    for q in (wide[..., 1, :].transpose(1, 2), same.expand(-1, -1, 8, -1)):
        check(q, k, v, variant, scheduled(variant, (64, 64), 4))


@pytest.mark.parametrize("pack", [1, 4, 8])
def test_a_debug_build_visits_what_the_twin_visits(pack):
    for name, variant in variants(8).items():
        q, k, v = drawn(2, 150, 400, 8, 1, 64)
        schedule = scheduled(variant, (64, 64), pack)
        noted = fa3.visits(q, k, v, variant, schedule=schedule).cpu()
        there = tuple(t.cpu() for t in (q, k, v))
        assert torch.equal(noted, fa3.visits(*there, on_cpu(variant), schedule=schedule)), name


def test_new_lengths_of_one_variant_find_their_kernels_and_graphs_replay_them():
    variant = Variant(mask=masks.causal)
    q, k, v = drawn(2, 400, 500, 8, 2, 64)
    for seqlen in (1, 400, 2, 300, 1):
        check(q[:, :seqlen], k, v, variant)
    one = q[:, :1].clone()
    fa3.attention(one, k, v, variant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa3.attention(one, k, v, variant)
    one.copy_(q[:, 7:8])
    graph.replay()
    assert torch.equal(out, fa3.attention(q[:, 7:8].contiguous(), k, v, variant))


def test_debugging_tools_take_packed_plans():
    variant = Variant(mask=masks.causal)
    q, k, v = drawn(64, 5, 200, 32, 8, 64)
    assert fa3.plan(q, k, v, variant).schedule.pack == 4
    out, lse = watched(q, k, v, variant)
    hold_to_torch((out, lse), q, k, v, variant)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fa3.shadow_check())
        fa3.attention(q, k, v, variant)
