"""Host time of a call: cached, and the first one of a process, compiled or taken from the disk.

The GPU must not be what is waited for: problems are small, and the calls of a sample fewer than a
stream queues. A first call is timed in processes of their own, after imports and with the GPU in
use already, in its three parts: the kernel is found (compiled, or read from the disk), loaded, and
launched.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from . import cache, masks
from .calls import prepare
from .counters import counter
from .interface import attention, plan
from .record import ROOT, CallRow
from .seen import Seen
from .variant import Variant

CALLS = 100  # of a sample, in a row; a stream queues 1,024
SAMPLES = 200
PROCESSES = 3
CAPTURES = (0, 1, 3)
PARTS = ("find", "load", "launch")
SHAPE = (1, 64, 2, 64)


def inputs(captures: int, device: str) -> tuple[list[torch.Tensor], Variant]:
    """q, k and v, and a causal variant with this many captured tensors."""
    given = [torch.zeros(SHAPE, device=device, dtype=torch.bfloat16) for _ in range(3)]
    biases = [torch.zeros(SHAPE[2], device=device) for _ in range(captures)]

    def score(s, b, h, q, k):
        for bias in biases:
            s = s + bias[h]
        return s

    return given, Variant(score if captures else None, masks.causal)


def measure(report: Callable[[str], None], processes: int = PROCESSES) -> Iterator[CallRow]:
    """Every step in turn, with a line for each, on the current CUDA device."""
    for captures in CAPTURES:
        yield _said(cached_call(captures), report)
        yield _said(launch_alone(captures), report)
    with tempfile.TemporaryDirectory(prefix="cutedsl_fa3_") as folder:
        compiled, found = [], []
        for number in range(processes):  # each compiles into a folder of its own
            place = os.path.join(folder, str(number))
            compiled.append(first_call_elsewhere(place))
            found.append(first_call_elsewhere(place))
        for step, calls in (("compiled", compiled), ("from disk", found)):
            yield _said(_row(f"first call, {step}", [sum(call) * 1e6 for call in calls]), report)
            for part, times in zip(PARTS, zip(*calls, strict=True), strict=True):
                yield _said(_row(f"{part}, {step}", [t * 1e6 for t in times]), report)


def cached_call(captures: int) -> CallRow:
    """Microseconds until a call of a kind that was seen before returns, its launch queued."""
    (q, k, v), variant = inputs(captures, "cuda")
    return _row("cached call", _queued(lambda: attention(q, k, v, variant)), captures)


def launch_alone(captures: int) -> CallRow:
    """Microseconds of the launch of such a call: tensor maps made, the kernel queued."""
    given, variant = inputs(captures, "cuda")
    call = prepare(*given, variant, None)
    out, lse = torch.empty_like(call.out), torch.empty_like(call.lse)
    drawn = None if call.ctas is None else counter(call.index)
    captured = Seen(call, tuple(given), variant.captures, None).numbers
    arguments = (*given, out, lse, captured, None, None, drawn, call.ctas)
    arguments += (call.scale,)
    return _row("launch alone", _queued(lambda: call.launch(*arguments)), captures)


def _queued(call: Callable[[], object]) -> list[float]:
    """Microseconds until a call returns, by sample."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return times


def first_call_elsewhere(folder: str, device: str = "cuda") -> tuple[float, ...]:
    """Seconds of each part of a process' first call, with its cache in `folder`."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import first_call; first_call({device!r})"],
        env={**os.environ, "PYTHONPATH": path, cache.ENVIRONMENT: folder},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise RuntimeError(f"a first call failed: {result.stderr.strip()}")
    return tuple(json.loads(result.stdout.splitlines()[-1]))


def first_call(device: str) -> None:
    """Print the seconds of each part of this process' first call as JSON.

    On the CPU the kernel is found and loaded, and a launch takes no time.
    """
    given, variant = inputs(1, device)
    kernel = plan(*given, variant).kernel
    if device == "cuda":
        torch.cuda.synchronize()
    times = [time.perf_counter()]
    compiled = cache.get(kernel)
    times.append(time.perf_counter())
    _ = compiled.launch if device == "cuda" else compiled.function
    times.append(time.perf_counter())
    if device == "cuda":
        attention(*given, variant)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
    else:
        times.append(times[-1])
    print(json.dumps([end - start for start, end in pairwise(times)]))


def _row(step: str, microseconds: list[float], captures: int = 1) -> CallRow:
    samples = tuple(round(us, 3) for us in microseconds)
    return CallRow(step, captures, round(statistics.median(samples), 3), samples)


def _said(row: CallRow, report: Callable[[str], None]) -> CallRow:
    amount = f"{row.us:.1f} us" if row.us < 1000 else f"{row.us / 1000:.1f} ms"
    report(f"{row.step}, {row.captures} captured tensors: {amount}")
    return row
