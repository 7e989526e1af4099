"""The masks and scores of attn-gym through the kernel, the CPU twin and the reference."""

from __future__ import annotations

import math

import pytest
import torch
from attn_gym_variants import CASES
from gradients import F64, of_reference, of_twin, upstream_of
from twin_cases import drawn, exact

import cutedsl_fa3 as fa3
from cutedsl_fa3 import emulate

pytestmark = pytest.mark.attn_gym

EVERY = pytest.mark.parametrize("name", CASES)
HALF = 2.0**-8  # of a step of bf16, by which P and the output are rounded


def problem(name: str, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    case = CASES[name]
    sizes = case.batch, case.seqlen_q, case.seqlen_k, case.heads, case.heads
    return drawn(*sizes, 64, device=device)


def check(name: str, device: str, out: torch.Tensor, lse: torch.Tensor, slack: float) -> None:
    """Each element within the roundings of P and of itself, and `slack` for fp32."""
    q, k, v = problem(name, device)
    variant = CASES[name].variant(device)
    wanted, wanted_lse = exact(q, k, v, variant)
    spread, _ = exact(q, k, v.abs(), variant)
    allowed = (HALF + slack) * (spread + wanted.abs())
    assert ((out.double() - wanted).abs() <= allowed).all()
    seen = wanted_lse != -math.inf
    assert torch.equal(lse != -math.inf, seen)
    within = slack * (1 + wanted_lse[seen].abs())
    assert ((lse.double() - wanted_lse)[seen].abs() <= within).all()


@EVERY
def test_the_twin_computes_what_the_reference_does(name):
    q, k, v = problem(name)
    out, lse, visits = emulate.attention_with_visits(q, k, v, CASES[name].variant())
    check(name, "cpu", out, lse, 1e-4)
    assert torch.equal(visits, fa3.visits(q, k, v, CASES[name].variant()))


@pytest.mark.gpu
@EVERY
def test_the_kernel_computes_what_the_reference_does_and_visits_what_the_twin_visits(name):
    q, k, v = problem(name, "cuda")
    out, lse = fa3.attention_with_lse(q, k, v, CASES[name].variant("cuda"))
    check(name, "cuda", out, lse, 1e-3)  # scores from approximate functions
    twin = emulate.attention_with_visits(q.cpu(), k.cpu(), v.cpu(), CASES[name].variant())
    assert (out.cpu().float() - twin.out.float()).abs().mean() <= HALF / 4 * v.float().abs().mean()
    noted = fa3.visits(q, k, v, CASES[name].variant("cuda")).cpu()
    assert torch.equal(noted, twin.visits)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].exact])
def test_every_function_has_the_references_gradients(name):
    """In fp64, in q, k and v and in the tensors that the published function captures."""
    case = CASES[name]
    variant = case.variant()
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, length, 1, 8, generator=generator, dtype=F64)
        for length in (case.seqlen_q, case.seqlen_k, case.seqlen_k)
    )
    upstream = upstream_of(q, v, variant)
    found = of_twin(q, k, v, variant, upstream, (64, 128))
    for part, right in of_reference(q, k, v, variant, upstream).items():
        # Captured tensors are leaves of fp32, in which torch adds up their gradients.
        relative = 1e-5 if part[0] == "t" else 1e-9
        size = 1 + right.abs().max().item()
        torch.testing.assert_close(
            found[part].double(), right.double(), rtol=relative, atol=relative * size
        )
