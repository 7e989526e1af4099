"""The fit: of plain rows only, repeatable from its records, and within 15% on every variant."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from cutedsl_fa3 import Variant, masks, scores
from cutedsl_fa3.ledger import stored
from cutedsl_fa3.ledger.fit import PLAIN, Compared, Measured, Sample, compared, fit, measured, plain
from cutedsl_fa3.ledger.launch import Parameters
from cutedsl_fa3.ledger.stored import ALLOWED, README, Stored
from cutedsl_fa3.peers import OURS
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.record import Record, Row


@functools.cache
def kept() -> tuple[Stored, tuple[Sample, ...]]:
    made = stored.load()
    return made, tuple(made.samples)


@functools.cache
def again() -> Parameters:
    return fit(plain(kept()[1]))


def variants() -> list[Compared]:
    made, found = kept()
    return [c for c in compared(found, made.parameters) if c.row.variant not in PLAIN]


def test_the_records_named_fit_to_the_numbers_kept():
    made = kept()[0].parameters
    assert again().clock == pytest.approx(made.clock, rel=1e-3)
    assert again().launch == pytest.approx(made.launch, rel=1e-3)
    assert again().work_tile == pytest.approx(made.work_tile, rel=1e-3)
    assert again().exposed == pytest.approx(made.exposed, abs=1e-3)


def test_every_plain_row_is_met():
    made, found = kept()
    for sample in plain(found):
        assert sample.predicted(made.parameters) == pytest.approx(sample.row.ms, rel=0.1)


@pytest.mark.parametrize("each", variants(), ids=lambda c: f"{c.row.variant}-d{c.row.head_dim}")
def test_a_variant_that_was_not_fitted_is_within_15_percent(each):
    assert abs(each.error) <= ALLOWED, each


def test_every_variant_of_the_record_is_held_at_both_head_sizes():
    names = {"alibi", "softcap:30", "bias", "window:1024,0", "prefix:256", "documents:1000"}
    names |= {"sigmoid", "sink"}
    assert {(c.row.variant, c.row.head_dim) for c in variants()} >= {
        (name, d) for name in names for d in (64, 128)
    }


def test_what_is_kept_of_a_kernel_that_is_measured_today_is_what_its_plan_says():
    plan = Plan.default(Variant(scores.softcap(30.0), masks.causal), Problem("bf16", 64, 64))
    kept_now = measured(plan)
    assert Schedule(**kept_now.schedule) == plan.schedule and kept_now.passes_over
    assert kept_now.elements[0] == pytest.approx(plan.ledger.full.elements, abs=0.1)
    assert kept_now.elements[1] == pytest.approx(plan.ledger.masked.elements, abs=0.1)


def test_a_row_of_a_variant_is_not_fitted():
    found = kept()[1]
    with pytest.raises(ValueError, match=r"\['alibi'\]: only full and causal are fitted"):
        fit([s for s in found if s.row.variant in ("full", "alibi")])


def test_times_that_the_model_makes_give_its_parameters_back():
    truth = Parameters(1.6, 9000.0, {"a CTA a tile": 4000.0}, {"2 intra": 0.5, "3 both": 0.2})
    samples = []
    three, two = Schedule(192, 128, 2, 3, "both"), Schedule(overlap="intra")
    narrow = Schedule(128, 80, overlap="intra")
    for d, schedule in ((64, three), (64, two), (128, two), (256, narrow)):
        for variant in PLAIN:
            for batch, seqlen in ((64, 512), (8, 2048), (1, 8192)):
                sizes = (d, d, seqlen, seqlen, batch, 16, 16)
                row = Row(OURS, "forward", variant, "bf16", *sizes, 1.0, 1.0, 0.0, ())
                sample = Sample(row, schedule, (20.0 * d, 25.0 * d))
                ms = sample.predicted(truth)
                samples.append(dataclasses.replace(sample, row=dataclasses.replace(row, ms=ms)))
    found = fit(samples)
    assert found.clock == pytest.approx(truth.clock, rel=0.02)
    assert found.work_tile == pytest.approx(truth.work_tile, rel=0.1)
    assert found.exposed == pytest.approx(truth.exposed, abs=0.03)


def test_the_readme_says_how_the_fit_does():
    text = README.read_text()
    assert stored.report(kept()[0]) in text


def test_what_is_written_is_what_is_read(tmp_path: Path):
    made = kept()[0]
    path = stored.write(made, tmp_path / "fitted.py")
    scope: dict = {}
    exec(path.read_text(), scope)
    assert Parameters(**scope["PARAMETERS"]) == made.parameters
    kernels = {name: Measured(**kept) for name, kept in scope["KERNELS"].items()}
    assert kernels == made.kernels and scope["RECORDS"] == made.records
    assert path.read_text() == stored.FITTED.read_text()


def record(tmp_path: Path, kind: str, **meta) -> None:
    known = {"device": "NVIDIA H200", "date": "2030-01-01T00:00:00+00:00"}
    names = ("driver", "torch", "cutlass", "toolchain", "commit", "kernel_source_hash")
    Record(dict.fromkeys(names, "x") | known | meta).write(tmp_path / f"{kind}-h200.json")


def test_records_of_other_kernels_than_todays_are_named(monkeypatch):
    made = kept()[0]
    (name, *_) = made.records
    its = Record.read(stored.DATA / name).meta["kernel_source_hash"]
    monkeypatch.setattr("cutedsl_fa3.cache.source_fingerprint", lambda: its)
    assert name not in stored.older(made)
    monkeypatch.setattr("cutedsl_fa3.cache.source_fingerprint", lambda: "another")
    assert all(each in stored.older(made) for each in made.records)


def test_records_of_other_sources_or_devices_are_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(stored, "DATA", tmp_path)
    with pytest.raises(ValueError, match="no record of bench, variants, tune"):
        stored.renewed()
    for kind in stored.KINDS:
        record(tmp_path, kind)
    with pytest.raises(ValueError, match="of other sources than today's"):
        stored.renewed()
    record(tmp_path, "tune", device="NVIDIA H100")
    with pytest.raises(ValueError, match="records of NVIDIA H100 and NVIDIA H200"):
        stored.renewed()
