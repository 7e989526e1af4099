"""Attention in plain torch from the same Variant: dense, exact, as precise as asked for.

It is the oracle that kernels are tested against, so it shares nothing with them but the graph of
the variant. Memory stays bounded by working through a few rows and heads at a time.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator

import torch

from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.evaluate import evaluate

SCORES_AT_ONCE = 1 << 24  # elements of one block of scores: 128 MiB in float64, held a few times


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The attention output, computed and returned in `dtype`.

    Differentiable in q, k, v and in captured tensors, the sink among them.

    Shape: q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim),
        v (batch, seqlen_k, kv_heads, head_dim_v) -> (batch, seqlen_q, heads, head_dim_v).
    Units: scale is natural and defaults to 1 / sqrt(head_dim).
    Raises: ValueError for shapes or dtypes that do not fit together, a variant that is no Variant,
        a sink of another number of heads and a scale that is no finite number.
    """
    return _attention(q, k, v, variant, scale, dtype)[0]


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention output and the log of each row's sum of exponentials, a sink included.

    A row that sees no key has output 0 (which an epilogue may change) and LSE -inf, or the sink.
    NaN and infinities in a key or value reach the rows that see it, and no others; a score of -inf
    hides a key as a mask does, except from Elementwise weights.

    Shape: as `attention`; LSE (batch, heads, seqlen_q), natural logarithm, in `dtype`.
    Raises: ValueError as `attention` does, and for Elementwise weights, which have no LSE.
    """
    if isinstance(variant, Variant) and not variant.has_lse:
        raise ValueError(
            "attention_with_lse is given a variant with Elementwise weights, which are not "
            "normalised and have no LSE; valid are variants with OnlineSoftmax, and attention"
        )
    out, lse = _attention(q, k, v, variant, scale, dtype)
    assert lse is not None
    return out, lse


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None,
    scale: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and, where the variant has one, LSE."""
    _check(q, k, v, dtype)
    _check_options(variant, scale)
    variant = Variant() if variant is None else variant
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    batch, seqlen_q, heads, _ = q.shape
    sink = _sink(variant, heads, q.device, dtype)
    out = torch.zeros(batch, seqlen_q, heads, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.zeros(batch, heads, seqlen_q, dtype=dtype, device=q.device)
    group = heads // k.shape[2] if heads else 1
    for b, head, rows in _blocks(batch, heads, seqlen_q, k.shape[1]):
        keys, values = (x[b, :, [h // group for h in head]].to(dtype) for x in (k, v))
        at = torch.arange(rows.start, rows.stop, device=q.device)
        positions = _positions(b, head, at, seqlen_q, k.shape[1])
        queries, of_head = q[b, rows][:, head].to(dtype), sink[head.start : head.stop]
        o, l = _block(variant, queries, keys, values, positions, of_head, scale)
        out[b, rows, head.start : head.stop] = o.transpose(0, 1)
        if l is not None:
            lse[b, head.start : head.stop, rows] = l.squeeze(-1)
    return out, lse if variant.has_lse else None


def rows_of_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    place: tuple[int, int, torch.Tensor],
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and LSE (None where the variant has none) of some rows of one batch entry and head.

    `place` is (batch, head, rows): what a long sequence costs is len(rows) * seqlen_k scores.

    Shape: as `attention`; rows (n,) -> (n, head_dim_v), (n,).
    """
    (b, head, rows), heads = place, q.shape[2]
    queries = q[b, rows, head][:, None].to(dtype)
    kv_head = head // (heads // k.shape[2])
    keys, values = (x[b, :, kv_head : kv_head + 1].to(dtype) for x in (k, v))
    positions = _positions(b, range(head, head + 1), rows, q.shape[1], k.shape[1])
    sink = _sink(variant, heads, q.device, dtype)[head : head + 1]
    o, l = _block(variant, queries, keys, values, positions, sink, scale)
    return o[0], None if l is None else l[0, :, 0]


def rounded_rows_of_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    place: tuple[int, int, torch.Tensor],
    *,
    scale: float,
) -> torch.Tensor:
    """The same rows as plain torch gives them at the input dtype: scores and P are rounded to it.

    Values that are not finite count as 0: where they are seen, fp64 is not finite either.

    Shape: (len(rows), head_dim_v).
    """
    b, head, rows = place
    kv_head = head // (q.shape[2] // k.shape[2])
    scores = (q[b, rows, head] @ k[b, :, kv_head].T).float() * scale
    at = {
        "b": b,
        "h": head,
        "q": rows[:, None],
        "k": torch.arange(k.shape[1], device=q.device),
        "seqlen_q": q.shape[1],
        "seqlen_k": k.shape[1],
    }
    captures, visible = variant.captures, torch.ones_like(scores, dtype=torch.bool)
    if variant.mask is not None:
        visible = evaluate(variant.mask, at, captures).expand(scores.shape)
    if variant.score is not None:
        scores = evaluate(variant.score, {"score": scores, **at}, captures).expand(scores.shape)
    lse = None
    if variant.weight is not None:
        weights = evaluate(variant.weight, {"score": scores, **at}, captures)
        weights = weights.expand(scores.shape).masked_fill(~visible, 0.0)
    else:
        scores = scores.masked_fill(~visible, -math.inf)
        if variant.sink is not None:
            sink = captures[variant.sink].to(q.device, torch.float32).expand(q.shape[2])[head]
            scores = torch.cat([scores, sink.expand(len(rows), 1)], -1)  # one more, of no key
        lse = torch.logsumexp(scores, -1, keepdim=True)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)[:, : k.shape[1]]
    values = v[b, :, kv_head].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    o = (weights.to(v.dtype) @ values).float()
    if variant.epilogue is not None:
        given = {"o": o, **at} if lse is None else {"o": o, "lse": lse, **at}
        o = evaluate(variant.epilogue, given, captures).expand(o.shape)
    return o.to(q.dtype)


def _block(
    variant: Variant,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: dict[str, torch.Tensor | int],
    sink: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output (heads, rows, head_dim_v) and LSE (heads, rows, 1) of some rows of some heads.

    Shape: queries (rows, heads, head_dim), keys (seqlen_k, heads, head_dim), values likewise, sink
        (heads,).
    """
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    scores, visible = _varied(variant, scores, positions)
    if variant.weight is None:
        scores = torch.where(visible, scores, -math.inf)
        o, l = _softmax(scores, values, sink[:, None, None])
    else:
        weights = _evaluated(variant, "weight", {"score": scores, **positions}, visible)
        o, l = _weighted(torch.where(visible, weights, 0.0), visible, values), None
    if variant.epilogue is not None:
        given = {"o": o, **positions} if l is None else {"o": o, "lse": l, **positions}
        o = _evaluated(variant, "epilogue", given, torch.ones_like(o, dtype=torch.bool))
    return o, l


def _sink(variant: Variant, heads: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """One more logit for each head; -inf, which weighs nothing, without a sink."""
    if variant.sink is None:
        return torch.full((heads,), -math.inf, dtype=dtype, device=device)
    sink = variant.captures[variant.sink]
    if sink.ndim and sink.shape[0] != heads:
        raise ValueError(
            f"the variant's sink has shape {tuple(sink.shape)} and q has {heads} heads; valid are "
            f"shapes () and ({heads},)"
        )
    return sink.to(device, dtype).expand(heads)


def _blocks(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int
) -> Iterator[tuple[int, range, slice]]:
    """Batch entry, heads and rows of pieces whose scores fit SCORES_AT_ONCE."""
    keys = max(1, seqlen_k)
    rows = max(1, min(seqlen_q, SCORES_AT_ONCE // keys))
    together = max(1, SCORES_AT_ONCE // (rows * keys))
    for b in range(batch):
        for h in range(0, heads, together):
            for row in range(0, seqlen_q, rows):
                end = min(row + rows, seqlen_q)
                yield b, range(h, min(h + together, heads)), slice(row, end)


def _positions(
    b: int, heads: range, rows: torch.Tensor, seqlen_q: int, seqlen_k: int
) -> dict[str, torch.Tensor | int]:
    """The inputs of a graph for scores (heads, rows, keys), without the score."""
    return {
        "b": b,
        "h": torch.arange(heads.start, heads.stop, device=rows.device)[:, None, None],
        "q": rows[:, None],
        "k": torch.arange(seqlen_k, device=rows.device),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
    }


def _varied(
    variant: Variant, scores: torch.Tensor, positions: dict[str, torch.Tensor | int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores after the variant's score function, and the keys that its mask shows.

    Shape: both as `scores`; what the scores are at hidden keys has no meaning.
    """
    visible = torch.ones((), dtype=torch.bool, device=scores.device)
    if variant.mask is not None:
        visible = evaluate(variant.mask, positions, variant.captures)
    visible = torch.broadcast_to(visible, scores.shape)
    if variant.score is not None:
        scores = _evaluated(variant, "score", {"score": scores, **positions}, visible)
    return scores, visible


def _evaluated(
    variant: Variant,
    role: str,
    inputs: dict[str, torch.Tensor | int],
    visible: torch.Tensor,
) -> torch.Tensor:
    """A graph's value for each of the scores or outputs that come first among its inputs."""
    name, value = next(iter(inputs.items()))
    # Hidden scores are taken out: a derivative that is not finite there goes no further.
    given = {**inputs, name: torch.where(visible, value, 0.0)}
    changed = evaluate(
        variant.graphs[role], given, variant.captures, dtype=value.dtype, visible=visible
    )
    return torch.broadcast_to(changed, value.shape)


def _softmax(
    scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; a key of score -inf takes no part, whatever its value holds.

    Shape: scores (heads, rows, keys), values (keys, heads, head_dim_v), sink (heads, 1, 1) ->
        (heads, rows, head_dim_v), (heads, rows, 1).
    """
    highest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, True) - math.inf
    row_max = torch.maximum(highest, sink)
    finite_max = row_max.masked_fill(row_max == -math.inf, 0)
    weights = torch.exp(scores - finite_max)
    takes_all = (sink == math.inf) & (highest < math.inf)
    row_sum = weights.sum(-1, True) + torch.where(takes_all, 1.0, torch.exp(sink - finite_max))
    finite = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    out = torch.einsum("hqk,khd->hqd", weights, finite)
    if not torch.equal(finite, values):
        seen = (scores != -math.inf).to(values.dtype)
        for kind in (values.isnan(), values == math.inf, values == -math.inf):
            hits = torch.einsum("hqk,khd->hqd", seen, kind.to(values.dtype)) > 0
            extreme = values[kind][:1].sum() if kind.any() else 0.0
            out = torch.where(hits, out + extreme, out)
    empty = highest == -math.inf
    lse = torch.where(empty, sink, row_max + torch.log(torch.where(empty, 1.0, row_sum)))
    return torch.where(empty, 0.0, out / torch.where(empty, 1.0, row_sum)), lse


def _weighted(weights: torch.Tensor, visible: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The sum of weight * value over visible keys, each product as floating point has it.

    Shape: weights and visible (heads, rows, keys), values (keys, heads, head_dim_v) ->
        (heads, rows, head_dim_v).
    """
    odd = ~values.isfinite().all(-1).all(-1)
    plain = values.masked_fill(odd[:, None, None], 0.0)
    out = torch.einsum("hqk,khd->hqd", weights.masked_fill(odd, 0.0), plain)
    for key in odd.nonzero().flatten().tolist():
        product = weights[..., key, None] * values[key][:, None, :]
        out = out + torch.where(visible[..., key, None], product, 0.0)
    return out


def _check_options(variant: object, scale: object) -> None:
    if variant is not None and not isinstance(variant, Variant):
        hint = "; make one of a function, as in Variant(mask=...)" if callable(variant) else ""
        raise ValueError(f"variant is {variant!r}; valid are a Variant and None{hint}")
    if scale is None:
        return
    number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not number or not math.isfinite(scale):
        raise ValueError(f"scale is {scale!r}; valid are finite numbers, and None for the default")


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; valid are 4 dimensions "
                "(batch, seqlen, heads, head_dim)"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; valid are floating point dtypes")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}; valid is q's device, {q.device}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype is {dtype}; valid are torch.float32 and torch.float64")
    rules = (
        ("k", "batch", k.shape[0], q.shape[0], "q's"),
        ("v", "batch", v.shape[0], q.shape[0], "q's"),
        ("v", "seqlen_k", v.shape[1], k.shape[1], "k's"),
        ("v", "kv_heads", v.shape[2], k.shape[2], "k's"),
        ("k", "head_dim", k.shape[3], q.shape[3], "q's"),
    )
    for name, what, given, needed, whose in rules:
        if given != needed:
            raise ValueError(f"{name} has {what} {given}; valid is {whose} {what}, {needed}")
    if q.shape[3] == 0:
        raise ValueError("q has head_dim 0; valid is at least 1")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}; valid are kv_heads that divide heads"
        )
