"""The key tiles that tiles of queries visit, in the kernel's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .bounds import PythonIntegers, TorchIntegers, visit_runs
from .graph import Graph
from .keys import QueryTile, key_sets
from .summaries import reader, summarise
from .tiles import Scan, by_tile


def visit_list(
    mask: Graph | None,
    tile: QueryTile,
    tile_m: int,
    tile_n: int,
    captures: Sequence[torch.Tensor] = (),
    table: torch.Tensor | None = None,
) -> list[tuple[int, bool]]:
    """(n_block, masked) of each key tile that one tile of queries visits, in order.

    Those that need the element mask come first, each kind from left to right. `table` is what
    `summarise` made for these tile sizes; masks without summaries need none.
    """
    ints = PythonIntegers(captures)
    if not by_tile(mask):
        runs = visit_runs(key_sets(mask, tile, ints), tile_n, tile.seqlen_k, ints)
        return [(runs.n_block(j), j < runs.n_partial) for j in range(runs.n_total)]
    read = reader(mask, table, tile.b, tile.h)
    scan = Scan(mask, tile, tile.q0 // tile_m, tile_n, ints, read)
    decided = [(n, *scan.decide(n)) for n in range(scan.first, scan.end)]
    found = [(n, masked) for n, visited, masked in decided if visited]
    return sorted(found, key=lambda entry: not entry[1])


def all_visits(
    mask: Graph | None,
    captures: Sequence[torch.Tensor],
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
) -> torch.Tensor:
    """Every `visit_list` of a launch: entry j is 2 * n_block + masked of the j-th, -1 behind them.

    Shape: (batch, heads, m_blocks, n_blocks + 1) int32, on the captured tensors' device.
    """
    decided = visited_tiles(mask, captures, batch, heads, seqlen_q, seqlen_k, tile_m, tile_n)
    return _in_order(*decided).expand(batch, heads, -1, -1)


def visited_tiles(
    mask: Graph | None,
    captures: Sequence[torch.Tensor],
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each tile of queries visits each key tile, and with the element mask.

    Shape: (batch or 1, heads or 1, m_blocks, n_blocks) bool, 1 where the mask does not depend on
    it, on the captured tensors' device. A tile that is not visited may count as masked.
    """
    device = captures[0].device if captures else torch.device("cpu")
    m_blocks, n_blocks = -(-seqlen_q // tile_m), -(-seqlen_k // tile_n)

    def counted(count: int, *after: None) -> torch.Tensor:
        return torch.arange(count, device=device)[(slice(None), *after)]

    depends = mask.inputs if mask else frozenset[str]()
    b = counted(batch if "b" in depends else 1, None, None, None)
    h = counted(heads if "h" in depends else 1, None, None)
    q_block, n_block = counted(m_blocks, None), counted(n_blocks)
    q0 = q_block * tile_m
    tile = QueryTile(q0, (q0 + tile_m).clamp(max=seqlen_q) - 1, b, h, seqlen_q, seqlen_k)
    table = summarise(mask, captures, batch, heads, seqlen_q, seqlen_k, tile_m, tile_n)
    ints = TorchIntegers(captures)
    scan = Scan(mask, tile, q_block, tile_n, ints, reader(mask, table, b, h))
    if by_tile(mask):
        visited, masked = scan.decide(n_block)
    else:
        masked = scan.within(n_block, scan.runs.partial)
        visited = ints.or_(masked, scan.within(n_block, scan.runs.full))

    def whole(condition: Any) -> torch.Tensor:
        shape = (b.shape[0], h.shape[0], m_blocks, n_blocks)
        return torch.as_tensor(condition, device=device).broadcast_to(shape)

    return whole(visited), whole(masked)


def _in_order(visited: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Conditions of each key tile as a list: masked ones, others, then -1 to one more than all."""
    rank = torch.where(visited, torch.where(masked, 0, 1), 2)
    order = torch.argsort(rank, dim=-1, stable=True)
    entries = 2 * order + masked.gather(-1, order)
    entries = torch.where(visited.gather(-1, order), entries, -1)
    return torch.nn.functional.pad(entries, (0, 1), value=-1).to(torch.int32)
