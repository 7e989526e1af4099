"""C = A @ B^T on SM100: the pieces of the SM90 kernel, another tensor core.

    role        warps  does                                                        rings
    epilogue    4      tensor memory -> registers -> shared memory -> TMA store <- acc
    mma         1      UMMA of shared memory into tensor memory                 <- ab, -> acc
    producer    1      A and B tiles by TMA                                     -> ab

    ring   carries                     filled by             emptied by
    ab     tiles a and b, in SMEM      bytes of TMA          the commit after a product
    acc    one accumulator, in TMEM    the commit at the end the epilogue's threads

No role needs more registers than the launch grants, so none moves any. The epilogue comes first
because its warps read the lanes of tensor memory that belong to their place in a warpgroup. The
arguments, the tiles and the producer are those of every GEMM (kernels/gemm.py).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cutedsl_fa3.layouts import Accumulator, tcgen05
from cutedsl_fa3.pipelines import (
    AccumulatorRing,
    Barrier,
    Barriers,
    Expect,
    Role,
    Schedule,
    ScheduleError,
    UmmaRing,
)

from ..gemm import Gemm


class GemmSm100(Gemm):
    """A GEMM at any ring depth: `schedule` gives tile_m, tile_n, stages and cluster.

    Raises:
        ScheduleError: other than one warpgroup of consumers. LayoutError: tiles that do not fit.
    """

    arch = "sm_100a"
    name = "gemm_sm100"

    def __init__(self, schedule: Schedule, dtype: type = cutlass.BFloat16) -> None:
        super().__init__(schedule, dtype)
        if schedule.consumers != 1:
            raise ScheduleError(
                f"consumers = {schedule.consumers}: on SM100 one warp issues the products and one "
                "warpgroup reads the result; use consumers=1"
            )
        self.accumulators = {"acc": Accumulator(schedule.tile_m, schedule.tile_n)}
        self.rings = {
            "ab": UmmaRing(("a", "b"), schedule.stages, multicast=self.multicast),
            "acc": AccumulatorRing(("acc",), 1),
        }
        self.roles = {"epilogue": Role(warps=4), "mma": Role(warps=1), "producer": Role(warps=1)}
        self.barriers = Barriers({"written": Barrier(self.roles["epilogue"].threads)})
        self.check()

    def expected(self) -> tuple[Expect, ...]:
        """What the tables promise about the machine code: the products are one loop."""
        products, count = tcgen05.instructions(self.schedule.tile_m, self.tile_k)
        loads, columns = tcgen05.loads(self.accumulators["acc"])
        return (
            *super().expected(),
            Expect(products, "exactly", count, "the k steps of one slot"),
            Expect("UTCBAR", "exactly", 2, "ring ab: a slot is read; ring acc: a slot is written"),
            Expect(loads, "exactly", columns, "the columns of the accumulator"),
        )

    @cute.jit
    def mma(self, io, smem, ports, thread):
        umma = tcgen05.tiled_mma(self.dtype, self.schedule.tile_n)
        part = umma.get_slice(0)
        a = umma.make_fragment_A(part.partition_A(smem.a))
        b = umma.make_fragment_B(part.partition_B(smem.b))
        acc = self.accumulator("acc", umma, smem)
        ring, filled = ports.ab, ports.acc.acquire_and_advance()
        target = acc[None, None, None, filled.index]
        for k in cutlass.range(self.k_tiles(io), unroll=1):
            slot = ring.wait_and_advance()
            at = (None, None, None, slot.index)
            tcgen05.issue(umma, target, a[at], b[at], accumulate=k > 0)
            slot.release()
        filled.commit()

    @cute.jit
    def epilogue(self, io, smem, ports, thread):
        m_block, n_block, _ = cute.arch.block_idx()
        umma = tcgen05.tiled_mma(self.dtype, self.schedule.tile_n)
        acc = self.accumulator("acc", umma, smem)
        slot = ports.acc.wait_and_advance()  # then every product has read B, which C overwrites
        tcgen05.to_smem(acc[None, None, None, slot.index], smem.c, thread)
        slot.release()
        cute.arch.fence_view_async_shared()
        self.barriers["written"].arrive_and_wait()
        if thread < 32:
            self.store(self.tiles["c"], io.c, smem.c, (m_block, n_block))
        self.free_tmem(smem)
