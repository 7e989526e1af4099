"""Small pieces of work for the kernels of this package: every number of tiles up to a ring's turn.

A ring of s slots is in the same state after s + 2 tiles as after more, but for the parity of its
phases, so 0 to s + 2 tiles are what a model has to see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from cutedsl_fa3.kernels.gemm import Gemm
    from cutedsl_fa3.plans import Plan


class Work(NamedTuple):
    """What a piece of work is called, the kernel's arguments, and which CTAs to look at.

    `ctas`: how many clusters from the first on; None for all.
    """

    what: str
    args: Sequence[Any]
    ctas: int | None = None


def of_plan(plan: Plan, longest: int | None = None) -> Iterator[Work]:
    """Forward calls that visit 0 to stages + 2 key tiles.

    One key head and the query heads of a tile, the queries of one tile (or of a cluster's), as many
    keys as fill so many tiles; at last three work tiles: of three CTAs (or of two clusters), one
    after the other, or of one persistent CTA (or cluster). Where captured tensors decide tile by
    tile, as many rows as keys, in one document or two.
    """
    s, of_cluster = plan.schedule, plan.schedule.queries * plan.schedule.cluster[0]
    top = s.stages + 2 if longest is None else longest
    for tiles in range(top + 1):
        keys = tiles * s.tile_n
        if not plan.by_tile or tiles == 0:
            yield _forward(plan, f"{tiles} key tiles", of_cluster, keys, None)
            continue
        for documents in (1, 2):
            queries = -(-keys // s.pack)
            what = f"{queries} queries, {keys} keys, {documents} documents"
            yield _forward(plan, what, queries, keys, documents)
    queries, keys = 3 * s.queries, 3 * s.tile_m
    what = f"{queries} queries, {keys} keys"
    yield _forward(plan, what, queries, keys, 1)._replace(ctas=3)


def _forward(plan: Plan, what: str, queries: int, keys: int, documents: int | None) -> Work:
    problem, variant, pack = plan.problem, plan.variant, plan.schedule.pack
    element = torch.bfloat16 if problem.dtype == "bf16" else torch.float16

    def tensor(rows: int, heads: int, cols: int) -> torch.Tensor:
        return torch.empty(1, rows, heads, cols, dtype=element, device="meta")

    table = plan.table_shape(1, pack, queries, keys)
    visits = plan.visits_shape(1, pack, queries, keys)
    args = (
        tensor(queries, pack, problem.head_dim),
        tensor(keys, 1, problem.head_dim),
        tensor(keys, 1, problem.head_dim_v),
        tensor(queries, pack, problem.head_dim_v),
        torch.empty(1, pack, queries, device="meta") if variant.has_lse else None,
        tuple(_capture(t, max(queries, keys, 1), documents) for t in variant.captures),
        None if table is None else torch.zeros(table, dtype=torch.int32),
        torch.zeros(visits, dtype=torch.int32) if plan.trace else None,
        torch.zeros(1, dtype=torch.int32) if plan.schedule.persistent else None,
        plan.schedule.cluster[0] if plan.schedule.persistent else None,
        1.0,
    )
    return Work(what, args, 1)


def _capture(tensor: torch.Tensor, length: int, documents: int | None) -> torch.Tensor:
    """A captured tensor: lists of integers long enough, as so many documents; others as they are.

    None: the list as it was given.
    """
    if tensor.is_floating_point():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if documents is None or tensor.dim() != 1 or tensor.dtype == torch.bool:
        return tensor
    even = length + length % 2
    return (torch.arange(even) * documents // even).to(tensor.dtype)


def of_gemm(kernel: Gemm) -> Iterator[Work]:
    """Products of 1 to stages + 2 tiles along k, for one cluster."""
    s = kernel.schedule
    rows, cols = s.tile_m * s.cluster[0], s.tile_n * s.cluster[1]
    element = torch.bfloat16 if "BFloat16" in kernel.dtype.__name__ else torch.float16
    for tiles in range(1, s.stages + 3):
        depth = tiles * kernel.tile_k
        shapes = ((rows, depth), (cols, depth), (rows, cols))
        args = tuple(torch.empty(shape, dtype=element, device="meta") for shape in shapes)
        yield Work(f"{tiles} tiles along k", args)
