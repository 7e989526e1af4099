"""A schedule that was tuned is used where it was measured for, and nowhere else."""

from __future__ import annotations

import json
import time
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import cache, calls, interface, tuned
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.schedules import Extents, schedule_for

BEST = Schedule(128, 64, 3, 2, "intra", head_group=4)
DEFAULT = None


def drawn(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


Q = drawn(2, 512, 4, 64)
CAUSAL = fa3.Variant(mask=fa3.masks.causal)


def new_process(monkeypatch) -> None:
    """What is known of the file in this process is forgotten."""
    monkeypatch.setattr(tuned, "_aside", 0)
    monkeypatch.setattr(tuned, "_kept", {})
    monkeypatch.setattr(tuned, "_warned", set())
    tuned._found.clear()
    interface._calls.clear()


@pytest.fixture
def kept(gpu, monkeypatch, tmp_path):
    """A pretended GPU with a folder of its own; keeps a choice for a call."""
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(tuned, "device_name", lambda device: "Pretended GPU")
    new_process(monkeypatch)

    def keep(q=Q, variant=CAUSAL, schedule=BEST, on_disk=True, k=None):
        k = q if k is None else k
        lengths = {"seqlen_q": q.shape[1], "seqlen_k": k.shape[1]}
        sizes = {"batch": q.shape[0], "heads": q.shape[2], **lengths}
        date = "2026-11-30T01:02:03+00:00"
        choice = tuned.Choice(schedule, date=date, **sizes, ms=0.5, default_ms=0.6)
        return tuned.keep(q, k, k, variant, choice, on_disk)

    return keep


def used(q=Q, variant=CAUSAL, k=None) -> Schedule | None:
    """The schedule of a call, None where it is the table's."""
    k = q if k is None else k
    plan = fa3.plan(q, k, k, variant)
    assert (plan.tuned is None) == (tuned.choice(q, k, k, variant) is None)
    if plan.tuned is None:
        extents = Extents(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        assert plan.schedule == schedule_for(variant, plan.problem, extents)
        return DEFAULT
    return plan.schedule


def test_a_call_without_a_schedule_launches_the_tuned_kernel_and_one_with_it_its_own(kept, gpu):
    fa3.attention(Q, Q, Q, CAUSAL)
    assert repr(BEST) not in gpu.kernels[-1]
    kept()
    fa3.attention(Q, Q, Q, CAUSAL)  # a kind that was known before
    assert repr(BEST) in gpu.kernels[-1]
    own = Schedule(128, 64, 2, 2, "none")
    fa3.attention(Q, Q, Q, CAUSAL, schedule=own)
    assert repr(own) in gpu.kernels[-1]
    fa3.visits(Q, Q, Q, CAUSAL)
    assert repr(BEST) in gpu.kernels[-1]


def test_the_plan_says_that_its_schedule_was_tuned_and_when(kept):
    assert "tuned" not in str(fa3.plan(Q, Q, Q, CAUSAL))
    kept()
    page = str(fa3.plan(Q, Q, Q, CAUSAL))
    said = "tuned 2026-11-30 01:02 UTC at batch 2, 4 heads, 512 x 512: 0.500 ms, 1.20 of the"
    assert said in page and "tile 128 x 64, 3 stages" in page
    given = fa3.plan(Q, Q, Q, CAUSAL, schedule=BEST)
    assert given.tuned is None and given.key_text == fa3.plan(Q, Q, Q, CAUSAL).key_text


@pytest.mark.parametrize(
    ("q", "k"),
    [
        (Q.half(), None),
        (drawn(2, 512, 4, 128), None),
        (Q, drawn(2, 512, 2, 64)),
        (drawn(2, 64, 4, 64), None),
        (Q, drawn(2, 4096, 4, 64)),
    ],
    ids=["dtype", "head_dim", "group", "short", "long keys"],
)
def test_another_problem_takes_its_row_of_the_table(kept, q, k):
    kept()
    assert used() == BEST
    assert used(q, k=k) is DEFAULT


def test_another_variant_takes_its_row_and_another_object_of_equal_text_does_not(kept):
    kept()
    assert used(variant=fa3.Variant()) is DEFAULT
    assert used(variant=fa3.Variant(fa3.scores.softcap(30.0), fa3.masks.causal)) is DEFAULT
    assert used(variant=fa3.Variant(mask=fa3.masks.causal)) == BEST


def test_another_batch_and_number_of_heads_take_the_tuned_schedule(kept):
    kept()
    assert used(drawn(1, 512, 16, 64)) == BEST


def test_another_device_takes_the_table(kept, monkeypatch):
    kept()
    monkeypatch.setattr(tuned, "device_name", lambda device: "Another GPU")
    assert used() is DEFAULT
    monkeypatch.setattr(tuned, "device_name", lambda device: None)  # the CPU
    assert used() is DEFAULT


def test_of_several_lengths_the_nearest_is_used(kept):
    short, long = Schedule(128, 64, 2, 2, "intra"), Schedule(128, 96, 2, 2, "intra")
    kept(drawn(2, 1024, 4, 64), schedule=short)
    kept(drawn(2, 8192, 4, 64), schedule=long)
    assert used(drawn(2, 2048, 4, 64)) == short
    assert used(drawn(2, 4096, 4, 64)) == long
    assert used(drawn(2, 32768, 4, 64)) == long
    assert used(drawn(2, 32769, 4, 64)) is DEFAULT


@given(st.tuples(*[st.integers(1, 1 << 20)] * 2), st.tuples(*[st.integers(1, 1 << 20)] * 2))
def test_lengths_are_near_up_to_a_factor_in_each(measured, given):
    choice = tuned.Choice(BEST, "", 1, 1, *measured, ms=1.0, default_ms=1.0)
    ratios = [max(a, b) / min(a, b) for a, b in zip(measured, given, strict=True)]
    assert choice.distance(*given) == pytest.approx(
        torch.tensor(ratios).log2().max().item(), abs=1e-4
    )


def test_a_later_process_reads_it_and_one_that_was_not_to_be_written_is_gone(kept, monkeypatch):
    path = kept()
    kept(drawn(2, 32, 4, 64), on_disk=False)
    assert used(drawn(2, 32, 4, 64)) == BEST
    assert path is not None and path.parent == cache.root()
    new_process(monkeypatch)
    assert used() == BEST
    assert used(drawn(2, 32, 4, 64)) is DEFAULT


def test_measuring_again_replaces_what_was_measured_at_the_same_lengths(kept, monkeypatch):
    kept(schedule=Schedule(128, 80, 2, 2, "intra"))
    kept(drawn(2, 8192, 4, 64))
    kept()
    assert used() == BEST and len(tuned.choices()) == 2
    new_process(monkeypatch)
    assert used() == BEST and len(tuned.choices()) == 2


def test_what_another_process_wrote_meanwhile_is_not_lost(kept, monkeypatch):
    path = kept()
    other = path.read_text()
    new_process(monkeypatch)
    path.unlink()
    kept(variant=fa3.Variant())  # this process has read no file
    path.write_text(other)
    kept(drawn(2, 32, 4, 64))
    new_process(monkeypatch)
    assert used() == BEST and used(drawn(2, 32, 4, 64)) == BEST


def test_forgetting_one_variant_keeps_the_others_and_forgetting_all_leaves_none(kept, monkeypatch):
    plain = fa3.Variant()
    path = kept()
    kept(variant=plain)
    assert tuned.forget(plain) == 1
    assert used(variant=plain) is DEFAULT and used() == BEST
    new_process(monkeypatch)
    assert used(variant=plain) is DEFAULT and used() == BEST
    assert tuned.forget() == 1
    assert used() is DEFAULT and not path.exists()


def test_what_is_set_aside_is_used_again_afterwards(kept, gpu):
    kept()
    fa3.attention(Q, Q, Q, CAUSAL)
    with tuned.set_aside():
        assert used() is DEFAULT
        fa3.attention(Q, Q, Q, CAUSAL)
        assert repr(BEST) not in gpu.kernels[-1]
    fa3.attention(Q, Q, Q, CAUSAL)
    assert used() == BEST and repr(BEST) in gpu.kernels[0]


def test_clearing_the_kernels_keeps_what_was_tuned(kept, monkeypatch):
    kept()
    cache.clear()
    new_process(monkeypatch)
    assert used() == BEST


def spoilt(path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def of_schedule(**fields):
    return lambda content: content["choices"][0]["choice"]["schedule"].update(fields)


SPOIL = {
    "no JSON": lambda path: path.write_text(path.read_text()[:-40]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "a list": lambda path: path.write_text("[]"),
    "no choices": lambda path: path.write_text('{"format": 1}'),
    "another format": lambda path: spoilt(path, lambda content: content.update(format=2)),
    "an entry that is none": lambda path: (
        spoilt(path, lambda c: c["choices"].append("x"))
        or spoilt(path, lambda c: c["choices"].pop(0))
    ),
    "a field unknown": lambda path: spoilt(path, of_schedule(depth=3)),
    "a tile refused": lambda path: spoilt(path, of_schedule(tile_n=63)),
    "a tile of text": lambda path: spoilt(path, of_schedule(tile_n="64")),
    "what does not fit": lambda path: spoilt(path, of_schedule(tile_n=256, stages=9)),
    "no time": lambda path: spoilt(path, lambda c: c["choices"][0]["choice"].update(ms=0)),
    "lengths of text": lambda path: spoilt(
        path, lambda c: c["choices"][0]["choice"].update(seqlen_q="512")
    ),
    "other sources": lambda path: spoilt(path, lambda c: c["choices"][0].update(made_by="then")),
}


@pytest.mark.parametrize("name", SPOIL)
def test_what_cannot_be_used_warns_once_and_fails_no_call(kept, gpu, monkeypatch, name):
    SPOIL[name](kept())
    new_process(monkeypatch)
    with pytest.warns(tuned.NotUsed, match="not used"):
        fa3.attention(Q, Q, Q, CAUSAL)
    assert repr(BEST) not in gpu.kernels[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert used(drawn(1, 512, 4, 64)) is DEFAULT
    kept()  # and it is put right by measuring again
    new_process(monkeypatch)
    assert used() == BEST


def test_one_spoilt_entry_does_not_spoil_the_others(kept, monkeypatch):
    kept(drawn(2, 8192, 4, 64))
    path = kept()
    spoilt(path, of_schedule(tile_n=63))
    new_process(monkeypatch)
    with pytest.warns(tuned.NotUsed, match="tile_n = 63"):
        assert used() == BEST


def test_where_the_folder_cannot_be_written_this_process_alone_keeps_it(
    kept, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "file"))
    new_process(monkeypatch)
    with pytest.warns(tuned.NotUsed, match="this process only"):
        assert kept() is None
    assert used() == BEST


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_no_content_of_the_file_fails_a_call(kept, monkeypatch, content):
    path = kept()
    path.write_bytes(content)
    new_process(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert used() is DEFAULT


def test_a_call_of_a_known_kind_asks_nobody(kept, monkeypatch):
    kept()
    fa3.attention(Q, Q, Q, CAUSAL)
    monkeypatch.setattr(tuned, "schedule", lambda *a: pytest.fail("asked"))
    monkeypatch.setattr(tuned, "choice", lambda *a: pytest.fail("asked"))
    for _ in range(3):
        fa3.attention(Q, Q, Q, CAUSAL)


def test_a_call_of_a_new_kind_finds_its_schedule_in_microseconds(kept):
    """Lengths that grow one by one make each call a new kind."""
    kept()
    tuned.choice(Q, Q, Q, CAUSAL)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        tuned.choice(Q, Q, Q, CAUSAL)
        times.append(time.perf_counter() - start)
    assert min(times) < 100e-6


def test_it_is_the_schedule_of_a_twin_on_no_cpu_tensor(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    assert calls.emulated(Q.device) and tuned.device_name(Q.device) is None
    assert tuned.choice(Q, Q, Q, CAUSAL) is None
    assert not list(tmp_path.iterdir())
