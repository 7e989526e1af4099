"""Warp MMA (mma.sync, SM80 on): operands by ldmatrix, and two views of an accumulator.

One warp multiplies 16 rows by 8 columns at a time, m16n8k16; both operands come from its registers,
which `ldmatrix` fills from shared memory, four 8 x 8 matrices an instruction. `warps` warps stack
along the rows of a tile, and all of them read all of B.

What a thread holds of a 16 x 8 accumulator, by lane (source: PTX ISA, matrix fragments of
mma.m16n8k16): rows lane/4 and lane/4 + 8, in both the columns 2*(lane % 4) + {0, 1}. That is the
share of a warp in an accumulator of WGMMA too (wgmma.py), so the lanes of a row are the same.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp

from . import wgmma
from .tile import transposed

ROWS = 16  # rows of one instruction, all of one warp
COLS = 8  # columns of one instruction
DEPTH = 16  # columns of A that one instruction sums over
ROWS_HELD = 2  # rows of an instruction that one thread holds
MATRICES = 4  # of 8 x 8, that one ldmatrix loads


def tiled_mma(dtype: type, warps: int) -> cute.TiledMma:
    """An mma.sync of (16 * warps) x 16 x 16, fp32 accumulator.

    16 columns, two instructions, because that is what one ldmatrix of four matrices brings of B.
    """
    op = warp.MmaF16BF16Op(dtype, Float32, (ROWS, COLS, DEPTH))
    return cute.make_tiled_mma(op, (warps, 1, 1), permutation_mnk=(ROWS * warps, 2 * COLS, DEPTH))


def accumulator(mma: cute.TiledMma, rows: int, cols: int) -> cute.Tensor:
    """Registers of one thread's share of a rows x cols accumulator, all 0."""
    acc = cute.make_rmem_tensor(mma.partition_shape_C((rows, cols)), Float32)
    acc.fill(0.0)
    return acc


class Operand:
    """One thread's fragment of A or B, and the ldmatrix instructions that fill it from a tile.

    Shape: `fragment` (instruction, rows, k steps); a k step is 16 columns of the product's depth.
    """

    def __init__(self, copy: cute.TiledCopy, source: cute.Tensor, fragment: cute.Tensor) -> None:
        self.copy, self.source = copy, source
        self.fragment, self.filled = fragment, copy.retile(fragment)

    @property
    def steps(self) -> int:
        """K steps of the whole tile."""
        return cute.size(self.fragment, mode=[2])

    @property
    def parts(self) -> int:
        """How many ldmatrix instructions fill a k step."""
        return cute.size(self.source, mode=[1])

    def load(self, k: int, stage: int | cute.Int32, part: int | None = None) -> None:
        """Fill one k step, or one `part` of it, from a slot of the tile."""
        cute.copy(self.copy, self.source[None, part, k, stage], self.filled[None, part, k])


def operand_a(mma: cute.TiledMma, smem: cute.Tensor, thread: cute.Int32) -> Operand:
    """A from a tile (rows, k, stages)."""
    copy = cute.make_tiled_copy_A(_ldmatrix(smem, transpose=False), mma)
    share = mma.get_slice(thread).partition_A(smem[None, None, 0])
    fragment = mma.make_fragment_A(share)
    return Operand(copy, copy.get_slice(thread).partition_S(smem), fragment)


def operand_b(
    mma: cute.TiledMma, smem: cute.Tensor, thread: cute.Int32, *, k_first: bool = False
) -> Operand:
    """B from a tile (n, k, stages), or with `k_first` (k, n, stages), which is read transposed."""
    copy = cute.make_tiled_copy_B(_ldmatrix(smem, transpose=k_first), mma)
    tile = transposed(smem) if k_first else smem
    share = mma.get_slice(thread).partition_B(tile[None, None, 0])
    fragment = mma.make_fragment_B(share)
    return Operand(copy, copy.get_slice(thread).partition_S(tile), fragment)


def _ldmatrix(smem: cute.Tensor, *, transpose: bool) -> cute.CopyAtom:
    op = warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=MATRICES)
    return cute.make_copy_atom(op, smem.element_type)


def multiply(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: Operand,
    k: int,
    part: int | None = None,
) -> None:
    """acc += a @ b for one k step, or for one `part` of its columns; a as a fragment of A."""
    fragment = b.fragment
    if part is not None:
        width = cute.size(fragment, mode=[1]) // b.parts
        acc = cute.logical_divide(acc, (None, None, width))[None, None, (None, part)]
        fragment = cute.logical_divide(fragment, (None, width, None))[None, (None, part), None]
    cute.gemm(mma, acc, a[None, None, k], fragment[None, None, k], acc)


def as_rows_cols(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as (rows, cols) of what this thread holds: ((2, M), (2, N/8))."""
    (pair, half), m, n = acc.layout.shape
    (s_pair, s_half), s_m, s_n = acc.layout.stride
    layout = cute.make_layout(((half, m), (pair, n)), stride=((s_half, s_m), (s_pair, s_n)))
    return cute.make_tensor(acc.iterator, layout)


def as_operand(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator's registers as the A operand of a second product: 16 columns a k step."""
    (pair, half), m, n = acc.layout.shape
    (s_pair, s_half), s_m, s_n = acc.layout.stride
    layout = cute.make_layout(
        ((pair, half, 2), m, n // 2), stride=((s_pair, s_half, s_n), s_m, 2 * s_n)
    )
    return cute.make_tensor(acc.iterator, layout)


def places(mma: cute.TiledMma, rows: int, cols: int, thread: cute.Int32) -> wgmma.Places:
    """The places of `thread`'s share of a rows x cols accumulator."""
    return wgmma.places(mma, rows, cols, thread, as_rows_cols)


def stmatrix(mma: cute.TiledMma, dtype: type) -> cute.TiledCopy:
    """The copy of an accumulator, rounded to `dtype`, to shared memory."""
    op = warp.StMatrix8x8x16bOp(transpose=False, num_matrices=MATRICES)
    return cute.make_tiled_copy_C(cute.make_copy_atom(op, dtype), mma)


def to_smem(acc: cute.Tensor, smem: cute.Tensor, mma: cute.TiledMma, thread: cute.Int32) -> None:
    """Round an accumulator to the tile's type and write this thread's share with stmatrix.

    The caller synchronises before others read the tile, and fences before TMA does.
    """
    copy = stmatrix(mma, smem.element_type)
    rounded = cute.make_rmem_tensor(acc.layout, smem.element_type)
    rounded.store(acc.load().to(smem.element_type))
    cute.copy(copy, copy.retile(rounded), copy.get_slice(thread).partition_D(smem))


def instructions(rows: int, n: int, k: int, warps: int) -> tuple[str, int]:
    """The SASS mnemonic prefix of an rows x n x k product and how often one warp issues it."""
    return "HMMA.16816.F32", rows // (ROWS * warps) * (n // COLS) * (k // DEPTH)


def loads_of_a(rows: int, k: int, warps: int) -> int:
    """ldmatrix instructions that bring A of an rows x k tile to one warp."""
    return rows // (ROWS * warps) * (k // DEPTH)


def loads_of_b(n: int, k: int) -> int:
    """ldmatrix instructions that bring B of an n x k product to one warp."""
    return n // (2 * COLS) * (k // DEPTH)
