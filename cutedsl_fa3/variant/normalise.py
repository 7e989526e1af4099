"""Brings a graph into canonical form: equal meaning written differently should become equal text.

Constants fold, identities and equal subexpressions merge, dead nodes go, and nodes are numbered by
first use from the result. Arguments of commutative operations keep the order they were written in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from cutedsl_fa3.errors import VariantError

from .graph import Builder, Graph, Node, Ref, Value
from .ops import MARKS, OPS, DType

_TORCH: dict[DType, torch.dtype] = {
    "bool": torch.bool,
    "int": torch.int64,
    "float": torch.float32,
}


def normalise(graph: Graph, captures: list[int] | None = None) -> Graph:
    """The same function in canonical form; marks of derivatives stay (`plain` takes them off).

    `captures` collects the numbers of the captured tensors in order of first use; loads are
    renumbered to their position in it, so that two graphs given one list share the numbers.
    """
    builder = Builder()
    values: list[Value] = []
    for node in graph.nodes:
        args = tuple(values[a.id] if isinstance(a, Ref) else a for a in node.args)
        values.append(simplified(builder, node, args))
    output = as_ref(builder, values[graph.output])
    nodes, (found,) = renumbered(builder.nodes, [output], [] if captures is None else captures)
    return Graph(nodes, found.id)


def plain(graph: Graph) -> Graph:
    """The same function without marks of derivatives, as every reader but `derive` takes it."""
    if not any(node.op in MARKS for node in graph.nodes):
        return graph
    builder = Builder()
    values: list[Value] = []
    for node in graph.nodes:
        args = tuple(values[a.id] if isinstance(a, Ref) else a for a in node.args)
        values.append(simplified(builder, node, args, marks=False))
    captures = max(graph.captures, default=-1) + 1
    nodes, (found,) = renumbered(
        builder.nodes, [as_ref(builder, values[graph.output])], [*range(captures)]
    )
    return Graph(nodes, found.id)


def as_ref(builder: Builder, value: Value) -> Ref:
    """A value as a node: a number as a constant."""
    return value if isinstance(value, Ref) else builder.const(value)


def simplified(builder: Builder, node: Node, args: tuple[Any, ...], *, marks: bool = True) -> Value:
    """A node with these arguments, or what it comes to; without `marks` they are taken off."""
    if node.op in MARKS and not (marks and any(isinstance(a, Ref) for a in args)):
        plain_op = MARKS[node.op]
        if plain_op is None:
            return args[0]
        node = Node(plain_op, node.args, node.dtype, node.depends)
    if node.op == "const":
        return args[0]
    if node.op in ("input", "load"):
        return builder.append(node.op, args, node.dtype)
    if not any(isinstance(a, Ref) for a in args):
        return _folded(node, args)
    found = _identity(builder, node.op, args) or _integer_comparison(builder, node, args)
    return builder.append(node.op, args, node.dtype) if found is None else found[0]


def _folded(node: Node, args: tuple[Any, ...]) -> Value:
    """The value of an operation on numbers, computed as the kernel computes: fp32 and integers."""
    tensors = [torch.tensor(a, dtype=_TORCH[Builder().dtype(a)]) for a in args]
    try:
        return OPS[node.op].torch(*tensors).item()
    except RuntimeError:  # an integer division by zero
        raise VariantError(
            f"{node.op}{args} has no value; valid are other divisors, and floats"
        ) from None


def _identity(builder: Builder, op: str, args: tuple[Any, ...]) -> tuple[Value] | None:
    """What an operation on a value and a neutral or absorbing number comes to, if it is one."""
    if op == "where":
        condition, a, b = args
        if isinstance(condition, bool):
            return (a if condition else b,)
        return (a,) if a == b and type(a) is type(b) and isinstance(a, Ref) else None
    if op == "not" or op == "neg":
        inner = builder.nodes[args[0].id]
        return (inner.args[0],) if inner.op == op else None
    if len(args) != 2:
        return None
    a, b = args
    if op in ("and", "or"):
        return _logic(op, a, b)
    if op == "xor":
        return _xor(builder, a, b)
    if builder.dtype(a) == "int":
        return _integer_identity(op, a, b)
    return None


def _logic(op: str, a: Value, b: Value) -> tuple[Value] | None:
    absorbing = op == "or"
    for number, other in ((a, b), (b, a)):
        if isinstance(number, bool):
            return (number,) if number is absorbing else (other,)
    return (a,) if a == b else None


def _xor(builder: Builder, a: Value, b: Value) -> tuple[Value] | None:
    for number, other in ((a, b), (b, a)):
        if isinstance(number, bool):
            return (builder.emit("not", other) if number else other,)
    return None


def _integer_identity(op: str, a: Value, b: Value) -> tuple[Value] | None:
    neutral_right = {"add": 0, "sub": 0, "mul": 1, "floordiv": 1, "truncdiv": 1, "shl": 0, "shr": 0}
    if not isinstance(b, Ref) and neutral_right.get(op) == b:
        return (a,)
    if not isinstance(a, Ref) and ((op == "add" and a == 0) or (op == "mul" and a == 1)):
        return (b,)
    if op == "mul" and (a == 0 or b == 0):
        return (0,)
    if op == "mod" and b == 1:
        return (0,)
    if op == "sub" and a == b:
        return (0,)
    if op in ("minimum", "maximum") and a == b:
        return (a,)
    if op in ("eq", "le", "ge", "ne", "lt", "gt") and a == b:
        return (op in ("eq", "le", "ge"),)
    return None


_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def _integer_comparison(builder: Builder, node: Node, args: tuple[Any, ...]) -> tuple[Value] | None:
    """`q - k < 512 / 2` as the comparison of integers it means, so that its keys can be found.

    An int converted for the sake of a float number is compared without rounding it to fp32.
    """
    if node.op not in _MIRRORED:
        return None
    op, (a, b) = node.op, args
    if not isinstance(a, Ref):
        op, a, b = _MIRRORED[op], b, a
    if isinstance(b, Ref) or not isinstance(b, float) or builder.nodes[a.id].op != "to_float":
        return None
    inner = builder.nodes[a.id].args[0]
    if builder.dtype(inner) != "int":
        return None
    if math.isnan(b):
        return (op == "ne",)
    if math.isinf(b):
        return (op == "ne" or (op != "eq" and (op in ("lt", "le")) == (b > 0)),)
    if op in ("eq", "ne") and b != math.floor(b):
        return (op == "ne",)
    bound = math.ceil(b) if op in ("lt", "ge") else math.floor(b)
    return (builder.emit(op, inner, bound),)


def renumbered(
    nodes: Sequence[Node], outputs: Sequence[Ref], captures: list[int]
) -> tuple[tuple[Node, ...], list[Ref]]:
    """Only what the outputs need, in the order in which a reader from the first one meets it.

    Returns the nodes and the outputs among them; what only a later output needs comes later.
    """
    order: dict[int, int] = {}
    kept: list[Node] = []
    for output in outputs:
        stack = [(output.id, iter(nodes[output.id].operands))]
        while stack:
            current, operands = stack[-1]
            pending = next((a for a in operands if isinstance(a, Ref) and a.id not in order), None)
            if pending is not None:
                stack.append((pending.id, iter(nodes[pending.id].operands)))
                continue
            stack.pop()
            if current not in order:
                order[current] = len(kept)
                kept.append(_with_new_ids(nodes[current], order, captures))
    return tuple(kept), [Ref(order[output.id]) for output in outputs]


def _with_new_ids(node: Node, order: dict[int, int], captures: list[int]) -> Node:
    args = tuple(Ref(order[a.id]) if isinstance(a, Ref) else a for a in node.args)
    if node.op == "load":
        number: Any = node.args[0]
        if number not in captures:
            captures.append(number)
        args = (captures.index(number), *args[1:])
    return Node(node.op, args, node.dtype, node.depends)
