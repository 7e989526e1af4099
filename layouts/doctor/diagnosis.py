"""The TMA doctor: why a tensor map is legal or not, what it moves, and the smallest change.

`explain(tensor, tile)` answers for your own tensor and your own tile, legal or not. It holds the
two against the rules that kernels are held against (`binding`, `tma_rules`), searches the cheapest
change that makes all of them hold (`remedies`), and counts what an instruction moves (`sectors`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cutedsl_fa3.layouts.errors import LayoutError
from cutedsl_fa3.layouts.tma import TensorMap
from cutedsl_fa3.layouts.tma_rules import Rule

from .binding import Binding, bind
from .geometry import ABBREVIATIONS, Geometry
from .remedies import Remedy, remedies
from .sectors import SECTOR, Traffic, last_box, traffic

if TYPE_CHECKING:
    from cutedsl_fa3.layouts.swizzle import Swizzle
    from cutedsl_fa3.layouts.tile import Tile

_LABEL = 16  # columns of a field's name


def explain(
    tensor: object,
    tile: Tile | tuple | None = None,
    *,
    box: tuple[int, ...] | None = None,
    swizzle: Swizzle | str | None = None,
    rows: int | None = None,
    element_strides: tuple[int, ...] | None = None,
    name: str = "x",
    **modes: str,
) -> Diagnosis:
    """What TMA can do with a tensor and a tile, or a box: print it, or ask its fields.

    `tensor` is a torch tensor (a meta tensor too), an array of numpy or cupy, a `Geometry` where
    there is neither, or a `TensorMap`, which has its box. `tile` is a `Tile`, or (rows, cols) or
    (rows, cols, dtype) for one that may be illegal. A tile's columns run along the last dimension,
    its rows along dimension `rows`: of a matrix 0, else 1, as in (batch, seqlen, heads, head_dim).
    A box has no swizzle unless one is given; a tile has the widest that fits its rows. `modes` are
    further fields of `TensorMap`: interleave, oob_fill, l2_promotion, cache_hint, prefetch.

    Shape: box, element_strides: one entry for each of the tensor's dimensions, in its order.
    Raises: LayoutError for arguments that do not go together; never for an illegal map.
    """
    binding = bind(
        tensor,
        tile,
        box=box,
        swizzle=swizzle,
        rows=rows,
        element_strides=element_strides,
        **modes,
    )
    return Diagnosis(binding, name)


@dataclass(frozen=True)
class Diagnosis:
    """A tile or a box on a tensor, every rule with its verdict, and what would make them hold."""

    binding: Binding
    name: str = "x"

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Every rule with the value given, its limit and whether it holds.

        After a wrong type or number of dimensions those of sizes and strides mean nothing and are
        left out; the remedies are held against all.
        """
        return tuple(self.binding.rules())

    @property
    def broken(self) -> tuple[Rule, ...]:
        """The rules that do not hold."""
        return tuple(rule for rule in self.rules if not rule.ok)

    @property
    def legal(self) -> bool:
        """Whether every rule holds."""
        return not self.broken

    @property
    def map(self) -> TensorMap:
        """The tensor map as it was asked for."""
        return self.binding.map

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """The changes that make the map legal, the smallest first; none where it is."""
        return remedies(self.binding)

    @property
    def encoded(self) -> TensorMap:
        """The map that CuTe's `make_tiled_tma_atom` would hand to the hardware, saying nothing."""
        return encoded(self.map)

    @property
    def command(self) -> str:
        """The command line that prints this diagnosis, without the tensor."""
        tensor, b = self.binding.tensor, self.binding
        size = tensor.itemsize
        whole = all(s % size == 0 for s in tensor.strides)
        strides = [str(s // size) if whole else f"{s}B" for s in tensor.strides]
        options = [f"--shape {_commas(tensor.shape)} --strides {_commas(strides)}"]
        options.append(f"--dtype {ABBREVIATIONS.get(tensor.kind, tensor.kind)}")
        if b.tile:
            options.append(f"--tile {b.tile[0]}x{b.tile[1]}")
            options += [f"--rows {b.rows}"] if b.rows not in (None, _usual(tensor)) else []
            own = getattr(b.element, "__name__", b.element)
            options += [f"--tile-dtype {ABBREVIATIONS.get(own, own)}"] if own != tensor.kind else []
        else:
            options.append(f"--box {_commas(b.box)}")
        options += [f"--swizzle {b.given_swizzle}"] if b.given_swizzle is not None else []
        options += [f"--element-strides {_commas(b.steps)}"] if b.steps else []
        options += [f"--address 0x{tensor.address:x}"] if tensor.address is not None else []
        fields = [f"--{name.replace('_', '-')} {value}" for name, value in b.modes.items()]
        return " ".join(["python -m cutedsl_fa3 doctor", *options, *fields])

    def traffic(self, coordinate: tuple[int, ...] | None = None) -> Traffic:
        """What one instruction moves at a coordinate of the map, innermost first.

        Raises: LayoutError where the map is illegal.
        """
        return traffic(self.map, coordinate)

    def __str__(self) -> str:
        parts = [self._verdict(), self._fields(), self._judged()]
        if not self.legal:
            parts += [self._told(), self._changes()]
        after = self.binding if self.legal else next((r.after for r in self.remedies), None)
        if after is not None:
            parts.append(_moved(after, "" if self.legal else ", after the smallest change"))
        return "\n\n".join(part for part in parts if part)

    def _verdict(self) -> str:
        tensor, b = self.binding.tensor, self.binding
        what = f"tile {b.tile[0]} x {b.tile[1]}" if b.tile else f"box {b.box}"
        head = f"{self.name} {tensor.shape} of {tensor.kind}, {what}, swizzle {b.swizzle.name}: "
        if self.legal:
            return f"{head}legal, all {len(self.rules)} rules hold"
        names = ", ".join(rule.name for rule in self.broken)
        return f"{head}ILLEGAL, {len(self.broken)} of {len(self.rules)} rules broken ({names})"

    def _fields(self) -> str:
        tensor, tmap, b = self.binding.tensor, self.map, self.binding
        address = "not known yet" if tensor.address is None else f"0x{tensor.address:x}"
        first = f"where element ({', '.join('0' for _ in tensor.shape)}) lies"
        lines = [
            "The tensor map, its dimensions innermost first",
            _line("element", f"{tensor.kind}, {tensor.itemsize} bytes"),
            _line("address", f"{address}: {first}"),
        ]
        for number, axis in enumerate(b.axes):
            lines.append(_line(f"dimension {number}", _dimension(b, number, axis)))
        lines += [
            _line("box", _box(b)),
            _line("swizzle", _swizzled(tmap)),
            _line("interleave", tmap.interleave),
            _line("out of bounds", f"filled with {tmap.oob_fill}, and counted by the mbarrier"),
            _line("L2 promotion", f"{tmap.l2_promotion}: what a miss in L2 fetches at least"),
        ]
        return "\n".join(lines)

    def _judged(self) -> str:
        width = max(len(rule.name) for rule in self.rules)
        lines = ["Rules (numbers of dimensions are the map's)"]
        for rule in self.rules:
            state = "ok    " if rule.ok else "BROKEN"
            by = "" if rule.ok else f"; refused by {_BY[rule.source]}"
            lines.append(
                f"  {state} {rule.name:<{width}}  {rule.value} (allowed: {rule.limit}){by}"
            )
        if {"data type", "rank"} & {rule.name for rule in self.broken}:
            lines.append("  the rules of sizes, strides and boxes mean nothing before these hold")
        return "\n".join(lines)

    def _told(self) -> str:
        said = list(misread(self.binding))
        if not said:
            return ""
        lines = ["What CuTe would tell the hardware instead, without an error"]
        return "\n".join([*lines, *(f"  {line}" for line in said)])

    def _changes(self) -> str:
        if not self.remedies:
            lines = [f"  {rule.name}: {rule.fix}" for rule in self.broken]
            return "\n".join(["No change found that mends all; each for itself", *lines])
        lines = []
        for number, remedy in enumerate(self.remedies):
            lines.append("The smallest change" if number == 0 else "Or")
            lines += [f"  {step.words}" for step in remedy.steps]
            lines += [f"      {line}" for line in self._named(remedy.code).splitlines()]
        return "\n".join(lines)

    def _named(self, code: str) -> str:
        """Python about `x` as Python about the tensor's own name."""
        if self.name == "x" or not self.name.isidentifier():
            return code
        return _X.sub(self.name, code)


def refusal(diagnosis: Diagnosis, why: str) -> LayoutError:
    """A short error that carries the whole diagnosis, and names the command that prints it."""
    error = LayoutError(
        f"{diagnosis.name} {why}. Every rule and other ways out: print(error.diagnosis), or "
        f"{diagnosis.command}"
    )
    error.diagnosis = diagnosis
    return error


_X = re.compile(r"\bx\b")
_BY = {
    "driver": "the driver",
    "documented": "the driver's manual, though driver 580.159 lets it pass",
    "instruction": "the copy instruction or its use here, not by the driver",
}


def encoded(tmap: TensorMap) -> TensorMap:
    """What CuTe's `make_tiled_tma_atom` makes of a map: it rounds and wraps, and says nothing.

    Source: descriptors dumped from the DSL 4.8.1, which a test repeats.
    """
    return replace(
        tmap,
        address=tmap.address // 16 * 16,
        strides=tuple(stride % 2**40 // 16 * 16 for stride in tmap.strides),
        shape=tuple((size - 1) % 2**32 + 1 for size in tmap.shape),
    )


def misread(binding: Binding) -> list[str]:
    """What would be read in error if an illegal map were encoded, field by field."""
    tensor, asked = binding.tensor, binding.map
    if not 1 <= asked.rank <= 5:
        return []
    told, size, said = encoded(asked), tensor.itemsize, []
    if told.address != asked.address:
        early = asked.address - told.address
        said.append(
            f"address 0x{told.address:x} instead of 0x{asked.address:x}: everything would be read "
            f"{_amount(early, size)} early (refused where 16-byte alignment was assumed)"
        )
    for number, (given, kept) in enumerate(zip(asked.strides, told.strides, strict=True), start=1):
        if given != kept:
            away = given - kept
            word = "early" if away > 0 else "late"
            said.append(
                f"stride {kept} bytes instead of {given} in dimension {number}: index 1 along it "
                f"would be read {_amount(abs(away), size)} {word}, index i along it i times as far"
            )
    for number, (given, kept) in enumerate(zip(asked.shape, told.shape, strict=True)):
        if given != kept:
            past = "memory past the end would be read (refused where sizes are static)"
            if kept < given:
                past = "what lies past them would be filled (refused where sizes are not static)"
            said.append(f"{kept} elements instead of {given} in dimension {number}: {past}")
    inner = tensor.strides[binding.inner]
    if inner != size and tensor.shape[binding.inner] > 1:
        said.append(
            f"dimension 0 as contiguous: index 1 along it would be what lies {size} bytes on, not "
            f"{inner}"
        )
    return said


def _usual(tensor: Geometry) -> int:
    """The dimension of a tile's rows, unless another is given."""
    return 0 if len(tensor.shape) == 2 else 1


def _commas(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def _amount(nbytes: int, size: int) -> str:
    if nbytes % size:
        return f"{nbytes} bytes (no whole elements)"
    return f"{nbytes} bytes ({_count(nbytes // size, 'element')})"


def _count(number: int, thing: str) -> str:
    many = f"{thing}es" if thing.endswith("x") else f"{thing}s"
    return f"{number} {thing if number == 1 else many}"


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{text}"


def _dimension(binding: Binding, number: int, axis: int) -> str:
    tensor, tmap = binding.tensor, binding.map
    size, extent = tensor.shape[axis], tmap.box[number]
    role = ""
    if binding.tile:
        role = {binding.inner: ", the tile's columns", binding.rows: ", its rows"}.get(axis, "")
    apart = f"{tensor.strides[axis]} bytes apart"
    if axis == binding.inner:
        apart = "side by side" if tensor.strides[axis] == tensor.itemsize else f"{apart}!"
    elif tensor.strides[axis] == 0:
        apart = "all the same, stride 0"
    boxes = -(-size // extent) if extent > 0 else 0
    over = boxes * extent - size
    text = f"{_count(size, 'element')} {apart} (dimension {axis} of the tensor{role}); "
    text += f"{_count(boxes, 'box')} of {extent}" + (f", {over} past the end" if over else "")
    return text + (f"; every {tmap.steps[number]}th" if tmap.steps[number] != 1 else "")


def _box(binding: Binding) -> str:
    tmap, size = binding.map, binding.element_bytes  # the map's own has no size if unknown to TMA
    extents = " x ".join(map(str, tmap.box)) or "none"
    rows, inner = math.prod(tmap.box[1:]), tmap.box[0] * size if tmap.box else 0
    return f"{extents}: {_count(rows, 'row')} of {inner} bytes"


def _swizzled(tmap: TensorMap) -> str:
    swizzle = tmap.swizzle
    if swizzle.bits == 0:
        return "none: rows follow one another as they are"
    inner = tmap.box[0] * tmap.element_bytes if tmap.box else 0
    text = f"{swizzle.name}: 16-byte chunks move within {swizzle.span} bytes, "
    text += f"repeating every {swizzle.period}"
    if 0 < inner < swizzle.span:
        text += f"; a row of {inner} bytes takes {swizzle.span} of shared memory"
    return text


def _moved(binding: Binding, when: str) -> str:
    tmap = binding.map
    lines = [
        f"One instruction{when}",
        _line("into SMEM", f"{tmap.bytes_per_box} bytes, inside or outside of the tensor"),
    ]
    if tmap.interleave == "none":
        first, last = (0,) * tmap.rank, last_box(tmap)
        lines.append(_line("first box", str(traffic(tmap, first))))
        if last != first:
            lines.append(_line("last box", str(traffic(tmap, last))))
        lines += _whole(binding, tmap)
    if binding.tile:
        rows, cols = binding.tile
        size = rows * cols * tmap.element_bytes
        count = _count(size // max(tmap.bytes_per_box, 1), "instruction")
        lines.append(_line("a tile", f"{count}, {size} bytes"))
    return "\n".join(lines)


def _whole(binding: Binding, tmap: TensorMap) -> list[str]:
    """What all boxes together move, and what would save sectors."""
    count = math.prod(tmap.boxes) * binding.maps
    moved = count * tmap.bytes_per_box
    lines = []
    if set(tmap.steps) == {1}:
        wanted = math.prod(tmap.shape) * tmap.element_bytes * binding.maps
        share = f"{100 * (moved - wanted) / moved:.1f}%" if moved else "0%"
        filled = f"{moved - wanted} of them ({share}) fill"
        lines.append(_line("all boxes", f"{_count(count, 'instruction')}, {moved} bytes, {filled}"))
    here = traffic(tmap)
    odd = tmap.address % SECTOR or any(s % SECTOR for s in tmap.strides)
    if here.wasted and odd:
        text = f"{here.sectors} sectors where {here.best} would do: rows begin inside of sectors; "
        text += f"an address and strides that are multiples of {SECTOR} bytes avoid it"
        lines.append(_line("to save", text))
    return lines
