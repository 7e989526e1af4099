"""Work tiles: which key tiles each visits, in which order, and when the last one is done."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3 import Variant, masks
from cutedsl_fa3.ledger import launch
from cutedsl_fa3.ledger.launch import Parameters, Sizes, makespan, visit_counts
from cutedsl_fa3.ledger.rates import SMS
from cutedsl_fa3.pipelines import Schedule, TileOrder
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.variant.visits import all_visits

DOCUMENTS = torch.arange(700) // 90
LENGTHS = torch.tensor([17, 400])
MASKS = {
    "all": None,
    "causal": masks.causal,
    "documents": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (k <= q),
    "lengths": lambda b, h, q, k: k < LENGTHS[b],
    "by head": lambda b, h, q, k: k <= q + 16 * h,
}
SIZES = Sizes(2, 3, 500, 700)


def plan(mask, **changes) -> Plan:
    schedule = Schedule(**{"tile_m": 128, "tile_n": 64, "overlap": "none", **changes})
    return Plan(Variant(mask=mask), Problem("bf16", 64, 64), schedule)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MASKS)
def test_visits_are_those_of_the_kernel_in_the_order_of_its_ctas(name, group):
    made = plan(MASKS[name], tile_m=64, consumers=1, head_group=group)
    found = visit_counts(made, SIZES)
    entries = all_visits(made.variant.mask, made.variant.captures, *SIZES, 64, 64).flatten(0, 1)
    heads, blocks, _ = entries.shape
    order = [TileOrder(group).at(i, blocks, heads) for i in range(blocks * heads)]
    of_each = [entries[head, m_block] for m_block, head in order]
    assert found.total.tolist() == [int((e >= 0).sum()) for e in of_each]
    assert found.masked.tolist() == [int((e >= 0).logical_and(e % 2 == 1).sum()) for e in of_each]


@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("name", ["all", "causal"])
def test_a_warpgroup_passes_over_the_first_tiles_that_its_rows_do_not_see(name, consumers):
    made = plan(MASKS[name], tile_m=64 * consumers, consumers=consumers, head_group=1)
    q, k = torch.arange(SIZES.seqlen_q)[:, None], torch.arange(SIZES.seqlen_k)
    seen = k <= q + SIZES.seqlen_k - SIZES.seqlen_q if name == "causal" else (k >= 0) & (q >= 0)
    wanted = []
    for first in range(0, SIZES.seqlen_q, 64 * consumers):
        strips = [seen[row : row + 64] for row in range(first, first + 64 * consumers, 64)]
        tiles = [-(-int(strip.sum(1).max()) // 64) for strip in strips if len(strip)]
        wanted.append(sum(tiles) / consumers)
    heads = SIZES.batch * SIZES.heads
    assert visit_counts(made, SIZES).total.tolist() == pytest.approx(wanted[::-1] * heads)


def test_tiles_that_are_too_many_to_look_at_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(launch, "MOST_DECIDED", 4 * 11 * 2)
    assert visit_counts(plan(masks.causal), SIZES) is not None
    assert visit_counts(plan(MASKS["by head"]), SIZES) is None
    assert visit_counts(plan(None), SIZES._replace(batch=0)) is None


durations = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=60)


@given(durations, st.integers(1, 9))
def test_each_worker_takes_the_next_as_soon_as_it_is_free(given_, workers):
    free = [0.0] * workers
    for duration in given_:
        first = free.index(min(free))
        free[first] += duration
    assert makespan(given_, workers) == pytest.approx(max(free))


@given(durations, st.integers(1, 9))
def test_the_end_lies_between_the_mean_load_and_one_more_piece(given_, workers):
    end = makespan(given_, workers)
    assert end >= max(max(given_), sum(given_) / workers) * (1 - 1e-9)
    assert end <= (sum(given_) / workers + max(given_)) * (1 + 1e-9)


def test_more_work_tiles_than_are_handed_out_are_estimated_within_a_piece(monkeypatch):
    many = [1.0 + n % 7 for n in range(5000)]
    exact = makespan(many)
    monkeypatch.setattr(launch, "MOST_HANDED_OUT", 100)
    assert makespan(many) == pytest.approx(exact, abs=max(many))


ONE = Parameters(1.0, 0.0, {"persistent": 50.0}, {"1 none": 1.0})


def clocks_of(work_tiles: int, residents: int) -> float:
    """Of a launch of equal work tiles, three key tiles of 100 clocks each."""
    schedule = Schedule(64, 64, 2, 1, "none", persistent=True, residents=residents)
    visits = launch.Visits(torch.full((work_tiles,), 3.0), torch.zeros(work_tiles))
    return launch.milliseconds(schedule, 100.0, 100.0, visits, ONE) * 1e6


@pytest.mark.parametrize("residents", [1, 2, 3, 4])
def test_ctas_beside_each_other_share_the_pipes_and_not_their_overheads(residents):
    rounds = 12 // residents
    found = clocks_of(12 * SMS, residents)
    assert found == pytest.approx(rounds * (residents * 300.0 + 50.0))


@pytest.mark.parametrize("residents", [2, 4])
def test_a_cta_that_is_alone_on_its_multiprocessor_shares_nothing(residents):
    assert clocks_of(SMS, residents) == pytest.approx(350.0)
    assert clocks_of(SMS + 1, residents) == pytest.approx(650.0)


def test_warpgroups_of_several_ctas_count_as_those_of_one():
    made = Parameters(1.8, 0.0, {"persistent": 5.0}, {"2 intra": 0.4, "3 both": 0.1, "3 none": 0.2})
    three = Schedule(64, 64, 2, 1, "none", residents=3, persistent=True)
    assert launch.overlap_kind(three) == "3 none" and made.knows(three)
    four = Schedule(64, 64, 2, 1, "none", residents=4, persistent=True)
    assert not made.knows(four) and made.exposed_by(four) == 0.2


def test_a_kind_of_schedule_that_was_not_fitted_takes_the_most_of_its_like():
    made = Parameters(1.8, 0.0, {"a CTA a tile": 5.0}, {"2 intra": 0.4, "2 none": 0.7, "3 both": 0})
    asked = Schedule(128, 128, 2, 2, "both")
    assert not made.knows(asked) and made.exposed_by(asked) == 0.7
    assert made.knows(Schedule(192, 128, 2, 3, "both"))
    assert made.exposed_by(Schedule(64, 128, 2, 1, "none")) == 0.7
    assert made.work_tile_by(asked) == 5.0
