"""The graph of one function of a variant: typed nodes in order, each used at least once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from cutedsl_fa3.errors import VariantError

from .ops import MARKS, OPS, DType

INPUTS: dict[str, DType] = {
    "score": "float",
    "b": "int",
    "h": "int",
    "q": "int",
    "k": "int",
    "seqlen_q": "int",
    "seqlen_k": "int",
    "o": "float",
    "lse": "float",
}

# What a captured tensor may hold, and as what its elements enter the graph.
CAPTURE_DTYPES: dict[torch.dtype, DType] = {
    torch.float64: "float",
    torch.float32: "float",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.int64: "int",
    torch.int32: "int",
    torch.int16: "int",
    torch.int8: "int",
    torch.uint8: "int",
    torch.bool: "bool",
}


LARGEST = 2**31 - 1  # captured int64 elements saturate here and at -LARGEST, in every reader


@dataclass(frozen=True)
class Ref:
    """The value of another node of the same graph."""

    id: int

    def __str__(self) -> str:
        return f"%{self.id}"


Value = Ref | bool | int | float


def literal(value: Any) -> str:
    """An argument as canonical text: `%3` for a node, repr for a number."""
    return str(value) if isinstance(value, Ref) else repr(value)


@dataclass(frozen=True)
class Node:
    """One value: an operation of `ops.OPS` (or a mark of `ops.MARKS`), or a source.

    Sources: ("input", (name,)), ("load", (capture, *indices)), ("const", (number,)).
    `depends` names the inputs that the value is a function of.
    """

    op: str
    args: tuple[Any, ...]
    dtype: DType
    depends: frozenset[str] = field(compare=False)

    @property
    def operands(self) -> tuple[Any, ...]:
        """The arguments that are values: nodes and numbers, not names or capture numbers."""
        if self.op in ("input", "const"):
            return ()
        return self.args[1:] if self.op == "load" else self.args

    def __str__(self) -> str:
        if self.op == "load":
            inside = ", ".join([f"t{self.args[0]}", *map(literal, self.args[1:])])
        elif self.op == "input":
            inside = self.args[0]
        else:
            inside = ", ".join(map(literal, self.args))
        return f"{self.op}({inside}): {self.dtype}"


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which each comes after its arguments; `output` is the result's id."""

    nodes: tuple[Node, ...]
    output: int

    @property
    def result(self) -> Node:
        return self.nodes[self.output]

    @cached_property
    def text(self) -> str:
        """Canonical text, one line for each node: equal text means equal code."""
        lines = [f"%{i} = {node}" for i, node in enumerate(self.nodes)]
        return "\n".join([*lines, f"return %{self.output}"])

    @cached_property
    def captures(self) -> tuple[int, ...]:
        """Numbers of the captured tensors that the graph reads, in order of first use."""
        return tuple(dict.fromkeys(n.args[0] for n in self.nodes if n.op == "load"))

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Names of the inputs that the result depends on."""
        return self.result.depends

    def __str__(self) -> str:
        return self.text


def dependencies(nodes: Sequence[Node], operands: Iterable[Any]) -> frozenset[str]:
    """The inputs that any of these operands depends on."""
    found: frozenset[str] = frozenset()
    for operand in operands:
        if isinstance(operand, Ref):
            found |= nodes[operand.id].depends
    return found


class Builder:
    """Appends typed nodes; promotion follows torch: bool < int < float."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[tuple[str, ...], Ref] = {}

    def dtype(self, value: Value) -> DType:
        """The type of a node or number."""
        if isinstance(value, Ref):
            return self.nodes[value.id].dtype
        if isinstance(value, bool):
            return "bool"
        if not isinstance(value, int | float):
            raise VariantError(f"{value!r} is neither a traced value nor a number")
        return "int" if isinstance(value, int) else "float"

    def append(self, op: str, args: tuple[Any, ...], dtype: DType) -> Ref:
        """The node with these arguments, shared with an equal one that exists."""
        key = (op, dtype, *map(literal, args))
        if key not in self._known:
            depends = frozenset(args) if op == "input" else dependencies(self.nodes, args)
            self.nodes.append(Node(op, args, dtype, depends))
            self._known[key] = Ref(len(self.nodes) - 1)
        return self._known[key]

    def input(self, name: str) -> Ref:
        return self.append("input", (name,), INPUTS[name])

    def const(self, number: bool | int | float) -> Ref:
        return self.append("const", (number,), self.dtype(number))

    def emit_const(self, number: Any, dtype: DType) -> Ref:
        """A number as a constant of this type."""
        return self.const({"bool": bool, "int": int, "float": float}[dtype](number))

    def load(self, capture: int, indices: tuple[Value, ...], dtype: DType) -> Ref:
        return self.append("load", (capture, *indices), dtype)

    def emit(self, name: str, *args: Value) -> Ref:
        """One operation of the table, its arguments promoted to a common type."""
        op = OPS[name]
        if len(args) != op.arity:
            raise VariantError(f"{name} takes {op.arity} values, not {len(args)}")
        head, values = (args[:1], args[1:]) if name == "where" else ((), args)
        common = "float" if op.accepts == ("float",) else self.promoted(*values)
        if common not in op.accepts:
            allowed = " or ".join(op.accepts)
            raise VariantError(f"{name} takes {allowed} arguments, not {common}")
        values = tuple(self.convert(value, common) for value in values)
        return self.append(name, (*head, *values), op.dtype(common))

    def mark(self, name: str, *args: Value) -> Value:
        """An operation of floats that carries a mark of its derivative; of others, without it."""
        plain = MARKS[name]
        if self.promoted(*args) != "float":
            return args[0] if plain is None else self.emit(plain, *args)
        return self.append(name, tuple(self.convert(value, "float") for value in args), "float")

    def promoted(self, *values: Value) -> DType:
        """The common type of these values."""
        types = {self.dtype(value) for value in values}
        return "float" if "float" in types else "int" if "int" in types else "bool"

    def convert(self, value: Value, dtype: DType) -> Value:
        """The value as another type, as `.float()`, `.int()` and `.bool()` do."""
        if self.dtype(value) == dtype:
            return value
        if not isinstance(value, Ref):
            return {"bool": bool, "int": int, "float": float}[dtype](value)
        if dtype == "bool":
            return self.emit("ne", value, self.convert(0, self.dtype(value)))
        return self.append(f"to_{dtype}", (value,), dtype)
