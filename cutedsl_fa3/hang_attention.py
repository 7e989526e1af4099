"""`watched(q, k, v, variant)`: attention by the forward's debug build, which says why it hangs."""

from __future__ import annotations

from functools import partial

import torch

from . import calls, hang
from .calls import Launcher, OnDevice, Result, plan_for
from .errors import Unsupported
from .inputs import check_device, check_schedule, check_tensors, checked_scale, without_scores
from .pipelines import Schedule
from .variant import Variant


def watched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    scale: float | None = None,
    schedule: Schedule | None = None,
    seconds: float = hang.SECONDS,
) -> Result:
    """`attention_with_lse` by a debug build that raises where it would wait for ever.

    Shape: as for `attention`; the log-sum-exp is None for weights that are not normalised.
    Units: `seconds` without progress of any warp of a CTA are a hang.
    Raises: Hang, after which this process can use no GPU any more; else as `attention`.
    """
    variant = Variant() if variant is None else variant
    seconds = hang.checked_seconds("seconds", seconds)
    check_tensors(q, k, v, variant)
    check_device(q, k, v, variant)
    check_schedule(schedule, q, k)
    if calls.emulated(q.device):
        raise Unsupported(f"q is on {q.device}: a kernel is watched, so a CUDA device is needed")
    plan = plan_for(q, k, v, variant, schedule)
    plan.check()
    if without_scores(q, k):
        raise Unsupported(f"q {tuple(q.shape)}, k {tuple(k.shape)}: no kernel runs for these")
    launch = partial(hang.watch, plan.kernel, seconds=seconds)
    with torch.no_grad():
        call = OnDevice(q, k, v, variant, Launcher(launch, plan.problem, plan.schedule))
        return call(q, k, v, variant, call.scale if scale is None else checked_scale(scale, 0))
