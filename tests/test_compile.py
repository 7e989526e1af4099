"""Kernels become cubins without a GPU, under their own names, and launch only where they can."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import cutlass.cute as cute
import pytest
import torch
from small_kernel import EDGE, Scale, TileGemm

from cutedsl_fa3 import compile as compile_module
from cutedsl_fa3.audit import disassemble
from cutedsl_fa3.compile import Compiled, CompileError, DeviceError, compile_kernel

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def gemm() -> Compiled:
    return compile_kernel(TileGemm(), name="first")


@pytest.fixture(scope="module")
def blackwell() -> Compiled:
    return compile_kernel(Scale(2.0, arch="sm_100a"))


def elf_architecture(cubin: bytes) -> tuple[int, int]:
    """The machine of an ELF file and the SM number in its flags."""
    assert cubin[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", cubin, 18)
    (flags,) = struct.unpack_from("<I", cubin, 48)
    return machine, flags >> 8 & 0xFF


def test_both_architectures_give_cubins_of_their_own(gemm, blackwell):
    cuda_machine = 190
    assert elf_architecture(gemm.cubin) == (cuda_machine, 90)
    assert elf_architecture(blackwell.cubin) == (cuda_machine, 100)


def test_machine_code_and_host_object_carry_the_name(gemm):
    assert gemm.symbols == ("first_0",)
    assert ".text.first_0" in disassemble(gemm.cubin)
    assert b"__tvm_ffi_first\0" in gemm.object_code
    assert not any("cutlass" in symbol for symbol in gemm.symbols)


def test_default_name_tells_two_plans_apart():
    two, three = compile_kernel(Scale(2.0)), compile_kernel(Scale(3.0))
    assert two.name != three.name
    assert two.symbols != three.symbols
    assert two.cubin != three.cubin


def test_resources_are_those_of_the_kernel(gemm):
    assert gemm.resources.smem_dynamic == TileGemm().smem.total
    assert gemm.resources.spills == 0
    assert gemm.resources.stack == 0
    assert gemm.resources.registers >= EDGE * 64 // 128  # the accumulator alone
    assert gemm.resources.advisories == ()


def test_spills_are_reported():
    resources = compile_kernel(Scale(2.0, live=63)).resources
    assert resources.spill_stores > 0
    assert resources.spill_loads > 0
    assert resources.registers == 64


def test_missing_wgmma_wait_is_reported():
    (advisory,) = compile_kernel(TileGemm(wait=False)).resources.advisories
    assert advisory.startswith("C7517 ")


def test_compiled_kernel_loads_and_checks_arguments_without_a_gpu(gemm):
    tensor = torch.zeros(EDGE, EDGE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="device_type=cuda"):
        gemm.function(tensor, tensor, tensor.float(), 1.0)


def test_launch_without_a_gpu_says_no_cuda_device(gemm, monkeypatch):
    monkeypatch.setattr(compile_module, "device_capabilities", lambda: ())
    with pytest.raises(DeviceError, match=r"^no CUDA device: .* capability 9\.0"):
        _ = gemm.launch


def test_launch_on_another_architecture_is_refused_before_loading(monkeypatch):
    monkeypatch.setattr(compile_module, "device_capabilities", lambda: ((9, 0), (8, 0)))
    compiled = compile_kernel(Scale(5.0, arch="sm_100a"))
    with pytest.raises(DeviceError, match=r"sm_100a .* 10\.0 only; visible GPUs have 9\.0, 8\.0"):
        _ = compiled.launch
    assert "function" not in vars(compiled)


def test_unknown_architecture_is_refused_naming_the_valid_ones():
    with pytest.raises(CompileError, match=r"'sm_90'; valid: sm_90a, sm_100a"):
        compile_kernel(Scale(2.0, arch="sm_90"))


def test_eight_threads_compile_side_by_side():
    kernels = [Scale(float(i)) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(compile_kernel, kernels))
    assert len({each.cubin for each in compiled}) == 8
    assert len({each.name for each in compiled}) == 8


class Broken(Scale):
    """A host function that raises while it is traced."""

    @cute.jit
    def host(self, x: cute.Tensor, y: cute.Tensor, stream):
        raise ValueError("the author's own mistake")


class Stray(Scale):
    """A kernel that is no method, and so cannot be named."""

    @cute.jit
    def host(self, x: cute.Tensor, y: cute.Tensor, stream):
        nothing(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def nothing(x: cute.Tensor):
    x[0] = x[0]


def test_error_while_tracing_reaches_the_author_and_leaves_the_compiler_usable(blackwell):
    with pytest.raises(ValueError, match="the author's own mistake"):
        compile_kernel(Broken(2.0))
    assert compile_kernel(Scale(2.0, arch="sm_100a")).cubin == blackwell.cubin


def test_kernel_without_source_leaves_the_compiler_usable(blackwell):
    space = {"cute": cute, "Scale": Scale}
    exec(
        "class Typed(Scale):\n    @cute.jit\n    def host(self, x, y, stream):\n        pass\n",
        space,
    )
    with pytest.raises(Exception, match="source"):
        compile_kernel(space["Typed"](2.0))
    assert compile_kernel(Scale(2.0, arch="sm_100a")).cubin == blackwell.cubin


def test_kernel_outside_the_class_is_refused_because_it_cannot_be_named():
    with pytest.raises(CompileError, match="must be a method of the kernel's class"):
        compile_kernel(Stray(2.0))


@pytest.mark.gpu
def test_launch_computes_the_tile(gemm):
    a, b = (torch.randn(EDGE, EDGE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty(EDGE, EDGE, device="cuda")
    gemm.launch(a, b, c, 0.5)
    torch.testing.assert_close(c.double(), 0.5 * (a.double() @ b.double().T), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_launch_runs_on_the_callers_stream():
    compiled = compile_kernel(Scale(2.0))
    x = torch.zeros(1 << 20, device="cuda")
    y = torch.empty_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.fill_(3.0)
        compiled.launch(x, y)
    side.synchronize()
    assert torch.all(y == 6.0)


@pytest.mark.gpu
def test_launch_of_blackwell_code_is_refused_here(blackwell):
    with pytest.raises(DeviceError, match=r"sm_100a .* visible GPUs have 9\.0"):
        _ = blackwell.launch
