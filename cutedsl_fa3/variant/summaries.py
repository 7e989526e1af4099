"""What a mask reads from memory by one position: its smallest and largest value in each block.

A mask such as `doc[q] == doc[k]` compares functions of one position. Their smallest and largest
values over a block of positions are few numbers, found in one pass; `tiles.py` puts them to the
mask in place of every element. What is computed here is int32, as in the kernel.

Where the mask asks for such an equality, the block's other values are also kept for its first and
last document alone: `(doc[q] == doc[k]) & (start[q] >= start[k])` compares within one document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from .evaluate import _Reader
from .graph import Graph, Node, Ref
from .intervals import COMPARISONS, HIGHEST, LOGIC, LOWEST, RULES
from .ops import Range

End = Literal["low", "high"]
POSITIONS = frozenset({"q", "k"})


@dataclass(frozen=True)
class Summary:
    """An integer or condition (as 0 or 1) of the mask: `graph` computes node `node`.

    With `given` (summary number, end), only positions count at which that summary, of the same
    position, has the value at this end of its range in the block.
    """

    node: int
    position: Literal["q", "k"]
    graph: Graph = field(repr=False, compare=False)
    given: tuple[int, End] | None = None


@lru_cache(maxsize=256)
def reached(mask: Graph) -> tuple[int, ...]:
    """The nodes whose ranges decide about a tile, each after those that it is computed from."""
    found: set[int] = set()
    pending = [mask.output]
    while pending:
        number = pending.pop()
        if number in found:
            continue
        found.add(number)
        if not _is_summary(mask, number):
            pending += _followed(mask, mask.nodes[number])
    return tuple(sorted(found))


def _followed(mask: Graph, node: Node) -> list[int]:
    """The operands whose ranges say something about the node's."""
    operands = [a.id for a in node.operands if isinstance(a, Ref)]
    if node.op in COMPARISONS or node.op == "to_int":
        known = all(mask.nodes[i].dtype != "float" for i in operands)
        known &= not any(isinstance(a, float) for a in node.operands)
    elif node.op == "load":
        known = node.dtype != "float"
    else:
        ruled = node.op in RULES or node.op in LOGIC or node.op == "where"
        known = ruled and node.dtype != "float"
    return operands if known else []


def _is_summary(mask: Graph, number: int) -> bool:
    node = mask.nodes[number]
    one = len(node.depends & POSITIONS) == 1
    return one and node.dtype != "float" and _reads_by_position(mask, number)


def _reads_by_position(graph: Graph, number: int) -> bool:
    """Whether a node is computed from elements that differ from position to position."""
    nodes = (graph.nodes[i] for i in _needed(graph, number))
    return any(node.op == "load" and node.depends & POSITIONS for node in nodes)


def _needed(graph: Graph, output: int) -> set[int]:
    """A node and all that it is computed from."""
    found, pending = set(), [output]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending += [a.id for a in graph.nodes[current].operands if isinstance(a, Ref)]
    return found


@lru_cache(maxsize=256)
def summaries(mask: Graph | None) -> tuple[Summary, ...]:
    """The largest parts of a mask that read memory by exactly one of q and k, in node order.

    Behind them, where the mask asks for an equality of two, what the others are at its ends.
    """
    if mask is None:
        return ()
    found = [
        Summary(i, "q" if "q" in mask.nodes[i].depends else "k", _part(mask, i))
        for i in reached(mask)
        if _is_summary(mask, i)
    ]
    pair = _equality(mask, {summary.node: i for i, summary in enumerate(found)})
    for summary in [s for i, s in enumerate(found) if pair and i not in pair]:
        key = next(i for i in pair if found[i].position == summary.position)
        found += [replace(summary, given=(key, end)) for end in ("low", "high")]
    return tuple(found)


def equality(mask: Graph | None) -> tuple[int, int] | None:
    """Of two summaries that are equal wherever the mask shows a key, the numbers: of q, of k."""
    whole = [s for s in summaries(mask) if s.given is None]
    return mask and _equality(mask, {summary.node: i for i, summary in enumerate(whole)})


def _equality(mask: Graph, numbers: dict[int, int]) -> tuple[int, int] | None:
    pending = [mask.output]
    while pending:
        node = mask.nodes[pending.pop()]
        operands = [a.id for a in node.operands if isinstance(a, Ref)]
        if node.op == "and":
            pending += reversed(operands)
        elif node.op == "eq" and len(operands) == 2 and all(i in numbers for i in operands):
            if mask.nodes[operands[0]].dtype == "int":
                of_q, of_k = sorted(operands, key=lambda i: "k" in mask.nodes[i].depends)
                return numbers[of_q], numbers[of_k]
    return None


def _part(graph: Graph, output: int) -> Graph:
    """The nodes that one node needs, and no others."""
    numbers = {old: new for new, old in enumerate(sorted(_needed(graph, output)))}
    nodes = []
    for old in numbers:
        node = graph.nodes[old]
        args = tuple(Ref(numbers[a.id]) if isinstance(a, Ref) else a for a in node.args)
        nodes.append(Node(node.op, args, node.dtype, node.depends))
    return Graph(tuple(nodes), numbers[output])


def per(mask: Graph | None, name: Literal["b", "h"]) -> bool:
    """Whether any summary depends on the batch entry (b) or the head (h)."""
    return any(name in s.graph.inputs for s in summaries(mask))


class _Reader32(_Reader):
    """Integers wrap at 32 bits, as in the kernel: the table must say what its element mask sees."""

    def node(self, node: Node, operands: list[Any]) -> torch.Tensor:
        value = super().node(node, operands)
        return value.to(torch.int32).long() if node.dtype == "int" else value


def table_shape(
    mask: Graph | None,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
) -> tuple[int, int, int, int] | None:
    """(batch or 1, heads or 1, blocks, 2 * summaries); None where there are no summaries.

    Words 2i and 2i + 1 are the smallest and largest value of summary i; a block's lie beside each
    other, so that one address finds them. Blocks are `tile_m` queries or `tile_n` keys, and as many
    as the side that has more of them.
    """
    found = summaries(mask)
    if not found:
        return None
    blocks = max(-(-seqlen_q // tile_m), -(-seqlen_k // tile_n))
    return (
        batch if per(mask, "b") else 1,
        heads if per(mask, "h") else 1,
        blocks,
        2 * len(found),
    )


@torch.no_grad()
def summarise(
    mask: Graph | None,
    captures: Sequence[torch.Tensor],
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
) -> torch.Tensor | None:
    """The table of `table_shape`, int32, by evaluating every position; empty blocks hold no value.

    Shape: as `table_shape` says; a block without positions has its smallest above its largest.
    """
    shape = table_shape(mask, batch, heads, seqlen_q, seqlen_k, tile_m, tile_n)
    if shape is None:
        return None
    device = captures[0].device
    batches, many, _, _ = shape
    table = torch.empty(shape, dtype=torch.int32, device=device)
    table[..., 0::2], table[..., 1::2] = HIGHEST, LOWEST
    inputs: dict[str, Any] = {
        "b": torch.arange(batches, device=device)[:, None, None],
        "h": torch.arange(many, device=device)[:, None],
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
    }
    found: list[torch.Tensor] = []  # each summary's values, as blocks of positions
    for i, summary in enumerate(summaries(mask)):
        size, length = (tile_m, seqlen_q) if summary.position == "q" else (tile_n, seqlen_k)
        here = -(-length // size)
        inputs[summary.position] = torch.arange(here * size, device=device)
        values = _Reader32(inputs, captures, torch.float32, None).read(summary.graph)
        values = values.to(torch.int32).expand(batches, many, -1).unflatten(-1, (here, size))
        found.append(values)
        counts = (inputs[summary.position] < length).unflatten(-1, (here, size))
        if summary.given is not None:
            key, end = summary.given
            extreme = table[:, :, :here, 2 * key + (end == "high"), None]
            counts = counts & (found[key] == extreme)
        table[:, :, :here, 2 * i] = torch.where(counts, values, HIGHEST).amin(-1)
        table[:, :, :here, 2 * i + 1] = torch.where(counts, values, LOWEST).amax(-1)
    return table


Read = Callable[[int, Any], Range]  # (summary number, block) -> smallest and largest value


def reader(mask: Graph | None, table: torch.Tensor | None, b: Any, h: Any) -> Read:
    """Reads a table for batch entries and heads: ints, or tensors that broadcast with blocks."""
    b, h = b if per(mask, "b") else 0, h if per(mask, "h") else 0

    def read(i: int, block: Any) -> Range:
        assert table is not None
        low, high = (table[b, h, block, word] for word in (2 * i, 2 * i + 1))
        return (low.long(), high.long()) if low.ndim else (low.item(), high.item())

    return read
