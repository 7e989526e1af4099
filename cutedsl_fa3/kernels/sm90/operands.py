"""What the forward's roles work on: arguments, one head's tensors, a thread's fragments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cutedsl_fa3.layouts import transposed, wgmma
from cutedsl_fa3.pipelines import Barriers, Schedule

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan

AT_ONCE = 8  # scores that are rounded together
WARP_ROWS = 16  # of an accumulator that a warp holds


@dataclass(frozen=True)
class Io:
    """What the kernel reads and writes.

    Shape: q, k, v, o as (rows, head_dim, heads, batch) with their TMA atoms, o without where it
    is stored from registers; plain: q, k, v without, where rows may have to be computed again; lse
    (rows, heads, batch) fp32, None for weights without one. Rows are positions; of q, o and lse,
    where a tile packs heads, (pack, seqlen_q), and heads are then packs of them. captures in the
    variant's order; table as variant/summaries.py has it; visits (batch, heads, m_blocks,
    n_blocks + 1) in a build that traces them; counter (1,), from which persistent CTAs draw their
    tiles.
    Units: scale is natural (raw product -> score).
    """

    q: tuple[cute.CopyAtom, cute.Tensor]
    k: tuple[cute.CopyAtom, cute.Tensor]
    v: tuple[cute.CopyAtom, cute.Tensor]
    o: tuple[cute.CopyAtom | None, cute.Tensor]
    plain: tuple[cute.Tensor, cute.Tensor, cute.Tensor] | None
    lse: cute.Tensor | None
    captures: tuple[cute.Tensor, ...] | None
    table: cute.Tensor | None
    visits: cute.Tensor | None
    counter: cute.Tensor | None
    scale: Float32


def fake_args(plan: Plan, captured: tuple | None) -> tuple:
    """Stand-ins for the arguments of `host`, of any lengths, heads, batch and strides.

    (q, k, v, o, lse, captured, table, visits, counter, ctas, scale, stream), None for what the
    plan has not. `captured` is as `inputs.as_numbers` makes it; no launch checks it.
    """
    problem = plan.problem
    dtype, d, dv = problem.element, problem.head_dim, problem.head_dim_v
    aligned = 16 // (dtype.width // 8)
    pack = plan.schedule.pack
    batch, kv_heads, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(4))
    heads = cute.sym_int() if pack == 1 else cute.sym_int(divisibility=pack)

    def tensor(seqlen: cute.SymInt, heads: cute.SymInt, dim: int) -> cute.Tensor:
        strides = (*(cute.sym_int64(divisibility=aligned) for _ in range(3)), 1)
        return make_fake_tensor(dtype, (batch, seqlen, heads, dim), strides, assumed_align=16)

    def words(dtype: type, rank: int, shape: tuple = ()) -> cute.Tensor:
        shape = shape or tuple(cute.sym_int() for _ in range(rank))
        strides = tuple(cute.sym_int64() for _ in range(rank))
        return make_fake_tensor(dtype, shape, strides, assumed_align=4)

    def table(words_a_block: int) -> cute.Tensor:
        shape = (*(cute.sym_int() for _ in range(3)), words_a_block)
        return make_fake_compact_tensor(Int32, shape, stride_order=(3, 2, 1, 0), assumed_align=16)

    def one_word() -> cute.Tensor:
        return make_fake_compact_tensor(Int32, (1,), assumed_align=4)

    persistent = plan.schedule.persistent
    per_block = plan.table_shape(1, 1, 1, 1)  # its last extent is known: words a block
    return (
        tensor(seqlen_q, heads, d),
        tensor(seqlen_k, kv_heads, d),
        tensor(seqlen_k, kv_heads, dv),
        tensor(seqlen_q, heads, dv),
        words(Float32, 3, (batch, heads, seqlen_q)) if plan.variant.has_lse else None,
        captured,
        per_block and table(per_block[3]),
        words(Int32, 4) if plan.trace else None,
        one_word() if persistent else None,
        Int32(1) if persistent else None,
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def rows_first(lse: cute.Tensor) -> cute.Tensor:
    """(batch, heads, seqlen_q) -> (seqlen_q, heads, batch)."""
    return cute.make_tensor(lse.iterator, cute.select(lse.layout, mode=[2, 1, 0]))


def heads_last(t: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, dim) -> (seqlen, dim, heads, batch): a tile is modes 0 and 1."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))


def heads_packed(t: cute.Tensor, pack: int) -> cute.Tensor:
    """(seqlen, ..., heads, batch) -> ((pack, seqlen), ..., heads / pack, batch).

    Row query * pack + head of a pack is that query of that head.
    """
    if pack == 1:
        return t
    (seqlen, *inner, heads, batch), (along, *within, apart, far) = t.shape, t.stride
    shape = ((pack, seqlen), *inner, heads // pack, batch)
    stride = ((apart, along), *within, apart * pack, far)
    return cute.make_tensor(t.iterator, cute.make_layout(shape, stride=stride))


def head_of(source: tuple, head: Int32, batch: Int32) -> tuple:
    """The (atom, coordinates) of one head."""
    atom, gmem = source
    return atom, gmem[None, None, head, batch]


def unpacked(places: wgmma.Places, pack: int) -> tuple[wgmma.Places, tuple]:
    """Places with rows counted in queries, and the heads of the rows: of all, or of each.

    An offset of 8 rows, the only one, never carries from heads to queries: a thread's first row has
    no 8 in it.
    """
    if pack == 1:
        return places, (0,)
    heads = dict.fromkeys(offset % pack for offset in places.row_offsets)
    offsets = tuple(offset // pack for offset in places.row_offsets)
    queries = wgmma.Places(places.row // pack, places.col, offsets, places.col_offsets)
    return queries, tuple(places.row % pack + head for head in heads)


def read_queries(f: Fragments, slot) -> None:
    """Products read Q from this slot of its ring from now on.

    A function, since a staged `if` would carry an object whose method is called in it.
    """
    if cute.size(f.q, mode=[3]) > 1:
        f.q_slot = slot.index


class Fragments:
    """One consumer thread's operands and accumulators, with the two products on them.

    `output` is acc_o as (rows, cols) of this thread; `places` says where its scores lie in the
    tile, `queries` the same in queries and keys, `heads` which of the packed heads its rows are of:
    one for all of its rows, or one for each. `barriers` are needed where P goes through shared
    memory. CuTe calls these tSrQ, tSrK, tOrP, tOrV.
    """

    def __init__(
        self,
        schedule: Schedule,
        dtype: type,
        dv: int,
        smem: SimpleNamespace,
        thread: Int32,
        barriers: Barriers | None = None,
    ) -> None:
        s, self.barriers = schedule, barriers
        self.tile_m, self.tile_n = s.tile_m, s.tile_n
        self.qk = wgmma.tiled_mma(dtype, s.tile_n, s.consumers)
        in_smem = s.p_from == "shared"
        source = "smem" if in_smem else "registers"
        self.pv = wgmma.tiled_mma(dtype, dv, s.consumers, a_from=source, b_major="n")
        self.pv_strip = wgmma.tiled_mma(dtype, dv, 1, a_from="registers", b_major="n")
        self.group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        qk, pv = (wgmma.operands_of(mma, self.group) for mma in (self.qk, self.pv))
        self.q, self.q_slot = self.qk.make_fragment_A(qk.partition_A(smem.q)), 0
        self.k = self.qk.make_fragment_B(qk.partition_B(smem.k))
        self.v = self.pv.make_fragment_B(pv.partition_B(transposed(smem.v)))
        self.half = s.tile_n // 2  # keys of a half that is multiplied without the other
        self.k_halves = self._halves(smem.k) if s.halves else ()
        self.acc_o = wgmma.accumulator(self.pv, s.tile_m, dv)
        self.p = cute.make_rmem_tensor(self.qk.partition_shape_C((s.tile_m, s.tile_n)), dtype)
        self.p_operand = wgmma.as_operand(self.p)
        self.p_strip, self.thread = None, thread
        if in_smem:
            self.p_operand = self.pv.make_fragment_A(pv.partition_A(smem.p))
            self.p_strip = cute.local_tile(smem.p, (wgmma.ROWS, s.tile_n), (self.group, 0))
            self.qk_strip = wgmma.tiled_mma(dtype, s.tile_n, 1)
        self.output = wgmma.as_rows_cols(self.acc_o)
        self.places = wgmma.places(self.qk, s.tile_m, s.tile_n, thread)
        self.queries, self.heads = unpacked(self.places, s.pack)
        if s.pack >= WARP_ROWS:  # a warp's rows are of one query: one register holds it for all
            row = cute.arch.make_warp_uniform(self.queries.row)
            self.queries = replace(self.queries, row=row)

    def _halves(self, k: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """The operands that the two halves of a tile of keys are."""
        self.qk_half = wgmma.tiled_mma(k.element_type, self.half, self.tile_m // wgmma.ROWS)
        mine = wgmma.operands_of(self.qk_half, self.group)
        shape = (self.half, cute.size(k, mode=[1]))
        halves = (cute.local_tile(k, shape, (half, 0, None)) for half in range(2))
        return tuple(self.qk_half.make_fragment_B(mine.partition_B(half)) for half in halves)

    def queries_of(self, half: int | None) -> wgmma.Places:
        """`queries` of one half of the keys, or of all."""
        if half is None:
            return self.queries
        first = self.queries.col + half * self.half
        offsets = self.queries.col_offsets
        return replace(self.queries, col=first, col_offsets=offsets[: len(offsets) // 2])

    def multiply_qk(self, slot, half: int | None = None) -> cute.Tensor:
        """Issue S = Q K^T into a fresh acc_s, so that no registers are held for it in between.

        With `half` of these keys alone, 0 or 1.
        """
        warpgroup.fence()
        mma, keys, operand = self.qk, self.tile_n, self.k
        if half is not None:
            mma, keys, operand = self.qk_half, self.half, self.k_halves[half]
        q, k = self.q[None, None, None, self.q_slot], operand[None, None, None, slot.index]
        acc_s = wgmma.accumulator(mma, self.tile_m, keys)
        wgmma.issue(mma, acc_s, q, k, accumulate=False)
        return acc_s

    def multiply_pv(self, slot, half: int | None = None) -> None:
        """Issue O += P V; `half` 0: of the first half of the keys alone."""
        warpgroup.fence()
        v = self.v[None, None, None, slot.index]
        steps = None if half is None else self.half // wgmma.DEPTH
        wgmma.issue(self.pv, self.acc_o, self.p_operand, v, accumulate=True, steps=steps)

    def round_p(self, acc_s: cute.Tensor, half: int | None = None) -> None:
        """P in the input dtype, as the second product reads it; 0 for the other half of the keys.

        A few at a time: where all are converted at once the compiler may convert them one by one,
        and wait before each instruction of the second product.
        """
        count, few = cute.size(acc_s), cute.make_layout(AT_ONCE)
        begin = count if half == 1 else 0
        for first in range(0, count, AT_ONCE):
            rounded = cute.make_tensor(acc_s.iterator + first, few).load().to(self.p.element_type)
            cute.make_tensor(self.p.iterator + begin + first, few).store(rounded)
        if half is not None:
            cute.make_tensor(self.p.iterator + count - begin, cute.make_layout(count)).fill(0.0)
        if self.p_strip is not None:
            self.store_p()

    def store_p(self) -> None:
        """P to shared memory, when all warps are done with the one before."""
        barrier = self.barriers["p", self.group]
        barrier.arrive_and_wait()
        wgmma.to_smem(self.p, self.p_strip, self.qk_strip, self.thread % wgmma.WARPGROUP)
        cute.arch.fence_view_async_shared()
        barrier.arrive_and_wait()
