"""The schedule of a backward when none is given: a table, each row with the reason that chose it.

Rows are tried from the top; the first whose head sizes, needs and order of sums match is taken.
Needs are those of the forward's table (`schedules.needs`): what a variant's functions hold in
registers besides the accumulators. A mask whose queries are spans for each key takes two registers
of bits and counts for nothing. Gradients of captured tensors count as "much".

What is fixed by arithmetic, for two consumer warpgroups of 240 registers a thread. Accumulators of
a thread take, in registers: dK and dV, 64 keys each: (d + dv) / 2, halved where two warpgroups
share keys; S and dP of 64 queries: 64, or 32 shared; dQ: d / 4 of 64 queries by columns, d / 2 of
128 by rows. Addresses, rows' numbers and functions take the rest.

    d, dv       keys  sharing  dK + dV  S + dP  dQ    SMEM KB of K, V; Q, dO a slot; P, dS; sums
    64, 64      128   no       64       128     32    32; 32; 32; 32     tile_m 128
    96, 96      128   no       96       64      24    48; 24; 16; 24
    128, 128    128   no       128      64      32    64; 32; 16; 32
    192, 128    128   no       160      64      48    does not fit: 240 with nothing besides
    192, 128    64    two      80       32      48    40; 40; 16; 48
    192, 192    64    two      96       32      48    48; 48; 16; 48
    256, 256    64    two      128      32      64    64; 64; 16; 64: sums fit beside one slot only
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .kernels.sm90.backward.schedule import BackwardSchedule
from .pipelines import ScheduleError
from .problem import Problem
from .schedules import NEEDS, needs
from .variant import Variant
from .variant.derive import number, of_element
from .variant.spans import exchanged, in_spans


@dataclass(frozen=True)
class Row:
    """A schedule for tiles of these head sizes, for variants that need no more than `needs`.

    `deterministic` rows are for sums of dQ in a fixed order, which the warp that adds keeps.
    """

    head_dim: int
    head_dim_v: int
    needs: str
    deterministic: bool
    schedule: BackwardSchedule
    why: str


_WIDE = BackwardSchedule(tile_m=128, spread=True)
_PLAIN = BackwardSchedule(early=4)
_SHARED = BackwardSchedule(tile_n=64, sharing=2)
_TIGHT = replace(_SHARED, stages=1, places=1)


def _in_turn(s: BackwardSchedule) -> BackwardSchedule:
    """For sums in a fixed order: fewer tiles of a head at once, since they wait for each other."""
    return replace(s, head_group=16)


# Head sizes, needs, deterministic; schedule; why: speed over this row's on an H200, or what does
# not fit. A row has the most queries and keys with which the compiler spills nothing, in bf16 and
# fp16; notebooks/tried.md has what else was tried.
TABLE = (
    Row(64, 64, "light", False, _WIDE, "dQ direct 0.92, 0.93"),
    Row(64, 64, "elements", False, _PLAIN, "softcap: 128 queries spill 4 B"),
    Row(64, 64, "much", False, _SHARED, "fewer registers for scores"),
    Row(64, 64, "light", True, _in_turn(_WIDE), "256 queries do not fit"),
    Row(64, 64, "elements", True, _in_turn(_PLAIN), "128 queries: fewer registers"),
    Row(64, 64, "much", True, _in_turn(_SHARED), "fewer registers for scores"),
    Row(96, 96, "elements", False, _PLAIN, "128 queries: 224 registers of sums"),
    Row(96, 96, "much", False, _SHARED, "fewer registers for scores"),
    Row(96, 96, "light", True, _in_turn(_PLAIN), "128 queries: 224 registers of sums"),
    Row(96, 96, "much", True, _in_turn(_SHARED), "fewer registers for scores"),
    Row(128, 128, "weights", False, _PLAIN, "128 queries: 256 registers of sums"),
    Row(128, 128, "uniform", False, BackwardSchedule(spread=True), "else softcap spills 8 B"),
    Row(128, 128, "tables", False, _PLAIN, "128 queries: 256 registers of sums"),
    Row(128, 128, "much", False, _SHARED, "documents: 128 keys spill 20 B"),
    Row(128, 128, "light", True, _in_turn(_PLAIN), "128 queries: 256 registers of sums"),
    Row(128, 128, "much", True, _in_turn(_SHARED), "fewer registers for scores"),
    Row(192, 128, "much", False, _SHARED, "128 keys spill 256 B"),
    Row(192, 128, "much", True, _in_turn(_SHARED), "128 keys spill 256 B"),
    Row(192, 192, "much", False, _SHARED, "128 keys: 256 registers of sums"),
    Row(192, 192, "much", True, _in_turn(_SHARED), "128 keys: 256 registers of sums"),
    Row(256, 256, "much", False, replace(_SHARED, add="direct"), "tma: one slot of queries only"),
    Row(256, 256, "much", True, _in_turn(_TIGHT), "two slots: 224 KB + 64; two places spill"),
)


def tile_dims(problem: Problem) -> tuple[int, int]:
    """The smallest (head_dim, head_dim_v) of the table that holds those of a problem.

    Raises: ScheduleError where none does.
    """
    needed = (problem.head_dim, problem.head_dim_v)
    pairs = dict.fromkeys((row.head_dim, row.head_dim_v) for row in TABLE)
    holding = [pair for pair in pairs if all(n <= d for n, d in zip(needed, pair, strict=True))]
    if not holding:
        largest = max(pairs)
        raise ScheduleError(
            f"head_dim, head_dim_v = {needed[0]}, {needed[1]}: the backward has tiles of head "
            f"sizes up to {largest[0]} and {largest[1]}"
        )
    return min(holding, key=sum)


def serving_row(
    variant: Variant,
    problem: Problem,
    deterministic: bool = False,
    wanted: tuple[int, ...] = (),
) -> Row:
    """The first row of the table that serves this variant and problem.

    Raises: ScheduleError where there is none.
    """
    dims = tile_dims(problem)
    held = needs(variant, with_mask=not in_spans(exchanged(variant.mask)))
    level = NEEDS.index("much" if wanted else held)
    return next(
        row
        for row in TABLE
        if (row.head_dim, row.head_dim_v) == dims
        and row.deterministic == deterministic
        and level <= NEEDS.index(row.needs)
    )


def default_schedule(
    variant: Variant,
    problem: Problem,
    deterministic: bool = False,
    wanted: tuple[int, ...] = (),
) -> BackwardSchedule:
    """The schedule of this problem.

    Where the derivative is a function to be computed and warpgroups have their keys alone, dQ goes
    directly: that spares the registers of its way through shared memory, without which these
    kernels spill. A fixed order needs that way.

    Raises: ScheduleError where there is none.
    """
    schedule = serving_row(variant, problem, deterministic, wanted).schedule
    if deterministic or schedule.sharing > 1 or not has_slope(variant):
        return schedule
    return replace(schedule, add="direct")


def has_slope(variant: Variant) -> bool:
    """Whether the derivative by the score is more than a number."""
    derived = of_element(variant)
    slope = None if derived is None else derived.inputs.get("score")
    return slope is not None and number(slope) is None
