"""How providers are timed and left out; the clocks are replaced, so no GPU is needed."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from cutedsl_fa3 import reference
from cutedsl_fa3.bench import (
    Timing,
    chosen_providers,
    measure,
    measure_together,
    run,
    run_together,
    window,
)
from cutedsl_fa3.cases import Case
from cutedsl_fa3.checks import WrongResult
from cutedsl_fa3.errors import Unsupported
from cutedsl_fa3.peers import OURS, PROVIDERS, Inputs, Provider
from cutedsl_fa3.record import Row

SMALL = Case("causal", "bf16", 64, 64, 48, 80, 2, 4, 2)


def reference_call(inputs: Inputs):
    q, k, v = inputs.q, inputs.k, inputs.v
    return lambda: reference.attention(q, k, v, inputs.named.variant).to(q.dtype)


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


def test_why_a_peer_has_no_time_is_said_once_for_all_lengths() -> None:
    def narrow(inputs: Inputs):
        raise AssertionError("head_dim is too large\nand more")

    def declining(inputs: Inputs):
        raise Unsupported(f"not offered: {inputs.named.name}")

    said: list[str] = []
    providers = [Provider("narrow", "none", narrow), Provider("declining", "none", declining)]
    cases = [
        replace(SMALL, variant=variant, seqlen_q=seqlen)
        for variant in ("causal", "full")
        for seqlen in (16, 32, 48)
    ]
    timing = Timing("test", 0, 8, 7, Clock())
    everything = partial(measure, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutedsl_fa3.bench.measure", everything)
        assert list(run(cases, providers, timing, said.append)) == [[]] * 6
    told = [line for line in said if "TFLOP/s" not in line]
    assert told == [
        "narrow: no time for causal bf16 d64: AssertionError: head_dim is too large",
        "declining: not offered: causal",
        "narrow: no time for full bf16 d64: AssertionError: head_dim is too large",
        "declining: not offered: full",
    ]


def test_cases_measured_together_take_turns_in_one_order_drawn_anew() -> None:
    clock = Clock()
    cases = [replace(SMALL, variant=name) for name in ("full", "causal", "alibi", "sigmoid")]
    providers = [Provider("a", "torch", reference_call), Provider("b", "torch", reference_call)]
    timing = Timing("test", 0, 8, 9, clock)
    rows = measure_together(cases, providers, timing, print, device="cpu")
    assert [(row.variant, row.provider) for row in rows] == [
        (case.variant, provider) for case in cases for provider in ("a", "b")
    ]
    assert [len(row.samples) for row in rows] == [9] * 8
    timed = clock.order[2 * 8 :]
    rounds = [tuple(timed[i : i + 8]) for i in range(0, len(timed), 8)]
    assert len(rounds) == 9 and all(len(set(one)) == 8 for one in rounds)
    assert len(set(rounds)) == 9


def test_cases_measured_together_share_their_tensors() -> None:
    seen: list[Inputs] = []

    def watched(inputs: Inputs):
        seen.append(inputs)
        return reference_call(inputs)

    cases = [replace(SMALL, variant=name) for name in ("causal", "sink")]
    cases.append(replace(SMALL, head_dim_v=32))
    timing = Timing("test", 0, 8, 3, Clock())
    measure_together(cases, [Provider("a", "torch", watched)], timing, print, device="cpu")
    causal, sink, narrow = seen
    assert causal.q is sink.q and causal.v is sink.v and causal.q is not narrow.q
    assert [one.named.name for one in seen] == ["causal", "sink", "causal"]
    assert torch.equal(causal.q, cases[0].inputs("cpu").q)


def test_a_group_is_prepared_ours_first_so_that_a_failure_costs_little() -> None:
    prepared: list[tuple[str, str]] = []

    def noting(name: str):
        def prepare(inputs: Inputs):
            prepared.append((name, inputs.named.name))
            return reference_call(inputs)

        return Provider(name, "torch", prepare)

    cases = [replace(SMALL, variant=name) for name in ("causal", "full")]
    timing = Timing("test", 0, 8, 3, Clock())
    measure_together(cases, [noting(OURS), noting("peer")], timing, print, device="cpu")
    assert [name for name, _ in prepared] == [OURS, OURS, "peer", "peer"]


def test_a_group_says_a_line_for_each_case(monkeypatch) -> None:
    cases = [replace(SMALL, variant=name) for name in ("causal", "sink")]
    rows = [row("fa3", 7.0), row("fa4", 7.0, ms=0.25)]
    monkeypatch.setattr("cutedsl_fa3.bench.measure_together", lambda *rest: rows)
    said: list[str] = []
    timing = Timing("test", 0, 8, 3, Clock())
    assert list(run_together([cases], [], timing, said.append)) == [rows]
    assert said[0] == f"{cases[0]}: fa3 1.000, fa4 0.250 ms"
    assert said[1] == f"{cases[1]}: nothing ms"
    assert said[2].startswith("2 cases together: ")


def test_a_run_yields_each_case_when_it_is_measured_and_says_one_line_for_it(monkeypatch) -> None:
    monkeypatch.setattr("cutedsl_fa3.bench.measure", lambda case, *rest: [case])
    said: list[str] = []
    measured = run(["one", "two"], [], Timing("test", 0, 8, 7, Clock()), said.append)
    monkeypatch.setattr("cutedsl_fa3.bench.measure", lambda case, *rest: [row("fa3", 7.0)])
    assert next(measured) == [row("fa3", 7.0)]
    assert len(said) == 1 and said[0].startswith("one: fa3 7 TFLOP/s (")
    assert next(measured) and len(said) == 2


@pytest.mark.slow
def test_flex_compiles_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiles))
    providers = [PROVIDERS["flex"]]
    clock = Timing("test", 0, 8, 7, lambda call, repeats: [call() for _ in range(2)] and 1.0)
    for seqlen in (16, 128):
        for variant in ("full", "causal"):
            case = Case(variant, "bf16", 64, 64, seqlen, seqlen, 1, 2, 2)
            before = compiles.frame_count
            (timed,) = measure(case, providers, clock, pytest.fail, device="cpu")
            assert timed.provider == "flex"
            assert compiles.frame_count == before + 1


@pytest.mark.slow
def test_flex_compiles_each_variant_once_where_they_take_turns(monkeypatch) -> None:
    compiles = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiles))
    names = ("window:16,0", "window:32,0", "bias", "documents:40")
    cases = [Case(name, "bf16", 64, 64, 128, 128, 1, 2, 2) for name in names]
    clock = Timing("test", 0, 8, 1, lambda call, repeats: call() is not None and 1.0)
    with torch._dynamo.config.patch(recompile_limit=2):
        rows = measure_together(cases, [PROVIDERS["flex"]], clock, pytest.fail, device="cpu")
    assert [row.variant for row in rows] == list(names)
    assert compiles.frame_count == len(names)


def test_our_own_wrong_result_is_an_error() -> None:
    ours = Provider(OURS, "none", lambda inputs: lambda: torch.zeros_like(inputs.q))
    with pytest.raises(WrongResult):
        measure(SMALL, [ours], Timing("test", 0, 8, 7, Clock()), print, device="cpu")


@pytest.mark.parametrize("name", ["flex", "flex_fa4", "cudnn", "fa2"])
@pytest.mark.parametrize("variant", ["sigmoid", "sink"])
def test_torchs_kernels_decline_another_softmax(name: str, variant: str) -> None:
    inputs = Case(variant, "bf16", 64, 64, 32, 32, 1, 2, 2).inputs("cpu")
    with pytest.raises(Unsupported, match=variant):
        PROVIDERS[name].prepare(inputs)


def test_providers_decline_what_their_options_cannot_say() -> None:
    alibi = Case("alibi", "bf16", 64, 64, 32, 32, 1, 2, 2).inputs("cpu")
    rectangular = Case("causal", "bf16", 64, 64, 16, 32, 1, 2, 2).inputs("cpu")
    for name in ("cudnn", "fa2"):
        with pytest.raises(Unsupported):
            PROVIDERS[name].prepare(alibi)
        with pytest.raises(Unsupported, match="top-left"):
            PROVIDERS[name].prepare(rectangular)


def test_an_unknown_provider_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="fa9"):
        chosen_providers(["fa3", "fa9"])


def row(provider: str, tflops: float, **changes) -> Row:
    sizes = vars(SMALL) | {"ms": 1.0, "tflops": tflops, "max_error": 0.002, "samples": (1.0, 1.1)}
    return Row(**{"provider": provider, "direction": "forward", **sizes, **changes})


@pytest.mark.gpu
def test_what_the_host_takes_before_its_first_launch_is_not_counted():
    numbers, waits = torch.zeros(1024, device="cuda"), [0.0006]

    def call():
        if waits:  # as a backward's first call after a rest
            time.sleep(waits.pop())
        numbers.add_(1.0)

    numbers.add_(1.0)
    assert window(call, 1) < 0.3


@pytest.mark.gpu
def test_a_host_that_is_slower_than_the_gpu_is_not_counted():
    numbers = torch.zeros(1024, device="cuda")

    def call():
        time.sleep(0.0002)
        numbers.add_(1.0)

    window(call, 4)  # which learns how long the host takes
    assert window(call, 40) < 0.1
