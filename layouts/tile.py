"""A tile: the unit that is copied, stored in shared memory and multiplied.

`Tile(rows, cols, dtype)` fixes everything about how a rows x cols block lies in shared memory: the
widest swizzle whose span divides a row, the boxes that TMA copies it in, its bytes, and its CuTe
layouts. A tile is stored with its columns contiguous; `transposed` views the same bytes with the
axes exchanged, which is how V serves as the second operand of P @ V.

            cols (contiguous)
         +--------+--------+      each box is one swizzle span wide (64 bf16 for 128B) and at most
    rows |  box 0 |  box 1 |      256 rows tall: one TMA instruction, one `complete_tx`
         +--------+--------+
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

from .errors import LayoutError
from .swizzle import NONE, Swizzle, widest
from .tma import TensorMap

MAX_BOX = 256  # elements of a box along any dimension; source: cuTensorMapEncodeTiled
ALIGN = 1024  # bytes of the widest swizzle's atom, at whose multiples a tile begins
ATOM_ROWS = 8  # rows of one swizzle atom; source: PTX ISA, shared-memory matrix layouts

COPY_BYTES = 16  # what a bulk copy moves a multiple of; source: PTX ISA, cp.async.bulk

_K_MAJOR_ATOM = {
    128: SmemLayoutAtomKind.K_SW128,
    64: SmemLayoutAtomKind.K_SW64,
    32: SmemLayoutAtomKind.K_SW32,
    16: SmemLayoutAtomKind.K_INTER,
}


@dataclass(frozen=True)
class Tile:
    """A rows x cols block of `dtype`, columns contiguous, swizzled by its row length.

    `pieces`: products take its columns in so many equal pieces, so that each begins with a swizzle
    span. `plain`: rows lie one after the other without a swizzle, which threads that write whole
    rows do not need; no product reads such a tile.

    Raises:
        LayoutError: rows not a multiple of 8, a row that no swizzle span divides, a dtype that is
        not one of cutlass, or a plain tile in pieces or wider than a box.
    """

    rows: int
    cols: int
    dtype: type
    pieces: int = 1
    plain: bool = False

    align: ClassVar[int] = ALIGN

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % ATOM_ROWS:
            raise LayoutError(
                f"tile rows = {self.rows}: a swizzle atom has {ATOM_ROWS} rows; "
                f"use {max(ATOM_ROWS, -(-self.rows // ATOM_ROWS) * ATOM_ROWS)}"
            )
        if getattr(self.dtype, "width", None) is None:
            raise LayoutError(
                f"tile dtype = {self.dtype!r}: a cutlass type is needed, e.g. cutlass.BFloat16"
            )
        if self.cols % self.pieces:
            raise LayoutError(
                f"tile pieces = {self.pieces}: a number that divides the {self.cols} columns is "
                "needed"
            )
        widest(self.row_bytes // self.pieces)
        if self.plain and (self.pieces > 1 or self.cols > MAX_BOX):
            raise LayoutError(
                f"plain tile of {self.cols} columns in {self.pieces} pieces: TMA lays rows one "
                f"after the other where a box holds them: 1 piece and at most {MAX_BOX} columns"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.cols * self.dtype.width // 8

    @property
    def bytes(self) -> int:
        """Bytes of the tile: what one stage occupies and what its copies add to the mbarrier."""
        return self.rows * self.row_bytes

    @property
    def swizzle(self) -> Swizzle:
        """The widest swizzle whose span divides a row, or each of its pieces; none where plain."""
        return NONE if self.plain else widest(self.row_bytes // self.pieces)

    @property
    def box(self) -> tuple[int, int]:
        """Elements (cols, rows) that one TMA instruction copies, innermost first."""
        split = -(-self.rows // MAX_BOX)
        while self.rows % split:
            split += 1
        span = self.row_bytes if self.plain else self.swizzle.span
        return min(self.cols, span * 8 // self.dtype.width), self.rows // split

    @property
    def copies(self) -> int:
        """TMA instructions that fill the tile."""
        cols, rows = self.box
        return (self.cols // cols) * (self.rows // rows)

    def holds_rows_of(self, other: Tile) -> bool:
        """Whether each row of `other` at the same address lies within this tile's same row.

        Boxes are as wide as the swizzle, so equal swizzles and heights put equal rows together.
        """
        same = (self.rows, self.swizzle) == (other.rows, other.swizzle)
        return same and self.row_bytes >= other.row_bytes

    def tensor_map(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], **fields: object
    ) -> TensorMap:
        """The TMA descriptor that binds this tile to a tensor in global memory.

        Shape:
            shape: elements, innermost (contiguous) dimension first; the tile spans dimensions
            0 (cols) and 1 (rows). strides: bytes, of dimensions 1 and up.
        """
        cols, rows = self.box
        box = (cols, rows) + (1,) * (len(shape) - 2)
        return TensorMap(
            self.dtype, address, tuple(shape), tuple(strides), box, swizzle=self.swizzle, **fields
        )

    # What follows needs an MLIR context: a kernel being traced, or `host_cute()`.

    def layout(self, stages: int | None = None) -> cute.ComposedLayout | cute.Layout:
        """Shared-memory layout (rows, cols[, stages]), swizzled unless plain."""
        if self.plain:
            shape = (self.rows, self.cols) if stages is None else (self.rows, self.cols, stages)
            return cute.make_ordered_layout(shape, order=(1, 0, 2)[: len(shape)])
        atom = make_smem_layout_atom(_K_MAJOR_ATOM[self.swizzle.span], self.dtype)
        if stages is None:
            return cute.tile_to_shape(atom, (self.rows, self.cols), order=(0, 1))
        return cute.tile_to_shape(atom, (self.rows, self.cols, stages), order=(0, 1, 2))

    def tensor(self, base: cute.Pointer, stages: int | None = None) -> cute.Tensor:
        """The tile's tensor (rows, cols[, stages]) at a shared-memory byte address."""
        layout = self.layout(stages)
        if self.plain:
            return cute.make_tensor(cute.recast_ptr(base, dtype=self.dtype), layout)
        pointer = cute.recast_ptr(base, layout.inner, dtype=self.dtype)
        return cute.make_tensor(pointer, layout.outer)

    def load_atom(self, gmem: cute.Tensor, multicast: int = 1) -> cpasync.TmaInfo:
        """TMA load of this tile from `gmem` (rows, cols, ...), to be made in the host function.

        With `multicast` = n each of n CTAs copies rows/n and writes them into all n.
        """
        op = (
            cpasync.CopyBulkTensorTileG2SOp()
            if multicast == 1
            else cpasync.CopyBulkTensorTileG2SMulticastOp()
        )
        return cpasync.make_tiled_tma_atom(
            op, gmem, self.layout(), (self.rows, self.cols), num_multicast=multicast
        )

    def store_atom(self, gmem: cute.Tensor) -> cpasync.TmaInfo:
        """TMA store of this tile to `gmem` (rows, cols, ...); rows past its end are not written."""
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), gmem, self.layout(), (self.rows, self.cols)
        )

    def add_atom(self, gmem: cute.Tensor) -> cpasync.TmaInfo:
        """TMA store that adds this tile to what `gmem` (rows, cols, ...) holds, in L2."""
        op = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        return cpasync.make_tiled_tma_atom(op, gmem, self.layout(), (self.rows, self.cols))

    def blocks(
        self,
        atom: cute.CopyAtom,
        gmem: cute.Tensor,
        smem: cute.Tensor,
        part: int | cute.Int32 = 0,
        parts: int = 1,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Both sides of the copy, cut into tiles: (gmem[:, row block, col block], smem[:, stage]).

        Shape:
            gmem: the atom's (rows, cols) coordinate tensor; smem: (rows, cols[, stages]).
            `part` of `parts`: the share of a multicast load that this CTA issues.
        """
        tiled = cute.local_tile(gmem, (self.rows, self.cols), (None, None))
        to_smem, from_gmem = cpasync.tma_partition(
            atom,
            part,
            cute.make_layout(parts),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(tiled, 0, 2),
        )
        return from_gmem, to_smem

    def __str__(self) -> str:
        return (
            f"{self.rows} x {self.cols} {self.dtype.__name__}, {self.bytes} B, "
            f"{self.swizzle.name} swizzle, {self.copies} TMA boxes of {self.box[1]} x {self.box[0]}"
        )


@dataclass(frozen=True)
class Row:
    """`length` contiguous elements of `dtype` in shared memory: what belongs to a tile's rows.

    One bulk copy fills it from contiguous memory, without a tensor map.

    Raises:
        LayoutError: bytes that are no multiple of 16, which a bulk copy moves.
    """

    length: int
    dtype: type

    align: ClassVar[int] = COPY_BYTES

    def __post_init__(self) -> None:
        if self.length < 1 or self.bytes % COPY_BYTES:
            raise LayoutError(
                f"row of {self.length} elements, {self.bytes} B: a bulk copy moves multiples of "
                f"{COPY_BYTES} B"
            )

    @property
    def bytes(self) -> int:
        """Bytes of one stage."""
        return self.length * self.dtype.width // 8

    def tensor(self, base: cute.Pointer, stages: int | None = None) -> cute.Tensor:
        """The row's tensor (length[, stages]) at a shared-memory byte address."""
        shape = self.length if stages is None else (self.length, stages)
        return cute.make_tensor(cute.recast_ptr(base, dtype=self.dtype), cute.make_layout(shape))

    def load(self, source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer) -> None:
        """Copy a row by one thread of a warp; the bytes count at the mbarrier.

        Shape: source, target (length,).
        """
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.dtype)
        with cute.arch.elect_one():
            cute.copy(atom, source, target, mbar_ptr=barrier)

    def __str__(self) -> str:
        return f"{self.length} {self.dtype.__name__}, {self.bytes} B, one bulk copy"


def transposed(smem: cute.Tensor) -> cute.Tensor:
    """The same bytes with rows and columns exchanged: (rows, cols, ...) -> (cols, rows, ...)."""
    order = [1, 0, *range(2, cute.rank(smem))]
    return cute.make_tensor(smem.iterator, cute.select(smem.layout, mode=order))
