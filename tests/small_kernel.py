"""Two small kernels with the interface of the real ones, for tests of what handles kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cutedsl_fa3.pipelines.expect import Expect

EDGE = 64  # rows, columns and depth of the one tile
K_STEP = 16  # depth of a 16-bit WGMMA


@dataclass(frozen=True)
class Smem:
    """A shared-memory plan with nothing but its size."""

    total: int

    def __str__(self) -> str:
        return f"{self.total} B"


class TileGemm:
    """c = alpha * a @ b.T for one 64 x 64 x 64 tile: two TMA loads, four WGMMAs.

    `promised` are expectations beside those that follow from the tile. Without `wait` the
    accumulator is read while WGMMAs still write it: ptxas repairs that, and says so.
    """

    arch = "sm_90a"
    name = "tile_gemm"

    def __init__(self, promised: tuple[Expect, ...] = (), wait: bool = True):
        self.promised = promised
        self.wait = wait
        self.smem = Smem(2 * EDGE * EDGE * 2 + 8)

    @property
    def key_text(self) -> str:
        return f"tile_gemm {EDGE}x{EDGE}x{EDGE} bf16, wait {self.wait}"

    def fake_args(self) -> tuple:
        def matrix(dtype):
            return make_fake_compact_tensor(
                dtype, (EDGE, EDGE), stride_order=(1, 0), assumed_align=16
            )

        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return matrix(BFloat16), matrix(BFloat16), matrix(Float32), Float32(1.0), stream

    def expected(self) -> tuple[Expect, ...]:
        shape = f"HGMMA.64x{EDGE}x{K_STEP}"
        return (
            Expect("UTMALDG", "exactly", 2, "one box each of a and b"),
            Expect(shape, "exactly", EDGE // K_STEP, "depth 64 in steps of 16"),
            Expect("UTMASTG", "none", 0, "c is stored from registers"),
            *self.promised,
        )

    @cute.jit
    def host(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        alpha: Float32,
        stream: cuda.CUstream,
    ):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        layout = cute.tile_to_shape(atom, (EDGE, EDGE), (0, 1))
        box = (EDGE, EDGE)
        op = cpasync.CopyBulkTensorTileG2SOp()
        load_a, coords_a = cpasync.make_tiled_tma_atom(op, a, layout, box)
        load_b, coords_b = cpasync.make_tiled_tma_atom(op, b, layout, box)
        mma = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                BFloat16,
                Float32,
                (64, EDGE, K_STEP),
                warpgroup.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        self.tile(load_a, coords_a, load_b, coords_b, c, alpha, layout, mma).launch(
            grid=(1, 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def tile(
        self,
        load_a: cute.CopyAtom,
        coords_a: cute.Tensor,
        load_b: cute.CopyAtom,
        coords_b: cute.Tensor,
        c: cute.Tensor,
        alpha: Float32,
        layout: cute.ComposedLayout,
        mma: cute.TiledMma,
    ):
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        a = smem.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
        b = smem.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
        full = smem.allocate_array(cutlass.Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * EDGE * EDGE * 2)
            self.copy(load_a, coords_a, a, full)
            self.copy(load_b, coords_b, b, full)
        cute.arch.mbarrier_wait(full, 0)

        slice_ = mma.get_slice(thread)
        frag_a = mma.make_fragment_A(slice_.partition_A(a))
        frag_b = mma.make_fragment_B(slice_.partition_B(b))
        out = slice_.partition_C(c)
        acc = cute.make_rmem_tensor(out.shape, Float32)
        warpgroup.fence()
        for k in cutlass.range_constexpr(EDGE // K_STEP):
            mma.set(warpgroup.Field.ACCUMULATE, k > 0)
            cute.gemm(mma, acc, frag_a[None, None, k], frag_b[None, None, k], acc)
        warpgroup.commit_group()
        if cutlass.const_expr(self.wait):
            warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(acc)):
            out[i] = acc[i] * alpha

    @cute.jit
    def copy(self, load: cute.CopyAtom, coords: cute.Tensor, tile: cute.Tensor, full: cute.Pointer):
        to_tile, from_coords = cpasync.tma_partition(
            load,
            0,
            cute.make_layout(1),
            cute.group_modes(tile, 0, 2),
            cute.group_modes(coords, 0, 2),
        )
        cute.copy(load, from_coords, to_tile, tma_bar_ptr=full)


class Scale:
    """y = factor * x, with `factor` in the code; `live` values a thread are held at once.

    With 1,024 threads a thread has 64 registers: `live` above that cannot do without spills.
    """

    name = "scale"
    THREADS = 1024

    def __init__(self, factor: float, arch: str = "sm_90a", live: int = 1):
        self.factor = factor
        self.arch = arch
        self.live = live
        self.smem = Smem(0)

    @cached_property
    def key_text(self) -> str:
        return f"scale by {self.factor!r}, {self.live} values live"

    def fake_args(self) -> tuple:
        def vector():
            return make_fake_tensor(Float32, (cute.sym_int(),), (1,), assumed_align=4)

        return vector(), vector(), make_fake_stream(use_tvm_ffi_env_stream=True)

    def expected(self) -> tuple[Expect, ...]:
        return (Expect("HGMMA", "none", 0, "no matrix product"),)

    @cute.jit
    def host(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(x), self.THREADS * self.live)
        self.scale(x, y).launch(grid=(blocks, 1, 1), block=(self.THREADS, 1, 1), stream=stream)

    @cute.kernel
    def scale(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = block * self.THREADS * self.live + thread
        held = cute.make_rmem_tensor((self.live,), Float32)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.live):
            held[i] = Float32(0.0)
            if first + i * self.THREADS < cute.size(x):
                held[i] = x[first + i * self.THREADS]
            total += held[i]
        for i in cutlass.range_constexpr(self.live):
            if first + i * self.THREADS < cute.size(x):
                # With one value the sum cancels; with more it keeps all of them live.
                y[first + i * self.THREADS] = held[i] * self.factor + (total - total)
