"""What the instructions of the card can and cannot do, read in machine code made here.

The design leans on these: a producer of 24 registers, one thread that issues a copy, zero fill
instead of NaN fill in front of the tensor cores. Mnemonics are those of the compiler in use.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from cutedsl_fa3 import Variant, masks
from cutedsl_fa3.audit import disassemble
from cutedsl_fa3.compile import Compiled, compile_kernel
from cutedsl_fa3.inline_ptx import PtxError, machine_code
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.sass import Instruction, functions

pytestmark = pytest.mark.compile

WIDTHS = {"f16": 16, "f16x2": 32, "bf16": 16, "bf16x2": 32, "f32": 32, "f64": 64}
HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def code(compiled: Compiled) -> list[Instruction]:
    return [i for function in functions(disassemble(compiled.cubin)) for i in function.code]


def fma(kind: str, modifier: str) -> str:
    """PTX of a * a + a at a type, whose bits are the lowest of a word."""
    width = WIDTHS[kind]
    return (
        f"{{\n.reg .b{width} a;\ncvt.u{width}.u64 a, {{$r0}};\n"
        f"fma.rn{modifier}.{kind} a, a, a, a;\ncvt.u64.u{width} {{$w0}}, a;\n}}"
    )


def cp_async(cache: str, size: str) -> str:
    """PTX that copies 16 bytes; `size` is empty, or says to read only n of them."""
    return (
        "{\n.reg .b32 s, n;\n.reg .b64 t;\ncvt.u64.u32 t, {$r2};\ncvt.u32.u64 s, t;\n"
        f"cvt.u32.u64 n, {{$r0}};\ncp.async.{cache}.shared.global [s], [{{$r1}}], 16{size};\n"
        "cp.async.wait_all;\nmov.b64 {$w0}, {$r0};\n}"
    )


def wgmma(modifier: str = "", k: int = 16, types: str = "bf16.bf16", majors: str = ", 0, 0") -> str:
    """PTX of one product of 64 x 8 x k, with a modifier behind its shape."""
    held = "d0, d1, d2, d3"
    return (
        f"{{\n.reg .f32 {held};\n.reg .pred p;\n.reg .b32 w;\n"
        "mov.f32 d0, 0f00000000;\nmov.f32 d1, d0;\nmov.f32 d2, d0;\nmov.f32 d3, d0;\n"
        "setp.ne.u64 p, {$r0}, 0;\nwgmma.fence.sync.aligned;\n"
        f"wgmma.mma_async.sync.aligned.m64n8k{k}{modifier}.f32.{types} "
        f"{{{held}}}, {{$r0}}, {{$r1}}, p, 1, 1{majors};\n"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
        "mov.b32 w, d0;\ncvt.u64.u32 {$w0}, w;\n}"
    )


@dataclass(frozen=True)
class Made:
    """The machine code of a forward, and of a GEMM whose CTAs share a tile by pairs."""

    forward: list[Instruction]
    gemm: list[Instruction]

    def named(self, opcode: str) -> list[Instruction]:
        return [i for i in (*self.forward, *self.gemm) if (i.opcode + ".").startswith(opcode + ".")]


@pytest.fixture(scope="module")
def kernels() -> Made:
    plan = Plan.default(Variant(mask=masks.causal), Problem("bf16", 64, 64))
    shared = GemmSm90(Schedule(128, 128, 2, 2, "none", cluster=(2, 1)))
    return Made(*(code(compile_kernel(kernel)) for kernel in (plan.kernel, shared)))


def test_a_tma_copy_takes_address_coordinates_and_descriptor_from_uniform_registers(kernels):
    """UTMALDG [UR..], [UR..]: shared address, mbarrier and coordinates in a row of uniform
    registers, then the descriptor's address. Behind them stands desc[URZ], the descriptor of the
    cache policy, which a claim of "two operands" leaves out. No vector register takes part."""
    copies = kernels.named("UTMALDG")
    assert copies
    for copy in copies:
        assert re.match(r"\[UR\d+\], \[UR\d+\]", copy.operands), copy
        assert not re.search(r"(?<!U)R\d", copy.operands), copy


def test_a_copy_shared_in_a_cluster_is_multicast_by_a_mask_in_a_uniform_register(kernels):
    multicast = [i for i in kernels.gemm if ".MULTICAST" in i.opcode]
    assert [i.opcode for i in multicast] == ["UTMALDG.2D.MULTICAST"]
    assert re.fullmatch(r"\[UR\d+\], \[UR\d+\], UR\d+, desc\[URZ\]", multicast[0].operands)
    assert len([i for i in kernels.gemm if i.opcode == "UTMALDG.2D"]) == 1, "the tile not shared"
    assert not [i for i in kernels.forward if ".MULTICAST" in i.opcode], "no cluster, no multicast"


def test_arriving_with_a_number_of_bytes_is_syncs_arrive_trans64(kernels):
    """As every arrival is: one without bytes has the modifier A1T0 (one arrival, no transaction),
    so the name alone does not show that bytes are expected; the register with their number does."""
    with_bytes = kernels.named("SYNCS.ARRIVE.TRANS64")
    expecting = [i for i in with_bytes if "A1T0" not in i.opcode]
    plain = [i for i in kernels.forward if i.opcode == "SYNCS.ARRIVE.TRANS64.A1T0"]
    assert len([i for i in expecting if i in kernels.forward]) == 3, "of Q, K and V"
    assert all(re.search(r"\], R\d+$", i.operands) for i in expecting)
    assert plain and all(i.operands.endswith("], RZ") for i in plain)


def test_one_thread_of_a_warp_is_chosen_by_elect(kernels):
    chosen = kernels.named("ELECT")
    assert chosen and all(re.fullmatch(r"U?P\d, UR(Z|\d+), U?PT", i.operands) for i in chosen)


@pytest.mark.parametrize(
    ("cache", "opcode"),
    [("ca", "LDGSTS.E.128.ZFILL"), ("cg", "LDGSTS.E.BYPASS.128.ZFILL")],
)
def test_cp_async_with_a_source_size_fills_the_rest_with_zeros(cache, opcode):
    """Every thread gives addresses of its own in vector registers, unlike a TMA copy."""
    (filling,), (whole,) = (
        [i for i in machine_code(cp_async(cache, size)) if i.family == "LDGSTS"]
        for size in (", n", "")
    )
    assert filling.opcode == opcode
    assert whole.opcode == opcode.removesuffix(".ZFILL")
    assert re.match(r"\[R\d+", filling.operands)


@pytest.mark.parametrize("kind", HALVES)
def test_fma_skips_what_lies_out_of_bounds_in_half_precision(kind):
    assert any(".OOB" in i.opcode for i in machine_code(fma(kind, ".oob")))
    assert not any(".OOB" in i.opcode for i in machine_code(fma(kind, "")))


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_fma_does_not_skip_what_lies_out_of_bounds_in_other_precisions(kind):
    machine_code(fma(kind, ""))
    refused(fma(kind, ".oob"), "Illegal modifier '.oob' for instruction 'fma'")


def test_wgmma_has_no_way_to_skip_what_lies_out_of_bounds(kernels):
    """So NaN fill would reach the sums, and the tensor maps here fill with zeros."""
    assert [i.opcode for i in machine_code(wgmma()) if i.family == "HGMMA"] == [
        "HGMMA.64x8x16.F32.BF16"
    ]
    refused(wgmma(".oob"), "Illegal modifier '.oob' for instruction 'wgmma.mma_async'")
    assert kernels.named("HGMMA") and not any("OOB" in i.opcode for i in kernels.named("HGMMA"))


def test_a_product_of_fp8_takes_two_operands_of_fp8_and_twice_the_depth():
    """So S = Q K^T with Q in fp16 and K in fp8 is no instruction: both are rounded, or neither."""
    fp8 = [wgmma(k=32, types=f"e4m3.{b}", majors="") for b in ("e4m3", "e5m2")]
    for ptx, kinds in zip(fp8, ("E4M3.E4M3", "E4M3.E5M2"), strict=True):
        (product,) = (i.opcode for i in machine_code(ptx) if "GMMA" in i.opcode)
        assert product == f"QGMMA.64x8x32.F32.{kinds}"
    for depth in (16, 32):
        refused(wgmma(k=depth, types="f16.e4m3", majors=""), "wgmma.mma_async")


def refused(ptx: str, said: str) -> None:
    """That ptxas refuses inline PTX for this reason."""
    with pytest.raises(PtxError) as caught:
        machine_code(ptx)
    assert said in str(caught.value)
