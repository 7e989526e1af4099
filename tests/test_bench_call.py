"""The host's share of a call is measured part by part, and recorded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from cutedsl_fa3 import bench_call, tables
from cutedsl_fa3.cli import app
from cutedsl_fa3.record import META, CallRow, Record


@pytest.mark.parametrize("captures", bench_call.CAPTURES)
def test_the_variant_has_as_many_captured_tensors_as_asked(captures):
    given, variant = bench_call.inputs(captures, "cpu")
    assert len(variant.captures) == captures
    assert [t.shape for t in given] == [bench_call.SHAPE] * 3


@pytest.mark.compile
@pytest.mark.slow
def test_the_first_call_of_a_process_is_timed_in_parts(tmp_path):
    compiled, found = (bench_call.first_call_elsewhere(str(tmp_path), "cpu") for _ in range(2))
    assert all(len(call) == 3 and min(call) >= 0 for call in (compiled, found))
    assert sum(found) < sum(compiled) / 10


@pytest.fixture
def pretended(monkeypatch):
    """A GPU whose calls take the time that they take here, and first calls a fixed one."""
    meta = {name: name.upper() for name in META} | {"date": "2026-11-29T12:00:00+00:00"}
    monkeypatch.setattr("cutedsl_fa3.bench.require_gpu", lambda: None)
    monkeypatch.setattr("cutedsl_fa3.record.collect", lambda commit, dirty: dict(meta))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_call, "attention", lambda *tensors: None)
    monkeypatch.setattr(
        bench_call,
        "prepare",
        lambda q, *rest: SimpleNamespace(
            out=q, lse=q, scale=1.0, ctas=None, launch=lambda *arguments: None
        ),
    )
    inputs = bench_call.inputs
    monkeypatch.setattr(bench_call, "inputs", lambda captures, device: inputs(captures, "cpu"))
    seen = set()

    def first_call_elsewhere(folder):
        cold = folder not in seen
        seen.add(folder)
        return (1.5 if cold else 0.02, 0.01, 0.003)

    monkeypatch.setattr(bench_call, "first_call_elsewhere", first_call_elsewhere)


def test_the_command_writes_a_record_of_every_step(pretended, tmp_path: Path):
    result = CliRunner().invoke(app, ["bench-call", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("call-*.json")
    rows = Record.read(path).rows
    assert all(isinstance(row, CallRow) for row in rows)
    steps = {(row.step, row.captures): row.us for row in rows}
    assert len(rows) == len(steps) == 14
    for timed in ("cached call", "launch alone"):
        assert {captures for step, captures in steps if step == timed} == {0, 1, 3}
    assert steps["first call, compiled", 1] == pytest.approx(1.513e6)
    assert steps["first call, from disk", 1] == pytest.approx(33e3)
    assert steps["find, from disk", 1] == pytest.approx(20e3)
    table = tables.call_table(Record.read(path))
    assert "| first call, compiled | 1 | 1513 ms |" in table
    assert "| first call, from disk | 1 | 33 ms |" in table
    assert table.count("| cached call |") == 3 and "find" not in table
    assert "launch alone" not in table


def test_without_a_gpu_the_command_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench-call"])
    assert result.exit_code == 1 and "SM90" in result.stderr


def test_without_a_record_the_table_says_how_to_make_one():
    assert "python -m cutedsl_fa3 bench-call" in tables.call_table(None)


@pytest.mark.gpu
@pytest.mark.parametrize("captures", bench_call.CAPTURES)
def test_a_cached_call_takes_at_most_15_microseconds_of_the_host(captures):
    assert min(bench_call.cached_call(captures).samples) <= 15.0


@pytest.mark.gpu
@pytest.mark.slow
def test_a_first_call_takes_3_seconds_and_a_tenth_of_one_where_the_kernel_is_on_disk(tmp_path):
    compiled = [bench_call.first_call_elsewhere(str(tmp_path / str(i))) for i in range(3)]
    found = [bench_call.first_call_elsewhere(str(tmp_path / str(i))) for i in range(3)]
    assert min(map(sum, compiled)) <= 3.0
    assert min(map(sum, found)) <= 0.1
