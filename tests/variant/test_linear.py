"""Scores that grow evenly with the key are told from others, and are the sum of their parts."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3 import masks, scores
from cutedsl_fa3.variant import Variant, seqlen_k, seqlen_q
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.fusion import with_known_signs
from cutedsl_fa3.variant.linear import Linear, linear

HEADS, SEQLEN_Q, SEQLEN_K = 3, 20, 30
SLOPES, HALVES = torch.tensor([0.7, -0.25, 4.0]), torch.tensor([0.5, 1.0, -2.0]).half()
GAIN, WHOLE, ROW = torch.tensor(1.5), torch.tensor([3, -2, 5]), torch.randn(SEQLEN_Q)
NATURAL = {"h": 1, "b": 0, "seqlen_q": SEQLEN_Q, "seqlen_k": SEQLEN_K}


def parts(score, mask=None) -> tuple[Variant, Linear | None]:
    variant = Variant(score, mask)
    return variant, linear(with_known_signs(variant.score, variant.mask))


def positions() -> dict:
    return {
        "b": 0,
        "h": torch.arange(HEADS)[:, None, None],
        "q": torch.arange(SEQLEN_Q)[:, None],
        "k": torch.arange(SEQLEN_K),
        "seqlen_q": SEQLEN_Q,
        "seqlen_k": SEQLEN_K,
    }


LINEAR = {
    "alibi": (scores.alibi(SLOPES), masks.causal),
    "alibi as written": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), None),
    "along the keys": (lambda s, b, h, q, k: SLOPES[h] * k + s, masks.causal),
    "half precision": (lambda s, b, h, q, k: s + HALVES[h] * (k - q), None),
    "a scalar": (lambda s, b, h, q, k: s - GAIN * (q - k), None),
    "a constant": (lambda s, b, h, q, k: s + 0.125 * (k - 3 * q + 7), None),
    "divided": (lambda s, b, h, q, k: s + (k - q) / GAIN / 3.0, None),
    "an offset of each head": (lambda s, b, h, q, k: s + (SLOPES[h] + 2 * k) * GAIN, None),
    "an offset alone": (lambda s, b, h, q, k: s + SLOPES[h], None),
    "of the query alone": (lambda s, b, h, q, k: s + SLOPES[h] * q, None),
    "two at once": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q) - GAIN * (seqlen_k - k), None),
    "integers of memory": (lambda s, b, h, q, k: s - (k - q + WHOLE[h]) * SLOPES[h], None),
    "a chain": (scores.chain(scores.alibi(SLOPES), scores.alibi(HALVES.float())), masks.causal),
}  # fmt: skip
OTHERS = {
    "alibi both ways": (scores.alibi(SLOPES), None),
    "scaled": (lambda s, b, h, q, k: s * GAIN + SLOPES[h] * k, None),
    "score twice": (lambda s, b, h, q, k: s + s + SLOPES[h] * k, None),
    "taken away": (lambda s, b, h, q, k: SLOPES[h] * k - s, None),
    "a square": (lambda s, b, h, q, k: s + SLOPES[h] * (k * k), None),
    "a slope of each query": (lambda s, b, h, q, k: s + ROW[q] * k, None),
    "a value of each query": (lambda s, b, h, q, k: s + k + ROW[q], None),
    "a step": (lambda s, b, h, q, k: s + SLOPES[h] * (k // 2), None),
    "a function": (lambda s, b, h, q, k: s + torch.exp(SLOPES[h] * k), None),
    "capped": (scores.chain(scores.softcap(20.0), scores.alibi(SLOPES)), masks.causal),
    "a choice": (lambda s, b, h, q, k: torch.where(k > q, s, s + k), None),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_grow_evenly_is_left_alone(name):
    assert parts(*OTHERS[name])[1] is None


@pytest.mark.parametrize("name", LINEAR)
def test_score_and_rest_are_the_whole_and_the_rest_grows_by_the_slope(name):
    variant, found = parts(*LINEAR[name])
    assert found is not None
    hold(variant, found)
    assert found.is_level == (name in ("an offset alone", "of the query alone"))


def hold(variant: Variant, found: Linear, units: float = 4.0) -> None:
    """Each part is what it says, by evaluation in fp64."""
    at, raw = positions(), torch.randn(HEADS, SEQLEN_Q, SEQLEN_K, dtype=torch.float64)

    def of(graph, **more):
        value = evaluate(graph, {**at, **more}, variant.captures, dtype=torch.float64)
        return torch.broadcast_to(value, raw.shape)

    score, in_units = of(with_known_signs(variant.score, variant.mask), score=raw), {"units": units}
    rest, slope = of(found.rest, **in_units), of(found.slope, **in_units)
    near = dict(rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(raw * units + rest, score * units, **near)
    torch.testing.assert_close(of(found.whole, score=raw, **in_units), raw + rest, **near)
    torch.testing.assert_close(rest[..., 1:] - rest[..., :-1], slope[..., 1:], **near)
    assert found.slope.inputs.isdisjoint({"q", "k", "score"})
    assert found.most.inputs.isdisjoint({"q", "k", "score", "units"})
    assert (rest.abs() <= of(found.most) * units * (1 + 1e-9)).all()
    assert not found.is_level or (slope == 0).all()


INTS = st.recursive(
    st.sampled_from(["q", "k", "(k - q)", "(q + (seqlen_k - seqlen_q) - k)", "h", "WHOLE[h]"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+-"), inner),
        st.builds("({} * ({}))".format, inner, st.integers(-3, 3)),
        st.builds("({} // 2)".format, inner),
    ),
    max_leaves=3,
)
FLOATS = st.recursive(
    st.one_of(INTS, st.sampled_from(["SLOPES[h]", "HALVES[h]", "GAIN", "ROW[q]", "s", "s"])),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner),
        st.builds("({} * {})".format, st.sampled_from(["SLOPES[h]", "GAIN", "0.5"]), inner),
        st.builds("({} / GAIN)".format, inner),
        st.builds("(-{})".format, inner),
    ),
    max_leaves=4,
)


@given(FLOATS)
@settings(max_examples=300, deadline=None)
def test_whatever_is_told_apart_is_the_sum_of_its_parts(text):
    names = {name: globals()[name] for name in ("SLOPES", "HALVES", "GAIN", "WHOLE", "ROW")}
    names |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    variant = Variant(eval(f"lambda s, b, h, q, k: s + {text}", names))
    found = variant.score and linear(variant.score)
    if found is not None:
        hold(variant, found)


@pytest.mark.parametrize("slope", [math.nan, math.inf, -math.inf, 3e38], ids=str)
def test_the_limit_of_a_slope_that_is_no_number_is_none_either(slope):
    slopes = torch.tensor([1.0, slope, 0.0])
    variant = Variant(scores.alibi(slopes), masks.causal)
    most = evaluate(linear(with_known_signs(variant.score, variant.mask)).most, NATURAL, [slopes])
    assert not most.isfinite()


def test_the_limit_is_that_of_the_farthest_positions():
    variant, found = parts(lambda s, b, h, q, k: s + SLOPES[h] * (2 * k - q))
    most = evaluate(found.most, NATURAL, variant.captures)
    assert most.item() == Fraction(1, 4) * (2 * SEQLEN_K + SEQLEN_Q)
