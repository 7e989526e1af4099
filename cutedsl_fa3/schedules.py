"""The schedule to use when none is given: a table, each row with the reason that chose it.

Rows are tried from the top; the first whose head sizes and needs match is taken. What a variant
needs of registers decides: scores and element loads live beside the accumulators, and three
warpgroups leave 160 registers each where two leave 240. Speeds are TFLOP/s on an H200, bf16,
S = 8192 (records in notebooks/data); "spills" is what the compiler reports for shipped variants.
"""

from __future__ import annotations

from dataclasses import dataclass

from .pipelines import Schedule
from .problem import Problem
from .variant import Variant


@dataclass(frozen=True)
class Row:
    """A schedule for head sizes up to `head_dim`, for variants that need no more than `needs`."""

    head_dim: int
    needs: str
    tile_m: int
    tile_n: int
    consumers: int
    why: str


NEEDS = ("nothing", "uniform", "elements")

TABLE = (
    Row(64, "nothing", 192, 128, 3, "a third warpgroup hides the exponentials: 577 against 462"),
    Row(64, "elements", 128, 128, 2, "192 x 128 spills with a score or captured tensors"),
    Row(128, "uniform", 128, 128, 2, "two warpgroups of 240 registers"),
    Row(128, "elements", 128, 96, 2, "128 x 128 spills when the mask loads an element a score"),
)

# Heads side by side where the mask skips tiles, so that their K and V stay in L2 together.
HEAD_GROUP = {64: 16, 128: 8}


def needs(variant: Variant) -> str:
    """What a variant's functions hold in registers besides the accumulators.

    "nothing": a mask of positions only. "uniform": a score, or captured tensors read once a tile.
    "elements": captured tensors read by query or key.
    """
    graphs = [graph for graph in (variant.score, variant.mask) if graph is not None]
    loads = [node for graph in graphs for node in graph.nodes if node.op == "load"]
    if any(node.depends & {"q", "k"} for node in loads):
        return "elements"
    return "uniform" if loads or variant.score is not None else "nothing"


def default_schedule(variant: Variant, problem: Problem) -> Schedule:
    """The first row of the table that serves this variant and problem."""
    widest = max(problem.head_dim, problem.head_dim_v)
    level = NEEDS.index(needs(variant))
    row = next(r for r in TABLE if widest <= r.head_dim and level <= NEEDS.index(r.needs))
    return Schedule(
        tile_m=row.tile_m,
        tile_n=row.tile_n,
        stages=2,
        consumers=row.consumers,
        overlap="both",
        head_group=1 if variant.mask is None else HEAD_GROUP[row.head_dim],
    )
