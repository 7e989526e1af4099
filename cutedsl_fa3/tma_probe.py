"""The copy engine of the GPU at hand, asked: what a load leaves in shared memory.

    encode(tmap)                    the descriptor that the driver makes of a tensor map
    encoded_by_cute(view, tile)     the one that CuTe makes, in host code: no GPU or driver needed
    load(tmap, (col, row))          all of shared memory behind one load, poisoned before
    product(a, at_a, b, at_b)       two tiles loaded through any two descriptors, by WGMMA

`layouts.copy_engine` says the same without a GPU; tests hold the two to each other byte by byte.
`RawLoad` issues one load through a descriptor at a coordinate given at run time. Nothing about box,
swizzle or type is in its code, so one kernel a rank serves every tensor map.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.cute.runtime import from_dlpack, make_fake_stream, make_fake_tensor

from .compile import Compiled, compile_kernel
from .layouts import (
    NONE,
    SW32,
    SW64,
    SW128,
    LayoutError,
    Swizzle,
    TensorMap,
    Tile,
    copy_engine,
    wgmma,
)
from .layouts.tma import DESCRIPTOR_BYTES
from .layouts.tma_rules import INTERLEAVES, L2_PROMOTIONS, OOB_FILLS, SWIZZLES
from .pipelines import Ring, Role, WarpSpecialized

SMEM_BYTES = 48 * 1024  # what a load may reach, `at` included
POISON = 0x5A
POISON_WORD = 0x5A5A5A5A
MOST_RANK = 5
THREADS = 128
WAIT_NS = 1_000_000  # a load takes microseconds; no wait here is endless
SAID = 4  # numbers of a case: bytes announced, byte of shared memory, bytes beyond, unused
SEEN = 3  # numbers shown of it: whether its phase ended, its mbarrier, the mbarrier to compare


def table(dtype: type, cols: int) -> cute.Tensor:
    """A row of `cols` numbers a case."""
    return make_fake_tensor(dtype, (cute.sym_int(), cols), (cols, 1), assumed_align=128)


def operands(first: int, count: int) -> str:
    """Operands of inline PTX, from number `first` on."""
    return ", ".join(f"{{$r{first + i}}}" for i in range(count))


def acquire(descriptor: Int64) -> None:
    """Make the copy engine read a descriptor in global memory anew."""
    cute.arch.inline_ptx(
        "fence.proxy.tensormap::generic.acquire.gpu [{$r0}], 128;", read_only_args=[descriptor]
    )


def raw_load(
    rank: int, smem: Int32, descriptor: Int64, mbarrier: Int32, coordinate: list[Int32]
) -> None:
    """One TMA load through a descriptor in global memory, by one thread."""
    acquire(descriptor)
    cute.arch.inline_ptx(
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[{{$r0}}], [{{$r1}}, {{{operands(3, rank)}}}], [{{$r2}}];",
        read_only_args=[smem, descriptor, mbarrier, *coordinate],
    )


class RawLoad:
    """One load a CTA: descriptor, coordinate and bytes by case; all shared memory comes back.

    The thread that waits tests the phase until it ends, or WAIT_NS have passed. A second mbarrier
    is told only the bytes `beyond` those that are expected to come: if just the others do come, the
    two are in the same state.
    """

    arch = "sm_90a"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"raw_load_{rank}"

    @property
    def key_text(self) -> str:
        return self.name

    def fake_args(self) -> tuple:
        """(descriptors, coordinates, said, smem, seen, stream)."""
        return (
            table(Int64, 16),
            table(Int32, MOST_RANK),
            table(Int32, SAID),
            table(Int32, SMEM_BYTES // 4),
            table(Int64, SEEN),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def host(self, descriptors, coords, said, smem, seen, stream):
        self.kernel(descriptors, coords, said, smem, seen).launch(
            grid=(cute.size(said, mode=[0]), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, descriptors, coords, said, smem, seen):
        thread, _, _ = cute.arch.thread_idx()
        case, _, _ = cute.arch.block_idx()
        allocator = cutlass.memory.SmemAllocator()
        base = allocator.allocate(SMEM_BYTES, byte_alignment=1024)
        bars = allocator.allocate_array(Int64, 2)
        words = cute.make_tensor(
            cute.recast_ptr(base, dtype=Int32), cute.make_layout(SMEM_BYTES // 4)
        )
        for i in cutlass.range(thread, SMEM_BYTES // 4, THREADS, unroll=1):
            words[i] = POISON_WORD
        if thread == 0:
            cute.arch.mbarrier_init(bars, 1)
            cute.arch.mbarrier_init(bars + 1, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.fence_view_async_shared()  # the poison comes before the copy
        cute.arch.barrier()
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(bars, said[case, 0] + said[case, 2])
            cute.arch.mbarrier_arrive_and_expect_tx(bars + 1, said[case, 2])
            raw_load(
                self.rank,
                Int32(base.toint()) + said[case, 1],
                descriptors.iterator.toint() + Int64(case) * 128,
                Int32(bars.toint()),
                [coords[case, d] for d in range(self.rank)],
            )
        ended, waited, start = Int32(0), Int64(0), cute.arch.globaltimer()
        while ended == 0 and waited < WAIT_NS:
            ended = Int32(cute.arch.mbarrier_test_wait(bars, 0))
            waited = cute.arch.globaltimer() - start
        cute.arch.barrier()
        for i in cutlass.range(thread, SMEM_BYTES // 4, THREADS, unroll=1):
            smem[case, i] = words[i]
        if thread == 0:
            seen[case, 0] = Int64(ended)
            for i in cutlass.range_constexpr(2):
                seen[case, 1 + i] = cute.make_tensor(bars + i, cute.make_layout(1))[0]


@dataclass(frozen=True)
class ProductIo:
    """Descriptors and corners of a and b, two a case, and their products."""

    descriptors: cute.Tensor
    coords: cute.Tensor
    product: cute.Tensor


class Product(WarpSpecialized):
    """a @ b^T of one 64 x 64 tile each by WGMMA, loaded through descriptors of the driver."""

    arch, name = "sm_90a", "product"
    edge = 64
    roles: ClassVar = {"producer": Role(warps=4), "consumer": Role(warps=4)}

    def __init__(self) -> None:
        self.tiles = dict.fromkeys(("a", "b"), PRODUCT_TILE)
        self.rings = {"ab": Ring(("a", "b"), stages=1)}

    @property
    def key_text(self) -> str:
        return self.name

    def fake_args(self) -> tuple:
        """(descriptors (2 * CTAs, 16), coordinates, product (64 * CTAs, 64), stream)."""
        return (
            table(Int64, 16),
            table(Int32, MOST_RANK),
            table(Float32, self.edge),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def host(self, descriptors, coords, product, stream):
        blocks = cute.size(descriptors, mode=[0]) // 2
        self.launch(ProductIo(descriptors, coords, product), (blocks, 1, 1), stream)

    @cute.jit
    def producer(self, io, smem, ports, thread):
        block, _, _ = cute.arch.block_idx()
        ring = ports.ab
        if thread < 32:
            slot = ring.acquire_and_advance()
            if thread == 0:
                for i, tile in enumerate((smem.a, smem.b)):
                    case = 2 * block + i
                    address = io.descriptors.iterator.toint() + Int64(case) * 128
                    raw_load(
                        2,
                        Int32(tile.iterator.toint()),
                        address,
                        Int32(slot.barrier.toint()),
                        [io.coords[case, d] for d in range(2)],
                    )
            cute.arch.sync_warp()
            ring.tail()

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        block, _, _ = cute.arch.block_idx()
        mma = wgmma.tiled_mma(cutlass.BFloat16, self.edge, 1)
        part = mma.get_slice(thread)
        a = mma.make_fragment_A(part.partition_A(smem.a))
        b = mma.make_fragment_B(part.partition_B(smem.b))
        acc = wgmma.accumulator(mma, self.edge, self.edge)
        ring = ports.ab
        slot = ring.wait_and_advance()
        warpgroup.fence()
        at = (None, None, None, slot.index)
        wgmma.issue(mma, acc, a[at], b[at], accumulate=False)
        warpgroup.wait_group(0)
        slot.release()
        out = cute.local_tile(io.product, (self.edge, self.edge), (block, 0))
        mine = part.partition_C(out)
        for i in cutlass.range_constexpr(cute.size(acc)):
            mine[i] = acc[i]


PRODUCT_TILE = Tile(Product.edge, Product.edge, cutlass.BFloat16)


@dataclass(frozen=True)
class Loaded:
    """What one load showed: all shared memory, and whether its mbarrier's phase ended.

    `smem`: `SMEM_BYTES` from a place that is a multiple of 1024, `POISON` where nothing came.
    """

    smem: bytes
    ended: bool


def load(tmap: TensorMap, coordinate: Sequence[int], *, at: int = 0, beyond: int = 0) -> Loaded:
    """One load of a map's box from memory of the current GPU to byte `at` of shared memory.

    The kernel announces the box's bytes and `beyond` more, and waits a millisecond for them.

    Raises: LayoutError for what no instruction takes, a map that the driver refuses, and a box that
        does not fit; DeviceError without an SM90 GPU.
    """
    copy_engine.check(tmap, coordinate, smem_bytes=SMEM_BYTES, at=at)
    launch = _raw_load(tmap.rank).launch
    smem = torch.zeros(1, SMEM_BYTES // 4, dtype=torch.int32, device="cuda")
    seen = torch.zeros(1, SEEN, dtype=torch.int64, device="cuda")
    said = torch.tensor([[tmap.bytes_per_box, at, beyond, 0]], dtype=torch.int32, device="cuda")
    launch(descriptors([tmap]), corners([coordinate]), said, smem, seen)
    return Loaded(bytes(smem.cpu().view(torch.uint8).flatten().tolist()), bool(seen[0, 0]))


def product(
    a: TensorMap, at_a: tuple[int, int], b: TensorMap, at_b: tuple[int, int]
) -> torch.Tensor:
    """a b^T by WGMMA of two 64 x 64 tiles in bf16, each loaded through its own map from (col, row).

    Shape: (64, 64) in fp32, on the CPU.
    Raises: LayoutError for a map that is not of such a tile or that the driver refuses; DeviceError
        without an SM90 GPU.
    """
    for name, tmap, at in (("a", a, at_a), ("b", b, at_b)):
        if tmap.rank != 2 or (tmap.box, tmap.swizzle) != (PRODUCT_TILE.box, PRODUCT_TILE.swizzle):
            raise LayoutError(f"map of {name}: one of a tile of {PRODUCT_TILE} is needed: {tmap}")
        copy_engine.check(tmap, at, smem_bytes=PRODUCT_TILE.bytes)
    launch = _product().launch
    out = torch.zeros(Product.edge, Product.edge, device="cuda")
    launch(descriptors([a, b]), corners([at_a, at_b]), out)
    return out.cpu()


@functools.cache
def _raw_load(rank: int) -> Compiled:
    return compile_kernel(RawLoad(rank))


@functools.cache
def _product() -> Compiled:
    return compile_kernel(Product())


def descriptors(maps: Sequence[TensorMap]) -> torch.Tensor:
    """What the driver encodes, on the device.

    Raises: LayoutError for a map that it refuses.
    """
    raw = [encode(tmap) for tmap in maps]
    for tmap, made in zip(maps, raw, strict=True):
        if made is None:
            raise LayoutError(f"the driver refuses {tmap}")
    return torch.frombuffer(bytearray(b"".join(raw)), dtype=torch.int64).view(-1, 16).cuda()


def corners(coordinates: Sequence[Sequence[int]]) -> torch.Tensor:
    """Where boxes begin, on the device: a row each."""
    rows = [[*c, *[0] * (MOST_RANK - len(c))] for c in coordinates]
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


# The driver's name of each type; TMA moves bits, and takes others by their width.
NAMES = {
    "Uint8": "UINT8",
    "Uint16": "UINT16",
    "Uint32": "UINT32",
    "Int32": "INT32",
    "Uint64": "UINT64",
    "Int64": "INT64",
    "Float16": "FLOAT16",
    "BFloat16": "BFLOAT16",
    "Float32": "FLOAT32",
    "Float64": "FLOAT64",
}


def encode(tmap: TensorMap) -> bytes | None:
    """The descriptor that this machine's driver makes of a map, or None where it refuses."""
    from cuda.bindings import driver

    if tmap.rank > MOST_RANK:
        return None  # cuda-python's own check: the driver is never asked

    by_width = f"Uint{tmap.dtype.width}"
    name = NAMES.get(tmap.dtype.__name__) or NAMES[by_width]

    def filled(values: tuple[int, ...], plain: int) -> list[int]:
        # Where the driver's array would be null it refuses a null pointer, whatever the rank; a
        # map of one dimension has no stride.
        return list(values) or [plain]

    result, made = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
        tmap.rank,
        tmap.address,
        [driver.cuuint64_t(s) for s in filled(tmap.shape, 1)],
        # A stride below zero reaches the driver as the large number that has its bits.
        [driver.cuuint64_t(s % 2**64) for s in filled(tmap.strides, 0)],
        [driver.cuuint32_t(b) for b in filled(tmap.box, 1)],
        [driver.cuuint32_t(e) for e in filled(tmap.steps, 1)],
        driver.CUtensorMapInterleave(INTERLEAVES.index(tmap.interleave)),
        driver.CUtensorMapSwizzle(SWIZZLES.index(tmap.swizzle)),
        driver.CUtensorMapL2promotion(L2_PROMOTIONS.index(tmap.l2_promotion)),
        driver.CUtensorMapFloatOOBfill(OOB_FILLS.index(tmap.oob_fill)),
    )
    if result != driver.CUresult.CUDA_SUCCESS:
        return None
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


_ATOM = {
    NONE: SmemLayoutAtomKind.K_INTER,
    SW32: SmemLayoutAtomKind.K_SW32,
    SW64: SmemLayoutAtomKind.K_SW64,
    SW128: SmemLayoutAtomKind.K_SW128,
}


@cute.jit
def _encode(
    tensor: cute.Tensor,
    out: cute.Tensor,
    tile: cutlass.Constexpr,
    kind: cutlass.Constexpr,
):
    atom = make_smem_layout_atom(kind, tensor.element_type)
    smem = cute.tile_to_shape(atom, tile, order=(0, 1))
    copy = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem, tile).atom
    target = cute.make_ptr(
        cutlass.Int64, out.iterator.toint(), cute.AddressSpace.gmem, assumed_align=64
    )
    cpasync.copy_tensormap(copy, target)


def encoded_by_cute(
    view: torch.Tensor, tile: tuple[int, int], swizzle: Swizzle, dynamic: bool = True
) -> bytes:
    """The descriptor that CuTe makes for a tile (rows, cols) of `view` (rows, cols, ...).

    `make_tiled_tma_atom` encodes in host code, so this shows what a kernel would be given without a
    GPU or a driver; it checks nothing. `dynamic` leaves sizes and strides to run time, as a
    compiled kernel does. Columns are contiguous.
    """
    space = torch.zeros(2 * DESCRIPTOR_BYTES, dtype=torch.uint8)
    start = -space.data_ptr() % DESCRIPTOR_BYTES
    out = space[start : start + DESCRIPTOR_BYTES]
    tensor = from_dlpack(view, assumed_align=16)
    if dynamic:
        tensor = tensor.mark_layout_dynamic(leading_dim=1)
    _encode(tensor, from_dlpack(out.view(torch.int64), assumed_align=64), tile, _ATOM[swizzle])
    return out.numpy().tobytes()
