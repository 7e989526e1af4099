"""Gradients held against fp64 in one head; what torch gives at the input dtype is the yardstick.

As in checks.py an error may be twice that of the same computation in torch at the input dtype, plus
one rounding, of dq, dk and dv each. Gradients of captured tensors are held by tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .checks import WrongResult, chosen_variant, tolerance
from .peers import Call
from .peers_backward import GradientInputs
from .reference import SCORES_AT_ONCE, rounded_rows_of_head, rows_of_head

NAMES = ("dq", "dk", "dv")
Rows = Callable[[list[torch.Tensor], tuple[int, int, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class GradientSample:
    """A key head with its query heads: its gradients in fp64, and the errors that a dtype explains.

    Shape: exact dq (seqlen_q, group, head_dim), dk (seqlen_k, head_dim), dv likewise.
    """

    batch: int
    kv_head: int
    heads: slice
    exact: tuple[torch.Tensor, ...]
    allowed: tuple[float, ...]

    def of(self, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """This head's part of dq, dk and dv, as `exact` has them."""
        dq, dk, dv = gradients[:3]
        b, h = self.batch, self.kv_head
        return dq[b, :, self.heads], dk[b, :, h], dv[b, :, h]


def gradient_sample(inputs: GradientInputs, seed: int = 0) -> GradientSample:
    """One head, the same for every provider that is checked with it."""
    picker, group = random.Random(seed), inputs.q.shape[2] // inputs.k.shape[2]
    batch, kv_head = picker.randrange(inputs.k.shape[0]), picker.randrange(inputs.k.shape[2])
    heads = slice(kv_head * group, (kv_head + 1) * group)
    variant, scale = chosen_variant(inputs), 1.0 / math.sqrt(inputs.q.shape[3])

    def exact_rows(given, place):
        return rows_of_head(*given, variant, place, scale=scale)[0]

    def rounded_rows(given, place):
        return rounded_rows_of_head(*given, variant, place, scale=scale)

    exact = _gradients(inputs, batch, kv_head, heads, torch.float64, exact_rows)
    rounded = _gradients(inputs, batch, kv_head, heads, inputs.q.dtype, rounded_rows)
    allowed = tuple(tolerance(e, r.to(inputs.q.dtype)) for e, r in zip(exact, rounded, strict=True))
    return GradientSample(batch, kv_head, heads, exact, allowed)


def _gradients(
    inputs: GradientInputs,
    batch: int,
    kv_head: int,
    heads: slice,
    dtype: torch.dtype,
    rows_of: Rows,
) -> tuple[torch.Tensor, ...]:
    """Gradients of a head's output by autograd, some rows at a time, added up in fp64."""
    given = [t.detach().to(dtype).requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    (_, seqlen_q, _, d), (_, seqlen_k, _, dv) = inputs.q.shape, inputs.v.shape
    group, at_once = heads.stop - heads.start, max(1, SCORES_AT_ONCE // seqlen_k)
    options = {"dtype": torch.float64, "device": inputs.q.device}
    sums = (
        torch.zeros(seqlen_q, group, d, **options),
        torch.zeros(seqlen_k, d, **options),
        torch.zeros(seqlen_k, dv, **options),
    )
    for head in range(heads.start, heads.stop):
        for rows in torch.arange(seqlen_q, device=inputs.q.device).split(at_once):
            out = rows_of(given, (batch, head, rows))
            upstream = inputs.dout[batch, rows, head].to(out.dtype)
            dq, dk, dv_ = torch.autograd.grad(out, given, upstream)
            sums[0][rows, head - heads.start] += dq[batch, rows, head]
            sums[1].add_(dk[batch, :, kv_head])
            sums[2].add_(dv_[batch, :, kv_head])
    return sums


def check_gradients(
    inputs: GradientInputs, call: Call, sample: GradientSample
) -> tuple[float, float, float]:
    """The largest errors of dq, dk and dv of one call against fp64 in the sampled head.

    The memory that the call is about to use is filled with NaN first, so that what is never written
    cannot pass.

    Raises: WrongResult with the error found and the one allowed.
    """
    poison = [t.new_full(t.shape, float("nan")) for t in (inputs.q, inputs.k, inputs.v)]
    del poison  # the caching allocator hands the same blocks to the next tensors of these sizes
    found = call()
    errors = []
    given = (inputs.q, inputs.k, inputs.v)
    parts = zip(NAMES, found, given, sample.of(found), sample.exact, sample.allowed, strict=False)
    for name, whole, like, got, exact, allowed in parts:
        if whole.shape != like.shape:
            raise WrongResult(f"{name} of shape {tuple(whole.shape)}, not {tuple(like.shape)}")
        if not bool(torch.isfinite(whole).all()):
            raise WrongResult(f"{name} with NaN or infinity")
        error = (got.double() - exact).abs().max().item()
        if not error <= allowed:
            raise WrongResult(
                f"{name}: error {error:.3g} against fp64 at batch {sample.batch}, key head "
                f"{sample.kv_head}; torch at {like.dtype} allows {allowed:.3g}"
            )
        errors.append(error)
    return errors[0], errors[1], errors[2]
