"""How backwards are timed, left out and recorded; the clocks are replaced, so no GPU is needed."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cutedsl_fa3 import backward as twin
from cutedsl_fa3 import bars, bench_backward, reference
from cutedsl_fa3.bench import BURST, Timing, shared_inputs
from cutedsl_fa3.bench_backward import (
    PEERS,
    VARIANTS,
    Absent,
    GradientCase,
    chosen_providers,
    compiled_ahead,
    measure_together,
    memory,
    missing,
    peaks,
    plain,
    plans,
    run,
    variants,
)
from cutedsl_fa3.cases import Case, Grid
from cutedsl_fa3.checks import WrongResult
from cutedsl_fa3.checks_backward import check_gradients, gradient_sample
from cutedsl_fa3.cli import app
from cutedsl_fa3.errors import Unsupported
from cutedsl_fa3.peers import OURS, PROVIDERS, Provider
from cutedsl_fa3.peers_backward import GRADIENTS, GradientInputs, GradientProvider, _by_autograd
from cutedsl_fa3.record import META, BackwardRow, PeakRow, Record, RecordError, Sizes
from cutedsl_fa3.tables import backward_table

SMALL = GradientCase("causal", "bf16", 32, 16, 40, 56, 2, 4, 2)
FIXED = replace(SMALL, deterministic=True)
ONCE = Timing("test", 0, 8, 3, lambda call, repeats: 1.0)


def forward(inputs: GradientInputs):
    q, k, v = inputs.leaves[:3]
    return lambda: reference.attention(q, k, v, inputs.named.variant).to(q.dtype)


def gradients(inputs: GradientInputs, out: torch.Tensor, retain: bool):
    found = _by_autograd(inputs, out, retain)
    return tuple(t.to(inputs.q.dtype) for t in found[:3]) + found[3:]


REFERENCE = GradientProvider("peer", forward, gradients)


def by_twin(inputs: GradientInputs):
    q, k, v = inputs.q, inputs.k, inputs.v
    lse = None
    if inputs.named.variant.has_lse:
        out, lse = reference.attention_with_lse(q, k, v, inputs.named.variant)
    else:
        out = reference.attention(q, k, v, inputs.named.variant)
    return lambda: (out.to(q.dtype).detach(), None if lse is None else lse.detach())


def twins_gradients(inputs: GradientInputs, kept, retain: bool):
    out, lse = kept
    q, k, v = (t.detach() for t in (inputs.q, inputs.k, inputs.v))
    options = {"scale": q.shape[3] ** -0.5, "wanted": inputs.wanted}
    found = twin.run(q, k, v, inputs.named.variant, out, lse, inputs.dout, **options)
    return found.q, found.k, found.v, *(found.captures[n] for n in inputs.wanted)


TWIN = GradientProvider(OURS, by_twin, twins_gradients)


def measured(cases, providers, absent=None, said=None, timing=ONCE) -> list[BackwardRow]:
    heard = (said if said is not None else []).append
    return measure_together(cases, providers, timing, heard, absent or Absent(), device="cpu")


def test_rows_say_what_was_asked_for_and_count_two_and_a_half_forwards() -> None:
    rows = measured([SMALL, FIXED], [TWIN, REFERENCE])
    assert [(row.provider, row.deterministic) for row in rows] == [
        (OURS, False), ("peer", False), (OURS, True), ("peer", True),
    ]  # fmt: skip
    plain_case = Case("causal", "bf16", 32, 16, 40, 56, 2, 4, 2)
    assert SMALL.flops == 2.5 * plain_case.flops
    assert rows[0].tflops == round(SMALL.flops / 1e9, 2)
    assert all(row.direction == "backward" and len(row.samples) == 3 for row in rows)
    assert all(0 < row.max_error == max(row.errors) < 0.1 for row in rows)


@pytest.mark.parametrize("variant", [*VARIANTS, "full", "sink", "prefix:8"])
def test_the_twin_of_the_kernel_passes_for_every_variant_that_is_timed(variant: str) -> None:
    (cases,) = variants([variant.replace("1024", "16").replace("1000", "16")], sizes=(48, 1, 2))
    (case,) = (replace(each, head_dim=32, head_dim_v=32) for each in cases[-1:])
    absent = Absent()
    (row,) = measured([case], [TWIN], absent)
    assert not absent.reasons and row.captured == variant.endswith("+gradient")


def test_all_providers_and_cases_of_a_problem_are_held_against_one_head(monkeypatch) -> None:
    seen = []

    def watched(inputs, call, sample):
        seen.append(sample)
        return 0.1, 0.2, 0.3

    monkeypatch.setattr(bench_backward, "check_gradients", watched)
    rows = measured([SMALL, FIXED], [replace(REFERENCE, name=name) for name in "ab"])
    assert len(seen) == 4 and all(each is seen[0] for each in seen)
    assert rows[0].errors == (0.1, 0.2, 0.3) and rows[0].max_error == 0.3


def test_the_sampled_head_is_what_autograd_gives_in_fp64() -> None:
    case = replace(SMALL, variant="alibi")
    inputs = case.inputs("cpu", 3)
    sample = gradient_sample(inputs, seed=3)
    given = [t.detach().double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = reference.attention(*given, inputs.named.variant, dtype=torch.float64)
    whole = torch.autograd.grad(out, given, inputs.dout.double())
    for got, exact in zip(sample.of(whole), sample.exact, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_gradient_is_found(wrong: int) -> None:
    inputs = SMALL.inputs("cpu")
    right = REFERENCE.prepare(inputs)()
    sample = gradient_sample(inputs)
    check_gradients(inputs, lambda: right, sample)
    for spoil in (lambda t: t * 1.1, torch.zeros_like, lambda t: t / 0.0):
        found = [spoil(t) if n == wrong else t for n, t in enumerate(right)]
        with pytest.raises(WrongResult, match=("dq", "dk", "dv")[wrong]):
            check_gradients(inputs, lambda found=found: tuple(found), sample)


def test_who_has_no_time_is_noted_with_the_reason_and_stops_nobody() -> None:
    def absent_one(inputs):
        raise ModuleNotFoundError("No module named 'peer'")

    def declining(inputs):
        raise Unsupported("head_dim, head_dim_v = 512, 512: tiles of up to 256")

    def wrong(inputs, kept, retain):
        return tuple(torch.zeros_like(t) for t in (inputs.q, inputs.k, inputs.v))

    absent, said = Absent(), []
    providers = [
        GradientProvider(OURS, declining, gradients),
        GradientProvider("away", absent_one, gradients),
        GradientProvider("wrong", forward, wrong),
        REFERENCE,
    ]
    rows = measured([SMALL, FIXED], providers, absent, said)
    assert [row.provider for row in rows] == ["peer", "peer"]
    assert list(absent.reasons) == [OURS, "away", "wrong"] and absent.ours
    assert absent.reasons["away"] == ["not installed (No module named 'peer')"]
    assert "WrongResult: dq: error" in absent.reasons["wrong"][0]
    assert len(said) == 6
    assert json.loads(json.dumps(absent.reasons)) == absent.reasons


def test_groups_are_measured_in_turn_and_a_failure_leaves_those_before(monkeypatch) -> None:
    def measure(cases, *rest):
        if cases[0].seqlen_q == 99:
            raise RuntimeError("the GPU takes no more work")
        return [_row(case) for case in cases]

    monkeypatch.setattr(bench_backward, "measure_together", measure)
    said: list[str] = []
    got = run([[SMALL], [replace(SMALL, seqlen_q=99)]], [], ONCE, said.append, Absent())
    assert [row.seqlen_q for row in next(got)] == [40]
    assert said[0] == f"{SMALL}: {OURS} 1.000 ms"
    with pytest.raises(RuntimeError, match="no more work"):
        next(got)


def test_cases_share_tensors_but_not_what_their_variant_captured() -> None:
    bias = replace(SMALL, variant="bias")
    cases = [bias, replace(bias, captured=True), SMALL]
    made = shared_inputs(cases, "cpu", 0)
    assert len({id(one.q) for one in made.values()}) == 1
    assert len({id(one.dout) for one in made.values()}) == 1
    without, with_it, _ = made.values()
    assert without.wanted == () and with_it.wanted == (0,)
    assert len(with_it.leaves) == 4 and len(without.leaves) == 3
    assert with_it.named.variant.captures[0].requires_grad
    assert not without.named.variant.captures[0].requires_grad


def test_a_peer_is_its_forward_with_torchs_graph_kept(monkeypatch) -> None:
    def prepare(inputs):
        q, k, v = inputs.heads_first()
        attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
        return lambda: attend(q, k, v).transpose(1, 2)

    monkeypatch.setitem(PROVIDERS, "cudnn", Provider("cudnn", "torch", prepare))
    full = replace(SMALL, variant="full", head_dim_v=32)
    rows = measured([full, replace(full, deterministic=True)], [GRADIENTS["cudnn"]])
    assert [(row.provider, row.deterministic) for row in rows] == [("cudnn", False)]
    call = GRADIENTS["cudnn"].prepare(full.inputs("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(call(), call(), strict=True))
    whole = GRADIENTS["cudnn"].whole(full.inputs("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(whole(), call(), strict=True))


def test_what_is_compiled_for_a_peer_can_be_asked_for_gradients_again() -> None:
    def prepare(inputs):
        q, k, v = inputs.leaves[:3]
        compiled = torch.compile(
            lambda q, k, v: torch.softmax(q.float() @ k.float().mT, -1).tanh() @ v.float(),
            backend="aot_eager",
        )
        return lambda: compiled(q, k, v)

    case = GradientCase("full", "bf16", 16, 16, 4, 4, 1, 4, 4)
    provider = GradientProvider("compiled", prepare, _by_autograd)
    call = provider.prepare(case.inputs("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(call(), call(), strict=True))


def test_plain_begins_with_the_usual_sizes_and_stands_beside_a_fixed_order() -> None:
    groups = plain()
    assert all([case.deterministic for case in group] == [False, True] for group in groups)
    assert all({case.variant for case in group} <= {"full", "causal"} for group in groups)
    firsts = [group[0] for group in groups]
    assert [case.head_dim for case in firsts[:12]] == [64] * 6 + [128] * 6
    assert [case.seqlen_q for case in firsts[:6]] == [16384, 16384, 4096, 4096, 1024, 1024]
    assert len(set(firsts)) == len(groups) == len(Grid().cases())
    assert len(plain([(64, 64)], (4096,))) == 2


def test_variants_take_turns_with_plain_causal_and_with_their_own_gradients() -> None:
    (group,) = variants(["sigmoid", "bias+gradient"])
    assert [(case.variant, case.captured) for case in group] == [
        ("causal", False), ("sigmoid", False), ("bias", True),
    ]  # fmt: skip
    assert str(group[2]).startswith("bias bf16 d128+gradient B=2 Sq=8192")
    with pytest.raises(ValueError, match="unheard"):
        variants(["unheard"])
    with pytest.raises(ValueError, match="fa3"):
        chosen_providers("plain", ["fa3"])
    assert [one.name for one in chosen_providers("variants")] == list(PEERS["variants"])


def test_plans_are_those_of_the_forward_and_of_the_backward_that_run() -> None:
    case = GradientCase("bias", "bf16", 64, 64, 512, 512, 1, 2, 2, captured=True)
    ahead, back = plans(case)
    assert "backward" in back.key_text and "backward" not in ahead.key_text
    assert back.wanted == (0,) and not back.deterministic
    _, fixed = plans(replace(case, captured=False, deterministic=True))
    assert fixed.wanted == () and fixed.deterministic


def test_each_kernel_is_compiled_once_ahead_and_a_refusal_is_said(monkeypatch) -> None:
    asked, compiled = [], []

    def here(function, items, workers):
        asked.append((len(items), workers))
        return [function(item) for item in items]

    def get(kernel):
        compiled.append(kernel.name)
        if len(compiled) == 3:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(bench_backward, "side_by_side", here)
    monkeypatch.setattr(bench_backward.cache, "get", get)
    said: list[str] = []
    large = GradientCase("full", "bf16", 264, 264, 64, 64, 1, 1, 1)
    long, short = memory([4096, 3072])  # of one forward kernel
    compiled_ahead([long, short, replace(long, deterministic=True), large], 3, said.append)
    assert asked == [(3, 3)] and len(set(compiled)) == 2
    assert "264" in said[0] and said[1].startswith("3 kernels")
    assert said[2].endswith("deterministic B=1 Sq=4096 Sk=4096 H=16/16: RuntimeError: no compiler")


def test_a_peak_is_the_largest_of_some_and_a_failure_is_noted() -> None:
    def failing(inputs):
        raise RuntimeError("out of memory")

    held = iter((300, 100, 200))
    absent = Absent()
    case = GradientCase("causal", "bf16", 32, 32, 16, 16, 1, 2, 2)
    providers = [TWIN, GradientProvider("failing", failing, gradients)]
    (rows,) = peaks(
        [case], providers, print, absent, device="cpu", peak=lambda call: call() and next(held)
    )
    assert [(row.provider, row.peak_bytes, row.samples) for row in rows] == [
        (OURS, 300, (300, 100, 200))
    ]
    assert absent.reasons["failing"] == [
        "no peak: no time for causal bf16 d32: RuntimeError: out of memory"
    ]


def _row(case: GradientCase, provider: str = OURS, **changes) -> BackwardRow:
    given = {"ms": 1.0, "tflops": 500.0, "max_error": 0.03, "errors": (0.01, 0.02, 0.03)}
    given |= {"samples": (1.0, 1.1, 1.2)} | changes
    return BackwardRow(provider=provider, direction="backward", **asdict(case), **given)


def _peak(case: GradientCase, provider: str, peak: int) -> PeakRow:
    sizes = {each.name: getattr(case, each.name) for each in fields(Sizes)}
    return PeakRow(**sizes, provider=provider, peak_bytes=peak, samples=(peak,) * 3)


@pytest.fixture
def record() -> Record:
    meta = {name: name.upper() for name in META}
    meta |= {"date": "2026-11-29T12:00:00+00:00", "device": "NVIDIA H200", "timing": "burst"}
    case = GradientCase("full", "bf16", 128, 128, 4096, 4096, 4, 16, 16)
    causal = GradientCase("causal", "bf16", 128, 128, 8192, 8192, 2, 16, 16)
    bias = replace(causal, variant="bias")
    rows = (
        _row(case),
        _row(case, "fa4", tflops=400.0, errors=(0.01, 0.01, 0.03)),
        _row(replace(case, deterministic=True), ms=1.2),
        _row(causal, ms=2.0),
        _row(bias, ms=2.4),
        _row(bias, "flex", ms=6.0),
        _row(replace(bias, captured=True), ms=3.0),
        *(_peak(memory([n])[0], OURS, n * 1024 * 8) for n in (16384, 8192)),
        _peak(memory([8192])[0], "fa4", 96 * 2**20),
    )
    return Record(meta, rows)


def test_a_record_of_the_backward_survives_writing_and_reading(record, tmp_path: Path) -> None:
    path = record.write(tmp_path / "backward-x.json")
    assert Record.read(path) == record


def test_the_table_shows_speed_errors_a_fixed_order_variants_and_memory(record) -> None:
    text = backward_table(record)
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA H200") and text.endswith("|\n")
    assert "| full | bf16 | 128 | 4096 | 500 | 400 | 1.25 | 2.00 | 1.20 |" in lines
    assert "Their geometric mean is 1.25." in text
    assert "| causal | bf16 | 128 | 8192 | 2.000 | 500 | 1.00 | - | - |" in lines
    assert "| bias | bf16 | 128 | 8192 | 2.400 | 500 | 1.20 | 6.000 | 2.50 |" in lines
    assert "| bias + gradient | bf16 | 128 | 8192 | 3.000 | 500 | 1.50 | - | - |" in lines
    peaks_of = [line for line in lines if line.startswith(("| 8192", "| 16384"))]
    assert peaks_of == ["| 8192 | 64 | 96 | 8.0 |", "| 16384 | 128 | - | 8.0 |"]
    held = Record(record.meta, tuple(r for r in record.rows if isinstance(r, BackwardRow)))
    assert "| 500 | 400 | 1.25 | 1.25 | 2.00 | 1.20 |" in backward_table(record, held)


def test_the_bars_are_of_plain_attention_as_it_is_by_default(record) -> None:
    pytest.importorskip("matplotlib")
    drawing = bars.backward(record)
    assert drawing is not None
    assert drawing.get_suptitle().startswith("Attention backward, bf16")
    heights = [bar.get_height() for axes in drawing.axes for bar in axes.patches]
    assert heights == [500.0, 400.0]
    assert bars.backward(Record(record.meta, record.rows[3:])) is None


def test_a_table_is_made_of_whatever_part_was_measured(record) -> None:
    for rows in (record.rows[:3], record.rows[3:7], record.rows[7:], record.rows[1:2]):
        text = backward_table(Record(record.meta, rows))
        assert text.startswith("NVIDIA H200") and text.endswith("|\n") and "\n\n\n" not in text


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that is there, a clean tree, and rows that take no time; what was measured."""
    meta = {name: name.upper() for name in META} | {"date": "2026-11-29T12:00:00+00:00"}
    monkeypatch.setattr("cutedsl_fa3.bench.require_gpu", lambda: None)
    monkeypatch.setattr("cutedsl_fa3.record.collect", lambda commit, dirty: dict(meta))
    done: list[str] = []

    def measure(cases, *rest):
        done.extend(map(str, cases))
        return [_row(case) for case in cases]

    def of_peaks(cases, *rest):
        done.extend(f"peak {case}" for case in cases)
        return iter([[_peak(case, OURS, 1)] for case in cases])

    monkeypatch.setattr(bench_backward, "measure_together", measure)
    monkeypatch.setattr(bench_backward, "peaks", of_peaks)
    monkeypatch.setattr(bench_backward, "compiled_ahead", lambda cases, *rest: None)
    return done


def command(*options: str):
    return CliRunner().invoke(app, ["bench-backward", *options])


def test_the_command_writes_one_record_of_all_parts(pretended, tmp_path: Path) -> None:
    result = command("--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.iterdir()
    record = Record.read(path)
    assert path.name.startswith("backward-") and "partial" not in record.meta
    assert len(record.rows) == 2 * len(Grid().cases()) + len(VARIANTS) + 2
    assert record.meta["absent"] == {}


def test_a_run_that_ended_early_is_gone_on_with(pretended, tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    options = ("--head-dims", "64,128", "--seqlens", "4096")
    assert command("--part", "plain", *options, "--out", str(first)).exit_code == 0
    held = Record.read(first)
    noted = {**held.meta, "partial": True, "absent": {"fa4": ["not installed"]}}
    Record(noted, held.rows[:2]).write(first)
    before, whole = len(pretended), tmp_path / "whole.json"
    result = command(*options, "--add", str(first), "--out", str(whole))
    assert result.exit_code == 0, result.output
    record = Record.read(whole)
    assert "partial" not in record.meta and record.meta["absent"] == {"fa4": ["not installed"]}
    assert len(record.rows) == 8 + len(VARIANTS) + 2
    assert len(pretended) - before == len(record.rows) - 2


@pytest.mark.parametrize("field", ["commit", "device", "timing"])
def test_a_record_of_something_else_is_not_gone_on_with(pretended, tmp_path, field) -> None:
    path = tmp_path / "first.json"
    assert command("--part", "memory", "--out", str(path)).exit_code == 0
    held = Record.read(path)
    Record({**held.meta, field: "another"}, held.rows).write(path)
    result = command("--add", str(path), "--out", str(tmp_path))
    assert result.exit_code == 2 and f"its {field} is 'another'" in result.stderr
    assert missing("memory", [memory()], held.rows) == []
    assert missing("plain", [memory()], held.rows) == [memory()]
    with pytest.raises(RecordError, match="no record"):
        bench_backward.of_earlier(tmp_path / "none.json", {"absent": {}})


def test_under_sustained_load_no_peak_is_measured(pretended, tmp_path: Path) -> None:
    assert command("--sustained", "--out", str(tmp_path)).exit_code == 0
    assert not any(line.startswith("peak") for line in pretended)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("backward-sustained-")


def test_where_ours_has_no_time_the_record_is_written_and_the_command_fails(
    pretended, monkeypatch, tmp_path: Path
) -> None:
    def measure(cases, providers, timing, report, absent, seed):
        absent.note(OURS, "dk: error 1 against fp64")
        return []

    monkeypatch.setattr(bench_backward, "measure_together", measure)
    result = command("--part", "variants", "--out", str(tmp_path))
    assert result.exit_code == 1 and "dk: error 1" in result.stderr
    (path,) = tmp_path.iterdir()
    assert Record.read(path).meta["absent"] == {OURS: ["dk: error 1 against fp64"]}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--part", "plain,whole"), "whole"),
        (("--variant", "unheard"), "unheard"),
        (("--providers", "fa9"), "fa9"),
        (("--seqlens", "many"), "many"),
    ],
)
def test_the_command_refuses_naming_what_was_given(pretended, options, named) -> None:
    result = command(*options)
    assert result.exit_code == 2 and named in result.stderr
    assert not pretended


@pytest.mark.gpu
def test_on_a_gpu_ours_and_cudnn_are_right_and_timed() -> None:
    full = GradientCase("full", "bf16", 64, 64, 1024, 1024, 1, 4, 4)
    absent, cases = Absent(), [full, replace(full, deterministic=True)]
    quick = replace(BURST, window_ms=1.0, rounds=3)
    providers = [GRADIENTS[OURS], GRADIENTS["cudnn"]]
    rows = measure_together(cases, providers, quick, print, absent)
    assert [(row.provider, row.deterministic) for row in rows] == [
        (OURS, False), ("cudnn", False), (OURS, True),
    ]  # fmt: skip
    assert not absent.ours and all(row.ms > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_every_variant_is_right_beside_flex() -> None:
    (group,) = variants(sizes=(1024, 1, 4))
    absent, quick = Absent(), replace(BURST, window_ms=1.0, rounds=3)
    providers = [GRADIENTS[OURS], GRADIENTS["flex"]]
    rows = measure_together(group, providers, quick, print, absent)
    assert not absent.ours and [row.provider for row in rows].count(OURS) == len(VARIANTS)
    assert {"causal", "alibi"} <= {row.variant for row in rows if row.provider == "flex"}


@pytest.mark.gpu
def test_on_a_gpu_the_peak_of_a_step_grows_with_the_length_and_no_faster() -> None:
    found = peaks(memory([2048, 4096, 8192]), [GRADIENTS[OURS]], print, Absent())
    short, middle, long = (rows[0].peak_bytes for rows in found)
    assert 0 < short and middle <= 2.1 * short and long <= 2.1 * middle
