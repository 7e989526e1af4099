"""Every configuration that is supported, each as a plan: what `configs` prints and CI compiles.

Head sizes come from `problem.NATIVE`, schedules from `schedules.TABLE`; a variant of each kind
stands for all of its kind, because what a kernel holds in registers depends on the kind alone.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table

from . import masks, scores
from .named import laborious
from .plans import Plan
from .problem import DTYPES, LARGEST, NATIVE, STEP, Problem
from .schedules import SPECIAL, needs, serving_row
from .variant import Elementwise, OnlineSoftmax, Variant

# Of plans with several heads in a tile: sizes and heads in a tile, in bf16. With more than 8 the
# rows of a thread are of two heads.
PACKED = (((64, 64), 8), ((128, 128), 8), ((128, 128), 16), ((256, 256), 8))

HEADS = 8  # of the captured tensors here; a plan is for any number


@functools.cache
def kinds() -> dict[str, Variant]:
    """A variant of each kind, by name; the first ones are those of `schedules.NEEDS`."""
    slopes = torch.linspace(0.5, 0.1, HEADS)
    table = torch.zeros(HEADS, 2 * 64 + 1)
    documents = torch.arange(64) // 8

    def packed(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (k <= q)

    def gated(o: Any, lse: Any, b: Any, h: Any, q: Any) -> Any:
        return o * torch.sigmoid(slopes[h] + lse)

    return {
        "nothing": Variant(mask=masks.causal),
        "light": Variant(scores.alibi(slopes), masks.causal),
        "mask": Variant(mask=masks.window(100, 0)),
        "uniform": Variant(scores.softcap(30.0), masks.causal),
        "elements": Variant(scores.relative_bias(table), masks.causal),
        "much": Variant(laborious, masks.causal),
        "documents": Variant(mask=packed),
        "gated": Variant(mask=masks.causal, softmax=OnlineSoftmax(slopes), epilogue=gated),
        "elementwise": Variant(mask=masks.causal, softmax=Elementwise(torch.sigmoid)),
    }


@functools.cache
def configs() -> list[Plan]:
    """A plan for each native pair of head sizes, dtype and kind of variant."""
    return [
        Plan.default(variant, Problem(dtype, *native))
        for native in NATIVE
        for dtype in DTYPES
        for variant in kinds().values()
    ]


@functools.cache
def unmasked() -> dict[str, Variant]:
    """As `kinds`, of variants without a mask."""
    return {"full": Variant()}


@functools.cache
def special() -> list[Plan]:
    """Plans of `schedules.SPECIAL`, for each dtype and kind of variant that a row serves."""
    return [
        Plan(variant, problem, row.schedule(variant.mask is not None))
        for row in SPECIAL
        for dtype in DTYPES
        for variant in (*kinds().values(), *unmasked().values())
        for problem in (Problem(dtype, row.head_dim, row.head_dim_v),)
        if serving_row(variant, problem, row.keys and row.keys[1]) is row
    ]


@functools.cache
def packed() -> list[Plan]:
    """Plans of `PACKED`, for each kind of variant: several heads in a tile."""
    return [
        replace(plan, schedule=replace(plan.schedule, pack=pack))
        for native, pack in PACKED
        for plan in configs()
        if plan.problem == Problem("bf16", *native)
    ]


def every() -> list[Plan]:
    """All of these."""
    return [*configs(), *special(), *packed()]


def kind(plan: Plan) -> str:
    """The kind of variant that a plan of `configs` is for."""
    named = kinds() | unmasked()
    return next(name for name, variant in named.items() if variant is plan.variant)


def label(plan: Plan) -> str:
    """A short name for a plan of `configs`, as in d192x128-bf16-uniform."""
    d, dv = plan.problem.head_dim, plan.problem.head_dim_v
    pack = f"-pack{plan.schedule.pack}" if plan.schedule.pack > 1 else ""
    tile = f"-{plan.schedule.tile_m}x{plan.schedule.tile_n}" if plan in special() else ""
    sizes = d if d == dv else f"{d}x{dv}"
    return f"d{sizes}-{plan.problem.dtype}-{kind(plan)}{tile}{pack}"


@functools.cache
def served(native: tuple[int, int]) -> str:
    """The head sizes, of q and k and of v, whose tiles have this native size."""
    sizes = range(STEP, LARGEST + 1, STEP)
    found = [(d, dv) for d in sizes for dv in sizes if Problem("bf16", d, dv).tile_dims == native]
    if native[0] == native[1]:
        return _range([d for d, dv in found if d == dv])
    return f"{_range([d for d, _ in found])}, v {_range([dv for _, dv in found])}"


def _range(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low}-{high}" if low < high else f"{low}"


COLUMNS = (
    "head_dim",
    "serves",
    "dtype",
    "variant",
    "needs",
    "tiles",
    "softmax",
    "tile",
    "stages",
    "consumers",
    "overlap",
    "SMEM B",
    "registers a thread",
)
DTYPE = COLUMNS.index("dtype")


def cells(plan: Plan) -> tuple[str, ...]:
    """One row of the table, in the order of `COLUMNS`."""
    p, s, kernel = plan.problem, plan.schedule, plan.kernel
    native = (p.head_dim, p.head_dim_v)
    registers = ", ".join(f"{name} {role.registers}" for name, role in kernel.roles.items())
    return (
        f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"{p.head_dim}, v {p.head_dim_v}",
        served(native),
        p.dtype,
        kind(plan),
        needs(plan.variant),
        "one by one" if getattr(plan, "by_tile", False) else "by runs",
        _softmax(plan.variant),
        f"{s.tile_m} x {s.tile_n}" + (f" of {s.pack} heads" if s.pack > 1 else ""),
        f"{s.stages}",
        f"{s.consumers}",
        s.overlap,
        f"{kernel.smem.total}",
        registers,
    )


def _softmax(variant: Variant) -> str:
    """How a variant turns scores into weights, in a word."""
    parts = ["online" if getattr(variant, "weight", None) is None else "elementwise"]
    parts += ["sink"] if getattr(variant, "sink", None) is not None else []
    parts += ["epilogue"] if getattr(variant, "epilogue", None) is not None else []
    return ", ".join(parts)


def table() -> Table:
    """All configurations as a table, each checked by the rules of its plan.

    Types that differ in nothing else share a row.
    """
    made = Table(*COLUMNS, box=None, header_style="bold", pad_edge=False)
    for row, dtypes in _rows().items():
        made.add_row(*row[:DTYPE], ", ".join(dtypes), *row[DTYPE:])
    return made


def _rows() -> dict[tuple[str, ...], list[str]]:
    """The types of each row of the table, by its other cells."""
    found: dict[tuple[str, ...], list[str]] = {}
    for plan in every():
        plan.check()
        row = cells(plan)
        found.setdefault(row[:DTYPE] + row[DTYPE + 1 :], []).append(row[DTYPE])
    return found


NOTE = (
    f"Any other pair of multiples of {STEP} takes the smallest of these tiles that holds both. "
    "Lengths, batch, strides, heads and any integer number of query heads per key head are free; "
    "heads that share a key head may share tiles (`Schedule.pack`), as some examples here do."
)
