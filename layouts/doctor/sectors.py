"""What one TMA instruction moves: bytes into shared memory, bytes read, and sectors of L2.

L2 hands out whole sectors of 32 bytes. Rows that begin in the middle of one, and rows that are no
whole number of them, make an instruction fetch bytes that it does not want.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutedsl_fa3.layouts.errors import LayoutError

if TYPE_CHECKING:
    from cutedsl_fa3.layouts.tma import TensorMap

SECTOR = 32  # bytes; source: CUDA C++ Best Practices Guide, global memory is accessed in such units


@dataclass(frozen=True)
class Traffic:
    """What one instruction moves at a coordinate.

    `smem` bytes are written, and counted by the mbarrier, whether or not they lie inside the
    tensor; `read` of them come from it and the rest is fill. `sectors` are those that the bytes
    read lie in, each counted once; `best` is the fewest that many bytes could lie in.

    Shape: `coordinate` as the map's dimensions, innermost first.
    Units: `smem`, `read` and `filled` in bytes; `rows` are runs of the innermost dimension.
    """

    coordinate: tuple[int, ...]
    smem: int
    read: int
    rows: int
    sectors: int

    @property
    def filled(self) -> int:
        """Bytes outside of the tensor, which arrive as zeros or NaN."""
        return self.smem - self.read

    @property
    def best(self) -> int:
        """Sectors that the bytes would lie in one after another from the start of one."""
        return -(-self.read // SECTOR)

    @property
    def wasted(self) -> int:
        """Sectors beyond the fewest."""
        return self.sectors - self.best

    def __str__(self) -> str:
        where = ", ".join(map(str, self.coordinate))
        sectors = f"{self.sectors} sector{'' if self.sectors == 1 else 's'} of {SECTOR}"
        text = f"at ({where}): {self.read} bytes read in {sectors}"
        text += f", {self.wasted} more than they need" if self.wasted else ""
        return text + (f"; {self.filled} bytes filled" if self.filled else "")


def traffic(tmap: TensorMap, coordinate: tuple[int, ...] | None = None) -> Traffic:
    """What one instruction of a legal map moves at a coordinate, by default that of the first box.

    Coordinates may be negative or past the end: what lies outside is filled. Bytes of elements that
    are loaded twice (a stride of 0) are read twice and lie in one sector.

    Raises: LayoutError for a map that breaks a rule, an interleaved one, or another number of
        coordinates.
    """
    tmap.check()
    if tmap.interleave != "none":
        raise LayoutError(f"interleave = {tmap.interleave}: sectors are counted for none only")
    at = (0,) * tmap.rank if coordinate is None else tuple(coordinate)
    if len(at) != tmap.rank:
        raise LayoutError(f"coordinate {at} has {len(at)} entries, the map {tmap.rank} dimensions")
    inside = [
        [c + i for i in range(0, extent, step) if 0 <= c + i < size]
        for c, extent, step, size in zip(at, tmap.box, tmap.steps, tmap.shape, strict=True)
    ]
    if not all(inside):
        return Traffic(at, tmap.bytes_per_box, 0, 0, 0)
    width = len(inside[0]) * tmap.element_bytes
    starts = [
        tmap.address + inside[0][0] * tmap.element_bytes + offset
        for offset in _offsets(inside[1:], tmap.strides)
    ]
    spans = sorted({(s // SECTOR, (s + width - 1) // SECTOR) for s in starts})
    return Traffic(at, tmap.bytes_per_box, len(starts) * width, len(starts), _union(spans))


def _offsets(inside: list[list[int]], strides: tuple[int, ...]) -> Iterator[int]:
    """Bytes from the address to each row of the box."""
    for indices in itertools.product(*inside):
        yield sum(i * s for i, s in zip(indices, strides, strict=True))


def _union(spans: list[tuple[int, int]]) -> int:
    """How many integers lie in any of these inclusive intervals, which are sorted."""
    count, end = 0, -1
    for first, last in spans:
        count += max(0, last - max(first, end + 1) + 1)
        end = max(end, last)
    return count


def last_box(tmap: TensorMap) -> tuple[int, ...]:
    """The coordinate of the box that holds the last element along every dimension."""
    return tuple((count - 1) * extent for count, extent in zip(tmap.boxes, tmap.box, strict=True))
