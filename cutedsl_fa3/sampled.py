"""A call's result held against fp64 in sampled rows, for any variant.

What may differ is what `checks.tolerance` allows: twice the error of the same computation in torch
at the input dtype, plus one rounding. A result that is not finite is accepted only where fp64, fp32
or torch at the input dtype gives none either. Of a row's LSE, exp(score - LSE) must add up to 1
over the keys that it sees and the sink: LSE itself is compared, with fp32 as the yardstick.

The work is len(rows) * seqlen_k scores for each sampled head, at most `SCORES` of them in all where
`FEWEST` rows of `FEW_HEADS` heads are not more; a small problem is compared as a whole.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from .checks import sampled_rows, tolerance
from .reference import rounded_rows_of_head, rows_of_head
from .variant import Variant

SCORES = 1 << 22
HEADS, FEW_HEADS, FEWEST = 16, 4, 8
LSE_WITHIN = 1e-4  # of 1 + |LSE|; approximate functions in a score are off by up to a tenth of it

Place = tuple[int, int, torch.Tensor]


@dataclass(frozen=True)
class Mismatch:
    """The worst of the compared numbers, and how many were wrong.

    `what` is "output" or "LSE"; `column` is None for an LSE. `error` is |got - expected|, infinite
    where got is no finite number.
    """

    what: str
    batch: int
    head: int
    row: int
    column: int | None
    got: float
    expected: float
    allowed: float
    dtype: torch.dtype
    wrong: int
    compared: int

    @property
    def error(self) -> float:
        error = abs(self.got - self.expected)
        return math.inf if math.isnan(error) else error

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column}"
        if self.what == "LSE":
            total = math.exp(min(self.expected - self.got, 700.0))
            why = (
                f"within twice the error of fp32; exp(score - LSE) adds up to {total:.6g}, not 1"
                if math.isfinite(self.got) and math.isfinite(self.expected)
                else "exactly"
            )
        else:
            why = f"twice torch's own error at {self.dtype} plus one rounding"
        return (
            f"{self.what} at batch {self.batch}, head {self.head}, row {self.row}{column}: got "
            f"{self.got:.9g}, expected {self.expected:.9g}, error {self.error:.3g}, allowed "
            f"{self.allowed:.3g} ({why}); {self.wrong} of {self.compared} numbers are wrong"
        )


def compare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float,
    result: tuple[torch.Tensor, torch.Tensor | None],
    chosen: list[Place] | None = None,
) -> Mismatch | None:
    """The worst mismatch of (out, lse) in sampled or chosen rows; None where all is right.

    Shape: as `attention_with_lse`.
    """
    with torch.no_grad():
        numbers = [
            one
            for place in (places(q.shape, k.shape[1], q.device) if chosen is None else chosen)
            for one in _of_head((q, k, v), variant, scale, place, result)
        ]
    worst = max(numbers, key=lambda one: one.largest, default=None)
    if worst is None or worst.largest <= 1:
        return None
    wrong = sum(int((one.ratios > 1).sum()) for one in numbers)
    return worst.mismatch(wrong, sum(int(one.counts.sum()) for one in numbers))


def places(shape: torch.Size, seqlen_k: int, device: torch.device, seed: int = 0) -> list[Place]:
    """(batch, head, rows) to compare: the first and the last head and row, others at random.

    Shape: that of q.
    """
    batches, seqlen_q, heads, _ = shape
    every = batches * heads
    count = HEADS if HEADS * FEWEST * seqlen_k <= SCORES else FEW_HEADS
    picker = random.Random(seed)
    between = range(1, max(1, every - 1))
    numbers = {0, every - 1, *picker.sample(between, min(count - 2, len(between)))}
    rows = max(FEWEST, SCORES // (len(numbers) * max(1, seqlen_k)))
    return [
        (
            number // heads,
            number % heads,
            torch.tensor(sampled_rows(seqlen_q, picker, rows - 2), device=device),
        )
        for number in sorted(numbers)
    ]


@dataclass(frozen=True)
class _Numbers:
    """Numbers of one head that are compared where `counts`, each with what it may be off.

    Shape: all of the same, (rows, columns) or (rows,).
    """

    what: str
    place: Place
    got: torch.Tensor
    exact: torch.Tensor
    allowed: torch.Tensor
    counts: torch.Tensor
    dtype: torch.dtype

    @cached_property
    def ratios(self) -> torch.Tensor:
        """|error| / allowed; infinite where the number is NaN and should be none.

        An output of infinity stands for the largest number of its type: what is near that may round
        to either.
        """
        largest = torch.finfo(self.dtype).max
        got = self.got.clamp(-largest, largest) if self.what == "output" else self.got
        error = torch.where(got == self.exact, 0.0, (got - self.exact).abs())
        error = error.nan_to_num(nan=math.inf, posinf=math.inf)
        ratios = torch.where(error == 0, 0.0, error / self.allowed)
        return torch.where(self.counts, ratios, 0.0)

    @cached_property
    def largest(self) -> float:
        return float(self.ratios.max()) if self.ratios.numel() else 0.0

    def mismatch(self, wrong: int, compared: int) -> Mismatch:
        """The worst of these numbers."""
        flat, (b, head, rows) = int(self.ratios.argmax()), self.place
        row, column = divmod(flat, self.exact.shape[1]) if self.exact.dim() == 2 else (flat, None)
        values = (float(t.flatten()[flat]) for t in (self.got, self.exact, self.allowed))
        place = (b, head, int(rows[row]), column)
        return Mismatch(self.what, *place, *values, self.dtype, wrong, compared)


def _of_head(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    variant: Variant,
    scale: float,
    place: Place,
    result: tuple[torch.Tensor, torch.Tensor | None],
) -> Iterator[_Numbers]:
    """Output and, where there is one, LSE of one head's rows."""
    (b, head, rows), (out, lse), dtype = place, result, inputs[0].dtype
    exact, exact_lse = rows_of_head(*inputs, variant, place, scale=scale)
    single, single_lse = rows_of_head(*inputs, variant, place, scale=scale, dtype=torch.float32)
    plain = rounded_rows_of_head(*inputs, variant, place, scale=scale)
    got = out[b, rows, head].double()
    allowed = torch.full_like(exact, _allowed(exact, plain))
    counts = exact.isfinite() & single.isfinite() & (plain.isfinite() | got.isfinite())
    yield _Numbers("output", place, got, exact, allowed, counts, dtype)
    if lse is not None and exact_lse is not None and single_lse is not None:
        counts = exact_lse.isfinite() & single_lse.isfinite()
        off = torch.where(counts, (single_lse.double() - exact_lse).abs(), 0.0).max()
        allowed = torch.where(counts, 2 * off + LSE_WITHIN * (1 + exact_lse.abs()), 0.0)
        counts |= (exact_lse == -math.inf) & (single_lse == -math.inf)
        got = lse[b, head, rows].double()
        yield _Numbers("LSE", place, got, exact_lse, allowed, counts, dtype)


def _allowed(exact: torch.Tensor, plain: torch.Tensor) -> float:
    """`checks.tolerance` of what is finite in both, and the step to 0 of fp32 and of the dtype."""
    both, info = exact.isfinite() & plain.isfinite(), torch.finfo(plain.dtype)
    step = max(torch.finfo(torch.float32).tiny, info.tiny * info.eps)
    return (tolerance(exact[both], plain[both]) if bool(both.any()) else 0.0) + step
