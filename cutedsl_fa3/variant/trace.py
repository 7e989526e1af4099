"""Traces a function of a variant into a graph, once, when the Variant is made.

The function runs with traced values in place of its arguments (s, b, h, q and k of a score). While
it runs, every torch function passes through `Watch`: those on traced values become nodes, reads of
captured tensors become loads, and those whose result would be frozen without a word are refused. It
does not matter how the function reached a tensor: closure, global, default argument, attribute or
helper.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.fx

from cutedsl_fa3.errors import VariantError

from .captured import Captures
from .control_flow import construct, location
from .graph import CAPTURE_DTYPES, Builder, Graph, Ref, Value
from .ops import DType
from .rows import Partial, Row, picked, row_of
from .rows import entry as rows_entry
from .surface import SUPPORTED, SURFACE, WRITTEN
from .symbols import Symbol, active, current
from .traced import Traced
from .watch import NothingRuns, Watch

# By the role of a function, which is the name of its graph in a Variant.
PARAMETERS = {
    "score": ("s", "b", "h", "q", "k"),
    "mask": ("b", "h", "q", "k"),
    "weight": ("s",),
    "epilogue": ("o", "lse", "b", "h", "q"),
}


class Tracer(torch.fx.Tracer):
    """Makes a node of each operation as it happens, so that an error shows the user's own line."""

    def __init__(self, role: str, captures: list[torch.Tensor]) -> None:
        super().__init__()
        self.role = role
        self.builder = Builder()
        self.captures = Captures(captures, self.builder, self.refuse, self.argument)
        self.refusal: VariantError | None = None
        self.computing = False  # the tracer itself runs torch, to make a constant

    # Called by torch.fx.Proxy for each operator.
    def create_proxy(  # type: ignore[override]
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Any, *rest: Any, **more: Any
    ) -> Any:
        name = getattr(target, "__name__", str(target)).strip("_")
        if name == "getitem":
            return self.index(*args)
        return self.record(name, args, kwargs, WRITTEN.get(name, name))

    def refuse(self, problem: str) -> NoReturn:
        """Raises: VariantError with the user's line."""
        self.refusal = VariantError(f"{_said(self.role)} at {location()}: {problem}")
        raise self.refusal from None

    def refuse_conversion(self, asked_for: str) -> NoReturn:
        """Raises: VariantError naming the Python construct that needs one number."""
        written, instead = construct(asked_for)
        self.refuse(
            f"{written} needs one Python number, but a traced value stands for many; use {instead}"
        )

    def traced(self, value: Any) -> Any:
        """A value, row or tuple of rows as what the user's function holds."""
        if isinstance(value, tuple):
            return tuple(map(self.traced, value))
        if not isinstance(value, Ref | Row | Partial):
            value = self.builder.const(value)
        return Traced(value, self)

    def dtype(self, value: Value | Row | Partial) -> DType:
        """The type of a value, or of the values of a row."""
        if isinstance(value, Partial):
            return CAPTURE_DTYPES[self.captures.tensors[value.number].dtype]
        return self.builder.promoted(*row_of(value).values)

    def record(self, name: str, args: Any, kwargs: dict[str, Any], written: str) -> Any:
        """The node of a function that the user calls by this name."""
        if "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {**kwargs}
            del kwargs["input"]
        rows = any(isinstance(arg, Traced) and arg.shape for arg in (*args, *kwargs.values()))
        function = SURFACE.get(name) if not rows else None
        function = rows_entry(name, args) if function is None else function
        if function is None:
            self.refuse(
                f"{written} is not supported on traced values; supported are {SUPPORTED}"
                if not (name.endswith("_") or name in ("iadd", "setitem"))
                else f"{written} changes a value in place; write a new value instead"
            )
        values = [self.argument(arg, written, rows) for arg in args]
        named = {key: self.argument(arg, written, rows) for key, arg in kwargs.items()}
        try:
            return self.traced(function(self.builder, *values, **named))
        except VariantError as error:
            self.refuse(str(error))
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                self.refuse(f"{written} was called with arguments it does not take: {error}")
            raise

    def argument(self, arg: Any, written: str, rows: bool = False) -> Any:
        """An argument as a graph value or row; keywords such as a dtype pass through.

        A captured tensor as a whole is a row only beside other `rows`.
        """
        if isinstance(arg, Symbol):
            arg = arg.traced()
        if isinstance(arg, Traced):
            if arg.tracer is not self:
                self.refuse("a value of another trace was kept; a function must not store values")
            return self.captures.row(arg.value) if isinstance(arg.value, Partial) else arg.value
        if isinstance(arg, torch.Tensor):
            if arg.ndim and not rows:
                self.refuse(
                    f"{written} uses a captured tensor of shape {tuple(arg.shape)} as a whole; "
                    "index it to one element first, as in t[h]"
                )
            return self.captures.row(self.captures.whole(arg))
        if isinstance(arg, numbers.Integral) and not isinstance(arg, bool):
            return int(arg)
        if isinstance(arg, numbers.Real) and not isinstance(arg, bool):
            return float(arg)
        if type(arg).__name__ in ("bool_", "bool"):  # NumPy's has either name, by its version
            return bool(arg)
        return arg

    def index(self, base: Any, index: Any) -> Traced:
        """An element of a captured tensor, or a row of them."""
        if isinstance(base, torch.Tensor):
            return self.traced(self.captures.indexed(self.captures.whole(base), index))
        if isinstance(base, Traced) and isinstance(base.value, Partial):
            return self.traced(self.captures.indexed(base.value, index))
        if isinstance(base, Traced) and isinstance(base.value, Row):
            try:
                return self.traced(picked(base.value, index))
            except VariantError as error:
                self.refuse(str(error))
        self.refuse("a traced value is one number and cannot be indexed; index a tensor")


@contextmanager
def _tracing(tracer: Tracer) -> Any:
    previous = current()
    active.tracer = tracer
    try:
        with NothingRuns(tracer), Watch(tracer):
            yield
    finally:
        active.tracer = previous


def trace(function: Callable[..., Any], role: str, captures: list[torch.Tensor]) -> Graph:
    """The raw graph of a function; captured tensors are appended to `captures`.

    Raises: VariantError where the function cannot become a graph.
    """
    check_parameters(function, role)
    tracer = Tracer(role, captures)
    inputs = [
        tracer.traced(tracer.builder.input("score" if p == "s" else p)) for p in PARAMETERS[role]
    ]
    try:
        with _tracing(tracer):
            result = _result(tracer, function(*inputs), function)
    except VariantError:
        raise
    except Exception as error:
        if tracer.refusal is not None:  # a scripted function wraps it in an error of its own
            raise tracer.refusal from None
        if isinstance(error, RuntimeError | TypeError) and "Traced" in str(error):
            raise VariantError(
                f"{_said(role)} `{name_of(function)}` calls what takes real tensors only, such as "
                "a scripted function; valid are torch functions and Python functions made of them"
            ) from error
        raise
    return Graph(tuple(tracer.builder.nodes), result.id)


def name_of(function: Callable[..., Any]) -> str:
    """The function's name as its author wrote it."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.replace("_VariableFunctionsClass.", "torch.")


def form(role: str) -> str:
    """How a function of this role is called, as in `mask(b, h, q, k)`."""
    name = "f" if role == "weight" else role
    return f"{name}({', '.join(PARAMETERS[role])})"


_MEANT = {"score": "mask", "mask": "score"}  # what a function of the wrong arity may be


def check_parameters(function: Any, role: str) -> None:
    """Raises: VariantError for what cannot be called as a function of this role."""
    wanted = PARAMETERS[role]
    if not callable(function):
        given, hint = repr(function), ""
        if type(function).__name__ == "BlockMask":  # of FlexAttention
            given = "a BlockMask"
            hint = "; tiles are found in the mask itself: give its mask_mod, if that says it all"
        raise VariantError(f"{_said(role)} must be a function {form(role)}, not {given}{hint}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*wanted)
    except TypeError as error:
        hint = "; positions belong in score=, whose result f is given" if role == "weight" else ""
        if role in _MEANT:
            try:
                signature.bind(*PARAMETERS[_MEANT[role]])
                hint = f"; did you mean Variant({_MEANT[role]}=...)?"
            except TypeError:
                pass
        raise VariantError(
            f"{_said(role)} `{name_of(function)}{signature}` cannot be called as {form(role)}: "
            f"{error}{hint}"
        ) from None


def _said(role: str) -> str:
    return "f of Elementwise" if role == "weight" else role


def _result(tracer: Tracer, result: Any, function: Callable[..., Any]) -> Ref:
    role, b = tracer.role, tracer.builder
    value = tracer.argument(result, "the result") if result is not None else None
    named = f"{_said(role)} `{name_of(function)}`"
    if not isinstance(value, Ref | Row | bool | int | float):
        hint = "; is a `return` missing?" if result is None else ""
        raise VariantError(f"{named} returned {type(result).__name__}, not a traced value{hint}")
    if isinstance(value, Row):
        raise VariantError(
            f"{named} returned a row of shape {value.shape}, not one value; give one index for "
            "each dimension of a captured tensor, as in t[b, h], or reduce it, as in .sum(-1)"
        )
    dtype = b.dtype(value)
    if role == "mask" and dtype != "bool":
        raise VariantError(f"{named} returned {dtype}, not bool; compare it, as in `... != 0`")
    if role == "score" and dtype == "bool":
        raise VariantError(f"{named} returned bool, not a score; a condition belongs in mask=")
    value = value if role == "mask" else b.convert(value, "float")
    return value if isinstance(value, Ref) else b.const(value)
