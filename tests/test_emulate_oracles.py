"""The CPU twin against oracles that are exact: what a row sees, and what must not reach it."""

from __future__ import annotations

import math

import pytest
import torch
from twin_cases import BATCH, HEADS, KV_HEADS, drawn, emulated, same, variants

from cutedsl_fa3 import (
    Elementwise,
    OnlineSoftmax,
    Schedule,
    Variant,
    emulate,
    masks,
    reference,
    scores,
)

NAN, INF = math.nan, math.inf
CAUSAL = Variant(mask=masks.causal)
VARIANTS = variants()


def ramp(keys: int, dim: int = 64) -> torch.Tensor:
    """Values that say which key they belong to."""
    return torch.arange(float(keys)).bfloat16().view(1, keys, 1, 1).repeat(1, 1, 1, dim)


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
    same_row = reached.any(-1, keepdim=True).expand_as(reached)
    assert torch.equal(found[~same_row], clean[~same_row])
    # Weights: what the key adds to the row's other columns is summed by itself, in another order.
    step = 2**-7 if variant.weight is not None else 0.0
    others = same_row & ~reached
    assert ((found - clean).abs() <= step * clean.abs())[others].all()
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
