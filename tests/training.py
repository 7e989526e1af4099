"""A forward and a backward with gradients in every place, as a step of training has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from cases.oracles import Sizes, drawn
from gradients import captured_leaves
from twin_cases import BATCH, HEADS, KV_HEADS

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, masks

SIZES: Sizes = (BATCH, 130, 200, HEADS, KV_HEADS)


def leaves(
    device: str,
    sizes: Sizes = SIZES,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> list[torch.Tensor]:
    """q, k and v that require gradients."""
    return [t.requires_grad_() for t in drawn(device, sizes, dim, dtype=dtype, seed=seed)]


def of_all_kinds(device: str) -> fa3.Variant:
    """A score, a sink and an epilogue that read tensors."""
    slopes, sink, gate = (torch.rand(n, device=device) for n in ((HEADS,), (HEADS,), ()))
    return fa3.Variant(
        lambda s, b, h, q, k: s + slopes[h] * (k - q),
        masks.causal,
        OnlineSoftmax(sink),
        lambda o, lse, b, h, q: o * torch.sigmoid(lse * gate),
    )


KINDS: dict[str, Callable[[str], fa3.Variant]] = {
    "causal": lambda device: fa3.Variant(mask=masks.causal),
    "all kinds": of_all_kinds,
    "weights": lambda device: fa3.Variant(mask=masks.causal, softmax=Elementwise(torch.relu)),
}


@contextmanager
def with_captures(variant: fa3.Variant, given: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """All that a gradient is asked for: these, and the captured floating tensors."""
    with captured_leaves(variant) as captured:
        yield [*given, *captured.values()]


def loss(variant: fa3.Variant, *given: torch.Tensor, deterministic: bool = True) -> torch.Tensor:
    """Of output and LSE, so that both have a gradient."""
    if not variant.has_lse:
        out = fa3.attention(*given, variant, deterministic=deterministic)
        return out.float().square().sum()
    out, lse = fa3.attention_with_lse(*given, variant, deterministic=deterministic)
    return out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()


def gradients(
    variant: fa3.Variant, given: list[torch.Tensor], deterministic: bool = True
) -> list[torch.Tensor]:
    """Of q, k, v and the captured floating tensors, by a forward and a backward."""
    with with_captures(variant, given) as asked:
        found = torch.autograd.grad(loss(variant, *given, deterministic=deterministic), asked)
    return list(found)
