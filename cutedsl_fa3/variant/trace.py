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

from .control_flow import construct, location
from .graph import CAPTURE_DTYPES, Builder, Graph, Ref, Value
from .surface import SUPPORTED, SURFACE, WRITTEN
from .symbols import Symbol, active, current
from .watch import NothingRuns, Watch

# By the role of a function, which is the name of its graph in a Variant.
PARAMETERS = {
    "score": ("s", "b", "h", "q", "k"),
    "mask": ("b", "h", "q", "k"),
    "weight": ("s",),
    "epilogue": ("o", "lse", "b", "h", "q"),
}

_TORCH_DTYPES = {"float": torch.float32, "int": torch.int32, "bool": torch.bool}


class Traced(torch.fx.Proxy):
    """A value of the function being traced; operators and torch functions on it make nodes."""

    tracer: Tracer
    value: Ref

    def __init__(self, value: Ref, tracer: Tracer) -> None:
        super().__init__(value, tracer)  # type: ignore[arg-type]
        self.value = value

    @property
    def dtype(self) -> torch.dtype:
        return _TORCH_DTYPES[self.tracer.builder.dtype(self.value)]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return torch.Size(())

    def __repr__(self) -> str:
        return f"traced({self.tracer.builder.nodes[self.value.id]})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.tracer.record(name, (self, *args), kwargs, f".{name}()")

    def __getitem__(self, index: Any) -> Traced:
        return self.tracer.index(self, index)

    def __abs__(self) -> Traced:
        return self.tracer.record("abs", (self,), {}, "abs()")

    def __bool__(self) -> bool:
        self.tracer.refuse_conversion("bool")

    def __int__(self) -> int:
        self.tracer.refuse_conversion("int")

    def __float__(self) -> float:
        self.tracer.refuse_conversion("float")

    def __complex__(self) -> complex:
        self.tracer.refuse_conversion("complex")

    def __index__(self) -> int:
        self.tracer.refuse_conversion("index")

    def __len__(self) -> int:
        self.tracer.refuse_conversion("len")

    def __hash__(self) -> int:
        self.tracer.refuse_conversion("hash")

    def __iter__(self) -> Any:
        self.tracer.refuse_conversion("iter")

    def __contains__(self, item: Any) -> bool:
        self.tracer.refuse_conversion("contains")

    def __round__(self, digits: int | None = None) -> Any:
        self.tracer.refuse_conversion("round")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self.tracer.refuse("a NumPy function on a traced value; use the torch function")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        names = {"true_divide": "truediv", "floor_divide": "floordiv", "power": "pow"}
        name = names.get(ufunc.__name__, ufunc.__name__)
        if method != "__call__" or kwargs or ufunc.nin != 2 or name not in SURFACE:
            self.tracer.refuse(
                f"numpy.{ufunc.__name__} on a traced value; use torch.{ufunc.__name__}"
            )
        return self.tracer.record(name, inputs, {}, f"numpy.{ufunc.__name__}")


class Tracer(torch.fx.Tracer):
    """Makes a node of each operation as it happens, so that an error shows the user's own line."""

    def __init__(self, role: str, captures: list[torch.Tensor]) -> None:
        super().__init__()
        self.role = role
        self.builder = Builder()
        self.captures = captures
        self.numbers = {id(tensor): i for i, tensor in enumerate(captures)}
        self.partial: dict[int, tuple[int, tuple[Value, ...]]] = {}  # loads that lack indices
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

    def traced(self, value: Value) -> Traced:
        """The value as what the user's function holds."""
        return Traced(value if isinstance(value, Ref) else self.builder.const(value), self)

    def record(self, name: str, args: Any, kwargs: dict[str, Any], written: str) -> Any:
        """The node of a function that the user calls by this name."""
        if name not in SURFACE:
            self.refuse(
                f"{written} is not supported on traced values; supported are {SUPPORTED}"
                if not (name.endswith("_") or name in ("iadd", "setitem"))
                else f"{written} changes a value in place; write a new value instead"
            )
        if "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {**kwargs}
            del kwargs["input"]
        values = [self.argument(arg, written) for arg in args]
        named = {key: self.argument(arg, written) for key, arg in kwargs.items()}
        try:
            return self.traced(SURFACE[name](self.builder, *values, **named))
        except VariantError as error:
            self.refuse(str(error))
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                self.refuse(f"{written} was called with arguments it does not take: {error}")
            raise

    def argument(self, arg: Any, written: str) -> Any:
        """An argument as a graph value; keywords such as a dtype pass through."""
        if isinstance(arg, Symbol):
            arg = arg.traced()
        if isinstance(arg, Traced):
            return self.complete(arg)
        if isinstance(arg, torch.Tensor):
            return self.capture(arg, written)
        if isinstance(arg, numbers.Integral) and not isinstance(arg, bool):
            return int(arg)
        if isinstance(arg, numbers.Real) and not isinstance(arg, bool):
            return float(arg)
        if type(arg).__name__ in ("bool_", "bool"):  # NumPy's has either name, by its version
            return bool(arg)
        return arg

    def complete(self, value: Traced) -> Ref:
        """The value's node, which must be of this trace and, if a load, have all its indices."""
        if value.tracer is not self:
            self.refuse("a value of another trace was kept; a function must not store its values")
        if value.value.id in self.partial:
            number, indices = self.partial[value.value.id]
            self.refuse(
                f"a captured tensor of {self.captures[number].ndim} dimensions is indexed with "
                f"{len(indices)}; give one index for each dimension, as in t[b, h]"
            )
        return value.value

    def capture(self, tensor: torch.Tensor, written: str) -> Ref:
        """A captured tensor used as a value: only a 0-d one is, a scalar bound at launch."""
        if tensor.ndim:
            self.refuse(
                f"{written} uses a captured tensor of shape {tuple(tensor.shape)} as a whole; "
                "index it to one element first, as in t[h]"
            )
        return self.load(self.number(tensor), ())

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a captured tensor, the same each time it is used."""
        if id(tensor) not in self.numbers:
            self.check_storage(tensor)
            if tensor.dtype not in CAPTURE_DTYPES:
                allowed = ", ".join(str(dtype)[6:] for dtype in CAPTURE_DTYPES)
                self.refuse(
                    f"a captured tensor has dtype {str(tensor.dtype)[6:]}; convert it outside to "
                    f"one of {allowed}"
                )
            self.numbers[id(tensor)] = len(self.captures)
            self.captures.append(tensor)
        return self.numbers[id(tensor)]

    def check_storage(self, tensor: torch.Tensor) -> None:
        """Raises: VariantError for a tensor that has no elements to read."""
        if tensor.is_nested:
            self.refuse("a captured tensor is nested; valid are dense ones: pad it outside")
        shape = tuple(tensor.shape)
        if tensor.layout != torch.strided:
            layout = str(tensor.layout)[6:]
            self.refuse(
                f"a captured tensor of shape {shape} has layout {layout}; valid is a dense "
                "(strided) one: convert it outside, as with t.to_dense()"
            )
        if tensor.device.type == "meta":
            self.refuse(
                f"a captured tensor of shape {shape} is on device meta and holds no values; valid "
                "are tensors on a GPU, and on the CPU for the reference"
            )
        if tensor.numel() == 0:
            self.refuse(
                f"a captured tensor of shape {shape} has no elements; a kernel reads at least one, "
                "at hidden positions too: give it sizes of at least 1"
            )

    def load(self, number: int, indices: tuple[Value, ...]) -> Ref:
        return self.builder.load(number, indices, CAPTURE_DTYPES[self.captures[number].dtype])

    def index(self, base: Any, index: Any) -> Traced:
        """An element of a captured tensor; `t[b][h]` is `t[b, h]`."""
        if isinstance(base, torch.Tensor):
            number, first = self.number(base), ()
        elif isinstance(base, Traced) and base.value.id in self.partial:
            number, first = self.partial[base.value.id]
        else:
            self.refuse("a traced value is one number and cannot be indexed; index a tensor")
        given = index if isinstance(index, tuple) else (index,)
        sizes = self.captures[number].shape
        if len(first) + len(given) > len(sizes):
            self.refuse(
                f"a captured tensor of {len(sizes)} dimensions is indexed with "
                f"{len(first) + len(given)}"
            )
        indices = first + tuple(
            self.position(one, size) for one, size in zip(given, sizes[len(first) :], strict=False)
        )
        value = self.load(number, indices)
        if len(indices) < len(sizes):
            self.partial[value.id] = (number, indices)
        return Traced(value, self)

    def position(self, index: Any, size: int) -> Value:
        """One index as a graph value; a negative number counts from the end, as in torch."""
        if isinstance(index, slice) or index is None or index is Ellipsis:
            self.refuse(
                "slices, None and ... on a captured tensor are not supported: slice it outside, "
                "and index one element inside"
            )
        value = self.argument(index, "an index")
        if not isinstance(value, Ref | bool | int | float):
            self.refuse(f"{index!r} is not an index; use traced integers or Python ints")
        if self.builder.dtype(value) != "int":
            self.refuse(f"an index is {self.builder.dtype(value)}, not int; convert it with .int()")
        if isinstance(value, int):
            if not -size <= value < size:
                self.refuse(f"index {value} is out of range for a dimension of size {size}")
            return value % size
        return value


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
    except Exception:
        if tracer.refusal is not None:  # a scripted function wraps it in an error of its own
            raise tracer.refusal from None
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
        raise VariantError(f"{_said(role)} must be a function {form(role)}, not {function!r}")
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
    if not isinstance(value, Ref | bool | int | float):
        hint = "; is a `return` missing?" if result is None else ""
        raise VariantError(f"{named} returned {type(result).__name__}, not a traced value{hint}")
    dtype = b.dtype(value)
    if role == "mask" and dtype != "bool":
        raise VariantError(f"{named} returned {dtype}, not bool; compare it, as in `... != 0`")
    if role == "score" and dtype == "bool":
        raise VariantError(f"{named} returned bool, not a score; a condition belongs in mask=")
    value = value if role == "mask" else b.convert(value, "float")
    return value if isinstance(value, Ref) else b.const(value)
