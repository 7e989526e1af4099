"""Forwards with small tiles, interpreted once: their events are run against many clocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from cutedsl_fa3 import Variant
from cutedsl_fa3.calls import plan_for
from cutedsl_fa3.model.names import Names
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.timeline.costs import ForwardCosts
from cutedsl_fa3.timeline.latencies import Latencies
from cutedsl_fa3.timeline.predicted import arguments, interpreted, masked_tiles
from cutedsl_fa3.timeline.table import Timeline, from_zero
from cutedsl_fa3.timeline.timed import Clockwork

TILE_N, KEY_TILES = 32, 6


def tensor(rows: int = KEY_TILES * TILE_N, heads: int = 1) -> torch.Tensor:
    """Q, K or V: only its shape matters."""
    return torch.empty(1, rows, heads, 64, dtype=torch.bfloat16, device="meta")


@dataclass(frozen=True)
class Interpreted:
    """A kernel's events, to be run against a clock."""

    plan: Plan
    kernel: Any
    programs: tuple
    costs: ForwardCosts

    def run(self, latencies: Latencies) -> Timeline:
        """Its timeline."""
        clockwork = Clockwork(self.programs, Names(self.kernel), self.costs, latencies)
        return Timeline("predicted", "a test's", from_zero(clockwork.run()))


@cache
def forward(stages: int, overlap: str) -> Interpreted:
    """A forward of one work tile of 128 queries and KEY_TILES key tiles, none of them masked."""
    q, k = tensor(128), tensor()
    schedule = Schedule(128, TILE_N, stages=stages, overlap=overlap)
    plan = plan_for(q, k, k, Variant(), schedule, trace=True)
    args, visits = arguments(plan, q, k, k, 0)
    kernel = plan.kernel
    launch, programs = interpreted(kernel, args, 0)
    costs = ForwardCosts(plan, masked_tiles(plan, visits, 0, launch.grid[0]))
    return Interpreted(plan, kernel, programs, costs)
