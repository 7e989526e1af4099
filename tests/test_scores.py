"""Every shipped score against its definition, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3 import scores
from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.evaluate import evaluate

LENGTHS = st.integers(1, 30)
SEEDS = st.integers(0, 999)


def changed(score: scores.Score, s: torch.Tensor, b: int = 0, h: int = 0) -> torch.Tensor:
    """What a score makes of s (seqlen_q, seqlen_k), as the reference reads it."""
    variant = Variant(score=score)
    seqlen_q, seqlen_k = s.shape
    if variant.score is None:
        return s
    inputs = {
        "score": s,
        "b": b,
        "h": h,
        "q": torch.arange(seqlen_q)[:, None],
        "k": torch.arange(seqlen_k),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
    }
    return evaluate(variant.score, inputs, variant.captures, visible=torch.tensor(True))


def given_scores(seqlen_q: int, seqlen_k: int, seed: int) -> torch.Tensor:
    return torch.randn(seqlen_q, seqlen_k, generator=torch.Generator().manual_seed(seed)) * 4


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))


def pairwise(seqlen_q: int, seqlen_k: int, value) -> torch.Tensor:
    """`value(p, k)`, a float or a 0-d tensor, for the query at key position p and key k."""
    shift = seqlen_k - seqlen_q
    rows = [[float(value(q + shift, k)) for k in range(seqlen_k)] for q in range(seqlen_q)]
    return torch.tensor(rows, dtype=torch.float32)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, SEEDS)
def test_alibi_is_a_slope_times_the_distance(seqlen_q, seqlen_k, seed):
    s, slopes = given_scores(seqlen_q, seqlen_k, seed), drawn(seed, 2, 3).abs()
    distance = pairwise(seqlen_q, seqlen_k, lambda p, k: abs(p - k))
    assert torch.equal(changed(scores.alibi(slopes[0]), s, 1, 2), s - slopes[0, 2] * distance)
    assert torch.equal(changed(scores.alibi(slopes), s, 1, 2), s - slopes[1, 2] * distance)


def test_alibi_slopes_are_those_of_the_paper():
    assert scores.alibi_slopes(1).tolist() == [2**-8]
    assert scores.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    sixteen = [2 ** (-i / 2) for i in range(1, 17)]
    torch.testing.assert_close(scores.alibi_slopes(16), torch.tensor(sixteen), rtol=0, atol=0)
    twelve = scores.alibi_slopes(12)
    assert twelve.dtype == torch.float32
    assert twelve[:8].tolist() == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(twelve[8:], torch.tensor(sixteen[::2][:4]), rtol=0, atol=0)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, SEEDS, st.integers(2, 4))
def test_a_bias_is_read_at_raw_indices(seqlen_q, seqlen_k, seed, rank):
    s = given_scores(seqlen_q, seqlen_k, seed)
    table = drawn(seed, *(2, 3, seqlen_q, seqlen_k)[4 - rank :])
    own = {2: table, 3: table[-1], 4: table[-1, -1]}[rank]
    assert torch.equal(changed(scores.bias(table), s, b=1, h=2), s + own)
    half = table.to(torch.bfloat16)
    rounded = own.to(torch.bfloat16).float()
    assert torch.equal(changed(scores.bias(half), s, b=1, h=2), s + rounded)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, SEEDS)
def test_a_relative_bias_is_read_by_the_difference_of_raw_indices(seqlen_q, seqlen_k, seed):
    s, center = given_scores(seqlen_q, seqlen_k, seed), max(seqlen_q, seqlen_k)
    table = drawn(seed, 3, 2 * center + 1)
    shift = seqlen_k - seqlen_q
    bias = pairwise(seqlen_q, seqlen_k, lambda p, k: table[2, k - (p - shift) + center])
    assert torch.equal(changed(scores.relative_bias(table), s, h=2), s + bias)


def t5_bucket(distance: int, buckets: int, bidirectional: bool, farthest: int) -> int:
    """Raffel et al.: half of the buckets of a direction are exact, the others grow."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance < 0 else 0
        distance = abs(distance)
    exact = buckets // 2
    if distance < exact:
        return first + max(distance, 0)
    grown = exact + math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact)
    nearest = round(grown)
    if abs(grown - nearest) < 1e-4:  # where fp32 decides: both neighbours are T5 to somebody
        return -1
    return first + min(int(grown), buckets - 1)


@settings(deadline=None)
@given(
    LENGTHS,
    st.integers(1, 200),
    SEEDS,
    st.sampled_from([4, 8, 32]),
    st.booleans(),
    st.sampled_from([17, 64, 128]),
)
def test_t5_buckets_are_exact_near_and_grow_far_away(
    seqlen_q, seqlen_k, seed, buckets, bidirectional, farthest
):
    s, weight = given_scores(seqlen_q, seqlen_k, seed), drawn(seed, buckets, 2)
    score = scores.t5_bias(weight, bidirectional=bidirectional, max_distance=farthest)
    found = changed(score, s, h=1)
    shift = seqlen_k - seqlen_q
    for q in range(seqlen_q):
        for k in range(0, seqlen_k, 3):
            bucket = t5_bucket(q + shift - k, buckets, bidirectional, farthest)
            if bucket >= 0:
                assert found[q, k] == s[q, k] + weight[bucket, 1]


def test_t5_buckets_at_powers_are_those_of_its_code():
    weight = torch.arange(32.0)[:, None]
    score = scores.t5_bias(weight, bidirectional=False, max_distance=128)
    found = changed(score, torch.zeros(1, 201))[0].flip(0)  # by distance before the query
    assert found[:17].tolist() == list(range(17))
    assert [found[d].item() for d in (18, 19, 20, 32, 63, 64, 127, 128, 200)] == [
        16, 17, 17, 21, 26, 26, 31, 31, 31,
    ]  # fmt: skip


def test_softcap_bounds_scores():
    s = torch.linspace(-100, 100, 41)[None]
    assert torch.equal(changed(scores.softcap(30.0), s), 30.0 * torch.tanh(s / 30.0))
    assert torch.equal(changed(scores.softcap(0), s), s)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, SEEDS)
def test_a_temperature_divides(seqlen_q, seqlen_k, seed):
    s, values = given_scores(seqlen_q, seqlen_k, seed), drawn(seed, 3).abs() + 0.1
    assert torch.equal(changed(scores.temperature(values), s, h=2), s / values[2])
    assert torch.equal(changed(scores.temperature(values[1].clone()), s, h=2), s / values[1])
    assert torch.equal(changed(scores.temperature(0.3), s), s / 0.3)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, SEEDS, st.integers(2, 20))
def test_log_length_scales_queries_beyond_the_trained_length(seqlen_q, seqlen_k, seed, trained):
    s = given_scores(seqlen_q, seqlen_k, seed)
    found = changed(scores.log_length(trained), s)
    for q in range(seqlen_q):
        keys = q + seqlen_k - seqlen_q + 1
        factor = torch.log(torch.tensor(float(max(keys, trained)))) / math.log(trained)
        assert torch.equal(found[q], s[q] * factor)
        if keys <= trained:
            torch.testing.assert_close(found[q], s[q], rtol=1e-6, atol=0)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, SEEDS)
def test_decay_is_a_power_of_the_distance(seqlen_q, seqlen_k, seed):
    s = given_scores(seqlen_q, seqlen_k, seed)
    rates = torch.tensor([0.5, 0.96875, 1.0])
    found = changed(scores.decay(rates), s, h=1)
    power = pairwise(seqlen_q, seqlen_k, lambda p, k: 0.96875 ** abs(p - k))
    torch.testing.assert_close(found, s * power, rtol=1e-5, atol=0)
    halves = pairwise(seqlen_q, seqlen_k, lambda p, k: 0.5 ** abs(p - k))
    assert torch.equal(changed(scores.decay(rates), s, h=0), s * halves)
    assert torch.equal(changed(scores.decay(rates), s, h=2), s)


def test_a_chain_applies_the_first_one_first():
    s = torch.linspace(-9, 9, 19)[None]
    both = scores.chain(scores.softcap(5.0), scores.temperature(2.0))
    assert torch.equal(changed(both, s), 5.0 * torch.tanh(s / 5.0) / 2.0)
    assert torch.equal(changed(scores.chain(), s), s)


FLOATS = torch.zeros(4)
INTS = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: scores.alibi(INTS), r"scores\.alibi: slopes is int32 of shape \(4,\)"),
        (lambda: scores.alibi(torch.tensor(1.0)), r"shape \(\); valid .*\(heads,\) or \(batch, h"),
        (lambda: scores.alibi_slopes(0), r"scores\.alibi_slopes: heads is 0; valid are ints from"),
        (lambda: scores.bias(FLOATS), r"scores\.bias: table is float32 of shape \(4,\); valid are"),
        (lambda: scores.bias(None), r"scores\.bias: table is None; valid is a tensor"),
        (lambda: scores.relative_bias(INTS[None]), r"scores\.relative_bias: table is int32"),
        (lambda: scores.t5_bias(FLOATS, bidirectional=True), r"scores\.t5_bias: weight is float32"),
        (
            lambda: scores.t5_bias(torch.zeros(5, 1), bidirectional=True),
            r"weight has 5 buckets; valid are even numbers from 4",
        ),
        (
            lambda: scores.t5_bias(torch.zeros(8, 1), bidirectional=1),
            r"bidirectional is 1; valid are True and False",
        ),
        (
            lambda: scores.t5_bias(torch.zeros(8, 1), bidirectional=False, max_distance=4),
            r"max_distance is 4; valid are ints from 5",
        ),
        (lambda: scores.temperature(0), r"scores\.temperature: value is 0; valid are positive"),
        (lambda: scores.temperature(math.inf), r"scores\.temperature: value is inf"),
        (lambda: scores.temperature(INTS), r"scores\.temperature: value is int32"),
        (lambda: scores.log_length(1), r"scores\.log_length: trained is 1; valid are ints from 2"),
        (lambda: scores.decay(FLOATS.half()), r"scores\.decay: rates is float16"),
        (lambda: scores.chain(scores.softcap(1.0), 3), r"scores\.chain: argument 1 is 3; valid"),
    ],
)
def test_wrong_arguments_are_refused_by_function_and_argument(make, words):
    with pytest.raises(VariantError, match=words):
        make()


def test_learned_tensors_are_captured_themselves():
    weight = torch.nn.Parameter(torch.zeros(8, 2))
    score = scores.t5_bias(weight, bidirectional=True, max_distance=32)
    assert any(capture is weight for capture in Variant(score=score).captures)
    temperature = torch.nn.Parameter(torch.ones(()))
    assert Variant(score=scores.temperature(temperature)).captures[0] is temperature
