"""Which keys a mask visits, in words, by running the key arithmetic on text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .graph import Graph, Ref
from .keys import KeySet, QueryTile, key_sets
from .solve import LARGEST
from .summaries import equality, summaries
from .tiles import by_tile

Word = Any  # int or Sum


def differs_by_head(mask: Graph | None) -> bool:
    """Whether heads may see different keys, so that they cannot share a work tile."""
    return mask is not None and "h" in mask.inputs


@dataclass(frozen=True)
class Sum:
    """A sum of named values times numbers, plus a number."""

    terms: tuple[tuple[str, int], ...]
    const: int = 0

    def __str__(self) -> str:
        text = ""
        for name, factor in sorted(self.terms, key=lambda term: term[1] < 0):
            size = name if abs(factor) == 1 else f"{abs(factor)} * {name}"
            text += f" - {size}" if factor < 0 else f" + {size}"
        if self.const or not text:
            text += f" - {-self.const}" if self.const < 0 else f" + {self.const}"
        text = text[3:] if text.startswith(" + ") else f"-{text[3:]}"
        return text.replace(" + seqlen_k - seqlen_q", " + (seqlen_k - seqlen_q)")


def _sum(value: Word) -> Sum:
    return Sum((), int(value)) if isinstance(value, int) else value


def _simple(value: Sum) -> Word:
    return value if value.terms else value.const


def _named(text: str) -> Sum:
    return Sum(((text, 1),))


def _factor(value: Word) -> str:
    return f"({value})" if " " in str(value) else str(value)


class TextIntegers:
    """Key arithmetic on text: values are ints or sums of names, conditions are bools or text."""

    def add(self, a: Word, b: Word) -> Word:
        return self._combined(a, b, 1)

    def sub(self, a: Word, b: Word) -> Word:
        return self._combined(a, b, -1)

    def _combined(self, a: Word, b: Word, factor: int) -> Word:
        terms = dict(_sum(a).terms)
        for name, times in _sum(b).terms:
            terms[name] = terms.get(name, 0) + factor * times
        kept = tuple((name, times) for name, times in terms.items() if times)
        return _simple(Sum(kept, _sum(a).const + factor * _sum(b).const))

    def mul(self, a: Word, b: Word) -> Word:
        if isinstance(a, int):
            a, b = b, a
        if isinstance(b, int):
            return _simple(Sum(tuple((n, f * b) for n, f in _sum(a).terms if b), _sum(a).const * b))
        return _named(f"{_factor(a)} * {_factor(b)}")

    def floordiv(self, a: Word, b: int) -> Word:
        return a // b if isinstance(a, int) else _named(f"({_factor(a)} // {b})")

    def minimum(self, a: Word, b: Word) -> Word:
        return self._extreme("min", a, b)

    def maximum(self, a: Word, b: Word) -> Word:
        return self._extreme("max", a, b)

    def _extreme(self, name: str, a: Word, b: Word) -> Word:
        difference = self.sub(a, b)
        if isinstance(difference, int):
            return a if (difference < 0) == (name == "min") else b
        if b in (LARGEST, -LARGEST):
            return a  # keeps 32-bit sums safe; says nothing about the mask
        return _named(f"{name}({a}, {b})")

    def less(self, a: Word, b: Word) -> Any:
        difference = self.sub(a, b)
        return difference < 0 if isinstance(difference, int) else f"{a} < {b}"

    def where(self, condition: Any, a: Word, b: Word) -> Word:
        if isinstance(condition, bool):
            return a if condition else b
        return _named(f"({a} if {condition} else {b})")

    def and_(self, a: Any, b: Any) -> Any:
        if isinstance(a, bool):
            return b if a else False
        return self.and_(b, a) if isinstance(b, bool) else f"{a} and {b}"

    def or_(self, a: Any, b: Any) -> Any:
        return self.not_(self.and_(self.not_(a), self.not_(b)))

    def not_(self, a: Any) -> Any:
        return not a if isinstance(a, bool) else f"not ({a})"

    def load(self, capture: int, indices: tuple[Word, ...]) -> Word:
        inside = ", ".join(map(str, indices))
        return _named(f"t{capture}[{inside}]" if indices else f"t{capture}")


_TILE = QueryTile(*map(_named, QueryTile._fields))


def describe(mask: Graph | None) -> str:
    """Which keys the queries q0 to q1 of a tile visit, and which need no element mask."""
    ints = TextIntegers()
    keys = key_sets(mask, _TILE, ints)
    visited = _visited(keys.possible, ints)
    if mask is not None and by_tile(mask):
        return f"{visited}, tile by tile: {_decided(mask)}"
    return f"{visited}; {_unmasked(keys.hidden, ints)}"


def _decided(mask: Graph) -> str:
    """What says which of the candidates a tile of queries visits, and which are full."""
    found = [expression(s.graph) for s in summaries(mask) if s.given is None]
    if not found:
        return "the mask on the tile's ranges of q and k says which are visited and full"
    text = f"the ranges of {', '.join(found)} in each block say which are visited and full"
    pair = equality(mask)
    if pair is not None and len(found) > len(pair):
        text += f", others' ranges at both ends of {' and '.join(found[i] for i in pair)} too"
    return text


_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"},
    **{"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="},
    **{"and": "&", "or": "|", "xor": "^", "bit_and": "&", "bit_or": "|", "bit_xor": "^"},
    **{"shl": "<<", "shr": ">>"},
}


MOST_PARTS = 40  # of an expression that is still read


def expression(graph: Graph) -> str:
    """A graph's result as one expression; a long one is only said to be one."""
    parts: list[int] = []
    for node in graph.nodes:
        parts.append(1 + sum(parts[a.id] for a in node.operands if isinstance(a, Ref)))
    if parts[graph.output] > MOST_PARTS:
        return f"an expression of {' and '.join(sorted(graph.inputs))}"

    def text(value: Any, inside: bool = True) -> str:
        if not isinstance(value, Ref):
            return str(value)
        node = graph.nodes[value.id]
        if node.op in ("input", "const"):
            return str(node.args[0])
        if node.op == "load":
            indices = ", ".join(text(a, False) for a in node.operands)
            return f"t{node.args[0]}[{indices}]" if indices else f"t{node.args[0]}"
        if node.op in _INFIX:
            joined = f" {_INFIX[node.op]} ".join(map(text, node.operands))
            return f"({joined})" if inside else joined
        if node.op in ("to_int", "to_float"):
            return text(node.args[0], inside)
        return f"{node.op}({', '.join(text(a, False) for a in node.operands)})"

    return text(Ref(graph.output), False)


def most_spans(mask: Graph | None) -> int:
    """How many separate spans of visible keys a tile of queries may have."""
    seen = key_sets(mask, _TILE, TextIntegers()).possible
    return len(seen.middles) + (seen.left is not None) + (seen.right is not None)


def most_edges(mask: Graph | None) -> int:
    """How many separate spans of keys that need the element mask a tile of queries may have.

    The end of the sequence, which every tile may reach, is not among them.
    """
    hidden = key_sets(mask, _TILE, TextIntegers()).hidden
    return len(hidden.middles) + (hidden.left is not None) + (hidden.right is not None)


def ever_full(mask: Graph | None) -> bool:
    """Whether any key tile can do without the element mask."""
    return key_sets(mask, _TILE, TextIntegers()).hidden.left is not _TILE.seqlen_k


def sees_first_keys(mask: Graph | None) -> bool:
    """Whether the keys that a tile of queries may see begin with the first of the sequence."""
    return key_sets(mask, _TILE, TextIntegers()).possible.left is not None


def _visited(keys: KeySet, ints: TextIntegers) -> str:
    if keys.left is _TILE.seqlen_k:
        return "every k"
    parts = [] if keys.left is None else [f"[0, {ints.sub(keys.left, 1)}]"]
    parts += [_inclusive(low, high, ints) for low, high in keys.middles]
    parts += [] if keys.right is None else [f"[{keys.right}, {ints.sub(_TILE.seqlen_k, 1)}]"]
    return f"k in {' and '.join(parts)}" if parts else "no k"


def _unmasked(hidden: KeySet, ints: TextIntegers) -> str:
    if hidden.left is _TILE.seqlen_k:
        return "none full"
    low, high = hidden.left, hidden.right
    if low is None and high is None:
        text = "all full"
    elif low is None:
        text = f"full up to {ints.sub(high, 1)}"
    else:
        text = f"full from {low}" if high is None else f"full in {_inclusive(low, high, ints)}"
    apart = [_inclusive(*middle, ints) for middle in hidden.middles]
    return f"{text} outside {' and '.join(apart)}" if apart else text


def _inclusive(low: Word, high: Word, ints: TextIntegers) -> str:
    return f"[{low}, {ints.sub(high, 1)}]"
