"""Records and the tables made from them: every number has an origin, and the README shows it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cutedsl_fa3.cases import HEAD_DIMS, head_dims
from cutedsl_fa3.cli_bench import NATIVE
from cutedsl_fa3.peers import OURS
from cutedsl_fa3.record import (
    DATA,
    META,
    Record,
    RecordError,
    Row,
    collect,
    here,
    newest,
    place,
    sustained_beside,
)
from cutedsl_fa3.schedules import table_fingerprint
from cutedsl_fa3.tables import (
    README,
    TABLES,
    attention_table,
    filled,
    refreshed,
    variants_table,
)


def row(provider: str, tflops: float, **changes) -> Row:
    sizes = dict(provider=provider, direction="forward")
    sizes |= dict(variant="causal", dtype="bf16", head_dim=128, head_dim_v=128, seqlen_q=4096)
    sizes |= dict(seqlen_k=4096, batch=4, heads=16, kv_heads=16, ms=1.0, tflops=tflops)
    sizes |= dict(max_error=0.002)
    return Row(**{**sizes, "samples": (1.0, 1.1), **changes})


@pytest.fixture
def record() -> Record:
    meta = {name: name.upper() for name in META}
    meta |= {"date": "2026-11-29T12:00:00+00:00", "device": "NVIDIA H200", "timing": "burst"}
    rows = (
        row(OURS, 600.0, max_error=0.0018),
        row("fa3", 640.0),
        row("fa4", 620.0, max_error=0.002),
        row(OURS, 1.0, seqlen_q=1),
    )
    return Record(meta, rows)


def test_a_record_survives_writing_and_reading(record: Record, tmp_path: Path) -> None:
    path = record.write(place(record.meta, tmp_path))
    assert path.name == "bench-h200-20261129-120000.json"
    assert Record.read(path) == record
    assert list(json.loads(path.read_text())) == ["meta", "rows"]


def test_a_record_without_an_origin_is_not_written(record: Record, tmp_path: Path) -> None:
    meta = {name: value for name, value in record.meta.items() if name != "driver"}
    with pytest.raises(RecordError, match="driver"):
        Record(meta, record.rows).write(tmp_path / "bench-x.json")


def test_the_newest_burst_record_wins_by_its_date(record: Record, tmp_path: Path) -> None:
    for name, date, timing in [
        ("a", "2026-12-01T00:00:00+00:00", "burst"),
        ("b", "2026-11-30T00:00:00+00:00", "burst"),
        ("c", "2026-12-02T00:00:00+00:00", "sustained"),
    ]:
        meta = {**record.meta, "date": date, "timing": timing}
        Record(meta, record.rows).write(tmp_path / f"bench-{name}.json")
    found = newest(tmp_path)
    assert found is not None and found.meta["date"].startswith("2026-12-01")
    assert newest(tmp_path / "empty") is None


def test_a_partial_record_is_never_the_newest(record: Record, tmp_path: Path) -> None:
    record.write(tmp_path / "bench-a.json")
    later = {**record.meta, "date": "2026-12-09T00:00:00+00:00", "partial": True}
    Record(later, record.rows).write(tmp_path / "bench-b.json")
    assert newest(tmp_path) == record


def test_a_table_shows_origin_providers_and_our_speed_and_error_beside_theirs(
    record: Record,
) -> None:
    lines = attention_table(record).splitlines()
    assert lines[0].startswith("NVIDIA H200, driver DRIVER")
    (head,) = (line for line in lines if line.startswith("| variant"))
    assert head.endswith("| cutedsl_fa3 | fa3 | fa4 | speed / best peer | error / fa4 |")
    assert "| causal | bf16 | 128 | 4096 | 600 | 640 | 620 | 0.94 | 0.90 |" in lines
    assert "| causal | bf16 | 128 | 1 x 4096 | 1 | - | - | - | - |" in lines


def test_a_record_of_uncommitted_changes_says_so(record: Record) -> None:
    dirty = Record({**record.meta, "dirty": True}, record.rows)
    assert "uncommitted changes" in attention_table(dirty)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit that `collect` takes for its own, on a pretended GPU."""
    monkeypatch.setattr("cutedsl_fa3.record.ROOT", tmp_path)
    monkeypatch.setattr("cutedsl_fa3.record.driver_version", lambda: "1.2.3")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretended GPU")
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    (tmp_path / "file").write_text("one")
    for command in (("init", "-q"), ("add", "file"), (*identity, "commit", "-qm", "one")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_clean_tree_is_recorded_by_its_commit(checkout: Path) -> None:
    meta = collect()
    assert len(meta["commit"]) == 40 and "dirty" not in meta
    assert set(META) <= set(meta)
    assert meta["schedules"] == table_fingerprint()


def test_uncommitted_changes_need_permission_and_are_recorded(checkout: Path) -> None:
    (checkout / "file").write_text("two")
    with pytest.raises(RecordError, match="--allow-dirty"):
        collect()
    assert collect(allow_dirty=True)["dirty"] is True


def test_a_tree_without_git_needs_its_commit_named(tmp_path: Path, checkout: Path) -> None:
    with pytest.raises(RecordError, match="this tree is at"):
        collect(commit="0" * 40)
    (checkout / ".git").rename(checkout / "elsewhere")
    with pytest.raises(RecordError, match="--commit"):
        collect()
    assert collect(commit="abc")["commit"] == "abc"
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)  # a repository, no history
    assert collect(commit="abc")["commit"] == "abc"


def test_committed_records_say_everything_the_format_asks() -> None:
    for path in (path for kind in TABLES for path in DATA.glob(f"{kind}-*.json")):
        read = Record.read(path)
        assert set(META) <= set(read.meta), path
        assert read.rows and all(len(one.samples) >= 3 for one in read.rows), path
        assert not read.meta.get("dirty"), f"{path.name} was measured on uncommitted changes"
        assert not read.meta.get("partial"), f"{path.name} is of a run that ended early"


def test_the_readme_shows_what_the_newest_records_say() -> None:
    text = README.read_text()
    assert text == refreshed(text), "run: python -m cutedsl_fa3 bench --readme"


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(RecordError, match="markers"):
        filled("<!-- bench:start --> only", "bench", "")
    text = "a <!-- gemm:start -->old<!-- gemm:end --> b"
    assert filled(text, "gemm", "new\n") == "a <!-- gemm:start -->\nnew\n<!-- gemm:end --> b"
    assert attention_table(None).startswith("Nothing recorded")


@pytest.fixture
def variants(record: Record) -> Record:
    """Causal, ALiBi and sigmoid at two head sizes, the second of which flex does not offer."""
    rows = []
    for d, dv in ((64, 64), (192, 128)):
        sizes = {"head_dim": d, "head_dim_v": dv}
        rows += [
            row(OURS, 600.0, ms=0.5, **sizes),
            row("fa4", 600.0, ms=0.4, **sizes),
            row(OURS, 500.0, variant="alibi", ms=0.6, **sizes),
        ]
    rows += [
        row("flex", 400.0, head_dim=64, head_dim_v=64, variant="alibi", ms=0.9),
        row(OURS, 500.0, head_dim=64, head_dim_v=64, variant="sigmoid", ms=0.5),
    ]
    return Record(record.meta, tuple(rows))


def test_a_variant_stands_beside_our_own_causal_of_its_size_and_beside_the_peers(
    variants: Record,
) -> None:
    lines = variants_table(variants).splitlines()
    assert lines[0].startswith("NVIDIA H200, driver DRIVER")
    (head,) = (line for line in lines if line.startswith("| variant"))
    assert head.endswith(
        "| ms | TFLOP/s | time / causal | fa4 ms | fa4 / ours | flex ms | flex / ours |"
    )
    assert "| causal | bf16 | 64 | 4096 | 0.500 | 600 | 1.00 | 0.400 | 0.80 | - | - |" in lines
    assert "| alibi | bf16 | 64 | 4096 | 0.600 | 500 | 1.20 | - | - | 0.900 | 1.50 |" in lines
    assert "| alibi | bf16 | 192x128 | 4096 | 0.600 | 500 | 1.20 | - | - | - | - |" in lines
    assert "| sigmoid | bf16 | 64 | 4096 | 0.500 | 500 | 1.00 | - | - | - | - |" in lines
    assert "at batch 4, 16 heads." in variants_table(variants)
    assert "FA4" not in variants_table(variants)
    both = replace(variants, rows=(*variants.rows, replace(variants.rows[-2], provider="flex_fa4")))
    assert "on the kernel of FA4" in variants_table(both)


def test_the_readmes_tables_say_how_it_is_under_sustained_load_where_that_was_recorded(
    record: Record, variants: Record, tmp_path: Path
) -> None:
    def slower(row: Row) -> Row:
        return replace(row, tflops=row.tflops * (0.8 if row.provider == OURS else 1.0))

    held = Record({**record.meta, "timing": "sustained"}, tuple(map(slower, record.rows)))
    lines = attention_table(record, held).splitlines()
    assert any("| speed / best peer | sustained | error / fa4 |" in line for line in lines)
    assert "| causal | bf16 | 128 | 4096 | 600 | 640 | 620 | 0.94 | 0.75 | 0.90 |" in lines
    assert "at the power limit" in lines[2]

    costly = [replace(r, ms=r.ms * (2 if r.variant == "alibi" else 1)) for r in variants.rows]
    lines = variants_table(variants, Record(held.meta, tuple(costly))).splitlines()
    assert "| alibi | bf16 | 192x128 | 4096 | 0.600 | 500 | 1.20 | 2.40 | - | - | - | - |" in lines

    record.write(tmp_path / "bench-burst.json")
    assert sustained_beside(record, tmp_path) is None
    held.write(tmp_path / "bench-sustained.json")
    assert sustained_beside(record, tmp_path) == held and newest(tmp_path) == record
    other = {**held.meta, "commit": "another", "date": "2026-12-30T00:00:00+00:00"}
    Record(other, held.rows).write(tmp_path / "bench-sustained-other.json")
    assert sustained_beside(record, tmp_path) is None


def test_a_record_of_variants_is_of_a_kind_of_its_own(variants: Record, tmp_path: Path) -> None:
    path = variants.write(place(variants.meta, tmp_path, "variants"))
    assert path.name == "variants-h200-20261129-120000.json"
    assert newest(tmp_path, "variants") == variants
    assert newest(tmp_path) is None


def test_without_a_record_each_table_says_which_command_writes_one() -> None:
    commands = {}
    for kind, table in TABLES.items():
        text = table(None, None)
        assert text.startswith("Nothing recorded yet: `")
        commands[kind] = text.split("`")[1]
    assert commands["variants"] == "python -m cutedsl_fa3 bench-variants"
    assert len(set(commands.values())) == len(TABLES)


def test_the_kinds_do_not_read_each_others_records() -> None:
    assert not any(a != b and a.startswith(f"{b}-") for a in TABLES for b in TABLES)


def test_the_command_measures_the_sizes_that_the_grid_has() -> None:
    assert head_dims(NATIVE) == HEAD_DIMS


def test_a_machine_without_a_gpu_says_that_nothing_ran_on_one(monkeypatch) -> None:
    monkeypatch.setattr("cutedsl_fa3.compile.device_capabilities", lambda: ((8, 0),))
    assert here().startswith("no GPU of capability 9.0 here: nothing below ran on one; nvidia-")


def test_a_machine_with_a_gpu_says_all_that_a_record_does(monkeypatch) -> None:
    monkeypatch.setattr("cutedsl_fa3.compile.device_capabilities", lambda: ((9, 0),))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("cutedsl_fa3.record.driver_version", lambda: "580.159.04")
    said = here()
    assert said.startswith(f"NVIDIA H200, driver 580.159.04, torch {torch.__version__}, nvidia-")
    end = r"ptxas [\d.]+\), 20\d\d-\d\d-\d\d, (commit \w{10}, )?kernel sources \w{10}$"
    assert re.search(end, said), said
