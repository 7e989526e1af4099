"""The forward in machine code: no spill, no advisory, and what its tables promise."""

from __future__ import annotations

import pytest
import torch
from sound import assert_sound

from cutedsl_fa3 import Variant, configs, contract, masks
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.errors import LayoutError
from cutedsl_fa3.layouts import SMEM_CAPACITY
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.schedules import SPECIAL, TABLE, serving_row

OVERLAPS = ("none", "intra", "pingpong", "both")
TILES = {64: (192, 128, 3), 128: (128, 128, 2)}  # head_dim -> tile_m, tile_n, consumers


def every_fourth_block(b, h, q, k):
    return ((k // 128) % 4 == 0) & (k <= q)


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


@pytest.mark.compile
@pytest.mark.parametrize("plan", configs.every(), ids=configs.label)
def test_every_supported_configuration_compiles_without_spilling_to_the_code_accepted(plan: Plan):
    compiled = assert_sound(plan)
    broken = contract.broken(contract.label(plan.kernel), compiled)
    assert not broken, broken


def test_every_row_of_the_schedule_table_serves_a_supported_configuration():
    """So no row stands behind one that takes all of its variants, and all are compiled."""
    used = {serving_row(plan.variant, plan.problem) for plan in configs.configs()}
    assert used == set(TABLE)
    tiles = {(plan.problem.tile_dims, plan.schedule) for plan in configs.special()}
    for row in SPECIAL:
        assert ((row.head_dim, row.head_dim_v), row.schedule(row.masked)) in tiles, row


@pytest.mark.compile
@pytest.mark.parametrize("dims", [(8, 8), (72, 72), (40, 200), (248, 120)], ids=str)
def test_head_sizes_between_the_native_ones_compile_in_their_tiles(dims):
    assert_sound(Plan.default(Variant(mask=masks.causal), Problem("bf16", *dims)))


@pytest.mark.compile
def test_a_build_that_traces_its_visits_is_another_kernel():
    problem, variant = Problem("bf16", 64, 64), Variant(mask=masks.causal)
    traced = Plan.default(variant, problem, trace=True)
    assert traced.key_text != Plan.default(variant, problem).key_text
    assert_sound(traced)


@pytest.mark.compile
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("head_dim", TILES)
def test_tiles_decided_one_by_one_compile_with_every_overlap(head_dim, overlap):
    tile_m, tile_n, consumers = TILES[head_dim]
    schedule = Schedule(tile_m, tile_n - 32, 2, consumers, overlap)
    plan = Plan(Variant(mask=every_fourth_block), Problem("bf16", head_dim, head_dim), schedule)
    assert plan.by_tile
    assert_sound(plan)


@pytest.mark.compile
@pytest.mark.parametrize("depth", ["shallowest", "deepest"])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("head_dim", TILES)
def test_every_overlap_compiles_at_both_ends_of_the_depths_that_fit(head_dim, overlap, depth):
    """The depths between them differ in two constants; 2 is that of the table."""
    stages = 1 if depth == "shallowest" else min(4, deepest(head_dim))
    assert_sound(overlapped(head_dim, overlap, stages))


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "mask",
    [masks.documents(torch.arange(64) // 8), masks.window(1024, 0), None],
    ids=["documents", "window", "full"],
)
def test_units_of_the_product_take_no_register_that_is_missed(mask, head_dim):
    """Tiles decided one by one, small ones, and any; contracts hold causal ones."""
    slopes = torch.linspace(0.1, 0.8, 8)
    variant = Variant(lambda s, b, h, q, k: s + slopes[h] * (k - q), mask)
    plan = Plan.default(variant, Problem("bf16", head_dim, head_dim))
    assert plan.linear is not None
    assert_sound(plan)


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
