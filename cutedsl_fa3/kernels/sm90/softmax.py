"""From scores to weights, on the accumulator of one score tile: two ways with the same methods.

`OnlineSoftmax`, for a row with maximum m over what has been seen:

    p     = exp2(x * scale_log2 - m * scale_log2)       x: what stands in acc_s
    alpha = exp2((m_old - m) * scale_log2)              by which acc_o and row_sum shrink
    lse   = (m * scale_log2 + log2(row_sum)) / log2(e)

`scale_log2` turns x into a base-2 logarithm: scale * log2(e) for raw products, so that the identity
score costs one FMA, and log2(e) once a score function has scaled them. A row that has seen nothing
has m = LOWEST, from which -inf is as far as from any other: exp2(-inf) = 0, so its row_sum stays 0.
NaN is not hidden: max skips it, row_sum does not. A sink is one more logit that joins at the end:
it takes weight and has no value.

Scores of a tile may lack a base, one value a row (units.py): x + base is compared with m then, and
m - base stands for m in p; where a thread's largest x makes m, that x does, so that no weight is
beyond 1 where the base is lost in rounding.

Rows whose maximum is beyond FAR, such as rows of nothing but a finite stand-in for -inf, take
p = exp2(x - m): m * scale_log2 is rounded to so few bits there that the exponents of equal scores
would not be 0, and unequal scores are 16 or more apart.

With `lazy` m stays what it is until it has grown by more than LEEWAY: p is then up to 2^LEEWAY, and
acc_o and row_sum in the same unit, so nothing else changes; a warp whose rows all keep their m
leaves acc_o alone. That pays where acc_o is large beside acc_s.

`Weights`, for a variant whose softmax is `Elementwise`: what stands in acc_s are the weights, and
nothing is normalised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cutedsl_fa3.layouts.wgmma import ROW_LANES
from cutedsl_fa3.variant.lower import LN_2, LOG2_E, absolute, exp2, log2, select
from cutedsl_fa3.variant.softmax import FAR, LARGEST, LEEWAY, LOWEST

EIGHTHS = 8
CHAINS = 2  # independent maxima and sums per row, for instruction-level parallelism


class OnlineSoftmax:
    """Running maximum and sum of the rows that one thread holds.

    Units: `row_max` is in units of acc_s; `row_sum` covers this thread's columns until `finish`;
    `scale` and `scale_log2` turn acc_s into a natural and a base-2 logarithm; `sinks` are natural,
    one for each row, None where there is no sink.
    """

    def __init__(
        self,
        rows: int,
        scale: Float32,
        scale_log2: Float32,
        sinks: Sequence[Float32] | None = None,
        lazy: bool = False,
    ) -> None:
        self.rows, self.lazy = rows, lazy
        self.scale, self.scale_log2 = scale, scale_log2
        self.sinks = sinks
        self.row_max = cute.make_rmem_tensor(rows, Float32)
        self.row_sum = cute.make_rmem_tensor(rows, Float32)
        self.alpha = cute.make_rmem_tensor(rows, Float32)
        self.row_max.fill(LOWEST)
        self.row_sum.fill(0.0)

    def step(
        self, acc_s: cute.Tensor, early: int = 0, bases: Sequence[Float32] | None = None
    ) -> None:
        """Replace scores by probabilities in place; set `alpha` for the rescale of acc_o.

        `early` eighths of them come before whatever waits next (see `finished`). `bases`: what is
        to be added to this thread's scores of each row.

        Shape: acc_s (rows, cols) of this thread.
        """
        for r in range(self.rows):
            old, base = self.row_max[r], None if bases is None else bases[r]
            mine = new = _largest(acc_s, r, old if base is None else None)
            if base is not None:
                new = cute.arch.fmax(old, mine + base)
            for lane in ROW_LANES:
                new = cute.arch.fmax(new, cute.arch.shuffle_sync_bfly(new, offset=lane))
            if self.lazy:
                grown = (new - old) * self.scale_log2 > LEEWAY
                new = select(grown, new, old)
            self.row_max[r] = new
            origin = new
            if base is not None:  # that x in front of the base which is the row's maximum behind it
                origin = select(mine + base == new, mine, new - base)
            shift, scale_log2 = self._near(origin)
            alpha = exp2((old - new) * self.scale_log2)
            self.row_sum[r] = self.row_sum[r] * alpha
            self._weigh(acc_s, r, lambda x, a=scale_log2, b=-shift: cute.math.fma(x, a, b), early)
            self.alpha[r] = alpha

    def _weigh(
        self, acc_s: cute.Tensor, r: int, exponent: Callable[[Float32], Float32], early: int
    ) -> None:
        """Row r's scores become 2^exponent of themselves, in place, and join its sum."""
        cols = cute.size(acc_s, mode=[1])
        before = cols * early // EIGHTHS
        total = self.row_sum[r]
        for columns in (range(before), range(before, cols)):
            sums = [total] + [None] * (CHAINS - 1)
            for c in columns:
                p = exp2(exponent(acc_s[r, c]))
                acc_s[r, c] = p
                sums[c % CHAINS] = p if sums[c % CHAINS] is None else sums[c % CHAINS] + p
            total = sums[0]
            for chain in sums[1:]:
                total = total if chain is None else total + chain
            if early and columns.stop == before:
                finished(total)
        self.row_sum[r] = total

    def _near(self, origin: Float32) -> tuple[Float32, Float32]:
        """(shift, scale) that turn scores into exponents of p, for a row with this maximum."""
        shift = origin * self.scale_log2
        far = absolute(shift) >= FAR
        return select(far, origin, shift), select(far, Float32(1.0), self.scale_log2)

    @cute.jit
    def rescale(self, acc_o: cute.Tensor):
        """Shrink acc_o (rows, cols) to the new maximum.

        With `lazy` a warp whose rows all keep theirs leaves it as it is; nothing may be in flight.
        """
        if cutlass.const_expr(self.lazy):
            moved = self.alpha[0] != 1.0
            for r in cutlass.range_constexpr(1, self.rows):
                moved = moved | (self.alpha[r] != 1.0)
            if cute.arch.vote_any_sync(moved):
                self._shrink(acc_o)
        else:
            self._shrink(acc_o)

    def _shrink(self, acc_o: cute.Tensor) -> None:
        for r in range(self.rows):
            for c in range(cute.size(acc_o, mode=[1])):
                acc_o[r, c] = acc_o[r, c] * self.alpha[r]

    def finish(self, acc_o: cute.Tensor) -> list[Float32]:
        """Divide acc_o by the row sums and return the rows' LSE (natural).

        A row that saw nothing has output 0, and LSE -inf or its sink.

        Shape: acc_o (rows, cols) of this thread.
        """
        lse, empty = [], []
        for r in range(self.rows):
            total = self.row_sum[r]
            for lane in ROW_LANES:
                total = total + cute.arch.shuffle_sync_bfly(total, offset=lane)
            empty.append(total == 0.0)
            inverse = 1.0 / total
            origin = self.row_max[r] * self.scale_log2
            value, size = (origin + log2(total)) * LN_2, absolute(origin)
            natural = self.row_max[r] * self.scale
            sink = None if self.sinks is None else self.sinks[r]
            if sink is not None:
                inverse, value, size, total = self._with_sink(sink, origin, total)
                natural = cute.arch.fmax(natural, sink)
            value = select(size >= FAR, natural + log2(total) * LN_2, value)
            for c in range(cute.size(acc_o, mode=[1])):
                acc_o[r, c] = acc_o[r, c] * inverse
            alone = -Float32.inf if sink is None else sink
            lse.append(select(empty[r], alone, value))
        self._clear(acc_o, empty)
        return lse

    @cute.jit
    def _clear(self, acc_o, empty):
        """Zeros in empty rows, even where a hidden value is not finite."""
        anywhere = empty[0]
        for r in cutlass.range_constexpr(1, self.rows):
            anywhere = anywhere | empty[r]
        if cute.arch.vote_any_sync(anywhere):
            zero_rows(acc_o, empty)

    def _with_sink(self, natural: Float32, origin: Float32, total: Float32) -> tuple[Float32, ...]:
        """What acc_o is multiplied by, LSE, size of the greater logit and the sum relative to it.

        Logits are held within fp32 here; -inf, for no sink, and NaN stay what they are.
        """
        sink = _held(natural * LOG2_E)
        sink = select(natural == -Float32.inf, natural, sink)
        origin = _held(origin)
        highest = cute.arch.fmax(origin, sink)
        shrink = exp2(origin - highest)
        joined = cute.math.fma(total, shrink, exp2(sink - highest))
        return shrink / joined, (highest + log2(joined)) * LN_2, absolute(highest), joined


def _largest(acc_s: cute.Tensor, r: int, least: Float32 | None) -> Float32:
    """The maximum of a row of acc_s, and of `least` if there is one."""
    cols = cute.size(acc_s, mode=[1])
    first = 0 if least is not None else CHAINS
    chains = [acc_s[r, c] for c in range(first)] or [least] * CHAINS
    for c in range(first, cols):
        chains[c % CHAINS] = cute.arch.fmax(chains[c % CHAINS], acc_s[r, c])
    found = chains[0]
    for chain in chains[1:]:
        found = cute.arch.fmax(found, chain)
    return found


def zero_rows(acc_o: cute.Tensor, rows: Sequence[Boolean]) -> None:
    """Zeros in these rows; acc_o (rows, cols) of this thread."""
    for r, chosen in enumerate(rows):
        for c in range(cute.size(acc_o, mode=[1])):
            acc_o[r, c] = select(chosen, Float32(0.0), acc_o[r, c])


def finished(value: Float32) -> None:
    """Keep the computation of a sum in front of the next wait.

    ptxas moves a wait for WGMMA up to where its operands are needed no more, and computes behind it
    what could have run meanwhile. It leaves a volatile store where it is, even one under a
    condition that no sum meets: to be a NaN of a pattern that arithmetic does not make.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred odd; .reg .b32 bits; mov.b32 bits, {$r0}; "
        "setp.eq.u32 odd, bits, 0x7f800001; @odd st.volatile.shared.b32 [bits], bits; }",
        read_only_args=[value],
    )


def _held(logit: Float32) -> Float32:
    """Within +-LARGEST; NaN stays."""
    logit = select(logit > LARGEST, Float32(LARGEST), logit)
    return select(logit < -LARGEST, Float32(-LARGEST), logit)


class Weights:
    """Weights that a variant's function has made of the scores; no row is normalised."""

    def step(self, acc_s: cute.Tensor, early: int = 0, bases: None = None) -> None:
        """acc_s holds the weights already; `early` eighths of them come before the next wait.

        Shape: acc_s (rows, cols) of this thread.
        """
        rows, cols = (cute.size(acc_s, mode=[i]) for i in range(2))
        known = None
        for r in range(rows):
            for c in range(cols * early // EIGHTHS):
                known = acc_s[r, c] if known is None else known + acc_s[r, c]
        if known is not None:
            finished(known)

    def rescale(self, acc_o: cute.Tensor) -> None:
        """Nothing: later keys do not change the weight of earlier ones."""

    def finish(self, acc_o: cute.Tensor) -> None:
        """Nothing, and no LSE."""
