"""Kernel, CPU twin and reference in pairs: errors against fp64, roundings and visits alike.

How near kernel and twin must be. Both round the same numbers at the same places, so they differ
where fp32 sums in another order, or an approximate function, put a number on the other side of a
rounding. A relative difference of d flips a share 2 d / eps of the roundings to a type of that eps,
by one step each, and a rounding is off by a quarter of a step on average: flips amount to 8 d / eps
of what roundings do. d is up to 3e-5 for sums of up to 256 products and 1024 keys in fp32, seldom
above 1e-6, and 1e-4 where the special-function unit enters the score; eps is 2^-7 and 2^-10. So the
mean distance of kernel and twin is at most 1/8 of the kernel's mean error in bf16 and 1/2 in fp16
or with approximate functions. An order of tiles, or a rounding of P, of its own would give about 1.
"""

from __future__ import annotations

import math

import pytest
import torch
from twin_cases import APPROXIMATE, BATCH, HEADS, KV_HEADS, drawn, exact, plain, variants

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, Schedule, Variant, emulate, masks

pytestmark = pytest.mark.gpu

LENGTHS = [(300, 900), (900, 300), (256, 256), (1, 513), (777, 64)]


def run(q, k, v, variant, scale=None, schedule=None):
    """Output and LSE, None where there is none, from whichever device the tensors are on."""
    if variant.has_lse:
        return fa3.attention_with_lse(q, k, v, variant, scale=scale, schedule=schedule)
    return fa3.attention(q, k, v, variant, scale=scale, schedule=schedule), None


def compare(name, lengths, dims, dtype=torch.bfloat16, schedule=None):
    """All three pairs on one problem."""
    here, there = variants("cuda")[name], variants("cpu")[name]
    q, k, v = drawn(BATCH, *lengths, HEADS, KV_HEADS, *dims, dtype=dtype, device="cuda")
    out, lse = run(q, k, v, here, schedule=schedule)
    twin = emulate.attention_with_visits(q.cpu(), k.cpu(), v.cpu(), there, schedule=schedule)
    twin_out = twin.out.cuda().double()
    wanted, wanted_lse = exact(q, k, v, here)

    error = (plain(q, k, v, here).double() - wanted).abs().max()
    allowed = 2 * error + torch.finfo(dtype).eps * wanted.abs().max()
    assert (out.double() - wanted).abs().max() <= allowed, "kernel and reference"
    assert (twin_out - wanted).abs().max() <= allowed, "twin and reference"

    near = 1 / 8 if dtype == torch.bfloat16 and name not in APPROXIMATE else 1 / 2
    distance = (out.double() - twin_out).abs()
    assert distance.mean() <= near * (out.double() - wanted).abs().mean(), "kernel and twin"
    assert distance.max() <= allowed, "kernel and twin"
    if lse is not None:
        twin_lse, seen = twin.lse.cuda(), wanted_lse != -math.inf
        assert torch.equal(lse != -math.inf, seen) and torch.equal(twin_lse != -math.inf, seen)
        within = (1e-4 if name in APPROXIMATE else 1e-5) * (1 + wanted_lse[seen].abs())
        assert ((lse - twin_lse)[seen].abs() <= within).all(), "LSE of kernel and twin"
        assert ((lse - wanted_lse)[seen].abs() <= within).all(), "LSE of kernel and reference"


@pytest.mark.parametrize("name", list(variants()))
def test_kernel_twin_and_reference_agree_on_every_kind_of_variant(name):
    for lengths in LENGTHS:
        compare(name, lengths, (128, 128))


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256), (40, 72)])
@pytest.mark.parametrize("name", ["plain", "alibi", "documents", "one sink", "relu weights"])
def test_kernel_twin_and_reference_agree_at_every_kind_of_head_size(name, dims):
    for lengths in LENGTHS:
        compare(name, lengths, dims)


@pytest.mark.parametrize("name", ["causal", "softcap", "sigmoid weights"])
def test_kernel_twin_and_reference_agree_in_fp16(name):
    for lengths in LENGTHS:
        compare(name, lengths, (64, 64), torch.float16)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(64, 64, 1, 1, "none"),
        Schedule(128, 96, 2, 2, "intra"),
        Schedule(128, 128, 2, 2, "pingpong"),
        Schedule(192, 128, 2, 3, "both"),
    ],
    ids=str,
)
def test_every_overlap_rounds_and_rescales_as_the_twin_does(schedule):
    for lengths in LENGTHS:
        compare("window", lengths, (64, 64), schedule=schedule)
        compare("documents", lengths, (64, 64), schedule=schedule)


@pytest.mark.parametrize("name", list(variants()))
def test_a_debug_build_visits_what_the_twin_visits(name):
    here, there = variants("cuda")[name], variants("cpu")[name]
    for lengths in LENGTHS:
        q, k, v = drawn(BATCH, *lengths, HEADS, KV_HEADS, 128)
        noted = fa3.visits(q.cuda(), k.cuda(), v.cuda(), here).cpu()
        twin = emulate.attention_with_visits(q, k, v, there).visits
        assert torch.equal(noted, twin), (lengths, noted.tolist(), twin.tolist())
        assert torch.equal(noted, fa3.visits(q, k, v, there))


@pytest.mark.parametrize("tile", [(64, 64), (128, 48), (192, 128)])
@pytest.mark.parametrize("name", ["documents", "window by head", "unsorted documents", "prefix"])
def test_a_debug_build_visits_what_the_twin_visits_at_other_tile_sizes(name, tile):
    schedule = Schedule(*tile, 2, tile[0] // 64, "intra")
    for lengths in LENGTHS:
        q, k, v = drawn(BATCH, *lengths, HEADS, KV_HEADS, 64)
        on_gpu = (t.cuda() for t in (q, k, v))
        noted = fa3.visits(*on_gpu, variants("cuda")[name], schedule=schedule)
        assert torch.equal(noted.cpu(), fa3.visits(q, k, v, variants()[name], schedule=schedule))


def test_new_values_in_a_captured_vector_are_visited_by_both():
    documents = torch.zeros(600, dtype=torch.int32)
    on_gpu = documents.cuda()
    pair = [Variant(mask=masks.documents(t)) for t in (documents, on_gpu)]
    q, k, v = drawn(1, 600, 600, 2, 2, 64)
    for size in (600, 100, 37):
        documents.copy_(torch.arange(600) // size)
        on_gpu.copy_(documents)
        noted = fa3.visits(q.cuda(), k.cuda(), v.cuda(), pair[1]).cpu()
        assert torch.equal(noted, fa3.visits(q, k, v, pair[0]))


def with_hidden_keys(kind: str, device: str) -> Variant:
    """A causal variant whose later keys are hidden in one way or another."""
    if kind == "score":  # one of -inf hides a key from the softmax, as a mask does
        return Variant(lambda s, b, h, q, k: torch.where(k <= q, s, -math.inf))
    sink = torch.tensor(0.3, device=device) if kind == "sink" else None
    softmax = Elementwise(torch.relu) if kind == "relu" else OnlineSoftmax(sink)
    return Variant(mask=masks.causal, softmax=softmax)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["softmax", "sink", "relu", "score"])
def test_values_that_are_not_finite_reach_the_same_elements_in_kernel_twin_and_reference(
    kind, poison
):
    here, there = with_hidden_keys(kind, "cuda"), with_hidden_keys(kind, "cpu")
    q, k, v = drawn(2, 300, 300, 4, 2, 64)
    clean = run(q.cuda(), k.cuda(), v.cuda(), here)[0].cpu()
    v[0, 200, 1, 5] = poison
    v[0, 250, 1, 40] = -poison
    out = run(q.cuda(), k.cuda(), v.cuda(), here)[0].cpu()
    twin = run(q, k, v, there)[0]
    wanted = exact(q, k, v, there)[0]
    for sort in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(sort(out), sort(wanted)), "kernel and reference"
        assert torch.equal(sort(twin), sort(wanted)), "twin and reference"
    finite = wanted.isfinite()
    step = 2 * torch.finfo(q.dtype).eps * clean.float().abs().max()  # P is rounded or not
    assert (out[finite].float() - clean[finite].float()).abs().max() <= step
    assert (out[finite].float() - twin[finite].float()).abs().max() <= step
