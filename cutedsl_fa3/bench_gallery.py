"""Every example of the gallery: what the ledger predicts it to cost, and, on a GPU, what it costs.

    predicted   the plan at the sizes below: its visits, a key tile by pipe, the time of a call
    measure     all examples taking turns in one process, each held against fp64 before

An example's captured tensors serve one batch entry and a few heads; they are repeated for the
others. `python -m cutedsl_fa3 bench-gallery` writes the record; notebooks/08_variants.ipynb shows
both.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from . import cache, gallery_page, inputs
from .bench import Timing, take_turns
from .checks import Sample, check, sampled_rows, tolerance
from .evidence import side_by_side
from .gallery_page import EXAMPLES, Example, Visits
from .interface import attention, plan
from .ladder_page import table
from .ledger.page import COLUMNS, Ledger
from .named import Named
from .peers import OURS, Call, Inputs
from .plans import Plan
from .record import Row
from .reference import rounded_rows_of_head, rows_of_head
from .variant import Variant
from .variant.describe import describe
from .variant.evaluate import evaluate

SEQLEN, HEADS, HEAD_DIM = 4096, 32, 128  # of one batch entry
CAUSAL, FULL = "causal", "full"  # what masks and scores are compared with
SAMPLED = 3  # heads in which an output is checked


def variant_of(example: Example, seqlen: int, heads: int, device: str = "cpu") -> Variant:
    """An example's variant for as many heads, its captured tensors on `device`."""
    made = example.variant(seqlen)
    captures = list(made.captures)
    for number, _, _, by in inputs.reads(made):
        for dim, name in by:
            t, many = captures[number], heads if name == "h" else 1
            if t.shape[dim] < many:
                captures[number] = t.index_select(dim, torch.arange(many) % t.shape[dim])
    return made.bound_to([t.to(device) for t in captures])


@dataclass(frozen=True)
class Predicted:
    """What a plan says of an example before anything is compiled.

    Units: `tile_clocks` and `by_pipe` are clocks of an SM for a key tile without the element mask,
    `ms` of a call.
    """

    example: Example
    plan: Plan

    @property
    def name(self) -> str:
        return self.example.name

    @property
    def visits(self) -> str:
        """Which keys a tile of queries visits, in words."""
        return describe(self.plan.variant.mask)

    @property
    def tile(self) -> str:
        return f"{self.plan.schedule.tile_m} x {self.plan.schedule.tile_n}"

    @cached_property
    def ledger(self) -> Ledger:
        return self.plan.ledger

    @property
    def by_pipe(self) -> dict[str, float]:
        return self.ledger.full.by_pipe

    @property
    def ms(self) -> float:
        return self.ledger.ms or 0.0

    @cached_property
    def tiles(self) -> Visits:
        """The tiles of this call: all, visited, and by brute force needed."""
        s, sizes = self.plan.schedule, self.plan.sizes
        assert sizes is not None
        return gallery_page.counted(self.example, sizes.seqlen_q, (s.tile_m, s.tile_n))


def predicted(
    example: Example, seqlen: int = SEQLEN, heads: int = HEADS, head_dim: int = HEAD_DIM
) -> Predicted:
    """The plan of an example, for these sizes and a batch of one."""
    shape = (1, seqlen, heads, head_dim)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(3))
    return Predicted(example, plan(q, k, v, variant_of(example, seqlen, heads)))


# As text


def tiles_table(rows: Sequence[Predicted]) -> str:
    """Tiles of each mask: all, needed, visited, and of these without computing the mask."""
    head = ("mask", "tile", "all", "needed", "visited", "visited / needed", "without mask")
    lines = []
    for row in rows:
        t = row.tiles
        ratio = f"{t.ratio:.2f}" if t.needed else "-"
        without = f"{t.full} of {t.needed_full}"
        lines.append((row.name, row.tile, t.all, t.needed, t.visited, ratio, without))
    return table(head, lines)


def clocks_table(rows: Sequence[Predicted]) -> str:
    """A key tile of each by pipe, what score and mask add, its copies, the time of a call.

    Ratios are as in `beside_table`, among these rows.
    """
    head = ("", "tile", *COLUMNS, "all", "+score", "+mask", "TMA B/clock", "ms", "ratio")
    times = {row.name: row.ms for row in rows}
    lines = []
    for row in rows:
        ledger, variant = row.ledger, row.plan.variant
        changed = variant.score is not None or variant.weight is not None
        cells = [f"{row.by_pipe.get(pipe, 0.0):.0f}" for pipe in COLUMNS]
        cells += [f"{ledger.clocks:.0f}", f"{ledger.for_score:.0f}" if changed else "-"]
        cells += ["-" if variant.mask is None else f"{ledger.for_mask:.0f}"]
        cells += [f"{ledger.full.tma_bytes / ledger.clocks:.0f}"]
        cells += [f"{row.ms:.3f}", _ratio(times, row.example)]
        lines.append((row.name, row.tile, *cells))
    return table(head, lines)


def beside_table(rows: Sequence[Predicted], measured: Sequence[Row]) -> str:
    """Predicted beside measured times, and how far the predicted ratio is off.

    Ratios are to causal for masks, and to full attention for scores and weights.
    """
    times, found = ({row.name: row.ms for row in rows}, {row.variant: row.ms for row in measured})
    lines = []
    for row in rows:
        cells = []
        for each in (times, found):
            cells += [f"{each[row.name]:.3f}" if row.name in each else "-"]
            cells += [_ratio(each, row.example)]
        known = "-" not in (cells[1], cells[3])
        off = ratio_of(times, row.example) / ratio_of(found, row.example) - 1 if known else 0.0
        lines.append((row.name, *cells, f"{off:+.0%}" if known else "-"))
    head = ("", "predicted ms", "ratio", "measured ms", "ratio", "off")
    return table(head, lines)


def unit_of(example: Example) -> str:
    """What an example is compared with."""
    return CAUSAL if example.kind == "mask" else FULL


def ratio_of(ms: Mapping[str, float], example: Example) -> float:
    """A time by name over that of what the example is compared with."""
    return ms[example.name] / ms[unit_of(example)]


def _ratio(ms: Mapping[str, float], example: Example) -> str:
    known = example.name in ms and ms.get(unit_of(example))
    return f"{ratio_of(ms, example):.2f}" if known else "-"


# Measured


def measure(
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
    examples: Sequence[Example] = EXAMPLES,
    sizes: tuple[int, int, int] = (SEQLEN, HEADS, HEAD_DIM),
    device: str = "cuda",
) -> list[Row]:
    """Check, then time, every example; `report` hears of each.

    Kernels for a GPU are compiled first, side by side by a process for each processor.

    Raises: WrongResult.
    """
    seqlen, heads, head_dim = sizes
    if torch.device(device).type == "cuda":
        wanted = [(example.name, *sizes) for example in examples]
        side_by_side(compiled, wanted, min(os.cpu_count() or 1, len(wanted)))
    random_numbers = torch.Generator(device).manual_seed(seed)
    shape = (1, seqlen, heads, head_dim)
    q, k, v = (
        torch.randn(shape, generator=random_numbers, device=device).bfloat16() for _ in range(3)
    )
    calls: dict[Example, Call] = {}
    errors, variants = {}, {}
    for example in examples:
        variants[example] = made = variant_of(example, seqlen, heads, device)
        given = Inputs(q, k, v, Named(example.name, made))
        calls[example] = _call(q, k, v, made)
        errors[example] = check(given, calls[example], _samples(given, made, seed))
    rows = []
    for example, times in take_turns(calls, timing, seed).items():
        ms = statistics.median(times)
        flops = 4.0 * heads * head_dim * visible_pairs(variants[example], seqlen)
        row = Row(
            provider=OURS,
            direction="forward",
            variant=example.name,
            dtype="bf16",
            head_dim=head_dim,
            head_dim_v=head_dim,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            batch=1,
            heads=heads,
            kv_heads=heads,
            ms=round(ms, 6),
            tflops=round(flops / ms / 1e9, 2),
            max_error=float(f"{errors[example]:.4g}"),
            samples=tuple(round(sample, 6) for sample in times),
        )
        report(f"{example.kind} {example.name}: {row.ms:.3f} ms")
        rows.append(row)
    return rows


def compiled(example: tuple[str, int, int, int]) -> str:
    """The name of an example's kernel, which is in the cache on disk from then on.

    `example`: its name, seqlen, heads, head_dim.
    """
    name, *sizes = example
    found = next(one for one in EXAMPLES if one.name == name)
    return cache.get(predicted(found, *sizes).plan.kernel).name


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> Call:
    return lambda: attention(q, k, v, variant)


def _samples(given: Inputs, variant: Variant, seed: int) -> list[Sample]:
    """Rows of some heads in fp64; the first is one that a repeated captured tensor serves."""
    picker, found = random.Random(seed), []
    heads = given.q.shape[2]
    for head in (heads - 1, *(picker.randrange(heads) for _ in range(SAMPLED - 1))):
        rows = sampled_rows(given.q.shape[1], picker)
        place = (0, head, torch.tensor(rows, device=given.q.device))
        scale = given.q.shape[3] ** -0.5
        exact = rows_of_head(given.q, given.k, given.v, variant, place, scale=scale)[0]
        rounded = rounded_rows_of_head(given.q, given.k, given.v, variant, place, scale=scale)
        found.append(Sample(0, head, rows, exact, tolerance(exact, rounded)))
    return found


def visible_pairs(variant: Variant, seqlen: int, at_once: int = 512) -> int:
    """The pairs that a mask shows in the first head, looked at some rows at a time."""
    if variant.mask is None:
        return seqlen * seqlen
    device = variant.captures[0].device if variant.captures else "cpu"
    keys = torch.arange(seqlen, dtype=torch.int32, device=device)
    total = 0
    for queries in keys[:, None].split(at_once):
        given = {"b": 0, "h": 0, "q": queries, "k": keys, "seqlen_q": seqlen, "seqlen_k": seqlen}
        seen = evaluate(variant.mask, given, variant.captures)
        total += int(seen.expand(len(queries), seqlen).sum())
    return total
