"""A torch tensor's memory as the emulated copy engine reads it."""

from __future__ import annotations

import ctypes

import torch

from cutedsl_fa3.layouts import LayoutError
from cutedsl_fa3.layouts.copy_engine import GlobalTensor


def global_tensor(tensor: torch.Tensor, oob_fill: str = "zeros") -> GlobalTensor:
    """The memory of `tensor` (rows, cols, ...), cols contiguous, with cols first as TMA counts.

    A CPU tensor shares its memory, so that a store writes it; of any other the bytes are copied.

    Raises: LayoutError for fewer than two dimensions, no element, and columns apart from each
        other.
    """
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise LayoutError(
            f"tensor of shape {tuple(tensor.shape)}: rows and columns are needed, at least one each"
        )
    if tensor.stride(1) != 1:
        raise LayoutError(
            f"tensor of strides {tensor.stride()}: dimension 1, its columns, must be contiguous; "
            "permute it to (rows, cols, ...) or copy it with .contiguous()"
        )
    size = tensor.element_size()
    order = (1, 0, *range(2, tensor.dim()))
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return GlobalTensor(
        _memory(tensor, reach),
        tuple(tensor.shape[i] for i in order),
        tuple(tensor.stride(i) * size for i in order[1:]),
        tensor.data_ptr(),
        oob_fill,
    )


def _memory(tensor: torch.Tensor, reach: int) -> memoryview:
    """The bytes of `reach` elements from the first one on."""
    flat = tensor.detach().as_strided((reach,), (1,)).cpu().view(torch.uint8)
    lent = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    lent.owner = flat  # lives as long as the view does
    return memoryview(lent)
