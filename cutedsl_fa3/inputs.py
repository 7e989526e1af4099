"""What a forward takes: each check names the argument, its value and what is allowed.

Nothing here compiles, launches or waits for a device.
"""

from __future__ import annotations

import functools
import math
import numbers
import weakref
from collections.abc import Collection

import torch

from .errors import LayoutError, Unsupported
from .layouts import Diagnosis, Tile, explain, refusal
from .pipelines import MAX_GRID, Schedule, ScheduleError
from .problem import DTYPES, Problem
from .schedules import packs_of
from .variant import Ref, Variant
from .variant.graph import CAPTURE_DTYPES, DType
from .variant.solve import LARGEST

NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNED = 16  # bytes; source: cuTensorMapEncodeTiled, addresses and strides
FARTHEST = 2**40  # bytes; source: the same, strides

LARGEST_ROW = 2**31 - 1  # rows of a head, or of several in a tile, are numbered in 32 bits
SMALLEST_SCALE = 1e-30  # scale 0 means this: -inf times it stays -inf, where 0 would give NaN
LARGEST_SCALE = 2e38  # scale * log2(e) is finite in fp32

# What a variant's graphs read of its captured tensors; a variant may be freed meanwhile.
_reads: weakref.WeakKeyDictionary[Variant, tuple[Read, ...]] = weakref.WeakKeyDictionary()
Read = tuple[int, DType, int, tuple[tuple[int, str], ...]]


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> None:
    """Types and shapes, on any device.

    Raises: Unsupported.
    """
    if not isinstance(variant, Variant):
        hint = "; make one of a function, as in Variant(mask=...)" if callable(variant) else ""
        raise Unsupported(
            f"variant = {type(variant).__name__}: a cutedsl_fa3.Variant is needed{hint}"
        )
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check_dense(name, t)
        if t.dim() != 4:
            raise Unsupported(
                f"{name} has shape {tuple(t.shape)}: (batch, seqlen, heads, head_dim) is needed"
            )
        if t.dtype != q.dtype:
            raise Unsupported(f"{name} is {t.dtype} but q is {q.dtype}: one dtype is needed")
    if q.dtype not in NAMES:
        allowed = ", ".join(map(str, NAMES))
        raise Unsupported(
            f"q is {q.dtype}: supported are {allowed}; use q.to(torch.bfloat16), k and v alike"
        )
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
    _check_captures(variant, {"b": q.shape[0], "h": q.shape[2]}, _read(variant, q, k))


def without_scores(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether there is no query, or no key that one could see."""
    return q.shape[:3].numel() == 0 or k.shape[1] == 0


def _read(variant: Variant, q: torch.Tensor, k: torch.Tensor) -> Collection[int]:
    """The captured tensors that a call reads: without queries none, without keys the epilogue's."""
    if q.shape[:3].numel() == 0:
        return ()
    if k.shape[1]:
        return range(len(variant.captures))
    return () if variant.epilogue is None else variant.epilogue.captures


def _check_dense(name: str, t: torch.Tensor) -> None:
    """That an argument is a tensor whose memory holds what torch reads from it."""
    if not isinstance(t, torch.Tensor):
        raise Unsupported(f"{name} = {type(t).__name__}: a torch.Tensor is needed")
    if t.is_nested or t.layout != torch.strided:
        kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise Unsupported(f"{name} is a {kind} tensor: a dense one is needed, strided as it may be")
    if t.is_neg():
        raise Unsupported(
            f"{name} is a view whose sign torch flips when it reads it: a kernel reads memory as "
            "it lies; use .resolve_neg()"
        )


def check_schedule(schedule: Schedule | None, q: torch.Tensor, k: torch.Tensor) -> None:
    """That a schedule is one, or None, and puts only heads into a tile that share a key head.

    Raises: Unsupported, ScheduleError.
    """
    if not isinstance(schedule, Schedule | None):
        raise Unsupported(
            f"schedule = {type(schedule).__name__}: a cutedsl_fa3.Schedule is needed, or None for "
            "the measured one"
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if schedule is not None and kv_heads and heads // kv_heads % schedule.pack:
        raise ScheduleError(
            f"schedule.pack = {schedule.pack}: q has {heads} heads and k {kv_heads}, and tiles are "
            f"of heads that share a key head, so pack must divide {heads // kv_heads}; use "
            f"pack={max(packs_of(heads, kv_heads), default=1)}"
        )


def checked_scale(scale: float | None, head_dim: int) -> float:
    """The scale as a kernel takes it.

    A tensor is refused, 0-dim or not: reading one would wait for its device at each call.
    Raises: Unsupported.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if type(scale) is float and SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        return scale
    if isinstance(scale, torch.Tensor):
        raise Unsupported(
            f"scale = a tensor of shape {tuple(scale.shape)} on {scale.device}: a Python number is "
            "needed; .item() makes one, or multiply by the tensor in the variant's score function"
        )
    number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not number or not 0 <= scale <= LARGEST_SCALE:
        raise Unsupported(
            f"scale = {scale!r}: a number from 0 to {LARGEST_SCALE:g} is needed; put a sign into "
            "the score function"
        )
    return max(float(scale), SMALLEST_SCALE)


def _check_captures(variant: Variant, extents: dict[str, int], read: Collection[int]) -> None:
    """That captured tensors are still what was traced, and cover the heads and batches read.

    Their types can change after a Variant was made: `module.half()` gives parameters new memory.
    Raises: Unsupported.
    """
    for number, t in enumerate(variant.captures):
        name = f"captured tensor t{number}"
        _check_dense(name, t)
        if t.numel() == 0 and number in read:
            raise Unsupported(
                f"{name} of shape {tuple(t.shape)} has no elements: a kernel reads at least one; "
                "leave it out of the variant"
            )
    for number, dtype, rank, by in reads(variant):
        t = variant.captures[number]
        if t.dim() != rank or CAPTURE_DTYPES.get(t.dtype) != dtype:
            raise Unsupported(
                f"captured tensor t{number} is {t.dtype} with {t.dim()} dimensions, but was "
                f"{dtype} with {rank} when the Variant was made: make another one"
            )
        for dim, name in by:
            if t.shape[dim] < extents[name]:
                raise Unsupported(
                    f"captured tensor t{number} has shape {tuple(t.shape)}: its dimension {dim} is "
                    f"read by {name}, of which there are {extents[name]}"
                )
    if variant.sink is not None:
        _check_sink(variant.captures[variant.sink], extents["h"])


def _check_sink(sink: torch.Tensor, heads: int) -> None:
    if tuple(sink.shape) not in ((), (heads,)):
        raise Unsupported(
            f"the sink has shape {tuple(sink.shape)}: () or (heads,) = ({heads},) is needed"
        )
    if not sink.is_floating_point():
        raise Unsupported(f"the sink is {sink.dtype}: a floating dtype is needed")


def reads(variant: Variant) -> tuple[Read, ...]:
    """(captured tensor, type of its elements, rank, dimensions read by just "b" or "h")."""
    if variant not in _reads:
        found: list[Read] = []
        for graph in variant.graphs.values():
            for node in graph.nodes:
                if node.op != "load":
                    continue
                sources = [graph.nodes[i.id] if isinstance(i, Ref) else None for i in node.operands]
                by = tuple(
                    (dim, source.args[0])
                    for dim, source in enumerate(sources)
                    if source and source.op == "input" and source.args[0] in ("b", "h")
                )
                found.append((node.args[0], node.dtype, len(sources), by))
        _reads[variant] = tuple(dict.fromkeys(found))
    return _reads[variant]


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def check_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> None:
    """That everything lies on one SM90 GPU, or on the CPU.

    Raises: Unsupported.
    """
    if q.device.type not in ("cuda", "cpu"):
        raise Unsupported(f"q is on {q.device}: a CUDA device of capability 9.0 or cpu is needed")
    if q.device.type == "cuda" and _capability(q.device.index) != (9, 0):
        found = ".".join(map(str, _capability(q.device.index)))
        raise Unsupported(
            f"q is on {q.device} of capability {found}: 9.0 is supported; on CPU tensors the same "
            "plan is emulated"
        )
    captured = ((f"captured tensor t{i}", t) for i, t in enumerate(variant.captures))
    for name, t in (("q", q), ("k", k), ("v", v), *captured):
        if t.device != q.device:
            raise Unsupported(f"{name} is on {t.device}, q is on {q.device}: one device is needed")
        _check_memory(name, t)


def _check_memory(name: str, t: torch.Tensor) -> None:
    try:
        here = t.data_ptr() != 0 or t.numel() == 0
    except RuntimeError:
        here = False
    if not here:
        raise Unsupported(
            f"{name} has no memory that a kernel could read: its storage was freed, or it is a "
            "fake tensor, or belongs to a torch.func transform, which attention cannot be part of"
        )


def check_grid(q: torch.Tensor, schedule: Schedule) -> None:
    """That the tiles of queries, and the rows of a head's, can be numbered.

    Raises: Unsupported.
    """
    tile_m, m_blocks = schedule.tile_m, -(-q.shape[1] // schedule.queries)
    tiles = m_blocks * (q.shape[2] // schedule.pack) * q.shape[0]
    if tiles > MAX_GRID:
        raise Unsupported(f"q has {tiles} tiles of {tile_m} rows in all heads: at most {MAX_GRID}")
    if m_blocks * tile_m > LARGEST_ROW:
        raise Unsupported(
            f"q has {m_blocks * tile_m} rows in tiles of {schedule.pack} heads: at most "
            f"{LARGEST_ROW}; use pack=1"
        )


def addressable(name: str, t: torch.Tensor) -> torch.Tensor:
    """The tensor as TMA can read it, without a copy; itself, if it is one already.

    Any strides that are multiples of 16 bytes do, 0 (an expanded dimension) too. A dimension of
    size 1 may have any stride; one that TMA does not accept is replaced.
    Raises: LayoutError naming argument, rule and a way out.
    """
    size, row = t.element_size(), t.shape[3]
    if t.stride(3) != 1:
        why = f"has stride {t.stride(3)} along head_dim: 1 is needed; use {name}.contiguous()"
        raise refusal(_diagnosis(name, t), why)
    given = t.stride()[:3]
    legal = [s * size % ALIGNED == 0 and s * size < FARTHEST for s in given]
    strides = tuple(
        s if ok or n > 1 else row for n, s, ok in zip(t.shape, given, legal, strict=False)
    )
    if t.data_ptr() % ALIGNED or not all(
        ok or n == 1 for n, ok in zip(t.shape, legal, strict=False)
    ):
        _refuse_address(name, t, [s * size for s in strides])
    return t if strides == given else t.as_strided(t.shape, (*strides, 1))


def check_addresses(captures: tuple[torch.Tensor, ...]) -> None:
    """That no element of a captured tensor lies across its natural alignment: a GPU would fault.

    Raises: LayoutError.
    """
    for number, t in enumerate(captures):
        if t.data_ptr() % t.element_size():
            raise LayoutError(
                f"captured tensor t{number} of {t.dtype} begins at address {t.data_ptr():#x}: a "
                f"multiple of {t.element_size()} is needed; copy it with .clone()"
            )


def _refuse_address(name: str, t: torch.Tensor, strides: list[int]) -> None:
    """Say which rule of a tensor map this tensor breaks; the caller has seen that it breaks one.

    Raises: LayoutError.
    """
    batch, seqlen, heads = strides
    # A contiguous tensor at a wrong address would be returned by .contiguous() as it is.
    way = f"{name}.clone()" if t.is_contiguous() else f"{name}.contiguous()"
    diagnosis = _diagnosis(name, t)
    broken = "; ".join(
        f"{rule.name}: given {rule.value}, allowed {rule.limit}" for rule in diagnosis.broken
    )
    given = f"strides of {batch}, {seqlen}, {heads} bytes (batch, seqlen, heads)"
    why = f"{tuple(t.shape)} with {given}: {broken}; copy it with {way}"
    raise refusal(diagnosis, why)


def _diagnosis(name: str, t: torch.Tensor) -> Diagnosis:
    """What the doctor says of a tensor, in tiles as small as any kernel's."""
    element = Problem(NAMES[t.dtype], t.shape[3], t.shape[3]).element
    return explain(t, Tile(64, 64, element), name=name)


def as_numbers(captures: tuple[torch.Tensor, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Captured tensors as a kernel takes them: None, or of each address, sizes and strides.

    Strides count elements; a scalar is a vector of one.
    """
    given = ((t.data_ptr(), *(t.shape or (1,)), *(t.stride() or (1,))) for t in captures)
    return tuple(given) or None
