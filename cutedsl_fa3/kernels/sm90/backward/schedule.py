"""How the backward's work is cut: the numbers to measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines.schedule import MAX_HEAD_GROUP, field_rule, is_whole

Add = Literal["tma", "direct"]

SHARES = (1, 2)  # warpgroups that may share keys
NUMBERS = (
    "tile_m", "tile_n", "stages", "places", "parts", "consumers", "sharing", "head_group"
)  # fmt: skip


@dataclass(frozen=True)
class BackwardSchedule:
    """Tile sizes, ring depths and consumer warpgroups of a backward.

    `tile_n` keys belong to a CTA, which walks along tiles of `tile_m` queries; each of `consumers`
    warpgroups has 64 of the keys, alone or as one of `sharing`. Those that share keys divide the
    queries of S and dP and the columns of dV and dK among them, and hand each other P and dS
    through shared memory: so a large head size leaves registers for the rest. `stages`: slots of Q
    and of dO; `places`: of dS (and of such a P), which all warpgroups write and read (with 2 they
    meet once a tile, with 1 twice). `parts`: the queries of a tile are worked on in so many, so
    that the products of the second run under the weights of the first, and P and dS of one take the
    registers of S and dP of the other. `add`: dQ joins its sums by "tma" from shared memory, or
    "direct" from registers, four at once. `head_group`: heads whose tiles are interleaved so that
    they stay in L2. `ahead`: S of the next tile is multiplied at the end of a step (ahead.py),
    which takes keys that nobody shares, one part, two places and two stages.
    `by_query`: dS lies in shared memory by rows of queries, as dQ reads it, and is transposed when
    it is stored; for keys that nobody shares and one part.

    Raises:
        ScheduleError: a field outside its range, naming field, value and what is allowed.
    """

    tile_m: int = 64
    tile_n: int = 128
    stages: int = 2
    places: int = 2
    parts: int = 1
    consumers: int = 2
    sharing: int = 1
    add: Add = "tma"
    head_group: int = 8
    ahead: bool = False
    by_query: bool = False

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
        need(self.parts in (1, self.tile_m // wgmma.ROWS), "parts", "1, or one for 64 queries")
        need(self.add in get_args(Add), "add", f"one of {', '.join(get_args(Add))}")
        need(isinstance(self.ahead, bool), "ahead", "True or False")
        single = self.parts == self.sharing == 1
        roomy = self.places == 2 and self.stages > 1
        need(
            (single and roomy) or not self.ahead,
            "ahead",
            "True needs parts 1, sharing 1, places 2, 2 stages",
        )
        need(isinstance(self.by_query, bool), "by_query", "True or False")
        need(single or not self.by_query, "by_query", "True needs parts 1 and sharing 1")
        need(1 <= self.head_group <= MAX_HEAD_GROUP, "head_group", f"1 to {MAX_HEAD_GROUP}")

    @property
    def part(self) -> int:
        """Queries of a part."""
        return self.tile_m // self.parts

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
        return (
            f"tile {self.tile_m} x {self.tile_n} in {self.parts} parts, {self.stages} stages, "
            f"{self.places} places of dS, {self.consumers} consumer warpgroups"
            f"{sharing}, dQ added {self.add}{', S a tile ahead' if self.ahead else ''}"
            f"{', dS by query' if self.by_query else ''}"
        )
