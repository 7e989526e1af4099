"""Reads a traced kernel: the module that `cute.compile` would lower, as nodes.

Nothing is described a second time. The module is printed in MLIR's generic form, one operation a
line, because MLIR's own objects cannot be looked at without adding operations to it.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from .cut import Values, cut
from .program import Block, Function, Node, NotCovered
from .shapes import Kind, kind


def read(kernel: Any) -> dict[str, Function]:
    """The functions of a kernel object's traced program by name; the host's is "host".

    Raises: NotCovered; whatever `compile.program` raises.
    """
    from cutedsl_fa3.compile import program

    return read_module(program(kernel))


def read_module(bitcode: bytes) -> dict[str, Function]:
    """The functions of a module in MLIR's bytecode."""
    import cutlass.cute  # noqa: F401  (registers the dialects)
    from cutlass._mlir import ir

    with ir.Context():
        module = ir.Module.parse(bitcode)
        text = module.operation.get_asm(print_generic_op_form=True, assume_verified=True)
    return read_text(text)


def read_text(text: str) -> dict[str, Function]:
    """The functions of a module in MLIR's generic form: one operation a line."""
    lines = _Lines(text)
    found = {}
    for raw in lines:
        name = _OPERATION.match(raw)
        if name is None or name["op"] not in ("func.func", "cuda.kernel"):
            continue
        symbol = re.search(r'sym_name = "([^"]*)"', raw)
        key = "host" if name["op"] == "func.func" else symbol[1] if symbol else "kernel"
        reader = _Reader()
        (body,) = reader.regions(lines, None)
        kinds = tuple(reader.kinds[p] for p in body.params)
        roots, tracked = cut(reader, body)
        found[key] = Function(key, body.params, kinds, body, reader.constants, roots, tracked)
    return found


class _Lines:
    """The lines of a module without the aliases of types that stand before it."""

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        self.aliases = {}
        for line in lines:
            if not line.startswith("!"):
                continue
            name, _, meaning = line.partition(" = ")
            self.aliases[name] = meaning
        self.lines = [line.strip() for line in lines if not line.startswith(("!", "#"))]
        self.at = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self.at >= len(self.lines):
            raise StopIteration
        self.at += 1
        return self.lines[self.at - 1]

    def kind(self, text: str) -> Kind:
        return kind(self.aliases.get(text, text))


_OPERATION = re.compile(
    r'(?:(?P<outs>%\w+)(?::(?P<count>\d+))? = )?"(?P<op>[\w.]+)"\((?P<args>[^)]*)\)(?P<rest>.*)$'
)
_VALUE = re.compile(r"%[\w#]+")
_ENDS = ("scf.yield", "scf.condition", "func.return", "cuda.return")


@functools.cache
def split(text: str) -> tuple[str, ...]:
    """A list of types at its commas, those inside types left alone."""
    parts, depth, start, quoted = [], 0, 0, False
    for at, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif char in "<([{":
            depth += 1
        elif char in ")]}" or (char == ">" and text[at - 1] != "-"):
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return (*parts, last) if last else tuple(parts)


@functools.cache
def signature(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The operands' and the results' types from "(a, b) -> c"."""
    depth, quoted = 0, False
    for at, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif not quoted and char in "([{<":
            depth += 1
        elif not quoted and (char in ")]}" or (char == ">" and text[at - 1] != "-")):
            depth -= 1
            if depth == 0:
                break
    results = text[at + 1 :].partition("->")[2].strip()
    if results.startswith("("):
        results = results[1:-1]
    return split(text[1:at]), split(results)


class _Reader(Values):
    """Numbers the values of one function."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}
        self.constants: dict[int, Any] = {}

    def number(self, name: str, what: Kind) -> int:
        found = self.numbers[name] = len(self.numbers)
        self.kinds[found] = what
        return found

    def regions(self, lines: _Lines, parent: Node | None) -> list[Block]:
        """The blocks up to the line that closes an operation's regions; keeps that line's types."""
        blocks = [Block((), [])]
        for line in lines:
            if line.startswith("^"):
                blocks[-1].params = tuple(
                    self.number(name, lines.kind(what.strip()))
                    for name, _, what in (
                        p.partition(":")
                        for p in split(line[line.index("(") + 1 : line.rindex(")")])
                    )
                )
            elif line.startswith("}, {"):
                blocks.append(Block((), []))
            elif line.startswith("})"):
                self.closing = line[2:]
                return blocks
            else:
                self.line(line, lines, blocks[-1], parent)
        raise NotCovered("the traced program ends inside an operation")

    def line(self, line: str, lines: _Lines, block: Block, parent: Node | None) -> None:
        found = _OPERATION.match(line)
        if found is None:
            raise NotCovered(f"the traced program has a line of an unknown form: {line[:120]}")
        args = tuple(self.numbers[name] for name in _VALUE.findall(found["args"]))
        if found["op"] in _ENDS:
            block.ends = args
            return
        node = Node(found["op"], args, (), tuple(self.kinds[a] for a in args), (), "")
        if parent is not None:
            self.parents[id(node)] = parent
        rest = found["rest"]
        if rest.endswith("({"):
            node.blocks = self.regions(lines, node)
            rest += self.closing
        at = rest.rindex(" : (")
        node.attrs = rest[:at]
        results = [lines.kind(text) for text in signature(rest[at + 3 :])[1]]
        if found["outs"]:
            name = found["outs"]
            names = [f"{name}#{i}" for i in range(len(results))] if found["count"] else [name]
            node.outs = tuple(self.number(n, k) for n, k in zip(names, results, strict=True))
            node.out_kinds = tuple(results)
        for out in node.outs:
            self.made_by[out] = node
        if node.op == "arith.constant" and node.out_kinds[0].integer:
            self.constants[node.outs[0]] = _integer(node.attr("value"), node.out_kinds[0].bits)
        block.nodes.append(node)


def _integer(text: str, bits: int) -> int:
    word = text.split(":")[0].strip()
    if word in ("true", "false"):
        return int(word == "true")
    return int(word) & 1 if bits == 1 else int(word)
