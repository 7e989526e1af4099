"""Candidates of the tuner follow from one table; what it keeps was checked and timed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import cache, interface, reference, tuned, tuning
from cutedsl_fa3.bench import Timing
from cutedsl_fa3.cases import Case
from cutedsl_fa3.checks import WrongResult
from cutedsl_fa3.errors import LayoutError, Unsupported
from cutedsl_fa3.named import EXAMPLES, named, visible_pairs
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.record import DATA, Record
from cutedsl_fa3.schedules import schedule_for

CASE = Case("causal", "bf16", 64, 64, 96, 96, 1, 2, 2)


def plan(schedule):
    return Plan(named("causal", CASE.lengths()).variant, Problem(*CASE.problem), schedule)


def test_the_first_candidate_is_the_default_and_the_others_differ_in_one_field():
    base, *others = tuning.candidates(CASE)
    made = plan(base)
    assert base == schedule_for(made.variant, made.problem, CASE.extents)
    assert base.residents == 4  # so few keys have a row of their own
    for other in others:
        fields = dataclasses.asdict(base)
        changed = {n for n, value in dataclasses.asdict(other).items() if value != fields[n]}
        assert len(changed) == 1 or changed - {"overlap"} == {"tile_m", "consumers"}
        assert "overlap" not in changed or len(changed) == 1 or other.consumers == 1
        plan(other).check()
    assert len(set(others)) == len(others) > 10


def test_what_does_not_fit_is_no_candidate():
    wide = dataclasses.replace(CASE, head_dim=128, head_dim_v=128)
    assert {s.stages for s in tuning.candidates(wide)} == {1, 2, 3}  # 4 stages need 295056 bytes


@pytest.mark.parametrize("dims", [(96, 96), (192, 128), (256, 256)])
def test_every_native_head_size_has_candidates_of_each_kind(dims):
    case = dataclasses.replace(CASE, head_dim=dims[0], head_dim_v=dims[1])
    base, *others = tuning.candidates(case)
    problem = Problem(*case.problem)
    assert base == schedule_for(named("causal", case.lengths()).variant, problem, case.extents)
    for field in ("overlap", "tile_n", "head_group"):
        assert len({getattr(other, field) for other in others}) > 1, field


def test_a_run_measures_each_case_with_its_schedules(monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda case, chosen, *rest: [case, *chosen])
    said = []
    plans = [(CASE, ["a", "b"]), (dataclasses.replace(CASE, variant="full"), ["c"])]
    first, second = tuning.run(plans, Timing("any", 0.0, 1.0, 3), said.append)
    assert first == [CASE, "a", "b"] and second[1:] == ["c"]
    assert said == [f"{plans[0][0]}: 2 schedules", f"{plans[1][0]}: 1 schedules"]


def test_records_made_before_v_had_a_size_of_its_own_are_read():
    for path in DATA.glob("tune-*.json"):
        rows = Record.read(path).rows
        assert rows and all(row.head_dim_v for row in rows)


def test_every_field_of_a_schedule_is_tried_or_named_as_not_tried():
    every = {field.name for field in dataclasses.fields(Schedule)}
    assert set(tuning.VALUES) | set(tuning.NOT_TRIED) == every
    assert not set(tuning.VALUES) & set(tuning.NOT_TRIED)


def test_what_a_rule_forbids_is_named_with_the_rule():
    variant, problem = fa3.Variant(), Problem("bf16", 128, 128)
    default = Plan.default(variant, problem).schedule
    found = tuning.around(variant, problem, default)
    refused = {change: why for change, why in found.items() if isinstance(why, str)}
    assert found["default"] == default
    assert "295112 bytes are needed" in refused["stages 4"]
    alone = dataclasses.replace(default, consumers=1, tile_m=64)
    why = tuning.around(variant, problem, alone)["tile_m 64, consumers 1, overlap both"]
    assert "take turns" in why
    assert found["tile_n 64"] == dataclasses.replace(default, tile_n=64)


def test_one_warpgroup_alone_is_tried_without_taking_turns():
    variant, problem = fa3.Variant(), Problem("bf16", 64, 64)
    default = Plan.default(variant, problem).schedule
    assert default.overlap == "both"
    found = tuning.around(variant, problem, default)["tile_m 64, consumers 1, overlap intra"]
    assert found == dataclasses.replace(default, tile_m=64, consumers=1, overlap="intra")


@pytest.mark.parametrize(
    ("heads", "seqlen", "base", "others"), [(2, 1, 1, []), (8, 4096, 1, [2, 4]), (24, 1, 1, [2, 4])]
)
def test_heads_that_share_a_key_head_are_tried_in_one_tile(heads, seqlen, base, others):
    case = dataclasses.replace(CASE, heads=heads, seqlen_q=seqlen)  # of 2 key heads
    default, *found = tuning.candidates(case)
    assert default.pack == base
    assert sorted({one.pack for one in found} - {base}) == others


def test_around_the_best_so_far_changes_are_still_named_from_the_default():
    variant, problem = fa3.Variant(), Problem("bf16", 64, 64)
    default = Plan.default(variant, problem).schedule
    best = dataclasses.replace(default, tile_n=64)
    found = tuning.around(variant, problem, best)
    assert next(iter(found)) == "tile_n 64" and found["default"] == default
    assert found["tile_n 64, stages 3"] == dataclasses.replace(default, tile_n=64, stages=3)


SIZES = (2, 40, 4, 64)
DEFAULT = Plan.default(fa3.Variant(), Problem("bf16", 64, 64)).schedule
FAST, FASTER = (
    dataclasses.replace(DEFAULT, stages=3),
    dataclasses.replace(DEFAULT, stages=3, tile_n=64),
)
SPILLING = dataclasses.replace(DEFAULT, tile_n=176)


class Pretended:
    """A GPU whose kernels give the reference's result, in a time that follows from the schedule."""

    def __init__(self) -> None:
        self.ms = {FAST: 0.8, FASTER: 0.7}
        self.spoil = {}
        self.running = None
        self.timed = []
        self.right = {}

    def get(self, kernel):
        spills = 96 if kernel.plan.schedule == SPILLING else 0
        return SimpleNamespace(resources=SimpleNamespace(spills=spills))

    def attention_with_lse(self, q, k, v, variant, *, schedule):
        self.running = schedule
        if q.data_ptr() not in self.right:  # computed once for each problem
            with torch.no_grad():
                self.right[q.data_ptr()] = reference._attention(
                    q, k, v, variant, None, torch.float32
                )
        out, lse = (t.clone() for t in self.right[q.data_ptr()])
        out = out.to(q.dtype)
        if schedule in self.spoil:
            self.spoil[schedule](out, lse)
        return out, lse

    def attention(self, *tensors, **options):
        return self.attention_with_lse(*tensors, **options)[0]

    def clock(self, call, repeats):
        call()
        self.timed.append(self.running)
        return self.ms.get(self.running, 1.0 + 1e-3 * (len(self.timed) % 3))

    @property
    def timing(self):
        return Timing("pretended", 0.0, 1.0, 5, self.clock)


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    made = Pretended()
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(tuned, "_aside", 0)
    monkeypatch.setattr(tuned, "_kept", {})
    monkeypatch.setattr(tuned, "device_name", lambda device: "Pretended GPU")
    monkeypatch.setattr(tuning.cache, "get", made.get)
    monkeypatch.setattr(tuning, "attention", made.attention)
    monkeypatch.setattr(tuning, "attention_with_lse", made.attention_with_lse)
    yield made
    tuned._found.clear()
    interface._calls.clear()


def tensors(*shape):
    seeded = torch.Generator().manual_seed(0)
    return [torch.randn(shape or SIZES, generator=seeded).bfloat16() for _ in range(3)]


def test_the_fastest_is_found_in_a_second_pass_and_used_from_then_on(pretended):
    q, k, v = tensors()
    result = fa3.tune(q, k, v, timing=pretended.timing)
    assert result.best == FASTER and result.default == DEFAULT
    assert result.speed == pytest.approx(1.0 / 0.7, rel=0.01)
    plan = fa3.plan(q, k, v)
    assert plan.schedule == FASTER and plan.tuned == result.choice
    assert result.path is not None and result.path.is_file()
    assert tuned.forget(fa3.Variant()) == 1
    assert fa3.plan(q, k, v).schedule == DEFAULT


def test_one_pass_finds_the_best_that_differs_in_one_field(pretended):
    result = fa3.tune(*tensors(), timing=pretended.timing, passes=1, on_disk=False)
    assert result.best == FAST and result.path is None
    assert not list(cache.root().iterdir())


def test_rows_are_fastest_first_and_say_why_a_candidate_was_left_out(pretended):
    result = fa3.tune(*tensors(), timing=pretended.timing, progress=False)
    timed = [row for row in result.rows if row.samples]
    assert [row.speed for row in timed] == sorted((row.speed for row in timed), reverse=True)
    left_out = {row.change: row.why_not for row in result.rows if not row.samples}
    assert left_out["tile_n 176"] == "spills 96 B a thread"
    assert SPILLING not in pretended.timed
    assert all(row.why_not for row in result.rows[len(timed) :])
    flops = 4 * 64 * 2 * 4 * 40 * 40
    assert all(row.tflops == pytest.approx(flops / row.ms / 1e9) for row in timed)
    page = str(result).splitlines()
    assert page[0].startswith("default: tile_m 192, tile_n 128") and "tuned" in page[-1]
    for row in result.rows:
        (line,) = (line for line in page if line.startswith(f"{row.change} "))
        assert ("best" in line) == (row.schedule == FASTER)
        assert row.why_not[:20] in line


def test_every_round_times_each_candidate_once_in_an_order_drawn_anew(pretended):
    result = fa3.tune(*tensors(), timing=pretended.timing, passes=1)
    count = sum(bool(row.samples) for row in result.rows)
    timed = pretended.timed[2 * count :]  # after two calls of each to warm up
    rounds = [tuple(timed[at : at + count]) for at in range(0, 5 * count, count)]
    assert all(len(set(one)) == count for one in rounds) and len(set(rounds)) == 5


def test_what_was_fast_by_chance_is_found_out_in_a_last_round_with_the_default(pretended):
    lucky = dataclasses.replace(DEFAULT, overlap="intra")
    pretended.ms = {FAST: 0.8}
    chance = iter([0.1] * 7)  # two calls to warm up, five rounds
    clock = pretended.timing.clock

    def once_lucky(call, repeats):
        ms = clock(call, repeats)
        return next(chance, 1.2) if pretended.running == lucky else ms

    timing = dataclasses.replace(pretended.timing, clock=once_lucky)
    result = fa3.tune(*tensors(), timing=timing, passes=1)
    assert result.best == FAST
    (row,) = (row for row in result.rows if row.schedule == lucky)
    assert row.ms == 1.2 and len(row.samples) == 5


def test_the_default_stays_where_nothing_is_faster_by_more_than_the_noise(pretended):
    pretended.ms = {DEFAULT: 1.0, FAST: 0.997}
    result = fa3.tune(*tensors(), timing=pretended.timing, passes=1)
    assert result.best == DEFAULT and result.speed == 1.0


def test_a_default_that_spills_is_timed_all_the_same(pretended, monkeypatch):
    compiled = SimpleNamespace(resources=SimpleNamespace(spills=8))
    monkeypatch.setattr(tuning.cache, "get", lambda kernel: compiled)
    result = fa3.tune(*tensors(), timing=pretended.timing, schedules=[FAST, DEFAULT])
    assert result.best == DEFAULT
    assert [(row.change, row.why_not) for row in result.rows] == [
        ("default", ""),
        ("stages 3", "spills 8 B a thread"),
    ]


def test_schedules_of_ones_own_are_the_candidates(pretended):
    result = fa3.tune(*tensors(), timing=pretended.timing, schedules=[FAST, FASTER])
    assert {row.schedule for row in result.rows} == {DEFAULT, FAST, FASTER}
    assert result.best == FASTER


def one_number(place):
    def change(out, lse):
        out[place] += 0.5

    return change


def nothing_written(out, lse):
    out[1, 39, 3] = float("nan")


def lse_only(out, lse):
    lse[1, 2, 7] -= 0.1


@pytest.mark.parametrize(
    "spoil",
    [one_number((0, 0, 0, 0)), one_number((1, 17, 3, 63)), nothing_written, lse_only],
    ids=["the first", "in the middle", "nan", "lse"],
)
def test_a_wrong_result_is_an_error_and_nothing_is_kept(pretended, spoil):
    pretended.spoil = {FAST: spoil}
    q, k, v = tensors()
    with pytest.raises(WrongResult, match=r"stages 3.*expected"):
        fa3.tune(q, k, v, timing=pretended.timing)
    assert FAST not in pretended.timed and fa3.plan(q, k, v).tuned is None


def test_a_wrong_default_is_an_error_too(pretended):
    pretended.spoil = {DEFAULT: one_number((0, 0, 0, 0))}
    with pytest.raises(WrongResult, match="stages 2"):
        fa3.tune(*tensors(), timing=pretended.timing)


def test_another_rounding_is_no_error(pretended):
    def rounded(out, lse):
        out.copy_(out * (1 + 2**-9))

    pretended.spoil = {FAST: rounded}
    assert fa3.tune(*tensors(), timing=pretended.timing, passes=1).best == FAST


def test_rows_that_differ_most_are_found_wherever_they_are():
    one = torch.zeros(2, 30, 3, 8), torch.zeros(2, 3, 30)
    other = torch.zeros(2, 30, 3, 8), torch.zeros(2, 3, 30)
    assert tuning.differing(one, other) == []
    other[0][1, 7, 2, 3] = 1e-3
    other[0][0, 9, 0, 0] = float("nan")
    other[1][1, 2, 11] = 1.0
    found = {(b, h): rows.tolist() for b, h, rows in tuning.differing(one, other)}
    assert found == {(1, 2): [7, 11], (0, 0): [9]}
    one[0][0, 9, 0, 0] = float("nan")  # the same in both
    found = {(b, h): rows.tolist() for b, h, rows in tuning.differing(one, other)}
    assert found == {(1, 2): [7, 11]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_visible_pairs_of_a_variant_are_those_of_its_mask(name, monkeypatch):
    monkeypatch.setattr(tuning, "SCORES", 1 << 10)  # in more than one part
    case = dataclasses.replace(CASE, variant=name, seqlen_q=70, seqlen_k=90, batch=2)
    inputs = case.inputs("cpu")
    found = tuning.visible_pairs(inputs.named.variant, inputs.q, inputs.k)
    mask, at = inputs.named.mask, torch.arange(90)
    shown = torch.ones(70, 90, dtype=bool) if mask is None else mask(0, 0, at[:70, None], at)
    assert found == 2 * 2 * shown.sum()
    if not inputs.named.causal:
        assert found == 2 * 2 * visible_pairs(name, case.lengths())


def test_pairs_of_a_mask_that_differs_by_head_and_batch_are_counted_in_each():
    limits = torch.tensor([[1, 2], [3, 40]])
    variant = fa3.Variant(mask=lambda b, h, q, k: k < limits[b, h])
    q, k = torch.zeros(2, 5, 2, 64), torch.zeros(2, 30, 2, 64)
    assert tuning.visible_pairs(variant, q, k) == 5 * (1 + 2 + 3 + 30)


def test_what_cannot_be_tuned_is_refused_by_name(pretended, monkeypatch):
    q, k, v = tensors()
    refused = [
        (((q.float(), k, v), {}), Unsupported, "k is torch.bfloat16 but q is torch.float32"),
        (((q[:0], k[:0], v[:0]), {}), Unsupported, "no kernel runs"),
        (((q, k, v), {"passes": 0}), Unsupported, "passes = 0"),
        (((q, k, v), {"schedules": ["fast"]}), Unsupported, "schedule = str"),
        (
            ((q, k, v), {"schedules": [dataclasses.replace(DEFAULT, stages=9)]}),
            LayoutError,
            "bytes are needed",
        ),
    ]
    for (given, options), error, said in refused:
        with pytest.raises(error, match=said):
            fa3.tune(*given, timing=pretended.timing, **options)
    monkeypatch.setattr(tuned, "device_name", lambda device: None)
    with pytest.raises(Unsupported, match="q is on cpu"):
        fa3.tune(q, k, v)
    assert not pretended.timed


def test_tensors_that_need_gradients_are_tuned_without_them(pretended):
    q, k, v = tensors()
    q.requires_grad_()
    assert fa3.tune(q, k, v, timing=pretended.timing).best == FASTER


@pytest.mark.parametrize("head_dim_v", [64, 128])
def test_rows_of_a_case_are_sorted_by_time_and_survive_a_record(pretended, tmp_path, head_dim_v):
    case = dataclasses.replace(CASE, variant="full", head_dim_v=head_dim_v)
    chosen, said = [*tuning.candidates(case)[:3], SPILLING], []
    rows = tuning.measure(case, chosen, pretended.timing, said.append, device="cpu")
    assert {(row.head_dim, row.head_dim_v) for row in rows} == {(64, head_dim_v)}
    assert [row.ms for row in rows] == sorted(row.ms for row in rows)
    assert sum("TFLOP/s" in line for line in said) == len(rows)
    assert sum(row.follows(chosen[0]) for row in rows) == 1
    meta = dict.fromkeys(
        "device driver torch cutlass toolchain commit kernel_source_hash date".split(), "x"
    )
    path = Record(meta, tuple(rows)).write(tmp_path / "tune-x.json")
    assert Record.read(path).rows == tuple(rows)


def test_a_case_leaves_out_what_spills_and_says_so(pretended):
    said = []
    rows = tuning.measure(
        dataclasses.replace(CASE, variant="full"),
        [DEFAULT, SPILLING],
        pretended.timing,
        said.append,
        device="cpu",
    )
    assert len(rows) == 1 and said[0] == "left out: tile_n 176 spills 96 B a thread"


def test_a_record_of_a_schedule_with_fewer_fields_follows_where_the_others_have_defaults():
    for path in DATA.glob("tune-*.json"):
        for row in Record.read(path).rows:
            schedule = Schedule(**row.schedule)
            assert row.follows(schedule)
            fewer = {name: v for name, v in row.schedule.items() if name != "cluster"}
            assert dataclasses.replace(row, schedule=fewer).follows(schedule)
            assert not row.follows(dataclasses.replace(schedule, tile_n=256))


@pytest.mark.gpu
def test_on_a_gpu_the_tuned_schedule_is_used_and_forgotten(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(tuned, "_aside", 0)
    q, k, v = (torch.randn(1, 512, 2, 64, device="cuda").bfloat16() for _ in range(3))
    default = fa3.plan(q, k, v).schedule
    other = dataclasses.replace(default, stages=3)
    timing = Timing("short", 1.0, 1.0, 3)
    result = fa3.tune(q, k, v, schedules=[other], timing=timing)
    assert len(result.rows) == 2 and all(len(row.samples) == 3 for row in result.rows)
    assert fa3.plan(q, k, v).schedule == result.best
    again = fa3.attention(q, k, v)
    assert torch.equal(again, fa3.attention(q, k, v, schedule=result.best))
    assert tuned.forget() == 1 and fa3.plan(q, k, v).schedule == default
