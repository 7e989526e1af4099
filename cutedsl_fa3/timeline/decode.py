"""The stamps of a debug build (pipelines/stamp.py) as a `Timeline`.

Waits are as they were noted. What lies between two of them is one piece of work, named by the wait
before it:

    after                       in an epilogue    else
    k empty, ...                epilogue          load k
    QK                                            softmax; issue, if the wait for P V comes at once
    PV, behind QK                                 rescale; softmax, if the softmax was not before it
    k full, turn, product, PV                     issue
    nothing, work, visits                         other

A softmax holds the rescale too where nothing overlaps inside a warpgroup, or where the wait for P V
comes before it (costs.py). The compiler moves arithmetic across a stamp, so the border of two
pieces of work is no sharp one where only a short wait divides them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cutedsl_fa3.pipelines.stamps import FIRST, PAIR, WORK, StampPlan

from .table import COMPLETE, NO_TILE, Interval, Timeline, TimelineError, from_zero

WORD = 1 << 32
TOLD = ("work", "visits")  # rings of words: what comes after them is no tile's work


@dataclass
class Lane:
    """One lane's stamps, read in their order."""

    name: str
    found: list[Interval] = field(default_factory=list)
    fulls: dict[str, int] = field(default_factory=dict)
    now: float | None = None  # the last stamp
    after: str = ""  # the wait that ended there
    before: str = ""  # and the one before that
    waits: str = ""  # for what
    epilogue: bool = False
    waits_early: bool = False  # for P V, before the softmax
    tile: int = NO_TILE

    def read(self, what: str, ends: bool, clock: float) -> None:
        """One stamp.

        Raises: TimelineError for an order that no role has.
        """
        if self.now is not None and clock < self.now:
            raise TimelineError(f"{self.name}: {what} is noted at clock {clock}, after {self.now}")
        if what not in WORK and (self.waits != what if ends else self.waits):
            done = "ends" if ends else "begins"
            at = f"waits for {self.waits}" if self.waits else "waits for nothing"
            raise TimelineError(f"{self.name}: {what} {done} where it {at}")
        if self.now is not None and not self.waits and clock > self.now:
            self._add("work", self._work(what), self.now, clock)
        if what in WORK:
            self.epilogue = what == "epilogue" and not ends
            self.after = self.before = ""
        elif ends:
            self._ended(what, clock)
        else:
            self.waits = what
        self.now = clock

    def _ended(self, what: str, clock: float) -> None:
        assert self.now is not None
        ring, _, side = what.partition(" ")
        if side:
            count = self.fulls[ring] = self.fulls.get(ring, -1) + 1
            if ring not in (*TOLD, "q"):
                self.tile = count
        self._add("wait", what, self.now, clock)
        self.waits, self.before, self.after = "", self.after, what

    def _add(self, kind: str, what: str, start: float, end: float) -> None:
        tile = NO_TILE if self.epilogue or what in ("other", "store") else self.tile
        if what in COMPLETE or what == "softmax":  # of the tile whose K was the last to come
            tile = self.fulls.get("k", self.tile)
        self.found.append(Interval(self.name, kind, what, tile, start, end))  # type: ignore[arg-type]

    def _work(self, following: str) -> str:
        if self.epilogue:
            return "epilogue"
        ring, _, side = self.after.partition(" ")
        if side == "empty" and ring not in TOLD:
            return f"load {ring}"
        if self.after == "QK":
            return "issue" if self.waits_early and following == "PV" else "softmax"
        if self.after == "PV" and self.before == "QK":
            return "softmax" if self.waits_early else "rescale"
        return "other" if not self.after or ring in TOLD else "issue"


def decode(
    plan: StampPlan, words: Sequence[int], title: str, cta: int = 0, waits_early: bool = False
) -> Timeline:
    """The timeline that a stamped kernel noted; `waits_early`: for P V, before the softmax.

    Shape: words as `StampPlan` has them, signed or not.
    Raises: TimelineError for words that no kernel with this plan notes.
    """
    if len(words) != plan.words:
        raise TimelineError(f"{len(words)} words: this plan has {plan.words}")
    intervals: list[Interval] = []
    dropped, origin, speeds = 0, None, []
    for number, (name, _) in enumerate(plan.lanes):
        first = number * plan.room * PAIR
        own = [word % WORD for word in words[first : first + plan.room * PAIR]]
        count, ended, opened, began = own[: FIRST * PAIR]
        if count == 0:
            raise TimelineError(f"{name}: no stamps; CTA {cta} has not run, or not to its end")
        origin = opened if origin is None else origin
        kept = min(count, plan.room - FIRST)
        dropped += count - kept
        lane = Lane(name, waits_early=waits_early)
        for what, ends, clock in _stamps(plan, name, own, kept, origin):
            lane.read(what, ends, clock)
        intervals += lane.found
        if kept == count and lane.now is not None and (ended - began) % WORD:
            clocks = lane.now - _after(opened, origin)
            speeds.append(clocks / ((ended - began) % WORD))
    speed = max(speeds, default=None)
    return Timeline("measured", title, from_zero(intervals), cta, dropped, speed)


def _stamps(
    plan: StampPlan, name: str, own: Sequence[int], kept: int, origin: int
) -> Iterator[tuple[str, bool, float]]:
    for at in range(FIRST * PAIR, (FIRST + kept) * PAIR, PAIR):
        code, clock = own[at : at + PAIR]
        if code >= 2 * len(plan.places):
            raise TimelineError(f"{name}: code {code} is none of {2 * len(plan.places)}")
        yield plan.places[code // 2], bool(code % 2), _after(clock, origin)


def _after(clock: int, origin: int) -> float:
    """Clocks since `origin`, negative before it: words wrap."""
    return float((clock - origin + WORD // 2) % WORD - WORD // 2)
