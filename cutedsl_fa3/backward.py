"""The backward on the CPU: gradients by tiles of keys, with plain torch.

    rows     do' = do * d out / d o,  delta = sum(do' * o) - dlse        one pass over the rows
    tiles    for each tile of keys, each tile of queries that sees some of them:
                 s = q k^T * scale, score' = score(s), p = exp(score' - lse), dp = do' v^T
                 ds = p * (dp - delta), or dp for Elementwise weights, where p = f(score')
                 dv += p^T do',  dk += (ds * d score' / d s)^T q,  dq += (ds * d score' / d s) k
    ends     dq and dk times the scale, in the input type; a sink gets -exp(sink - lse) * delta

The derivatives of the variant's functions come from `variant/derive.py`, the tiles from the same
interval evaluation as in the forward (`variant/visits.py`), read by tiles of keys. P and dS are
rounded to the input type before they meet dO, Q and K; sums are fp32. fp64 tensors are computed in
fp64 throughout, so that finite differences can be held against it.

A pair that is hidden takes no part, whatever its query, key, value or gradient holds: what is not
finite reaches the rows and keys that it is seen with, as in the forward. So rows that see nothing
and keys that nobody sees get exactly 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .variant import Variant
from .variant.derive import Derivatives, of_element, of_epilogue
from .variant.evaluate import evaluate
from .variant.shares import Shares, add_loads, evaluate_shares
from .variant.visits import visited_tiles

LOG2_E = math.log2(math.e)
TILE = (128, 128)  # of queries and of keys
AT_ONCE = 1 << 20  # elements of the tiles that are worked on side by side
WIDE_TILE, WIDE_AT_ONCE = (512, 2048), 1 << 22  # the same where a launch should be worth its time
ROWS_AT_ONCE = 1 << 22  # elements of the rows that an epilogue's derivative is computed for
SMALLEST_EXPONENT = -126.0  # below it a power of 2 is no normal fp32 number: the unit returns 0


class Gradients(NamedTuple):
    """Gradients of q, k and v in their type, and by number of the captured tensors asked for.

    Those of captured tensors are the sums as they were added up: fp32, or fp64 of fp64 inputs.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    captures: dict[int, torch.Tensor]


def differentiable(variant: Variant) -> frozenset[int]:
    """The numbers of the captured tensors that have a gradient: the sink, and floats that are read.

    A mask, an index and a condition give none.
    Raises: VariantError naming an operation without a derivative.
    """
    found = set() if variant.sink is None else {variant.sink}
    for derived in (of_element(variant), of_epilogue(variant)):
        found |= set() if derived is None else set(derived.captures)
    return frozenset(found)


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    scale: float,
    wanted: Collection[int] = (),
    tile: tuple[int, int] = TILE,
) -> Gradients:
    """Gradients of (do * out).sum() + (dlse * lse).sum(), for tensors that were checked.

    `o` is the output before an epilogue, `do` the gradient of the output after it; `wanted` are
    numbers of captured tensors.

    Shape: q, k, v as for `attention`; o and do as its output, lse and dlse (batch, heads,
        seqlen_q), any strides; lse is None for Elementwise weights.
    Units: scale is natural.
    Raises: VariantError naming an operation without a derivative.
    """
    call = _Call(q, k, v, variant, scale, tile, zeros_of(variant, wanted, _compute(q.dtype)))
    rows = _rows(call, o, lse, do, dlse)
    dq = torch.zeros(q.shape, dtype=call.compute, device=q.device)
    dk, dv = (torch.zeros(t.shape, dtype=call.compute, device=q.device) for t in (k, v))
    visited, masked = _visits(call)
    for n_block in range(visited.shape[3]):
        keys = call.span(n_block, 1)
        shape = (q.shape[0], q.shape[2], len(keys))
        dk_tile = torch.zeros((*shape, k.shape[3]), dtype=call.compute, device=q.device)
        dv_tile = torch.zeros((*shape, v.shape[3]), dtype=call.compute, device=q.device)
        for m_block in range(visited.shape[2]):
            for b, h in call.batches(visited[:, :, m_block, n_block], len(keys)):
                pair = _Tile(call, rows, b, h, call.span(m_block, 0), keys)
                pair.add(dq, dk_tile, dv_tile, masked[b, h, m_block, n_block])
        for whole, part in ((dk, dk_tile), (dv, dv_tile)):
            of_group = part.unflatten(1, (k.shape[2], -1)).sum(2) if part.numel() else part
            whole[:, keys.start : keys.stop] = of_group.transpose(1, 2)
    if (sink := variant.sink) in call.totals and lse is not None and rows.delta is not None:
        add_sink(call.totals[sink], variant.captures[sink], lse, rows.delta)
    return Gradients(
        (dq * call.scale).to(q.dtype), (dk * call.scale).to(k.dtype), dv.to(v.dtype), call.totals
    )


def zeros_of(
    variant: Variant, wanted: Collection[int], dtype: torch.dtype = torch.float32
) -> dict[int, torch.Tensor]:
    """Where the gradients of captured tensors are added up."""
    found = ((n, variant.captures[n]) for n in sorted(wanted))
    return {n: torch.zeros(t.shape, dtype=dtype, device=t.device) for n, t in found}


def _compute(dtype: torch.dtype) -> torch.dtype:
    """What sums over tensors of a type are held in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Call:
    """The arguments of one call; `totals` add up the gradients of captured tensors."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    variant: Variant
    natural_scale: float
    tile: tuple[int, int]
    totals: dict[int, torch.Tensor]

    @property
    def compute(self) -> torch.dtype:
        """What sums are held in."""
        return _compute(self.q.dtype)

    @cached_property
    def scale(self) -> torch.Tensor:
        """() in the type of the sums."""
        return torch.full((), self.natural_scale, dtype=self.compute, device=self.q.device)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[2] // self.k.shape[2]

    @cached_property
    def element(self) -> Derivatives | None:
        return of_element(self.variant)

    def rounded(self, t: torch.Tensor) -> torch.Tensor:
        """As an operand of a product: in the input type, held in that of the sums."""
        return t.to(self.q.dtype).to(self.compute)

    def span(self, block: int, axis: int) -> range:
        """The positions in a tile of queries (axis 0) or of keys (axis 1)."""
        length = (self.q if axis == 0 else self.k).shape[1]
        return range(block * self.tile[axis], min((block + 1) * self.tile[axis], length))

    def batches(
        self, visited: torch.Tensor, columns: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batch entries and heads whose tiles are worked on side by side."""
        widest = max(columns, self.q.shape[3], self.v.shape[3])
        together = max(1, AT_ONCE // max(1, self.tile[0] * widest))
        for some in visited.nonzero().split(together):
            if len(some):
                yield some[:, 0], some[:, 1]

    def shares(self, derived: Derivatives, inputs: dict[str, torch.Tensor | int]) -> Shares:
        return evaluate_shares(derived, inputs, self.variant.captures, self.totals, self.compute)


@dataclass(frozen=True)
class _Rows:
    """What the tiles need of each row.

    Shape: do (batch, seqlen_q, heads, head_dim_v) by the output before an epilogue; lse, delta
        (batch, heads, seqlen_q), None for Elementwise weights. lse is +inf where it was -inf, so
        that every weight is 0 there; delta is sum(do * o) - dlse.
    """

    do: torch.Tensor
    lse: torch.Tensor | None
    delta: torch.Tensor | None


def _rows(
    call: _Call,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
) -> _Rows:
    """One pass over the rows; what an epilogue loads gets its gradient here."""
    do, dlse = before_epilogue(
        call.variant, o, lse, do, dlse, seqlen_k=call.k.shape[1], totals=call.totals
    )
    o, do = (t.to(call.compute).contiguous() for t in (o, do))
    if lse is None:
        return _Rows(do, None, None)
    delta = (do * o).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse.to(call.compute)
    return _Rows(do, lse.to(call.compute).masked_fill(lse == -math.inf, math.inf), delta)


def before_epilogue(
    variant: Variant,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    seqlen_k: int,
    totals: Mapping[int, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients by the output before an epilogue and by the LSE, on any device.

    do is rounded to its type again, as the operand that it will be; dlse is None where neither
    the caller nor the epilogue gives one. What the epilogue loads is added to `totals`.

    Shape: o and do (batch, seqlen_q, heads, head_dim_v), lse and dlse (batch, heads, seqlen_q);
        memory beside the results is that of a few million elements.
    """
    epilogue = of_epilogue(variant)
    if epilogue is None or do.numel() == 0:
        return do, dlse
    compute = _compute(do.dtype)
    batch, seqlen_q, heads, dim = do.shape
    b, h = (torch.arange(n, device=do.device) for n in (batch, heads))
    through = torch.empty(do.shape, dtype=do.dtype, device=do.device)
    by_lse = None
    if "lse" in epilogue.inputs:
        by_lse = torch.empty((batch, heads, seqlen_q), dtype=compute, device=do.device)
    together = max(1, ROWS_AT_ONCE // (batch * heads * dim))
    for first in range(0, seqlen_q, together):
        some = slice(first, min(first + together, seqlen_q))
        # In one layout, so that sums over them are added up in one order.
        given, before = (t[:, some].to(compute).contiguous() for t in (do, o))
        inputs: dict[str, torch.Tensor | int] = {
            "o": before,
            "b": b[:, None, None, None],
            "q": torch.arange(some.start, some.stop, device=do.device)[:, None, None],
            "h": h[:, None],
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
        }
        if lse is not None:
            inputs["lse"] = lse[..., some].to(compute).transpose(1, 2)[..., None]
        found = evaluate_shares(epilogue, inputs, variant.captures, totals, compute)
        add_loads(totals, found.loads, given)
        if by_lse is not None:
            by_lse[..., some] = (given * found.inputs["lse"]).sum(-1).transpose(1, 2)
        through[:, some] = given * found.inputs["o"] if "o" in found.inputs else 0.0
    if by_lse is not None and dlse is not None:
        by_lse += dlse
    return through, dlse if by_lse is None else by_lse


def _visits(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles of queries and keys meet, and which of those need the element mask.

    Shape: (batch, heads, m_blocks, n_blocks).
    """
    (batch, seqlen_q, heads, _), seqlen_k = call.q.shape, call.k.shape[1]
    sizes = batch, heads, seqlen_q, seqlen_k
    if 0 in sizes:
        none = torch.zeros(batch, heads, 0, 0, dtype=torch.bool, device=call.q.device)
        return none, none
    found = visited_tiles(call.variant.mask, call.variant.captures, *sizes, *call.tile)
    visited, masked = (t.expand(batch, heads, -1, -1) for t in found)
    return visited, masked


@dataclass(frozen=True)
class _Tile:
    """A tile of queries and one of keys, of several batch entries and heads side by side."""

    call: _Call
    rows: _Rows
    b: torch.Tensor
    h: torch.Tensor
    queries: range
    keys: range

    def of_queries(self, t: torch.Tensor) -> torch.Tensor:
        """Rows of q or do: (cells, queries, dim)."""
        return t[self.b, self.queries.start : self.queries.stop, self.h].to(self.call.compute)

    def of_keys(self, t: torch.Tensor) -> torch.Tensor:
        """Rows of k or v: (cells, keys, dim)."""
        at = self.h // self.call.group
        return t[self.b, self.keys.start : self.keys.stop, at].to(self.call.compute)

    def of_rows(self, t: torch.Tensor) -> torch.Tensor:
        """What each row has one of: (cells, queries, 1)."""
        return t[self.b, self.h, self.queries.start : self.queries.stop][..., None]

    @property
    def positions(self) -> dict[str, torch.Tensor | int]:
        """The inputs of a graph but for the score."""
        call = self.call
        return {
            "b": self.b[:, None, None],
            "h": self.h[:, None, None],
            "q": torch.arange(self.queries.start, self.queries.stop, device=self.b.device)[:, None],
            "k": torch.arange(self.keys.start, self.keys.stop, device=self.b.device),
            "seqlen_q": call.q.shape[1],
            "seqlen_k": call.k.shape[1],
        }

    def visible(self, masked: torch.Tensor | None = None) -> torch.Tensor:
        """Which pairs the element mask shows, where it is applied: (cells, queries, keys).

        Without `masked` it is applied everywhere, and nothing is waited for.
        """
        shape = len(self.b), len(self.queries), len(self.keys)
        mask = self.call.variant.mask
        if mask is None or (masked is not None and not masked.any()):
            return torch.ones(shape, dtype=torch.bool, device=self.b.device)
        shown = torch.broadcast_to(
            evaluate(mask, self.positions, self.call.variant.captures), shape
        )
        return shown if masked is None else shown | ~masked[:, None, None]

    def add(
        self,
        dq: torch.Tensor,
        dk_tile: torch.Tensor,
        dv_tile: torch.Tensor,
        masked: torch.Tensor,
    ) -> None:
        """Add what these tiles give; dk_tile and dv_tile are (batch, heads, keys, dim)."""
        call = self.call
        p, ds, seen = self.weighed(self.visible(masked))
        p, do = call.rounded(p), self.of_queries(self.rows.do)
        dv_tile[self.b, self.h] += _product(p.mT, do, seen.mT)
        if ds is None:
            return
        ds, q, k = call.rounded(ds), self.of_queries(call.q), self.of_keys(call.k)
        dk_tile[self.b, self.h] += _product(ds.mT, q, seen.mT)
        dq[self.b, self.queries.start : self.queries.stop, self.h] += _product(ds, k, seen)

    def weighed(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """P, dS by the raw score (None where it is 0 everywhere), and the pairs that take part.

        Captured tensors get their share.
        Shape: (cells, queries, keys), as `seen`, which the mask shows.
        """
        call, element = self.call, self.call.element
        values = torch.bmm(self.of_queries(call.q), self.of_keys(call.k).mT)
        found = None
        if element is not None:
            found = call.shares(element, {"score": values * call.scale, **self.positions})
            values = torch.broadcast_to(found.value, seen.shape)
        dp = torch.bmm(self.of_queries(self.rows.do), self.of_keys(call.v).mT)
        if self.rows.lse is not None and self.rows.delta is not None:
            seen = seen & (values != -math.inf)
            p = self.weights(values, self.of_rows(self.rows.lse))
            ds = p * (dp - self.of_rows(self.rows.delta))
        else:
            p, ds = values, dp
        p, ds = torch.where(seen, p, 0.0), torch.where(seen, ds, 0.0)
        if found is None:
            return p, ds, seen
        add_loads(call.totals, found.loads, ds, seen)
        if "score" not in found.inputs:
            return p, None, seen
        return p, torch.where(seen, ds * found.inputs["score"], 0.0), seen

    def weights(self, values: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """exp(score - lse) of scores, which are raw products if no function changes them."""
        call = self.call
        if call.compute == torch.float64:
            return torch.exp((values if call.element is not None else values * call.scale) - lse)
        to_log2 = torch.full((), LOG2_E, dtype=torch.float32, device=lse.device)
        factor = to_log2 if call.element is not None else to_log2 * call.scale
        exponents = (values.double() * factor - (lse * to_log2)).float()  # rounded once: an FMA
        return torch.exp2(exponents).masked_fill_(exponents < SMALLEST_EXPONENT, 0.0)


def _product(a: torch.Tensor, b: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """a @ b, to which rows of b that are not finite add only where they are seen.

    Shape: a and seen (cells, m, n), b (cells, n, dim) -> (cells, m, dim).
    """
    if b.sum().isfinite():  # cheaper; other sums may still be of finite numbers
        return torch.bmm(a, b)
    odd = ~b.isfinite().all(-1)
    found = torch.bmm(a.masked_fill(odd[:, None], 0.0), b.masked_fill(odd[..., None], 0.0))
    for row in odd.any(0).nonzero().flatten().tolist():
        met = odd[:, None, row] & seen[..., row]
        product = a[..., row, None] * b[:, None, row]
        found += torch.where(met[..., None], product, 0.0)
    return found


def add_sink(
    total: torch.Tensor, sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
) -> None:
    """Add the gradient of a sink, whose weight meets no value: -exp(sink - lse) * delta.

    Shape: lse and delta (batch, heads, seqlen_q), a natural logarithm; sink and total (heads,)
        or ().
    """
    each = sink.to(total.dtype).expand(lse.shape[1])[:, None]
    # Equal where the sink has all of the row, be it -inf, as in a row with nothing at all.
    weight = torch.where(each == lse, 1.0, torch.exp(each - lse))
    shares = -(weight * delta).sum((0, 2))
    total.add_(shares if sink.ndim else shares.sum())


@torch.no_grad()
def of_captures(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    lse: torch.Tensor | None,
    do: torch.Tensor,
    delta: torch.Tensor | None,
    totals: dict[int, torch.Tensor],
    *,
    scale: float,
    tile: tuple[int, int] = WIDE_TILE,
) -> None:
    """Add what scores and weights hand on to captured tensors, in an order that is always the same.

    A second pass over all pairs, in torch on any device, for where a kernel adds in the order in
    which its parts come. It waits for nothing, so it can be part of a CUDA graph: only tiles that
    the mask hides whatever memory holds are left out.

    Shape: lse and delta (batch, heads, seqlen_q), natural, do as the output before an epilogue;
        memory is that of some tiles of a few million elements.
    """
    if 0 in (q.numel(), k.numel()):
        return
    call = _Call(q, k, v, variant, scale, tile, totals)
    if lse is not None:
        lse = lse.masked_fill(lse == -math.inf, math.inf)
    rows = _Rows(do, lse, delta)
    cells = torch.arange(q.shape[0] * q.shape[2], device=q.device)
    pairs = min(tile[0], q.shape[1]) * min(tile[1], k.shape[1])
    together = max(1, WIDE_AT_ONCE // pairs)
    for m_block, n_block in _may_meet(call):
        for some in cells.split(together):
            b, h = some // q.shape[2], some % q.shape[2]
            pair = _Tile(call, rows, b, h, call.span(m_block, 0), call.span(n_block, 1))
            pair.weighed(pair.visible())


def _may_meet(call: _Call) -> list[tuple[int, int]]:
    """Tiles of queries and keys that some head may visit, as far as the host knows."""
    batch, seqlen_q, heads, _ = call.q.shape
    lengths = seqlen_q, call.k.shape[1]
    mask = call.variant.mask
    if mask is not None and mask.captures:  # who can tell
        counts = (range(-(-n // size)) for n, size in zip(lengths, call.tile, strict=True))
        return list(itertools.product(*counts))
    visited, _ = visited_tiles(mask, (), batch, heads, *lengths, *call.tile)
    return [(m, n) for m, n in visited.any(0).any(0).nonzero().tolist()]
