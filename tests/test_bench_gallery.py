"""What the gallery's examples are predicted to cost, and how their times are taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from cutedsl_fa3 import (
    attention,
    bench_gallery,
    cache,
    cases,
    figures,
    gallery,
    gallery_page,
    reference,
)
from cutedsl_fa3.bench import Timing
from cutedsl_fa3.bench_gallery import (
    beside_table,
    clocks_table,
    compiled,
    measure,
    predicted,
    tiles_table,
    unit_of,
    variant_of,
    visible_pairs,
)
from cutedsl_fa3.checks import WrongResult
from cutedsl_fa3.cli import app
from cutedsl_fa3.gallery_page import EXAMPLES
from cutedsl_fa3.inputs import reads
from cutedsl_fa3.record import META, Record

BY_NAME = {example.name: example for example in EXAMPLES}
every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.name)
N = 96


@every_example
def test_a_head_beyond_those_of_its_captured_tensors_is_served_as_the_first(example) -> None:
    own = example.variant(N)
    by_head = [(n, dim) for n, _, _, by in reads(own) for dim, name in by if name == "h"]
    heads = 1 + max((own.captures[n].shape[dim] for n, dim in by_head), default=1)
    q, k, v = (torch.randn(1, N, heads, 8) for _ in range(3))
    for t in (q, k, v):
        t[:, :, -1] = t[:, :, 0]
    out = reference.attention(q, k, v, variant_of(example, N, heads))
    assert out.isfinite().all()
    assert torch.equal(out[:, :, -1], out[:, :, 0])
    assert (example.name in ("alibi", "chain", "decay", "relative_bias", "t5_bias")) == bool(
        by_head
    )


def test_no_two_examples_have_a_name() -> None:
    assert len(BY_NAME) == len(EXAMPLES)


@every_example
def test_a_prediction_has_a_time_and_says_what_is_visited(example) -> None:
    made = predicted(example, 1024, 4)
    assert made.ms > 0 and made.visits
    assert made.by_pipe["WGMMA"] > 0
    assert (unit_of(example) == "causal") == (example.kind == "mask")


def test_a_tiles_count_is_that_of_the_plans_own_tile() -> None:
    made = predicted(BY_NAME["window"], 1024, 4, head_dim=64)
    tile_m, tile_n = map(int, made.tile.split(" x "))
    assert made.tiles.all == -(-1024 // tile_m) * -(-1024 // tile_n)
    assert made.tiles.needed == made.tiles.visited


@pytest.mark.parametrize("name", ["causal", "none", "full", "documents", "alibi"])
def test_pairs_are_counted_one_by_one(name: str) -> None:
    n = 32
    variant = variant_of(BY_NAME[name], n, 1)
    q, k, v = (torch.ones(1, n, 1, 8) for _ in range(3))
    seen = torch.zeros(n)
    for key in range(n):  # a value that only this key has reaches those that see it
        v.zero_()[:, key] = 1.0
        seen[key] = (reference.attention(q, k, v, variant) > 0).any(-1).sum()
    assert visible_pairs(variant, n, at_once=10) == int(seen.sum())


def counted_calls(call, repeats: int) -> float:
    """A clock for machines without a GPU: it calls, and says 2 ms."""
    call()
    return 2.0


QUICK = Timing("burst", idle_ms=0.0, window_ms=1.0, rounds=3, clock=counted_calls)
SOME = tuple(BY_NAME[name] for name in ("full", "causal", "documents", "alibi", "relu"))


@pytest.fixture(scope="module")
def rows() -> list:
    return measure(QUICK, lambda line: None, examples=SOME, sizes=(N, 2, 64), device="cpu")


def test_rows_are_checked_and_fit_a_record(rows, tmp_path) -> None:
    assert [row.variant for row in rows] == [one.name for one in SOME]
    causal = rows[1]
    assert causal.tflops == round(4 * 2 * 64 * N * (N + 1) / 2 / 2.0 / 1e9, 2)
    assert 0 < causal.max_error < 0.05 and len(causal.samples) == 3
    meta = {name: "x" for name in META}
    written = Record(meta, tuple(rows)).write(tmp_path / "gallery-x.json")
    assert Record.read(written).rows == tuple(rows)
    assert cases.of_row(causal).seqlen_q == N


def test_a_wrong_result_is_not_timed(monkeypatch) -> None:
    right = bench_gallery.attention
    monkeypatch.setattr(bench_gallery, "attention", lambda *given: right(*given) + 1)
    with pytest.raises(WrongResult):
        measure(QUICK, print, examples=SOME[:1], sizes=(N, 2, 64), device="cpu")


def test_the_kernel_compiled_ahead_is_the_one_that_is_called(gpu, monkeypatch) -> None:
    pretended, asked = cache.get, []

    def get(kernel):
        asked.append(kernel.key_text)
        return SimpleNamespace(**vars(pretended(kernel)), name=kernel.name)

    monkeypatch.setattr(cache, "get", get)
    for example in EXAMPLES:
        compiled((example.name, N, 4, 64))
        q, k, v = (torch.zeros(1, N, 4, 64, dtype=torch.bfloat16) for _ in range(3))
        attention(q, k, v, variant_of(example, N, 4))
        ahead, called = asked
        assert ahead == called, example.name
        asked.clear()


def test_tables_show_ratios_to_causal_and_to_full(rows) -> None:
    made = [predicted(one, 1024, 4) for one in SOME]
    masks = made[:3]
    assert len(tiles_table(masks).splitlines()) == 4
    lines = {line.split()[0]: line.split() for line in clocks_table(made).splitlines()[1:]}
    assert lines["causal"][-1] == "1.00"
    full, causal, _, alibi, relu = (one.ms for one in made)
    assert lines["full"][-1] == f"{full / causal:.2f}"
    assert lines["alibi"][-1] == f"{alibi / full:.2f}"
    assert float(lines["relu"][-1]) < 1 and relu < full
    lines = {line.split()[0]: line.split() for line in beside_table(made, rows[:2]).splitlines()}
    assert lines["full"][3:5] == ["2.000", "1.00"]
    assert lines["full"][5] == f"{full / causal - 1:+.0%}"
    assert lines["alibi"][3:] == ["-", "-", "-"]


@pytest.mark.jupyter
def test_a_sheet_has_a_panel_for_each_picture_and_no_other() -> None:
    chosen = [BY_NAME[name] for name in ("causal", "alibi", "softcap", "window", "relu")]
    shown = gallery_page.drawn(chosen)
    drawing = gallery.sheet(shown, columns=3)
    titled = [axes for axes in drawing.axes if axes.get_title()]
    assert [axes.get_title() for axes in titled] == list(shown)
    assert figures.in_grey(drawing).std() > 10


def test_without_a_gpu_the_command_says_so(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench-gallery"])
    assert result.exit_code == 1 and "no CUDA device" in result.output


@pytest.mark.gpu
@pytest.mark.slow
def test_every_example_runs_right_on_a_gpu() -> None:
    quick = Timing("burst", idle_ms=0.0, window_ms=1.0, rounds=3)
    found = measure(quick, print)
    assert [row.variant for row in found] == [one.name for one in EXAMPLES]
