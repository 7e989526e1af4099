"""Candidates of the tuner follow from the tables; what it reports was checked and timed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from cutedsl_fa3 import reference, tune
from cutedsl_fa3.bench import Timing
from cutedsl_fa3.cases import Case
from cutedsl_fa3.checks import WrongResult
from cutedsl_fa3.named import named
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.record import DATA, Record

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


@pytest.mark.parametrize("dims", [(96, 96), (192, 128), (256, 256)])
def test_every_native_head_size_has_candidates_of_each_kind(dims):
    case = dataclasses.replace(CASE, head_dim=dims[0], head_dim_v=dims[1])
    base, *others = tune.candidates(case)
    problem = Problem(*case.problem)
    assert base == Plan.default(named("causal", case.lengths()).variant, problem).schedule
    for field in ("overlap", "tile_n", "head_group"):
        assert len({getattr(other, field) for other in others}) > 1, field


def test_a_run_measures_each_case_with_its_schedules(monkeypatch):
    monkeypatch.setattr(tune, "measure", lambda case, chosen, *rest: [case, *chosen])
    said = []
    plans = [(CASE, ["a", "b"]), (dataclasses.replace(CASE, variant="full"), ["c"])]
    first, second = tune.run(plans, timing(), said.append)
    assert first == [CASE, "a", "b"] and second[1:] == ["c"]
    assert said == [f"{plans[0][0]}: 2 schedules", f"{plans[1][0]}: 1 schedules"]


def test_records_made_before_v_had_a_size_of_its_own_are_read():
    for path in DATA.glob("tune-*.json"):
        rows = Record.read(path).rows
        assert rows and all(row.head_dim_v for row in rows)


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


@pytest.mark.parametrize("head_dim_v", [64, 128])
def test_rows_are_sorted_by_time_and_survive_a_record(without_gpu, tmp_path, head_dim_v):
    case = dataclasses.replace(CASE, head_dim_v=head_dim_v)
    chosen, said = tune.candidates(case)[:3], []
    rows = tune.measure(case, chosen, timing(), said.append, device="cpu")
    assert {(row.head_dim, row.head_dim_v) for row in rows} == {(64, head_dim_v)}
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
