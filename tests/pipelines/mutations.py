"""Single mutations of what a kernel's warps do, and programs of fewer warps to walk wholly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cutedsl_fa3.model import events as ev
from cutedsl_fa3.model.events import Event

WARPS_PER_GROUP = 4
Programs = tuple[tuple[Event, ...], ...]


def projected(programs: Programs, keep: Sequence[int]) -> Programs:
    """One warp of each warpgroup: the counts of barriers are those of a quarter of the warps."""
    made = []
    for number in keep:
        program: list[Event] = []
        for event in programs[number]:
            if event.kind == ev.INIT and event.count > 1:
                event = event._replace(count=event.count // WARPS_PER_GROUP)
            elif event.kind in (ev.SYNC, ev.SIGNAL):
                whole = 32 * len(keep) if event.at == 0 else event.count // WARPS_PER_GROUP
                event = event._replace(count=whole)
            program.append(event)
        made.append(tuple(program))
    return tuple(made)


def mutations(programs: Programs, of: Sequence[int]) -> Iterator[tuple[str, Programs]]:
    """Each single mutation of the steps that the warps `of` all do, in all of them at once.

    Drop, duplicate, swap with the next, other bytes, other parity, count in threads or one less,
    another stage's barrier, early exit.
    """
    first = programs[of[0]]
    for at, event in enumerate(first):
        for name, changed in _changes(first, at, event):
            yield f"{name} {event.kind} {at}", _with(programs, of, at, name, changed)
        if at + 1 < len(first) and first[at + 1].kind != event.kind:
            yield f"swap {event.kind} and {first[at + 1].kind} {at}", _swapped(programs, of, at)


def _changes(program: tuple[Event, ...], at: int, event: Event) -> Iterator[tuple[str, list]]:
    yield "drop", []
    yield "duplicate", [event, event]
    if event.kind == ev.WAIT:
        yield "phase", [event._replace(value=1 - event.value)]
    if event.kind == ev.EXPECT:
        yield "more bytes", [event._replace(value=event.value + 1024)]
        yield "fewer bytes", [event._replace(value=event.value - 1024)]
    if event.kind == ev.COPY:
        yield "fewer bytes", [event._replace(value=event.value - 1024)]
    if event.kind == ev.INIT:
        yield "in threads", [event._replace(count=event.count * 32)]
        yield "one less", [event._replace(count=event.count - 1)]
    if event.kind in (ev.WAIT, ev.ARRIVE):
        others = [e.at for e in program if e.kind == event.kind and e.at != event.at]
        if others:
            yield "elsewhere", [event._replace(at=others[0])]
    yield "exit before", [None]


def _with(programs: Programs, of: Sequence[int], at: int, name: str, changed: list) -> Programs:
    made = list(programs)
    for warp in of:
        steps = list(programs[warp])
        if name == "exit before":
            made[warp] = tuple(steps[:at])
            continue
        if at >= len(steps) or steps[at].kind != programs[of[0]][at].kind:
            continue
        own = steps[at]
        new = [_like(own, programs[of[0]][at], event) for event in changed]
        made[warp] = tuple([*steps[:at], *new, *steps[at + 1 :]])
    return tuple(made)


def _like(own: Event, model: Event, changed: Event) -> Event:
    """The same change to another warp's own step."""
    same = {name: getattr(changed, name) for name in ("at", "count", "value")}
    return own._replace(**{k: v for k, v in same.items() if v != getattr(model, k)})


def _swapped(programs: Programs, of: Sequence[int], at: int) -> Programs:
    made = list(programs)
    for warp in of:
        steps = list(programs[warp])
        if at + 1 < len(steps):
            steps[at], steps[at + 1] = steps[at + 1], steps[at]
        made[warp] = tuple(steps)
    return tuple(made)
