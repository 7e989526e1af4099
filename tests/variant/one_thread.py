"""A kernel of one thread an element that applies operations of a variant's graph."""

from __future__ import annotations

from functools import cached_property

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutedsl_fa3.variant import lower
from cutedsl_fa3.variant.ops import OPS

BLOCK = 128


class OneThread:
    """out[i, n] = the n-th of `names`, applied to x[i] converted to each type it takes."""

    arch = "sm_90a"
    name = "one_thread"

    def __init__(self, names: tuple[str, ...]) -> None:
        self.calls = [(name, kind) for name in names for kind in OPS[name].accepts]

    @cached_property
    def key_text(self) -> str:
        return f"{self.name} {self.calls}"

    def fake_args(self) -> tuple:
        count = cute.sym_int()
        x = make_fake_tensor(Float32, (count,), (1,), assumed_align=4)
        out = make_fake_tensor(Float32, (count, len(self.calls)), (len(self.calls), 1))
        return x, out, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def host(self, x: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(x, out).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        i, _, _ = cute.arch.thread_idx()
        self.apply(x[i], out, i)

    def apply(self, x: Float32, out: cute.Tensor, i: Int32) -> None:
        for n, (name, kind) in enumerate(self.calls):
            x = x + 1.0  # nothing in common that the compiler could compute once
            typed = {"float": x, "int": Int32(x), "bool": x > 0.0}
            values = [typed[kind]] * OPS[name].arity
            if name == "where":
                values[0] = typed["bool"]
            elif len(values) == 2:
                values[1] = {"float": x + 2.0, "int": Int32(x) | 2, "bool": x > 1.0}[kind]
            result = lower.LOWER[name](*values)
            is_bool = isinstance(result, Boolean)
            out[i, n] = lower.select(result, 1.0, 0.0) if is_bool else Float32(result)
