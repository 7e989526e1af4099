"""Executes a kernel's scalar code for one warp and yields what other warps can notice.

All 32 lanes run in step under a mask, as the structured branches of the traced program say. A word
read from shared memory is asked of whoever runs the warps, so that what one role tells another
decides what the other does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .effects import ALLOCATE, EFFECTS
from .integers import default
from .lanes import UNKNOWN, select, spread, uniform
from .launch import Steps, WarpState
from .program import ORDERING, TOUCHING, Block, Function, Node, NotCovered, touches
from .semantics import TABLE

MOST_STEPS = 100_000  # passes of one loop, beyond which it does not end


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


EFFECTS |= {"scf.if": _branch, "scf.for": _for, "scf.while": _while}
