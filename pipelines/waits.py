"""What the words of a watched kernel mean: who waits for what, in the words of its tables.

    at      0: runs; -1: has ended; else (1 + place) << 16 | stage << 1 | phase
    place   2 * ring: waits for `empty`, 2 * ring + 1: for `full`, then the named barriers by number

The host reads a `Report`'s words: first those of all, then a slot for each CTA that reports.

    word    0: somebody watches
    slot    flag, CTA x, y, z, rank in its cluster, multiprocessor, now, watching warp
            at, since of warp 0, of warp 1, ...
            the rings' mbarriers, as they lie in shared memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cutedsl_fa3.layouts import Tile

from .barriers import Barriers
from .ring import WORD_BYTES, Ring
from .roles import WARP, Role, first_warps, threads

RUNS, ENDED = 0, -1
TICK_SHIFT = 10  # since: ticks of 1,024 ns, so that 32 bits hold an hour

HEADER = 4
SLOTS = 256  # CTAs that can report: more than a GPU has multiprocessors
SLOT_HEADER = 8
REPORTED = 0x48414E47  # the flag of a slot that is complete

# Source: the words that ptxas computes for mbarrier.init: both counts are kept as what is missing
# to 2^20, so that the last arrival carries into the phase. Bytes are taken to lie between them,
# which the planted faults of tests/pipelines/hanging.py hold against a GPU.
COUNT_BITS = 20
EXPECTED_SHIFT, BYTES_SHIFT, PENDING_SHIFT = 1, 21, 43
BYTES_BITS = 21


class Tables(Protocol):
    """What is needed of a kernel to put its waits into words."""

    tiles: Mapping[str, Tile]
    rings: Mapping[str, Ring]
    roles: Mapping[str, Role]
    cluster: tuple[int, int]

    @property
    def barriers(self) -> Barriers: ...


@dataclass(frozen=True)
class ReportPlan:
    """How many words the report of a kernel with these tables has.

    `warps`: those that are watched. `mbarriers`: words of all rings.
    """

    warps: int
    mbarriers: int

    @classmethod
    def of(cls, kernel: Tables) -> ReportPlan:
        """The plan for a kernel's tables."""
        mbarriers = sum(ring.bytes for ring in kernel.rings.values()) // WORD_BYTES
        return cls(threads(kernel.roles) // WARP, mbarriers)

    @property
    def slot(self) -> int:
        """Words of one CTA."""
        return SLOT_HEADER + 2 * self.warps + self.mbarriers

    @property
    def total(self) -> int:
        """Words of all."""
        return HEADER + SLOTS * self.slot


def ticks(seconds: float) -> int:
    """A time in the unit of `since`, at least 1."""
    return max(1, round(seconds * 1e9) >> TICK_SHIFT)


def wait_code(place: int, stage: int = 0, phase: int = 0) -> int:
    """The word `at` of a wait; works on Python and device integers."""
    return (1 + place) * 65536 + stage * 2 + phase


@dataclass(frozen=True)
class Mbarrier:
    """The state of an mbarrier: arrivals that its phase needs, and what is missing to them.

    `missing_bytes`: announced and not yet written. 64 bits of zero are no state of an mbarrier,
    but were read on an H200 where several processes shared it; then `arrivals` is 0.
    """

    arrivals: int
    missing: int
    missing_bytes: int

    @classmethod
    def of(cls, raw: int) -> Mbarrier:
        """From its 64 bits."""
        count = (1 << COUNT_BITS) - 1
        tx = raw >> BYTES_SHIFT & (1 << BYTES_BITS) - 1
        return cls(
            -(raw >> EXPECTED_SHIFT) & count,
            -(raw >> PENDING_SHIFT) & count,
            min(tx, (1 << BYTES_BITS) - tx),
        )


Kind = Literal["runs", "ended", "empty", "full", "barrier"]


@dataclass(frozen=True)
class Wait:
    """Where a warp is.

    `kind`: "runs" between waits, has "ended", waits for a slot of ring `name` to become "empty" or
    "full", or at a named "barrier", whose number is `stage`. `seconds`: since when.
    """

    warp: int
    role: str
    kind: Kind
    name: str = ""
    stage: int = 0
    phase: int = 0
    seconds: float = 0.0

    @property
    def place(self) -> tuple:
        """What warps that wait for the same thing have in common."""
        return self.role, self.kind, self.name, self.stage, self.phase


@dataclass(frozen=True)
class Stuck:
    """What a CTA reported.

    `mbarriers`: of each slot, by (ring, "full" or "empty", stage). `raw`: its words as they came.
    """

    block: tuple[int, int, int]
    rank: int
    multiprocessor: int
    watcher: int
    waits: tuple[Wait, ...]
    mbarriers: Mapping[tuple[str, str, int], Mbarrier]
    raw: tuple[int, ...]

    def __str__(self) -> str:
        return f"CTA ({', '.join(map(str, self.block))})"


def decode(kernel: Tables, words: Sequence[int]) -> list[Stuck]:
    """What every CTA reported, in the order in which they came."""
    plan = ReportPlan.of(kernel)
    found = []
    for start in range(HEADER, plan.total, plan.slot):
        if words[start] == REPORTED:
            found.append(_stuck(kernel, plan, tuple(words[start : start + plan.slot])))
    return found


def _stuck(kernel: Tables, plan: ReportPlan, slot: tuple[int, ...]) -> Stuck:
    _, x, y, z, rank, multiprocessor, now, watcher = slot[:SLOT_HEADER]
    waits = tuple(
        _wait(kernel, warp, *slot[SLOT_HEADER + 2 * warp :][:2], now) for warp in range(plan.warps)
    )
    raw = slot[SLOT_HEADER + 2 * plan.warps :]
    return Stuck((x, y, z), rank, multiprocessor, watcher, waits, _mbarriers(kernel, raw), slot)


def _wait(kernel: Tables, warp: int, at: int, since: int, now: int) -> Wait:
    role = next(n for n, first in reversed(first_warps(kernel.roles).items()) if first <= warp)
    seconds = ((now - since) % (1 << 32) << TICK_SHIFT) / 1e9
    if at in (RUNS, ENDED):
        return Wait(warp, role, "runs" if at == RUNS else "ended", seconds=seconds)
    place, stage, phase = (at >> 16) - 1, at >> 1 & 0x7FFF, at & 1
    rings = list(kernel.rings)
    if place < 2 * len(rings):
        kind = "full" if place % 2 else "empty"
        return Wait(warp, role, kind, rings[place // 2], stage, phase, seconds)
    number = place - 2 * len(rings)
    barriers = kernel.barriers
    name = next(n for n in reversed(barriers.table) if barriers.number(n) <= number)
    return Wait(warp, role, "barrier", name, number, 0, seconds)


def _mbarriers(kernel: Tables, raw: Sequence[int]) -> dict[tuple[str, str, int], Mbarrier]:
    found, start = {}, 0
    for name, ring in kernel.rings.items():
        for i in range(2 * ring.stages):
            low, high = (word % (1 << 32) for word in raw[start + 2 * i : start + 2 * i + 2])
            kind = "full" if i < ring.stages else "empty"
            found[name, kind, i % ring.stages] = Mbarrier.of(high << 32 | low)
        start += ring.bytes // WORD_BYTES
    return found
