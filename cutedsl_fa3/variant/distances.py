"""Which floats of a graph are distances: integers that grow evenly with query and key, converted.

A tile needs one conversion for each of them; its other elements follow by an addition.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from .graph import Graph, Ref

# Inputs by what they differ along.
ROW, COLUMN, ELEMENT = frozenset({"q", "lse"}), frozenset({"k"}), frozenset({"score", "o"})


class Steps(NamedTuple):
    """An integer node that grows by `q` with each query and by `k` with each key."""

    node: int
    q: int
    k: int
    magnitude: bool  # whether its absolute value is meant


@lru_cache(maxsize=256)
def distances(graph: Graph) -> dict[int, Steps]:
    """Conversions to float, by node number, of what grows evenly with query and key."""
    found = {}
    for number, node in enumerate(graph.nodes):
        if node.op != "to_float" or not node.depends >= {"q", "k"}:
            continue
        inner = node.args[0].id
        magnitude = graph.nodes[inner].op == "abs"
        inner = graph.nodes[inner].args[0].id if magnitude else inner
        steps = _steps(graph, Ref(inner))
        if steps is not None:
            found[number] = Steps(inner, *steps, magnitude)
    return found


def _steps(graph: Graph, value: Any) -> tuple[int, int] | None:
    """By how much an integer grows with q and with k, if by the same everywhere."""
    if not isinstance(value, Ref):
        return 0, 0
    node = graph.nodes[value.id]
    if node.depends.isdisjoint(ROW | COLUMN | ELEMENT):
        return 0, 0
    if node.op == "input":
        return {"q": (1, 0), "k": (0, 1)}.get(node.args[0])
    parts = [_steps(graph, a) for a in node.operands]
    if node.op not in ("add", "sub", "neg", "mul") or None in parts:
        return None
    if node.op == "mul":
        factors = [a for a in node.args if not isinstance(a, Ref)]
        (a, b), (c, d) = parts  # one of them is that of the number, which does not grow
        return (factors[0] * (a + c), factors[0] * (b + d)) if factors else None
    if node.op == "neg":
        return -parts[0][0], -parts[0][1]
    sign = 1 if node.op == "add" else -1
    return parts[0][0] + sign * parts[1][0], parts[0][1] + sign * parts[1][1]
