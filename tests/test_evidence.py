"""Rows of the schedule table say what their record says, and records cover what a row serves."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cutedsl_fa3 import evidence, schedules
from cutedsl_fa3.cli import app
from cutedsl_fa3.record import DATA, META, Record, ScheduleRow
from cutedsl_fa3.schedules import NEEDS, TABLE, Row

ROW = next(row for row in TABLE if row.needs == "nothing" and row.head_dim == 128)
OLDER = "tune-h200-20261129-195356.json"  # of schedules that no row has any more


def name(row: Row) -> str:
    return f"{row.head_dim}x{row.head_dim_v}-{row.needs}"


def objections(row: Row) -> list[str]:
    """What a row's record has against it."""
    read = evidence.recorded(row)
    found = evidence.judged(row, read)
    if found is None:
        return ["its record has no case of it"]
    wrong = [] if row.why == evidence.why(found) else [f"says {row.why!r}: {evidence.why(found)!r}"]
    wrong += [] if found.holds else [f"slower than {found.others[0]}"]
    fastest = max(evidence.head_groups(read).values(), default=1.0)
    return wrong + ([] if fastest <= evidence.HOLDS else ["other heads side by side are faster"])


def test_rows_that_name_a_record_say_what_it_says_and_are_the_fastest_there_within_1_percent():
    found = {name(row): wrong for row in TABLE if row.record and (wrong := objections(row))}
    assert not found


def test_a_row_that_its_record_contradicts_is_noticed(tmp_path, monkeypatch):
    def against(others: float, **changes) -> list[str]:
        """What is said of the row, changed, where the record has one alternative this fast."""
        row = dataclasses.replace(ROW, record="seen.json", **changes)
        table = tuple(row if each is ROW else each for each in TABLE)
        monkeypatch.setattr(schedules, "TABLE", table)
        base = base_of(full)
        record(measured(full, base, 100.0), measured(full, base, others, tile_n=112)).write(
            tmp_path / "seen.json"
        )
        return objections(row)

    monkeypatch.setattr(evidence, "DATA", tmp_path)
    full = evidence.cases(ROW)[0]
    right = "100; tile_n 112 0.99"
    assert not against(99.0, why=right)
    assert against(99.0, why="100") == [f"says '100': {right!r}"]
    assert len(against(103.0, why=right)) == 2
    assert against(99.0, why=right, tile_n=64) == ["its record has no case of it"]


def test_every_need_has_variants_and_every_row_is_measured_with_each_that_it_serves():
    assert tuple(evidence.VARIANTS) == NEEDS
    of_dims: dict[tuple, list] = {}
    for row in TABLE:
        chosen = evidence.cases(row)
        assert chosen, row
        of_dims.setdefault((row.head_dim, row.head_dim_v), []).extend(c.variant for c in chosen)
    every = [variant for group in evidence.VARIANTS.values() for variant in group]
    # Rows for these sizes and some needs.
    light = ["full", "causal", "alibi", "sigmoid", "window:1024,0"]
    alone = {(128, 64): ["documents:1000"], (64, 128): sorted(light)}
    for dims, variants in of_dims.items():
        assert sorted(variants) == sorted(alone.get(dims, every))


@pytest.mark.parametrize("row", TABLE, ids=name)
def test_a_row_is_measured_first_and_beside_alternatives_of_each_field_it_chooses(row):
    for case in evidence.cases(row):
        base, *others = evidence.alternatives(row, case)
        assert base == row.schedule(masked=case.variant != "full")
        assert len(set(others)) == len(others) and base not in others
        # Three warpgroups cannot hold a product of 256 columns.
        third = () if row.head_dim_v > 192 else ("consumers",)
        for field in ("tile_n", "overlap", *third):
            assert any(getattr(one, field) != getattr(base, field) for one in others), field


def measured(case, schedule, tflops, **changes) -> ScheduleRow:
    fields = dataclasses.asdict(dataclasses.replace(schedule, **changes))
    sizes = vars(case)
    return ScheduleRow(**sizes, schedule=fields, ms=1.0, tflops=tflops, samples=(1.0,) * 3)


def record(*rows) -> Record:
    return Record({name: "x" for name in META}, rows)


def base_of(case):
    return ROW.schedule(masked=case.variant != "full")


def test_the_score_is_the_mean_speed_over_all_cases_that_have_the_alternative():
    full, causal = evidence.cases(ROW)[:2]
    found = evidence.judged(
        ROW,
        record(
            measured(full, base_of(full), 100.0),
            measured(full, base_of(full), 80.0, tile_n=112),
            measured(full, base_of(full), 300.0, tile_n=144),  # which spills where it is causal
            measured(full, base_of(full), 500.0, head_group=4),  # of another choice than the row's
            measured(causal, base_of(causal), 50.0),
            measured(causal, base_of(causal), 90.0, tile_n=112),
            measured(causal, base_of(causal), 25.0, consumers=3, tile_m=192),
        ),
    )
    assert found.tflops == {"full": 100.0, "causal": 50.0}
    assert [other.change for other in found.others] == ["tile_n 112"]
    assert found.others[0].score == pytest.approx((0.8 * 1.8) ** 0.5)
    assert not found.holds
    assert evidence.why(found) == "100 50; tile_n 112 1.20"


def test_a_reason_names_the_best_other_and_as_many_more_as_fit_a_line():
    others = tuple(evidence.Alternative(f"tile_n {n}", 1 - n / 1000) for n in (1, 2, 3, 4))
    text = evidence.why(evidence.Judged(ROW, {"full": 612.4}, others))
    assert text.startswith("612; tile_n 1 1.00, tile_n 2 1.00") and len(text) <= evidence.WIDTH
    wide = {str(n): 700.0 for n in range(9)}
    assert evidence.why(evidence.Judged(ROW, wide, others)).endswith("700; tile_n 1 1.00")
    assert evidence.why(evidence.Judged(ROW, {"full": 612.4}, ())) == "612"


def test_a_row_that_is_slower_than_another_choice_is_named_by_the_summary():
    (full, *_) = evidence.cases(ROW)
    text = evidence.summary(
        record(
            measured(full, base_of(full), 100.0),
            measured(full, base_of(full), 102.0, consumers=3, tile_m=192),
        )
    )
    assert '128 nothing      SLOWER "100; consumers 3 1.02"  (full)' in text
    assert "consumers 3: 1.020" in text
    assert text.count("not measured") == len(TABLE) - 1


def test_the_command_says_what_a_record_has_of_each_row():
    result = CliRunner().invoke(app, ["tune", "--table", "--read", str(DATA / OLDER)])
    assert result.exit_code == 0, result.output
    assert result.output.count("not measured") == len(TABLE)


@pytest.mark.compile
@pytest.mark.slow
def test_kernels_are_compiled_side_by_side_and_what_spills_is_left_out():
    """In a process of its own: workers are new processes, which import the main module."""
    code = (
        "from dataclasses import replace\n"
        "from cutedsl_fa3 import evidence\n"
        "from cutedsl_fa3.schedules import TABLE\n"
        "if __name__ == '__main__':\n"
        "    case = evidence.cases(TABLE[0])[0]\n"
        "    base = TABLE[0].schedule(masked=False)\n"
        "    chosen = [base, replace(base, tile_n=176), replace(base, stages=3)]\n"
        "    ((_, kept),) = evidence.compiled_ahead([(case, chosen)], 2, print)\n"
        "    print(kept == [chosen[0], chosen[2]])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "True", run.stderr
