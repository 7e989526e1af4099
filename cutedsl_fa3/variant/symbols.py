"""The sequence lengths as symbols: known only at launch, usable in any function of a variant.

`k <= q + (seqlen_k - seqlen_q)` is the causal mask aligned at the bottom right.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutedsl_fa3.errors import VariantError

if TYPE_CHECKING:
    from .trace import Tracer
    from .traced import Traced

active = threading.local()  # .tracer: the trace that runs in this thread


def current() -> Tracer | None:
    """The tracer at work in this thread, if any."""
    return getattr(active, "tracer", None)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator on the traced length."""
    return lambda self, *others: function(self.traced(), *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(other, self.traced())


class Symbol:
    """A length that is known only at launch: usable wherever the function computes with indices."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def traced(self) -> Traced:
        """The length as a traced value. Raises: VariantError outside a trace."""
        tracer = current()
        if tracer is None:
            raise VariantError(
                f"{self.name} has a value only inside a function of a variant, while "
                "Variant(...) traces it; outside, use the tensor's shape"
            )
        return tracer.traced(tracer.builder.input(self.name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.traced(), name)

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reached only outside a trace: inside, the mode comes first.
        next(a for a in args if isinstance(a, Symbol)).traced()

    __add__ = _forward(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = _forward(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __mul__ = _forward(operator.mul)
    __rmul__ = _reflected(operator.mul)
    __truediv__ = _forward(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _forward(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__ = _forward(operator.mod)
    __rmod__ = _reflected(operator.mod)
    __pow__ = _forward(operator.pow)
    __rpow__ = _reflected(operator.pow)
    __lshift__ = _forward(operator.lshift)
    __rlshift__ = _reflected(operator.lshift)
    __rshift__ = _forward(operator.rshift)
    __rrshift__ = _reflected(operator.rshift)
    __and__ = _forward(operator.and_)
    __rand__ = _reflected(operator.and_)
    __or__ = _forward(operator.or_)
    __ror__ = _reflected(operator.or_)
    __xor__ = _forward(operator.xor)
    __rxor__ = _reflected(operator.xor)
    __lt__ = _forward(operator.lt)
    __le__ = _forward(operator.le)
    __gt__ = _forward(operator.gt)
    __ge__ = _forward(operator.ge)
    __eq__ = _forward(operator.eq)  # type: ignore[assignment]
    __ne__ = _forward(operator.ne)  # type: ignore[assignment]
    __neg__ = _forward(operator.neg)
    __pos__ = _forward(operator.pos)
    __abs__ = _forward(operator.abs)
    __invert__ = _forward(operator.invert)
    __index__ = _forward(operator.index)
    __bool__ = _forward(bool)
    __int__ = _forward(int)
    __float__ = _forward(float)


seqlen_q = Symbol("seqlen_q")
seqlen_k = Symbol("seqlen_k")
