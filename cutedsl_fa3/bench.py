"""Attention timed beside its peers, in one process, after each has been proved right.

The loop of rounds, and the forward in it; the backward is bench_backward.py.

A burst is `idle_ms` of rest, a spin until calls are queued, and a window of them between two CUDA
events. The card is limited by power: a kernel that follows a thrifty one runs up to 10% faster, so
every round draws the order of the calls anew, and only ratios within one run mean something.
"Sustained" is the same with a window long enough to reach the card's power limit.
"""

from __future__ import annotations

import random
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Protocol, TypeVar

import torch

from .cases import Case
from .checks import check, samples
from .errors import Unsupported
from .peers import OURS, PROVIDERS, Call, Inputs, Provider
from .record import Row

Key = TypeVar("Key")
AnyCase = TypeVar("AnyCase", bound=Case)
Offer = TypeVar("Offer", bound="Offered")
Measure = Callable[..., list[Any]]


class Offered(Protocol):
    """What is timed: a name in records, and a call of it prepared for inputs."""

    @property
    def name(self) -> str: ...

    def prepare(self, inputs: Any, /) -> Call: ...


CLOCKS_PER_MS = 2_000_000  # of a GPU, at most
AHEAD_MS = 1.0, 25.0  # how long the GPU is kept waiting, at least and at most
_host_ms: weakref.WeakKeyDictionary[Call, float] = weakref.WeakKeyDictionary()  # of a call, lately


def window(call: Call, repeats: int) -> float:
    """Milliseconds per call of back-to-back calls; the GPU is idle before and after.

    The GPU spins until the host has queued all calls, if it takes as long as lately, up to 25 ms:
    what the host takes is not kernel time. Some peers' calls take longer than their kernels.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    least, most = AHEAD_MS
    ahead = min(most, max(least, 1.2 * repeats * _host_ms.get(call, 0.0)))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(ahead * CLOCKS_PER_MS))
    start.record()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    _host_ms[call] = (time.perf_counter() - began) * 1e3 / repeats
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


@dataclass(frozen=True)
class Timing:
    """How long to rest, how long to measure, how often, and the clock that measures."""

    name: str
    idle_ms: float
    window_ms: float
    rounds: int
    clock: Callable[[Call, int], float] = window


BURST = Timing("burst", idle_ms=30.0, window_ms=8.0, rounds=9)
SUSTAINED = Timing("sustained", idle_ms=0.0, window_ms=300.0, rounds=5)
SLOW_TO_PREPARE = 8.0  # seconds that deserve a line of their own


class NoDevice(RuntimeError):
    """There is no GPU here to time anything on."""


def require_gpu() -> None:
    """Check that the current device is one that the kernels run on.

    Raises: NoDevice.
    """
    if not torch.cuda.is_available():
        raise NoDevice("no CUDA device: this needs an SM90 GPU (plan, compile and audit do not)")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        found = f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}"
        raise NoDevice(f"this needs a GPU of compute capability 9.0; {found}")


def chosen_providers(names: Iterable[str]) -> list[Provider]:
    """The forward's providers of these names.

    Raises: ValueError for an unknown one.
    """
    return known_providers(names, PROVIDERS)


def known_providers(names: Iterable[str], known: Mapping[str, Offer]) -> list[Offer]:
    """Those of `known` with these names.

    Raises: ValueError for an unknown one.
    """
    names = list(names)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"providers {unknown} are unknown; known: {', '.join(known)}")
    return [known[name] for name in names]


def run(
    cases: Iterable[Case],
    providers: list[Provider],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
) -> Iterator[list[Row]]:
    """The rows of each case in turn, with a line for each, and what is absent once."""
    once = _once(report)
    for case in cases:
        start = time.perf_counter()
        measured = measure(case, providers, timing, once, seed)
        speeds = ", ".join(f"{row.provider} {row.tflops:.0f}" for row in measured)
        seconds = time.perf_counter() - start
        report(f"{case}: {speeds or 'nothing'} TFLOP/s ({seconds:.0f} s)")
        yield measured


def run_together(
    grouped: Iterable[list[AnyCase]],
    providers: Sequence[Offered],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
    measure: Measure | None = None,
) -> Iterator[list[Any]]:
    """The rows of each group of cases in turn, with a line for each case.

    `measure` has the parameters of `measure_together`, which it is by default.
    """
    once = _once(report)
    for cases in grouped:
        start = time.perf_counter()
        measured = (measure or measure_together)(cases, providers, timing, once, seed)
        for case in cases:
            rows = (row for row in measured if case.is_of(row))
            times = ", ".join(f"{row.provider} {row.ms:.3f}" for row in rows)
            report(f"{case}: {times or 'nothing'} ms")
        report(f"{len(cases)} cases together: {time.perf_counter() - start:.0f} s")
        yield measured


def _once(report: Callable[[str], None]) -> Callable[[str], None]:
    """`report`, which hears no line twice."""
    said: set[str] = set()

    def once(line: str) -> None:
        if line not in said:
            said.add(line)
            report(line)

    return once


def measure(
    case: Case,
    providers: list[Provider],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
    device: str = "cuda",
) -> list[Row]:
    """Check, then time, every provider that offers this case; `report` hears why one does not.

    Raises: whatever this project's own kernel raises, WrongResult included.
    """
    return measure_together([case], providers, timing, report, seed, device)


def measure_together(
    cases: list[Case],
    providers: list[Provider],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
    device: str = "cuda",
) -> list[Row]:
    """As `measure` for several cases, all calls taking turns: their ratios mean something too.

    Cases of the same sizes share their tensors.

    Raises: as `measure`.
    """
    inputs = shared_inputs(cases, device, seed)
    sampled = {case: samples(inputs[case], seed) for case in cases}

    def checked(case: Case, call: Call) -> float:
        return check(inputs[case], call, sampled[case])

    def refused(provider: str, case: Case, error: Exception) -> None:
        if provider == OURS:
            raise error
        report(f"{provider}: {why_not(error, case)}")

    calls, errors = prepared(inputs, providers, checked, refused, report)
    times = take_turns(calls, timing, seed)
    keys = [(case, provider.name) for case in cases for provider in providers]
    return [_row(*key, times[key], errors[key]) for key in keys if key in times]


def prepared(
    inputs: Mapping[AnyCase, Inputs],
    providers: Sequence[Offered],
    checked: Callable[[AnyCase, Call], Any],
    refused: Callable[[str, AnyCase, Exception], None],
    report: Callable[[str], None],
) -> tuple[dict[tuple[AnyCase, str], Call], dict[tuple[AnyCase, str], Any]]:
    """By case and provider's name: the call, and what `checked` found in it.

    `refused` hears the name, the case and the error where there is none, and may raise it.
    """
    calls: dict[tuple[AnyCase, str], Call] = {}
    found: dict[tuple[AnyCase, str], Any] = {}
    for provider, case in product(providers, inputs):
        start, key = time.perf_counter(), (case, provider.name)
        try:
            call = provider.prepare(inputs[case])
            found[key] = checked(case, call)
            calls[key] = call
        except Exception as error:
            refused(provider.name, case, error)
            continue
        seconds = time.perf_counter() - start
        if seconds > SLOW_TO_PREPARE:
            report(f"{provider.name}: {seconds:.0f} s to compile and check {case}")
    return calls, found


def shared_inputs(cases: Iterable[AnyCase], device: str, seed: int) -> dict[AnyCase, Any]:
    """The inputs of each case; those of the same sizes are the same tensors."""
    made: dict[AnyCase, Any] = {}
    of_sizes: dict[Case, Any] = {}
    for case in cases:
        if case.sizes not in of_sizes:
            of_sizes[case.sizes] = case.sizes.inputs(device, seed)
        made[case] = case.with_tensors(of_sizes[case.sizes])
    return made


def why_not(error: Exception, case: Case) -> str:
    """Why a peer has no time; without the lengths, so that it is said once for all of them."""
    if isinstance(error, ImportError):
        return f"not installed ({error})"
    reason = (str(error).splitlines() or [""])[0]
    if isinstance(error, Unsupported):
        return reason
    return f"no time for {case.kind}: {type(error).__name__}: {reason}"


def _row(case: Case, provider: str, times: list[float], error: float) -> Row:
    return Row(
        provider=provider,
        direction="forward",
        **asdict(case),
        **timed(case, times),
        max_error=float(f"{error:.4g}"),
    )


def timed(case: Case, times: list[float]) -> dict[str, Any]:
    """What a row says of its samples (milliseconds)."""
    ms = statistics.median(times)
    return {
        "ms": round(ms, 6),
        "tflops": round(case.flops / ms / 1e9, 2),
        "samples": tuple(round(sample, 6) for sample in times),
    }


def take_turns(
    calls: dict[Key, Call],
    timing: Timing,
    seed: int = 0,
    after: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Milliseconds per call, by name and round; each round in an order of its own.

    `after` is called after each round.
    """
    shuffler, repeats = random.Random(seed), {}
    for name, call in calls.items():
        timing.clock(call, 2)
        repeats[name] = max(1, round(timing.window_ms / timing.clock(call, 3)))
    times: dict[Key, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(timing.rounds):
        shuffler.shuffle(order)
        for name in order:
            time.sleep(timing.idle_ms / 1e3)
            times[name].append(timing.clock(calls[name], repeats[name]))
        after()
    return times
