"""Limits of scores: no value lies outside, and a softmax needs no maximum only within them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cutedsl_fa3 import Elementwise, Plan, Problem, Variant, masks, scores
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.graph import Builder, Graph
from cutedsl_fa3.variant.limits import bounded, in_base_2, limits

LIMITED = {
    "a cap": (lambda s: 30.0 * torch.tanh(s / 30.0), (-30, 30)),
    "a negative cap": (lambda s: torch.tanh(s) * -4.0, (-4, 4)),
    "a gate": (lambda s: 2.0 - torch.sigmoid(s), (1, 2)),
    "a clamp": (lambda s: torch.clamp(s, -3.0, 5.0), (-3, 5)),
    "half a clamp": (lambda s: torch.clamp(s, min=-3.0), (-3, math.inf)),
    "a choice": (lambda s: torch.where(s > 0, torch.cos(s), 7.0), (-1, 7)),
    "a sum": (lambda s: torch.tanh(s) + 3.0 * torch.erf(s), (-4, 4)),
    "the score": (lambda s: s, (-math.inf, math.inf)),
    "its magnitude": (lambda s: torch.abs(s), (-math.inf, math.inf)),
    "a cap of the score's size": (lambda s: s * torch.tanh(s), (-math.inf, math.inf)),
}


@pytest.mark.parametrize("name", LIMITED)
def test_limits_are_those_of_the_functions(name):
    function, wanted = LIMITED[name]
    graph = Variant(lambda s, b, h, q, k: function(s) + 0.0).score
    assert limits(graph) == pytest.approx(wanted)


NUMBERS = st.sampled_from([0.0, -1.5, 3.0, 100.0, math.inf, -math.inf])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    b = Builder()

    def value(depth: int):
        if depth == 0:
            return b.input("score") if draw(st.booleans()) else b.const(draw(NUMBERS))
        op = draw(st.sampled_from(["tanh", "sin", "add", "sub", "mul", "neg", "minimum", "where"]))
        if op in ("tanh", "sin", "neg"):
            return b.emit(op, value(depth - 1))
        if op == "where":
            condition = b.emit("gt", b.input("score"), draw(st.sampled_from([0.0, 2.0])))
            return b.emit(op, condition, value(depth - 1), value(depth - 1))
        return b.emit(op, value(depth - 1), value(depth - 1))

    output = value(draw(st.integers(1, 4)))
    return Graph(tuple(b.nodes), output.id)


def capped_by_infinities() -> Graph:
    """min(0, score + inf, score): the sum has no limit, so this has no lower one."""
    b = Builder()
    score, infinite = b.input("score"), b.const(math.inf)
    output = b.emit(
        "minimum", b.const(0.0), b.emit("minimum", b.emit("add", score, infinite), score)
    )
    return Graph(tuple(b.nodes), output.id)


@given(graphs())
@example(capped_by_infinities())
@settings(max_examples=200)
def test_no_value_lies_outside_the_limits(graph):
    points = torch.tensor([0.0, 1.0, -1.0, 2.5, -40.0, 1e30, math.inf, -math.inf])
    values = evaluate(graph, {"score": points}).expand(8)
    low, high = limits(graph)
    assert all(low <= v <= high for v in values[~values.isnan()].tolist()) or math.isnan(low + high)
    if not math.isnan(low + high):
        in_2 = evaluate(in_base_2(graph), {"score": points}).expand(8)
        torch.testing.assert_close(in_2, values * math.log2(math.e), equal_nan=True)


CAPPED = scores.softcap(50.0)
WITHOUT_MAXIMUM = {
    "a softcap": (Variant(CAPPED), "bf16", True),
    "a softcap under a mask": (Variant(CAPPED, masks.causal), "bf16", True),
    "a softcap in fp16, whose P ends at 65504": (Variant(CAPPED), "fp16", False),
    "a larger cap": (Variant(scores.softcap(60.0)), "bf16", False),
    "what is added to a cap": (Variant(scores.chain(CAPPED, lambda s, b, h, q, k: s + k)), "bf16",
                               False),
    "weights": (Variant(CAPPED, softmax=Elementwise(torch.sigmoid)), "bf16", False),
    "no score": (Variant(mask=masks.causal), "bf16", False),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_MAXIMUM)
def test_a_softmax_goes_without_a_maximum_where_scores_are_limited(name):
    variant, dtype, wanted = WITHOUT_MAXIMUM[name]
    plan = Plan.default(variant, Problem(dtype, 64, 64))
    assert plan.bounded == wanted == (bounded(variant) and dtype == "bf16")
    assert ("without a maximum" in str(plan)) == wanted
