"""An audit counts instructions, holds them against the tables, and accepts no spill."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest
from small_kernel import Scale, Smem, TileGemm

from cutedsl_fa3 import audit as audit_module
from cutedsl_fa3.audit import AuditError, Census, audit, census_of, find_nvdisasm, take_census
from cutedsl_fa3.compile import Compiled, compile_kernel
from cutedsl_fa3.pipelines import Role
from cutedsl_fa3.pipelines.expect import Expect


@pytest.fixture(scope="module")
def gemm() -> Compiled:
    return compile_kernel(TileGemm())


@pytest.mark.compile
def test_census_of_a_known_kernel(gemm):
    census = take_census(gemm.cubin)
    assert census.count("UTMALDG") == census.count("UTMALDG.2D") == 2
    assert census.count("HGMMA") == census.count("HGMMA.64x64x16") == 4
    assert census.count("HGMMA.64x64x16.F32.BF16") == 4
    assert census.count("HGMMA.64x64x1") == 0
    assert census.count("SYNCS.EXCH") == 1  # one barrier is initialised
    assert census.count("FMUL") == 64 * 64 // 128
    assert census.count("UTMASTG") == census.count("LDL") == census.count("STL") == 0
    assert f"{4:6d}  HGMMA.64x64x16.F32.BF16" in str(census)


@pytest.mark.compile
def test_kernel_that_keeps_its_promises_passes(gemm):
    report = audit(TileGemm(), gemm)
    assert report.ok, report
    assert report.failures == ()
    page = str(report)
    assert page.startswith(f"{gemm.name} for sm_90a: ok")
    for line in ("UTMALDG: 2, wanted exactly 2 (one box each of a and b)", "16392 B", "registers"):
        assert line in page


@pytest.mark.compile
@pytest.mark.parametrize(
    "planted",
    [
        Expect("UTMALDG", "exactly", 3, "planted"),
        Expect("HGMMA.64x128x16", "at least", 1, "planted"),
        Expect("UTMALDG.2D", "none", 0, "planted"),
    ],
    ids=str,
)
def test_planted_wrong_promise_is_rejected(gemm, planted):
    report = audit(TileGemm(promised=(planted,)), gemm)
    assert not report.ok
    (failure,) = report.failures
    assert (failure.subject, failure.why) == (planted.opcode, "planted")
    assert "FAIL" in str(report)


@pytest.mark.compile
def test_spilling_kernel_fails_though_its_promises_hold():
    kernel = Scale(2.0, live=63)
    report = audit(kernel, compile_kernel(kernel))
    assert {check.subject for check in report.failures} == {"spills", "LDL, STL"}


@pytest.mark.compile
def test_repaired_wgmma_wait_fails():
    kernel = TileGemm(wait=False)
    report = audit(kernel, compile_kernel(kernel))
    (failure,) = report.failures
    assert failure.subject == "C75xx advisories"
    assert "C7517" in failure.found


@pytest.mark.compile
def test_launch_that_asks_for_more_smem_than_planned_fails(gemm):
    kernel = TileGemm()
    kernel.smem = Smem(kernel.smem.total - 8)
    (failure,) = audit(kernel, gemm).failures
    assert failure.subject == "dynamic SMEM"


@pytest.mark.compile
def test_blackwell_code_is_counted_too():
    kernel = Scale(2.0, arch="sm_100a")
    report = audit(kernel, compile_kernel(kernel))
    assert report.ok, report
    assert report.census.count("LDG") == report.census.count("STG") == 1


def test_census_reads_predicates_and_ignores_labels():
    sass = """
.text.some_kernel_0:
        /*0000*/               @!P0 BRA `(.L_x_0) ;
        /*0010*/                   @!UP0 SYNCS.EXCH.64 URZ, [UR8+0x4000], UR4 ;
.L_x_0:
        /*10020*/              @P1 HGMMA.64x176x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*10030*/                   EXIT ;
"""
    expected = {"BRA": 1, "SYNCS.EXCH.64": 1, "HGMMA.64x176x16.F32.BF16": 1, "EXIT": 1}
    assert census_of(sass) == Census(expected)
    assert census_of(sass).total == 4


def test_empty_disassembly_is_an_error_and_not_a_clean_bill():
    with pytest.raises(AuditError, match="no instruction"):
        census_of("\t.target\tsm_90a\n")


def test_unreadable_cubin_is_an_error():
    with pytest.raises(AuditError, match=r"cannot read the cubin \(4 bytes\)"):
        take_census(b"\x7fELF")


def test_nvdisasm_comes_from_path_where_the_wheel_is_absent(tmp_path, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(audit_module.importlib.metadata, "files", absent)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AuditError, match="pip install nvidia-cuda-nvdisasm"):
        find_nvdisasm()
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert find_nvdisasm() == tool


@pytest.mark.compile
def test_an_expectation_never_follows_the_cubin(gemm):
    other = replace(gemm, cubin=compile_kernel(Scale(2.0)).cubin)
    report = audit(TileGemm(), other)
    assert {check.subject for check in report.failures} == {"UTMALDG", "HGMMA.64x64x16"}


@pytest.mark.compile
@pytest.mark.parametrize("more, ok", [(0, True), (8, False)], ids=["all", "one step more"])
def test_roles_that_ask_for_more_registers_than_the_launch_grants_fail(gemm, more, ok):
    kernel, launched = TileGemm(), 128
    kernel.roles = {"all": Role(4, launched + more)}
    resources = replace(gemm.resources, registers=launched)
    report = audit(kernel, replace(gemm, resources=resources))
    (check,) = (check for check in report.checks if check.subject == "role registers")
    assert (report.ok, check.ok) == (ok, ok)
    assert check.wanted == "at most 128 x 128 = 16384 in all"
    assert check.found == "16384" if ok else "all 128 x 136 = 17408 exceeds" in check.found
