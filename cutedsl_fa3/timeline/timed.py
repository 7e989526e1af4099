"""The events of a traced kernel's warps, each given a beginning and an end.

What every warp does, and in which order, is the model's (model/search.py): here it only gets
clocks. Warps advance in the order of their clocks; what they share is used by one after the other,
in the order in which they ask:

    tensor cores       of each quarter of the SM, where one warp of every warpgroup lies
    MUFU, FMA, ALU,    of each quarter
    LSU, issue
    TMA                one copy's bytes after the other's

A wait ends when what it waits for has happened, and a latency later. Nothing here is random, so
equal programs give equal timelines.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cutedsl_fa3.model import events as ev
from cutedsl_fa3.model.events import Event
from cutedsl_fa3.model.names import Names

from .costs import Costs, Task
from .latencies import Latencies
from .table import COMPLETE, NO_TILE, TENSOR_CORES, TMA, Interval

WARP, QUARTERS, WARPGROUP_WARPS = 32, 4, 4
TIMED = frozenset(
    {
        ev.INIT, ev.WAIT, ev.ARRIVE, ev.EXPECT, ev.COPY, ev.PRODUCT, ev.COMMIT, ev.RETIRE,
        ev.STORE, ev.STORE_COMMIT, ev.STORE_WAIT, ev.SYNC, ev.SIGNAL, ev.END,
    }
)  # fmt: skip


class Stalled(RuntimeError):
    """Warps that wait for what never comes: their programs are not those of one run."""


@dataclass
class Product:
    """A committed group of WGMMAs."""

    what: str
    tile: int
    end: float


@dataclass
class Warp:
    """How far a warp is; `lane` is None for one whose intervals nobody draws."""

    number: int
    lane: str | None
    program: Sequence[Event]
    at: int = 0
    waits_since: float | None = None
    fulls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    todo: deque[tuple[Task, int]] = field(default_factory=deque)  # with their tile
    reads: list[str] = field(default_factory=list)  # tiles of the group that is open
    prepared: bool = False
    groups: deque[Product] = field(default_factory=deque)
    owed: tuple[str, int] | None = None  # a product whose P waits for another to end
    stores: deque[float] = field(default_factory=deque)
    tile: int = NO_TILE

    @property
    def quarter(self) -> int:
        """The quarter of the SM on which it runs."""
        return self.number % QUARTERS


@dataclass
class Phases:
    """An mbarrier."""

    expected: int
    pending: int
    tx: int = 0
    phase: int = 0
    waiting: list[Warp] = field(default_factory=list)


@dataclass
class Meeting:
    """A named barrier."""

    arrived: int = 0
    waiting: list[Warp] = field(default_factory=list)


class Clockwork:
    """One CTA's warps against the clock."""

    def __init__(
        self,
        programs: Sequence[Sequence[Event]],
        names: Names,
        costs: Costs,
        latencies: Latencies,
    ) -> None:
        self.names, self.costs, self.latencies = names, costs, latencies
        self.warps = [
            Warp(n, lane_of(names, n), [e for e in program if e.kind in TIMED])
            for n, program in enumerate(programs)
        ]
        self.free: dict[tuple[str, int], float] = defaultdict(float)
        self.mbarriers: dict[int, Phases] = {}
        self.meetings: dict[int, Meeting] = defaultdict(Meeting)
        self.found: list[Interval] = []
        self.queue: list[tuple[float, int, int, tuple]] = []
        self.counted = 0

    def run(self) -> list[Interval]:
        """All intervals, lane by lane.

        Raises: Stalled.
        """
        for warp in self.warps:
            self._later(0.0, warp)
        while self.queue:
            now, _, _, what = heapq.heappop(self.queue)
            if isinstance(what[0], Warp):
                self._advance(what[0], now)
            else:
                self._landed(*what, now)
        held = [warp for warp in self.warps if warp.at < len(warp.program)]
        if held:
            told = ", ".join(f"{w.lane or 'warp'} {w.number}" for w in held)
            raise Stalled(f"{told}: waiting for what never comes")
        order = {lane: n for n, lane in enumerate(lanes(self.names, len(self.warps)))}
        return sorted(self.found, key=lambda e: (order.get(e.lane, len(order)), e.start, e.end))

    def _later(self, when: float, warp: Warp) -> None:
        self._push(when, 1 + warp.number, (warp,))

    def _push(self, when: float, order: int, what: tuple) -> None:
        self.counted += 1
        heapq.heappush(self.queue, (when, order, self.counted, what))

    def _note(
        self, warp: Warp, kind: str, what: str, start: float, end: float, tile: int | None = None
    ) -> None:
        if warp.lane is not None and (end > start or what in COMPLETE):
            at = warp.tile if tile is None else tile
            self.found.append(Interval(warp.lane, kind, what, at, start, end))  # type: ignore[arg-type]

    def _advance(self, warp: Warp, now: float) -> None:
        """Steps of a warp until time passes for it, or it is held."""
        while True:
            event = warp.program[warp.at] if warp.at < len(warp.program) else None
            releases = event is not None and event.kind == ev.ARRIVE
            if warp.todo and not releases:  # a slot is released before its scores are worked on
                return self._task(warp, *warp.todo.popleft(), now)
            if event is None:
                return None
            after = getattr(self, "_" + event.kind.replace(" ", "_"))(warp, event, now)
            if after is None:
                return None
            if after > now:
                return self._later(after, warp)

    def _task(self, warp: Warp, task: Task, tile: int, now: float) -> None:
        """A step on a pipe that the warps of a quarter share."""
        pipe = task.pipe, warp.quarter
        start = max(now, self.free[pipe])
        self.free[pipe] = start + task.clocks
        end = start + task.clocks * self.latencies.alone + task.waited
        self._note(warp, "wait", task.pipe, now, start, tile)
        self._note(warp, "work", task.what, start, end, tile)
        self._later(end, warp)

    # Each of these is a kind of event: when the warp goes on, or None where it is held or was told.

    def _init(self, warp: Warp, event: Event, now: float) -> float:
        self.mbarriers[event.at] = Phases(event.count, event.count)
        warp.at += 1
        return now

    def _wait(self, warp: Warp, event: Event, now: float) -> float | None:
        barrier = self.mbarriers[event.at]
        if warp.waits_since is None:
            warp.waits_since = now
        if (barrier.phase & 1) == event.value:
            barrier.waiting.append(warp)
            return None
        end, started = now + self.latencies.mbarrier, warp.waits_since
        ring, side, _ = self.names.end_of(event.at) or ("mbarrier", "", 0)
        if side == "full":
            warp.fulls[ring] += 1
            if ring in PACED_BY:
                warp.tile = warp.fulls[ring] - 1
        warp.waits_since = None
        warp.at += 1
        self._note(warp, "wait", f"{ring} {side}".strip(), started, end)
        return end

    def _count(self, address: int, arrivals: int, announced: int, now: float) -> None:
        barrier = self.mbarriers[address]
        barrier.pending -= arrivals
        barrier.tx += announced
        if barrier.pending <= 0 and barrier.tx == 0:
            barrier.pending, barrier.phase = barrier.expected, barrier.phase + 1
            woken, barrier.waiting = barrier.waiting, []
            for warp in woken:
                self._later(now, warp)

    def _arrive(self, warp: Warp, event: Event, now: float) -> float:
        self._count(event.at, event.count, 0, now)
        warp.at += 1
        return now

    def _expect(self, warp: Warp, event: Event, now: float) -> float:
        self._count(event.at, event.count, event.value, now)
        warp.at += 1
        return now

    def _copy(self, warp: Warp, event: Event, now: float) -> float:
        """Issued by a thread; the bytes come after a latency, behind those of earlier copies."""
        issued = now + self.latencies.tma_issue
        (address, region), *_ = event.targets
        tiles = " ".join(self.names.tiles(region)[:1])
        start = max(issued, self.free[TMA, 0])
        end = start + event.value / self.latencies.l2_bytes
        self.free[TMA, 0] = end
        come = self.latencies.tma_load
        ring, _, _ = self.names.end_of(address) or ("", "", 0)
        warp.fulls[ring] += 1
        tile = warp.fulls[ring] - 1 if tiles in PACED else NO_TILE
        self._note(warp, "work", f"load {tiles}", now, issued, tile)
        self.found.append(Interval(TMA, "work", f"copy {tiles}", tile, start + come, end + come))
        for address, _ in event.targets:
            self._push(end + come, 0, (address, event.value))
        warp.at += 1
        return issued

    def _landed(self, address: int, bytes_moved: int, now: float) -> None:
        self._count(address, 0, -bytes_moved, now)

    def _product(self, warp: Warp, event: Event, now: float) -> float:
        if not warp.prepared:
            warp.prepared = True
            warp.reads = self.names.tiles(event.region)
            what, _ = self.costs.product(warp.reads)
            warp.tile = self._tile_of(warp)
            self._do(warp, self.costs.before(what, warp.tile), warp.tile)
            return now
        warp.at += 1
        return now

    def _tile_of(self, warp: Warp) -> int:
        """The tile whose slot was the last to be waited for, of the ring that is read."""
        ring = next(
            name
            for name, ring in self.names.rings.items()
            if set(ring.tiles) & set(warp.reads) & PACED
        )
        return warp.fulls[ring] - 1

    def _commit(self, warp: Warp, event: Event, now: float) -> float:
        what, clocks = self.costs.product(warp.reads)
        unit = TENSOR_CORES, warp.quarter
        start = max(now, self.free[unit])
        end = self.free[unit] = start + clocks
        tile = self._tile_of(warp)
        warp.groups.append(Product(what, tile, end))
        warp.prepared, warp.reads = False, []
        if warp.lane is not None:
            number = warp.lane.split()[-1] if " " in warp.lane else "0"
            self.found.append(Interval(TENSOR_CORES, "work", f"{what} {number}", tile, start, end))
        warp.at += 1
        return now

    def _retire(self, warp: Warp, event: Event, now: float) -> float:
        warp.at += 1
        over = []
        while len(warp.groups) > event.value:
            over.append(warp.groups.popleft())
        if not over:
            return now
        end = max(now, over[-1].end + self.latencies.product)
        self._note(warp, "wait", over[-1].what, now, end, over[-1].tile)
        for product in over:
            warp.tile = product.tile
            self._do(warp, self.costs.at_once(product.what, product.tile), product.tile)
            if self.costs.after_p(product.what, product.tile):
                warp.owed = product.what, product.tile
        if warp.owed is not None and not warp.groups:
            self._do(warp, self.costs.after_p(*warp.owed), warp.owed[1])
            warp.owed = None
        for product in over:
            self._do(warp, self.costs.last(product.what, product.tile), product.tile)
        return end

    def _do(self, warp: Warp, tasks: tuple[Task, ...], tile: int) -> None:
        warp.todo.extend((task, tile) for task in tasks)

    def _store(self, warp: Warp, event: Event, now: float) -> float:
        issued = now + self.latencies.tma_issue
        self._note(warp, "work", "store", now, issued)
        warp.at += 1
        return issued

    def _store_commit(self, warp: Warp, event: Event, now: float) -> float:
        warp.stores.append(now + self.latencies.store)
        warp.at += 1
        return now

    def _store_wait(self, warp: Warp, event: Event, now: float) -> float:
        end = now
        while len(warp.stores) > event.value:
            end = max(end, warp.stores.popleft())
        self._note(warp, "wait", "store", now, end, NO_TILE)
        warp.at += 1
        return end

    def _sync(self, warp: Warp, event: Event, now: float) -> None:
        warp.waits_since = now
        self._meet(event, warp, now)

    def _signal(self, warp: Warp, event: Event, now: float) -> float:
        warp.at += 1
        self._meet(event, None, now)
        return now

    def _meet(self, event: Event, warp: Warp | None, now: float) -> None:
        meeting = self.meetings[event.at]
        meeting.arrived += WARP
        if warp is not None:
            meeting.waiting.append(warp)
        if meeting.arrived < event.count:
            return
        come, self.meetings[event.at] = meeting.waiting, Meeting()
        end = now + self.latencies.barrier
        for each in come:
            began = each.waits_since if each.waits_since is not None else now
            self._note(each, "wait", barrier_name(self.names, event.at), began, end)
            each.waits_since = None
            each.at += 1
            self._later(end, each)

    def _end(self, warp: Warp, event: Event, now: float) -> float:
        warp.at += 1
        return now


PACED = frozenset({"k", "v", "ab", "a", "b"})  # tiles that are counted
PACED_BY = frozenset({"k", "v", "ab"})  # and the rings that carry them


def barrier_name(names: Names, number: int) -> str:
    """A named barrier, as in "turn"."""
    found = names.named.get(number % 16, "")
    return found.split("'")[1] if "'" in found else "all threads"


def lane_of(names: Names, warp: int) -> str | None:
    """The lane that a warp stands for: the first of its warpgroup does."""
    role, within = names.role(warp)
    if within % WARPGROUP_WARPS:
        return None
    warps = next((end - first for name, first, end in names.roles if name == role), 1)
    return role if warps <= WARPGROUP_WARPS else f"{role} {within // WARPGROUP_WARPS}"


def lanes(names: Names, warps: int) -> list[str]:
    """The lanes of so many warps, in their order, then the units."""
    return [*(lane for n in range(warps) if (lane := lane_of(names, n))), TENSOR_CORES, TMA]
