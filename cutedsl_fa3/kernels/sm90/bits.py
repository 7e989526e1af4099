"""Which elements of a row of an accumulator lie within spans, a bit for each that a thread holds.

The compiler makes seven predicates of seven neighbouring bits at once, so that an element costs one
selection and little more, where asking the mask costs a comparison for each of its conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Int32

WORD = 32
EIGHT, PAIR = 8, 2  # columns of an accumulator, and those of them that a thread holds (wgmma.py)

Span = tuple[Any | None, Any | None]  # from low to below high; None is no end


class Bits:
    """`bits[c]`: whether a thread's c-th element of a row lies within one of some spans.

    Shape: spans as positions, `first` that of the first element, `count` elements: pairs of every
        eight positions.
    """

    def __init__(self, spans: Sequence[Span], first: Int32, count: int) -> None:
        words = range(0, count, WORD)
        self.words = [Int32(0) for _ in words]
        for span in spans:
            low, high = (None if end is None else in_front(Int32(end) - first) for end in span)
            for n, before in enumerate(words):
                size = min(WORD, count - before)
                found = Int32(-1) if high is None else _lowest(high, before, size)
                found = found if low is None else found & ~_lowest(low, before, size)
                self.words[n] = self.words[n] | found

    def but_for(self, all_of_them: Boolean) -> Bits:
        """The same, or none where the condition does not hold."""
        found = Bits((), Int32(0), 0)
        found.words = [cutlass.select_(all_of_them, word, Int32(0)) for word in self.words]
        return found

    def __getitem__(self, c: int) -> Boolean:
        word, bit = divmod(c, WORD)
        one = 1 << bit if bit < WORD - 1 else -(1 << bit)  # as a number with a sign
        return (self.words[word] & Int32(one)) != 0


def in_pairs(offsets: Sequence[int]) -> bool:
    """Whether elements lie as `Bits` takes them."""
    return tuple(offsets) == tuple(EIGHT * (c // PAIR) + c % PAIR for c in range(len(offsets)))


def in_front(distance: Int32) -> Int32:
    """How many elements lie in front of a position so far behind the first one."""
    distance = cutlass.max(distance, Int32(0))
    return distance // EIGHT * PAIR + cutlass.min(distance % EIGHT, Int32(PAIR))


def _lowest(count: Int32, before: int, size: int) -> Int32:
    """The bits of the first `count` elements, of a word of `size` with `before` in front of it."""
    here = cutlass.max(count - before, Int32(0)) if before else count
    some = (Int32(1) << cutlass.min(here, Int32(min(size, WORD - 1)))) - 1
    return some if size < WORD else cutlass.select_(here < WORD, some, Int32(-1))
