"""Geometry of tiles: how they lie in global and shared memory, and what the hardware allows.

Names that need the compiler are loaded on first use, so that swizzles, tensor maps and storage
plans can be computed, checked and printed without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from . import copy_engine
from .copy_engine import GlobalTensor
from .doctor import Diagnosis, encoded, explain, refusal
from .errors import LayoutError
from .geometry import Geometry
from .host import host_cute
from .remedies import Remedy
from .sectors import Traffic, traffic
from .smem import SMEM_CAPACITY, Buffer, SmemPlan
from .swizzle import NONE, SW32, SW64, SW128, Swizzle, bank, bank_conflicts, picture, widest
from .tma import TensorMap
from .tma_rules import Rule
from .tmem import TMEM_COLUMNS, Accumulator, Columns, TmemPlan

if TYPE_CHECKING:
    from .tile import Tile, transposed

_NEEDS_COMPILER = {"Tile": "tile", "transposed": "tile"}  # name -> module

__all__ = [
    "NONE",
    "SMEM_CAPACITY",
    "SW32",
    "SW64",
    "SW128",
    "TMEM_COLUMNS",
    "Accumulator",
    "Buffer",
    "Columns",
    "Diagnosis",
    "Geometry",
    "GlobalTensor",
    "LayoutError",
    "Remedy",
    "Rule",
    "SmemPlan",
    "Swizzle",
    "TensorMap",
    "Tile",
    "TmemPlan",
    "Traffic",
    "bank",
    "bank_conflicts",
    "copy_engine",
    "encoded",
    "explain",
    "host_cute",
    "picture",
    "refusal",
    "traffic",
    "transposed",
    "widest",
]


def __getattr__(name: str) -> object:
    if name not in _NEEDS_COMPILER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_NEEDS_COMPILER[name]}", __name__), name)
