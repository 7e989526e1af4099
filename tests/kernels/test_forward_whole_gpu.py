"""Head sizes, weights, tiles decided one by one and spoilt rows of the forward on an SM90 GPU."""

from __future__ import annotations

import math

import pytest
import torch
from twin_cases import drawn, exact, plain

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, Variant, masks
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import NATIVE, Problem

pytestmark = pytest.mark.gpu

LENGTH = 1500


def close(q, k, v, variant=None, schedule=None):
    """At most twice torch's error at the input dtype, plus one rounding."""
    out = fa3.attention(q, k, v, variant, schedule=schedule)
    right = exact(q, k, v, variant)[0]
    error = (plain(q, k, v, variant).double() - right).abs().max()
    allowed = 2 * error + torch.finfo(q.dtype).eps * right.abs().max()
    assert (out.double() - right).abs().max() <= allowed
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", NATIVE, ids=str)
@pytest.mark.parametrize("mask", [None, masks.causal], ids=["full", "causal"])
def test_every_native_head_size_matches_fp64_at_tails(dtype, dims, mask):
    shape = (2, 333, 700, 4, 2, *dims)
    close(*drawn(*shape, dtype=dtype, device="cuda"), Variant(mask=mask))


@pytest.mark.parametrize("dims", [(8, 8), (24, 24), (72, 72), (120, 120), (160, 160), (248, 40)])
def test_head_sizes_between_are_right_and_write_no_column_past_their_own(dims):
    close(*drawn(1, 200, 333, 4, 2, *dims, device="cuda"), Variant(mask=masks.causal))


@pytest.mark.parametrize("overlap", ["none", "intra", "pingpong", "both"])
@pytest.mark.parametrize("dims", NATIVE, ids=str)
def test_every_overlap_serves_every_native_head_size(dims, overlap):
    default = Plan.default(Variant(), Problem("bf16", *dims)).schedule
    schedule = Schedule(128, min(default.tile_n, 80), 2, 2, overlap)
    close(*drawn(1, 300, 500, 2, 1, *dims, device="cuda"), Variant(mask=masks.causal), schedule)


def documents(lengths, device="cuda"):
    """The document of each position, for documents of these lengths."""
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    return torch.repeat_interleave(numbers, torch.tensor(lengths)).to(device)


def by_tile_masks():
    sorted_ = documents([100, 400, 37, 963])
    mixed = sorted_[torch.randperm(LENGTH, device="cuda")].contiguous()
    batched = torch.stack([sorted_, documents([700, 800])])
    headed = torch.stack([sorted_, documents([1000, 500]), mixed, documents([1500])])
    return {
        "sorted": lambda b, h, q, k: (sorted_[q] == sorted_[k]) & (k <= q),
        "both ways": lambda b, h, q, k: sorted_[q] == sorted_[k],
        "mixed": lambda b, h, q, k: mixed[q] == mixed[k],
        "by batch": lambda b, h, q, k: (batched[b, q] == batched[b, k]) & (k <= q),
        "by head": lambda b, h, q, k: headed[h, q] == headed[h, k],
        "strided": lambda b, h, q, k: ((k // 128) % 4 == 0) & (k <= q),
        "nothing": lambda b, h, q, k: sorted_[q] == sorted_[k] + 1000,
    }


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("name", list(by_tile_masks()) if torch.cuda.is_available() else [])
def test_tiles_decided_one_by_one_give_the_same_attention(dim, name):
    variant = Variant(mask=by_tile_masks()[name])
    assert Plan.default(variant, Problem("bf16", dim, dim)).by_tile
    close(*drawn(2, LENGTH, LENGTH, 4, 2, dim, device="cuda"), variant)


def test_a_replayed_graph_decides_by_the_documents_of_that_moment():
    q, k, v = drawn(1, LENGTH, LENGTH, 2, 2, 64, device="cuda")
    where = documents([100, 400, 37, 963])
    variant = Variant(mask=lambda b, h, q, k: (where[q] == where[k]) & (k <= q))
    fa3.attention(q, k, v, variant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa3.attention(q, k, v, variant)
    where.copy_(documents([1200, 1, 1, 298]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, fa3.attention(q, k, v, variant))
    assert (out.double() - exact(q, k, v, variant)[0]).abs().max() < 3e-2


def test_keys_of_tiles_that_no_document_reaches_are_never_read():
    q, k, v = drawn(1, 256, LENGTH, 2, 2, 128, device="cuda")
    where = documents([100, 400, 37, 963])
    variant = Variant(mask=lambda b, h, q, k: where[k] == 1)
    clean = fa3.attention_with_lse(q, k, v, variant)
    for t in (k, v):
        t[:, 640:] = math.nan
    poisoned = fa3.attention_with_lse(q, k, v, variant)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


@pytest.mark.parametrize("sink", [-math.inf, 0.5, 2.0, 100.0])
def test_a_sink_takes_its_weight_and_stands_in_the_lse(sink):
    q = torch.zeros(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    variant = Variant(softmax=OnlineSoftmax(torch.tensor([sink], device="cuda")))
    out, lse = fa3.attention_with_lse(q, q, torch.ones_like(q), variant)
    weight = 1 / (1 + math.exp(sink))
    assert out.flatten().tolist() == [torch.tensor(weight).bfloat16().item()] * 64
    assert lse.item() == pytest.approx(math.log1p(math.exp(sink)), abs=1e-5)


def test_a_hidden_key_weighs_nothing_whatever_the_function_says_of_it():
    q, k, v = drawn(1, 300, 300, 2, 2, 64, device="cuda")
    variant = Variant(mask=masks.causal, softmax=Elementwise(lambda s: s * 0 + 0.125))
    out = close(q, k, v, variant)
    assert torch.allclose(out[0, 0].float(), v[0, 0].float() / 8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256)], ids=str)
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_and_no_other(dims, value):
    q, k, v = drawn(1, 400, 400, 4, 2, *dims, device="cuda")
    v[0, 137, 0, 3] = value
    v[0, 300, 1, dims[1] - 1] = value
    gate = torch.rand(4, device="cuda")
    variants = {
        "causal": Variant(mask=masks.causal),
        "window": Variant(mask=masks.window(60, 10)),
        "sink": Variant(mask=masks.causal, softmax=OnlineSoftmax(gate)),
        "weights": Variant(mask=masks.causal, softmax=Elementwise(torch.sigmoid)),
        "gated": Variant(mask=masks.causal, epilogue=lambda o, lse, b, h, q: o * gate[h] + lse),
    }
    for name, variant in variants.items():
        out, right = fa3.attention(q, k, v, variant), exact(q, k, v, variant)[0]
        finite = right.isfinite()
        assert torch.equal(out.isnan(), right.isnan()), name
        assert torch.equal(out[~finite].float().nan_to_num(), right[~finite].float().nan_to_num())
        allowed = 2e-2 * max(1.0, right[finite].abs().max().item())
        assert (out.double() - right)[finite].abs().max() < allowed, name
