"""One look for all figures: inks that stay apart in grey, sizes of text, and quiet axes.

    drawing = figures.figure(8, 3)                 # inches; the last value of a cell shows it
    axes = drawing.subplots()
    axes.bar(names, values, **figures.RUST.fill)
    axes.plot(x, y, label="predicted", **figures.NAVY.line)
    figures.tidy(axes)

Only `figure` needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#5b5b5b"  # text beside the data
AXIS = "#b0b0b0"
RULE = "#e3e3e3"  # lines of a grid
TITLE, LABEL, TICK = 11, 9, 8  # points
DPI = 100


@dataclass(frozen=True)
class Ink:
    """What one series is drawn with: a colour, a pattern over it, a kind of line, a marker."""

    colour: str
    dashes: str | tuple[int, tuple[int, ...]] = "-"
    marker: str = "o"
    hatch: str = ""

    @property
    def fill(self) -> dict[str, Any]:
        """Arguments of a bar, a patch or a shaded span."""
        over = "#ffffff" if luminance(self.colour) < 170 else GREY
        return {"facecolor": self.colour, "edgecolor": over, "hatch": self.hatch, "linewidth": 0}

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of a line without markers; `marker=ink.marker` adds them."""
        return {"color": self.colour, "linestyle": self.dashes, "linewidth": 1.6}

    def hatched(self, pattern: str = "////") -> Ink:
        """This ink with a pattern over it: for a sixth series, or for time spent waiting."""
        return replace(self, hatch=pattern)


# Dark to light: neighbours differ by 35 of 255 levels or more in grey, and the last by 20 from
# white; it is for areas, too light for a line.
NAVY = Ink("#1f2f66", "-", "o")
RUST = Ink("#b3450f", (0, (5, 2)), "s")
BLUE = Ink("#62a0d8", (0, (1, 1.2)), "^")
SAND = Ink("#e3b96c", (0, (5, 1, 1, 1)), "D")
PALE = Ink("#e2e9ee", "-", "v")
INKS = (NAVY, RUST, BLUE, SAND, PALE)


def luminance(colour: str) -> float:
    """The grey of "#rrggbb" in a print without colours, 0 to 255 (Source: ITU-R BT.601)."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


@cache
def figure_class() -> type[Figure]:
    """matplotlib's Figure, which a notebook shows without a backend.

    Raises: ModuleNotFoundError naming the extra, where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing needs matplotlib: install cutedsl-fa3[plot]", name=error.name
        ) from None

    class Drawing(Figure):
        def _repr_png_(self) -> bytes:
            import io

            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return Drawing


def figure(width: float, height: float, dpi: int = DPI) -> Figure:
    """An empty figure whose parts make room for each other.

    Units: inches.
    Raises: ModuleNotFoundError without matplotlib.
    """
    return figure_class()(figsize=(width, height), dpi=dpi, layout="constrained")


def tidy(axes: Axes, grid: str = "y") -> None:
    """Quiet axes: a grid along `grid` ("x", "y", "both" or ""), one line below, no ticks.

    Call it when title and labels are set.
    """
    axes.tick_params(length=0, colors=GREY, labelsize=TICK)
    if grid:
        axes.grid(axis=grid, color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(AXIS)
    axes.title.set(fontsize=LABEL, color=GREY)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(fontsize=LABEL, color=GREY)


def in_grey(drawing: Figure) -> Any:
    """The pixels as a print without colours shows them.

    Shape: (height, width) uint8, a numpy array.
    """
    import io

    import numpy
    from matplotlib.image import imread

    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", facecolor="white")
    buffer.seek(0)
    colours = imread(buffer, format="png")[..., :3]
    grey = colours @ numpy.array([0.299, 0.587, 0.114])
    return (255 * grey).round().astype("uint8")
