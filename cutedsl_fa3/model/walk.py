"""One interleaving of a kernel's warps to read, with the state of every mbarrier behind each step.

The warps take turns, a step each; copies land as soon as they are issued. `check_pipeline` looks at
the other interleavings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from . import events as ev
from . import host, program, reader
from .check import clusters, given, prepared
from .events import Event
from .report import many
from .search import Run
from .works import Work


@dataclass
class Counts:
    """An mbarrier: its phase, the arrivals that this lacks, the bytes announced and not copied."""

    expected: int
    missing: int
    phase: int = 0
    bytes: int = 0

    def take(self, arrivals: int, announced: int) -> None:
        """Count arrivals and announced or, negative, copied bytes."""
        self.missing -= arrivals
        self.bytes += announced
        if self.missing <= 0 and self.bytes == 0:
            self.missing = self.expected
            self.phase += 1

    def __str__(self) -> str:
        arrived = f"{self.phase}: {self.expected - self.missing}/{self.expected}"
        return arrived + (f" {self.bytes} B" if self.bytes else "")


@dataclass(frozen=True)
class Line:
    """What some warps do, and the mbarriers of the rings behind it, in the order of the columns."""

    who: str
    does: str
    mbarriers: tuple[str, ...]


@dataclass(frozen=True)
class Walk:
    """The steps of one interleaving. Printed: phase, arrivals so far of all, bytes under way."""

    columns: tuple[str, ...]
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        rows = [("who", "does", *self.columns)]
        for line, before in zip(self.lines, (None, *self.lines), strict=False):
            was = before.mbarriers if before else ("",) * len(self.columns)
            same = zip(line.mbarriers, was, strict=True)
            rows.append((line.who, line.does, *("" if now == then else now for now, then in same)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(text.rstrip() for text in texts)


class InTurns(Run):
    """Each warp goes one step, then the next."""

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for process in self.processes:
                moved |= not process.done and self.advance(process)


def walk(kernel: Any, work: Work | Sequence[Any] | None = None) -> Walk:
    """The steps of one piece of work, by default the kernel's longest own one.

    `kernel` and `work` as `check_pipeline` takes them; the first cluster of the first launch that
    has barriers is shown.

    Raises: NotCovered; what tracing the kernel raises.
    """
    kernel, works = given(kernel, None if work is None else [work])
    functions = reader.read(kernel)
    for launch in host.launches(functions, works[-1].args):
        if program.hands_over(launch.function):
            run, _ = prepared(InTurns, kernel, launch, clusters(launch)[0])
            run.run()
            return _told(run)
    raise program.NotCovered(f"{type(kernel).__name__} launches nothing that has barriers")


def _told(run: Run) -> Walk:
    places = [
        address + (cta + 1) * ev.CTA_BYTES
        for cta in range(run.names.ctas)
        for address in run.names.barriers
    ]
    counts: dict[int, Counts] = {}

    def state() -> tuple[str, ...]:
        return tuple(str(counts[at]) if at in counts else "" for at in places)

    lines = []
    for does, steps in groupby(_steps(run), key=lambda step: step[1]):
        who = []
        for number, _, event in steps:
            _count(counts, event)
            name = run.who(run.processes[number])
            who += [name] if name not in who else []
        if does:
            lines.append(Line(many(who), does, state()))
    return Walk(tuple(_short(run.names.barrier(at)) for at in places), tuple(lines))


def _steps(run: Run) -> Iterator[tuple[int, str, Event]]:
    """(process, what it does or "", event) of each step that has to do with a ring or a tile."""
    for number, event in run.what:
        if event.kind != ev.INIT and _shown(run, event):
            yield number, _says(run, event), event
        elif event.kind == ev.INIT:
            yield number, "", event


def _shown(run: Run, event: Event) -> bool:
    if event.kind in (ev.WAIT, ev.ARRIVE, ev.EXPECT):
        return run.names.end_of(event.at) is not None
    if event.kind == ev.PRODUCT:
        return bool(event.region)
    return event.kind in ("landed", ev.RETIRE, ev.STORE)


def _says(run: Run, event: Event) -> str:
    if event.kind in (ev.WAIT, ev.ARRIVE, ev.EXPECT):
        at = _short(run.names.barrier(event.at))
        return {
            ev.WAIT: f"pass {at}, parity {event.value}",
            ev.ARRIVE: f"arrive at {at}",
            ev.EXPECT: f"arrive at {at}, announce {event.value} B",
        }[event.kind]
    if event.kind == ev.RETIRE:
        return f"wait until {event.value} groups of WGMMA are left"
    if event.kind == "landed":
        return f"copy {event.value} B to {run.names.region(event.targets[0][1])}"
    verb = "store" if event.kind == ev.STORE else "issue WGMMA on"
    return f"{verb} {run.names.region(event.region)}"


def _short(barrier: str) -> str:
    return barrier.replace("ring ", "").replace(", stage", "")


def _count(counts: dict[int, Counts], event: Event) -> None:
    if event.kind == ev.INIT:
        counts[event.at] = Counts(event.count, event.count)
    elif event.kind in (ev.ARRIVE, ev.EXPECT):
        counts[event.at].take(event.count, event.value if event.kind == ev.EXPECT else 0)
    elif event.kind == "landed":
        for at, _ in event.targets:
            counts[at].take(0, -event.value)
