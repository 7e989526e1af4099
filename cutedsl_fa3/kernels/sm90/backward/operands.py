"""What the backward's roles work on: arguments, a thread's fragments, rows of an accumulator."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cutedsl_fa3.layouts import transposed, wgmma
from cutedsl_fa3.layouts.wgmma import Places

from .schedule import WORDS, BackwardSchedule

if TYPE_CHECKING:
    from cutedsl_fa3.plans_backward import BackwardPlan

CHUNK = 8  # columns that a lane stores at once
LANES = 4  # that hold a row of an accumulator together
AT_ONCE = 8  # numbers that are rounded together
FEW = 4  # where they are no operand from registers, whose rounding the products would wait for


@dataclass(frozen=True)
class Io:
    """What the kernel reads and writes.

    Shape: q, k, v, do as (seqlen, head_dim, heads, batch) with their TMA atoms, and dk, dv likewise
    with those that store; lse_log2 and delta (rows, heads, batch) fp32 with whole tiles of rows;
    sums (rows, WORDS) as sums.py has it, with the atom that adds to it; captures in the variant's
    order; table as variant/summaries.py has it; turns (1, m_blocks, heads, batch), how many tiles
    of keys have added to dQ, where the order is fixed; captured, the fp32 gradients of
    `plan.wanted`; flags (n,), not 0 where keys are to be computed again (again.py).
    Units: scale is natural (raw product -> score), lse_log2 in base 2.
    """

    q: tuple[cute.CopyAtom, cute.Tensor]
    k: tuple[cute.CopyAtom, cute.Tensor]
    v: tuple[cute.CopyAtom, cute.Tensor]
    do: tuple[cute.CopyAtom, cute.Tensor]
    sums: tuple[cute.CopyAtom | None, cute.Tensor]
    lse_log2: cute.Tensor
    delta: cute.Tensor
    dk: tuple[cute.CopyAtom, cute.Tensor]
    dv: tuple[cute.CopyAtom, cute.Tensor]
    captures: tuple[cute.Tensor, ...] | None
    table: cute.Tensor | None
    turns: cute.Tensor | None
    captured: tuple[cute.Tensor, ...] | None
    flags: cute.Tensor
    scale: Float32


def fake_args(plan: BackwardPlan, captures: tuple | None) -> tuple:
    """Stand-ins for the arguments of `host`, of any lengths, heads, batch and strides.

    `captures` is as `inputs.as_numbers` makes it; no launch checks it.
    """
    problem, s = plan.problem, plan.schedule
    dtype, d, dv = problem.element, problem.head_dim, problem.head_dim_v
    aligned = 16 // (dtype.width // 8)
    batch, heads, kv_heads, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(5))
    rows = cute.sym_int(divisibility=s.tile_m)

    def tensor(seqlen: cute.SymInt, heads: cute.SymInt, dim: int) -> cute.Tensor:
        strides = (*(cute.sym_int64(divisibility=aligned) for _ in range(3)), 1)
        return make_fake_tensor(dtype, (batch, seqlen, heads, dim), strides, assumed_align=16)

    def of_rows() -> cute.Tensor:
        strides = tuple(cute.sym_int64() for _ in range(3))
        return make_fake_tensor(Float32, (batch, heads, seqlen_q), strides, assumed_align=4)

    def padded() -> cute.Tensor:
        strides = (*(cute.sym_int64(divisibility=s.tile_m) for _ in range(2)), 1)
        return make_fake_tensor(Float32, (batch, heads, rows), strides, assumed_align=16)

    def table() -> cute.Tensor | None:
        shape = plan.table_shape(1, 1, 1, 1)
        if shape is None:
            return None
        shape = (*(cute.sym_int() for _ in range(3)), shape[3])
        return make_fake_compact_tensor(Int32, shape, stride_order=(3, 2, 1, 0), assumed_align=16)

    def turns() -> cute.Tensor:
        shape = (cute.sym_int(), heads, batch)  # in the order of memory
        return make_fake_compact_tensor(Int32, shape, stride_order=(0, 1, 2), assumed_align=4)

    def captured(number: int) -> cute.Tensor:
        shape = tuple(cute.sym_int() for _ in range(max(1, plan.variant.captures[number].dim())))
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(Float32, shape, stride_order=order, assumed_align=4)

    queries = (seqlen_q, heads, d)
    return (
        tensor(*queries),
        tensor(seqlen_k, kv_heads, d),
        tensor(seqlen_k, kv_heads, dv),
        tensor(seqlen_q, heads, dv),
        of_rows() if plan.variant.has_lse else None,
        tensor(seqlen_q, heads, dv),
        of_rows() if plan.has_dlse else None,
        tensor(*queries),
        tensor(seqlen_k, kv_heads, d),
        tensor(seqlen_k, kv_heads, dv),
        captures,
        table(),
        padded(),
        padded(),
        make_fake_compact_tensor(
            Float32, (cute.sym_int(), WORDS), stride_order=(1, 0), assumed_align=16
        ),
        turns() if plan.deterministic else None,
        tuple(captured(number) for number in plan.wanted) or None,
        make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def dq_mma(s: BackwardSchedule, dtype: type, d: int) -> cute.TiledMma:
    """The product dQ = dS K: the warpgroups share its rows, or its columns if those are few."""
    return wgmma.tiled_mma(
        dtype,
        d // s.beside,
        s.consumers // s.beside,
        a_major="k" if s.sharing == 1 else "m",
        b_major="n",
        beside=s.beside,
    )


def exchanged(t: cute.Tensor) -> cute.Tensor:
    """(rows, cols) as (cols, rows)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 0]))


def by_query(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator of keys x queries, as (queries, keys) of what this thread holds."""
    return exchanged(wgmma.as_rows_cols(acc))


def rounded(acc: cute.Tensor, to: cute.Tensor) -> None:
    """Convert an accumulator to the input dtype, a few at a time.

    Where all are converted at once the compiler may convert them one by one, and wait before each
    instruction of the product that reads them.
    """
    at_once = min(AT_ONCE, cute.size(acc))
    few = cute.make_layout(at_once)
    for first in range(0, cute.size(acc), at_once):
        part = cute.make_tensor(acc.iterator + first, few).load().to(to.element_type)
        cute.make_tensor(to.iterator + first, few).store(part)


def store_rows(
    acc: cute.Tensor,
    places: Places,
    out: cute.Tensor,
    first: Int32,
    factor: Float32,
    whole: bool,
) -> None:
    """An accumulator to global memory, 16 bytes a lane, times a factor.

    Shape: acc (rows, cols) of this thread at `places` below row `first`; out (seqlen, dim): rows
    and, unless `whole`, columns outside it are left out.
    """
    values = wgmma.as_rows_cols(acc)
    for n in range(cute.size(acc)):
        acc[n] = acc[n] * factor
    lane = cute.arch.lane_idx() % LANES
    vectored = cute.size(values, mode=[1]) // CHUNK * CHUNK
    for r in range(len(places.row_offsets)):
        of_row = [values[r, n] for n in range(cute.size(values, mode=[1]))]
        vectors = wgmma.row_vectors(filled(of_row[:vectored]), out.element_type)
        row = first + places.row + places.row_offsets[r]
        _store_row(vectors, out, row, places.col // CHUNK + lane, CHUNK, whole)
        pairs = [
            filled(of_row[n : n + 2], out.element_type) for n in range(vectored, len(of_row), 2)
        ]
        _store_row(pairs, out, row, (places.col + LANES * vectored) // 2, 2, whole)


def filled(values: list, dtype: type = Float32) -> cute.Tensor:
    """Registers that hold these numbers."""
    made = cute.make_rmem_tensor(len(values), dtype)
    for n, value in enumerate(values):
        made[n] = value.to(dtype)
    return made


@cute.jit
def _store_row(vectors, out, row, chunk, size: cutlass.Constexpr, whole: cutlass.Constexpr):
    """Vectors of `size` to every fourth place of that size from `chunk` on."""
    if row < out.shape[0]:
        for n in cutlass.range_constexpr(len(vectors)):
            if whole or size * (chunk + LANES * n) < out.shape[1]:
                target = cute.local_tile(out, (1, size), (row, chunk + LANES * n))
                cute.autovec_copy(vectors[n], target[0, None])


def operand(held: cute.Tensor, stored: cute.Tensor | None, place: Int32) -> cute.Tensor:
    """P^T or dS^T as an operand: this thread's registers, or a place of shared memory."""
    return wgmma.as_operand(held) if stored is None else stored[None, None, None, place]


class Fragments:
    """One consumer thread's operands and accumulators, with the five products on them.

    S and dP are computed transposed, keys x queries, so that P^T and dS^T are operands from
    registers for dV and dK; warpgroups that share keys have them from shared memory. `places` says
    where a thread's scores lie as (queries, keys) in the tile.
    """

    def __init__(
        self,
        s: BackwardSchedule,
        dtype: type,
        dims: tuple[int, int],
        smem: SimpleNamespace,
        thread: Int32,
    ) -> None:
        d, dv = dims
        self.schedule, self.dims = s, dims
        self.scores = wgmma.tiled_mma(dtype, s.tile_m // s.sharing, s.groups, beside=s.sharing)
        self.dv, self.dk = (
            wgmma.tiled_mma(
                dtype,
                cols // s.sharing,
                s.groups,
                a_from="registers" if s.sharing == 1 else "smem",
                b_major="n",
                beside=s.sharing,
            )
            for cols in (dv, d)
        )
        self.dq = dq_mma(s, dtype, d)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        of_scores, of_dv, of_dk, of_dq = (
            wgmma.operands_of(mma, group) for mma in (self.scores, self.dv, self.dk, self.dq)
        )
        self.k = self.scores.make_fragment_A(of_scores.partition_A(smem.k))
        self.v = self.scores.make_fragment_A(of_scores.partition_A(smem.v))
        self.q, self.do = (
            self.scores.make_fragment_B(of_scores.partition_B(t)) for t in (smem.q, smem.do)
        )
        self.do_t = self.dv.make_fragment_B(of_dv.partition_B(transposed(smem.do)))
        self.q_t = self.dk.make_fragment_B(of_dk.partition_B(transposed(smem.q)))
        self.p_t, self.ds_t = None, None  # where they come from shared memory
        if s.sharing > 1:
            self.p_t = self.dv.make_fragment_A(of_dv.partition_A(smem.p))
            self.ds_t = self.dk.make_fragment_A(of_dk.partition_A(smem.ds))
        ds = smem.ds if s.sharing == 1 else transposed(smem.ds)
        self.ds = self.dq.make_fragment_A(of_dq.partition_A(ds))
        self.k_t = self.dq.make_fragment_B(of_dq.partition_B(transposed(smem.k)))
        self.acc_dk = wgmma.accumulator(self.dk, s.tile_n, d)
        self.acc_dv = wgmma.accumulator(self.dv, s.tile_n, dv)
        held = self.scores.partition_shape_C((s.tile_n, s.tile_m))
        self.p16, self.ds16 = (cute.make_rmem_tensor(held, dtype) for _ in range(2))

    def places(self, thread: Int32) -> Places:
        """Where a thread's scores lie in the tile, as (queries, keys)."""
        at = wgmma.places(self.scores, self.schedule.tile_n, self.schedule.tile_m, thread)
        return Places(at.col, at.row, at.col_offsets, at.row_offsets)

    def store_ds(self, tile: cute.Tensor, place: Int32, thread: Int32) -> None:
        """dS, rounded, to a place of `tile`, which has queries in rows unless keys are shared."""
        alone = self.schedule.sharing == 1
        ds = transposed(tile) if alone else tile
        wgmma.to_smem(self.ds16, ds[None, None, place], self.scores, thread, transpose=alone)

    def multiply_scores(self, a: cute.Tensor, b: cute.Tensor, slot) -> cute.Tensor:
        """Issue S^T = K Q^T or dP^T = V dO^T into fresh registers."""
        warpgroup.fence()
        acc = wgmma.accumulator(self.scores, self.schedule.tile_n, self.schedule.tile_m)
        at = b[None, None, None, slot.index]
        wgmma.issue(self.scores, acc, a[None, None, None, 0], at, accumulate=False)
        return acc

    def multiply_dv(self, slot, place: Int32) -> None:
        """Issue dV += P^T dO."""
        warpgroup.fence()
        do = self.do_t[None, None, None, slot.index]
        p = operand(self.p16, self.p_t, place)
        wgmma.issue(self.dv, self.acc_dv, p, do, accumulate=True)

    def multiply_dk(self, slot, place: Int32) -> None:
        """Issue dK += dS^T Q."""
        warpgroup.fence()
        q = self.q_t[None, None, None, slot.index]
        ds = operand(self.ds16, self.ds_t, place)
        wgmma.issue(self.dk, self.acc_dk, ds, q, accumulate=True)

    def multiply_dq(self, place: Int32) -> cute.Tensor:
        """Issue dQ = dS K of this tile of keys into fresh registers."""
        warpgroup.fence()
        acc = wgmma.accumulator(self.dq, self.schedule.tile_m, self.dims[0])
        ds, k = self.ds[None, None, None, place], self.k_t[None, None, None, 0]
        wgmma.issue(self.dq, acc, ds, k, accumulate=False)
        return acc
