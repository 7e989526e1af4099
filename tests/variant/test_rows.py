"""Rows, activations and custom operators in a function, against the function in eager torch."""

from __future__ import annotations

import math
import uuid

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Elementwise, Variant, approximations
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.rows import broadcast

G = torch.Generator().manual_seed(0)
WHOLE = torch.randint(-3, 4, (2, 4, 20, 6), generator=G).float()
OTHER = torch.randint(-3, 4, (2, 20, 6), generator=G).float()
PICKED = torch.randint(0, 20, (2, 20, 5), generator=G)
SPANS = torch.randint(0, 20, (4, 2), generator=G)
FLAGS = torch.rand(4, 3, 2, generator=G) > 0.5
VECTOR = torch.arange(6.0) - 2
BIAS = torch.randn(4, 20, generator=G)
EMBEDDING = torch.nn.Embedding(20, 4)
for parameter in EMBEDDING.parameters():
    parameter.requires_grad_(False)


def mapped(function) -> torch.Tensor:
    """The function of single indices, at every (b, h, q, k)."""
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if i == axis else None for i in range(4))
        function = torch.vmap(function, in_dims=dims)
    return function(*map(torch.arange, (2, 4, 20, 20)))


def read(function) -> torch.Tensor:
    variant = Variant(score=lambda s, b, h, q, k: function(b, h, q, k))
    inputs = {
        name: torch.arange(size).reshape(-1, *[1] * (3 - axis))
        for axis, (name, size) in enumerate(zip("bhqk", (2, 4, 20, 20), strict=True))
    }
    found = evaluate(variant.score, inputs, variant.captures)
    return torch.broadcast_to(found, (2, 4, 20, 20))


def spans(b, h, q, k):
    low, high = SPANS[h]
    return (k >= low) & (k < high)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: torch.dot(WHOLE[b, h, q], OTHER[b, k]),
        lambda b, h, q, k: torch.dot(WHOLE[b, h, q], VECTOR),
        lambda b, h, q, k: WHOLE[b, h, q] @ OTHER[b, k],
        lambda b, h, q, k: torch.inner(WHOLE[b, h, q, :], OTHER[b][k]),
        lambda b, h, q, k: (WHOLE[b, h, q] * OTHER[b, k]).sum(-1),
        lambda b, h, q, k: (WHOLE[b, h, q] - OTHER[b, k]).abs().sum(dim=0, keepdim=True)[0],
        lambda b, h, q, k: (WHOLE[b, h, q] - OTHER[b, k]).square().mean(),
        lambda b, h, q, k: WHOLE[b, h, q].amax() - WHOLE[b, h, k].amin(-1),
        lambda b, h, q, k: torch.max(WHOLE[b, h, q]) - WHOLE[b, h, k].min(),
        lambda b, h, q, k: torch.maximum(WHOLE[b, h, q], OTHER[b, k]).sum(),
        lambda b, h, q, k: torch.max(WHOLE[b, h, q], OTHER[b, k]).sum(),
        lambda b, h, q, k: WHOLE[b, h, q].clamp(min=-1, max=2).prod(),
        lambda b, h, q, k: WHOLE[b, h, q, 1:5:2].sum() + OTHER[b, k, -2:][0],
        lambda b, h, q, k: WHOLE[b, ..., 2][h, q] + OTHER[b, :, 1][k],
        lambda b, h, q, k: WHOLE[b, :, q].sum() + OTHER[..., 0][b, k],
        lambda b, h, q, k: WHOLE[b, :, q, 2:].sum(0)[3] + WHOLE[b, :, q].sum((0, 1)),
        lambda b, h, q, k: WHOLE[b, h, q].unsqueeze(0).squeeze().reshape(2, 3).flatten()[4],
        lambda b, h, q, k: WHOLE[b, h, q].view(3, -1).sum(1).amax(),
        lambda b, h, q, k: torch.where(OTHER[b, k] > 0, WHOLE[b, h, q], -1.0).sum(),
        lambda b, h, q, k: (PICKED[b, q] == k.unsqueeze(-1)).any(dim=-1).float(),
        lambda b, h, q, k: (PICKED[b, q] < k).all().float() + (PICKED[b, q] < k).sum(),
        lambda b, h, q, k: (PICKED[b, q] == PICKED[b, k].unsqueeze(1)).any(0).sum().float(),
        lambda b, h, q, k: torch.count_nonzero(PICKED[b, q] > k).float(),
        lambda b, h, q, k: BIAS[h, PICKED[b, q]].amax() * (q + 1),
        lambda b, h, q, k: BIAS[h][k] + BIAS[h, PICKED[b, q, 0]],
        lambda b, h, q, k: spans(b, h, q, k).float(),
        lambda b, h, q, k: FLAGS[h].any().float() + FLAGS[h].all(0).sum(),
        lambda b, h, q, k: FLAGS[h, 1].float().sum(),
        lambda b, h, q, k: sum(OTHER[b, k]) + len(OTHER[b, k]) * OTHER[b, k].numel(),
        lambda b, h, q, k: EMBEDDING(q)[h] + F.embedding(k, EMBEDDING.weight)[0],
        lambda b, h, q, k: (torch.zeros_like(OTHER[b, k]) + 2).sum() + q.new_zeros(()),
        lambda b, h, q, k: k.to("cpu").to(torch.float32) + q.type_as(BIAS[h, k]).detach().clone(),
        lambda b, h, q, k: torch.sign(OTHER[b, k, 0]) * q.sign() + torch.frac(BIAS[h, k]),
    ],
)
def test_rows_are_what_torch_makes_of_single_indices(function):
    expected = mapped(function)
    assert torch.equal(read(function), expected.float())


def test_a_chain_of_indices_on_slices_is_one_load():
    text = Variant(score=lambda s, b, h, q, k: s + WHOLE[1][:, 4:][h][q, 2]).score.text
    assert "load(t0, 1, %1, %3, 2)" in text and "add(%2, 4)" in text


SHAPES = st.lists(st.sampled_from([1, 1, 2, 3]), max_size=3).map(tuple)


@given(st.lists(SHAPES, min_size=1, max_size=3))
def test_shapes_broadcast_as_in_torch(shapes):
    try:
        expected = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        expected = None
    if expected is None:
        with pytest.raises(VariantError, match="do not go together"):
            broadcast(shapes)
    else:
        assert broadcast(shapes) == expected


# Functions of one element

POINTS = torch.cat(
    [
        torch.randn(1000, generator=G) * 4,
        torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 100.0, -100.0, 0.5, -0.5]),
    ]
)


@pytest.mark.parametrize(
    "f",
    [
        *(F.gelu, F.silu, F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.softplus),
        *(F.hardtanh, F.hardsigmoid, F.hardswish, F.softsign, F.tanhshrink),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.elu(x, 2.0),
        lambda x: F.celu(x, alpha=0.5),
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: F.threshold(x, 0.1, -3.0),
        torch.nn.GELU(),
        torch.nn.Hardtanh(-2, 2),
        *(torch.erf, torch.expm1, torch.log1p, torch.special.expit, torch.special.expm1),
        *(torch.isnan, torch.isinf, torch.isfinite, torch.sign, torch.frac),
    ],
)
def test_activations_are_those_of_torch_to_the_bit(f):
    variant = Variant(softmax=Elementwise(f))
    found = evaluate(variant.weight, {"score": POINTS}, variant.captures)
    torch.testing.assert_close(found, f(POINTS).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("f", [F.mish, F.logsigmoid, lambda x: F.softplus(x, 2.0, 10.0)])
def test_activations_that_are_put_together_are_those_of_torch_to_rounding(f):
    variant = Variant(softmax=Elementwise(f))
    found = evaluate(variant.weight, {"score": POINTS}, variant.captures)
    torch.testing.assert_close(found, f(POINTS), rtol=1e-5, atol=1e-30, equal_nan=True)


class TorchUnit:
    exp2, log2 = staticmethod(torch.exp2), staticmethod(torch.log2)
    reciprocal, absolute = staticmethod(torch.reciprocal), staticmethod(torch.abs)
    select = staticmethod(torch.where)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("expm1", torch.expm1),
        ("log1p", torch.log1p),
        ("erf", torch.erf),
        ("gelu", lambda x: x * torch.special.erfc(x * -(0.5**0.5)) / 2),
        ("gelu_tanh", lambda x: x * torch.sigmoid((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
        ("silu", F.silu),
        ("softplus", lambda x: F.softplus(x, threshold=1e3)),
    ],
)
def test_approximations_are_close_in_fp32_however_small_the_value(name, exact):
    sizes = torch.logspace(-7, 2, 4000)
    x = torch.cat([-sizes, sizes, torch.tensor([0.0, math.inf, -math.inf, math.nan])])
    found = getattr(approximations, name)(x, TorchUnit())
    expected = exact(x.double()).float().double()
    normal = expected.abs() >= 2.0**-126
    torch.testing.assert_close(
        found[normal].double(), expected[normal], rtol=2e-5, atol=0, equal_nan=True
    )
    assert torch.equal(found.isnan(), expected.isnan())
    assert not (found[~normal & ~expected.isnan()].abs() > 2.0**-125).any()


# Operators that someone registered


def operator(signature: str, function, key: str) -> torch._ops.OpOverloadPacket:
    library = f"tests_{uuid.uuid4().hex}"
    torch.library.define(f"{library}::add", signature)
    torch.library.impl(f"{library}::add", key, function)
    return getattr(torch.ops, library).add


@pytest.mark.parametrize("key", ["CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_a_custom_operator_is_what_it_is_made_of_whatever_its_name(key):
    add = operator("(Tensor a, Tensor b) -> Tensor", lambda a, b: torch.tanh(a) * b - 1, key)
    for call in (add, add.default):
        variant = Variant(score=lambda s, b, h, q, k, call=call: call(s, BIAS[h, k]))
        by_hand = Variant(score=lambda s, b, h, q, k: torch.tanh(s) * BIAS[h, k] - 1)
        assert variant.text == by_hand.text


def test_a_custom_operator_made_of_another_is_followed_into_both():
    inner = operator("(Tensor a, Tensor b) -> Tensor", torch.sub, "CompositeExplicitAutograd")
    outer = operator(
        "(Tensor a, Tensor b) -> Tensor", lambda a, b: inner(b, a) * 2, "CompositeExplicitAutograd"
    )
    by_hand = Variant(score=lambda s, b, h, q, k: (BIAS[h, k] - s) * 2)
    for call in (outer, outer.default):
        traced = Variant(score=lambda s, b, h, q, k, call=call: call(s, BIAS[h, k]))
        assert traced.score.result == by_hand.score.result
        assert sorted(map(str, traced.score.nodes)) == sorted(map(str, by_hand.score.nodes))


def test_a_custom_operator_with_a_kernel_only_is_refused_by_name():
    add = operator("(Tensor a, Tensor b) -> Tensor", lambda a, b: a * b, "CPU")
    with pytest.raises(VariantError, match=r"custom operator tests_\w+::add has kernels"):
        Variant(score=lambda s, b, h, q, k: add(s, s))


def test_a_custom_operator_on_captured_tensors_alone_cannot_freeze_them():
    add = operator("(Tensor a, Tensor b) -> Tensor", torch.sub, "CompositeExplicitAutograd")
    with pytest.raises(VariantError, match="outside"):
        Variant(score=lambda s, b, h, q, k: s * add(BIAS, BIAS)[h, k])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2


def test_autograd_functions_and_compiled_functions_are_traced_through():
    by_hand = Variant(score=lambda s, b, h, q, k: s * 2).text
    assert Variant(score=lambda s, b, h, q, k: Doubled.apply(s)).text == by_hand
    compiled = torch.compile(lambda s, b, h, q, k: s * 2, backend="eager")
    assert Variant(score=compiled).text == by_hand
