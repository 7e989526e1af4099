"""Which values of a graph follow from distances: integers that grow evenly with query and key.

Where one is converted to a float, a tile needs one conversion; its other elements follow by an
addition. Where captured tensors are read by them, elements at equal distances are one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from .graph import Graph, Ref

# Inputs by what they differ along.
ROW, COLUMN, ELEMENT = frozenset({"q", "lse"}), frozenset({"k"}), frozenset({"score", "o"})

MOST_STEPS = 64  # of an index with each query or key, so that its way over tiles is an Int32


class Steps(NamedTuple):
    """An integer node that grows by `q` with each query and by `k` with each key."""

    node: int
    q: int
    k: int
    magnitude: bool  # whether its absolute value is meant

    def ahead(self, queries: int, keys: int) -> int:
        """By how much it is larger so many queries and keys later."""
        return self.q * queries + self.k * keys


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


@lru_cache(maxsize=256)
def evenly_indexed(graph: Graph) -> dict[int, tuple[tuple[int, int], ...]]:
    """Loads, by node number, all of whose indices grow evenly: by how much with q and with k.

    Those of which no two elements of a tile are the same are left out.
    """
    found = {}
    for number, node in enumerate(graph.nodes):
        if node.op != "load" or not node.depends >= {"q", "k"}:
            continue
        grows = tuple(_steps(graph, index) for index in node.operands)
        if None not in grows and all(q == 0 or k == 0 for q, k in grows) is False:
            found[number] = grows
    return found


def along_last(grows: tuple[tuple[int, int], ...]) -> bool:
    """Whether of a load's indices only the last grows, and slowly; its steps are numbers then."""
    return not any(map(any, grows[:-1])) and max(map(abs, grows[-1])) <= MOST_STEPS


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
