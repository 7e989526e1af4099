"""The benchmark's arithmetic, checks and records; its clocks are replaced, so no GPU is needed."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from cutedsl_fa3 import reference
from cutedsl_fa3.bench import (
    Case,
    Grid,
    Timing,
    WrongResult,
    check,
    chosen_providers,
    exact_rows,
    measure,
    rounded_rows,
    run,
    samples,
)
from cutedsl_fa3.errors import Unsupported
from cutedsl_fa3.named import EXAMPLES, Lengths, named, visible_pairs
from cutedsl_fa3.peers import OURS, PROVIDERS, Inputs, Provider
from cutedsl_fa3.record import DATA, META, Record, RecordError, Row, collect, newest, place
from cutedsl_fa3.tables import README, attention_table, filled, refreshed

SMALL = Case("causal", "bf16", 64, 64, 48, 80, 2, 4, 2)


def reference_call(inputs: Inputs):
    q, k, v = inputs.q, inputs.k, inputs.v
    return lambda: reference.attention(q, k, v, inputs.named.variant).to(q.dtype)


def test_flops_count_both_products_and_half_the_pairs_when_causal() -> None:
    full = Case("full", "bf16", 64, 128, 1024, 1024, 4, 8, 8)
    causal = Case("causal", "bf16", 64, 128, 1024, 1024, 4, 8, 8)
    assert full.flops == 2 * 4 * 8 * 1024 * 1024 * (64 + 128)
    assert causal.flops == full.flops / 2


def test_window_pairs_are_counted_exactly() -> None:
    lengths = Lengths(heads=1, seqlen_q=50, seqlen_k=70)
    inside = sum(0 <= k <= q + 20 and k >= q + 20 - 7 for q in range(50) for k in range(70))
    assert visible_pairs("window:7,0", lengths) == inside


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_named_variant_and_its_flex_functions_agree(name: str) -> None:
    case = Case(name.replace("1024", "9").replace("256", "11"), "bf16", 64, 64, 33, 47, 1, 4, 4)
    inputs = case.inputs("cpu")
    whole = reference.attention(
        inputs.q, inputs.k, inputs.v, inputs.named.variant, dtype=torch.float64
    )
    rows = [0, 5, 32]
    found = exact_rows(inputs, 0, 3, rows)
    torch.testing.assert_close(found, whole[0, rows, 3], rtol=1e-10, atol=1e-12)
    rounded = rounded_rows(inputs, 0, 3, rows)
    torch.testing.assert_close(rounded.double(), found, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("left", [-1, 0, 7])
@pytest.mark.parametrize("right", [-1, 0, 3])
def test_a_named_window_shows_every_kernel_the_same_keys(left: int, right: int) -> None:
    chosen = named(f"window:{left},{right}", Lengths(heads=1, seqlen_q=20, seqlen_k=30))
    q, k, v = (torch.ones(1, n, 1, 1) for n in (20, 30, 30))
    v[0, :, 0, 0] = torch.arange(30)
    ours = reference.attention(q, k, v, chosen.variant)
    i, j = torch.arange(20)[:, None], torch.arange(30)[None, :]
    by_function = torch.ones(20, 30, dtype=torch.bool)
    if chosen.mask is not None:
        by_function &= chosen.mask(0, 0, i, j)
    before, after = chosen.window or (None, None)
    by_option = torch.ones(20, 30, dtype=torch.bool)
    if before is not None:
        by_option &= j >= i + 10 - before
    if after is not None:
        by_option &= j <= i + 10 + after
    assert torch.equal(by_function, by_option)
    means = (by_function * torch.arange(30.0)).sum(1) / by_function.sum(1)
    torch.testing.assert_close(ours[0, :, 0, 0].float(), means)


@pytest.mark.parametrize("name", ["nothing", "window:1", "softcap:x", "softcap:nan", "causal:3"])
def test_an_unknown_variant_or_wrong_numbers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="variant"):
        named(name, Lengths(1, 8, 8))


def test_the_check_accepts_torch_at_the_input_dtype() -> None:
    inputs = SMALL.inputs("cpu")
    check(inputs, reference_call(inputs))


@pytest.mark.parametrize("spoil", ["nan", "shape", "one row", "scale"])
def test_the_check_notices_a_wrong_output(spoil: str) -> None:
    inputs = SMALL.inputs("cpu")
    right = reference_call(inputs)

    def call() -> torch.Tensor:
        out = right()
        if spoil == "nan":
            out[1, 7, 2, 5] = float("nan")
        elif spoil == "one row":
            out[:, -1] = out[:, -2]
        elif spoil == "scale":
            out *= 1.1
        return out[..., :-1] if spoil == "shape" else out

    with pytest.raises(WrongResult):
        check(inputs, call)


def test_the_check_tells_the_largest_error_in_its_rows() -> None:
    inputs = SMALL.inputs("cpu")
    right = reference_call(inputs)
    sampled = samples(inputs)
    at = sampled[0]
    nudge = 0.9 * at.allowed

    def call() -> torch.Tensor:
        out = right().double()
        out[at.batch, at.rows[3], at.head, 5] = at.exact[3, 5] + nudge
        return out

    assert check(inputs, call, sampled) == pytest.approx(nudge, rel=1e-6)


def test_every_provider_of_a_case_is_held_against_the_same_rows(monkeypatch) -> None:
    seen = []

    def watched(inputs, call, sampled):
        seen.append(sampled)
        return 0.5

    monkeypatch.setattr("cutedsl_fa3.bench.check", watched)
    providers = [Provider(name, "torch", reference_call) for name in ("a", "b", "c")]
    rows = measure(SMALL, providers, Timing("test", 0, 8, 7, Clock()), print, device="cpu")
    assert len(seen) == 3 and all(each is seen[0] for each in seen)
    assert [row.max_error for row in rows] == [0.5] * 3


class Clock:
    """Counts windows instead of timing them, in the order they are asked for."""

    def __init__(self) -> None:
        self.order: list[object] = []

    def __call__(self, call: object, repeats: int) -> float:
        self.order.append(call)
        return 1.0 + 0.5 * self.order.count(call)


def test_every_round_times_each_provider_once_in_an_order_drawn_anew() -> None:
    clock = Clock()
    providers = [Provider(name, "torch", reference_call) for name in ("a", "b", "c", "d")]
    rows = measure(SMALL, providers, Timing("test", 0, 8, 9, clock), print, device="cpu")
    assert [len(row.samples) for row in rows] == [9] * 4
    timed = clock.order[2 * len(providers) :]
    rounds = [tuple(timed[i : i + 4]) for i in range(0, len(timed), 4)]
    assert all(len(set(one)) == 4 for one in rounds)
    assert len(set(rounds)) > 3


def test_an_absent_a_declining_and_a_wrong_peer_are_reported_and_left_out() -> None:
    def absent(inputs: Inputs):
        raise ModuleNotFoundError("No module named 'peer'")

    def declining(inputs: Inputs):
        raise Unsupported("not offered: causal")

    def wrong(inputs: Inputs):
        return lambda: torch.zeros_like(inputs.q)

    said: list[str] = []
    providers = [
        Provider("absent", "none", absent),
        Provider("declining", "none", declining),
        Provider("wrong", "none", wrong),
        Provider("right", "none", reference_call),
    ]
    timing = Timing("test", 0, 8, 7, Clock())
    rows = measure(SMALL, providers, timing, said.append, device="cpu")
    assert [row.provider for row in rows] == ["right"]
    assert [line.partition(":")[0] for line in said] == ["absent", "declining", "wrong"]


def test_a_run_yields_each_case_when_it_is_measured_and_says_one_line_for_it(monkeypatch) -> None:
    monkeypatch.setattr("cutedsl_fa3.bench.measure", lambda case, *rest: [case])
    said: list[str] = []
    measured = run(["one", "two"], [], Timing("test", 0, 8, 7, Clock()), said.append)
    monkeypatch.setattr("cutedsl_fa3.bench.measure", lambda case, *rest: [row("fa3", 7.0)])
    assert next(measured) == [row("fa3", 7.0)]
    assert len(said) == 1 and said[0].startswith("one: fa3 7 TFLOP/s (")
    assert next(measured) and len(said) == 2


def test_flex_compiles_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiles))
    providers = [PROVIDERS["flex"]]
    clock = Timing("test", 0, 8, 7, lambda call, repeats: [call() for _ in range(2)] and 1.0)
    for seqlen in (128, 256):
        for variant in ("full", "causal"):
            case = Case(variant, "bf16", 64, 64, seqlen, seqlen, 1, 2, 2)
            before = compiles.frame_count
            (timed,) = measure(case, providers, clock, pytest.fail, device="cpu")
            assert timed.provider == "flex"
            assert compiles.frame_count == before + 1


def test_our_own_wrong_result_is_an_error() -> None:
    ours = Provider(OURS, "none", lambda inputs: lambda: torch.zeros_like(inputs.q))
    with pytest.raises(WrongResult):
        measure(SMALL, [ours], Timing("test", 0, 8, 7, Clock()), print, device="cpu")


def test_providers_decline_what_their_options_cannot_say() -> None:
    alibi = Case("alibi", "bf16", 64, 64, 32, 32, 1, 2, 2).inputs("cpu")
    rectangular = Case("causal", "bf16", 64, 64, 16, 32, 1, 2, 2).inputs("cpu")
    for name in ("cudnn", "fa2"):
        with pytest.raises(Unsupported):
            PROVIDERS[name].prepare(alibi)
        with pytest.raises(Unsupported, match="top-left"):
            PROVIDERS[name].prepare(rectangular)


def test_a_grid_is_every_combination_at_constant_tokens_and_width() -> None:
    cases = Grid(seqlens=(1024, 32768)).cases()
    assert Counter((case.head_dim, case.heads) for case in cases) == {(64, 32): 4, (128, 16): 4}
    assert {(case.seqlen_q, case.batch) for case in cases} == {(1024, 16), (32768, 1)}


def test_an_unknown_provider_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="fa9"):
        chosen_providers(["fa3", "fa9"])


def row(provider: str, tflops: float, **changes) -> Row:
    sizes = dict(zip(Row.__dataclass_fields__, (provider, "forward"), strict=False))
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
    for path in [*DATA.glob("bench-*.json"), *DATA.glob("gemm-*.json")]:
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
