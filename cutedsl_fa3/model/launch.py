"""A launch of a kernel, and what the scalar code of one of its warps reads and keeps."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .events import CTA_BYTES, Event
from .lanes import WARP
from .program import Function

Steps = Generator[Event, Any, None]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: extents, arguments by parameter."""

    function: Function
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    args: tuple[Any, ...]


@dataclass
class WarpState:
    """What the scalar code of one warp reads of its surroundings.

    `taken`: the way of a branch whose condition is not computed; `guesses` counts those that decide
    about more than registers.
    """

    launch: Launch
    cta: tuple[int, int, int]
    number: int
    rank: int = 0
    taken: bool = False
    guesses: set[int] = field(default_factory=set)
    launched: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.threads = np.arange(WARP, dtype=np.int64) + WARP * self.number
        self.mask = np.ones(WARP, dtype=bool)
        self.values: list[Any] = []
        self.registers: dict[tuple[int, int], Any] = {}
        self.smem_top = 0
        self.base = (self.rank + 1) * CTA_BYTES  # addresses below CTA_BYTES are this CTA's own
