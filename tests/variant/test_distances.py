"""Distances as floats: which integers grow evenly, and that moving the tile's first is the same."""

from __future__ import annotations

import pytest
import torch
from cutlass import Float32
from hypothesis import given, settings
from hypothesis import strategies as st
from on_cpu import for_each

from cutedsl_fa3.variant import Variant, seqlen_k, seqlen_q
from cutedsl_fa3.variant.device import Lowering
from cutedsl_fa3.variant.distances import distances
from cutedsl_fa3.variant.evaluate import evaluate

TABLE = torch.arange(64)

EVEN = {
    "k - q": (lambda q, k: k - q, (-1, 1)),
    "aligned": (lambda q, k: torch.abs(q + (seqlen_k - seqlen_q) - k), (1, -1)),
    "sum": (lambda q, k: 3 * q + k * 2 + 5, (3, 2)),
    "negative": (lambda q, k: -(q - 2 * (k - q)), (-3, 2)),
    "by head": (lambda q, k: q - k + TABLE[2], (1, -1)),
}
UNEVEN = {
    "product": lambda q, k: q * k,
    "quotient": lambda q, k: (q - k) // 2,
    "remainder": lambda q, k: (q - k) % 7,
    "from memory": lambda q, k: TABLE[q] - k,
    "nearer": lambda q, k: torch.minimum(q, k),
    "one of them": lambda q, k: k,
}


def graph(function):
    return Variant(lambda s, b, h, q, k: s + function(q, k) * 0.5).score


@pytest.mark.parametrize("name", EVEN)
def test_sums_of_positions_grow_evenly(name):
    function, steps = EVEN[name]
    (found,) = distances(graph(function)).values()
    assert (found.q, found.k) == steps
    assert found.magnitude == (name == "aligned")


@pytest.mark.parametrize("name", UNEVEN)
def test_what_grows_unevenly_is_converted_element_by_element(name):
    assert not distances(graph(UNEVEN[name]))


@given(st.integers(-5, 5), st.integers(-5, 5), st.integers(-99, 99), st.data())
def test_steps_are_those_of_the_values(a, b, c, data):
    def function(q, k):
        return a * q - (k * b - c)

    found = list(distances(graph(function)).values())
    places = {n: torch.tensor(data.draw(st.integers(0, 1000))) for n in ("q", "k")}
    at = {"b": 0, "h": 0, "seqlen_q": 9, "seqlen_k": 9, "score": torch.tensor(0.0), **places}
    for steps in found:
        for name, step in (("q", steps.q), ("k", steps.k)):
            there = evaluate(graph(function), {**at, name: at[name] + 1}, ())
            assert there - evaluate(graph(function), at, ()) == 0.5 * step


@pytest.mark.parametrize("name", EVEN)
@settings(max_examples=5)
@given(first_q=st.integers(0, 2**22), first_k=st.integers(0, 2**22))
def test_moving_the_first_distance_gives_every_distance(name, first_q, first_k):
    variant = Variant(lambda s, b, h, q, k: s + EVEN[name][0](q, k) * 0.5)
    lengths = {"seqlen_q": 2**22 + 64, "seqlen_k": 2**22 + 100}
    rows, cols = (0, 8), (0, 1, 8, 57)
    out = torch.zeros(1, len(rows), len(cols))
    given_ = torch.tensor([first_q, first_k, 0, 0, *lengths.values()], dtype=torch.int32)

    def write(i, tensors, results):
        numbers = tensors[0]
        uniform = {"b": numbers[2], "h": numbers[3]}
        uniform |= {"seqlen_q": numbers[4], "seqlen_k": numbers[5]}
        reader, memo = Lowering(variant.score, tensors[1:], uniform), {}
        for r, ahead_q in enumerate(rows):
            for c, ahead_k in enumerate(cols):
                at = {"score": Float32(0.0), "q": numbers[0] + ahead_q, "k": numbers[1] + ahead_k}
                at["origin"] = (numbers[0], numbers[1], ahead_q, ahead_k)
                results[0][i, r, c] = reader.at({**at, **uniform}, r, c, memo)

    for_each(1, [given_, *variant.captures], [out], write)
    q = torch.tensor([first_q + r for r in rows])[:, None]
    k = torch.tensor([first_k + c for c in cols])
    at = {"score": torch.tensor(0.0), "b": 0, "h": 0, "q": q, "k": k, **lengths}
    assert torch.equal(out[0], evaluate(variant.score, at, variant.captures).float())
