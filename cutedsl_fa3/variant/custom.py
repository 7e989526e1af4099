"""Custom torch operators in a trace: what they are made of is traced, as their name says nothing.

An operator that is composed of torch functions (one registered for CompositeImplicitAutograd or
CompositeExplicitAutograd) is called with stand-ins, tensors without storage; what it does to them
becomes nodes. One that has kernels only cannot be looked into and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .trace import Tracer
    from .traced import Traced

_TORCHS_OWN = ("aten", "prims")
_COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


class Boxed(torch.Tensor):
    """A traced value as a tensor without storage, which the dispatcher accepts."""

    traced: Traced

    @staticmethod
    def __new__(cls, traced: Traced) -> Boxed:
        box = torch.Tensor._make_wrapper_subclass(cls, (), dtype=traced.dtype)
        box.traced = traced
        return box

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = next(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, cls))
        tracer = mine.traced.tracer
        args, kwargs = unboxed(args), unboxed(kwargs or {})
        if is_custom(func):
            return boxed(run_custom(func, args, kwargs, tracer), tracer)
        name, written = names_of(func)
        return boxed(tracer.record(name, args, kwargs, written), tracer)


def boxed(tree: Any, tracer: Tracer) -> Any:
    """The same with a stand-in for each traced value."""
    from .traced import Traced

    if type(tree) in (tuple, list):
        return type(tree)(boxed(branch, tracer) for branch in tree)
    if isinstance(tree, dict):
        return {key: boxed(branch, tracer) for key, branch in tree.items()}
    if not isinstance(tree, Traced):
        return tree
    if tree.shape:
        tracer.refuse("a custom operator on a row is not supported; apply it to one value")
    tracer.computing = True
    try:
        return Boxed(tree)
    finally:
        tracer.computing = False


def unboxed(tree: Any) -> Any:
    """The same with the traced value of each stand-in."""
    if type(tree) in (tuple, list):
        return type(tree)(map(unboxed, tree))
    if isinstance(tree, dict):
        return {key: unboxed(branch) for key, branch in tree.items()}
    return tree.traced if isinstance(tree, Boxed) else tree


def is_custom(func: Any) -> bool:
    """Whether this is an operator that someone registered, rather than one of torch's own."""
    return _namespace(func) not in (None, *_TORCHS_OWN)


def _namespace(func: Any) -> str | None:
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name.split("::")[0]
    return None


def run_custom(func: Any, args: Any, kwargs: dict[str, Any], tracer: Tracer) -> Any:
    """What a custom operator makes of traced values.

    Raises: VariantError, through the tracer, for one that is not composed of torch functions.
    """
    overload = func
    if isinstance(func, torch._ops.OpOverloadPacket):
        overload = getattr(func, func.overloads()[0])
    written = f"the custom operator {overload.name()}"
    keys = [
        key
        for key in _COMPOSITE
        if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)
    ]
    if len(keys) != 1 or (func is not overload and len(func.overloads()) != 1):
        tracer.refuse(
            f"{written} has kernels but no composition of torch functions to trace; write what it "
            "computes with torch functions"
        )
    try:
        found = overload._op_dk(
            getattr(torch._C.DispatchKey, keys[0]), *boxed(args, tracer), **boxed(kwargs, tracer)
        )
    except (RuntimeError, TypeError, ValueError) as error:
        if tracer.refusal is not None:
            raise
        tracer.refuse(f"{written} cannot be traced: {error}")
    return unboxed(found)


def leaves_of(tree: Any) -> Iterator[Any]:
    """What lies in nested tuples, lists and dicts."""
    if isinstance(tree, tuple | list):
        for branch in tree:
            yield from leaves_of(branch)
    elif isinstance(tree, dict):
        yield from leaves_of(tuple(tree.values()))
    else:
        yield tree


def names_of(func: Any) -> tuple[str, str]:
    """A torch function's name, and how a user writes it."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
        return name, f".{name}"
    name = name.split(".")[0]  # of an overload, such as tanh.default
    if name in ("_threshold", "special_expit", "special_expm1", "special_log1p", "special_erf"):
        name = name.removeprefix("_").removeprefix("special_")
    if getattr(torch.Tensor, name, None) is func:
        return name, f"Tensor.{name}"
    return name, f"torch.{name}"
