"""The ladder: from FlashAttention-2's kernel to the project's own, one thing changed in each step.

Steps and depths are data. A step names the kernel that serves it, and the values of the schedule in
which it differs from the step before; everything else stays. Tiles are
as large as registers allow without a spill: those of mma.sync in four warps of 255, as
FlashAttention-2 has them; those of WGMMA, until setmaxnreg, within what the launch gives a thread.
That is less than the register file over the threads: each quarter of a multiprocessor has its own
16,384, so that a thirteenth warp leaves its neighbours 128 registers a thread, as sixteen would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from .pipelines import Schedule
from .plans import Plan
from .problem import Problem
from .variant import Variant

HEAD_DIMS = (64, 128)
VARIANTS = ("full", "causal")
DEPTHS = (1, 2, 3, 4)  # slots of K and of V, each

_SYNC = {64: {"tile_m": 128, "tile_n": 96}, 128: {"tile_m": 128, "tile_n": 64}}
_WGMMA = {
    64: {"tile_m": 192, "tile_n": 112, "consumers": 3},
    128: {"tile_m": 128, "tile_n": 128, "consumers": 2},
}
_OURS = "forward:ForwardSm90"


@dataclass(frozen=True)
class Step:
    """One step: what changes, the kernel as module:class, and values of the schedule that change.

    `tiles`: the values that depend on the head size.
    """

    name: str
    changes: str
    kernel: str
    schedule: Mapping[str, Any] = field(default_factory=dict)
    tiles: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


STEPS = (
    Step(
        "cp.async, mma.sync",
        "all threads copy and all warps multiply; K and V one tile ahead",
        "ladder.cp_async:CpAsync",
        {"consumers": 1, "stages": 2, "overlap": "none", "head_group": 1},
        _SYNC,
    ),
    Step(
        "TMA",
        "one thread issues a copy, mbarriers say when it has arrived; O is stored by TMA too",
        "ladder.tma:TmaSync",
    ),
    Step(
        "WGMMA",
        "warpgroups multiply from shared memory, in larger tiles",
        "ladder.tma:TmaWgmma",
        tiles=_WGMMA,
    ),
    Step(
        "warp specialisation",
        "a warp of its own loads, warpgroups multiply",
        "ladder.roles:Specialised",
    ),
    Step(
        "setmaxnreg",
        "the loading warp becomes a warpgroup, which gives registers to the others",
        "ladder.roles:InOrder",
        tiles={64: {"tile_n": 128}},
    ),
    Step(
        "ping-pong",
        "warpgroups take turns to issue products",
        "ladder.roles:InOrder",
        {"overlap": "pingpong"},
    ),
    Step(
        "intra-warpgroup overlap",
        "the next tile's first product runs under the softmax of this one",
        "ladder.roles:InOrder",
        {"overlap": "both"},
    ),
    Step("longest first", "tiles of the last rows start first", _OURS),
    Step("heads in groups", "heads alternate by eight, for L2", _OURS, {"head_group": 8}),
    Step("persistent", "CTAs draw tile after tile", _OURS, {"persistent": True}),
)


@dataclass(frozen=True)
class Rung:
    """A kernel of the ladder for one problem: a step, or the last step at another depth."""

    number: int
    name: str
    plan: Plan
    kernel_name: str

    @property
    def kernel(self) -> Any:
        """The kernel, as tables."""
        module, _, name = self.kernel_name.partition(":")
        made = import_module(f".kernels.sm90.{module}", __package__)
        return getattr(made, name)(self.plan)

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


def schedules(head_dim: int, steps: tuple[Step, ...] = STEPS) -> list[Schedule]:
    """The schedule of each step.

    Raises: ValueError for a head size that the ladder has not.
    """
    if head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"head_dim = {head_dim}: the ladder has {known}")
    values: dict[str, Any] = {}
    found = []
    for step in steps:
        values |= {**step.schedule, **step.tiles.get(head_dim, {})}
        found.append(Schedule(**values))
    return found


def rungs(variant: Variant, head_dim: int, dtype: str = "bf16") -> list[Rung]:
    """Every step, then the last one at each other depth whether or not it fits; see `fitting`.

    Raises: ValueError.
    """
    problem, made = Problem(dtype, head_dim, head_dim), schedules(head_dim)
    found = [
        Rung(number, step.name, Plan(variant, problem, schedule), step.kernel)
        for number, (step, schedule) in enumerate(zip(STEPS, made, strict=True), start=1)
    ]
    last = found[-1]
    for depth in DEPTHS:
        schedule = replace(made[-1], stages=depth)
        if schedule != made[-1]:
            plan = Plan(variant, problem, schedule)
            found.append(Rung(last.number, depth_name(depth), plan, last.kernel_name))
    return found


def depth_name(depth: int) -> str:
    """What the last step at another depth is called."""
    return f"{depth} stage{'s' if depth > 1 else ''}"


def refusal(rung: Rung) -> str:
    """Why a kernel cannot run, as its check says it; empty where it can."""
    try:
        rung.kernel.check()
    except ValueError as error:
        return str(error)
    return ""


def fitting(found: list[Rung]) -> list[Rung]:
    """Those that fit shared memory."""
    return [rung for rung in found if not refusal(rung)]


def launched(
    rung: Rung, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
    """A call of the rung's kernel on these tensors: it allocates (out, lse) and returns them.

    Shape: as for `attention`. Raises: what `attention` raises for its tensors, DeviceError.
    """
    from . import cache
    from .calls import Launcher, OnDevice
    from .inputs import check_tensors

    plan = rung.plan
    check_tensors(q, k, v, plan.variant)
    made = Launcher(cache.get(rung.kernel).launch, plan.problem, plan.schedule)
    call = OnDevice(q, k, v, plan.variant, made)
    return lambda: call(q, k, v, plan.variant, call.scale)
