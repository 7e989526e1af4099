"""The functions a user calls: `attention`, `attention_with_lse`, `plan`, `visits`.

Tensors are (batch, seqlen, heads, head_dim) with contiguous rows; any strides that TMA can address
are read in place. CUDA tensors run the kernel, CPU tensors an emulation of the same plan. Whatever
cannot be served is refused before any launch, naming the argument, its value and what is allowed.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import operators, shadow
from .calls import Call, Result, SlowKernel, plan_for, prepare, visited
from .errors import Unsupported
from .inputs import check_schedule, check_tensors, checked_scale
from .ledger.launch import Sizes
from .pipelines import Schedule
from .plans import Plan
from .variant import Variant

__all__ = ["SlowKernel", "attention", "attention_with_lse", "checked_scale", "plan", "visits"]

PLAIN = Variant()
MOST_SIGNATURES = 1024  # of one variant that are kept; lengths that grow one by one are as many
# A variant that was not called yet, or an argument that `prepare` refuses by its name.
NEW = (AttributeError, KeyError, RuntimeError, TypeError)
MISMATCH = (TypeError, ValueError)  # what a kernel raises for tensors that it does not take

_calls: weakref.WeakKeyDictionary[Variant, dict[tuple, Call]] = weakref.WeakKeyDictionary()


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
    check_tensors(q, k, v, variant)
    check_schedule(schedule)
    made = plan_for(q, k, v, variant, schedule)
    made.check()
    return replace(made, sizes=Sizes(q.shape[0], q.shape[2], q.shape[1], k.shape[1]))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    scale: float | None = None,
    schedule: Schedule | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """softmax(score(q k^T * scale) where the mask allows) v, on an SM90 GPU or emulated on the CPU.

    Shape:
        q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim),
        v (batch, seqlen_k, kv_heads, head_dim_v) -> (batch, seqlen_q, heads, head_dim_v).
        heads is a multiple of kv_heads; query head h reads key head h // (heads // kv_heads).
    Units: scale is natural; default 1 / sqrt(head_dim).
    Without `schedule` the one that `tune` kept for such a call, else the measured table's.
    Differentiable, once, on CPU tensors: in q, k, v, in captured floating tensors and in a sink;
    `deterministic` asks for gradients that are equal bit by bit each time. On a GPU asking for a
    gradient raises Unsupported: there is no backward kernel yet.
    Raises: Unsupported, LayoutError, ScheduleError, VariantError before any launch.
    """
    variant = PLAIN if variant is None else variant
    return _call(q, k, v, variant, scale, schedule, deterministic)[0]


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    scale: float | None = None,
    schedule: Schedule | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention`, with each row's log-sum-exp: (batch, heads, seqlen_q), fp32, natural log.

    A row that sees no key has output 0 and LSE -inf, or the sink where there is one.
    """
    variant = PLAIN if variant is None else variant
    if isinstance(variant, Variant) and not variant.has_lse:
        raise Unsupported(
            "attention_with_lse: weights by Elementwise have no log-sum-exp, since nothing is "
            "normalised; use attention"
        )
    return _call(q, k, v, variant, scale, schedule, deterministic)


def visits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """The key tiles that each tile of queries visits, in order, as a debug build notes them.

    Shape: as for `attention` -> int32 (batch, heads, m_blocks, n_blocks + 1): 2 * n_block, plus 1
        where the tile needs the element mask, then -1.
    Raises: as `attention`.
    """
    return visited(q, k, v, PLAIN if variant is None else variant, schedule)


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    schedule: Schedule | None,
    deterministic: bool = False,
) -> Result:
    """Check, or find that this kind of call was checked before, and run it.

    A kind is described by as little as will do, since this is most of what a call costs in Python.
    """
    if is_dynamo_compiling():
        return operators.traced(q, k, v, variant, scale, schedule, deterministic)
    graded = forward_ad._current_level >= 0 or (  # tangents come without requires_grad
        torch.is_grad_enabled() and _requires_grad(q, k, v, variant)
    )
    if not graded:
        call = None
        try:
            call = _calls[variant].get(_kind(q, k, v, variant.captures, schedule))
        except NEW:
            pass
        if call is not None:
            try:
                return call(q, k, v, variant, _scaled(call, scale))
            except MISMATCH:
                pass  # nothing was launched: a kernel checks types, strides and addresses first
    if operators.is_fake(q):
        return operators.traced(q, k, v, variant, scale, schedule, deterministic)
    q, k, v = operators.autocast(q, k, v)
    call = _exactly(q, k, v, variant, schedule)
    scale = _scaled(call, scale)
    if graded:
        return operators.attend(q, k, v, variant, scale, schedule, deterministic)
    return call(q, k, v, variant, scale)


def _requires_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> bool:
    try:
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return True
        captures = variant.captures
        return bool(captures) and True in [t.requires_grad for t in captures]
    except AttributeError:
        return False  # an argument that `prepare` refuses by its name


def _scaled(call: Call | shadow.Shadowed, scale: float | None) -> float:
    return call.scale if scale is None else checked_scale(scale, 0)


def _kind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: tuple[torch.Tensor, ...],
    schedule: Schedule | None,
) -> tuple | None:
    """What the checks depend on, but for what a kernel checks when it is launched.

    None where it would not: memory that is not there, signs that torch flips (none in bf16).
    """
    dtype = q.dtype
    if not (q.data_ptr() and k.data_ptr() and v.data_ptr()):
        return None
    if dtype is torch.float16 and (q.is_neg() or k.is_neg() or v.is_neg()):
        return None
    devices = q.get_device(), k.get_device(), v.get_device()
    if not captures:
        return q.shape, k.shape, v.shape, dtype, devices, schedule
    about = []
    for t in captures:
        if not t.data_ptr() or t.is_neg():
            return None
        about += t.shape, t.get_device()
    return q.shape, k.shape, v.shape, dtype, devices, schedule, *about


def _signature(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: tuple[torch.Tensor, ...],
    schedule: Schedule | None,
) -> tuple:
    """Whatever the checks and the choice of a kernel depend on."""
    tensors = (q, k, v, *captures)
    return (
        *((t.shape, t.stride(), t.dtype, t.device, _alignment(t), t.is_neg()) for t in tensors),
        schedule,
    )


def _alignment(t: torch.Tensor) -> int:
    """What an address is beyond a multiple of 16 bytes; -1 for a tensor without memory."""
    address = t.data_ptr()
    return address & 15 if address else -1


def _exactly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    schedule: Schedule | None,
) -> Call | shadow.Shadowed:
    """The call for tensors just like these, kept for the next time unless it is to be compared."""
    signature = None
    try:
        signature = _signature(q, k, v, variant.captures, schedule)
        call = _calls[variant].get(signature)
    except NEW:
        call = None
    if call is None:
        call = prepare(q, k, v, variant, schedule)
        if (compared := shadow.first(call, q, k, v, variant, schedule)) is not call:
            return compared
        known = _calls.setdefault(variant, {})
        if len(known) + 2 > MOST_SIGNATURES:
            known.clear()
        if signature is not None:
            known[signature] = call
            kind = _kind(q, k, v, variant.captures, schedule)
            if kind is not None and call.checks_layouts:
                known[kind] = call
    return call
