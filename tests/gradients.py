"""Gradients of the CPU twin, of the reference and of plain torch, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cutedsl_fa3 import Variant, backward, reference

F64 = torch.float64
Parts = dict[str, torch.Tensor]  # by name: q, k, v, and t0, t1, ... for captured tensors


@contextmanager
def captured_leaves(variant: Variant) -> Iterator[dict[int, torch.Tensor]]:
    """The captured floating tensors by number, while they require gradients."""
    floats = {i: t for i, t in enumerate(variant.captures) if t.is_floating_point()}
    for t in floats.values():
        t.requires_grad_()
    try:
        yield floats
    finally:
        for t in floats.values():
            t.requires_grad_(False)


def by_autograd(
    function: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    upstream: tuple[torch.Tensor, torch.Tensor | None],
) -> Parts:
    """torch's gradients of what `function(q, k, v, variant)` returns, an output or (out, lse)."""
    with captured_leaves(variant) as leaves:
        given = [t.detach().requires_grad_() for t in (q, k, v)]
        found = function(*given, variant)
        found = found if isinstance(found, tuple) else (found,)
        pairs = [
            (t, g.to(t.dtype))
            for t, g in zip(found, upstream, strict=False)
            if t is not None and g is not None
        ]
        names = [*"qkv", *(f"t{i}" for i in leaves)]
        inputs = [*given, *leaves.values()]
        pairs = [(t, g) for t, g in pairs if t.requires_grad]  # without queries nothing does
        wanted: Any = [None] * len(inputs)
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            wanted = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    return {
        name: torch.zeros_like(t) if g is None else g
        for name, t, g in zip(names, inputs, wanted, strict=True)
    }


def of_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    upstream: tuple[torch.Tensor, torch.Tensor | None],
) -> Parts:
    """The reference's gradients in fp64; upstream is (do, dlse)."""

    def function(*given: Any) -> Any:
        if upstream[1] is None or not variant.has_lse:
            return reference.attention(*given, dtype=F64)
        return reference.attention_with_lse(*given, dtype=F64)

    return by_autograd(function, q, k, v, variant, upstream)


def of_twin(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    upstream: tuple[torch.Tensor, torch.Tensor | None],
    tile: tuple[int, int] = backward.TILE,
) -> Parts:
    """The twin's gradients from the exact output, rounded to q's type."""
    raw = variant.without_epilogue()
    o = reference.attention(q, k, v, raw, dtype=F64).to(q.dtype)
    lse = None
    if variant.has_lse:
        lse = reference.attention_with_lse(q, k, v, raw, dtype=F64)[1]
        lse = lse if q.dtype == F64 else lse.float()
    floats = [i for i, t in enumerate(variant.captures) if t.is_floating_point()]
    scale = q.shape[3] ** -0.5
    found = backward.run(q, k, v, variant, o, lse, *upstream, scale=scale, wanted=floats, tile=tile)
    captures = {f"t{i}": g for i, g in found.captures.items()}
    return {"q": found.q, "k": found.k, "v": found.v, **captures}


def upstream_of(
    q: torch.Tensor, v: torch.Tensor, variant: Variant, seed: int = 7
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random gradients of an output and, where there is one, of its LSE."""
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(*q.shape[:3], v.shape[3], generator=generator).to(q.dtype)
    if not variant.has_lse:
        return do, None
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator)
    return do, dlse.to(F64 if q.dtype == F64 else torch.float32)
