"""The attention forward on SM90.

    role        does                                                              rings
    producer    Q once, then the visible K and V tiles, by TMA                 -> q, k, v
    consumer    S = Q K^T -> score -> mask -> softmax -> O += P V              <- q, k, v
                then O / row_sum -> epilogue -> shared memory -> TMA store

    ring    carries        filled by     emptied by, one arrival a warp
    q       Q, one slot    TMA bytes     never: a CTA has one tile of queries
    k       K, stages      TMA bytes     when its S is complete
    v       V, stages      TMA bytes     when its product with P is complete
    visits  which tile     the producer  when read; only where tiles are decided one by one

    barrier    threads    says
    strip      128        a warpgroup is done with its rows of Q; then, its rows of O are written
    turn       256        with pingpong: the warpgroup before has issued, the next may

Shared memory holds q, k and v, and o, which takes the place of q where its rows fit into q's.

A CTA serves tile_m queries of one head; each consumer warpgroup has 64 of them. Which key tiles are
visited, and which of those need no element mask, is found in the mask (variant/bounds.py): every
role computes the same runs of tiles from the same few integers, so all take the same turns. Where
the visible tiles are no runs, because they hang on the values of captured tensors or on more than
bounds of k, the producer alone decides tile by tile (variant/tiles.py) and tells the consumers.

Where a change goes: another score, mask, softmax or epilogue is a Variant and needs no kernel code;
what happens to an element between the two products is elements.py and softmax.py, the order of the
products mainloop.py; another operand is a tile, a ring that carries it, and two lines in the roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

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
    WordRing,
    put,
)
from cutedsl_fa3.pipelines.roles import WARP, first_warps
from cutedsl_fa3.variant.bounds import Runs
from cutedsl_fa3.variant.describe import ever_full

from .elements import Elements
from .exact import Again, chosen, lost
from .mainloop import END, MainLoop
from .operands import Fragments, Io, fake_args, head_of, heads_last, rows_first
from .summarise import Summarise

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


class ForwardSm90(MainLoop, WarpSpecialized):
    """Tables and roles of the forward for one plan."""

    arch = "sm_90a"
    name = "forward_sm90"
    summarise_blocks = Summarise.blocks  # launched before the forward, under the same name

    def __init__(self, plan: Plan) -> None:
        s, problem = plan.schedule, plan.problem
        dtype, (d, dv) = problem.element, problem.tile_dims
        self.plan, self.schedule, self.dtype, self.head_dim_v = plan, s, dtype, dv
        self.tiles = {
            "q": Tile(s.tile_m, d, dtype),
            "k": Tile(s.tile_n, d, dtype),
            "v": Tile(s.tile_n, dv, dtype),
            "o": Tile(s.tile_m, dv, dtype),
        }
        self.strip = Tile(wgmma.ROWS, dv, dtype)  # the rows of O that one warpgroup stores
        if self.tiles["q"].holds_rows_of(self.tiles["o"]):
            self.aliases = {"o": "q"}
        self.rings = {
            "q": Ring(("q",), 1),
            "k": Ring(("k",), s.stages),
            "v": Ring(("v",), s.stages),
        }
        if plan.by_tile:
            self.rings["visits"] = WordRing()
        self.summarise = None
        if plan.table_shape(1, 1, 1, 1) is not None:
            self.summarise = Summarise(plan.variant.mask, s.tile_m, s.tile_n)
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
        self.ever_full = plan.by_tile or ever_full(plan.variant.mask)
        # A mask hides values of a visited tile, and so does a score of -inf.
        self.repairs = plan.variant.mask is not None or plan.variant.score is not None
        self.first_consumer_thread = WARP * first_warps(self.roles)["consumer"]

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
        loads = {"q": 1, "k": 1, "v": 2 if self.plan.by_tile else 1}  # places in the code
        rows = wgmma.ROWS_HELD  # that one thread holds, and cols of each
        cols = wgmma.ROWS * s.tile_n // (wgmma.WARPGROUP * rows)
        exponentials = (
            Expect(
                "MUFU.EX2",
                "at least",
                places * rows * (cols + 1),
                "an exponential a score, and one a row to rescale",
            ),
        )
        return (
            *self.common_expectations(loads, {"o": self.strip}, rank=4),
            *(
                Expect(name, "exactly", count, f"QK and PV, in {places} places")
                for name, count in products.items()
            ),
            *(exponentials if self.plan.variant.weight is None else ()),
        )

    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `host`: any lengths, heads, batch and strides."""
        captures = Elements.fake_captures(self.plan.variant, self.plan.pairs) or None
        return fake_args(self.plan, captures)

    @cute.jit
    def host(self, q, k, v, o, lse, captures, table, visits, scale, stream):
        """Make the tensor maps and launch a CTA for each tile of queries of each head."""
        s = self.schedule
        q, k, v, o = (heads_last(t) for t in (q, k, v, o))
        (seqlen_q, _, heads, batches), seqlen_k = q.shape, k.shape[0]
        if cutlass.const_expr(self.summarise is not None):
            self.summarise.launch(captures, table, seqlen_q, seqlen_k, stream)
        io = Io(
            tuple(self.tiles["q"].load_atom(q)),
            tuple(self.tiles["k"].load_atom(k)),
            tuple(self.tiles["v"].load_atom(v)),
            tuple(self.strip.store_atom(o)),
            (q, k, v) if self.repairs else None,
            None if lse is None else rows_first(lse),
            captures,
            table,
            visits,
            scale,
        )
        m_blocks = cute.ceil_div(seqlen_q, s.tile_m)
        tiles = self.order.tiles(m_blocks, heads * batches)
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
        place, lengths = (batch, head), (seqlen_q, seqlen_k)
        variant, pairs = self.plan.variant, self.plan.pairs
        bounded = self.plan.bounded
        elements = Elements(variant, io.captures, io.scale, place, lengths, pairs, bounded)
        runs = elements.runs(m_block, self.schedule.tile_m, self.schedule.tile_n)
        return Work(m_block, head, batch, kv_head, elements, runs)

    @cute.jit
    def producer(self, io, smem, ports, thread):
        """Q once, then K and V of the visible tiles; one warp issues all copies."""
        w = self.work(io)
        loads = (
            self.load("q", head_of(io.q, w.head, w.batch), smem.q, col=0),
            self.load("k", head_of(io.k, w.kv_head, w.batch), smem.k, col=0),
            self.load("v", head_of(io.v, w.kv_head, w.batch), smem.v, col=0),
        )
        warp = cute.arch.make_warp_uniform(thread // WARP)
        if warp == 0:
            if cutlass.const_expr(self.plan.by_tile):
                self.produce_by_tile(io, smem, ports, w, loads)
            else:
                self.produce_runs(ports, w, loads)

    @cute.jit
    def produce_runs(self, ports, w, loads):
        """Load the tiles of `w.runs`."""
        load_q, load_k, load_v = loads
        ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
        total = w.runs.n_total
        if total > 0:
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
    def produce_by_tile(self, io, smem, ports, w, loads):
        """Decide which tiles are visible, 32 at a time, one a lane; load them and say so.

        The range is scanned twice: for tiles that need the element mask, then for full ones.
        """
        s = self.schedule
        load_q, load_k, load_v = loads
        ring_q, ring_k, ring_v, visits = ports.q, ports.k, ports.v, ports.visits
        scan = w.elements.scan(w.m_block, s.tile_m, s.tile_n, io.table)
        first, end, decide = scan.first, scan.end, scan.decide
        lane = cute.arch.lane_idx()
        before = Int32(END)  # the tile whose V is still to be loaded
        for kind in cutlass.range(2, unroll=1):
            for base in cutlass.range(first, end, WARP, unroll=1):
                visit, masked = decide(base + lane)
                mine = (base + lane < end) & Boolean(visit) & (Boolean(masked) ^ (kind == 1))
                found = cute.arch.vote_ballot_sync(mine)
                while found != 0:
                    n_block = base + cute.arch.popc((found & -found) - 1)
                    found = found & (found - 1)
                    if before == END:
                        slot_q = ring_q.acquire_and_advance()
                        load_q(w.m_block, slot_q)
                        slot_q.commit()
                    visits = put(visits, smem.visits, 2 * n_block + 1 - kind)
                    slot_k = ring_k.acquire_and_advance()
                    load_k(n_block, slot_k)
                    slot_k.commit()
                    if before != END:  # K runs one tile ahead of V
                        slot_v = ring_v.acquire_and_advance()
                        load_v(before, slot_v)
                        slot_v.commit()
                    before = n_block
        put(visits, smem.visits, Int32(END))
        if before != END:
            slot_v = ring_v.acquire_and_advance()
            load_v(before, slot_v)
            slot_v.commit()

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        """Attend to the visible tiles, those that need the element mask first, and store O."""
        s = self.schedule
        w = self.work(io)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        f = Fragments(s, self.dtype, self.head_dim_v, smem, thread)
        softmax = w.elements.softmax(len(f.places.row_offsets))
        turns = Turns(self.barriers, "turn", group) if s.pingpong else None
        if cutlass.const_expr(self.plan.by_tile):
            self.along_words(io, w, f, softmax, turns, ports, smem.visits)
        else:
            self.along_runs(io, w, f, softmax, turns, ports)
        self.epilogue(io, smem, w, f, softmax, thread, group)

    @cute.jit
    def epilogue(self, io, smem, w, f, softmax, thread, group):
        """O and LSE to global memory; each warpgroup stores its own 64 rows."""
        first_q = w.m_block * self.schedule.tile_m
        lse = softmax.finish(f.output)
        spoilt = lost(f.output, lse) if self.repairs else []
        w.elements.finish(f.output, lse, first_q, f.places)
        if cutlass.const_expr("o" in self.aliases):
            self.barriers["strip", group].arrive_and_wait()
        rows = cute.local_tile(smem.o, (self.strip.rows, self.strip.cols), (group, 0))
        wgmma.to_smem(f.acc_o, rows, f.pv_strip, thread % wgmma.WARPGROUP)
        if cutlass.const_expr(self.repairs):
            self.repair(io, w, f, rows, spoilt, lse, thread)
        cute.arch.fence_view_async_shared()
        self.barriers["strip", group].arrive_and_wait()
        if thread % wgmma.WARPGROUP < WARP:
            target = head_of(io.o, w.head, w.batch)
            block = w.m_block * self.schedule.consumers + group
            self.store(self.strip, target, rows, (block, 0))
        if cutlass.const_expr(lse is not None):
            lse_row = io.lse[None, w.head, w.batch]
            for r in cutlass.range_constexpr(len(lse)):
                row = first_q + f.places.row + f.places.row_offsets[r]
                if thread % 4 == 0 and row < io.lse.shape[0]:
                    lse_row[row] = lse[r]

    @cute.jit
    def repair(self, io, w, f, rows, spoilt, lse, thread):
        """Compute rows again that a hidden value has spoilt; a warp wrote its own rows."""
        any_row = spoilt[0]
        for r in cutlass.range_constexpr(1, len(spoilt)):
            any_row = any_row | spoilt[r]
        if cute.arch.vote_any_sync(any_row):
            cute.arch.sync_warp()
            for r in cutlass.range(len(spoilt), unroll=1):
                inside = f.places.row + chosen(f.places.row_offsets, r)
                row = w.m_block * self.schedule.tile_m + inside
                if chosen(spoilt, r) and row < w.elements.seqlen_q:
                    out = rows[inside % wgmma.ROWS, None]
                    of_row = None if lse is None else chosen(lse, r)
                    self.again(io, w).row(out, row, of_row, thread)

    def again(self, io: Io, w: Work) -> Again:
        """What computes rows of this work tile again, from global memory."""
        q = io.plain[0][None, None, w.head, w.batch]
        k, v = (t[None, None, w.kv_head, w.batch] for t in io.plain[1:])
        problem = self.plan.problem
        return Again(w.elements, q, k, v, (problem.head_dim, problem.head_dim_v))
