"""The CPU twin against fp64, against oracles that are exact, and against the order it claims."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twin_cases import BATCH, HEADS, KV_HEADS, drawn, exact, plain, variants

import cutedsl_fa3 as fa3
from cutedsl_fa3 import (
    Elementwise,
    OnlineSoftmax,
    Plan,
    Problem,
    Schedule,
    Variant,
    emulate,
    masks,
    reference,
    scores,
)
from cutedsl_fa3.emulate import Emulated
from cutedsl_fa3.problem import DTYPES

NAN, INF = math.nan, math.inf
CAUSAL = Variant(mask=masks.causal)
VARIANTS = variants()


def emulated(q, k, v, variant=None, schedule=None, scale=None) -> Emulated:
    """The twin of the plan for these tensors, with any schedule that can be written down."""
    variant = Variant() if variant is None else variant
    dtype = next(name for name, dtype in DTYPES.items() if dtype == q.dtype)
    problem = Problem(dtype, q.shape[3], v.shape[3])
    plan = Plan(variant, problem, schedule) if schedule else Plan.default(variant, problem)
    return emulate.run(plan, q, k, v, q.shape[3] ** -0.5 if scale is None else scale)


def same(a: Emulated, b: Emulated) -> bool:
    """Bitwise, NaN equal to NaN."""
    pairs = zip(a, b, strict=True)
    return all(x is y or torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in pairs)


def ramp(keys: int, dim: int = 64) -> torch.Tensor:
    """Values that say which key they belong to."""
    return torch.arange(float(keys)).bfloat16().view(1, keys, 1, 1).repeat(1, 1, 1, dim)


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
            alpha = torch.exp2((row_max - new) * scale_log2)
            p = torch.exp2((here.double() * scale_log2).float() - (new * scale_log2)[:, None])
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


# Exact oracles.


def test_uniform_scores_give_the_mean_of_visible_values_and_the_log_of_their_number():
    q, k, v = torch.zeros(1, 300, 1, 64).bfloat16(), *drawn(1, 300, 300, 1, 1, 64)[1:]
    out, lse, _ = emulated(q, k, torch.ones_like(v), CAUSAL)
    assert (out == 1).all()
    assert torch.allclose(lse[0, 0].double(), torch.arange(1, 301).double().log(), atol=1e-6)


def test_ramp_shows_the_empty_rows_of_a_short_causal_key_sequence():
    q, k, _ = drawn(1, 5, 2, 1, 1, 64)
    out, lse, _ = emulated(torch.zeros_like(q), k, ramp(2), CAUSAL)
    assert out[0, :, 0, 0].tolist() == [0, 0, 0, 0, 0.5]
    assert lse[0, 0, :3].tolist() == [-INF] * 3
    assert torch.allclose(lse[0, 0, 3:], torch.tensor([0.0, math.log(2)]), atol=1e-6)


def test_window_bounds_are_inclusive():
    q = torch.zeros(1, 8, 1, 64).bfloat16()
    out = emulated(q, q, ramp(8), Variant(mask=masks.window(3, 0))).out
    assert out[0, :, 0, 0].tolist() == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]


@pytest.mark.parametrize("level, lse", [(-2e4, -1323.704), (-6e4, -4864.895), (-12e4, -10182.338)])
def test_rows_of_very_low_scores_are_not_taken_for_empty(level, lse):
    q = torch.ones(1, 1, 16, 128).bfloat16()
    k = torch.full((1, 64, 1, 128), level / 128).bfloat16()
    k[:, 0] = (level + 5000) / 128
    found = emulated(q, k, ramp(64, 128) + 1)
    assert (found.out == 1).all()
    assert torch.allclose(found.lse, torch.tensor(lse), atol=1e-3)


@pytest.mark.parametrize(
    "keys, sink, output, lse",
    [(0, 0.5, 0.0, 0.5), (1, 2.0, 0.119203, 2.126928), (1, 100.0, 0.0, 100.0), (1, -INF, 1.0, 0.0)],
)
def test_a_sink_takes_its_share_and_has_no_value(keys, sink, output, lse):
    q, k, v = torch.zeros(1, 3, 2, 64), torch.zeros(1, keys, 2, 64), torch.ones(1, keys, 2, 64)
    variant = Variant(softmax=OnlineSoftmax(torch.tensor([sink, sink])))
    found = emulated(q.half(), k.half(), v.half(), variant)
    assert torch.allclose(found.out.float(), torch.tensor(output), atol=1e-4)
    assert torch.allclose(found.lse, torch.tensor(lse), atol=1e-6)


def test_elementwise_weights_are_summed_and_have_no_lse():
    q = torch.zeros(1, 10, 1, 64).bfloat16()
    variant = Variant(mask=masks.causal, softmax=Elementwise(torch.sigmoid))
    out, lse, _ = emulated(q, q, torch.ones_like(q), variant)
    assert lse is None
    assert out[0, :, 0, 0].tolist() == [0.5 * n for n in range(1, 11)]


def test_an_epilogue_sees_empty_rows_and_changes_them():
    q, k, v = drawn(1, 5, 2, 1, 1, 64)
    variant = Variant(
        mask=masks.causal, epilogue=lambda o, lse, b, h, q: torch.where(lse == -INF, q + 1.0, o)
    )
    plain_out, changed = emulated(q, k, v, CAUSAL).out, emulated(q, k, v, variant).out
    assert changed[0, :3, 0, 0].tolist() == [1, 2, 3]
    assert torch.equal(changed[0, 3:], plain_out[0, 3:])


def test_alibi_slopes_keep_their_bits_and_their_documented_lse():
    q = torch.zeros(1, 4, 12, 64).bfloat16()
    variant = Variant(scores.alibi(torch.full((12,), 0.5)), masks.causal)
    found = emulated(q, q, ramp(4).repeat(1, 1, 12, 1), variant)
    wanted = torch.tensor([0.0, 0.6225, 1.3202, 2.0846])
    assert torch.allclose(found.out[0, :, 0, 0].float(), wanted, rtol=2.0**-8)
    assert torch.allclose(found.lse[0, 0], torch.tensor([0.0, 0.4741, 0.6803, 0.7873]), atol=1e-4)


def test_scale_zero_is_uniform_attention():
    q, k, v = drawn(1, 70, 90, 1, 1, 64)
    found = emulate.attention_with_visits(q, k, v, CAUSAL, scale=0.0)
    uniform = emulate.attention_with_visits(torch.zeros_like(q), k, v, CAUSAL)
    assert same(found, uniform)


# What must not reach the output, and what must.


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_rows_past_the_sequence_cannot_poison_the_output(poison):
    q, k, v = drawn(1, 300, 400, 2, 2, 64)
    outputs = []
    for fill in (0.0, poison):
        q[:, 200:], k[:, 130:], v[:, 130:] = fill, fill, fill
        outputs.append(emulated(q[:, :200], k[:, :130], v[:, :130]))
    assert same(*outputs)


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "chunks", "decayed weights"])
def test_rows_never_read_the_tiles_that_they_do_not_visit(name, poison):
    q, k, v = drawn(BATCH, 900, 900, HEADS, KV_HEADS, 64)
    schedule = Schedule(128, 64, 2, 2, "intra")
    clean = emulated(q, k, v, VARIANTS[name], schedule)
    for t in (k, v):
        t[:, 640:704] = poison
    found = emulated(q, k, v, VARIANTS[name], schedule)
    visiting = (clean.visits // 2 == 10).any(-1).repeat_interleave(128, 2)[:, :, :900].mT
    assert visiting.any() and not visiting.all()
    assert torch.equal(found.out[~visiting], clean.out[~visiting])
    assert torch.equal(found.visits, clean.visits)


SOFTMAXES = {
    "softmax": OnlineSoftmax(),
    "sink": OnlineSoftmax(torch.tensor(0.3)),
    "relu": Elementwise(torch.relu),
    "linear": Elementwise(lambda s: s),
}


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("softmax", list(SOFTMAXES))
def test_keys_that_no_row_sees_change_no_bit_even_in_visited_tiles(softmax, poison):
    q, k, v = drawn(2, 150, 300, 4, 2, 64)
    dropped = torch.arange(300) % 3 == 0
    variant = Variant(mask=lambda b, h, q, k: ~dropped[k], softmax=SOFTMAXES[softmax])
    outputs = []
    for fill in (0.0, poison):
        k[:, dropped], v[:, dropped] = fill, fill
        outputs.append(emulated(q, k, v, variant))
    assert same(*outputs)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("softmax", list(SOFTMAXES))
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_its_key_and_no_others(
    softmax, poison
):
    q, k, v = drawn(2, 300, 300, 4, 2, 64)
    variant = Variant(mask=masks.causal, softmax=SOFTMAXES[softmax])
    clean = emulated(q, k, v, variant).out
    v[0, 200, 1, 5] = poison
    v[0, 250, 1, 5] = -poison
    found = emulated(q, k, v, variant).out
    wanted = reference.attention(q, k, v, variant)
    reached = torch.zeros(found.shape, dtype=torch.bool)
    reached[0, 200:, 2:, 5] = True
    assert torch.equal(found[~reached], clean[~reached])
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found), kind(wanted))
    assert not found[reached].isfinite().any()


def test_a_value_that_is_not_finite_at_a_key_scored_minus_infinity_is_hidden():
    q, k, v = drawn(1, 100, 100, 1, 1, 64)
    variant = Variant(lambda s, b, h, q, k: torch.where(k <= q, s, -math.inf))
    clean = emulated(q, k, v, variant).out
    v[0, 60] = NAN
    found = emulated(q, k, v, variant).out
    assert torch.equal(found[:, :60], clean[:, :60]) and found[:, 60:].isnan().all()


@pytest.mark.parametrize("softmax", list(SOFTMAXES))
def test_nan_in_a_visible_key_reaches_the_rows_that_see_it(softmax):
    q, k, v = drawn(1, 300, 300, 1, 1, 64)
    variant = Variant(mask=masks.causal, softmax=SOFTMAXES[softmax])
    clean = emulated(q, k, v, variant)
    k[0, 200, 0, 0] = NAN
    found = emulated(q, k, v, variant)
    assert torch.equal(found.out[0, :200], clean.out[0, :200])
    assert found.out[0, 200:].isnan().all()
    if found.lse is not None:
        assert found.lse[0, 0, 200:].isnan().all() and found.lse[0, 0, :200].isfinite().all()


def test_nan_in_a_query_reaches_its_own_row():
    q, k, v = drawn(1, 300, 300, 2, 1, 64)
    q[0, 100, 1, 3] = NAN
    bad = emulated(q, k, v, CAUSAL).out.isnan()
    assert bad[0, 100, 1].all() and bad.sum() == 64


def test_a_captured_buffer_is_not_read_outside_itself_at_hidden_keys():
    q, k, v = drawn(1, 128, 128, 1, 1, 64)
    bias = torch.randn(127)
    variant = Variant(lambda s, b, h, q, k: s + bias[k], lambda b, h, q, k: (k < 127) & (q >= k))
    within = Variant(lambda s, b, h, q, k: s + bias[k], lambda b, h, q, k: q >= k)
    out = emulated(q, k, v, variant).out
    assert torch.equal(out[:, :127], emulated(q[:, :127], k[:, :127], v[:, :127], within).out)
    assert out.isfinite().all()


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
