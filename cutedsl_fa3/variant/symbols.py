"""The sequence lengths as symbols: known only at launch, usable in any score or mask.

`k <= q + (seqlen_k - seqlen_q)` is the causal mask aligned at the bottom right.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutedsl_fa3.errors import VariantError

if TYPE_CHECKING:
    from .trace import Traced, Tracer

active = threading.local()  # .tracer: the trace that runs in this thread


def current() -> Tracer | None:
    """The tracer at work in this thread, if any."""
    return getattr(active, "tracer", None)


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
                f"{self.name} has a value only inside a score or mask function, while "
                "Variant(...) traces it; outside, use the tensor's shape"
            )
        return tracer.traced(tracer.builder.input(self.name))

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


def _delegate(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def forward(self: Symbol, *others: Any) -> Any:
        return function(self.traced(), *others)

    return forward


def _delegate_reflected(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)
    return lambda self, other: function(other, self.traced())


_BINARY = "add sub mul truediv floordiv mod pow lshift rshift and_ or_ xor".split()
for _op in [*_BINARY, *"lt le gt ge eq ne neg pos abs invert index".split()]:
    setattr(Symbol, f"__{_op.strip('_')}__", _delegate(_op))
for _op in _BINARY:
    setattr(Symbol, f"__r{_op.strip('_')}__", _delegate_reflected(_op))
for _type in (bool, int, float):
    setattr(Symbol, f"__{_type.__name__}__", lambda self, _type=_type: _type(self.traced()))

seqlen_q = Symbol("seqlen_q")
seqlen_k = Symbol("seqlen_k")
