"""Which tile of keys a CTA of the backward has."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutedsl_fa3.pipelines import TileOrder

from .schedule import BackwardSchedule

FLAGGED = 16  # keys that share a flag, by which they are computed again: those of a warp's sums


@dataclass(frozen=True)
class Work:
    """A tile of keys of one head of K and V."""

    n_block: Int32
    kv_head: Int32
    batch: Int32


def work_of(s: BackwardSchedule, index: Int32, k: cute.Tensor) -> Work:
    """The tile of CTA `index`; the first keys come first: under causality most queries see them.

    Shape: k (seqlen, dim, heads, batch).
    """
    seqlen_k, _, kv_heads, batches = k.shape
    n_blocks = cute.ceil_div(seqlen_k, s.tile_n)
    row, head_of_all = TileOrder(s.head_group).at(index, n_blocks, kv_heads * batches, cutlass.min)
    batch = head_of_all // kv_heads
    return Work(n_blocks - 1 - row, head_of_all - batch * kv_heads, batch)
