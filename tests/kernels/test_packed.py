"""Rows of a tile that packs heads: where they lie, whose they are, what is computed for them."""

from __future__ import annotations

import math

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32
from on_cpu import for_each, launchable

from cutedsl_fa3 import Elementwise, OnlineSoftmax, Variant, masks, scores
from cutedsl_fa3.kernels.sm90.elements import Elements
from cutedsl_fa3.kernels.sm90.ladder.tma import TmaSync
from cutedsl_fa3.kernels.sm90.operands import heads_last, heads_packed, rows_first, unpacked
from cutedsl_fa3.layouts.wgmma import Places
from cutedsl_fa3.pipelines import PACKS, Schedule, ScheduleError
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.limits import LOG2_E, bounded

ROWS, COLS, SCALE = (0, 8), tuple(8 * n + m for n in range(4) for m in (0, 1)), 0.125
HEADS, SEQLEN_Q, SEQLEN_K = 64, 80, 100
THREADS = 128  # of one warpgroup
FIRST_QUERY, FIRST_KEY = 3, 32  # of the tile


def first_row(thread):
    """A thread's first row in its warpgroup; works on numbers, tensors and device integers."""
    return thread // 32 * 16 + thread % 32 // 4


@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("pack", PACKS)
def test_each_row_of_a_thread_is_a_query_of_a_head(pack, group):
    for thread in range(THREADS):
        row = 64 * group + first_row(thread)
        queries, heads = unpacked(Places(row, 0, ROWS, COLS), pack)
        assert len(heads) == (2 if pack > 8 else 1)
        for r, offset in enumerate(ROWS):
            found = queries.row + queries.row_offsets[r], heads[r % len(heads)]
            assert found == divmod(row + offset, pack)


@pytest.mark.parametrize("pack", PACKS)
def test_a_row_is_addressed_as_the_query_of_the_head_that_it_is(pack):
    batch, seqlen, heads, dim = 2, 5, 2 * pack, 16
    q = torch.arange(batch * seqlen * heads * dim, dtype=torch.float32)
    q = q.view(batch, seqlen, heads, dim)
    lse = torch.arange(batch * heads * seqlen, dtype=torch.float32).view(batch, heads, seqlen)
    count = seqlen * pack
    vectors, sums = torch.zeros(2, 2, count, 8), torch.zeros(2, 2, count)

    def write(i, given, out):
        for b in range(2):
            for p in range(2):
                rows = heads_packed(heads_last(given[0]), pack)[None, None, p, b]
                second = cute.local_tile(rows, (1, 8), (i, 1))
                for e in range(8):
                    out[0][b, p, i, e] = second[0, e]
                out[1][b, p, i] = heads_packed(rows_first(given[1]), pack)[None, p, b][i]

    for_each(count, [q, lse], [vectors, sums], write)
    of_packs = q.view(batch, seqlen, 2, pack, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    assert torch.equal(vectors, of_packs[..., 8:])
    assert torch.equal(sums, lse.view(batch, 2, pack, seqlen).transpose(2, 3).flatten(2))


GENERATOR = torch.Generator().manual_seed(0)
SLOPES, SINKS = torch.rand(HEADS, generator=GENERATOR), torch.rand(HEADS, generator=GENERATOR)
TABLE = torch.randn(HEADS, 2 * 40 + 1, generator=GENERATOR)
BIAS = torch.randn(HEADS, SEQLEN_Q, SEQLEN_K, generator=GENERATOR)
VARIANTS = {
    "nothing": Variant(mask=masks.causal),
    "alibi": Variant(scores.alibi(SLOPES), masks.causal),
    "alibi both ways": Variant(scores.alibi(SLOPES)),
    "softcap": Variant(scores.softcap(30.0), masks.causal),
    "relative bias": Variant(scores.relative_bias(TABLE), masks.causal),
    "bias": Variant(scores.bias(BIAS), masks.window(30, 3)),
    "sigmoid": Variant(
        lambda s, b, h, q, k: s * SLOPES[h] - h, masks.causal, Elementwise(torch.sigmoid)
    ),
    "temperature": Variant(scores.temperature(SLOPES), masks.causal),
}


def of_rows(pack: int, head: int) -> dict:
    """The positions of every element of a warpgroup's threads, in the pack `head`."""
    row = first_row(torch.arange(THREADS))[:, None, None] + torch.tensor(ROWS)[:, None]
    keys = FIRST_KEY + torch.arange(THREADS)[:, None, None] % 4 * 2 + torch.tensor(COLS)
    return {
        "b": 0, "h": head * pack + row % pack, "q": FIRST_QUERY + row // pack, "k": keys,
        "seqlen_q": SEQLEN_Q, "seqlen_k": SEQLEN_K,
    }  # fmt: skip


def elements(variant, given, i, pack, head):
    zero = i * 0
    queries, heads = unpacked(Places(first_row(i), i % 4 * 2, ROWS, COLS), pack)
    place = zero, tuple(zero + head * pack + each for each in heads)
    lengths = zero + SEQLEN_Q, zero + SEQLEN_K
    made = Elements(variant, given, Float32(SCALE), place, lengths, bounded=bounded(variant))
    return made, queries


@pytest.mark.parametrize("pack", [2, 8, 16, 32])
@pytest.mark.parametrize("name", VARIANTS)
def test_elements_of_every_row_are_what_the_graphs_say_of_its_head(name, pack):
    variant, head = VARIANTS[name], HEADS // pack - 1
    raw = torch.randn(THREADS, len(ROWS), len(COLS)) * 60
    at = of_rows(pack, head)
    wanted = raw if variant.score is variant.weight is None else raw * SCALE
    for graph in (variant.score, variant.weight):
        if graph is not None:
            wanted = evaluate(graph, {**at, "score": wanted}, variant.captures).expand(raw.shape)
    wanted = wanted * LOG2_E if bounded(variant) else wanted
    shown = torch.ones(raw.shape, dtype=torch.bool)
    if variant.mask is not None:
        shown = evaluate(variant.mask, at, variant.captures).expand(raw.shape)
    hidden = 0.0 if variant.weight is not None else -math.inf
    found = raw.clone()

    def write(i, given, results):
        made, queries = elements(variant, given, i, pack, head)
        corner = i * 0 + FIRST_QUERY, i * 0 + FIRST_KEY
        memos = made.ahead(queries, corner, True)
        made.apply(results[0][i, None, None], queries, corner, True, memos)

    for_each(THREADS, list(map(launchable, variant.captures)) or [torch.zeros(1)], [found], write)
    torch.testing.assert_close(found, torch.where(shown, wanted, hidden), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("pack", [4, 16])
def test_sinks_and_outputs_are_of_each_rows_head(pack):
    variant = Variant(
        softmax=OnlineSoftmax(SINKS), epilogue=lambda o, lse, b, h, q: o * SLOPES[h] + lse + q
    )
    out, sinks = torch.randn(THREADS, len(ROWS), len(COLS)), torch.zeros(THREADS, len(ROWS))
    lse, at = torch.randn(THREADS, len(ROWS)), of_rows(pack, 1)
    wanted = evaluate(variant.epilogue, {**at, "o": out, "lse": lse[..., None]}, variant.captures)

    def write(i, given, results):
        *captures, logs = given
        made, queries = elements(variant, captures, i, pack, 1)
        rows = [logs[i, r] for r in range(len(ROWS))]
        mine = cute.make_rmem_tensor((len(ROWS), len(COLS)), Float32)
        places = [(r, c) for r in range(len(ROWS)) for c in range(len(COLS))]
        for r, c in places:
            mine[r, c] = results[0][i, r, c]
        made.finish(mine, rows, i * 0 + FIRST_QUERY, queries)
        for r, c in places:
            results[0][i, r, c] = mine[r, c]
        for r, sink in enumerate(made.sinks(len(ROWS))):
            results[1][i, r] = sink

    for_each(THREADS, [*variant.captures, lse], [out, sinks], write)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(sinks, SINKS[at["h"]][..., 0])


def test_the_ladder_refuses_tiles_of_several_heads():
    plan = Plan(Variant(), Problem("bf16", 128, 128), Schedule(128, 64, pack=2))
    with pytest.raises(ScheduleError, match="pack = 2: the ladder's tiles are of one head"):
        TmaSync(plan).check()
