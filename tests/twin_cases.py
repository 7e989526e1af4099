"""Variants, inputs and yardsticks that kernel, emulator and reference are compared on."""

from __future__ import annotations

import functools
import math

import torch

from cutedsl_fa3 import (
    Elementwise,
    OnlineSoftmax,
    Plan,
    Problem,
    Schedule,
    Variant,
    emulate,
    masks,
    reference,
    scores,
)
from cutedsl_fa3.problem import DTYPES
from cutedsl_fa3.variant.evaluate import evaluate

BATCH, HEADS, KV_HEADS = 2, 4, 2
LONGEST = 1024  # of the sequences that the variants' tables cover

# Built on approximate functions of the special-function unit: off by up to 1e-5 of their value.
APPROXIMATE = ("softcap", "sigmoid weights", "decayed weights", "gated output", "many functions")


def drawn(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, the same on every device."""
    generator = torch.Generator().manual_seed(seqlen_q * 1000003 + seqlen_k * 1009 + dim)
    shapes = (
        (batch, seqlen_q, heads, dim),
        (batch, seqlen_k, kv_heads, dim),
        (batch, seqlen_k, kv_heads, dim_v or dim),
    )
    q, k, v = (torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes)
    return q, k, v


@functools.cache
def variants(device: str = "cpu") -> dict[str, Variant]:
    """One variant of every kind, for HEADS heads, BATCH batch entries, lengths up to LONGEST."""
    generator = torch.Generator().manual_seed(0)

    def table(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    gates, biases, sinks = table(HEADS), table(HEADS), table(HEADS)
    distances = table(HEADS, 2 * LONGEST + 1)
    row_gates = table(BATCH, LONGEST, HEADS)
    documents = torch.arange(LONGEST, device=device, dtype=torch.int32) // 150
    shuffled = torch.randint(0, 3, (LONGEST,), generator=generator).to(device)
    prefixes = torch.tensor([70, 300], device=device)
    dropped = (torch.rand(LONGEST, generator=generator) < 0.3).to(device)
    scalar = torch.tensor(0.7, device=device)
    return {
        "plain": Variant(),
        "causal": Variant(mask=masks.causal),
        "window": Variant(mask=masks.window(100, 30)),
        "prefix": Variant(mask=masks.or_masks(masks.causal, masks.prefix(prefixes))),
        "documents": Variant(mask=masks.and_masks(masks.causal, masks.documents(documents))),
        "unsorted documents": Variant(mask=lambda b, h, q, k: shuffled[q] == shuffled[k]),
        "chunks": Variant(mask=lambda b, h, q, k: (q // 100 == k // 100) & (k <= q)),
        "dilated": Variant(mask=lambda b, h, q, k: ((q - k) % 3 == 0) & (k <= q)),
        "window by head": Variant(mask=lambda b, h, q, k: (q - k < 50 * (h + 1)) & (k <= q)),
        "dropped keys": Variant(mask=lambda b, h, q, k: ~dropped[k]),
        "nothing seen": Variant(mask=masks.none),
        "softcap": Variant(scores.softcap(20.0), masks.causal),
        "alibi": Variant(scores.alibi(slopes), masks.causal),
        "relative bias": Variant(scores.relative_bias(distances)),
        "score with -inf": Variant(lambda s, b, h, q, k: torch.where(k <= q, s - 0.1, -math.inf)),
        "many functions": Variant(
            lambda s, b, h, q, k: torch.exp(-torch.abs(s)) + torch.cos(s) * torch.sqrt(k + 1.0) / 9
        ),
        "sink": Variant(mask=masks.causal, softmax=OnlineSoftmax(sinks)),
        "one sink": Variant(mask=masks.window(40, 0), softmax=OnlineSoftmax(scalar)),
        "relu weights": Variant(mask=masks.causal, softmax=Elementwise(torch.relu)),
        "sigmoid weights": Variant(
            lambda s, b, h, q, k: s + biases[h], masks.causal, Elementwise(torch.sigmoid)
        ),
        "decayed weights": Variant(
            lambda s, b, h, q, k: s * torch.exp(-0.01 * torch.abs(q - k)),
            masks.window(200, 0),
            Elementwise(lambda s: s),
        ),
        "scaled heads": Variant(mask=masks.causal, epilogue=lambda o, lse, b, h, q: o * gates[h]),
        "gated output": Variant(
            mask=masks.causal,
            softmax=OnlineSoftmax(sinks),
            epilogue=lambda o, lse, b, h, q: o * torch.sigmoid(row_gates[b, q, h] + lse),
        ),
    }


def hold_to_torch(
    found: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    scale: float | None = None,
) -> None:
    """One tolerance rule: at most twice torch's error at the input dtype, plus one rounding."""
    (out, lse), given = found, (q, k, v, variant)
    exact, exact_lse = reference.attention_with_lse(*given, scale=scale, dtype=torch.float64)
    error = (plain(*given, scale).double() - exact).abs().max()
    allowed = 2 * error + torch.finfo(q.dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= allowed
    empty = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert (out.transpose(1, 2)[empty] == 0).all()
    # Ten times what the approximate functions of a score may be off by (variant/lower.py).
    assert ((lse.double() - exact_lse)[~empty].abs() <= 1e-4 * (1 + exact_lse[~empty].abs())).all()


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The same attention as torch computes it at the input type: products and P rounded to it."""
    variant = Variant() if variant is None else variant
    scale = q.shape[3] ** -0.5 if scale is None else scale
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    outs = []
    for b in range(q.shape[0]):
        s = torch.einsum("qhd,khd->hqk", q[b], k[b]).float() * scale
        at = {
            "b": b,
            "h": torch.arange(s.shape[0], device=s.device)[:, None, None],
            "q": torch.arange(s.shape[1], device=s.device)[:, None],
            "k": torch.arange(s.shape[2], device=s.device),
            "seqlen_q": s.shape[1],
            "seqlen_k": s.shape[2],
        }
        o = _weighted(variant, s, v[b].to(q.dtype), at)
        outs.append(o.to(q.dtype).transpose(0, 1))
    return torch.stack(outs)


def _weighted(variant: Variant, s: torch.Tensor, v: torch.Tensor, at: dict) -> torch.Tensor:
    """From products (heads, rows, keys) to outputs (heads, rows, dim), each step in torch."""
    captures, visible = variant.captures, torch.ones((), dtype=torch.bool, device=s.device)
    if variant.mask is not None:
        visible = evaluate(variant.mask, at, captures)
    if variant.score is not None:
        s = evaluate(variant.score, {"score": s, **at}, captures).expand(s.shape)
    if variant.weight is not None:
        p = torch.where(visible, evaluate(variant.weight, {"score": s, **at}, captures), 0.0)
        o, lse = torch.einsum("hqk,khd->hqd", p.to(v.dtype), v), None
    else:
        s = torch.where(visible, s, -math.inf)
        sink = torch.full((s.shape[0],), -math.inf, device=s.device)
        if variant.sink is not None:
            sink = captures[variant.sink].float().expand(s.shape[0])
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:2], 1)], -1)
        p, lse = torch.softmax(s, -1)[..., :-1].nan_to_num(0.0), torch.logsumexp(s, -1, True)
        o = torch.einsum("hqk,khd->hqd", p.to(v.dtype), v)
    if variant.epilogue is not None:
        given = {"o": o.float(), **at} if lse is None else {"o": o.float(), "lse": lse, **at}
        o = evaluate(variant.epilogue, given, captures)
    return o


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and LSE (None where there is none) of the reference in fp64."""
    if variant is None or variant.has_lse:
        return reference.attention_with_lse(q, k, v, variant, scale=scale, dtype=torch.float64)
    return reference.attention(q, k, v, variant, scale=scale, dtype=torch.float64), None


def emulated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    schedule: Schedule | None = None,
    scale: float | None = None,
) -> emulate.Emulated:
    """The twin of the plan for these tensors, with any schedule that can be written down."""
    variant = Variant() if variant is None else variant
    dtype = next(name for name, dtype in DTYPES.items() if dtype == q.dtype)
    problem = Problem(dtype, q.shape[3], v.shape[3])
    plan = Plan(variant, problem, schedule) if schedule else Plan.default(variant, problem)
    return emulate.run(plan, q, k, v, q.shape[3] ** -0.5 if scale is None else scale)


def same(a: emulate.Emulated, b: emulate.Emulated) -> bool:
    """Bitwise, NaN equal to NaN."""
    pairs = zip(a, b, strict=True)
    return all(x is y or torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in pairs)
