"""The ledger as a plan prints it: clocks of a tile by step and pipe, and what they add up to."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from cutedsl_fa3.variant import Variant

from . import stored
from .launch import Sizes, Visits, milliseconds, visit_counts
from .rates import PIPES
from .tile import Step, TileCost, tile_cost

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan

COLUMNS = ("WGMMA", *PIPES, "issue")
ISSUE = "issue slots"


class Ledger:
    """What a plan is predicted to cost; printable.

    Units: clocks of one SM for a key tile, but `ms`.
    """

    def __init__(self, plan: Plan, sizes: Sizes | None = None) -> None:
        self.plan, self.sizes = plan, sizes
        self.fit = stored.load()
        self.exposed = self.fit.parameters.exposed_by(plan.schedule)
        self.full, self.masked = tile_cost(plan), tile_cost(plan, masked=True)

    @property
    def clocks(self) -> float:
        """A tile that needs no element mask."""
        return self.full.total(self.exposed)

    @property
    def for_mask(self) -> float:
        """What a tile that needs the element mask costs beside."""
        return self.masked.total(self.exposed) - self.clocks

    @cached_property
    def for_score(self) -> float:
        """What the score and weight functions add to a tile of plain attention of this schedule.

        A softmax that they allow to go without a maximum counts in their favour.
        """
        without = replace(self.plan, variant=Variant())
        return self.clocks - tile_cost(without).total(self.exposed)

    @cached_property
    def to_plain(self) -> float:
        """Clocks for a score, in units of plain attention with a schedule of its own."""
        plain = Ledger(type(self.plan).default(Variant(), self.plan.problem))
        return self.clocks / _scores(self.plan) / (plain.clocks / _scores(plain.plan))

    @cached_property
    def visits(self) -> Visits | None:
        """The tiles of a call of these sizes; None without sizes, or where they are too many."""
        return None if self.sizes is None else visit_counts(self.plan, self.sizes)

    @property
    def ms(self) -> float | None:
        """Predicted time of a call of these sizes."""
        if self.visits is None:
            return None
        tiles = (self.clocks, self.clocks + self.for_mask)
        return milliseconds(self.plan.schedule, *tiles, self.visits, self.fit.parameters)

    @cached_property
    def to_causal(self) -> float | None:
        """The time in units of plain causal attention of the same sizes, scheduled on its own.

        As many heads share a tile.
        """
        from cutedsl_fa3.masks import causal
        from cutedsl_fa3.schedules import default_schedule

        if self.sizes is None:
            return None
        variant, problem = Variant(mask=causal), self.plan.problem
        schedule = default_schedule(variant, problem, self.sizes.seqlen_k)
        schedule = replace(schedule, pack=self.plan.schedule.pack)
        its = Ledger(type(self.plan)(variant, problem, schedule), self.sizes).ms
        return self.ms / its if self.ms and its else None

    def __str__(self) -> str:
        steps = [_products(self.full), *self.full.steps]
        s = self.plan.schedule
        lines = [f"a key tile of {s.tile_m} x {s.tile_n} scores, clocks of an SM (predicted)"]
        lines += [f"{'':9} {' '.join(f'{name:>6}' for name in (*COLUMNS, 'takes'))}"]
        lines += [_row(step) for step in steps]
        shown = " ".join(f"{self.full.by_pipe[name]:6.0f}" for name in COLUMNS)
        shares = " ".join(f"{self.full.by_pipe[name] / self.clocks:6.0%}" for name in COLUMNS)
        lines += [f"{'all':9} {shown} {self.clocks:6.0f}", f"{'share':9} {shares}"]
        mask = self.masked.step("mask")
        if self.plan.variant.mask is not None and mask is not None:
            lines += [f"{_row(mask)}  where a tile needs it"]
        return "\n".join([*lines, *self._said()])

    def _said(self) -> list[str]:
        s, full = self.plan.schedule, self.full
        lines = [
            f"tile     the longer of {full.products:.0f} (products) and {full.elements:.0f} (the "
            f"rest), and {self.exposed:.0%} of the shorter: {self.clocks:.0f}; {_limit(full)}"
        ]
        if s.residents > 1:
            lines += [
                f"shared   an SM has {s.residents} CTAs at a time: a tile of each lasts "
                f"{s.residents * self.clocks:.0f} clocks"
            ]
        step = full.step("score")
        if step is not None:
            pipe = ISSUE if step.limit == "issue" else step.limit
            wait = f", {step.waited:.0f} of it waiting for memory" if step.waited else ""
            lines += [
                f"score    {self.for_score:+.0f} clocks a tile, on {pipe}{wait}: "
                f"{self.to_plain:.2f} x plain attention"
            ]
        lines += [f"copies   {full.tma_bytes} B of K and V a tile, {self._rate:.0f} B a clock"]
        if self.sizes is not None:
            lines += [f"time     {self._time()}"]
        kind = "" if self.fit.parameters.knows(s) else "; no such schedule was fitted"
        lines += [f"fitted   on plain attention, {self.fit.device}, {self.fit.records[0]}{kind}"]
        return lines

    @property
    def _rate(self) -> float:
        return self.full.tma_bytes / self.clocks

    def _time(self) -> str:
        if self.ms is None:
            return f"{self.sizes}: nothing to do, or too many tiles to look at"
        assert self.visits is not None
        d, dv = self.plan.problem.head_dim, self.plan.problem.head_dim_v
        flop = 2 * (d + dv) * _scores(self.plan) * float(self.visits.total.sum())
        speed = flop / self.ms * 1e-9
        return (
            f"about {self.ms:.3g} ms, {speed:.0f} TFLOP/s in visited tiles, {self.to_causal:.2f} x "
            f"plain causal, on an {self.fit.device}: {self.sizes}"
        )


def _scores(plan: Plan) -> int:
    return plan.schedule.tile_m * plan.schedule.tile_n


def _products(tile: TileCost) -> Step:
    return Step("products", {}, {"WGMMA": tile.products})


def _row(step: Step) -> str:
    cells = [f"{step.clocks.get(name, 0.0):.0f}" for name in COLUMNS]
    shown = " ".join(f"{'-' if cell == '0' else cell:>6}" for cell in cells)
    return f"{step.name:9} {shown} {step.takes:6.0f}"


def _limit(tile: TileCost) -> str:
    """Which pipe has most to do."""
    pipe = max(tile.by_pipe, key=lambda name: tile.by_pipe[name])
    return f"most used: {ISSUE if pipe == 'issue' else pipe}"
