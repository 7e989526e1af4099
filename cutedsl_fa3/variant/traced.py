"""The value that a function of a variant holds while it is traced, in place of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from .graph import Ref
from .rows import Partial, Row
from .surface import SURFACE

if TYPE_CHECKING:
    from .trace import Tracer

_TORCH_DTYPES = {"float": torch.float32, "int": torch.int32, "bool": torch.bool}


class Traced(torch.fx.Proxy):
    """A value of the function being traced; operators and torch functions on it make nodes.

    It is one number for each (b, h, q, k), or a row of them: elements of a captured tensor that is
    indexed in some of its dimensions.
    """

    tracer: Tracer
    value: Ref | Row | Partial

    def __init__(self, value: Ref | Row | Partial, tracer: Tracer) -> None:
        super().__init__(value, tracer)  # type: ignore[arg-type]
        self.value = value

    @property
    def dtype(self) -> torch.dtype:
        return _TORCH_DTYPES[self.tracer.dtype(self.value)]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return torch.Size(() if isinstance(self.value, Ref) else self.value.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self) -> str:
        if isinstance(self.value, Ref):
            return f"traced({self.tracer.builder.nodes[self.value.id]})"
        return f"traced({self.dtype}, shape {tuple(self.shape)})"

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
        if self.shape:
            return self.shape[0]
        self.tracer.refuse_conversion("len")

    def __hash__(self) -> int:
        self.tracer.refuse_conversion("hash")

    def __iter__(self) -> Iterator[Traced]:
        if self.shape:
            return iter([self[i] for i in range(self.shape[0])])
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
