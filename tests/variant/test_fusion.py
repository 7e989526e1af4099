"""What the kernel computes in fewer instructions is what the graph says."""

from __future__ import annotations

import math

import pytest
import torch
from cutlass import Float32
from hypothesis import given, settings
from hypothesis import strategies as st
from on_cpu import for_each

from cutedsl_fa3 import masks, scores
from cutedsl_fa3.variant import Elementwise, Ref, Variant, seqlen_k, seqlen_q
from cutedsl_fa3.variant.device import Lowering
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.fusion import composed, lines, spoils_row, with_known_signs

SLOPES = torch.tensor([0.7, -0.3])
TABLE, FIRST = torch.randn(2, 40), torch.tensor([3, 9])

# Signs that a mask settles.


def ahead(b, h, q, k):
    return q + (seqlen_k - seqlen_q) - k


SETTLED = {
    "causal": (masks.causal, lambda q, k: ahead(0, 0, q, k), 1),
    "turned round": (lambda b, h, q, k: q >= k, lambda q, k: k - q, -1),
    "strictly": (lambda b, h, q, k: k < q, lambda q, k: q - k - 1, 1),
    "further than asked": (lambda b, h, q, k: q - k > 5, lambda q, k: q - k + 2, 1),
    "among other conditions": (masks.window(7, 0), lambda q, k: ahead(0, 0, q, k), 1),
    "where they are equal": (lambda b, h, q, k: 2 * q == k * 2, lambda q, k: 2 * (q - k), 1),
    "from memory": (lambda b, h, q, k: FIRST[1] <= k, lambda q, k: k - FIRST[1], 1),
}
UNSETTLED = {
    "no mask": (None, lambda q, k: q - k, 0),
    "not so far": (lambda b, h, q, k: q - k > -5, lambda q, k: q - k, 0),
    "one of two": (lambda b, h, q, k: (k <= q) | (k < 3), lambda q, k: q - k, 0),
    "another distance": (masks.causal, lambda q, k: 2 * q - k, 0),
    "raw indices": (masks.causal, lambda q, k: q - k, 0),
    "not": (lambda b, h, q, k: ~(q >= k), lambda q, k: q - k, 0),
}


@pytest.mark.parametrize("name", [*SETTLED, *UNSETTLED])
def test_a_magnitude_goes_exactly_where_the_mask_settles_its_sign(name):
    mask, distance, sign = (SETTLED | UNSETTLED)[name]
    score = lambda s, b, h, q, k: s - SLOPES[h] * torch.abs(distance(q, k))  # noqa: E731
    variant = Variant(score, mask)
    known = with_known_signs(variant.score, variant.mask)
    assert any(node.op == "abs" for node in known.nodes) == (sign == 0)
    at = {
        "score": torch.zeros(1),
        "b": 0,
        "h": 1,
        "q": torch.arange(30)[:, None],
        "k": torch.arange(40),
        "seqlen_q": 30,
        "seqlen_k": 40,
    }
    wanted, found = (evaluate(g, at, variant.captures) for g in (variant.score, known))
    seen = torch.ones_like(wanted, dtype=torch.bool)
    if variant.mask is not None:
        seen = torch.broadcast_to(evaluate(variant.mask, at, variant.captures), wanted.shape)
    assert seen.any()
    assert torch.equal(wanted[seen], found[seen])


@given(*(st.integers(-3, 3) for _ in range(4)), st.integers(-9, 9), st.integers(-9, 9))
@settings(max_examples=200)
def test_a_sign_is_never_taken_for_settled_that_is_not(a, b, c, d, e, f):
    def score(s, _b, h, q, k):
        return s + torch.abs(a * q + b * k + e) * 0.5

    variant = Variant(score, lambda _b, h, q, k: (c * q + d * k + f >= 0) & (k <= q + 20))
    if variant.score is None or variant.mask is None:
        return
    at = {"score": torch.zeros(1), "q": torch.arange(25)[:, None], "k": torch.arange(25)}
    known = with_known_signs(variant.score, variant.mask)
    seen = torch.broadcast_to(evaluate(variant.mask, at), (25, 25))
    values = (torch.broadcast_to(evaluate(g, at), (25, 25))[seen] for g in (variant.score, known))
    assert torch.equal(*values)


# NaN that spoils a row.

NAN_REACHES = {
    "a cap": (lambda s: 5.0 * torch.tanh(s / 5.0), True),
    "products and sums": (lambda s: 1.0 - torch.exp(torch.tanh(s)) * 0.0, True),
    "a clamp": (lambda s: torch.clamp(torch.tanh(s), -0.5, 0.5), True),
    "a choice": (lambda s: torch.where(s > 0.0, torch.tanh(s), 0.0), False),
    "a condition": (lambda s: torch.where(torch.tanh(s) > 0.0, 1.0, 0.0), False),
    "an integer": (lambda s: torch.tanh(s).int() * 1.0, False),
}


@pytest.mark.parametrize("name", NAN_REACHES)
def test_only_functions_whose_nan_becomes_the_results_may_share(name):
    function, reaches = NAN_REACHES[name]
    graph = Variant(lambda s, b, h, q, k: function(s)).score
    (tanh,) = (i for i, node in enumerate(graph.nodes) if node.op == "tanh")
    assert (tanh in spoils_row(graph)) == reaches
    if reaches:
        assert evaluate(graph, {"score": torch.tensor(math.nan)}).isnan()


@pytest.mark.parametrize("weight", [False, True], ids=["score", "weight"])
def test_a_nan_that_is_not_chosen_reaches_no_neighbour(weight):
    """Functions beside a choice are computed each on its own, however many are asked together."""

    def function(s):
        return torch.where(s > 0.0, torch.sigmoid(s), torch.tanh(s * 0.0))

    variant = Variant(lambda s, b, h, q, k: function(s))
    values = torch.tensor([math.nan, 2.0])
    out = torch.zeros(2)

    def write(i, tensors, results):
        reader = Lowering(variant.score, (), {}, exponent=not weight)
        elements = [({"score": tensors[0][n]}, 0, n) for n in range(2)]
        for n, value in enumerate(reader.together(elements, {})):
            results[0][n] = value

    for_each(1, [values], [out], write)
    torch.testing.assert_close(out, function(values), equal_nan=True)


# Together as one by one.


@pytest.mark.parametrize("name", ["softcap", "sigmoid", "tanh"])
def test_neighbours_have_the_values_that_each_has_alone(name):
    function = {
        "softcap": scores.softcap(30.0),
        "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s - 3.0),
        "tanh": lambda s, b, h, q, k: torch.exp(torch.tanh(s * 0.1)),
    }[name]
    graph = Variant(function).score
    points = torch.cat([torch.linspace(-300, 300, 61), torch.tensor([0.0, 1e-5, 3e38])])
    count = len(points)
    out = torch.zeros(2, count, count)

    def write(i, tensors, results):
        reader = Lowering(graph, (), {}, exponent=True)
        raw = [tensors[0][i // count], tensors[0][i % count]]
        scale = Float32(0.125)
        at = [{"score": x * scale, "product": (x, scale)} for x in raw]
        elements = [(here, 0, n) for n, here in enumerate(at)]
        for n, value in enumerate(reader.together(elements, {})):
            results[0][n, i // count, i % count] = value

    for_each(count * count, [points], [out], write)
    wanted = evaluate(graph, {"score": points.double() / 8}, dtype=torch.float64).float()
    for n, of_each in enumerate((wanted[:, None], wanted)):
        within = 30 * 2.0**-21 if name == "softcap" else 1e-30
        torch.testing.assert_close(out[n], of_each.expand(count, count), rtol=1e-5, atol=within)


# Lines.


LINES = {
    "a slope": (lambda h, q, k: SLOPES[h] * (k - q), True),
    "a slope on the right": (lambda h, q, k: (3 * q - k) * SLOPES[h], True),
    "two factors": (lambda h, q, k: 0.5 * (SLOPES[h] * -(k - q).float()), True),
    "a magnitude": (lambda h, q, k: SLOPES[h] * torch.abs(k - q), False),
    "a square": (lambda h, q, k: (k - q) * (k - q) * 1.0, False),
    "a slope by key": (lambda h, q, k: TABLE[h, k] * (k - q), False),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_added_to_the_score_is_moved_from_where_the_tile_begins(name):
    function, is_line = LINES[name]
    variant = Variant(lambda s, b, h, q, k: s + function(h, q, k))
    graph = variant.score
    (added,) = (a for a in graph.result.args if graph.nodes[a.id].op != "input")
    assert (added.id in lines(graph)) == is_line
    rows, cols = (0, 8), (0, 1, 8, 57)
    out = torch.zeros(2, len(rows), len(cols))

    def write(i, tensors, results):
        uniform = {"b": i, "h": i, "seqlen_q": i, "seqlen_k": i}
        reader, memo = Lowering(graph, tensors, uniform, exponent=True), {}
        for r, ahead_q in enumerate(rows):
            for c, ahead_k in enumerate(cols):
                at = {"q": i + 1000 + ahead_q, "k": i + 900 + ahead_k, **uniform}
                at["origin"] = (i + 1000, i + 900, ahead_q, ahead_k)
                at |= {"score": Float32(2.0), "product": (Float32(1.0), Float32(2.0))}
                results[0][i, r, c] = reader.at(at, r, c, memo)

    for_each(2, variant.captures or [TABLE], [out], write)
    h = torch.arange(2)[:, None, None]
    q = h + 1000 + torch.tensor(rows)[:, None]
    k = h + 900 + torch.tensor(cols)
    at = {"score": torch.tensor(2.0), "h": h, "q": q, "k": k}
    wanted = evaluate(graph, at, variant.captures)
    torch.testing.assert_close(out, wanted.expand(out.shape), rtol=1e-6, atol=1e-4 * is_line)


# A weight after a score.


def test_a_weight_after_a_score_is_one_graph_of_both():
    variant = Variant(
        lambda s, b, h, q, k: s * SLOPES[h] + TABLE[h, k],
        softmax=Elementwise(lambda s: torch.sigmoid(s) * s + SLOPES[1]),
    )
    at = {"h": 1, "k": torch.arange(40)}
    first = torch.randn(40)
    scored = evaluate(variant.score, {**at, "score": first}, variant.captures)
    wanted = evaluate(variant.weight, {"score": scored}, variant.captures)
    both = composed(variant.score, variant.weight)
    assert torch.equal(evaluate(both, {**at, "score": first}, variant.captures), wanted)
    assert composed(variant.score, None) is variant.score
    assert composed(None, variant.weight) is variant.weight
    assert composed(None, None) is None
    assert all(a.id < i for i, n in enumerate(both.nodes) for a in n.operands if isinstance(a, Ref))
