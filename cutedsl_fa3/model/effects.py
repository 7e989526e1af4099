"""The steps that operations with an effect on others are, one function for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from . import events as ev
from .events import CTA_BYTES, Event
from .integers import default
from .lanes import UNKNOWN, select, spread, uniform
from .launch import Steps, WarpState
from .program import Function, Node, NotCovered
from .shapes import Layout, leaves, offset, size
from .values import Atom, Pointer, View, in_cta, region, scalar_region

ALLOCATE = "cute.memref.alloca"
ASM = re.compile(r"mbarrier|cp\.async|wgmma|\bbar\.|barrier\.|tcgen05|\bexit\b|\btrap\b")


def _need(value: Any, node: Node, what: str) -> Any:
    """A value that decides an event; every operand of one must be known."""
    if isinstance(value, Pointer):
        value = value.address
    if value is UNKNOWN or value is None:
        raise NotCovered(f"{node.op}: {what} hangs on what the model does not compute")
    return value


def _barriers(node: Node, state: WarpState, value: Any) -> list[tuple[int, int]]:
    """(address, lanes) of each mbarrier that the active lanes name."""
    address = _need(value, node, "which mbarrier")
    lanes = int(state.mask.sum())
    if not isinstance(address, np.ndarray):
        own = address if address >= CTA_BYTES else address + state.base
        return [(own, lanes)] if lanes else []
    chosen = address[state.mask].tolist()
    return [(a, chosen.count(a)) for a in dict.fromkeys(chosen)]


def _number(node: Node, state: WarpState, place: int, what: str) -> int:
    if place >= len(node.args):
        return 1
    value = uniform(_need(state.values[node.args[place]], node, what), state.mask)
    if isinstance(value, np.ndarray):
        raise NotCovered(f"{node.op}: {what} differs between lanes")
    return int(value)


def _init(function: Function, node: Node, state: WarpState) -> Steps:
    count = _number(node, state, 1, "the number of arrivals")
    for address, _ in _barriers(node, state, state.values[node.args[0]]):
        yield Event(ev.INIT, address, count)


def _arrive(function: Function, node: Node, state: WarpState) -> Steps:
    count = _number(node, state, 1, "the number of arrivals")
    _nothing(node, state)
    for address, lanes in _barriers(node, state, state.values[node.args[0]]):
        yield Event(ev.ARRIVE, address, count * lanes)


def _expect(function: Function, node: Node, state: WarpState) -> Steps:
    announced = _number(node, state, 1, "the bytes")
    arrives = node.op == "nvvm.mbarrier.arrive.expect_tx"
    _nothing(node, state)
    for address, lanes in _barriers(node, state, state.values[node.args[0]]):
        yield Event(ev.EXPECT, address, lanes if arrives else 0, announced * lanes)


def _nothing(node: Node, state: WarpState) -> None:
    for out in node.outs:
        state.values[out] = UNKNOWN


def _wait(function: Function, node: Node, state: WarpState) -> Steps:
    if node.outs:  # only a look: what it finds decides whether the warp waits at once or later
        state.values[node.outs[0]] = 0
        return
    parity = _number(node, state, 1, "the parity") & 1
    for address, _ in _barriers(node, state, state.values[node.args[0]]):
        yield Event(ev.WAIT, address, value=parity)


def _sync(function: Function, node: Node, state: WarpState) -> Steps:
    numbers = [_number(node, state, place, "the barrier") for place in range(len(node.args))]
    sizes = [int(n) for n in re.findall(r"\d+", node.attr("operandSegmentSizes")[10:])]
    threads = int(np.prod(state.launch.block))
    number = 0
    if node.op == "nvvm.barrier.cta.arrive":
        number, threads = numbers
    elif numbers:
        has_id, has_count = (*sizes, 0, 0)[:2]
        number = numbers[0] if has_id else 0
        threads = numbers[has_id] if has_count else threads
    kind = ev.SIGNAL if node.op == "nvvm.barrier.cta.arrive" else ev.SYNC
    yield Event(kind, number + 16 * state.rank, threads)


def _simple(kind: str, attribute: str = "") -> Callable[..., Steps]:
    def effect(function: Function, node: Node, state: WarpState) -> Steps:
        left = int(node.attr(attribute).split(":")[0]) if attribute else 0
        yield Event(kind, value=left)

    return effect


def _proxy(function: Function, node: Node, state: WarpState) -> Steps:
    if "async" in node.attrs:
        yield Event(ev.PROXY)


def _own(view: View, state: WarpState) -> View:
    """A view of shared memory at this CTA's place, as the active lanes see it."""
    whole = view.at.whole and _own(view.at.whole, state)
    address = view.at.address
    if isinstance(address, np.ndarray):
        address = address[state.mask]
    moved = replace(view.at, address=address + state.base, whole=whole)
    return View(moved, view.layout, view.cover)


def _smem(node: Node, place: int, state: WarpState) -> View | None:
    """The operand as a tensor in shared memory, or None where it lies elsewhere."""
    view = state.values[node.args[place]]
    if not isinstance(view, View):
        return None
    space = node.arg_kinds[place].space
    if node.arg_kinds[place].name != "smem_desc_view" and space != "smem":
        return None
    _need(view.at, node, "which shared memory")
    if any(leaf is UNKNOWN for leaf in leaves(view.layout.shape)):
        raise NotCovered(f"{node.op}: the extent of shared memory hangs on what is not computed")
    return view


def _copy(function: Function, node: Node, state: WarpState) -> Steps:
    text = node.arg_kinds[0].text
    if "tma" in text or "bulk" in text:
        yield from _tma(function, node, state, text)
        return
    if "g2s" in text or "simt_async" in text or "cp_async" in text:
        raise NotCovered("cp.async copies are not followed")
    source, target = _smem(node, 1, state), _smem(node, 2, state)
    if source is not None:
        bytes_read, exact = region(_own(source, state))
        yield Event(ev.READ, region=bytes_read, exact=exact)
    if target is not None:
        written, exact = region(_own(target, state))
        yield Event(ev.WRITE, region=written, exact=exact)
    for place, kind in ((1, 0), (2, 1)):
        root = function.roots.get(node.args[place])
        if root is not None:
            yield Event(ev.TOUCH, root, value=kind)


def _tma(function: Function, node: Node, state: WarpState, text: str) -> Steps:
    atom = state.values[node.args[0]]
    if "tma_store" in text or "tma_reduce" in text:
        source = _smem(node, 1, state)
        bytes_read, exact = region(_own(source, state))
        yield Event(ev.STORE, region=bytes_read, exact=exact)
        return
    target = _smem(node, 2, state)
    if "bulk_copy_g2s" in text and target is not None and isinstance(atom, Atom):
        barrier = uniform(_need(atom.field("tma_bar"), node, "which mbarrier"), state.mask)
        moved = size(target.layout.shape) * node.arg_kinds[2].bits // 8
        there = _in_cta(barrier, region(target)[0], state.rank)
        yield Event(ev.COPY, value=moved, targets=(there,))
        return
    if "tma_load" not in text or target is None or not isinstance(atom, Atom):
        raise NotCovered(f"copy {text[:60]} is not followed")
    parts = atom.field("num_multicast") or 1
    box = leaves(target.layout.shape)[0]
    shape = _with_first(target.layout.shape, box // parts)
    part = View(target.at, Layout(shape, target.layout.stride))
    bytes_moved = size(shape) * node.arg_kinds[2].bits // 8
    barrier = _need(atom.field("tma_bar"), node, "which mbarrier")
    mask = atom.field("mcast_mask")
    ctas = [state.rank]
    if mask is not None:
        bits = int(uniform(_need(mask, node, "to which CTAs"), state.mask))
        ctas = [cta for cta in range(16) if bits >> cta & 1]
    where = uniform(barrier, state.mask)
    own = region(part)[0]
    targets = tuple(_in_cta(where, own, cta) for cta in ctas)
    yield Event(ev.COPY, value=bytes_moved, targets=targets)


def _in_cta(barrier: int, own: ev.Region, cta: int) -> tuple[int, ev.Region]:
    """An mbarrier and bytes of shared memory at their places in one CTA of the cluster."""
    bytes_here = tuple((lo + (cta + 1) * CTA_BYTES, hi + (cta + 1) * CTA_BYTES) for lo, hi in own)
    return in_cta(barrier, cta), bytes_here


def _with_first(shape: Any, first: int) -> Any:
    return (_with_first(shape[0], first), *shape[1:]) if isinstance(shape, tuple) else first


def _product(function: Function, node: Node, state: WarpState) -> Steps:
    if "sm80.mma" in node.arg_kinds[0].text:  # a warp's own registers, filled before
        for place in (2, 3, 1):
            root = function.roots.get(node.args[place])
            if root is not None:
                yield Event(ev.TOUCH, root, value=int(place == 1))
        return
    if "sm90.mma" not in node.arg_kinds[0].text:
        raise NotCovered(f"product {node.arg_kinds[0].text[:60]} is not followed")
    covered: list[tuple[int, int]] = []
    for place in (2, 3):
        operand = _smem(node, place, state)
        if operand is not None:
            covered += region(_own(operand, state))[0]
    accumulator = function.roots.get(node.args[1], -1)
    operand_a = function.roots.get(node.args[2], -1)
    yield Event(ev.PRODUCT, accumulator, value=operand_a, region=ev.merged(covered))


def _access(function: Function, node: Node, state: WarpState) -> Steps:
    """A load or store of one element or a vector."""
    load = "load" in node.op
    place = next(i for i, k in enumerate(node.arg_kinds) if k.name == "memref")
    what = node.arg_kinds[place]
    view = state.values[node.args[place]]
    root = function.roots.get(node.args[place])
    if what.space == "rmem":
        if root in function.tracked:
            _register(node, state, root)
        elif root is not None:
            yield Event(ev.TOUCH, root, value=0 if load else 1)
            _nothing(node, state)
        return
    if what.space == "gmem":
        _global(node, state, view)
        return
    _need(view.at, node, "which shared memory")
    if node.op.endswith("vec"):
        covered, exact = region(_own(view, state))
        found = yield Event(ev.READ if load else ev.WRITE, region=covered, exact=exact)
        _nothing(node, state)
        return
    covered, exact = _element(node, state, view)
    if load:
        found = yield Event(ev.READ, region=covered, exact=exact)
        state.values[node.outs[0]] = found if what.integer and found is not None else UNKNOWN
        return
    value = uniform(state.values[node.args[2]], state.mask) if what.integer else UNKNOWN
    told = value if isinstance(value, int) else 0
    yield Event(ev.WRITE, value=told, count=int(what.integer), region=covered, exact=exact)


def _element(node: Node, state: WarpState, view: View) -> tuple[ev.Region, bool]:
    """The bytes that the active lanes' elements occupy, and whether it is exactly those."""
    coord = state.values[node.args[1]]
    if view.at.whole is None and not any(leaf is UNKNOWN for leaf in leaves(coord)):
        at = view.at.moved(offset(coord, view.layout))
        _need(at, node, "which shared memory")
        element = _own(View(at, Layout((), ())), state)
        if not view.at.swizzle:
            return scalar_region(element.at.address, max(1, view.at.bits // 8)), True
        return region(element)[0], False
    return region(_own(view, state))[0], False


def _register(node: Node, state: WarpState, root: int) -> None:
    """An integer kept in a register tensor; the index is known or the model refuses."""
    view = state.values[node.args[0]]
    layout = view.layout if isinstance(view, View) else node.arg_kinds[0].value
    index = uniform(offset(state.values[node.args[1]], layout), state.mask)
    if index is UNKNOWN or isinstance(index, np.ndarray) or index is None:
        raise NotCovered("an integer in a register tensor is indexed by what is not computed")
    if "load" in node.op:
        state.values[node.outs[0]] = state.registers.get((root, index), UNKNOWN)
    else:
        old = state.registers.get((root, index), 0)
        new = state.values[node.args[2]]
        full = state.mask.all()
        state.registers[root, index] = new if full else select(state.mask.astype(int), new, old)


def _global(node: Node, state: WarpState, view: Any) -> None:
    """An element of a captured tensor of integers, where its values were given."""
    if node.outs:
        state.values[node.outs[0]] = UNKNOWN
    if not isinstance(view, View) or not isinstance(view.at, Pointer):
        return
    if node.op.endswith("vec") or not node.arg_kinds[0].integer:
        return
    buffer, start = view.at.buffer, view.at.address
    coord = state.values[node.args[1]]
    if buffer is None or start is UNKNOWN or any(c is UNKNOWN for c in leaves(coord)):
        return
    if any(leaf is UNKNOWN for leaf in leaves(view.layout.stride)):
        return
    place = start // view.at.bits + offset(coord, view.layout)
    if "load" in node.op:
        if isinstance(place, np.ndarray):
            inside = np.clip(place, 0, max(0, len(buffer) - 1))
            state.values[node.outs[0]] = np.asarray(buffer)[inside].astype(np.int64)
        elif 0 <= place < len(buffer):
            state.values[node.outs[0]] = int(buffer[place])
        return
    value = state.values[node.args[2]]
    if value is UNKNOWN:
        return
    places, told = spread(place)[state.mask], spread(value)[state.mask]
    for where, what in zip(places.tolist(), told.tolist(), strict=True):
        if 0 <= where < len(buffer):
            buffer[where] = what


def _atomic(function: Function, node: Node, state: WarpState) -> Steps:
    """An addition to an integer in global memory whose value was given; returns the old one."""
    pointer, (out,) = state.values[node.args[0]], node.outs
    state.values[out] = UNKNOWN
    buffer = pointer.buffer if isinstance(pointer, Pointer) else None
    added = uniform(state.values[node.args[1]], state.mask)
    if "atomic_op add" in node.attrs and buffer is not None and isinstance(added, int):
        place = uniform(pointer.address, state.mask) // pointer.bits
        old, lanes = int(buffer[place]), int(state.mask.sum())
        buffer[place] = old + added * lanes
        state.values[out] = old if lanes == 1 else UNKNOWN
    return
    yield


def _alloca(function: Function, node: Node, state: WarpState) -> Steps:
    what = node.out_kinds[0]
    out = node.outs[0]
    if what.space == "smem":
        start = -(-state.smem_top // what.align) * what.align
        state.smem_top = start + size(what.value.shape) * what.bits // 8
        state.values[out] = View(Pointer("smem", start, what.bits, what.swizzle), what.value)
    else:
        state.values[out] = View(UNKNOWN, default(what).layout)
    return
    yield


def _assembly(function: Function, node: Node, state: WarpState) -> Steps:
    found = ASM.search(node.attrs)
    if found:
        raise NotCovered(f"inline assembly with {found[0]!r} is not followed: {node.attrs[:80]}")
    _nothing(node, state)
    return
    yield


EFFECTS: dict[str, Callable[..., Steps]] = {
    "nvvm.mbarrier.init": _init,
    "nvvm.mbarrier.arrive": _arrive,
    "nvvm.mbarrier.arrive.expect_tx": _expect,
    "nvvm.mbarrier.expect_tx": _expect,
    "nvvm.mbarrier.try_wait.parity": _wait,
    "nvvm.mbarrier.wait.parity": _wait,
    "nvvm.barrier": _sync,
    "nvvm.barrier.cta.arrive": _sync,
    "nvvm.cluster.arrive": _simple(ev.CLUSTER_ARRIVE),
    "nvvm.cluster.arrive.relaxed": _simple(ev.CLUSTER_ARRIVE),
    "nvvm.cluster.wait": _simple(ev.CLUSTER_WAIT),
    "nvvm.cp.async.bulk.commit.group": _simple(ev.STORE_COMMIT),
    "nvvm.cp.async.bulk.wait_group": _simple(ev.STORE_WAIT, "group"),
    "nvvm.fence.proxy": _proxy,
    "nvvm.atomicrmw": _atomic,
    "nvvm.wgmma.fence.aligned": _simple(ev.FENCE),
    "nvvm.wgmma.commit.group.sync.aligned": _simple(ev.COMMIT),
    "nvvm.wgmma.wait.group.sync.aligned": _simple(ev.RETIRE, "group"),
    "cute.copy": _copy,
    "cute.gemm": _product,
    "cute.memref.load": _access,
    "cute.memref.load_vec": _access,
    "cute.memref.store": _access,
    "cute.memref.store_vec": _access,
    ALLOCATE: _alloca,
    "llvm.inline_asm": _assembly,
}
