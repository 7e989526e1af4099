"""Gradients that a hidden value has spoilt, computed again from the pairs that see each other.

WGMMA multiplies every value of a visited tile, and 0 * NaN is NaN: a query, a key or a gradient
that is not finite spoils its columns of dK, dV or dQ for the whole tile, although the mask hides
it. What is lost shows as sums that are not finite; such rows, rare as they are, are computed again
by a warp each, which holds eight neighbours of each row in a lane:

    a row of    walks along               and sums                  who notices
    dQ          the keys that it sees     dS * K                    the kernel that finishes dQ
    dK and dV   the queries that see it   dS * Q, P * dO            the backward, by a flag for 16

What is then not finite is so because a pair that is seen makes it so, as IEEE has it. Gradients of
captured tensors are sums over elements, from which hidden ones are left out one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cutedsl_fa3.kernels.sm90.elements import Elements
from cutedsl_fa3.kernels.sm90.exact import lost
from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.layouts.wgmma import Places
from cutedsl_fa3.pipelines.roles import WARP
from cutedsl_fa3.variant.lower import exp2, select

from .visiting import first_of
from .weights import Weigher
from .work import FLAGGED, work_of

if TYPE_CHECKING:
    from cutedsl_fa3.plans_backward import BackwardPlan

VECTOR = 8  # elements of 16 bytes
EVERY_LANE = (1, 2, 4, 8, 16)  # butterfly distances
FIRST_LANES = 0x11111111  # of the four lanes that hold a row


@dataclass(frozen=True)
class Given:
    """What a row is computed again from, and dK and dV.

    Shape: q, k, v, do, dk, dv (seqlen, dim, heads, batch) in global memory; lse_log2 and delta
    (rows, heads, batch) as prepare.py leaves them; flags (n,) int32, not 0 where keys are lost.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    lse_log2: cute.Tensor
    delta: cute.Tensor
    flags: cute.Tensor
    captures: tuple[cute.Tensor, ...] | None
    scale: Float32


@cute.jit
def flag(flags, number, spoilt):
    """Say that some of 16 keys are lost, if a lane of this warp has seen it."""
    if cute.arch.vote_ballot_sync(spoilt) != 0:
        if cute.arch.lane_idx() == 0:
            flags[number] = Int32(1)


def note(acc: cute.Tensor, places: Places, flags: cute.Tensor, tile_n: int) -> None:
    """Flag the rows of this CTA's dK or dV that are not finite. All threads of a warp take part.

    Flags are numbered by CTA, whose number costs no register until then.
    """
    values = wgmma.as_rows_cols(acc)
    offsets = places.row_offsets
    first = cute.arch.block_idx()[0] * (tile_n // FLAGGED)
    for r in range(0, len(offsets), wgmma.ROWS_HELD):
        zero = Float32(0.0)
        for beside in range(wgmma.ROWS_HELD):
            for c in range(len(places.col_offsets)):
                zero = cute.math.fma(values[r + beside, c], Float32(0.0), zero)
        flag(flags, first + (places.row + offsets[r]) // FLAGGED, zero != zero)


class Again:
    """Computes rows of one plan's gradients again."""

    def __init__(self, plan: BackwardPlan) -> None:
        problem = plan.problem
        self.variant, self.dtype, self.schedule = plan.variant, problem.element, plan.schedule
        self.chunks = problem.head_dim // VECTOR
        self.chunks_v = problem.head_dim_v // VECTOR

    def weigher(self, given: Given, head: Int32, batch: Int32) -> Weigher:
        """The variant's functions at one head of queries."""
        lengths = (given.q.shape[0], given.k.shape[0])
        elements = Elements(self.variant, given.captures, given.scale, (batch, head), lengths)
        return Weigher(elements, self.variant)

    @cute.jit
    def queries(self, given, spoilt, row, head, batch, dq, columns):
        """Rows of dQ again: those of the lanes that say `spoilt`, in columns of this warp.

        `row` is that of each lane; columns are (first, count) in vectors.
        """
        cute.arch.sync_warp()  # what is written over has been written
        found = cute.arch.vote_ballot_sync(spoilt) & FIRST_LANES
        while found != 0:
            bit = first_of(found)
            found = found & (found - 1)
            self.query(given, cute.arch.shuffle_sync(row, bit), head, batch, dq, columns)

    @cute.jit
    def query(self, given, row, head, batch, dq, columns):
        """A row of dQ from the keys that it sees."""
        lane = cute.arch.lane_idx()
        kv_head = head // (given.q.shape[2] // given.k.shape[2])
        weigher = self.weigher(given, head, batch)
        k, v = given.k[None, None, kv_head, batch], given.v[None, None, kv_head, batch]
        q = vector(given.q[None, None, head, batch], row, self.chunks)
        do = vector(given.do[None, None, head, batch], row, self.chunks_v)
        lse, delta = given.lse_log2[row, head, batch], given.delta[row, head, batch]
        total = zeros()
        for base in cutlass.range(0, given.k.shape[0], WARP, unroll=1):
            over = all_nan(total, self.chunks)
            seen = self.visible(weigher, row, base + lane) & (over ^ True)
            found = cute.arch.vote_ballot_sync(seen)
            while found != 0:
                key = base + first_of(found)
                found = found & (found - 1)
                of_key, value = vector(k, key, self.chunks), vector(v, key, self.chunks_v)
                _, ds, shown = self.pair(weigher, (row, key), (q, of_key), (do, value), lse, delta)
                self.add(total, ds, of_key, shown)
        first, count = columns
        inside = (lane >= first) & (lane < first + count) & (lane < self.chunks)
        self.store(dq, row, total, given.scale, inside)

    @cute.jit
    def keys(self, given, number, warps):
        """Rows of dK and dV again, of the flags that fall to warp `number` of all."""
        flags = given.flags.shape[0]
        of_tile = self.schedule.tile_n // FLAGGED
        for base in cutlass.range(number, flags, warps * WARP, unroll=1):
            mine = base + cute.arch.lane_idx() * warps
            raised = Int32(0)
            if mine < flags:
                raised = given.flags[mine]
            found = cute.arch.vote_ballot_sync(raised != 0)
            while found != 0:
                at = base + first_of(found) * warps
                found = found & (found - 1)
                w = work_of(self.schedule, at // of_tile, given.k)
                first = w.n_block * self.schedule.tile_n + at % of_tile * FLAGGED
                end = cutlass.min(first + FLAGGED, given.k.shape[0])
                for key in cutlass.range(first, end, unroll=1):
                    self.key(given, key, w.kv_head, w.batch)

    @cute.jit
    def key(self, given, key, kv_head, batch):
        """A row of dK and dV from the queries that see it, if it is lost."""
        lane = cute.arch.lane_idx()
        group = given.q.shape[2] // given.k.shape[2]
        dk, dv = given.dk[None, None, kv_head, batch], given.dv[None, None, kv_head, batch]
        k = vector(given.k[None, None, kv_head, batch], key, self.chunks)
        v = vector(given.v[None, None, kv_head, batch], key, self.chunks_v)
        made = [vector(dk, key, self.chunks), vector(dv, key, self.chunks_v)]
        spoilt = not_finite(made[0]) | not_finite(made[1])
        by_score, by_value = zeros(), zeros()
        members = Int32(0)
        if cute.arch.vote_ballot_sync(spoilt) != 0:
            members = Int32(group)
        for member in cutlass.range(members, unroll=1):
            head = kv_head * group + member
            weigher = self.weigher(given, head, batch)
            q, do = given.q[None, None, head, batch], given.do[None, None, head, batch]
            for base in cutlass.range(0, given.q.shape[0], WARP, unroll=1):
                query = base + lane
                over = all_nan(by_score, self.chunks) & all_nan(by_value, self.chunks_v)
                seen = self.visible(weigher, query, key) & (query < given.q.shape[0])
                seen = seen & (over ^ True)
                found = cute.arch.vote_ballot_sync(seen)
                while found != 0:
                    row = base + first_of(found)
                    found = found & (found - 1)
                    of_query, of_do = vector(q, row, self.chunks), vector(do, row, self.chunks_v)
                    lse, delta = given.lse_log2[row, head, batch], given.delta[row, head, batch]
                    p, ds, shown = self.pair(
                        weigher, (row, key), (of_query, k), (of_do, v), lse, delta
                    )
                    self.add(by_score, ds, of_query, shown)
                    self.add(by_value, p, of_do, shown)
        self.store(dk, key, by_score, given.scale, (members > 0) & (lane < self.chunks))
        self.store(dv, key, by_value, Float32(1.0), (members > 0) & (lane < self.chunks_v))

    def visible(self, weigher: Weigher, query: Int32, key: Int32) -> Boolean:
        """Whether the mask shows a key to a query."""
        return weigher.elements.visible({"q": query, "k": key, **weigher.elements.uniform})

    def pair(
        self,
        weigher: Weigher,
        at: tuple[Int32, Int32],
        products: tuple[cute.Tensor, cute.Tensor],
        gradients: tuple[cute.Tensor, cute.Tensor],
        lse: Float32,
        delta: Float32,
    ) -> tuple[Float32, Float32, Boolean]:
        """P and dS of a visible pair, and whether its score takes part: not if it is -inf."""
        raw, dp = dot(*products), dot(*gradients)
        position = {"q": at[0], "k": at[1], **weigher.elements.uniform}
        (value,), (slope,) = weigher.values([raw], [(position, 0, 0)], ({}, {}))
        p, ds, shown = value, dp, Boolean(True)
        if not weigher.is_weight:
            shown = value != -Float32.inf
            p = exp2(cute.math.fma(value, weigher.scale_log2, -lse))
            ds = p * (dp - delta)
        if weigher.constant == 0.0:
            ds = Float32(0.0)
        elif slope is not None:
            ds = ds * slope
        return p, ds, shown

    def add(self, total: cute.Tensor, weight: Float32, row: cute.Tensor, shown: Boolean) -> None:
        """total += weight * row, the weight rounded as an operand."""
        weight = weight.to(self.dtype).to(Float32)
        for e in range(VECTOR):
            total[e] = select(shown, cute.math.fma(weight, row[e], total[e]), total[e])

    @cute.jit
    def store(self, out, row, total, factor, inside):
        """This lane's part of a row, if it is `inside`."""
        rounded = cute.make_rmem_tensor(VECTOR, out.element_type)
        for e in cutlass.range_constexpr(VECTOR):
            total[e] = total[e] * factor
        rounded.store(total.load().to(out.element_type))
        if inside:
            target = cute.local_tile(out, (1, VECTOR), (row, cute.arch.lane_idx()))
            cute.autovec_copy(rounded, target[0, None])


def spoilt_rows(acc: cute.Tensor) -> list[Boolean]:
    """Which of this thread's rows hold what is not finite. All threads of a warp take part."""
    return lost(wgmma.as_rows_cols(acc), None)


def zeros() -> cute.Tensor:
    """A lane's part of a row of sums."""
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.fill(0.0)
    return values


@cute.jit
def vector(rows, row, chunks: cutlass.Constexpr):
    """A lane's eight neighbours of one row as fp32; zeros past its end."""
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.fill(0.0)
    if cute.arch.lane_idx() < chunks:
        source = cute.local_tile(rows, (1, VECTOR), (row, cute.arch.lane_idx()))
        values.store(source[0, None].load().to(Float32))
    return values


def dot(a: cute.Tensor, b: cute.Tensor) -> Float32:
    """The product of two rows, the same in all lanes."""
    total = Float32(0.0)
    for e in range(VECTOR):
        total = cute.math.fma(a[e], b[e], total)
    for distance in EVERY_LANE:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
    return total


def not_finite(values: cute.Tensor) -> Boolean:
    """Whether any of these is NaN or an infinity."""
    zero = Float32(0.0)
    for e in range(VECTOR):
        zero = cute.math.fma(values[e], Float32(0.0), zero)
    return zero != zero


def all_nan(values: cute.Tensor, chunks: int) -> Boolean:
    """Whether a row of sums is NaN throughout, so that nothing can change it any more."""
    mine = values[0] != values[0]
    for e in range(1, VECTOR):
        mine = mine & (values[e] != values[e])
    mine = mine | (cute.arch.lane_idx() >= chunks)
    return cute.arch.vote_ballot_sync(mine) == -1
