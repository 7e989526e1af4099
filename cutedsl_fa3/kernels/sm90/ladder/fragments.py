"""One thread's operands and accumulators, with the two products on them: mma.sync or WGMMA.

Both have the same members, so that a kernel can have either: a product is complete when its method
returns. `output` is acc_o as (rows, cols) of this thread, `places` says where its scores lie.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cutedsl_fa3.layouts import mma_sync, wgmma
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.pipelines.roles import WARPS_PER_GROUP

from ..operands import AT_ONCE, Fragments


class BySync:
    """Products by mma.sync: a warp loads what it multiplies by ldmatrix.

    `in_parts`: V is loaded 16 columns at a time instead of a k step; which of both leaves ptxas
    enough registers, of 255, is seen by compiling.

    Shape: smem.q (tile_m, head_dim, 1), smem.k and smem.v (tile_n, head_dim, stages).
    """

    def __init__(
        self,
        schedule: Schedule,
        dtype: type,
        dv: int,
        smem: SimpleNamespace,
        thread: Int32,
        in_parts: bool = False,
    ) -> None:
        self.schedule, self.in_parts = schedule, in_parts
        self.mma = mma_sync.tiled_mma(dtype, WARPS_PER_GROUP * schedule.consumers)
        self.q = mma_sync.operand_a(self.mma, smem.q, thread)
        self.k = mma_sync.operand_b(self.mma, smem.k, thread)
        self.v = mma_sync.operand_b(self.mma, smem.v, thread, k_first=True)
        self.acc_o = mma_sync.accumulator(self.mma, schedule.tile_m, dv)
        scores = self.mma.partition_shape_C((schedule.tile_m, schedule.tile_n))
        self.p = cute.make_rmem_tensor(scores, dtype)
        self.output = mma_sync.as_rows_cols(self.acc_o)
        self.places = mma_sync.places(self.mma, schedule.tile_m, schedule.tile_n, thread)

    def multiply_qk(self, slot: object) -> cute.Tensor:
        """S = Q K^T."""
        acc_s = mma_sync.accumulator(self.mma, self.schedule.tile_m, self.schedule.tile_n)
        for k in range(self.k.steps):
            self.q.load(k, 0)
            self.k.load(k, slot.index)
            mma_sync.multiply(self.mma, acc_s, self.q.fragment, self.k, k)
        return acc_s

    def multiply_pv(self, slot: object) -> None:
        """O += P V."""
        p, parts = mma_sync.as_operand(self.p), range(self.v.parts) if self.in_parts else (None,)
        for k, part in product(range(self.v.steps), parts):
            self.v.load(k, slot.index, part)
            mma_sync.multiply(self.mma, self.acc_o, p, self.v, k, part)

    def rows_cols(self, acc_s: cute.Tensor) -> cute.Tensor:
        """Scores as (rows, cols) of this thread."""
        return mma_sync.as_rows_cols(acc_s)

    def round_p(self, acc_s: cute.Tensor) -> None:
        """P in the input dtype, as the second product reads it."""
        for first in range(0, cute.size(acc_s), AT_ONCE):
            few = cute.make_layout(AT_ONCE)
            rounded = cute.make_tensor(acc_s.iterator + first, few).load().to(self.p.element_type)
            cute.make_tensor(self.p.iterator + first, few).store(rounded)

    def write(self, o: cute.Tensor, thread: Int32) -> None:
        """This thread's share of O to the tile o (tile_m, head_dim_v) in shared memory."""
        mma_sync.to_smem(self.acc_o, o, self.mma, thread)


class ByWarpgroup(Fragments):
    """Products by WGMMA, which reads shared memory itself; each is waited for at once."""

    def __init__(
        self, schedule: Schedule, dtype: type, dv: int, smem: SimpleNamespace, thread: Int32
    ) -> None:
        super().__init__(schedule, dtype, dv, smem, thread)
        self.acc_o.fill(0.0)

    def multiply_qk(self, slot: object) -> cute.Tensor:
        """S = Q K^T."""
        acc_s = super().multiply_qk(slot)
        warpgroup.wait_group(0)
        return acc_s

    def multiply_pv(self, slot: object) -> None:
        """O += P V."""
        super().multiply_pv(slot)
        warpgroup.wait_group(0)

    def rows_cols(self, acc_s: cute.Tensor) -> cute.Tensor:
        """Scores as (rows, cols) of this thread."""
        return wgmma.as_rows_cols(acc_s)

    def write(self, o: cute.Tensor, thread: Int32) -> None:
        """This thread's share of O to the tile o (tile_m, head_dim_v) in shared memory."""
        wgmma.to_smem(self.acc_o, o, self.pv, thread)
