"""Tensors that end where mapped memory ends, or begin where it begins: one byte more is a fault.

Device memory is mapped by whole pages between two stretches of addresses that are reserved and
never mapped, so that no allocation can come to lie there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from cuda.bindings import driver

_BYTES = {2: "<i2", 1: "|u1", 4: "<i4", 8: "<i8"}


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver answered {error.name}")
    return values[0] if values else None


class Pages:
    """Mapped pages that hold at least `size` bytes, with unmapped addresses on both sides.

    They stay mapped until the process ends.
    """

    def __init__(self, size: int) -> None:
        torch.cuda.synchronize()  # makes the context current
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = torch.cuda.current_device()
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        page = _checked(driver.cuMemGetAllocationGranularity(prop, least))
        mapped = -(-size // page) * page
        reserved = int(_checked(driver.cuMemAddressReserve(mapped + 2 * page, 0, 0, 0)))
        handle = _checked(driver.cuMemCreate(mapped, prop, 0))
        self.start, self.end = reserved + page, reserved + page + mapped
        _checked(driver.cuMemMap(self.start, mapped, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = prop.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _checked(driver.cuMemSetAccess(self.start, mapped, [access], 1))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, *, last: bool) -> torch.Tensor:
        """A contiguous tensor whose last (or first) byte is the last (or first) that is mapped."""
        size = dtype.itemsize
        count = math.prod(shape)
        address = self.end - count * size if last else self.start
        described = Memory(address, (count,), _BYTES[size])
        made = torch.as_tensor(described, device="cuda")
        assert made.data_ptr() == address, "copied"
        return made.view(dtype).view(shape)


class Memory:
    """Device memory as torch accepts it from elsewhere."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": kind,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def at_the_edge(t: torch.Tensor, *, last: bool) -> torch.Tensor:
    """A contiguous copy of a tensor at the end (or start) of mapped memory."""
    copy = Pages(t.numel() * t.element_size()).tensor(tuple(t.shape), t.dtype, last=last)
    copy.copy_(t)
    return copy
