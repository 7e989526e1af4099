"""What torch sees of attention: autograd, torch.compile, fake tensors, checkpoints, autocast."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gradients import captured_leaves, of_twin
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint
from twin_cases import BATCH, HEADS, KV_HEADS, drawn, variants

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, masks, operators, schedules_backward

SIZES = (BATCH, 40, 50, HEADS, KV_HEADS, 64)


def leaves(*sizes: int) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in drawn(*(sizes or SIZES))]


def of_all_kinds() -> tuple[fa3.Variant, list[torch.Tensor]]:
    """A variant with a gradient in every place, and its captured tensors."""
    slopes, sink, gate = torch.rand(HEADS), torch.randn(HEADS), torch.rand(())
    variant = fa3.Variant(
        lambda s, b, h, q, k: s + slopes[h] * (k - q),
        masks.causal,
        OnlineSoftmax(sink),
        lambda o, lse, b, h, q: o * torch.sigmoid(lse * gate),
    )
    return variant, [slopes, sink, gate]


def loss(found: Any) -> torch.Tensor:
    found = found if isinstance(found, tuple) else (found,)
    return sum(t.masked_fill(t == -torch.inf, 0.0).float().square().sum() for t in found)


def gradients(run: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss(run()), given)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Autograd.


@pytest.mark.parametrize("name", variants())
def test_gradients_on_the_cpu_are_the_twins(name):
    variant = variants()[name]
    q, k, v = leaves()
    call = fa3.attention_with_lse if variant.has_lse else fa3.attention
    with captured_leaves(variant) as captured:
        found = call(q, k, v, variant)
        found = found if isinstance(found, tuple) else (found,)
        upstream = [torch.randn_like(t) for t in found]
        parts = torch.autograd.grad(
            found, [q, k, v, *captured.values()], upstream, allow_unused=True
        )
    do, dlse = (*upstream, None)[:2]
    wanted = of_twin(q.detach(), k.detach(), v.detach(), variant, (do, dlse))
    for part, (name_, right) in zip(parts, wanted.items(), strict=True):
        if part is None:
            assert not right.any()
            continue
        # The twin is given the exact output, rounded; here it is the emulator's.
        size = right.float().abs().max().item()
        assert part.dtype == (torch.float32 if name_[0] == "t" else q.dtype)
        torch.testing.assert_close(part.float(), right.float(), rtol=0.05, atol=0.02 * size)


def test_an_output_and_an_lse_may_each_be_used_alone():
    variant, _ = of_all_kinds()
    q, k, v = leaves()
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    both = torch.autograd.grad(out.sum().float() + seen.sum(), q, retain_graph=True)[0]
    of_out = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    of_lse = torch.autograd.grad(seen.sum(), [q, v])
    torch.testing.assert_close((of_out + of_lse[0]).float(), both.float(), rtol=0.02, atol=0.02)
    assert not of_lse[1].any()


def test_only_what_requires_a_gradient_gets_one():
    variant, captured = of_all_kinds()
    q, k, v = drawn(*SIZES)
    captured[1].requires_grad_()
    fa3.attention(q, k, v, variant).sum().backward()
    assert captured[1].grad.abs().sum() > 0
    assert all(t.grad is None for t in (q, k, v, captured[0], captured[2]))
    with torch.no_grad():
        assert not fa3.attention(q, k, v, variant).requires_grad


def test_a_captured_tensor_in_half_precision_gets_its_gradient_in_that_type():
    slopes = torch.rand(HEADS, dtype=torch.float16, requires_grad=True)
    q, k, v = drawn(*SIZES)
    variant = fa3.Variant(lambda s, b, h, q, k: s * slopes[h])
    fa3.attention(q, k, v, variant).float().square().sum().backward()
    assert slopes.grad.dtype == torch.float16 and slopes.grad.abs().sum() > 0


def test_what_has_no_derivative_by_rule_gets_none():
    limits, table = torch.rand(HEADS), torch.randn(HEADS)
    q, k, v = leaves()
    variant = fa3.Variant(
        lambda s, b, h, q, k: torch.where(s > limits[h], s + table[h].detach(), s)
    )
    for t in (limits, table):
        t.requires_grad_()
    found = torch.autograd.grad(
        fa3.attention(q, k, v, variant).sum(), [q, limits, table], allow_unused=True
    )
    assert found[0].isfinite().all() and found[1] is None and found[2] is None


def layouts(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values in other strides."""
    yield t.transpose(1, 2).contiguous().transpose(1, 2)
    yield torch.stack([t, t + 1], 2)[:, :, 0]
    yield torch.cat([t, t], -1)[..., : t.shape[-1]]


def test_strides_of_an_outputs_gradient_do_not_matter():
    variant, _ = of_all_kinds()
    q, k, v = leaves()
    out = fa3.attention(q, k, v, variant)
    do = torch.randn_like(out)
    wanted = torch.autograd.grad(out, [q, k, v], do, retain_graph=True)
    for strided in layouts(do):
        assert strided.stride() != do.stride() and torch.equal(strided, do)
        assert same(torch.autograd.grad(out, [q, k, v], strided, retain_graph=True), wanted)
    of_sum = torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True)  # all strides 0
    assert same(of_sum, torch.autograd.grad(out, [q, k, v], torch.ones_like(out)))


def test_gradients_are_the_same_each_time():
    variant, captured = of_all_kinds()
    q, k, v = leaves()
    given = [q, k, v, *(t.requires_grad_() for t in captured)]
    runs = [
        gradients(lambda: fa3.attention(q, k, v, variant, deterministic=True), *given)
        for _ in range(4)
    ]
    assert all(same(run, runs[0]) for run in runs)


def test_what_deterministic_may_be_is_said():
    q = drawn(*SIZES)[0]
    with pytest.raises(fa3.Unsupported, match="deterministic = 1: supported are True and False"):
        fa3.attention(q, q, q, deterministic=1)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_derivative_is_refused_by_name(compiled):
    q, k, v = leaves()

    def out() -> torch.Tensor:
        if not compiled:
            return fa3.attention(q, k, v)
        return operators.traced(q, k, v, fa3.Variant(), (None, None, False))[0]

    (first,) = torch.autograd.grad(out().sum(), q, create_graph=True)
    assert first.isfinite().all()
    with pytest.raises(fa3.Unsupported, match=r"no second derivative.*double backward.*reference"):
        first.sum().backward()


def test_a_forward_mode_derivative_is_refused_by_name():
    q, k, v = leaves()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(fa3.Unsupported, match=r"no forward-mode derivative.*reference"):
            fa3.attention(dual, k, v)
        fa3.attention(q, k, v).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_gives_the_same_gradients(reentrant):
    variant, _ = of_all_kinds()
    q, k, v = leaves()
    plain = gradients(lambda: fa3.attention(q * 2, k, v, variant), q, k, v)
    for t in (q, k, v):
        t.grad = None
    found = checkpoint(
        lambda *given: fa3.attention(given[0] * 2, *given[1:], variant),
        q, k, v, use_reentrant=reentrant,
    )  # fmt: skip
    loss(found).backward()
    assert same([q.grad, k.grad, v.grad], plain)


def test_autocast_casts_as_for_torchs_own_attention():
    variant, captured = of_all_kinds()
    q, k, v = (t.float() for t in drawn(*SIZES))
    with pytest.raises(fa3.Unsupported, match=r"q is torch\.float32"):
        fa3.attention(q, k, v, variant)
    given = [t.requires_grad_() for t in (q, k, v, captured[0])]
    with torch.autocast("cpu", torch.bfloat16):
        out = fa3.attention(q, k, v, variant)
        found = torch.autograd.grad(loss(out), given, retain_graph=True)
        mixed = fa3.attention(q.bfloat16(), k, v, variant)
        silent = fa3.attention(q.detach(), k.detach(), v.detach())
    assert out.dtype == mixed.dtype == silent.dtype == torch.bfloat16 and torch.equal(out, mixed)
    assert [t.dtype for t in found] == [torch.float32] * 4
    assert same(found, torch.autograd.grad(loss(out), given))
    halves = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    wanted = gradients(lambda: fa3.attention(*halves, variant), *halves, captured[0])
    assert same(found, [t.float() for t in wanted])


def test_fp64_under_autocast_is_refused_like_elsewhere():
    q = drawn(*SIZES)[0].double()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(fa3.Unsupported, match=r"q is torch\.float64"),
    ):
        fa3.attention(q, q, q)


# Operators.


@pytest.fixture
def checked() -> Iterator[None]:
    """Graphs of other tests are forgotten."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def kinds() -> dict[str, fa3.Variant]:
    return {
        "plain": fa3.Variant(),
        "all kinds": of_all_kinds()[0],
        "weights": fa3.Variant(softmax=Elementwise(torch.relu)),
    }


@pytest.mark.parametrize("name", kinds())
def test_both_operators_pass_torchs_own_checks(name, checked):
    variant = kinds()[name]
    q, k, v = leaves(1, 20, 30, HEADS, KV_HEADS, 16)
    captures = [t.requires_grad_() for t in variant.captures]
    options = variant.handle, 0.3, "", False
    results = torch.library.opcheck(torch.ops.cutedsl_fa3.attention, (q, k, v, captures, *options))
    assert set(results.values()) == {"SUCCESS"}
    with torch.no_grad():
        out, lse = torch.ops.cutedsl_fa3.attention(q, k, v, captures, *options)
    given = [t.detach() for t in (torch.randn_like(out), q, k, v, out, lse)]
    do, *saved = given
    dlse = torch.randn_like(lse) if variant.has_lse else None
    results = torch.library.opcheck(
        torch.ops.cutedsl_fa3.attention_backward,
        (do, dlse, *saved, [t.detach() for t in captures], *options, [*range(len(captures))]),
    )
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", kinds())
def test_one_graph_holds_forward_and_backward_at_all_lengths(name, backend, checked):
    variant = kinds()[name]
    counted = CompileCounterWithBackend(backend)
    call = fa3.attention_with_lse if variant.has_lse else fa3.attention
    schedule = fa3.Schedule(128, 64)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return loss(call(q * 2, k, v, variant, schedule=schedule))

    compiled = torch.compile(step, fullgraph=True, backend=counted, dynamic=True)
    with captured_leaves(variant) as captured:
        for seqlen_q, seqlen_k in ((20, 30), (33, 33), (64, 20)):
            given = leaves(2, seqlen_q, seqlen_k, HEADS, KV_HEADS, 16)
            given = [*given, *captured.values()]
            found = torch.autograd.grad(compiled(*given[:3]), given)
            assert same(found, torch.autograd.grad(step(*given[:3]), given))
    assert counted.frame_count == 1


def test_a_graph_follows_captured_tensors_that_it_changes_itself(checked):
    slopes = torch.rand(HEADS)
    variant = fa3.Variant(lambda s, b, h, q, k: s + slopes[h] * k)

    def step(q: torch.Tensor) -> torch.Tensor:
        slopes.mul_(-1.0)
        return fa3.attention(q, q, q, variant)

    q = drawn(1, 20, 20, HEADS, HEADS, 16)[0]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    before = slopes.clone()
    found = compiled(q)
    assert torch.equal(slopes, -before)
    assert torch.equal(found, fa3.attention(q, q, q, variant))


def test_two_variants_of_one_function_are_two_graphs(checked):
    counted = CompileCounterWithBackend("eager")
    step = torch.compile(
        lambda q, variant: fa3.attention(q, q, q, variant), fullgraph=True, backend=counted
    )
    q = drawn(1, 20, 20, HEADS, HEADS, 16)[0]
    for variant in (fa3.Variant(), fa3.Variant(mask=masks.causal), None):
        assert torch.equal(step(q, variant), fa3.attention(q, q, q, variant))
    assert counted.frame_count == 3


def test_autocast_holds_in_a_graph_too(checked):
    q = drawn(1, 20, 20, HEADS, HEADS, 16)[0].float()

    def step(q: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return fa3.attention(q, q, q)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), step(q))


def test_what_is_refused_is_refused_by_name_in_a_graph(checked):
    q = drawn(1, 20, 20, HEADS, HEADS, 16)[0].float()
    compiled = torch.compile(lambda q: fa3.attention(q, q, q), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"q is torch\.float32: supported are"):
        compiled(q)


@pytest.mark.parametrize("name", kinds())
def test_fake_tensors_give_what_real_ones_do_but_for_the_values(name):
    variant = kinds()[name]
    call = fa3.attention_with_lse if variant.has_lse else fa3.attention
    real = drawn(*SIZES)
    wanted = call(real[0].transpose(1, 2).contiguous().transpose(1, 2), *real[1:], variant)
    with FakeTensorMode() as mode:
        q, k, v = map(mode.from_tensor, real)
        found = call(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, variant)
        with pytest.raises(fa3.Unsupported, match="k batch = 1"):
            call(q, k[:1], v, variant)
    pairs = zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, wanted)), strict=True)
    for fake, right in pairs:
        assert isinstance(fake, FakeTensor) and not isinstance(right, FakeTensor)
        assert (fake.shape, fake.stride(), fake.dtype) == (
            right.shape, right.stride(), right.dtype
        )  # fmt: skip


@pytest.mark.parametrize("name", kinds())
def test_fake_tensors_of_any_gpu_give_fake_gradients_there(name):
    """Without autograd, which a torch without CUDA has not for them."""
    variant = kinds()[name]
    with FakeTensorMode() as mode:
        q, k, v = (torch.empty(t.shape, dtype=t.dtype, device="cuda:1") for t in drawn(*SIZES))
        captures = [mode.from_tensor(t).to("cuda:1") for t in variant.captures]
        options = variant.handle, None, "", True
        out, lse = torch.ops.cutedsl_fa3.attention(q, k, v, captures, *options)
        wanted = [i for i, t in enumerate(captures) if t.is_floating_point()]
        dlse = lse if variant.has_lse else None
        *found, of_captures = torch.ops.cutedsl_fa3.attention_backward(
            out, dlse, q, k, v, out, lse, captures, *options, wanted
        )
    like = [q, k, v, *(captures[i] for i in wanted)]
    for t, right in zip([*found, *of_captures], like, strict=True):
        assert isinstance(t, FakeTensor) and t.device == right.device == torch.device("cuda:1")
        assert (t.shape, t.dtype) == (right.shape, right.dtype) and t.is_contiguous()


def test_a_gradient_without_a_kernel_is_refused_while_its_graph_is_made(monkeypatch):
    monkeypatch.setattr(schedules_backward, "TABLE", schedules_backward.TABLE[:1])
    variant = fa3.Variant()
    options = variant.handle, None, "", False
    with FakeTensorMode():
        q, lse = torch.empty(1, 8, 2, 128, device="cuda"), torch.empty(1, 2, 8, device="cuda")
        q = q.bfloat16()
        with pytest.raises(fa3.Unsupported, match=r"head_dim, head_dim_v = 128, 128.*no_grad"):
            torch.ops.cutedsl_fa3.attention_backward(q, None, q, q, q, q, lse, [], *options, [])


def test_a_variant_that_is_gone_is_named_where_its_graph_is_run():
    from cutedsl_fa3.variant.variant import by_handle

    variant = fa3.Variant()
    handle = variant.handle
    assert by_handle(handle) is variant
    del variant
    with pytest.raises(fa3.VariantError, match=f"{handle} is no Variant .*keep a reference"):
        by_handle(handle)


def test_a_schedule_goes_through_text_unchanged():
    fields = {"stages": (1, 3), "cluster": ((1, 1), (1, 2)), "store": ("tma", "direct")}
    for values in itertools.product(*fields.values()):
        schedule = fa3.Schedule(**dict(zip(fields, values, strict=True)))
        assert operators._read(operators._written(schedule)) == schedule
    assert operators._read(operators._written(None)) is None
