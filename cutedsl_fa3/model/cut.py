"""Cuts a function down to what decides barriers and shared memory; arithmetic on elements goes.

Kept are the operations that touch a barrier, shared memory or the registers of a WGMMA, and
whatever their operands and the branches around them are computed from.
"""

from __future__ import annotations

from .program import EVENTS, HARMLESS, ORDERING, TOUCHING, Block, Node, touches, walk
from .shapes import Kind

MOST_VIEWS = 200  # of a tensor, one of the other
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


class Values:
    """The values of a function: their types, what makes them, and what is around that."""

    def __init__(self) -> None:
        self.kinds: dict[int, Kind] = {}
        self.made_by: dict[int, Node] = {}
        self.parents: dict[int, Node] = {}  # a node's id -> the operation around it
        self.owner: dict[int, tuple[Node, int, int]] = {}  # a block's parameter -> where it is

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


def cut(of: Values, body: Block) -> tuple[dict[int, int], frozenset[int]]:
    """Drop the nodes that decide nothing; what register tensors the rest works on."""
    nodes = list(walk(body))
    for node in nodes:
        for place, block in enumerate(node.blocks):
            for index, param in enumerate(block.params):
                of.owner[param] = (node, place, index)
    roots = {}
    for node in nodes:
        for value, what in zip(node.args, node.arg_kinds, strict=True):
            if what.name == "memref" and what.space == "rmem":
                found = of.root(value)
                if found is not None:
                    roots[value] = found
    registers = {
        roots[a] for node in nodes if node.op == "cute.gemm" for a in node.args if a in roots
    }
    keep = _Keep(of, nodes, roots, registers)
    keep.mark()
    _prune(body, keep.needed, roots, keep.tracked)
    return roots, frozenset(keep.tracked)


class _Keep:
    """Which nodes are needed, backwards from those with an effect."""

    def __init__(
        self, of: Values, nodes: list[Node], roots: dict[int, int], registers: set[int]
    ) -> None:
        self.of, self.nodes, self.roots, self.registers = of, nodes, roots, registers
        self.needed: set[int] = set()
        self.values: set[int] = set()
        self.tracked: set[int] = set()
        self.work: list[int] = []
        self.owner = of.owner

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
            node = self.of.parents.get(id(node))

    def want_all(self, node: Node) -> None:
        if touches(node):
            return
        for arg, what in zip(node.args, node.arg_kinds, strict=True):
            if what.name != "coord_tensor" and what.space != "rmem":
                self.want(arg)

    def want(self, value: int) -> None:
        what = self.of.kinds[value]
        if value in self.values or what.known or what.opaque:
            return
        self.values.add(value)
        self.work.append(value)

    def trace(self, value: int) -> None:
        """Mark what `value` is computed from."""
        made = self.of.made_by.get(value)
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
