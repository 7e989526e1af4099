"""Trace-time evaluation for SM90: what depends on WGMMA needs a compilation for that target."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import cutlass
import cutlass.cute as cute

T = TypeVar("T")


@cute.jit
def _trace(compute: cutlass.Constexpr):
    compute()


def on_sm90(compute: Callable[[], T]) -> T:
    """What `compute` returns when it runs while a host function is traced for sm_90a."""
    found: list[T] = []
    cute.compile(_trace, lambda: found.append(compute()), options="--gpu-arch sm_90a")
    return found[0]
