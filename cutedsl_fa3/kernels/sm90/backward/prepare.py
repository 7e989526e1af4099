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

from cutedsl_fa3.variant.lower import LOG2_E, minimum, select

from .schedule import WORDS, BackwardSchedule
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
        corner = block * self.tile_m
        natural = self.of_rows(None if lse is None else lse[None, head, batch], corner, thread)
        products = self.products(
            o[None, None, head, batch], do[None, None, head, batch],
            corner + thread // self.sharing, thread % self.sharing,
        )  # fmt: skip
        for n in cutlass.range_constexpr(len(natural)):
            row = corner + thread + n * THREADS
            if thread + n * THREADS < self.tile_m:
                found = Float32(Float32.inf)
                if cutlass.const_expr(lse is not None):
                    empty = (natural[n] == -Float32.inf) | (row >= o.shape[0])
                    found = select(empty, Float32(Float32.inf), natural[n] * LOG2_E)
                lse_log2[row, head, batch] = found
        if thread % self.sharing == 0:
            for n in cutlass.range_constexpr(len(products)):
                row = corner + thread // self.sharing + n * (THREADS // self.sharing)
                total = products[n]
                if cutlass.const_expr(lse is None):  # weights: dS = f' * dP
                    total = Float32(0.0)
                elif cutlass.const_expr(dlse is not None):
                    if row < o.shape[0]:
                        total = total - Float32(dlse[row, head, batch])
                delta[row, head, batch] = total

    def of_rows(self, t: cute.Tensor | None, corner: Int32, thread: Int32) -> list:
        """A number of each row that this thread has, from the last row where there is no such."""
        rows = range(0, self.tile_m, THREADS)
        if t is None:
            return [None for _ in rows]
        return [Float32(t[minimum(corner + thread + n, t.shape[0] - 1)]) for n in rows]

    def products(self, o: cute.Tensor, do: cute.Tensor, first: Int32, chunk: Int32) -> list:
        """The sums of O * dO over rows `first` and on, as many as this thread has a part of.

        All are read before any is summed, from the last row or chunk where there is no such row or
        chunk: so no read waits for another, or for a branch.
        """
        rows = range(0, self.tile_m, THREADS // self.sharing)
        last_row, chunks = o.shape[0] - 1, self.dv // AT_ONCE
        read = []
        for n in rows:
            at = (minimum(first + n, last_row), minimum(chunk, Int32(chunks - 1)))
            read.append([self.part(t, *at) for t in (o, do)])
        found = []
        for n, (of_o, of_do) in zip(rows, read, strict=True):
            total = Float32(0.0)
            for e in range(AT_ONCE):
                total = cute.math.fma(of_o[e].to(Float32), of_do[e].to(Float32), total)
            inside = (first + n <= last_row) & (chunk < chunks)
            total = select(inside, total, Float32(0.0))
            distance = self.sharing // 2
            while distance > 0:
                total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
                distance //= 2
            found.append(total)
        return found

    def part(self, t: cute.Tensor, row: Int32, chunk: Int32) -> cute.Tensor:
        """A thread's part of a row."""
        part = cute.make_rmem_tensor(AT_ONCE, t.element_type)
        cute.autovec_copy(cute.local_tile(t, (1, AT_ONCE), (row, chunk))[0, None], part)
        return part

    def clear(self, sums: cute.Tensor, block: Int32, thread: Int32) -> None:
        """Zeros in one tile of dQ's sums."""
        zeros = cute.make_rmem_tensor(VECTOR, Float32)
        zeros.fill(0.0)
        vectors = WORDS // VECTOR
        mine = cute.local_tile(sums, (self.sums.rows, WORDS), (block, 0))
        for first in range(0, self.sums.rows * vectors, THREADS):
            at = ((first + thread) // vectors, thread % vectors)
            cute.autovec_copy(zeros, cute.local_tile(mine, (1, VECTOR), at)[0, None])
