"""Random programs of a few warps: where the model finds nothing, no order of their steps fails."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3.model import events as ev
from cutedsl_fa3.model.check import replay
from cutedsl_fa3.model.events import CTA_BYTES, Event
from cutedsl_fa3.model.explore import TooMany, explore

BARRIERS = (CTA_BYTES + 1024, CTA_BYTES + 1032)
PLACES = (((CTA_BYTES, CTA_BYTES + 128),), ((CTA_BYTES + 128, CTA_BYTES + 256),))
BYTES = 128
MOST_STATES = 20_000

barrier, place = st.sampled_from(BARRIERS), st.sampled_from(PLACES)
named = st.sampled_from((Event(ev.SYNC, 1, 64), Event(ev.SIGNAL, 1, 64)))
wait = barrier.flatmap(
    lambda at: st.sampled_from([Event(ev.WAIT, at, value=parity) for parity in (0, 1)])
)
arrive = barrier.flatmap(lambda at: st.sampled_from([Event(ev.ARRIVE, at, n) for n in (1, 2)]))
expect = barrier.flatmap(
    lambda at: st.sampled_from([Event(ev.EXPECT, at, n, BYTES) for n in (0, 1)])
)
by_threads = place.flatmap(
    lambda where: st.sampled_from([Event(kind, region=where) for kind in (ev.READ, ev.WRITE)])
)


@st.composite
def copies(draw: st.DrawFn) -> tuple[Event, ...]:
    """An announced copy, or one that is not."""
    at, where = draw(barrier), draw(place)
    copy = Event(ev.COPY, value=BYTES, targets=((at, where),))
    return draw(st.sampled_from(((Event(ev.EXPECT, at, 1, BYTES), copy), (copy,))))


@st.composite
def products(draw: st.DrawFn) -> tuple[Event, ...]:
    """A product, and perhaps the wait for it."""
    steps = (Event(ev.FENCE), Event(ev.PRODUCT, region=draw(place)), Event(ev.COMMIT))
    return (*steps, Event(ev.RETIRE)) if draw(st.booleans()) else steps


one = st.one_of(named, wait, arrive, expect, by_threads).map(lambda event: (event,))
step = st.one_of(one, one, copies(), products())
program = st.lists(step, max_size=4).map(lambda steps: [e for group in steps for e in group])


def opened(programs: list[list[Event]], counts: tuple[int, int]) -> list[tuple[Event, ...]]:
    """The programs behind the initialisation of both mbarriers, for all to see."""
    first = [Event(ev.INIT, at, n) for at, n in zip(BARRIERS, counts, strict=True)]
    meet = Event(ev.SYNC, 0, 32 * len(programs))
    return [
        tuple([*(first if number == 0 else []), meet, *steps])
        for number, steps in enumerate(programs)
    ]


def agree(programs: list[tuple[Event, ...]]) -> bool:
    """Whether the model found a fault or no order has one; True where there are too many."""
    outcome = replay(None, programs, range(len(programs)), 32 * len(programs))
    if outcome.findings:
        return True
    try:
        return explore(programs, MOST_STATES).ok
    except TooMany:
        return True


@settings(max_examples=400, deadline=None)
@given(st.lists(program, min_size=2, max_size=3), st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_a_random_program_that_the_model_passes_ends_alike_in_every_order(programs, counts):
    made = opened(programs, counts)
    assert agree(made), made


@st.composite
def rings(draw: st.DrawFn) -> list[list[Event]]:
    """A ring of one or two slots with at most one step left out, doubled or moved."""
    stages, tiles = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    consumers = draw(st.integers(1, 2))
    full = [CTA_BYTES + 1024 + 8 * s for s in range(stages)]
    empty = [CTA_BYTES + 2048 + 8 * s for s in range(stages)]
    producer, consumer = [], []
    for tile in range(tiles):
        slot, turn = tile % stages, tile // stages % 2
        producer += [
            Event(ev.WAIT, empty[slot], value=1 - turn),
            Event(ev.EXPECT, full[slot], 1, BYTES),
            Event(ev.COPY, value=BYTES, targets=((full[slot], PLACES[slot]),)),
        ]
        consumer += [
            Event(ev.WAIT, full[slot], value=turn),
            Event(ev.READ, region=PLACES[slot]),
            Event(ev.ARRIVE, empty[slot], 1),
        ]
    warps = [producer, *[list(consumer) for _ in range(consumers)]]
    which = draw(st.integers(0, len(warps) - 1))
    at = draw(st.integers(0, len(warps[which]) - 1))
    how = draw(st.sampled_from(("as it is", "drop", "double", "parity", "swap")))
    steps = warps[which]
    if how == "drop":
        del steps[at]
    elif how == "double":
        steps.insert(at, steps[at])
    elif how == "parity" and steps[at].kind == ev.WAIT:
        steps[at] = steps[at]._replace(value=1 - steps[at].value)
    elif how == "swap" and at + 1 < len(steps):
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
    first = [Event(ev.INIT, a, 1) for a in full] + [Event(ev.INIT, a, consumers) for a in empty]
    meet = Event(ev.SYNC, 0, 32 * len(warps))
    return [tuple([*(first if n == 0 else []), meet, *s]) for n, s in enumerate(warps)]


@settings(max_examples=300, deadline=None)
@given(rings())
def test_a_ring_with_one_step_changed_fails_in_no_order_if_the_model_passes_it(programs):
    assert agree(programs), programs


A, B = BARRIERS
ARRIVE_A, ARRIVE_B = Event(ev.ARRIVE, A, 1), Event(ev.ARRIVE, B, 1)
LOAD = (Event(ev.EXPECT, B, 1, BYTES), Event(ev.COPY, value=BYTES, targets=((B, PLACES[0]),)))
# Each had once passed: what one order hides, another shows.
HIDDEN = {
    "an arrival of two that may come in between": (
        [[ARRIVE_B, ARRIVE_B], [], [Event(ev.ARRIVE, B, 2)]],
        (1, 3),
    ),
    "an arrival that may come before a wait for the beginning": (
        [[ARRIVE_A], [Event(ev.WAIT, A, value=1), ARRIVE_A]],
        (1, 1),
    ),
    "an arrival that may take the place of the one that a wait is for": (
        [[ARRIVE_B], [ARRIVE_B, *LOAD, Event(ev.WAIT, B), Event(ev.READ, region=PLACES[0])]],
        (1, 2),
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_fault_that_one_order_hides_is_found(name: str) -> None:
    programs, counts = HIDDEN[name]
    made = opened([list(program) for program in programs], counts)
    assert not explore(made).ok
    assert replay(None, made, range(len(made)), 32 * len(made)).findings
