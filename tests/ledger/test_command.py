"""The command `ledger`: prints how the fit does, refuses records whose kernels it cannot know."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cutedsl_fa3.cli import app
from cutedsl_fa3.ledger import stored


def test_it_prints_the_fit_and_names_records_of_other_kernels(monkeypatch):
    monkeypatch.setattr("cutedsl_fa3.cache.source_fingerprint", lambda: "another")
    result = CliRunner().invoke(app, ["ledger"])
    assert result.exit_code == 0, result.output
    made = stored.load()
    assert stored.report(made) in result.output
    assert f"measure and fit again: {', '.join(made.records)}" in result.output


def test_it_refuses_to_fit_where_there_is_nothing_to_fit(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(stored, "DATA", tmp_path)
    result = CliRunner().invoke(app, ["ledger", "--accept"])
    assert result.exit_code == 2
    assert "no record of bench, variants in" in result.output


def test_what_it_accepts_it_writes_with_the_readme(tmp_path: Path, monkeypatch):
    fitted, readme = tmp_path / "fitted.py", tmp_path / "README.md"
    readme.write_text("before\n<!-- ledger:start -->\n<!-- ledger:end -->\nafter\n")
    kept = stored.load()
    monkeypatch.setattr(stored, "renewed", lambda same_kernels: kept)
    for name, path in (("write", fitted), ("explain", readme)):
        whole = getattr(stored, name)
        monkeypatch.setattr(stored, name, lambda made, whole=whole, path=path: whole(made, path))
    result = CliRunner().invoke(app, ["ledger", "--accept"])
    assert result.exit_code == 0, result.output
    assert fitted.read_text() == stored.FITTED.read_text()
    assert stored.report(kept) in readme.read_text() and readme.read_text().endswith("after\n")


@pytest.mark.parametrize("option", ["--accept", "--same-kernels"])
def test_its_options_are_documented(option):
    assert option in CliRunner().invoke(app, ["ledger", "--help"], terminal_width=200).output
