"""Scores: what replaces a score before the softmax; each makes a function for `Variant(score=...)`.

A score function takes (s, b, h, q, k) with s = scale * <query, key>, in natural units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import seqlen_k, seqlen_q

Score = Callable[[Any, Any, Any, Any, Any], Any]


def alibi(slopes: torch.Tensor) -> Score:
    """Adds -slope * |distance|, the distance counted from the bottom right as masks do.

    Under a causal mask this differs from `+ slope * k` in the LSE, not in the output.

    Shape: slopes (heads,) or (batch, heads), float32.
    Raises: VariantError for another shape or dtype; fp16 and bf16 slopes would lose bits silently.
    """
    if slopes.dtype != torch.float32:
        raise VariantError(
            f"slopes are {str(slopes.dtype)[6:]}; make them in float32 (a later .float() does not "
            "bring the bits back)"
        )
    if slopes.ndim not in (1, 2):
        raise VariantError(
            f"slopes have shape {tuple(slopes.shape)}; valid are (heads,) and (batch, heads)"
        )

    def biased(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return s - slope * torch.abs(q + (seqlen_k - seqlen_q) - k)

    return biased


def softcap(cap: float) -> Score:
    """Bounds scores smoothly: cap * tanh(s / cap); 0 leaves them as they are.

    Raises: ValueError for a negative cap.
    """
    if cap < 0:
        raise ValueError(f"cap is {cap}; valid are positive numbers, and 0 for no cap")
    if cap == 0:
        return lambda s, b, h, q, k: s
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap)


def relative_bias(table: torch.Tensor) -> Score:
    """Adds table[h, k - q + center], for relative positions within the table.

    Shape: table (heads, 2 * center + 1), center being the farthest distance that is visible.
    Raises: VariantError for another shape.
    """
    if table.ndim != 2 or table.shape[1] % 2 == 0:
        raise VariantError(
            f"table has shape {tuple(table.shape)}; valid is (heads, 2 * center + 1), an odd "
            "number of relative positions"
        )
    center = table.shape[1] // 2
    return lambda s, b, h, q, k: s + table[h, k - q + center]
