"""Variants by name, for the command line and the benchmark; a name may carry numbers.

    full   causal   alibi   softcap:30   window:1024,0   prefix:256

`causal`, `alibi` and `softcap` are causal, `prefix` too but for the first keys, and `window` where
its second number is 0; -1 leaves a side of a window unbounded. The same two functions serve every
kernel that takes them; what a kernel with fixed options needs to know (`causal`, `window`,
`softcap`) stands beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import masks, scores
from .variant import Variant


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
    lengths; `causal`, `window` (left, right; inclusive, None is unbounded) and `softcap` are the
    options of kernels without functions. `only_functions` marks what no option expresses.
    """

    name: str
    variant: Variant
    score: Callable | None = None
    mask: Callable | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    only_functions: bool = False


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


def visible_pairs(name: str, lengths: Lengths) -> float:
    """How many (query, key) pairs a variant computes; by convention causal is half of all."""
    chosen = named(name, lengths)
    pairs = float(lengths.seqlen_q * lengths.seqlen_k)
    if chosen.mask is None:
        return pairs
    if chosen.causal and chosen.window is None:
        return pairs / 2
    q = torch.arange(lengths.seqlen_q)[:, None]
    counted = 0
    for first in range(0, lengths.seqlen_k, 4096):
        k = torch.arange(first, min(first + 4096, lengths.seqlen_k))[None, :]
        counted += int(chosen.mask(0, 0, q, k).sum())
    return float(counted)


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


_BUILDERS: dict[str, tuple[Callable[..., Named], tuple[int | float, ...]]] = {
    "full": (_full, ()),
    "causal": (_causal, ()),
    "alibi": (_alibi, ()),
    "softcap": (_softcap, (30.0,)),
    "window": (_window, (1024, 0)),
    "prefix": (_prefix, (256,)),
}
EXAMPLES = tuple(
    f"{kind}:{','.join(f'{number:g}' for number in numbers)}" if numbers else kind
    for kind, (_, numbers) in _BUILDERS.items()
)
