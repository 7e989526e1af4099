"""What a kernel's host function launches for given arguments: extents and kernel parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .effects import EFFECTS
from .lanes import UNKNOWN
from .launch import Launch, Steps, WarpState
from .program import Function, Node, NotCovered
from .shapes import Kind, Layout, fill, leaves
from .values import Pointer, View
from .warp import run


def launches(functions: dict[str, Function], args: Sequence[Any]) -> list[Launch]:
    """The launches of the host function in order, for arguments as its compiled form takes them.

    A tensor is anything with `shape` and `stride()`, also where the compiled form takes numbers:
    address, sizes, strides. The values of integer tensors on the CPU are read. None stands for an
    argument that the kernel does not have; the stream is left out.

    Raises: NotCovered.
    """
    host = functions["host"]
    given = list(_flat(args))
    values = []
    for what in host.param_kinds:
        if "stream" in what.text.lower():
            values.append(UNKNOWN)
            continue
        if not given:
            raise NotCovered(f"argument for a parameter {what.text[:60]} is missing")
        value = given.pop(0)
        if what.name != "memref" and hasattr(value, "stride"):
            given[:0] = [*(value.shape or (1,)), *(value.stride() or (1,))]
            integer = not value.is_floating_point()
            values.append(Pointer("gmem", 0, 0, buffer=_buffer(value, integer)))
        else:
            values.append(_argument(value, what))
    if given:
        raise NotCovered(f"{len(given)} arguments more than the host function has")
    nowhere = Launch(host, (1, 1, 1), (1, 1, 1), (1, 1, 1), tuple(values))
    state = WarpState(nowhere, (0, 0, 0), 0)
    for _ in run(host, state):
        raise NotCovered("the host function touches barriers or shared memory")
    return [_launch(name, settings, given, functions) for name, settings, given in state.launched]


def _flat(args: Sequence[Any]) -> Any:
    for arg in args:
        if isinstance(arg, tuple | list):
            yield from _flat(arg)
        elif arg is not None:
            yield arg


def _argument(value: Any, what: Kind) -> Any:
    if what.name != "memref":
        return int(value) if what.integer else UNKNOWN
    sizes = [int(n) for n in value.shape]
    strides = [int(n) for n in value.stride()]
    layout = what.value
    given = [s for s, t in zip(sizes, leaves(layout.shape), strict=True) if t is None]
    given += [s for s, t in zip(strides, leaves(layout.stride), strict=True) if t is None]
    full = Layout(*fill(layout, given))
    if leaves(full.shape) != sizes:
        raise NotCovered(f"a tensor of shape {tuple(sizes)} where {what.text[:80]} is needed")
    return View(Pointer("gmem", 0, what.bits, buffer=_buffer(value, what.integer)), full)


def _buffer(value: Any, integer: bool) -> Any:
    """The elements of an integer tensor on the CPU from its first on, to read and write."""
    if not integer or getattr(getattr(value, "device", None), "type", "") != "cpu":
        return None
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    if 0 in value.shape:
        return np.zeros(0, dtype=np.int64)
    return value.detach().as_strided((extent,), (1,)).numpy()


def _launch(
    name: str, settings: dict[str, Any], args: tuple[Any, ...], functions: dict[str, Function]
) -> Launch:
    kernel = next((f for key, f in functions.items() if key != "host" and key in name), None)
    if kernel is None:
        raise NotCovered(f"launch of {name[:80]}, which is no kernel of the program")
    extents = [tuple(settings[key]) for key in ("grid", "block", "cluster")]
    if any(not isinstance(n, int) for extent in extents for n in extent):
        raise NotCovered("the extents of a launch hang on what is not computed")
    return Launch(kernel, *extents, args)


def _settings(function: Function, node: Node, state: WarpState) -> Steps:
    values = [state.values[a] for a in node.args]
    state.values[node.outs[0]] = {"block": values[:3], "grid": values[4:7], "cluster": (1, 1, 1)}
    return
    yield


def _cluster(function: Function, node: Node, state: WarpState) -> Steps:
    settings, *extents = (state.values[a] for a in node.args)
    settings["cluster"] = extents
    return
    yield


def _launched(function: Function, node: Node, state: WarpState) -> Steps:
    settings, *args = (state.values[a] for a in node.args)
    state.launched.append((node.attrs, settings, tuple(args)))
    state.values[node.outs[0]] = UNKNOWN
    return
    yield


EFFECTS["cuda.launch_cfg.create"] = _settings
EFFECTS["cuda.launch_cfg.cluster_dim"] = _cluster
EFFECTS["cuda.launch_ex"] = _launched
