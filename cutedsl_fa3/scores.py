"""Scores: what replaces a score before the softmax; each makes a function for `Variant(score=...)`.

A score function takes (s, b, h, q, k) with s = scale * <query, key>, in natural units.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch

from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import seqlen_k, seqlen_q

Score = Callable[[Any, Any, Any, Any, Any], Any]

_FP32 = torch.finfo(torch.float32)


def _check_tensor(function: str, name: str, value: Any, shape: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise VariantError(
            f"scores.{function}: {name} is {value!r}; valid is a tensor of shape {shape}"
        )


def alibi(slopes: torch.Tensor) -> Score:
    """Adds -slope * |distance|, the distance counted from the bottom right as masks do.

    Under a causal mask this differs from `+ slope * k` in the LSE, not in the output.

    Shape: slopes (heads,) or (batch, heads), float32.
    Raises: VariantError for another type, shape or dtype; fp16 and bf16 slopes would lose bits
        silently.
    """
    _check_tensor("alibi", "slopes", slopes, "(heads,) or (batch, heads)")
    if slopes.dtype != torch.float32:
        lossy = slopes.dtype in (torch.float16, torch.bfloat16)
        raise VariantError(
            f"scores.alibi: slopes are {str(slopes.dtype)[6:]}; valid is float32: "
            + (
                "make them in it (a later .float() does not bring the bits back)"
                if lossy
                else "give slopes.float(), made outside"
            )
        )
    if slopes.ndim not in (1, 2):
        raise VariantError(
            f"scores.alibi: slopes have shape {tuple(slopes.shape)}; valid are (heads,) and "
            "(batch, heads)"
        )

    def biased(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return s - slope * torch.abs(q + (seqlen_k - seqlen_q) - k)

    return biased


def softcap(cap: float) -> Score:
    """Bounds scores smoothly: cap * tanh(s / cap); 0 leaves them as they are.

    Raises: VariantError for a negative cap, one that is no normal fp32 value, and what is no
        number.
    """
    number = isinstance(cap, numbers.Real) and not isinstance(cap, bool)
    if not number or not (cap == 0 or _FP32.tiny <= cap <= _FP32.max):
        raise VariantError(
            f"scores.softcap: cap is {cap!r}; valid are positive numbers from {_FP32.tiny:.3g} to "
            f"{_FP32.max:.3g} (fp32), and 0 for no cap"
        )
    if cap == 0:
        return lambda s, b, h, q, k: s
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap)


def relative_bias(table: torch.Tensor) -> Score:
    """Adds table[h, k - q + center], for relative positions within the table.

    Shape: table (heads, 2 * center + 1), center being the farthest distance that is visible.
    Raises: VariantError for another type or shape.
    """
    _check_tensor("relative_bias", "table", table, "(heads, 2 * center + 1)")
    if table.ndim != 2 or table.shape[1] % 2 == 0:
        raise VariantError(
            f"scores.relative_bias: table has shape {tuple(table.shape)}; valid is "
            "(heads, 2 * center + 1), an odd number of relative positions"
        )
    center = table.shape[1] // 2
    return lambda s, b, h, q, k: s + table[h, k - q + center]
