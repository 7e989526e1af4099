"""The table of intervals: what it refuses, what it says of itself, the way to JSON and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.timeline.table import (
    GROUPS,
    TENSOR_CORES,
    Interval,
    Timeline,
    TimelineError,
    from_zero,
    group_of,
)

WORDS = st.sampled_from(["softmax", "k full", "load k", "QK", "epilogue"])


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Lanes of intervals side by side, with and without gaps."""
    found = []
    for lane in draw(st.lists(st.sampled_from(["a", "b 0", TENSOR_CORES]), unique=True)):
        at = draw(st.integers(0, 50))
        for _ in range(draw(st.integers(1, 6))):
            start = at + draw(st.integers(0, 20))
            at = start + draw(st.integers(0, 30))
            kind = draw(st.sampled_from(["work", "wait"]))
            tile = draw(st.integers(-1, 9))
            found.append(Interval(lane, kind, draw(WORDS), tile, float(start), float(at)))
    origin = draw(st.sampled_from(["predicted", "measured"]))
    ghz = draw(st.one_of(st.none(), st.floats(1.0, 2.0)))
    return Timeline(origin, "a kernel", tuple(found), draw(st.integers(0, 9)), 0, ghz)


@given(timelines())
def test_json_and_back_is_the_same_timeline(timeline):
    assert Timeline.from_json(timeline.to_json()) == timeline


@given(timelines(), st.integers(0, 40), st.integers(1, 60))
def test_a_part_is_cut_at_its_ends_and_keeps_what_lies_within(timeline, start, long):
    part = timeline.between(start, start + long)
    for lane in timeline.lanes:
        inside = sum(
            max(0.0, min(e.end, start + long) - max(e.start, start)) for e in timeline.of(lane)
        )
        assert sum(e.clocks for e in part.of(lane)) == pytest.approx(inside)
    assert all(0 <= e.start <= e.end <= long for e in part.intervals)


@given(timelines())
def test_clocks_from_zero_begin_at_zero_and_last_as_long(timeline):
    moved = from_zero(timeline.intervals)
    assert min((e.start for e in moved), default=0.0) == 0.0
    assert [e.clocks for e in moved] == [e.clocks for e in timeline.intervals]


def at(start: float, end: float, kind: str = "work", what: str = "softmax", tile: int = 0):
    return Interval("consumer 0", kind, what, tile, start, end)


def test_intervals_that_overlap_in_a_lane_or_end_before_they_begin_are_refused():
    with pytest.raises(TimelineError, match="begins before the end of"):
        Timeline("predicted", "", (at(0, 10), at(9, 12)))
    with pytest.raises(TimelineError, match="ends before it begins"):
        Timeline("predicted", "", (at(10, 9),))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"intervals": [{"lane": 1}]}', '{"intervals": [], "unheard": 1}']
)
def test_what_is_no_timeline_is_refused(text):
    with pytest.raises(TimelineError, match="no timeline"):
        Timeline.from_json(text)


def test_clocks_a_tile_leave_out_first_loads_and_epilogues():
    ends = [500, 600, 700, 800, 900]
    waits = [at(end - 50, end, "wait", "QK", n) for n, end in enumerate(ends)]
    epilogue = at(950, 5000, what="epilogue", tile=-1)
    more = [at(end + 5950, end + 6000, "wait", "QK", 5 + n) for n, end in enumerate((0, 300, 600))]
    timeline = Timeline("predicted", "", (*waits, epilogue, *more))
    assert timeline.clocks_a_tile() == 100.0  # three tiles of the second work tile are too few
    assert Timeline("predicted", "", tuple(waits[:3])).clocks_a_tile() is None
    assert "100 from key tile to key tile" in str(timeline)


def test_the_page_says_works_and_waits_of_each_lane():
    timeline = Timeline("measured", "a kernel", (at(0, 25), at(25, 100, "wait", "k full")), 3, 7)
    page = str(timeline)
    assert page.startswith("measured: a kernel, CTA 3: 100 clocks")
    assert "works  25%, waits  75%: wait k full 75, softmax 25" in page
    assert "7 stamps found no room" in page
    assert (timeline.waited("consumer 0"), timeline.worked("consumer 0", "mask")) == (75, 0)


def test_every_kind_of_work_is_of_one_group():
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names))
    assert (group_of("load k"), group_of("QK 1"), group_of("unheard")) == (
        "loads",
        "products",
        "other",
    )
