"""The GEMM on both architectures: what is compiled, what the tables promise, right numbers."""

from __future__ import annotations

import math
import re

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.utils import sm100 as sm100_utils

from cutedsl_fa3 import cache, contract
from cutedsl_fa3.audit import audit
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.errors import LayoutError, Unsupported
from cutedsl_fa3.gemm import DEFAULT, gemm
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.kernels.sm100.gemm import GemmSm100
from cutedsl_fa3.layouts import Accumulator, Tile, tcgen05
from cutedsl_fa3.pipelines import Schedule, ScheduleError

STAGES = (1, 2, 3, 4)
CLUSTERS = ((1, 1), (2, 1), (1, 2))


def schedule(tile_m=128, tile_n=128, stages=2, consumers=2, cluster=(1, 1)) -> Schedule:
    return Schedule(tile_m, tile_n, stages, consumers, overlap="none", cluster=cluster)


def sm100(tile_m=128, tile_n=128, stages=2, cluster=(1, 1), dtype=cutlass.BFloat16) -> GemmSm100:
    return GemmSm100(schedule(tile_m, tile_n, stages, 1, cluster), dtype)


def assert_kept(kernel) -> None:
    """The machine code has no spill, no advisory, what the tables promise, and is as accepted."""
    compiled = compile_kernel(kernel)
    report = audit(kernel, compiled)
    assert report.ok, report
    assert compiled.resources.spills == 0
    assert not compiled.resources.advisories
    broken = contract.broken(contract.label(kernel), compiled)
    assert not broken, broken


@pytest.mark.compile
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("stages", STAGES)
def test_sm90_code_is_what_the_tables_promise(stages, cluster):
    assert_kept(GemmSm90(schedule(stages=stages, cluster=cluster)))


@pytest.mark.compile
@pytest.mark.parametrize(
    ("tile_m", "tile_n", "consumers"), [(128, 256, 2), (64, 128, 1), (192, 64, 3)]
)
def test_sm90_tiles_and_consumers_change_the_promise_with_the_code(tile_m, tile_n, consumers):
    assert_kept(GemmSm90(schedule(tile_m, tile_n, consumers=consumers), cutlass.Float16))


@pytest.mark.compile
@pytest.mark.parametrize("stages", (*STAGES, 6))
def test_sm100_code_is_what_the_tables_promise(stages):
    assert_kept(sm100(stages=stages))


@pytest.mark.compile
@pytest.mark.parametrize(
    ("tile_m", "tile_n", "cluster", "dtype"),
    [
        (128, 256, (1, 1), cutlass.Float16),
        (256, 128, (1, 1), cutlass.BFloat16),
        (128, 48, (2, 1), cutlass.BFloat16),
        (128, 128, (1, 2), cutlass.BFloat16),
    ],
)
def test_sm100_tiles_and_clusters_change_the_promise_with_the_code(tile_m, tile_n, cluster, dtype):
    assert_kept(sm100(tile_m, tile_n, cluster=cluster, dtype=dtype))


@pytest.mark.compile
@pytest.mark.parametrize("make", [lambda: GemmSm90(schedule()), sm100])
def test_a_tile_table_that_the_code_does_not_follow_fails_the_audit(make):
    kernel = make()
    compiled = compile_kernel(kernel)
    kernel.tiles["b"] = Tile(kernel.tiles["b"].rows, 2 * kernel.tile_k, kernel.dtype)
    (failure,) = audit(kernel, compiled).failures
    assert failure.subject == "UTMALDG"
    assert (failure.wanted, failure.found) == ("exactly 3", "2")


@pytest.mark.compile
def test_every_table_of_the_sm100_kernel_has_a_promise_that_can_fail():
    kernel = sm100()
    compiled = compile_kernel(kernel)
    kernel.tiles["c"] = Tile(128, 64, kernel.dtype)
    kernel.accumulators["acc"] = Accumulator(128, 64)
    kernel.rings.pop("ab")
    failed = {check.subject for check in audit(kernel, compiled).failures}
    assert failed >= {"UTMASTG", "LDTM", "SYNCS.EXCH.64"}


class DslLayouts(GemmSm100):
    """The same kernel, its operands described by the layouts that the DSL makes for UMMA."""

    @cute.jit
    def mma(self, io, smem, ports, thread):
        umma = tcgen05.tiled_mma(self.dtype, self.schedule.tile_n)
        shape = (self.schedule.tile_m, self.schedule.tile_n, self.tile_k)
        layout_a = sm100_utils.make_smem_layout_a(umma, shape, self.dtype, self.schedule.stages)
        layout_b = sm100_utils.make_smem_layout_b(umma, shape, self.dtype, self.schedule.stages)
        a = umma.make_fragment_A(cute.make_tensor(smem.a.iterator, layout_a.outer))
        b = umma.make_fragment_B(cute.make_tensor(smem.b.iterator, layout_b.outer))
        acc = self.accumulator("acc", umma, smem)
        ring, filled = ports.ab, ports.acc.acquire_and_advance()
        target = acc[None, None, None, filled.index]
        for k in cutlass.range(self.k_tiles(io), unroll=1):
            slot = ring.wait_and_advance()
            at = (None, None, None, slot.index)
            tcgen05.issue(umma, target, a[at], b[at], accumulate=k > 0)
            slot.release()
        filled.commit()


@pytest.mark.compile
@pytest.mark.parametrize(("tile_m", "tile_n"), [(128, 128), (256, 96)])
def test_umma_reads_a_tile_exactly_as_it_reads_the_layouts_made_for_it(tile_m, tile_n):
    shape = schedule(tile_m, tile_n, consumers=1)
    ours, theirs = (compile_kernel(k(shape), name="gemm") for k in (GemmSm100, DslLayouts))
    assert ours.cubin == theirs.cubin


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (lambda: GemmSm90(schedule(256, 256, stages=4)), 4 * 65536 + 2 * 4 * 8),
        (lambda: sm100(128, 256, stages=5), 5 * 49152 + 2 * 6 * 8 + 4),
    ],
)
def test_too_deep_is_refused_naming_bytes_and_limit(make, needed):
    with pytest.raises(LayoutError, match=rf"{needed} bytes are needed and a block has 232448"):
        make()


def test_sm100_takes_one_warpgroup_of_consumers():
    with pytest.raises(ScheduleError, match=r"consumers = 2: .* use consumers=1"):
        GemmSm100(schedule())


def test_sm100_refuses_an_accumulator_that_tensor_memory_has_no_lanes_for():
    with pytest.raises(LayoutError, match=r"accumulator rows = 64: .* use 128"):
        sm100(tile_m=64)


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (None, zeros(4, 8), Unsupported, "a = NoneType: a torch.Tensor"),
        (zeros(3, 8, 1), zeros(4, 8), Unsupported, r"a has shape (3, 8, 1): (m, k)"),
        (zeros(3, 8), zeros(8), Unsupported, r"b has shape (8,): (n, k)"),
        (zeros(3, 8).float(), zeros(4, 8), Unsupported, "a is torch.float32: supported are"),
        (zeros(3, 8), zeros(4, 8).half(), Unsupported, "b is torch.float16 but a is"),
        (zeros(3, 8), zeros(4, 16), Unsupported, "b has k = 16 but a has k = 8"),
        (zeros(3, 0), zeros(4, 0), Unsupported, "a has k = 0: k of 1 or more"),
        (zeros(8, 3).T, zeros(4, 8), Unsupported, "a has strides (1, 3): rows must be contiguous"),
        (zeros(3, 7), zeros(4, 7), LayoutError, "a (3, 7): .*stride alignment: given 14 bytes"),
        (zeros(3, 8), zeros(4, 9)[:, :8], LayoutError, "b (4, 8): .*stride alignment: given 18"),
        (zeros(3, 8), zeros(4, 8), Unsupported, "a is on cpu: a CUDA device"),
    ],
)
def test_gemm_refuses_naming_argument_value_and_what_is_allowed(a, b, error, message):
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(error, match=pattern):
        gemm(a, b)


def test_gemm_has_no_gradient_and_says_so():
    with pytest.raises(Unsupported, match=r"a requires a gradient.*a\.detach\(\)"):
        gemm(zeros(3, 8).requires_grad_(), zeros(4, 8))


def test_gemm_of_no_rows_is_empty():
    assert gemm(zeros(0, 8), zeros(4, 8)).shape == (0, 4)


SIZES = [(1, 8, 8), (129, 264, 72), (1000, 520, 328), (256, 256, 64)]
DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
GUARD = 3  # rows behind C that nothing may touch


def relative_error(made: Schedule, m, n, k, dtype=torch.bfloat16) -> float:
    """Error of C against fp32; C is NaN before, and rows behind it must stay NaN."""
    torch.manual_seed(m + n + k)
    a, b = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (m, n))
    c = torch.full((m + GUARD, n), math.nan, device="cuda", dtype=dtype)
    cache.get(GemmSm90(made, DTYPES[dtype])).launch(a, b, c[:m])
    assert c[m:].isnan().all()
    exact = a.float() @ b.float().T
    return ((c[:m].float() - exact).norm() / exact.norm()).item()


@pytest.fixture(autouse=True)
def fp32_without_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("stages", STAGES)
def test_every_depth_and_cluster_is_right_on_ragged_sizes(stages, cluster):
    made = schedule(stages=stages, cluster=cluster)
    for size in SIZES:
        assert relative_error(made, *size) < 3e-3, size


@pytest.mark.gpu
@pytest.mark.parametrize(
    "made",
    [
        DEFAULT,
        schedule(64, 128, consumers=1),
        schedule(192, 128, consumers=3),
        schedule(128, 256, 3, cluster=(2, 2)),
        schedule(128, 64, 6, cluster=(1, 4)),
    ],
)
def test_every_tile_is_right_in_both_dtypes(made):
    for size in SIZES:
        assert relative_error(made, *size) < 3e-3, size
        assert relative_error(made, *size, dtype=torch.float16) < 4e-4, size


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 7, 264])
def test_gemm_pads_the_rows_of_c_and_reads_strided_rows_in_place(n):
    a = torch.randn(100, 128, device="cuda").bfloat16()[:, 16:88]
    b = torch.randn(n, 72, device="cuda").bfloat16()
    c = gemm(a, b)
    exact = a.float() @ b.float().T
    assert c.shape == (100, n)
    assert (c.float() - exact).norm() / exact.norm() < 3e-3


@pytest.mark.gpu
def test_gemm_runs_on_the_current_stream():
    a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    exact = gemm(a, b)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # work on any other stream would overtake this
        a.mul_(2)
        twice = gemm(a, b)
    stream.synchronize()
    assert torch.equal(twice, 2 * exact)
