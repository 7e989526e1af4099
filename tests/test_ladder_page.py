"""The ladder as text: nothing that was not measured, and every figure of a record in its place."""

from __future__ import annotations

import re
from dataclasses import replace

from cutedsl_fa3 import Variant, ladder, ladder_page
from cutedsl_fa3.record import META, LadderRow, Record

ROW = LadderRow(
    rung="cp.async, mma.sync", number=1, variant="causal", dtype="bf16", head_dim=64, seqlen=8192,
    batch=2, heads=32, tile_m=128, tile_n=112, stages=2, threads=128, registers=254, budgets=None,
    smem=73728, spills=0, ms=1.0, tflops=300.0, max_error=1e-3, samples=(1.0,),
)  # fmt: skip


def record() -> Record:
    meta = {name: name.upper() for name in META} | {"date": "2026-11-30T12:00:00+00:00"}
    rows = (
        ROW,
        replace(ROW, rung="TMA", number=2, tflops=330.0),
        replace(ROW, rung="1 stage", number=2, tflops=165.0, stages=1, budgets=(32, 160)),
        replace(ROW, rung="fa3", number=0, tflops=500.0, tile_m=None, tile_n=None, stages=None,
                threads=None, registers=None, smem=None, spills=None),
        replace(ROW, variant="full", tflops=999.0),
    )  # fmt: skip
    return Record(meta, rows)


def test_without_a_record_it_says_so_and_names_the_command():
    for none in (None, replace(record(), rows=())):
        text = ladder_page.measured(none, 64, "causal")
        assert text.startswith("Nothing measured yet") and ladder_page.MEASURE in text
        assert not re.search(r"\d{3}", text.replace("H100", "").replace("H200", ""))


def test_gains_are_over_the_step_before_and_peers_have_none():
    text = ladder_page.measured(record(), 64, "causal")
    title, head, *lines = text.splitlines()
    assert "head size 64, S = 8192, batch 2, 32 heads; DEVICE, 2026-11-30" in title
    assert head.split()[-2:] == ["TFLOP/s", "gain"]
    assert [line.split()[-2:] for line in lines] == [
        ["300", "-"],
        ["330", "1.10"],
        ["165", "0.50"],
        ["500", "-"],
    ]
    assert "32 / 160" in lines[2] and lines[3].split()[:2] == ["-", "fa3"]


def test_a_step_is_told_from_another_depth_and_from_a_peer():
    rows = ladder_page.of_problem(record(), 64, "causal")
    assert [ladder_page.is_step(row, rows) for row in rows] == [True, True, False, False]


def test_every_step_has_a_line_and_what_does_not_fit_says_so():
    text = ladder_page.steps(ladder.rungs(Variant(), 128))
    lines = text.splitlines()[1:]
    assert len(lines) == len(ladder.STEPS) + 3
    assert [line for line in lines if "too many" in line] == [lines[-1]]
    assert "4 stages" in lines[-1]


def test_columns_of_numbers_stand_to_the_right():
    text = ladder_page.table(("name", "n", "tile"), [("1 a", 5, "128 x 64"), ("bcd", 1000, "-")])
    assert text.splitlines() == [
        "name     n      tile",
        "1 a      5  128 x 64",
        "bcd   1000         -",
    ]


def test_every_figure_of_the_literature_names_its_paper():
    assert all(re.search(r"arXiv \d{4}\.\d{5}, ", one.where) for one in ladder_page.LITERATURE)
    text = ladder_page.literature()
    for figure in ("35% of the peak", "570; 620-640", "582", "661", "740", "335"):
        assert figure in text
