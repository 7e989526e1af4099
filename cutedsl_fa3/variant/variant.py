"""A Variant: what the user wrote, as graphs and captured tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from cutedsl_fa3.errors import VariantError

from .graph import Graph
from .normalise import normalise
from .trace import PARAMETERS, trace

INTEGER_DIVISIONS = ("floordiv", "truncdiv", "mod", "fmod")


class Variant:
    """An attention variant in plain Python: what to do with a score, and which keys a query sees.

    `score(s, b, h, q, k)` returns the score used instead of s (scaled, natural units) and
    `mask(b, h, q, k)` whether query q sees key k; q and k are raw indices. The functions are traced
    here and not kept: code and Python numbers are frozen by value, captured tensors are kept by
    reference and read at each launch (a 0-d tensor is a scalar).

    Integer arithmetic is 32-bit: captured int64 elements saturate at +-(2^31 - 1), smaller integers
    are widened to int32; captured fp16 and bf16 elements are widened to fp32. Indices of captured
    tensors are clamped to the tensor at hidden positions. copy and deepcopy return the Variant
    itself, captured tensors being references; it cannot be pickled.

    Raises: VariantError where a function cannot become a graph.
    """

    __slots__ = ("__weakref__", "captures", "mask", "score")

    score: Graph | None
    mask: Graph | None
    captures: tuple[torch.Tensor, ...]

    def __init__(
        self,
        score: Callable[..., Any] | None = None,
        mask: Callable[..., Any] | None = None,
    ) -> None:
        found: list[torch.Tensor] = []
        raw = {
            role: trace(function, role, found)
            for role, function in (("score", score), ("mask", mask))
            if function is not None
        }
        used: list[int] = []
        graphs = {role: _checked(normalise(graph, used), role) for role, graph in raw.items()}
        object.__setattr__(self, "score", _unless(_is_identity, graphs.get("score")))
        object.__setattr__(self, "mask", _unless(_is_everything, graphs.get("mask")))
        object.__setattr__(self, "captures", tuple(found[number] for number in used))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Variant is a snapshot; make another one to change {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Variant is a snapshot; {name} cannot be deleted")

    def __copy__(self) -> Variant:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Variant:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Variant cannot be pickled: its captured tensors are references, which no other "
            "process can follow; send what it is made from and call Variant(...) there"
        )

    @property
    def text(self) -> str:
        """Canonical text: variants that generate the same code have the same text."""
        lines = [f"t{i}: {_described(tensor)}" for i, tensor in enumerate(self.captures)]
        for role, graph in (("score", self.score), ("mask", self.mask)):
            if graph is not None:
                lines += [f"{role}({', '.join(PARAMETERS[role])})"]
                lines += [f"  {line}" for line in graph.text.splitlines()]
        return "\n".join(lines) if lines else "plain attention"

    def __repr__(self) -> str:
        return f"Variant:\n{self.text}"


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}[{', '.join('?' * tensor.ndim)}]"


def _unless(holds: Callable[[Graph], bool], graph: Graph | None) -> Graph | None:
    return None if graph is None or holds(graph) else graph


def _is_identity(graph: Graph) -> bool:
    return graph.result.op == "input"


def _is_everything(graph: Graph) -> bool:
    return graph.result.op == "const" and graph.result.args == (True,)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _checked(graph: Graph, role: str) -> Graph:
    for node in graph.nodes:
        if node.op in INTEGER_DIVISIONS and node.dtype == "int" and _is_zero(node.args[1]):
            raise VariantError(
                f"{role} divides an integer by 0 ({node.op}), which has no value; valid are other "
                "divisors, and floats"
            )
        for value in (*node.operands, *(node.args if node.op == "const" else ())):
            if isinstance(value, int) and not -(2**31) <= value < 2**31:
                raise VariantError(
                    f"{role} uses the integer {value}; integers are 32-bit, so it must lie between "
                    f"{-(2**31)} and {2**31 - 1}"
                )
            if isinstance(value, float) and not math.isinf(value) and abs(value) > 3.5e38:
                raise VariantError(f"{role} uses {value!r}, which does not fit fp32")
    return graph
