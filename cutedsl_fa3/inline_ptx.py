"""What machine code some PTX becomes, and what ptxas says where it is none.

    [str(i.opcode) for i in machine_code("add.u64 {$w0}, {$r0}, {$r1};")]

For questions to the instruction set: whether a modifier exists, what an instruction is called in
SASS. The PTX is compiled in a kernel of one warp, which is never launched.
"""

from __future__ import annotations

import re

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from .audit import disassemble
from .compile import compile_kernel
from .sass import Instruction, functions

_ERROR = re.compile(r"\berror\s*:\s*(.*?)\s*(?=ptxas|$)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class PtxError(ValueError):
    """PTX that ptxas refuses, in its words."""


class InlinePtx:
    """One warp that puts the words of a vector through some PTX.

    `ptx` has {$r0}, a word of 64 bits; {$r1}, its address in global memory; {$r2}, the address of
    16 bytes in shared memory; and writes {$w0}.
    """

    arch = "sm_90a"
    name = "inline_ptx"

    def __init__(self, ptx: str) -> None:
        self.key_text = self.ptx = ptx

    def fake_args(self) -> tuple:
        """(words, stream)."""
        words = make_fake_compact_tensor(Int64, (64,), stride_order=(0,), assumed_align=16)
        return words, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def host(self, words: cute.Tensor, stream):
        self.run(words).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def run(self, words: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        shared = cutlass.memory.SmemAllocator().allocate_array(Int64, 2)
        words[thread] = cute.arch.inline_ptx(
            self.ptx,
            write_only_types=[Int64],
            read_only_args=[words[thread], words.iterator.toint(), shared.toint()],
        )


def machine_code(ptx: str) -> list[Instruction]:
    """The SASS of a kernel around some PTX, as `InlinePtx` takes it.

    Raises: PtxError where ptxas refuses it; AuditError where nvdisasm is absent.
    """
    try:
        compiled = compile_kernel(InlinePtx(ptx))
    except Exception as error:
        said = _COLOUR.sub("", str(error))
        found = _ERROR.search(said[said.find("ptxas") :]) if "ptxas" in said else None
        if found is None:
            raise
        raise PtxError(" ".join(found[1].split())) from None
    return [i for function in functions(disassemble(compiled.cubin)) for i in function.code]
