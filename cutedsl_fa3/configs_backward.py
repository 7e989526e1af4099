"""Backward configurations that stand for all that are supported, each as a plan that CI compiles.

What a kernel holds in registers depends on head sizes, on the kind of variant and on what is asked
for besides. Each pair of head sizes is there in both types, each row of `schedules_backward.TABLE`
with a variant of the kind that needs most of those that it serves, and each kind that comes to a
row of its own at the most used size.
"""

from __future__ import annotations

import functools

import torch

from . import masks
from .configs import HEADS, kinds
from .plans_backward import BackwardPlan
from .problem import DTYPES, Problem
from .schedules_backward import TABLE
from .variant import Variant

USUAL = (128, 128)
LEAST, MOST = "nothing", "much"
# Kinds of variants that need as much as the name of a row says, the hardest to compile first.
OF_NEED = {
    "nothing": "nothing",
    "light": "light",
    "weights": "elementwise",
    "mask": "mask",
    "uniform": "uniform",
    "tables": "elements",
    "elements": "documents",
    "much": "much",
}


@functools.cache
def variants() -> dict[str, Variant]:
    """A variant of each kind by name: those of the forward, before an epilogue."""
    found = {"full": Variant(), **kinds()}
    found = {
        name: variant if variant.epilogue is None else variant.without_epilogue()
        for name, variant in found.items()
    }
    slopes, temperature = torch.linspace(0.5, 0.1, HEADS), torch.tensor(0.7)
    by_key = torch.zeros(HEADS, 64)
    found["slopes"] = Variant(lambda s, b, h, q, k: s + slopes[h] * (k - q), masks.causal)
    found["by key"] = Variant(lambda s, b, h, q, k: s + by_key[h, k], masks.causal)
    found["temperature"] = Variant(
        lambda s, b, h, q, k: 5.0 * torch.tanh(s * temperature / 5.0), masks.causal
    )
    return found


# Known to spill, 4 to 24 B stored, mostly of what loops do not change: no schedule is better.
SPILLING = {("much", dims, order) for dims in ((192, 192), (256, 256)) for order in (False, True)}
WANTED = ("slopes", "by key", "temperature")  # whose captured tensor gets its gradient


def plan(
    kind: str,
    dims: tuple[int, int],
    dtype: str = "bf16",
    *,
    deterministic: bool = False,
    has_dlse: bool = False,
) -> BackwardPlan:
    """The plan of the table for one configuration."""
    wanted = (0,) if kind in WANTED else ()
    return BackwardPlan.default(
        variants()[kind],
        Problem(dtype, *dims),
        has_dlse=has_dlse,
        deterministic=deterministic,
        wanted=wanted,
    )


@functools.cache
def configs() -> dict[str, BackwardPlan]:
    """All of them, by a name such as d192x128-bf16-uniform."""
    found: dict[str, BackwardPlan] = {}

    def add(
        kind: str, dims: tuple[int, int], dtype: str = "bf16", deterministic: bool = False
    ) -> None:
        d, dv = dims
        name = f"d{d if d == dv else f'{d}x{dv}'}-{dtype}-{kind.replace(' ', '_')}"
        name += "-deterministic" if deterministic else ""
        has_dlse = kind == "gated"
        found[name] = plan(kind, dims, dtype, deterministic=deterministic, has_dlse=has_dlse)

    for dims in dict.fromkeys((row.head_dim, row.head_dim_v) for row in TABLE):
        for dtype in DTYPES:
            add(LEAST, dims, dtype)
    for row in TABLE:
        if (row.head_dim, row.head_dim_v) == USUAL and not row.deterministic:
            continue  # below, with every kind
        kind, dims = OF_NEED[row.needs], (row.head_dim, row.head_dim_v)
        if (kind, dims, row.deterministic) in SPILLING:
            kind = "documents"
        add(kind, dims, deterministic=row.deterministic)
    for kind in variants():
        add(kind, USUAL)
    return found


def label(plan: BackwardPlan) -> str:
    """The name of one of them; another plan of equal code has it too."""
    return next(name for name, known in configs().items() if known.key_text == plan.key_text)
