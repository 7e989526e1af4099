"""`Timeline`: who did what, or waited for what, from when to when.

lane          a role, as in "producer"; one of its warpgroups, as in "consumer 1"; or, of a
              prediction, a unit that they share: "tensor cores", "TMA"
kind, what    "work": load, issue, softmax, ..., "wait": k full, QK, turn, ... (`GROUPS`)
tile          the how manieth key tile of its lane, from 0; -1 where it is of none
start, end    clocks of the SM since the first interval began
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["work", "wait"]
Origin = Literal["predicted", "measured"]

TENSOR_CORES, TMA = "tensor cores", "TMA"
UNITS = (TENSOR_CORES, TMA)
NO_TILE = -1

# Kinds of work by what they are called, in the order of a legend. A measured timeline says only
# "softmax" and "rescale"; a predicted one says the ledger's steps.
GROUPS: dict[str, tuple[str, ...]] = {
    "products": ("QK", "PV", "product"),
    "softmax": ("softmax", "score", "mask", "maximum", "weights"),
    "rescale": ("rescale", "rounding"),
    "issue": ("issue", "waits"),
    "loads": ("load", "copy"),
    "epilogue": ("epilogue", "store"),
    "other": ("other",),
}
COMPLETE = ("QK", "product")  # waits that end with a tile's first product
_GROUP = {what: group for group, names in GROUPS.items() for what in names}


def group_of(what: str) -> str:
    """The kind of a piece of work: "load k" is of the loads, as "load" is."""
    return _GROUP.get(what.split()[0], "other")


class TimelineError(ValueError):
    """What was given is no timeline; the message says what is wrong with it."""


@dataclass(frozen=True)
class Interval:
    """A piece of work, or a wait, of one lane.

    Units: clocks.
    """

    lane: str
    kind: Kind
    what: str
    tile: int
    start: float
    end: float

    @property
    def clocks(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The intervals of one CTA, lane by lane in the order of its tables, each in its order.

    `title`: kernel and schedule. `cta`: its index in the grid. Of a measured one, `dropped`: stamps
    that found no room, `ghz`: how fast the SM ran, where that could be told.

    Raises: TimelineError for intervals that end before they begin or overlap within their lane.
    """

    origin: Origin
    title: str
    intervals: tuple[Interval, ...]
    cta: int = 0
    dropped: int = 0
    ghz: float | None = None

    def __post_init__(self) -> None:
        before: dict[str, Interval] = {}
        for each in self.intervals:
            if not each.start <= each.end:
                raise TimelineError(f"{each} ends before it begins")
            last = before.get(each.lane)
            if last is not None and each.start < last.end:
                raise TimelineError(f"{each} begins before the end of {last}, of the same lane")
            before[each.lane] = each

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes, roles first."""
        found = dict.fromkeys(each.lane for each in self.intervals)
        return (*(n for n in found if n not in UNITS), *(n for n in found if n in UNITS))

    def of(self, lane: str) -> tuple[Interval, ...]:
        """The intervals of one lane, in their order."""
        return tuple(each for each in self.intervals if each.lane == lane)

    @cached_property
    def clocks(self) -> float:
        """From the first beginning to the last end."""
        return max((each.end for each in self.intervals), default=0.0)

    def waited(self, lane: str) -> float:
        """Clocks that a lane waits."""
        return sum(each.clocks for each in self.of(lane) if each.kind == "wait")

    def worked(self, lane: str, what: str | None = None) -> float:
        """Clocks that a lane works, or works at one thing."""
        return sum(
            each.clocks
            for each in self.of(lane)
            if each.kind == "work" and what in (None, each.what)
        )

    def clocks_a_tile(self, lane: str | None = None) -> float | None:
        """Clocks from key tile to key tile of a lane, in the mean; None for fewer than four tiles.

        Counted from the end of a tile's first product to that of the next one's, without the first
        and without epilogues. `lane`: the first that has as many.
        """
        for name in (lane,) if lane else self.lanes:
            clocks = tiles = 0.0
            for ends in self._work_tiles(name):
                if len(ends) >= 4:
                    clocks, tiles = clocks + ends[-1] - ends[1], tiles + len(ends) - 2
            if tiles:
                return clocks / tiles
        return None

    def _work_tiles(self, lane: str) -> list[list[float]]:
        """When the first products of a lane's tiles were complete, by work tile."""
        found: list[list[float]] = [[]]
        for each in self.of(lane):
            if each.kind == "wait" and each.what in COMPLETE:
                found[-1].append(each.end)
            elif each.what == "epilogue" and found[-1]:
                found.append([])
        return found

    def between(self, start: float, end: float) -> Timeline:
        """The part from `start` to `end`, cut there; its clocks begin at 0."""
        cut = tuple(
            Interval(
                e.lane, e.kind, e.what, e.tile, max(e.start, start) - start, min(e.end, end) - start
            )
            for e in self.intervals
            if e.end > start and e.start < end
        )
        return Timeline(self.origin, self.title, cut, self.cta, self.dropped, self.ghz)

    def rows(self) -> Iterator[tuple[str, str, str, int, float, float]]:
        """The plain table."""
        for e in self.intervals:
            yield e.lane, e.kind, e.what, e.tile, e.start, e.end

    def to_json(self) -> str:
        """As JSON, an interval a line."""
        rows = ",\n".join(f"    {json.dumps(asdict(each))}" for each in self.intervals)
        head = {k: v for k, v in asdict(self).items() if k != "intervals"}
        before = json.dumps(head, indent=2).removesuffix("\n}")
        return f'{before},\n  "intervals": [\n{rows}\n  ]\n}}'

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """What `to_json` wrote.

        Raises: TimelineError.
        """
        try:
            content = json.loads(text)
            rows = tuple(Interval(**row) for row in content.pop("intervals"))
            return cls(intervals=rows, **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TimelineError(f"no timeline: {error}") from error

    def __str__(self) -> str:
        head = f"{self.origin}: {self.title}, CTA {self.cta}: {self.clocks:,.0f} clocks"
        tile = self.clocks_a_tile()
        lines = [head + ("" if tile is None else f", {tile:,.0f} from key tile to key tile")]
        if self.ghz:
            lines[0] += f", at {self.ghz:.2f} GHz"
        if self.dropped:
            lines.append(f"  {self.dropped} stamps found no room: the end is missing")
        width = max(map(len, self.lanes), default=0)
        for lane in self.lanes:
            share = f"works {self.worked(lane) / self.clocks:4.0%}"
            if lane not in UNITS:
                share += f", waits {self.waited(lane) / self.clocks:4.0%}"
            parts = ", ".join(f"{w} {c:,.0f}" for w, c in self._longest(lane))
            lines.append(f"  {lane:{width}}  {share}: {parts}")
        return "\n".join(lines)

    def _longest(self, lane: str, most: int = 6) -> list[tuple[str, float]]:
        total: dict[str, float] = {}
        for each in self.of(lane):
            name = each.what if each.kind == "work" else f"wait {each.what}"
            total[name] = total.get(name, 0.0) + each.clocks
        return sorted(total.items(), key=lambda item: -item[1])[:most]


def from_zero(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same intervals, clocks counted from the first beginning."""
    every = tuple(intervals)
    first = min((each.start for each in every), default=0.0)
    return tuple(
        Interval(e.lane, e.kind, e.what, e.tile, e.start - first, e.end - first) for e in every
    )
