"""Gradients of q, k and v, and of what a variant captures: allocate, launch, return."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import NamedTuple

import torch

from . import backward as twin
from . import cache, calls
from .backward import Gradients
from .errors import LayoutError, Unsupported
from .inputs import (
    ALIGNED,
    NAMES,
    addressable,
    as_numbers,
    check_addresses,
    check_device,
    check_tensors,
    checked_scale,
    without_scores,
)
from .kernels.sm90.backward.schedule import WORDS, BackwardSchedule
from .kernels.sm90.backward.work import FLAGGED
from .pipelines import ScheduleError
from .plans_backward import BackwardPlan
from .problem import Problem
from .schedules_backward import tile_dims
from .variant import Variant
from .variant.derive import of_element
from .variant.pairs import dense
from .variant.summaries import table_shape


class Loaded(NamedTuple):
    """The loaded kernels of a plan, and what a call needs to know of it; none refers to a variant.

    `width`: columns of a tile of dQ. `has_table`: captured vectors are summarised by block.
    """

    launch: Callable[..., None]
    schedule: BackwardSchedule
    width: int
    has_table: bool


# By variant, which may be freed meanwhile: neither keys nor values refer to it.
_launchers: weakref.WeakKeyDictionary[Variant, dict[tuple, Loaded]] = weakref.WeakKeyDictionary()
_before: weakref.WeakKeyDictionary[Variant, Variant] = weakref.WeakKeyDictionary()


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    dout: torch.Tensor,
    variant: Variant,
    scale: float | None = None,
    *,
    dlse: torch.Tensor | None = None,
    wanted: Collection[int] = (),
    deterministic: bool = False,
    schedule: BackwardSchedule | None = None,
) -> Gradients:
    """Gradients of an attention: by the kernels, of CPU tensors by their twin.

    `out` is the output before an epilogue, `dout` the gradient of the output after it. `dout` may
    have any strides; where a kernel cannot read it, it is copied. `wanted`: numbers of the captured
    tensors whose gradients are asked for, which come in fp32. `deterministic`: equal inputs give
    equal bits; otherwise dq and the gradients of captured tensors are sums in the order in which
    their parts come. Those that scores and weights read take a second pass over all pairs then.

    Shape: as in the forward; dout as out, lse and dlse (batch, heads, seqlen_q) fp32, lse None for
        weights by Elementwise. Memory beside the results grows with the lengths, not their product.
    Raises: Unsupported, ScheduleError, LayoutError.
    """
    check_tensors(q, k, v, variant)
    check_device(q, k, v, variant)
    check_served(q, v)
    _check_results(q, v, out, lse, dout, dlse)
    if (lse is not None) != variant.has_lse or (dlse is not None and lse is None):
        given = "None" if lse is None else "a tensor"
        raise Unsupported(
            f"lse is {given}: it is needed where the softmax has one, which Elementwise has not"
        )
    scale = checked_scale(scale, q.shape[3])
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        if calls.emulated(q.device) or without_scores(q, k):
            return twin.run(q, k, v, variant, out, lse, dout, dlse, scale=scale, wanted=wanted)
        captured = twin.zeros_of(variant, wanted)
        dout, dlse = twin.before_epilogue(
            variant, out, lse, dout, dlse, seqlen_k=k.shape[1], totals=captured
        )
        raw = without_epilogue(variant)
        options = (scale, deterministic, schedule)
        dq, dk, dv = _launched(q, k, v, out, lse, dout, dlse, raw, captured, options)
    return Gradients(dq, dk, dv, captured)


def _launched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    variant: Variant,
    captured: dict[int, torch.Tensor],
    options: tuple[float, bool, BackwardSchedule | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of a variant without an epilogue; `captured` gets what there is to add.

    Everything is on the current stream of the tensors' device, and nothing waits for it.
    """
    scale, deterministic, schedule = options
    read = tuple(n for n in captured if n in _read_by_elements(variant))
    again = read if deterministic else ()  # a kernel adds to these as its parts come
    kind = (q.dtype, q.shape[3], v.shape[3])
    in_kernel = () if again else read
    loaded = _launcher(variant, *kind, schedule, dlse is not None, deterministic, in_kernel)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    rows, sums, table, turns, flags = _workspace(loaded, variant, q, k, deterministic)
    check_addresses(variant.captures)
    captures = as_numbers(variant.captures)
    q, k, v, out, dout = (_readable(t) for t in (q, k, v, out, dout))
    with torch.cuda.device(q.device):
        loaded.launch(
            q, k, v, out, lse, dout, dlse, dq, dk, dv, captures,
            table, rows[0], rows[1], sums, turns,
            tuple(_with_dimension(captured[n]) for n in in_kernel) or None, flags, scale,
        )  # fmt: skip
    delta = None if lse is None else rows[1][..., : q.shape[1]]
    if again:
        totals = {n: captured[n] for n in again}
        twin.of_captures(q, k, v, variant, lse, dout, delta, totals, scale=scale)
    if variant.sink in captured and lse is not None and delta is not None:
        sink = variant.captures[variant.sink]
        twin.add_sink(captured[variant.sink], sink, lse, delta)
    return dq, dk, dv


def check_served(q: torch.Tensor, v: torch.Tensor) -> None:
    """That gradients of a call for these tensors can be computed; CPU tensors have a twin.

    Raises: Unsupported naming the head sizes and those that there are kernels for.
    """
    if calls.emulated(q.device):
        return
    why = _not_served(q.dtype, q.shape[3], v.shape[3])
    if why is not None:
        raise Unsupported(
            f"a gradient is asked for and {why}; cutedsl_fa3.reference.attention is "
            "differentiable and computes the same variant, and under torch.no_grad() attention "
            "returns the output alone"
        )


@lru_cache(maxsize=256)
def _not_served(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> str | None:
    """Why no tile holds these head sizes; None where one does."""
    try:
        tile_dims(Problem(NAMES[dtype], head_dim, head_dim_v))
    except ScheduleError as error:
        return str(error)
    return None


def without_epilogue(variant: Variant) -> Variant:
    """The variant up to its epilogue, the same object each time: kernels are found by it."""
    if variant.epilogue is None and "epilogue" not in variant.marked:
        return variant
    return _before.get(variant) or _before.setdefault(variant, variant.without_epilogue())


def _workspace(
    loaded: Loaded, variant: Variant, q: torch.Tensor, k: torch.Tensor, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Each row's LSE and delta, the sums of dQ, summaries of blocks, turns and flags: O(seqlen)."""
    s = loaded.schedule
    batch, seqlen_q, heads, _ = q.shape
    tiles = -(-seqlen_q // s.tile_m)
    fp32, int32 = ({"dtype": t, "device": q.device} for t in (torch.float32, torch.int32))
    rows = torch.empty(2, batch, heads, tiles * s.tile_m, **fp32)
    sums = torch.empty(batch * heads * tiles * s.tile_m * loaded.width // WORDS, WORDS, **fp32)
    table = None
    if loaded.has_table:
        lengths = (seqlen_q, k.shape[1])
        shape = table_shape(variant.mask, batch, heads, *lengths, s.tile_m, s.tile_n)
        table = torch.empty(shape, **int32)
    turns = None
    if deterministic:
        turns = torch.empty(batch, heads, tiles, **int32).permute(2, 1, 0)
    of_head = -(-k.shape[1] // s.tile_n) * (s.tile_n // FLAGGED)
    flags = torch.empty(batch * k.shape[2] * of_head, **int32)
    return rows, sums, table, turns, flags


def _with_dimension(t: torch.Tensor) -> torch.Tensor:
    """A scalar as a vector of one, as a kernel takes it."""
    return t if t.dim() else t.view(1)


def _read_by_elements(variant: Variant) -> frozenset[int]:
    """The captured tensors that have a gradient through scores or weights."""
    derived = of_element(variant)
    return frozenset() if derived is None else frozenset(derived.captures)


def _check_results(
    q: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> None:
    shape = (*q.shape[:3], v.shape[3])
    of_rows = (q.shape[0], q.shape[2], q.shape[1])
    for name, t, needed, dtype in (
        ("out", out, shape, q.dtype),
        ("dout", dout, shape, q.dtype),
        ("lse", lse, of_rows, torch.float32),
        ("dlse", dlse, of_rows, torch.float32),
    ):
        if t is None:
            continue
        if tuple(t.shape) != tuple(needed) or t.dtype != dtype or t.device != q.device:
            raise Unsupported(
                f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}: {dtype} {tuple(needed)} on "
                f"{q.device} is needed"
            )


def _readable(t: torch.Tensor) -> torch.Tensor:
    """The tensor as TMA can read it, or a copy of it where it cannot."""
    if t.is_neg() or t.stride(3) != 1 or t.data_ptr() % ALIGNED:
        return t.resolve_neg().clone(memory_format=torch.contiguous_format)
    try:
        return addressable("tensor", t)
    except LayoutError:
        return t.clone(memory_format=torch.contiguous_format)


def _launcher(
    variant: Variant,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    schedule: BackwardSchedule | None,
    has_dlse: bool,
    deterministic: bool,
    wanted: tuple[int, ...],
) -> Loaded:
    """The kernels of a call of this kind, compiled and loaded once."""
    types = tuple(t.dtype for t in variant.captures)
    key = (
        dtype,
        head_dim,
        head_dim_v,
        schedule,
        has_dlse,
        deterministic,
        wanted,
        types,
        dense(variant),
    )
    known = _launchers.setdefault(variant, {})
    if key not in known:
        problem = Problem(NAMES[dtype], head_dim, head_dim_v)
        options = {"has_dlse": has_dlse, "deterministic": deterministic, "wanted": wanted}
        if schedule is None:
            plan = BackwardPlan.default(variant, problem, **options)
        else:
            plan = BackwardPlan(variant, problem, schedule, **options)
        plan.check()
        has_table = plan.table_shape(1, 1, 1, 1) is not None
        launch = cache.get(plan.kernel).launch
        known[key] = Loaded(launch, plan.schedule, plan.tile_dims[0], has_table)
    return known[key]
