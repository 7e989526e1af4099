"""Warp roles and their register budgets, as data.

A CTA's warps are divided among roles in the order of the table; a role's name is the method that
its warps run. `setmaxnreg` moves registers from the warpgroups that copy to those that multiply. It
acts on whole warpgroups, in steps of 8 from 24 to 256, and it cannot create registers: a CTA owns
what it was launched with, launch registers x threads. Asking for more does not fail, it waits for
ever; so the sum is checked here.

| consumers | TMA producer / consumer | one that draws tiles too | cp.async producer / consumer |
|-----------|-------------------------|--------------------------|------------------------------|
| 1         | 56 / 256                | 56 / 256                 |                              |
| 2         | 24 / 240                | 40 / 232                 | 40 / 232                     |
| 3         | 32 / 160                | 32 / 160                 |                              |

Without a number a role keeps the registers it was launched with and may have any number of warps:
so it is where accumulators lie in tensor memory.

Source: measured by FlashAttention-3 (its flash_fwd_kernel_sm90.h), but for a producer that draws
tiles: with 24 its divisions spill. The sums follow from the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .schedule import ScheduleError, is_whole

WARP = 32
WARPS_PER_GROUP = 4
REGISTER_FILE = 65536  # 32-bit registers of an SM; source: CUDA programming guide, capability 9.0
MAX_PER_THREAD = 256

# (producer, consumer) registers by number of consumer warpgroups.
TMA_BUDGETS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
DRAWING_BUDGETS = {**TMA_BUDGETS, 2: (40, 232)}
CP_ASYNC_BUDGETS = {2: (40, 232)}


@dataclass(frozen=True)
class Role:
    """`warps` warps that run the method of this role's name with `registers` each.

    Without `registers` the role keeps those of the launch, and setmaxnreg is not used.

    Raises:
        ScheduleError: no warps, or registers that setmaxnreg does not take, or takes only for
        whole warpgroups.
    """

    warps: int
    registers: int | None = None

    def __post_init__(self) -> None:
        for field in ("warps", "registers"):
            value = getattr(self, field)
            if not is_whole(value) and (field, value) != ("registers", None):
                raise ScheduleError(f"role {field} = {value!r}: a whole number (int) is needed")
        if self.warps < 1:
            raise ScheduleError(f"role warps = {self.warps}: 1 or more are needed")
        if self.registers is None:
            return
        if self.warps % WARPS_PER_GROUP:
            raise ScheduleError(
                f"role warps = {self.warps}: setmaxnreg acts on whole warpgroups; use a multiple "
                f"of {WARPS_PER_GROUP}, or leave registers out"
            )
        if self.registers % 8 or not 24 <= self.registers <= MAX_PER_THREAD:
            raise ScheduleError(
                f"role registers = {self.registers}: setmaxnreg takes multiples of 8 "
                f"from 24 to {MAX_PER_THREAD}"
            )

    @property
    def threads(self) -> int:
        """Threads of the role."""
        return self.warps * WARP

    @property
    def warpgroups(self) -> int:
        """Whole warpgroups of the role; 0 for fewer than four warps."""
        return self.warps // WARPS_PER_GROUP


def launch_registers(threads: int, residents: int = 1) -> int:
    """Registers per thread that a launch of `residents` CTAs per SM can grant: steps of 8."""
    return min(MAX_PER_THREAD, REGISTER_FILE // (threads * residents) // 8 * 8)


def threads(roles: Mapping[str, Role]) -> int:
    """Threads of the CTA."""
    return sum(role.threads for role in roles.values())


def first_warps(roles: Mapping[str, Role]) -> dict[str, int]:
    """The first warp of each role, in table order."""
    starts, warp = {}, 0
    for name, role in roles.items():
        starts[name] = warp
        warp += role.warps
    return starts


def registers_asked(roles: Mapping[str, Role], granted: int) -> int:
    """Registers of all threads, `granted` for each of a role without a number."""
    return sum(role.threads * (role.registers or granted) for role in roles.values())


def check_registers(
    roles: Mapping[str, Role], launched: int | None = None, residents: int = 1
) -> None:
    """Refuse budgets whose sum exceeds what the launch grants.

    `launched`: registers per thread of the compiled kernel; default: the most a launch of
    `residents` CTAs per SM can grant.

    Raises:
        ScheduleError: with both sums, by role; or a role with a budget that shares a warpgroup.
    """
    count = threads(roles)
    if count > 1024:
        raise ScheduleError(f"roles: {count} threads; a CTA has at most 1024")
    granted = launch_registers(count, residents) if launched is None else launched
    for name, first in first_warps(roles).items():
        if roles[name].registers is not None and first % WARPS_PER_GROUP:
            raise ScheduleError(
                f"role {name!r} begins at warp {first}: setmaxnreg acts on whole warpgroups; put "
                "the roles that have registers first"
            )
    budgets = {name: role.registers or granted for name, role in roles.items()}
    asked = registers_asked(roles, granted)
    if asked > granted * count:
        parts = " + ".join(f"{n} {r.threads} x {budgets[n]}" for n, r in roles.items())
        raise ScheduleError(
            f"role registers: {parts} = {asked} exceeds the launch's {count} threads x {granted} "
            f"registers = {granted * count}; setmaxnreg would wait for ever"
        )
