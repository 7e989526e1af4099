"""The reference on sinks, elementwise weights and epilogues, against closed forms and torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3 import Elementwise, OnlineSoftmax, Variant, masks, reference, seqlen_k

F64 = torch.float64
BOTH = pytest.mark.parametrize("dtype", [torch.float32, F64])


def inputs(seqlen_q, seqlen_k, heads=2, *, kv_heads=None, dim=8, batch=2, dtype=F64):
    kv_heads = heads if kv_heads is None else kv_heads
    q = torch.randn(batch, seqlen_q, heads, dim, dtype=dtype)
    k, v = (torch.randn(batch, seqlen_k, kv_heads, dim, dtype=dtype) for _ in range(2))
    return q, k, v


def run(q, k, v, variant, **options):
    return reference.attention_with_lse(q, k, v, variant, dtype=F64, **options)


def sunk(value, **more):
    sink = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    return Variant(softmax=OnlineSoftmax(sink), **more)


# Sinks


@BOTH
@pytest.mark.parametrize(
    ("sink", "output", "lse"), [(2.0, 0.119203, 2.126928), (100.0, 0.0, 100.0), (-100.0, 1.0, 0.0)]
)
def test_one_key_beside_a_sink_shares_the_weight_with_it(sink, output, lse, dtype):
    q, one = torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1, 8)
    found = reference.attention_with_lse(q, one, one, sunk(sink), dtype=dtype)
    assert found[0].flatten().tolist() == pytest.approx([output] * 8, abs=1e-6)
    assert found[1].item() == pytest.approx(lse, abs=1e-6)


@pytest.mark.parametrize("seqlen_k", [0, 3])
def test_a_row_that_sees_no_key_is_zero_and_its_lse_the_sink(seqlen_k):
    sink = torch.tensor([0.5, -7.0])
    out, lse = run(*inputs(5, seqlen_k), sunk(sink, mask=masks.none))
    assert not out.any()
    assert torch.equal(lse, sink.double()[None, :, None].expand(2, 2, 5))


def test_rows_of_a_causal_mask_that_see_nothing_have_the_sink_as_lse_and_no_nan():
    out, lse = run(*inputs(5, 2), sunk(0.5, mask=masks.causal))
    assert not out[:, :3].any() and (lse[..., :3] == 0.5).all()
    assert out.isfinite().all() and (lse[..., 3:] > 0.5).all()


def concatenated(q, k, v, sink):
    """torch's softmax with one more logit, whose column is dropped."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    sink = sink.to(q.dtype).expand(q.shape[2])[None, :, None, None]
    logits = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), logits.logsumexp(-1)


@pytest.mark.parametrize("shape", [(), (6,)])
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sink_is_one_more_logit_without_a_value(shape, sink_dtype):
    q, k, v = inputs(7, 9, 6, kv_heads=2)
    sink = (torch.randn(shape) * 3).to(sink_dtype)
    torch.testing.assert_close(run(q, k, v, sunk(sink)), concatenated(q, k, v, sink))


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v = inputs(5, 2)
    plain = run(q, k, v, Variant(mask=masks.causal))
    found = run(q, k, v, sunk(-math.inf, mask=masks.causal))
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])


def test_the_scale_does_not_touch_the_sink():
    q, k, v = inputs(3, 4)
    _, lse = run(q * 0, k, v, sunk(1.0), scale=7.0)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4 + math.e)))


def test_a_sink_is_read_at_each_call():
    q, k, v = inputs(3, 4)
    sink = torch.zeros(2)
    variant = sunk(sink)
    first = run(q, k, v, variant)
    sink[1] = 3.0
    again = run(q, k, v, variant)
    assert torch.equal(first[1][:, 0], again[1][:, 0])
    assert (again[1][:, 1] > first[1][:, 1]).all()


def test_a_sink_for_another_number_of_heads_is_refused_with_both():
    with pytest.raises(ValueError, match=r"sink has shape \(3,\) and q has 2 heads; .*\(2,\)"):
        run(*inputs(3, 4), sunk(torch.zeros(3)))


# Elementwise weights


@BOTH
@pytest.mark.parametrize("f", [torch.sigmoid, torch.relu, torch.square, torch.exp, lambda s: s > 0])
def test_elementwise_weights_are_not_normalised(f, dtype):
    q, k, v = inputs(7, 9, 6, kv_heads=2, dtype=dtype)
    variant = Variant(mask=masks.causal, softmax=Elementwise(f))
    found = reference.attention(q, k, v, variant, dtype=dtype)
    k, v = (x.repeat_interleave(3, 2) for x in (k, v))
    weights = f(torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)).to(dtype)
    visible = torch.ones(7, 9).tril(2).to(dtype)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights * visible, v)
    torch.testing.assert_close(found, expected)


def test_elementwise_weights_have_no_lse_and_say_so():
    q, k, v = inputs(3, 4)
    variant = Variant(softmax=Elementwise(torch.relu))
    with pytest.raises(ValueError, match=r"no LSE; valid are variants with OnlineSoftmax"):
        reference.attention_with_lse(q, k, v, variant)
    assert reference.attention(q, k, v, variant).shape == q.shape


@pytest.mark.parametrize(
    "f",
    [
        torch.log,
        torch.rsqrt,
        lambda s: s / 0.0,
        lambda s: torch.exp(s) * 1e38,
        lambda s: 1 / (s * 0),
    ],
)
def test_hidden_keys_weigh_exactly_nothing_whatever_the_function_is_there(f):
    q, k, v = inputs(6, 6)
    variant = Variant(mask=masks.none, softmax=Elementwise(f))
    assert not reference.attention(q, k, v, variant).any()
    empty = reference.attention(q, k[:, :0], v[:, :0], Variant(softmax=Elementwise(f)))
    assert not empty.any()


def test_a_score_of_minus_infinity_is_a_score_like_any_other_for_elementwise_weights():
    q, k, v = inputs(3, 4)
    variant = Variant(
        score=lambda s, b, h, q, k: torch.where(k < 2, s, -math.inf),
        softmax=Elementwise(lambda s: torch.where(s < -1e30, 1.0, 0.0)),
    )
    out = reference.attention(q, k, v, variant, dtype=F64)
    torch.testing.assert_close(out, v[:, 2:].sum(1, keepdim=True).expand_as(out))


def test_lengths_and_captured_scalars_reach_the_weights():
    q, k, v = inputs(3, 5)
    bias = torch.tensor(0.5)
    variant = Variant(softmax=Elementwise(lambda s: (s * 0 + bias) / seqlen_k))
    out = reference.attention(q, k, v, variant, dtype=F64)
    torch.testing.assert_close(out, 0.5 * v.mean(1, keepdim=True).expand_as(out))


# NaN and infinities


ODD = [math.nan, math.inf, -math.inf]
KINDS = {
    "sink": sunk(1.0, mask=masks.window(2, 0)),
    "sigmoid": Variant(mask=masks.window(2, 0), softmax=Elementwise(torch.sigmoid)),
    "relu": Variant(mask=masks.window(2, 0), softmax=Elementwise(torch.relu)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("what", ["k", "v"])
def test_what_is_not_finite_stays_out_of_rows_that_do_not_see_it_to_the_bit(kind, odd, what):
    q, k, v = inputs(12, 12, batch=1)
    clean = reference.attention(q, k, v, KINDS[kind], dtype=F64)
    (k if what == "k" else v)[:, 5] = odd
    found = reference.attention(q, k, v, KINDS[kind], dtype=F64)
    rows = [i for i in range(12) if i not in (5, 6, 7)]
    assert torch.equal(found[:, rows], clean[:, rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["k", "v"])
def test_nan_reaches_every_row_that_sees_it(kind, what):
    q, k, v = inputs(12, 12, batch=1)
    (k if what == "k" else v)[0, 5, 1, 3] = math.nan
    out = reference.attention(q, k, v, KINDS[kind], dtype=F64)
    columns = slice(3, 4) if what == "v" else slice(None)
    reached = torch.zeros_like(out, dtype=torch.bool)
    reached[0, 5:8, 1, columns] = True
    assert torch.equal(out.isnan(), reached)


@settings(max_examples=50)
@given(odd=st.sampled_from(ODD), weight=st.sampled_from([-2.0, 0.0, 0.5]))
def test_elementwise_products_are_those_of_floating_point(odd, weight):
    q, k, v = inputs(2, 4, 1, batch=1)
    v[0, 1] = odd
    variant = Variant(softmax=Elementwise(lambda s: s * 0 + weight))
    out = reference.attention(q, k, v, variant, dtype=F64)
    assert torch.equal(out.isnan(), torch.full_like(out, weight * odd).isnan())
    if not math.isnan(weight * odd):
        assert (out == weight * odd).all()


def test_a_sink_that_is_not_a_number_reaches_every_row_that_sees_a_key():
    out, lse = run(*inputs(5, 2), sunk(math.nan, mask=masks.causal))
    assert not out[:, :3].any() and out[:, 3:].isnan().all() and lse.isnan().all()


# Epilogues


@BOTH
def test_an_epilogue_changes_each_output_element_after_normalisation(dtype):
    q, k, v = inputs(5, 7, 3, dtype=dtype)
    gate = torch.rand(2, 3, 5)
    plain, lse = reference.attention_with_lse(q, k, v, dtype=dtype)
    variant = Variant(
        epilogue=lambda o, lse, b, h, q: o * gate[b, h, q] + torch.sigmoid(lse) * (q + 1)
    )
    out, same = reference.attention_with_lse(q, k, v, variant, dtype=dtype)
    rows = torch.arange(1, 6, dtype=dtype)
    more = torch.sigmoid(lse) * rows
    expected = plain * gate.to(dtype).permute(0, 2, 1)[..., None] + more.transpose(1, 2)[..., None]
    torch.testing.assert_close(out, expected)
    assert torch.equal(same, lse)


def test_an_epilogue_sees_zero_and_the_lse_of_a_row_without_keys():
    q, k, v = inputs(3, 0)

    def epilogue(o, lse, b, h, q):
        return torch.where(lse < -1e30, o + 7.0, o)

    out, _ = run(q, k, v, Variant(epilogue=epilogue))
    assert (out == 7.0).all()
    out, _ = run(q, k, v, sunk(0.5, epilogue=lambda o, lse, b, h, q: lse))
    assert (out == 0.5).all()


def test_an_epilogue_follows_elementwise_weights():
    q, k, v = inputs(4, 5)
    scale = torch.tensor([2.0, -1.0])
    relu = Elementwise(torch.relu)
    plain = reference.attention(q, k, v, Variant(softmax=relu), dtype=F64)
    scaled = Variant(softmax=relu, epilogue=lambda o, lse, b, h, q: o * scale[h])
    found = reference.attention(q, k, v, scaled, dtype=F64)
    torch.testing.assert_close(found, plain * scale.double()[:, None])


def test_an_epilogue_that_reads_outside_its_tensor_is_an_error():
    gate = torch.ones(4)
    with pytest.raises(IndexError, match=r"captured tensor t0 .* index 4 of dimension 0"):
        run(*inputs(5, 2), Variant(epilogue=lambda o, lse, b, h, q: o * gate[q]))


def test_working_in_small_pieces_changes_no_sink_weight_or_epilogue(monkeypatch):
    q, k, v = inputs(30, 20, 4, kv_heads=2)
    gate = torch.rand(4, 30)

    def epilogue(o, lse, b, h, q):
        return o * gate[h, q]

    for softmax in (OnlineSoftmax(torch.randn(4)), Elementwise(torch.sigmoid)):
        variant = Variant(mask=masks.causal, softmax=softmax, epilogue=epilogue)
        whole = reference.attention(q, k, v, variant, dtype=F64)
        for size in (1, 50, 700):
            with monkeypatch.context() as patch:
                patch.setattr(reference, "SCORES_AT_ONCE", size)
                pieces = reference.attention(q, k, v, variant, dtype=F64)
            torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)


# Gradients


def test_gradients_reach_queries_keys_values_sink_and_captured_tensors():
    q, k, v = inputs(3, 4, batch=1, dim=4)
    sink, gate = torch.randn(2, requires_grad=True), torch.rand(2, 3, requires_grad=True)
    slopes = torch.rand(2, requires_grad=True)
    variant = Variant(
        score=lambda s, b, h, q, k: s + slopes[h] * (k - q),
        mask=masks.window(1, 1),
        softmax=OnlineSoftmax(sink),
        epilogue=lambda o, lse, b, h, q: o * gate[h, q] + lse,
    )
    for x in (q, k, v):
        x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: run(*x, variant), (q, k, v), check_undefined_grad=False
    )
    run(q, k, v, variant)[0].sum().backward()
    for captured in (sink, gate, slopes):
        assert captured.grad.isfinite().all() and captured.grad.any()


def test_gradients_of_a_sink_are_those_of_one_more_logit():
    q, k, v = inputs(5, 6)
    sink = torch.randn(2, dtype=torch.float32)
    gradients = []
    for compute in (lambda s: run(q, k, v, sunk(s)), lambda s: concatenated(q, k, v, s)):
        leaf = sink.clone().requires_grad_()
        out, lse = compute(leaf)
        (out.square().sum() + lse.sum()).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("softmax", [OnlineSoftmax(), Elementwise(torch.sigmoid)])
def test_what_has_no_derivative_at_hidden_keys_leaves_gradients_finite(softmax):
    q, k, v = (x.requires_grad_() for x in inputs(5, 5, batch=1))
    root = torch.tensor([-1.0, 1.0, 2.0, 3.0, 4.0], requires_grad=True)
    variant = Variant(
        score=lambda s, b, h, q, k: s + torch.sqrt(root[k]),
        mask=lambda b, h, q, k: (k > 0) & (k <= q),
        softmax=softmax,
    )
    reference.attention(q, k, v, variant, dtype=F64).sum().backward()
    for x in (q, k, v, root):
        assert x.grad.isfinite().all()
    assert not q.grad[:, 0].any() and not k.grad[:, 0].any() and not v.grad[:, 0].any()
