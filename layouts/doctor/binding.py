"""A tile, or a box, on a tensor: which dimension is which, the tensor map, and all of its rules.

`TensorMap` holds what the hardware is told. Two things cannot be said to it at all, and are rules
here: its innermost dimension has no stride, so it has to be contiguous, and an element has the
size that the map says. A tile has rules of its own besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cutedsl_fa3.layouts.errors import LayoutError
from cutedsl_fa3.layouts.smem import SMEM_CAPACITY
from cutedsl_fa3.layouts.swizzle import CHUNK, NONE, Swizzle, widest
from cutedsl_fa3.layouts.tma import TensorMap
from cutedsl_fa3.layouts.tma_rules import SWIZZLES, Rule

from .geometry import Geometry, geometry_of

if TYPE_CHECKING:
    from cutedsl_fa3.layouts.tile import Tile

ATOM_ROWS = 8  # as in tile.py, which needs the compiler
MODES = ("interleave", "oob_fill", "l2_promotion", "cache_hint", "prefetch")


@dataclass(frozen=True)
class Binding:
    """What one instruction shall move of a tensor: a tile's box, or a box as it is given.

    `element` is the type that the map is told. `maps` counts the tensor maps that replace the one
    asked for and `pieces` the instructions that replace one, both 1 until a change splits.

    Shape: `inner` and `rows` are dimensions of the tensor; `tile` is (rows, cols); `given_box` and
        `steps` (element strides) have an entry for each of the tensor's dimensions, in its order.
    """

    tensor: Geometry
    element: type | str
    inner: int
    rows: int | None = None
    tile: tuple[int, int] | None = None
    given_box: tuple[int, ...] | None = None
    given_swizzle: Swizzle | None = None
    steps: tuple[int, ...] | None = None
    modes: Mapping[str, str] = field(default_factory=dict)
    typed: bool = False  # whether the tile has a type of its own
    maps: int = 1
    pieces: int = 1

    @property
    def axes(self) -> tuple[int, ...]:
        """The tensor's dimensions as the map numbers them, innermost first."""
        if not self.tensor.shape:
            return ()
        first = [self.inner] if self.rows is None else [self.inner, self.rows]
        rest = [d for d in reversed(range(len(self.tensor.shape))) if d not in first]
        return (*first, *rest)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the map; of the tensor's own where the map has no such type."""
        return getattr(self.element, "width", 0) // 8 or self.tensor.itemsize

    @property
    def swizzle(self) -> Swizzle:
        """The one given, else the widest whose span divides a row of the tile."""
        if self.given_swizzle is not None:
            return self.given_swizzle
        row = self.tile[1] * self.element_bytes if self.tile else 0
        return widest(row) if row > 0 and row % CHUNK == 0 else NONE

    @property
    def box(self) -> tuple[int, ...]:
        """Elements that one instruction moves along each of the tensor's dimensions."""
        if self.given_box is not None:
            return self.given_box
        box = [1] * len(self.tensor.shape)
        rows, cols = self.tile or (1, 1)
        row = cols * self.element_bytes
        if box:
            whole = row <= 0 or row % CHUNK  # no row of a tile: its own rule says so
            span = max(row, 0) if whole else widest(row).span
            box[self.inner] = min(cols, span // self.element_bytes)
        if self.rows is not None:
            box[self.rows] = _share(rows)
        return tuple(box)

    @property
    def map(self) -> TensorMap:
        """The tensor map; an address that is not known counts as 0."""
        axes, box = self.axes, self.box
        steps = self.steps or (1,) * len(axes)
        return TensorMap(
            self.element,
            self.tensor.address or 0,
            tuple(self.tensor.shape[d] for d in axes),
            tuple(self.tensor.strides[d] for d in axes[1:]),
            tuple(box[d] for d in axes),
            tuple(steps[d] for d in axes),
            swizzle=self.swizzle,
            **self.modes,
        )

    def rules(self) -> list[Rule]:
        """The rules of the tensor, of the tile and of the map, each with its value and verdict."""
        of_map = self.map.rules()
        if self.tensor.address is None:
            of_map = [
                replace(r, value="not known, taken as aligned") if r.name.startswith("addr") else r
                for r in of_map
            ]
        return [*self._of_tensor(), *(self._of_tile() if self.tile else ()), *of_map]

    @property
    def legal(self) -> bool:
        """Whether every rule holds."""
        return all(rule.ok for rule in self.rules())

    def _of_tensor(self) -> list[Rule]:
        tensor, size = self.tensor, self.tensor.itemsize
        rules = []
        if tensor.shape:
            stride, count = tensor.strides[self.inner], tensor.shape[self.inner]
            rules = [
                Rule(
                    "contiguous dimension",
                    f"{stride} bytes between elements of the tensor's dimension {self.inner}",
                    f"{size} bytes, the size of an element: a map has no stride for dimension 0",
                    stride == size or count <= 1,
                    "copy it, or put the contiguous dimension innermost",
                    "instruction",
                )
            ]
        width = getattr(self.element, "width", 8 * size)
        return [
            *rules,
            Rule(
                "element size",
                f"{8 * size} bits in memory ({tensor.kind}), {width} in the map",
                "the same size; TMA moves bits and converts nothing",
                width == 8 * size,
                "convert the tensor, or give the tile the tensor's type",
                "instruction",
            ),
            Rule(
                "memory as it lies",
                f"the library {tensor.lazy} what it reads" if tensor.lazy else "read as it lies",
                "elements that a read does not change: the copy engine moves them as they lie",
                not tensor.lazy,
                "resolve it into memory of its own",
                "instruction",
            ),
        ]

    def _of_tile(self) -> list[Rule]:
        rows, cols = self.tile
        row = cols * self.element_bytes
        rank = len(self.tensor.shape)
        return [
            Rule(
                "tile dimensions",
                f"{rank} dimensions of the tensor",
                "2 or more: rows and columns of the tile",
                rank >= 2,
                "add a dimension of size 1",
                "instruction",
            ),
            Rule(
                "tile rows",
                str(rows),
                f"a positive multiple of {ATOM_ROWS}, the rows of a swizzle atom",
                rows > 0 and rows % ATOM_ROWS == 0,
                f"use {max(ATOM_ROWS, round_up(rows, ATOM_ROWS))}",
                "instruction",
            ),
            Rule(
                "tile columns",
                f"{cols} elements of {self.element_bytes} bytes = {row} bytes",
                f"a positive multiple of {CHUNK} bytes",
                row > 0 and row % CHUNK == 0,
                f"use {max(CHUNK, round_up(row, CHUNK)) // self.element_bytes} columns",
                "instruction",
            ),
            Rule(
                "tile bytes",
                f"{rows * row} bytes",
                f"at most {SMEM_CAPACITY}, the shared memory of a block",
                rows * row <= SMEM_CAPACITY,
                "use fewer rows",
                "instruction",
            ),
        ]


def _share(rows: int) -> int:
    """Rows of each box of a tile: at most 256, and all boxes alike."""
    if rows < 1:
        return rows
    split = -(-rows // 256)
    while rows % split:
        split += 1
    return rows // split


def bind(
    tensor: object,
    tile: Tile | tuple | None = None,
    *,
    box: tuple[int, ...] | None = None,
    swizzle: Swizzle | str | None = None,
    rows: int | None = None,
    element_strides: tuple[int, ...] | None = None,
    **modes: str,
) -> Binding:
    """A tile or a box on a tensor; the arguments are those of `explain`.

    Raises: LayoutError for arguments that do not go together, naming what is needed.
    """
    unknown = sorted(set(modes) - set(MODES))
    if unknown:
        raise LayoutError(f"{', '.join(unknown)}: no field of a map; there are {', '.join(MODES)}")
    if isinstance(tensor, TensorMap):
        if tile is not None or box is not None:
            raise LayoutError("a TensorMap has its box: give no tile and no box with it")
        return _of_map(tensor)
    geometry = geometry_of(tensor)
    if (tile is None) == (box is None):
        raise LayoutError(
            "give one of both: a tile, e.g. Tile(128, 64, cutlass.BFloat16), or a box"
        )
    rank = len(geometry.shape)
    for name, values in (("box", box), ("element_strides", element_strides)):
        if values is not None and len(values) != rank:
            raise LayoutError(
                f"{name} {tuple(values)} has {len(values)} entries, the tensor {rank} dimensions: "
                "one each is needed, in the tensor's order"
            )
    common = {
        "given_swizzle": _swizzle(swizzle),
        "steps": None if element_strides is None else tuple(element_strides),
        "modes": modes,
    }
    if tile is None:
        inner = _contiguous(geometry)
        given = Binding(geometry, geometry.dtype, inner, given_box=tuple(box), **common)
        # Without a swizzle given, a box has none.
        return settled(replace(given, given_swizzle=given.given_swizzle or NONE))
    size = (tile.rows, tile.cols, tile.dtype) if hasattr(tile, "rows") else tuple(tile)
    if len(size) not in (2, 3):
        raise LayoutError(f"tile = {tile!r}: a Tile, (rows, cols) or (rows, cols, dtype) is needed")
    return settled(
        Binding(
            geometry,
            size[2] if len(size) == 3 else geometry.dtype,
            max(rank - 1, 0),
            _rows(rows, rank),
            size[:2],
            typed=len(size) == 3,
            **common,
        )
    )


def _swizzle(given: Swizzle | str | None) -> Swizzle | None:
    if not isinstance(given, str):
        return given
    found = next((s for s in SWIZZLES if s.name == given), None)
    if found is None:
        raise LayoutError(f"swizzle = {given!r}: choose one of {', '.join(map(str, SWIZZLES))}")
    return found


def _rows(given: int | None, rank: int) -> int | None:
    """The dimension that a tile's rows run along: (batch, seqlen, heads, head_dim) has it at 1."""
    if rank < 2:
        return None
    if given is None:
        return 0 if rank == 2 else 1
    if not -rank <= given < rank or given % rank == rank - 1:
        raise LayoutError(
            f"rows = {given}: a dimension from 0 to {rank - 2} is needed; the tile's columns run "
            f"along the last, {rank - 1}"
        )
    return given % rank


def _contiguous(tensor: Geometry) -> int:
    """The dimension whose elements lie side by side, the last of these; else the last of all."""
    pairs = enumerate(zip(tensor.shape, tensor.strides, strict=True))
    found = [d for d, (size, stride) in pairs if size > 1 and stride == tensor.itemsize]
    return found[-1] if found else max(len(tensor.shape) - 1, 0)


def _of_map(tmap: TensorMap) -> Binding:
    """A binding whose map is this one again."""
    lengths = {len(tmap.shape), len(tmap.strides) + 1, len(tmap.box), len(tmap.steps)}
    if len(lengths) > 1 and tmap.shape:
        tmap.check()  # the rule called "lengths" says which
    tensor = Geometry(
        tmap.shape[::-1],
        (*tmap.strides[::-1], tmap.element_bytes)[-len(tmap.shape) :] if tmap.shape else (),
        tmap.dtype,
        tmap.address,
        tmap.element_bytes or 1,
    )
    modes = {name: getattr(tmap, name) for name in MODES}
    return Binding(
        tensor,
        tmap.dtype,
        max(tmap.rank - 1, 0),
        given_box=tmap.box[::-1],
        given_swizzle=tmap.swizzle,
        steps=tmap.steps[::-1],
        modes=modes,
    )


def settled(binding: Binding) -> Binding:
    """The same with a legal stride wherever a dimension has one element: it is never followed."""
    tensor = binding.tensor
    if not tensor.shape:
        return binding
    row = min(round_up(tensor.shape[binding.inner] * tensor.itemsize, CHUNK), 2**39)
    strides = list(tensor.strides)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True)):
        if dim == binding.inner and size == 1:
            strides[dim] = tensor.itemsize
        elif size == 1 and (stride % CHUNK or not 0 <= stride < 2**40):
            strides[dim] = row
    return replace(binding, tensor=replace(tensor, strides=tuple(strides)))


def round_up(value: int, multiple: int) -> int:
    """The next multiple from a value on."""
    return -(-value // multiple) * multiple
