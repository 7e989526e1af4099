"""Outputs held against fp64 in sampled rows; what torch gives at the input dtype is the yardstick.

An error may be twice that of the same computation in torch at the input dtype, plus one rounding of
the result. The rows are the same for everything that is held against them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from .peers import Call, Inputs
from .reference import rounded_rows_of_head, rows_of_head
from .variant import Elementwise, OnlineSoftmax, Variant


class WrongResult(RuntimeError):
    """A kernel's output is farther from fp64 than its dtype explains."""


@dataclass(frozen=True)
class Sample:
    """Some query rows of one head: what is right in fp64, and the error that a dtype explains.

    Shape: exact (len(rows), head_dim_v).
    """

    batch: int
    head: int
    rows: list[int]
    exact: torch.Tensor
    allowed: float


def samples(inputs: Inputs, seed: int = 0, count: int = 4) -> list[Sample]:
    """Rows of `count` heads, the same for every provider that is checked with them."""
    picker = random.Random(seed)
    picked = []
    for _ in range(count):
        batch, head = picker.randrange(inputs.q.shape[0]), picker.randrange(inputs.q.shape[2])
        rows = sampled_rows(inputs.q.shape[1], picker)
        exact = exact_rows(inputs, batch, head, rows)
        rounded = rounded_rows(inputs, batch, head, rows)
        allowed = tolerance(exact, rounded)
        picked.append(Sample(batch, head, rows, exact, allowed))
    return picked


def tolerance(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """Twice the error of torch's own result at a dtype, plus one rounding to it."""
    error = (rounded.double() - exact).abs().max().item()
    return 2 * error + torch.finfo(rounded.dtype).eps * exact.abs().max().item()


def check(inputs: Inputs, call: Call, sampled: list[Sample] | None = None) -> float:
    """The largest error of one call against fp64 in the sampled rows.

    The memory that the call is about to use for its output is filled with NaN first, so a row that
    is never written cannot pass.

    Raises: WrongResult with the error found and the one allowed.
    """
    sampled = samples(inputs) if sampled is None else sampled
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    poison = inputs.q.new_full(shape, float("nan"))
    del poison  # the caching allocator hands the same block to the next tensor of this size
    out = call()
    if out.shape != shape:
        raise WrongResult(f"output of shape {tuple(out.shape)} instead of {shape}")
    if not bool(torch.isfinite(out).all()):
        raise WrongResult("output with NaN or infinity")
    largest = 0.0
    for one in sampled:
        error = (out[one.batch, one.rows, one.head].double() - one.exact).abs().max().item()
        if not error <= one.allowed:
            raise WrongResult(
                f"error {error:.3g} against fp64 at batch {one.batch}, head {one.head}; torch at "
                f"{inputs.q.dtype} allows {one.allowed:.3g}"
            )
        largest = max(largest, error)
    return largest


def sampled_rows(seqlen_q: int, picker: random.Random, count: int = 62) -> list[int]:
    """The first and the last row and some between."""
    between = range(1, max(1, seqlen_q - 1))
    return sorted({0, seqlen_q - 1, *picker.sample(between, min(count, len(between)))})


def exact_rows(inputs: Inputs, batch: int, head: int, rows: list[int]) -> torch.Tensor:
    """Chosen query rows of one head by the reference in fp64.

    Shape: (len(rows), head_dim_v).
    """
    return rows_of_head(*_chosen(inputs, batch, head, rows), scale=_scale(inputs))[0]


def rounded_rows(inputs: Inputs, batch: int, head: int, rows: list[int]) -> torch.Tensor:
    """The same rows as plain torch gives them at the input dtype: its rounding is the yardstick.

    Shape: (len(rows), head_dim_v).
    """
    return rounded_rows_of_head(*_chosen(inputs, batch, head, rows), scale=_scale(inputs))


def _scale(inputs: Inputs) -> float:
    return 1.0 / math.sqrt(inputs.q.shape[3])


def _chosen(inputs: Inputs, batch: int, head: int, rows: list[int]) -> tuple:
    """(q, k, v, variant, place) as the reference takes them."""
    place = (batch, head, torch.tensor(rows, device=inputs.q.device))
    return inputs.q, inputs.k, inputs.v, chosen_variant(inputs), place


def chosen_variant(inputs: Inputs) -> Variant:
    """The variant made of the functions that peers are given."""
    chosen = inputs.named
    softmax = OnlineSoftmax(chosen.sink) if chosen.weight is None else Elementwise(chosen.weight)
    return Variant(score=chosen.score, mask=chosen.mask, softmax=softmax)
