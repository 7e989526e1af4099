"""`gemm(a, b)`: C = A @ B^T by the smallest kernel that uses every piece, on an SM90 GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import cutlass
import torch

from . import cache, hang
from .errors import LayoutError, Unsupported
from .kernels.sm90.gemm import GemmSm90
from .layouts import explain, refusal
from .pipelines import Schedule

# Two warpgroups hold a 128 x 256 fp32 accumulator in 240 registers each; its A and B tiles fit
# four times. Two CTAs of a cluster share their B.
DEFAULT = Schedule(128, 256, stages=4, consumers=2, overlap="none", cluster=(2, 1))

MAX_GRID_Y = 65535  # CTAs along n; source: CUDA programming guide, capability 9.0
ELEMENTS = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


def gemm(a: torch.Tensor, b: torch.Tensor, schedule: Schedule | None = None) -> torch.Tensor:
    """A @ B^T in the inputs' dtype, summed in fp32, on the current stream.

    Shape: a (m, k), b (n, k) -> (m, n); rows contiguous, their starts multiples of 16 bytes.
    Raises: Unsupported, LayoutError, ScheduleError before any launch; DeviceError without SM90.
    """
    schedule = DEFAULT if schedule is None else schedule
    _check(a, b)
    m, n = a.shape[0], b.shape[0]
    if n > MAX_GRID_Y * schedule.tile_n:
        raise Unsupported(
            f"b has {n} rows: at most {MAX_GRID_Y * schedule.tile_n} with tile_n = "
            f"{schedule.tile_n}, since a grid has {MAX_GRID_Y} CTAs along n"
        )
    kernel = _kernel(schedule, ELEMENTS[a.dtype])
    padded = -(-n // 8) * 8  # rows of C, too, start at multiples of 16 bytes
    c = torch.empty(m, padded, dtype=a.dtype, device=a.device)[:, :n]
    if m == 0 or n == 0:
        return c
    for name, matrix in (("a", a), ("b", b), ("c", c)):
        _check_addressable(name, matrix, kernel)
    _check_device(a, b)
    with torch.cuda.device(a.device):
        _launcher(kernel)(a, b, c)
    return c


@functools.cache
def _kernel(schedule: Schedule, element: type) -> GemmSm90:
    return GemmSm90(schedule, element)


@functools.cache
def _launcher(kernel: GemmSm90) -> Callable:
    if (seconds := hang.asked()) is not None:
        return functools.partial(hang.watch, kernel, seconds=seconds)
    return cache.get(kernel).launch


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuse what no schedule serves: types, dtypes, shapes, gradients."""
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, torch.Tensor):
            raise Unsupported(f"{name} = {type(t).__name__}: a torch.Tensor is needed")
        if t.dim() != 2:
            rows = "m" if name == "a" else "n"
            raise Unsupported(f"{name} has shape {tuple(t.shape)}: ({rows}, k) is needed")
        if t.dtype not in ELEMENTS:
            allowed = ", ".join(str(dtype) for dtype in ELEMENTS)
            raise Unsupported(f"{name} is {t.dtype}: supported are {allowed}")
        if torch.is_grad_enabled() and t.requires_grad:
            raise Unsupported(f"{name} requires a gradient, and gemm has none: use {name}.detach()")
    if a.dtype != b.dtype:
        raise Unsupported(f"b is {b.dtype} but a is {a.dtype}: one dtype is needed")
    if a.shape[1] != b.shape[1]:
        raise Unsupported(f"b has k = {b.shape[1]} but a has k = {a.shape[1]}: one k is needed")
    if a.shape[1] < 1:
        raise Unsupported("a has k = 0: k of 1 or more is needed")


def _check_addressable(name: str, matrix: torch.Tensor, kernel: GemmSm90) -> None:
    """Refuse a matrix that TMA cannot address, by the rules of its tile's tensor map.

    Raises: Unsupported, LayoutError.
    """
    (rows, cols), (row_stride, col_stride) = matrix.shape, matrix.stride()
    if col_stride != 1:
        raise Unsupported(
            f"{name} has strides {matrix.stride()}: rows must be contiguous; use "
            f"{name}.contiguous()"
        )
    stride = row_stride * matrix.element_size()
    try:
        kernel.tiles[name].tensor_map(matrix.data_ptr(), (cols, rows), (stride,)).check()
    except LayoutError as error:
        diagnosis = explain(matrix, kernel.tiles[name], name=name)
        raise refusal(diagnosis, f"{tuple(matrix.shape)}: {error}") from None


def _check_device(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.device.type != "cuda":
        raise Unsupported(f"a is on {a.device}: a CUDA device is needed")
    if b.device != a.device:
        raise Unsupported(f"b is on {b.device} but a is on {a.device}: one device is needed")
