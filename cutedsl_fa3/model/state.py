"""What is kept while warps run: findings, barriers, accesses, and how far each warp is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .events import Event, Region


@dataclass
class Finding:
    """One fault: what it is in a word, what it says, and the steps that lead there."""

    kind: str
    text: str
    step: int
    others: tuple[int, ...] = ()
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.text}"]
        return "\n".join(lines + [f"    {line}" for line in self.trace])


@dataclass
class Mbarrier:
    """An mbarrier while it runs; `clock` is the past of what has counted in this phase."""

    expected: int
    init: int
    pending: int
    tx: int = 0
    phase: int = 0
    clock: int = 0
    ended: list[int] = field(default_factory=list)
    waits: dict[int, list[int]] = field(default_factory=dict)
    counted: list[tuple[int, int, int]] = field(default_factory=list)  # (step, arrivals, bytes)
    doubts: dict[int, Finding] = field(default_factory=dict)
    largest: int = 0  # arrivals at once


@dataclass
class Round:
    """A named barrier, or the cluster's, while it runs."""

    expected: int
    arrived: int = 0
    number: int = 0
    clock: int = 0
    ended: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)


@dataclass
class Access:
    """Bytes of shared memory that are read or written from `begin` to `end`, both steps."""

    kind: str
    who: int
    region: Region
    begin: int
    end: int | None
    exact: bool = True
    order: int = 0
    times: int = 1


@dataclass
class Process:
    """A warp while it runs."""

    cta: int
    warp: int
    steps: Iterator[Event]
    past: int = 0
    event: Event | None = None
    reply: Any = None
    joined: int | None = None  # the round of the named barrier that it waits in
    done: bool = False
    number: int = 0
    open: list[int] = field(default_factory=list)  # accesses of products not yet committed
    groups: list[tuple[list[int], set[int], set[int]]] = field(default_factory=list)
    open_registers: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    dirty: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    fenced: bool = False
    stores: list[int] = field(default_factory=list)
    store_groups: list[list[int]] = field(default_factory=list)
    taken: list[Event] = field(default_factory=list)
