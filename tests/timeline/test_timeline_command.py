"""The command `timeline`, its figure and its record."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cutedsl_fa3 import Schedule, Unsupported, Variant, bench, figures
from cutedsl_fa3.calls import plan_for
from cutedsl_fa3.cli import app
from cutedsl_fa3.record import META, Record, TimelineRow
from cutedsl_fa3.timeline import Interval, Timeline, draw, measured
from cutedsl_fa3.timeline.drawing import INKS, MOST_CLOCKS, WAIT
from cutedsl_fa3.timeline.table import GROUPS

SIZES = ("--head-dim", "64", "--batch", "1", "--heads", "1", "--seqlen", "128")
SCHEDULE = ("--overlap", "none")  # of the table's choice for so few queries, 64 x 64


def run(*options: str):
    return CliRunner().invoke(app, ["timeline", *options])


def made(origin: str = "predicted", clocks: float = 900.0) -> Timeline:
    """A timeline of everything that is drawn."""
    intervals = [Interval("producer", "work", "load k", 0, 0.0, 30.0)]
    at = 0.0
    for what in ("issue", "maximum", "softmax", "rescale", "epilogue", "other"):
        intervals.append(Interval("consumer 0", "work", what, 1, at, at + 100))
        intervals.append(Interval("consumer 0", "wait", "k full", 1, at + 100, at + 150))
        at += 150
    intervals.append(Interval("tensor cores", "work", "QK 0", 0, 0.0, 64.0))
    intervals.append(Interval("tensor cores", "work", "PV 1", 0, 64.0, clocks))
    return Timeline(origin, "a kernel", tuple(intervals), 2, 0, 1.7)


def test_the_command_prints_each_lane_as_a_line() -> None:
    result = run(*SIZES, *SCHEDULE)
    assert result.exit_code == 0, result.output
    head, *lanes = result.stdout.splitlines()
    assert head.startswith("predicted: bf16, head_dim 64") and "tile 64 x 64" in head
    assert [line.split()[0] for line in lanes] == ["consumer", "producer", "tensor", "TMA"]


@pytest.mark.jupyter
def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    result = run(*SIZES, *SCHEDULE, "--json", "--out", str(path))
    assert result.exit_code == 0, result.output
    (content,) = json.loads(result.stdout)
    timeline = Timeline.from_json(json.dumps(content))
    assert {"producer", "consumer"} <= set(timeline.lanes)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seqlen", "0"), "--seqlen 0"),
        (("--heads", "-1"), "--heads -1"),
        (("--out", "x.pdf"), "--out x.pdf: a .png is needed"),
        (("--record",), "--record keeps what is measured"),
        (("--cta", "9"), "cta = 9: the launch has CTAs 0 to 1"),
        (("--variant", "unheard"), "unheard"),
        (("--stages", "99"), "stages"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_2(options: tuple[str, ...], said: str) -> None:
    result = run(*SIZES, *SCHEDULE, *options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("refused: ") and said in result.stderr


def test_measuring_without_a_gpu_exits_with_1(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*SIZES, "--measured")
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("refused: ")


def test_what_is_measured_is_kept_in_a_record(monkeypatch, tmp_path: Path) -> None:
    q = torch.empty(1, 128, 2, 64, dtype=torch.bfloat16)
    timeline, schedule = made("measured"), Schedule(128, 64)
    row = measured.row(timeline, "causal", q, q, q, schedule, 1.2)
    meta = dict.fromkeys(META, "x") | {"date": "2026-11-30T00:00:00+00:00"}
    path = Record(meta, (row,)).write(tmp_path / "timeline-x.json")
    (read,) = Record.read(path).rows
    assert isinstance(read, TimelineRow) and read == row
    assert measured.of_row(read) == timeline
    assert (read.schedule, read.slowdown, read.ghz) == (
        asdict(schedule) | {"cluster": (1, 1)},
        1.2,
        1.7,
    )


def test_a_measured_timeline_is_asked_for_with_the_plans_schedule(monkeypatch, tmp_path) -> None:
    asked = []

    def measure(q, k, v, variant, *, schedule, cta):
        asked.append((tuple(q.shape), schedule.tile_n, cta))
        return made("measured")

    meta = dict.fromkeys(META, "x") | {"device": "x", "date": "2026-11-30T00:00:00+00:00"}
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr("cutedsl_fa3.timeline.measure", measure)
    monkeypatch.setattr("cutedsl_fa3.timeline.measured.slowdown", lambda *a, **k: 1.1)
    monkeypatch.setattr("cutedsl_fa3.cli_timeline.DEVICE", "cpu")
    monkeypatch.setattr("cutedsl_fa3.record.collect", lambda *a: meta)
    kept = tmp_path / "kept.json"
    options = ("--measured", "--record", "--record-out", str(kept), "--cta", "0")
    result = run(*SIZES, *SCHEDULE, *options)
    assert result.exit_code == 0, result.output
    assert asked == [((1, 128, 1, 64), 64, 0)]
    assert "measured: a kernel, CTA 2" in result.stdout and "predicted" not in result.stdout
    (row,) = Record.read(kept).rows
    assert (row.variant, row.seqlen_q, row.slowdown) == ("causal", 128, 1.1)


def test_without_a_gpu_the_call_says_what_is_needed() -> None:
    q = torch.randn(1, 128, 1, 64).bfloat16()
    with pytest.raises(Unsupported, match="q is on cpu: clocks are measured"):
        measured.measure(q, q, q)


def test_a_cta_beyond_the_launch_is_refused_before_it(gpu) -> None:
    q = torch.randn(1, 300, 2, 64).bfloat16()
    for cta in (-1, 6, True, 0.0):
        with pytest.raises(Unsupported, match=r"cta = .*: the launch has CTAs 0 to 5"):
            measured.measure(q, q, q, schedule=Schedule(128, 64, overlap="none"), cta=cta)
    assert not gpu.launches


def test_measuring_launches_the_debug_build_with_the_words_and_the_cta(gpu, monkeypatch) -> None:
    """Four launches, the last of which counts; nobody notes anything here."""
    from types import SimpleNamespace

    from cutedsl_fa3 import cache
    from cutedsl_fa3.timeline.table import TimelineError

    launched = []
    monkeypatch.setattr(
        cache,
        "get",
        lambda kernel: SimpleNamespace(launch=lambda *a: launched.append((kernel, *a))),
    )
    q = torch.randn(1, 300, 2, 64).bfloat16()
    with pytest.raises(TimelineError, match="producer: no stamps; CTA 4 has not run"):
        measured.measure(q, q, q, schedule=Schedule(128, 64, overlap="none"), cta=4, room=64)
    assert len(launched) == measured.WARM + 1
    kernel, arguments, (address, cta) = launched[-1]
    assert kernel.name == "forward_sm90_stamped" and "64 stamps a lane" in kernel.key_text
    assert len(arguments) == 11 and address > 0 and cta == 4


# The figure.


@pytest.mark.jupyter
def test_timelines_share_one_scale_of_clocks() -> None:
    drawing = draw(made(), made("measured", 1200.0))
    above, below = drawing.axes
    assert above.get_xlim() == below.get_xlim() == (0.0, 1200.0)
    assert [label.get_text() for label in above.get_yticklabels()] == list(made().lanes)
    assert above.get_title(loc="left").startswith("predicted, CTA 2: 900 clocks")
    assert draw(made(clocks=10 * MOST_CLOCKS)).axes[0].get_xlim() == (0.0, MOST_CLOCKS)
    assert draw(made(), start=100, end=200).axes[0].get_xlim() == (100.0, 200.0)


@pytest.mark.jupyter
def test_lanes_that_wait_and_that_work_stay_apart_in_grey() -> None:
    shades = {name: figures.luminance(ink.colour) for name, ink in INKS.items() if name != "other"}
    for name, shade in shades.items():
        assert abs(shade - figures.luminance(WAIT.colour)) > 40, name
    for one, other in (("softmax", "rescale"), ("softmax", "issue"), ("products", "softmax")):
        assert abs(shades[one] - shades[other]) > 30, (one, other)
    assert set(INKS) == set(GROUPS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "one timeline or more is needed"),
        ((made(), 5.0, 5.0), "start = 5.0, end = 5.0"),
        ((made(), -1.0, 5.0), "start = -1.0"),
    ],
)
def test_a_figure_of_nothing_is_refused(given: tuple, said: str) -> None:
    timelines, window = given[:1], given[1:]
    with pytest.raises(Unsupported, match=said):
        draw(*timelines, **dict(zip(("start", "end"), window, strict=False)))


def test_the_series_is_that_of_the_notebook_and_fits() -> None:
    """Its second schedule is the one that the notebook draws beside the prediction."""
    schedules = measured.series_schedules()
    assert (schedules[1].stages, schedules[1].overlap) == (2, "both")
    assert len(set(schedules)) == len(schedules) == 7
    q = torch.empty(measured.SERIES, dtype=torch.bfloat16, device="meta")
    for schedule in schedules:
        plan_for(q, q, q, Variant(), schedule).check()


def test_the_series_is_kept_in_one_record(monkeypatch, tmp_path: Path) -> None:
    q = torch.empty(1, 128, 2, 64, dtype=torch.bfloat16)

    def series(report):
        for schedule in measured.series_schedules()[:2]:
            yield measured.row(made("measured"), "full", q, q, q, schedule, 1.2)

    meta = dict.fromkeys(META, "x") | {"device": "x", "date": "2026-11-30T00:00:00+00:00"}
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(measured, "series", series)
    monkeypatch.setattr("cutedsl_fa3.record.collect", lambda *a: meta)
    kept = tmp_path / "kept.json"
    result = run("--series", "--record-out", str(kept))
    assert result.exit_code == 0, result.output
    read = Record.read(kept)
    assert [row.schedule["stages"] for row in read.rows] == [1, 2]
    assert not read.meta.get("partial")
