"""Random masks and scores as source text, run by tracing and by eager torch.

`masks()`, `scores()` and `variants()` are hypothesis strategies of `Written`: what an example is
stands in its text, so that a failing one can be pasted. Captured tensors come from a seed; lengths
may be up to LONGEST, the batch up to BATCH and heads up to HEADS. Every index is in range, and no
integer leaves 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from cutedsl_fa3.variant import Variant, seqlen_k, seqlen_q

LONGEST, BATCH, HEADS, DOCUMENTS = 512, 2, 4, 12


def captured(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """What the functions read: vectors of positions, tables of heads, scalars."""
    g = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

    sorted_documents = whole(0, DOCUMENTS, LONGEST).sort().values
    made = {
        "doc": sorted_documents,
        "kind": whole(0, 4, LONGEST),
        "start": torch.searchsorted(sorted_documents, torch.arange(DOCUMENTS)),
        "order": torch.randperm(LONGEST, generator=g),
        "length": whole(0, LONGEST, BATCH),
        "width": whole(0, 200, HEADS),
        "page": whole(0, 9, BATCH, LONGEST // 16),
        "count": whole(0, 300),
        "flag": torch.rand(LONGEST, generator=g) > 0.3,
        "flags": torch.rand(HEADS, LONGEST, generator=g) > 0.5,
        "slope": torch.rand(HEADS, generator=g),
        "bias": torch.randn(BATCH, HEADS, 7, generator=g),
        "weight": torch.randn(LONGEST, generator=g).half(),
        "gain": torch.randn((), generator=g),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


@dataclass(frozen=True)
class Written:
    """A mask and a score as Python source over b, h, q, k, s and the names of `captured`."""

    mask: str | None
    score: str | None
    seed: int

    def function(self, source: str, given: str, names: dict[str, Any]) -> Callable[..., Any]:
        return eval(f"lambda {given}: {source}", {"torch": torch, **names})

    def variant(self, device: str = "cpu") -> Variant:
        """The same text, traced."""
        names = {**captured(self.seed, device), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        score = self.score and self.function(self.score, "s, b, h, q, k", names)
        mask = self.mask and self.function(self.mask, "b, h, q, k", names)
        return Variant(score=score, mask=mask)

    def _eager(self, lengths: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
        """Names for eager torch: floats widened, as they are when a variant reads them."""
        sizes = {"seqlen_q": torch.tensor(lengths[0]), "seqlen_k": torch.tensor(lengths[1])}
        made = captured(self.seed)
        return sizes | {n: t.to(dtype) if t.is_floating_point() else t for n, t in made.items()}

    def visible(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
        """Eager torch's value of the mask everywhere."""
        shape = batch, heads, seqlen_q, seqlen_k
        if self.mask is None:
            return torch.ones(shape, dtype=torch.bool)
        names = self._eager((seqlen_q, seqlen_k), torch.float32)
        function = self.function(self.mask, "b, h, q, k", names)
        return torch.broadcast_to(function(*positions(*shape).values()), shape)

    def scored(self, s: torch.Tensor) -> torch.Tensor:
        """Eager torch's value of the score. Shape: s (batch, heads, seqlen_q, seqlen_k)."""
        if self.score is None:
            return s
        names = self._eager((s.shape[2], s.shape[3]), s.dtype)
        function = self.function(self.score, "s, b, h, q, k", names)
        return torch.broadcast_to(function(s, *positions(*s.shape).values()), s.shape)


def positions(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> dict[str, torch.Tensor]:
    """b, h, q and k, each along its own dimension of four."""
    return {
        name: torch.arange(size).reshape(-1, *[1] * (3 - axis))
        for axis, (name, size) in enumerate(
            zip("bhqk", (batch, heads, seqlen_q, seqlen_k), strict=True)
        )
    }


# What is never a Python number stands on the left of an operator, as eager torch needs it.
_INTS = st.sampled_from(
    [
        *("q", "k", "q", "k", "h", "b", "(q - k)", "(k - q)", "(q + (seqlen_k - seqlen_q))"),
        *("doc[q]", "doc[k]", "kind[q]", "kind[k]", "start[doc[q]]", "start[doc[k]]"),
        *("(q - start[doc[q]])", "(k - start[doc[k]])", "order[k]", "order[q]"),
        *("length[b]", "width[h]", "count", "page[b, k // 16]", "page[b, q // 16]"),
        *("order[(q + k) % 512]", "seqlen_k"),
    ]
)
_CONSTANTS = st.integers(-40, 300).map(lambda n: f"({n})")
_DIVISORS = st.sampled_from([1, 2, 3, 16, 48, 100, -4]).map(lambda n: f"({n})")
_COMPARISONS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])


def _more_ints(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    either = inner | _CONSTANTS
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-"]), either),
        st.builds("({} * {})".format, inner, st.sampled_from(["2", "3", "(-1)"])),
        st.builds("({} {} {})".format, inner, st.sampled_from(["//", "%"]), _DIVISORS),
        st.builds("torch.{}({}, {})".format, st.sampled_from(["minimum", "maximum"]), inner, inner),
        st.builds("abs({})".format, inner),
        st.builds("({}).clamp(min=0, max={})".format, inner, st.sampled_from([7, 60, 300])),
        st.builds("({} {} {})".format, inner, st.sampled_from([">>", "&", "^", "|"]), _SHIFTS),
        st.builds("torch.where({}, {}, {})".format, _compared(inner), inner, either),
    )


_SHIFTS = st.sampled_from(["1", "3"])


def _compared(ints: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds("({} {} {})".format, ints, _COMPARISONS, ints | _CONSTANTS)


INTS = st.recursive(_INTS, _more_ints, max_leaves=4)
_BOOLS = st.one_of(
    _compared(INTS),
    _compared(_INTS),
    st.sampled_from(
        [
            *("(q >= k)", "(doc[q] == doc[k])", "(q - k < 64)", "(k < length[b])"),
            *("(k <= q + (seqlen_k - seqlen_q))", "(k // 48 == q // 48)", "((q - k) % 3 == 0)"),
            *("flag[q]", "flag[k]", "flags[h, k]", "flags[h, q]", "(kind[q] != kind[k])"),
        ]
    ),
)


def _more_bools(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} & {})".format, inner, inner),
        st.builds("({} | {})".format, inner, inner),
        st.builds("({} ^ {})".format, inner, inner),
        st.builds("(~{})".format, inner),
        st.builds("torch.where({}, {}, {})".format, inner, inner, inner),
        st.builds("({} == {})".format, inner, inner),
    )


BOOLS = st.recursive(_BOOLS, _more_bools, max_leaves=5)

_FLOATS = st.sampled_from(
    [
        *("s", "s", "s", "(s * 0.5)", "(s + slope[h] * (k - q))", "weight[k]", "(s * gain)"),
        *("bias[b, h, (q - k) % 7]", "bias[b, h, 2]", "(q / 7)", "slope[h]"),
    ]
)


def _more_floats(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*"]), inner),
        st.builds("({} * {})".format, inner, st.sampled_from(["0.25", "(-1.5)", "3.0"])),
        st.builds("torch.{}({})".format, st.sampled_from(["tanh", "sigmoid", "abs"]), inner),
        st.builds("({}).clamp(-4, 4)".format, inner),
        st.builds("torch.where({}, {}, {})".format, _BOOLS, inner, inner),
        st.builds("torch.where({}, {}, 0.0)".format, _BOOLS, inner),
        st.builds("({} + ({}).float() * 0.01)".format, inner, INTS),
    )


FLOATS = st.recursive(_FLOATS, _more_floats, max_leaves=4)
_SEEDS = st.integers(0, 3)


def masks() -> st.SearchStrategy[Written]:
    """Variants that hide keys."""
    return st.builds(Written, BOOLS, st.none(), _SEEDS)


def scores() -> st.SearchStrategy[Written]:
    """Variants that change scores."""
    return st.builds(Written, st.none(), FLOATS, _SEEDS)


def variants() -> st.SearchStrategy[Written]:
    """Variants that hide keys, change scores, or both."""
    return st.builds(Written, st.none() | BOOLS, st.none() | FLOATS, _SEEDS)
