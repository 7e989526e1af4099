"""What records of measured schedules say of the rows of the schedule table.

A row of `schedules.TABLE` serves several kinds of variant, so it is measured in a case of each, and
an alternative counts where it was measured in all of them: its score is the geometric mean of its
speed over the chosen row's, both from the same turns. Rows of `schedules.SPECIAL` are left out, as
if they were not there. `alternatives` says what is measured; `judged` reads what a record has;
`why` is the reason that a row states.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .cases import Case, Grid, of_row, shown
from .named import Lengths, named
from .pipelines import Schedule
from .plans import Plan
from .problem import Problem
from .record import DATA, Record, ScheduleRow
from .schedules import HEAD_GROUP, TABLE, Row, serving_row
from .tuning import VALUES

# By need, the variants that a row which serves it is measured with.
VARIANTS = {
    "nothing": ("full", "causal"),
    "light": ("alibi",),
    "weights": ("sigmoid",),
    "mask": ("window:1024,0",),
    "uniform": ("softcap:30",),
    "tables": ("bias",),
    "elements": ("documents:1000",),
    "much": ("laborious",),
}
SEQLEN = 8192
NEAR = 2  # values of a field on each side of the chosen one
FEWER_KEYS = (0, 16, 48)  # a third warpgroup has fewer registers: it is tried with fewer keys too
ALONE = 128  # keys of a tile whose CTA has a multiprocessor for itself
HOLDS = 1.01  # a chosen row may be this much slower than the best alternative
WIDTH = 36  # characters of a reason, so that a row of the table is a line

_BY_ROW = {f.name for f in fields(Schedule)} - {"narrow"}  # which hangs on the mask too
CHOSEN = tuple(f.name for f in fields(Row) if f.name in _BY_ROW)


@dataclass(frozen=True)
class Alternative:
    """Another choice for a row: what is different, and its speed over the chosen one's."""

    change: str
    score: float


@dataclass(frozen=True)
class Judged:
    """A row and what a record has of it: TFLOP/s by variant, alternatives with the best first."""

    row: Row
    tflops: dict[str, float]
    others: tuple[Alternative, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing is faster by more than repeating the measurement changes."""
        return not self.others or self.others[0].score <= HOLDS


def cases(row: Row) -> list[Case]:
    """A case for each variant that a row serves, at its own head sizes."""
    names = tuple(name for group in VARIANTS.values() for name in group)
    grid = Grid(names, head_dims=((row.head_dim, row.head_dim_v),), seqlens=(SEQLEN,))
    return [case for case in grid.cases() if _row(case) == row]


def alternatives(row: Row, case: Case) -> list[Schedule]:
    """The row's schedule for a case, then the legal ones that are measured beside it.

    They differ in one field that rows choose; a third warpgroup may have fewer keys besides, and
    other numbers of warpgroups have a multiprocessor for themselves. Plain causal is also tried
    with other groups of heads.
    """
    variant, problem = _variant(case), Problem(*case.problem)
    base = row.schedule(masked=variant.mask is not None)
    wanted = []
    for field in (name for name in CHOSEN if name in VALUES and name != "consumers"):
        wanted += [{field: value} for value in _near(VALUES[field], getattr(base, field))]
    for consumers in {2, 3} - {base.consumers}:
        wide = {"consumers": consumers, "tile_m": 64 * consumers, "residents": 1}
        widest = base.tile_n if base.residents == 1 else ALONE
        wanted += [wide | {"tile_n": widest - fewer} for fewer in FEWER_KEYS]
    if case.variant == "causal":
        wanted += [{"head_group": value} for value in _near(VALUES["head_group"], HEAD_GROUP, 1)]
    found = [base]
    for change in wanted:
        try:
            schedule = replace(base, **change)
            Plan(variant, problem, schedule).check()
        except ValueError:
            continue
        if schedule not in found:
            found.append(schedule)
    return found


def plans(
    rows: Iterable[Row] = TABLE, variants: Sequence[str] = ()
) -> list[tuple[Case, list[Schedule]]]:
    """What is to be measured of these rows, with all variants or some.

    Raises: ValueError for variants that no row is measured with.
    """
    known = [name for group in VARIANTS.values() for name in group]
    if unknown := [name for name in variants if name not in known]:
        raise ValueError(f"variant {', '.join(unknown)}: rows are measured with {', '.join(known)}")
    wanted = variants or known
    return [
        (case, alternatives(row, case))
        for row in rows
        for case in cases(row)
        if case.variant in wanted
    ]


def compiled_ahead(
    wanted: Sequence[tuple[Case, list[Schedule]]], workers: int, report: Callable[[str], None]
) -> list[tuple[Case, list[Schedule]]]:
    """The same without what spills, every kernel in the cache on disk: compiled side by side.

    A chosen schedule stays, whatever it spills.
    """
    flat = [(case, schedule) for case, chosen in wanted for schedule in chosen]
    report(f"{len(flat)} kernels, those that are not on disk compiled by {workers} processes")
    spills = dict(zip(flat, side_by_side(_spills, flat, workers), strict=True))
    kept = []
    for case, chosen in wanted:
        good = [each for each in chosen if each == chosen[0] or not spills[case, each]]
        kept.append((case, good))
    return kept


def side_by_side(function: Callable[[Any], Any], items: Sequence, workers: int) -> list:
    """The results for all items, in their order, of processes of their own.

    `function` is one of a module, and takes and returns what can be pickled.
    """
    at_once = max(1, min(4, len(items) // workers))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, items, chunksize=at_once))


def _spills(one: tuple[Case, Schedule]) -> int:
    """What a kernel spills, in bytes a thread."""
    from . import cache

    case, schedule = one
    # By the lengths: the layout of captured tensors decides by which loads they are read.
    variant = named(case.variant, case.lengths()).variant
    plan = Plan(variant, Problem(*case.problem), schedule)
    return cache.get(plan.kernel).resources.spills


def judged(row: Row, record: Record) -> Judged | None:
    """What a record has of a row; None where not one of its cases was measured."""
    speeds: list[dict[tuple, float]] = []
    tflops: dict[str, float] = {}
    for case, measured in _by_case(record).items():
        if _row(case) != row or (case.head_dim, case.head_dim_v) != (row.head_dim, row.head_dim_v):
            continue
        base = row.schedule(masked=_variant(case).mask is not None)
        by_choice = {
            _choice(_whole(one)): one.tflops
            for one in measured
            if one.follows(replace(base, **{name: _whole(one)[name] for name in CHOSEN}))
        }
        if (chosen := by_choice.get(_choice(asdict(base)))) is not None:
            speeds.append({key: value / chosen for key, value in by_choice.items()})
            tflops[case.variant] = chosen
    if not speeds:
        return None
    base = row.schedule(masked=False)
    others = [
        Alternative(
            _changed(base, key), math.prod(each[key] for each in speeds) ** (1 / len(speeds))
        )
        for key in speeds[0]
        if key != _choice(asdict(base)) and all(key in each for each in speeds)
    ]
    return Judged(row, tflops, tuple(sorted(others, key=lambda other: -other.score)))


def why(found: Judged) -> str:
    """The reason that a row states: its TFLOP/s by variant, the speed of the best others over it.

    As many of them as fit into a line of the table, at least one.
    """
    text = " ".join(f"{value:.0f}" for value in found.tflops.values())
    for number, other in enumerate(found.others):
        more = f"{',' if number else ';'} {other.change} {other.score:.2f}"
        if number and len(text + more) > WIDTH:
            break
        text += more
    return text


def head_groups(record: Record) -> dict[int, float]:
    """By group of heads the speed over that of `HEAD_GROUP`, where a masked case has both."""
    speeds: dict[int, list[float]] = {}
    for case, measured in _by_case(record).items():
        if _variant(case).mask is None:
            continue
        base = _row(case).schedule(masked=True)
        for one in measured:
            group = _whole(one)["head_group"]
            if one.follows(replace(base, head_group=group)):
                chosen = next((o.tflops for o in measured if o.follows(base)), None)
                if chosen is not None:
                    speeds.setdefault(group, []).append(one.tflops / chosen)
    return {group: math.prod(each) ** (1 / len(each)) for group, each in sorted(speeds.items())}


def summary(record: Record) -> str:
    """What a record says of every row, as the row would state it, and what is faster than it."""
    lines = []
    for row in TABLE:
        name = f"{shown((row.head_dim, row.head_dim_v))} {row.needs}"
        found = judged(row, record)
        if found is None:
            lines.append(f"{name:16} not measured")
            continue
        verdict = "holds " if found.holds else "SLOWER"
        lines.append(f'{name:16} {verdict} "{why(found)}"  ({", ".join(found.tflops)})')
        better = [other for other in found.others if other.score > HOLDS]
        lines += [f"{'':24}{other.change}: {other.score:.3f}" for other in better]
    groups = ", ".join(f"{group}: {speed:.3f}" for group, speed in head_groups(record).items())
    return "\n".join([*lines, f"heads side by side, speed over that of {HEAD_GROUP}: {groups}"])


def recorded(row: Row) -> Record | None:
    """The record that a row names, if it names one."""
    return Record.read(DATA / row.record) if row.record else None


def _by_case(record: Record) -> dict[Case, list[ScheduleRow]]:
    found: dict[Case, list[ScheduleRow]] = {}
    for row in record.rows:
        found.setdefault(of_row(row), []).append(row)
    return found


def _variant(case: Case):
    """The case's variant; its lengths are those of captured tensors, which choose no schedule."""
    return named(case.variant, Lengths(heads=1, seqlen_q=2, seqlen_k=2)).variant


def _row(case: Case) -> Row:
    return serving_row(_variant(case), Problem(*case.problem), special=())


def _near(values: Sequence, chosen: object, near: int = NEAR) -> list:
    """The values on both sides of the chosen one; all others of a field that has no order."""
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        below = [value for value in values if value < chosen][-near:]
        return below + [value for value in values if value > chosen][:near]
    return [value for value in values if value != chosen]


def _whole(row: ScheduleRow) -> dict:
    """A row's schedule; a field that there was not yet had the value that is its default."""
    return {field.name: field.default for field in fields(Schedule)} | row.schedule


def _choice(schedule: dict) -> tuple:
    return tuple(schedule[name] for name in CHOSEN)


def _changed(base: Schedule, choice: tuple) -> str:
    values = dict(zip(CHOSEN, choice, strict=True))
    changed = [name for name in CHOSEN if getattr(base, name) != values[name]]
    if "consumers" in changed and values["residents"] == 1 and "residents" in changed:
        changed.remove("residents")
    if "consumers" in changed and values["tile_m"] == 64 * values["consumers"]:
        changed.remove("tile_m")
    return " ".join(f"{name} {values[name]}" for name in changed)
