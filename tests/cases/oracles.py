"""Inputs whose result is known, and the one tolerance for those whose result is not.

Exact oracles, for q = 0 (every score is 0 before the variant changes it): the output of a row is
the mean of the visible rows of v and its LSE the logarithm of their number. With `ramp` as v the
mean is that of the visible indices, so that any key too many or too few shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from gradients import Parts, by_autograd, of_reference
from twin_cases import plain

import cutedsl_fa3 as fa3
from cutedsl_fa3 import reference

Result = tuple[torch.Tensor, torch.Tensor]
Sizes = tuple[int, int, int, int, int]  # batch, seqlen_q, seqlen_k, heads, kv_heads


def drawn(
    device: str,
    sizes: Sizes,
    dim: int = 64,
    dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normally distributed q, k, v, the same values on every device."""
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, length, count, width, generator=generator).to(device, dtype)
        for length, count, width in (
            (seqlen_q, heads, dim),
            (seqlen_k, kv_heads, dim),
            (seqlen_k, kv_heads, dim if dim_v is None else dim_v),
        )
    )
    return q, k, v


def ramp(
    device: str,
    sizes: Sizes,
    dim: int = 64,
    dtype: torch.dtype = torch.float16,
    period: int = 2048,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q = 0, random k, and v whose rows hold their own index; fp16 holds integers to 2,048."""
    q, k, v = drawn(device, sizes, dim, dtype=dtype)
    index = torch.arange(sizes[2], device=device) % period
    v.copy_(index.to(dtype)[None, :, None, None].expand_as(v))
    return torch.zeros_like(q), k, v


def ramp_means(visible: torch.Tensor, period: int = 2048) -> torch.Tensor:
    """The exact output of `ramp` for each row of `visible` (..., keys), 0 for empty rows."""
    index = torch.arange(visible.shape[-1], device=visible.device, dtype=torch.float64) % period
    counts = visible.sum(-1)
    return (visible * index).sum(-1) / counts.clamp(min=1)


def hold_ramp(result: Result, visible: torch.Tensor) -> None:
    """Hold every row of a `ramp` to its mean, to one rounding, and its LSE to the count.

    Shape: visible (seqlen_q, seqlen_k), the same for all heads and batch entries.
    """
    out, lse = result
    visible = visible.to(out.device)
    mean, counts = ramp_means(visible), visible.sum(-1).double()
    allowed = mean * torch.finfo(out.dtype).eps / 2 * 1.01  # 1%: fp32 sums and the division
    assert ((out.double() - mean[None, :, None, None]).abs() <= allowed[None, :, None, None]).all()
    expected = counts.log().expand_as(lse)
    assert torch.equal(lse == -math.inf, expected == -math.inf)
    some = expected != -math.inf
    assert ((lse.double() - expected)[some].abs() <= 1e-5).all()


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: fa3.Variant | None = None,
    scale: float | None = None,
) -> Result:
    """Output and LSE in fp64."""
    return reference.attention_with_lse(q, k, v, variant, scale=scale, dtype=torch.float64)


def hold(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: fa3.Variant | None = None,
    scale: float | None = None,
) -> Result:
    """Run, and hold to fp64: at most twice torch's error at the input dtype, plus one rounding."""
    out, lse = fa3.attention_with_lse(q, k, v, variant, scale=scale)
    wanted, wanted_lse = exact(q, k, v, variant, scale)
    if wanted.numel():
        error = (plain(q, k, v, variant, scale).double() - wanted).abs().max()
        allowed = 2 * error + torch.finfo(q.dtype).eps * wanted.abs().max()
        assert (out.double() - wanted).abs().max() <= allowed
    hold_lse(lse, wanted_lse)
    assert (out.transpose(1, 2)[wanted_lse == -math.inf] == 0).all()
    return out, lse


def hold_lse(lse: torch.Tensor, wanted: torch.Tensor) -> None:
    """Hold LSEs to 1e-4 of their size, ten times what a score's functions may be off by."""
    empty = wanted == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert ((lse.double() - wanted)[~empty].abs() <= 1e-4 * (1 + wanted[~empty].abs())).all()


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    return t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)


def same(here: Iterable[torch.Tensor], there: Iterable[torch.Tensor]) -> bool:
    """Whether all tensors are equal bit by bit."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(here, there, strict=True))


def positions(seqlen_q: int, seqlen_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(query, key) indices that broadcast to (seqlen_q, seqlen_k)."""
    return torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: fa3.Variant,
    do: torch.Tensor,
) -> Parts:
    """Gradients by name: q, k, v, and t0, t1, ... of the captured floats that get one."""
    found = by_autograd(fa3.attention, q, k, v, variant, (do, None))
    return {name: t for name, t in found.items() if name in "qkv" or t.any()}


def hold_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: fa3.Variant, seed: int = 11
) -> Parts:
    """Run backwards, and hold to fp64."""
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(*q.shape[:3], v.shape[3], generator=generator).to(q.device, q.dtype)
    found = gradients(q, k, v, variant, do)
    hold_parts(found, q, k, v, variant, do)
    return found


def hold_parts(
    found: Parts,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: fa3.Variant,
    do: torch.Tensor,
) -> None:
    """Hold gradients to fp64: at most twice torch's error, plus one rounding.

    Where dP and delta cancel, as with a single key, torch may have no error at all: the sums of
    head_dim products in fp32 that both are may still differ by their roundings.
    """
    wanted = of_reference(q, k, v, variant, (do, None))
    torchs = by_autograd(plain, q, k, v, variant, (do, None))
    # Delta is a sum over the rounded output, and its error is as one of the LSE's gradient.
    of_delta = {}
    if variant.has_lse:
        out = reference.attention(q, k, v, variant.without_epilogue(), dtype=torch.float64)
        rounded = (do.double() * out).abs().sum(-1).transpose(1, 2)
        of_delta = of_reference(q, k, v, variant, (torch.zeros_like(do), rounded))
    for name, part in found.items():
        right = wanted[name].double()
        error = (torchs[name].double() - right).abs().max()
        size = right.abs().max()
        if name not in "qkv" and of_delta:
            size = size + of_delta[name].abs().max()
        allowed = 2 * error + torch.finfo(q.dtype).eps * size
        if of_delta:
            rounding = torch.finfo(torch.float32).eps * v.shape[3]
            allowed = allowed + rounding * of_delta[name].double().abs().max()
        assert part.isfinite().all(), name
        assert (part.double() - right).abs().max() <= allowed, name
