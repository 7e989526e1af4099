"""The fit: `Parameters` from measured times of plain attention, held against all the rest.

Only rows of full and causal attention are fitted; rows of variants are compared with what these
parameters predict, never fitted. A record does not say which kernels were measured, only from which
sources and by which table of schedules: where these are today's (stored.py), schedules and clocks
of tiles are too, and then kept beside the parameters (fitted.py), since a kernel that was made
faster since is not the one of the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from cutedsl_fa3.named import Lengths, named
from cutedsl_fa3.peers import OURS
from cutedsl_fa3.record import Record, Row, ScheduleRow

from .launch import (
    Parameters,
    Sizes,
    Visits,
    cta_kind,
    milliseconds,
    overlap_kind,
    visit_counts,
)
from .tile import products_of, tile_clocks, tile_cost

if TYPE_CHECKING:
    from cutedsl_fa3.pipelines import Schedule
    from cutedsl_fa3.plans import Plan

PLAIN = ("full", "causal")
FIRST_GUESS = {"clock": 1.8, "launch": 10000.0, "work_tile": 6000.0, "exposed": 0.3}
# What no fit may go beyond, since rows of a few head sizes tell a faster clock from less that is
# hidden, and launches from work tiles, only weakly: the highest clock of an H200 (its data sheet),
# half of it, and 10 us for a launch, several times what an empty one takes.
HIGHEST_CLOCK = 1.98
ENDS = {
    "clock": (HIGHEST_CLOCK / 2, HIGHEST_CLOCK),
    "launch": (0.0, 10000.0 * HIGHEST_CLOCK),
    "work_tile": (0.0, math.inf),
    "exposed": (0.0, math.inf),
}
MOST_STEPS = 30
TYPICAL = 0.05  # error of a row, which makes steps of a size
EXACT = 1e-9  # rows that are met need no second fit


@dataclass(frozen=True)
class Measured:
    """A kernel that was measured: its schedule, and clocks of a tile beside its products.

    `schedule`: fields of a `Schedule`; `elements`: of a full tile and of one that needs the element
    mask. `passes_over` as in `visit_counts`.
    """

    schedule: Mapping[str, Any]
    elements: tuple[float, float]
    passes_over: bool = True


Kernels = Mapping[str, Measured]  # by `label`
Ends = tuple[float, float]


@dataclass(frozen=True)
class Sample:
    """A measured time of ours, with the kernel that it was measured with."""

    row: Row | ScheduleRow
    schedule: Schedule
    elements: tuple[float, float]
    passes_over: bool = True

    @cached_property
    def plan(self) -> Plan:
        return _plan(self.row, self.schedule)

    @cached_property
    def visits(self) -> Visits:
        row = self.row
        sizes = Sizes(row.batch, row.heads, row.seqlen_q, row.seqlen_k)
        counted = visit_counts(self.plan, sizes, self.passes_over)
        if counted is None:
            raise ValueError(f"{row.variant} at {row.seqlen_q} x {row.seqlen_k}: too long to count")
        return counted

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What this sample shares with the plain causal one that it is held against."""
        r = self.row
        lengths = (r.seqlen_q, r.seqlen_k, r.batch, r.heads, r.kv_heads)
        return (r.dtype, r.head_dim, r.head_dim_v, *lengths)

    def predicted(self, parameters: Parameters) -> float:
        """Milliseconds."""
        exposed, products = parameters.exposed_by(self.schedule), products_of(self.plan)
        tiles = (tile_clocks(products, elements, exposed) for elements in self.elements)
        return milliseconds(self.schedule, *tiles, self.visits, parameters)


def _plan(row: Row | ScheduleRow, schedule: Schedule | None = None) -> Plan:
    from cutedsl_fa3.plans import Plan
    from cutedsl_fa3.problem import Problem
    from cutedsl_fa3.schedules import Extents, schedule_for

    variant = named(row.variant, Lengths(row.heads, row.seqlen_q, row.seqlen_k)).variant
    problem = Problem(row.dtype, row.head_dim, row.head_dim_v)
    if schedule is None:
        lengths = row.batch, row.seqlen_q, row.seqlen_k
        schedule = schedule_for(variant, problem, Extents(*lengths, row.heads, row.kv_heads))
    return Plan(variant, problem, schedule)


def label(row: Row | ScheduleRow) -> str:
    """What a row's kernel is kept under, if it is the one for any lengths."""
    return f"{row.variant} {row.dtype} {row.head_dim}x{row.head_dim_v}"


def label_of_lengths(row: Row | ScheduleRow) -> str:
    """What it is kept under where the lengths or the heads chose another."""
    lengths = f"batch {row.batch}, {row.seqlen_q} x {row.seqlen_k}"
    return f"{label(row)}, {lengths}, heads {row.heads}/{row.kv_heads}"


def kernel_of(row: Row | ScheduleRow, kernels: Kernels) -> Measured:
    """The kernel that a row was measured with.

    Raises: KeyError where it is not known.
    """
    of_lengths = kernels.get(label_of_lengths(row))
    return kernels[label(row)] if of_lengths is None else of_lengths


def todays_kernels(records: Iterable[Record]) -> dict[str, Measured]:
    """What the table and the ledger say today of the kernels of our rows, by label."""
    from cutedsl_fa3.schedules import default_schedule

    ours = {label_of_lengths(r): r for record in records for r in record.rows if _is_ours(r)}
    found: dict[str, Measured] = {}
    for name, row in ours.items():
        plan = _plan(row)
        usual = plan.schedule == default_schedule(plan.variant, plan.problem)
        name = label(row) if usual else name
        found[name] = found.get(name) or measured(plan)
    return found


def measured(plan: Plan) -> Measured:
    """What is kept of a plan whose kernel is measured today."""
    full, masked = (round(tile_cost(plan, kind).elements, 1) for kind in (False, True))
    return Measured(_fields(plan.schedule), (full, masked))


def _is_ours(row: Any) -> bool:
    return isinstance(row, Row) and row.provider == OURS


def _fields(schedule: Schedule) -> dict[str, Any]:
    return {each.name: getattr(schedule, each.name) for each in fields(schedule)}


def samples(record: Record, kernels: Kernels) -> list[Sample]:
    """Our rows of a record; of schedules beside each other, those that differ in overlap alone.

    Raises: KeyError for a row whose kernel is not known.
    """
    from cutedsl_fa3.pipelines import Schedule

    found = []
    for row in record.rows:
        known = label(row) in kernels or label_of_lengths(row) in kernels
        beside = isinstance(row, ScheduleRow) and known
        if not beside and not _is_ours(row):
            continue
        kernel = kernel_of(row, kernels)
        kept = Schedule(**kernel.schedule)
        its = _its_schedule(row) if beside else kept
        if replace(its, overlap=kept.overlap) == kept:
            found.append(Sample(row, its, kernel.elements, kernel.passes_over))
    return found


def _its_schedule(row: ScheduleRow) -> Schedule:
    """The schedule of a row that says it, field by field or as a whole."""
    from cutedsl_fa3.pipelines import Schedule

    said = getattr(row, "schedule", None) or vars(row)
    return Schedule(
        **{each.name: said[each.name] for each in fields(Schedule) if each.name in said}
    )


def plain(found: Iterable[Sample]) -> list[Sample]:
    """The samples that may be fitted."""
    return [sample for sample in found if sample.row.variant in PLAIN]


def fit(found: Iterable[Sample]) -> Parameters:
    """Least fourth powers of the errors of the logarithms of the times of plain attention.

    Every row is to be met: squares would leave one far off where many others share its parameter;
    from theirs it starts.

    Raises: ValueError for a sample of another variant, and for fewer samples than parameters.
    """
    found = list(found)
    if strange := {s.row.variant for s in found} - set(PLAIN):
        raise ValueError(f"variants {sorted(strange)}: only {' and '.join(PLAIN)} are fitted")
    names: list[tuple[str, ...]] = [("clock",), ("launch",)]
    names += [("work_tile", kind) for kind in sorted({cta_kind(s.schedule) for s in found})]
    names += [("exposed", kind) for kind in sorted({overlap_kind(s.schedule) for s in found})]
    if len(found) < len(names):
        raise ValueError(
            f"{len(found)} rows of {' and '.join(PLAIN)} attention for {len(names)} parameters: "
            "measure more lengths and head sizes, as bench does by default"
        )

    def errors(values: list[float]) -> torch.Tensor:
        parameters = _parameters(names, values)
        logs = [math.log(s.predicted(parameters) / s.row.ms) for s in found]
        return torch.tensor(logs, dtype=torch.float64)

    def squares(values: list[float]) -> torch.Tensor:
        of_row = errors(values)
        return of_row * of_row.abs() / TYPICAL

    unit, ends = ([of[name] for name, *_ in names] for of in (FIRST_GUESS, ENDS))
    values = _least_squares(errors, unit, unit, ends)
    if float(squares(values).abs().max()) > EXACT:
        values = _least_squares(squares, values, unit, ends)
    return _parameters(names, values)


def _parameters(names: list[tuple[str, ...]], values: list[float]) -> Parameters:
    made: dict[str, Any] = {"work_tile": {}, "exposed": {}}
    for (name, *kind), value in zip(names, values, strict=True):
        if kind:
            made[name][kind[0]] = value
        else:
            made[name] = value
    return Parameters(**made)


def _least_squares(
    errors: Callable[[list[float]], torch.Tensor],
    start: list[float],
    units: list[float],
    ends: list[Ends],
) -> list[float]:
    """Levenberg-Marquardt with differences, from a start; all between their `ends`."""
    here, damping = list(start), 1e-3
    at = errors(here)
    for _ in range(MOST_STEPS):
        columns = []
        for n, unit in enumerate(units):
            beside = [value + 1e-3 * unit * (m == n) for m, value in enumerate(here)]
            columns.append((errors(beside) - at) / 1e-3)
        slopes = torch.stack(columns, dim=1)
        at_ends = [(v <= low, v >= high) for v, (low, high) in zip(here, ends, strict=True)]
        move = _move(slopes, at, damping, at_ends)
        there = [v + m * unit for v, m, unit in zip(here, move, units, strict=True)]
        there = [min(max(low, v), high) for v, (low, high) in zip(there, ends, strict=True)]
        then = errors(there)
        better = float(at @ at - then @ then)
        here, at, damping = (there, then, damping / 3) if better > 0 else (here, at, damping * 4)
        if abs(better) < 1e-6 * float(at @ at):
            break
    return here


def _move(
    slopes: torch.Tensor, at: torch.Tensor, damping: float, at_ends: list[tuple[bool, bool]]
) -> list[float]:
    """The damped step; what is at its lower or upper end, and would go beyond, stays there."""
    free = list(range(len(at_ends)))
    while True:
        some = slopes[:, free]
        square = some.T @ some + damping * torch.eye(len(free), dtype=torch.float64)
        move = dict(zip(free, torch.linalg.solve(square, -some.T @ at).tolist(), strict=True))
        stay = {
            n for n, m in move.items() if (m < 0 and at_ends[n][0]) or (m > 0 and at_ends[n][1])
        }
        if not stay:
            return [move.get(n, 0.0) for n in range(len(at_ends))]
        free = [n for n in free if n not in stay]


@dataclass(frozen=True)
class Compared:
    """A row's time in units of plain causal at the same sizes, predicted and measured."""

    row: Row
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def compared(found: Iterable[Sample], parameters: Parameters) -> list[Compared]:
    """Each sample beside the plain causal one of its sizes, where that is among them.

    Schedules beside each other (`ScheduleRow`) are left out: these are of plain attention alone.
    """
    found = [s for s in found if isinstance(s.row, Row)]
    causal = {s.sizes: s for s in found if s.row.variant == "causal"}
    return [
        Compared(
            sample.row,
            sample.predicted(parameters) / beside.predicted(parameters),
            sample.row.ms / beside.row.ms,
        )
        for sample in found
        if (beside := causal.get(sample.sizes)) is not None and sample.row.variant != "causal"
    ]
