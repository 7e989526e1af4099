"""The torch reader of a graph: one torch call for each node, broadcast over the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .graph import LARGEST, Graph, Node, Ref, Value
from .ops import OPS


def evaluate(
    graph: Graph,
    inputs: Mapping[str, torch.Tensor | int | float],
    captures: Sequence[torch.Tensor] = (),
    *,
    dtype: torch.dtype = torch.float32,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """The graph's value for these inputs, floats computed in `dtype`.

    Indices of captured tensors are clamped to the tensor, as in the kernel, because masked
    positions may lie outside; where `visible` (broadcastable) holds, they must be in range, and
    gradients reach captured tensors from there only. Captured int64 elements saturate at
    +-(2^31 - 1) and float64 ones are rounded to fp32, as in the kernel.

    Shape: the broadcast of the inputs that the graph depends on.
    Raises: IndexError for a visible index outside its captured tensor.
    """
    return _Reader(inputs, captures, dtype, visible).read(graph)


def evaluate_each(
    nodes: Sequence[Node],
    values: Sequence[Value],
    inputs: Mapping[str, torch.Tensor | int | float],
    captures: Sequence[torch.Tensor] = (),
    *,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Several values of common nodes, as `evaluate` gives each; nodes that none needs do not run.

    Shape: each the broadcast of the inputs that it depends on.
    """
    reader = _Reader(inputs, captures, dtype, None)
    found = reader.needed(nodes, [value.id for value in values if isinstance(value, Ref)])
    return [found[v.id] if isinstance(v, Ref) else reader.tensor(v) for v in values]


class _Reader:
    def __init__(
        self,
        inputs: Mapping[str, torch.Tensor | int | float],
        captures: Sequence[torch.Tensor],
        dtype: torch.dtype,
        visible: torch.Tensor | None,
    ) -> None:
        self.inputs = inputs
        self.captures = captures
        self.dtype = dtype
        self.visible = visible
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def read(self, graph: Graph) -> torch.Tensor:
        return self.needed(graph.nodes, [graph.output])[graph.output]

    def needed(self, nodes: Sequence[Node], outputs: Sequence[int]) -> dict[int, torch.Tensor]:
        """Values by node number, of these and of all that they are made of."""
        wanted, values = set(outputs), dict[int, torch.Tensor]()
        for number in reversed(range(len(nodes))):
            if number in wanted:
                wanted |= {a.id for a in nodes[number].operands if isinstance(a, Ref)}
        for number in sorted(wanted):
            node = nodes[number]
            operands = [values[a.id] if isinstance(a, Ref) else a for a in node.operands]
            values[number] = self.node(node, operands)
        return values

    def node(self, node: Node, operands: list[torch.Tensor | bool | int | float]) -> torch.Tensor:
        if node.op == "input":
            value = self.tensor(self.inputs[node.args[0]])
            return value.to(self.dtype) if node.dtype == "float" else value
        if node.op == "const":
            return self.tensor(node.args[0])
        tensors = [self.tensor(operand) for operand in operands]
        if node.op == "load":
            return self.load(node.args[0], tensors)
        if node.op == "to_float":
            return tensors[0].to(self.dtype)
        return OPS[node.op].torch(*tensors)

    def tensor(self, value: torch.Tensor | bool | int | float) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        # Filled where it lies: a copy from the host could not be part of a CUDA graph.
        dtype = self.dtype if isinstance(value, float) else None
        return torch.full((), value, dtype=dtype, device=self.device)

    def load(self, number: int, indices: list[torch.Tensor]) -> torch.Tensor:
        capture = self.captures[number]
        clamped = []
        for axis, (index, size) in enumerate(zip(indices, capture.shape, strict=True)):
            inside = index.clamp(0, size - 1)
            outside = index != inside
            if self.visible is not None and outside.any():
                self.check(number, axis, index, outside & self.visible)
            clamped.append(inside.long().to(capture.device))
        # As an operator: written as capture[...], an index of no dimension waits for its device.
        found = torch.ops.aten.index.Tensor(capture, clamped) if clamped else capture
        value = found.to(self.device)
        if value.is_floating_point():
            if value.requires_grad and self.visible is not None:
                value = torch.where(self.visible, value, value.detach())
            return (value.float() if value.dtype == torch.float64 else value).to(self.dtype)
        if value.dtype == torch.int64:
            return value.clamp(-LARGEST, LARGEST)
        return value if value.dtype == torch.bool else value.long()

    def check(self, number: int, axis: int, index: torch.Tensor, outside: torch.Tensor) -> None:
        if outside.any():
            found = torch.broadcast_to(index, outside.shape)[outside][0].item()
            raise IndexError(
                f"captured tensor t{number} of shape {tuple(self.captures[number].shape)} is read "
                f"at index {found} of dimension {axis}, outside it, where the result counts"
            )
