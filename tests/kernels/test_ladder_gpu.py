"""The ladder's kernels on an SM90 GPU: tails, masks, ratios, memory that must not be read."""

from __future__ import annotations

import math
from functools import cache as cached

import pytest
import torch
from twin_cases import drawn, hold_to_torch

from cutedsl_fa3 import Variant, ladder, masks, reference
from cutedsl_fa3 import cache as kernels
from cutedsl_fa3.ladder import STEPS, Rung, launched

pytestmark = pytest.mark.gpu

NAN = math.nan
MASKS = {"full": None, "causal": masks.causal}
NUMBERS = range(1, len(STEPS) + 1)
ALIKE = (1, 2, 3)  # steps whose kernels are of the ladder alone

every_step = pytest.mark.parametrize("number", NUMBERS)
alike_steps = pytest.mark.parametrize("number", ALIKE)
both_sizes = pytest.mark.parametrize("dim", ladder.HEAD_DIMS)
both_masks = pytest.mark.parametrize("mask", MASKS)

SHAPES = [  # batch, seqlen_q, seqlen_k, heads, kv_heads
    (1, 1, 1, 1, 1),
    (2, 127, 129, 4, 4),
    (1, 128, 128, 3, 1),
    (1, 333, 700, 5, 1),
    (2, 700, 333, 6, 2),
    (1, 5, 2, 7, 1),
    (1, 193, 1024, 12, 4),
    (4, 1024, 1024, 16, 16),
]


@cached
def steps(mask: str, dim: int, dtype: str = "bf16") -> list[Rung]:
    return ladder.rungs(Variant(mask=MASKS[mask]), dim, dtype)


def on_gpu(*shape: int, dtype=torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return drawn(*shape, dtype=dtype, device="cuda")


def check(rung: Rung, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's result, held to torch."""
    found = launched(rung, q, k, v)()
    hold_to_torch(found, q, k, v, rung.plan.variant)
    return found


@every_step
@both_sizes
@both_masks
def test_every_step_matches_fp64_on_every_tail_and_ratio(number, dim, mask):
    for shape in SHAPES:
        check(steps(mask, dim)[number - 1], *on_gpu(*shape, dim))


@alike_steps
def test_fp16_is_served_too(number):
    rung = steps("causal", 64, "fp16")[number - 1]
    check(rung, *on_gpu(1, 333, 700, 4, 2, 64, dtype=torch.float16))


@both_sizes
@both_masks
def test_every_depth_that_fits_matches_fp64(dim, mask):
    depths = ladder.fitting(steps(mask, dim)[len(STEPS) :])
    assert {rung.plan.schedule.stages for rung in depths} == ({1, 3, 4} if dim == 64 else {1, 3})
    for rung in depths:
        check(rung, *on_gpu(1, 333, 1500, 4, 2, dim))


def poisoned(t: torch.Tensor, rows: int = 300) -> torch.Tensor:
    """The same values with NaN in memory before the first and behind the last row."""
    batch, seqlen, heads, dim = t.shape
    room = t.new_full((batch, seqlen + 2 * rows, heads, dim), NAN)
    room[:, rows : rows + seqlen] = t
    return room[:, rows : rows + seqlen]


@every_step
@both_sizes
@both_masks
def test_memory_outside_of_the_tensors_cannot_reach_the_output(number, dim, mask):
    rung = steps(mask, dim)[number - 1]
    for sizes in ((1, 129, 65, 2, 1), (2, 300, 433, 4, 2)):
        q, k, v = on_gpu(*sizes, dim)
        out, lse = check(rung, *map(poisoned, (q, k, v)))
        same_out, same_lse = launched(rung, q, k, v)()
        assert torch.equal(out, same_out) and torch.equal(lse, same_lse)


@every_step
@both_sizes
def test_a_hidden_value_that_is_not_finite_reaches_just_the_rows_that_see_it(number, dim):
    """0 * NaN is NaN in a product, so rows of the tile that do not see it are computed again."""
    q, k, v = on_gpu(1, 400, 400, 2, 2, dim)
    v[0, 250, 0, 7], v[0, 390, 1, 3] = NAN, math.inf
    rung = steps("causal", dim)[number - 1]
    out, _ = launched(rung, q, k, v)()
    exact = reference.attention(q, k, v, rung.plan.variant, dtype=torch.float64)
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out == math.inf, exact == math.inf)
    finite = exact.isfinite()
    assert ((out.double() - exact)[finite].abs() <= 2 * torch.finfo(q.dtype).eps * 4).all()


@alike_steps
@both_sizes
def test_rows_behind_the_output_stay_as_they_are(number, dim):
    rung = steps("causal", dim)[number - 1]
    q, k, v = on_gpu(2, 201, 300, 2, 1, dim)
    room = q.new_full((2, 201 + 150, 2, dim), NAN)
    lse = torch.full((2, 2, 201 + 150), NAN, device="cuda")
    rest = (None,) * 5  # captures, table, visits, counter, ctas
    launch = kernels.get(rung.kernel).launch
    launch(q, k, v, room[:, :201], lse[:, :, :201], *rest, dim**-0.5)
    out, same_lse = launched(rung, q, k, v)()
    assert torch.equal(room[:, :201], out) and room[:, 201:].isnan().all()
    assert torch.equal(lse[:, :, :201], same_lse) and lse[:, :, 201:].isnan().all()


@every_step
@both_sizes
def test_a_call_repeated_gives_the_same_bits(number, dim):
    """A slot that is filled before all have read it shows as a difference between runs."""
    call = launched(steps("causal", dim)[number - 1], *on_gpu(2, 1024, 1024, 16, 16, dim))
    out, lse = call()
    for _ in range(30):
        again, lse_again = call()
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@alike_steps
@both_sizes
def test_strided_and_transposed_inputs_are_read_as_they_lie(number, dim):
    rung = steps("full", dim)[number - 1]
    q, k, v = on_gpu(2, 150, 260, 4, 4, dim)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    packed = torch.cat([k, v], dim=3)
    for given in (heads_first, [q, packed[..., :dim], packed[..., dim:]]):
        out, _ = launched(rung, *given)()
        assert torch.equal(out, launched(rung, q, k, v)()[0])
