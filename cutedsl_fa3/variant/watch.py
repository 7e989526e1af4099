"""Sees every torch operation that runs during a trace, and lets none freeze a value unnoticed.

An operation on traced values becomes a node; one on captured tensors alone would be computed now
and enter the kernel as a number that no longer follows the tensor: it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .custom import Boxed, boxed, is_custom, leaves_of, names_of, run_custom, unboxed
from .surface import SURFACE
from .symbols import Symbol

if TYPE_CHECKING:
    from .trace import Tracer
    from .traced import Traced

# What a captured tensor may be asked for while tracing: facts that its values cannot change.
_METADATA = frozenset(
    "shape ndim dtype device layout is_cuda is_cpu is_nested requires_grad size dim numel nelement"
    " stride is_contiguous is_floating_point element_size __len__ __hash__ storage_offset".split()
)
_CONSTANTS = frozenset(("tensor", "as_tensor", "scalar_tensor", "zeros", "ones", "full"))
_CONVERSIONS = frozenset(("bool", "int", "float", "index", "complex", "len", "iter", "contains"))

# What gives the same elements another shape: no computation, but an object the trace cannot follow.
_VIEWS = frozenset(
    "T mT H mH t data real detach alias view view_as reshape reshape_as flatten ravel unflatten"
    " transpose swapaxes swapdims permute movedim moveaxis squeeze unsqueeze expand expand_as"
    " broadcast_to contiguous select narrow diagonal unfold as_strided unbind chunk split"
    " tensor_split atleast_1d atleast_2d atleast_3d".split()
)


class Watch(TorchFunctionMode):
    """Sees every torch function that runs while a function of a variant is traced."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tracer, kwargs = self.tracer, kwargs or {}
        name, written = names_of(func)
        leaves = list(leaves_of((args, kwargs)))
        if any(isinstance(leaf, Boxed) for leaf in leaves):
            found = self.__torch_function__(func, types, unboxed(args), unboxed(kwargs))
            return boxed(found, tracer)
        if is_custom(func):
            return run_custom(func, args, kwargs, tracer)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        traced = any(isinstance(leaf, torch.fx.Proxy | Symbol) for leaf in leaves)
        if not traced and name in _METADATA:
            return func(*args, **kwargs)
        bare = name.strip("_") if name.startswith("__") else name
        if bare == "getitem":
            return tracer.index(*args)
        if name == "embedding" and tensors and traced:  # of either order, by who calls it
            return tracer.index(tensors[0], next(a for a in args if a is not tensors[0]))
        if name.startswith("__") and bare in _CONVERSIONS:
            tracer.refuse_conversion(bare)
        if name in ("item", "tolist", "numpy", "__array__"):
            tracer.refuse(
                f"{written} would freeze the value of a captured tensor; use the tensor itself "
                "(a 0-d tensor is a scalar bound at launch), or take the number outside"
            )
        if traced or (tensors and bare in SURFACE and all(t.ndim == 0 for t in tensors)):
            return tracer.record(bare, args, kwargs, written)
        if not tensors and name in _CONSTANTS:
            return self.constant(func, args, kwargs, written)
        if tensors and name in _VIEWS:
            tracer.refuse(
                f"{written} takes a view of a captured tensor; do the view outside the function "
                "and capture the result"
            )
        tracer.refuse(
            f"{written} on captured tensors only would be frozen into the kernel at its present "
            "value; do it outside and capture the result, or index the tensor first and apply it "
            "to the element"
            if tensors
            else f"{written} makes a tensor inside the function; make it outside and capture it"
        )

    def constant(self, func: Any, args: Any, kwargs: Any, written: str) -> Traced:
        """A 0-d tensor made by the function itself: a number."""
        self.tracer.computing = True
        try:
            tensor = func(*args, **kwargs)
            number = None if tensor.ndim else tensor.item()
        finally:
            self.tracer.computing = False
        if number is None:
            self.tracer.refuse(
                f"{written} makes a tensor inside the function; make it outside and capture it"
            )
        return self.tracer.traced(number)


class NothingRuns(TorchDispatchMode):
    """Refuses what reached a torch kernel past `Watch`, such as a compiled or scripted function."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = list(leaves_of((args, kwargs or {})))
        if any(isinstance(leaf, Boxed) for leaf in leaves):
            return func(*args, **(kwargs or {}))  # they record it themselves
        if not self.tracer.computing and any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self.tracer.refuse(
                f"{func} on captured tensors only would be frozen into the kernel; do it outside"
            )
        return func(*args, **(kwargs or {}))
