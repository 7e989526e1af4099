"""Gradients of q, k and v on a GPU: allocate, launch, return."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection

import torch

from . import cache
from .backward import Gradients
from .errors import LayoutError, Unsupported
from .inputs import (
    NAMES,
    addressable,
    as_numbers,
    check_addresses,
    check_tensors,
    checked_scale,
)
from .kernels.sm90.backward.schedule import BackwardSchedule
from .plans_backward import BackwardPlan
from .problem import Problem
from .schedules_backward import tile_dims
from .variant import Variant
from .variant.derive import of_element
from .variant.pairs import dense

# By variant, which may be freed meanwhile: neither keys nor values refer to it.
_launchers: weakref.WeakKeyDictionary[Variant, dict[tuple, tuple]] = weakref.WeakKeyDictionary()


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
    """Gradients of an attention whose result was `out` and `lse`.

    Shape: as in the forward; dout as out, dlse as lse (batch, heads, seqlen_q). dout may have any
    strides; where a kernel cannot read it, it is copied. `wanted`: numbers of the captured tensors
    whose gradients are asked for, which come in fp32. `deterministic`: equal inputs give equal
    bits; otherwise dq is a sum in the order in which its parts come.
    Raises: Unsupported, ScheduleError, LayoutError.
    """
    check_tensors(q, k, v, variant)
    _check_results(q, v, out, lse, dout, dlse)
    if variant.epilogue is not None:
        raise Unsupported(
            "variant has an epilogue: a kernel's gradients begin at the output before it; give "
            "variant.without_epilogue(), its output, and dout times d out / d o"
        )
    if (lse is not None) != variant.has_lse or (dlse is not None and lse is None):
        given = "None" if lse is None else "a tensor"
        raise Unsupported(
            f"lse is {given}: it is needed where the softmax has one, which Elementwise has not"
        )
    scale = checked_scale(scale, q.shape[3])
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    captured = {
        n: torch.zeros(variant.captures[n].shape, dtype=torch.float32, device=q.device)
        for n in wanted
    }
    if q.numel() == 0 or k.numel() == 0:
        return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), captured)
    read = tuple(n for n in captured if n in _read_by_elements(variant))
    if read and deterministic:
        raise Unsupported(
            f"deterministic = True with gradients of captured tensors {read}: these are sums in "
            "the order in which their parts come; ask for either"
        )
    kind = (q.dtype, q.shape[3], v.shape[3])
    launch, plan = _launcher(variant, *kind, schedule, dlse is not None, deterministic, read)
    s = plan.schedule
    batch, seqlen_q, heads, _ = q.shape
    tiles = -(-seqlen_q // s.tile_m)
    rows = torch.empty(2, batch, heads, tiles * s.tile_m, dtype=torch.float32, device=q.device)
    words = batch * heads * tiles * s.tile_m * tile_dims(plan.problem)[0]
    sums = torch.empty(words // 32, 32, dtype=torch.float32, device=q.device)
    shape = plan.table_shape(batch, heads, seqlen_q, k.shape[1])
    table = None if shape is None else torch.empty(shape, dtype=torch.int32, device=q.device)
    turns = None
    if deterministic:
        turns = torch.empty(batch, heads, tiles, dtype=torch.int32, device=q.device).permute(
            2, 1, 0
        )
    check_addresses(variant.captures)
    captures = as_numbers(variant.captures)
    q, k, v, out, dout = (_readable(t.detach()) for t in (q, k, v, out, dout))
    with torch.cuda.device(q.device):
        launch(
            q, k, v, out, _detached(lse), dout, _detached(dlse), dq, dk, dv, captures,
            table, rows[0], rows[1], sums, turns,
            tuple(_with_dimension(captured[n]) for n in read) or None, scale,
        )  # fmt: skip
    if variant.sink in captured:
        delta = rows[1][..., :seqlen_q]
        _add_sink(captured[variant.sink], variant.captures[variant.sink].detach(), lse, delta)
    return Gradients(dq, dk, dv, captured)


def _with_dimension(t: torch.Tensor) -> torch.Tensor:
    """A scalar as a vector of one, as a kernel takes it."""
    return t if t.dim() else t.view(1)


def _read_by_elements(variant: Variant) -> frozenset[int]:
    """The captured tensors that have a gradient through scores or weights."""
    derived = of_element(variant)
    return frozenset() if derived is None else frozenset(derived.captures)


def _add_sink(
    sums: torch.Tensor, sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
) -> None:
    """A sink takes weight and has no value: it gets -exp(sink - lse) * delta of each row.

    Shape: lse, delta (batch, heads, seqlen_q); sink and sums (heads,) or ().
    """
    weight = torch.exp(sink.float().reshape(-1, 1) - lse)
    by_head = -(weight * delta).sum(dim=(0, 2))
    sums += by_head if sums.dim() else by_head.sum()


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


def _detached(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach()


def _readable(t: torch.Tensor) -> torch.Tensor:
    """The tensor as TMA can read it, or a copy of it where it cannot."""
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
) -> tuple[Callable[..., None], BackwardPlan]:
    """The loaded kernels of a plan and their plan, made anew around the variant."""
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
    problem = Problem(NAMES[dtype], head_dim, head_dim_v)
    if schedule is None:
        plan = BackwardPlan.default(
            variant, problem, has_dlse=has_dlse, deterministic=deterministic, wanted=wanted
        )
    else:
        plan = BackwardPlan(variant, problem, schedule, has_dlse, deterministic, wanted)
    if key not in known:
        plan.check()
        known[key] = (cache.get(plan.kernel).launch,)
    return known[key][0], plan
