"""From a finished accumulator to O and LSE in global memory, by shared memory or directly.

    store    O goes                                                       needs
    tma      registers -> stmatrix -> shared memory -> one TMA a strip    a tile o, barrier strip
    direct   registers -> traded within four lanes -> 16 bytes a lane     nothing

Rows that a hidden value has spoilt (exact.py) are computed again where they were written.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines.roles import WARP

from .exact import chosen, lost_where, suspect
from .operands import head_of


def not_before(value: Int32) -> Int32:
    """The same value, so that what hangs on it is computed here, not held since long before."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


class Repairs:
    """Mixed into a kernel that has `schedule` and `again(io, w, row)`."""

    @cute.jit
    def repair(self, io, w, places, rows, first, spoilt, lse, thread):
        """Compute rows again that a hidden value has spoilt; a warp wrote its own rows.

        `rows` is where they lie, row `first` of the sequence and its successors.
        """
        any_row = spoilt[0]
        for r in cutlass.range_constexpr(1, len(spoilt)):
            any_row = any_row | spoilt[r]
        if cute.arch.vote_any_sync(any_row):
            cute.arch.sync_warp()
            for r in cutlass.range(len(spoilt), unroll=1):
                inside = places.row + chosen(places.row_offsets, r)
                row = w.m_block * self.schedule.tile_m + inside
                if chosen(spoilt, r) and row < w.elements.seqlen_q * self.schedule.pack:
                    out = rows[row - first, None]
                    of_row = None if lse is None else chosen(lse, r)
                    self.again(io, w, row).row(out, row, of_row, thread)


class Epilogue(Repairs):
    """What `ForwardSm90.consumer` does after its last key tile.

    Mixed into a kernel that has `schedule`, `plan`, `strip`, `barriers`, `aliases` and `repairs`.
    """

    @cute.jit
    def epilogue(self, io, smem, w, f, softmax, thread):
        """O and LSE to global memory; each warpgroup stores its own 64 rows."""
        s, places = self.schedule, f.places
        if cutlass.const_expr(s.pack > 1):  # rows are also queries then: registers hold one of them
            thread = not_before(thread)
            places = wgmma.places(f.qk, s.tile_m, s.tile_n, thread)
        suspected = suspect(f.output) if self.repairs else False
        lse = softmax.finish(f.output)
        spoilt = lost_where(suspected, f.output, lse) if self.repairs else []
        w.elements.finish(f.output, lse, w.m_block * s.queries, f.queries)
        if cutlass.const_expr(s.store == "tma"):
            self.store_through_smem(io, smem, w, f, places, spoilt, lse, thread)
        else:
            self.store_directly(io, w, f, places)
            if cutlass.const_expr(self.repairs):
                o = io.o[1][None, None, w.head, w.batch]
                self.repair(io, w, places, o, 0, spoilt, lse, thread)
        if cutlass.const_expr(lse is not None):
            lse_row = io.lse[None, w.head, w.batch]
            for r in cutlass.range_constexpr(len(lse)):
                row = w.m_block * s.tile_m + places.row + places.row_offsets[r]
                if thread % 4 == 0 and row < cute.size(io.lse, mode=[0]):
                    lse_row[row] = lse[r]

    @cute.jit
    def store_through_smem(self, io, smem, w, f, places, spoilt, lse, thread):
        """Each warpgroup's rows of O to shared memory, from there by TMA."""
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        aliased, persistent = "o" in self.aliases, self.schedule.persistent
        waits = aliased or not persistent  # else the store is waited for before the next one
        if cutlass.const_expr(not waits):
            if thread % wgmma.WARPGROUP < WARP:
                self.stored()
        if cutlass.const_expr(aliased or persistent):
            self.barriers["strip", group].arrive_and_wait()
        rows = cute.local_tile(smem.o, (self.strip.rows, self.strip.cols), (group, 0))
        wgmma.to_smem(f.acc_o, rows, f.pv_strip, thread % wgmma.WARPGROUP)
        if cutlass.const_expr(self.repairs):
            first = w.m_block * self.schedule.tile_m + group * wgmma.ROWS
            self.repair(io, w, places, rows, first, spoilt, lse, thread)
        cute.arch.fence_view_async_shared()
        self.barriers["strip", group].arrive_and_wait()
        if thread % wgmma.WARPGROUP < WARP:
            target = head_of(io.o, w.head, w.batch)
            block = w.m_block * self.schedule.consumers + group
            self.store(self.strip, target, rows, (block, 0), wait=waits)

    @cute.jit
    def store_directly(self, io, w, f, places):
        """O from registers, 16 bytes a lane; rows and columns outside the tensor are left out."""
        o = io.o[1][None, None, w.head, w.batch]
        whole = self.head_dim_v == self.plan.problem.head_dim_v
        lane = cute.arch.lane_idx() % 4
        for r in cutlass.range_constexpr(len(places.row_offsets)):
            vectors = wgmma.row_vectors(f.output[r, None], self.dtype)
            row = w.m_block * self.schedule.tile_m + places.row + places.row_offsets[r]
            if row < cute.size(o, mode=[0]):
                for n in cutlass.range_constexpr(len(vectors)):
                    chunk = 4 * n + lane
                    if whole or 8 * chunk < o.shape[1]:
                        target = cute.local_tile(o, (1, 8), (row, chunk))
                        cute.autovec_copy(vectors[n], target[0, None])
