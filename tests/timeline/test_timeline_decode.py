"""Stamps of a debug build, from words that nobody noted to a timeline."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.pipelines import Barrier, Barriers, Ring, Role
from cutedsl_fa3.pipelines.stamps import FIRST, NAMED, PAIR, StampPlan
from cutedsl_fa3.timeline.decode import decode
from cutedsl_fa3.timeline.table import NO_TILE, TimelineError

WORD = 1 << 32


@dataclass
class Tables:
    """A producer and two consumer warpgroups."""

    rings: dict = field(default_factory=lambda: {n: Ring((n,), 2) for n in ("q", "k", "v")})
    roles: dict = field(default_factory=lambda: {"producer": Role(4), "consumer": Role(8)})
    barriers: Barriers = field(default_factory=lambda: Barriers({"turn": Barrier(256, 2)}))


PLAN = StampPlan.of(Tables(), room=64)
LANES = [name for name, _ in PLAN.lanes]
Stamps = list[tuple[str, bool, int]]  # what, whether it ends, at which clock


def words(lanes: dict[str, Stamps], start: int = 0, plan: StampPlan = PLAN, ns: int = 0) -> list:
    """What a kernel would have noted, its clocks counted from `start`."""
    found = []
    for name, _ in plan.lanes:
        stamps = lanes.get(name, [("role", False, 0), ("role", True, 1)])
        pairs = [(len(stamps), ns), ((start + stamps[0][2]) % WORD, 0)]
        for what, ends, clock in stamps[: plan.room - FIRST]:
            place = max(i for i, each in enumerate(plan.places) if each == what)
            pairs.append((2 * place + ends, (start + clock) % WORD))
        pairs += [(0, 0)] * (plan.room - len(pairs))
        found += [word for pair in pairs for word in pair]
    return found


def waits(*each: tuple[str, int, int]) -> Stamps:
    """A role with these waits, from 0 to a hundred clocks after the last."""
    inner = [stamp for what, a, b in each for stamp in ((what, False, a), (what, True, b))]
    return [("role", False, 0), *inner, ("role", True, each[-1][2] + 100)]


OVERLAPPED = waits(
    ("q full", 0, 50),
    ("k full", 50, 60),
    ("QK", 70, 100),
    ("k full", 300, 310),
    ("turn", 310, 320),
    ("v full", 330, 340),
    ("QK", 350, 400),
    ("PV", 500, 510),
    ("v full", 600, 610),
    ("PV", 620, 700),
)


def test_waits_and_what_lies_between_them_are_named_with_their_tiles():
    timeline = decode(PLAN, words({"consumer 1": OVERLAPPED}), "a kernel", 5)
    assert [(e.kind, e.what, e.tile, e.start, e.end) for e in timeline.of("consumer 1")] == [
        ("wait", "q full", NO_TILE, 0, 50),
        ("wait", "k full", 0, 50, 60),
        ("work", "issue", 0, 60, 70),
        ("wait", "QK", 0, 70, 100),
        ("work", "softmax", 0, 100, 300),
        ("wait", "k full", 1, 300, 310),
        ("wait", "turn", 1, 310, 320),
        ("work", "issue", 1, 320, 330),
        ("wait", "v full", 0, 330, 340),
        ("work", "issue", 0, 340, 350),
        ("wait", "QK", 1, 350, 400),
        ("work", "softmax", 1, 400, 500),
        ("wait", "PV", 0, 500, 510),
        ("work", "rescale", 0, 510, 600),
        ("wait", "v full", 1, 600, 610),
        ("work", "issue", 1, 610, 620),
        ("wait", "PV", 1, 620, 700),
        ("work", "issue", 1, 700, 800),
    ]
    assert (timeline.origin, timeline.title, timeline.cta) == ("measured", "a kernel", 5)
    assert timeline.dropped == 0 and timeline.ghz is None


def test_where_values_are_waited_for_before_the_softmax_it_comes_behind_them():
    timeline = decode(PLAN, words({"consumer 0": OVERLAPPED}), "", waits_early=True)
    named = [(e.what, e.start) for e in timeline.of("consumer 0") if e.kind == "work"]
    assert ("softmax", 100) in named  # the first tile has no values before it
    assert ("issue", 400) in named and ("softmax", 510) in named


def test_a_producer_loads_after_it_has_waited_for_a_slot():
    stamps = waits(("k empty", 10, 20), ("q empty", 50, 60), ("k empty", 90, 200))
    timeline = decode(PLAN, words({"producer": stamps}), "")
    named = [(e.what, e.tile) for e in timeline.of("producer") if e.kind == "work"]
    assert named == [("other", NO_TILE), ("load k", 0), ("load q", 0), ("load k", 1)]


def test_an_epilogue_holds_its_waits():
    stamps = [
        ("role", False, 0),
        ("k full", False, 0),
        ("k full", True, 5),
        ("epilogue", False, 10),
        ("store", False, 30),
        ("store", True, 60),
        ("epilogue", True, 80),
        ("role", True, 90),
    ]
    timeline = decode(PLAN, words({"consumer 0": stamps}), "")
    assert [(e.kind, e.what, e.tile, e.start) for e in timeline.of("consumer 0")][1:] == [
        ("work", "issue", 0, 5),
        ("work", "epilogue", NO_TILE, 10),
        ("wait", "store", NO_TILE, 30),
        ("work", "epilogue", NO_TILE, 60),
        ("work", "other", NO_TILE, 80),
    ]


@given(st.integers(0, WORD - 1), st.lists(st.integers(0, 400), min_size=2, max_size=40))
def test_a_clock_that_wraps_and_words_with_a_sign_change_nothing(start, steps):
    clocks = [sum(steps[: n + 1]) for n in range(len(steps))]
    stamps = [("role", False, 0)]
    stamps += [
        ("k full", bool(n % 2), clock) for n, clock in enumerate(clocks[: len(steps) // 2 * 2])
    ]
    lanes = {"consumer 0": [*stamps, ("role", True, clocks[-1] + 1)]}
    plain = decode(PLAN, words(lanes), "")
    noted = words(lanes, start)
    assert decode(PLAN, noted, "") == plain
    assert decode(PLAN, [w - (w >> 31 << 32) for w in noted], "") == plain
    assert sum(e.clocks for e in plain.of("consumer 0")) == clocks[-1] + 1


@given(st.integers(0, 200))
def test_stamps_beyond_the_room_are_counted_and_what_came_before_is_kept(pairs):
    each = [("k full", 10 * n, 10 * n + 4) for n in range(pairs)]
    stamps = waits(*each) if each else [("role", False, 0), ("role", True, 1)]
    timeline = decode(PLAN, words({"consumer 0": stamps}), "")
    room = PLAN.room - FIRST
    assert timeline.dropped == max(0, len(stamps) - room)
    kept = min(pairs, (room - 1) // 2)
    assert len([e for e in timeline.of("consumer 0") if e.kind == "wait"]) == kept


def test_how_fast_the_multiprocessor_ran_follows_from_nanoseconds():
    lanes = {name: [("role", False, 0), ("role", True, 3400)] for name in LANES}
    assert decode(PLAN, words(lanes, ns=2000), "").ghz == pytest.approx(1.7)
    assert decode(PLAN, words(lanes, ns=0), "").ghz is None


@pytest.mark.parametrize(
    ("stamps", "said"),
    [
        ([("role", False, 0), ("k full", True, 5)], "k full ends where it waits for nothing"),
        (
            [("role", False, 0), ("k full", False, 5), ("v full", False, 6)],
            "v full begins where it waits for k full",
        ),
        (
            [("role", False, 0), ("k full", False, 5), ("v full", True, 6)],
            "v full ends where it waits for k full",
        ),
        (
            [("role", False, 9), ("k full", False, 5)],
            "k full is noted at clock -4.0, after 0.0",
        ),
    ],
)
def test_stamps_in_an_order_that_no_role_has_are_refused(stamps, said):
    with pytest.raises(TimelineError, match=f"producer: {said}"):
        decode(PLAN, words({"producer": stamps}), "")


def test_words_that_are_too_few_or_of_no_stamp_are_refused():
    with pytest.raises(TimelineError, match=f"3 words: this plan has {PLAN.words}"):
        decode(PLAN, [0, 0, 0], "")
    with pytest.raises(TimelineError, match="producer: no stamps; CTA 4 has not run"):
        decode(PLAN, [0] * PLAN.words, "", 4)
    noted = words({})
    noted[FIRST * PAIR] = 2 * len(PLAN.places)
    with pytest.raises(TimelineError, match=f"code {noted[FIRST * PAIR]} is none of"):
        decode(PLAN, noted, "")


@given(st.sampled_from(NAMED), st.booleans())
def test_a_named_code_is_read_as_it_was_written(name, ends):
    code = PLAN.code(name, ends)
    assert (PLAN.places[code // 2], bool(code % 2)) == (name, ends)
