"""Predicted timelines: deterministic, no unit used twice, products as the ledger counts them."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_forwards import KEY_TILES, TILE_N, forward, tensor

from cutedsl_fa3 import Unsupported, Variant, masks
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.ledger.tile import products_of, tile_cost
from cutedsl_fa3.model.names import Names
from cutedsl_fa3.pipelines import Schedule, ScheduleError
from cutedsl_fa3.timeline import Latencies, Timeline, predict, predict_gemm
from cutedsl_fa3.timeline.table import TENSOR_CORES, TMA
from cutedsl_fa3.timeline.timed import Clockwork, Stalled

# By the stages of a ring, and other overlaps of two.
DEPTHS = [(1, "both"), (2, "both"), (3, "both")]
KINDS = [*DEPTHS, (2, "none")]
SMALL = Schedule(128, TILE_N, stages=2, overlap="none")

some = st.integers(0, 2000).map(float)
latencies = st.builds(
    Latencies,
    tma_load=some,
    l2_bytes=st.sampled_from([5.0, 20.0, 38.8, 100.0]),
    tma_issue=st.integers(0, 100).map(float),
    product=st.integers(0, 200).map(float),
    mbarrier=st.integers(0, 100).map(float),
    barrier=st.integers(0, 100).map(float),
    store=some,
    alone=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
)
few = settings(max_examples=15)


@few
@given(latencies, st.sampled_from(KINDS))
def test_equal_latencies_give_equal_timelines(given_latencies, kind):
    kernel = forward(*kind)
    assert kernel.run(given_latencies) == kernel.run(given_latencies)


@few
@given(latencies, st.sampled_from(KINDS))
def test_the_tensor_cores_work_as_many_clocks_as_the_ledger_counts(given_latencies, kind):
    kernel = forward(*kind)
    timeline = kernel.run(given_latencies)
    assert timeline.worked(TENSOR_CORES) == pytest.approx(KEY_TILES * products_of(kernel.plan))


@few
@given(latencies, st.sampled_from(KINDS))
def test_elements_take_what_the_ledger_counts_and_what_a_warp_takes_longer(given_latencies, kind):
    kernel = forward(*kind)
    timeline, cost = kernel.run(given_latencies), tile_cost(kernel.plan)
    consumers = kernel.plan.schedule.consumers
    for name, tiles in (("maximum", KEY_TILES), ("weights", KEY_TILES), ("rescale", KEY_TILES - 1)):
        worked = sum(timeline.worked(f"consumer {n}", name) for n in range(consumers))
        assert worked == pytest.approx(tiles * cost.step(name).takes * given_latencies.alone)


@few
@given(latencies, st.sampled_from(KINDS))
def test_no_unit_is_used_twice_at_once_and_no_role_does_two_things(given_latencies, kind):
    timeline = forward(*kind).run(given_latencies)
    assert set(timeline.lanes) == {"producer", "consumer 0", "consumer 1", TENSOR_CORES, TMA}
    for lane in timeline.lanes:
        for before, after in pairwise(timeline.of(lane)):
            assert before.end <= after.start, lane


@few
@given(latencies)
def test_more_stages_are_never_slower(given_latencies):
    clocks = [forward(*kind).run(given_latencies).clocks for kind in DEPTHS]
    assert clocks == sorted(clocks, reverse=True)


@few
@given(latencies, st.sampled_from(KINDS))
def test_a_tile_is_multiplied_only_when_its_bytes_are_there(given_latencies, kind):
    timeline = forward(*kind).run(given_latencies)
    come = {(e.what.split()[1], e.tile): e.end for e in timeline.of(TMA)}
    assert {tile for name, tile in come if name == "k"} == set(range(KEY_TILES))
    for product in timeline.of(TENSOR_CORES):
        operand = "k" if product.what.startswith("QK") else "v"
        assert product.start >= come[operand, product.tile]


@few
@given(latencies)
def test_with_turns_the_warpgroups_alternate_on_the_tensor_cores(given_latencies):
    timeline = forward(2, "both").run(given_latencies)
    first = [e.what.split()[1] for e in timeline.of(TENSOR_CORES) if e.what.startswith("QK")]
    assert first == ["0", "1"] * KEY_TILES


def test_overlap_inside_a_warpgroup_issues_the_next_scores_before_the_values():
    for overlap, expected in (("both", [1, 0]), ("none", [0, 0])):
        timeline = forward(2, overlap).run(Latencies())
        mine = [e for e in timeline.of(TENSOR_CORES) if e.what in ("QK 0", "PV 0")]
        order = [(e.what[:2], e.tile) for e in sorted(mine, key=lambda e: e.start)]
        second = order.index(("PV", 0))
        assert order[second - 1] == ("QK", expected[0]), overlap


def test_a_step_on_a_pipe_that_another_warpgroup_uses_waits_for_it():
    timeline = forward(2, "both").run(Latencies(alone=1.0))
    weights = [
        [e for e in timeline.of(f"consumer {n}") if e.what == "weights" and e.kind == "work"]
        for n in range(2)
    ]
    for mine in weights[0]:
        assert all(mine.end <= other.start or other.end <= mine.start for other in weights[1])


def test_programs_that_stop_in_the_middle_are_stalled():
    kernel = forward(2, "both")
    cut = tuple(p if n else p[: len(p) // 2] for n, p in enumerate(kernel.programs))
    with pytest.raises(Stalled, match="consumer 0"):
        Clockwork(cut, Names(kernel.kernel), kernel.costs, Latencies()).run()


def test_the_default_latencies_are_predicted_by_the_public_call():
    q, k = tensor(128), tensor()
    timeline = predict(q, k, k, schedule=Schedule(128, TILE_N, stages=2, overlap="both"))
    assert timeline.intervals == forward(2, "both").run(Latencies()).intervals
    assert timeline.origin == "predicted" and "128 x 32" in timeline.title


def test_masked_tiles_take_longer_and_hidden_ones_are_not_there():
    """The first CTA has the last queries, the last the first."""
    q = tensor(rows=256)
    causal = Variant(mask=masks.causal)
    first, last = (predict(q, q, q, causal, schedule=SMALL, cta=n) for n in (0, 1))
    tiles = {e.tile for e in first.of("consumer 1") if e.what == "maximum"}
    assert tiles == set(range(8))  # all keys, the masked ones first
    masked = {e.tile for e in first.of("consumer 1") if e.what == "mask"}
    assert masked == set(range(4))
    assert max(e.tile for e in last.of("consumer 1")) == 3


def test_tiles_that_hang_on_captured_values_are_those_of_the_values():
    document = torch.arange(256) // 64
    variant = Variant(mask=lambda b, h, q, k: document[q] == document[k])
    q = tensor(rows=256)
    timeline = predict(q, q, q, variant, schedule=SMALL)
    assert max(e.tile for e in timeline.of("consumer 0")) == 3  # of eight key tiles two documents
    assert any(e.what == "visits full" for e in timeline.of("consumer 0"))


def test_a_persistent_cta_draws_while_others_do():
    q = tensor(rows=128, heads=140)  # 140 work tiles: the first eight CTAs have two
    schedule = Schedule(128, TILE_N, stages=2, overlap="none", persistent=True)
    seen = {}
    for cta in (7, 8):
        timeline = predict(q, q, q, schedule=schedule, cta=cta)
        seen[cta] = sum(e.what == "copy q" for e in timeline.of(TMA))
    assert seen == {7: 2, 8: 1}


@pytest.mark.parametrize("cta", [-1, 1])
def test_a_cta_that_the_launch_has_not_is_refused(cta):
    q = tensor(128)
    with pytest.raises(Unsupported, match=rf"cta = {cta}: the launch has CTAs 0 to 0"):
        predict(q, q, q, schedule=SMALL, cta=cta)


def test_calls_without_a_kernel_and_schedules_that_do_not_fit_are_refused():
    q, none = tensor(), tensor(rows=0)
    with pytest.raises(Unsupported, match="no kernel runs for these"):
        predict(q, none, none)
    with pytest.raises(ScheduleError, match="tile_m"):
        predict(q, q, q, schedule=Schedule(128, TILE_N, consumers=1, overlap="none"))


@pytest.mark.parametrize("name", [each.name for each in fields(Latencies)])
@pytest.mark.parametrize("value", [-1, math.inf, math.nan, "soon", None, True])
def test_latencies_that_make_no_sense_are_refused(name, value):
    with pytest.raises(Unsupported, match=rf"Latencies\.{name} = .*: a number, .* is needed"):
        Latencies(**{name: value})


def test_no_bytes_a_clock_and_warps_faster_than_their_pipe_are_refused():
    with pytest.raises(Unsupported, match="l2_bytes = 0: a number, more than 0"):
        Latencies(l2_bytes=0)
    with pytest.raises(Unsupported, match=r"alone = 0\.9: a number, 1 or more"):
        Latencies(alone=0.9)


def test_a_cluster_is_refused_for_its_ctas_share_loads():
    q = tensor(rows=256)
    with pytest.raises(Unsupported, match=r"cluster = \(2, 1\): a CTA alone is predicted"):
        predict(q, q, q, schedule=Schedule(128, TILE_N, overlap="none", cluster=(2, 1)))


def gemm(stages: int) -> Timeline:
    schedule = Schedule(128, 128, stages=stages, consumers=2, overlap="none")
    return predict_gemm(GemmSm90(schedule), 8)


def test_a_gemm_with_a_slot_more_waits_less_and_multiplies_as_much():
    one, three = gemm(1), gemm(3)
    assert one.clocks > 1.5 * three.clocks
    for each in (one, three):
        assert each.worked(TENSOR_CORES) == pytest.approx(8 * 2 * 128 * 128 * 64 / 4096)
    assert one.waited("consumer 0") > three.waited("consumer 0")


def test_a_gemm_of_a_cluster_or_of_nothing_is_refused():
    with pytest.raises(Unsupported, match=r"cluster = \(2, 1\)"):
        predict_gemm(GemmSm90(Schedule(128, 128, overlap="none", cluster=(2, 1))), 4)
    with pytest.raises(Unsupported, match="k_tiles = 0"):
        predict_gemm(GemmSm90(Schedule(128, 128, overlap="none")), 0)
