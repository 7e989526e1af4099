"""The ladder's measurement: what is measured, checked and recorded; clocks and kernels replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cutedsl_fa3 import bench, bench_ladder, record
from cutedsl_fa3.bench import Timing
from cutedsl_fa3.bench_ladder import cases, measure, rungs
from cutedsl_fa3.cases import Case
from cutedsl_fa3.checks import WrongResult
from cutedsl_fa3.cli import app
from cutedsl_fa3.kernels.sm90.ladder.tma import TmaWgmma
from cutedsl_fa3.ladder import STEPS, Rung
from cutedsl_fa3.peers import Inputs, Provider
from cutedsl_fa3.pipelines import Expect
from cutedsl_fa3.record import META, LadderRow, Record, newest, place
from cutedsl_fa3.reference import attention

SMALL = Case("causal", "bf16", 64, 64, 96, 96, 1, 2, 2)
ONE_MS = Timing("test", 0, 8, 7, lambda call, repeats: 1.0)


def by_torch(rung: Rung, inputs: Inputs):
    return lambda: attention(inputs.q, inputs.k, inputs.v, rung.plan.variant)


def rows_of(peers=(), report=lambda line: None, prepare=by_torch, case=SMALL):
    return measure(case, list(peers), ONE_MS, report, device="cpu", prepare=prepare)


def test_the_problems_are_both_sizes_full_and_causal_at_the_tokens_of_the_benchmark():
    found = cases()
    assert {(c.head_dim, c.variant) for c in found} == {
        (dim, variant) for dim in (64, 128) for variant in ("full", "causal")
    }
    assert {(c.batch * c.seqlen_q, c.heads * c.head_dim) for c in found} == {(16384, 2048)}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"head_dims": (96,)}, "head_dim = 96: the ladder has 64, 128"),
        ({"variants": ("alibi",)}, r"variants \['alibi'\] are not the ladder's: full, causal"),
        ({"dtype": "fp8"}, "fp8"),
    ],
)
def test_what_the_ladder_has_not_is_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        cases(**asked)


def test_every_step_and_every_other_depth_that_fits_is_measured():
    names = [rung.name for rung in rungs(SMALL)]
    assert names == [*(step.name for step in STEPS), "1 stage", "3 stages", "4 stages"]
    wide = [rung.name for rung in rungs(cases(head_dims=(128,))[0])]
    assert wide == [*(step.name for step in STEPS), "1 stage", "3 stages"]


def test_each_rung_and_peer_has_a_row_with_what_it_ran_on():
    def slow(inputs: Inputs):
        return lambda: attention(inputs.q, inputs.k, inputs.v, inputs.named.variant)

    said: list[str] = []
    rows = rows_of([Provider("slow", "torch", slow)], said.append)
    assert len(rows) == len(said) == len(rungs(SMALL)) + 1
    by_name = {row.rung: row for row in rows}
    first, last, peer = by_name["cp.async, mma.sync"], by_name["persistent"], by_name["slow"]
    assert (first.number, first.tile_m, first.threads, first.budgets) == (1, 128, 128, None)
    assert (last.number, last.tile_m, last.stages, last.budgets) == (10, 192, 2, (32, 160))
    assert by_name["4 stages"].number == last.number
    assert first.smem == 65536 and last.smem > by_name["1 stage"].smem
    assert (peer.number, peer.smem, peer.stages) == (0, None, None)
    for row in rows:
        assert len(row.samples) == 7 and 0 < row.max_error < 0.1
        assert row.tflops == pytest.approx(SMALL.flops / 1e9, abs=0.01)


def test_a_peer_that_is_absent_is_reported_and_left_out():
    def absent(inputs: Inputs):
        raise ImportError("no module named fast")

    said: list[str] = []
    rows = rows_of([Provider("fast", "fast", absent)], said.append)
    assert said[0] == "fast: ImportError: no module named fast"
    assert "fast" not in {row.rung for row in rows}


@pytest.mark.parametrize("spoil", ["a row", "scale"])
def test_a_wrong_step_has_no_time_but_an_error(spoil):
    def prepare(rung: Rung, inputs: Inputs):
        def call():
            out = by_torch(rung, inputs)()
            if rung.number == 3 and spoil == "scale":
                return out * 1.1
            if rung.number == 3:
                out[:, -1] = torch.nan
            return out

        return call

    with pytest.raises(WrongResult):
        rows_of(prepare=prepare)


def test_a_record_survives_writing_and_reading(tmp_path: Path):
    meta = {name: name.upper() for name in META} | {"date": "2026-11-30T12:00:00+00:00"}
    made = Record(meta, tuple(rows_of()))
    path = made.write(place(made.meta, tmp_path, "ladder"))
    assert path.name == "ladder-device-20261130-120000.json"
    read = Record.read(path)
    assert read == made and all(isinstance(row, LadderRow) for row in read.rows)
    assert newest(tmp_path, "ladder") == made


@pytest.mark.compile
def test_a_kernel_that_is_put_into_the_cache_is_audited(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEDSL_FA3_CACHE", str(tmp_path))
    made = bench_ladder._compile(SMALL, 2)
    assert made.rung == "3 WGMMA" and made.faults == ()
    assert "spills 0 B stored" in str(made)
    promise = Expect("UTMALDG", "none", 0, "a promise that the code does not keep")
    monkeypatch.setattr(TmaWgmma, "expected", lambda self: (promise,))
    (fault,) = bench_ladder._compile(SMALL, 2).faults
    assert "UTMALDG" in fault


def run(*options: str):
    return CliRunner().invoke(app, ["ladder", *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--head-dims", "64,x"), "--head-dims 64,x: valid are numbers by comma"),
        (("--head-dims", "96"), "head_dim = 96: the ladder has 64, 128"),
        (("--variant", "alibi"), "not the ladder's"),
        (("--peers", "fa9"), "providers ['fa9'] are unknown"),
    ],
)
def test_the_command_refuses_naming_the_option_and_what_is_allowed(options, message):
    result = run(*options)
    assert result.exit_code == 2 and message in result.output


def test_the_command_says_where_its_gpu_is_missing(monkeypatch):
    def absent():
        raise bench.NoDevice("no CUDA device")

    monkeypatch.setattr(bench, "require_gpu", absent)
    result = run()
    assert result.exit_code == 1 and "no CUDA device" in result.output


@pytest.mark.parametrize(("faults", "code"), [((), 0), (("spills: 8 B",), 1)])
def test_compiling_all_ends_with_the_number_that_fail(monkeypatch, faults, code):
    one = bench_ladder.Compiled(SMALL, "3 WGMMA", "126 registers", faults)
    monkeypatch.setattr(bench_ladder, "compile_all", lambda cases, jobs: iter([one, one]))
    result = run("--compile")
    assert result.exit_code == code
    assert f"2 kernels compiled, {2 * len(faults)} fail their audit" in result.output


def test_a_run_writes_its_record(monkeypatch, tmp_path):
    meta = {name: name.upper() for name in META} | {"date": "2026-11-30T12:00:00+00:00"}
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(record, "collect", lambda commit, dirty: dict(meta))
    monkeypatch.setattr(
        bench_ladder, "run", lambda cases, peers, timing, report, seed: iter([rows_of()])
    )
    result = run("--out", str(tmp_path), "--peers", "")
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.iterdir()
    read = Record.read(path)
    assert not read.meta.get("partial") and len(read.rows) == len(rungs(SMALL))
