"""What one run proves about all: races over bytes, what each read finds, who waits for whom."""

from __future__ import annotations

import functools
import re

from . import events as ev
from .events import Region, overlap, without
from .report import deadlock, seat, trace
from .search import Run, cta_of
from .state import Access, Finding

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
        deadlock(run, blocked)
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
    latest_first = sorted(writes, key=lambda a: a.begin, reverse=True)
    found = []
    for access in accesses:
        if access.kind not in WRITES:
            found.append((access.who, access.times, _contents(run, access, latest_first)))
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
    warps = {who: seat(run, who)[1] for who in {access.who for access in accesses}}
    roles = {who: run.names.role(warp)[0] for who, warp in warps.items()}
    # Whom a write must not meet is the same for all that a warp writes so to these bytes.
    clashing: dict[tuple[Region, bool, bool, int], list[Access]] = {}
    for write in writes:
        like = (write.region, write.kind in BY_THREADS, write.exact, write.who)
        if like not in clashing:
            clashing[like] = [a for a in near[write.region] if _clash(roles, write, a)]
        for other in clashing[like]:
            if other is write or (other.kind in WRITES and other.begin > write.begin):
                continue
            first, second = (write, other) if write.begin < other.begin else (other, write)
            if first.end is not None and run.past[second.begin] >> first.end & 1:
                continue
            kind, text = _race(run, first, second, writes)
            key = (kind, run.names.region(write.region), first.kind, second.kind)
            if key not in told:
                told.add(key)
                run.fault(kind, text, second.begin, first.begin)


def _clash(roles: dict[int, str], write: Access, other: Access) -> bool:
    """Whether two accesses to the same bytes must not meet; `roles` by process.

    Threads of one role have places of their own in a tensor that they write together.
    """
    if write.kind not in BY_THREADS or other.kind not in BY_THREADS:
        return True
    if write.who == other.who:
        return False
    return (write.exact and other.exact) or roles[write.who] != roles[other.who]


def _race(run: Run, first: Access, second: Access, writes: list[Access]) -> tuple[str, str]:
    """What kind of a race two accesses are in; the second comes later in this order only."""
    places = [run.names.region(a.region) for a in (first, second)]
    who = [run.names.who(*seat(run, a.who)) for a in (first, second)]
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


def _contents(run: Run, read: Access, writes: list[Access]) -> tuple[tuple[int, int], ...]:
    """Whose writes a read finds, latest first; a fault where it finds bytes of nobody.

    `writes` come latest first.
    """
    left, found = read.region, []
    past = run.past[read.begin]
    for write in writes:
        if write.end is None or not past >> write.end & 1 or not _meet(write.region, left):
            continue
        found.append((write.who, write.order))
        if write.kind == "write" and read.kind in BY_ENGINE:
            _needs_proxy_fence(run, write, read)
        left = without(left, write.region)
        if not left:
            break
    if (
        left
        and read.exact
        and not any(
            w.begin > read.begin or not past >> w.begin & 1 for w in writes if _meet(w.region, left)
        )
    ):
        run.fault(
            "read before full",
            f"{run.names.region(left)}: {run.names.who(*seat(run, read.who))} reads what nobody "
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
        f"{run.names.region(write.region)}: {run.names.who(*seat(run, write.who))} writes it, "
        f"and {NOUNS[read.kind]} it follows without a fence.proxy.async in between",
        read.begin,
        write.begin,
    )


def _unread(run: Run, accesses: list[Access], writes: list[Access]) -> None:
    """Copies that are overwritten, or left at the end, before anybody has read any of them.

    A copy into several CTAs is read where one of them reads it: the rest may have no use for it.
    """
    races = ("read before full", "overwritten before read", "two writers")
    told = {f.text.partition(":")[0] for f in run.findings if f.kind in races}
    reads = [a for a in accesses if a.kind not in WRITES]
    copies: dict[tuple[int, int], list[tuple[Access, list[Access]]]] = {}
    for write in writes:
        if write.kind == "copy":
            later = [
                w
                for w in writes
                if w is not write and w.begin > write.begin and _meet(w.region, write.region)
            ]
            copies.setdefault((write.who, write.begin), []).append((write, later))
    for parts in copies.values():
        if any(_is_read(write, later, reads) for write, later in parts):
            continue
        for write, later in parts:
            place = run.names.region(write.region)
            if place in told:
                continue
            told.add(place)
            who = run.names.who(*seat(run, write.who))
            after = "is overwritten before anybody has" if later else "ends without anybody having"
            run.fault(
                "never read",
                f"{place}: a tile that {who} copied {after} read it",
                min((w.begin for w in later), default=len(run.past) - 1),
                write.begin,
            )


def _is_read(write: Access, later: list[Access], reads: list[Access]) -> bool:
    """Whether anything reads what a copy wrote, before all of that is written `later`."""
    behind = (r for r in reads if r.begin > write.begin and _meet(r.region, write.region))
    return any(
        all(w.begin > r.begin or not _meet(w.region, r.region) for w in later) for r in behind
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
