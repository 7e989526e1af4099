"""Outputs held against fp64 in sampled rows; what torch gives at the input dtype is the yardstick.

An error may be twice that of the same computation in torch at the input dtype, plus one rounding of
the result. The rows are the same for everything that is held against them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from . import reference
from .named import Named
from .peers import Call, Inputs
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


def _of_head(
    inputs: Inputs, batch: int, head: int, rows: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chosen query rows of one head, with its keys and values, as (1, seqlen, 1, head_dim)."""
    kv_head = head // (inputs.q.shape[2] // inputs.k.shape[2])
    one, of_keys = slice(batch, batch + 1), slice(kv_head, kv_head + 1)
    q = inputs.q[one, rows, head : head + 1]
    return q, inputs.k[one, :, of_keys], inputs.v[one, :, of_keys]


def exact_rows(inputs: Inputs, batch: int, head: int, rows: list[int]) -> torch.Tensor:
    """Chosen query rows of one head by the reference in fp64; the variant sees true indices.

    Shape: (len(rows), head_dim_v).
    """
    indices = torch.tensor(rows, dtype=torch.int32, device=inputs.q.device)
    variant = at_indices(inputs.named, batch, head, indices)
    q, k, v = _of_head(inputs, batch, head, rows)
    return reference.attention(q, k, v, variant, dtype=torch.float64)[0, :, 0]


def rounded_rows(inputs: Inputs, batch: int, head: int, rows: list[int]) -> torch.Tensor:
    """The same rows as plain torch gives them at the input dtype: its rounding is the yardstick.

    Shape: (len(rows), head_dim_v).
    """
    chosen = inputs.named
    q, k, v = (x[0, :, 0] for x in _of_head(inputs, batch, head, rows))
    i = torch.tensor(rows, device=q.device)[:, None]
    j = torch.arange(k.shape[0], device=q.device)
    scores = (q @ k.T).float() / math.sqrt(q.shape[1])
    if chosen.score is not None:
        scores = chosen.score(scores, batch, head, i, j)
    hidden = torch.zeros((), dtype=torch.bool, device=q.device)
    if chosen.mask is not None:
        hidden = ~chosen.mask(batch, head, i, j)
    if chosen.weight is not None:
        weights = chosen.weight(scores).masked_fill(hidden, 0.0)
    else:
        scores = scores.masked_fill(hidden, -math.inf)
        if chosen.sink is not None:  # one more score, of no key
            sink = chosen.sink[head].expand(len(rows), 1)
            scores = torch.cat([scores, sink], -1)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)[:, : k.shape[0]]
    return weights.to(v.dtype) @ v


def at_indices(chosen: Named, batch: int, head: int, rows: torch.Tensor) -> Variant:
    """The variant for one batch element, one head and some query rows of the whole problem."""
    batches = rows.new_tensor([batch])
    heads = rows.new_tensor([head])
    score, mask = chosen.score, chosen.mask

    def moved_score(s, b, h, q, k):
        return score(s, batches[b], heads[h], rows[q], k)

    def moved_mask(b, h, q, k):
        return mask(batches[b], heads[h], rows[q], k)

    softmax = OnlineSoftmax(None if chosen.sink is None else chosen.sink[head : head + 1])
    return Variant(
        score=score and moved_score,
        mask=mask and moved_mask,
        softmax=softmax if chosen.weight is None else Elementwise(chosen.weight),
    )
