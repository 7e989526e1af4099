"""A model trained through `attention`: its task, its gradients, its record."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cutedsl_fa3 import training
from cutedsl_fa3.cli import app
from cutedsl_fa3.record import DATA, META, Record, newest
from cutedsl_fa3.training import BLIND, DENSE, KINDS, OURS, SMALL

FEW = replace(SMALL, seqlen=48, window=20, lags=(2, 9), steps=4, batch=2)


def test_tokens_repeat_those_at_the_two_lags_as_often_as_said() -> None:
    sizes = replace(SMALL, vocabulary=1 << 20)  # so that two random tokens are never equal
    tokens = training.data(sizes)
    assert tokens.shape == (sizes.steps, sizes.batch, sizes.seqlen + 1)
    first = max(sizes.lags)
    for lag, share in zip(sizes.lags, training.REPEATS, strict=True):
        same = tokens[..., first:] == tokens[..., first - lag : -lag]
        # Chains of repeats meet now and then: a token may lie at both lags, or at neither's own.
        assert share - 0.02 < same.double().mean() < share + 0.1


def test_the_floor_is_the_loss_of_the_rule_that_made_the_tokens() -> None:
    tokens = training.data(FEW)
    near, far = FEW.lags
    total, count = 0.0, 0
    for sequence in tokens.flatten(0, 1).tolist():
        for t in range(far, len(sequence)):
            likely = 0.2 / FEW.vocabulary
            likely += 0.5 * (sequence[t] == sequence[t - near])
            likely += 0.3 * (sequence[t] == sequence[t - far])
            total, count = total - math.log(likely), count + 1
    assert training.floor(tokens, FEW) == pytest.approx(total / count, rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(heads=st.integers(1, 3), window=st.integers(1, 12), seqlen=st.integers(1, 12))
def test_a_bias_by_distance_is_the_table_at_each_distance(heads, window, seqlen) -> None:
    table = torch.randn(heads, window)
    found = training.by_distance(table, seqlen)
    for q in range(seqlen):
        for k in range(seqlen):
            inside = 0 <= q - k < window
            expected = table[:, q - k] if inside else torch.full((heads,), -math.inf)
            assert torch.equal(found[:, q, k], expected)


def test_all_kinds_start_from_the_same_weights() -> None:
    first, *others = (training.Model(FEW, kind).state_dict() for kind in KINDS)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_model_that_is_moved_keeps_the_table_that_its_variant_reads() -> None:
    model = training.Model(FEW, OURS).double()
    layer = model.blocks[0].attention[1]
    assert layer.biased.captures[0] is layer.table


def test_the_first_gradients_are_as_near_to_fp64_as_those_of_dense_torch() -> None:
    errors = training.gradients(FEW, training.data(FEW)[0])
    assert errors[OURS].weights < 2 * errors[DENSE].weights < 0.05
    assert errors[OURS].bias < 2 * errors[DENSE].bias < 0.1


@pytest.fixture(scope="module")
def rows() -> dict:
    said: list[str] = []
    found = {row.attention: row for row in training.run(FEW, "cpu", said.append)}
    assert [line.split(":")[0] for line in said] == list(KINDS)
    return found


def test_losses_are_those_of_dense_torch_step_by_step(rows) -> None:
    ours, theirs = rows[OURS], rows[DENSE]
    assert len(ours.losses) == FEW.steps
    assert ours.losses == pytest.approx(theirs.losses, abs=5e-3)
    assert len(set(ours.losses)) == FEW.steps  # something was learned


def test_the_bias_is_learned_through_attention_and_absent_without_it(rows) -> None:
    ours, theirs = (torch.tensor(rows[kind].bias) for kind in (OURS, DENSE))
    assert ours.shape == (FEW.layers, FEW.heads, FEW.window)
    # A step moves a bias by its rate, whatever the gradient's size; few gradients change sign.
    moved = training.BIAS_RATE * FEW.rate
    assert ours.abs().max() > moved
    assert ((ours - theirs).abs() < moved / 2).double().mean() > 0.9
    assert rows[BLIND].bias == () and rows[BLIND].bias_error is None


def test_a_row_survives_writing_and_reading(rows, tmp_path: Path) -> None:
    written = Record({name: "x" for name in META}, tuple(rows.values()))
    assert Record.read(written.write(tmp_path / "train-x.json")) == written


def test_the_command_writes_a_record_of_all_kinds(rows, monkeypatch, tmp_path: Path) -> None:
    meta = {name: "x" for name in META} | {"date": "2026-11-30T00:00:00+00:00"}
    monkeypatch.setattr("cutedsl_fa3.cli_bench.Recorded.meta", lambda self: meta)
    asked = []

    def run(sizes, device, report):
        asked.append((sizes, device))
        return iter(rows.values())

    monkeypatch.setattr(training, "run", run)
    result = CliRunner().invoke(app, ["train", "--steps", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert asked == [(replace(training.LARGE, steps=2), "cuda")]
    record = newest(tmp_path, "train")
    assert record is not None and [row.attention for row in record.rows] == list(KINDS)


def test_without_a_gpu_the_command_says_so(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["train"])
    assert result.exit_code == 1
    assert "no CUDA device" in result.output


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_losses_and_bias_are_those_of_dense_torch() -> None:
    sizes = replace(training.LARGE, steps=20, batch=2)
    ours, theirs = list(training.run(sizes, "cuda", print, kinds=(OURS, DENSE)))
    assert ours.losses == pytest.approx(theirs.losses, abs=0.02)
    assert ours.weight_error < 2 * theirs.weight_error
    assert ours.bias_error < 2 * theirs.bias_error
    assert ours.peak_bytes < theirs.peak_bytes


def test_committed_records_of_training_show_that_both_learned_the_same() -> None:
    for path in DATA.glob("train-*.json"):
        by_kind = {row.attention: row for row in Record.read(path).rows}
        ours, theirs, blind = (by_kind[kind] for kind in KINDS)
        assert sum(ours.losses[-10:]) == pytest.approx(sum(theirs.losses[-10:]), abs=0.2), path
        assert ours.losses[-1] < blind.losses[-1] - 0.3, path
