"""Whom the warps of a CTA signal when they release a slot: the compiler's own code, on the CPU."""

from __future__ import annotations

from functools import cache

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.pipeline import PipelineTmaAsync

WARP = 32


@cute.jit
def _signals(
    out: cute.Tensor, cta: cutlass.Int32, shape: cutlass.Constexpr, mode: cutlass.Constexpr
):
    for lane in cutlass.range(WARP):
        to, sent = PipelineTmaAsync.init_empty_barrier_arrive_signal(
            cute.make_layout(shape), lane, mode
        )
        out[lane] = cutlass.Int32(cutlass.select_(sent, to, cutlass.Int32(-1)))


@cache
def signalled(shape: tuple[int, ...], mode: tuple[int, int], cta: int) -> list[int]:
    """The CTAs, by rank in the cluster, that one warp of `cta` signals; one a lane at most."""
    out = torch.zeros(WARP, dtype=torch.int32)
    rank = cutlass.Int32(cta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute.arch, "block_idx_in_cluster", lambda: rank)
        patch.setattr(cute.arch, "make_warp_uniform", lambda value: value)
        _signals(from_dlpack(out), rank, shape, mode)
    ranks = [to for to in out.tolist() if to >= 0]
    # Told of one CTA, a pipeline signals the barrier of its own.
    return [cta] * len(ranks) if torch.Size(shape).numel() == 1 else ranks
