"""CuTe's static layout algebra outside a kernel, so that layouts can be printed and tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def host_cute() -> Iterator[None]:
    """A scope in which CuTe layouts with static shapes evaluate to Python integers.

    Inside it, `cute.make_layout((8, 64), stride=(64, 1))((3, 5))` is the integer 197. Nothing can
    be launched from it and no tensor has data. CuTe refuses layout algebra outside a kernel because
    it builds compiler IR; the scope is an empty module that collects that IR and is thrown away.

    Source: cutlass._mlir is not a documented interface; this is the only place that uses it.
    """
    # Imported here: the rest of the pure part works without loading the compiler.
    from cutlass._mlir import ir

    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            yield
