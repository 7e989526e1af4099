"""Named barriers: one registry per kernel, so that no two uses share a hardware barrier.

`bar.sync` / `bar.arrive` have 16 barriers per CTA; 0 belongs to `sync_threads`. A name maps to one
barrier or to a row of them (one per warpgroup), numbered in table order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.pipeline import NamedBarrier

from .roles import WARP
from .schedule import ScheduleError, is_whole

HARDWARE_BARRIERS = 16  # source: PTX ISA, bar


@dataclass(frozen=True)
class Barrier:
    """`copies` barriers that `threads` threads each must reach (arrivals and waits together)."""

    threads: int
    copies: int = 1


@dataclass(frozen=True)
class Barriers:
    """The named barriers of a kernel, in table order.

    Raises:
        ScheduleError: more than 15 in total, no copy, or threads that are not whole warps.
    """

    table: Mapping[str, Barrier]

    def __post_init__(self) -> None:
        for name, barrier in self.table.items():
            if not is_whole(barrier.copies) or barrier.copies < 1:
                raise ScheduleError(
                    f"named barrier {name!r} copies = {barrier.copies!r}: a whole number from 1 "
                    "is needed"
                )
            if not is_whole(barrier.threads) or barrier.threads < WARP or barrier.threads % WARP:
                raise ScheduleError(
                    f"named barrier {name!r} threads = {barrier.threads!r}: whole warps are needed"
                )
        total = sum(barrier.copies for barrier in self.table.values())
        if total > HARDWARE_BARRIERS - 1:
            raise ScheduleError(
                f"named barriers: {total} asked, {HARDWARE_BARRIERS - 1} exist besides "
                "barrier 0 of sync_threads"
            )

    def number(self, name: str) -> int:
        """The hardware barrier of `name` (the first of its copies)."""
        number = 1
        for other, barrier in self.table.items():
            if other == name:
                return number
            number += barrier.copies
        raise KeyError(name)

    def __getitem__(self, key: tuple[str, int | cutlass.Int32] | str) -> NamedBarrier:
        """`barriers["name"]` or `barriers["name", copy]`, to arrive at or wait on in a kernel.

        Raises:
            ScheduleError: a copy known here that does not exist: its number is another barrier's.
        """
        name, copy = key if isinstance(key, tuple) else (key, 0)
        copies = self.table[name].copies
        if isinstance(copy, int) and not 0 <= copy < copies:
            raise ScheduleError(f"named barrier {name!r} copy = {copy}: 0 to {copies - 1} exist")
        return NamedBarrier(self.number(name) + copy, self.table[name].threads)

    def __str__(self) -> str:
        return ", ".join(
            f"{self.number(name)}"
            + (f"-{self.number(name) + b.copies - 1}" if b.copies > 1 else "")
            + f" {name} ({b.threads} threads)"
            for name, b in self.table.items()
        )


class Turns:
    """Warpgroups that take turns: `wait()` for mine, `pass_on()` to the next.

    A token goes round the warpgroups 0, 1, ..., 0: each waits on its own copy of the barrier and
    arrives at its successor's, so a copy counts two warpgroups. Creating it hands out the first
    token, from the last warpgroup. Every warpgroup must take the same number of turns.
    """

    def __init__(self, barriers: Barriers, name: str, warpgroup: cutlass.Int32) -> None:
        self.barriers = barriers
        self.name = name
        self.count = barriers.table[name].copies
        self.warpgroup = warpgroup
        self._start()

    @cute.jit
    def _start(self):
        if self.warpgroup == self.count - 1:
            self.barriers[self.name, 0].arrive_unaligned()

    def wait(self) -> None:
        """Wait for this warpgroup's turn."""
        self.barriers[self.name, self.warpgroup].wait_unaligned()

    def pass_on(self) -> None:
        """End this turn: wake the next warpgroup."""
        last = self.warpgroup == self.count - 1
        following = cutlass.Int32(cutlass.select_(last, 0, self.warpgroup + 1))
        self.barriers[self.name, following].arrive_unaligned()
