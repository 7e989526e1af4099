"""NaN and infinities in visible inputs reach just the rows and channels that they reach in torch.

Nothing hides them, as a maximum that skips NaN would, and nothing spreads them, as 0 times NaN
does at a key of weight 0.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, backward, masks, reference, scores

from .oracles import Parts, Result, drawn, exact, gradients, same

NAN, INF = math.nan, math.inf
SIZES = (2, 150, 200, 4, 2)


def documents(device: str) -> fa3.Variant:
    of = (torch.arange(256, dtype=torch.int32) // 37).to(device)
    return fa3.Variant(mask=lambda b, h, q, k: (of[q] == of[k]) & (k <= q + 20))


def holes(device: str) -> fa3.Variant:
    hidden = (torch.arange(256) % 3 == 1).to(device)
    return fa3.Variant(mask=lambda b, h, q, k: ~hidden[k] & ((q + k) % 2 == 0))


VARIANTS = {
    "full": lambda device: fa3.Variant(),
    "causal": lambda device: fa3.Variant(mask=masks.causal),
    "window": lambda device: fa3.Variant(mask=masks.window(40, 3)),
    "prefix": lambda device: fa3.Variant(mask=masks.or_masks(masks.prefix(30), masks.causal)),
    "documents": documents,
    "holes": holes,
    "empty rows": lambda device: fa3.Variant(mask=lambda b, h, q, k: k < q - 70),
}


def hold_patterns(result: Result, wanted: Result, v: torch.Tensor) -> None:
    """The same NaN and infinities, and finite numbers where they are finite."""
    for found, right in zip(result, wanted, strict=True):
        assert torch.equal(found.isnan(), right.isnan())
        for extreme in (INF, -INF):
            assert torch.equal(found == extreme, right == extreme)
    finite = wanted[0].isfinite()
    largest = v[v.isfinite()].abs().max()
    allowed = 2 * torch.finfo(v.dtype).eps * largest  # P and the output are rounded once each
    assert ((result[0].double() - wanted[0])[finite].abs() <= allowed).all()


SITE = st.tuples(
    st.sampled_from("qkv"),
    st.sampled_from((NAN, INF, -INF)),
    st.integers(0, 1),  # batch entry
    st.integers(0, 199),  # position, taken modulo the length
    st.integers(0, 1),  # head
    st.integers(0, 7),  # channel
)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("seeing", [range(8), range(8, 16)], ids=["first", "second"])
def test_a_hidden_value_spoils_no_row_beside_empty_ones(device, dim, value, seeing):
    """A thread holds two rows, 8 apart; here one of them sees nothing."""
    first, last = seeing[0], seeing[-1]
    variant = fa3.Variant(mask=lambda b, h, q, k: (q % 16 >= first) & (q % 16 <= last) & (k < 3))
    q, k, v = drawn(device, SIZES, dim)
    v[:, 5] = value
    result = fa3.attention_with_lse(q, k, v, variant)
    assert result[0].isfinite().all()
    hold_patterns(result, exact(q, k, v, variant), v)


@pytest.mark.parametrize("dim", [64, 128, 256, 40])
@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=6)
@given(sites=st.lists(SITE, min_size=1, max_size=4))
def test_what_is_not_finite_reaches_just_what_it_reaches_in_the_reference(device, name, dim, sites):
    inputs = dict(zip("qkv", drawn(device, SIZES, dim), strict=True))
    for at, value, b, position, head, channel in sites:
        t = inputs[at]
        t[b, position % t.shape[1], head, channel] = value
    variant = VARIANTS[name](device)
    result = fa3.attention_with_lse(*inputs.values(), variant)
    hold_patterns(result, exact(*inputs.values(), variant), inputs["v"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("at", ["q", "k", "v"])
def test_one_position_of_each_tensor_reaches_the_rows_that_see_it(device, at, value, dtype):
    """A causal mask over two tiles of queries and of keys, in plain sight."""
    sizes = (1, 300, 300, 1, 1)
    inputs = dict(zip("qkv", drawn(device, sizes, dtype=dtype), strict=True))
    inputs[at][0, 200, 0, 5] = value
    variant = fa3.Variant(mask=masks.causal)
    out, lse = fa3.attention_with_lse(*inputs.values(), variant)
    hold_patterns((out, lse), exact(*inputs.values(), variant), inputs["v"])
    rows = torch.arange(300, device=device)
    touched = {"q": rows == 200, "k": rows >= 200, "v": rows >= 200}[at]
    assert out[0, ~touched].isfinite().all() and lse[0, 0, ~touched].isfinite().all()
    if at == "v":
        assert not out[0, touched, 0, 5].isfinite().any()
        assert out[0, touched, 0, 6:].isfinite().all() and lse.isfinite().all()
    elif math.isnan(value):
        assert out[0, touched].isnan().all() and lse[0, 0, touched].isnan().all()


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "full"])
@pytest.mark.parametrize("dim", [64, 256])
def test_what_no_row_sees_changes_nothing_but_roundings(device, dim, name, value):
    """All of K and V that some rows see is clean; what no row sees is not.

    The kernel computes again what a product with a hidden value has spoilt, in another order.
    """
    q, k, v = drawn(device, SIZES, dim)
    variant = VARIANTS[name](device)
    marked = torch.eye(200, 256, device=device)[None, :, None, :].expand(2, 200, 2, 256)
    weights = exact(q, k, marked.double(), variant)[0]
    seen = (weights > 0).any(1).view(2, 2, 2, 256).any(2)[..., :200]  # batch, kv head, key
    clean = fa3.attention_with_lse(q, k, v, variant)
    hidden = ~seen.transpose(1, 2)[..., None]
    for t in (k, v):
        t.masked_fill_(hidden, value)
    found = fa3.attention_with_lse(q, k, v, variant)
    assert same(clean[1:], found[1:])
    assert device != "cpu" or same(clean, found)
    hold_patterns(found, tuple(t.double() for t in clean), v)


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_a_value_reaches_a_row_that_sees_it_even_where_its_weight_vanishes(device, value):
    """exp of -400 is 0 in fp32, and 0 times infinity would be NaN."""
    q, k, v = drawn(device, (1, 130, 200, 1, 1))
    v[0, 150, 0, 9] = value
    low = torch.tensor(150, device=device)
    variant = fa3.Variant(lambda s, b, h, q, k: torch.where(k == low, -400.0, s), masks.causal)
    result = fa3.attention_with_lse(q, k, v, variant)
    hold_patterns(result, exact(q, k, v, variant), v)


def test_a_key_whose_score_is_minus_infinity_is_not_seen(device):
    q, k, v = drawn(device, (1, 130, 200, 1, 1))
    v[0, 150] = NAN
    at = torch.tensor(150, device=device)
    variant = fa3.Variant(lambda s, b, h, q, k: torch.where(k == at, -INF, s))
    result = fa3.attention_with_lse(q, k, v, variant)
    assert result[0].isfinite().all()
    hold_patterns(result, exact(q, k, v, variant), v)


def test_rows_that_see_nothing_are_0_whatever_their_query_holds(device):
    q, k, v = drawn(device, (1, 300, 100, 2, 2))
    q[:] = NAN
    variant = fa3.Variant(mask=masks.causal)
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    assert (out[:, :200] == 0).all() and (lse[..., :200] == -INF).all()
    assert out[:, 200:].isnan().all() and lse[..., 200:].isnan().all()


# A score function sees NaN as torch's would.

SCORES = {
    "s != s": lambda s, b, h, q, k: torch.where(s != s, 0.0, s),
    "s == s": lambda s, b, h, q, k: torch.where(s == s, s, 0.0),
    "not s == s": lambda s, b, h, q, k: torch.where(~(s == s), -INF, s),
    "s - s == 0": lambda s, b, h, q, k: torch.where(s - s == 0, s, -INF),
    "s > 0": lambda s, b, h, q, k: torch.where(s > 0, s, 0.0),
    "not s > 0": lambda s, b, h, q, k: torch.where(~(s > 0), s, 0.0),
    "s >= s": lambda s, b, h, q, k: torch.where(s >= s, s, 1.0),
    "s * 0": lambda s, b, h, q, k: s * 0.0,
    "s - s": lambda s, b, h, q, k: s - s,
    "maximum": lambda s, b, h, q, k: torch.maximum(s, q * 0.0 - 1.0),
    "minimum": lambda s, b, h, q, k: torch.minimum(s, q * 0.0 + 1.0),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -1.0, 1.0),
    "relu": lambda s, b, h, q, k: torch.relu(s),
    "abs": lambda s, b, h, q, k: torch.abs(s),
    "tanh": lambda s, b, h, q, k: 5 * torch.tanh(s / 5),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s),
    "exp": lambda s, b, h, q, k: torch.exp(-torch.abs(s)),
    "1 / s": lambda s, b, h, q, k: 1.0 / (s * s + 1.0),
    "sqrt of a negative": lambda s, b, h, q, k: torch.where(k == 7, torch.sqrt(-1.0 - s * s), s),
}


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_a_score_function_sees_what_is_not_finite_as_torch_does(device, name, value):
    q, k, v = drawn(device, (1, 130, 200, 2, 1))
    q = q.abs()  # the product with an infinite key is then +inf for every row
    k[0, 60, 0, 3] = value
    variant = fa3.Variant(SCORES[name], masks.window(90, 0))
    result = fa3.attention_with_lse(q, k, v, variant)
    hold_patterns(result, exact(q, k, v, variant), v)


@pytest.mark.parametrize("test", ["x != x", "x == x"])
def test_a_mask_may_ask_whether_a_captured_number_is_nan(device, test):
    weights = torch.randn(200)
    weights[::3] = NAN
    weights = weights.to(device)
    q, k, v = drawn(device, (1, 130, 200, 2, 1))
    hides = {
        "x != x": lambda b, h, q, k: ~(weights[k] != weights[k]),
        "x == x": lambda b, h, q, k: weights[k] == weights[k],
    }
    plain = (torch.arange(200) % 3 != 0).to(device)
    wanted = fa3.attention_with_lse(q, k, v, fa3.Variant(mask=lambda b, h, q, k: plain[k]))
    assert same(wanted, fa3.attention_with_lse(q, k, v, fa3.Variant(mask=hides[test])))


def test_a_captured_nan_reaches_the_rows_and_heads_that_read_it(device):
    bias = torch.zeros(4, device=device)
    bias[2] = NAN
    q, k, v = drawn(device, SIZES)
    variant = fa3.Variant(lambda s, b, h, q, k: s + bias[h], masks.causal)
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    assert out[:, :, 2].isnan().all() and lse[:, 2].isnan().all()
    others = [0, 1, 3]
    assert out[:, :, others].isfinite().all() and lse[:, others].isfinite().all()


def test_a_sink_that_is_nan_reaches_its_head_alone(device):
    sink = torch.tensor([0.0, NAN, 1.0, -INF], device=device)
    q, k, v = drawn(device, SIZES)
    variant = fa3.Variant(softmax=OnlineSoftmax(sink=sink))
    result = fa3.attention_with_lse(q, k, v, variant)
    assert result[0][:, :, 1].isnan().all() and result[1][:, 1].isnan().all()
    hold_patterns(result, exact(q, k, v, variant), v)


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("at", ["q", "k", "v"])
def test_weights_that_are_not_normalised_pass_on_what_is_not_finite_too(device, at, value):
    inputs = dict(zip("qkv", drawn(device, SIZES), strict=True))
    inputs[at][0, 100, 0, 5] = value
    variant = fa3.Variant(mask=masks.causal, softmax=Elementwise(lambda s: torch.relu(s) + 0.5))
    out = fa3.attention(*inputs.values(), variant)
    wanted = fa3.reference.attention(*inputs.values(), variant, dtype=torch.float64)
    assert torch.equal(out.isnan(), wanted.isnan())
    for extreme in (INF, -INF):
        assert torch.equal(out == extreme, wanted == extreme)


# Gradients.

GRADED = VARIANTS | {
    "softcap": lambda device: fa3.Variant(scores.softcap(5.0), masks.causal),
    "weights": lambda device: fa3.Variant(mask=masks.causal, softmax=Elementwise(torch.sigmoid)),
    "score of -inf": lambda device: fa3.Variant(
        lambda s, b, h, q, k: torch.where((q + k) % 3 == 0, s, -math.inf)
    ),
}
# Other tiles of a kernel; the twin has the same for all.
OF_GRADED_DIMS = pytest.mark.parametrize(
    "dim", [64, *(pytest.param(dim, marks=pytest.mark.gpu) for dim in (40, 128, 192, 256))]
)
GRADED_SIZES = (1, 150, 200, 2, 1)
GRADED_SITE = st.tuples(
    st.sampled_from(("q", "k", "v", "do")),
    st.sampled_from((NAN, INF, -INF)),
    st.integers(0, 199),
    st.integers(0, 1),
    st.integers(0, 7),
)


def twins(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, name: str) -> Parts:
    """The twin's gradients in fp64, from the exact output, on the CPU."""
    variant = GRADED[name]("cpu")
    q, k, v, do = (t.detach().cpu().double() for t in (q, k, v, do))
    lse = None
    if variant.has_lse:
        o, lse = reference.attention_with_lse(q, k, v, variant, dtype=torch.float64)
    else:
        o = reference.attention(q, k, v, variant, dtype=torch.float64)
    found = backward.run(q, k, v, variant, o, lse, do, scale=q.shape[3] ** -0.5)
    return {"q": found.q, "k": found.k, "v": found.v}


@OF_GRADED_DIMS
@pytest.mark.parametrize("name", GRADED)
@settings(max_examples=2)
@given(sites=st.lists(GRADED_SITE, min_size=1, max_size=3))
def test_what_is_not_finite_reaches_just_the_gradients_that_it_is_seen_with(
    device, name, dim, sites
):
    given = dict(zip("qkv", drawn(device, GRADED_SIZES, dim), strict=True))
    given["do"] = drawn(device, GRADED_SIZES, dim, seed=1)[0]
    for at, value, position, head, channel in sites:
        t = given[at]
        t[0, position % t.shape[1], head % t.shape[2], channel] = value
    q, k, v, do = given.values()
    found = gradients(q, k, v, GRADED[name](device), do)
    for part, right in twins(*given.values(), name).items():
        here = found[part].cpu().double()
        finite = right.isfinite()
        assert torch.equal(here.isfinite(), finite), part
        size = right[finite].abs().max().item() if finite.any() else 0.0
        # P, dS, the output and the gradient are rounded once each.
        torch.testing.assert_close(here[finite], right[finite], rtol=0.05, atol=0.02 * size)


@OF_GRADED_DIMS
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("at", ["q", "k", "v", "do"])
def test_what_documents_hide_from_one_another_leaves_their_gradients_as_they_are(
    device, at, value, dim
):
    """Documents shorter than a tile, of which the middle one is spoilt."""
    of = (torch.arange(128, dtype=torch.int32) // 50).to(device)
    variant = fa3.Variant(mask=lambda b, h, q, k: of[q] == of[k])
    given = dict(zip("qkv", drawn(device, (1, 128, 128, 2, 1), dim), strict=True))
    given["do"] = drawn(device, (1, 128, 128, 2, 1), dim, seed=1)[0]
    clean = gradients(given["q"], given["k"], given["v"], variant, given["do"])
    given[at][:, 70, :, 3] = value
    found = gradients(given["q"], given["k"], given["v"], variant, given["do"])
    others = of != 1
    for name, right in clean.items():
        torch.testing.assert_close(found[name][:, others], right[:, others], rtol=0.02, atol=0.02)
    assert not all(t[:, 50:100].isfinite().all() for t in found.values())
