"""The torch reader of graphs against the same functions run eagerly on tensors."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3 import masks
from cutedsl_fa3.variant import Graph, Node, Ref, Variant
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.graph import CAPTURE_DTYPES
from cutedsl_fa3.variant.ops import OPS

N = 64
_generator = torch.Generator().manual_seed(0)
INPUTS = {
    "score": torch.randn(N, generator=_generator) * 4,
    "b": torch.arange(N) % 2,
    "h": torch.arange(N) % 4,
    "q": torch.randint(0, 100, (N,), generator=_generator),
    "k": torch.randint(0, 100, (N,), generator=_generator),
}
FLOATS = torch.randn(2, 4, generator=_generator)
INTEGERS = torch.tensor([3, -2, 0, 7], dtype=torch.int32)
FLAGS = torch.tensor([True, False, False, True])
SCALAR = torch.tensor(1.25)


def _example(kind: str) -> torch.Tensor:
    return {
        "float": torch.tensor([0.5, 1.5]),
        "int": torch.tensor([7, -7]),
        "bool": torch.tensor([True, False]),
    }[kind]


@pytest.mark.parametrize("name", OPS)
def test_every_operation_has_a_torch_reader_of_its_declared_type(name):
    op = OPS[name]
    kinds = {"b": "bool", "i": "int", "f": "float"}
    for kind in op.accepts:
        arguments = [_example(kind)] * op.arity
        if name == "where":
            arguments[0] = _example("bool")
        if name in ("shl", "shr"):
            arguments[1] = torch.tensor(2)
        found = op.torch(*arguments)
        letter = "b" if found.dtype == torch.bool else "f" if found.is_floating_point() else "i"
        assert kinds[letter] == op.dtype(kind)


def _both(f):
    return lambda pair: lambda *x: f(pair[0](*x), pair[1](*x))


def _one(f):
    return lambda inner: lambda *x: f(inner(*x))


INT_LEAVES = st.sampled_from(
    [
        lambda s, b, h, q, k: q,
        lambda s, b, h, q, k: k,
        lambda s, b, h, q, k: h - b,
        lambda s, b, h, q, k: INTEGERS[h],
        lambda s, b, h, q, k: INTEGERS[(q - k) % 4],
        lambda s, b, h, q, k: s.to(torch.int32),
    ]
)
FLOAT_LEAVES = st.sampled_from(
    [
        lambda s, b, h, q, k: s,
        lambda s, b, h, q, k: FLOATS[b, h],
        lambda s, b, h, q, k: FLOATS[b, k % 4] * SCALAR,
        lambda s, b, h, q, k: s * 0.3 - 1,
        lambda s, b, h, q, k: q / 7,
    ]
)
BOOL_LEAVES = st.sampled_from(
    [
        lambda s, b, h, q, k: q >= k,
        lambda s, b, h, q, k: FLAGS[h],
        lambda s, b, h, q, k: s > 0.5,
        lambda s, b, h, q, k: (q - k) < 33 / 2,
        lambda s, b, h, q, k: s.bool(),
    ]
)
CONSTANTS = st.sampled_from([2, 3, -5, 7, 0.5, -1.75])
DIVISORS = st.sampled_from([1, 2, 3, -4, 7])


def _ints(inner):
    two = st.tuples(inner, inner)
    return st.one_of(
        *(two.map(_both(f)) for f in (operator.add, operator.sub, torch.minimum, torch.maximum)),
        *(two.map(_both(f)) for f in (operator.and_, operator.or_, operator.xor)),
        *(inner.map(_one(f)) for f in (operator.neg, abs, operator.invert, torch.square)),
        inner.map(_one(lambda x: x << 2)),
        inner.map(_one(lambda x: 3 * (x >> 1) - 1)),
        *(
            st.tuples(inner, DIVISORS).map(lambda p, f=f: lambda *x: f(p[0](*x), p[1]))
            for f in (
                operator.floordiv,
                operator.mod,
                torch.fmod,
                lambda a, c: torch.div(a, c, rounding_mode="trunc"),
            )
        ),
        st.tuples(BOOL_LEAVES, inner, inner).map(
            lambda p: lambda *x: torch.where(p[0](*x), p[1](*x), p[2](*x))
        ),
        st.tuples(BOOL_LEAVES, inner).map(lambda p: lambda *x: p[0](*x) * p[1](*x)),
    )


INTS = st.recursive(INT_LEAVES, _ints, max_leaves=5)


def _floats(inner):
    mixed = st.tuples(inner, inner | INTS)
    return st.one_of(
        *(mixed.map(_both(f)) for f in (operator.add, operator.sub, operator.mul)),
        *(mixed.map(_both(f)) for f in (operator.truediv, torch.minimum, torch.maximum)),
        *(
            inner.map(_one(f))
            for f in (
                operator.neg,
                abs,
                torch.exp,
                torch.exp2,
                torch.log2,
                torch.sqrt,
                torch.sin,
                torch.cos,
                torch.tanh,
                torch.sigmoid,
                torch.relu,
                torch.floor,
                torch.nn.functional.relu,
                lambda x: x.log(),
                lambda x: x.rsqrt(),
                lambda x: x.ceil(),
                lambda x: torch.trunc(x),
                lambda x: x**2,
                lambda x: x**0.5,
                lambda x: x.clamp(-1, 2.5),
                lambda x: x % 0.75,
                lambda x: torch.fmod(x, -1.5),
                lambda x: torch.add(x, x, alpha=2),
                lambda x: x.masked_fill(x > 1, 0.0),
            )
        ),
        st.tuples(inner, CONSTANTS).map(lambda p: lambda *x: p[1] * p[0](*x)),
        st.tuples(BOOL_LEAVES, inner, INTS).map(
            lambda p: lambda *x: torch.where(p[0](*x), p[1](*x), p[2](*x))
        ),
        INTS.map(_one(lambda x: x.float())),
        INTS.map(_one(lambda x: x / 3)),
    )


FLOATS_TREE = st.recursive(FLOAT_LEAVES, _floats, max_leaves=5)
COMPARE = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


def _bools(inner):
    two = st.tuples(inner, inner)
    joins = (operator.and_, operator.or_, operator.xor, operator.add, operator.mul)
    return st.one_of(
        *(two.map(_both(f)) for f in (*joins, operator.eq, operator.ne, torch.logical_or)),
        inner.map(_one(operator.invert)),
        inner.map(_one(torch.logical_not)),
        st.tuples(inner, inner, inner).map(
            lambda p: lambda *x: torch.where(p[0](*x), p[1](*x), p[2](*x))
        ),
        st.tuples(st.sampled_from(COMPARE), INTS, INTS).map(
            lambda p: lambda *x: p[0](p[1](*x), p[2](*x))
        ),
        st.tuples(st.sampled_from(COMPARE), FLOATS_TREE, CONSTANTS).map(
            lambda p: lambda *x: p[0](p[1](*x), p[2])
        ),
        st.tuples(st.sampled_from(COMPARE), INTS, CONSTANTS).map(
            lambda p: lambda *x: p[0](p[1](*x), p[2])
        ),
    )


BOOLS = st.recursive(BOOL_LEAVES, _bools, max_leaves=5)


def eager(function) -> torch.Tensor:
    return torch.broadcast_to(function(*INPUTS.values()), (N,))


def read(graph: Graph | None, captures, default: torch.Tensor) -> torch.Tensor:
    if graph is None:
        return default
    return torch.broadcast_to(evaluate(graph, INPUTS, captures), (N,))


@given(FLOATS_TREE)
@settings(max_examples=300, deadline=None)
def test_float_graphs_compute_what_torch_computes(function):
    variant = Variant(score=function)
    found = read(variant.score, variant.captures, INPUTS["score"])
    torch.testing.assert_close(found, eager(function), rtol=0, atol=0, equal_nan=True)


@given(INTS)
@settings(max_examples=300, deadline=None)
def test_integer_graphs_equal_torch_bit_for_bit(function):
    # A score is a float, which holds 16 bits of an integer exactly.
    def halves(part):
        return lambda *x: part(function(*x)).float()

    for part in (lambda x: x & 0xFFFF, lambda x: x >> 16):
        variant = Variant(score=halves(part))
        assert torch.equal(read(variant.score, variant.captures, None), eager(halves(part)))


@given(BOOLS)
@settings(max_examples=300, deadline=None)
def test_bool_graphs_equal_torch(function):
    variant = Variant(score=lambda *x: torch.where(function(*x), 1.0, 2.0))
    found = read(variant.score, variant.captures, INPUTS["score"])
    assert torch.equal(found, torch.where(eager(function), 1.0, 2.0))


def test_floor_division_of_floats_and_number_over_value_are_close_to_torch():
    for function in (
        lambda s, b, h, q, k: s // 0.7,
        lambda s, b, h, q, k: 2.0 / s,
        lambda s, b, h, q, k: 3.0 ** (q / 50),
        lambda s, b, h, q, k: s**5,
        lambda s, b, h, q, k: s**-2,
        lambda s, b, h, q, k: (2**h).float(),
        lambda s, b, h, q, k: 1.5 - s,
        lambda s, b, h, q, k: s.reciprocal() * s.new_full((), 3.0) + torch.zeros_like(s),
    ):
        variant = Variant(score=function)
        torch.testing.assert_close(read(variant.score, variant.captures, None), eager(function))


def test_half_precision_captures_are_widened_before_arithmetic():
    half = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.bfloat16)
    variant = Variant(score=lambda s, b, h, q, k: half[h] * 3)
    found = evaluate(variant.score, INPUTS, variant.captures)
    assert torch.equal(found, half.float()[INPUTS["h"]] * 3)


def test_float64_evaluation_does_not_round_to_float32_on_the_way():
    variant = Variant(score=lambda s, b, h, q, k: s + q / 3)
    found = evaluate(variant.score, INPUTS, dtype=torch.float64)
    assert torch.equal(found, INPUTS["score"].double() + INPUTS["q"].double() / 3)


def test_an_index_outside_is_clamped_where_hidden_and_an_error_where_visible():
    table = torch.arange(10.0)
    variant = Variant(score=lambda s, b, h, q, k: s * 0 + table[k])
    inputs = {"score": torch.zeros(3), "k": torch.tensor([-4, 5, 12])}
    hidden = torch.tensor([False, True, False])
    found = evaluate(variant.score, inputs, variant.captures, visible=hidden)
    assert found.tolist() == [0.0, 5.0, 9.0]
    with pytest.raises(IndexError, match="index -4"):
        evaluate(variant.score, inputs, variant.captures, visible=torch.tensor(True))


def test_captured_float64_elements_are_rounded_to_fp32_in_every_precision():
    table = torch.tensor([1 / 3, 1e300, 1 + 2.0**-40], dtype=torch.float64)
    variant = Variant(score=lambda s, b, h, q, k: s * 0 + table[h])
    for dtype in (torch.float32, torch.float64):
        inputs = {"score": torch.zeros(3, dtype=dtype), "h": torch.arange(3)}
        found = evaluate(variant.score, inputs, variant.captures, dtype=dtype)
        assert torch.equal(found, table.float().to(dtype))


@pytest.mark.parametrize("rank", range(7))
@pytest.mark.parametrize("dtype", CAPTURE_DTYPES)
def test_captured_tensors_of_any_rank_and_dtype_are_read_at_their_index(dtype, rank):
    sizes = (2, 3, 2, 2, 3, 2)[:rank]
    values = torch.randint(0, 2 if dtype == torch.bool else 100, sizes, generator=_generator)
    table = values.to(dtype)
    if rank > 1:
        table = table.transpose(0, 1)  # as it lies, not only packed

    def at(b, h, q, k):
        return (b, h, q % 2, k % 2, (q + k) % 3, 1)[:rank]

    variant = Variant(score=lambda s, b, h, q, k: s + table[at(b, h, q, k)])
    inputs = {**INPUTS, "h": INPUTS["h"] % 3, "b": INPUTS["b"] % 2}
    if rank > 1:
        inputs["b"], inputs["h"] = inputs["h"], inputs["b"]
    found = evaluate(variant.score, inputs, variant.captures)
    positions = at(*(inputs[name] for name in "bhqk"))
    expected = inputs["score"] + (table[positions] if rank else table).float()
    assert torch.equal(found, expected)


def test_captured_int64_elements_saturate_at_32_bits():
    for value, seen in ((2**40, True), (-(2**40), False)):
        variant = Variant(mask=masks.prefix(torch.tensor(value)))
        keys = torch.tensor([0, 5, 2**30])
        assert evaluate(variant.mask, {"k": keys}, variant.captures).tolist() == [seen] * 3
        beyond = torch.tensor([value])
        one = Variant(score=lambda s, b, h, q, k, t=beyond: s * 0 + t[h])
        found = evaluate(
            one.score, {"score": torch.zeros(()), "h": 0}, one.captures, dtype=torch.float64
        )
        assert found.item() == (2**31 - 1 if seen else -(2**31 - 1))


def test_a_graph_can_be_made_by_hand():
    q = Node("input", ("q",), "int", frozenset({"q"}))
    twice = Node("mul", (Ref(0), 2), "int", frozenset({"q"}))
    graph = Graph((q, twice), 1)
    assert graph.text == "%0 = input(q): int\n%1 = mul(%0, 2): int\nreturn %1"
    assert torch.equal(evaluate(graph, INPUTS), INPUTS["q"] * 2)
