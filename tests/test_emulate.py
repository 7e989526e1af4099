"""The CPU twin: errors against fp64, the order it claims, layouts, sizes, time and memory."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from twin_cases import BATCH, HEADS, KV_HEADS, drawn, emulated, exact, plain, same, variants

import cutedsl_fa3 as fa3
from cutedsl_fa3 import (
    Schedule,
    Variant,
    emulate,
    masks,
    scores,
)

NAN, INF = math.nan, math.inf
CAUSAL = Variant(mask=masks.causal)
VARIANTS = variants()


# Against fp64.


def each_kind():
    """Every variant at one head size of its own kind, and one of them at every head size."""
    sizes = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 72)]
    yield from (("softcap", dims) for dims in sizes)
    yield from ((name, (128, 64)) for name in VARIANTS)


@pytest.mark.parametrize("name, dims", list(each_kind()))
def test_errors_are_at_most_twice_those_of_torch_at_the_input_type(name, dims):
    q, k, v = drawn(BATCH, 150, 300, HEADS, KV_HEADS, *dims)
    out, lse, _ = emulated(q, k, v, VARIANTS[name])
    wanted, wanted_lse = exact(q, k, v, VARIANTS[name])
    error = (plain(q, k, v, VARIANTS[name]).double() - wanted).abs().max()
    assert (out.double() - wanted).abs().max() <= 2 * error + 1e-5
    if wanted_lse is not None:
        seen = wanted_lse != -INF
        assert torch.equal(lse != -INF, seen)
        assert ((lse - wanted_lse)[seen].abs() <= 1e-5 * (1 + wanted_lse[seen].abs())).all()


BOUNDED = ["causal", "window", "chunks", "softcap", "one sink", "relu weights"]


@st.composite
def problems(draw):
    """Tensors and a schedule: any lengths, ratios and sizes, tails of all kinds."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    consumers = draw(st.integers(1, 3))
    tile_n = draw(st.integers(1, 12).map(lambda n: 16 * n))
    schedule = Schedule(64 * consumers, tile_n, 2, consumers, "intra")
    tensors = drawn(
        draw(st.integers(1, 2)),
        draw(st.integers(0, 260)),
        draw(st.integers(0, 260)),
        kv_heads * group,
        kv_heads,
        draw(st.integers(1, 32).map(lambda n: 8 * n)),
        draw(st.integers(1, 32).map(lambda n: 8 * n)),
        draw(st.sampled_from([torch.bfloat16, torch.float16])),
    )
    return tensors, schedule


@given(
    problems(),
    st.sampled_from(["causal", "window", "chunks", "softcap", "one sink", "relu weights"]),
)
@settings(max_examples=100)
def test_each_element_is_off_by_no_more_than_the_roundings_of_p_and_of_itself(problem, name):
    (q, k, v), schedule = problem
    variant = VARIANTS[name]
    out, lse, _ = emulated(q, k, v, variant, schedule)
    wanted, wanted_lse = exact(q, k, v, variant)
    spread, _ = exact(q, k, v.abs(), variant)  # the sum of p |v|: these weights are >= 0
    half = torch.finfo(q.dtype).eps / 2
    # Small weights: sums in fp32 give scores to 2^-19, and fp16 goes by steps of 2^-24 near 0.
    least = 2.0**-19 if lse is None else 2.0**-25 if q.dtype == torch.float16 else 0.0
    least *= k.shape[1] * v.abs().max().item() if v.numel() else 0.0
    allowed = (half + 1e-4) * (spread + wanted.abs()) + least  # 1e-4: sums in fp32
    assert ((out.double() - wanted).abs() <= allowed).all()
    if lse is not None:
        assert torch.equal(lse == -INF, wanted_lse == -INF)


def test_rows_that_see_nothing_under_a_limited_score_have_no_weight_and_an_lse_of_minus_infinity():
    q, k, v = drawn(1, 3, 5, 1, 1, 64)
    variant = Variant(scores.softcap(30.0), masks.none)
    schedule = Schedule(64, 32, 2, 1, "none")
    assert fa3.plan(q, k, v, variant, schedule=schedule).bounded
    out, lse, _ = emulated(q, k, v, variant, schedule)
    assert (out == 0).all() and (lse == -INF).all()


def literal(q, k, v, variant, schedule, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """One head, one tile of queries after another, as kernels/sm90/softmax.py has it in words."""
    visits = emulated(q, k, v, variant, schedule, scale).visits[0, 0]
    x = q[0, :, 0].double() @ k[0, :, 0].double().T
    hidden = torch.ones(x.shape, dtype=torch.bool).triu(1)
    out, lse = torch.zeros(q.shape[1], v.shape[3]), torch.full((q.shape[1],), -INF)
    scale_log2 = float(torch.tensor(scale) * torch.tensor(math.log2(math.e)))
    for m_block, entries in enumerate(visits.tolist()):
        rows = slice(m_block * schedule.tile_m, (m_block + 1) * schedule.tile_m)
        row_max = torch.full_like(lse[rows], -INF)
        row_sum, acc_o = torch.zeros_like(row_max), torch.zeros_like(out[rows])
        for entry in (e for e in entries if e >= 0):
            keys = slice(entry // 2 * schedule.tile_n, (entry // 2 + 1) * schedule.tile_n)
            here = x[rows, keys].float()
            if entry % 2:
                here = here.masked_fill(hidden[rows, keys], -INF)
            new = torch.maximum(row_max, here.amax(-1))
            origin = new.masked_fill(new == -INF, 0.0)  # a row may see nothing of its first tiles
            alpha = torch.exp2((row_max - origin) * scale_log2)
            p = torch.exp2((here.double() * scale_log2).float() - (origin * scale_log2)[:, None])
            row_sum = row_sum * alpha + p.sum(-1)
            acc_o = acc_o * alpha[:, None] + p.to(v.dtype).float() @ v[0, keys, 0].float()
            row_max = new
        out[rows] = acc_o / row_sum[:, None]
        lse[rows] = row_max * scale + row_sum.log()
    return out, lse


def test_p_is_rounded_beside_the_running_maximum_of_the_tiles_in_their_order():
    q, k, v = drawn(1, 200, 200, 1, 1, 64)
    k[:, 150:] *= 8  # so that the maximum grows, and the order of the tiles shows
    schedule, scale = Schedule(64, 32, 2, 1, "none"), 0.37
    wanted, wanted_lse = literal(q, k, v, CAUSAL, schedule, scale)
    found = emulated(q, k, v, CAUSAL, schedule, scale)
    error = (found.out[0, :, 0].float() - wanted).abs()
    assert (error <= 2.0**-8 * wanted.abs() + 1e-5).all()  # the last rounding, and no other
    assert torch.allclose(found.lse[0, 0], wanted_lse, rtol=1e-6, atol=1e-6)
    at_once = emulated(q, k, v, CAUSAL, Schedule(64, 208, 2, 1, "none"), scale)
    assert (found.out != at_once.out).any(), "the order would not show"


# Layouts, sizes, repeats.


def test_layouts_do_not_change_a_bit():
    packed = drawn(2, 200, 1, 12, 1, 64)[0].view(2, 200, 3, 4, 64)
    heads_first = torch.stack(drawn(2, 4, 4, 200, 200, 64))
    views = [
        packed.unbind(2),
        [t.transpose(1, 2) for t in heads_first],
        [t[:, ::2] for t in drawn(2, 400, 400, 4, 4, 64)],
        [t[:, 5:, 1:3] for t in drawn(2, 200, 100, 4, 4, 64)],
        [t[:, :1, :1] for t in drawn(1, 5, 5, 3, 3, 64)],
        [t.expand(2, 200, 4, 64) for t in drawn(1, 200, 200, 1, 1, 64)],
        [t[..., ::2] for t in drawn(1, 100, 100, 2, 2, 128)],
        [t.as_strided((1, 50, 1, 64), (7, 64, 3, 1)) for t in drawn(1, 50, 50, 1, 1, 64)],
    ]
    for q, k, v in views:
        assert same(
            emulated(q, k, v, CAUSAL),
            emulated(q.contiguous(), k.contiguous(), v.contiguous(), CAUSAL),
        )


def test_what_of_a_tile_lies_past_the_sequence_is_zero():
    k = drawn(1, 1, 100, 2, 2, 64)[1]
    rows = torch.arange(64, 128)[None]
    tile = emulate._tiles(k[:, :90], torch.tensor([0]), rows, torch.tensor([1]))
    assert torch.equal(tile[0, :26], k[0, 64:90, 1].float()) and (tile[0, 26:] == 0).all()


def test_query_heads_share_key_heads_as_if_those_were_repeated():
    for heads, kv_heads in ((12, 1), (5, 1), (9, 3), (6, 2)):
        q, k, v = drawn(1, 3, 300, heads, kv_heads, 128)
        repeated = [t.repeat_interleave(heads // kv_heads, 2) for t in (k, v)]
        assert same(emulated(q, k, v, CAUSAL), emulated(q, *repeated, CAUSAL))


def test_repeated_calls_are_bitwise_equal():
    q, k, v = drawn(2, 333, 444, 4, 2, 128)
    first = emulated(q, k, v, VARIANTS["alibi"])
    assert all(same(first, emulated(q, k, v, VARIANTS["alibi"])) for _ in range(3))


@pytest.mark.parametrize("name", ["causal", "window by head", "sigmoid weights", "gated output"])
def test_working_on_few_tiles_at_a_time_changes_nothing_but_memory(name, monkeypatch):
    q, k, v = drawn(BATCH, 500, 500, HEADS, KV_HEADS, 64)
    at_once = emulated(q, k, v, VARIANTS[name])
    monkeypatch.setattr(emulate, "AT_ONCE", 1)
    one_by_one = emulated(q, k, v, VARIANTS[name])
    assert torch.equal(at_once.visits, one_by_one.visits)
    eps = torch.finfo(q.dtype).eps  # a product of many tiles may sum in another order than of one
    assert torch.allclose(at_once.out.float(), one_by_one.out.float(), rtol=eps, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [(0, 128, 16, 4, 2), (2, 0, 16, 4, 2), (2, 128, 0, 4, 2), (2, 0, 0, 4, 2), (1, 5, 5, 0, 0)],
)
def test_sizes_of_zero_give_empty_rows_or_nothing(shape):
    q, k, v = drawn(*shape, 64)
    out, lse, visits = emulated(q, k, v, CAUSAL)
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == (shape[0], shape[3], shape[1]) and (lse == -INF).all()
    assert (visits == -1).all()


def test_defaults_of_torch_change_nothing():
    q, k, v = drawn(1, 100, 100, 2, 2, 64)
    wanted = emulated(q, k, v, VARIANTS["softcap"])
    torch.set_default_dtype(torch.float64)
    try:
        found = emulated(q, k, v, VARIANTS["softcap"])
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(wanted, found) and found.lse.dtype == torch.float32


def test_the_public_function_checks_its_arguments():
    q, k, v = drawn(1, 10, 10, 2, 2, 64)
    out, lse, visits = emulate.attention_with_visits(q, k, v)
    assert out.dtype == q.dtype and lse.shape == (1, 2, 10) and visits.tolist() == [[[[1, -1]]] * 2]
    with pytest.raises(ValueError, match="scale"):
        emulate.attention_with_visits(q, k, v, scale=NAN)
    with pytest.raises(ValueError, match="k head_dim"):
        emulate.attention_with_visits(q, k[..., :32], v)
    with pytest.raises(ValueError, match="v has stride 2 along head_dim"):
        emulate.attention_with_visits(q, k, drawn(1, 10, 10, 2, 2, 128)[2][..., ::2])


@pytest.mark.parametrize("name", ["plain", "alibi", "sink", "relu weights", "gated output"])
def test_attention_on_cpu_tensors_is_the_twin(name):
    q, k, v = drawn(BATCH, 100, 200, HEADS, KV_HEADS, 64)
    twin = emulate.attention_with_visits(q, k, v, VARIANTS[name], scale=0.2)
    assert torch.equal(fa3.attention(q, k, v, VARIANTS[name], scale=0.2), twin.out)
    assert torch.equal(fa3.visits(q, k, v, VARIANTS[name]), twin.visits)
    if twin.lse is not None:
        lse = fa3.attention_with_lse(q, k, v, VARIANTS[name], scale=0.2)[1]
        assert torch.equal(lse, twin.lse)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that anything makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(t, torch.Tensor) and not t._is_view():
                self.bytes = max(self.bytes, t.numel() * t.element_size())
        return made


def test_memory_does_not_grow_with_the_square_of_the_length():
    q, k, v = drawn(1, 4096, 4096, 4, 4, 64)
    with Largest() as seen:
        emulated(q, k, v, Variant(mask=masks.window(200, 0)))
    assert 4 * emulate.AT_ONCE <= seen.bytes <= 16 * emulate.AT_ONCE  # all scores are 256 MiB


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["alibi", "softcap", "documents"])
def test_two_heads_of_2048_by_2048_take_under_two_seconds(name, dim):
    q, k, v = drawn(1, 2048, 2048, 2, 2, dim)
    slopes, documents = torch.tensor([0.5, 0.25]), torch.arange(2048) // 300
    variant = {
        "alibi": Variant(scores.alibi(slopes), masks.causal),
        "softcap": Variant(scores.softcap(20.0)),
        "documents": Variant(mask=masks.and_masks(masks.causal, masks.documents(documents))),
    }[name]
    times, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # where others compute too, threads that wait for each other cost most
    try:
        for _ in range(5):  # the machine may be busy: the fastest is what it costs
            start = time.perf_counter()
            emulate.attention_with_visits(q, k, v, variant)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    assert min(times) < 2
