"""The smallest change that makes a tensor map legal, found by trying all that are known.

A broken rule has a few single changes that mend it, each to the nearest legal value: the next
multiple, the fewest boxes, the fewest pieces. `remedies` follows them from one broken rule to the
next, cheapest first. Cost is compared in this order: bytes copied, tensor maps instead of one,
swizzle given up, instructions instead of one, bytes of memory, number of changes. So the first
remedy is the cheapest of all sequences of these changes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import retile
from .binding import Binding
from .relayout import (
    mend_address,
    mend_coordinates,
    mend_memory,
    mend_size,
    mend_type,
)
from .rerank import mend_dimensions, mend_rank
from .retile import Change, Step, code_of, mode

# Rules are mended in this order, since the later ones depend on the earlier.
MEND: dict[str, Callable[[Binding], list[Change]]] = {
    "memory as it lies": mend_memory,
    "rank": mend_rank,
    "tile dimensions": mend_dimensions,
    "data type": mend_type,
    "element size": mend_size,
    "tile rows": retile.mend_tile_rows,
    "tile columns": retile.mend_tile_columns,
    "tile bytes": retile.mend_tile_bytes,
    "interleave": mode("interleave", "none"),
    "swizzle": retile.mend_swizzle,
    "swizzle with interleave 32B": mode("interleave", "none"),
    "out-of-bounds fill": mode("oob_fill", "zeros"),
    "NaN fill of a floating type": mode("oob_fill", "zeros"),
    "L2 promotion": mode("l2_promotion", "128B"),
    "cache hint": mode("cache_hint", "evict_normal"),
    "prefetch": mode("prefetch", "descriptor"),
    "element stride": retile.mend_steps,
    "element stride of dimension 0": retile.mend_inner_step,
    "inner box within the swizzle span": retile.mend_span,
    "box extent": retile.mend_extent,
    "inner box bytes": retile.mend_inner_bytes,
    "box against element stride": retile.mend_step_of_box,
    "box bytes": retile.mend_box_bytes,
    "contiguous dimension": mend_memory,
    "address range": mend_address,
    "address alignment": mend_memory,
    "stride range": mend_memory,
    "stride alignment": mend_memory,
    "size": mend_coordinates,
    "int32 coordinates": mend_coordinates,
}
MOST_STEPS = 24
MOST_TRIED = 500
SHOWN = 3


@dataclass(frozen=True)
class Remedy:
    """Changes that together make a map legal, and what is then bound to what.

    `after` is None where nothing is left to copy: an empty tensor needs no map.
    """

    steps: tuple[Step, ...]
    after: Binding | None

    @property
    def copied(self) -> int:
        """Bytes that have to be written anew."""
        return sum(step.copied for step in self.steps)

    @property
    def code(self) -> str:
        """The changes as Python, where they can be said in the tensor's own library."""
        return code_of(self.steps)

    def __str__(self) -> str:
        return "; then ".join(step.words for step in self.steps)


def remedies(binding: Binding, limit: int = SHOWN) -> tuple[Remedy, ...]:
    """The cheapest ways to make a binding legal, the smallest first; none for a legal one."""
    if binding.legal:
        return ()
    if 0 in binding.tensor.shape:
        words = "launch nothing: the tensor is empty, and no map is needed"
        return (Remedy((Step("nothing", words),), None),)
    return tuple(itertools.islice(_cheapest(binding), limit))


def _cheapest(start: Binding) -> Iterator[Remedy]:
    """Legal ends of sequences of changes in the order of their cost, each set of kinds once."""
    count = itertools.count()  # a heap compares what is equal in cost by age
    heap = [(_cost(start, start, ()), next(count), start, ())]
    seen: set[tuple[str, ...]] = set()
    for _ in range(MOST_TRIED):
        if not heap:
            return
        _, _, binding, steps = heapq.heappop(heap)
        broken = {rule.name for rule in binding.rules() if not rule.ok}
        if not broken:
            kinds = tuple(step.kind for step in steps)
            if kinds not in seen:
                seen.add(kinds)
                yield Remedy(steps, binding)
            continue
        if len(steps) < MOST_STEPS:
            for step, after in _changes(binding, broken):
                done = (*steps, step)
                heapq.heappush(heap, (_cost(start, after, done), next(count), after, done))


def _changes(binding: Binding, broken: set[str]) -> list[tuple[Step, Binding]]:
    """What mends the first of the broken rules."""
    first = next((name for name in MEND if name in broken), None)
    return MEND[first](binding) if first else []


def _cost(start: Binding, after: Binding, steps: tuple[Step, ...]) -> tuple[int, ...]:
    given_up = max(0, start.swizzle.bits - after.swizzle.bits)
    copied = sum(step.copied for step in steps)
    memory = sum(step.memory for step in steps)
    return (copied, after.maps, given_up, after.pieces, memory, len(steps))
