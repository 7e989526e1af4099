"""Between which numbers a float of a graph lies, whatever its inputs are.

A softmax over scores with limits needs no running maximum: where 2^score and its sums stay far from
the ends of fp32, the exponentials are taken of the scores as they are.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .graph import Builder, Graph, Node, Ref
from .normalise import normalise

if TYPE_CHECKING:
    from .variant import Variant

LOG2_E = math.log2(math.e)

# Base-2 scores within +-FARTHEST: sums of 2^20 products p * v stay within fp32 for |v| up to 2^27,
# and products of the smallest p are normal numbers for |v| from 2^-46 on.
FARTHEST = 80.0

Limits = tuple[float, float]  # what lies between may also be NaN
UNLIMITED: Limits = (-math.inf, math.inf)

_FUNCTIONS: dict[str, Limits] = {
    "tanh": (-1.0, 1.0),
    "sigmoid": (0.0, 1.0),
    "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0),
    "erf": (-1.0, 1.0),
}


@lru_cache(maxsize=256)
def limits(graph: Graph) -> Limits:
    """The limits of a graph's result, an infinite one where there is none."""
    found: list[Limits] = []
    for node in graph.nodes:
        operands = [found[a.id] if isinstance(a, Ref) else _of_number(a) for a in node.operands]
        found.append(_of_node(node, operands))
    return found[graph.output]


def _of_number(number: Any) -> Limits:
    return (float(number), float(number)) if isinstance(number, int | float) else UNLIMITED


def _of_node(node: Node, given: list[Limits]) -> Limits:
    if node.dtype != "float":
        return UNLIMITED
    if node.op in _FUNCTIONS:
        return _FUNCTIONS[node.op]
    if node.op == "const":
        return _of_number(node.args[0])
    if node.op == "where":
        return min(given[1][0], given[2][0]), max(given[1][1], given[2][1])
    if node.op in ("minimum", "maximum"):
        of_two = min if node.op == "minimum" else max
        return of_two(given[0][0], given[1][0]), of_two(given[0][1], given[1][1])
    if node.op == "neg":
        return -given[0][1], -given[0][0]
    if node.op in ("add", "sub"):
        a, b = given if node.op == "add" else (given[0], (-given[1][1], -given[1][0]))
        low, high = a[0] + b[0], a[1] + b[1]
        # inf - inf is NaN, which no comparison carries on: there is no limit then.
        return (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)
    if node.op == "mul" and all(map(math.isfinite, (*given[0], *given[1]))):
        ends = [x * y for x in given[0] for y in given[1]]
        return min(ends), max(ends)
    return UNLIMITED


def bounded(variant: Variant) -> bool:
    """Whether the softmax over a variant's scores needs no maximum, if P can hold 2^+-FARTHEST."""
    if variant.score is None or variant.weight is not None:
        return False
    low, high = limits(variant.score)
    return -FARTHEST <= low * LOG2_E and high * LOG2_E <= FARTHEST


def in_base_2(graph: Graph) -> Graph:
    """The same scores as base-2 logarithms; a number that multiplies them takes the factor in."""
    nodes, result = list(graph.nodes), graph.result
    numbers = [a for a in result.args if isinstance(a, float)] if result.op == "mul" else []
    builder = Builder()
    refs: list[Ref] = []
    for node in nodes:
        args = tuple(refs[a.id] if isinstance(a, Ref) else a for a in node.args)
        if node is result and numbers:
            args = tuple(a * LOG2_E if isinstance(a, float) else a for a in args)
        refs.append(builder.append(node.op, args, node.dtype))
    output = refs[graph.output]
    if not numbers:
        output = builder.append("mul", (output, LOG2_E), "float")
    captures = max(graph.captures, default=-1) + 1
    return normalise(Graph(tuple(builder.nodes), output.id), [*range(captures)])
