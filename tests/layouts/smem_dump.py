"""Kernels that show what the copy engine does: raw shared memory, raw mbarriers, products of it.

`RawLoad` issues one TMA load through a descriptor that the driver encoded, at a coordinate given
at run time, into poisoned shared memory, and stores all of it as it lies. Nothing about box,
swizzle or type is in its code, so one kernel a rank serves every tensor map. `RawStore` is the way
back. `TileLoad` and `Product` are made of the classes of the project's own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutedsl_fa3.layouts import Tile, wgmma
from cutedsl_fa3.pipelines import Barrier, Barriers, Ring, Role, WarpSpecialized

SMEM_BYTES = 48 * 1024  # what a case may reach, `at` included
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


class RawStore:
    """One store a CTA, of shared memory as it is given, through a descriptor by case."""

    arch = "sm_90a"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"raw_store_{rank}"

    @property
    def key_text(self) -> str:
        return self.name

    def fake_args(self) -> tuple:
        """(descriptors, coordinates, said, smem, stream)."""
        return (
            table(Int64, 16),
            table(Int32, MOST_RANK),
            table(Int32, SAID),
            table(Int32, SMEM_BYTES // 4),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def host(self, descriptors, coords, said, smem, stream):
        self.kernel(descriptors, coords, said, smem).launch(
            grid=(cute.size(said, mode=[0]), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, descriptors, coords, said, smem):
        thread, _, _ = cute.arch.thread_idx()
        case, _, _ = cute.arch.block_idx()
        base = cutlass.memory.SmemAllocator().allocate(SMEM_BYTES, byte_alignment=1024)
        words = cute.make_tensor(
            cute.recast_ptr(base, dtype=Int32), cute.make_layout(SMEM_BYTES // 4)
        )
        for i in cutlass.range(thread, SMEM_BYTES // 4, THREADS, unroll=1):
            words[i] = smem[case, i]
        cute.arch.fence_view_async_shared()
        cute.arch.barrier()
        if thread == 0:
            address = descriptors.iterator.toint() + Int64(case) * 128
            acquire(address)
            cute.arch.inline_ptx(
                f"cp.async.bulk.tensor.{self.rank}d.global.shared::cta.tile.bulk_group "
                f"[{{$r1}}, {{{operands(2, self.rank)}}}], [{{$r0}}];",
                read_only_args=[
                    Int32(base.toint()) + said[case, 1],
                    address,
                    *(coords[case, d] for d in range(self.rank)),
                ],
            )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


@dataclass(frozen=True)
class TileIo:
    """The atom and coordinates of a tensor, where to begin by load, and what came, as it lies."""

    source: tuple[cute.CopyAtom, cute.Tensor]
    coords: cute.Tensor
    smem: cute.Tensor


class TileLoad(WarpSpecialized):
    """Two loads a CTA of one `tile` into the slots of a ring, from a tensor (rows, cols, ...).

    The ring announces the tile's bytes and nothing else; shared memory is poisoned before.
    """

    arch = "sm_90a"
    roles: ClassVar = {"producer": Role(warps=4), "consumer": Role(warps=4)}
    barriers = Barriers({"poisoned": Barrier(256)})

    def __init__(self, tile: Tile, rank: int) -> None:
        self.tiles = {"tile": tile}
        self.rings = {"ring": Ring(("tile",), stages=2)}
        self.rank = rank
        self.name = f"tile_load_{tile.rows}_{tile.cols}_{tile.dtype.__name__}_{rank}"

    @property
    def words(self) -> int:
        """32-bit words of both slots."""
        return 2 * self.tiles["tile"].bytes // 4

    @property
    def key_text(self) -> str:
        return self.name

    def fake_args(self) -> tuple:
        """(tensor, coordinates as (row, col, ...) by load, smem by CTA, stream)."""
        dtype = self.tiles["tile"].dtype
        apart = 16 // (dtype.width // 8)
        strides = [cute.sym_int64(divisibility=apart) for _ in range(self.rank - 1)]
        strides.insert(1, 1)
        sizes = tuple(cute.sym_int() for _ in range(self.rank))
        return (
            make_fake_tensor(dtype, sizes, tuple(strides), assumed_align=16),
            table(Int32, MOST_RANK),
            table(Int32, self.words),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def host(self, tensor, coords, smem, stream):
        io = TileIo(tuple(self.tiles["tile"].load_atom(tensor)), coords, smem)
        self.launch(io, (cute.size(smem, mode=[0]), 1, 1), stream)

    @cute.jit
    def producer(self, io, smem, ports, thread):
        self.barriers["poisoned"].arrive_and_wait()
        block, _, _ = cute.arch.block_idx()
        atom, whole = io.source
        ring = ports.ring
        if thread < 32:
            for i in cutlass.range(2, unroll=1):
                slot = ring.acquire_and_advance()
                at = [io.coords[2 * block + i, d] for d in range(self.rank)]
                matrix = whole[None, None, *at[2:]]
                corner = cute.domain_offset(tuple(at[:2]), matrix)
                from_gmem, to_smem = self.tiles["tile"].blocks(atom, corner, smem.tile)
                cute.copy(
                    atom,
                    from_gmem[None, 0, 0],
                    to_smem[None, slot.index],
                    tma_bar_ptr=slot.barrier,
                )
            ring.tail()

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        block, _, _ = cute.arch.block_idx()
        base = cute.make_ptr(
            Int32, smem.tile.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024
        )
        words = cute.make_tensor(base, cute.make_layout(self.words))
        for i in cutlass.range(thread, self.words, 128, unroll=1):
            words[i] = POISON_WORD
        cute.arch.fence_view_async_shared()
        self.barriers["poisoned"].arrive_and_wait()
        ring = ports.ring
        half = self.words // 2
        for _ in cutlass.range(2, unroll=1):
            slot = ring.wait_and_advance()
            first = slot.index * half
            for i in cutlass.range(thread, half, 128, unroll=1):
                io.smem[block, first + i] = words[first + i]
            slot.release()


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
        self.tiles = {name: Tile(self.edge, self.edge, cutlass.BFloat16) for name in ("a", "b")}
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
