"""Calls that have been checked: what is left to do each time is to allocate and to launch.

The first call of a kind is checked and its kernel found; how the next one is known is in seen.py.
Nothing kept here holds a variant, or a tensor of the caller.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import tvm_ffi  # noqa: F401  # kernels are loaded by it: a first call should not wait for it

from . import cache, hang, tuned
from .counters import counter, under_capture
from .inputs import (
    NAMES,
    addressable,
    as_numbers,
    check_addresses,
    check_device,
    check_grid,
    check_schedule,
    check_tensors,
    checked_scale,
    without_scores,
)
from .pipelines import Schedule
from .plans import Plan
from .problem import Problem
from .schedules import Extents, default_schedule, schedule_for
from .variant import Variant
from .variant.evaluate import evaluate
from .variant.pairs import dense, pairs

Result = tuple[torch.Tensor, torch.Tensor | None]


class SlowKernel(UserWarning):
    """A kernel is right but slower than it need be; the message says why and what to try."""


@dataclass(frozen=True)
class Launcher:
    """A loaded kernel and what was fixed when it was compiled, apart from its variant."""

    launch: Callable[..., None]
    problem: Problem
    schedule: Schedule


# By variant: a variant and the tensors that it captures may be freed meanwhile, so neither keys nor
# values refer to them.
_launchers: weakref.WeakKeyDictionary[Variant, dict[tuple, Launcher]] = weakref.WeakKeyDictionary()

# What `torch.cuda.current_device` wraps, which first looks whether CUDA is there; a torch without
# CUDA has none.
current_device = getattr(torch._C, "_cuda_getDevice", None)
empty_like = torch.empty_like


class OnDevice:
    """A forward on a GPU, for tensors of one shape, layout and place."""

    __slots__ = ("checks_layouts", "ctas", "device", "index", "launch", "lse", "out", "scale",
                 "strides", "table", "unread")  # fmt: skip

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, made: Launcher
    ) -> None:
        batch, seqlen_q, heads, head_dim = q.shape
        plan = Plan(variant, made.problem, made.schedule)
        check_grid(q, made.schedule)
        check_addresses(variant.captures)
        self.launch = made.launch
        self.scale = checked_scale(None, head_dim)
        self.device, self.index = q.device, q.device.index
        residents = made.schedule.residents
        self.ctas = residents * _multiprocessors(q.device) if made.schedule.persistent else None
        self.out = _model((batch, seqlen_q, heads, v.shape[3]), q.dtype, q.device)
        rows = (batch, heads, seqlen_q) if variant.has_lse else None
        self.lse = _model(rows, torch.float32, q.device)
        self.unread = None if rows is None else _unread(rows, q.device)
        table = plan.table_shape(batch, heads, seqlen_q, k.shape[1])
        self.table = _model(table, torch.int32, q.device)
        given = (("q", q), ("k", k), ("v", v))
        taken = [(t, addressable(name, t)) for name, t in given]
        strides = [None if a is t else a.stride() for t, a in taken]
        self.strides = strides if any(strides) else None
        # A launch refuses types, strides and addresses that its kernel cannot take, unless a
        # stride is replaced before.
        self.checks_layouts = self.strides is None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: Variant,
        scale: float,
        visits: torch.Tensor | None = None,
    ) -> Result:
        """As `run`, of tensors as they come: described anew, odd strides replaced."""
        if self.strides is not None:
            q, k, v = (
                t if s is None else t.as_strided(t.shape, s)
                for t, s in zip((q, k, v), self.strides, strict=True)
            )
        return self.run(q, k, v, as_numbers(variant.captures), scale, True, visits)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        captured: Any,
        scale: float,
        reads_lse: bool,
        visits: torch.Tensor | None = None,
    ) -> Result:
        """Allocate, launch on the current stream of the tensors' device, return (out, lse).

        `captured` is what `as_numbers` says of the captured tensors, which no launch checks; q, k
        and v are checked by it. Unless the caller `reads_lse`, the second is no LSE.
        """
        out = empty_like(self.out)
        lse = self.unread
        if reads_lse or lse is None:
            lse = None if self.lse is None else empty_like(self.lse)
        table = None if self.table is None else empty_like(self.table)
        ctas = self.ctas
        if current_device() == self.index:
            drawn = None if ctas is None else counter(self.index)
            self.launch(q, k, v, out, lse, captured, table, visits, drawn, ctas, scale)
        else:
            with torch.cuda.device(self.device):
                drawn = None if ctas is None else counter(self.index)
                self.launch(q, k, v, out, lse, captured, table, visits, drawn, ctas, scale)
        return out, lse


class OnCpu:
    """The same plan, emulated."""

    __slots__ = ("problem", "scale", "schedule")
    checks_layouts = False

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        for name, t in (("q", q), ("k", k), ("v", v)):
            addressable(name, t)
        check_grid(q, plan.schedule)
        self.scale = checked_scale(None, q.shape[3])
        self.problem, self.schedule = plan.problem, plan.schedule

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, scale: float
    ) -> Result:
        from . import emulate  # which no GPU needs

        made = emulate.run(Plan(variant, self.problem, self.schedule), q, k, v, scale)
        return made.out, made.lse


class WithoutScores:
    """No query, or no key that one could see: there is nothing to compile or to launch."""

    __slots__ = ("scale",)
    checks_layouts = False

    def __init__(self, q: torch.Tensor) -> None:
        self.scale = checked_scale(None, q.shape[3])

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, scale: float
    ) -> Result:
        """Rows that see no key: 0 and -inf or the sink, and what an epilogue makes of them."""
        (batch, seqlen_q, heads, _), head_dim_v = q.shape, v.shape[3]
        with torch.no_grad():
            out = q.new_zeros(batch, seqlen_q, heads, head_dim_v)
            lse = q.new_full((batch, heads, seqlen_q), -math.inf, dtype=torch.float32)
            if variant.sink is not None:
                lse.copy_(variant.captures[variant.sink].reshape(-1, 1))
            if variant.epilogue is not None and out.numel():
                at = {
                    "o": out.float(),
                    "lse": lse.transpose(1, 2)[..., None],
                    "b": torch.arange(batch, device=q.device).view(-1, 1, 1, 1),
                    "h": torch.arange(heads, device=q.device).view(-1, 1),
                    "q": torch.arange(seqlen_q, device=q.device).view(-1, 1, 1),
                    "seqlen_q": seqlen_q,
                    "seqlen_k": 0,
                }
                out.copy_(evaluate(variant.epilogue, at, variant.captures))
        return out, lse if variant.has_lse else None


Call = OnDevice | OnCpu | WithoutScores


def emulated(device: torch.device) -> bool:
    """Whether a plan is emulated there, not launched."""
    return device.type == "cpu"


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, schedule: Schedule | None
) -> Call:
    """Check everything about a call but its scale, and find or compile its kernel.

    Raises: Unsupported, LayoutError, ScheduleError.
    """
    check_tensors(q, k, v, variant)
    check_device(q, k, v, variant)
    check_schedule(schedule, q, k)
    if without_scores(q, k):
        plan_for(q, k, v, variant, schedule).check()
        return WithoutScores(q)
    if emulated(q.device):
        plan = plan_for(q, k, v, variant, schedule)
        plan.check()
        return OnCpu(q, k, v, plan)
    schedule = tuned.schedule(q, k, v, variant, schedule) or schedule_of_lengths(q, k, v, variant)
    made = launcher(variant, q.dtype, q.shape[3], v.shape[3], schedule)
    return OnDevice(q, k, v, variant, made)


def visited(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, schedule: Schedule | None
) -> torch.Tensor:
    """The key tiles that each tile of queries visits, noted by a debug build of the kernel.

    Shape: int32 (batch, heads, m_blocks, n_blocks + 1), -1 after the last.
    Raises: Unsupported, LayoutError, ScheduleError.
    """
    check_tensors(q, k, v, variant)
    check_device(q, k, v, variant)
    check_schedule(schedule, q, k)
    plan = plan_for(q, k, v, variant, schedule, trace=True)
    plan.check()
    sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    noted = torch.full(plan.visits_shape(*sizes), -1, dtype=torch.int32, device=q.device)
    if 0 in sizes:
        return noted
    if emulated(q.device):
        from . import emulate

        return emulate.run(plan, q, k, v, checked_scale(None, q.shape[3])).visits
    kind = (variant, q.dtype, q.shape[3], v.shape[3], plan.schedule)
    with torch.no_grad():
        call = OnDevice(q, k, v, variant, launcher(*kind, trace=True))
        call(q, k, v, variant, call.scale, noted)
    return noted


def plan_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    schedule: Schedule | None,
    trace: bool = False,
) -> Plan:
    """The plan for checked tensors: with this schedule, else a tuned one, else the table's."""
    choice = tuned.choice(q, k, v, variant) if schedule is None else None
    schedule = schedule if choice is None else choice.schedule
    schedule = schedule or schedule_of_lengths(q, k, v, variant)
    plan = planned(variant, q.dtype, q.shape[3], v.shape[3], schedule, trace)
    return plan if choice is None else replace(plan, tuned=choice)


def schedule_of_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant
) -> Schedule | None:
    """The table's schedule for these lengths and heads; None if it is that for any."""
    problem = Problem(NAMES[q.dtype], q.shape[3], v.shape[3])
    extents = Extents(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    found = schedule_for(variant, problem, extents)
    return None if found == default_schedule(variant, problem) else found


def planned(
    variant: Variant,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    schedule: Schedule | None,
    trace: bool = False,
) -> Plan:
    """The plan for tensors of this type and these head sizes, by the table without a schedule."""
    problem = Problem(NAMES[dtype], head_dim, head_dim_v)
    if schedule is None:
        return Plan.default(variant, problem, trace=trace)
    return Plan(variant, problem, schedule, trace)


def launcher(
    variant: Variant,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    schedule: Schedule | None,
    trace: bool = False,
) -> Launcher:
    """The loaded kernel of a plan; compiled, or taken from the disk, the first time.

    Captured tensors may have changed their types and layouts since: those choose the kernel too.
    """
    types = tuple(t.dtype for t in variant.captures)
    key = (dtype, head_dim, head_dim_v, schedule, trace, types, pairs(variant), dense(variant))
    known = _launchers.setdefault(variant, {})
    found = known.get(key)
    if found is None:
        plan = planned(variant, dtype, head_dim, head_dim_v, schedule, trace)
        plan.check()
        if (seconds := hang.asked()) is not None:
            launch = functools.partial(hang.watch, plan.kernel, seconds=seconds)
        else:
            compiled = cache.get(plan.kernel)
            if compiled.resources.spills and not trace:
                _warn_of_spills(compiled.resources.spills, plan.schedule)
            launch = compiled.launch
        found = known[key] = Launcher(launch, plan.problem, plan.schedule)
    return found


def _warn_of_spills(spills: int, schedule: Schedule) -> None:
    warnings.warn(
        f"the kernel spills {spills} B a thread to memory, which is slow: its {schedule.tile_m} x "
        f"{schedule.tile_n} tile leaves too few registers for this variant; try "
        f"schedule=Schedule(..., tile_n={max(16, schedule.tile_n - 32)})",
        SlowKernel,
        stacklevel=7,  # the caller of attention
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=dtype, device=device)


def _model(
    shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """One element seen as a tensor of this shape: `empty_like` it makes a contiguous one.

    That takes half the time of `torch.empty`, which parses shape, type and device at each call.
    """
    return None if shape is None else _element(dtype, device).expand(shape)


_rows: dict[torch.device, list[torch.Tensor]] = {}


def _unread(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor | None:
    """Memory in place of an LSE that nobody reads, since to allocate one takes a call's tenth.

    All heads and launches write over one another in it. It is never freed, since graphs and other
    streams may still write to it: a vector as long as the longest sequence, and shorter ones from
    before. None where it would have to be allocated for a graph, whose memory is used again.
    """
    rows = _rows.setdefault(device, [])
    if not rows or rows[-1].numel() < shape[2]:
        if under_capture(device):
            return None
        length = 1 << max(shape[2] - 1, 1023).bit_length()
        rows.append(torch.empty(length, dtype=torch.float32, device=device))
    return rows[-1][: shape[2]].expand(shape)
