"""A traced kernel as plain nodes, cut down to what decides barriers and shared memory.

Nothing is described a second time: `read` takes the module that `cute.compile` would lower and
keeps, of each function, the operations that touch a barrier, shared memory or the registers of a
WGMMA, and whatever their operands and the branches around them are computed from. Arithmetic on
elements falls away.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

from .shapes import Kind, kind

EVENTS = frozenset(
    {
        "nvvm.mbarrier.init",
        "nvvm.mbarrier.arrive",
        "nvvm.mbarrier.arrive.expect_tx",
        "nvvm.mbarrier.expect_tx",
        "nvvm.mbarrier.try_wait.parity",
        "nvvm.mbarrier.wait.parity",
        "nvvm.barrier",
        "nvvm.barrier.cta.arrive",
        "nvvm.cluster.arrive",
        "nvvm.cluster.arrive.relaxed",
        "nvvm.cluster.wait",
        "nvvm.cp.async.bulk.commit.group",
        "nvvm.cp.async.bulk.wait_group",
        "nvvm.fence.proxy",
        "nvvm.wgmma.fence.aligned",
        "nvvm.wgmma.commit.group.sync.aligned",
        "nvvm.wgmma.wait.group.sync.aligned",
        "cute.gemm",
        "llvm.inline_asm",
        "cuda.launch_cfg.cluster_dim",
        "cuda.launch_ex",
    }
)
MOST_VIEWS = 200  # of a tensor, one of the other
# Whatever else orders threads or moves bytes is kept, and refused by name where it is executed.
ORDERING = re.compile(
    r"^(nvvm|cute_nvgpu)\..*(mbarrier|barrier|cp\.async|wgmma|tcgen05|cluster\.(arrive|wait)|bulk)"
)
HARMLESS = frozenset({"nvvm.fence.mbarrier.init", "nvvm.memory.barrier", "nvvm.bar.warp.sync"})
TOUCHING = frozenset(
    {
        "cute.copy",
        "cute.memref.load",
        "cute.memref.load_vec",
        "cute.memref.store",
        "cute.memref.store_vec",
    }
)
VIEWS = frozenset(
    {
        "cute.get_iter",
        "cute.make_view",
        "cute.slice",
        "cute.dice",
        "cute.recast_iter",
        "cute.add_offset",
        "cute.group_modes",
        "cute.logical_divide",
        "cute.zipped_divide",
        "cute.local_tile",
        "cute.coalesce",
        "cute.select",
        "cute.composition",
        "cute.tiled.copy.retile",
        "cute.tiled.copy.partition_S",
        "cute.tiled.copy.partition_D",
        "cute.tiled.mma.partition",
        "cute.mma.make_fragment",
        "builtin.unrealized_conversion_cast",
    }
)


class NotCovered(ValueError):
    """The kernel does something that the model does not follow; the message names it."""


@dataclass(slots=True)
class Block:
    """Straight-line nodes, with what they take and what they hand to the operation around them."""

    params: tuple[int, ...]
    nodes: list[Node]
    ends: tuple[int, ...] = ()


@dataclass(slots=True)
class Node:
    """One operation: values are numbers in the function's table."""

    op: str
    args: tuple[int, ...]
    outs: tuple[int, ...]
    arg_kinds: tuple[Kind, ...]
    out_kinds: tuple[Kind, ...]
    attrs: str
    blocks: list[Block] = field(default_factory=list)

    def attr(self, name: str) -> str:
        """One attribute as written; empty if there is none."""
        found = re.search(
            rf"\b{re.escape(name)} = (\[[^\]]*\]|array<[^>]*>|#[\w.]+<[^>]*>|\"[^\"]*\"|[^,}}>]+)",
            self.attrs,
        )
        return found[1] if found else ""


@dataclass
class Function:
    """One function of the module: the host's, or a kernel."""

    name: str
    params: tuple[int, ...]
    param_kinds: tuple[Kind, ...]
    body: Block
    constants: dict[int, Any]
    roots: dict[int, int]
    tracked: frozenset[int]


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
        roots, tracked = reader.cut(body)
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


class _Reader:
    """Numbers the values of one function and keeps the nodes that matter."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.kinds: dict[int, Kind] = {}
        self.constants: dict[int, Any] = {}
        self.made_by: dict[int, Node] = {}
        self.parents: dict[int, Node] = {}  # a node's id -> the operation around it
        self.owner: dict[int, tuple[Node, int, int]] = {}  # a block's parameter -> where it is

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

    def root(self, value: int, depth: int = 0) -> int | None:
        """The allocation that a register tensor is a view of, also through loops and branches."""
        node = self.made_by.get(value)
        if depth > MOST_VIEWS:
            return None
        if node is None:
            if value not in self.owner:
                return None
            around, _, index = self.owner[value]
            first = 2 if around.op == "scf.for" else 0
            if around.op not in ("scf.for", "scf.while") or first + index >= len(around.args):
                return None
            return self.root(around.args[first + index], depth + 1)
        if node.op == "cute.memref.alloca":
            return node.outs[0]
        if node.op in ("scf.for", "scf.while"):
            first = 3 if node.op == "scf.for" else 0
            return self.root(node.args[first + node.outs.index(value)], depth + 1)
        if node.op == "scf.if":
            ends = (block.ends[node.outs.index(value)] for block in node.blocks)
            found = (self.root(end, depth + 1) for end in ends)
            return next((root for root in found if root is not None), None)
        if node.op not in VIEWS:
            return None
        # What applies a tiled copy or product to a tensor has it as its first operand in memory.
        kinds = zip(node.args, node.arg_kinds, strict=True)
        tensor = next((a for a, k in kinds if k.name in ("memref", "ptr")), None)
        return None if tensor is None else self.root(tensor, depth + 1)

    def cut(self, body: Block) -> tuple[dict[int, int], frozenset[int]]:
        """Drop the nodes that decide nothing; what register tensors the rest works on."""
        nodes = list(_walk(body))
        for node in nodes:
            for place, block in enumerate(node.blocks):
                for index, param in enumerate(block.params):
                    self.owner[param] = (node, place, index)
        roots = {}
        for node in nodes:
            for value, what in zip(node.args, node.arg_kinds, strict=True):
                if what.name == "memref" and what.space == "rmem":
                    found = self.root(value)
                    if found is not None:
                        roots[value] = found
        registers = {
            roots[a] for node in nodes if node.op == "cute.gemm" for a in node.args if a in roots
        }
        keep = _Keep(self, nodes, roots, registers)
        keep.mark()
        _prune(body, keep.needed, roots, keep.tracked)
        return roots, frozenset(keep.tracked)


class _Keep:
    """Which nodes are needed, backwards from those with an effect."""

    def __init__(
        self, reader: _Reader, nodes: list[Node], roots: dict[int, int], registers: set[int]
    ) -> None:
        self.reader, self.nodes, self.roots, self.registers = reader, nodes, roots, registers
        self.needed: set[int] = set()
        self.values: set[int] = set()
        self.tracked: set[int] = set()
        self.work: list[int] = []
        self.owner = reader.owner

    def mark(self) -> None:
        for node in self.nodes:
            if self.effect(node):
                self.keep(node)
                self.want_all(node)
        while self.work:
            self.trace(self.work.pop())

    def effect(self, node: Node) -> bool:
        if node.op in EVENTS:
            return True
        if ORDERING.match(node.op) and node.op not in HARMLESS and "prefetch" not in node.op:
            return True
        if node.op in TOUCHING:
            spaces = {k.space for k in node.arg_kinds}
            if "smem" in spaces or any("tma" in k.name for k in node.arg_kinds):
                return True
            if any(self.roots.get(a) in self.registers for a in node.args):
                return True
            return node.op == "cute.memref.store" and (
                node.arg_kinds[0].space == "gmem" and node.arg_kinds[0].integer
            )
        return False

    def keep(self, node: Node | None) -> None:
        while node is not None and id(node) not in self.needed:
            self.needed.add(id(node))
            if node.op == "scf.if":
                self.want(node.args[0])
            elif node.op == "scf.for":
                for arg in node.args[:3]:
                    self.want(arg)
            elif node.op == "scf.while":
                self.want(node.blocks[0].ends[0])
            node = self.reader.parents.get(id(node))

    def want_all(self, node: Node) -> None:
        if touches(node):
            return
        for arg, what in zip(node.args, node.arg_kinds, strict=True):
            if what.name != "coord_tensor" and what.space != "rmem":
                self.want(arg)

    def want(self, value: int) -> None:
        what = self.reader.kinds[value]
        if value in self.values or what.known or what.opaque:
            return
        self.values.add(value)
        self.work.append(value)

    def trace(self, value: int) -> None:
        """Mark what `value` is computed from."""
        made = self.reader.made_by.get(value)
        if made is None:
            self.trace_param(value)
            return
        self.keep(made)
        if made.op == "scf.if":
            index = made.outs.index(value)
            for block in made.blocks:
                self.want(block.ends[index])
        elif made.op == "scf.for":
            index = made.outs.index(value)
            self.want(made.args[3 + index])
            self.want(made.blocks[0].ends[index])
            self.want(made.blocks[0].params[1 + index])
        elif made.op == "scf.while":
            self.want(made.blocks[0].ends[1 + made.outs.index(value)])
        else:
            for arg in made.args:
                self.want(arg)
            if made.op == "cute.memref.load" and made.arg_kinds[0].space == "rmem":
                self.track(self.roots.get(made.args[0]))

    def trace_param(self, value: int) -> None:
        if value not in self.owner:
            return  # a parameter of the function
        node, place, index = self.owner[value]
        self.keep(node)
        if node.op == "scf.for":
            if index > 0:
                self.want(node.args[2 + index])
                self.want(node.blocks[0].ends[index - 1])
        elif node.op == "scf.while":
            if place == 0:
                self.want(node.args[index])
                self.want(node.blocks[1].ends[index])
            else:
                self.want(node.blocks[0].ends[1 + index])

    def track(self, root: int | None) -> None:
        if root is None or root in self.tracked:
            return
        self.tracked.add(root)
        for node in self.nodes:
            if node.op == "cute.memref.store" and self.roots.get(node.args[0]) == root:
                self.keep(node)
                for arg in node.args:
                    self.want(arg)


def touches(node: Node) -> bool:
    """Whether a kept load, store or copy concerns registers only."""
    return node.op in TOUCHING and not any(
        k.space == "smem" or "tma" in k.name or (k.space == "gmem" and "store" in node.op)
        for k in node.arg_kinds
    )


def hands_over(function: Function) -> bool:
    """Whether a kernel has barriers or copies at all."""
    return any(
        node.op.startswith(("nvvm.mbarrier", "nvvm.barrier")) or "tma" in node.op
        for node in _walk(function.body)
    )


def _walk(block: Block) -> Any:
    for node in block.nodes:
        yield node
        for inner in node.blocks:
            yield from _walk(inner)


def _prune(block: Block, needed: set[int], roots: dict[int, int], tracked: set[int]) -> None:
    """Leave the needed nodes, and of neighbours that touch the same registers the first."""
    kept: list[Node] = []
    seen: set[tuple[int, bool]] = set()
    for node in block.nodes:
        if id(node) not in needed:
            continue
        if touches(node):
            mine = {roots[a] for a in node.args if a in roots}
            ways = {(root, "load" in node.op) for root in mine}
            if mine and ways <= seen and not mine & tracked:
                continue
            seen |= ways
        elif node.blocks or node.op in EVENTS:
            seen.clear()
        kept.append(node)
        for inner in node.blocks:
            _prune(inner, needed, roots, tracked)
    block.nodes = kept


def _integer(text: str, bits: int) -> int:
    word = text.split(":")[0].strip()
    if word in ("true", "false"):
        return int(word == "true")
    return int(word) & 1 if bits == 1 else int(word)
