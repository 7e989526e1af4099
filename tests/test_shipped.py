"""Every shipped mask, score and weight through CPU twin and kernel, beside the reference."""

from __future__ import annotations

import pytest
import torch
from twin_cases import drawn, exact, plain

import cutedsl_fa3 as fa3
from cutedsl_fa3.gallery_page import EXAMPLES, Example

SEQLEN_Q, SEQLEN_K = 300, 400
# One of each kind that the kernel meets nowhere else.
ON_GPU = (
    "padding packed spans or_masks tree block_strided neighborhood block_sparse"
    " bias t5_bias temperature log_length decay chain relu"
).split()


def check(example: Example, device: str) -> None:
    """The error against fp64 is at most twice that of torch at the input type, plus a rounding."""
    with torch.device(device):
        variant = example.variant(SEQLEN_K)
    q, k, v = drawn(1, SEQLEN_Q, SEQLEN_K, 1, 1, 64, device=device)
    wanted, wanted_lse = exact(q, k, v, variant)
    if variant.has_lse:
        out, lse = fa3.attention_with_lse(q, k, v, variant)
        seen = wanted_lse != -torch.inf
        assert torch.equal(lse != -torch.inf, seen)
        within = (1e-4 if device == "cuda" else 1e-5) * (1 + wanted_lse[seen].abs())
        assert ((lse - wanted_lse)[seen].abs() <= within).all()
    else:
        out = fa3.attention(q, k, v, variant)
    error = (plain(q, k, v, variant).double() - wanted).abs().max()
    allowed = 2 * error + torch.finfo(q.dtype).eps * wanted.abs().max()
    assert (out.double() - wanted).abs().max() <= allowed


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_the_twin_gives_what_the_reference_gives(example):
    check(example, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_the_kernel_gives_what_the_reference_gives(name):
    check(next(e for e in EXAMPLES if e.name == name), "cuda")
