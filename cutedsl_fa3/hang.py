"""A kernel that hangs becomes an exception that says who waits for whom.

    hang.watch(kernel, *arguments)             any WarpSpecialized kernel
    fa3.watched(q, k, v, variant)              attention
    CUTEDSL_FA3_WATCH=2 python program.py      every call of attention and gemm in a program

Each runs the kernel's debug build (pipelines/watch.py) and waits until it has ended. Where no warp
of a CTA goes on for some seconds, a warp of it reports their waits to memory of the host and traps;
CUDA then refuses all further work of this process, but the report can be read.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from . import cache
from .errors import Unsupported
from .pipelines import WarpSpecialized
from .pipelines.deadlock import explain
from .pipelines.waits import HEADER, REPORTED, Stuck, decode, ticks
from .pipelines.watch import GRACE, Watched
from .pipelines.watch import watched as debug_build

ENVIRONMENT = "CUTEDSL_FA3_WATCH"
SECONDS = 2.0
SHORTEST, LONGEST = 0.001, 600.0
POLL = 0.001  # seconds between two looks at the GPU
PATIENCE = 5.0  # seconds beyond its own until a kernel is given up that nothing stops

LOST = (
    "The trap has cost this process its CUDA context: every further CUDA call fails, so start a "
    "new process"
)
RUNS_ON = "The kernel still occupies the GPU: end this process"


class Hang(RuntimeError):
    """A kernel stands still: no warp of a CTA went on for the time that it was given.

    `explanation`: who waits for whom, in the words of the kernel's tables. `ctas`: all reports.
    """

    def __init__(self, text: str, explanation: str = "", ctas: tuple[Stuck, ...] = ()) -> None:
        super().__init__(text)
        self.explanation = explanation
        self.ctas = ctas


class NotStopped(RuntimeError):
    """A kernel runs on, because nobody watches it or because its trap has not ended it."""


def watch(kernel: WarpSpecialized, *arguments: Any, seconds: float = SECONDS) -> None:
    """Run a kernel's debug build with what its `host` takes but the stream, until it has ended.

    Units: `seconds` without progress of any warp of a CTA are a hang.
    Raises: Hang, after which this process can use no GPU any more; ScheduleError for what is no
        WarpSpecialized kernel; Unsupported for times out of range; what CUDA raises otherwise.
    """
    limit = checked_seconds("seconds", seconds)
    build = debug_build(kernel)
    compiled = cache.get(build)
    device = next(_devices(arguments), torch.device("cuda", torch.cuda.current_device()))
    with _current(device):
        report = pinned(build.report_plan.total)
        claims = torch.zeros(1, dtype=torch.int32, device=device)
        started, ended = torch.cuda.Event(), torch.cuda.Event()
        started.record()
        compiled.launch(arguments, (report.data_ptr(), claims.data_ptr(), ticks(limit)))
        ended.record()
        error = until_ended(started, ended, report, report[HEADER :: build.report_plan.slot], limit)
        if error is not None:
            told = named(build, error, decode(build, report.tolist()), limit)
            raise told from (None if told is error else error)


def named(build: Watched, error: RuntimeError, ctas: list[Stuck], seconds: float) -> RuntimeError:
    """The exception for what ended a watched kernel: the error itself where nothing hung."""
    end = RUNS_ON if isinstance(error, NotStopped) else LOST
    if ctas:
        why = explain(build, ctas)
        text = (
            f"{build.name} hangs: no warp of {ctas[0]} has gone on for {seconds:g} s\n{why}\n{end}"
        )
        return Hang(text, why, tuple(ctas))
    if isinstance(error, NotStopped):
        return Hang(
            f"{build.name} {error}: no warp is free to watch the others, for none has ended; give "
            f"a role a warp without work to see who waits. {end}"
        )
    return error


def until_ended(
    started: torch.cuda.Event,
    ended: torch.cuda.Event,
    report: torch.Tensor,
    flags: torch.Tensor,
    seconds: float,
) -> RuntimeError | None:
    """Wait for a kernel; the error that ended it, or NotStopped where nothing does.

    `flags` are those of the slots of `report`.
    """
    since = None  # when the kernel may have begun; then, when it has reported
    reported = False
    try:
        while not ended.query():
            time.sleep(POLL)
            now = time.monotonic()
            if since is None:
                since = now if started.query() else None
            elif reported:
                if now - since > seconds / GRACE + PATIENCE:
                    return NotStopped("has trapped and goes on")
            elif bool((flags == REPORTED).any()):
                reported, since = True, now
            elif not report[0] and now - since > seconds + PATIENCE:
                return NotStopped(f"has not ended in {now - since:.1f} s")
    except RuntimeError as error:
        return error
    return None


def asked() -> float | None:
    """After how many seconds the environment wants calls to be hangs; None if it does not.

    Raises: Unsupported.
    """
    given = os.environ.get(ENVIRONMENT)
    return checked_seconds(ENVIRONMENT, given) if given else None


def checked_seconds(name: str, seconds: object) -> float:
    """A time after which a kernel counts as hanging.

    Raises: Unsupported.
    """
    given = math.nan
    if isinstance(seconds, (int, float, str)) and not isinstance(seconds, bool):
        with contextlib.suppress(ValueError):
            given = float(seconds)
    if not SHORTEST <= given <= LONGEST:
        raise Unsupported(
            f"{name} = {seconds!r}: seconds from {SHORTEST} to {LONGEST:g} are needed"
        )
    return given


def pinned(words: int) -> torch.Tensor:
    """Memory of the host, all zero, that a kernel can write at the same address."""
    return torch.zeros(words, dtype=torch.int32, pin_memory=True)


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Make a device the current one, if it is not: leaving must not touch a lost context."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _devices(arguments: tuple) -> Iterator[torch.device]:
    for each in arguments:
        if isinstance(each, torch.Tensor) and each.device.type == "cuda":
            yield each.device
        elif isinstance(each, tuple):
            yield from _devices(each)
