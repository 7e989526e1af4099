"""What the kernel may compute of a graph in fewer instructions, found in the graph alone.

capped        cap * tanh(x) that is added up to the score: its absolute error counts, so tanh
              needs no series of its own near 0
spoils_row    values whose NaN reaches the result, so that it spoils the row whoever else has it
multiple      a score times one factor plus one offset: an FMA of the raw product
line          what grows evenly with query and key, times a factor: an FMA of the distance
known_signs   magnitudes of distances whose sign the mask settles
composed      a weight function after a score function, as one graph
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from .distances import COLUMN, ELEMENT, ROW, Steps, distances
from .graph import Builder, Graph, Node, Ref, Value
from .normalise import normalise

# The greatest error of tanh without its series is 2^-22 of the cap; in a score that is far below
# what P loses when it is rounded, as long as the cap is no larger than this. Caps below the
# smallest would take products of four denominators, divided by them, to the end of fp32.
SMALLEST_CAP, LARGEST_CAP = 0.125, 128.0

# Operations whose result is NaN if an argument is.
PASS_NAN = frozenset(
    "add sub mul div fmod minimum maximum neg abs exp exp2 log log2 sqrt rsqrt sin cos tanh "
    "sigmoid expm1 log1p erf gelu gelu_tanh silu softplus floor ceil trunc".split()
)


class Capped(NamedTuple):
    """cap * tanh(argument)."""

    argument: Value
    cap: float


def _terms(graph: Graph) -> Iterator[int]:
    """The nodes that the result is a sum or difference of, and all partial sums."""
    pending = [graph.output]
    while pending:
        number = pending.pop()
        yield number
        node = graph.nodes[number]
        if node.op in ("add", "sub", "neg") and node.dtype == "float":
            pending += [a.id for a in node.args if isinstance(a, Ref)]


@lru_cache(maxsize=256)
def capped(graph: Graph) -> dict[int, Capped]:
    """Terms of the result that are a number times tanh, by node number."""
    found = {}
    for number in _terms(graph):
        node = graph.nodes[number]
        if node.op != "mul":
            continue
        for cap, other in (node.args, node.args[::-1]):
            if not isinstance(cap, float) or not SMALLEST_CAP <= abs(cap) <= LARGEST_CAP:
                continue
            inner = graph.nodes[other.id]
            if inner.op == "tanh":
                found[number] = Capped(inner.args[0], cap)
    return found


@lru_cache(maxsize=256)
def spoils_row(graph: Graph) -> frozenset[int]:
    """Nodes whose NaN makes the result NaN.

    A result that is NaN, visible in its row, makes all of the row NaN: its sum if it is a score,
    the output in every column if it is a weight.
    """
    found: set[int] = set()
    pending = [graph.output]
    while pending:
        number = pending.pop()
        if number in found:
            continue
        found.add(number)
        node = graph.nodes[number]
        if node.op in PASS_NAN and node.dtype == "float":
            pending += [a.id for a in node.args if isinstance(a, Ref)]
    return frozenset(found)


def varies(graph: Graph, value: Value) -> bool:
    """Whether a value differs between elements of a tile."""
    if not isinstance(value, Ref):
        return False
    return not graph.nodes[value.id].depends.isdisjoint(ROW | COLUMN | ELEMENT)


@lru_cache(maxsize=256)
def multiples(graph: Graph) -> frozenset[int]:
    """Nodes that are the score times a factor plus an offset, both the same in the whole tile."""
    found: set[int] = set()
    for number, node in enumerate(graph.nodes):
        if node.op == "input":
            is_one = node.args[0] == "score"
        elif node.op in ("add", "sub", "mul", "neg", "div"):
            moving = [a for a in node.args if varies(graph, a)]
            is_one = len(moving) == 1 and moving[0].id in found
            is_one = is_one and not (node.op == "div" and node.args[0] != moving[0])
        else:
            is_one = False
        if is_one:
            found.add(number)
    return frozenset(found)


class Line(NamedTuple):
    """A float that grows evenly: by the slope of `steps` for each query and key.

    `factors`: nodes and numbers that the slope is the product of.
    """

    steps: Steps
    factors: tuple[Value, ...]


@lru_cache(maxsize=256)
def lines(graph: Graph) -> dict[int, Line]:
    """Distances times what is the same in the whole tile, by node number.

    Only their absolute error is small, against that of the distance at the tile's begin: for terms
    of a score.
    """
    found: dict[int, Line] = {}
    evenly = distances(graph)
    for number, node in enumerate(graph.nodes):
        if number in evenly and not evenly[number].magnitude:
            found[number] = Line(evenly[number], ())
        if node.dtype != "float" or node.op not in ("mul", "neg"):
            continue
        moving = [a for a in node.args if varies(graph, a)]
        if len(moving) != 1 or moving[0].id not in found:
            continue
        steps, factors = found[moving[0].id]
        others = tuple(a for a in node.args if a != moving[0]) if node.op == "mul" else (-1.0,)
        found[number] = Line(steps, (*factors, *others))
    return found


def composed(score: Graph | None, weight: Graph | None) -> Graph | None:
    """weight(score(s)), either of which may be missing."""
    if score is None or weight is None:
        return weight if score is None else score
    builder = Builder()
    scored = _copied(builder, score, None)
    output = _copied(builder, weight, scored)
    numbers = max((*score.captures, *weight.captures), default=-1) + 1
    return normalise(Graph(tuple(builder.nodes), output.id), [*range(numbers)])


def _copied(builder: Builder, graph: Graph, score: Ref | None) -> Ref:
    """A graph's nodes at the end of the builder's, `score` in place of its input; its result."""
    values: list[Ref] = []
    for node in graph.nodes:
        if score is not None and node.op == "input" and node.args == ("score",):
            values.append(score)
            continue
        args = tuple(values[a.id] if isinstance(a, Ref) else a for a in node.args)
        values.append(builder.append(node.op, args, node.dtype))
    return values[graph.output]


# Signs that a mask settles. A sum of integers is held as its addends with their coefficients; the
# addends are nodes as nested tuples, so that those of two graphs can be compared.

Sum = dict[Any, int]  # coefficients by addend; that of 1 is the number
DEPTH = 3  # of addends; deeper ones differ from those of another graph


def with_known_signs(graph: Graph, mask: Graph | None) -> Graph:
    """The same function where the mask holds, without magnitudes of what has one sign there."""
    if mask is None:
        return graph
    positive = [_sum(mask, a, 1, _sum(mask, b, -1, {1: -less})) for a, b, less in _at_least(mask)]
    nodes = list(graph.nodes)
    for number, node in enumerate(nodes):
        if node.op != "abs" or node.dtype != "int":
            continue
        for sign in (1, -1):
            if any(_settles(given, _sum(graph, node.args[0], sign, {})) for given in positive):
                nodes[number] = Node("mul", (node.args[0], sign), "int", node.depends)
                break
    return graph if nodes == list(graph.nodes) else _without_ones(nodes, graph.output)


def _without_ones(nodes: list[Node], output: int) -> Graph:
    numbers = max((n.args[0] for n in nodes if n.op == "load"), default=-1) + 1
    return normalise(Graph(tuple(nodes), output), [*range(numbers)])


def _settles(given: Sum, asked: Sum) -> bool:
    """Whether asked >= 0 follows from given >= 0: they differ by a number that is not negative."""
    rest = {a: asked.get(a, 0) - given.get(a, 0) for a in {*asked, *given}}
    return rest.pop(1, 0) >= 0 and not any(rest.values())


def _at_least(mask: Graph) -> Iterator[tuple[Value, Value, int]]:
    """(a, b, n) with a - b >= n wherever the mask holds."""
    pending = [mask.output]
    while pending:
        node = mask.nodes[pending.pop()]
        if node.op == "and":
            pending += [a.id for a in node.args if isinstance(a, Ref)]
        elif node.op in ("lt", "le", "gt", "ge", "eq") and _are_ints(mask, node.args):
            a, b = node.args
            if node.op in ("gt", "ge", "eq"):
                yield a, b, int(node.op == "gt")
            if node.op in ("lt", "le", "eq"):
                yield b, a, int(node.op == "lt")


def _are_ints(graph: Graph, values: tuple[Value, ...]) -> bool:
    return all(
        graph.nodes[v.id].dtype == "int" if isinstance(v, Ref) else type(v) is int for v in values
    )


def _sum(graph: Graph, value: Value, factor: int, found: Sum) -> Sum:
    """Adds factor * value to `found`."""
    if not isinstance(value, Ref):
        found[1] = found.get(1, 0) + factor * int(value)
        return found
    node = graph.nodes[value.id]
    if node.op in ("add", "sub"):
        _sum(graph, node.args[0], factor, found)
        return _sum(graph, node.args[1], factor if node.op == "add" else -factor, found)
    if node.op == "neg":
        return _sum(graph, node.args[0], -factor, found)
    if node.op == "mul" and any(type(a) is int for a in node.args):
        number, other = sorted(node.args, key=lambda a: isinstance(a, Ref))
        return _sum(graph, other, factor * number, found)
    addend = _nested(graph, value, DEPTH)
    found[addend] = found.get(addend, 0) + factor
    return found


def _nested(graph: Graph, value: Any, depth: int) -> Any:
    if not isinstance(value, Ref):
        return value
    node = graph.nodes[value.id]
    if depth == 0:
        return (id(graph), value.id)
    return (node.op, node.dtype, *(_nested(graph, a, depth - 1) for a in node.args))
