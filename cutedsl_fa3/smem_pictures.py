"""Pictures of shared memory, from the emulated copy engine: banks, a ragged tail, WGMMA's reads.

`python -m cutedsl_fa3 gallery` writes them, with their page, to `notebooks/gallery/smem`. As with
the gallery's other pictures, what is drawn is computed apart and stored in the file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cutedsl_fa3.layouts import (
    NONE,
    SW32,
    SW64,
    SW128,
    Swizzle,
    TensorMap,
    Tile,
    bank,
    bank_conflicts,
    copy_engine,
)

from . import gallery

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).resolve().parent.parent / "notebooks" / "gallery" / "smem"
COMMAND = "python -m cutedsl_fa3 gallery"
CHUNK = 16  # bytes that lie together
LINE = 128  # bytes across all 32 banks
GROUPS = LINE // CHUNK  # of four banks each

# Groups of banks, dark to light to dark, so that neighbours stay apart in grey too.
BANK_COLOURS = (
    *("#22386f", "#3f6fb5", "#7fb5d8", "#cfe3ea"),
    *("#fbe7cd", "#f3b670", "#c2691c", "#74350a"),
)
DATA, FILL = 0, 1
TAIL_COLOURS = ("#7fb5d8", "#fbdcb4")
UNREAD = "#e8e8e8"
DARK = 140  # of 255: text on darker cells is white


@dataclass(frozen=True)
class Cells:
    """A grid of cells, each with the number of its colour and, where they fit, a text.

    Shape: levels (rows, columns) uint8; texts of the same shape, or none.
    Units: `cell` is (width, height) in pixels.
    """

    levels: torch.Tensor
    colours: tuple[str, ...]
    title: str
    cell: tuple[int, int]
    texts: tuple[tuple[str, ...], ...] = ()
    lines: tuple[int, int] = (1, 1)  # columns and rows from a line to the next

    behind = 16

    @property
    def extent(self) -> tuple[int, int]:
        rows, cols = self.levels.shape
        return cols * self.cell[0], rows * self.cell[1]

    def paint(self, axes: Axes) -> None:
        rows, cols = self.levels.shape
        rgb = torch.tensor([_rgb(colour) for colour in self.colours], dtype=torch.uint8)
        shown = rgb[self.levels.long()]
        axes.imshow(
            shown.tolist(), interpolation="nearest", extent=(0, cols, rows, 0), aspect="auto"
        )
        for row in range(0, rows, self.lines[1]):
            axes.axhline(row, color="#ffffff", linewidth=0.6)
        for col in range(0, cols, self.lines[0]):
            axes.axvline(col, color="#ffffff", linewidth=0.6)
        for row, texts in enumerate(self.texts):
            for col, text in enumerate(texts):
                light = shown[row, col].float().mean() < DARK
                ink = {"color": "#ffffff" if light else "#000000", "fontsize": 5.5}
                axes.text(col + 0.5, row + 0.5, text, ha="center", va="center", **ink)
        every = 1 if self.cell[1] >= 9 else 8
        axes.set_yticks([r + 0.5 for r in range(0, rows, every)], range(0, rows, every))
        axes.set_xticks([])
        axes.tick_params(labelsize=5.5, length=0, pad=2)
        axes.set_title(self.title, fontsize=6.5, pad=4)
        for side in axes.spines.values():
            side.set_linewidth(0.5)


@dataclass(frozen=True)
class Key:
    """What the colours mean."""

    entries: tuple[tuple[str, str], ...]  # colour, label
    extent: tuple[int, int]

    behind = 4
    levels = torch.zeros(0, dtype=torch.uint8)

    def paint(self, axes: Axes) -> None:
        axes.set_axis_off()
        axes.set_xlim(0, self.extent[0])
        axes.set_ylim(self.extent[1], 0)
        for i, (colour, label) in enumerate(self.entries):
            box = {"facecolor": colour, "edgecolor": "#808080", "linewidth": 0.5}
            axes.add_patch(_rectangle(0, 16 * i + 2, 14, 10, **box))
            axes.text(20, 16 * i + 7, label, fontsize=6.5, va="center")


Part = Cells | Key


def _rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _rectangle(left: float, top: float, width: float, height: float, **how: object) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), width, height, **how)


# Banks


def _banks(tmap: TensorMap, rows: int, title: str) -> Cells:
    """The first bank of each chunk of a box, by row and chunk as the tensor has them."""
    columns = range(0, tmap.box[0], CHUNK // tmap.element_bytes)
    at = [[copy_engine.address_of(tmap, (c, r)) for c in columns] for r in range(rows)]
    groups = torch.tensor([[bank(a) // 4 for a in row] for row in at], dtype=torch.uint8)
    texts = tuple(tuple(str(bank(a)) for a in row) for row in at)
    return Cells(groups, BANK_COLOURS, title, (20, 13), texts)


def column_conflicts(swizzle: Swizzle, row_bytes: int) -> int:
    """Wavefronts beyond the first when eight lanes read a column of eight rows, 16 bytes each."""
    return bank_conflicts([swizzle(row * row_bytes) for row in range(GROUPS)], CHUNK)


def banks() -> list[Part]:
    """A box of each swizzle, coloured by the banks that its chunks fall into."""
    import cutlass

    parts: list[Part] = []
    for swizzle in (NONE, SW32, SW64, SW128):
        row = swizzle.span if swizzle.bits else LINE
        box = (row // 2, GROUPS)
        tmap = TensorMap(cutlass.BFloat16, 0, box, (row,), box, swizzle=swizzle)
        more = column_conflicts(swizzle, row)
        parts.append(_banks(tmap, GROUPS, f"{swizzle.name}: +{more}"))
    entries = ((c, f"banks {4 * i} to {4 * i + 3}") for i, c in enumerate(BANK_COLOURS))
    parts.append(Key(tuple(entries), (110, 16 * GROUPS)))
    return parts


# A ragged tail

TAIL_TILE = (48, 64)  # rows, columns
TAIL_SHAPE = (53, 33)  # of the tensor, innermost first
TAIL_CORNER = (-8, 8)


def tail() -> list[Part]:
    """A tile over three edges of its tensor: as the tensor has it, and as shared memory has it."""
    import cutlass

    rows, cols = TAIL_TILE
    tile = Tile(rows, cols, cutlass.BFloat16)

    def state(place: tuple[int, int]) -> int:
        address = copy_engine.address_of(tile, place)
        element = copy_engine.element_at(tile, address, TAIL_CORNER)
        return DATA if element.within(TAIL_SHAPE) else FILL

    def lying(line: int, word: int) -> int:
        element = copy_engine.element_at(tile, line * LINE + 2 * word, TAIL_CORNER)
        return DATA if element.within(TAIL_SHAPE) else FILL

    logical = [[state((c, r)) for c in range(cols)] for r in range(rows)]
    physical = [[lying(r, c) for c in range(cols)] for r in range(rows)]
    return [
        _tail_cells(logical, "rows and columns of the tile"),
        _tail_cells(physical, "lines of 128 bytes in shared memory"),
        Key(((TAIL_COLOURS[DATA], "the tensor's"), (TAIL_COLOURS[FILL], "zero fill")), (80, 32)),
    ]


def _tail_cells(states: list[list[int]], title: str) -> Cells:
    levels = torch.tensor(states, dtype=torch.uint8)
    return Cells(levels, TAIL_COLOURS, title, (4, 5), lines=(8, 8))


# What WGMMA reads

WGMMA_ROWS, WGMMA_BYTES = 64, 32  # of A in one instruction of a 16-bit type: 16 columns
CORE_ROWS = 8  # of a core matrix, 16 bytes wide; source: PTX ISA, wgmma shared-memory layouts
STEP = 1  # the second k step of the tile
SHOWN_ROWS = 24


def cores() -> list[Part]:
    """The core matrices of one WGMMA's A in a 128B-swizzled tile, and the banks of each."""
    import cutlass

    tile = Tile(WGMMA_ROWS, LINE // 2, cutlass.BFloat16)
    first = STEP * WGMMA_BYTES // CHUNK
    width = WGMMA_BYTES // CHUNK

    def core(row: int, chunk: int) -> int:
        inside = first <= chunk < first + width
        return 1 + row // CORE_ROWS * width + chunk - first if inside else 0

    logical, physical, texts = _blank(), _blank(), [[""] * GROUPS for _ in range(SHOWN_ROWS)]
    for row in range(SHOWN_ROWS):
        for chunk in range(GROUPS):
            address = copy_engine.address_of(tile, (chunk * CHUNK // 2, row))
            line, place = address // LINE, address % LINE // CHUNK
            logical[row][chunk] = physical[line][place] = core(row, chunk)
            texts[line][place] = str(bank(address)) if core(row, chunk) else ""
    colours = (UNREAD, *(BANK_COLOURS[i] for i in (0, 6, 2, 5, 1, 7)))
    entries = [(UNREAD, "not read in this step")]
    for i, colour in enumerate(colours[1:]):
        top = CORE_ROWS * (i // width)
        left = 8 * (first + i % width)
        entries.append((colour, f"rows {top} to {top + 7}, columns {left} to {left + 7}"))
    as_tile = Cells(_levels(logical), colours, "the tile: 8 columns a cell", (22, 11))
    named = tuple(map(tuple, texts))
    as_smem = Cells(_levels(physical), colours, "shared memory: first bank", (22, 11), named)
    return [as_tile, as_smem, Key(tuple(entries), (200, 16 * len(entries)))]


def _blank() -> list[list[int]]:
    return [[0] * GROUPS for _ in range(SHOWN_ROWS)]


def _levels(numbers: list[list[int]]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


# The page

PICTURES: dict[str, Callable[[], list[Part]]] = {"banks": banks, "tail": tail, "cores": cores}

# Title and text of each.
_CAPTIONS = {
    "banks": (
        "Banks of a box, by swizzle",
        """Eight rows as wide as each swizzle's span (128 bytes without one). A cell is 16 bytes,
        its number the first bank. Above: how many wavefronts beyond one it takes to read a column
        of eight rows, 16 bytes from each. Swizzled, every column meets all 32 banks.""",
    ),
    "tail": (
        "A ragged tail",
        f"""A tile of {TAIL_TILE[0]} x {TAIL_TILE[1]} bf16 elements over three edges of a tensor of
        {TAIL_SHAPE[1]} rows and {TAIL_SHAPE[0]} columns: it begins at row {TAIL_CORNER[1]} and
        column {TAIL_CORNER[0]}. What lies outside arrives as zeros, element by element, and the
        mbarrier counts it like the rest. In shared memory the swizzle has moved whole chunks of 8
        elements, with what is fill in them.""",
    ),
    "cores": (
        "What one WGMMA reads",
        f"""The A operand of the second of four products of 64 x 16 (bf16), in a tile of 64 columns
        with the 128B swizzle; the first {SHOWN_ROWS} of its {WGMMA_ROWS} rows. The tensor core
        reads core matrices of {CORE_ROWS} rows of 16 bytes, here a colour each. In shared memory
        the chunks of each lie in eight different groups of banks, so that it meets all 32 banks
        once.""",
    ),
}

_INTRODUCTION = f"""Made by `{COMMAND}` from the emulated copy engine
(`cutedsl_fa3.layouts.copy_engine`); a test holds them to it."""


def page() -> str:
    """The text of the page."""
    lines = ["# Shared memory in pictures", _paragraph(_INTRODUCTION)]
    for name, (title, text) in _CAPTIONS.items():
        lines += [f"## {title}", _paragraph(text), f"![{name}]({name}.png)"]
    return "\n\n".join(lines) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, break_on_hyphens=False)


def write(folder: Path = FOLDER) -> list[Path]:
    """Writes page and pictures; what it wrote.

    Raises: ModuleNotFoundError without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "README.md"]
    written[0].write_text(page())
    for name, draw in PICTURES.items():
        parts = draw()
        written.append(folder / f"{name}.png")
        gallery.save(gallery.figure(parts), parts, written[-1])
    return written
