"""The attention forward on SM90.

    role        does                                                              rings
    producer    Q once, then the visible K and V tiles, by TMA                 -> q, k, v
    consumer    S = Q K^T -> score -> mask -> online softmax -> O += P V       <- q, k, v
                then O / row_sum -> shared memory -> TMA store

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

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutedsl_fa3.layouts import Tile, transposed, wgmma
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
from cutedsl_fa3.variant.bounds import Runs
from cutedsl_fa3.variant.describe import shape

from .elements import Elements
from .softmax import OnlineSoftmax


@dataclass(frozen=True)
class Io:
    """What the kernel reads and writes.

    Shape: q, k, v, o as (seqlen, head_dim, heads, batch) with their TMA atoms; lse (seqlen_q,
    heads, batch) fp32; captures in the variant's order.
    Units: scale is natural (raw product -> score).
    """

    q: tuple[cute.CopyAtom, cute.Tensor]
    k: tuple[cute.CopyAtom, cute.Tensor]
    v: tuple[cute.CopyAtom, cute.Tensor]
    o: tuple[cute.CopyAtom, cute.Tensor]
    lse: cute.Tensor
    captures: tuple[cute.Tensor, ...]
    scale: Float32


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

    def __init__(self, plan) -> None:
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
        if d == dv:
            self.aliases = {"o": "q"}  # a warpgroup's O rows replace its own Q rows
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
        self.ever_full = shape(plan.variant.mask).ever_full

    @property
    def name(self) -> str:
        """The kernel's symbol prefix."""
        return "forward_sm90"

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
        rows, cols = 2, s.tile_n // 4  # of scores that one thread holds
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
        """(q, k, v, o, lse, captures, scale, stream) of any lengths, heads, batch and strides."""
        aligned = 16 // (self.dtype.width // 8)
        batch, heads, kv_heads, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(5))

        def tensor(seqlen: cute.SymInt, heads: cute.SymInt, dim: int) -> cute.Tensor:
            strides = (*(cute.sym_int64(divisibility=aligned) for _ in range(3)), 1)
            shape = (batch, seqlen, heads, dim)
            return make_fake_tensor(self.dtype, shape, strides, assumed_align=16)

        d, dv = self.tiles["q"].cols, self.head_dim_v
        lse_strides = tuple(cute.sym_int64() for _ in range(3))
        lse = make_fake_tensor(Float32, (batch, heads, seqlen_q), lse_strides, assumed_align=4)
        return (
            tensor(seqlen_q, heads, d),
            tensor(seqlen_k, kv_heads, d),
            tensor(seqlen_k, kv_heads, dv),
            tensor(seqlen_q, heads, dv),
            lse,
            Elements.fake_captures(self.plan.variant) or None,
            Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def host(self, q, k, v, o, lse, captures, scale, stream):
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
        w = self.work(io)
        load_q = self.load("q", head_of(io.q, w.head, w.batch), smem.q, col=0)
        load_k = self.load("k", head_of(io.k, w.kv_head, w.batch), smem.k, col=0)
        load_v = self.load("v", head_of(io.v, w.kv_head, w.batch), smem.v, col=0)
        ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
        total = w.runs.n_total
        warp = cute.arch.make_warp_uniform(thread // 32)
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
        s = self.schedule
        w = self.work(io)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        f = Fragments(self, smem, thread)
        softmax = OnlineSoftmax(len(f.places.row_offsets), w.elements.unit)
        turns = Turns(self.barriers, "turn", group) if s.pingpong else None
        ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
        partial, total = w.runs.n_partial, w.runs.n_total
        if total > 0:
            ring_q.wait_and_advance()
            if cutlass.const_expr(s.intra):
                ring_k = self.first_scores(w, f, softmax, ring_k)
                for j in cutlass.range(1, partial, unroll=1):
                    ring_k, ring_v = self.overlapped(w, f, softmax, turns, ring_k, ring_v, j, True)
                if cutlass.const_expr(self.ever_full):
                    for j in cutlass.range(cutlass.max(partial, 1), total, unroll=1):
                        ring_k, ring_v = self.overlapped(
                            w, f, softmax, turns, ring_k, ring_v, j, False
                        )
                self.last_values(f, ring_v)
            else:
                for j in cutlass.range(partial, unroll=1):
                    ring_k, ring_v = self.serial(w, f, softmax, turns, ring_k, ring_v, j, True)
                if cutlass.const_expr(self.ever_full):
                    for j in cutlass.range(partial, total, unroll=1):
                        ring_k, ring_v = self.serial(w, f, softmax, turns, ring_k, ring_v, j, False)
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
        rows = cute.local_tile(smem.o, (self.strip.rows, self.strip.cols), (group, 0))
        wgmma.to_smem(f.acc_o, rows, f.pv_strip, thread % wgmma.WARPGROUP)
        cute.arch.fence_view_async_shared()
        self.barriers["strip", group].arrive_and_wait()
        if thread % wgmma.WARPGROUP < 32:
            target = head_of(io.o, w.head, w.batch)
            block = w.m_block * self.schedule.consumers + group
            self.store(self.strip, target, rows, (block, 0))
        lse_row = io.lse[None, w.head, w.batch]
        for r in cutlass.range_constexpr(len(lse)):
            offset = f.places.row + f.places.row_offsets[r]
            row = w.m_block * self.schedule.tile_m + offset
            if thread % 4 == 0 and row < io.lse.shape[0]:
                lse_row[row] = lse[r]


class Fragments:
    """One consumer thread's operands and accumulators, with the two products on them.

    `output` is acc_o as (rows, cols) of this thread; `places` says where its scores lie in the
    tile. CuTe calls these tSrQ, tSrK, tOrP, tOrV.
    """

    def __init__(self, kernel: ForwardSm90, smem, thread: Int32) -> None:
        s, dtype, dv = kernel.schedule, kernel.dtype, kernel.head_dim_v
        self.qk = wgmma.tiled_mma(dtype, s.tile_n, s.consumers)
        self.pv = wgmma.tiled_mma(dtype, dv, s.consumers, a_from="registers", b_major="n")
        self.pv_strip = wgmma.tiled_mma(dtype, dv, 1, a_from="registers", b_major="n")
        qk, pv = self.qk.get_slice(thread), self.pv.get_slice(thread)
        self.q = self.qk.make_fragment_A(qk.partition_A(smem.q))
        self.k = self.qk.make_fragment_B(qk.partition_B(smem.k))
        self.v = self.pv.make_fragment_B(pv.partition_B(transposed(smem.v)))
        self.tile_m, self.tile_n = s.tile_m, s.tile_n
        self.acc_o = wgmma.accumulator(self.pv, s.tile_m, dv)
        self.acc_o.fill(0.0)
        self.p = cute.make_rmem_tensor(self.qk.partition_shape_C((s.tile_m, s.tile_n)), dtype)
        self.output = wgmma.as_rows_cols(self.acc_o)
        self.places = wgmma.places(self.qk, s.tile_m, s.tile_n, thread)

    def multiply_qk(self, slot) -> cute.Tensor:
        """Issue S = Q K^T into a fresh acc_s, so that no registers are held for it in between."""
        warpgroup.fence()
        q, k = self.q[None, None, None, 0], self.k[None, None, None, slot.index]
        acc_s = wgmma.accumulator(self.qk, self.tile_m, self.tile_n)
        wgmma.issue(self.qk, acc_s, q, k, accumulate=False)
        return acc_s

    def multiply_pv(self, slot) -> None:
        """Issue O += P V."""
        warpgroup.fence()
        p, v = wgmma.as_operand(self.p), self.v[None, None, None, slot.index]
        wgmma.issue(self.pv, self.acc_o, p, v, accumulate=True)

    def round_p(self, acc_s: cute.Tensor) -> None:
        """P in the input dtype, as the second product reads it."""
        self.p.store(acc_s.load().to(self.p.element_type))


def heads_last(t: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, dim) -> (seqlen, dim, heads, batch): a tile is modes 0 and 1."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))


def head_of(source: tuple, head: Int32, batch: Int32) -> tuple:
    """The (atom, coordinates) of one head."""
    atom, gmem = source
    return atom, gmem[None, None, head, batch]
