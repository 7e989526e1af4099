"""What the words of a stamped kernel mean: which lane noted what, at which clock.

    lane    the first thread of each warpgroup of each role; of a role of fewer warps, of its first
    words   lane after lane, `room` pairs each, unsigned
    pair 0  how many stamps the lane noted, also beyond its room; nanoseconds at its end
    pair 1  clock and nanoseconds at its beginning
    others  (code, clock), a stamp each
    code    2 * place + (0: begins, 1: ends)
    place   2 * ring: waits for `empty`, 2 * ring + 1: for `full`, then the named barriers by
            number, then `NAMED`: waits for a product or a store, an epilogue, the role as a whole

Clocks are low words of the SM's own counter, which all warps of a CTA share; nanoseconds those of
%globaltimer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .barriers import HARDWARE_BARRIERS, Barriers
from .ring import Ring
from .roles import WARPS_PER_GROUP, Role, first_warps
from .schedule import ScheduleError, is_whole

PAIR = 2  # words of a stamp
ROOM = 4096  # pairs of a lane
FIRST = 2  # the pair of the first stamp
LEAST_ROOM, MOST_ROOM = 16, 1 << 20

NAMED = ("QK", "PV", "product", "store", "epilogue", "role")
WORK = frozenset({"epilogue", "role"})  # the others are waits


class Tables(Protocol):
    """What is needed of a kernel to put its stamps into words."""

    rings: Mapping[str, Ring]
    roles: Mapping[str, Role]

    @property
    def barriers(self) -> Barriers: ...


@dataclass(frozen=True)
class StampPlan:
    """The lanes of a kernel and the words of its stamps; `lanes`: (name, first warp).

    `room`: pairs of a lane.

    Raises: ScheduleError for room for too few or too many.
    """

    lanes: tuple[tuple[str, int], ...]
    places: tuple[str, ...]
    room: int = ROOM

    def __post_init__(self) -> None:
        if not is_whole(self.room) or not LEAST_ROOM <= self.room <= MOST_ROOM:
            raise ScheduleError(
                f"room = {self.room!r}: a whole number from {LEAST_ROOM} to {MOST_ROOM} is needed"
            )

    @classmethod
    def of(cls, kernel: Tables, room: int = ROOM) -> StampPlan:
        """The plan for a kernel's tables."""
        return cls(lanes(kernel.roles), places(kernel), room)

    @property
    def words(self) -> int:
        """32-bit words of all lanes."""
        return len(self.lanes) * self.room * PAIR

    def code(self, name: str, ends: bool = False) -> int:
        """The code of one of `NAMED`."""
        return 2 * (len(self.places) - len(NAMED) + NAMED.index(name)) + int(ends)


def lanes(roles: Mapping[str, Role]) -> tuple[tuple[str, int], ...]:
    """(name, first warp) of each warpgroup of each role, as in "consumer 1"."""
    found = []
    for name, first in first_warps(roles).items():
        groups = -(-roles[name].warps // WARPS_PER_GROUP)
        for group in range(groups):
            lane = name if groups == 1 else f"{name} {group}"
            found.append((lane, first + WARPS_PER_GROUP * group))
    return tuple(found)


def places(kernel: Tables) -> tuple[str, ...]:
    """What is waited for, or done, at each place."""
    rings = [f"{name} {side}" for name in kernel.rings for side in ("empty", "full")]
    barriers = ["all threads"] * HARDWARE_BARRIERS
    for name, barrier in kernel.barriers.table.items():
        number = kernel.barriers.number(name)
        barriers[number : number + barrier.copies] = [name] * barrier.copies
    return (*rings, *barriers, *NAMED)
