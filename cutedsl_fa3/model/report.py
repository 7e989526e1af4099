"""A run in words: who waits for whom, and an interleaving that leads to a fault."""

from __future__ import annotations

import re

from . import events as ev
from .events import Event
from .search import CLUSTER, Run
from .state import Finding, Process

LONGEST = 16  # lines of a counter-example


def seat(run: Run, who: int) -> tuple[int, int]:
    """The CTA and the warp of a process."""
    process = run.processes[who]
    return process.cta, process.warp


def deadlock(run: Run, blocked: list[Process]) -> None:
    """Say who waits for what, and which role could give it."""
    seen: dict[str, tuple[list[str], Event]] = {}
    for process in blocked:
        assert process.event is not None
        key = _waiting(run, process.event)
        seen.setdefault(key, ([], process.event))[0].append(run.who(process))
        barrier = run.mbarriers.get(process.event.at) if process.event.kind == ev.WAIT else None
        if barrier is not None:
            run.findings += barrier.doubts.values()
            barrier.doubts.clear()
    lines = [f"{many(who)}: {key} ({_lacks(run, event)})" for key, (who, event) in seen.items()]
    ended = [run.who(p) for p in run.processes if p.done]
    if ended:
        lines.append(f"{many(ended)}: ended")
    finding = run.fault("deadlock", f"{len(blocked)} warps wait for ever", len(run.past) - 1)
    finding.trace = (*lines, *_cycle(run, blocked), *_cause(run, blocked))


def _cycle(run: Run, blocked: list[Process]) -> list[str]:
    """The roles that wait for each other at rings, if they do."""
    waits: dict[str, str] = {}
    for process in blocked:
        event = process.event
        end = run.names.end_of(event.at) if event and event.kind == ev.WAIT else None
        if end is not None:
            ring = run.names.rings[end[0]]
            giver = ring.producer if end[1] == "full" else ring.consumer
            waits[run.names.role(process.warp)[0]] = giver
    for first in sorted(waits):
        path = [first]
        while path[-1] in waits and waits[path[-1]] not in path:
            path.append(waits[path[-1]])
        if waits.get(path[-1]) == first:
            return [f"the cycle: {' -> '.join([*path, first])}"]
    return []


def _waiting(run: Run, event: Event) -> str:
    if event.kind == ev.WAIT:
        phase = run.mbarriers[event.at].phase
        return f"waits on {run.names.barrier(event.at)}, phase {phase}"
    if event.kind == ev.SYNC:
        return f"waits at {run.names.named_barrier(event.at)}"
    return "waits for all CTAs of the cluster"


def _lacks(run: Run, event: Event) -> str:
    if event.kind == ev.WAIT:
        barrier = run.mbarriers[event.at]
        parts = []
        if barrier.pending > 0:
            have = barrier.expected - barrier.pending
            parts.append(f"{have} of {barrier.expected} arrivals{_giver(run, event.at)}")
        if barrier.tx:
            announced = sum(b for _, _, b in barrier.counted if b > 0)
            moved = -sum(b for _, _, b in barrier.counted if b < 0)
            parts.append(f"{announced} B announced, {moved} B copied")
        return ", ".join(parts) or "complete"
    number = CLUSTER if event.kind == ev.CLUSTER_WAIT else event.at
    meeting = run.rounds.get(number)
    return f"{meeting.arrived} of {meeting.expected} threads" if meeting else "nobody has come"


def _giver(run: Run, address: int) -> str:
    """The role whose arrivals a ring's mbarrier counts."""
    end = run.names.end_of(address)
    if end is None:
        return ""
    ring = run.names.rings[end[0]]
    return f" from {ring.producer if end[1] == 'full' else ring.consumer}"


def _cause(run: Run, blocked: list[Process]) -> list[str]:
    """A count or a byte number that can never be right, in the words of the ring."""
    told = []
    for process in blocked:
        event = process.event
        if event is None or event.kind != ev.WAIT:
            continue
        barrier, name = run.mbarriers[event.at], run.names.barrier(event.at)
        end = run.names.end_of(event.at)
        warps = 0
        if end is not None:
            consumer = run.names.rings[end[0]].consumer
            warps = sum(last - first for n, first, last in run.names.roles if n == consumer)
        if barrier.tx and barrier.pending == 0:
            told.append(f"{name}: the announced bytes differ from what the copies move")
        elif end and end[1] == "empty" and barrier.expected > 0 and not barrier.ended and warps:
            arrived = barrier.expected - barrier.pending
            if arrived and arrived < barrier.expected and arrived % warps == 0:
                told.append(
                    f"{name} is initialised for {barrier.expected} arrivals, its {warps} consumer "
                    f"warps bring {arrived}"
                )
    return list(dict.fromkeys(told))


def many(names: list[str]) -> str:
    """ "consumer warps 0, 1, 2" from single names."""
    groups: dict[str, list[str]] = {}
    for name in names:
        head, _, number = name.rpartition(" ")
        groups.setdefault(head, []).append(number)
    parts = []
    for head, numbers in groups.items():
        many = "s" if len(numbers) > 1 else ""
        whole = sorted({int(n) for n in numbers})
        run_of = whole == list(range(whole[0], whole[-1] + 1)) and len(whole) > 2
        text = f"{whole[0]} to {whole[-1]}" if run_of else ", ".join(map(str, whole))
        parts.append(f"{head}{many} {text}")
    return " and ".join(parts)


def describe(run: Run, step: int) -> str | None:
    """What a step does, without who; None for what no counter-example needs."""
    event, names = run.what[step][1], run.names
    if event.kind == ev.WAIT:
        return f"pass {names.barrier(event.at)}, parity {event.value}"
    if event.kind == ev.ARRIVE:
        return f"arrive at {names.barrier(event.at)}"
    if event.kind == ev.EXPECT:
        return f"announce {event.value} B on {names.barrier(event.at)}"
    if event.kind == ev.COPY:
        return f"issue a copy of {event.value} B to {names.region(event.targets[0][1])}"
    if event.kind == "landed":
        return f"{event.value} B land in {names.region(event.targets[0][1])}"
    if event.kind == ev.PRODUCT:
        return f"issue WGMMA on {names.region(event.region)}"
    if event.kind == ev.RETIRE:
        return f"wait until {event.value} groups of WGMMA are left"
    if event.kind in (ev.READ, ev.WRITE, ev.STORE):
        verb = {ev.READ: "read", ev.WRITE: "write", ev.STORE: "store by TMA"}[event.kind]
        return f"{verb} {names.region(event.region)}"
    if event.kind in (ev.SYNC, ev.SIGNAL):
        return f"come to {names.named_barrier(event.at)}"
    return "end" if event.kind == ev.END else None


def trace(run: Run, finding: Finding) -> tuple[str, ...]:
    """An interleaving that leads to a fault: what must have come before its steps, and no more.

    Steps at other barriers and tiles than the fault names are left out.
    """
    near = {finding.step, *finding.others}
    wanted = 0
    for step in near:
        wanted |= run.past[step]
    named = re.findall(r"'\w+'", finding.text)
    lines: list[tuple[str, list[str], int]] = []
    for step in range(len(run.past)):
        if not wanted >> step & 1:
            continue
        text = describe(run, step)
        if text is None or (step not in near and named and not any(n in text for n in named)):
            continue
        who, event = run.what[step]
        name = "copy engine 0" if event.kind == "landed" else run.names.who(*seat(run, who))
        _add_line(run, lines, text, name, step)
    made = [f"{many(names)}: {text}".replace("engine 0", "engine") for text, names, _ in lines]
    return tuple(["...", *made[-LONGEST:]] if len(made) > LONGEST else made)


def _add_line(
    run: Run, lines: list[tuple[str, list[str], int]], text: str, name: str, step: int
) -> None:
    """Add a step, to the line of others that do the same if it may come as early as theirs."""
    latest = next((text for text, names, _ in reversed(lines) if name in names), None)
    if latest == text:
        return
    for what, names, first in reversed(lines):
        if what == text and name not in names:
            names.append(name)
            return
        if run.past[step] >> first & 1:
            break
    lines.append((text, [name], step))
