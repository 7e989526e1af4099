"""A GPU that is not there: CPU tensors take the way of CUDA tensors up to the launch, and stop.

A launch refuses what the compiled host function refuses: it is described by the same stand-ins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import cutlass.torch
import pytest
import torch

from cutedsl_fa3 import cache, calls, calls_backward, interface
from cutedsl_fa3.compile import Resources


@dataclass
class Gpu:
    """What was compiled and launched; `fail` is raised by the next launch, `spills` is reported."""

    kernels: list[Any] = field(default_factory=list)
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    current: int | None = None  # the current device; that of CPU tensors is None
    stream: int = 0  # the current stream
    multiprocessors: int = 132
    fail: Exception | None = None
    spills: int = 0

    counters: dict[int, torch.Tensor] = field(default_factory=dict)  # by stream

    def counter(self, index: int | None) -> torch.Tensor:
        """In place of `counters.counter`."""
        return self.counters.setdefault(self.stream, torch.zeros(1, dtype=torch.int32))

    def get(self, kernel: Any) -> Any:
        """In place of `cache.get`."""
        self.kernels.append(kernel.key_text)
        taken = kernel.fake_args()

        def launch(*arguments: Any) -> None:
            refuse_mismatch(taken, arguments)
            self.launch(*arguments)

        return SimpleNamespace(launch=launch, resources=Resources(168, 0, self.spills, 0, 0))

    def launch(self, *arguments: Any) -> None:
        self.launches.append((self.current, *arguments))
        if self.fail is not None:
            raise self.fail


def refuse_mismatch(taken: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
    """What tvm-ffi checks of a tensor: type, rank, address, sizes and strides.

    Those are fixed, or divisible, or the same wherever their stand-in is.
    Raises: ValueError.
    """
    sizes: dict[int, int] = {}
    for like, given in zip(taken, arguments, strict=False):  # the stream is not given
        if isinstance(given, torch.Tensor):
            expected = (*like.shape, *like.stride)
            fits = len(expected) == 2 * given.dim() and all(
                number == size
                if isinstance(size, int)
                else number % size.divisibility == 0
                and number == sizes.setdefault(id(size), number)
                for size, number in zip(expected, (*given.shape, *given.stride()), strict=True)
            )
            if (
                not fits
                or dtype_of(like.element_type) != given.dtype
                or given.data_ptr() % like._assumed_align
            ):
                raise ValueError(f"Mismatched Tensor: {like.shape} {like.stride} is needed")


def dtype_of(element: Any) -> torch.dtype:
    return cutlass.torch.dtype(element)


class Switched:
    """In place of `torch.cuda.device`: makes the tensors' device the current one for a while."""

    def __init__(self, gpu: Gpu, device: Any) -> None:
        self.gpu, self.device = gpu, device

    def __enter__(self) -> None:
        self.before, self.gpu.current = self.gpu.current, self.device.index

    def __exit__(self, *raised: Any) -> None:
        self.gpu.current = self.before


def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """CPU tensors count as CUDA tensors; kernels are compiled and launched by this object."""
    made = Gpu()
    monkeypatch.setattr(cache, "get", made.get)
    monkeypatch.setattr(interface, "_calls", {})  # real ones are for the CPU
    monkeypatch.setattr(calls, "_launchers", WeakKeyDictionary())
    monkeypatch.setattr(calls_backward, "_launchers", WeakKeyDictionary())
    monkeypatch.setattr(calls, "emulated", lambda device: False)
    monkeypatch.setattr(calls, "current_device", lambda: made.current)
    monkeypatch.setattr(calls, "counter", made.counter)
    monkeypatch.setattr(calls, "_multiprocessors", lambda device: made.multiprocessors)
    monkeypatch.setattr(calls.torch.cuda, "device", lambda device: Switched(made, device))
    return made
