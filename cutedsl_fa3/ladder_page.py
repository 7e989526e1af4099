"""The ladder as text: its steps, what a record measured, and what the literature reports.

Everything is made of `ladder.py` and a record; without a record there is nothing measured to show.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .ladder import Rung, refusal
from .record import LadderRow, Record

MEASURE = "python -m cutedsl_fa3 ladder"
_NUMBER = re.compile(r"-|[\d.]+( x \d+)?(, too many)?")  # what stands to the right of its column


@dataclass(frozen=True)
class Reported:
    """What a paper reports of a kernel: `speed` as it is printed there."""

    kernel: str
    gpu: str
    speed: str
    where: str


_FA2 = "Dao 2023, arXiv 2307.08691"
_FA3 = "Shah et al. 2024, arXiv 2407.08608"
_SAME = "FP16 forward, head size 128"

LITERATURE = (
    Reported("FlashAttention", "A100", "25-40% of the peak", f"{_FA2}, abstract"),
    Reported("FlashAttention-2", "A100", "50-73% of the peak", f"{_FA2}, abstract"),
    Reported("FlashAttention-2", "H100", "up to 335 TFLOP/s", f"{_FA2}, section 4"),
    Reported("FlashAttention-2", "H100", "35% of the peak", f"{_FA3}, abstract"),
    Reported(
        "FlashAttention-3 before ping-pong; with it",
        "H100",
        "570; 620-640 TFLOP/s",
        f"{_FA3}, section 3.1: {_SAME}, S = 8192",
    ),
    Reported(
        "FlashAttention-3 without overlap in a warpgroup",
        "H100",
        "582 TFLOP/s",
        f"{_FA3}, table 2: {_SAME}, S = 8448, not causal",
    ),
    Reported(
        "FlashAttention-3 without warp specialisation",
        "H100",
        "570 TFLOP/s",
        f"{_FA3}, table 2: the same",
    ),
    Reported("FlashAttention-3", "H100", "661 TFLOP/s", f"{_FA3}, table 2: the same"),
    Reported("FlashAttention-3", "H100", "up to 740 TFLOP/s, 75%", f"{_FA3}, abstract: FP16"),
)


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Columns of text, numbers to the right."""
    rows = [tuple(head), *(tuple(map(str, line)) for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    right = [
        len(rows) > 1 and all(_NUMBER.fullmatch(row[i]) for row in rows[1:])
        for i in range(len(head))
    ]
    made = []
    for row in rows:
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        made.append("  ".join(cells).rstrip())
    return "\n".join(made)


def steps(rungs: Iterable[Rung]) -> str:
    """Each kernel with its tile, threads and shared memory, or why it cannot run."""
    lines = []
    for rung in rungs:
        kernel, s = rung.kernel, rung.plan.schedule
        bytes_ = f"{kernel.smem.total}" + (", too many" if refusal(rung) else "")
        tile = f"{s.tile_m} x {s.tile_n}"
        lines.append((rung.number, rung.name, tile, s.stages, kernel.threads, bytes_))
    return table(("", "step", "tile", "stages", "threads", "SMEM B"), lines)


def measured(record: Record | None, head_dim: int, variant: str) -> str:
    """Speeds of one problem, step by step; a line that says so where nothing was measured."""
    rows = of_problem(record, head_dim, variant)
    if record is None or not rows:
        return f"Nothing measured yet: there is no record. On an H100 or H200: {MEASURE}"
    lines, before = [], None
    for row in rows:
        gain = "-" if before is None or not row.number else f"{row.tflops / before:.2f}"
        lines.append(
            (
                row.number or "-",
                row.rung,
                "-" if row.tile_m is None else f"{row.tile_m} x {row.tile_n}",
                _known(row.stages),
                _known(row.registers),
                "-" if row.budgets is None else " / ".join(map(str, row.budgets)),
                _known(row.smem),
                f"{row.tflops:.0f}",
                gain,
            )
        )
        if is_step(row, rows):
            before = row.tflops
    head = ("", "step", "tile", "stages", "registers", "by role", "SMEM B", "TFLOP/s", "gain")
    first = rows[0]
    meta = record.meta
    title = (
        f"{variant}, {first.dtype}, head size {head_dim}, S = {first.seqlen}, batch {first.batch}, "
        f"{first.heads} heads; {meta['device']}, {meta['date'][:10]}, commit {meta['commit'][:7]}"
    )
    return f"{title}\n{table(head, lines)}"


def of_problem(record: Record | None, head_dim: int, variant: str) -> list[LadderRow]:
    """The rows of one problem: steps and depths in their order, then peers."""
    found = [
        row
        for row in (record.rows if record else ())
        if (row.head_dim, row.variant) == (head_dim, variant)
    ]
    return [row for row in found if row.number] + [row for row in found if not row.number]


def is_step(row: LadderRow, rows: Sequence[LadderRow]) -> bool:
    """Whether this is the row of a step, not of another depth or of a peer."""
    first = next((other for other in rows if other.number == row.number), None)
    return bool(row.number) and row is first


def _known(value: int | None) -> str:
    return "-" if value is None else str(value)


def literature() -> str:
    """What papers report, with where; other GPUs, types and lengths than here where they say so."""
    return table(
        ("kernel", "GPU", "reported", "source"),
        ((r.kernel, r.gpu, r.speed, r.where) for r in LITERATURE),
    )
