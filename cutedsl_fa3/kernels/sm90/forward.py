"""The attention forward on SM90.

    role        does                                                              rings
    producer    Q once, then the visible K and V tiles, by TMA                 -> q, k, v
    consumer    S = Q K^T -> score -> mask -> softmax -> O += P V              <- q, k, v
                then O / row_sum -> epilogue -> shared memory -> TMA store

    ring    carries        filled by     emptied by, one arrival a warp
    q       Q, 1 or 2      TMA bytes     when its last S is complete; where o lies in its place,
                                         when O is stored
    k       K, stages      TMA bytes     when its S is complete
    v       V, stages      TMA bytes     when its product with P is complete
    visits  which tile     the producer  when read; only where tiles are decided one by one
    work    what is next   the producer  when read; only for persistent CTAs

    barrier    threads    says
    strip      128        a warpgroup's rows of o may be written; then, they are written
    p          128        with P in shared memory: it has been read; then, it is written
    turn       256        with pingpong: the warpgroup before has issued, the next may

Shared memory holds q, k, v and o, and p if the schedule says so; o takes the place of q where its
rows fit into q's, unless there is room for both and a CTA has more than one tile of queries. CTAs
of a cluster have queries one behind the other of one head, and copy half of each K and V for both.

A work tile is tile_m queries of one head, or with `pack` tile_m / pack queries of so many heads
that read the same keys, row by row; each consumer warpgroup has 64 of its rows. A CTA has one, or
draws one after the other (pipelines/tickets.py): then the copies of the next run under the products
and the epilogue of this one. Which key tiles are visited, and which of those need no element mask,
is found in the mask (variant/bounds.py): every role computes the same runs of tiles from the same
few integers, so all take the same turns. Where the visible tiles are no runs, because they hang on
the values of captured tensors or on more than bounds of k, the producer alone decides tile by tile
(variant/tiles.py) and tells the consumers.

Where a change goes: another score, mask, softmax or epilogue is a Variant and needs no kernel code;
what happens to an element between the two products is elements.py, units.py and softmax.py, the
order of the products mainloop.py, the way of O to memory epilogue.py; another operand is a tile, a
ring that carries it, and two lines in the roles.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from cutedsl_fa3.layouts import Tile, wgmma
from cutedsl_fa3.pipelines import (
    DRAWING_BUDGETS,
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
    draw,
    drawn_tile,
    put,
    take,
)
from cutedsl_fa3.pipelines.roles import WARP, first_warps, launch_registers
from cutedsl_fa3.variant.bounds import Runs
from cutedsl_fa3.variant.describe import differs_by_head, ever_full, sees_first_keys
from cutedsl_fa3.variant.tiles import candidates

from .elements import Elements
from .epilogue import Epilogue
from .exact import Again
from .mainloop import END, MainLoop
from .operands import Fragments, Io, fake_args, head_of, heads_last, heads_packed, rows_first
from .summarise import Summarise
from .units import Units

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan


BESIDE = 30  # registers that ptxas (C7602) wants for an instruction besides its accumulator
SMALL = 64  # head size up to which two warpgroups of consumers do with 232 registers as with 240


@dataclass(frozen=True)
class Work:
    """A tile of queries of one head, and the key tiles to visit; `head` counts packs of heads."""

    m_block: Int32
    head: Int32
    batch: Int32
    elements: Elements
    runs: Runs
    inside: Boolean | bool  # whether full tiles can do without care; see `Elements.inside`


class ForwardSm90(MainLoop, Epilogue, WarpSpecialized):
    """Tables and roles of the forward for one plan."""

    arch = "sm_90a"
    name = "forward_sm90"
    summarise_blocks = Summarise.blocks  # launched before the forward, under the same name

    def __init__(self, plan: Plan) -> None:
        s, problem = plan.schedule, plan.problem
        dtype, (d, dv) = problem.element, problem.tile_dims
        self.plan, self.schedule, self.dtype, self.head_dim_v = plan, s, dtype, dv
        self.cluster = s.cluster
        self.beside = s.cluster[0]  # CTAs whose work tiles lie one behind the other, and share K, V
        self.tiles = {
            "q": Tile(s.tile_m, d, dtype),
            "k": Tile(s.tile_n, d, dtype),
            "v": Tile(s.tile_n, dv, dtype),
        }
        if s.store == "tma":
            self.tiles["o"] = Tile(s.tile_m, dv, dtype)
        if s.p_from == "shared":
            self.tiles["p"] = Tile(s.tile_m, s.tile_n, dtype)
        self.strip = Tile(wgmma.ROWS, dv, dtype)  # the rows of O that one warpgroup stores
        self.rings = {
            "q": Ring(("q",), 1),
            "k": Ring(("k",), s.stages, multicast={"k": "m"} if self.beside > 1 else {}),
            "v": Ring(("v",), s.stages, multicast={"v": "m"} if self.beside > 1 else {}),
        }
        if plan.by_tile:
            self.rings["visits"] = WordRing()
        if s.persistent:
            self.rings["work"] = WordRing(stages=2, words=3)
        self.summarise = None
        if plan.table_shape(1, 1, 1, 1) is not None:
            self.summarise = Summarise(plan.variant.mask, s.queries, s.tile_n)
        # Registers of the consumers that they can spare, for a producer that would spill.
        spare = dv <= SMALL or (d <= SMALL and not plan.by_tile)
        budgets = DRAWING_BUDGETS if s.persistent and spare else TMA_BUDGETS
        producer, consumer = budgets[s.consumers]
        self.residents = s.residents
        self.roles = {
            "producer": Role(warps=4, registers=producer),
            "consumer": Role(warps=4 * s.consumers, registers=consumer),
        }
        if s.residents > 1:
            self.roles = {"consumer": Role(warps=4 * s.consumers), "producer": Role(warps=1)}
        table = {}
        if s.store == "tma":
            table["strip"] = Barrier(wgmma.WARPGROUP, copies=s.consumers)
        if s.pingpong:
            table["turn"] = Barrier(2 * wgmma.WARPGROUP, copies=s.consumers)
        if s.p_from == "shared":
            table["p"] = Barrier(wgmma.WARPGROUP, copies=s.consumers)
        self.barriers = Barriers(table)
        self.order = TileOrder(s.head_group)
        roomy = s.persistent and self.smem.total <= self.smem.capacity
        o = self.tiles.get("o")
        if o is not None and self.tiles["q"].holds_rows_of(o) and not roomy:
            self.aliases = {"o": "q"}
        # Three warpgroups wait for each other less where the next Q is there before all have read
        # the last; two gain nothing.
        if s.persistent and s.consumers > 2 and not self.aliases:
            one = self.rings["q"]
            self.rings["q"] = replace(one, stages=2)
            if self.smem.total > self.smem.capacity:
                self.rings["q"] = one
        self.ever_full = plan.by_tile or ever_full(plan.variant.mask)
        # Whether tiles are asked for first halves that nobody sees: where a mask may hide the first
        # keys of a sequence.
        self.narrow = s.halves and not plan.by_tile
        self.second_halves = self.narrow and not sees_first_keys(plan.variant.mask)
        # A mask hides values of a visited tile, and so does a score of -inf.
        self.repairs = plan.variant.mask is not None or plan.variant.score is not None
        self.first_consumer_thread = WARP * first_warps(self.roles)["consumer"]

    @property
    def key_text(self) -> str:
        """Everything that affects the code."""
        return self.plan.key_text

    @property
    def draws(self) -> bool:
        """Whether CTAs draw their work tiles."""
        return self.schedule.persistent and self.beside == 1

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
        cols, granted = max(s.tile_n, self.head_dim_v), launch_registers(self.threads, s.residents)
        if cols // 2 + BESIDE > granted:
            raise ScheduleError(
                f"consumers = {s.consumers}: a product of {cols} columns needs {cols // 2} and "
                f"{BESIDE} registers a thread, and {self.threads} threads are launched with "
                f"{granted}; use consumers=2"
            )
        if s.cluster[1] != 1:
            raise ScheduleError(
                f"cluster = {s.cluster}: the forward's CTAs share keys along the queries; use "
                f"({s.cluster[0]}, 1)"
            )
        if self.beside > 1 and self.plan.variant.mask is not None:
            raise ScheduleError(
                f"cluster = {s.cluster}: CTAs that share key tiles visit the same, and a mask "
                "gives each its own; use (1, 1)"
            )
        if self.beside > 1 and self.plan.trace:
            raise ScheduleError(
                f"cluster = {s.cluster}: CTAs that share key tiles trace no visits; use (1, 1)"
            )
        if s.pack > 1 and differs_by_head(self.plan.variant.mask):
            raise ScheduleError(
                f"pack = {s.pack}: the mask reads h, and all heads of a tile visit the same key "
                "tiles; use pack=1"
            )
        super().check()

    def expected(self) -> tuple[Expect, ...]:
        """What the tables promise about the machine code.

        The loop over tiles with an element mask is a place for both products, so is the loop over
        those without, if the mask can have any; with overlap inside a warpgroup, the first S and
        the last P V stand outside both. Products of halves have places of their own.
        """
        s, dv = self.schedule, self.head_dim_v
        places = 1 + int(self.ever_full) + int(s.intra)
        halves = 1 + int(self.second_halves) if self.narrow else 0  # for S of half of a tile
        after = 1 + int(self.ever_full) if self.narrow else 0  # steps that multiply half of V
        products = Counter()
        for rows, cols, depth, count in (
            (s.tile_m, s.tile_n, self.tiles["q"].cols, places + after),
            (s.tile_m, s.tile_n // 2, self.tiles["q"].cols, halves),
            (s.tile_m, dv, s.tile_n, places + int(self.second_halves)),
            (s.tile_m, dv, s.tile_n // 2, after),
        ):
            name, each = wgmma.instructions(rows, cols, depth, s.consumers)
            products[name] += count * each
        why = f"QK and PV, in {places} places" + (", and halves of them" if self.narrow else "")
        stores = {"o": self.strip} if s.store == "tma" else {}
        loads = {"q": 1, "k": 1, "v": 2 if self.plan.by_tile else 1}  # places in the code
        rows = wgmma.ROWS_HELD  # that one thread holds, and cols of each
        cols = wgmma.ROWS * s.tile_n // (wgmma.WARPGROUP * rows)
        exponentials = (
            Expect(
                "MUFU.EX2",
                "at least",
                places * rows * (cols + int(not self.plan.bounded)),
                "an exponential a score, and one a row to rescale unless its maximum stays",
            ),
        )
        return (
            *self.common_expectations(loads, stores, rank=4),
            *(Expect(name, "exactly", count, why) for name, count in products.items() if count),
            *(exponentials if self.plan.variant.weight is None else ()),
        )

    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `host`: any lengths, heads, batch and strides."""
        return fake_args(self.plan, Elements.fake_captures(self.plan.variant))

    @cute.jit
    def host(self, q, k, v, o, lse, captured, table, visits, counter, ctas, scale, stream):
        """Make the tensor maps and launch a CTA for each tile of queries of each head.

        Persistent CTAs are at most `ctas`, and share `counter`, which is 0 before and after.
        """
        s = self.schedule
        q, k, v, o = (heads_last(t) for t in (q, k, v, o))
        lse = None if lse is None else rows_first(lse)
        lengths = (q.shape[0], k.shape[0])
        q, o, lse = (t if t is None else heads_packed(t, s.pack) for t in (q, o, lse))
        captures = Elements.given_captures(self.plan.variant, self.plan.pairs, captured)
        if cutlass.const_expr(self.summarise is not None):
            self.summarise.launch(captures, table, *lengths, stream)
        io = Io(
            tuple(self.tiles["q"].load_atom(q)),
            tuple(self.tiles["k"].load_atom(k, multicast=self.beside)),
            tuple(self.tiles["v"].load_atom(v, multicast=self.beside)),
            tuple(self.strip.store_atom(o)) if s.store == "tma" else (None, o),
            (q, k, v) if self.repairs else None,
            lse,
            captures,
            table,
            visits,
            counter,
            scale,
        )
        grid = self.work_tiles(io)
        if cutlass.const_expr(s.persistent):
            grid = cutlass.min(grid, ctas // self.beside)
        self.launch(io, (grid * self.beside, 1, 1), stream)

    def work_tiles(self, io: Io) -> Int32:
        """How many work tiles there are, or so many of a cluster."""
        _, _, heads, batches = io.q[1].shape
        return self.order.tiles(self.m_blocks(io), heads * batches)

    def seqlen_q(self, io: Io) -> Int32:
        """The length of a sequence of queries."""
        rows = io.q[1].shape[0]
        return rows if self.schedule.pack == 1 else rows[1]

    def m_blocks(self, io: Io) -> Int32:
        """Work tiles, of clusters, of a head or of heads that share them."""
        return cute.ceil_div(self.seqlen_q(io), self.schedule.queries * self.beside)

    def place(self, io: Io, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(m_block, head, batch) of this CTA's part of a work tile."""
        _, _, heads, batches = io.q[1].shape
        m_block, head_of_all = self.order.at(index, self.m_blocks(io), heads * batches, cutlass.min)
        batch = head_of_all // heads
        if self.beside > 1:
            m_block = m_block * self.beside + cute.arch.block_in_cluster_idx()[0]
        return m_block, head_of_all - batch * heads, batch

    def first_index(self) -> Int32:
        """The work tile that this CTA or its cluster begins with."""
        index, _, _ = cute.arch.block_idx()
        return index // self.beside

    def work(
        self, io: Io, m_block: Int32, head: Int32, batch: Int32, of_pack: tuple = (0,)
    ) -> Work:
        """A work tile, computed alike by every role.

        `of_pack` are heads of the pack, as `Fragments.heads`; key tiles do not depend on them.
        """
        s, lengths = self.schedule, (self.seqlen_q(io), io.k[1].shape[0])
        variant, pairs = self.plan.variant, self.plan.pairs
        heads = head if s.pack == 1 else tuple(head * s.pack + each for each in of_pack)
        place, bounded, units = (batch, heads), self.plan.bounded, None
        if self.plan.linear is not None:
            uniform = {"b": batch, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
            units = Units(self.plan.linear, io.captures, io.scale, uniform, head, s.pack)
        elements = Elements(
            variant, io.captures, io.scale, place, lengths, pairs, bounded, units=units
        )
        runs = elements.runs(m_block, s.queries, s.tile_n)
        full = runs if self.plan.by_tile else Runs((), runs.full, runs.ints)
        within = elements.inside(m_block, s.queries, s.tile_n, candidates(full))
        return Work(m_block, head, batch, elements, runs, within)

    def kv_head(self, io: Io, head: Int32) -> Int32:
        """The head of K and V that a head of queries, or a pack of them, reads."""
        return head // (io.q[1].shape[2] // io.k[1].shape[2])

    @cute.jit
    def producer(self, io, smem, ports, thread):
        """Load what the consumers need; one warp issues all copies."""
        for atom, _ in (io.q, io.k, io.v):
            cpasync.prefetch_descriptor(atom)
        if cute.arch.make_warp_uniform(thread // WARP) == 0:
            if cutlass.const_expr(self.schedule.persistent):
                self.produce_drawn(io, smem, ports)
            else:
                place = self.place(io, self.first_index())
                _, ring_k, ring_v, _, _ = self.produce(io, smem, ports, *place)
                self.part(ring_k, ring_v)

    @cute.jit
    def produce_drawn(self, io, smem, ports):
        """One work tile after the other; the next is drawn before the last loads of this one.

        Sooner would give it to this CTA while another is done first. Clusters take theirs in turn.
        """
        ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
        work, visits = ports.work, ports.visits if self.plan.by_tile else None
        tiles = self.work_tiles(io)
        index = self.first_index()
        while index < tiles:
            m_block, head, batch = self.place(io, index)
            work = put(work, smem.work, m_block, head, batch)
            ends = SimpleNamespace(q=ring_q, k=ring_k, v=ring_v, visits=visits)
            ring_q, ring_k, ring_v, visits, drawn = self.produce(
                io, smem, ends, m_block, head, batch
            )
            if cutlass.const_expr(self.draws):
                index = drawn_tile(drawn, io.counter, tiles)
            else:
                ctas, _, _ = cute.arch.grid_dim()
                index += ctas // self.beside
        put(work, smem.work, Int32(END), Int32(0), Int32(0))
        self.part(ring_k, ring_v)

    def part(self, ring_k, ring_v):
        """Stay until what the others of a cluster do in this CTA's shared memory is done."""
        if self.beside > 1:
            ring_k.tail()
            ring_v.tail()

    @cute.jit
    def produce(self, io, smem, ports, m_block, head, batch):
        """Q, K and V of the visible tiles of one work tile.

        Returns the rings' ends and, for persistent CTAs, the number drawn for the next work tile.
        """
        w = self.work(io, m_block, head, batch)
        kv_head = self.kv_head(io, head)
        loads = (
            self.load("q", head_of(io.q, head, batch), smem.q, col=0, prefetch=False),
            self.load("k", head_of(io.k, kv_head, batch), smem.k, col=0, prefetch=False),
            self.load("v", head_of(io.v, kv_head, batch), smem.v, col=0, prefetch=False),
        )
        if cutlass.const_expr(self.plan.by_tile):
            return self.produce_by_tile(io, smem, ports, w, loads)
        ring_q, ring_k, ring_v, drawn = self.produce_runs(io, ports, w, loads)
        return ring_q, ring_k, ring_v, None, drawn

    @cute.jit
    def produce_runs(self, io, ports, w, loads):
        """Load the tiles of `w.runs`.

        The slots of K are empty before that of Q, so the first K comes before Q; where Q has to
        wait for O besides, what else there is a slot for does.
        """
        load_q, load_k, load_v = loads
        ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
        total = w.runs.n_total
        late = self.schedule.persistent and "o" in self.aliases and self.schedule.stages > 1
        again, drawn = self.draws, Int32(0)
        if cutlass.const_expr(again):
            if total == 0:
                drawn = draw(io.counter)
        if total > 0:
            for j in cutlass.range(total + 1, unroll=1):  # K runs one tile ahead of V
                if cutlass.const_expr(again):
                    if j == total - 1:
                        drawn = draw(io.counter)
                if j < total:
                    slot_k = ring_k.acquire_and_advance()
                    load_k(w.runs.n_block(j), slot_k)
                    slot_k.commit()
                if j > 0:
                    slot_v = ring_v.acquire_and_advance()
                    load_v(w.runs.n_block(j - 1), slot_v)
                    slot_v.commit()
                if j == int(late):
                    slot_q = ring_q.acquire_and_advance()
                    load_q(w.m_block, slot_q)
                    slot_q.commit()
        return ring_q, ring_k, ring_v, drawn

    @cute.jit
    def produce_by_tile(self, io, smem, ports, w, loads):
        """Decide which tiles are visible, 32 at a time, one a lane; load them and say so.

        The range is scanned twice: for tiles that need the element mask, then for full ones.
        """
        s = self.schedule
        load_q, load_k, load_v = loads
        ring_q, ring_k, ring_v, visits = ports.q, ports.k, ports.v, ports.visits
        scan = w.elements.scan(w.m_block, s.queries, s.tile_n, io.table)
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
                    visits = put(visits, smem.visits, 2 * n_block + 1 - kind)
                    slot_k = ring_k.acquire_and_advance()
                    load_k(n_block, slot_k)
                    slot_k.commit()
                    if before == END:
                        slot_q = ring_q.acquire_and_advance()
                        load_q(w.m_block, slot_q)
                        slot_q.commit()
                    else:  # K runs one tile ahead of V
                        slot_v = ring_v.acquire_and_advance()
                        load_v(before, slot_v)
                        slot_v.commit()
                    before = n_block
        drawn = draw(io.counter) if self.schedule.persistent else Int32(0)
        visits = put(visits, smem.visits, Int32(END))
        if before != END:
            slot_v = ring_v.acquire_and_advance()
            load_v(before, slot_v)
            slot_v.commit()
        return ring_q, ring_k, ring_v, visits, drawn

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        """Attend to one work tile, or to those that the producer names."""
        s = self.schedule
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        f = Fragments(s, self.dtype, self.head_dim_v, smem, thread, self.barriers)
        turns = Turns(self.barriers, "turn", group) if s.pingpong else None
        if cutlass.const_expr(s.persistent):
            ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
            visits = ports.visits if self.plan.by_tile else None
            work, m_block, head, batch = take(ports.work, smem.work)
            while m_block != END:
                w = self.work(io, m_block, head, batch, f.heads)
                ends = SimpleNamespace(q=ring_q, k=ring_k, v=ring_v, visits=visits)
                ring_q, ring_k, ring_v, visits = self.attend(io, smem, w, f, turns, ends, thread)
                work, m_block, head, batch = take(work, smem.work)
            if cutlass.const_expr(s.store == "tma"):
                if thread % wgmma.WARPGROUP < WARP:
                    self.stored()
        else:
            w = self.work(io, *self.place(io, self.first_index()), f.heads)
            self.attend(io, smem, w, f, turns, ports, thread)

    @cute.jit
    def attend(self, io, smem, w, f, turns, ports, thread):
        """The visible tiles, those that need the element mask first; then store O.

        Returns the rings' ends.
        """
        softmax = w.elements.softmax(len(f.places.row_offsets), self.schedule.lazy)
        f.acc_o.fill(0.0)
        q, visits = ports.q.clone(), None
        if cutlass.const_expr(self.plan.by_tile):
            ring_q, ring_k, ring_v, visits, some = self.along_words(
                io, w, f, softmax, turns, ports, smem.visits
            )
            taken = some
        else:
            group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            ring_q, ring_k, ring_v, some = self.along_runs(io, w, f, softmax, turns, ports, group)
            taken = w.runs.n_total > 0
        again, aliased = self.schedule.persistent, "o" in self.aliases
        if cutlass.const_expr(again and not aliased):
            if taken:
                q.release()
        if cutlass.const_expr(self.schedule.intra):
            if some:
                ring_v = self.last_values(f, ring_v)
        self.epilogue(io, smem, w, f, softmax, thread)
        if cutlass.const_expr(again and aliased):
            if taken:
                q.release()
        return ring_q, ring_k, ring_v, visits

    def again(self, io: Io, w: Work, row: Int32) -> Again:
        """What computes a row of this work tile again, from global memory."""
        q = io.plain[0][None, None, w.head, w.batch]
        k, v = (t[None, None, self.kv_head(io, w.head), w.batch] for t in io.plain[1:])
        problem, pack, elements = self.plan.problem, self.schedule.pack, w.elements
        if elements.others:
            elements = elements.of_head(w.head * pack + row % pack)
        return Again(elements, q, k, v, (problem.head_dim, problem.head_dim_v), pack)
