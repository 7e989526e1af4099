"""nvdisasm's text as kernels, blocks and loops.

A loop is a set of blocks that control can go round in, found from the branches of the code, not
from where it lies: a strongly connected part of the flow is a loop, its header is where control
enters it, and what is still connected without the header is a loop within. So a wait that ptxas has
moved behind the end of the kernel counts where it is waited.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

_SECTION = re.compile(r'^\s*\.section\s+\.text\.([^\s,"]+)')
_LABEL = re.compile(r"^\s*([.$\w]+):\s*$")
# The address, the guard, the mnemonic with its modifiers, the operands; braces pair instructions.
_CODE = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+\{?\s*(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)\s*([^;]*?)\s*;"
)
_TARGET = re.compile(r"`\(([^)]+)\)")

JUMPS, INDIRECT, ENDS = ("BRA", "JMP"), ("BRX", "JMX", "BRXU", "JMXU"), ("EXIT", "RET", "KILL")


class SassError(ValueError):
    """Text that is no disassembly, or control flow that cannot be followed."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `opcode` with all its modifiers, `guard` as in @!P0, empty if there is none.

    `target` is the label that it names, if any.
    """

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def family(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> str | None:
        found = _TARGET.search(self.operands)
        return found[1] if found else None

    @property
    def conditional(self) -> bool:
        """Whether control may also go on behind it: a guard, or a predicate among its operands."""
        return bool(self.guard) or bool(_TARGET.sub("", self.operands).strip(" ,"))


@dataclass(frozen=True)
class Loop:
    """Blocks that control can go round in: all of them, and those of no loop within.

    `blocks` and `own` are numbers of blocks; `inner` are the loops within, by address.
    """

    header: int
    blocks: frozenset[int]
    inner: tuple[Loop, ...]

    @cached_property
    def own(self) -> frozenset[int]:
        return self.blocks.difference(*(loop.blocks for loop in self.inner))

    def walk(self) -> Iterator[Loop]:
        """This loop and those within it, outer before inner."""
        yield self
        for loop in self.inner:
            yield from loop.walk()


@dataclass(frozen=True)
class Function:
    """The code of one kernel, with the subroutines that it calls."""

    name: str
    code: tuple[Instruction, ...]
    labels: Mapping[str, int] = field(repr=False)

    @cached_property
    def blocks(self) -> tuple[tuple[Instruction, ...], ...]:
        """Instructions that are entered only at the first and left only at the last."""
        ends = (*self._starts[1:], len(self.code))
        return tuple(self.code[a:b] for a, b in zip(self._starts, ends, strict=True))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        starts = {0}
        for at, this in enumerate(self.code):
            if this.family in INDIRECT:
                raise SassError(f"{self.name}: {this.opcode} {this.operands} branches anywhere")
            if this.family in JUMPS or this.family in ENDS:
                starts.add(at + 1)
            if this.target is not None and this.target in self.labels:
                starts.add(self.labels[this.target])
        return tuple(sorted(start for start in starts if start < len(self.code)))

    @cached_property
    def following(self) -> tuple[tuple[int, ...], ...]:
        """The blocks that may run after each block."""
        at = {start: number for number, start in enumerate(self._starts)}
        following = []
        for number, block in enumerate(self.blocks):
            last, after = block[-1], []
            if last.family in JUMPS:
                place = self.labels.get(last.target or "")
                if place is None:
                    raise SassError(f"{self.name}: {last.opcode} {last.operands} has no target")
                after += [at[place]] if place in at else []  # none behind the last instruction
            goes_on = last.family not in (*JUMPS, *ENDS) or last.conditional
            if last.family in ENDS:
                goes_on = bool(last.guard)
            if goes_on and number + 1 < len(self.blocks):
                after.append(number + 1)
            following.append(tuple(dict.fromkeys(after)))
        return tuple(following)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The outermost loops, by the address of their headers."""
        return self._loops_in(frozenset(range(len(self.blocks))))

    def _loops_in(self, among: frozenset[int]) -> tuple[Loop, ...]:
        loops = []
        for part in components({b: self.following[b] for b in among}):
            if len(part) == 1 and not any(b in self.following[b] for b in part):
                continue
            entered = {
                b for a in range(len(self.blocks)) if a not in part for b in self.following[a]
            }
            header = min(part & entered, default=min(part))
            loops.append(Loop(header, part, self._loops_in(part - {header})))
        return tuple(sorted(loops, key=lambda loop: loop.header))

    def instructions(self, blocks: Iterable[int]) -> Iterator[Instruction]:
        """The instructions of these blocks, by address."""
        for number in sorted(blocks):
            yield from self.blocks[number]


def functions(sass: str) -> list[Function]:
    """The kernels of nvdisasm's text, in its order.

    Raises: SassError where there is none: an empty list would agree with everything.
    """
    found: list[Function] = []
    name, code, labels = "", [], {}
    for line in sass.splitlines():
        if section := _SECTION.match(line):
            _keep(found, name, code, labels)
            name, code, labels = section[1], [], {}
        elif instruction := _CODE.match(line):
            address, guard, opcode, operands = instruction.groups()
            code.append(Instruction(int(address, 16), guard or "", opcode, operands))
        elif label := _LABEL.match(line):
            labels[label[1]] = len(code)
    _keep(found, name, code, labels)
    if not found:
        raise SassError(f"no instruction in the disassembly, which begins: {sass[:200]!r}")
    return found


def _keep(found: list[Function], name: str, code: list[Instruction], labels: dict) -> None:
    if code:
        found.append(Function(name, tuple(code), labels))


def components(graph: Mapping[int, Iterable[int]]) -> list[frozenset[int]]:
    """The strongly connected parts of a graph; edges to nodes outside of it do not count.

    Source: Tarjan 1972, with a stack in place of the recursion.
    """
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    open_: list[int] = []
    parts: list[frozenset[int]] = []
    placed: set[int] = set()
    for root in graph:
        if root in order:
            continue
        todo = [(root, iter(graph[root]))]
        order[root] = low[root] = len(order)
        open_.append(root)
        while todo:
            node, rest = todo[-1]
            fresh = next((b for b in rest if b in graph and not _seen(b, node, order, low, placed)),
                         None)  # fmt: skip
            if fresh is not None:
                order[fresh] = low[fresh] = len(order)
                open_.append(fresh)
                todo.append((fresh, iter(graph[fresh])))
                continue
            todo.pop()
            if todo:
                low[todo[-1][0]] = min(low[todo[-1][0]], low[node])
            if low[node] == order[node]:
                at = open_.index(node)
                parts.append(frozenset(open_[at:]))
                placed.update(open_[at:])
                del open_[at:]
    return parts


def _seen(b: int, node: int, order: dict[int, int], low: dict[int, int], placed: set[int]) -> bool:
    """Whether b was met before; if its part is still open, node belongs to it too."""
    if b not in order:
        return False
    if b not in placed:
        low[node] = min(low[node], order[b])
    return True
