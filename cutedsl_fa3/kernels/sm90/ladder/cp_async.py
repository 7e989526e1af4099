"""Step 1: FlashAttention-2's style. cp.async into swizzled shared memory, ldmatrix, mma.sync.

Every thread computes addresses and copies 16 bytes at a time, K and V of `stages` - 1 tiles ahead;
rows past a sequence's end are filled with zeros by the copy (a source of 0 bytes). Copies are
counted in groups, one for each K and each V in turn, so that what a product needs has arrived when
all but the newest 2 * stages - 3 groups have:

    wait K(j) | barrier | copy K(j + stages - 1) | S = Q K^T | softmax
    wait V(j) | barrier | copy V(j + stages - 1) | O += P V

The barrier shows all threads what each has copied. It also says that all are done with tile j - 1,
whose slot is filled next.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import CopyUniversalOp, LoadCacheMode, cpasync
from cutlass.memory import SmemAllocator

from cutedsl_fa3.layouts import Buffer, SmemPlan, Tile
from cutedsl_fa3.pipelines import Expect, ScheduleError

from .alike import Alike
from .fragments import BySync

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan

CHUNK = 16  # bytes that one thread copies at a time


class Slot(NamedTuple):
    """A place of K or V in shared memory."""

    index: Int32


class CpAsync(Alike):
    """The forward by cp.async and mma.sync."""

    name = "ladder_cp_async"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.depths = {"q": 1, "k": plan.schedule.stages, "v": plan.schedule.stages, "o": 1}
        self.pending = 2 * plan.schedule.stages - 3

    @property
    def smem(self) -> SmemPlan:
        """The tiles and nothing else: groups of copies need no mbarriers."""
        return SmemPlan(
            tuple(
                Buffer(name, tile.bytes, stages=self.depths[name], alias=self.aliases.get(name))
                for name, tile in self.tiles.items()
            )
        )

    def check(self) -> None:
        """Raises: ScheduleError, LayoutError."""
        stages = self.schedule.stages
        if stages < 2:
            raise ScheduleError(f"stages = {stages}: copies run a tile ahead, 2 or more")
        super().check()

    def chunks(self, name: str) -> int:
        """Copies of a tile that one thread issues."""
        return self.tiles[name].bytes // (CHUNK * self.threads)

    def expected(self) -> tuple[Expect, ...]:
        """What tiles and warps promise about the machine code."""
        ahead, places = self.schedule.stages - 1, self.loops
        copies = self.chunks("q") + (ahead + places) * (self.chunks("k") + self.chunks("v"))
        why = f"Q, {ahead} tiles ahead, and one in each of {places} places"
        return (
            *self.common_expectations({}, {}, rank=4),
            Expect("LDGSTS.E.BYPASS.128", "exactly", copies, why),
            *self.sync_products(),
        )

    # Traced from here on.

    def open_storage(self) -> tuple[SimpleNamespace, None]:
        """A tensor per tile at its planned offset."""
        plan = self.smem
        base = SmemAllocator().allocate(plan.total, byte_alignment=1024)
        stages = {name: None if name == "o" else depth for name, depth in self.depths.items()}
        tensors = {
            name: tile.tensor(base + plan.offset(name), stages[name])
            for name, tile in self.tiles.items()
        }
        return SimpleNamespace(**tensors), None

    def open_rings(self, mbarriers: None) -> dict:
        """None: all threads wait for all copies at a barrier."""
        return {}

    @cute.jit
    def attend(self, io, smem, ends, thread):
        """Attend to the visible tiles, those that need the element mask first, and store O."""
        w = self.work(io)
        f = BySync(self.schedule, self.dtype, self.head_dim_v, smem, thread)
        softmax = w.elements.softmax(len(f.places.row_offsets))
        copy_q = self.copies("q", io.q[None, None, w.head, w.batch], smem.q, thread)
        copy_k = self.copies("k", io.k[None, None, w.kv_head, w.batch], smem.k, thread)
        copy_v = self.copies("v", io.v[None, None, w.kv_head, w.batch], smem.v, thread)
        copies, total = (copy_k, copy_v), w.runs.n_total
        if total > 0:
            copy_q(w.m_block, 0)
        for ahead in cutlass.range_constexpr(self.schedule.stages - 1):
            self.fetch(w, copy_k, ahead)
            self.fetch(w, copy_v, ahead)
        for j in cutlass.range(0, w.runs.n_partial, unroll=1):
            self.step(w, f, softmax, copies, j, True)
        if cutlass.const_expr(self.ever_full):
            for j in cutlass.range(w.runs.n_partial, total, unroll=1):
                self.step(w, f, softmax, copies, j, False)
        self.finish(io, smem, w, f, softmax, thread)

    @cute.jit
    def step(self, w, f, softmax, copies, j, masked: cutlass.Constexpr):
        """S, softmax and O of the j-th tile."""
        s = self.schedule
        copy_k, copy_v = copies
        n_block, slot = w.runs.n_block(j), Slot(j % s.stages)
        cute.arch.cp_async_wait_group(self.pending)
        cute.arch.sync_threads()
        self.fetch(w, copy_k, j + s.stages - 1)
        acc_s = f.multiply_qk(slot)
        scores = f.rows_cols(acc_s)
        self.modify(w, f, scores, n_block, masked)
        softmax.step(scores)
        f.round_p(acc_s)
        softmax.rescale(f.output)
        cute.arch.cp_async_wait_group(self.pending)
        cute.arch.sync_threads()
        self.fetch(w, copy_v, j + s.stages - 1)
        f.multiply_pv(slot)

    @cute.jit
    def fetch(self, w, copy, j):
        """Copy K or V of the j-th tile, if there is one, as one group; without it one is empty."""
        if j < w.runs.n_total:
            copy(w.runs.n_block(j), j % self.schedule.stages)
        cute.arch.cp_async_commit_group()

    def copies(self, name: str, gmem: cute.Tensor, smem: cute.Tensor, thread: Int32) -> Callable:
        """A function copy(block, stage) that copies this thread's chunks of one tile.

        Shape: gmem (seqlen, cols), smem (rows, cols, stages).
        """
        tile = self.tiles[name]
        op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL)
        tiled = self.by_chunks(tile, op)
        mine = tiled.get_slice(thread)
        target = mine.partition_D(smem)
        first, offsets = self.rows_copied(tiled, tile, thread)
        across = cute.size(target, mode=[2])

        def copy(block: int | Int32, stage: int | Int32) -> None:
            source = mine.partition_S(cute.local_tile(gmem, (tile.rows, tile.cols), (block, 0)))
            left = gmem.shape[0] - block * tile.rows - first  # rows from this thread's first on
            layout = cute.make_layout((1, len(offsets), across), stride=(0, 1, 0))
            inside = cute.make_rmem_tensor(layout, Boolean)
            for r, offset in enumerate(offsets):
                inside[0, r, 0] = left > offset
            cute.copy(tiled, source, target[None, None, None, stage], pred=inside)

        return copy

    def by_chunks(self, tile: Tile, op: object) -> cute.TiledCopy:
        """All threads along a tile's rows, a chunk each: neighbours copy neighbours."""
        elements = 8 * CHUNK // tile.dtype.width
        across = min(tile.box[0], tile.cols) // elements
        atom = cute.make_copy_atom(op, tile.dtype, num_bits_per_copy=8 * CHUNK)
        threads = cute.make_layout((self.threads // across, across), stride=(across, 1))
        return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, elements)))

    def rows_copied(
        self, tiled: cute.TiledCopy, tile: Tile, thread: Int32
    ) -> tuple[Int32, tuple[int, ...]]:
        """The first row of a tile that `thread` copies from, and the others counted from it."""
        where = cute.make_identity_tensor((tile.rows, tile.cols))
        mine, static = (tiled.get_slice(t).partition_S(where) for t in (thread, 0))
        return mine[0, 0, 0][0], tuple(
            static[0, r, 0][0] for r in range(cute.size(static, mode=[1]))
        )

    @cute.jit
    def store_o(self, io, smem, w, thread):
        """O from shared to global memory, 16 bytes at a time; rows past the end are not written."""
        cute.arch.sync_threads()
        tile, seqlen_q = self.tiles["o"], io.o.shape[0]
        tiled = self.by_chunks(tile, CopyUniversalOp())
        mine = tiled.get_slice(thread)
        source = mine.partition_S(smem.o)
        target = mine.partition_D(
            cute.local_tile(
                io.o[None, None, w.head, w.batch], (tile.rows, tile.cols), (w.m_block, 0)
            )
        )
        first, offsets = self.rows_copied(tiled, tile, thread)
        left = seqlen_q - w.m_block * tile.rows - first
        for r in cutlass.range_constexpr(len(offsets)):
            if left > offsets[r]:
                cute.copy(tiled, source[None, r, None], target[None, r, None])
