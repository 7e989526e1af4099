"""What the forward's host function takes so that persistent CTAs can draw their tiles."""

from __future__ import annotations

import torch

from cutedsl_fa3.pipelines import Schedule

CTAS = 132  # an H200's multiprocessors


def drawing(schedule: Schedule, device: str, ctas: int = CTAS) -> tuple:
    """(counter, ctas) of a launch by hand; None where a CTA has one tile.

    On the meta device too: the counter is a number that the model follows.
    """
    if not schedule.persistent:
        return None, None
    where = "cpu" if device == "meta" else device
    return torch.zeros(1, dtype=torch.int32, device=where), ctas
