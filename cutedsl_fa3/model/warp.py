"""Executes a kernel's scalar code for one warp and yields what other warps can notice.

All 32 lanes run in step under a mask, as the structured branches of the traced program say. A word
read from shared memory is asked of whoever runs the warps, so that what one role tells another
decides what the other does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import events as ev
from .events import CTA_BYTES, Event
from .lanes import UNKNOWN, WARP, select, spread, uniform
from .program import ORDERING, TOUCHING, Block, Function, Node, NotCovered, touches
from .semantics import TABLE, default
from .shapes import Layout, leaves, offset, size
from .values import Atom, Pointer, View, in_cta, region, scalar_region

Steps = Generator[Event, Any, None]
MOST_STEPS = 100_000  # events of one warp, beyond which its loops do not end
ALLOCATE = "cute.memref.alloca"
TIDY_ASM = re.compile(r"mbarrier|cp\.async|wgmma|\bbar\.|barrier\.|tcgen05|\bexit\b|\btrap\b")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: extents, arguments by parameter."""

    function: Function
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    args: tuple[Any, ...]


@dataclass
class WarpState:
    """What the scalar code of one warp reads of its surroundings.

    `taken`: the way of a branch whose condition is not computed; `guesses` counts those that decide
    about more than registers.
    """

    launch: Launch
    cta: tuple[int, int, int]
    number: int
    rank: int = 0
    taken: bool = False
    guesses: set[int] = field(default_factory=set)
    launched: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.threads = np.arange(WARP, dtype=np.int64) + WARP * self.number
        self.mask = np.ones(WARP, dtype=bool)
        self.values: list[Any] = []
        self.registers: dict[tuple[int, int], Any] = {}
        self.smem_top = 0
        self.base = (self.rank + 1) * CTA_BYTES  # addresses below CTA_BYTES are this CTA's own


def run(function: Function, state: WarpState) -> Steps:
    """The events of one warp; the reader sends back what a READ of one word gives."""
    base = _base(function)
    state.values = list(base)
    for number, value in zip(function.params, state.launch.args, strict=True):
        state.values[number] = value
    yield from _block(function, function.body, state)


def _base(function: Function) -> list[Any]:
    """The table of values with everything that the types alone say."""
    found = getattr(function, "base", None)
    if found is None:
        kinds: dict[int, Any] = {}
        _known(function.body, kinds)
        top = max([*kinds, *function.params, *function.constants, 0]) + 1
        found = [None] * top
        for number, what in kinds.items():
            found[number] = what.value if what.known else UNKNOWN
        for number, value in function.constants.items():
            if number < top:
                found[number] = value
        object.__setattr__(function, "base", found)
    return found


def _known(block: Block, kinds: dict[int, Any]) -> None:
    for node in block.nodes:
        kinds.update(zip(node.outs, node.out_kinds, strict=True))
        kinds.update(zip(node.args, node.arg_kinds, strict=True))
        for inner in node.blocks:
            kinds.update(dict.fromkeys((*inner.params, *inner.ends), _ANY))
            _known(inner, kinds)


class _Any:
    known = False
    value = None


_ANY = _Any()


def _block(function: Function, block: Block, state: WarpState) -> Steps:
    values = state.values
    for node in block.nodes:
        pure = TABLE.get(node.op)
        if pure is not None:
            try:
                found = pure(node, [values[a] for a in node.args], state)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise NotCovered(f"{node.op} of {_types(node)} is not followed: {error}") from error
            if len(node.outs) == 1:
                values[node.outs[0]] = found
            else:
                for out, value in zip(node.outs, found, strict=True):
                    values[out] = value
            continue
        if node.op == "arith.constant":
            continue
        effect = EFFECTS.get(node.op)
        if effect is not None:
            yield from effect(function, node, state)
            continue
        if node.blocks:
            raise NotCovered(f"{node.op} around barriers or copies is not followed")
        if node.op.startswith(("nvvm.", "cute_nvgpu.")) and (
            not node.outs or ORDERING.match(node.op)
        ):
            raise NotCovered(f"{node.op} is not followed")
        for out, what in zip(node.outs, node.out_kinds, strict=True):
            values[out] = what.value if what.known else default(what)


def _types(node: Node) -> str:
    return ", ".join(what.text[:60] for what in node.arg_kinds)


def _branch(function: Function, node: Node, state: WarpState) -> Steps:
    values, outer = state.values, state.mask
    condition = values[node.args[0]]
    if condition is UNKNOWN:
        if any(_orders(block) for block in node.blocks):
            raise NotCovered("a branch around barriers or copies hangs on elements")
        if any(_beyond_registers(block) for block in node.blocks):
            state.guesses.add(id(node))
        condition = int(state.taken)
    condition = uniform(condition, outer)
    if not isinstance(condition, np.ndarray):
        place = 0 if condition else 1
        if place < len(node.blocks):
            chosen = node.blocks[place]
            yield from _block(function, chosen, state)
            for out, end in zip(node.outs, chosen.ends, strict=True):
                values[out] = values[end]
        return
    results = []
    for block, mask in zip(node.blocks, (condition != 0, condition == 0), strict=False):
        state.mask = outer & mask
        yield from _block(function, block, state)
        results.append([values[end] for end in block.ends])
    state.mask = outer
    for index, out in enumerate(node.outs):
        values[out] = select(condition, results[0][index], results[1][index])


def _orders(block: Block) -> bool:
    """Whether a block does more than read and write memory."""
    return any(
        (node.op in EFFECTS and not node.blocks and node.op not in (*TOUCHING, ALLOCATE))
        or ("tma" in node.arg_kinds[0].text if node.op == "cute.copy" else False)
        or any(_orders(inner) for inner in node.blocks)
        for node in block.nodes
    )


def _beyond_registers(block: Block) -> bool:
    return any(
        (node.op in EFFECTS and not node.blocks and not touches(node))
        or any(_beyond_registers(inner) for inner in node.blocks)
        for node in block.nodes
    )


def _for(function: Function, node: Node, state: WarpState) -> Steps:
    values, outer = state.values, state.mask
    low, high, step = (uniform(values[a], outer) for a in node.args[:3])
    body = node.blocks[0]
    carried = [values[a] for a in node.args[3:]]
    if low is UNKNOWN or high is UNKNOWN or step is UNKNOWN:
        if not _beyond_registers(body):
            low, high, step = 0, int(state.taken), 1
        else:
            raise NotCovered("a loop around barriers or copies has bounds that hang on elements")
    count = 0
    while True:
        active = outer & spread(low < high).astype(bool)
        if not active.any():
            break
        partial = not bool((active == outer).all())
        state.mask = active
        values[body.params[0]] = low
        for param, value in zip(body.params[1:], carried, strict=True):
            values[param] = value
        yield from _block(function, body, state)
        after = [values[end] for end in body.ends]
        if partial:
            lanes = active.astype(np.int64)
            after = [select(lanes, new, old) for new, old in zip(after, carried, strict=True)]
        carried, low, count = after, low + step, count + 1
        if count > MOST_STEPS:
            raise NotCovered(f"a loop of more than {MOST_STEPS} passes")
    state.mask = outer
    for out, value in zip(node.outs, carried, strict=True):
        values[out] = value


def _while(function: Function, node: Node, state: WarpState) -> Steps:
    values, outer = state.values, state.mask
    before, body = node.blocks
    carried = [values[a] for a in node.args]
    results: list[Any] = [UNKNOWN] * len(node.outs)
    active, count = outer, 0
    while True:
        state.mask = active
        for param, value in zip(before.params, carried, strict=True):
            values[param] = value
        yield from _block(function, before, state)
        condition = values[before.ends[0]]
        if condition is UNKNOWN:
            raise NotCovered("a while loop hangs on elements")
        passed = [values[end] for end in before.ends[1:]]
        leaving = active & ~spread(condition).astype(bool)
        if (active == outer).all() and (leaving == outer).all():
            results = passed
        elif leaving.any():
            lanes = leaving.astype(np.int64)
            pairs = zip(passed, results, strict=True)
            results = [new if old is UNKNOWN else select(lanes, new, old) for new, old in pairs]
        active = active & ~leaving
        count += 1
        if not active.any():
            break
        if count > MOST_STEPS:
            raise NotCovered(f"a loop of more than {MOST_STEPS} passes")
        state.mask = active
        for param, value in zip(body.params, passed, strict=True):
            values[param] = value
        yield from _block(function, body, state)
        carried = [values[end] for end in body.ends]
    state.mask = outer
    for out, value in zip(node.outs, results, strict=True):
        values[out] = value


# Effects.


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
    if "tma_store" in text:
        source = _smem(node, 1, state)
        bytes_read, exact = region(_own(source, state))
        yield Event(ev.STORE, region=bytes_read, exact=exact)
        return
    target = _smem(node, 2, state)
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
    targets = tuple(
        (
            in_cta(where, cta),
            tuple((lo + (cta + 1) * CTA_BYTES, hi + (cta + 1) * CTA_BYTES) for lo, hi in own),
        )
        for cta in ctas
    )
    yield Event(ev.COPY, value=bytes_moved, targets=targets)


def _with_first(shape: Any, first: int) -> Any:
    return (_with_first(shape[0], first), *shape[1:]) if isinstance(shape, tuple) else first


def _product(function: Function, node: Node, state: WarpState) -> Steps:
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
    found = TIDY_ASM.search(node.attrs)
    if found:
        raise NotCovered(f"inline assembly with {found[0]!r} is not followed: {node.attrs[:80]}")
    _nothing(node, state)
    return
    yield


EFFECTS: dict[str, Callable[..., Steps]] = {
    "scf.if": _branch,
    "scf.for": _for,
    "scf.while": _while,
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
