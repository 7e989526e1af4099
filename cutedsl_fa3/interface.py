"""The functions a user calls: `attention`, `attention_with_lse`, `plan`, `visits`.

Tensors are (batch, seqlen, heads, head_dim) with contiguous rows; any strides that TMA can address
are read in place. CUDA tensors run the kernel, CPU tensors an emulation of the same plan. Whatever
cannot be served is refused before any launch, naming the argument, its value and what is allowed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import operators, shadow
from .calls import Call, Result, SlowKernel, plan_for, prepare, visited
from .errors import Unsupported
from .inputs import check_schedule, check_tensors, checked_scale
from .ledger.launch import Sizes
from .pipelines import Schedule
from .plans import Plan
from .seen import Known, Seen, signature
from .variant import Variant

__all__ = ["SlowKernel", "attention", "attention_with_lse", "checked_scale", "plan", "visits"]

PLAIN = Variant()
# A variant that was not called yet, or an argument that `prepare` refuses by its name.
NEW = (AttributeError, KeyError, RuntimeError, TypeError)
MISMATCH = (TypeError, ValueError)  # what a kernel raises for tensors that it does not take

_calls: dict[int, Known] = {}  # by the variant's id, which is its own as long as it lives


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
    check_schedule(schedule, q, k)
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
    Differentiable, once: in q, k, v, in captured floating tensors and in a sink. `deterministic`,
    or `torch.use_deterministic_algorithms`, asks for gradients that are equal bit by bit each time;
    those of captured tensors then take a second pass over all pairs, in torch. On a GPU a gradient
    for head sizes without a backward kernel is refused here, not by the backward.
    Raises: Unsupported, LayoutError, ScheduleError, VariantError before any launch.
    """
    variant = PLAIN if variant is None else variant
    return _call(q, k, v, variant, scale, schedule, deterministic, False)[0]


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
    return _call(q, k, v, variant, scale, schedule, deterministic, True)


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
        where the tile needs the element mask, then -1. Heads that share tiles (`Schedule.pack`)
        count as one.
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
    deterministic: bool,
    reads_lse: bool,
) -> Result:
    """Find that such a call was checked before, and run it; else check it."""
    if is_dynamo_compiling():
        return operators.traced(q, k, v, variant, (scale, schedule, deterministic))
    seen = _seen_before(q, k, v, variant, schedule)
    if seen is not None:
        call = seen.call
        try:
            natural = call.scale if scale is None else checked_scale(scale, 0)
            return call.run(q, k, v, seen.numbers, natural, reads_lse)
        except MISMATCH:
            pass  # nothing was launched: a kernel checks layouts and addresses of q, k and v first
    if type(q) is FakeTensor:
        return operators.faked(q, k, v, variant, (scale, schedule, deterministic))
    q, k, v = operators.autocast(q, k, v)
    if not isinstance(deterministic, bool):
        raise Unsupported(f"deterministic = {deterministic!r}: supported are True and False")
    call = _exactly(q, k, v, variant, schedule)
    natural = call.scale if scale is None else checked_scale(scale, 0)
    if _graded(q, k, v, variant):
        return operators.attend(call, q, k, v, variant, (natural, schedule, deterministic))
    return call(q, k, v, variant, natural)


def _seen_before(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    schedule: Schedule | None,
) -> Seen | None:
    """What was checked before for a call like this one, unless a derivative may be asked for.

    Here is most of what a call costs in Python, so nothing is described: what was seen is asked
    whether it still holds. Strides and addresses of q, k and v are not asked for: a launch refuses
    those that it cannot take.
    """
    try:
        captures = variant.captures
        for seen in _calls[id(variant)].recent:
            if (
                seen.alike(q, k, v, *captures)
                and (q.data_ptr() and k.data_ptr() and v.data_ptr())  # else there is no memory
                and (not captures or seen.lie_there(captures))
                and (schedule is seen.schedule or schedule == seen.schedule)
            ):
                dual = forward_ad._current_level >= 0  # tangents come without requires_grad
                graded = dual or (seen.requires_grad and torch.is_grad_enabled())
                return None if graded else seen
    except NEW:
        pass
    return None


def _graded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> bool:
    """Whether a derivative may be asked for; of checked tensors."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *variant.captures))


def _exactly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    schedule: Schedule | None,
) -> Call | shadow.Shadowed:
    """The call for tensors just like these, kept for the next time unless it is to be compared."""
    known = exact = seen = None
    given = (q, k, v)
    try:
        exact = signature(given, variant.captures, schedule)
        known = _calls[id(variant)]
        seen = known.exact.get(exact)
    except NEW:
        pass
    if seen is None:
        call = prepare(q, k, v, variant, schedule)
        if (compared := shadow.first(call, q, k, v, variant, schedule)) is not call:
            return compared
    else:
        call = seen.call
    if exact is not None:
        captures = variant.captures
        if seen is None or not (seen.alike(*given, *captures) and seen.lie_there(captures)):
            seen = Seen(call, given, captures, schedule)
        if known is None:
            known = _calls.setdefault(id(variant), Known(variant, _calls))
        known.keep(exact, seen)
    return call
