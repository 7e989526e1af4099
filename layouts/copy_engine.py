"""The copy engine, emulated: which bytes a TMA copy puts where, and what its mbarrier counts.

    load          global -> shared memory: box, strides, swizzle, fill outside the tensor
    store         shared -> global memory; what lies outside the tensor is dropped
    check         whether a load is one that an instruction does
    address_of    where an element of a box or tile lies in shared memory
    element_at    which element lies at a byte of shared memory, and in which bank

A box is copied row by row along its innermost dimension. In shared memory a row lies behind the row
before it, at least one swizzle span apart, and the swizzle then moves its 16-byte chunks. It goes
by the address, not by the number of the row: a box that begins 128 bytes into a period begins in
the midst of the pattern.

    row r, chunk c of a box at a   ->   swizzle(a + r * pitch + 16 * c),  pitch = max(row, span)

Coordinates, shapes and indices are listed innermost first, as the instruction takes them. Addresses
of shared memory are bytes from a place that is a multiple of 1024, where `smem` begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, TypeAlias

from .errors import LayoutError
from .swizzle import CHUNK, Swizzle, bank
from .tma import TensorMap

if TYPE_CHECKING:
    from .tile import Tile

# Anything that lends its bytes in one stretch: an array or a ctypes buffer as well.
Memory: TypeAlias = bytes | bytearray | memoryview

SMEM_ALIGN = 128  # of a box in shared memory; source: CUDA C++ Programming Guide, tensor copies
# What NaN fill writes to every 16 bits of an element, of whatever floating type. Undocumented;
# source: public emulators of TMA, whose authors read it from GPUs; an H200 has the same.
OOB_NAN = 0x7FF7
# Bytes: a copy whose innermost coordinate is no multiple ends as an illegal instruction, and stores
# write no less; both seen on an H200.
INNER_ALIGN = 16
_COORDINATES = range(-(2**31), 2**31)


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor in global memory: the bytes from its first element on, and how it lies in them.

    Shape: `shape` innermost first; `strides` leaves out dimension 0, which is contiguous.
    Units: `shape` in elements, `strides` in bytes. `address` is what a tensor map would hold.
    """

    memory: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = 0
    oob_fill: str = "zeros"


@dataclass(frozen=True)
class Load:
    """Shared memory after a load, the bytes that it counted, and how many elements it filled.

    `transaction_bytes` is what the mbarrier is told: whole boxes, whatever lies outside the tensor.
    """

    smem: bytearray
    transaction_bytes: int
    filled: int


@dataclass(frozen=True)
class Element:
    """What lies at a byte of shared memory: the byte `byte` of an element.

    `place` is counted from the corner of the box or tile, `index` in the tensor.
    """

    place: tuple[int, ...]
    index: tuple[int, ...]
    byte: int
    bank: int

    def within(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has the element; where not, the fill lies there."""
        return all(0 <= i < size for i, size in zip(self.index, shape, strict=True))


@dataclass(frozen=True)
class _Boxes:
    """How a box, or the boxes of a tile, lie in shared memory: `grid` counts boxes."""

    counts: tuple[int, ...]  # elements of a box
    size: int  # bytes of an element
    swizzle: Swizzle
    grid: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.counts[0] * self.size

    @property
    def pitch(self) -> int:
        """Bytes from a row to the next: a row narrower than the swizzle leaves the rest unwritten.

        Source: CUDA C++ Programming Guide, swizzle modes (allocate the full swizzle width).
        """
        return max(self.row_bytes, self.swizzle.span) if self.swizzle.bits else self.row_bytes

    @property
    def extent(self) -> int:
        """Bytes of shared memory that one box occupies, gaps included."""
        return math.prod(self.counts[1:]) * self.pitch

    @property
    def elements(self) -> tuple[int, ...]:
        """Elements of all boxes in each dimension."""
        return tuple(c * g for c, g in zip(self.counts, self.grid, strict=True))

    def outer(self, rank: int) -> tuple[int, ...]:
        """Elements of a box in dimensions 1 and up of a tensor of that rank."""
        return self.counts[1:] + (1,) * (rank - len(self.counts))

    def corners(self) -> Iterator[tuple[int, ...]]:
        """The corner of each box, in the order in which they lie: the last dimension first."""
        for which in product(*map(range, self.grid)):
            yield tuple(w * c for w, c in zip(which, self.counts, strict=True))


def _boxes(what: TensorMap | Tile) -> _Boxes:
    if isinstance(what, TensorMap):
        what.check()
        if what.interleave != "none":
            raise LayoutError(
                f"interleave {what.interleave}: how it lies in shared memory is not emulated; "
                "use interleave none"
            )
        counts = tuple(-(-b // e) for b, e in zip(what.box, what.steps, strict=True))
        return _Boxes(counts, what.element_bytes, what.swizzle, (1,) * what.rank)
    grid = tuple(n // b for n, b in zip((what.cols, what.rows), what.box, strict=True))
    return _Boxes(what.box, what.dtype.width // 8, what.swizzle, grid)


def load(
    what: TensorMap | Tile,
    memory: Memory | GlobalTensor,
    coordinate: Sequence[int],
    *,
    smem: bytearray | None = None,
    at: int = 0,
) -> Load:
    """Copy the box of a tensor map, or all boxes of a tile, whose corner is `coordinate`.

    `memory` begins at the map's address; a tile needs a `GlobalTensor`. `smem` is written in place
    from byte `at` on, and keeps what the copy does not write; by default it is new and zero.

    Raises: LayoutError for a map that breaks a rule, a coordinate or an `at` that no instruction
        takes, and for memory or shared memory that ends too early.
    """
    tmap, boxes = _map(what, memory), _boxes(what)
    smem = bytearray(at + footprint(what)) if smem is None else smem
    source, fill = _bytes("memory", memory), _fill(tmap, boxes)
    filled = math.prod(boxes.elements)
    for corner, offset in _instructions(tmap, boxes, coordinate, len(smem), at):
        low, high = _inside(tmap, boxes, corner[0])
        for start, row in _rows(tmap, boxes, corner, offset):
            data = fill
            if start is not None and low < high:
                data = fill[:low] + _within(source, start + low, start + high) + fill[high:]
                filled -= (high - low) // boxes.size
            _scatter(smem, row, data, boxes.swizzle)
    return Load(smem, math.prod(boxes.grid) * tmap.bytes_per_box, filled)


def store(
    what: TensorMap | Tile,
    memory: Memory | GlobalTensor,
    coordinate: Sequence[int],
    smem: Memory,
    *,
    at: int = 0,
) -> int:
    """Copy a box or tile back to `memory`, which is written in place; returns the bytes written.

    Rows outside the tensor are dropped. A row of it is written in whole pieces of 16 bytes: where
    its length is no multiple, up to 15 bytes of shared memory land behind it, in the row's padding
    or in what follows the tensor (here they are lost where `memory` ends).

    Raises: LayoutError as `load`, for a negative coordinate, and for memory that is read-only.
    Source: CUDA C++ Programming Guide: what is written may lie partly out of bounds, but its corner
        has no negative index.
    """
    tmap, boxes = _map(what, memory), _boxes(what)
    target, source = _bytes("memory", memory), _bytes("smem", smem)
    if min(coordinate) < 0:
        raise LayoutError(
            f"store at coordinate {tuple(coordinate)}: a store begins at 0 or later in every "
            "dimension; only a load may begin before the tensor"
        )
    if target.readonly:
        raise LayoutError("store: memory is read-only; use a bytearray or another that is not")
    written = 0
    for corner, offset in _instructions(tmap, boxes, coordinate, len(source), at):
        low, high = _inside(tmap, boxes, corner[0])
        for start, row in _rows(tmap, boxes, corner, offset):
            if start is not None and low < high:
                data = _gather(source, row, boxes.row_bytes, boxes.swizzle)
                _within(target, start + low, start + high)
                end = min(-(-high // INNER_ALIGN) * INNER_ALIGN, len(target) - start)
                target[start + low : start + end] = data[low:end]
                written += end - low
    return written


def check(tmap: TensorMap, coordinate: Sequence[int], *, smem_bytes: int, at: int = 0) -> None:
    """Refuse a load that no instruction does, or that ends behind `smem_bytes` of shared memory.

    Raises: LayoutError as `load`.
    """
    _instructions(tmap, _boxes(tmap), coordinate, smem_bytes, at)


def footprint(what: TensorMap | Tile) -> int:
    """Bytes of shared memory that a box or tile occupies, gaps included."""
    boxes = _boxes(what)
    return boxes.extent * math.prod(boxes.grid)


def address_of(what: TensorMap | Tile, place: Sequence[int], *, at: int = 0) -> int:
    """The shared-memory address of the first byte of an element, of a box or tile at `at`.

    Shape: `place` counts elements from the corner, innermost first: (col, row) of a tile.
    Raises: LayoutError for a place outside the box or tile.
    """
    boxes = _boxes(what)
    limits = boxes.elements
    if len(place) != len(limits) or any(not 0 <= i < n for i, n in zip(place, limits, strict=True)):
        size = " x ".join(map(str, limits))
        raise LayoutError(f"place {tuple(place)}: outside {size} elements, innermost first")
    number = row = 0
    for i, count, grid in zip(place, boxes.counts, boxes.grid, strict=True):
        number = number * grid + i // count
    for i, count in zip(place[:0:-1], boxes.counts[:0:-1], strict=True):
        row = row * count + i % count
    byte = place[0] % boxes.counts[0] * boxes.size
    return boxes.swizzle(at + number * boxes.extent + row * boxes.pitch + byte)


def element_at(
    what: TensorMap | Tile,
    address: int,
    coordinate: Sequence[int] | None = None,
    *,
    at: int = 0,
) -> Element | None:
    """The element that a copy from `coordinate` to `at` leaves at this byte; None in a gap.

    Without a coordinate, `index` is `place`.

    Raises: LayoutError for an address outside the box or tile.
    """
    boxes = _boxes(what)
    if not at <= address < at + footprint(what):
        raise LayoutError(
            f"address {address}: outside the box or tile, which lies in {at} to "
            f"{at + footprint(what) - 1}"
        )
    # A swizzle is its own inverse.
    number, rest = divmod(boxes.swizzle(address) - at, boxes.extent)
    row, byte = divmod(rest, boxes.pitch)
    if byte >= boxes.row_bytes:
        return None
    inner = [byte // boxes.size]
    for count in boxes.counts[1:]:
        row, i = divmod(row, count)
        inner.append(i)
    corner = next(islice(boxes.corners(), number, None))
    place = tuple(c + i for c, i in zip(corner, inner, strict=True))
    index = place if coordinate is None else _index(what, coordinate, place)
    return Element(place, index, byte % boxes.size, bank(address))


def _index(
    what: TensorMap | Tile, coordinate: Sequence[int], place: tuple[int, ...]
) -> tuple[int, ...]:
    """The tensor's index of a place; a tile is one element deep in dimensions it does not have."""
    steps = what.steps if isinstance(what, TensorMap) else (1,) * len(coordinate)
    deep = place + (0,) * (len(coordinate) - len(place))
    return tuple(c + s * i for c, s, i in zip(coordinate, steps, deep, strict=True))


def _map(what: TensorMap | Tile, memory: Memory | GlobalTensor) -> TensorMap:
    """The map of one instruction."""
    if isinstance(what, TensorMap):
        return what
    if not isinstance(memory, GlobalTensor):
        raise LayoutError(
            f"memory of a tile's copy is {type(memory).__name__}: a GlobalTensor is needed, which "
            "says how the tensor lies in it"
        )
    tmap = what.tensor_map(memory.address, memory.shape, memory.strides, oob_fill=memory.oob_fill)
    tmap.check()
    return tmap


def _bytes(name: str, memory: Memory | GlobalTensor) -> memoryview:
    """The bytes of an object, without a copy."""
    view = memoryview(memory.memory if isinstance(memory, GlobalTensor) else memory)
    if not view.c_contiguous:
        raise LayoutError(
            f"{name} is a view with gaps: its bytes are needed in one stretch, from the first "
            "element to the last; strides belong into the tensor map"
        )
    return view.cast("B")


def _instructions(
    tmap: TensorMap, boxes: _Boxes, coordinate: Sequence[int], smem_bytes: int, at: int
) -> list[tuple[tuple[int, ...], int]]:
    """The coordinate and the shared-memory address that each instruction is given."""
    if len(coordinate) != tmap.rank or any(c not in _COORDINATES for c in coordinate):
        raise LayoutError(
            f"coordinate {tuple(coordinate)}: {tmap.rank} signed 32-bit integers are needed, "
            "innermost first"
        )
    start = coordinate[0] * tmap.element_bytes
    if start % INNER_ALIGN:
        down = start // INNER_ALIGN * INNER_ALIGN // tmap.element_bytes
        raise LayoutError(
            f"coordinate {tuple(coordinate)}: the box would begin {start} bytes into a row, and "
            f"the copy instruction takes multiples of {INNER_ALIGN}; begin at element {down} or "
            f"{down + INNER_ALIGN // tmap.element_bytes}"
        )
    found = []
    for number, corner in enumerate(boxes.corners()):
        deep = corner + (0,) * (tmap.rank - len(corner))
        place = at + number * boxes.extent
        found.append((tuple(c + d for c, d in zip(coordinate, deep, strict=True)), place))
        if place % SMEM_ALIGN or place < 0:
            raise LayoutError(
                f"at = {at}: box {number} would begin at byte {place} of shared memory; boxes "
                f"begin at multiples of {SMEM_ALIGN}"
            )
    end = found[-1][1] + boxes.extent
    if end > smem_bytes:
        raise LayoutError(f"smem has {smem_bytes} bytes: the copy to {at} needs {end}")
    return found


def _inside(tmap: TensorMap, boxes: _Boxes, first: int) -> tuple[int, int]:
    """From which byte to which a row of a box that begins at column `first` is in the tensor."""
    low = min(max(-first, 0), boxes.counts[0])
    high = min(max(tmap.shape[0] - first, 0), boxes.counts[0])
    return low * boxes.size, high * boxes.size


def _rows(
    tmap: TensorMap, boxes: _Boxes, corner: tuple[int, ...], at: int
) -> Iterator[tuple[int | None, int]]:
    """Where each row begins: in global memory, None outside the tensor, and in shared memory."""
    counts, steps = boxes.outer(tmap.rank), tmap.steps[1:]
    outer = []
    for d, (first, count, step) in enumerate(zip(corner[1:], counts, steps, strict=True)):
        size, stride = tmap.shape[d + 1], tmap.strides[d]
        indices = range(first, first + count * step, step)
        outer.append([i * stride if 0 <= i < size else None for i in indices])
    before = corner[0] * boxes.size
    for row, offsets in enumerate(product(*reversed(outer))):
        start = None if None in offsets else before + sum(offsets)
        yield start, at + row * boxes.pitch


def _fill(tmap: TensorMap, boxes: _Boxes) -> bytes:
    """A row of nothing but fill."""
    value = OOB_NAN if tmap.oob_fill == "nan" else 0
    return value.to_bytes(2, "little") * (boxes.row_bytes // 2)


def _within(memory: memoryview, start: int, end: int) -> memoryview:
    if end > len(memory):
        raise LayoutError(
            f"memory has {len(memory)} bytes: the tensor's shape and strides reach byte {end - 1}"
        )
    return memory[start:end]


def _scatter(smem: bytearray, row: int, data: bytes, swizzle: Swizzle) -> None:
    if not swizzle.bits:
        smem[row : row + len(data)] = data
        return
    for chunk in range(0, len(data), CHUNK):
        place = swizzle(row + chunk)
        smem[place : place + CHUNK] = data[chunk : chunk + CHUNK]


def _gather(smem: memoryview, row: int, length: int, swizzle: Swizzle) -> bytes:
    if not swizzle.bits:
        return bytes(smem[row : row + length])
    places = [swizzle(row + chunk) for chunk in range(0, length, CHUNK)]
    return b"".join(smem[place : place + CHUNK] for place in places)
