"""UMMA (SM100, tcgen05): the tensor cores read both operands from shared memory, write TMEM.

One thread issues a product; the accumulator lies in tensor memory (tmem.py), where a warp reads the
32 lanes of its place in its warpgroup. Operands are ordinary `Tile`s: a K-major tile with its
widest swizzle is one of the layouts that UMMA's shared-memory descriptors describe, so what TMA
writes for WGMMA serves here unchanged.

What a thread gets from `to_smem`'s load: the row of its lane, all of a chunk's columns. Eight
neighbouring threads then store 16 bytes each of eight rows, which the swizzle spreads over all
banks.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import sm100 as sm100_utils

from .errors import LayoutError
from .tmem import TMEM_LANES, Accumulator

ROWS = TMEM_LANES  # rows of one CTA's instruction
STEP_K = 16  # depth of an instruction on 16-bit operands
MAX_N = 256
MAX_CHUNK = 32  # columns that a thread loads at a time: as many registers


def tiled_mma(dtype: type, n: int, *, b_major: str = "k") -> cute.TiledMma:
    """A UMMA of 128 x n x 16 by one CTA, operands in shared memory, fp32 accumulator.

    `b_major`: "k" when the tile of B has its rows along n, "n" for a transposed view.

    Raises:
        LayoutError: n outside 16..256 or not a multiple of 16.
    """
    if n % 16 or not 16 <= n <= MAX_N:
        raise LayoutError(
            f"UMMA n = {n}: with {ROWS} rows a multiple of 16 from 16 to {MAX_N} is needed; "
            f"use {min(MAX_N, max(16, round(n / 16) * 16))}"
        )
    return sm100_utils.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.K if b_major == "k" else OperandMajorMode.MN,
        Float32,
        tcgen05.CtaGroup.ONE,
        (ROWS, n),
    )


def accumulator(
    mma: cute.TiledMma, shape: Accumulator, address: cute.Pointer, stages: int = 1
) -> cute.Tensor:
    """The accumulator in tensor memory at `address`: (instruction, rows, cols, stage)."""
    whole = cute.append(mma.partition_shape_C((shape.rows, shape.cols)), stages)
    return cute.make_tensor(address, mma.make_fragment_C(whole).layout)


def issue(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    *,
    accumulate: bool | cute.Boolean,
) -> None:
    """Issue acc (+)= a @ b, from one warp; nothing waits, a ring's release or commit signals."""
    atom = cute.make_mma_atom(mma.op)  # local: state set on the caller's atom would escape a loop
    atom.set(tcgen05.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(tcgen05.Field.ACCUMULATE, True)


def to_smem(acc: cute.Tensor, smem: cute.Tensor, thread: cute.Int32) -> None:
    """Round an accumulator (instruction, rows, cols) to the tile's type and write it to the tile.

    By the 128 threads of a warpgroup; returns when their loads are done. The caller fences the
    async proxy and synchronises before a TMA store reads the tile.
    """
    width = chunk_columns(cute.size(smem, mode=[1]))
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), Float32)
    chunk = (ROWS, width)
    for block in range(cute.size(acc, mode=[1])):
        columns = cute.flat_divide(acc[(None, None), block, 0], chunk)[None, None, 0, None]
        rows = cute.flat_divide(smem, chunk)[None, None, block, None]
        load = tcgen05.make_tmem_copy(atom, columns[None, None, 0]).get_slice(thread)
        source, target = load.partition_S(columns), load.partition_D(rows)
        for part in range(cute.size(source, mode=[3])):
            held = cute.make_rmem_tensor(target[None, None, None, part].shape, Float32)
            cute.copy(atom, source[None, None, None, part], held)
            cute.arch.fence_view_async_tmem_load()
            rounded = cute.make_rmem_tensor(held.shape, smem.element_type)
            rounded.store(held.load().to(smem.element_type))
            cute.autovec_copy(rounded, target[None, None, None, part])


def chunk_columns(cols: int) -> int:
    """Columns of one load from tensor memory: a power of two that divides the row."""
    return math.gcd(cols, MAX_CHUNK)


def instructions(rows: int, k: int) -> tuple[str, int]:
    """The SASS mnemonic of a product of 16-bit operands and how often it is issued."""
    return "UTCHMMA", (rows // ROWS) * (k // STEP_K)


def loads(shape: Accumulator) -> tuple[str, int]:
    """The SASS mnemonic of `to_smem`'s loads from tensor memory and how many there are."""
    return "LDTM", shape.columns // chunk_columns(shape.cols)
