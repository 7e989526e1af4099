"""The functions a user calls: `attention`, `attention_with_lse`, `plan`.

Tensors are (batch, seqlen, heads, head_dim) with contiguous rows; any strides that TMA can address
are read in place. Whatever cannot be served is refused before any launch, naming the argument, its
value and what is allowed.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch

from . import cache
from .errors import LayoutError, Unsupported
from .layouts import Tile
from .pipelines import MAX_GRID, Schedule
from .plans import Plan
from .problem import DTYPES, Problem
from .variant import Ref, Variant
from .variant.solve import LARGEST

__all__ = ["SlowKernel", "attention", "attention_with_lse", "plan"]


class SlowKernel(UserWarning):
    """A kernel is right but slower than it need be; the message says why and what to try."""


PLAIN = Variant()
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Loaded kernels by variant; a variant and the tensors it captures may be freed meanwhile.
_launchers: weakref.WeakKeyDictionary[Variant, dict] = weakref.WeakKeyDictionary()
_covered: weakref.WeakKeyDictionary[Variant, tuple] = weakref.WeakKeyDictionary()
SMALLEST_SCALE = 1e-30  # scale 0 means this: -inf times it stays -inf, where 0 would give NaN


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    schedule: Schedule | None = None,
) -> Plan:
    """What `attention` would run for these tensors, printable; nothing is compiled.

    Shape: as for `attention`; tensors may be on any device.
    Raises: Unsupported, LayoutError, ScheduleError, VariantError.
    """
    variant = PLAIN if variant is None else variant
    _check_tensors(q, k, v, variant)
    _check_schedule(schedule)
    made = _plan(variant, q.dtype, q.shape[3], v.shape[3], schedule)
    made.check()
    return made


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    scale: float | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """softmax(score(q k^T * scale) where the mask allows) v, on an SM90 GPU.

    Shape:
        q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim),
        v (batch, seqlen_k, kv_heads, head_dim_v) -> (batch, seqlen_q, heads, head_dim_v).
        heads is a multiple of kv_heads; query head h reads key head h // (heads // kv_heads).
    Units: scale is natural; default 1 / sqrt(head_dim).
    Raises: Unsupported, LayoutError, ScheduleError, VariantError before any launch.
    """
    return attention_with_lse(q, k, v, variant, scale=scale, schedule=schedule)[0]


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    scale: float | None = None,
    schedule: Schedule | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention`, with each row's log-sum-exp: (batch, heads, seqlen_q), fp32, natural log.

    A row that sees no key has output 0 and LSE -inf.
    """
    variant = PLAIN if variant is None else variant
    _check_tensors(q, k, v, variant)
    _check_device(q, k, v, variant)
    _check_schedule(schedule)
    scale = _checked_scale(scale, q.shape[3])
    launch = _launcher(variant, q.dtype, q.shape[3], v.shape[3], schedule)
    operands = [_addressable(name, t) for name, t in (("q", q), ("k", k), ("v", v))]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *variant.captures)):
        return _ForwardOnly.apply(launch, scale, len(operands), *operands, *variant.captures)
    return _run(launch, scale, operands, variant.captures)


def _run(
    launch: Callable,
    scale: float,
    operands: Sequence[torch.Tensor],
    captures: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate, launch on the current stream, return (out, lse)."""
    q, k, v = operands
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if k.shape[1] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    launchable = tuple(_launchable(t) for t in captures) or None
    with torch.cuda.device(q.device):
        launch(q, k, v, out, lse, launchable, scale)
    return out, lse


class _ForwardOnly(torch.autograd.Function):
    """The forward inside a graph: the result is right, and asking for its gradient says why not."""

    @staticmethod
    def forward(ctx, launch, scale, count, *tensors):
        return _run(launch, scale, tensors[:count], tensors[count:])

    @staticmethod
    def backward(ctx, *gradients):
        raise Unsupported(
            "attention has no backward kernel yet; cutedsl_fa3.reference.attention is "
            "differentiable and computes the same variant"
        )


def _plan(
    variant: Variant,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    schedule: Schedule | None,
) -> Plan:
    problem = Problem(NAMES[dtype], head_dim, head_dim_v)
    return Plan(variant, problem, schedule) if schedule else Plan.default(variant, problem)


def _launcher(variant: Variant, *rest: object) -> Callable:
    """The loaded kernel of a plan; compiled, or taken from the disk, the first time."""
    known = _launchers.setdefault(variant, {})
    if rest not in known:
        made = _plan(variant, *rest)
        made.check()
        compiled = cache.get(made.kernel)
        if compiled.resources.spills:
            warnings.warn(
                f"the kernel spills {compiled.resources.spills} B a thread to memory, which is "
                f"slow: its {made.schedule.tile_m} x {made.schedule.tile_n} tile leaves too few "
                f"registers for this variant; try schedule=Schedule(..., tile_n="
                f"{max(16, made.schedule.tile_n - 32)})",
                SlowKernel,
                stacklevel=4,
            )
        known[rest] = compiled.launch
    return known[rest]


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> None:
    """Types and shapes that need no device.

    Raises: Unsupported.
    """
    if not isinstance(variant, Variant):
        raise Unsupported(f"variant = {type(variant).__name__}: a cutedsl_fa3.Variant is needed")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise Unsupported(f"{name} = {type(t).__name__}: a torch.Tensor is needed")
        if t.dim() != 4:
            raise Unsupported(
                f"{name} has shape {tuple(t.shape)}: (batch, seqlen, heads, head_dim) is needed"
            )
        if t.dtype != q.dtype:
            raise Unsupported(f"{name} is {t.dtype} but q is {q.dtype}: one dtype is needed")
    if q.dtype not in NAMES:
        allowed = ", ".join(map(str, NAMES))
        raise Unsupported(f"q is {q.dtype}: supported are {allowed}")
    expected = {
        "k batch": (k.shape[0], q.shape[0], "q's batch"),
        "v batch": (v.shape[0], q.shape[0], "q's batch"),
        "v seqlen": (v.shape[1], k.shape[1], "k's seqlen"),
        "v heads": (v.shape[2], k.shape[2], "k's heads"),
        "k head_dim": (k.shape[3], q.shape[3], "q's head_dim"),
    }
    for what, (given, needed, source) in expected.items():
        if given != needed:
            raise Unsupported(f"{what} = {given}: {source} is {needed}, they must be equal")
    _check_captures(variant, {"b": q.shape[0], "h": q.shape[2]})
    if (k.shape[2] and q.shape[2] % k.shape[2]) or (q.shape[2] and not k.shape[2]):
        raise Unsupported(
            f"q has {q.shape[2]} heads, k has {k.shape[2]}: an integer number of query heads must "
            "share each key head"
        )
    Problem(NAMES[q.dtype], q.shape[3], v.shape[3])
    for name, t in (("q", q), ("k", k)):
        if t.shape[1] > LARGEST:
            raise Unsupported(
                f"{name} seqlen = {t.shape[1]}: at most {LARGEST}, so that sums of positions stay "
                "32-bit"
            )


def _check_schedule(schedule: Schedule | None) -> None:
    if not isinstance(schedule, Schedule | None):
        raise Unsupported(
            f"schedule = {type(schedule).__name__}: a cutedsl_fa3.Schedule is needed, or None for "
            "the measured one"
        )


def _check_captures(variant: Variant, extents: dict[str, int]) -> None:
    """Captured tensors that are read by head or batch alone must cover all of them.

    Raises: Unsupported.
    """
    for capture, dim, by in _read_by(variant):
        shape = variant.captures[capture].shape
        if shape[dim] < extents[by]:
            raise Unsupported(
                f"captured tensor t{capture} has shape {tuple(shape)}: its dimension {dim} is read "
                f"by {by}, of which there are {extents[by]}"
            )


def _read_by(variant: Variant) -> tuple[tuple[int, int, str], ...]:
    """(captured tensor, dimension, "b" or "h") of each index that is just the batch or head."""
    if variant not in _covered:
        found = []
        for graph in (variant.score, variant.mask):
            for node in graph.nodes if graph else ():
                for dim, index in enumerate(node.operands if node.op == "load" else ()):
                    source = graph.nodes[index.id] if isinstance(index, Ref) else None
                    if source and source.op == "input" and source.args[0] in ("b", "h"):
                        found.append((node.args[0], dim, source.args[0]))
        _covered[variant] = tuple(found)
    return _covered[variant]


def _check_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> None:
    """Where the tensors live.

    Raises: Unsupported.
    """
    if q.device.type != "cuda":
        raise Unsupported(
            f"q is on {q.device}: a CUDA device of capability 9.0 is needed; "
            "cutedsl_fa3.reference.attention computes the same variant anywhere"
        )
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        found = ".".join(map(str, torch.cuda.get_device_capability(q.device)))
        raise Unsupported(f"q is on {q.device} of capability {found}: 9.0 is supported")
    captured = ((f"captured tensor t{i}", t) for i, t in enumerate(variant.captures))
    for name, t in (("k", k), ("v", v), *captured):
        if t.device != q.device:
            raise Unsupported(f"{name} is on {t.device}, q is on {q.device}: one device is needed")
    tiles = -(-q.shape[1] // 64) * q.shape[2] * q.shape[0]
    if tiles > MAX_GRID:
        raise Unsupported(f"q has {tiles} tiles of 64 rows in all heads: at most {MAX_GRID}")


def _checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not (isinstance(scale, (int, float)) and 0 <= scale < math.inf):
        raise Unsupported(
            f"scale = {scale!r}: a finite number >= 0 is needed; put a sign into the score function"
        )
    return max(float(scale), SMALLEST_SCALE)


def _addressable(name: str, t: torch.Tensor) -> torch.Tensor:
    """The tensor as TMA can read it, without a copy.

    A dimension of size 1 may have any stride; it gets one that TMA accepts.
    Raises: LayoutError naming argument, rule and a way out.
    """
    row, size = t.shape[3], t.element_size()
    if t.stride(3) != 1:
        raise LayoutError(
            f"{name} has stride {t.stride(3)} along head_dim: 1 is needed; use {name}.contiguous()"
        )
    strides = [row if n == 1 else s for n, s in zip(t.shape[:3], t.stride()[:3], strict=True)]
    if t.data_ptr() % 16 or any(s * size % 16 or s * size >= 2**40 for s in strides):
        _refuse_address(name, t, [s * size for s in strides])
    return t.as_strided(t.shape, (*strides, 1)) if list(t.stride()[:3]) != strides else t


def _refuse_address(name: str, t: torch.Tensor, strides: list[int]) -> None:
    """Say which rule of a tensor map this tensor breaks; the caller has seen that it breaks one.

    Raises: LayoutError.
    """
    batch, seqlen, heads = strides
    tile = Tile(64, t.shape[3], Problem(NAMES[t.dtype], t.shape[3], t.shape[3]).element)
    shape = (t.shape[3], t.shape[1], t.shape[2], t.shape[0])
    try:
        tile.tensor_map(t.data_ptr(), shape, (seqlen, heads, batch)).check()
    except LayoutError as error:
        raise LayoutError(
            f"{name} {tuple(t.shape)} with strides of {batch}, {seqlen}, {heads} bytes (batch, "
            f"seqlen, heads): {error}"
        ) from None


def _launchable(t: torch.Tensor) -> torch.Tensor:
    """A captured tensor as the kernel takes it: at least one dimension, bools as bytes."""
    if t.numel() == 0:
        raise Unsupported(
            f"a captured tensor of shape {tuple(t.shape)} has no elements: a kernel reads at least "
            "one; leave it out of the variant"
        )
    t = t.detach()
    if t.dtype == torch.bool:
        t = t.view(torch.uint8)
    return t.reshape(1) if t.dim() == 0 else t
