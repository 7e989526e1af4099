"""Scores: what replaces a score before the softmax; each makes a function for `Variant(score=...)`.

A score function takes (s, b, h, q, k) with s = scale * <query, key>, in natural units. Distances
are counted from the position of the query, aligned at the bottom right as masks are: query i stands
at key position i + (seqlen_k - seqlen_q). Captured tensors are read at each launch, so that
learned ones need no new Variant; they must be on the device of q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import arguments
from .errors import VariantError
from .variant import seqlen_k, seqlen_q

Score = Callable[[Any, Any, Any, Any, Any], Any]

_FP32 = torch.finfo(torch.float32)


def _distance(q: Any, k: Any) -> Any:
    """How far a key lies before the query; negative after it."""
    return q + (seqlen_k - seqlen_q) - k


def alibi(slopes: torch.Tensor) -> Score:
    """Adds -slope * |distance|; `alibi_slopes` makes the slopes of the paper.

    Under a causal mask this differs from `+ slope * k` in the LSE, not in the output.

    Shape: slopes (heads,) or (batch, heads), float32.
    Raises: VariantError for another type, shape or dtype; fp16 and bf16 slopes would lose bits
        silently.
    Source: Press et al. 2022, arXiv:2108.12409.
    """
    floats = isinstance(slopes, torch.Tensor) and slopes.is_floating_point()
    if floats and slopes.dtype != torch.float32:
        lossy = slopes.dtype != torch.float64
        raise VariantError(
            f"scores.alibi: slopes are {str(slopes.dtype)[6:]}; valid is float32: "
            + (
                "make them in it (a later .float() does not bring the bits back)"
                if lossy
                else "give slopes.float(), made outside"
            )
        )
    arguments.tensor(
        "scores.alibi", "slopes", slopes, (torch.float32,), "(heads,)", "(batch, heads)"
    )

    def biased(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return s - slope * torch.abs(_distance(q, k))

    return biased


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The paper's slopes: 2^(-8 i / n) for heads 1 to n, n a power of two.

    Further heads take every second of the slopes for 2n heads.

    Shape: (heads,), float32.
    Raises: VariantError for what is no int from 1.
    Source: Press et al. 2022, arXiv:2108.12409, section 3 and its code.
    """
    count = arguments.integer("scores.alibi_slopes", "heads", heads, 1)
    even = 1 << (count.bit_length() - 1)
    exponents = [-8 * i / even for i in range(1, even + 1)]
    exponents += [-4 * i / even for i in range(1, 2 * (count - even), 2)]
    return torch.tensor([2.0**e for e in exponents], dtype=torch.float32, device=device)


def softcap(cap: float) -> Score:
    """Bounds scores smoothly: cap * tanh(s / cap); 0 leaves them as they are.

    Raises: VariantError for a negative cap, one that is no normal fp32 value, and what is no
        number.
    """
    if not arguments.is_number(cap) or not (cap == 0 or _FP32.tiny <= cap <= _FP32.max):
        raise VariantError(
            f"scores.softcap: cap is {cap!r}; valid are positive numbers from {_FP32.tiny:.3g} to "
            f"{_FP32.max:.3g} (fp32), and 0 for no cap"
        )
    if cap == 0:
        return lambda s, b, h, q, k: s
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap)


def bias(table: torch.Tensor) -> Score:
    """Adds table[b, h, q, k], raw indices: any bias that is at hand as a tensor.

    Shape: (seqlen_q, seqlen_k), (heads, seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k),
        float.
    Raises: VariantError for another type, shape or dtype.
    """
    arguments.tensor(
        "scores.bias",
        "table",
        table,
        arguments.FLOATS,
        "(seqlen_q, seqlen_k)",
        "(heads, seqlen_q, seqlen_k)",
        "(batch, heads, seqlen_q, seqlen_k)",
    )
    return lambda s, b, h, q, k: s + table[(*(b, h)[4 - table.ndim :], q, k)]


def relative_bias(table: torch.Tensor) -> Score:
    """Adds table[h, k - q + center], raw indices, for relative positions within the table.

    Shape: table (heads, 2 * center + 1), center being the farthest distance that is visible.
    Raises: VariantError for another type or shape.
    """
    shape = "(heads, 2 * center + 1)"
    arguments.tensor("scores.relative_bias", "table", table, arguments.FLOATS, shape)
    if table.shape[1] % 2 == 0:
        raise VariantError(
            f"scores.relative_bias: table has shape {tuple(table.shape)}; valid is "
            f"{shape}, an odd number of relative positions"
        )
    center = table.shape[1] // 2
    return lambda s, b, h, q, k: s + table[h, k - q + center]


def t5_bias(weight: torch.Tensor, *, bidirectional: bool, max_distance: int = 128) -> Score:
    """Adds weight[bucket, h], the bucket growing with the logarithm of the distance.

    `weight` is laid out as T5's embedding. Half of the buckets, of each direction if
    `bidirectional`, hold one distance each; the others grow up to `max_distance`. Which bucket a
    distance falls into is settled here, once, so that no device rounds it otherwise.

    Shape: weight (buckets, heads), float; an even number of buckets from 4.
    Raises: VariantError for another type, shape or dtype, and a `max_distance` that leaves no room
        for growing buckets.
    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1 and its code.
    """
    name = "scores.t5_bias"
    arguments.tensor(name, "weight", weight, arguments.FLOATS, "(buckets, heads)")
    if not isinstance(bidirectional, bool):
        raise VariantError(f"{name}: bidirectional is {bidirectional!r}; valid are True and False")
    buckets = weight.shape[0]
    if buckets < 4 or buckets % 2:
        raise VariantError(f"{name}: weight has {buckets} buckets; valid are even numbers from 4")
    exact = buckets // (4 if bidirectional else 2)
    farthest = arguments.integer(name, "max_distance", max_distance, exact + 1)
    distances = torch.arange(-farthest, farthest + 1)
    bucket = _t5_buckets(distances, buckets, bidirectional, farthest).int().to(weight.device)

    def biased(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = torch.clamp(_distance(q, k), -farthest, farthest)
        return s + weight[bucket[distance + farthest], h]

    return biased


def _t5_buckets(
    distances: torch.Tensor, buckets: int, bidirectional: bool, farthest: int
) -> torch.Tensor:
    """T5's bucket of each distance (positive before the query)."""
    first = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        first = torch.where(distances < 0, buckets, 0)
        distances = distances.abs()
    distances = distances.clamp_min(0)
    exact = buckets // 2
    # T5 takes fp32 logarithms, and a bucket begins where they say so.
    ratio = torch.log(distances.float() / exact) / math.log(farthest / exact)
    grown = (exact + (ratio.clamp_min(0) * (buckets - exact)).long()).clamp_max(buckets - 1)
    return first + torch.where(distances < exact, distances, grown)


def temperature(value: torch.Tensor | float) -> Score:
    """Divides scores by a temperature: a number, or a tensor that may be learned.

    Shape: float, () or (heads,), float.
    Raises: VariantError for another type, shape or dtype, and a number that is not positive.
    """
    if isinstance(value, torch.Tensor):
        arguments.tensor("scores.temperature", "value", value, arguments.FLOATS, "()", "(heads,)")
        return lambda s, b, h, q, k: s / (value[h] if value.ndim else value)
    if not arguments.is_number(value) or not _FP32.tiny <= value <= _FP32.max:
        raise VariantError(
            f"scores.temperature: value is {value!r}; valid are positive fp32 numbers, and a "
            "tensor of shape () or (heads,)"
        )
    return lambda s, b, h, q, k: s / value


def log_length(trained: int) -> Score:
    """Multiplies scores by log(n) / log(trained) once a query has n > trained keys up to its own.

    Raises: VariantError for what is no int from 2.
    Source: Chiang and Cholak 2022, arXiv:2202.12172.
    """
    length = arguments.integer("scores.log_length", "trained", trained, 2)

    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        keys = torch.clamp(_distance(q, 0) + 1, min=length)
        return s * (torch.log(keys.float()) / math.log(length))

    return scaled


def decay(rates: torch.Tensor) -> Score:
    """Multiplies scores by rate ** |distance|, for weights that no softmax follows.

    With `softmax=Elementwise(lambda s: s)` and a causal mask this is retention; a softmax would
    rather take `alibi` with slopes -log(rate).

    Shape: rates (heads,), float32, between 0 and 1.
    Raises: VariantError for another type, shape or dtype.
    Source: Sun et al. 2023, arXiv:2307.08621.
    """
    arguments.tensor("scores.decay", "rates", rates, (torch.float32,), "(heads,)")

    def decayed(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * torch.exp2(torch.log2(rates[h]) * torch.abs(_distance(q, k)))

    return decayed


def chain(*scores: Score) -> Score:
    """Applies scores one after the other, the first one first.

    Raises: VariantError for an argument that is no score function.
    """
    for i, score in enumerate(scores):
        if not callable(score):
            raise VariantError(
                f"scores.chain: argument {i} is {score!r}; valid are functions "
                "score(s, b, h, q, k), each an argument of its own"
            )

    def applied(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for score in scores:
            s = score(s, b, h, q, k)
        return s

    return applied
