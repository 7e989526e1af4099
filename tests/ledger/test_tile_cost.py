"""Costs of a tile: units, what a step depends on, and how products and the rest add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3 import Elementwise, Variant, masks, scores
from cutedsl_fa3.ledger.rates import FAMILIES, L2_LATENCY, PIPES, WGMMA_FLOP, clocks
from cutedsl_fa3.ledger.tile import Step, TileCost, tile_cost
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem


def cost(variant: Variant, *, tile=(128, 128), consumers=2, masked=False, dims=(64, 64)):
    schedule = Schedule(*tile, 2, consumers, "intra")
    return tile_cost(Plan(variant, Problem("bf16", *dims), schedule), masked)


def test_a_pipe_takes_lanes_over_its_rate_and_issue_one_instruction_a_scheduler():
    found = clocks({"FFMA": 10, "MUFU": 2, "IMAD": 3, "UMOV": 5}, warps=8)
    assert found["FMA"] == (10 + 2 * 3) * 8 * 32 / 128
    assert found["MUFU"] == 2 * 8 * 32 / 16
    assert found["issue"] == (10 + 2 + 3 + 5) * 8 / 4
    assert found["ALU"] == found["LSU"] == 0
    assert {pipe for pipe, _ in FAMILIES.values()} == set(PIPES)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_products_follow_from_the_tile_alone(dims):
    plain, other = cost(Variant(), dims=dims), cost(Variant(scores.softcap(30.0)), dims=dims)
    assert plain.products == other.products == 2 * 128 * 128 * sum(dims) / WGMMA_FLOP
    assert plain.tma_bytes == 128 * sum(dims) * 2


def test_d64_has_as_many_clocks_of_exponentials_as_of_products():
    found = cost(Variant())
    assert found.by_pipe["MUFU"] == pytest.approx(found.products, rel=0.05)


def test_a_score_is_a_step_of_its_own_and_changes_no_other():
    plain, grown = cost(Variant()), cost(Variant(lambda s, b, h, q, k: torch.exp(s)))
    assert plain.step("score") is None
    step = grown.step("score")
    assert step.limit == "MUFU" and step.takes > 0
    assert [s for s in grown.steps if s.name != "score"] == list(plain.steps)
    assert grown.elements == plain.elements + step.takes


def test_elementwise_weights_have_no_maximum_and_no_rescale():
    names = {s.name for s in cost(Variant(softmax=Elementwise(torch.sigmoid))).steps}
    assert "score" in names and not names & {"maximum", "weights", "rescale"}


def test_only_a_tile_that_needs_it_has_the_mask_and_only_loads_by_position_wait():
    documents, lengths = torch.zeros(64).int(), torch.zeros(4).int()
    own = Variant(mask=lambda b, h, q, k: documents[q] == documents[k])
    short = Variant(mask=lambda b, h, q, k: k < lengths[b])
    assert cost(own).step("mask") is None
    assert cost(own, masked=True).step("mask").waited > 0
    assert cost(short, masked=True).step("mask").waited == 0


def test_what_is_read_by_distance_waits_as_far_as_the_product_of_s_does_not_cover_it():
    table, rows = torch.zeros(2049), torch.zeros(2048)
    by_distance = Variant(lambda s, b, h, q, k: s + table[k - q + 1024])
    by_query = Variant(lambda s, b, h, q, k: s + rows[q])

    def waited(variant: Variant, tile_n: int, dims: int) -> float:
        return cost(variant, tile=(128, tile_n), dims=(dims, dims)).step("score").waited

    of_s = 2 * 64 * 96 * 64 / WGMMA_FLOP  # of one warpgroup
    assert of_s < L2_LATENCY
    assert waited(by_distance, 96, 64) == pytest.approx(2 * (L2_LATENCY - of_s))
    assert waited(by_distance, 128, 128) == 0
    assert waited(by_query, 96, 64) == waited(by_query, 128, 128) == 2 * L2_LATENCY


@pytest.mark.parametrize("early", [0, 2, 8])
def test_weights_before_a_wait_are_summed_and_their_sums_kept(early):
    schedule = Schedule(128, 96, 2, 2, "intra", early=early)
    plan = Plan(Variant(softmax=Elementwise(torch.sigmoid)), Problem("bf16", 64, 64), schedule)
    step = tile_cost(plan).step("weights")
    assert (step.instructions["FADD"] if step else 0) == 48 * early / 8
    assert (step.instructions["ISETP"] if step else 0) == (2 if early else 0)
    online = tile_cost(replace(plan, variant=Variant())).step("weights")
    assert online.instructions.get("ISETP", 0) == (4 if early else 0)
    assert (
        tile_cost(replace(plan, schedule=replace(schedule, overlap="none"))).step("weights") is None
    )


def test_ctas_beside_each_other_cost_a_tile_what_one_does():
    alone = Plan(
        Variant(mask=masks.causal), Problem("bf16", 64, 64), Schedule(64, 64, 2, 1, "none")
    )
    beside = replace(alone, schedule=replace(alone.schedule, residents=4))
    assert tile_cost(beside, masked=True) == tile_cost(alone, masked=True)


def test_steps_grow_with_the_number_of_warpgroups_and_keys():
    small = cost(Variant(mask=masks.causal), masked=True)
    wide = cost(Variant(mask=masks.causal), tile=(192, 128), consumers=3, masked=True)
    long = cost(Variant(mask=masks.causal), tile=(128, 256), masked=True)
    assert wide.elements == pytest.approx(1.5 * small.elements)
    assert 1.8 * small.elements < long.elements < 2 * small.elements


@given(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0, 1))
def test_a_tile_takes_at_least_the_longer_and_at_most_both(products, elements, exposed):
    made = TileCost((Step("score", {}, {"ALU": elements}),), products, 0)
    assert max(products, elements) <= made.total(exposed) <= (products + elements) * (1 + 1e-12)
    assert made.total(1.0) == pytest.approx(products + elements)
