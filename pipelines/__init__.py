"""Who does what when: rings, roles, named barriers, schedules, and the kernel made of them."""

from .barriers import Barrier, Barriers, Turns
from .expect import Expect, exactly
from .kernel import WarpSpecialized
from .ring import AccumulatorRing, Ring, UmmaRing, WordRing, put, take
from .roles import (
    CP_ASYNC_BUDGETS,
    DRAWING_BUDGETS,
    TMA_BUDGETS,
    Role,
    check_registers,
    launch_registers,
)
from .schedule import MAX_HEAD_GROUP, PACKS, Overlap, Schedule, ScheduleError, Source, Store
from .tickets import draw, drawn_tile
from .tile_order import MAX_GRID, TileOrder

__all__ = [
    "CP_ASYNC_BUDGETS",
    "DRAWING_BUDGETS",
    "MAX_GRID",
    "MAX_HEAD_GROUP",
    "PACKS",
    "TMA_BUDGETS",
    "AccumulatorRing",
    "Barrier",
    "Barriers",
    "Expect",
    "Overlap",
    "Ring",
    "Role",
    "Schedule",
    "ScheduleError",
    "Source",
    "Store",
    "TileOrder",
    "Turns",
    "UmmaRing",
    "WarpSpecialized",
    "WordRing",
    "check_registers",
    "draw",
    "drawn_tile",
    "exactly",
    "launch_registers",
    "put",
    "take",
]
