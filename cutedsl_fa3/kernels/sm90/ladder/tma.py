"""Steps 2 and 3: TMA brings the tiles, first to warps that use mma.sync, then to WGMMA.

One warp, which multiplies like all others, issues each copy `stages` - 1 tiles ahead; the copy
engine computes addresses, swizzles, and fills rows past a sequence's end with zeros. Rings take the
place of groups and barriers:

    ring    carries        filled by     emptied by, one arrival a warp
    q       Q, one slot    TMA bytes     never: a CTA has one tile of queries
    k, v    `stages`       TMA bytes     when the product with it is complete

    warp 0 loads K(j + stages - 1) | wait K(j) | S = Q K^T | softmax
    warp 0 loads V(j + stages - 1) | wait V(j) | O += P V

A load waits until all warps have released the slot: here all of them, warp 0 too, run at the pace
of the slowest. Step 3 is step 2 with other fragments: WGMMA reads Q, K and V from shared memory, so
ldmatrix is gone, and a warpgroup multiplies 64 rows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines import Expect, Ring, ScheduleError
from cutedsl_fa3.pipelines.roles import WARP

from ..operands import head_of
from .alike import Alike
from .fragments import BySync, ByWarpgroup

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan


class Tma(Alike):
    """The forward by TMA, its warps alike; a subclass says what multiplies."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        ends = {"producer": "one of them", "consumer": "all"}
        self.rings = {
            "q": Ring(("q",), 1, **ends),
            "k": Ring(("k",), plan.schedule.stages, **ends),
            "v": Ring(("v",), plan.schedule.stages, **ends),
        }

    def products(self) -> tuple[Expect, ...]:
        """What the products promise about the machine code."""
        raise NotImplementedError

    def expected(self) -> tuple[Expect, ...]:
        """What tiles, rings and warps promise about the machine code."""
        sites = (self.schedule.stages - 1) + self.loops
        loads = {"q": 1, "k": sites, "v": sites}
        common = self.common_expectations(loads, {"o": self.tiles["o"]}, rank=4)
        return (*common, Expect("LDGSTS", "none", 0, "TMA copies"), *self.products())

    # Traced from here on.

    def fragments(self, smem: SimpleNamespace, thread: Int32) -> BySync | ByWarpgroup:
        """This thread's operands and accumulators."""
        raise NotImplementedError

    def atoms(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor) -> tuple:
        """The TMA atoms of q, k, v and o, each with its tensor of coordinates."""
        loads = (self.tiles[name].load_atom(t) for name, t in (("q", q), ("k", k), ("v", v)))
        return (*map(tuple, loads), tuple(self.tiles["o"].store_atom(o)))

    @cute.jit
    def attend(self, io, smem, ends, thread):
        """Attend to the visible tiles, those that need the element mask first, and store O."""
        w = self.work(io)
        f = self.fragments(smem, thread)
        softmax = w.elements.softmax(len(f.places.row_offsets))
        load_q, load_k, load_v = (
            self.load("q", head_of(io.tma[0], w.head, w.batch), smem.q, col=0),
            self.load("k", head_of(io.tma[1], w.kv_head, w.batch), smem.k, col=0),
            self.load("v", head_of(io.tma[2], w.kv_head, w.batch), smem.v, col=0),
        )
        loads, first = (load_k, load_v), cute.arch.make_warp_uniform(thread // WARP) == 0
        fill_q, ring_q = ends["q"]
        fill_k, ring_k = ends["k"]
        fill_v, ring_v = ends["v"]
        partial, total = w.runs.n_partial, w.runs.n_total
        if total > 0:
            if first:
                slot = fill_q.acquire_and_advance()
                load_q(w.m_block, slot)
                slot.commit()
            for ahead in cutlass.range_constexpr(self.schedule.stages - 1):
                fill_k = self.fetch(w, load_k, fill_k, ahead, first)
                fill_v = self.fetch(w, load_v, fill_v, ahead, first)
            ring_q.wait_and_advance()
        for j in cutlass.range(0, partial, unroll=1):
            fill_k, fill_v, ring_k, ring_v = self.step(
                w, f, softmax, loads, first, (fill_k, fill_v, ring_k, ring_v), j, True
            )
        if cutlass.const_expr(self.ever_full):
            for j in cutlass.range(partial, total, unroll=1):
                fill_k, fill_v, ring_k, ring_v = self.step(
                    w, f, softmax, loads, first, (fill_k, fill_v, ring_k, ring_v), j, False
                )
        self.finish(io, smem, w, f, softmax, thread)

    @cute.jit
    def step(self, w, f, softmax, loads, first, rings, j, masked: cutlass.Constexpr):
        """S, softmax and O of the j-th tile; returns the ends of the rings."""
        fill_k, fill_v, ring_k, ring_v = rings
        load_k, load_v = loads
        n_block, ahead = w.runs.n_block(j), j + self.schedule.stages - 1
        fill_k = self.fetch(w, load_k, fill_k, ahead, first)
        slot_k = ring_k.wait_and_advance()
        acc_s = f.multiply_qk(slot_k)
        cute.arch.sync_warp()  # all lanes have read K
        slot_k.release()
        scores = f.rows_cols(acc_s)
        self.modify(w, f, scores, n_block, masked)
        softmax.step(scores)
        f.round_p(acc_s)
        softmax.rescale(f.output)
        fill_v = self.fetch(w, load_v, fill_v, ahead, first)
        slot_v = ring_v.wait_and_advance()
        f.multiply_pv(slot_v)
        cute.arch.sync_warp()  # all lanes have read V
        slot_v.release()
        return fill_k, fill_v, ring_k, ring_v

    @cute.jit
    def fetch(self, w, load, ring, j, first):
        """Load K or V of the j-th tile, if there is one, by the first warp."""
        if first and j < w.runs.n_total:
            slot = ring.acquire_and_advance()
            load(w.runs.n_block(j), slot)
            slot.commit()
        return ring

    @cute.jit
    def store_o(self, io, smem, w, thread):
        """O from shared to global memory by TMA, by one warp."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(thread // WARP) == 0:
            target = head_of(io.tma[3], w.head, w.batch)
            self.store(self.tiles["o"], target, smem.o, (w.m_block, 0))


class TmaSync(Tma):
    """Step 2: the products are still those of mma.sync."""

    name = "ladder_tma"

    def products(self) -> tuple[Expect, ...]:
        """As in step 1."""
        return self.sync_products()

    def fragments(self, smem: SimpleNamespace, thread: Int32) -> BySync:
        """This thread's operands and accumulators."""
        return BySync(self.schedule, self.dtype, self.head_dim_v, smem, thread, in_parts=True)


class TmaWgmma(Tma):
    """Step 3: the products are those of WGMMA, by warpgroups of 64 rows."""

    name = "ladder_wgmma"

    def check(self) -> None:
        """Raises: ScheduleError, LayoutError."""
        s = self.schedule
        if s.tile_m != wgmma.ROWS * s.consumers:
            raise ScheduleError(
                f"tile_m = {s.tile_m} with consumers = {s.consumers}: each warpgroup has "
                f"{wgmma.ROWS} rows; use tile_m={wgmma.ROWS * s.consumers}"
            )
        super().check()

    def products(self) -> tuple[Expect, ...]:
        """QK and PV once in each place."""
        s, (d, dv) = self.schedule, self.plan.problem.tile_dims
        qk_name, qk = wgmma.instructions(s.tile_m, s.tile_n, d, s.consumers)
        pv_name, pv = wgmma.instructions(s.tile_m, dv, s.tile_n, s.consumers)
        counts = {qk_name: self.loops * qk}
        counts[pv_name] = counts.get(pv_name, 0) + self.loops * pv
        why = f"QK and PV, in {self.loops} places"
        return (
            *(Expect(name, "exactly", count, why) for name, count in counts.items()),
            Expect("LDSM", "none", 0, "WGMMA reads shared memory"),
            self.exponentials(wgmma.ROWS_HELD),
        )

    def fragments(self, smem: SimpleNamespace, thread: Int32) -> ByWarpgroup:
        """This thread's operands and accumulators."""
        return ByWarpgroup(self.schedule, self.dtype, self.head_dim_v, smem, thread)
