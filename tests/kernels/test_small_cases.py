"""The small cases cover every kind and notice a wrong result; what a sanitizer says is recorded."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import sanitize
import torch
from cases.alone import python
from sanitize import SanitizerError, summary
from small_cases import CASES, Attention, Backward, Gemm, WrongCase

from cutedsl_fa3 import reference
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.record import META
from cutedsl_fa3.schedules import needs

ATTENTION = [case for case in CASES.values() if isinstance(case, Attention)]
BACKWARDS = [case for case in CASES.values() if isinstance(case, Backward)]
GEMMS = [case for case in CASES.values() if isinstance(case, Gemm)]


def test_the_cases_cover_every_kind_of_forward_and_gemm() -> None:
    given = [case.schedule for case in ATTENTION if case.schedule]
    for dim in (64, 128):
        of_dim = [case for case in ATTENTION if case.head_dims == (dim, dim)]
        overlaps = {case.schedule.overlap for case in of_dim if case.schedule}
        assert overlaps >= {"none", "intra", "pingpong", "both"}
        assert {case.dtype for case in of_dim} == {"bf16", "fp16"}
        assert any(case.schedule is None for case in of_dim)  # what the table of schedules gives
    assert {schedule.consumers for schedule in given} == {1, 2, 3}
    kinds = {"nothing", "light", "weights", "mask", "uniform", "tables", "elements"}
    assert {needs(case.variant("cpu")) for case in ATTENTION} == kinds
    assert {case.head_dims for case in ATTENTION} >= {(64, 128), (128, 64)}
    assert any(case.sizes[3] != case.sizes[4] for case in ATTENTION)
    assert any(case.sizes[1] > case.sizes[2] for case in ATTENTION)
    assert {case.schedule.cluster for case in GEMMS} == {(1, 1), (2, 1), (1, 2)}
    assert {case.dtype for case in GEMMS} == {"bf16", "fp16"}


def test_the_cases_cover_every_kind_of_backward() -> None:
    plans = [case.kernel().plan for case in BACKWARDS]
    assert {plan.schedule.add for plan in plans} == {"tma", "direct"}
    assert {plan.deterministic for plan in plans} == {False, True}
    assert {len(plan.wanted) for plan in plans} == {0, 1}
    assert {plan.variant.weight is None for plan in plans} == {False, True}
    assert {plan.by_tile for plan in plans} == {False, True}


@pytest.mark.parametrize("name", CASES)
def test_every_case_makes_a_kernel(name: str) -> None:
    CASES[name].kernel().check()


def rounded(case: Attention, *, ahead: int = 0) -> torch.Tensor:
    """A causal case with P rounded as the kernel does; each row sees `ahead` keys too many."""
    q, k, v = case.inputs()
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2).float() for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k)
    rows, keys = q.shape[1], k.shape[1]
    hidden = torch.arange(keys) > torch.arange(rows)[:, None] + (keys - rows + ahead)
    s = (s / q.shape[3] ** 0.5).masked_fill(hidden, -torch.inf)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    o = torch.einsum("bhqk,bkhd->bqhd", p.to(q.dtype).float(), v)
    return (o / p.sum(-1).transpose(1, 2)[..., None]).to(q.dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_case_allows_the_roundings_of_the_kernel_but_no_key_too_many(dtype: str) -> None:
    case = Attention("causal", dtype=dtype)
    case.verify(rounded(case))
    with pytest.raises(WrongCase, match="elements are wrong"):
        case.verify(rounded(case, ahead=1))


@pytest.mark.parametrize("name", ["empty rows", "grouped heads"])
def test_a_case_notices_a_value_that_is_wrong_or_never_written(name: str) -> None:
    case = CASES[name]
    q, k, v = case.inputs()
    exact = reference.attention(q, k, v, case.variant("cpu"), dtype=torch.float64).to(q.dtype)
    case.verify(exact)
    for wrong in (float("nan"), 0.01):
        spoilt = exact.clone()
        spoilt[0, 0, 0, 3] = wrong if name == "empty rows" else spoilt[0, 0, 0, 3] + wrong
        with pytest.raises(WrongCase, match=name):
            case.verify(spoilt)


def test_a_gemm_case_allows_one_rounding() -> None:
    case = GEMMS[0]
    a, b = case.inputs()
    right = (a.float() @ b.float().T).to(a.dtype)
    case.verify(right)
    right[5, 7] *= 1 + 3 * torch.finfo(a.dtype).eps
    with pytest.raises(WrongCase, match="1 of"):
        case.verify(right)


@pytest.mark.parametrize("name", ["causal, d64", "slopes, d64", "sigmoid"])
def test_a_case_of_gradients_allows_the_roundings_of_the_twin_and_notices_a_wrong_one(
    name: str,
) -> None:
    case = CASES[f"gradients: {name}"]
    right = case.twins(torch.bfloat16)
    case.verify(right)
    for wrong in (float("nan"), right[-1] + 0.1 * right.abs().max()):
        spoilt = right.clone()
        spoilt[-1] = wrong
        with pytest.raises(WrongCase, match=f"{name}: 1 of"):
            case.verify(spoilt)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_small_case_is_right(name: str) -> None:
    case = CASES[name]
    if isinstance(case, Backward) and case.deterministic:  # waits for turns
        python(str(sanitize.SCRIPT), name)
    else:
        case.verify(case.run())


@pytest.mark.parametrize(
    ("tool", "line", "found"),
    [
        ("memcheck", "ERROR SUMMARY: 0 errors", (0, 0)),
        ("memcheck", "ERROR SUMMARY: 1 error", (1, 0)),
        ("racecheck", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", (0, 0)),
        ("racecheck", "RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)", (1, 3)),
    ],
)
def test_the_summary_of_each_tool_is_read(tool: str, line: str, found: tuple[int, int]) -> None:
    assert summary(tool, f"========= COMPUTE-SANITIZER\n========= {line}\n") == found


def test_a_tool_without_a_summary_is_no_clean_run() -> None:
    with pytest.raises(SanitizerError, match="without its summary"):
        summary("memcheck", "killed")


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A GPU, a clean tree, kernels that are compiled, and a tool that prints what it is told."""
    meta = {name: name.upper() for name in META} | {"date": "2026-11-29T12:00:00+00:00"}
    monkeypatch.setattr(sanitize.bench, "require_gpu", lambda: None)
    monkeypatch.setattr(sanitize.record, "collect", lambda commit, dirty: dict(meta))
    monkeypatch.setattr(sanitize.subprocess, "run", lambda command, check: None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def tool(memcheck: str, racecheck: str, last: str = f"{len(CASES)} cases right") -> None:
        path = tmp_path / sanitize.NAME
        script = f'case "$2" in memcheck) echo "{memcheck}";; *) echo "{racecheck}";; esac'
        path.write_text(f'#!/bin/sh\necho "{last}"\n{script}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return tool


NO_ERRORS = "========= ERROR SUMMARY: 0 errors"
NO_HAZARDS = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"


def test_a_clean_run_is_recorded_and_exits_with_0(pretended, tmp_path: Path) -> None:
    pretended(NO_ERRORS, NO_HAZARDS)
    assert sanitize.main(["--out", str(tmp_path / "data")]) == 0
    (path,) = (tmp_path / "data").iterdir()
    assert path.name == "sanitizer-device-20261129-120000.json"
    content = json.loads(path.read_text())
    assert [row["tool"] for row in content["rows"]] == ["memcheck", "racecheck"]
    for row in content["rows"]:
        assert (row["errors"], row["hazards"], len(row["cases"])) == (0, 0, len(CASES))


def test_an_error_or_a_hazard_is_recorded_and_exits_with_1(pretended, tmp_path: Path) -> None:
    for memcheck, racecheck in (
        ("========= ERROR SUMMARY: 2 errors", NO_HAZARDS),
        (NO_ERRORS, NO_HAZARDS.replace("0 hazards", "1 hazard").replace("0 warn", "1 warn")),
    ):
        pretended(memcheck, racecheck)
        assert sanitize.main(["--out", str(tmp_path / "found.json")]) == 1
        assert (tmp_path / "found.json").exists()


def test_cases_that_did_not_all_run_are_no_clean_run(pretended, tmp_path: Path, capsys) -> None:
    pretended(NO_ERRORS, NO_HAZARDS, last="right: the first")
    assert sanitize.main(["--out", str(tmp_path / "none.json")]) == 1
    assert not (tmp_path / "none.json").exists()
    assert "found no error, but the cases ended" in capsys.readouterr().err


def test_an_absent_tool_is_named_with_where_it_comes_from(monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sanitize, "PLACES", ("/nowhere",))
    assert sanitize.main([]) == 1
    assert "compute-sanitizer is neither on PATH" in capsys.readouterr().err


def test_the_default_schedule_is_left_to_the_table() -> None:
    chosen = [case for case in ATTENTION if case.schedule is None]
    assert len(chosen) > 15
    assert all(isinstance(case.kernel().plan.schedule, Schedule) for case in chosen)
