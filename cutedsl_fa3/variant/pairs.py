"""Layouts of captured tensors that make reading them cheap: two keys at a time, or no stride.

A thread's columns of an accumulator come in pairs of neighbours, the first even. An element read
at exactly k, or k plus an even number, in the last dimension, lies beside that of the next column,
and one load of twice the size reads both where its address allows it. Where neighbours in the last
dimension are neighbours in memory, an address is a base plus an index, without a multiplication.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .graph import Graph, Node, Ref

if TYPE_CHECKING:
    from .variant import Variant


def pairable(tensor: torch.Tensor) -> bool:
    """Whether an even number of elements from any row's begin lies where a pair can be read.

    That is: neighbours in the last dimension, an even number of them, other strides even, and a
    first element that is aligned to two.
    """
    return (
        tensor.ndim > 0
        and tensor.numel() > 0
        and tensor.stride(-1) == 1
        and tensor.shape[-1] % 2 == 0
        and all(stride % 2 == 0 for stride in tensor.stride()[:-1])
        and tensor.data_ptr() % (2 * tensor.element_size()) == 0
    )


@lru_cache(maxsize=256)
def read_along_k(graph: Graph) -> frozenset[int]:
    """Loads (node numbers) whose last index is k plus an even number, and no other depends on k."""
    return frozenset(
        i for i, node in enumerate(graph.nodes) if node.op == "load" and _along_k(graph, node)
    )


def _along_k(graph: Graph, node: Node) -> bool:
    indices = node.operands
    if not indices or offset_from_k(graph, indices[-1]) is None:
        return False
    others = (graph.nodes[i.id] for i in indices[:-1] if isinstance(i, Ref))
    return all(other.depends.isdisjoint({"k", "score"}) for other in others)


def offset_from_k(graph: Graph, index: object) -> int | None:
    """The even number by which an index differs from k; None if it is no such index."""
    if not isinstance(index, Ref):
        return None
    node = graph.nodes[index.id]
    if node.op == "input":
        return 0 if node.args == ("k",) else None
    if node.op not in ("add", "sub"):
        return None
    a, b = node.args
    if node.op == "add" and isinstance(a, int):
        a, b = b, a
    if not isinstance(b, int) or b % 2 or offset_from_k(graph, a) != 0:
        return None
    return b if node.op == "add" else -b


def pairs(variant: Variant) -> frozenset[int]:
    """The numbers of the captured tensors that are read along k and can be read in pairs.

    It depends on their layout and address at the time, so it is part of a kernel's key.
    """
    read = {
        graph.nodes[i].args[0] for graph in variant.graphs.values() for i in read_along_k(graph)
    }
    return frozenset(number for number in read if pairable(variant.captures[number]))


@lru_cache(maxsize=256)
def _read_by_position(graph: Graph) -> frozenset[int]:
    """The numbers of captured tensors whose last index depends on query or key."""
    loads = (node for node in graph.nodes if node.op == "load" and node.operands)
    return frozenset(
        node.args[0]
        for node in loads
        if isinstance(node.args[-1], Ref)
        and not graph.nodes[node.args[-1].id].depends.isdisjoint({"q", "k"})
    )


def dense(variant: Variant) -> frozenset[int]:
    """The numbers of the captured tensors read by query or key whose neighbours are adjacent.

    It depends on their layout at the time, so it is part of a kernel's key.
    """
    read = {number for graph in variant.graphs.values() for number in _read_by_position(graph)}
    return frozenset(number for number in read if variant.captures[number].stride(-1) == 1)
