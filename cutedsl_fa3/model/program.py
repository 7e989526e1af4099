"""A traced kernel as plain nodes, and what in it orders threads or moves bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .shapes import Kind

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
        "nvvm.atomicrmw",
        "nvvm.wgmma.fence.aligned",
        "nvvm.wgmma.commit.group.sync.aligned",
        "nvvm.wgmma.wait.group.sync.aligned",
        "cute.gemm",
        "llvm.inline_asm",
        "cuda.launch_cfg.cluster_dim",
        "cuda.launch_ex",
    }
)
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
        for node in walk(function.body)
    )


def walk(block: Block) -> Iterator[Node]:
    """Every node of a block and of those inside it."""
    for node in block.nodes:
        yield node
        for inner in node.blocks:
            yield from walk(inner)
