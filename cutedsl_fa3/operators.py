"""Attention as torch operators: what autograd, torch.compile and fake tensors see of a call.

    cutedsl_fa3::attention            q, k, v, captured tensors  ->  out, lse
    cutedsl_fa3::attention_backward   gradients of those          ->  dq, dk, dv, captured gradients

An operator takes tensors, numbers and text, so a Variant goes by its handle and a Schedule by its
fields. Captured tensors are arguments of their own: a graph may have changed them since the Variant
was made, and asks for their gradients. What is eager and needs no gradient goes past all of this.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .calls import Result
from .errors import Unsupported
from .inputs import check_tensors
from .pipelines import Schedule
from .variant import Variant
from .variant.variant import by_handle

Options = tuple[float | None, Schedule | None, bool]  # scale, schedule, deterministic
CAST = (torch.float32, torch.float16, torch.bfloat16)  # what autocast casts; never float64

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
    call: Callable[..., Result],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    options: Options,
) -> Result:
    """A call that was checked, eagerly and differentiable; an operator takes ten times as long.

    Raises: Unsupported for tangents of forward-mode derivatives, and where there is no backward.
    """
    from . import calls_backward  # which only gradients need

    captures = variant.captures
    if forward_ad._current_level >= 0:
        _refuse_tangents(q, k, v, *captures)
    else:
        calls_backward.check_served(q, v)
    return _Attention.apply(call, variant, options, q, k, v, *captures)


def traced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, options: Options
) -> Result:
    """The call as an operator: in a graph that is compiled."""
    return _operator(q, k, v, variant, list(variant.captures), options)


def faked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, options: Options
) -> Result:
    """The same for tensors of `FakeTensorMode`, real captured tensors among them."""
    check_tensors(*autocast(q, k, v), variant)
    mode = q.fake_mode  # type: ignore[attr-defined]
    captures = [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in variant.captures]
    return _operator(q, k, v, variant, captures, options)


def _operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    captures: list[torch.Tensor],
    options: Options,
) -> Result:
    if not isinstance(variant, Variant):
        check_tensors(q, k, v, variant)  # which refuses it by name
    q, k, v = autocast(q, k, v)
    scale, schedule, deterministic = options
    found = torch.ops.cutedsl_fa3.attention(
        q, k, v, captures, variant.handle, scale, _written(schedule), deterministic
    )
    return found[0], found[1] if variant.weight is None else None


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
    return "" if schedule is None else schedule.text


def _read(text: str) -> Schedule | None:
    if not text:
        return None
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    return Schedule(**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})


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
    out, lse = _forward(q, k, v, bound, (scale, _read(schedule), deterministic))
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
    found = by_handle(variant)
    if all(isinstance(n, int) for t in (q, k, v) for n in t.shape):
        check_tensors(q, k, v, found)  # of sizes that a graph leaves open, when it is called
    batch, seqlen_q, heads, _ = q.shape
    rows = (batch, heads, seqlen_q) if found.has_lse else (0,)
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
    bound = by_handle(variant).bound_to(captures)
    options = scale, _read(schedule), deterministic
    saved = q, k, v, out, lse if bound.has_lse else None
    dq, dk, dv, *of_captures = _gradients(do, dlse, saved, bound, options, wanted)
    return dq, dk, dv, of_captures


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
    from . import calls_backward

    if isinstance(q.shape[3], int) and isinstance(v.shape[3], int):
        calls_backward.check_served(q, v)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, [captures[i].new_empty(captures[i].shape) for i in wanted]


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, options: Options
) -> Result:
    """The call itself, without gradients; checked as any other."""
    from . import interface  # which imports this module

    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return interface._call(q, k, v, variant, *options, reads_lse=True)


Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _gradients(
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    saved: Saved,
    variant: Variant,
    options: Options,
    wanted: Sequence[int],
) -> list[torch.Tensor]:
    """Gradients of q, k, v and of the captured tensors wanted, each in its type.

    Raises: Unsupported where there is no kernel.
    """
    from . import calls_backward  # which only gradients need

    q, k, v, out, lse = saved
    scale, _, deterministic = options
    do = torch.zeros_like(out) if do is None else do
    raw = calls_backward.without_epilogue(variant)
    if raw is not variant:  # what the epilogue was given is not kept from the forward
        out, lse = _forward(q, k, v, raw, options)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    found = calls_backward.backward(
        q, k, v, out, lse, do, variant, scale,
        dlse=dlse, wanted=wanted, deterministic=deterministic,
    )  # fmt: skip
    of_captures = [found.captures[i].to(variant.captures[i].dtype) for i in wanted]
    return [found.q, found.k, found.v, *of_captures]


def _wanted(variant: Variant, asked: Sequence[bool]) -> list[int]:
    """The captured tensors, of those asked for, that have a gradient."""
    if not any(asked):
        return []
    from .backward import differentiable

    return [i for i in sorted(differentiable(variant)) if asked[i]]


# Eagerly.


class _Attention(torch.autograd.Function):
    """(call, variant, options, q, k, v, *captured tensors) -> out, lse."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Callable[..., Result],
        variant: Variant,
        options: Options,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *captures: torch.Tensor,
    ) -> Result:
        out, lse = call(q, k, v, variant, options[0])
        ctx.set_materialize_grads(False)
        ctx.variant, ctx.options = variant, options
        ctx.save_for_backward(q, k, v, out, lse, *captures)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        asked = ctx.needs_input_grad[6:]
        wanted = _wanted(ctx.variant, asked)
        dq, dk, dv, *found = _Backward.apply(
            ctx.variant, ctx.options, wanted, do, dlse, *ctx.saved_tensors
        )
        by_number = dict(zip(wanted, found, strict=True))
        return None, None, None, dq, dk, dv, *(by_number.get(i) for i in range(len(asked)))


class _Backward(torch.autograd.Function):
    """The gradients; a function of its own, so that a derivative of them is refused by name."""

    @staticmethod
    def forward(
        ctx: Any,
        variant: Variant,
        options: Options,
        wanted: Sequence[int],
        do: torch.Tensor | None,
        dlse: torch.Tensor | None,
        *saved: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse, *_ = saved
        return tuple(_gradients(do, dlse, (q, k, v, out, lse), variant, options, wanted))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise Unsupported(TWICE)


# As operators.


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What the backward needs: O(seqlen) memory, the inputs included."""
    q, k, v, captures, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.count, ctx.variant = len(captures), by_handle(ctx.options[0])
    ctx.save_for_backward(q, k, v, *output, *captures)


def _hand_back(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *captures = ctx.saved_tensors
    wanted = _wanted(ctx.variant, ctx.needs_input_grad[3]) if ctx.count else []
    do = torch.zeros_like(out) if do is None else do
    dlse = None if lse.dim() == 1 else dlse  # there is no LSE
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
