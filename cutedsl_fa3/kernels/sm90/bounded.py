"""The softmax of scores whose size is limited: no maximum, so nothing is rescaled.

    p   = exp2(x)                x: base-2 scores in acc_s, within +-FARTHEST, or -inf
    lse = log2(row_sum) / log2(e)

What the scores say of themselves (`variant/limits.py`) takes the place of the running maximum. That
saves a comparison, an FMA and a share of O's rescale for each score; P must be of a type that has
fp32's range of exponents.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Float32

from cutedsl_fa3.variant.lower import LN_2

from .softmax import OnlineSoftmax


class BoundedSoftmax(OnlineSoftmax):
    """`OnlineSoftmax` of base-2 scores with a maximum of 0 that does not change."""

    def __init__(self, rows: int, sinks: Sequence[Float32] | None = None) -> None:
        super().__init__(rows, Float32(LN_2), Float32(1.0), sinks)
        self.row_max.fill(0.0)

    def step(self, acc_s: cute.Tensor, early: int = 0, bases: None = None) -> None:
        """Replace scores by weights in place, `early` eighths of them before the next wait.

        Shape: acc_s (rows, cols) of this thread.
        """
        for r in range(self.rows):
            self._weigh(acc_s, r, lambda x: x, early)

    def rescale(self, acc_o: cute.Tensor) -> None:
        """Nothing: the maximum does not grow."""
