"""Tables and roles of the attention backward on SM90.

    role        does                                                              rings
    producer    warp 0: K and V once, then Q, LSE and dO, delta of the queries  -> kv, rows, visits
                that see some of these keys, by TMA; warp 1: adds dQ to its sums
    consumer    S, dP -> P, dS -> dV += P^T dO, dQ = dS K, dK += dS^T Q         <- kv, rows, visits
                then dK and dV -> the memory of K and V -> global memory, by TMA

    ring    carries            filled by     emptied by, one arrival a warp
    kv      K and V, one slot  TMA bytes     never: they stay, until dK and dV take their memory
    rows    Q, dO, lse, delta  TMA bytes     when dK and dV of them are complete
    visits  which tile         the producer  when read

    barrier  threads   says
    ds       all       dS (and P) of all keys lies in shared memory; with one place, may be written;
                       at the end: nobody reads K and V any more; dK and dV lie there
    empty    128 + 32  a warpgroup's strip of dQ has been read, and may be written
    full     128 + 32  it is written, and may be added to the sums

Where dQ is added in turn, a warp waits until its addition is complete before it lets the next CTA
add; that takes longer than a tile of 64 queries, so two warps have every second tile each, with
barriers of their own.

A CTA has tile_n keys of one head of K and V, and all heads of queries that read it, one after the
other: so dK and dV are sums of registers in a fixed order. dQ is summed in fp32 in global memory,
in the layout of registers (sums.py). Which tiles of queries see these keys, and in which order they
come, says visiting.py.

Where a change goes: what happens to an element between the products is weights.py, what captured
tensors get captured.py, the order of the products mainloop.py, what comes before and after
prepare.py and finish.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cutedsl_fa3.kernels.sm90.elements import Elements
from cutedsl_fa3.kernels.sm90.operands import head_of, heads_last, rows_first
from cutedsl_fa3.kernels.sm90.summarise import Summarise
from cutedsl_fa3.layouts import Tile, wgmma
from cutedsl_fa3.layouts.tile import Row
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
    WarpSpecialized,
    WordRing,
    put,
)
from cutedsl_fa3.pipelines.roles import WARP
from cutedsl_fa3.variant.describe import ever_full

from .again import Given, note
from .finish import Finish
from .mainloop import END, MainLoop
from .operands import Fragments, Io, fake_args
from .prepare import Prepare
from .schedule import BackwardSchedule
from .sums import strip, whole
from .visiting import Visiting, end_turn, wait_for_turn
from .work import Work, work_of

if TYPE_CHECKING:
    from cutedsl_fa3.plans_backward import BackwardPlan

# Registers of a consumer's accumulators beyond which it needs those that the producer can spare;
# below, the producer decides which tiles to visit without spilling. Origin: the compiler.
CROWDED = 192
RANK = 4  # dimensions of a tensor map: seqlen, head_dim, heads, batch


class BackwardSm90(MainLoop, Visiting, WarpSpecialized):
    """Tables and roles of the backward for one plan."""

    arch = "sm_90a"
    name = "backward_sm90"
    summarise_blocks = Summarise.blocks  # launched under the same name, as are these two
    prepare_rows = Prepare.rows
    finish_tiles = Finish.tiles_of_dq

    def __init__(self, plan: BackwardPlan) -> None:
        s: BackwardSchedule = plan.schedule
        problem = plan.problem
        dtype, dims = problem.element, plan.tile_dims
        self.plan, self.schedule, self.dtype, self.dims = plan, s, dtype, dims
        self.strip = strip(s, dims[0])
        self.tiles = {
            "k": Tile(s.tile_n, dims[0], dtype, pieces=max(s.beside, s.sharing)),
            "v": Tile(s.tile_n, dims[1], dtype, pieces=s.sharing),
            "q": Tile(s.tile_m, dims[0], dtype, pieces=s.sharing),
            "do": Tile(s.tile_m, dims[1], dtype, pieces=s.sharing),
            "ds": Tile(*((s.tile_m, s.tile_n) if s.sharing == 1 else (s.tile_n, s.tile_m)), dtype),
            "lse": Row(s.tile_m, Float32),
            "delta": Row(s.tile_m, Float32),
        }
        self.places = {"ds": s.places}
        if s.sharing > 1:
            self.tiles["p"], self.places["p"] = self.tiles["ds"], s.places
        if s.add == "tma":
            self.tiles["sums"] = whole(s, dims[0])
        self.rings = {
            "kv": Ring(("k", "v"), 1),
            "rows": Ring(("q", "do", "lse", "delta"), s.stages),
            "visits": WordRing(words=2),
        }
        budgets = TMA_BUDGETS if s.accumulated(*dims) >= CROWDED else DRAWING_BUDGETS
        producer, consumer = budgets[s.consumers]
        self.roles = {
            "producer": Role(warps=4, registers=producer),
            "consumer": Role(warps=4 * s.consumers, registers=consumer),
        }
        self.adders = 2 if plan.deterministic else 1
        table = {"ds": Barrier(wgmma.WARPGROUP * s.consumers)}
        if s.add == "tma":
            strips = s.consumers * self.adders
            table["empty"] = Barrier(wgmma.WARPGROUP + WARP, copies=strips)
            table["full"] = Barrier(wgmma.WARPGROUP + WARP, copies=strips)
        self.barriers = Barriers(table)
        self.order = TileOrder(s.head_group)
        self.summarise = None
        if plan.table_shape(1, 1, 1, 1) is not None:
            self.summarise = Summarise(plan.variant.mask, s.tile_m, s.tile_n)
        self.prepare = Prepare(s, dims, problem.head_dim_v)
        self.finish = Finish(plan, dims[0])
        self.ever_full = plan.by_tile or ever_full(plan.variant.mask)

    @property
    def key_text(self) -> str:
        """Everything that affects the code."""
        return self.plan.key_text

    def check(self) -> None:
        """Besides the tables: what this kernel's roles take for granted.

        Raises: ScheduleError, LayoutError.
        """
        if self.plan.deterministic and self.schedule.add != "tma":
            raise ScheduleError(
                f"add = {self.schedule.add!r} with deterministic: the order of additions is kept "
                "by the warp that adds, so 'tma' is needed"
            )
        super().check()

    def expected(self) -> tuple[Expect, ...]:
        """What the tables promise about the machine code.

        The loop over tiles with an element mask is a place for the five products, so is the loop
        over those without.
        """
        s, (d, dv) = self.schedule, self.dims
        adds = {}
        if s.add == "tma":
            adds = {f"dq of warpgroup {n}": self.strip for n in range(s.consumers)}
        loads, stores = dict.fromkeys(("k", "v", "q", "do"), 1), {n: self.tiles[n] for n in "kv"}
        common = self.common_expectations(loads, stores, RANK, adds=adds)
        rows = Expect("UBLKCP", "exactly", 2, "bulk copies of lse and delta")
        places = 1 + int(self.ever_full)
        products: dict[str, int] = {}
        for height, cols, inner, beside in (
            (s.tile_n, s.tile_m, d, s.sharing),
            (s.tile_n, s.tile_m, dv, s.sharing),
            (s.tile_n, dv, s.tile_m, s.sharing),
            (s.tile_n, d, s.tile_m, s.sharing),
            (s.tile_m, d, s.tile_n, s.beside),
        ):
            name, count = wgmma.instructions(height, cols // beside, inner, s.consumers // beside)
            products[name] = products.get(name, 0) + places * count
        scores = s.tile_m * s.tile_n // (s.consumers * wgmma.WARPGROUP)
        why = f"five products, in {places} places"
        exponentials = (Expect("MUFU.EX2", "at least", places * scores, "an exponential a score"),)
        return (
            *common,
            rows,
            *(Expect(name, "exactly", count, why) for name, count in products.items()),
            *(exponentials if self.plan.variant.weight is None else ()),
        )

    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `host`: any lengths, heads, batch and strides."""
        return fake_args(self.plan, Elements.fake_captures(self.plan.variant))

    @cute.jit
    def host(self, q, k, v, o, lse, do, dlse, dq, dk, dv, captures, table, lse_log2, delta, sums,
             turns, captured, flags, scale, stream):  # fmt: skip
        """Launch what prepares the rows, a CTA for each tile of keys, and what finishes dQ."""
        captures = Elements.given_captures(self.plan.variant, frozenset(), captures)
        q, k, v, o, do, dq, dk, dv = (heads_last(t) for t in (q, k, v, o, do, dq, dk, dv))
        lse_log2, delta = rows_first(lse_log2), rows_first(delta)
        lse, dlse = (None if t is None else rows_first(t) for t in (lse, dlse))
        if cutlass.const_expr(self.summarise is not None):
            self.summarise.launch(captures, table, q.shape[0], k.shape[0], stream)
        self.prepare.launch(o, do, lse, dlse, lse_log2, delta, sums, turns, flags, stream)
        if cutlass.const_expr(turns is not None):  # a mode of one element, for a pointer to it
            ordered = cute.make_ordered_layout((1, *turns.shape), order=(0, 1, 2, 3))
            turns = cute.make_tensor(turns.iterator, ordered)
        io = Io(
            tuple(self.tiles["q"].load_atom(q)),
            tuple(self.tiles["k"].load_atom(k)),
            tuple(self.tiles["v"].load_atom(v)),
            tuple(self.tiles["do"].load_atom(do)),
            tuple(self.strip.add_atom(sums)) if self.schedule.add == "tma" else (None, sums),
            lse_log2,
            delta,
            tuple(self.tiles["k"].store_atom(dk)),
            tuple(self.tiles["v"].store_atom(dv)),
            captures,
            table,
            turns,
            captured,
            flags,
            scale,
        )
        seqlen_k, _, kv_heads, batches = k.shape
        n_blocks = cute.ceil_div(seqlen_k, self.schedule.tile_n)
        grid = self.order.tiles(n_blocks, kv_heads * batches)
        self.launch(io, (grid, 1, 1), stream)
        given = Given(q, k, v, do, dk, dv, lse_log2, delta, flags, captures, scale)
        self.finish.launch(sums, dq, given, stream)

    def work(self, io: Io) -> Work:
        """This CTA's tile."""
        return work_of(self.schedule, cute.arch.block_idx()[0], io.k[1])

    def elements(self, io: Io, head: Int32, batch: Int32) -> Elements:
        """The variant's functions at one head of queries."""
        lengths = (io.q[1].shape[0], io.k[1].shape[0])
        return Elements(self.plan.variant, io.captures, io.scale, (batch, head), lengths)

    def group(self, io: Io) -> Int32:
        """Heads of queries that read one head of K and V."""
        return io.q[1].shape[2] // io.k[1].shape[2]

    def first_strip(self, io: Io, head: Int32, batch: Int32) -> Int32:
        """The first strip of a head's sums of dQ; see sums.py."""
        before = batch * io.q[1].shape[2] + head
        return before * self.m_blocks(io) * self.schedule.consumers

    @cute.jit
    def producer(self, io, smem, ports, thread):
        """Warp 0 loads; warp 1, or warps 1 and 2 by turns, add dQ to its sums."""
        for atom, _ in (io.q, io.k, io.v, io.do):
            cpasync.prefetch_descriptor(atom)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        w = self.work(io)
        if warp == 0:
            self.produce(io, smem, ports, w)
        if cutlass.const_expr(self.schedule.add == "tma"):
            if warp >= 1 and warp <= self.adders:
                self.add(io, smem, w, warp - 1)

    @cute.jit
    def produce(self, io, smem, ports, w):
        """K and V, then the rows of each tile of queries that sees them, of head after head."""
        load_k = self.load("k", head_of(io.k, w.kv_head, w.batch), smem.k, col=0, prefetch=False)
        load_v = self.load("v", head_of(io.v, w.kv_head, w.batch), smem.v, col=0, prefetch=False)
        slot_kv = ports.kv.acquire_and_advance()
        load_k(w.n_block, slot_kv)
        load_v(w.n_block, slot_kv)
        slot_kv.commit()

        def load(ends, m_block, head, masked, _):
            visits, ring = ends
            visits = put(visits, smem.visits, 2 * m_block + masked, head)
            slot = ring.acquire_and_advance()
            self.rows(io.q, io.lse_log2, ("q", "lse"), smem, slot, m_block, head, w)
            self.rows(io.do, io.delta, ("do", "delta"), smem, slot, m_block, head, w)
            slot.commit()
            return visits, ring

        visits, _ = self.walk(io, w, (ports.visits, ports.rows), load, False)
        put(visits, smem.visits, Int32(END), Int32(0))

    def rows(self, source, numbers, names, smem, slot, m_block, head, w) -> None:
        """A tile of queries and its rows' numbers into a slot."""
        tile, row = names
        of_tile = head_of(source, head, w.batch)
        load = self.load(tile, of_tile, getattr(smem, tile), col=0, prefetch=False)
        load(m_block, slot)
        mine = cute.local_tile(numbers[None, head, w.batch], (self.schedule.tile_m,), (m_block,))
        self.tiles[row].load(mine, getattr(smem, row)[None, slot.index], slot.barrier)

    @cute.jit
    def add(self, io, smem, w, adder):
        """Add each tile's dQ to its sums, a strip a warpgroup; as many as `produce` loads.

        Where there are two warps for it, this one is `adder`, 0 or 1, and has every second tile.
        """
        s = self.schedule
        cpasync.prefetch_descriptor(io.sums[0])
        if adder == 0:
            self.emptied(0)

        def add(number, m_block, head, masked, turn):
            first = self.first_strip(io, head, w.batch) + m_block * s.consumers
            counter = None
            if cutlass.const_expr(self.plan.deterministic):
                counter = io.turns[None, m_block, head, w.batch]
            if cutlass.const_expr(self.adders > 1):
                self.add_every_second(io, smem, first, turn, counter, number, adder)
            else:
                self.add_tile(io, smem, first, turn, counter, 0)
            return number ^ (self.adders - 1)

        self.walk(io, w, Int32(0), add, self.plan.deterministic)

    @cute.jit
    def add_every_second(self, io, smem, first, turn, counter, number, adder):
        """Those of the tiles that are this warp's."""
        if number == adder:
            self.add_tile(io, smem, first, turn, counter, adder)

    @cute.jit
    def add_tile(self, io, smem, first, turn, counter, adder):
        """Add the strips from `first` on, in turn if there is one: when `counter` says so."""
        s = self.schedule
        for group in cutlass.range_constexpr(s.consumers):
            self.barriers["full", self.strip_of(adder, group)].arrive_and_wait()
            if cutlass.const_expr(turn is not None and group == 0):
                wait_for_turn(counter, turn)
            strip = (self.strip.rows, self.strip.cols)
            mine = cute.local_tile(smem.sums, strip, (group, 0))
            self.store(self.strip, io.sums, mine, (first + group, 0), wait=False)
        self.stored()
        self.emptied(adder ^ (self.adders - 1))
        if cutlass.const_expr(turn is not None):
            end_turn(counter)

    def emptied(self, adder: int | Int32) -> None:
        """Say that all strips may be written, for a tile that this warp will add."""
        for group in range(self.schedule.consumers):
            self.barriers["empty", self.strip_of(adder, group)].arrive_unaligned()

    def strip_of(self, adder: int | Int32, group: int | Int32) -> int | Int32:
        """The copy of a barrier for a warp that adds and a warpgroup's strip."""
        return group if self.adders == 1 else adder * self.schedule.consumers + group

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        """The gradients of one tile of keys."""
        s = self.schedule
        w = self.work(io)
        f = Fragments(s, self.dtype, self.dims, smem, thread)
        f.acc_dk.fill(0.0)
        f.acc_dv.fill(0.0)
        ports.kv.wait_and_advance()
        odd = self.along(io, smem, f, w, ports, thread)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        self.all_have_read(group, odd)
        f.acc_dk.store(f.acc_dk.load() * io.scale)
        wgmma.to_smem(f.acc_dv, smem.v[None, None, 0], f.dv, thread)
        wgmma.to_smem(f.acc_dk, smem.k[None, None, 0], f.dk, thread)
        cute.arch.fence_view_async_shared()
        self.meet(group)
        self.send(io, smem, w, thread)
        for acc, mma, size in ((f.acc_dv, f.dv, self.dims[1]), (f.acc_dk, f.dk, self.dims[0])):
            note(acc, wgmma.places(mma, s.tile_n, size, thread), io.flags, s.tile_n)
        self.stored()

    def all_have_read(self, group: Int32, odd: Int32) -> None:
        """Wait until no warpgroup reads K or V any more.

        The last strip of dQ says so, which the warp that adds has from all of them.
        """
        if self.schedule.add == "tma":
            self.barriers["empty", self.strip_of(odd, group)].arrive_and_wait()
        else:
            self.meet(group)

    @cute.jit
    def send(self, io, smem, w, thread):
        """Store dV and dK, in the shared memory of V and K, from the first warp."""
        if thread < WARP:
            of_head = head_of(io.dv, w.kv_head, w.batch)
            self.store(self.tiles["v"], of_head, smem.v[None, None, 0], (w.n_block, 0), wait=False)
            of_head = head_of(io.dk, w.kv_head, w.batch)
            self.store(self.tiles["k"], of_head, smem.k[None, None, 0], (w.n_block, 0), wait=False)
