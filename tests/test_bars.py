"""The committed pictures are those of the newest records, and a bar is as high as its number."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cutedsl_fa3 import bars, figures
from cutedsl_fa3.peers import OURS, PROVIDERS
from cutedsl_fa3.record import DATA, Record, newest


def texts(path: Path) -> dict[str, str]:
    """The texts that a PNG holds beside its pixels."""
    content, at, found = path.read_bytes(), 8, {}
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        if kind == b"tEXt":
            name, _, value = content[at + 8 : at + 8 + length].partition(b"\0")
            found[name.decode()] = value.decode("latin-1")
        at += 12 + length
    return found


@pytest.mark.parametrize("kind", [kind for kind in bars.PICTURES if newest(kind=kind)])
def test_the_committed_picture_is_of_the_newest_record(kind: str) -> None:
    record = newest(kind=kind)
    assert record is not None
    found = texts(bars.FOLDER / f"{kind}.png")[bars.FROM]
    assert found == bars.origin(record, DATA, kind), "run: python -m cutedsl_fa3 bench --draw"


def test_every_provider_has_an_ink_of_its_own() -> None:
    assert set(bars.INKS) == set(PROVIDERS)
    assert len(set(bars.INKS.values())) == len(PROVIDERS)


@pytest.fixture
def record() -> Record:
    found = newest()
    assert found is not None
    return found


@pytest.mark.jupyter
def test_a_bar_is_as_high_as_its_row_and_the_ratio_above_is_to_the_best_peer(record) -> None:
    rows = [row for row in record.rows if (row.head_dim, row.head_dim_v) == (64, 64)]
    drawing = bars.plain(Record(record.meta, tuple(rows)))
    heights = [round(p.get_height(), 2) for axes in drawing.axes for p in axes.patches]
    assert sorted(heights) == sorted(row.tflops for row in rows)
    said = [text.get_text() for axes in drawing.axes for text in axes.texts]
    expected = []
    for variant in ("full", "causal"):
        for seqlen in (1024, 4096, 16384):
            some = [r for r in rows if (r.variant, r.seqlen_q) == (variant, seqlen)]
            (ours,) = (r.tflops for r in some if r.provider == OURS)
            expected.append(f"{ours / max(r.tflops for r in some if r.provider != OURS):.2f}")
    assert said == expected


@pytest.mark.jupyter
def test_what_a_peer_does_not_offer_leaves_its_place_empty_and_others_where_they_are(
    record,
) -> None:
    rows = [r for r in record.rows if (r.head_dim, r.variant, r.seqlen_q) == (64, "full", 4096)]
    whole = bars.plain(Record(record.meta, tuple(rows)))
    less = bars.plain(Record(record.meta, (*rows[:1], *rows[2:], replace(rows[1], seqlen_q=1))))
    before = {round(p.get_height(), 2): p.get_x() for p in whole.axes[0].patches}
    after = {round(p.get_height(), 2): p.get_x() for p in less.axes[0].patches}
    moved = {after[row.tflops] - before[row.tflops] for row in (rows[0], *rows[2:])}
    assert moved == {1.0}  # the group of length 1 stands before


@pytest.mark.jupyter
def test_sustained_speeds_are_lines_across_the_bars(record) -> None:
    held = Record(record.meta, tuple(replace(r, tflops=r.tflops * 0.9) for r in record.rows))
    drawing = bars.plain(record, held)
    lines = [c for axes in drawing.axes for c in axes.collections]
    assert len(lines) == len(record.rows)
    assert "sustained" in drawing.get_suptitle()
    assert "sustained" not in bars.plain(record).get_suptitle()


@pytest.mark.jupyter
def test_a_variant_is_as_high_as_its_time_in_units_of_our_causal() -> None:
    record = newest(kind="variants")
    assert record is not None
    drawing = bars.variants(record)
    for axes, head_dim in zip(drawing.axes, (64, 128), strict=True):
        rows = [row for row in record.rows if row.head_dim == head_dim]
        (unit,) = (r.ms for r in rows if (r.variant, r.provider) == ("causal", OURS))
        heights = sorted(patch.get_height() for patch in axes.patches)
        assert heights == pytest.approx(sorted(row.ms / unit for row in rows))


@pytest.mark.jupyter
def test_pictures_are_written_for_the_kinds_that_have_a_record(tmp_path: Path, record) -> None:
    data, folder = tmp_path / "data", tmp_path / "bars"
    record.write(data / "bench-x.json")
    (path,) = bars.write(folder, data)
    assert path == folder / "bench.png"
    assert texts(path)[bars.FROM] == bars.origin(record, data, "bench")


def test_drawing_without_matplotlib_names_the_extra(monkeypatch, tmp_path: Path) -> None:
    figures.figure_class.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"cutedsl-fa3\[plot\]"):
        bars.write(tmp_path)
    figures.figure_class.cache_clear()
