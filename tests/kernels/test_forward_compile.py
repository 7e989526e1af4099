"""The forward in machine code: no spill, no advisory, and what its tables promise."""

from __future__ import annotations

import pytest
import torch

from cutedsl_fa3 import Variant, masks, scores
from cutedsl_fa3.audit import audit
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.errors import LayoutError
from cutedsl_fa3.layouts import SMEM_CAPACITY
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.schedules import TABLE, Row, default_schedule

OVERLAPS = ("none", "intra", "pingpong", "both")
TILES = {64: (192, 128, 3), 128: (128, 128, 2)}  # head_dim -> tile_m, tile_n, consumers

SLOPES = torch.linspace(0.5, 0.1, 8)
BIAS = torch.zeros(8, 2 * 64 + 1)


def laborious(s, b, h, q, k):
    """Twenty operations on floats for each score."""
    distance = (q - k).float()
    for rate in (0.5, 0.25, 0.125, 0.0625, 0.03125):
        s = torch.tanh(s * rate) + distance * rate
    return s


# The score of a variant that needs what a row of the table is for.
SCORES = {
    "nothing": None,
    "uniform": scores.alibi(SLOPES),
    "elements": scores.relative_bias(BIAS),
    "much": laborious,
}
MASKS = {"full": None, "causal": masks.causal}


def deepest(head_dim: int) -> int:
    """The most stages whose K and V fit beside Q, by plain arithmetic in 16-bit elements."""
    tile_m, tile_n, _ = TILES[head_dim]
    row = 2 * head_dim
    mbarriers = 1024  # more than any number of stages here needs
    return (SMEM_CAPACITY - mbarriers - tile_m * row) // (2 * tile_n * row)


def overlapped(head_dim: int, overlap: str, stages: int) -> Plan:
    tile_m, tile_n, consumers = TILES[head_dim]
    schedule = Schedule(tile_m, tile_n, stages, consumers, overlap)
    return Plan(Variant(mask=masks.causal), Problem("bf16", head_dim, head_dim), schedule)


def assert_sound(plan: Plan) -> None:
    plan.check()
    compiled = compile_kernel(plan.kernel)
    resources = compiled.resources
    assert (resources.spill_stores, resources.spill_loads, resources.stack) == (0, 0, 0)
    assert resources.advisories == ()
    assert resources.smem_dynamic == plan.kernel.smem.total
    report = audit(plan.kernel, compiled)
    assert report.ok, report


@pytest.mark.compile
@pytest.mark.parametrize(
    ("dtype", "mask"), [("bf16", "full"), ("bf16", "causal"), ("fp16", "causal")]
)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"d{row.head_dim}-{row.needs}")
def test_every_row_of_the_schedule_table_compiles_without_spilling(row: Row, dtype, mask):
    variant = Variant(score=SCORES[row.needs], mask=MASKS[mask])
    problem = Problem(dtype, row.head_dim, row.head_dim)
    schedule = default_schedule(variant, problem)
    assert (schedule.tile_m, schedule.tile_n) == (row.tile_m, row.tile_n)
    assert_sound(Plan(variant, problem, schedule))


@pytest.mark.compile
@pytest.mark.parametrize("dims", [(64, 128), (128, 64)], ids=str)
def test_values_may_be_wider_or_narrower_than_keys(dims):
    variant = Variant(mask=masks.causal)
    assert_sound(Plan.default(variant, Problem("bf16", *dims)))


@pytest.mark.compile
@pytest.mark.parametrize("depth", ["shallowest", "deepest"])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("head_dim", TILES)
def test_every_overlap_compiles_at_both_ends_of_the_depths_that_fit(head_dim, overlap, depth):
    """The depths between them differ in two constants; 2 is that of the table."""
    stages = 1 if depth == "shallowest" else min(4, deepest(head_dim))
    assert_sound(overlapped(head_dim, overlap, stages))


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("head_dim", TILES)
def test_depths_that_do_not_fit_are_refused_with_the_bytes_and_the_limit(head_dim, overlap, stages):
    plan = overlapped(head_dim, overlap, stages)
    if stages <= deepest(head_dim):
        plan.check()
        return
    with pytest.raises(LayoutError) as caught:
        plan.check()
    needed = plan.kernel.smem.total
    assert needed > SMEM_CAPACITY
    assert f"{needed} bytes are needed and a block has {SMEM_CAPACITY}" in str(caught.value)


def test_four_stages_fit_at_64_and_three_at_128():
    assert min(4, deepest(64)) == 4
    assert deepest(128) == 3


def test_an_unchecked_kernel_is_refused_before_it_is_compiled():
    schedule = Schedule(128, 128, stages=4)
    plan = Plan(Variant(), Problem("bf16", 128, 128), schedule)
    assert plan.kernel.smem.total > SMEM_CAPACITY
    with pytest.raises(LayoutError, match=r"295056 bytes"):
        compile_kernel(plan.kernel)
