"""Geometry of tiles: how they lie in global and shared memory, and what the hardware allows.

Names that need the compiler are loaded on first use, so that swizzles, tensor maps and storage
plans can be computed, checked and printed without it; so is what no kernel uses, the doctor and the
copy engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import LayoutError
from .host import host_cute
from .smem import SMEM_CAPACITY, Buffer, SmemPlan, capacity_of_each
from .swizzle import NONE, SW32, SW64, SW128, Swizzle, bank, bank_conflicts, picture, widest
from .tma import TensorMap
from .tma_rules import Rule
from .tmem import TMEM_COLUMNS, Accumulator, Columns, TmemPlan

if TYPE_CHECKING:
    from . import copy_engine
    from .copy_engine import GlobalTensor
    from .doctor import Diagnosis, Geometry, Remedy, Traffic, encoded, explain, refusal, traffic
    from .tile import Row, Tile, transposed

_ON_FIRST_USE = {
    "tile": ("Row", "Tile", "transposed"),
    "copy_engine": ("GlobalTensor",),
    "doctor": (
        "Diagnosis", "Geometry", "Remedy", "Traffic", "encoded", "explain", "refusal", "traffic",
    ),
}  # fmt: skip
_MODULES = {name: module for module, names in _ON_FIRST_USE.items() for name in names}

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
    "Row",
    "Rule",
    "SmemPlan",
    "Swizzle",
    "TensorMap",
    "Tile",
    "TmemPlan",
    "Traffic",
    "bank",
    "bank_conflicts",
    "capacity_of_each",
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
    if name in _ON_FIRST_USE:
        return import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
