"""Our verdicts beside the driver's: what is recorded of an H200, and live ones on a GPU."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import compare_driver
import geometries
import pytest
import torch
from compare_driver import bits, compare, compared, proposed

from cutedsl_fa3.layouts import TensorMap
from cutedsl_fa3.record import DATA, META
from cutedsl_fa3.tma_probe import encode


def pretended(tmap: TensorMap) -> bytes | None:
    """A driver that refuses what the rules say that the driver refuses."""
    holds = all(rule.ok for rule in tmap.rules() if rule.source == "driver")
    return b"descriptor" if holds else None


@pytest.fixture(scope="module")
def maps() -> list[TensorMap]:
    return geometries.maps()


def test_the_geometries_are_thousands_on_both_sides_of_every_rule(maps):
    found = compared(maps, [True] * len(maps))
    assert len(maps) > 5000
    assert found.ours > 1500 and len(maps) - found.ours > 3000
    named = {rule.name for tmap in maps[:50] for rule in tmap.rules()}
    plain = {"data type", "interleave", "swizzle", "out-of-bounds fill", "L2 promotion"}
    plain |= {"cache hint", "prefetch"}  # names that the driver has no word for
    assert named - plain <= set(found.broken)
    assert all(found.alone[name] >= 5 for name in named - plain - {"lengths"})


def test_the_geometries_are_the_same_wherever_they_are_made(maps):
    fields = [
        (tmap.dtype.__name__, tmap.address, tmap.shape, tmap.strides, tmap.box, tmap.steps)
        for tmap in maps
    ]
    text = repr([(*one, tmap.swizzle.name) for one, tmap in zip(fields, maps, strict=True)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "7df45fcb3e66387c"


def test_a_driver_that_agrees_leaves_nothing_to_explain():
    found, changes, wrong = compare(pretended, seed=1, count=600)
    assert not wrong and not found.missed and not found.unexplained
    assert all(changes) and len(changes) > 200
    assert found.beyond == sum(found.verdicts) - found.ours > 0


def test_a_driver_that_refuses_what_we_accept_or_a_change_we_propose_is_noticed():
    found, changes, wrong = compare(lambda tmap: None, seed=1, count=100)
    assert len(found.missed) == found.ours > 0 and not any(changes)
    assert any("refused by the driver" in text for text in wrong)
    assert any("a proposed change" in text for text in wrong)


def test_a_driver_that_accepts_what_we_refuse_without_a_reason_is_noticed():
    found, _, wrong = compare(lambda tmap: b"descriptor", seed=1, count=100)
    assert found.unexplained and any("without a reason" in text for text in wrong)


def test_recorded_verdicts_read_back_as_they_were():
    verdicts = [True, False, False, True, True, False, True]
    maps = geometries.maps(3, 14)[:7]
    assert bits(compared(maps, verdicts).bits) == verdicts


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict]]:
    """What the command returns and writes beside a pretended driver."""

    def run(driver: Callable[[TensorMap], bytes | None]) -> tuple[int, dict]:
        meta = {name: name.upper() for name in META} | {"date": "2026-11-30T12:00:00+00:00"}
        monkeypatch.setattr(compare_driver, "ready", lambda: None)
        monkeypatch.setattr(compare_driver.record, "collect", lambda commit, dirty: dict(meta))
        monkeypatch.setattr(compare_driver, "encode", driver)
        code = compare_driver.main(["--count", "400", "--out", str(tmp_path / "one.json")])
        return code, json.loads((tmp_path / "one.json").read_text())

    return run


def test_the_command_writes_a_record_from_which_every_verdict_can_be_checked_again(written):
    code, record = written(pretended)
    assert code == 0
    meta, rows = record["meta"], record["rows"]
    asked = geometries.maps(meta["seed"], meta["count"])
    assert bits(meta["verdicts"]) == [pretended(tmap) is not None for tmap in asked]
    assert meta["accepted_by_us_and_refused_by_the_driver"] == 0
    beyond = {row["rule"]: row for row in rows if row["accepted"]}
    assert {row["source"] for row in beyond.values()} <= {"documented", "instruction"}
    assert all(row["reason"] for row in beyond.values())


def test_the_command_fails_where_a_verdict_differs(written):
    code, record = written(lambda tmap: None)
    assert code == 1
    assert record["meta"]["accepted_by_us_and_refused_by_the_driver"] > 0


def test_every_recorded_verdict_agrees_with_the_rules_of_today():
    for path in DATA.glob("doctor-*.json"):
        meta = json.loads(path.read_text())["meta"]
        asked = geometries.maps(meta["seed"], meta["count"])
        assert len(asked) == meta["maps"], path
        found = compared(asked, bits(meta["verdicts"]))
        assert not found.missed and not found.unexplained, path
        assert meta["proposed_changes_refused_by_the_driver"] == 0, path
        assert len(proposed(meta["seed"], meta["count"] // 2)) == meta["proposed_changes"], path


@pytest.mark.gpu
def test_this_machines_driver_refuses_nothing_that_we_accept_or_propose():
    torch.zeros(1, device="cuda")  # the driver encodes within a context
    found, changes, wrong = compare(encode, seed=7, count=2000)
    assert not wrong, "\n\n".join(wrong)
    assert sum(found.verdicts) > 400 and len(changes) > 800
