"""`measure`: a call's kernel, in the debug build that notes the clock, and what one CTA noted.

Why not IKET, the compiler's own in-kernel tracing: its ranges are the right idea, but a program has
to run under its launcher, which takes the place of other profilers, the kernel must be compiled in
that run, which passes our cache by, and its timer steps by 32 ns, 60 clocks. A notebook wants one
call, and most waits are shorter than that. The debug build (pipelines/stamp.py) is a call like
another, leaves the shipped kernel as it is, and counts clocks.

What it costs: some nine instructions a stamp, of which a warpgroup notes about ten a key tile, so a
stamped kernel is slower; `slowdown` says by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from cutedsl_fa3 import cache, calls
from cutedsl_fa3.arguments import is_int
from cutedsl_fa3.calls import Launcher, OnDevice, Result, plan_for
from cutedsl_fa3.errors import Unsupported
from cutedsl_fa3.inputs import (
    NAMES,
    check_device,
    check_schedule,
    check_tensors,
    checked_scale,
    without_scores,
)
from cutedsl_fa3.ledger.rates import SMS
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.pipelines.stamp import stamped
from cutedsl_fa3.pipelines.stamps import ROOM
from cutedsl_fa3.record import TimelineRow
from cutedsl_fa3.variant import Variant

from .decode import decode
from .predicted import title
from .table import Interval, Timeline

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan

# The schedules of notebook 6, and what they are measured on: (batch, seqlen, heads, head_dim).
SERIES = (4, 768, 16, 64)
DEPTHS, OVERLAPS = (1, 2, 3, 4), ("none", "pingpong", "intra")
WARM = 3  # launches before the one that counts: code and tensors in their caches
TURNS = 5  # launches of either build that are timed


def measure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    schedule: Schedule | None = None,
    cta: int = 0,
    room: int = ROOM,
) -> Timeline:
    """What one CTA of `attention(q, k, v, variant)` does when, noted by a debug build.

    `room`: stamps kept of a lane; later ones are counted as dropped.

    Units: clocks of the CTA's multiprocessor.
    Raises: Unsupported without a GPU, and for a CTA that the launch has not; ScheduleError for
        `room`; what `attention` raises before a launch.
    """
    return noted(q, k, v, variant, schedule=schedule, cta=cta, room=room)[1]


def noted(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    schedule: Schedule | None = None,
    cta: int = 0,
    room: int = ROOM,
) -> tuple[Result, Timeline]:
    """As `measure`; also what the debug build computes: (out, lse)."""
    variant = Variant() if variant is None else variant
    plan = checked(q, k, v, variant, schedule, cta)
    build = stamped(plan.kernel, room)
    build.check()
    launch = cache.get(build).launch
    words = torch.zeros(build.stamp_plan.words, dtype=torch.int32, device=q.device)

    def stamping(*arguments: Any) -> None:
        launch(arguments, (words.data_ptr(), cta))

    call = _call(q, k, v, variant, plan, stamping)
    for _ in range(WARM):
        call()
    words.zero_()
    result = call()
    early = plan.schedule.intra and not plan.schedule.early
    return result, decode(build.stamp_plan, words.tolist(), title(plan), cta, early)


def checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    schedule: Schedule | None,
    cta: int,
) -> Plan:
    """The plan of a call that can be measured.

    Raises: Unsupported, LayoutError, ScheduleError.
    """
    check_tensors(q, k, v, variant)
    check_device(q, k, v, variant)
    check_schedule(schedule, q, k)
    if calls.emulated(q.device):
        raise Unsupported(f"q is on {q.device}: clocks are measured, so a CUDA device is needed")
    if without_scores(q, k):
        raise Unsupported(f"q {tuple(q.shape)}, k {tuple(k.shape)}: no kernel runs for these")
    plan = plan_for(q, k, v, variant, schedule)
    plan.check()
    last = ctas(plan, q.shape[0], q.shape[1], q.shape[2], calls._multiprocessors(q.device)) - 1
    if not is_int(cta) or not 0 <= cta <= last:
        raise Unsupported(f"cta = {cta!r}: the launch has CTAs 0 to {last}")
    return plan


def ctas(plan: Plan, batch: int, seqlen_q: int, heads: int, multiprocessors: int = SMS) -> int:
    """CTAs of a launch."""
    s = plan.schedule
    tiles = plan.kernel.order.tiles(-(-seqlen_q // s.queries), batch * heads // s.pack)
    return min(tiles, multiprocessors * s.residents) if s.persistent else tiles


def slowdown(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    schedule: Schedule | None = None,
) -> float:
    """Time of the debug build over that of the shipped kernel, medians of launches in turns."""
    variant = Variant() if variant is None else variant
    plan = checked(q, k, v, variant, schedule, 0)
    build = stamped(plan.kernel)
    words = torch.zeros(build.stamp_plan.words, dtype=torch.int32, device=q.device)
    launch, shipped = cache.get(build).launch, cache.get(plan.kernel).launch

    def stamping(*arguments: Any) -> None:
        launch(arguments, (words.data_ptr(), 0))

    both = [_call(q, k, v, variant, plan, each) for each in (stamping, shipped)]
    times: list[list[float]] = [[], []]
    for turn in range(WARM + TURNS):
        for number, call in enumerate(both):
            took = _milliseconds(call)
            if turn >= WARM:
                times[number].append(took)
    return median(times[0]) / median(times[1])


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    plan: Plan,
    launch: Callable[..., None],
) -> Callable[[], Result]:
    """A call of a plan's kernel by this launch."""
    call = OnDevice(q, k, v, variant, Launcher(launch, plan.problem, plan.schedule))
    return partial(_without_gradients, call, q, k, v, variant, checked_scale(None, q.shape[3]))


def _without_gradients(call: OnDevice, *arguments: Any) -> Result:
    with torch.no_grad():
        return call(*arguments)


def _milliseconds(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def row(
    timeline: Timeline,
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    schedule: Schedule,
    slower: float,
) -> TimelineRow:
    """A measured timeline as a row of a record; `name` of the variant, `slower` its slowdown."""
    return TimelineRow(
        variant=name,
        dtype=NAMES[q.dtype],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        batch=q.shape[0],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        schedule=asdict(schedule),
        title=timeline.title,
        cta=timeline.cta,
        dropped=timeline.dropped,
        ghz=timeline.ghz,
        slowdown=slower,
        intervals=tuple(timeline.rows()),
    )


def of_row(row: TimelineRow) -> Timeline:
    """The timeline that a record keeps."""
    rows = tuple(Interval(*each) for each in row.intervals)
    return Timeline("measured", row.title, rows, row.cta, row.dropped, row.ghz)


def series_schedules() -> list[Schedule]:
    """Depths with both overlaps, and the other overlaps at a depth of two."""
    kinds = [(stages, "both") for stages in DEPTHS] + [(2, overlap) for overlap in OVERLAPS]
    return [
        Schedule(192, 128, stages=stages, consumers=3, overlap=overlap) for stages, overlap in kinds
    ]


def series(report: Callable[[str], None]) -> Iterator[TimelineRow]:
    """The timelines of notebook 6 on the GPU at hand, a row each."""
    make = partial(torch.randn, *SERIES, device="cuda", dtype=torch.bfloat16)
    q, k, v = make(), make(), make()
    for schedule in series_schedules():
        timeline = measure(q, k, v, schedule=schedule)
        report(str(timeline))
        yield row(timeline, "full", q, k, v, schedule, slowdown(q, k, v, schedule=schedule))
