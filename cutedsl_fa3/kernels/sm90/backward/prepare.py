"""What the backward needs of each row, and zeros where it sums dQ, counts turns and raises flags.

    delta    = sum over d of dO * O, less the gradient of LSE
    lse_log2 = LSE * log2(e); +inf for rows that see nothing or lie past the sequence, so that
               their probabilities are exactly 0

A CTA has a tile of queries of one head; some neighbouring threads share a row.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutedsl_fa3.variant.lower import LOG2_E, select

from .operands import WORDS
from .schedule import BackwardSchedule
from .sums import VECTOR, whole

THREADS = 128
AT_ONCE = 8  # elements of a row that a thread reads at once


class Prepare:
    """The pass over O and dO, for tiles of one schedule and head sizes.

    A kernel whose `host` calls `launch` names `rows` as an attribute of its class.
    """

    def __init__(self, s: BackwardSchedule, dims: tuple[int, int], dv: int) -> None:
        self.tile_m, self.dv = s.tile_m, dv
        self.sums = whole(s, dims[0])
        self.sharing = 1  # threads of a row
        while self.sharing * AT_ONCE < dims[1]:
            self.sharing *= 2

    def launch(self, o, do, lse, dlse, lse_log2, delta, sums, turns, flags, stream) -> None:
        """o, do (seqlen, dim, heads, batch); lse, dlse (seqlen, heads, batch); others padded."""
        rows, heads, batches = delta.shape
        blocks = rows // self.tile_m
        self.rows(o, do, lse, dlse, lse_log2, delta, sums, turns, flags).launch(
            grid=(blocks * heads * batches, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def rows(self, o, do, lse, dlse, lse_log2, delta, sums, turns, flags):
        """One tile of queries."""
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        rows, heads, _ = delta.shape
        blocks = rows // self.tile_m
        head_of_all = index // blocks
        batch = head_of_all // heads
        head, block = head_of_all - batch * heads, index - head_of_all * blocks
        self.clear(sums, index, thread)
        step = THREADS * blocks * heads * delta.shape[2]
        for at in cutlass.range(index * THREADS + thread, flags.shape[0], step, unroll=1):
            flags[at] = Int32(0)
        if cutlass.const_expr(turns is not None):
            if thread == 0:
                turns[block, head, batch] = Int32(0)
        o_head, do_head = o[None, None, head, batch], do[None, None, head, batch]
        at_once = THREADS // self.sharing
        chunk = thread % self.sharing
        for first in cutlass.range(0, self.tile_m, at_once, unroll_full=True):
            row = block * self.tile_m + first + thread // self.sharing
            inside = row < o.shape[0]
            total = Float32(0.0)
            if inside and chunk * AT_ONCE < self.dv:
                total = self.product(o_head, do_head, row, chunk)
            distance = self.sharing // 2
            while cutlass.const_expr(distance > 0):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
                distance = distance // 2
            if chunk == 0:
                found = Float32(Float32.inf)
                if cutlass.const_expr(lse is None):  # weights: dS = f' * dP
                    total = Float32(0.0)
                elif inside:
                    natural = Float32(lse[row, head, batch])
                    empty = natural == -Float32.inf
                    found = select(empty, Float32(Float32.inf), natural * LOG2_E)
                    if cutlass.const_expr(dlse is not None):
                        total = total - Float32(dlse[row, head, batch])
                lse_log2[row, head, batch] = found
                delta[row, head, batch] = total

    def product(self, o: cute.Tensor, do: cute.Tensor, row: Int32, chunk: Int32) -> Float32:
        """The sum of O * dO over this thread's part of a row."""
        parts = []
        for t in (o, do):
            part = cute.make_rmem_tensor(AT_ONCE, t.element_type)
            cute.autovec_copy(cute.local_tile(t, (1, AT_ONCE), (row, chunk))[0, None], part)
            parts.append(part.load().to(Float32))
        total = Float32(0.0)
        for n in range(AT_ONCE):
            total = cute.math.fma(parts[0][n], parts[1][n], total)
        return total

    def clear(self, sums: cute.Tensor, block: Int32, thread: Int32) -> None:
        """Zeros in one tile of dQ's sums."""
        zeros = cute.make_rmem_tensor(VECTOR, Float32)
        zeros.fill(0.0)
        vectors = WORDS // VECTOR
        mine = cute.local_tile(sums, (self.sums.rows, WORDS), (block, 0))
        for first in range(0, self.sums.rows * vectors, THREADS):
            at = ((first + thread) // vectors, thread % vectors)
            cute.autovec_copy(zeros, cute.local_tile(mine, (1, VECTOR), at)[0, None])
