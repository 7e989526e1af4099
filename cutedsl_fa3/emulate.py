"""The forward's plan on the CPU: what the kernel computes, in its order, with plain torch.

A tile of queries visits the key tiles that the kernel visits, in the kernel's order; what of a tile
lies past the end of a sequence is zero, as TMA fills it; the element mask is applied only where the
kernel applies it; P is rounded to the input type before it meets V; the rescales come in the same
order. So a variant can be written, tried and understood on a laptop, and what differs from the
kernel is the order of the sums inside a product and the last bits of the exponential.

Tiles of queries are independent of each other and are worked on side by side:

    cell     one tile of queries of one head, or pack of heads, and batch entry; a CTA of the kernel
    entry    2 * n_block + masked: a visited key tile and whether it needs the element mask
    visits   the entries of each cell in order, then -1

At step j every cell of a batch of cells visits its j-th tile; cells are sorted so that those which
are still at it are the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .errors import Unsupported
from .inputs import addressable, check_device, checked_scale
from .pipelines import Schedule
from .plans import Plan
from .variant import Variant
from .variant.evaluate import evaluate
from .variant.softmax import FAR, LARGEST, LEEWAY
from .variant.visits import all_visits

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)
AT_ONCE = 1 << 20  # fp32 elements of a batch of cells' largest tile: 4 MiB, held a dozen times
SMALLEST_EXPONENT = -126.0  # below it a power of 2 is no normal fp32 number: the unit returns 0


class Emulated(NamedTuple):
    """What one call computes.

    Shape: out (batch, seqlen_q, heads, head_dim_v) in the input type; lse (batch, heads, seqlen_q)
    fp32, natural, None where the variant has none; visits (batch, heads / pack, m_blocks,
    n_blocks + 1) int32, the entries of each tile of queries in order, then -1.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    visits: torch.Tensor


def attention_with_visits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    scale: float | None = None,
    schedule: Schedule | None = None,
) -> Emulated:
    """What `attention_with_lse` computes for CPU tensors, and which key tiles it visited.

    Shape: as for `attention`.
    Units: scale is natural; default 1 / sqrt(head_dim).
    Raises: Unsupported, LayoutError, ScheduleError, VariantError.
    """
    from .interface import plan  # which imports this module

    made = plan(q, k, v, variant, schedule=schedule)
    if q.device.type != "cpu":
        raise Unsupported(f"q is on {q.device}: the CPU is needed; `visits` takes GPU tensors")
    check_device(q, k, v, made.variant)
    for name, t in (("q", q), ("k", k), ("v", v)):
        addressable(name, t)
    return run(made, q, k, v, checked_scale(scale, q.shape[3]))


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def run(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Emulated:
    """The plan's result for tensors that were checked; any strides, any sizes, 0 among them.

    Units: scale is natural and not 0.
    """
    call = _Call(plan, q, k, v, scale)
    visits = _visits(call)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = call.floats(q.shape[0], q.shape[2], q.shape[1]) if plan.variant.has_lse else None
    for cells in _batches(call, visits):
        o, l = cells.result()
        inside = cells.queries < call.seqlen_q
        b, h = (x.expand(inside.shape)[inside] for x in (cells.b[:, None], cells.heads))
        rows = cells.queries[inside]
        out[b, rows, h] = o[inside].to(q.dtype)
        if lse is not None:
            lse[b, h, rows] = l[inside]
    return Emulated(out, lse, visits)


@dataclass(frozen=True)
class _Call:
    """The arguments of one call; scale is natural."""

    plan: Plan
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float

    def floats(self, *shape: int, fill: float = 0.0) -> torch.Tensor:
        """An fp32 tensor, whatever torch's defaults are."""
        return torch.full(shape, fill, dtype=torch.float32, device=self.q.device)

    def count(self, end: int) -> torch.Tensor:
        """0 to end - 1."""
        return torch.arange(end, device=self.q.device)

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[1]

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[1]

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a score tile that some tile needs: a short sequence fills less."""
        s = self.plan.schedule
        return min(s.tile_m, self.seqlen_q * s.pack), min(s.tile_n, self.seqlen_k)

    @cached_property
    def scale_log2(self) -> torch.Tensor:
        """Turns what the softmax is given into a base-2 logarithm: () fp32."""
        log2_e = self.floats(fill=LOG2_E)
        return log2_e if self.plan.variant.score is not None else log2_e * self.scale_fp32

    @property
    def scale_natural(self) -> torch.Tensor:
        """Turns what the softmax is given into a natural logarithm: () fp32."""
        return self.floats(fill=1.0) if self.plan.variant.score is not None else self.scale_fp32

    @cached_property
    def scale_fp32(self) -> torch.Tensor:
        """() fp32."""
        return self.floats(fill=self.scale)


def _visits(call: _Call) -> torch.Tensor:
    """The entries of every cell."""
    variant, s = call.plan.variant, call.plan.schedule
    sizes = call.q.shape[0], call.q.shape[2] // s.pack, call.seqlen_q, call.seqlen_k
    return all_visits(variant.mask, variant.captures, *sizes, s.queries, s.tile_n).contiguous()


def _batches(call: _Call, visits: torch.Tensor) -> Iterator[_Cells]:
    """All cells, in batches of bounded size, those with the most visits first."""
    rows, cols = call.tile
    dims = call.q.shape[3], call.v.shape[3]
    together = max(1, AT_ONCE // max(rows * cols, (rows + cols) * max(dims), 1))
    entries = visits.flatten(0, 2)
    order = (entries >= 0).sum(-1).argsort(descending=True, stable=True)
    for some in order.split(together) if len(order) else ():
        b, h, m_block = torch.unravel_index(some, visits.shape[:3])
        yield _Cells(call, b, h, m_block, entries[some])


@dataclass(frozen=True)
class _Cells:
    """Cells worked on side by side: their batch entries, packs of heads and tiles of queries.

    Shape: b, h, m_block (cells,); entries (cells, n_blocks + 1).
    """

    call: _Call
    b: torch.Tensor
    h: torch.Tensor
    m_block: torch.Tensor
    entries: torch.Tensor

    @cached_property
    def queries(self) -> torch.Tensor:
        """Positions of the rows: (cells, rows)."""
        (rows, _), s = self.call.tile, self.call.plan.schedule
        return self.m_block[:, None] * s.queries + self.call.count(rows) // s.pack

    @cached_property
    def heads(self) -> torch.Tensor:
        """Heads of the rows: (cells, rows), or (cells, 1) where they are of one."""
        (rows, _), pack = self.call.tile, self.call.plan.schedule.pack
        return self.h[:, None] * pack + self.call.count(rows if pack > 1 else 1) % pack

    def result(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """O (cells, rows, head_dim_v) in fp32 and LSE (cells, rows)."""
        call, variant = self.call, self.call.plan.variant
        shape = *self.queries.shape, call.v.shape[3]
        q = _tiles(call.q, self.b, self.queries, self.heads)
        softmax = _softmax_of(call.plan)(shape, call)
        for j in range(int((self.entries >= 0).sum(-1).amax())):
            self.step(q, softmax, self.entries[:, j])
        o, lse = softmax.finish(self.heads)
        if variant.epilogue is None:
            return o, lse
        inputs = {"o": o, **self.positions(slice(None))}
        if lse is not None:
            inputs["lse"] = lse[..., None]
        return torch.broadcast_to(evaluate(variant.epilogue, inputs, variant.captures), shape), lse

    def positions(self, some: slice | torch.Tensor) -> dict[str, torch.Tensor | int]:
        """The inputs of a graph on some cells, without keys, scores and outputs."""
        return {
            "b": self.b[some, None, None],
            "h": self.heads[some, :, None],
            "q": self.queries[some, :, None],
            "seqlen_q": self.call.seqlen_q,
            "seqlen_k": self.call.seqlen_k,
        }

    def step(self, q: torch.Tensor, softmax: _Online | _Weights, entries: torch.Tensor) -> None:
        """Visit one key tile of each cell that has an entry; those are the first ones."""
        call, variant = self.call, self.call.plan.variant
        entries = entries[: int((entries >= 0).sum())].long()
        some = slice(len(entries))
        group = call.q.shape[2] // call.k.shape[2] // call.plan.schedule.pack
        kv_heads = self.h[some, None] // group
        columns = call.count(call.tile[1])
        keys = (entries >> 1)[:, None] * call.plan.schedule.tile_n + columns
        k, v = (_tiles(t, self.b[some], keys, kv_heads) for t in (call.k, call.v))
        values = torch.bmm(q[some], k.mT)
        at = {"k": keys[:, None], **self.positions(some)}
        if variant.score is not None or variant.weight is not None:
            values *= call.scale_fp32
        for graph in (variant.score, variant.weight):
            if graph is not None:
                changed = evaluate(graph, {"score": values, **at}, variant.captures)
                values = torch.broadcast_to(changed, values.shape).contiguous()
        softmax.step(values, self.hidden(values.shape, keys, entries & 1), v)

    def hidden(
        self, shape: torch.Size, keys: torch.Tensor, masked: torch.Tensor
    ) -> torch.Tensor | None:
        """Where the element mask hides a key: tiles that are not masked have none."""
        variant, some = self.call.plan.variant, masked.nonzero()[:, 0]
        if not len(some):
            return None
        visible = keys[some, None] < self.call.seqlen_k
        if variant.mask is not None:
            inputs = {"k": keys[some, None], **self.positions(some)}
            visible = visible & evaluate(variant.mask, inputs, variant.captures)
        hidden = torch.zeros(shape, dtype=torch.bool, device=keys.device)
        hidden[some] = ~visible
        return hidden


class _Online:
    """The online softmax on the rows of a batch of cells; see kernels/sm90/softmax.py.

    Shape: row_max, row_sum (cells, rows); acc_o, beyond (cells, rows, head_dim_v), all fp32.
    """

    def __init__(self, shape: tuple[int, ...], call: _Call) -> None:
        self.call = call
        self.row_max = call.floats(*shape[:2], fill=-math.inf)
        self.row_sum = call.floats(*shape[:2])
        self.acc_o = call.floats(*shape)
        self.beyond: torch.Tensor | None = None  # sums of the values that are not finite

    def step(self, scores: torch.Tensor, hidden: torch.Tensor | None, v: torch.Tensor) -> None:
        """Weigh one tile's scores, which are overwritten, and add the values of its keys."""
        some, scale_log2 = slice(len(scores)), self.call.scale_log2
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        old = self.row_max[some]
        new = torch.fmax(old, _largest(scores))
        if self.call.plan.schedule.lazy:
            new = torch.where((new - old) * scale_log2 > LEEWAY, new, old)
        origin = new.masked_fill(new == -math.inf, 0.0)
        shift = origin * scale_log2
        alpha = _exp2((old - origin) * scale_log2)
        far = shift.abs() >= FAR
        shift, scale_log2 = torch.where(far, origin, shift), torch.where(far, 1.0, scale_log2)
        exponents = scores.double().mul_(scale_log2[..., None]).sub_(shift[..., None])
        p = _exp2(exponents.float())  # rounded once, as by an FMA
        self.row_sum[some] = self.row_sum[some] * alpha + p.sum(-1)
        self.row_max[some] = new
        acc_o = self.acc_o[some].mul_(alpha[..., None])
        if _may_hold_others(v):
            v = self.finite(scores != -math.inf, v)
        acc_o.baddbmm_(p.to(self.call.q.dtype).float(), v)

    def finite(self, seen: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Values with 0 for NaN and infinities, which are kept for the rows that see their keys."""
        if self.beyond is None:
            self.beyond = torch.zeros_like(self.acc_o)
        for value in (math.nan, math.inf, -math.inf):
            kind = v.isnan() if math.isnan(value) else v == value
            met = torch.bmm(seen.float(), kind.float()) > 0
            self.beyond[: len(v)] += torch.where(met, value, 0.0)
        return torch.nan_to_num(v, nan=0.0, posinf=0.0, neginf=0.0)

    def finish(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """O (cells, rows, head_dim_v) and LSE (cells, rows) of rows of heads `h`."""
        total, origin = self.row_sum, self.row_max * self.call.scale_log2
        empty, factor, value = total == 0, 1 / total, origin + torch.log2(total)
        natural, size = self.row_max * self.call.scale_natural, origin.abs()
        alone, sink = torch.full_like(origin, -math.inf), _sink(self.call.plan.variant, h)
        if sink is not None:
            logit = (
                (sink * LOG2_E).clamp(-LARGEST, LARGEST).masked_fill(sink == -math.inf, -math.inf)
            )
            origin = origin.clamp(-LARGEST, LARGEST)
            highest = torch.fmax(origin, logit)
            shrink = _exp2(origin - highest)
            total = total * shrink + _exp2(logit - highest)
            factor, value, size = shrink / total, highest + torch.log2(total), highest.abs()
            natural, alone = torch.fmax(natural, sink), sink
        o = self.acc_o if self.beyond is None else self.acc_o + self.beyond
        o = (o * factor[..., None]).masked_fill(empty[..., None], 0.0)
        value = torch.where(size >= FAR, natural + torch.log2(total) * LN_2, value * LN_2)
        return o, torch.where(empty, alone, value)


class _Bounded(_Online):
    """The softmax of limited scores on the same rows; see kernels/sm90/bounded.py."""

    def __init__(self, shape: tuple[int, ...], call: _Call) -> None:
        super().__init__(shape, call)
        self.row_max.zero_()

    def step(self, scores: torch.Tensor, hidden: torch.Tensor | None, v: torch.Tensor) -> None:
        """Weigh one tile's scores, which are overwritten, and add the values of its keys."""
        some = slice(len(scores))
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        p = _exp2(scores * LOG2_E)
        self.row_sum[some] += p.sum(-1)
        if _may_hold_others(v):
            v = self.finite(scores != -math.inf, v)
        self.acc_o[some].baddbmm_(p.to(self.call.q.dtype).float(), v)


def _softmax_of(plan: Plan) -> type[_Online | _Weights]:
    """What makes weights of this plan's scores."""
    if plan.variant.weight is not None:
        return _Weights
    return _Bounded if plan.bounded else _Online


class _Weights:
    """Weights that a function has made of each score alone: nothing is normalised.

    Shape: acc_o (cells, rows, head_dim_v) fp32.
    """

    def __init__(self, shape: tuple[int, ...], call: _Call) -> None:
        self.dtype = call.q.dtype
        self.acc_o = call.floats(*shape)
        self.beyond: torch.Tensor | None = None  # what keys add whose values are not all finite

    def step(self, weights: torch.Tensor, hidden: torch.Tensor | None, v: torch.Tensor) -> None:
        """Add the values of one tile's keys; weights are overwritten."""
        if hidden is not None:
            weights.masked_fill_(hidden, 0.0)
        p = weights.to(self.dtype).float()
        if _may_hold_others(v):
            p, v = self.finite(p, hidden, v)
        self.acc_o[: len(p)].baddbmm_(p, v)

    def finite(
        self, p: torch.Tensor, hidden: torch.Tensor | None, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """P and V with 0 for keys with NaN or infinities, whose products are added up by key."""
        if self.beyond is None:
            self.beyond = torch.zeros_like(self.acc_o)
        odd = ~v.isfinite().all(-1)
        for key in odd.any(0).nonzero().flatten().tolist():
            met = odd[:, None, key]
            met = met & ~hidden[..., key] if hidden is not None else met
            product = p[..., key, None] * v[:, None, key]
            self.beyond[: len(p)] += torch.where(met[..., None], product, 0.0)
        return p.masked_fill(odd[:, None], 0.0), v.masked_fill(odd[..., None], 0.0)

    def finish(self, h: torch.Tensor) -> tuple[torch.Tensor, None]:
        """O (cells, rows, head_dim_v), and no LSE."""
        return self.acc_o if self.beyond is None else self.acc_o + self.beyond, None


def _may_hold_others(v: torch.Tensor) -> bool:
    """Whether values that are not finite may be among these; True also where their sum is not."""
    return not v.sum().isfinite()


def _sink(variant: Variant, h: torch.Tensor) -> torch.Tensor | None:
    """The sinks of heads `h` (cells, rows or 1), natural: as `h`, or () for all."""
    if variant.sink is None:
        return None
    sink = variant.captures[variant.sink].float()
    return sink[h] if sink.ndim else sink


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """Each row's maximum, NaN passed over."""
    found = scores.amax(-1)
    if found.isnan().any():
        found = scores.masked_fill(scores.isnan(), -math.inf).amax(-1)
    return found


def _exp2(exponents: torch.Tensor) -> torch.Tensor:
    """2^x as the special-function unit gives it: 0 where the result is no normal number."""
    return torch.exp2(exponents).masked_fill_(exponents < SMALLEST_EXPONENT, 0.0)


def _tiles(t: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor (batch, seqlen, heads, dim) in fp32, zero past the end of the sequence.

    Shape: b (cells,), rows (cells, rows), h (cells, rows or 1) -> (cells, rows, dim).
    """
    last = t.shape[1] - 1
    found = t[b[:, None], rows.clamp(max=last), h].float()
    beyond = rows > last
    return found.masked_fill_(beyond[..., None], 0.0) if beyond.any() else found
