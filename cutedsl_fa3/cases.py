"""What the benchmark times: problems of a variant and sizes, one by one or in groups.

`Grid` is plain attention over head sizes and lengths, each case timed by itself; `groups` are
variants of one size, timed together, because each of ours is compared with our plain causal too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import product

import torch

from .named import Lengths, named, visible_pairs
from .peers import Inputs
from .problem import DTYPES, Problem
from .record import Sizes
from .schedules import Extents

Dims = tuple[int, int]  # head_dim, head_dim_v

HEAD_DIMS: tuple[Dims, ...] = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
SEQLENS = (1024, 4096, 16384)
VARIANTS = (
    "full",
    "causal",
    "alibi",
    "softcap:30",
    "bias",
    "window:1024,0",
    "prefix:256",
    "documents:1000",
    "sigmoid",
    "sink",
)
PLAIN = "causal"  # what a variant of ours is compared with


@dataclass(frozen=True)
class Case(Sizes):
    """One problem: a variant by name and the sizes it runs on."""

    @property
    def problem(self) -> tuple[str, int, int]:
        """What is fixed when a kernel is compiled: dtype and head sizes."""
        return self.dtype, self.head_dim, self.head_dim_v

    @property
    def extents(self) -> Extents:
        """What else a schedule may depend on."""
        sizes = self.seqlen_q, self.seqlen_k, self.heads, self.kv_heads
        return Extents(self.batch, *sizes)

    @property
    def flops(self) -> float:
        """2 x (head_dim + head_dim_v) for each visible pair, over batch and heads."""
        pairs = visible_pairs(self.variant, self.lengths())
        return 2.0 * self.batch * self.heads * pairs * (self.head_dim + self.head_dim_v)

    @property
    def sizes(self) -> Case:
        """The case of these sizes whose tensors are shared; see `with_tensors`."""
        return replace(self, variant="full")

    def with_tensors(self, like: Inputs) -> Inputs:
        """The case's inputs with the tensors of another of its sizes."""
        return replace(like, named=named(self.variant, self.lengths(like.q.device.type)))

    def is_of(self, row: object) -> bool:
        """Whether a row was measured on this problem; what it does not say has the default."""
        return all(
            getattr(row, each.name, each.default) == getattr(self, each.name)
            for each in fields(self)
        )

    def lengths(self, device: str = "cpu") -> Lengths:
        """What the variant depends on."""
        return Lengths(self.heads, self.seqlen_q, self.seqlen_k, device)

    def inputs(self, device: str, seed: int = 0) -> Inputs:
        """Normally distributed tensors and the variant, on `device`."""
        random_numbers = torch.Generator(device).manual_seed(seed)

        def tensor(seqlen: int, heads: int, head_dim: int) -> torch.Tensor:
            shape = (self.batch, seqlen, heads, head_dim)
            values = torch.randn(shape, generator=random_numbers, device=device)
            return values.to(DTYPES[self.dtype])

        return Inputs(
            tensor(self.seqlen_q, self.heads, self.head_dim),
            tensor(self.seqlen_k, self.kv_heads, self.head_dim),
            tensor(self.seqlen_k, self.kv_heads, self.head_dim_v),
            named(self.variant, self.lengths(device)),
        )

    @property
    def kind(self) -> str:
        """The case but for lengths, batch and heads, as in "causal bf16 d192x128"."""
        return f"{self.variant} {self.dtype} d{shown((self.head_dim, self.head_dim_v))}"

    def __str__(self) -> str:
        return (
            f"{self.kind} "
            f"B={self.batch} Sq={self.seqlen_q} Sk={self.seqlen_k} H={self.heads}/{self.kv_heads}"
        )


def shown(dims: Dims) -> str:
    """Head sizes as they are given and printed: 64, or 192x128 where that of V differs."""
    return f"{dims[0]}" if dims[0] == dims[1] else f"{dims[0]}x{dims[1]}"


def head_dims(text: str) -> tuple[Dims, ...]:
    """The pairs in a text such as "64,192x128".

    Raises: ValueError naming the part that is none.
    """
    pairs = []
    for part in text.split(","):
        d, _, dv = part.partition("x")
        if not d.isdecimal() or ("x" in part and not dv.isdecimal()):
            raise ValueError(f"head size {part!r}: valid are one number, and two as in '192x128'")
        pairs.append((int(d), int(dv or d)))
    return tuple(pairs)


def usual_seqlens(dims: Dims) -> tuple[int, ...]:
    """The lengths of a record: 1024 too at the head sizes that are used most."""
    return SEQLENS if dims in ((64, 64), (128, 128), (256, 256)) else SEQLENS[1:]


@dataclass(frozen=True)
class Grid:
    """Which cases a run measures: every combination at a constant number of tokens and width.

    There are `hidden` // head_dim heads, at least one; `group` query heads share a key head.
    Without `seqlens` each pair of head sizes has its usual ones.
    """

    variants: tuple[str, ...] = ("full", PLAIN)
    dtypes: tuple[str, ...] = ("bf16",)
    head_dims: tuple[Dims, ...] = HEAD_DIMS
    seqlens: tuple[int, ...] | None = None
    tokens: int = 16384
    hidden: int = 2048
    group: int = 1

    def cases(self) -> list[Case]:
        """The cases, sequences longer than `tokens` as a batch of one.

        Raises: ValueError for a variant, dtype, head size or group that cannot be.
        """
        return [
            self._case(dtype, dims, variant, seqlen)
            for dtype, dims, variant in product(self.dtypes, self.head_dims, self.variants)
            for seqlen in self.seqlens or usual_seqlens(dims)
        ]

    def _case(self, dtype: str, dims: Dims, variant: str, seqlen: int) -> Case:
        heads, batch = max(1, self.hidden // dims[0]), max(1, self.tokens // seqlen)
        if heads % self.group:
            raise ValueError(
                f"group = {self.group} must divide the query heads, {heads} at head_dim {dims[0]}"
            )
        sizes = (*dims, seqlen, seqlen, batch, heads, heads // self.group)
        return checked(Case(variant, dtype, *sizes))


def groups(
    variants: Iterable[str] = VARIANTS,
    dtype: str = "bf16",
    head_dims: Iterable[Dims] = ((64, 64), (128, 128)),
    seqlen: int = 8192,
    batch: int = 2,
    heads: int = 16,
) -> list[list[Case]]:
    """For each pair of head sizes the cases that are timed together, plain causal among them.

    Raises: ValueError for a variant, dtype or head size that cannot be.
    """
    names = list(dict.fromkeys([*variants, PLAIN]))
    sizes = (seqlen, seqlen, batch, heads, heads)
    return [[checked(Case(name, dtype, *dims, *sizes)) for name in names] for dims in head_dims]


def of_row(row: object) -> Case:
    """The problem that a record's row was measured on."""
    return Case(**{field.name: getattr(row, field.name) for field in fields(Case)})


def checked(case: Case) -> Case:
    """The case, if there is one of its name and sizes.

    Raises: ValueError.
    """
    Problem(*case.problem)
    named(case.variant, case.lengths())
    return case
