"""Derivatives of graphs against torch.autograd through the user's own functions, in fp64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_gym_variants import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from random_variants import captured, positions
from random_variants import scores as random_scores
from test_attn_gym import SINGLE_INDICES, mapped

from cutedsl_fa3 import Elementwise, Variant, VariantError, masks, scores
from cutedsl_fa3.gallery_page import WEIGHTS
from cutedsl_fa3.variant import Graph, Node, derive
from cutedsl_fa3.variant.derive import Derivatives, of_element, of_epilogue
from cutedsl_fa3.variant.evaluate import evaluate, evaluate_each
from cutedsl_fa3.variant.ops import MARKS, OPS

F64 = torch.float64
BATCH, HEADS, SEQLEN_Q, SEQLEN_K = SHAPE = (2, 3, 9, 11)


def wide(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64) * 3


def found_gradients(
    d: Derivatives,
    inputs: dict[str, Any],
    captures: tuple[torch.Tensor, ...],
    upstream: torch.Tensor,
) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    """Gradients of (upstream * value).sum() by inputs and, by number, by captured tensors."""
    outputs = [*d.inputs.values(), *(load.factor for load in d.loads)]
    indices = [i for load in d.loads for i in load.indices]
    values = [derive.Ref(graph.output) for graph in outputs]
    found = evaluate_each(d.value.nodes, [*values, *indices], inputs, captures, dtype=F64)
    by_input = {name: upstream * value for name, value in zip(d.inputs, found, strict=False)}
    by_capture = {n: torch.zeros(captures[n].shape, dtype=F64) for n in d.captures}
    rest = iter(found[len(outputs) :])
    for load, factor in zip(d.loads, found[len(d.inputs) :], strict=False):
        total = by_capture[load.capture]
        share = torch.broadcast_to(factor * upstream, upstream.shape)
        at = [
            torch.broadcast_to(next(rest).clamp(0, size - 1), upstream.shape)
            for size in total.shape
        ]
        if at:
            total.index_put_(tuple(at), share, accumulate=True)
        else:
            total += share.sum()
    return by_input, by_capture


def hold(
    found: torch.Tensor | None,
    wanted: torch.Tensor | None,
    like: torch.Tensor,
    rtol: float = 1e-9,
) -> None:
    """Equal wherever torch's is finite; 0 where either has none."""
    found = torch.zeros_like(like) if found is None else torch.broadcast_to(found, like.shape)
    wanted = torch.zeros_like(like) if wanted is None else wanted
    where = wanted.isfinite()
    scale = wanted[where].abs().max().item() if where.any() else 0.0
    torch.testing.assert_close(
        found[where], wanted[where].to(F64), rtol=rtol, atol=1e-12 + 1e-12 * scale
    )


def check(
    variant: Variant,
    eager: Callable[[torch.Tensor], torch.Tensor],
    s: torch.Tensor,
    leaves: dict[int, torch.Tensor] | None = None,
    rtol: float = 1e-9,
) -> None:
    """An element's derivatives against autograd of `eager(s)`, `leaves` being what it captures."""
    upstream = wide(s.shape, 9)
    s = s.clone().requires_grad_()
    value = torch.broadcast_to(eager(s), s.shape)
    wanted: list[torch.Tensor | None] = [None] * (1 + len(leaves or {}))
    if value.requires_grad:
        given = [s, *(leaves or {}).values()]
        wanted = list(torch.autograd.grad(value, given, upstream, allow_unused=True))
    d = of_element(variant)
    if d is None:
        hold(upstream, wanted[0], s)
        return
    sizes = {"seqlen_q": s.shape[2], "seqlen_k": s.shape[3]}
    inputs = {"score": s.detach(), **positions(*s.shape), **sizes}
    by_input, by_capture = found_gradients(d, inputs, variant.captures, upstream)
    hold(by_input.get("score"), wanted[0], s, rtol)
    for (number, leaf), right in zip((leaves or {}).items(), wanted[1:], strict=True):
        hold(by_capture.get(number), right, leaf, rtol)


def test_every_operation_says_what_its_derivative_is():
    assert set(derive.RULES) == {*OPS, *MARKS}


def test_an_operation_without_a_derivative_is_an_error_that_names_it(monkeypatch):
    monkeypatch.delitem(derive.RULES, "erf")
    graph = Variant(lambda s, b, h, q, k: torch.erf(s) * 1.75).score
    derive.derivatives.cache_clear()
    with pytest.raises(VariantError, match=r"erf has no derivative here; .*gelu"):
        derive.derivatives(graph)


# One function for each operation and each way in which floats may tie.

GRID = torch.cat(
    [torch.linspace(-6, 6, 49, dtype=F64), torch.tensor([30.0, -30.0, 20.0, 20.5], dtype=F64)]
)
TABLE = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.5, 3.0])

# Where eager torch computes in fp32 whatever it is given: 1 / 6, and `k.float()`.
FP32_INSIDE = {"hardsigmoid": 1e-7, "log_length": 1e-6}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda s, t: s + t,
    "sub": lambda s, t: t - s,
    "mul": lambda s, t: s * t * 0.3,
    "square": lambda s, t: s * s - t * t,
    "cube": lambda s, t: s**3,
    "div": lambda s, t: s / (t + 4.0),
    "divided by": lambda s, t: t / (s * s + 1.0),
    "divided number": lambda s, t: 3.0 / (s + 40.0) + s / 7.0,
    "fmod": lambda s, t: torch.fmod(s, t + 5.0),
    "remainder": lambda s, t: torch.remainder(s, t + 2.5),
    "frac": lambda s, t: torch.frac(s),
    "minimum": lambda s, t: torch.minimum(s, t),
    "maximum": lambda s, t: torch.maximum(t, s),
    "maximum of a number": lambda s, t: torch.maximum(s, torch.tensor(1.5, dtype=s.dtype)),
    "maximum of equals": lambda s, t: torch.maximum(s + t, s + 0.0 * t),
    "clamp": lambda s, t: s.clamp(-1.5, 3.0),
    "clamp by a tensor": lambda s, t: torch.clamp(s, t - 1.0, t + 1.0),
    "clamp_min": lambda s, t: torch.clamp_min(s, 0.5),
    "clamp_max": lambda s, t: s.clamp(max=0.5),
    "abs": lambda s, t: torch.abs(s) * abs(t),
    "neg": lambda s, t: (-s) * 2.0 - (-t),
    "exp": lambda s, t: torch.exp(-s * s) * t,
    "exp2": lambda s, t: torch.exp2(s * 0.3) + 2.0**t,
    "log": lambda s, t: torch.log(s * s + t * t + 0.5),
    "log2": lambda s, t: torch.log2(torch.abs(s) + 1.0),
    "sqrt": lambda s, t: torch.sqrt(s * s + 1.0) * t,
    "rsqrt": lambda s, t: torch.rsqrt(s * s + t * t + 1.0),
    "sin": lambda s, t: torch.sin(s * t),
    "cos": lambda s, t: torch.cos(s * t),
    "tanh": lambda s, t: 5.0 * torch.tanh(s / 5.0) * t,
    "sigmoid": lambda s, t: torch.sigmoid(s * t),
    "expm1": lambda s, t: torch.expm1(-torch.abs(s)),
    "log1p": lambda s, t: torch.log1p(s * s),
    "erf": lambda s, t: torch.erf(s + t),
    "gelu": lambda s, t: F.gelu(s) * t,
    "gelu_tanh": lambda s, t: F.gelu(s + t, approximate="tanh"),
    "silu": lambda s, t: F.silu(s - t),
    "softplus": lambda s, t: F.softplus(s),
    "softplus of beta": lambda s, t: F.softplus(s, beta=2.0, threshold=5.0),
    "relu": lambda s, t: F.relu(s) + F.relu(t),
    "relu6": lambda s, t: F.relu6(s),
    "hardtanh": lambda s, t: F.hardtanh(s, -2.0, 2.0),
    "hardsigmoid": lambda s, t: F.hardsigmoid(s),
    "hardswish": lambda s, t: F.hardswish(s),
    "leaky_relu": lambda s, t: F.leaky_relu(s, 0.1),
    "elu": lambda s, t: F.elu(s, 1.5),
    "celu": lambda s, t: F.celu(s, 1.5),
    "selu": lambda s, t: F.selu(s),
    "mish": lambda s, t: F.mish(s),
    "logsigmoid": lambda s, t: F.logsigmoid(s),
    "softsign": lambda s, t: F.softsign(s),
    "tanhshrink": lambda s, t: F.tanhshrink(s),
    "threshold": lambda s, t: F.threshold(s, 1.0, -7.0),
    "floor": lambda s, t: torch.floor(s) * t,
    "ceil": lambda s, t: torch.ceil(s * t) + s,
    "trunc": lambda s, t: torch.trunc(s) - t,
    "to int": lambda s, t: s.int() * t,
    "comparison": lambda s, t: (s > t).float() * s,
    "logic": lambda s, t: torch.where((s > 0) & ~(t > 0) | (s == t), s, t * 2.0),
    "where": lambda s, t: torch.where(s > 1.0, s * s, t * s),
    "where of two": lambda s, t: torch.where(s > 1.0, torch.tanh(s), torch.tanh(t)),
    "detach": lambda s, t: s.detach() * s + t,
    "straight through": lambda s, t: s + (torch.floor(s) - s).detach() * t,
    "all detached": lambda s, t: s.detach(),
    "unused": lambda s, t: t * 1.0 + 0.0 * s,
    "twice": lambda s, t: torch.tanh(s) * torch.tanh(s) + torch.tanh(s) * 2.0,
    "difference of equals": lambda s, t: (s + t) - (s - t),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_score_and_a_loaded_value_has_autograds_derivatives(name):
    function = FUNCTIONS[name]
    table = TABLE.clone()
    variant = Variant(lambda s, b, h, q, k: function(s, table[h]))
    s = GRID.expand(1, len(TABLE), 1, -1).contiguous()
    leaf = TABLE.to(F64).requires_grad_()

    def eager(s: torch.Tensor) -> torch.Tensor:
        return function(s, leaf[:, None, None])

    leaves = {0: leaf} if len(variant.captures) else {}
    check(variant, eager, s, leaves, FP32_INSIDE.get(name, 1e-9))


def test_the_functions_above_reach_every_operation_that_has_a_derivative():
    table = TABLE.clone()
    reached = set()
    for function in FUNCTIONS.values():
        variant = Variant(lambda s, b, h, q, k, f=function: f(s, table[h]))
        graph = variant.marked.get("score", variant.score)
        reached |= {node.op for node in graph.nodes}
    assert {name for name, rule in derive.RULES.items() if rule} <= reached


def test_what_a_choice_does_not_take_adds_nothing_even_where_it_is_not_finite():
    """torch's own derivative is NaN here: 0 * inf."""
    choices = (
        (lambda s, b, h, q, k: torch.where(s > 0, torch.sqrt(s), -s), lambda s: s <= 0, -1.0),
        (lambda s, b, h, q, k: torch.where(s > 0, torch.log(s) / s, s), lambda s: s <= 0, 1.0),
        (lambda s, b, h, q, k: torch.where(s == 0, 1.0, torch.sin(s) / s), lambda s: s == 0, 0.0),
    )
    for function, elsewhere, slope in choices:
        d = of_element(Variant(function))
        found = evaluate(d.inputs["score"], {"score": GRID}, dtype=F64)
        assert found.isfinite().all()
        assert (found[elsewhere(GRID)] == slope).all() and elsewhere(GRID).any()
        s = GRID.clone().requires_grad_()
        function(s, 0, 0, 0, 0).sum().backward()
        some = ~elsewhere(GRID)
        torch.testing.assert_close(found[some], s.grad[some])


# Shipped scores and weights, eagerly: the lengths that they read are numbers then.


def shipped() -> dict[str, Callable[..., Any]]:
    """By name a score and the tensors that it reads, in the order in which they are captured."""

    def made(*shape: int, positive: bool = False) -> torch.Tensor:
        t = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        return t.abs() + 0.1 if positive else t

    def of(make: Callable[..., Any], *tensors: torch.Tensor) -> Callable[..., Any]:
        return lambda *other: make(*(other or tensors)), tensors

    table = made(BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
    return {
        "alibi": of(scores.alibi, made(HEADS)),
        "alibi by batch": of(scores.alibi, made(BATCH, HEADS)),
        "softcap": of(lambda: scores.softcap(2.5)),
        "bias": of(scores.bias, table),
        "bias of all heads": of(scores.bias, made(SEQLEN_Q, SEQLEN_K)),
        "relative_bias": of(scores.relative_bias, made(HEADS, 41)),
        "t5_bias": of(lambda w: scores.t5_bias(w, bidirectional=True), made(8, HEADS)),
        "temperature": of(scores.temperature, made(HEADS, positive=True)),
        "temperature of all": of(scores.temperature, made(positive=True)),
        "log_length": of(lambda: scores.log_length(4)),
        "decay": of(scores.decay, made(HEADS).sigmoid()),
        "chain": of(
            lambda t, u: scores.chain(scores.temperature(t), scores.softcap(3.0), scores.bias(u)),
            made(positive=True),
            table,
        ),
    }


def test_every_shipped_score_is_among_these():
    public = {n for n, f in inspect.getmembers(scores, inspect.isfunction) if n[0] != "_"}
    assert public - {"alibi_slopes"} == {name.split()[0] for name in shipped()}


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_score_has_autograds_derivatives(name, monkeypatch):
    make, tensors = shipped()[name]
    variant = Variant(make())
    leaves = {
        i: next(t for t in tensors if t is c).to(F64).requires_grad_()
        for i, c in enumerate(variant.captures)
        if any(t is c for t in tensors)
    }
    assert len(leaves) == len(tensors)
    order = [next(i for i, c in enumerate(variant.captures) if c is t) for t in tensors]
    monkeypatch.setattr(scores, "seqlen_q", SEQLEN_Q)
    monkeypatch.setattr(scores, "seqlen_k", SEQLEN_K)
    # A score refuses fp64 tensors of its own: one that widens what it reads does not.
    monkeypatch.setattr(scores.arguments, "tensor", lambda *given: None)
    eager = make(*(leaves[i] for i in order)) if name.split()[0] != "alibi" else None
    if eager is None:
        leaf = leaves[0]

        def eager(s, b, h, q, k):
            slope = leaf[h] if leaf.ndim == 1 else leaf[b, h]
            return s - slope * torch.abs(q + (SEQLEN_K - SEQLEN_Q) - k)

    at = positions(*SHAPE)
    rtol = FP32_INSIDE.get(name, 1e-9)
    check(variant, lambda s: eager(s, *at.values()), wide(SHAPE), leaves, rtol)


@pytest.mark.parametrize("f", [torch.relu, torch.sigmoid, torch.tanh, F.softplus, lambda s: s])
def test_a_weight_after_a_score_is_derived_as_one_function(f):
    gain = torch.tensor(0.7)
    variant = Variant(lambda s, b, h, q, k: s * gain + k, softmax=Elementwise(f))
    leaf = gain.to(F64).requires_grad_()
    at = positions(*SHAPE)
    check(variant, lambda s: f(s * leaf + at["k"]), wide(SHAPE), {0: leaf})


def test_weights_of_the_gallery_have_autograds_derivatives():
    weights = {"sigmoid": torch.sigmoid, "relu": torch.relu}
    assert set(WEIGHTS) >= set(weights)
    for f in weights.values():
        check(Variant(softmax=Elementwise(f)), f, torch.cat([GRID, GRID])[None, None, None])


@pytest.mark.attn_gym
@pytest.mark.parametrize("name", CASES)
def test_an_attn_gym_function_has_autograds_derivatives(name):
    case = CASES[name]
    functions = case.functions("cpu")
    variant = Variant(**functions)
    shape = case.batch, case.heads, case.seqlen_q, case.seqlen_k
    if "score" not in functions:
        assert of_element(variant) is None  # a mask takes no part
        return
    s, at = wide(shape), positions(*shape)
    if name in SINGLE_INDICES:
        check(variant, lambda s: mapped(functions["score"], [s, *at.values()], True), s)
    else:
        check(variant, lambda s: functions["score"](s, *at.values()), s)


@contextmanager
def fp64_by_default() -> Iterator[None]:
    """A scope in which eager torch divides integers in fp64."""
    torch.set_default_dtype(F64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@settings(max_examples=60)
@given(random_scores(), st.integers(0, 99))
def test_a_random_score_has_autograds_derivatives(written, seed):
    shape = (2, 4, 7, 13)
    variant = written.variant()
    names = written._eager((shape[2], shape[3]), F64)
    traced = {id(t): n for n, t in _captured_of(variant, written).items()}
    leaves = {}
    for number, capture in enumerate(variant.captures):
        name = traced[id(capture)]
        if capture.is_floating_point():
            leaves[number] = names[name] = names[name].clone().requires_grad_()
    source = written.score.replace(".float()", ".double()")
    function = written.function(source, "s, b, h, q, k", names)
    at = positions(*shape)
    with fp64_by_default():
        check(variant, lambda s: function(s, *at.values()), wide(shape, seed), leaves)


def _captured_of(variant: Variant, written: Any) -> dict[str, torch.Tensor]:
    """The captured tensors by the name under which the text knows them."""
    known = captured(written.seed)
    return {
        name: capture
        for capture in variant.captures
        for name, t in known.items()
        if t.shape == capture.shape and t.dtype == capture.dtype and torch.equal(t, capture)
    }


# The epilogue.

GATES, ROWS = torch.rand(HEADS), torch.randn(BATCH, SEQLEN_Q, HEADS)
EPILOGUES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "scaled": (lambda o, lse, b, h, q, gates: o * gates[h], (GATES,)),
    "gated by lse": (
        lambda o, lse, b, h, q, rows: o * torch.sigmoid(rows[b, q, h] + lse),
        (ROWS,),
    ),
    "relu": (lambda o, lse, b, h, q: torch.relu(o), ()),
    "lse alone": (lambda o, lse, b, h, q: torch.tanh(lse) * q, ()),
    "number": (lambda o, lse, b, h, q: o * 0.5, ()),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_an_epilogue_has_autograds_derivatives(name):
    function, tensors = EPILOGUES[name]
    variant = Variant(epilogue=lambda o, lse, b, h, q: function(o, lse, b, h, q, *tensors))
    d = of_epilogue(variant)
    o, lse = wide((BATCH, SEQLEN_Q, HEADS, 5)), wide((BATCH, SEQLEN_Q, HEADS, 1), 2)
    at = {
        "b": torch.arange(BATCH)[:, None, None, None],
        "h": torch.arange(HEADS)[:, None],
        "q": torch.arange(SEQLEN_Q)[:, None, None],
    }
    upstream = wide(o.shape, 5)
    by_input, by_capture = found_gradients(
        d, {"o": o, "lse": lse, **at}, variant.captures, upstream
    )
    given = o.requires_grad_(), lse.requires_grad_()
    leaves = [t.to(F64).requires_grad_() for t in tensors]
    value = torch.broadcast_to(function(*given, *at.values(), *leaves), o.shape)
    wanted = torch.autograd.grad(value, [*given, *leaves], upstream, allow_unused=True)
    hold(by_input.get("o"), wanted[0], o)
    by_lse = by_input.get("lse")
    by_lse = by_lse if by_lse is None else by_lse.expand(o.shape).sum(-1, keepdim=True)
    hold(by_lse, wanted[1], lse)
    assert set(by_input) == {n for n, w in zip(("o", "lse"), wanted, strict=False) if w is not None}
    for number, (leaf, right) in enumerate(zip(leaves, wanted[2:], strict=True)):
        hold(by_capture.get(number), right, leaf)


# What a reader of the graphs relies on.


def graphs() -> list[Variant]:
    made = [Variant(make()) for make, _ in shipped().values()]
    return [variant for variant in made if variant.score is not None]


def test_the_nodes_of_the_value_come_first_and_are_the_forwards_own():
    for variant in graphs():
        d = derive.derivatives(variant.marked.get("score", variant.score))
        assert d.value.nodes[: len(variant.score.nodes)] == variant.score.nodes
        assert d.value.output == variant.score.output
        assert all(
            node.op in OPS or node.op in ("input", "load", "const") for node in d.value.nodes
        )


def test_what_only_concerns_derivatives_leaves_the_forwards_text_as_it_was():
    clamped = Variant(lambda s, b, h, q, k: F.relu(s.clamp(-1, 1).detach() * 2))
    written = Variant(
        lambda s, b, h, q, k: torch.maximum(
            torch.minimum(torch.maximum(s, s * 0 - 1), s * 0 + 1) * 2, s * 0
        )
    )
    ops = [
        [n.op for n in v.score.nodes if n.op in ("maximum", "minimum")] for v in (clamped, written)
    ]
    assert ops[0] == ops[1] == ["maximum", "minimum", "maximum"]
    assert Variant(lambda s, b, h, q, k: s.detach()).text == "plain attention"


def test_a_derivative_that_is_a_number_is_one_that_readers_can_leave_out():
    slopes = torch.rand(4)
    d = of_element(Variant(scores.alibi(slopes), masks.causal))
    assert derive.number(d.inputs["score"]) == 1.0
    assert derive.number(d.loads[0].factor) is None
    assert of_element(Variant(mask=masks.causal)) is None and of_epilogue(Variant()) is None
    constant = of_element(Variant(lambda s, b, h, q, k: 0.0 * s + slopes[h]))
    assert "score" not in constant.inputs and constant.captures == (0,)


def test_magnitudes_whose_sign_the_mask_settles_are_not_taken_again():
    slopes = torch.rand(4)
    d = of_element(Variant(scores.alibi(slopes), masks.causal))
    assert "abs" not in {node.op for node in d.value.nodes}
    assert "abs" in {node.op for node in of_element(Variant(scores.alibi(slopes))).value.nodes}


def test_integer_gathers_have_no_gradient():
    bucket, ids = torch.arange(20, dtype=torch.int32), torch.arange(20)
    d = of_element(Variant(lambda s, b, h, q, k: s + bucket[q] * 0.5 + ids[k]))
    assert d.loads == () and derive.number(d.inputs["score"]) == 1.0


def test_a_graph_alone_is_the_same_function_with_fewer_nodes():
    make, _ = shipped()["chain"]
    variant = Variant(make())
    d = of_element(variant)
    inputs = {"score": wide(SHAPE), **positions(*SHAPE), "seqlen_q": 9, "seqlen_k": 11}
    for graph in (*d.inputs.values(), *(load.factor for load in d.loads)):
        found = evaluate(derive.alone(graph), inputs, variant.captures, dtype=F64)
        assert torch.equal(found, evaluate(graph, inputs, variant.captures, dtype=F64))
        assert len(derive.alone(graph).nodes) < len(graph.nodes)


def test_a_softcap_costs_two_operations_more_than_its_forward():
    d = of_element(Variant(scores.softcap(30.0)))
    ops = [node.op for node in d.value.nodes]
    assert ops == ["input", "div", "tanh", "mul", "mul", "sub"]


def test_a_graph_of_one_number_has_no_derivatives():
    nodes = (Node("const", (2.0,), "float", frozenset()),)
    d = derive.derivatives(Graph(nodes, 0))
    assert d.inputs == {} and d.loads == () and math.isclose(derive.number(d.value), 2.0)
