"""Candidates of the tuner follow from the tables; what it reports was checked and timed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from cutedsl_fa3 import reference, tune
from cutedsl_fa3.bench import Case, Timing, WrongResult
from cutedsl_fa3.named import named
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.record import Record

CASE = Case("causal", "bf16", 64, 64, 96, 96, 1, 2, 2)


def plan(schedule):
    return Plan(named("causal", CASE.lengths()).variant, Problem(*CASE.problem), schedule)


def test_the_first_candidate_is_the_default_and_the_others_differ_in_one_field():
    base, *others = tune.candidates(CASE)
    assert base == Plan.default(plan(base).variant, plan(base).problem).schedule
    for other in others:
        fields = dataclasses.asdict(base)
        changed = {n for n, value in dataclasses.asdict(other).items() if value != fields[n]}
        assert len(changed) == 1 or changed == {"tile_m", "consumers"}
        plan(other).check()
    assert len(set(others)) == len(others) > 10


def test_what_does_not_fit_is_no_candidate():
    wide = dataclasses.replace(CASE, head_dim=128, head_dim_v=128)
    assert {s.stages for s in tune.candidates(wide)} == {1, 2, 3}  # 4 stages need 295056 bytes


@pytest.fixture
def without_gpu(monkeypatch):
    """Attention by the reference, kernels that spill nothing."""
    compiled = SimpleNamespace(resources=SimpleNamespace(spills=0))
    monkeypatch.setattr(tune.cache, "get", lambda kernel: compiled)

    def attention(q, k, v, variant, *, schedule):
        return reference.attention(q, k, v, variant).to(q.dtype)

    monkeypatch.setattr(tune, "attention", attention)


def timing():
    ticks = iter(range(1, 10**6))
    return Timing("fake", 0.0, 1.0, 3, clock=lambda call, repeats: float(next(ticks)))


def test_rows_are_sorted_by_time_and_survive_a_record(without_gpu, tmp_path):
    chosen, said = tune.candidates(CASE)[:3], []
    rows = tune.measure(CASE, chosen, timing(), said.append, device="cpu")
    assert [row.ms for row in rows] == sorted(row.ms for row in rows)
    assert len(said) == 3 and all("TFLOP/s" in line for line in said)
    assert sum(row.follows(chosen[0]) for row in rows) == 1
    meta = dict.fromkeys(
        "device driver torch cutlass toolchain commit kernel_source_hash date".split(), "x"
    )
    path = Record(meta, tuple(rows)).write(tmp_path / "tune-x.json")
    assert Record.read(path).rows == tuple(rows)


def test_a_schedule_that_gives_wrong_numbers_is_not_timed(without_gpu, monkeypatch):
    monkeypatch.setattr(tune, "attention", lambda q, k, v, variant, *, schedule: 2 * v)
    with pytest.raises(WrongResult):
        tune.measure(CASE, tune.candidates(CASE)[:1], timing(), print, device="cpu")
