"""One or more timelines as a figure: a panel each, on one scale of clocks, a bar a lane.

Waits are hatched, with what is waited for where there is room; work is filled, a key tile's softmax
with the tile's number. The tensor cores have a row for each consumer, PV hatched; two rows are
never filled at once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from cutedsl_fa3.errors import Unsupported
from cutedsl_fa3.figures import BLUE, GREY, LABEL, NAVY, PALE, RUST, SAND, Ink, figure, tidy

from .table import TENSOR_CORES, UNITS, Interval, Timeline, group_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CLOCKS = 16000  # that are drawn where nobody says which
WIDTH, LANE, AROUND = 13.0, 0.34, 0.75  # inches: of a figure, of a lane, above and below a panel
LETTER = 0.062  # inches of a letter of SMALL points
SMALL = 6.5
THICK = 0.78  # of a lane

WAIT = Ink("#f4f4f4", hatch="//////")
INKS: dict[str, Ink] = {
    "products": NAVY,
    "softmax": RUST,
    "rescale": SAND,
    "issue": BLUE,
    "loads": BLUE,
    "epilogue": SAND.hatched("...."),
    "other": PALE,
}
LEGEND = {
    "softmax": "softmax: score, mask, maximum, exponentials",
    "rescale": "P to 16 bits, O rescaled",
    "issue": "issue of products or loads; TMA: bytes",
    "epilogue": "epilogue",
    "products": "tensor cores: QK, hatched PV",
}


def draw(*timelines: Timeline, start: float = 0.0, end: float | None = None) -> Figure:
    """Timelines above each other on one scale, from `start` to `end`.

    Without an end: to that of the longest, at most MOST_CLOCKS. Needs matplotlib (extra `plot`).

    Units: clocks.
    Raises: Unsupported where nothing is given, or the end is not behind the start.
    """
    if not timelines:
        raise Unsupported("draw(): one timeline or more is needed")
    if end is None:
        end = min(start + MOST_CLOCKS, max(each.clocks for each in timelines))
    if not end > start >= 0:
        raise Unsupported(f"start = {start}, end = {end}: an end behind a start from 0 is needed")
    heights = [LANE * len(each.lanes) + AROUND for each in timelines]
    drawing = figure(WIDTH, sum(heights) + 0.5)
    panels = drawing.subplots(
        len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axes, timeline in zip(panels, timelines, strict=True):
        _panel(axes, timeline, start, end)
    panels[-1].set_xlabel("clocks")
    for axes in panels:
        tidy(axes, grid="x")
    _legend(drawing, timelines)
    return drawing


def _panel(axes: Axes, timeline: Timeline, start: float, end: float) -> None:
    lanes = timeline.lanes
    for place, lane in enumerate(lanes):
        shown = [e for e in timeline.of(lane) if e.end > start and e.start < end]
        if lane == TENSOR_CORES:
            _units(axes, place, shown)
            continue
        bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for each in shown:
            name = "wait" if each.kind == "wait" else group_of(each.what)
            bars[name].append((each.start, each.clocks))
        for name, spans in bars.items():
            ink = WAIT if name == "wait" else INKS[name]
            axes.broken_barh(spans, (place - THICK / 2, THICK), **_fill(ink))
        if lane not in UNITS:
            _words(axes, place, shown, start, end)
    axes.set_xlim(start, end)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_title(_title(timeline), loc="left", fontsize=LABEL, color=GREY)


def _fill(ink: Ink) -> dict:
    return {**ink.fill, "edgecolor": "#bdbdbd"} if ink is WAIT else ink.fill


def _units(axes: Axes, place: int, shown: list[Interval]) -> None:
    """The tensor cores, a row for each warpgroup that they work for."""
    numbers = sorted({e.what.split()[-1] for e in shown})
    height = THICK / max(1, len(numbers))
    for row, number in enumerate(numbers):
        for second, ink in ((False, NAVY), (True, NAVY.hatched())):
            spans = [
                (e.start, e.clocks)
                for e in shown
                if e.what.split()[-1] == number and (e.what.split()[0] == "PV") == second
            ]
            at = place - THICK / 2 + row * height
            axes.broken_barh(spans, (at, 0.9 * height), **ink.fill)


def _words(axes: Axes, place: int, shown: list[Interval], start: float, end: float) -> None:
    """Of a wait what for, of the first step of a softmax which tile, where there is room."""
    inches = 0.86 * WIDTH / (end - start)
    told = None
    for each in shown:
        left, right = max(each.start, start), min(each.end, end)
        if each.kind == "wait":
            text, colour = each.what, GREY
        elif group_of(each.what) == "softmax" and each.tile != told:
            text, colour = str(each.tile), "#ffffff"
        else:
            continue
        if (right - left) * inches < LETTER * (len(text) + 1):
            continue
        told = each.tile if each.kind == "work" else told
        axes.text(
            (left + right) / 2,
            place,
            text,
            ha="center",
            va="center",
            fontsize=SMALL,
            color=colour,
            bbox=(
                {"facecolor": WAIT.colour, "edgecolor": "none", "pad": 0.6}
                if each.kind == "wait"
                else None
            ),
        )


def _title(timeline: Timeline) -> str:
    tile = timeline.clocks_a_tile()
    text = f"{timeline.origin}, CTA {timeline.cta}: {timeline.clocks:,.0f} clocks"
    text += "" if tile is None else f", {tile:,.0f} from key tile to key tile"
    return text + ("" if timeline.ghz is None else f", at {timeline.ghz:.2f} GHz")


def _legend(drawing: Figure, timelines: tuple[Timeline, ...]) -> None:
    from matplotlib.patches import Patch

    there = {
        group_of(e.what) if e.kind == "work" else "wait"
        for each in timelines
        for e in each.intervals
    }
    handles = [Patch(**_fill(WAIT), label="waits")] if "wait" in there else []
    handles += [
        Patch(**INKS[name].fill, label=text) for name, text in LEGEND.items() if name in there
    ]
    drawing.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        fontsize=LABEL - 1,
        frameon=False,
        labelcolor=GREY,
    )
