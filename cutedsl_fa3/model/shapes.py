"""What the types of a traced kernel say: nested integers, layouts, where a tensor lies.

A leaf of a tuple is an int, `None` where only the run knows it, `FREE` for the `_` of a slice, or a
`Basis` (the stride `64@1` of a tensor of coordinates).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

FREE = "_"
_TOKEN = re.compile(r"\s*(?:(\()|(\))|(,)|(_)|((?:\?(?:\{[^}]*\})?|-?\d+)(?:@\d+)*))")
_TYPE = re.compile(r"!?(?P<name>[\w.]+)(?:<(?P<body>.*)>)?$", re.DOTALL)
_QUOTED = re.compile(r'"([^"]*)"')


class Basis(NamedTuple):
    """A stride that moves a coordinate: `scale` along `path`."""

    scale: int | None
    path: str


class Layout(NamedTuple):
    """Shape and stride, congruent."""

    shape: Any
    stride: Any


@dataclass(frozen=True)
class Kind:
    """One type: its name, and by name what is in it.

    `value` is a tuple or Layout in which what only the run knows is None; `bits` is the element's
    size; `space` smem, gmem, rmem or empty; `swizzle` as written, or empty.
    """

    name: str
    text: str
    value: Any = None
    bits: int = 0
    space: str = ""
    swizzle: str = ""
    align: int = 1
    integer: bool = False

    @property
    def known(self) -> bool:
        """Whether the type alone says what a value of it is."""
        tuples = ("int_tuple", "coord", "shape", "stride", "layout", "tile", "static")
        return self.name in tuples and self.value is not None and not unknown(self.value)

    @property
    def opaque(self) -> bool:
        """Whether values of the type are not computed: floating-point numbers and vectors."""
        if self.name in ("memref", "ptr", "smem_desc_view"):
            return False
        return self.name == "vector" or (self.bits > 0 and not self.integer)


@functools.cache
def kind(text: str) -> Kind:
    """What a type's text says."""
    found = _TYPE.match(text)
    if found is None:
        return Kind("", text)
    name = found["name"].split(".")[-1] if text.startswith("!cute.") else found["name"]
    body = found["body"] or ""
    quoted = _QUOTED.findall(body)
    if text.startswith("vector"):
        return Kind("vector", text)
    if re.fullmatch(r"i\d+|index|f\d+|bf16|f\d+E.*", text):
        bits = 64 if text == "index" else element_bits(text)
        return Kind(text, text, bits=bits, integer=text[0] == "i")
    if name in ("int_tuple", "coord", "shape", "stride"):
        return Kind(name, text, parse_tuple(quoted[0]))
    if name == "layout":
        return Kind(name, text, parse_layout(quoted[0]))
    if name == "composed_layout":
        outer = quoted[0].split(" o ")[-1]
        return Kind(name, text, parse_layout(outer), swizzle=_swizzle(quoted[0]))
    if name == "tile":
        return Kind(name, text, parse_tile(quoted[0]))
    if name in ("memref", "ptr"):
        element = body.split(",")[0].strip()
        space = next((s for s in ("smem", "gmem", "rmem") if re.search(rf"\b{s}\b", body)), "")
        align = re.search(r"align<(\d+)>", body)
        return Kind(
            name,
            text,
            parse_layout(quoted[0]) if quoted else None,
            element_bits(element),
            space,
            _swizzle(body),
            int(align[1]) if align else 1,
            bool(re.fullmatch(r"i\d+", element)),
        )
    if name == "coord_tensor":
        return Kind(name, text, parse_layout(quoted[1]))
    if text.startswith("!cute_nvgpu.smem_desc_view"):
        return Kind("smem_desc_view", text, parse_layout(quoted[-1]), bits=128)
    return Kind(name, text)


def element_bits(name: str) -> int:
    """The size of an element type by its name."""
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else 0


def _swizzle(text: str) -> str:
    found = re.search(r"S<\d+,\d+,\d+>", text)
    return found[0] if found else ""


def swizzle_span(swizzle: str) -> int:
    """Bytes of the block within which a swizzle moves 16-byte chunks; 16 without one."""
    if not swizzle:
        return 16
    b, _, _ = (int(n) for n in re.findall(r"\d+", swizzle))
    return 16 << b


@functools.cache
def parse_tuple(text: str) -> Any:
    """The nested tuple that a type spells."""
    stack: list[list[Any]] = [[]]
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"tuple {text!r}: cannot be read from {text[at:]!r}")
        at = token.end()
        opened, closed, _, free, leaf = token.groups()
        if opened:
            stack.append([])
        elif closed:
            done = tuple(stack.pop())
            stack[-1].append(done)
        elif free:
            stack[-1].append(FREE)
        elif leaf:
            stack[-1].append(_leaf(leaf))
    return stack[0][0] if stack[0] else ()


def _leaf(text: str) -> int | Basis | None:
    scale, _, path = text.partition("@")
    number = None if scale.startswith("?") else int(scale)
    return Basis(number, path) if path else number


@functools.cache
def parse_layout(text: str) -> Layout:
    """Shape and stride from "shape:stride"."""
    text = text.split(" o ")[-1]
    shape, _, stride = text.partition(":")
    return Layout(parse_tuple(shape), parse_tuple(stride))


@functools.cache
def parse_tile(text: str) -> Any:
    """The extents of a tile such as "[128:1;64:1]"; None for a mode that is left whole."""
    modes = text.strip("[]").split(";")
    sizes = tuple(None if mode == "_" else parse_layout(mode).shape for mode in modes)
    return sizes if text.startswith("[") else sizes[0]


def unknown(value: Any) -> bool:
    """Whether any leaf is left to the run."""
    if isinstance(value, Basis):
        return value.scale is None
    if isinstance(value, tuple):
        return any(unknown(v) for v in value)
    return value is None


def free(coord: Any) -> bool:
    """Whether a coordinate is the `_` that keeps a mode whole."""
    return isinstance(coord, str) and coord == FREE


def leaves(value: Any) -> list[Any]:
    """The leaves from left to right."""
    if isinstance(value, tuple) and not isinstance(value, Basis):
        return [leaf for v in value for leaf in leaves(v)]
    return [value]


def fill(template: Any, values: list[Any]) -> Any:
    """The template with its unknown leaves taken from `values`, in order; consumes them."""
    if isinstance(template, Basis):
        return Basis(values.pop(0), template.path) if template.scale is None else template
    if isinstance(template, Layout):
        shape = fill(template.shape, values)
        return Layout(shape, fill(template.stride, values))
    if isinstance(template, tuple):
        return tuple(fill(v, values) for v in template)
    return values.pop(0) if template is None else template


def size(shape: Any) -> Any:
    """The product of all extents."""
    total = 1
    for extent in leaves(shape):
        total = total * extent
    return total


def offset(coord: Any, layout: Layout) -> Any:
    """Where a coordinate lies, free modes at 0; None where strides are coordinates."""
    shape, stride = layout
    if free(coord):
        return 0
    if isinstance(coord, tuple):
        total = 0
        shapes = shape if isinstance(shape, tuple) else (shape,)
        strides = stride if isinstance(shape, tuple) else (stride,)
        for c, sh, st in zip(coord, shapes, strides, strict=False):
            part = offset(c, Layout(sh, st))
            if part is None:
                return None
            total = total + part
        return total
    if isinstance(shape, tuple):
        total, rest = 0, coord
        for place, (sh, st) in enumerate(zip(shape, stride, strict=True)):
            extent = size(sh)
            last = place == len(shape) - 1
            part = offset(rest if last else rest % extent, Layout(sh, st))
            if part is None:
                return None
            total = total + part
            rest = rest if last else rest // extent
        return total
    if isinstance(stride, Basis):
        return None
    return coord * stride


def kept(coord: Any, layout: Layout) -> Layout:
    """The modes of a layout that a slice leaves free."""
    if not isinstance(coord, tuple):
        return layout if free(coord) else Layout((), ())
    shapes, strides = [], []
    for c, sh, st in zip(coord, layout.shape, layout.stride, strict=False):
        if isinstance(c, tuple):
            inner = kept(c, Layout(sh, st))
            if inner.shape != ():
                shapes.append(inner.shape)
                strides.append(inner.stride)
        elif free(c):
            shapes.append(sh)
            strides.append(st)
    return Layout(tuple(shapes), tuple(strides))
