"""Kernels that the copy engine's tests need beside `cutedsl_fa3.tma_probe`: stores, and tiles.

`RawStore` is the way back of `RawLoad`; `TileLoad` is made of the classes of the project's own
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutedsl_fa3.layouts import Tile
from cutedsl_fa3.pipelines import Barrier, Barriers, Ring, Role, WarpSpecialized
from cutedsl_fa3.tma_probe import (
    MOST_RANK,
    POISON_WORD,
    SAID,
    SMEM_BYTES,
    THREADS,
    acquire,
    operands,
    table,
)


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
