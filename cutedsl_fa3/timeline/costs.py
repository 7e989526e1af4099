"""Clocks of what a kernel's consumers do: their products, and what lies between them.

The steps are those of the cost ledger (ledger/tile.py), each by the pipe that it takes longest. A
warpgroup's warps lie on the four quarters of an SM, so a step of one warpgroup takes its share of
the SM's clocks: of three consumers a third.

    when                                          a warp of the forward does
    before S = Q K^T is issued                    waits        (barriers, descriptors, the loop)
    S is complete                                 score, mask, maximum, weights
    S is, and no O += P V runs that reads P       rounding, rescale (not after the first tile)
    the last O += P V of a work tile is complete  epilogue

With overlap inside a warpgroup the source has the wait for P V behind the weights. The compiler
moves it up to the wait for S (kernels/sm90/softmax.py, `finished`), but for the eighths of the
weights that the schedule's `early` holds in front of it; so is it here:

    S is complete                                 early: score, mask, maximum, early / 8 of weights
    S is, and no O += P V runs                    the rest, rounding, rescale
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cutedsl_fa3.ledger.rates import WGMMA_FLOP, clocks
from cutedsl_fa3.ledger.tile import TileCost, tile_cost

if TYPE_CHECKING:
    from cutedsl_fa3.kernels.gemm import Gemm
    from cutedsl_fa3.layouts import Tile
    from cutedsl_fa3.pipelines import Schedule
    from cutedsl_fa3.plans import Plan

SCORES, WEIGHTS, AFTER = ("score", "mask", "maximum"), "weights", ("rounding", "rescale")
EIGHTHS = 8
DESCRIPTION = 20  # instructions of an epilogue besides its elements, counted like a tile's waits


class Task(NamedTuple):
    """Work of one warp: clocks on a pipe of its quarter, and clocks that it waits besides."""

    what: str
    pipe: str
    clocks: float
    waited: float = 0.0


class Costs(Protocol):
    """What a kernel's consumers do, by the key tile of their lane; see this module's table."""

    def product(self, tiles: Sequence[str]) -> tuple[str, float]:
        """What a group of WGMMAs that reads these tiles is called, and its clocks."""
        ...

    def before(self, what: str, tile: int) -> tuple[Task, ...]:
        """Before a product is issued."""
        ...

    def at_once(self, what: str, tile: int) -> tuple[Task, ...]:
        """When it is complete."""
        ...

    def after_p(self, what: str, tile: int) -> tuple[Task, ...]:
        """When it is complete and no other product runs."""
        ...

    def last(self, what: str, tile: int) -> tuple[Task, ...]:
        """When it is complete and was the last of its work tile."""
        ...


@dataclass(frozen=True)
class ForwardCosts:
    """Of a forward.

    `masked`: of every key tile of a lane, work tile after work tile, whether it needs the element
    mask.
    """

    plan: Plan
    masked: tuple[tuple[bool, ...], ...]

    @cached_property
    def _flat(self) -> tuple[tuple[bool, bool, bool], ...]:
        """(masked, first of its work tile, last) of each tile."""
        return tuple(
            (masked, n == 0, n == len(work) - 1)
            for work in self.masked
            for n, masked in enumerate(work)
        )

    @cached_property
    def _tasks(self) -> Mapping[tuple[bool, str], Task]:
        consumers, found = self.plan.schedule.consumers, {}
        for masked in (False, True):
            cost: TileCost = tile_cost(self.plan, masked)
            for step in cost.steps:
                share = (step.takes - step.waited) / consumers
                waited = step.waited / consumers
                found[masked, step.name] = Task(step.name, step.limit, share, waited)
        return found

    def _some(self, shares: Mapping[str, float], tile: int) -> tuple[Task, ...]:
        """Steps of a tile, of each its share."""
        masked, first, _ = self._flat[tile]
        found = []
        for name, share in shares.items():
            task = self._tasks.get((masked, name))
            if task is not None and share and not (first and name == "rescale"):
                found.append(task._replace(clocks=share * task.clocks, waited=share * task.waited))
        return tuple(found)

    @cached_property
    def _ahead(self) -> Mapping[str, float]:
        """Of each step between the products, the share that comes before the wait for P V."""
        s = self.plan.schedule
        weights = s.early / EIGHTHS if s.intra else 1.0
        return {**dict.fromkeys(SCORES, float(weights > 0)), WEIGHTS: weights}

    def product(self, tiles: Sequence[str]) -> tuple[str, float]:
        """S = Q K^T reads K, O += P V reads V."""
        s, (d, dv) = self.plan.schedule, self.plan.problem.tile_dims
        what, depth = ("QK", d) if "k" in tiles else ("PV", dv)
        return what, product_clocks(s, s.tile_n * depth)

    def before(self, what: str, tile: int) -> tuple[Task, ...]:
        """The tile's waits."""
        return self._some({"waits": 1.0}, tile) if what == "QK" else ()

    def at_once(self, what: str, tile: int) -> tuple[Task, ...]:
        """Scores to weights, as far as the wait for P V does not come first."""
        return self._some(self._ahead, tile) if what == "QK" else ()

    def after_p(self, what: str, tile: int) -> tuple[Task, ...]:
        """The other weights; P in 16 bits; O to the new maximum."""
        rest = {name: 1.0 - share for name, share in self._ahead.items()}
        return self._some({**rest, **dict.fromkeys(AFTER, 1.0)}, tile) if what == "QK" else ()

    def last(self, what: str, tile: int) -> tuple[Task, ...]:
        """O divided by its sums, in 16 bits."""
        if what != "PV" or not self._flat[tile][2]:
            return ()
        s = self.plan.schedule
        outputs = s.tile_m * self.plan.problem.tile_dims[1] // (128 * s.consumers)
        return (_epilogue(s, {"FMUL": outputs, "FSEL": outputs}, outputs),)


@dataclass(frozen=True)
class GemmCosts:
    """Of a GEMM with `k_tiles` tiles along k: products, and one epilogue."""

    schedule: Schedule
    tiles: Mapping[str, Tile]
    k_tiles: int

    @classmethod
    def of(cls, kernel: Gemm, k_tiles: int) -> GemmCosts:
        """Of a kernel."""
        return cls(kernel.schedule, kernel.tiles, k_tiles)

    def product(self, tiles: Sequence[str]) -> tuple[str, float]:
        """A slot's tiles."""
        b = self.tiles["b"]
        return "product", product_clocks(self.schedule, b.rows * b.cols)

    def before(self, what: str, tile: int) -> tuple[Task, ...]:
        """Nothing."""
        return ()

    at_once = after_p = before

    def last(self, what: str, tile: int) -> tuple[Task, ...]:
        """C in 16 bits."""
        if tile < self.k_tiles - 1:
            return ()
        s = self.schedule
        outputs = s.tile_m * s.tile_n // (128 * s.consumers)
        return (_epilogue(s, {}, outputs),)


def product_clocks(schedule: Schedule, elements_b: int) -> float:
    """Clocks of the tensor cores for one warpgroup's rows by an operand B of so many elements."""
    return 2 * schedule.tile_m // schedule.consumers * elements_b / WGMMA_FLOP


def _epilogue(schedule: Schedule, counts: Mapping[str, int], outputs: int) -> Task:
    """Elements of an accumulator to 16 bits, and the instructions `counts` before."""
    warps = 4 * schedule.consumers
    every = {**counts, "F2FP": outputs / 2, "bookkeeping": DESCRIPTION + outputs / 4}
    by_pipe = clocks(every, warps)
    return Task("epilogue", "issue", sum(by_pipe.values()) / schedule.consumers)
