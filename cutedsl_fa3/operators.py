"""Attention as torch operators: what autograd, torch.compile and fake tensors see of a call.

    cutedsl_fa3::attention            q, k, v, captured tensors  ->  out, lse
    cutedsl_fa3::attention_backward   gradients of those          ->  dq, dk, dv, captured gradients

An operator takes tensors, numbers and text, so a Variant goes by its handle and a Schedule by its
fields. Captured tensors are arguments of their own: a graph may have changed them since the Variant
was made, and asks for their gradients. What is eager and needs no gradient goes past all of this.
"""

from __future__ import annotations

import ast
import math
from dataclasses import fields
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from . import calls
from .errors import Unsupported
from .pipelines import Schedule
from .variant import Variant
from .variant.variant import by_handle

FIELDS = tuple(field.name for field in fields(Schedule))
CAST = (torch.float32, torch.float16, torch.bfloat16)  # what autocast casts; never float64

NO_KERNEL = (
    "attention has no backward kernel yet; cutedsl_fa3.reference.attention is differentiable and "
    "computes the same variant, and CPU tensors have a backward"
)
FORWARD_MODE = (
    "attention has no forward-mode derivative; cutedsl_fa3.reference.attention is differentiable "
    "and computes the same variant"
)
TWICE = (
    "attention has no second derivative: its backward was called with create_graph=True and is "
    "differentiated in turn (double backward); cutedsl_fa3.reference.attention can be "
    "differentiated twice"
)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    schedule: Schedule | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call as an operator; the LSE is None where the variant has none.

    Raises: Unsupported for tangents of forward-mode derivatives.
    """
    captures = list(variant.captures)
    if forward_ad._current_level >= 0:
        _refuse_tangents(q, k, v, *captures)
    found = torch.ops.cutedsl_fa3.attention(
        q, k, v, captures, variant.handle, scale, _written(schedule), deterministic
    )
    return found[0], found[1] if variant.weight is None else None


def traced(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    schedule: Schedule | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same where tensors have no memory: in a graph that is compiled, or a fake tensor's."""
    q, k, v = autocast(q, k, v)
    return attend(q, k, v, variant, scale, schedule, deterministic)


def is_fake(q: object) -> bool:
    """Whether this is a tensor of `FakeTensorMode`, which has shapes and no memory."""
    return isinstance(q, FakeTensor)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v in the type that torch.autocast asks for, as torch's own attention takes them."""
    device = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else ""
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in CAST else t for t in tensors
    )


def _refuse_tangents(*tensors: torch.Tensor) -> None:
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise Unsupported(FORWARD_MODE)


def _written(schedule: Schedule | None) -> str:
    """A schedule as text that `_read` takes; "" for none."""
    if schedule is None:
        return ""
    return str(tuple([getattr(schedule, name) for name in FIELDS]))


def _read(text: str) -> Schedule | None:
    return Schedule(*ast.literal_eval(text)) if text else None


@torch.library.custom_op("cutedsl_fa3::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: list[torch.Tensor],
    variant: str,
    scale: float | None,
    schedule: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, which is empty where the variant has none."""
    bound = by_handle(variant).bound_to(captures)
    out, lse = _forward(q, k, v, bound, scale, _read(schedule))
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


@_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: list[torch.Tensor],
    variant: str,
    scale: float | None,
    schedule: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    rows = (batch, heads, seqlen_q) if by_handle(variant).has_lse else (0,)
    out = q.new_empty(batch, seqlen_q, heads, v.shape[3])
    return out, q.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("cutedsl_fa3::attention_backward", mutates_args=())
def _attention_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    captures: list[torch.Tensor],
    variant: str,
    scale: float | None,
    schedule: str,
    deterministic: bool,
    wanted: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Gradients of q, k and v, and of the captured tensors of these numbers, each in its type.

    Raises: Unsupported where there is no kernel.
    """
    from . import backward  # which only gradients need

    if not calls.emulated(q.device):
        raise Unsupported(NO_KERNEL)
    bound = by_handle(variant).bound_to(captures)
    natural = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    raw = bound.without_epilogue()
    if raw is not bound:  # what the epilogue was given is not kept from the forward
        out, again = _forward(q, k, v, raw, scale, _read(schedule))
        lse = lse if again is None else again
    found = backward.run(
        q, k, v, bound, out, lse if bound.has_lse else None, do, dlse, scale=natural, wanted=wanted
    )
    of_captures = [found.captures[i].to(captures[i].dtype) for i in wanted]
    return found.q, found.k, found.v, of_captures


@_attention_backward.register_fake
def _(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    captures: list[torch.Tensor],
    variant: str,
    scale: float | None,
    schedule: str,
    deterministic: bool,
    wanted: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, [captures[i].new_empty(captures[i].shape) for i in wanted]


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    scale: float | None,
    schedule: Schedule | None,
) -> calls.Result:
    """The call itself, without gradients; checked as any other."""
    from . import interface  # which imports this module

    with torch.no_grad():
        return interface._call(q, k, v, variant, scale, schedule)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What the backward needs: O(seqlen) memory, the inputs included."""
    q, k, v, captures, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.count = len(captures)
    ctx.save_for_backward(q, k, v, *output, *captures)


def _hand_back(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    from .backward import differentiable

    q, k, v, out, lse, *captures = ctx.saved_tensors
    handle = ctx.options[0]
    needed = ctx.needs_input_grad[3]
    asked = [i for i, needs in enumerate(needed) if needs] if ctx.count else []
    having = differentiable(by_handle(handle)) if asked else frozenset()
    wanted = [i for i in asked if i in having]
    do = torch.zeros_like(out) if do is None else do
    if lse.dim() == 1:  # there is no LSE
        dlse = None
    dq, dk, dv, found = torch.ops.cutedsl_fa3.attention_backward(
        do, dlse, q, k, v, out, lse, captures, *ctx.options, wanted
    )
    by_number = dict(zip(wanted, found, strict=True))
    of_captures = [by_number.get(i) for i in range(ctx.count)]
    return dq, dk, dv, of_captures, *(None,) * len(ctx.options)


def _refuse_twice(ctx: Any, *gradients: Any) -> None:
    raise Unsupported(TWICE)


_attention.register_autograd(_hand_back, setup_context=_keep)
_attention_backward.register_autograd(_refuse_twice)
