"""Outputs that a hidden value has spoilt, computed again from the keys that the row sees.

WGMMA multiplies every value of a visited tile, and 0 * NaN is NaN: a value that is not finite, at a
key that only some rows of the tile see (the mask shows it, and its score is not -inf), spoils its
column for all of them. What is lost shows as an
output that is not finite in a row whose sum is; such rows, rare as they are, are computed again:

    the row sees a value that is not finite     the sum of those values, as IEEE has it
    it does not, but a hidden one is            sum of p * v over the keys that it sees
    neither                                     what the products gave

The row's four threads share its columns, 8 at a time; loads are plain ones from global memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cutedsl_fa3.layouts.wgmma import ROW_LANES
from cutedsl_fa3.variant.lower import LOG2_E, exp2, select

VECTOR = 8  # elements of 16 bytes
LANES = 4  # threads that hold a row
CHAINS = 2  # independent sums, for instruction-level parallelism


def lost(acc_o: cute.Tensor, lse: list[Float32] | None) -> list[Boolean]:
    """Which of this thread's rows hold an output that is not finite, though their sum is.

    Shape: acc_o (rows, cols) of this thread, normalised. All threads of a warp take part.
    """
    rows = []
    for r in range(cute.size(acc_o, mode=[0])):
        zero = _zero(acc_o, r)
        for lane in ROW_LANES:
            zero = zero + cute.arch.shuffle_sync_bfly(zero, offset=lane)
        spoilt = zero != zero
        rows.append(spoilt if lse is None else spoilt & (lse[r] == lse[r]))
    return rows


def suspect(acc_o: cute.Tensor) -> Boolean:
    """Whether a value may have spoilt rows of this warp, which are all of the same products.

    One that is not finite spoils its column for all of them, so the first of each thread's rows
    shows it: of the accumulator as it is, before rows that see nothing are cleared.

    Shape: acc_o (rows, cols) of this thread. All threads of a warp take part.
    """
    zero = _zero(acc_o, 0)
    return cute.arch.vote_any_sync(zero != zero)


@cute.jit
def lost_where(suspected, acc_o, lse):
    """`lost` where the warp is suspected, else no rows."""
    found = [Int32(0) for _ in range(cute.size(acc_o, mode=[0]))]
    if suspected:
        found = [Int32(spoilt) for spoilt in lost(acc_o, lse)]
    return [spoilt != 0 for spoilt in found]


def _zero(acc_o: cute.Tensor, row: int) -> Float32:
    """0, or NaN where an element of a row is not finite."""
    chains = [Float32(0.0)] * CHAINS
    for c in range(cute.size(acc_o, mode=[1])):
        chains[c % CHAINS] = cute.math.fma(acc_o[row, c], Float32(0.0), chains[c % CHAINS])
    return chains[0] + chains[1]


class Again:
    """Computes rows of one work tile again.

    Shape: q, k, v (rows, dim) of this head in global memory, dims in elements; rows of q are
    (pack, seqlen_q) where a tile packs heads.
    """

    def __init__(
        self, elements, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dims: tuple, pack: int = 1
    ):
        self.elements, self.pack = elements, pack
        self.q, self.k, self.v = q, k, v
        self.head_dim, self.head_dim_v = dims

    @cute.jit
    def row(self, out, row, lse, thread):
        """Write what was lost of row `row` of q to `out` (head_dim_v,), in shared memory.

        A first pass over the keys finds what is not finite; a second, if any of it is hidden, sums.
        """
        chunks = self.head_dim_v // VECTOR
        for chunk in cutlass.range(thread % LANES, chunks, LANES, unroll=1):
            seen, tainted, sums, total = _zeros(), _zeros(), _zeros(), Float32(0.0)
            for attempt in cutlass.range(2, unroll=1):
                keys = self.elements.seqlen_k
                if attempt == 1 and not _not_finite(tainted):
                    keys = Int32(0)
                for key in cutlass.range(keys, unroll=1):
                    visible, p = self.weight(row, key, lse, attempt)
                    total += p
                    values = _vector(self.v, key, chunk)
                    for e in cutlass.range_constexpr(VECTOR):
                        zero = values[e] * 0.0
                        odd = (zero != zero) & (attempt == 0)
                        seen[e] = seen[e] + select(odd & visible, values[e], Float32(0.0))
                        tainted[e] = tainted[e] + select(odd & (visible ^ True), zero, Float32(0.0))
                        added = cute.math.fma(p, values[e], sums[e])
                        sums[e] = select(visible & (attempt == 1), added, sums[e])
                if attempt == 0:
                    total = Float32(0.0)
            for e in cutlass.range_constexpr(VECTOR):
                right, changed = sums[e], tainted[e] != tainted[e]
                if cutlass.const_expr(lse is not None):
                    right = select(seen[e] == 0.0, right / self.whole(total, lse), seen[e])
                    changed = changed | (seen[e] != 0.0)
                if changed:
                    right = self.finished(right, row, lse)
                    out[chunk * VECTOR + e] = right.to(out.element_type)

    @cute.jit
    def weight(self, row, key, lse, attempt):
        """Whether the row sees the key (the mask shows it, its score is not -inf), and its weight.

        The weight is 0 where it is not asked for, in the first attempt of a variant without score.
        """
        at = {"q": self.query(row), "k": key, **self.elements.uniform}
        visible, p = self.elements.visible(at), Float32(0.0)
        scored = self.elements.variant.score is not None
        if visible and (attempt == 1 or scored):
            value = self.score(row, key)
            if cutlass.const_expr(lse is None):
                p = value
            else:
                if cutlass.const_expr(scored):
                    visible = value != -Float32.inf
                p = exp2(value * self.elements.scale_log2 - lse * LOG2_E)
        return visible, p

    @cute.jit
    def score(self, row, key):
        """What the variant's functions make of a key's product with the query."""
        raw = Float32(0.0)
        for part in cutlass.range(self.head_dim // VECTOR, unroll=1):
            a, b = _vector(self.q, row, part), _vector(self.k, key, part)
            for e in cutlass.range_constexpr(VECTOR):
                raw = cute.math.fma(a[e], b[e], raw)
        at = {"q": self.query(row), "k": key, **self.elements.uniform}
        return self.elements.changed(raw, at)

    def query(self, row: Int32) -> Int32:
        """The position of a row."""
        return row if self.pack == 1 else row // self.pack

    def whole(self, total: Float32, lse: Float32) -> Float32:
        """The sum of all weights: 1, but for roundings of the LSE."""
        sink = self.elements.sink()
        return total if sink is None else total + exp2((sink - lse) * LOG2_E)

    def finished(self, value: Float32, row: Int32, lse: Float32 | None) -> Float32:
        """The epilogue function on one output."""
        if self.elements.epilogue is None:
            return value
        at = {"o": value, "q": self.query(row), **self.elements.uniform}
        return self.elements.epilogue.at(at if lse is None else {**at, "lse": lse}, 0, 0, {})


def chosen(values: Sequence, index: Int32) -> object:
    """One of a few values by a dynamic index, so that what follows is traced once."""
    value = values[0]
    for number, other in enumerate(values[1:], start=1):
        value = select(index == number, other, value)
    return value


def _zeros() -> cute.Tensor:
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.fill(0.0)
    return values


def _not_finite(values: cute.Tensor) -> Boolean:
    """Whether any of these sums of zeros is NaN."""
    total = values[0]
    for e in range(1, VECTOR):
        total = total + values[e]
    return total != total


def _vector(rows: cute.Tensor, row: Int32, part: Int32) -> cute.Tensor:
    """Eight neighbours of one row as fp32."""
    source = cute.local_tile(rows, (1, VECTOR), (row, part))
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.store(source[0, None].load().to(Float32))
    return values
