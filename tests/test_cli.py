"""The command line, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, astuple
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cutedsl_fa3 import audit as audit_module
from cutedsl_fa3 import cache, tuned
from cutedsl_fa3.cases import Grid
from cutedsl_fa3.cli import app
from cutedsl_fa3.record import META, BackwardRow, CallRow, GemmRow, Record, Row, ScheduleRow
from cutedsl_fa3.tables import TABLES

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_the_module_lists_its_commands() -> None:
    command = [sys.executable, "-m", "cutedsl_fa3", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    commands = ("plan", "compile", "audit", "configs", "bench-gemm", "bench-call", "tune", "demo")
    assert all(name in result.stdout for name in commands)


@pytest.mark.parametrize("variant", ["full", "causal", "alibi", "softcap:20", "window:512,0"])
def test_plan_prints_a_page_for_every_named_variant(variant: str) -> None:
    result = run("plan", "--variant", variant, "--head-dim", "64")
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) > 10


def test_plan_takes_the_schedule_from_its_options() -> None:
    options = ("--tile-m", "128", "--tile-n", "64", "--stages", "3", "--consumers", "2")
    result = run("plan", *options, "--overlap", "intra")
    assert result.exit_code == 0, result.output
    assert "128 x 64" in result.output and "intra" in result.output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--variant", "unheard"), "unheard"),
        (("--stages", "9"), "stages"),
        (("--head-dim", "76"), "76"),
        (("--dtype", "fp64"), "fp64"),
        (("--stages", "4", "--tile-n", "256"), "bytes"),
    ],
)
def test_a_refusal_names_what_was_given_and_exits_with_2(options: tuple[str, ...], named: str):
    result = run("plan", *options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("refused: ") and named in result.stderr


@pytest.mark.compile
def test_plan_and_compile_say_why_a_kernel_is_compiled(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    for known in ("_memory", "_origins", "_known"):  # kernels of other tests of this process
        monkeypatch.setattr(cache, known, {})
    options = ("--head-dim", "64", "--consumers", "2", "--tile-m", "128", "--overlap", "intra")
    first = run("plan", *options, "--tile-n", "64")
    assert "kernel   will be compiled as the first forward_sm90" in first.output
    assert "compiled as the first forward_sm90" in run("compile", *options, "--tile-n", "64").output
    second = run("plan", *options, "--tile-n", "80")
    assert "kernel   will be recompiled because schedule: tile_n 64 -> 80" in second.output


@pytest.mark.compile
def test_compile_writes_an_sm90_cubin(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    result = run("compile", "--head-dim", "64", "--output", str(path))
    assert result.exit_code == 0, result.output
    assert "sm_90a" in result.output
    assert path.read_bytes().startswith(b"\x7fELF")


@pytest.mark.compile
def test_audit_prints_its_checks_and_exits_with_0() -> None:
    result = run("audit", "--head-dim", "64")
    assert result.exit_code == 0, result.output
    assert "HGMMA" in result.output and "UTMALDG" in result.output


@pytest.mark.compile
def test_audit_exits_with_1_on_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module.Report, "ok", property(lambda report: False))
    assert run("audit", "--head-dim", "64").exit_code == 1


@pytest.mark.parametrize(
    "command", ["bench", "bench-backward", "bench-gemm", "bench-variants", "tune"]
)
def test_bench_without_a_gpu_says_what_it_needs(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(command)
    assert result.exit_code == 1
    assert "SM90" in result.stderr


def test_bench_refuses_an_unknown_provider() -> None:
    result = run("bench", "--providers", "fa3,fa9")
    assert result.exit_code == 2
    assert "fa9" in result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--size", "1,2"), "--size 1,2"),
        (("--clusters", "2"), "cluster '2'"),
        (("--stages", "5"), "bytes are needed"),
        (("--dtype", "fp8"), "fp8"),
    ],
)
def test_bench_gemm_refuses_naming_what_was_given(options: tuple[str, ...], named: str) -> None:
    result = run("bench-gemm", *options)
    assert result.exit_code == 2, result.output
    assert named in result.stderr


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A GPU that is there, and a clean tree."""
    meta = {name: name.upper() for name in META} | {"date": "2026-11-29T12:00:00+00:00"}
    monkeypatch.setattr("cutedsl_fa3.bench.require_gpu", lambda: None)
    monkeypatch.setattr("cutedsl_fa3.record.collect", lambda commit, dirty: dict(meta))
    return meta


def measured_row(case) -> Row:
    return Row(*astuple(case), "fa3", "forward", ms=1.0, tflops=1.0, max_error=0.1, samples=(1.0,))


def test_bench_writes_one_record_of_all_cases(pretended, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cutedsl_fa3.bench.measure", lambda case, *rest: [measured_row(case)])
    result = run("bench", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.iterdir()
    record = Record.read(path)
    assert len(record.rows) == len(Grid().cases()) and "partial" not in record.meta
    assert {row.seqlen_q for row in record.rows} == {1024, 4096, 16384}
    assert result.output.count("TFLOP/s (") == len(Grid().cases())


def test_bench_variants_writes_one_record_of_all_groups(
    pretended, monkeypatch, tmp_path: Path
) -> None:
    def measure(cases, *rest) -> list[Row]:
        return [measured_row(case) for case in cases]

    monkeypatch.setattr("cutedsl_fa3.bench.measure_together", measure)
    result = run(
        "bench-variants", "--variant", "alibi", "--variant", "sink", "--out", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("variants-*.json")
    record = Record.read(path)
    assert "partial" not in record.meta
    assert [(row.head_dim, row.variant) for row in record.rows] == [
        (d, name) for d in (64, 128) for name in ("alibi", "sink", "causal")
    ]


def test_tune_writes_one_record_of_pairs_of_head_sizes(pretended, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("cutedsl_fa3.tuning.measure", lambda case, *rest: [measured_row(case)])
    result = run("tune", "--head-dims", "192x128,96", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("tune-*.json")
    sizes = [(row.head_dim, row.head_dim_v) for row in Record.read(path).rows]
    assert sizes == [(192, 128)] * 2 + [(96, 96)] * 2


@pytest.mark.parametrize("command", ["bench", "bench-variants", "tune"])
def test_measurements_refuse_what_is_no_head_size(command: str) -> None:
    result = run(command, "--head-dims", "64,128by64")
    assert result.exit_code == 2
    assert "128by64" in result.stderr and "192x128" in result.stderr


def test_bench_leaves_what_it_measured_where_a_later_case_fails(
    pretended, monkeypatch, tmp_path: Path
) -> None:
    def measure(case, *rest) -> list[Row]:
        if case.seqlen_q == 16384:
            raise RuntimeError("a kernel failed")
        return [measured_row(case)]

    monkeypatch.setattr("cutedsl_fa3.bench.measure", measure)
    result = run("bench", "--out", str(tmp_path))
    assert result.exit_code == 1 and "a kernel failed" in str(result.exception)
    (path,) = tmp_path.iterdir()
    record = Record.read(path)
    assert record.meta["partial"] is True
    assert [row.seqlen_q for row in record.rows] == [1024, 4096]


@pytest.fixture
def every_kind(pretended, monkeypatch) -> list[str]:
    """Measurements of each kind that take no time; which timing each was asked for."""
    asked: list[str] = []

    def plain(case, providers, timing, *rest) -> list[Row]:
        asked.append(timing.name)
        return [measured_row(case)]

    def together(cases, providers, timing, *rest) -> list[Row]:
        asked.append(timing.name)
        return [measured_row(case) for case in cases]

    def gemm(size, chosen, timing, *rest) -> list[GemmRow]:
        asked.append(timing.name)
        sizes = {"m": 1, "n": 1, "k": 1, "dtype": "bf16", "tile_m": 1, "tile_n": 1, "stages": 1}
        rest = {"consumers": 1, "cluster": (1, 1), "ms": 1.0, "tflops": 1.0, "max_error": 0.1}
        return [GemmRow("cutedsl_fa3", **sizes, **rest, samples=(1.0,))]

    monkeypatch.setattr("cutedsl_fa3.bench.measure", plain)
    monkeypatch.setattr("cutedsl_fa3.bench.measure_together", together)

    def backward(cases, providers, timing, *rest) -> list[BackwardRow]:
        asked.append(timing.name)
        row = {"ms": 1.0, "tflops": 1.0, "max_error": 0.1, "samples": (1.0,)}
        row |= {"provider": "fa4", "direction": "backward"}
        return [BackwardRow(**vars(case), **row) for case in cases]

    monkeypatch.setattr("cutedsl_fa3.bench_gemm.measure", gemm)
    monkeypatch.setattr("cutedsl_fa3.bench_backward.measure_together", backward)
    monkeypatch.setattr("cutedsl_fa3.bench_backward.compiled_ahead", lambda *rest: None)
    monkeypatch.setattr("cutedsl_fa3.bench_backward.peaks", lambda *rest: iter([]))
    call = CallRow("cached call", 0, 1.0, (1.0,))
    monkeypatch.setattr("cutedsl_fa3.bench_call.measure", lambda report: iter([call]))
    return asked


def test_bench_peers_writes_a_record_for_every_table_of_the_readme(every_kind, tmp_path) -> None:
    result = run("bench", "--peers", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    written = sorted(path.name.partition("-")[0] for path in tmp_path.iterdir())
    assert written == sorted(TABLES)
    assert set(every_kind) == {"burst"}
    for path in tmp_path.iterdir():
        assert "partial" not in Record.read(path).meta


def test_bench_peers_sustained_measures_both_timings_and_the_host_once(
    every_kind, tmp_path: Path
) -> None:
    result = run("bench", "--peers", "--sustained", "--rounds", "4", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    names = sorted(path.name.partition("-device")[0] for path in tmp_path.iterdir())
    of_kernels = ("backward", "bench", "gemm", "variants")
    assert names == sorted(["call", *of_kernels, *(f"{kind}-sustained" for kind in of_kernels)])
    half = len(every_kind) // 2
    assert every_kind == ["burst"] * half + ["sustained"] * half


def test_bench_peers_measures_the_chosen_tables_alone(every_kind, tmp_path: Path) -> None:
    result = run("bench", "--peers", "--tables", "call,gemm", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"call", "gemm"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tables", "bench,speed"), "speed"),
        (("--out", "one.json"), "one.json"),
        (("--dtypes", "fp16"), "--dtypes fp16"),
    ],
)
def test_bench_peers_refuses_before_anything_is_measured(every_kind, options, named) -> None:
    result = run("bench", "--peers", *options)
    assert result.exit_code == 2 and named in result.stderr
    assert not every_kind


def test_bench_peers_in_the_usual_place_also_writes_tables_and_bars(
    every_kind, monkeypatch, tmp_path: Path
) -> None:
    done = []
    monkeypatch.setattr("cutedsl_fa3.record.DATA", tmp_path)
    monkeypatch.setattr("cutedsl_fa3.cli_bench._write_tables", lambda: done.append("tables"))
    monkeypatch.setattr("cutedsl_fa3.cli_bench._draw", lambda: done.append("bars"))
    result = run("bench", "--peers", "--tables", "call")
    assert result.exit_code == 0, result.output
    assert done == ["tables", "bars"] and len(list(tmp_path.iterdir())) == 1


SHARED = {"--out", "--commit", "--allow-dirty"}


@pytest.mark.parametrize(
    ("command", "timed"),
    [
        ("bench", True),
        ("bench-backward", True),
        ("bench-variants", True),
        ("bench-gemm", True),
        ("bench-call", False),
    ],
)
def test_every_measurement_takes_the_shared_options(command: str, timed: bool) -> None:
    """The call has no rounds: it counts the host's time in samples of its own."""
    (found,) = (
        one
        for one in app.registered_groups[0].typer_instance.registered_commands
        if one.name == command
    )
    options = {f"--{name.replace('_', '-')}" for name in found.callback.__signature__.parameters}
    assert options >= SHARED
    assert ({"--rounds", "--seed", "--sustained"} <= options) == timed


def test_what_was_tuned_here_is_set_aside_while_defaults_are_measured(
    pretended, monkeypatch, tmp_path: Path
) -> None:
    aside = []

    def measure(case, *rest) -> list[Row]:
        aside.append(tuned._aside)
        return [measured_row(case)]

    monkeypatch.setattr("cutedsl_fa3.bench.measure", measure)
    before = tuned._aside
    run("bench", "--head-dims", "64", "--out", str(tmp_path))
    assert set(aside) == {before + 1} and tuned._aside == before


def test_tune_table_compiles_then_measures_what_is_left_in_one_record(
    pretended, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "cutedsl_fa3.evidence.compiled_ahead", lambda plans, workers, report: plans[:2]
    )
    seen = []

    def measure(case, chosen, timing, *rest) -> list[ScheduleRow]:
        seen.append((case.variant, timing.rounds))
        return [
            ScheduleRow(**vars(case), schedule=asdict(one), ms=1.0, tflops=1.0, samples=(1.0,) * 5)
            for one in chosen
        ]

    monkeypatch.setattr("cutedsl_fa3.tuning.measure", measure)
    result = run("tune", "--table", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("table-") and seen == [("full", 5), ("causal", 5)]
    assert '64 light         holds  "1 1;' in result.output


@pytest.mark.compile
def test_demo_without_a_gpu_compiles_audits_and_says_what_a_gpu_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("demo")
    assert result.exit_code == 0, result.output
    for part in ("sm_90a", "HGMMA", "Not run here", "would now run"):
        assert part in result.output


@pytest.mark.gpu
@pytest.mark.slow
def test_demo_on_a_gpu_runs_verifies_and_times() -> None:
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert "agree with fp64" in result.output and "TFLOP/s" in result.output
