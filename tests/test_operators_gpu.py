"""Gradients on an SM90 GPU as torch asks for them: eagerly, in graphs, in memory that is linear.

Those in a fixed order, whose bits can be compared, are computed in processes of their own under a
time limit: an order that is kept by waiting could wait for ever.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from cases.alone import alone
from cases.oracles import drawn, hold_gradients, same
from poison import poisoned
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from training import KINDS, SIZES, leaves, loss, of_all_kinds, with_captures
from twin_cases import BATCH, HEADS, KV_HEADS, variants

import cutedsl_fa3 as fa3
from cutedsl_fa3 import masks

pytestmark = pytest.mark.gpu

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
    alone(_alone_and_among_others, asked)


def _alone_and_among_others(asked: str) -> None:
    variant = of_all_kinds("cuda")
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
    q, k, v = leaves("cuda")
    variant = fa3.Variant(mask=masks.causal)
    _, lse = fa3.attention_with_lse(q, k, v, variant)
    of_lse = torch.autograd.grad(lse.masked_fill(lse == -torch.inf, 0.0).sum(), [q, k, v])
    assert of_lse[0].any() and of_lse[1].any() and not of_lse[2].any()


def test_nothing_waits_for_the_device_after_the_first_call():
    alone(_hold_that_nothing_waits)


def _hold_that_nothing_waits() -> None:
    given = leaves("cuda")
    for make, deterministic in itertools.product(KINDS.values(), (False, True)):
        variant = make("cuda")
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
    alone(_hold_checkpoint, kind, reentrant)


def _hold_checkpoint(kind: str, reentrant: bool) -> None:
    variant, given = KINDS[kind]("cuda"), leaves("cuda")
    wanted = torch.autograd.grad(loss(variant, *given), given)
    checkpoint(lambda *t: loss(variant, *t), *given, use_reentrant=reentrant).backward()
    assert same([t.grad for t in given], wanted)


def test_autocast_casts_as_for_torchs_own_attention_also_around_the_backward():
    alone(_hold_autocast)


def _hold_autocast() -> None:
    variant = of_all_kinds("cuda")
    wide = [t.float().detach().requires_grad_() for t in leaves("cuda")]
    with with_captures(variant, wide) as asked:
        with torch.autocast("cuda", torch.bfloat16):
            within = torch.autograd.grad(loss(variant, *wide), asked)
        halves = [t.detach().bfloat16().requires_grad_() for t in wide]
        outside = torch.autograd.grad(loss(variant, *halves), [*halves, *asked[3:]])
    assert [t.dtype for t in within] == [torch.float32] * len(asked)
    assert same(within, [t.float() for t in outside])


def test_a_second_derivative_is_refused_by_name():
    q, k, v = leaves("cuda")
    (first,) = torch.autograd.grad(fa3.attention(q, k, v).sum(), q, create_graph=True)
    assert first.isfinite().all()
    with pytest.raises(fa3.Unsupported, match=r"no second derivative.*double backward"):
        first.sum().backward()


# Graphs of torch.compile.


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_are_one_graph_at_all_lengths(kind):
    alone(_hold_one_graph, kind)


def _hold_one_graph(kind: str) -> None:
    variant, counted = KINDS[kind]("cuda"), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *given: loss(variant, given[0] * 2, *given[1:]),
        fullgraph=True, backend=counted, dynamic=True,
    )  # fmt: skip
    for seqlen_q, seqlen_k in ((40, 70), (77, 77), (130, 300)):
        given = leaves("cuda", (BATCH, seqlen_q, seqlen_k, HEADS, KV_HEADS))
        with with_captures(variant, given) as asked:
            found = torch.autograd.grad(compiled(*given), asked)
            eager = torch.autograd.grad(loss(variant, given[0] * 2, *given[1:]), asked)
        assert same(found, eager)
    assert counted.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_both_operators_pass_torchs_own_checks(kind):
    variant = KINDS[kind]("cuda")
    q, k, v = (t.detach() for t in leaves("cuda", (1, 20, 30, HEADS, KV_HEADS)))
    captures = [t.detach() for t in variant.captures]
    options = variant.handle, 0.3, "", False
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


# Memory.


def _peak(variant: fa3.Variant, seqlen: int, deterministic: bool) -> int:
    """Bytes at most in use during forward and backward beyond the inputs."""
    given = leaves("cuda", (1, seqlen, seqlen, 2, 2))
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
    """Scores of one head in bf16 would grow by 384 MiB from 8192 to 16384 positions.

    In a process of its own, since other tests leave memory behind.
    """
    slopes = torch.rand(2, device="cuda")
    variant = fa3.Variant(
        lambda s, b, h, q, k: s + slopes[h] * (k - q), masks.causal,
        epilogue=lambda o, lse, b, h, q: o * torch.sigmoid(lse),
    )  # fmt: skip
    peaks = {n: _peak(variant, n, deterministic) for n in (1024, 4096, 8192, 16384)}
    assert peaks[16384] - peaks[8192] <= 1.2 * 2 * (peaks[8192] - peaks[4096]) + 2**22
    assert peaks[16384] - peaks[8192] <= 128 * 2**20
