"""What one key tile costs an SM, step by step, from a plan's graph and schedule.

    step       what it is                                             mostly takes
    products   S = Q K^T and O += P V                                  WGMMA
    score      the score or weight function of the variant             its own pipes
    mask       the element mask, in tiles that need it                 ALU
    maximum    the rows' maxima                                        ALU
    weights    exponentials and their sum                              MUFU
    rounding   P in 16 bits                                            ALU
    rescale    of O and the sums to the new maximum                    FMA
    waits      barriers, descriptors, the loop: issue slots            issue

A warp goes through the steps one after the other, each as long as the pipe that it takes longest;
the warpgroups' products run beside them. How much of the shorter of the two stays hidden is the
schedule's doing, and a fitted number (fit.py). CTAs that an SM has at a time share its pipes as
warpgroups do: a tile costs the SM as much as if it were alone, and lasts as many times longer
(launch.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from cutedsl_fa3.variant.distances import evenly_indexed

from .instructions import mask_instructions, reads, score_graph, score_instructions
from .rates import KEPT_EARLY, L2_LATENCY, WGMMA_FLOP, Counts, clocks

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan

ROWS_HELD = 2  # of a tile, by one thread; source: layouts/wgmma.py
SUMS = 2  # of a row's weights, side by side; source: kernels/sm90/softmax.py
MMA_K = 16  # of one WGMMA of 16-bit operands
BYTES = 2  # of an element of Q, K, V and O


@dataclass(frozen=True)
class Step:
    """One step of a tile: instructions of each warp, and clocks of the SM by pipe.

    `waited`: clocks that a step waits whatever its pipes do.
    """

    name: str
    instructions: Counts
    clocks: Mapping[str, float]
    waited: float = 0.0

    @property
    def takes(self) -> float:
        """Clocks of the pipe that this step takes longest, and what it waits."""
        return max(self.clocks.values(), default=0.0) + self.waited

    @property
    def limit(self) -> str:
        """The pipe that this step takes longest."""
        return max(self.clocks, key=lambda pipe: self.clocks[pipe])


@dataclass(frozen=True)
class TileCost:
    """A key tile of one plan, with or without the element mask.

    Units: clocks of one SM for all of its consumer warpgroups; bytes a tile.
    """

    steps: tuple[Step, ...]
    products: float
    tma_bytes: int

    @cached_property
    def elements(self) -> float:
        """Clocks of everything between the products, step after step."""
        return sum(step.takes for step in self.steps)

    def total(self, exposed: float) -> float:
        """Clocks of the tile; `exposed` as in `tile_clocks`."""
        return tile_clocks(self.products, self.elements, exposed)

    @cached_property
    def by_pipe(self) -> dict[str, float]:
        """Clocks of each pipe, WGMMA first."""
        found = Counter({"WGMMA": self.products})
        for step in self.steps:
            found.update(step.clocks)
        return dict(found)

    def step(self, name: str) -> Step | None:
        """The step of this name, if the tile has it."""
        return next((step for step in self.steps if step.name == name), None)


def tile_clocks(products: float, elements: float, exposed: float) -> float:
    """Clocks of a tile where a share `exposed` of the shorter of the two is not hidden."""
    return max(products, elements) + exposed * min(products, elements)


def products_of(plan: Plan) -> float:
    """Clocks of the tensor cores for a tile."""
    s = plan.schedule
    return 2 * s.tile_m * s.tile_n * sum(plan.problem.tile_dims) / WGMMA_FLOP


def tile_cost(plan: Plan, masked: bool = False) -> TileCost:
    """What one key tile of this plan costs; `masked`: one that needs the element mask."""
    s, (d, dv) = plan.schedule, plan.problem.tile_dims
    warps = 4 * s.consumers
    steps = []
    for name, counts in instructions(plan, masked).items():
        waited = s.consumers * _waited(plan, name)
        steps.append(Step(name, counts, clocks(counts, warps), waited))
    return TileCost(tuple(steps), products_of(plan), s.tile_n * (d + dv) * BYTES)


def instructions(plan: Plan, masked: bool) -> dict[str, Counts]:
    """Instructions of one warp for a tile, by step; steps that do nothing are left out."""
    s, (d, dv), variant = plan.schedule, plan.problem.tile_dims, plan.variant
    scores = s.tile_m * s.tile_n // (128 * s.consumers)  # that a thread holds
    rows, outputs = ROWS_HELD, s.tile_m * dv // (128 * s.consumers)
    products = d // MMA_K + s.tile_n // MMA_K
    found: dict[str, Counts] = {}
    if variant.score is not None or variant.weight is not None:
        found["score"] = score_instructions(plan, masked)
    if masked:
        found["mask"] = mask_instructions(plan)
    early = s.early if s.intra else 0
    if plan.bounded:
        found["weights"] = {"MUFU": scores, "FADD": scores + rows}
    elif variant.weight is None:
        found["maximum"] = {"FMNMX": scores + 3 * rows, "SHFL": 2 * rows}
        found["weights"] = {
            "FFMA": scores,
            "MUFU": scores + rows,
            "FADD": scores + rows,
            "FSETP": 2 * rows,
            "FSEL": 3 * rows,
        }
        found["rescale"] = {"FMUL": outputs + 2 * rows, "FFMA": rows}
    elif early:
        found["weights"] = {"FADD": scores * early // 8}  # a sum that holds them before the wait
    if early:
        sums = rows * (SUMS if variant.weight is None else 1)
        kept = {family: sums * count for family, count in KEPT_EARLY.items()}
        found["weights"] = {**found["weights"], **kept}
    found["rounding"] = {"F2FP": scores / 2}
    again = products if s.persistent else 0  # addresses made uniform once more
    vote = 12 if s.lazy else 0
    word = 24 if plan.by_tile else 0  # which tile, from the producer
    bookkeeping = 45 + 3 * products + again + vote + word
    found["waits"] = {"HGMMA": products, "bookkeeping": bookkeeping}
    return found


def _waited(plan: Plan, step: str) -> float:
    """Clocks that a step of one warpgroup waits for captured tensors read by query or key: L2 once.

    What a score function reads evenly by distance is asked for before the wait for S
    (kernels/sm90/mainloop.py), so S's product covers a part.
    """
    graph = {"score": score_graph(plan), "mask": plan.variant.mask}.get(step)
    loads = reads(graph)
    if graph is None or not loads:
        return 0.0
    if step == "mask" or not loads <= evenly_indexed(graph).keys():
        return L2_LATENCY
    s, (d, _) = plan.schedule, plan.problem.tile_dims
    return max(0.0, L2_LATENCY - 2 * s.tile_m * s.tile_n * d / s.consumers / WGMMA_FLOP)
