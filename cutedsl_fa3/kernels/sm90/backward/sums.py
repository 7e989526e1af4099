"""The order in which fp32 sums of dQ lie in memory: that of the registers that made them.

A tile of dQ is `consumers` strips, one a warpgroup; in a strip the n-th four registers of thread t
are the vector n * 128 + t. So a warp writes 512 contiguous bytes at once, and no bank twice; the
kernel that finishes dQ has the same accumulator and reads it the same way.

    strip     rows of 32 words
    0         threads 0-7, first four registers
    ...
    16        threads 0-7, second four registers
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutedsl_fa3.layouts import Tile, wgmma

from .schedule import WORDS, BackwardSchedule

WORD_BYTES = 4
VECTOR = 4  # words that a thread moves at once
ROW_VECTORS = WORDS // VECTOR
ROWS_AT_ONCE = wgmma.WARPGROUP // ROW_VECTORS


def strip(s: BackwardSchedule, d: int) -> Tile:
    """One warpgroup's part of a tile of dQ."""
    from cutlass import Float32

    return Tile(s.tile_m * d // (s.consumers * WORDS), WORDS, Float32, plain=True)


def whole(s: BackwardSchedule, d: int) -> Tile:
    """A tile of dQ: a strip for each warpgroup."""
    from cutlass import Float32

    return Tile(s.tile_m * d // WORDS, WORDS, Float32, plain=True)


def write(acc: cute.Tensor, strip: cute.Tensor, thread: Int32) -> None:
    """A thread's share of dQ to its warpgroup's strip; `thread` counts within the warpgroup."""
    row, col = thread // ROW_VECTORS, thread % ROW_VECTORS
    for n in range(cute.size(acc) // VECTOR):
        source = cute.make_tensor(acc.iterator + n * VECTOR, cute.make_layout(VECTOR))
        target = cute.local_tile(strip, (1, VECTOR), (row + n * ROWS_AT_ONCE, col))
        cute.autovec_copy(source, target[0, None])


def read(strip: cute.Tensor, acc: cute.Tensor, thread: Int32) -> None:
    """The inverse of `write`, from global memory."""
    row, col = thread // ROW_VECTORS, thread % ROW_VECTORS
    for n in range(cute.size(acc) // VECTOR):
        source = cute.local_tile(strip, (1, VECTOR), (row + n * ROWS_AT_ONCE, col))
        target = cute.make_tensor(acc.iterator + n * VECTOR, cute.make_layout(VECTOR))
        cute.autovec_copy(source[0, None], target)


def add(acc: cute.Tensor, sums: cute.Tensor, strip: Int32, thread: Int32) -> None:
    """Add a thread's share of dQ to strip number `strip` of all, four sums an instruction."""
    words = cute.size(acc) * wgmma.WARPGROUP
    first = sums.iterator.toint() + (Int64(strip) * words + thread * VECTOR) * WORD_BYTES
    step = wgmma.WARPGROUP * VECTOR * WORD_BYTES
    for n in range(cute.size(acc) // VECTOR):
        cute.arch.inline_ptx(
            "red.relaxed.gpu.global.v4.f32.add [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[first + n * step, *(acc[n * VECTOR + i] for i in range(VECTOR))],
        )
