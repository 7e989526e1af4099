"""From a kernel that stands still to an exception: the host side, with a GPU that is not there."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import calls, hang
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.pipelines.waits import (
    ENDED,
    HEADER,
    REPORTED,
    ReportPlan,
    decode,
    ticks,
    wait_code,
)
from cutedsl_fa3.pipelines.watch import watched as debug_build

SCHEDULE = Schedule(128, 128, stages=2, consumers=2, overlap="none")


class Launch:
    """A launch that happens in steps: at each look at its end, something may have changed."""

    def __init__(self, *steps) -> None:
        self.steps = list(steps)
        self.report = torch.zeros(64, dtype=torch.int32)
        self.started = SimpleNamespace(query=lambda: True)
        self.ended = SimpleNamespace(query=self.look)

    def look(self) -> bool:
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return step(self) if callable(step) else step

    def wait(self, seconds: float = 0.01) -> RuntimeError | None:
        flags = self.report[HEADER :: self.report.numel()]
        return hang.until_ended(self.started, self.ended, self.report, flags, seconds)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(hang, "PATIENCE", 0.02)


def watching(launch: Launch) -> bool:
    launch.report[0] = 1
    return False


def reporting(launch: Launch) -> bool:
    launch.report[HEADER] = REPORTED
    return False


def test_a_kernel_that_ends_is_no_error(impatient):
    assert Launch(False, False, True).wait() is None


def test_what_cuda_raises_ends_the_wait(impatient):
    error = RuntimeError("CUDA error: unspecified launch failure")
    assert Launch(False, watching, reporting, error).wait() is error


def test_a_kernel_that_nobody_watches_is_given_up(impatient):
    assert "has not ended in 0.0" in str(Launch(False).wait())
    assert isinstance(Launch(False).wait(), hang.NotStopped)


def test_a_kernel_that_is_watched_may_take_its_time(impatient):
    assert Launch(watching, *[False] * 100, True).wait() is None


def test_a_trap_that_stops_nothing_is_given_up(impatient):
    assert "has trapped and goes on" in str(Launch(watching, reporting, False).wait())


def words(build) -> list[int]:
    """The report of a GEMM whose consumers release nothing."""
    plan = ReportPlan.of(build)
    at = [wait_code(0, 1, 0), ENDED, ENDED, ENDED, *[wait_code(1, 0, 1)] * 8]
    slot = [REPORTED, 5, 0, 0, 0, 77, 9, 3]
    for each in at:
        slot += [each, 0]
    slot += [0] * plan.mbarriers
    made = [1, *[0] * (HEADER - 1), *slot]
    return made + [0] * (plan.total - len(made))


@pytest.fixture
def build():
    return debug_build(GemmSm90(SCHEDULE))


def test_a_hang_names_kernel_cta_cycle_and_what_is_lost(build):
    lost = RuntimeError("CUDA error: unspecified launch failure")
    error = hang.named(build, lost, decode(build, words(build)), 2.0)
    assert isinstance(error, fa3.Hang)
    lines = str(error).splitlines()
    assert lines[0] == "gemm_sm90_watched hangs: no warp of CTA (5, 0, 0) has gone on for 2 s"
    assert "the cycle: producer warp 0 -> consumer warps 4-11 -> producer warp 0" in lines
    assert lines[-1].startswith("The trap has cost this process its CUDA context")
    assert error.ctas[0].block == (5, 0, 0) and error.explanation in str(error)


def test_an_error_without_a_report_is_the_error(build):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert hang.named(build, error, [], 2.0) is error


def test_without_a_watcher_it_is_said_how_to_get_one(build):
    error = hang.named(build, hang.NotStopped("has not ended in 7.0 s"), [], 2.0)
    assert isinstance(error, fa3.Hang)
    assert "has not ended in 7.0 s: no warp is free to watch" in str(error)
    assert "end this process" in str(error)


def test_watch_launches_the_debug_build_with_the_arguments_and_a_report(monkeypatch):
    launched, compiled = [], []

    def launch(*arguments) -> None:
        launched.append(arguments)

    def get(kernel):
        compiled.append(kernel.key_text)
        return SimpleNamespace(launch=launch)

    event = SimpleNamespace(record=lambda: None, query=lambda: True)
    host = torch.zeros(20000, dtype=torch.int32)
    monkeypatch.setattr(hang.cache, "get", get)
    monkeypatch.setattr(hang, "pinned", lambda count: host[:count])
    monkeypatch.setattr(hang, "_current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
    hang.watch(GemmSm90(SCHEDULE), "a", ("b",), None, seconds=0.5)
    ((arguments, (address, claims, limit)),) = launched
    assert arguments == ("a", ("b",), None)
    assert address == host.data_ptr() and claims and limit == ticks(0.5) == 488281
    assert compiled[0].endswith("debug build: warps note their waits, one watches")


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan, "soon", None, True, 601])
def test_times_that_make_no_sense_are_refused(seconds):
    with pytest.raises(fa3.Unsupported, match=r"seconds = .*: seconds from 0\.001 to 600 are"):
        hang.checked_seconds("seconds", seconds)


def test_the_environment_asks_for_debug_builds(monkeypatch, gpu):
    asked = []
    monkeypatch.setattr(hang, "watch", lambda kernel, *a, seconds: asked.append((kernel, seconds)))
    monkeypatch.setenv(hang.ENVIRONMENT, "1.5")
    q, k, v = (torch.randn(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    fa3.attention(q, k, v)
    ((kernel, seconds),) = asked
    assert kernel.name == "forward_sm90" and seconds == 1.5
    assert not gpu.launches


def test_an_environment_that_makes_no_sense_is_refused(monkeypatch):
    monkeypatch.setenv(hang.ENVIRONMENT, "yes")
    with pytest.raises(fa3.Unsupported, match="CUTEDSL_FA3_WATCH = 'yes'"):
        hang.asked()
    monkeypatch.setenv(hang.ENVIRONMENT, "")
    assert hang.asked() is None


def test_watched_attention_launches_the_debug_build_of_its_plan(monkeypatch, gpu):
    asked = []

    def watch(kernel, *arguments, seconds):
        asked.append((kernel.key_text, len(arguments), arguments[-1], seconds))

    monkeypatch.setattr(hang, "watch", watch)
    q, k, v = (torch.randn(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    variant = fa3.Variant(mask=fa3.masks.causal)
    out, lse = fa3.watched(q, k, v, variant, schedule=SCHEDULE, scale=0.5, seconds=3)
    assert (out.shape, lse.shape) == (q.shape, (1, 2, 64))
    plan = calls.planned(variant, q.dtype, 64, 64, SCHEDULE)
    assert asked == [(plan.key_text, 11, 0.5, 3.0)]


def test_watched_attention_needs_a_kernel_to_run():
    q = torch.randn(1, 64, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(fa3.Unsupported, match="q is on cpu: a kernel is watched"):
        fa3.watched(q, q, q)
