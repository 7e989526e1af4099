"""Masks that show each query a few spans of keys, so that no key needs to be asked for by itself.

A kernel then takes the spans of a row once, makes bits of them, and one bit says of an element
whether it is seen. A thread of the backward holds few keys and many queries, so it takes the spans
of queries that see a key: those of the mask with queries and keys exchanged.
"""

from __future__ import annotations

from functools import lru_cache

from .graph import Graph, Node
from .solve import solve

MOST_SPANS = 3  # each costs a row some ten instructions an end

_EXCHANGED = {"q": "k", "k": "q", "seqlen_q": "seqlen_k", "seqlen_k": "seqlen_q"}


@lru_cache(maxsize=256)
def in_spans(mask: Graph | None) -> bool:
    """Whether `keys.key_spans` says all of a mask, without reading captured tensors."""
    if mask is None:
        return True
    solved = solve(mask)
    return solved.exact and len(solved.possible) <= MOST_SPANS and not mask.captures


@lru_cache(maxsize=256)
def exchanged(mask: Graph | None) -> Graph | None:
    """The mask of the transposed problem: what shows query q key k shows query k key q."""
    if mask is None:
        return None
    return Graph(tuple(_renamed(node) for node in mask.nodes), mask.output)


def _renamed(node: Node) -> Node:
    depends = frozenset(_EXCHANGED.get(name, name) for name in node.depends)
    args = node.args
    if node.op == "input":
        args = (_EXCHANGED.get(*node.args, *node.args),)
    return Node(node.op, args, node.dtype, depends)
