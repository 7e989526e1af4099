"""Single changes of a tile, a box or a mode that mend one broken rule, to the nearest legal value.

A change gives the binding as it is afterwards, words, and Python for a torch tensor called `x` and
what is said of it: its `tile` or `box`, `swizzle`, `element_strides` and modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cutedsl_fa3.layouts.smem import SMEM_CAPACITY
from cutedsl_fa3.layouts.swizzle import CHUNK, NONE
from cutedsl_fa3.layouts.tma_rules import SWIZZLES

from .binding import ATOM_ROWS, Binding, round_up

MOST = 256  # elements of a box along any dimension


@dataclass(frozen=True)
class Step:
    """One change in words, and in Python where that is possible.

    Units: `copied` bytes are written anew; `memory` is what the copy takes beyond its elements.
    """

    kind: str
    words: str
    code: str = ""
    copied: int = 0
    memory: int = 0


Change = tuple[Step, Binding]


def code_of(steps: tuple[Step, ...]) -> str:
    """The Python of several changes, a line each; empty where one of them has none.

    Once a tensor is split, what is done to `x` is done to each of `xs`.
    """
    if not all(step.code for step in steps):
        return ""
    lines: list[str] = []
    several = False
    for line in "\n".join(step.code for step in steps).splitlines():
        target, _, value = line.partition(" = ")
        if target == "xs" and several:
            line = f"xs = [part for x in xs for part in {value}]"
        elif target == "x" and several:
            line = f"xs = [{value} for x in xs]"
        several |= target == "xs"
        lines.append(line)
    return "\n".join(lines)


def torch_code(binding: Binding, text: str) -> str:
    """Python that holds for a torch tensor, and for nothing else."""
    return text if binding.tensor.library == "torch" else ""


# The tile, the box, and what shared memory looks like.


def with_tile(binding: Binding, rows: int, cols: int, words: str, kind: str = "tile") -> Change:
    """Another tile."""
    kind_of = getattr(binding.element, "__name__", "")
    code = f"tile = Tile({rows}, {cols}, cutlass.{kind_of})"
    return (
        Step(kind, words, code if binding.typed else f"tile = ({rows}, {cols})"),
        replace(binding, tile=(rows, cols)),
    )


def with_box(binding: Binding, box: dict[int, int], pieces: int, words: str, kind: str) -> Change:
    """Another box: new extents by dimension of the tensor."""
    extents = tuple(box.get(d, extent) for d, extent in enumerate(binding.box))
    after = replace(binding, given_box=extents, pieces=binding.pieces * pieces)
    return Step(kind, words, f"box = {extents}"), after


def fitted(extent: int, limit: int, multiple: int = 1) -> tuple[int, int]:
    """(boxes, extent of each): the fewest that cover `extent`, then the smallest multiple."""
    limit = max(multiple, limit // multiple * multiple)
    boxes = max(1, -(-extent // limit))
    return boxes, max(multiple, round_up(-(-extent // boxes), multiple))


def chunk(binding: Binding) -> int:
    """Elements in the 16 bytes that an inner box is a multiple of."""
    return max(1, CHUNK // binding.element_bytes)


def mend_tile_rows(binding: Binding) -> list[Change]:
    rows, cols = binding.tile
    more = max(ATOM_ROWS, round_up(rows, ATOM_ROWS))
    return [with_tile(binding, more, cols, f"use a tile of {more} rows instead of {rows}")]


def mend_tile_columns(binding: Binding) -> list[Change]:
    rows, cols = binding.tile
    more = max(chunk(binding), round_up(cols, chunk(binding)))
    words = f"use a tile of {more} columns instead of {cols}; those past the tensor arrive as fill"
    return [with_tile(binding, rows, more, words)]


def mend_tile_bytes(binding: Binding) -> list[Change]:
    rows, cols = binding.tile
    row = cols * binding.element_bytes
    most = SMEM_CAPACITY // row // ATOM_ROWS * ATOM_ROWS
    if most:
        return [with_tile(binding, most, cols, f"use a tile of {most} rows instead of {rows}")]
    most = SMEM_CAPACITY // (ATOM_ROWS * CHUNK) * chunk(binding)
    words = f"use a tile of {ATOM_ROWS} x {most} instead of {rows} x {cols}"
    return [with_tile(binding, ATOM_ROWS, most, words)]


def mend_extent(binding: Binding) -> list[Change]:
    box, said, pieces = {}, [], 1
    for d, extent in enumerate(binding.box):
        if not 1 <= extent <= MOST:
            multiple = chunk(binding) if d == binding.inner else step_of(binding, d)
            boxes, box[d] = fitted(max(extent, 1), MOST, multiple)
            pieces *= boxes
            several = f"{boxes} boxes" if boxes > 1 else "a box"
            said.append(f"{several} of {box[d]} along dimension {d} instead of {extent}")
    return [with_box(binding, box, pieces, f"use {', '.join(said)}", "split the box")]


def mend_inner_bytes(binding: Binding) -> list[Change]:
    inner = binding.box[binding.inner]
    boxes, more = fitted(max(inner, 1), MOST, chunk(binding))
    words = (
        f"make the box {more} elements instead of {inner} along dimension {binding.inner}: "
        f"{more * binding.element_bytes} bytes; those past the tensor arrive as fill"
    )
    return [with_box(binding, {binding.inner: more}, boxes, words, "pad the box")]


def mend_span(binding: Binding) -> list[Change]:
    """Split to the span of the swizzle, or take the narrowest that spans the box, or none."""
    size, extent, swizzle = binding.element_bytes, binding.box[binding.inner], binding.swizzle
    wider = next((s for s in SWIZZLES[1:] if s.span >= extent * size), NONE)
    words = f"use swizzle {wider.name} instead of {swizzle.name}"
    if wider is NONE:
        words += ": rows are then not spread over the banks"
    name = f"SW{wider.span}" if wider.bits else "NONE"
    step = Step("other swizzle", words, f"swizzle = {name}")
    other = step, replace(binding, given_swizzle=wider)
    if binding.given_box is None:
        return [other]
    boxes, each = fitted(extent, swizzle.span // size, chunk(binding))
    words = (
        f"use {boxes} boxes of {each} elements ({each * size} bytes) along dimension "
        f"{binding.inner} instead of one of {extent}"
    )
    return [with_box(binding, {binding.inner: each}, boxes, words, "split the box"), other]


def mend_box_bytes(binding: Binding) -> list[Change]:
    """Split the longest dimension until a block's shared memory holds the box."""
    counts = {d: -(-e // step_of(binding, d)) for d, e in enumerate(binding.box)}
    total = math.prod(counts.values()) * binding.element_bytes
    outer = [d for d in counts if d != binding.inner and counts[d] > 1]
    d = max(outer, key=counts.__getitem__, default=binding.inner)
    step = chunk(binding) if d == binding.inner else step_of(binding, d)
    most = SMEM_CAPACITY // (total // counts[d])
    boxes, each = fitted(binding.box[d], most * step_of(binding, d), step)
    words = f"use {boxes} boxes of {each} along dimension {d} instead of one of {binding.box[d]}"
    return [with_box(binding, {d: each}, boxes, words, "split the box")]


def step_of(binding: Binding, dim: int) -> int:
    """The element stride of a dimension, at least 1."""
    return max(1, binding.steps[dim]) if binding.steps else 1


def mend_steps(binding: Binding) -> list[Change]:
    steps = tuple(min(8, max(1, step)) for step in binding.steps or ())
    return [with_steps(binding, steps)]


def mend_inner_step(binding: Binding) -> list[Change]:
    steps = tuple(1 if d == binding.inner else s for d, s in enumerate(binding.steps or ()))
    return [with_steps(binding, steps)]


def with_steps(binding: Binding, steps: tuple[int, ...]) -> Change:
    words = f"use element strides {steps} instead of {binding.steps}"
    return Step("step", words, f"element_strides = {steps}"), replace(binding, steps=steps)


def mend_step_of_box(binding: Binding) -> list[Change]:
    box, pieces = {}, 1
    for d, extent in enumerate(binding.box):
        step = step_of(binding, d)
        if extent % step:
            boxes, box[d] = fitted(extent, MOST, step)
            pieces *= boxes
    said = ", ".join(f"{e} along dimension {d}" for d, e in box.items())
    words = f"use a box of {said}: a multiple of the element stride"
    return [with_box(binding, box, pieces, words, "pad the box")]


def mode(name: str, value: str) -> Callable[[Binding], list[Change]]:
    """A change of one field to its plain value."""

    def mend(binding: Binding) -> list[Change]:
        given = binding.modes.get(name)
        step = Step("mode", f"use {name} {value} instead of {given}", f"{name} = {value!r}")
        return [(step, replace(binding, modes={**binding.modes, name: value}))]

    return mend


def mend_swizzle(binding: Binding) -> list[Change]:
    row = binding.box[binding.inner] * binding.element_bytes
    named = next((s for s in SWIZZLES[1:] if s.span >= row), NONE)
    code = f"swizzle = {f'SW{named.span}' if named.bits else 'NONE'}"
    words = f"use swizzle {named.name} instead of {binding.swizzle.name}"
    return [(Step("other swizzle", words, code), replace(binding, given_swizzle=named))]
