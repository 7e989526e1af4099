"""How long a launch takes: its work tiles' costs, handed out to the multiprocessors in order.

    work tile   overhead + the sum of its key tiles' clocks (tile.py), masked ones apart
    launch      overhead + until the last CTA is done, each taking the next work tile

CTAs that a multiprocessor has at a time (`Schedule.residents`) share its pipes: the key tiles of
each last as many times longer as they are, their overheads run beside each other.
The numbers that no table has are in `Parameters`, fitted on plain attention (fit.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from .rates import SMS

if TYPE_CHECKING:
    from cutedsl_fa3.pipelines import Schedule
    from cutedsl_fa3.plans import Plan

MOST_HANDED_OUT = 1 << 17  # work tiles that are handed out one by one
MOST_DECIDED = 1 << 24  # key tiles that are looked at


class Sizes(NamedTuple):
    """The lengths of one call."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.heads} heads, {self.seqlen_q} x {self.seqlen_k}"


class Visits(NamedTuple):
    """Key tiles of each work tile, in launch order; a tile that half of its rows pass over is half.

    Shape: (work tiles,) fp64 each; `masked` counts those of `total` that need the element mask.
    """

    total: torch.Tensor
    masked: torch.Tensor


@dataclass(frozen=True)
class Parameters:
    """What the tables leave open.

    `exposed`: by `overlap_kind`, the share of the shorter of products and element work that is not
    hidden; `work_tile`: by `cta_kind`, what a work tile costs besides its key tiles.

    Units: clocks; `clock` in GHz. It is that of plain attention in bursts on one card, which is
    limited by power, so it is no constant of the hardware.
    """

    clock: float
    launch: float
    work_tile: Mapping[str, float]
    exposed: Mapping[str, float]

    def exposed_by(self, schedule: Schedule) -> float:
        """The share for a schedule; of a kind that was not fitted, the most of its like.

        That is: of schedules with as many warpgroups on an SM, or with the nearest number.
        """
        kind = overlap_kind(schedule)
        if kind in self.exposed:
            return self.exposed[kind]
        apart = {name: abs(warpgroups(schedule) - int(name.split()[0])) for name in self.exposed}
        nearest = min(apart.values())
        return max(v for name, v in self.exposed.items() if apart[name] == nearest)

    def work_tile_by(self, schedule: Schedule) -> float:
        """The overhead of a work tile; of a kind that was not fitted, the most of the others."""
        return self.work_tile.get(cta_kind(schedule), max(self.work_tile.values()))

    def knows(self, schedule: Schedule) -> bool:
        """Whether a schedule of this kind was fitted."""
        return overlap_kind(schedule) in self.exposed and cta_kind(schedule) in self.work_tile


def warpgroups(schedule: Schedule) -> int:
    """Consumer warpgroups of an SM at a time."""
    return schedule.consumers * schedule.residents


def overlap_kind(schedule: Schedule) -> str:
    """Consumer warpgroups of an SM, of one CTA or of several, and overlap, as in "2 intra"."""
    return f"{warpgroups(schedule)} {schedule.overlap}"


def cta_kind(schedule: Schedule) -> str:
    """How CTAs come by work tiles."""
    return "persistent" if getattr(schedule, "persistent", False) else "a CTA a tile"


def visit_counts(plan: Plan, sizes: Sizes, passes_over: bool = True) -> Visits | None:
    """How many key tiles each work tile visits; None where there are too many to look at.

    Captured tensors that the mask reads are read, from a GPU too. `passes_over`: whether
    warpgroups pass over tiles that their rows do not see, as today's kernels do.
    """
    from cutedsl_fa3.variant.visits import visited_tiles

    s, mask = plan.schedule, plan.variant.mask
    depends = mask.inputs if mask is not None else frozenset[str]()
    sizes = sizes._replace(heads=sizes.heads // s.pack)
    apart = (sizes.batch if "b" in depends else 1) * (sizes.heads if "h" in depends else 1)
    blocks = -(-sizes.seqlen_q // s.queries), -(-sizes.seqlen_k // s.tile_n)
    if 0 in sizes or apart * blocks[0] * blocks[1] * s.consumers > MOST_DECIDED:
        return None
    visited, masked = visited_tiles(mask, plan.variant.captures, *sizes, s.queries, s.tile_n)
    share = visited.double()
    if passes_over and not plan.by_tile:
        share = share * _share_of_rows(plan, sizes, blocks[0])
    every = (sizes.batch, sizes.heads, -1)
    counts = (t.sum(-1).cpu().expand(every) for t in (share, share * masked))
    return Visits(*(_in_order(each, s.head_group) for each in counts))


def _share_of_rows(plan: Plan, sizes: Sizes, m_blocks: int) -> torch.Tensor:
    """Of each tile of queries and key tile, the share of warpgroups that do not pass over it.

    They pass over what lies to the right of all that their rows see (kernels/sm90/mainloop.py).
    """
    from cutedsl_fa3.variant.visits import visited_tiles

    s, variant = plan.schedule, plan.variant
    queries = s.queries // s.consumers
    seen, _ = visited_tiles(variant.mask, variant.captures, *sizes, queries, s.tile_n)
    missing = m_blocks * s.consumers - seen.shape[2]  # strips past the last query
    seen = torch.nn.functional.pad(seen, (0, 0, 0, missing))
    to_the_right = seen.flip(-1).cumsum(-1).flip(-1) > 0  # or seen itself
    return to_the_right.unflatten(2, (m_blocks, s.consumers)).double().mean(3)


def _in_order(counts: torch.Tensor, head_group: int) -> torch.Tensor:
    """Of (batch, heads, m_blocks), in launch order (pipelines/tile_order.py)."""
    by_head = counts.reshape(-1, counts.shape[-1]).flip(-1)
    groups = -(-len(by_head) // head_group)
    widest = -(-len(by_head) // groups)
    return torch.cat([group.T.reshape(-1) for group in by_head.split(widest)])


def milliseconds(
    schedule: Schedule, full: float, masked: float, visits: Visits, parameters: Parameters
) -> float:
    """Predicted time of one launch, of clocks of its two kinds of tiles.

    Fewer work tiles than CTAs have room for leave an SM with fewer CTAs.
    """
    tiles = visits.total * full + visits.masked * (masked - full)
    at_a_time = min(schedule.residents, -(-len(tiles) // SMS))
    work = tiles * at_a_time + parameters.work_tile_by(schedule)
    end = makespan(work.tolist(), SMS * at_a_time)
    return (end + parameters.launch) / parameters.clock * 1e-6


def makespan(durations: list[float], workers: int = SMS) -> float:
    """When the last of `durations` is done if each worker takes the next as soon as it is free."""
    if len(durations) <= workers:
        return max(durations, default=0.0)
    longest = max(durations)
    if longest == min(durations):
        return -(-len(durations) // workers) * longest
    if len(durations) > MOST_HANDED_OUT:
        return sum(durations) / workers + longest / 2
    free = durations[:workers]
    heapq.heapify(free)
    for duration in durations[workers:]:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)
