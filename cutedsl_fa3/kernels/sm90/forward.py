"""The attention forward on SM90.

    role        does                                                              rings
    producer    Q once, then the visible K and V tiles, by TMA                 -> q, k, v
    consumer    S = Q K^T -> score -> mask -> online softmax -> O += P V       <- q, k, v
                then O / row_sum -> shared memory -> TMA store

    ring    carries        filled by     emptied by, one arrival a warp
    q       Q, one slot    TMA bytes     never: a CTA has one tile of queries
    k       K, stages      TMA bytes     when its S is complete
    v       V, stages      TMA bytes     when its product with P is complete

    barrier    threads    says
    strip      128        a warpgroup is done with its rows of Q; then, its rows of O are written
    turn       256        with pingpong: the warpgroup before has issued, the next may

Shared memory holds q, k and v, and o, which takes the place of q where their sizes are the same.

A CTA serves tile_m queries of one head; each consumer warpgroup has 64 of them. Which key tiles are
visited, and which of those need no element mask, is found in the mask (variant/bounds.py): every
role computes the same runs of tiles from the same few integers, so all take the same turns. Tiles
that need the element mask come first, in a loop of their own.

Overlap, one consumer's view of step j (MMAs are issued, then run while the warpgroup goes on):

    none      QK(j) | softmax(j) | PV(j)
    intra     QK(j+1), PV(j) running under softmax(j+1)
    pingpong  warpgroups take turns to issue, so that one multiplies while another exponentiates

Where a change goes: another score or mask is a Variant and needs no kernel code; what happens to an
element between the two products is elements.py and softmax.py; another operand is a tile, a ring
that carries it, and two lines in the roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cutedsl_fa3.layouts import Tile, wgmma
from cutedsl_fa3.pipelines import (
    TMA_BUDGETS,
    Barrier,
    Barriers,
    Expect,
    Ring,
    Role,
    ScheduleError,
    TileOrder,
    Turns,
    WarpSpecialized,
)
from cutedsl_fa3.pipelines.roles import WARP
from cutedsl_fa3.variant.bounds import Runs
from cutedsl_fa3.variant.describe import ever_full

from .elements import Elements
from .operands import Fragments, Io, fake_args, head_of, heads_last
from .softmax import OnlineSoftmax

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan


@dataclass(frozen=True)
class Work:
    """One CTA's share: a tile of queries of one head, and the key tiles to visit."""

    m_block: Int32
    head: Int32
    batch: Int32
    kv_head: Int32
    elements: Elements
    runs: Runs


class ForwardSm90(WarpSpecialized):
    """Tables and roles of the forward for one plan."""

    arch = "sm_90a"
    name = "forward_sm90"

    def __init__(self, plan: Plan) -> None:
        s, problem = plan.schedule, plan.problem
        dtype, d, dv = problem.element, problem.head_dim, problem.head_dim_v
        self.plan, self.schedule, self.dtype, self.head_dim_v = plan, s, dtype, dv
        self.tiles = {
            "q": Tile(s.tile_m, d, dtype),
            "k": Tile(s.tile_n, d, dtype),
            "v": Tile(s.tile_n, dv, dtype),
            "o": Tile(s.tile_m, dv, dtype),
        }
        self.strip = Tile(wgmma.ROWS, dv, dtype)  # the rows of O that one warpgroup stores
        if d == dv:  # otherwise a warpgroup's rows of O would lie on another's rows of Q
            self.aliases = {"o": "q"}
        self.rings = {
            "q": Ring(("q",), 1),
            "k": Ring(("k",), s.stages),
            "v": Ring(("v",), s.stages),
        }
        producer, consumer = TMA_BUDGETS[s.consumers]
        self.roles = {
            "producer": Role(warps=4, registers=producer),
            "consumer": Role(warps=4 * s.consumers, registers=consumer),
        }
        table = {"strip": Barrier(wgmma.WARPGROUP, copies=s.consumers)}
        if s.pingpong:
            table["turn"] = Barrier(2 * wgmma.WARPGROUP, copies=s.consumers)
        self.barriers = Barriers(table)
        self.order = TileOrder(s.head_group)
        self.ever_full = ever_full(plan.variant.mask)

    @property
    def key_text(self) -> str:
        """Everything that affects the code."""
        return self.plan.key_text

    def check(self) -> None:
        """Besides the tables: what this kernel's roles take for granted.

        Raises: ScheduleError, LayoutError.
        """
        s = self.schedule
        if s.tile_m != wgmma.ROWS * s.consumers:
            raise ScheduleError(
                f"tile_m = {s.tile_m} with consumers = {s.consumers}: the forward gives each "
                f"consumer warpgroup {wgmma.ROWS} rows; use tile_m={wgmma.ROWS * s.consumers}"
            )
        if s.cluster != (1, 1):
            raise ScheduleError(
                f"cluster = {s.cluster}: the forward's CTAs visit key tiles of their own and share "
                "none; use (1, 1)"
            )
        super().check()

    def expected(self) -> tuple[Expect, ...]:
        """What the tables promise about the machine code.

        The loop over tiles with an element mask is a place for both products, so is the loop over
        those without, if the mask can have any; with overlap inside a warpgroup, the first S and
        the last P V stand outside both.
        """
        s, dv = self.schedule, self.head_dim_v
        places = 1 + int(self.ever_full) + int(s.intra)
        qk_name, qk = wgmma.instructions(s.tile_m, s.tile_n, self.tiles["q"].cols, s.consumers)
        pv_name, pv = wgmma.instructions(s.tile_m, dv, s.tile_n, s.consumers)
        products = {qk_name: places * qk}
        products[pv_name] = products.get(pv_name, 0) + places * pv
        rows = wgmma.ROWS_HELD  # that one thread holds, and cols of each
        cols = wgmma.ROWS * s.tile_n // (wgmma.WARPGROUP * rows)
        return (
            *self.common_expectations({"q": 1, "k": 1, "v": 1}, {"o": self.strip}, rank=4),
            *(
                Expect(name, "exactly", count, f"QK and PV, in {places} places")
                for name, count in products.items()
            ),
            Expect(
                "MUFU.EX2",
                "at least",
                places * rows * (cols + 1),
                "an exponential a score, and one a row to rescale",
            ),
        )

    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `host`: any lengths, heads, batch and strides."""
        captures = Elements.fake_captures(self.plan.variant) or None
        return fake_args(self.dtype, self.tiles["q"].cols, self.head_dim_v, captures)

    @cute.jit
    def host(self, q, k, v, o, lse, captures, scale, stream):
        """Make the tensor maps and launch a CTA for each tile of queries of each head."""
        q, k, v, o = (heads_last(t) for t in (q, k, v, o))
        io = Io(
            tuple(self.tiles["q"].load_atom(q)),
            tuple(self.tiles["k"].load_atom(k)),
            tuple(self.tiles["v"].load_atom(v)),
            tuple(self.strip.store_atom(o)),
            cute.make_tensor(lse.iterator, cute.select(lse.layout, mode=[2, 1, 0])),
            captures,
            scale,
        )
        m_blocks = cute.ceil_div(q.shape[0], self.schedule.tile_m)
        tiles = self.order.tiles(m_blocks, q.shape[2] * q.shape[3])
        self.launch(io, (tiles, 1, 1), stream)

    def work(self, io: Io) -> Work:
        """This CTA's tile, computed alike by every role."""
        index, _, _ = cute.arch.block_idx()
        seqlen_q, _, heads, batches = io.q[1].shape
        seqlen_k, _, kv_heads, _ = io.k[1].shape
        m_blocks = cute.ceil_div(seqlen_q, self.schedule.tile_m)
        m_block, head_of_all = self.order.at(index, m_blocks, heads * batches, cutlass.min)
        batch = head_of_all // heads
        head = head_of_all - batch * heads
        kv_head = head // (heads // kv_heads)
        elements = Elements(
            self.plan.variant, io.captures, io.scale, (batch, head), (seqlen_q, seqlen_k)
        )
        runs = elements.runs(m_block, self.schedule.tile_m, self.schedule.tile_n)
        return Work(m_block, head, batch, kv_head, elements, runs)

    @cute.jit
    def producer(self, io, smem, ports, thread):
        """Q once, then K and V of the visible tiles; one warp issues all copies."""
        w = self.work(io)
        load_q = self.load("q", head_of(io.q, w.head, w.batch), smem.q, col=0)
        load_k = self.load("k", head_of(io.k, w.kv_head, w.batch), smem.k, col=0)
        load_v = self.load("v", head_of(io.v, w.kv_head, w.batch), smem.v, col=0)
        ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
        total = w.runs.n_total
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if warp == 0 and total > 0:
            slot_q = ring_q.acquire_and_advance()
            load_q(w.m_block, slot_q)
            slot_q.commit()
            for j in cutlass.range(total + 1, unroll=1):  # K runs one tile ahead of V
                if j < total:
                    slot_k = ring_k.acquire_and_advance()
                    load_k(w.runs.n_block(j), slot_k)
                    slot_k.commit()
                if j > 0:
                    slot_v = ring_v.acquire_and_advance()
                    load_v(w.runs.n_block(j - 1), slot_v)
                    slot_v.commit()

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        """Attend to the visible tiles, those that need the element mask first, and store O."""
        s = self.schedule
        w = self.work(io)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        f = Fragments(s, self.dtype, self.head_dim_v, smem, thread)
        softmax = OnlineSoftmax(len(f.places.row_offsets), w.elements.scale_log2)
        turns = Turns(self.barriers, "turn", group) if s.pingpong else None
        ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
        partial, total = w.runs.n_partial, w.runs.n_total
        if total > 0:
            ring_q.wait_and_advance()
            step, first = (self.overlapped, 1) if s.intra else (self.serial, 0)
            if cutlass.const_expr(s.intra):
                ring_k = self.first_scores(w, f, softmax, ring_k)
            for j in cutlass.range(first, partial, unroll=1):
                ring_k, ring_v = step(w, f, softmax, turns, ring_k, ring_v, j, True)
            if cutlass.const_expr(self.ever_full):
                for j in cutlass.range(cutlass.max(partial, first), total, unroll=1):
                    ring_k, ring_v = step(w, f, softmax, turns, ring_k, ring_v, j, False)
            if cutlass.const_expr(s.intra):
                self.last_values(f, ring_v)
        self.epilogue(io, smem, w, f, softmax, thread, group)

    @cute.jit
    def first_scores(self, w, f, softmax, ring_k):
        """S and P of the first tile, which nothing overlaps."""
        slot = ring_k.wait_and_advance()
        acc_s = f.multiply_qk(slot)
        warpgroup.wait_group(0)
        slot.release()
        if w.runs.n_partial > 0:
            self.modify(w, f, acc_s, 0, masked=True)
        else:
            self.modify(w, f, acc_s, 0, masked=False)
        softmax.step(wgmma.as_rows_cols(acc_s))
        f.round_p(acc_s)
        return ring_k

    @cute.jit
    def overlapped(self, w, f, softmax, turns, ring_k, ring_v, j, masked: cutlass.Constexpr):
        """S of tile j is computed while O += P V of tile j - 1 runs."""
        slot_k = ring_k.wait_and_advance()
        if cutlass.const_expr(turns is not None):
            turns.wait()
        acc_s = f.multiply_qk(slot_k)
        slot_v = ring_v.wait_and_advance()
        f.multiply_pv(slot_v)
        if cutlass.const_expr(turns is not None):
            turns.pass_on()
        warpgroup.wait_group(1)
        slot_k.release()
        self.modify(w, f, acc_s, j, masked)
        softmax.step(wgmma.as_rows_cols(acc_s))
        warpgroup.wait_group(0)
        slot_v.release()
        f.round_p(acc_s)
        softmax.rescale(f.output)
        return ring_k, ring_v

    @cute.jit
    def last_values(self, f, ring_v):
        """O += P V of the last tile."""
        slot = ring_v.wait_and_advance()
        f.multiply_pv(slot)
        warpgroup.wait_group(0)
        slot.release()

    @cute.jit
    def serial(self, w, f, softmax, turns, ring_k, ring_v, j, masked: cutlass.Constexpr):
        """S, softmax and O of tile j, one after the other."""
        slot_k = ring_k.wait_and_advance()
        if cutlass.const_expr(turns is not None):
            turns.wait()
        acc_s = f.multiply_qk(slot_k)
        if cutlass.const_expr(turns is not None):
            turns.pass_on()
        warpgroup.wait_group(0)
        slot_k.release()
        self.modify(w, f, acc_s, j, masked)
        softmax.step(wgmma.as_rows_cols(acc_s))
        f.round_p(acc_s)
        softmax.rescale(f.output)
        slot_v = ring_v.wait_and_advance()
        f.multiply_pv(slot_v)
        warpgroup.wait_group(0)
        slot_v.release()
        return ring_k, ring_v

    def modify(self, w, f, acc_s, j, masked):
        """Score and mask of the j-th visited tile, in place."""
        s = self.schedule
        corner = (w.m_block * s.tile_m, w.runs.n_block(j) * s.tile_n)
        w.elements.apply(wgmma.as_rows_cols(acc_s), f.places, corner, masked)

    @cute.jit
    def epilogue(self, io, smem, w, f, softmax, thread, group):
        """O / row_sum and LSE to global memory; each warpgroup stores its own 64 rows."""
        lse = softmax.finish(f.output)
        if cutlass.const_expr("o" in self.aliases):
            self.barriers["strip", group].arrive_and_wait()
        rows = cute.local_tile(smem.o, (self.strip.rows, self.strip.cols), (group, 0))
        wgmma.to_smem(f.acc_o, rows, f.pv_strip, thread % wgmma.WARPGROUP)
        cute.arch.fence_view_async_shared()
        self.barriers["strip", group].arrive_and_wait()
        if thread % wgmma.WARPGROUP < WARP:
            target = head_of(io.o, w.head, w.batch)
            block = w.m_block * self.schedule.consumers + group
            self.store(self.strip, target, rows, (block, 0))
        lse_row = io.lse[None, w.head, w.batch]
        for r in cutlass.range_constexpr(len(lse)):
            offset = f.places.row + f.places.row_offsets[r]
            row = w.m_block * self.schedule.tile_m + offset
            if thread % 4 == 0 and row < io.lse.shape[0]:
                lse_row[row] = lse[r]
