"""What lies where in a kernel's tensor memory (SM100): columns by name, against the 512 there are.

Tensor memory is 128 lanes of 512 columns, 32 bits each. UMMA writes its accumulators there and a
warp reads 32 lanes of it, so an fp32 accumulator of 128 rows takes as many columns as it has. A
CTA allocates a power of two of columns, at least 32, and must free them before it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import LayoutError

# Source: PTX ISA, tcgen05: tensor memory allocation.
TMEM_LANES = 128
TMEM_COLUMNS = 512
TMEM_SMALLEST = 32

_BAR_WIDTH = 32


@dataclass(frozen=True)
class Accumulator:
    """A rows x cols fp32 result of UMMA; every 128 rows lie in columns of their own.

    Raises: LayoutError if rows are no multiple of the 128 lanes, or there are no columns.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % TMEM_LANES:
            nearest = max(1, round(self.rows / TMEM_LANES)) * TMEM_LANES
            raise LayoutError(
                f"accumulator rows = {self.rows}: tensor memory has {TMEM_LANES} lanes, one a row; "
                f"use {nearest}"
            )
        if self.cols < 1:
            raise LayoutError(f"accumulator cols = {self.cols}: 1 or more are needed")

    @property
    def columns(self) -> int:
        """Columns of tensor memory."""
        return self.cols * (self.rows // TMEM_LANES)


@dataclass(frozen=True)
class Columns:
    """One thing in tensor memory: `columns` columns a stage, stages side by side."""

    name: str
    columns: int
    stages: int = 1

    @property
    def size(self) -> int:
        """Columns of all stages."""
        return self.columns * self.stages


@dataclass(frozen=True)
class TmemPlan:
    """Columns in the order they are stored, packed from column 0.

    Raises: LayoutError if names repeat or something is empty.
    """

    parts: tuple[Columns, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        for part in self.parts:
            if names.count(part.name) > 1:
                raise LayoutError(f"two accumulators are called {part.name!r}; each needs a name")
            if part.columns < 1 or part.stages < 1:
                raise LayoutError(
                    f"accumulator {part.name!r}: {part.stages} stages of {part.columns} columns; "
                    "both must be at least 1"
                )

    def offset(self, name: str) -> int:
        """The first column of `name`."""
        first = 0
        for part in self.parts:
            if part.name == name:
                return first
            first += part.size
        raise LayoutError(
            f"no accumulator is called {name!r}; there are {[part.name for part in self.parts]}"
        )

    @property
    def used(self) -> int:
        """Columns that hold something."""
        return sum(part.size for part in self.parts)

    @property
    def allocated(self) -> int:
        """Columns that the CTA asks for: the next power of two, at least 32."""
        return max(TMEM_SMALLEST, 1 << (self.used - 1).bit_length())

    def check(self) -> None:
        """Refuse a plan that does not fit.

        Raises: LayoutError naming the columns, the limit, and what takes most.
        """
        if self.used <= TMEM_COLUMNS:
            return
        by_size = sorted(self.parts, key=lambda part: part.size, reverse=True)
        shares = ", ".join(f"{p.name} {p.size} ({p.stages} x {p.columns})" for p in by_size)
        largest = by_size[0]
        left = TMEM_COLUMNS - (self.used - largest.size)
        fitting = max(0, left) // largest.columns
        advice = (
            f"{fitting} stage{'s' if fitting > 1 else ''} of {largest.name!r} would fit"
            if fitting
            else "choose a smaller tile"
        )
        raise LayoutError(
            f"tensor memory: {self.used} columns are needed and an SM has {TMEM_COLUMNS}, "
            f"{self.used - TMEM_COLUMNS} too many. Columns by accumulator: {shares}. {advice}"
        )

    def __str__(self) -> str:
        width = max([len(part.name) for part in self.parts] + [11])
        scale = max(self.used, TMEM_COLUMNS)
        lines = [f"{'column':>8} {'columns':>8}  {'stages':>6}  {'accumulator':<{width}}"]
        for part in self.parts:
            start = self.offset(part.name)
            bar = " " * (start * _BAR_WIDTH // scale)
            bar += "#" * max(1, round(part.size * _BAR_WIDTH / scale))
            lines.append(
                f"{start:8d} {part.size:8d}  {part.stages:6d}  {part.name:<{width}}  "
                f"|{bar:<{_BAR_WIDTH}.{_BAR_WIDTH}}|"
            )
        state = "fits" if self.used <= TMEM_COLUMNS else "DOES NOT FIT"
        limit = f"of {TMEM_COLUMNS} columns: {state}; {self.allocated} are allocated"
        lines.append(f"    used {self.used:8d}  {limit}")
        return "\n".join(lines)
