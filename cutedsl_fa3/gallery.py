"""Pictures of variants: the pairs that a mask shows, the tiles visited for them, what a score does.

    fa3.gallery.draw(variant, seqlen_q, seqlen_k)          # a figure, for a notebook

What is drawn is computed apart from how it is drawn, so that a stored picture can be held against
the code without comparing pixels: a PNG written by `save` carries its data. Only drawing needs
matplotlib (the extra `plot`).
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import arguments, figures
from .errors import VariantError
from .figures import figure_class
from .variant import Variant
from .variant.evaluate import evaluate
from .variant.visits import all_visits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CELLS = 512  # of a side; beyond, a cell is one pair in a few
MOST_LINES = 48  # between tiles, of a side
SIDE = 256  # pixels of a panel's longer side, which 64 cells share evenly
BEFORE, AFTER, ABOVE, BELOW, SCALE, LEGEND = 34, 10, 26, 8, 56, 40  # pixels around a panel
PANEL = 1.8  # inches of a picture on a sheet
DPI = 100
CURVE_FROM, CURVE_TO, CURVE_POINTS = -10.0, 10.0, 201

# States of a pair, as colours that stay apart in grey: white, light, middle, dark.
SKIPPED, HIDDEN, SEEN, SEEN_IN_FULL, MISSED = range(5)
COLOURS = ("#ffffff", "#fbdcb4", "#c2691c", "#22386f", "#ff0000")
LABELS = ("tile not visited", "hidden in a visited tile", "seen", "seen, tile needs no mask")


@dataclass(frozen=True)
class Pairs:
    """What becomes of each pair of query and key: a state, as listed above.

    Shape: states (queries, keys) uint8, one in a few beyond MOST_CELLS.
    """

    states: torch.Tensor
    seqlens: tuple[int, int]
    tile: tuple[int, int]

    behind = AFTER

    @property
    def extent(self) -> tuple[int, int]:
        return _extent(self.seqlens)

    @property
    def levels(self) -> torch.Tensor:
        return self.states

    def paint(self, axes: Axes) -> None:
        rgb = torch.tensor([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS])
        _matrix(axes, rgb[self.states.long()].to(torch.uint8).numpy(), self.seqlens)
        edges = [range(t, s, t) for t, s in zip(self.tile, self.seqlens, strict=True)]
        if max(map(len, edges)) < MOST_LINES:
            for queries in edges[0]:
                axes.axhline(queries, color="#b0b0b0", linewidth=0.5)
            for keys in edges[1]:
                axes.axvline(keys, color="#b0b0b0", linewidth=0.5)


@dataclass(frozen=True)
class Change:
    """What a score adds to a score of 1, for each pair; NaN where the key is hidden.

    Shape: values (queries, keys) float32, one in a few beyond MOST_CELLS.
    """

    values: torch.Tensor
    seqlens: tuple[int, int]

    behind = AFTER + SCALE

    @property
    def extent(self) -> tuple[int, int]:
        return _extent(self.seqlens)

    @property
    def levels(self) -> torch.Tensor:
        """The values on a scale from 1 to 255; 0 where there is none."""
        return _levels(self.values)

    def paint(self, axes: Axes) -> None:
        image = _matrix(axes, self.values.numpy(), self.seqlens, cmap="cividis")
        wide = self.extent[0]
        inset = axes.inset_axes((1 + 8 / wide, 0, 8 / wide, 1))
        bar = axes.get_figure().colorbar(image, cax=inset)
        bar.ax.tick_params(labelsize=6, length=2)
        bar.set_label("added to a score of 1", fontsize=7, labelpad=2)
        bar.outline.set_visible(False)


@dataclass(frozen=True)
class Curve:
    """A function of the score alone.

    Shape: values (CURVE_POINTS,) float32, for scores from CURVE_FROM to CURVE_TO.
    """

    values: torch.Tensor
    name: str

    behind = AFTER

    @property
    def extent(self) -> tuple[int, int]:
        return SIDE, SIDE

    @property
    def levels(self) -> torch.Tensor:
        return _levels(self.values)

    def paint(self, axes: Axes) -> None:
        scores = torch.linspace(CURVE_FROM, CURVE_TO, CURVE_POINTS)
        if self.name == "score":
            axes.plot(scores, scores, color="#b0b0b0", linewidth=0.8, linestyle="--")
        axes.plot(scores, self.values, color=COLOURS[SEEN_IN_FULL], linewidth=1.6)
        axes.set_xlabel("score s", fontsize=7, labelpad=2)
        axes.xaxis.set_label_position("top")
        axes.xaxis.tick_top()
        axes.set_ylabel(f"{self.name} of s", fontsize=7, labelpad=0)
        axes.grid(color="#e0e0e0", linewidth=0.5)
        axes.tick_params(labelsize=6, length=2, pad=1)
        axes.locator_params(nbins=5)
        for side in axes.spines.values():
            side.set_linewidth(0.5)


Picture = Pairs | Change | Curve


def draw(
    variant: Variant,
    seqlen_q: int,
    seqlen_k: int,
    *,
    b: int = 0,
    h: int = 0,
    tile: tuple[int, int] | None = None,
) -> Figure:
    """A figure of what `variant` does at batch entry `b` and head `h`.

    Its mask: which pairs are seen, in which tiles. Its score, and the weights of `Elementwise`: a
    curve if they depend on the score alone, else the change of a score of 1. `tile` is (queries,
    keys) of a tile; by default that of the kernel for head_dim 128.

    Raises: VariantError for what is no Variant, lengths below 1, a negative b or h, and a tile that
        is no pair of sizes; ModuleNotFoundError without matplotlib.
    """
    return figure(pictures(variant, seqlen_q, seqlen_k, b=b, h=h, tile=tile), legend=True)


def _check(variant: object, tile: object, **numbers: object) -> None:
    if not isinstance(variant, Variant):
        hint = "; make one of a function, as in Variant(mask=...)" if callable(variant) else ""
        raise VariantError(f"gallery.draw: variant is {variant!r}; valid is a Variant{hint}")
    for name, number in numbers.items():
        arguments.integer("gallery.draw", name, number, int(name.startswith("seqlen")))
    if tile is None:
        return
    if not (isinstance(tile, tuple) and len(tile) == 2):
        raise VariantError(f"gallery.draw: tile is {tile!r}; valid are (queries, keys) and None")
    for name, number in zip(("tile[0]", "tile[1]"), tile, strict=True):
        arguments.integer("gallery.draw", name, number, 1)


def pictures(
    variant: Variant,
    seqlen_q: int,
    seqlen_k: int,
    *,
    b: int = 0,
    h: int = 0,
    tile: tuple[int, int] | None = None,
) -> list[Picture]:
    """What `draw` draws."""
    _check(variant, tile, seqlen_q=seqlen_q, seqlen_k=seqlen_k, b=b, h=h)
    inputs: dict[str, Any] = {
        "b": b,
        "h": h,
        "q": _sampled(seqlen_q)[:, None],
        "k": _sampled(seqlen_k),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
    }
    cells = (inputs["q"].numel(), inputs["k"].numel())
    seen = torch.ones((), dtype=torch.bool)
    if variant.mask is not None:
        seen = evaluate(variant.mask, inputs, variant.captures)
    seen = seen.expand(cells)
    found: list[Picture] = []
    if variant.mask is not None or (variant.score is None and variant.weight is None):
        tile = default_tile(variant) if tile is None else tile
        states = _states(variant, seen, inputs, tile)
        found.append(Pairs(states, (seqlen_q, seqlen_k), tile))
    for name, graph in (("score", variant.score), ("weight", variant.weight)):
        if graph is None:
            continue
        if graph.inputs <= {"score", "b", "h"}:
            scores = torch.linspace(CURVE_FROM, CURVE_TO, CURVE_POINTS)
            values = evaluate(graph, inputs | {"score": scores}, variant.captures)
            found.append(Curve(values.expand(CURVE_POINTS), name))
        else:
            one = torch.ones(())
            values = evaluate(graph, inputs | {"score": one}, variant.captures) - 1
            values = values.expand(cells).masked_fill(~seen, torch.nan)
            found.append(Change(values, (seqlen_q, seqlen_k)))
    return found


def default_tile(variant: Variant) -> tuple[int, int]:
    """The kernel's tile at head_dim 128, as (queries, keys)."""
    from .plans import Plan
    from .problem import Problem

    schedule = Plan.default(variant, Problem("bf16", 128, 128)).schedule
    return schedule.tile_m, schedule.tile_n


def visited_tiles(
    variant: Variant,
    seqlen_q: int,
    seqlen_k: int,
    tile: tuple[int, int],
    b: int = 0,
    h: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles a launch visits, and which of them without the element mask.

    Shape: two of (m_blocks, n_blocks) bool.
    """
    entries = all_visits(
        variant.mask, variant.captures, b + 1, h + 1, seqlen_q, seqlen_k, *tile
    ).cpu()[b, h]
    n_blocks = entries.shape[-1] - 1
    visited = torch.zeros(entries.shape, dtype=torch.bool)  # the last column takes what is no tile
    full = visited.clone()
    block = torch.where(entries < 0, n_blocks, entries // 2).long()
    visited.scatter_(1, block, entries >= 0)
    full.scatter_(1, block, (entries >= 0) & (entries % 2 == 0))
    return visited[:, :n_blocks], full[:, :n_blocks]


def _sampled(length: int) -> torch.Tensor:
    return torch.arange(0, length, -(-length // MOST_CELLS) or 1, dtype=torch.int32)


def _states(
    variant: Variant, seen: torch.Tensor, inputs: dict[str, Any], tile: tuple[int, int]
) -> torch.Tensor:
    lengths = inputs["seqlen_q"], inputs["seqlen_k"]
    visited, full = visited_tiles(variant, *lengths, tile, inputs["b"], inputs["h"])
    rows, cols = (inputs["q"] // tile[0]).long(), (inputs["k"] // tile[1]).long()
    visited, full = visited[rows, cols], full[rows, cols]
    missed = (seen & ~visited) | (full & ~seen)
    states = torch.where(visited, torch.where(seen, torch.where(full, 3, 2), 1), 0)
    return states.masked_fill(missed, MISSED).to(torch.uint8)


def _levels(values: torch.Tensor) -> torch.Tensor:
    shown = values[values.isfinite()]
    low, high = (shown.min(), shown.max()) if shown.numel() else (torch.zeros(()), torch.ones(()))
    scaled = 1 + (values - low) / (high - low).clamp_min(1e-30) * 254
    return scaled.nan_to_num(0, 0, 0).round().to(torch.uint8)


# Drawing


def figure(parts: Sequence[Picture], legend: bool = False) -> Figure:
    """The pictures side by side."""
    legend = legend and any(isinstance(part, Pairs) for part in parts)
    widths = [BEFORE + part.extent[0] + part.behind for part in parts]
    tallest = max(part.extent[1] for part in parts)
    width, height = sum(widths), ABOVE + tallest + BELOW + (LEGEND if legend else 0)
    drawing = figure_class()(figsize=(width / DPI, height / DPI), dpi=DPI)
    left = 0
    for part, taken in zip(parts, widths, strict=True):
        wide, high = part.extent
        at = ((left + BEFORE) / width, 1 - (ABOVE + high) / height, wide / width, high / height)
        part.paint(drawing.add_axes(at))
        left += taken
    if legend:
        _add_legend(drawing, 2, "lower left")
    return drawing


def sheet(shown: Mapping[str, Picture], columns: int) -> Figure:
    """Many pictures under their titles, without numbers at their sides."""
    rows = -(-len(shown) // columns)
    pairs = any(isinstance(part, Pairs) for part in shown.values())
    drawing = figures.figure(PANEL * columns, (PANEL + 0.25) * rows + 0.3 * pairs)
    panels = drawing.subplots(rows, columns, squeeze=False).flatten().tolist()
    for title, part in shown.items():
        axes = panels.pop(0)
        part.paint(axes)
        axes.set_box_aspect(part.extent[1] / part.extent[0])
        if not isinstance(part, Curve):
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set(xlabel="", ylabel="")
        axes.set_title(title, fontsize=figures.TICK, pad=3)
    for axes in panels:
        axes.remove()
    if pairs:
        _add_legend(drawing, 4, "outside lower center")
    return drawing


def legend() -> Figure:
    """The colours of pairs."""
    drawing = figure_class()(figsize=(5.4, 0.3), dpi=DPI)
    _add_legend(drawing, 4, "center left")
    return drawing


def _add_legend(drawing: Figure, columns: int, where: str) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, edgecolor="#808080", linewidth=0.5, label=label)
        for colour, label in zip(COLOURS, LABELS, strict=False)
    ]
    spacing = {"columnspacing": 1.0, "handletextpad": 0.5, "handlelength": 1.6}
    drawing.legend(
        handles=patches, loc=where, ncols=columns, fontsize=6.5, frameon=False, **spacing
    )


def _extent(seqlens: tuple[int, int]) -> tuple[int, int]:
    """Pixels of a matrix, (width, height): its longer side is SIDE."""
    high, wide = (max(SIDE // 8, round(SIDE * length / max(seqlens))) for length in seqlens)
    return wide, high


def _matrix(axes: Axes, values: Any, seqlens: tuple[int, int], **how: Any) -> Any:
    seqlen_q, seqlen_k = seqlens
    image = axes.imshow(
        values, interpolation="nearest", extent=(0, seqlen_k, seqlen_q, 0), aspect="auto", **how
    )
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xticks([0, seqlen_k])
    axes.set_yticks([0, seqlen_q], ["0", str(seqlen_q)], rotation=90)
    axes.yaxis.get_ticklabels()[0].set_verticalalignment("top")
    axes.yaxis.get_ticklabels()[1].set_verticalalignment("bottom")
    axes.tick_params(labelsize=6, length=0)
    axes.set_xlabel("keys", fontsize=7, labelpad=-6)
    axes.set_ylabel("queries", fontsize=7, labelpad=-6)
    for side in axes.spines.values():
        side.set_linewidth(0.5)
    return image


# Stored pictures

_KEY = "cutedsl_fa3"


def save(drawing: Figure, parts: Sequence[Picture], path: Path) -> None:
    """Write a PNG that carries the levels of what it shows."""
    data = b"".join(part.levels.contiguous().numpy().tobytes() for part in parts)
    text = base64.b64encode(zlib.compress(data, 9)).decode()
    drawing.savefig(path, format="png", metadata={_KEY: text, "Software": None})


def stored(path: Path) -> torch.Tensor:
    """The levels that a picture carries, uint8 in one dimension.

    Raises: ValueError for a file that carries none.
    """
    content = path.read_bytes()
    at = 8
    while at < len(content):
        (length,), kind = struct.unpack(">I", content[at : at + 4]), content[at + 4 : at + 8]
        key, _, text = content[at + 8 : at + 8 + length].partition(b"\0")
        if kind == b"tEXt" and key == _KEY.encode():
            data = zlib.decompress(base64.b64decode(text))
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)
        at += 12 + length
    raise ValueError(f"{path.name} carries no data; write it with `python -m cutedsl_fa3 gallery`")
