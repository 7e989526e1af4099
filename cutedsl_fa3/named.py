"""Variants by name, for the command line and the benchmark; a name may carry numbers.

    full   causal   window:1024,0   prefix:256   documents:1000
    alibi   bias   softcap:30   sigmoid   sink   laborious

All but `full` and `window` are causal, `prefix` but for the first keys, and `window` where its
second number is 0; -1 leaves a side of a window unbounded. The number of `documents` is their mean
length; they and the values of `bias` and `sink` are random, and the same every time. The same
functions serve every kernel that takes them; what a kernel with fixed options needs to know
(`causal`, `window`, `softcap`, `sink`) stands beside them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from . import masks, scores
from .variant import Elementwise, OnlineSoftmax, Variant

AT_ONCE = 1 << 22  # pairs whose visibility is looked at together


@dataclass(frozen=True)
class Lengths:
    """What a variant's captured tensors and raw indices depend on."""

    heads: int
    seqlen_q: int
    seqlen_k: int
    device: str = "cpu"

    @property
    def offset(self) -> int:
        """What aligns the last query with the last key."""
        return self.seqlen_k - self.seqlen_q


@dataclass(frozen=True)
class Named:
    """One variant, said in the three ways that kernels accept.

    `variant` is ours; `score` and `mask` are FlexAttention's functions on raw indices, for these
    lengths; `causal`, `window` (left, right; inclusive, None is unbounded), `softcap` and `sink`
    are the options of kernels without functions. `only_functions` marks what no option expresses.
    `weight` takes the place of the softmax; `pairs` is how many are visible, where that is known
    without looking at each.

    Shape: sink (heads,).
    """

    name: str
    variant: Variant
    score: Callable | None = None
    mask: Callable | None = None
    weight: Callable | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    sink: torch.Tensor | None = None
    only_functions: bool = False
    pairs: int | None = None


def named(name: str, lengths: Lengths) -> Named:
    """The variant of this name for these lengths.

    Raises: ValueError for an unknown name or numbers that the name does not take.
    """
    kind, _, text = name.partition(":")
    if kind not in _BUILDERS:
        raise ValueError(f"variant {name!r} is unknown; known: {', '.join(EXAMPLES)}")
    build, defaults = _BUILDERS[kind]
    given = text.split(",") if text else list(defaults)
    try:
        numbers = [type(usual)(part) for usual, part in zip(defaults, given, strict=True)]
    except ValueError:
        example = f"{kind}:{','.join(map(str, defaults))}" if defaults else kind
        raise ValueError(f"variant {name!r}: give its numbers as in {example!r}") from None
    return build(name, lengths, *numbers)


@lru_cache(maxsize=256)
def visible_pairs(name: str, lengths: Lengths) -> float:
    """How many (query, key) pairs a variant computes; by convention causal is half of all."""
    chosen = named(name, lengths)
    pairs = float(lengths.seqlen_q * lengths.seqlen_k)
    if chosen.mask is None:
        return pairs
    if chosen.causal and chosen.window is None:
        return pairs / 2
    return float(_counted(chosen.mask, lengths) if chosen.pairs is None else chosen.pairs)


def _counted(mask: Callable, lengths: Lengths) -> int:
    """The pairs that a mask shows, looked at a few rows at a time."""
    k = torch.arange(lengths.seqlen_k)
    rows = torch.arange(lengths.seqlen_q)[:, None].split(max(1, AT_ONCE // lengths.seqlen_k))
    return sum(int(mask(0, 0, q, k).sum()) for q in rows)


def _causal_mask(lengths: Lengths) -> Callable:
    offset = lengths.offset
    return lambda b, h, q, k: k <= q + offset


def _full(name: str, lengths: Lengths) -> Named:
    return Named(name, Variant())


def _causal(name: str, lengths: Lengths) -> Named:
    return Named(name, Variant(mask=masks.causal), mask=_causal_mask(lengths), causal=True)


def _alibi(name: str, lengths: Lengths) -> Named:
    heads = torch.arange(1, lengths.heads + 1, device=lengths.device, dtype=torch.float32)
    slopes = torch.exp2(-8.0 * heads / lengths.heads)

    def score(s, b, h, q, k):
        return s + slopes[h] * (k - q)

    return Named(
        name,
        Variant(score=score, mask=masks.causal),
        score=score,
        mask=_causal_mask(lengths),
        causal=True,
        only_functions=True,
    )


def _softcap(name: str, lengths: Lengths, cap: float) -> Named:
    if not math.isfinite(cap):
        raise ValueError(f"variant {name!r}: a cap is a finite number, as in 'softcap:30'")
    score = scores.softcap(cap)
    return Named(
        name,
        Variant(score=score, mask=masks.causal),
        score=score,
        mask=_causal_mask(lengths),
        causal=True,
        softcap=cap,
    )


def _window(name: str, lengths: Lengths, left: int, right: int) -> Named:
    variant, offset = Variant(mask=masks.window(left, right)), lengths.offset  # refuses sizes < -1
    if left == right == -1:
        return Named(name, variant)

    def mask(b, h, q, k):
        if left == -1:
            return k <= q + (offset + right)
        if right == -1:
            return k >= q + (offset - left)
        return (k >= q + (offset - left)) & (k <= q + (offset + right))

    sides = (None if left == -1 else left, None if right == -1 else right)
    return Named(name, variant, mask=mask, causal=right == 0, window=sides)


def _prefix(name: str, lengths: Lengths, length: int) -> Named:
    causal = _causal_mask(lengths)

    def mask(b, h, q, k):
        return (k < length) | causal(b, h, q, k)

    variant = Variant(mask=masks.or_masks(masks.prefix(length), masks.causal))
    return Named(name, variant, mask=mask, only_functions=True)


def _documents(name: str, lengths: Lengths, mean: int) -> Named:
    if mean < 1:
        raise ValueError(f"variant {name!r}: a mean length is at least 1, as in 'documents:1000'")
    starts = torch.tensor(_cuts(lengths.seqlen_k, mean))
    ids = torch.bucketize(torch.arange(lengths.seqlen_k), starts, right=True) - 1
    position = torch.arange(lengths.seqlen_q) + lengths.offset
    own = torch.where(position < 0, -1, ids[position.clamp_min(0)])
    shown = torch.where(own < 0, 0, position - starts[own.clamp_min(0)] + 1)
    # One tensor where the lengths are equal, as documents are usually written.
    of_key = ids.to(lengths.device, torch.int32)
    of_query = of_key if lengths.offset == 0 else own.to(lengths.device, torch.int32)
    causal = _causal_mask(lengths)

    def mask(b, h, q, k):
        return (of_query[q] == of_key[k]) & causal(b, h, q, k)

    return Named(name, Variant(mask=mask), mask=mask, only_functions=True, pairs=int(shown.sum()))


def _cuts(seqlen: int, mean: int) -> list[int]:
    """Where documents of this mean length begin, at random places."""
    count = min(max(1, round(seqlen / mean)), seqlen)
    return [0, *sorted(random.Random(0).sample(range(1, seqlen), count - 1))]


def _bias(name: str, lengths: Lengths) -> Named:
    reach = max(lengths.seqlen_q, lengths.seqlen_k) - 1
    table = _normal(lengths, lengths.heads, 2 * reach + 1)
    score = scores.relative_bias(table)
    return Named(
        name,
        Variant(score=score, mask=masks.causal),
        score=score,
        mask=_causal_mask(lengths),
        causal=True,
        only_functions=True,
    )


def laborious(s, b, h, q, k):
    """Twenty operations on floats for each score."""
    distance = (q - k).float()
    for rate in (0.5, 0.25, 0.125, 0.0625, 0.03125):
        s = torch.tanh(s * rate) + distance * rate
    return s


def _laborious(name: str, lengths: Lengths) -> Named:
    return Named(
        name,
        Variant(score=laborious, mask=masks.causal),
        score=laborious,
        mask=_causal_mask(lengths),
        causal=True,
        only_functions=True,
    )


def _sigmoid(name: str, lengths: Lengths) -> Named:
    """Source: Ramapuram et al. 2024, arXiv:2409.04431: weights sigmoid(s - log(seqlen))."""
    shift = math.log(lengths.seqlen_k)

    def score(s, b, h, q, k):
        return s - shift

    return Named(
        name,
        Variant(score=score, mask=masks.causal, softmax=Elementwise(torch.sigmoid)),
        score=score,
        mask=_causal_mask(lengths),
        weight=torch.sigmoid,
        causal=True,
        only_functions=True,
    )


def _sink(name: str, lengths: Lengths) -> Named:
    sink = _normal(lengths, lengths.heads)
    variant = Variant(mask=masks.causal, softmax=OnlineSoftmax(sink))
    return Named(name, variant, mask=_causal_mask(lengths), causal=True, sink=sink)


def _normal(lengths: Lengths, *shape: int) -> torch.Tensor:
    """Normally distributed fp32 values, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(lengths.device)


_BUILDERS: dict[str, tuple[Callable[..., Named], tuple[int | float, ...]]] = {
    "full": (_full, ()),
    "causal": (_causal, ()),
    "window": (_window, (1024, 0)),
    "prefix": (_prefix, (256,)),
    "documents": (_documents, (1000,)),
    "alibi": (_alibi, ()),
    "bias": (_bias, ()),
    "softcap": (_softcap, (30.0,)),
    "sigmoid": (_sigmoid, ()),
    "laborious": (_laborious, ()),
    "sink": (_sink, ()),
}
EXAMPLES = tuple(
    f"{kind}:{','.join(f'{number:g}' for number in numbers)}" if numbers else kind
    for kind, (_, numbers) in _BUILDERS.items()
)
