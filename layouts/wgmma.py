"""Warpgroup MMA (SM90): tiled operands, issue, and two views of an accumulator.

One warpgroup (4 warps) multiplies 64 rows; `warpgroups` of them stack along the rows of a tile. B
always comes from shared memory, A from shared memory (SS) or from registers (RS).

What a thread holds of a 64 x N accumulator, by lane and register pair (source: PTX ISA, wgmma
matrix fragments): rows lane/4 and lane/4 + 8 of its warp's 16 rows; in both, columns
2*(lane % 4) + {0, 1} of every group of 8. `as_rows_cols` is that fact as a layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.utils import sm90 as sm90_utils

from .errors import LayoutError

ROWS = 64  # rows of one warpgroup's instruction
WARPGROUP = 128  # threads
ROW_LANES = (1, 2)  # butterfly distances of the lanes that hold a row together
ROWS_HELD = 2  # rows of an instruction that one thread holds
DEPTH = 16  # 16-bit columns of A that an instruction multiplies
MAX_N = 256


def tiled_mma(
    dtype: type,
    n: int,
    warpgroups: int,
    *,
    a_from: Literal["smem", "registers"] = "smem",
    a_major: Literal["k", "m"] = "k",
    b_major: Literal["k", "n"] = "k",
    beside: int = 1,
) -> cute.TiledMma:
    """A WGMMA of (64 * warpgroups) x (n * beside) x 16, fp32 accumulator.

    `beside` rows of warpgroups lie side by side along n. `b_major`: "k" when the tile of B has its
    rows along n, "n" for a transposed view; `a_major` likewise, "m" from shared memory only.

    Raises:
        LayoutError: n outside 8..256 or not a multiple of 8; an unknown source or major mode.
    """
    if n % 8 or not 8 <= n <= MAX_N:
        nearest = min(MAX_N, max(8, (n + 4) // 8 * 8))
        raise LayoutError(f"WGMMA n = {n}: a multiple of 8 from 8 to {MAX_N}; use {nearest}")
    sources = {"smem": warpgroup.OperandSource.SMEM, "registers": warpgroup.OperandSource.RMEM}
    majors = {"k": OperandMajorMode.K, "n": OperandMajorMode.MN}
    rows_major = {"k": OperandMajorMode.K, "m": OperandMajorMode.MN}
    for what, given, known in (
        ("a_from", a_from, sources),
        ("a_major", a_major, rows_major),
        ("b_major", b_major, majors),
    ):
        if given not in known:
            raise LayoutError(f"WGMMA {what} = {given!r}: one of {', '.join(known)} is needed")
    return sm90_utils.make_trivial_tiled_mma(
        dtype,
        dtype,
        rows_major[a_major],
        majors[b_major],
        Float32,
        (warpgroups, beside, 1),
        (ROWS, n),
        sources[a_from],
    )


def operands_of(mma: cute.TiledMma, group: cute.Int32) -> cute.ThrMma:
    """The slice of an MMA with which warpgroup `group` partitions what it reads of shared memory.

    That is the same for all of its threads. Where the compiler knows so, `group` being uniform,
    descriptors stay in uniform registers; else each is moved there before its instruction, which
    then waits.
    """
    return mma.get_slice(group * WARPGROUP)


def accumulator(mma: cute.TiledMma, rows: int, cols: int) -> cute.Tensor:
    """Registers of one thread's share of a rows x cols accumulator."""
    return cute.make_rmem_tensor(mma.partition_shape_C((rows, cols)), Float32)


def issue(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    *,
    accumulate: bool,
    steps: int | None = None,
) -> None:
    """Issue acc (+)= a @ b as one committed group; nothing waits.

    `steps`: only so many instructions of DEPTH columns of a, from the first.
    The caller orders register operands with `warpgroup.fence()` before, and `wait_group` after.
    """
    atom = cute.make_mma_atom(mma.op)  # local: state set on the caller's atom would escape a loop
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a, mode=[2]) if steps is None else steps):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def as_rows_cols(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as (rows, cols) of what this thread holds: ((2, M), (2, N/8, blocks))."""
    (pair, half, group), m, n = acc.layout.shape
    (s_pair, s_half, s_group), s_m, s_n = acc.layout.stride
    layout = cute.make_layout(
        ((half, m), (pair, group, n)), stride=((s_half, s_m), (s_pair, s_group, s_n))
    )
    return cute.make_tensor(acc.iterator, layout)


@dataclass(frozen=True)
class Places:
    """Where a thread's accumulator elements lie in the tile: a first element plus static offsets.

    Kept apart so that a loop carries two registers, not one per column.
    """

    row: cute.Int32
    col: cute.Int32
    row_offsets: tuple[int, ...]
    col_offsets: tuple[int, ...]


def places(
    mma: cute.TiledMma,
    rows: int,
    cols: int,
    thread: cute.Int32,
    view: Callable[[cute.Tensor], cute.Tensor] = as_rows_cols,
) -> Places:
    """The places of `thread`'s share of a rows x cols accumulator, `view` of it as (rows, cols)."""
    tile = cute.make_identity_tensor((rows, cols))
    mine = view(mma.get_slice(thread).partition_C(tile))
    static = view(mma.get_slice(0).partition_C(tile))  # thread 0 starts at (0, 0)
    held = [cute.size(static, mode=[i]) for i in range(2)]
    return Places(
        mine[0, 0][0],
        mine[0, 0][1],
        tuple(static[r, 0][0] for r in range(held[0])),
        tuple(static[0, c][1] for c in range(held[1])),
    )


def as_operand(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator's registers as the A operand of a second MMA: 16 columns a k step."""
    (pair, half, group), m, n = acc.layout.shape
    (s_pair, s_half, s_group), s_m, s_n = acc.layout.stride
    layout = cute.make_layout(
        ((pair, half, 2), m, (group // 2, n)),
        stride=((s_pair, s_half, s_group), s_m, (2 * s_group, s_n)),
    )
    return cute.make_tensor(acc.iterator, layout)


def to_smem(
    acc: cute.Tensor,
    smem: cute.Tensor,
    mma: cute.TiledMma,
    thread: cute.Int32,
    *,
    transpose: bool = False,
) -> None:
    """Round an accumulator to the tile's type, if need be, and write this thread's share.

    `transpose`: the tile's columns are contiguous, as of `layouts.transposed` of one with rows.
    The caller fences the async proxy and synchronises before a TMA store reads the tile.
    """
    op = warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4)
    atom = cute.make_copy_atom(op, smem.element_type)
    copy = cute.make_tiled_copy_C(atom, mma)
    rounded = acc
    if acc.element_type is not smem.element_type:
        rounded = cute.make_rmem_tensor(acc.layout, smem.element_type)
        rounded.store(acc.load().to(smem.element_type))
    cute.copy(atom, copy.retile(rounded), copy.get_slice(thread).partition_D(smem))


def row_vectors(values: cute.Tensor, dtype: type) -> list[cute.Tensor]:
    """One row of an accumulator in `dtype`, as neighbours that can be stored at once.

    The four lanes of a row hold two columns of every 8; they trade, so that lane i of them gets all
    of columns 32 * n + 8 * i on in the n-th vector. All lanes of a warp take part.

    Shape: values (cols,) of this thread, a row of `as_rows_cols`, a multiple of 8 of them; each
    vector (8,).
    """
    lane = cute.arch.lane_idx() % 4
    rounded = cute.make_rmem_tensor(cute.size(values), dtype)
    rounded.store(values.load().to(dtype))
    words = cute.recast_tensor(rounded, cute.Int32)
    vectors = []
    for first in range(0, cute.size(words), 4):
        mine = [words[first + n] for n in range(4)]
        for distance in ROW_LANES:
            upper = (lane & distance) != 0
            for a in (n for n in range(4) if not n & distance):
                _trade(mine, a, a + distance, distance, upper)
        vector = cute.make_rmem_tensor(8, dtype)
        four = cute.recast_tensor(vector, cute.Int32)
        for n in range(4):
            four[n] = mine[n]
        vectors.append(vector)
    return vectors


def _trade(words: list, a: int, b: int, distance: int, upper: cutlass.Boolean) -> None:
    """Transpose words a and b with those of the lane `distance` away."""
    given = cute.Int32(cutlass.select_(upper, words[a], words[b]))
    got = cute.arch.shuffle_sync_bfly(given, offset=distance)
    words[a] = cute.Int32(cutlass.select_(upper, got, words[a]))
    words[b] = cute.Int32(cutlass.select_(upper, words[b], got))


def instructions(rows: int, n: int, k: int, warpgroups: int) -> tuple[str, int]:
    """The SASS mnemonic prefix of an rows x n x k product and how often one warpgroup issues it."""
    return f"HGMMA.{ROWS}x{n}x{DEPTH}", (rows // (ROWS * warpgroups)) * (k // DEPTH)
