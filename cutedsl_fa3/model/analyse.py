"""What one run proves about all: races over bytes, what each read finds, who waits for whom."""

from __future__ import annotations

import functools
import re

from . import events as ev
from .events import Event, Region, overlap, without
from .search import CLUSTER, Access, Finding, Process, Run, cta_of

WRITES = ("copy", "write")
BY_THREADS = ("read", "write")
BY_ENGINE = ("product", "store")  # what reads through the async proxy
NOUNS = {
    "copy": "a TMA copy into",
    "write": "a write of threads to",
    "product": "a WGMMA that reads",
    "store": "a TMA store that reads",
    "read": "a read by threads of",
}
ORDER = (
    "not initialised",
    "initialised twice",
    "bytes differ",
    "too many arrivals",
    "phase may end early",
    "barrier used by two",
    "out of turn",
    "wrong phase",
    "read before full",
    "overwritten before read",
    "two writers",
    "fence missing",
    "registers in use",
    "proxy fence missing",
    "deadlock",
    "ends too soon",
    "never read",
)
LONGEST = 16  # lines of a counter-example

# Who reads, how often, and whose writes it finds (warp and number), in each warp's order.
Reads = tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]


@functools.lru_cache(maxsize=65536)
def _meet(a: Region, b: Region) -> bool:
    return overlap(a, b)


def analyse(run: Run) -> Reads:
    """Add to a run's findings what its accesses show; what each read finds, for comparisons."""
    blocked = [p for p in run.processes if not p.done]
    _bytes(run)
    if blocked:
        _deadlock(run, blocked)
    _ends(run, bool(blocked))
    reads = _accesses(run, bool(blocked))
    _tidy(run)
    return reads


def _tidy(run: Run) -> None:
    """One finding for what several warps do alike, the cause before its consequences."""
    first: dict[tuple[str, str], Finding] = {}
    for finding in sorted(run.findings, key=lambda f: (ORDER.index(f.kind), f.step)):
        alike = re.sub(r"\b(warp|round|phase) -?\d+", r"\1", finding.text)
        first.setdefault((finding.kind, alike), finding)
    run.findings = list(first.values())
    for finding in run.findings:
        if not finding.trace:
            finding.trace = trace(run, finding)


def _bytes(run: Run) -> None:
    """Mbarriers on which other bytes are announced than copied."""
    announced: dict[int, list[list[int]]] = {}
    for step, (_, event) in enumerate(run.what):
        if event.kind == ev.EXPECT:
            announced.setdefault(event.at, []).append([event.value, 0, step])
        elif event.kind == ev.COPY:
            for address, _ in event.targets:
                announced.setdefault(address, [[0, 0, step]])[-1][1] += event.value
    blocked = any(not p.done for p in run.processes)
    if blocked and run.names.ctas > 1:  # a partner's copy may have come before the announcement
        return
    for address, phases in announced.items():
        if sum(told for told, _, _ in phases) == sum(moved for _, moved, _ in phases):
            continue
        told, moved, step = next(phase for phase in phases if phase[0] != phase[1])
        run.fault(
            "bytes differ",
            f"{run.names.barrier(address)}: {told} B are announced, and {moved} B are copied "
            "before the next announcement",
            step,
        )


# Bytes.


def _accesses(run: Run, blocked: bool) -> Reads:
    accesses = run.accesses
    writes = [a for a in accesses if a.kind in WRITES]
    _races(run, accesses, writes)
    found = []
    for access in accesses:
        if access.kind not in WRITES:
            found.append((access.who, access.times, _contents(run, access, writes)))
    if not blocked:
        _unread(run, accesses, writes)
    return tuple(sorted(found, key=lambda read: read[0]))


def _races(run: Run, accesses: list[Access], writes: list[Access]) -> None:
    told: set[tuple[str, ...]] = set()
    by_region: dict[Region, list[Access]] = {}
    for access in accesses:
        by_region.setdefault(access.region, []).append(access)
    near = {
        r: [a for other, group in by_region.items() if _meet(r, other) for a in group]
        for r in {write.region for write in writes}
    }
    for write in writes:
        for other in near[write.region]:
            if other is write or (other.kind in WRITES and other.begin > write.begin):
                continue
            if not _clash(write, other):
                continue
            first, second = (write, other) if write.begin < other.begin else (other, write)
            if first.end is not None and run.past[second.begin] >> first.end & 1:
                continue
            kind, text = _race(run, first, second, writes)
            key = (kind, run.names.region(write.region), first.kind, second.kind)
            if key not in told:
                told.add(key)
                run.fault(kind, text, second.begin, first.begin)


def _clash(write: Access, other: Access) -> bool:
    if write.who == other.who and write.kind in BY_THREADS and other.kind in BY_THREADS:
        return False
    by_threads = write.kind in BY_THREADS and other.kind in BY_THREADS
    # Threads have places of their own in a tensor that they write together.
    return not by_threads or (write.exact and other.exact)


def _race(run: Run, first: Access, second: Access, writes: list[Access]) -> tuple[str, str]:
    """What kind of a race two accesses are in; the second comes later in this order only."""
    places = [run.names.region(a.region) for a in (first, second)]
    who = [run.names.who(*_place(run, a.who)) for a in (first, second)]
    if first.kind in WRITES and second.kind in WRITES:
        return "two writers", (
            f"{places[0]}: {NOUNS[first.kind]} it by {who[0]} and {NOUNS[second.kind]} it by "
            f"{who[1]} may meet"
        )
    write, read = (first, second) if first.kind in WRITES else (second, first)
    past = run.past[read.begin]
    earlier = any(
        w is not write
        and (w.who == write.who or w.kind != write.kind)
        and w.end is not None
        and past >> w.end & 1
        and _meet(w.region, write.region)
        for w in writes
    )
    by = {id(a): w for a, w in zip((first, second), who, strict=True)}
    place = places[0] if write is first else places[1]
    if earlier:
        return "overwritten before read", (
            f"{place}: {NOUNS[write.kind]} it by {by[id(write)]} may come before "
            f"{NOUNS[read.kind]} it by {by[id(read)]} is done"
        )
    return "read before full", (
        f"{place}: {NOUNS[read.kind]} it by {by[id(read)]} may come before {NOUNS[write.kind]} it "
        f"by {by[id(write)]} is done"
    )


def _place(run: Run, who: int) -> tuple[int, int]:
    process = run.processes[who]
    return process.cta, process.warp


def _contents(run: Run, read: Access, writes: list[Access]) -> tuple[tuple[int, int], ...]:
    """Whose writes a read finds, latest first; a fault where it finds bytes of nobody."""
    left, found = read.region, []
    past = run.past[read.begin]
    for write in sorted(writes, key=lambda a: a.begin, reverse=True):
        if write.end is None or not past >> write.end & 1 or not _meet(write.region, left):
            continue
        found.append((write.who, write.order))
        if write.kind == "write" and read.kind in BY_ENGINE:
            _needs_proxy_fence(run, write, read)
        left = without(left, write.region)
        if not left:
            break
    late = any(
        w.begin > read.begin or not past >> w.begin & 1 for w in writes if _meet(w.region, left)
    )
    if left and read.exact and not late:
        run.fault(
            "read before full",
            f"{run.names.region(left)}: {run.names.who(*_place(run, read.who))} reads what nobody "
            "has written",
            read.begin,
        )
    return tuple(found)


def _needs_proxy_fence(run: Run, write: Access, read: Access) -> None:
    past = run.past[read.begin]
    if any(past >> f & 1 and run.past[f] >> write.begin & 1 for f in run.proxy_fences):
        return
    if any(f.kind == "proxy fence missing" for f in run.findings):
        return
    run.fault(
        "proxy fence missing",
        f"{run.names.region(write.region)}: {run.names.who(*_place(run, write.who))} writes it, "
        f"and {NOUNS[read.kind]} it follows without a fence.proxy.async in between",
        read.begin,
        write.begin,
    )


def _unread(run: Run, accesses: list[Access], writes: list[Access]) -> None:
    """Copies that are overwritten, or left at the end, before anybody has read them."""
    races = ("read before full", "overwritten before read", "two writers")
    told = {f.text.partition(":")[0] for f in run.findings if f.kind in races}
    reads = [a for a in accesses if a.kind not in WRITES]
    for write in writes:
        if write.kind != "copy":
            continue
        later = [
            w
            for w in writes
            if w is not write and w.begin > write.begin and _meet(w.region, write.region)
        ]
        until = min((w.begin for w in later), default=len(run.past))
        if any(write.begin < r.begin < until and _meet(r.region, write.region) for r in reads):
            continue
        place = run.names.region(write.region)
        if place in told:
            continue
        told.add(place)
        who = run.names.who(*_place(run, write.who))
        after = "is overwritten before anybody has" if later else "ends without anybody having"
        run.fault(
            "never read",
            f"{place}: a tile that {who} copied {after} read it",
            until if later else len(run.past) - 1,
            write.begin,
        )


# The end.


def _ends(run: Run, blocked: bool) -> None:
    """Copies and arrivals that may reach a CTA that has ended."""
    if blocked:
        return
    ends: dict[int, int] = {}
    for process in run.processes:
        ends[process.cta] = ends.get(process.cta, 0) | process.past
    told: set[tuple[str, int]] = set()
    for step, (who, event) in enumerate(run.what):
        process = run.processes[who]
        if event.kind == "landed":
            for address, region in event.targets:
                cta = cta_of(address)
                if ends[cta] >> step & 1 or ("copy", cta) in told:
                    continue
                if not _lands_at(run, step, region):
                    continue
                told.add(("copy", cta))
                run.fault(
                    "ends too soon",
                    f"{run.names.region(region)}: the CTA may end before a copy of "
                    f"{run.who(process)} has landed there: nobody waits for it",
                    step,
                )
        elif event.kind == ev.ARRIVE and cta_of(event.at) != process.cta:
            cta = cta_of(event.at)
            if not ends[cta] >> step & 1 and ("arrive", cta) not in told:
                told.add(("arrive", cta))
                run.fault(
                    "ends too soon",
                    f"{run.names.barrier(event.at)}: its CTA may end before "
                    f"{run.who(process)} has arrived there",
                    step,
                )


def _lands_at(run: Run, step: int, region: Region) -> bool:
    return any(a.end == step and a.region == region for a in run.accesses)


def _deadlock(run: Run, blocked: list[Process]) -> None:
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
    lines = [f"{_many(who)}: {key} ({_lacks(run, event)})" for key, (who, event) in seen.items()]
    ended = [run.who(p) for p in run.processes if p.done]
    if ended:
        lines.append(f"{_many(ended)}: ended")
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


# Words.


def _many(names: list[str]) -> str:
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
        name = "copy engine 0" if event.kind == "landed" else run.names.who(*_place(run, who))
        _add_line(run, lines, text, name, step)
    made = [f"{_many(names)}: {text}".replace("engine 0", "engine") for text, names, _ in lines]
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
