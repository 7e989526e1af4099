"""Schedules of one variant beside each other: to choose a row of the table, or to check one.

Each candidate differs from the default schedule in one field, and from the tables alone it is known
which of them fit; the rest is compiled, proved right on sampled rows, and timed in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace

from . import cache
from .bench import Timing, take_turns
from .cases import Case
from .checks import check, samples
from .interface import attention
from .named import named
from .pipelines import Schedule
from .plans import Plan
from .problem import Problem
from .record import ScheduleRow

OVERLAPS = ("none", "intra", "pingpong", "both")
TILE_NS = (48, 64, 80, 96, 112, 128, 144, 160, 176)
HEAD_GROUPS = (1, 2, 4, 8, 16)


def candidates(case: Case) -> list[Schedule]:
    """The default schedule, then every one that fits and differs from it in one field.

    The other number of consumer warpgroups, 2 or 3, counts as one field with its tile_m.
    """
    variant, problem = named(case.variant, case.lengths()).variant, Problem(*case.problem)
    base = Plan.default(variant, problem).schedule
    changes = [{"overlap": overlap} for overlap in OVERLAPS]
    changes += [{"tile_n": tile_n} for tile_n in TILE_NS]
    changes += [{"stages": stages} for stages in (1, 2, 3, 4)]
    changes += [{"head_group": group} for group in HEAD_GROUPS]
    changes += [{"consumers": n, "tile_m": 64 * n} for n in (2, 3)]
    found = [base]
    for change in changes:
        made = replace(base, **change)
        try:
            Plan(variant, problem, made).check()
        except ValueError:
            continue
        if made not in found:
            found.append(made)
    return found


def run(
    plans: Iterable[tuple[Case, list[Schedule]]],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
) -> Iterator[list[ScheduleRow]]:
    """The rows of each case and its schedules in turn.

    Raises: WrongResult.
    """
    for case, chosen in plans:
        report(f"{case}: {len(chosen)} schedules")
        yield measure(case, chosen, timing, report, seed)


def measure(
    case: Case,
    chosen: list[Schedule],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
    device: str = "cuda",
) -> list[ScheduleRow]:
    """Check, then time, each schedule; fastest first, with a line for each.

    Raises: WrongResult.
    """
    inputs = case.inputs(device, seed)
    variant, problem = inputs.named.variant, Problem(*case.problem)
    sampled, calls, spills = samples(inputs, seed), {}, {}
    for schedule in chosen:
        spills[schedule] = cache.get(Plan(variant, problem, schedule).kernel).resources.spills

        def call(schedule: Schedule = schedule):
            return attention(inputs.q, inputs.k, inputs.v, variant, schedule=schedule)

        check(inputs, call, sampled)
        calls[schedule] = call
    timed = take_turns(calls, timing, seed)
    rows = []
    for schedule, times in timed.items():
        ms = statistics.median(times)
        rows.append(
            ScheduleRow(
                variant=case.variant,
                dtype=case.dtype,
                head_dim=case.head_dim,
                head_dim_v=case.head_dim_v,
                seqlen_q=case.seqlen_q,
                seqlen_k=case.seqlen_k,
                batch=case.batch,
                heads=case.heads,
                kv_heads=case.kv_heads,
                **asdict(schedule),
                spills=spills[schedule],
                ms=round(ms, 6),
                tflops=round(case.flops / ms / 1e9, 2),
                samples=tuple(round(sample, 6) for sample in times),
            )
        )
    rows.sort(key=lambda row: row.ms)
    for row, schedule in ((row, next(s for s in chosen if row.follows(s))) for row in rows):
        spilling = f", spills {row.spills} B" if row.spills else ""
        report(f"{row.tflops:6.0f} TFLOP/s  {schedule}, head_group {row.head_group}{spilling}")
    return rows
