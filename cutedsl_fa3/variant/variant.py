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


class Variant:
    """An attention variant in plain Python: what to do with a score, and which keys a query sees.

    `score(s, b, h, q, k)` returns the score used instead of s (scaled, natural units) and
    `mask(b, h, q, k)` whether query q sees key k; q and k are raw indices. The functions are traced
    here and not kept: code and Python numbers are frozen by value, captured tensors are kept by
    reference and read at each launch (a 0-d tensor is a scalar). Integers are 32-bit; captured fp16
    and bf16 elements are widened to fp32, small integers to int32.

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


def _checked(graph: Graph, role: str) -> Graph:
    for node in graph.nodes:
        for value in (*node.operands, *(node.args if node.op == "const" else ())):
            if isinstance(value, int) and not -(2**31) <= value < 2**31:
                raise VariantError(
                    f"{role} uses the integer {value}; integers are 32-bit, so it must lie between "
                    f"{-(2**31)} and {2**31 - 1}"
                )
            if isinstance(value, float) and not math.isinf(value) and abs(value) > 3.5e38:
                raise VariantError(f"{role} uses {value!r}, which does not fit fp32")
    return graph
