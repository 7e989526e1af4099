"""How a kernel's work is cut and overlapped: the numbers to measure, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Overlap = Literal["none", "pingpong", "intra", "both"]
Store = Literal["tma", "direct"]
Source = Literal["registers", "shared"]

PACKS = (1, 2, 4, 8, 16, 32, 64)  # the 64 rows of a consumer warpgroup are whole queries then

MAX_HEAD_GROUP = 64  # 128 are no faster, and up to a third slower (notebooks/tried.md)


class ScheduleError(ValueError):
    """A schedule breaks a rule of the hardware or of the kernel; the message names it."""


def is_whole(value: object) -> bool:
    """Whether this is a Python int: 2.0 and True compare equal to ints and yet print otherwise."""
    return type(value) is int


def field_rule(schedule: object) -> Callable[[bool, str, str], None]:
    """A function need(ok, field, allowed) that refuses a field of `schedule` unless it is ok.

    Raises: ScheduleError, from that function, naming field, value and what is allowed.
    """

    def need(ok: bool, field: str, allowed: str) -> None:
        if not ok:
            raise ScheduleError(f"{field} = {getattr(schedule, field)!r}: {allowed}")

    return need


NUMBERS = (
    "tile_m", "tile_n", "stages", "consumers", "head_group", "early", "residents", "pack"
)  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Tile sizes, ring depth, consumer warpgroups and overlap.

    `overlap`: "intra" issues the next tile's first product before the softmax of this one,
    "pingpong" lets consumer warpgroups take turns on the tensor cores, "both" does both.
    `cluster`: CTAs along (m, n) that share multicast loads. `head_group`: heads whose tiles are
    interleaved so that their K and V stay in L2 (1: head after head). `persistent`: a CTA a
    multiprocessor, which draws tile after tile, instead of a CTA a tile. `residents`: CTAs that a
    multiprocessor has at a time; where they are more than one the roles share registers evenly.
    `store`: the output goes by "tma" through shared memory, or "direct" from registers, and needs
    no shared memory then. `early`: with "intra" or "both", how many eighths of a tile's
    exponentials are computed before the wait for the product with V that runs meanwhile; 0 leaves
    it to the compiler. `lazy`: O is rescaled only when a row's maximum has grown by more than 8 in
    base 2. `pack`: query heads of one key head that share a tile, row by row (row = query * pack +
    head), so that few queries fill it too; a tile has `queries` of them then. `p_from`: the second
    product reads P from "registers", or from "shared" memory, which leaves registers for the rest.
    `narrow`: with "intra" or "both", tile_n by 32 and one head in a tile, a warpgroup whose rows
    see nothing of half of a tile of keys multiplies the other half: of its first tile the first
    half, and where the mask may hide the first keys of all, of a later tile that needs it the
    second. Tiles that are decided one by one are multiplied whole.

    Raises:
        ScheduleError: a field outside its range, naming field, value and what is allowed.
    """

    tile_m: int = 128
    tile_n: int = 128
    stages: int = 2
    consumers: int = 2
    overlap: Overlap = "both"
    cluster: tuple[int, int] = (1, 1)
    head_group: int = 8
    persistent: bool = False
    store: Store = "tma"
    early: int = 0
    lazy: bool = False
    residents: int = 1
    pack: int = 1
    p_from: Source = "registers"
    narrow: bool = False
    text: ClassVar[str]

    def __post_init__(self) -> None:
        need = field_rule(self)
        for field in NUMBERS:
            need(is_whole(getattr(self, field)), field, "a whole number (int) is needed")
        need(self.stages >= 1, "stages", "1 or more; shared memory sets the limit")
        need(self.consumers in (1, 2, 3), "consumers", "1, 2 or 3 warpgroups")
        need(self.overlap in get_args(Overlap), "overlap", f"one of {', '.join(get_args(Overlap))}")
        need(
            self.overlap in ("none", "intra") or self.consumers > 1,
            "overlap",
            "ping-pong needs 2 or 3 consumers to take turns; use 'intra' or 'none' with one",
        )
        need(self.tile_n % 16 == 0 and 16 <= self.tile_n <= 256, "tile_n", "16 to 256, by 16")
        need(
            self.tile_m % (64 * self.consumers) == 0 and self.tile_m > 0,
            "tile_m",
            f"a multiple of 64 rows for each of {self.consumers} consumers",
        )
        need(
            isinstance(self.cluster, tuple)
            and len(self.cluster) == 2
            and all(is_whole(c) and c in (1, 2, 4) for c in self.cluster)
            and self.cluster[0] * self.cluster[1] <= 8,
            "cluster",
            "two extents of 1, 2 or 4 in a tuple, with a product of at most 8",
        )
        need(1 <= self.head_group <= MAX_HEAD_GROUP, "head_group", f"1 to {MAX_HEAD_GROUP}")
        for field in ("persistent", "lazy", "narrow"):
            need(isinstance(getattr(self, field), bool), field, "True or False")
        need(1 <= self.residents <= 4, "residents", "1 to 4")
        need(0 <= self.early <= 8, "early", "0 to 8")
        need(self.store in get_args(Store), "store", f"one of {', '.join(get_args(Store))}")
        need(self.pack in PACKS, "pack", f"one of {', '.join(map(str, PACKS))} heads in a tile")
        need(self.p_from in get_args(Source), "p_from", f"one of {', '.join(get_args(Source))}")
        # What it is made by, once: a graph that is compiled takes text, and cannot make it.
        object.__setattr__(self, "text", repr(self))

    @property
    def queries(self) -> int:
        """Queries of a tile, each in `pack` heads."""
        return self.tile_m // self.pack

    @property
    def intra(self) -> bool:
        """Whether the next tile's first product is issued before this tile's softmax."""
        return self.overlap in ("intra", "both")

    @property
    def halves(self) -> bool:
        """Whether half of a tile of keys may be multiplied: `narrow`, where halves are by 16.

        Rows of several heads leave too few registers for it.
        """
        return self.narrow and self.intra and self.tile_n % 32 == 0 and self.pack == 1

    @property
    def pingpong(self) -> bool:
        """Whether consumer warpgroups take turns."""
        return self.overlap in ("pingpong", "both")

    def __str__(self) -> str:
        return (
            f"tile {self.tile_m} x {self.tile_n}, {self.stages} stages, {self.consumers} consumer "
            f"warpgroups, overlap {self.overlap}, cluster {self.cluster[0]}x{self.cluster[1]}, "
            f"{'persistent CTAs' if self.persistent else 'a CTA a tile'}, "
            f"{f'{self.residents} at a time, ' if self.residents > 1 else ''}store {self.store}, "
            f"early {self.early}/8, rescale {'lazy' if self.lazy else 'always'}"
            f"{f', {self.pack} heads in a tile' if self.pack > 1 else ''}"
            f"{', P in shared memory' if self.p_from == 'shared' else ''}"
            f"{', halves of tiles' if self.halves else ''}"
        )
