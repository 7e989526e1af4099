"""Every interleaving, one by one: what `search.py` says without walking them, on small programs.

A state is how far each warp is, every barrier, the copies in flight and what lies where; states are
kept by their hash, so that each is walked once. Only steps that no other party can notice are
joined with the step before them. It is the judge of the reduction, not a tool for whole kernels:
the states grow exponentially with the number of warps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import events as ev
from .analyse import WRITES, _meet
from .events import Event

LOCAL = frozenset({ev.FENCE, ev.COMMIT, ev.TOUCH, ev.PROXY, ev.STORE_COMMIT})
MOST_STATES = 400_000


class TooMany(RuntimeError):
    """More states than are worth walking."""


class Barrier(NamedTuple):
    """An mbarrier: what it was initialised for, what is still to come, how many phases ended."""

    expected: int
    pending: int
    tx: int
    phase: int


class Meeting(NamedTuple):
    """A named barrier: threads that have come, and how many rounds have ended."""

    arrived: int
    ended: int


class State(NamedTuple):
    """Everything that decides what can happen from here on."""

    at: tuple[int, ...]
    joined: tuple[int, ...]  # the round that a warp waits in, or -1
    barriers: tuple[tuple[int, Barrier], ...]
    meetings: tuple[tuple[int, Meeting], ...]
    flying: frozenset[tuple[int, int, int]]  # copies: (warp, step, which CTA's)
    reading: frozenset[tuple[int, int]]  # products and stores: (warp, step)
    last: tuple[tuple[tuple[int, int, int], Any], ...]  # the writes that lie somewhere, in order
    found: tuple[tuple[int, int, Any], ...]


@dataclass
class Explored:
    """What some interleaving does: stand still, let accesses meet, break a count; all results."""

    states: int = 0
    deadlocks: int = 0
    clashes: set[str] = field(default_factory=set)
    overflows: int = 0
    results: set[Any] = field(default_factory=set)

    @property
    def ok(self) -> bool:
        """Whether every interleaving ends, without a clash, and all find the same."""
        return not self.deadlocks and not self.clashes and not self.overflows and self.one_result

    @property
    def one_result(self) -> bool:
        """Whether all reads find the same in every interleaving that ends."""
        return len(self.results) <= 1


def explore(programs: Sequence[Sequence[Event]], most: int = MOST_STATES) -> Explored:
    """Walk every interleaving of the warps' steps and the copies' landings.

    Raises: TooMany.
    """
    found, programs = Explored(), [tuple(program) for program in programs]
    nobody = tuple(-1 for _ in programs)
    start = State(tuple(0 for _ in programs), nobody, (), (), frozenset(), frozenset(), (), ())
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        found.states += 1
        following = list(_following(programs, state, found))
        done = all(at >= len(p) for at, p in zip(state.at, programs, strict=True))
        if done and not state.flying:
            found.results.add(state.found)
        elif not following:
            found.deadlocks += 1
        for after in following:
            if after not in seen:
                if len(seen) >= most:
                    raise TooMany(f"more than {most} states")
                seen.add(after)
                todo.append(after)
    return found


def _following(programs: list[tuple[Event, ...]], state: State, found: Explored) -> Any:
    for landing in state.flying:
        yield _land(programs, state, landing, found)
    for warp, program in enumerate(programs):
        if state.at[warp] < len(program):
            after = _step(program, state, warp, found, programs)
            if after is not None:
                yield _local(programs, after, warp)


def _local(programs: list[tuple[Event, ...]], state: State, warp: int) -> State:
    """Go on over steps that nobody else notices."""
    at = state.at[warp]
    while at < len(programs[warp]) and programs[warp][at].kind in LOCAL:
        at += 1
    return state if at == state.at[warp] else _moved(state, warp, at)


def _moved(state: State, warp: int, at: int) -> State:
    return State((*state.at[:warp], at, *state.at[warp + 1 :]), *state[1:])


def _put(pairs: tuple, key: int, value: Any) -> tuple:
    return tuple(sorted({**dict(pairs), key: value}.items()))


def _count(state: State, address: int, arrivals: int, announced: int, found: Explored) -> State:
    barrier = dict(state.barriers).get(address)
    if barrier is None:
        found.clashes.add("not initialised")
        return state
    if arrivals > barrier.pending:
        found.overflows += 1
    pending, tx, phase = barrier.pending - arrivals, barrier.tx + announced, barrier.phase
    if pending <= 0 and tx == 0:
        pending, phase = barrier.expected, phase + 1
    made = Barrier(barrier.expected, pending, tx, phase)
    return state._replace(barriers=_put(state.barriers, address, made))


def _land(
    programs: list[tuple[Event, ...]], state: State, landing: tuple[int, int, int], found: Explored
) -> State:
    warp, step, which = landing
    event = programs[warp][step]
    state = state._replace(flying=state.flying - {landing})
    return _count(state, event.targets[which][0], 0, -event.value, found)


def _clashes(
    programs: list[tuple[Event, ...]], state: State, kind: str, region: ev.Region, warp: int
) -> str | None:
    """What is under way in these bytes and must not be."""
    for who, step, which in state.flying:
        if _meet(programs[who][step].targets[which][1], region):
            return f"{kind} during copy"
    if kind in WRITES:
        for who, step in state.reading:
            if _meet(programs[who][step].region, region):
                return f"{kind} during {programs[who][step].kind}"
    return None


def _write(state: State, key: tuple[int, int, int], region: ev.Region, exact: bool = True) -> State:
    """Lay a write over what lies there, as far as it is covered.

    Warps that write their parts of one tensor lie side by side.
    """
    left = []
    for other, place in state.last:
        covers = exact and _meet(place, region)
        rest = ev.without(place, region) if covers else place
        if rest:
            left.append((other, rest))
    return state._replace(last=tuple(sorted([*left, (key, region)])))


def _read(state: State, warp: int, step: int, region: ev.Region) -> State:
    lies = tuple(key for key, place in state.last if _meet(place, region))
    return state._replace(found=tuple(sorted([*state.found, (warp, step, lies)])))


def _holds(state: State, event: Event) -> bool:
    """Whether an mbarrier lets nobody through who waits like this."""
    barrier = next((each for place, each in state.barriers if place == event.at), None)
    return barrier is None or (barrier.phase & 1) == event.value


def _step(
    program: tuple[Event, ...],
    state: State,
    warp: int,
    found: Explored,
    programs: list[tuple[Event, ...]],
) -> State | None:
    """One step of a warp, or None where it is held."""
    at = state.at[warp]
    event = program[at]
    kind = event.kind
    if kind == ev.WAIT and _holds(state, event):  # before all else, since most steps are held so
        return None
    after = _moved(state, warp, at + 1)
    if kind == ev.INIT:
        made = Barrier(event.count, event.count, 0, 0)
        return after._replace(barriers=_put(state.barriers, event.at, made))
    if kind in (ev.ARRIVE, ev.EXPECT):
        return _count(after, event.at, event.count, event.value if kind == ev.EXPECT else 0, found)
    if kind in (ev.SYNC, ev.SIGNAL):
        return _meet_others(state, after, warp, event)
    if kind in (ev.CLUSTER_ARRIVE, ev.CLUSTER_WAIT):
        raise TooMany("clusters are not walked")
    if kind == ev.COPY:
        for which, (_, region) in enumerate(event.targets):
            clash = _clashes(programs, after, "copy", region, warp)
            found.clashes |= {clash} if clash else set()
            after = _write(after, (warp, at, which), region)
            after = after._replace(flying=after.flying | {(warp, at, which)})
        return after
    if kind in (ev.PRODUCT, ev.READ, ev.STORE):
        clash = _clashes(programs, after, kind, event.region, warp)
        found.clashes |= {clash} if clash else set()
        after = _read(after, warp, at, event.region)
        if kind != ev.READ:
            after = after._replace(reading=after.reading | {(warp, at)})
        return after
    if kind == ev.WRITE:
        clash = _clashes(programs, after, "write", event.region, warp)
        found.clashes |= {clash} if clash else set()
        return _write(after, (warp, at, 0), event.region, event.exact)
    if kind in (ev.RETIRE, ev.STORE_WAIT):
        which, ends = (ev.PRODUCT, ev.COMMIT) if kind == ev.RETIRE else (ev.STORE, ev.STORE_COMMIT)
        commits = [i for i in range(at) if program[i].kind == ends]
        limit = commits[-1 - event.value] if len(commits) > event.value else -1
        over = {(w, s) for w, s in state.reading if w == warp and s < limit}
        over = {(w, s) for w, s in over if program[s].kind == which}
        return after._replace(reading=after.reading - over)
    return after


def _meet_others(state: State, after: State, warp: int, event: Event) -> State | None:
    meeting = dict(state.meetings).get(event.at, Meeting(0, 0))
    joined = state.joined[warp]
    if joined >= 0:
        if meeting.ended <= joined:
            return None
        return after._replace(joined=(*state.joined[:warp], -1, *state.joined[warp + 1 :]))
    come = meeting.arrived + 32
    made = Meeting(0, meeting.ended + 1) if come >= event.count else meeting._replace(arrived=come)
    meetings = _put(state.meetings, event.at, made)
    if event.kind == ev.SIGNAL or made.ended > meeting.ended:
        return after._replace(meetings=meetings)
    waiting = (*state.joined[:warp], meeting.ended, *state.joined[warp + 1 :])
    return state._replace(meetings=meetings, joined=waiting)
