"""What operations on integers compute, and what a warp reads of its place.

`TABLE` has a function for each operation without an effect: it gets the operation, its operands'
values and the warp that runs it. Tuples, layouts and views follow in semantics.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from . import lanes
from .events import CTA_BYTES
from .lanes import UNKNOWN, WARP, spread, wrap
from .program import Node
from .shapes import Kind, fill, size
from .values import View

Semantics = Callable[[Node, list[Any], Any], Any]
TABLE: dict[str, Semantics] = {}

PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")


def names(*ops: str) -> Callable[[Semantics], Semantics]:
    """Register a function for these operations."""

    def register(function: Semantics) -> Semantics:
        TABLE.update(dict.fromkeys(ops, function))
        return function

    return register


def default(what: Kind) -> Any:
    """A value of which nothing but the type is known."""
    if what.value is None:
        return UNKNOWN
    if what.name in ("memref", "coord_tensor"):
        return View(UNKNOWN, filled(what.value))
    return filled(what.value)


def filled(template: Any) -> Any:
    """A template whose open leaves are not known."""
    return fill(template, [UNKNOWN] * 64)


# Integers.


def _binary(function: Callable[[Any, Any], Any]) -> Semantics:
    def run(node: Node, args: list[Any], warp: Any) -> Any:
        a, b = args[:2]
        if a is UNKNOWN or b is UNKNOWN:
            return UNKNOWN
        found = function(a, b)
        return found if found is UNKNOWN else wrap(found, node.out_kinds[0].bits)

    return run


TABLE |= {
    "arith.addi": _binary(lambda a, b: a + b),
    "arith.subi": _binary(lambda a, b: a - b),
    "arith.muli": _binary(lambda a, b: a * b),
    "arith.divsi": _binary(lanes.truncated),
    "arith.floordivsi": _binary(lanes.floored),
    "arith.ceildivsi": _binary(lambda a, b: -lanes.floored(-a, b)),
    "arith.remsi": _binary(lanes.remainder),
    "arith.xori": _binary(lambda a, b: a ^ b),
    "arith.maxsi": _binary(lanes.maximum),
    "arith.minsi": _binary(lanes.minimum),
    "arith.shli": _binary(lambda a, b: a << b),
    "arith.shrsi": _binary(lambda a, b: a >> b),
}


@names("arith.andi", "arith.ori")
def _bits(node: Node, args: list[Any], warp: Any) -> Any:
    found = (lanes.both if node.op == "arith.andi" else lanes.either)(*args)
    return found if found is UNKNOWN else wrap(found, node.out_kinds[0].bits)


@names("arith.divui", "arith.remui", "arith.shrui", "arith.maxui", "arith.minui")
def _unsigned(node: Node, args: list[Any], warp: Any) -> Any:
    if UNKNOWN in [a if a is UNKNOWN else 0 for a in args]:
        return UNKNOWN
    bits = node.out_kinds[0].bits
    a, b = (lanes.unsigned(v, bits) for v in args)
    function = {
        "arith.divui": lanes.truncated,
        "arith.remui": lanes.remainder,
        "arith.shrui": lambda x, y: x >> y,
        "arith.maxui": lanes.maximum,
        "arith.minui": lanes.minimum,
    }[node.op]
    found = function(a, b)
    return found if found is UNKNOWN else wrap(found, bits)


@names("arith.cmpi")
def _compared(node: Node, args: list[Any], warp: Any) -> Any:
    if args[0] is UNKNOWN or args[1] is UNKNOWN:
        return UNKNOWN
    predicate = PREDICATES[int(node.attr("predicate").split(":")[0])]
    return lanes.compare(predicate, args[0], args[1], node.arg_kinds[0].bits)


@names("arith.select")
def _selected(node: Node, args: list[Any], warp: Any) -> Any:
    return lanes.select(*args)


@names("arith.extsi", "arith.trunci", "arith.index_cast", "arith.index_castui")
def _resized(node: Node, args: list[Any], warp: Any) -> Any:
    if args[0] is UNKNOWN:
        return UNKNOWN
    value = -args[0] if node.op == "arith.extsi" and node.arg_kinds[0].bits == 1 else args[0]
    return wrap(value, node.out_kinds[0].bits)


@names("arith.extui")
def _extended(node: Node, args: list[Any], warp: Any) -> Any:
    return UNKNOWN if args[0] is UNKNOWN else lanes.unsigned(args[0], node.arg_kinds[0].bits)


@names("math.ctpop")
def _population(node: Node, args: list[Any], warp: Any) -> Any:
    return UNKNOWN if args[0] is UNKNOWN else lanes.population(args[0], node.arg_kinds[0].bits)


# The warp and its place.


def _register(read: Callable[[Any], Any]) -> Semantics:
    return lambda node, args, warp: read(warp)


for _axis, _letter in enumerate("xyz"):
    TABLE |= {
        f"nvvm.read.ptx.sreg.tid.{_letter}": _register(
            lambda warp, axis=_axis: warp.threads if axis == 0 else 0
        ),
        f"nvvm.read.ptx.sreg.ntid.{_letter}": _register(
            lambda warp, axis=_axis: warp.launch.block[axis]
        ),
        f"nvvm.read.ptx.sreg.ctaid.{_letter}": _register(lambda warp, axis=_axis: warp.cta[axis]),
        f"nvvm.read.ptx.sreg.nctaid.{_letter}": _register(
            lambda warp, axis=_axis: warp.launch.grid[axis]
        ),
        f"nvvm.read.ptx.sreg.cluster.ctaid.{_letter}": _register(
            lambda warp, axis=_axis: warp.cta[axis] % warp.launch.cluster[axis]
        ),
        f"nvvm.read.ptx.sreg.cluster.nctaid.{_letter}": _register(
            lambda warp, axis=_axis: warp.launch.cluster[axis]
        ),
    }
TABLE |= {
    "nvvm.read.ptx.sreg.laneid": _register(lambda warp: np.arange(WARP, dtype=np.int64)),
    "nvvm.read.ptx.sreg.warpid": _register(lambda warp: int(warp.threads[0]) // WARP),
    "nvvm.read.ptx.sreg.cluster.ctarank": _register(lambda warp: warp.rank),
    "nvvm.read.ptx.sreg.cluster.nctarank": _register(lambda warp: size(warp.launch.cluster)),
}


@names("nvvm.elect.sync")
def _elected(node: Node, args: list[Any], warp: Any) -> Any:
    chosen = np.zeros(WARP, dtype=np.int64)
    chosen[int(np.argmax(warp.mask))] = 1
    return chosen


@names("cute_nvgpu.arch.make_warp_uniform")
def _warp_uniform(node: Node, args: list[Any], warp: Any) -> Any:
    value = args[0]
    return int(value[0]) if isinstance(value, np.ndarray) else value


@names("nvvm.vote.sync")
def _vote(node: Node, args: list[Any], warp: Any) -> Any:
    """Where lanes vote "all" on what is not computed, all warps have the same outcome: kernels ask
    so what is true or false of a work tile (kernels/sm90/units.py). Both are looked at.
    """
    value = args[-1]
    kind = re.search(r"vote_sync_kind (\w+)", node.attrs)[1]
    if value is UNKNOWN and kind == "all":
        warp.guesses.add(id(node))
        return int(warp.taken)
    if value is UNKNOWN:
        return UNKNOWN
    votes = (spread(value) != 0) & warp.mask
    if kind == "ballot":
        return wrap(int(sum(1 << lane for lane in range(WARP) if votes[lane])), 32)
    if kind == "any":
        return int(votes.any())
    return int(votes[warp.mask].all()) if kind == "all" else UNKNOWN


@names("nvvm.redux.sync")
def _reduced(node: Node, args: list[Any], warp: Any) -> Any:
    value = args[0]
    if value is UNKNOWN:
        return UNKNOWN
    chosen = spread(value)[warp.mask]
    kind = re.search(r"reduction_kind (\w+)", node.attrs)[1]
    function = {"min": min, "max": max, "add": sum}.get(kind)
    return UNKNOWN if function is None else wrap(int(function(chosen.tolist())), 32)


@names("nvvm.shfl.sync")
def _shuffled(node: Node, args: list[Any], warp: Any) -> Any:
    value, by = args[1], args[2]
    if value is UNKNOWN or by is UNKNOWN or not node.out_kinds[0].integer:
        return UNKNOWN
    lane, values = np.arange(WARP), spread(value)
    kind = re.search(r"shfl_kind (\w+)", node.attrs)[1]
    source = {"bfly": lane ^ by, "idx": by + 0 * lane, "up": lane - by, "down": lane + by}[kind]
    source = np.where((source < 0) | (source >= WARP), lane, source)
    return values[source]


@names("nvvm.mapa")
def _mapped(node: Node, args: list[Any], warp: Any) -> Any:
    pointer, rank = args
    if rank is UNKNOWN or pointer.address is UNKNOWN:
        return UNKNOWN
    address = pointer.address % CTA_BYTES + (rank + 1) * CTA_BYTES
    return replace(pointer, address=address)


@names("builtin.unrealized_conversion_cast")
def _cast(node: Node, args: list[Any], warp: Any) -> Any:
    return args[0]
