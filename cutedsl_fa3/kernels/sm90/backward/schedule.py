"""How the backward's work is cut: the numbers to measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines.schedule import MAX_HEAD_GROUP, field_rule, is_whole

Add = Literal["tma", "direct"]

WORDS = 32  # fp32 columns of the tensor that sums dQ
SHARES = (1, 2)  # warpgroups that may share keys
EIGHTHS = 8  # in which it is said how much of P comes before the wait for dP
NUMBERS = (
    "tile_m", "tile_n", "stages", "places", "consumers", "sharing", "head_group", "early"
)  # fmt: skip


@dataclass(frozen=True)
class BackwardSchedule:
    """Tile sizes, ring depths and consumer warpgroups of a backward.

    `tile_n` keys belong to a CTA, which walks along tiles of `tile_m` queries; each of `consumers`
    warpgroups has 64 of the keys, alone or as one of `sharing`. Those that share keys divide the
    queries of S and dP and the columns of dV and dK among them, and hand each other P and dS
    through shared memory: so a large head size leaves registers for the rest. `stages`: slots of Q
    and of dO; `places`: of dS (and of such a P), which all warpgroups write and read (with 2 they
    meet once a tile, with 1 twice). `add`: dQ joins its sums by "tma" from shared memory, or
    "direct" from registers, four at once. `head_group`: heads whose tiles are interleaved so that
    they stay in L2. `spread`: of LSE and delta, a lane holds a pair of every 64 queries and the
    lanes of a warp ask each other, so that they take 2 registers of each instead of 16. `early`:
    eighths of P that are computed before the wait for dP, which the compiler moves up else; where a
    function of scores takes the registers, it is left to the compiler unless LSE is spread.

    Raises:
        ScheduleError: a field outside its range, naming field, value and what is allowed.
    """

    tile_m: int = 64
    tile_n: int = 128
    stages: int = 2
    places: int = 2
    consumers: int = 2
    sharing: int = 1
    add: Add = "tma"
    head_group: int = 4
    spread: bool = False
    early: int = 0

    def __post_init__(self) -> None:
        need = field_rule(self)
        for field in NUMBERS:
            need(is_whole(getattr(self, field)), field, "a whole number (int) is needed")
        need(self.consumers in (1, 2, 3), "consumers", "1, 2 or 3 warpgroups")
        shares = [n for n in SHARES if self.consumers % n == 0]
        need(self.sharing in shares, "sharing", f"one of {shares} of {self.consumers} consumers")
        rows, keys = wgmma.ROWS * self.consumers, wgmma.ROWS * self.consumers // self.sharing
        each = "each consumer" if self.sharing == 1 else f"{self.sharing} consumers"
        need(self.tile_n == keys, "tile_n", f"{wgmma.ROWS} keys for {each}: {keys}")
        need(
            self.tile_m in (wgmma.ROWS, rows),
            "tile_m",
            f"{wgmma.ROWS} queries, whose dQ the consumers share by columns, or {rows}, by rows",
        )
        need(self.stages >= 1, "stages", "1 or more; shared memory sets the limit")
        need(self.places in (1, 2), "places", "1 or 2")
        need(self.add in get_args(Add), "add", f"one of {', '.join(get_args(Add))}")
        need(isinstance(self.spread, bool), "spread", "True or False")
        need(self.sharing == 1 or not self.spread, "spread", "True needs sharing 1")
        alone = "; more than 0 where warpgroups have their keys alone" if self.sharing > 1 else ""
        most = EIGHTHS if self.sharing == 1 else 0
        need(0 <= self.early <= most, "early", f"0 to {most} eighths{alone}")
        need(1 <= self.head_group <= MAX_HEAD_GROUP, "head_group", f"1 to {MAX_HEAD_GROUP}")

    @property
    def groups(self) -> int:
        """Warpgroups, or two that share, one below the other along the keys."""
        return self.consumers // self.sharing

    def accumulated(self, d: int, dv: int) -> int:
        """Registers of a thread that hold sums of products under the weights: dK, dV, S, dP."""
        of_keys = wgmma.ROWS * self.groups * (d + dv)
        return (of_keys + 2 * self.tile_n * self.tile_m) // (self.consumers * wgmma.WARPGROUP)

    @property
    def beside(self) -> int:
        """Warpgroups that share the rows of dQ, each with columns of its own."""
        return self.consumers if self.tile_m == wgmma.ROWS else 1

    def __str__(self) -> str:
        sharing = f", {self.sharing} on the same keys" if self.sharing > 1 else ""
        spread = ", LSE and delta by lanes" if self.spread else ""
        early = f", {self.early} of {EIGHTHS} of P before dP" if self.early else ""
        return (
            f"tile {self.tile_m} x {self.tile_n}, {self.stages} stages, {self.places} places of "
            f"dS, {self.consumers} consumer warpgroups{sharing}, dQ added {self.add}{spread}{early}"
        )
