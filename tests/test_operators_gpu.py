"""Gradients on an SM90 GPU as torch asks for them: eagerly, in graphs, on streams and devices."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from cases.alone import alone
from cases.oracles import drawn, hold_gradients, same
from gradients import captured_leaves
from poison import poisoned
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from twin_cases import BATCH, HEADS, KV_HEADS, variants

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, masks

pytestmark = pytest.mark.gpu

SIZES = (BATCH, 130, 200, HEADS, KV_HEADS)


def leaves(sizes: tuple[int, ...] = SIZES, dim: int = 64, seed: int = 0) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in drawn("cuda", sizes, dim, seed=seed)]


def of_all_kinds() -> fa3.Variant:
    """A gradient in every place: a score, a sink and an epilogue that read tensors."""
    slopes, sink, gate = (torch.rand(n, device="cuda") for n in ((HEADS,), (HEADS,), ()))
    return fa3.Variant(
        lambda s, b, h, q, k: s + slopes[h] * (k - q),
        masks.causal,
        OnlineSoftmax(sink),
        lambda o, lse, b, h, q: o * torch.sigmoid(lse * gate),
    )


def relu_weights() -> fa3.Variant:
    return fa3.Variant(mask=masks.causal, softmax=Elementwise(torch.relu))


KINDS = {
    "causal": lambda: fa3.Variant(mask=masks.causal),
    "all kinds": of_all_kinds,
    "weights": relu_weights,
}


def loss(variant: fa3.Variant, *given: torch.Tensor, deterministic: bool = True) -> torch.Tensor:
    """Of output and LSE, so that both have a gradient."""
    if not variant.has_lse:
        out = fa3.attention(*given, variant, deterministic=deterministic)
        return out.float().square().sum()
    out, lse = fa3.attention_with_lse(*given, variant, deterministic=deterministic)
    return out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()


@contextmanager
def with_captures(variant: fa3.Variant, given: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """All that a gradient is asked for."""
    with captured_leaves(variant) as captured:
        yield [*given, *captured.values()]


# Right, whatever is asked for.


@pytest.mark.parametrize("name", variants())
def test_gradients_of_every_kind_of_variant_match_fp64(name):
    _hold_kinds(name)


@pytest.mark.parametrize("part", range(4))
def test_gradients_in_a_fixed_order_match_fp64(part):
    alone(_hold_kinds_in_order, *list(variants())[part::4])


def _hold_kinds_in_order(*names: str) -> None:
    """In a process of its own: a fixed order waits for turns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    _hold_kinds(*names)


def _hold_kinds(*names: str) -> None:
    for name in names:
        with poisoned():
            found = hold_gradients(*drawn("cuda", SIZES), variants("cuda")[name])
        assert all(t.isfinite().all() for t in found.values()), name


@pytest.mark.parametrize("asked", ["q", "k", "v", "captured", "qv"])
def test_what_is_asked_for_alone_is_what_it_is_among_others(asked):
    variant = of_all_kinds()
    given = dict(zip("qkv", drawn("cuda", SIZES), strict=True))
    names = ["captured"] if asked == "captured" else list(asked)
    chosen = {**given, "captured": variant.captures[0]}

    def gradients(wanted: list[str]) -> list[torch.Tensor]:
        for t in chosen.values():
            t.requires_grad_(False)
        for name in wanted:
            chosen[name].requires_grad_()
        total = loss(variant, *given.values())
        return list(torch.autograd.grad(total, [chosen[name] for name in wanted]))

    everything = dict(zip(chosen, gradients(list(chosen)), strict=True))
    assert same(gradients(names), [everything[name] for name in names])
    assert all(t.grad is None for t in chosen.values())


def test_an_lse_alone_passes_nothing_on_to_values():
    q, k, v = leaves()
    variant = fa3.Variant(mask=masks.causal)
    _, lse = fa3.attention_with_lse(q, k, v, variant, deterministic=True)
    of_lse = torch.autograd.grad(lse.masked_fill(lse == -torch.inf, 0.0).sum(), [q, k, v])
    assert of_lse[0].any() and of_lse[1].any() and not of_lse[2].any()


def test_nothing_waits_for_the_device_after_the_first_call():
    given = leaves()
    for make, deterministic in itertools.product(KINDS.values(), (False, True)):
        variant = make()
        with with_captures(variant, given) as asked:
            for step in range(2):
                torch.cuda.set_sync_debug_mode("error" if step else "default")
                try:
                    torch.autograd.grad(
                        loss(variant, *given, deterministic=deterministic), asked,
                        allow_unused=True,
                    )  # fmt: skip
                finally:
                    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_gives_the_same_gradients(kind, reentrant):
    variant, given = KINDS[kind](), leaves()
    wanted = torch.autograd.grad(loss(variant, *given), given)
    checkpoint(lambda *t: loss(variant, *t), *given, use_reentrant=reentrant).backward()
    assert same([t.grad for t in given], wanted)


def test_autocast_casts_as_for_torchs_own_attention_also_around_the_backward():
    variant = of_all_kinds()
    wide = [t.float().detach().requires_grad_() for t in leaves()]
    with with_captures(variant, wide) as asked:
        with torch.autocast("cuda", torch.bfloat16):
            within = torch.autograd.grad(loss(variant, *wide), asked)
        halves = [t.detach().bfloat16().requires_grad_() for t in wide]
        outside = torch.autograd.grad(loss(variant, *halves), [*halves, *asked[3:]])
    assert [t.dtype for t in within] == [torch.float32] * len(asked)
    assert same(within, [t.float() for t in outside])


def test_a_second_derivative_is_refused_by_name():
    q, k, v = leaves()
    (first,) = torch.autograd.grad(fa3.attention(q, k, v).sum(), q, create_graph=True)
    assert first.isfinite().all()
    with pytest.raises(fa3.Unsupported, match=r"no second derivative.*double backward"):
        first.sum().backward()


# Graphs of torch.compile, and of CUDA.


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_are_one_graph_at_all_lengths(kind):
    torch._dynamo.reset()
    variant, counted = KINDS[kind](), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *given: loss(variant, given[0] * 2, *given[1:]),
        fullgraph=True, backend=counted, dynamic=True,
    )  # fmt: skip
    for seqlen_q, seqlen_k in ((40, 70), (77, 77), (130, 300)):
        given = leaves((BATCH, seqlen_q, seqlen_k, HEADS, KV_HEADS))
        with with_captures(variant, given) as asked:
            found = torch.autograd.grad(compiled(*given), asked)
            eager = torch.autograd.grad(loss(variant, given[0] * 2, *given[1:]), asked)
        assert same(found, eager)
    assert counted.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_both_operators_pass_torchs_own_checks(kind):
    variant = KINDS[kind]()
    q, k, v = (t.detach() for t in leaves((1, 20, 30, HEADS, KV_HEADS)))
    captures = [t.detach() for t in variant.captures]
    options = variant.handle, 0.3, "", True
    out, lse = torch.ops.cutedsl_fa3.attention(q, k, v, captures, *options)
    checks = {
        torch.ops.cutedsl_fa3.attention: (q, k, v, captures, *options),
        torch.ops.cutedsl_fa3.attention_backward: (
            torch.randn_like(out), None, q, k, v, out, lse, captures, *options,
            list(range(len(captures))),
        ),
    }  # fmt: skip
    for operator, given in checks.items():
        results = torch.library.opcheck(operator, given)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_of_forward_and_backward_gives_the_gradients_of_new_data(kind, deterministic):
    alone(_in_a_cuda_graph, kind, deterministic)


def _in_a_cuda_graph(kind: str, deterministic: bool) -> None:
    """Warmed up and captured on a side stream, replayed on other inputs of the same shapes."""
    variant, given = KINDS[kind](), leaves()
    step = _step(variant, given, deterministic)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an empty graph
        with torch.cuda.graph(graph, stream=side):
            found = step()
    for seed in (1, 2):
        with torch.no_grad():
            for t, new in zip(given, drawn("cuda", SIZES, seed=seed), strict=True):
                t.copy_(new)
            for t in variant.captures:
                t.mul_(0.9)
            for t in found:
                t.fill_(torch.nan)
        graph.replay()
        replayed = [t.clone() for t in found]
        eager = step()
        if deterministic:
            assert same(replayed, eager)
        for t, wanted in zip(replayed, eager, strict=True):
            scale = wanted.float().abs().max().item()
            torch.testing.assert_close(t, wanted, rtol=2e-2, atol=2e-2 * scale)


def _step(
    variant: fa3.Variant, given: list[torch.Tensor], deterministic: bool
) -> Callable[[], list[torch.Tensor]]:
    """A forward and a backward that return the gradients of everything."""

    def step() -> list[torch.Tensor]:
        with with_captures(variant, given) as asked:
            found = torch.autograd.grad(loss(variant, *given, deterministic=deterministic), asked)
        return list(found)

    return step


# Streams and devices.


def test_a_backward_runs_on_the_stream_of_its_forward():
    """Inputs are written late on a side stream: whoever does not follow it reads the old ones."""
    variant = of_all_kinds()
    new = drawn("cuda", SIZES, seed=5)
    with with_captures(variant, [t.clone().requires_grad_() for t in new]) as asked:
        wanted = torch.autograd.grad(loss(variant, *asked[:3]), asked)
    given = [torch.zeros_like(t).requires_grad_() for t in new]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), with_captures(variant, given) as asked:
        torch.cuda._sleep(200_000_000)  # clocks: a tenth of a second
        with torch.no_grad():
            for t, right in zip(given, new, strict=True):
                t.copy_(right)
        found = torch.autograd.grad(loss(variant, *given), asked)
    side.synchronize()
    assert same(found, wanted)


two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="two GPUs are needed, here is one"
)


@two_gpus
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_another_device_leave_the_current_one_as_found(kind):
    alone(_on_another_device, kind)


def _on_another_device(kind: str) -> None:
    here, there = KINDS[kind](), leaves()
    with with_captures(here, there) as asked:
        wanted = torch.autograd.grad(loss(here, *there), asked)
    moved = [t.detach().to("cuda:1").requires_grad_() for t in there]
    variant = here.bound_to([t.detach().to("cuda:1") for t in here.captures])
    with with_captures(variant, moved) as asked:
        found = torch.autograd.grad(loss(variant, *moved), asked)
    assert torch.cuda.current_device() == 0 and torch.empty(1, device="cuda").get_device() == 0
    assert all(t.get_device() == 1 for t in found)
    assert same([t.to("cuda:0") for t in found], wanted)
    try:
        fa3.attention(moved[0], there[1], there[2])
    except fa3.Unsupported as error:
        assert "k is on cuda:0, q is on cuda:1" in str(error)
    else:
        raise AssertionError("tensors of two devices were taken")
    assert torch.cuda.current_device() == 0


# Memory.


def _peak(variant: fa3.Variant, seqlen: int, deterministic: bool) -> int:
    """Bytes at most in use during forward and backward beyond the inputs."""
    given = leaves((1, seqlen, seqlen, 2, 2))
    with with_captures(variant, given) as asked:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(loss(variant, *given, deterministic=deterministic), asked)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_grows_with_the_length_not_with_its_square(deterministic):
    alone(_hold_memory, deterministic)


def _hold_memory(deterministic: bool) -> None:
    """Scores of one head alone would take 256 MiB in bf16 at 8192 positions, 2 GiB in fp32 at
    16384 of two heads; in a process of its own, since other tests leave memory behind.
    """
    slopes = torch.rand(2, device="cuda")
    variant = fa3.Variant(
        lambda s, b, h, q, k: s + slopes[h] * (k - q), masks.causal,
        epilogue=lambda o, lse, b, h, q: o * torch.sigmoid(lse),
    )  # fmt: skip
    peaks = {n: _peak(variant, n, deterministic) for n in (1024, 4096, 8192, 16384)}
    assert peaks[16384] - peaks[8192] <= 1.2 * 2 * (peaks[8192] - peaks[4096])
    assert peaks[16384] - peaks[8192] <= 64 * 2**20


# A fixed order.


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    ("sizes", "dim"),
    [((2, 1024, 1024, 12, 12), 64), ((2, 512, 512, 8, 8), 64), ((1, 700, 700, 16, 2), 128)],
    ids=str,
)
def test_gradients_in_a_fixed_order_are_equal_bits_in_30_runs(sizes, dim, busy):
    alone(_hold_bits, sizes, dim, busy)


def _hold_bits(sizes: tuple[int, ...], dim: int, busy: bool) -> None:
    """Of captured tensors too: by head, by distance in one place for many pairs, by key, a sink."""
    heads, length = sizes[3], sizes[1]
    slopes, sink = (torch.rand(heads, device="cuda") for _ in range(2))
    near, by_key = torch.rand(heads, 64, device="cuda"), torch.rand(length, device="cuda")
    variant = fa3.Variant(
        lambda s, b, h, q, k: s * slopes[h] + near[h, torch.clamp(q - k, 0, 63)] + by_key[k],
        masks.causal,
        OnlineSoftmax(sink),
    )
    given = [t.requires_grad_() for t in drawn("cuda", sizes, dim, dtype=torch.float16)]
    step = _step(variant, given, deterministic=True)
    first = step()
    beside, a = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for _ in range(30):
        if busy:
            with torch.cuda.stream(beside):
                for _ in range(4):
                    a = torch.tanh(a @ a)
        assert same(step(), first)
    torch.cuda.synchronize()
