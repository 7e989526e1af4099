"""What a score function adds to a multiple of the score costs one FMA, of the raw product."""

from __future__ import annotations

import math

import pytest
import torch
from cutlass import Float32
from on_cpu import for_each

from cutedsl_fa3 import Variant, scores
from cutedsl_fa3.variant.device import Lowering

SMALL = 2.0**-12  # its square is lost where 1 + 2 SMALL + SMALL^2 is rounded to fp32
ROUNDED = 1 + 2 * SMALL  # the score: (1 + SMALL)^2 in fp32

# By name: a score function of s and of what cancels the rounded square, and its exact result.
FUSED = {
    "score + it": (lambda s, t, u: s + t, SMALL**2),
    "it + score": (lambda s, t, u: t + s, SMALL**2),
    "score - it": (lambda s, t, u: s - (-t), SMALL**2),
    "it - score": (lambda s, t, u: (-t) - s, -(SMALL**2)),
    "half of the score": (lambda s, t, u: s * 0.5 + t * 0.5, SMALL**2 / 2),
    "by a number": (lambda s, t, u: s / 4.0 + t * 0.25, SMALL**2 / 4),
    "by what is uniform": (lambda s, t, u: u * s + t * u, SMALL**2 * 8),
    "negative": (lambda s, t, u: -s - t, -(SMALL**2)),
    "added twice": (lambda s, t, u: (s + 0.0) + t, SMALL**2),
}
APART = {
    "score + score": (lambda s, t, u: s + s, 2 * ROUNDED),
    "after a clamp": (lambda s, t, u: torch.clamp(s, min=-9.0) + t, 0.0),
    "chosen": (lambda s, t, u: torch.where(u > 0.0, s, 1.0) + t, 0.0),
}


def value(function, varies: bool) -> float:
    """The device reader's value at one element, `t` being read by query or the same everywhere."""
    t, u = torch.tensor([-ROUNDED]), torch.tensor([8.0])
    variant = Variant(lambda s, b, h, q, k: function(s, t[q if varies else h], u[h]))
    out = torch.zeros(1)

    def write(i, tensors, results):
        uniform = {"b": i, "h": i, "seqlen_q": i, "seqlen_k": i}
        factor = Float32(1 + SMALL)
        at = {"score": factor * factor, "product": (factor, factor), "q": i, "k": i, **uniform}
        results[0][i] = Lowering(variant.score, tensors, uniform).at(at, 0, 0, {})

    for_each(1, variant.captures or [t], [out], write)
    return out.item()


@pytest.mark.parametrize("varies", [False, True], ids=["uniform", "by query"])
@pytest.mark.parametrize("name", [*FUSED, *APART])
def test_only_what_is_added_to_a_multiple_of_the_score_is_fused_with_its_scale(name, varies):
    function, expected = (FUSED | APART)[name]
    assert value(function, varies) == expected


CAPS = {
    "a cap": (lambda s: scores.softcap(30.0)(s, 0, 0, 0, 0), 1),
    "a cap and what is added": (lambda s: 1.0 - 30.0 * torch.tanh(s / 30.0), 1),
    "its tanh on the left": (lambda s: torch.tanh(s) * 2.0, 1),
    "two caps": (lambda s: 2.0 * torch.tanh(s) + 3.0 * torch.tanh(s * 2.0), 2),
    "a cap within": (lambda s: torch.exp(2.0 * torch.tanh(s)), 0),
    "a cap that is chosen": (lambda s: torch.where(s > 0.0, 2.0 * torch.tanh(s), s), 0),
    "no number": (lambda s: s * torch.tanh(s), 0),
    "a large cap": (lambda s: 1e4 * torch.tanh(s / 1e4), 0),
    "a small cap": (lambda s: 1e-4 * torch.tanh(s / 1e-4), 0),
    "infinite": (lambda s: math.inf * torch.tanh(s), 0),
}


@pytest.mark.parametrize("name", CAPS)
def test_tanh_loses_its_series_only_where_a_cap_of_it_is_added_up(name):
    function, count = CAPS[name]
    graph = Variant(lambda s, b, h, q, k: function(s)).score
    assert len(Lowering(graph, (), {}, exponent=True).capped) == count
    assert not Lowering(graph, (), {}).capped
