"""The device reader of graphs, run on CPU tensors: the compiler's host functions take its code.

The special-function unit has no CPU counterpart, so its instructions are replaced by the compiler's
own functions there; the formulas built on them stay. A thread is a warp of its own there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cutedsl_fa3.variant import Graph, device, lower

ROWS, COLS = 2, 2  # of the fragment whose elements share a memo, as one thread's do
UNIFORM = ("b", "h", "seqlen_q", "seqlen_k")
OUT = {"bool": torch.int32, "int": torch.int32, "float": torch.float32}

_EXACT: dict[str, Callable[..., Any]] = {
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1.0 / a,
    **{
        name: getattr(cute.math, name)
        for name in ("exp2", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh")
    },
}


_OF_A_WARP: dict[str, Callable[..., Any]] = {
    "shuffle_sync": lambda value, offset: value,
    "shuffle_sync_bfly": lambda value, offset: value,
    "vote_all_sync": lambda condition: condition,
    "fmax": lambda a, b: lower.select((a > b) | (b != b), a, b),
}


@contextmanager
def host_functions():
    """A scope in which the lowering uses functions that a CPU has."""

    def without_options(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values, **_: function(*values)

    with pytest.MonkeyPatch.context() as patch:
        for name, function in _EXACT.items():
            patch.setattr(cute.math, name, without_options(function))
            if name in ("sqrt", "rsqrt", "sin", "cos"):
                patch.setitem(lower.LOWER, name, without_options(function))
        for name, function in _OF_A_WARP.items():
            patch.setattr(cute.arch, name, function)
        yield


@cute.jit
def _for_each(count: cutlass.Int32, given: tuple, out: tuple, write: cutlass.Constexpr):
    for i in cutlass.range(count):
        write(i, given, out)


def launchable(capture: torch.Tensor) -> torch.Tensor:
    """A captured tensor as a kernel takes it: bools as bytes, a scalar as one element."""
    capture = capture.view(torch.uint8) if capture.dtype == torch.bool else capture
    return capture.reshape(1) if capture.dim() == 0 else capture


def on_device(tensor: torch.Tensor) -> cute.Tensor:
    """A tensor whose extents the compiler does not know."""
    return from_dlpack(tensor).mark_layout_dynamic(leading_dim=tensor.dim() - 1)


def for_each(
    count: int,
    given: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    write: Callable[[Any, Sequence[Any], Sequence[Any]], None],
) -> None:
    """Run `write(i, given, out)` for i below `count`, compiled for this machine."""
    with host_functions():
        _for_each(
            cutlass.Int32(count),
            tuple(on_device(tensor) for tensor in given),
            tuple(on_device(tensor) for tensor in out),
            write,
        )


def lowered(
    graphs: Sequence[Graph], inputs: dict[str, torch.Tensor], captures: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What the device reader makes of each graph.

    Shape: inputs score (n, ROWS, COLS), q (n, ROWS), k (n, COLS), the uniform ones (n,); results
    (n, ROWS, COLS).
    """
    names = list(inputs)
    count = inputs["score"].shape[0]
    out = [torch.zeros(count, ROWS, COLS, dtype=OUT[graph.result.dtype]) for graph in graphs]

    def write(i, given, results):
        at = dict(zip(names, given, strict=False))
        uniform = {name: at[name][i] for name in UNIFORM}
        for graph, result in zip(graphs, results, strict=True):
            reader = device.Lowering(graph, given[len(names) :], uniform)
            memo = {}
            for r in range(ROWS):
                for c in range(COLS):
                    here = {"score": at["score"][i, r, c], "q": at["q"][i, r], "k": at["k"][i, c]}
                    value = reader.at({**here, **uniform}, r, c, memo)
                    if graph.result.dtype == "bool":
                        value = lower.select(value, 1, 0)
                    result[i, r, c] = value

    for_each(count, [*inputs.values(), *map(launchable, captures)], out, write)
    return [
        result.bool() if graph.result.dtype == "bool" else result
        for graph, result in zip(graphs, out, strict=True)
    ]
