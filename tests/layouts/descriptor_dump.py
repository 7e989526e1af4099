"""The 128 bytes that CuTe's TMA atoms encode, dumped on the CPU.

`make_tiled_tma_atom` encodes its descriptor in host code, so a host function that copies it into a
buffer shows what a kernel would be given, without a GPU or a driver.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.cute.runtime import from_dlpack

from cutedsl_fa3.layouts import NONE, SW32, SW64, SW128, Swizzle

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


def dump(view: torch.Tensor, tile: tuple[int, int], swizzle: Swizzle, dynamic: bool) -> bytes:
    """The descriptor of loading `tile` (rows, cols) from `view` (rows, cols, ...), cols contiguous.

    `dynamic` leaves sizes and strides to run time, as a compiled kernel does.
    """
    space = torch.zeros(256, dtype=torch.uint8)
    start = -space.data_ptr() % 128
    out = space[start : start + 128]
    tensor = from_dlpack(view, assumed_align=16)
    if dynamic:
        tensor = tensor.mark_layout_dynamic(leading_dim=1)
    _encode(tensor, from_dlpack(out.view(torch.int64), assumed_align=64), tile, _ATOM[swizzle])
    return out.numpy().tobytes()
