"""What was tried to make the forward faster: each lead as schedules beside the table's, in turns.

A lead is a change of schedule fields and the problems on which it is tried. All of a problem's
schedules take turns in one record; `page` shows, lead by lead, the speed of each over that of the
table's. So what does not pay stays known, and a row of the table can be asked why it is as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .cases import Case, of_row, shown
from .named import named
from .pipelines import Schedule
from .plans import Plan
from .problem import Problem
from .record import ROOT, Record, ScheduleRow
from .schedules import schedule_for

Change = Mapping[str, Any]
PAGE = ROOT / "notebooks" / "leads.md"

VARIANTS = ("alibi", "softcap:30", "bias", "sigmoid", "window:1024,0", "documents:1000")


@dataclass(frozen=True)
class Lead:
    """A question, the changes that answer it and the problems on which they are tried."""

    question: str
    changes: tuple[Change, ...]
    cases: tuple[Case, ...]


def _square(variant: str, dim: int, seqlen: int, heads: int | None = None) -> Case:
    heads = heads or 2048 // dim
    return Case(variant, "bf16", dim, dim, seqlen, seqlen, 16384 // seqlen, heads, heads)


PLAIN = tuple(
    _square(name, dim, seqlen)
    for dim in (64, 128)
    for name, seqlen in (("full", 8192), ("causal", 1024), ("causal", 8192))
)
FULL = tuple(_square("full", dim, seqlen) for dim in (64, 128, 256) for seqlen in (1024, 8192))
CAUSAL = tuple(case for case in PLAIN if case.variant == "causal")
OTHERS = tuple(_square(name, dim, 8192, 16) for dim in (64, 128) for name in VARIANTS)
LONG = tuple(case for case in PLAIN if case.seqlen_q > 1024)
AT_128 = tuple(case for case in OTHERS if case.head_dim == 128)
AT_64 = tuple(case for case in (*PLAIN, *OTHERS) if case.head_dim == 64)
FEW_QUERIES = tuple(
    Case("causal", "bf16", 128, 128, seqlen_q, 8192, 8, heads, kv_heads)
    for heads, kv_heads in ((32, 8), (16, 1))
    for seqlen_q in (1, 16, 64, 256)
)


def _values(field: str, *values: Any) -> tuple[Change, ...]:
    return tuple({field: value} for value in values)


def _at_a_time(residents: int, tile_m: int, tile_n: int, consumers: int, overlap: str) -> Change:
    return {
        "residents": residents, "tile_m": tile_m, "tile_n": tile_n, "consumers": consumers,
        "overlap": overlap, "early": 0,
    }  # fmt: skip


LEADS = (
    Lead(
        "The next product under the softmax, or warpgroups in turns?",
        _values("overlap", "none", "pingpong", "intra", "both"),
        (*PLAIN, *AT_128),
    ),
    Lead("A CTA for each tile of queries?", _values("persistent", False), PLAIN),
    Lead("Heads side by side, for L2?", _values("head_group", 1, 16), CAUSAL),
    Lead("The output from registers?", _values("store", "tma", "direct"), PLAIN),
    Lead(
        "Exponentials held before the wait, in eighths?",
        _values("early", 0, 2, 4),
        (*PLAIN, *AT_128),
    ),
    Lead("Rescaling only where the maximum has grown?", _values("lazy", False, True), PLAIN),
    Lead("Deeper rings?", _values("stages", 1, 3), PLAIN[:3]),
    Lead("Fewer or more keys a tile?", _values("tile_n", 96, 176), LONG),
    Lead(
        "Several CTAs of a multiprocessor at a time?",
        (
            _at_a_time(4, 64, 64, 1, "none"),
            _at_a_time(3, 64, 64, 1, "intra"),
            _at_a_time(2, 128, 64, 2, "pingpong"),
            _at_a_time(1, 128, 128, 2, "intra"),
            _at_a_time(1, 192, 128, 3, "both"),
        ),
        AT_64,
    ),
    Lead(
        "K and V for a cluster of two CTAs at a time?",
        ({"cluster": (2, 1)}, {"cluster": (2, 1), "persistent": False}),
        FULL,
    ),
    Lead(
        "P from shared memory?",
        ({"p_from": "shared", "tile_n": 128}, {"p_from": "shared", "tile_n": 160}),
        (*LONG, *(case for case in AT_128 if case.variant in ("sigmoid", "softcap:30"))),
    ),
    Lead("Query heads of one key head in one tile?", _values("pack", 1, 2, 4, 8, 16), FEW_QUERIES),
)


def chosen(case: Case) -> Schedule:
    """The table's schedule for a problem."""
    variant = named(case.variant, case.lengths()).variant
    return schedule_for(variant, Problem(*case.problem), case.extents)


def chosen_then(case: Case, rows: Iterable[ScheduleRow]) -> Schedule | None:
    """What the table chose when these were measured: of which most of them are changes.

    Of several of which as many are, the one that is most like today's choice.
    """
    measured, today = [Schedule(**row.schedule) for row in rows], chosen(case)
    asked = [lead for lead in LEADS if case in lead.cases]

    def unlike(one: Schedule) -> int:
        return sum(getattr(one, f.name) != getattr(today, f.name) for f in fields(one))

    def changes(one: Schedule) -> int:
        return sum(made in measured for lead in asked for _, made in tried(lead, case, one))

    return min(measured, key=lambda one: (-changes(one), unlike(one)), default=None)


def tried(
    lead: Lead, case: Case, base: Schedule | None = None
) -> Iterator[tuple[Change, Schedule]]:
    """The lead's changes of a schedule, or the chosen one, that a plan of this problem takes."""
    base = base or chosen(case)
    group = case.heads // case.kv_heads
    for change in lead.changes:
        if group % change.get("pack", 1):
            continue
        try:
            schedule = replace(base, **change)
            variant = named(case.variant, case.lengths()).variant
            Plan(variant, Problem(*case.problem), schedule).check()
        except ValueError:
            continue
        yield change, schedule


def plans(leads: tuple[Lead, ...] = LEADS) -> list[tuple[Case, list[Schedule]]]:
    """What is to be measured: each problem once, the chosen schedule first."""
    found: dict[Case, list[Schedule]] = {}
    for lead in leads:
        for case in lead.cases:
            schedules = found.setdefault(case, [chosen(case)])
            schedules += [each for _, each in tried(lead, case) if each not in schedules]
    return list(found.items())


def page(record: Record) -> str:
    """The leads as Markdown: a table for each, a line for each problem, speed over the chosen."""
    meta = record.meta
    parts = [
        "# What was tried\n\n"
        "Speed over that of the schedule that the table chose then, of the same turns: above 1 is "
        "faster. Problems of S tokens have 16,384 in all; TFLOP/s are the chosen schedule's. "
        f"{meta['device']}, driver {meta['driver']}, {meta['date'][:10]}, commit "
        f"{meta['commit'][:7]}; every sample is in `notebooks/data`. "
        "Written by `python -m cutedsl_fa3 leads`."
    ]
    rows: dict[Case, list[ScheduleRow]] = {}
    for row in record.rows:
        rows.setdefault(of_row(row), []).append(row)
    for lead in LEADS:
        names = [_named(change) for change in lead.changes]
        lines = [" | ".join(("problem", "chosen", *names)), " | ".join(["---"] * (len(names) + 2))]
        for case in lead.cases:
            then = chosen_then(case, rows.get(case, ()))
            base = None if then is None else _of(then, rows[case])
            if base is None:
                continue
            speeds = dict.fromkeys(names, "")
            for change, schedule in tried(lead, case, then):
                row = _of(schedule, rows[case])
                if row is not None:
                    speeds[_named(change)] = f"{base.ms / row.ms:.3f}"
            lines.append(" | ".join((_said(case), f"{base.tflops:.0f}", *speeds.values())))
        body = "\n".join(f"| {line} |" for line in lines)
        parts.append(f"## {lead.question}\n\n{body}")
    return "\n\n".join(parts) + "\n"


def _of(schedule: Schedule, rows: Iterable[ScheduleRow]) -> ScheduleRow | None:
    """The row of a schedule."""
    return next((row for row in rows if row.follows(schedule)), None)


def _named(change: Change) -> str:
    if "residents" not in change:
        return ", ".join(f"{field} {value}" for field, value in change.items())
    return f"{change['residents']} of {change['tile_m']} x {change['tile_n']}, {change['overlap']}"


def _said(case: Case) -> str:
    dims = shown((case.head_dim, case.head_dim_v))
    if case.seqlen_q == case.seqlen_k:
        return f"{case.variant} d{dims} S={case.seqlen_q}"
    return f"{case.heads}/{case.kv_heads} heads d{dims} Sq={case.seqlen_q}"
