"""`predict`: a call's kernel, interpreted and run against the clock; nothing is compiled.

The kernel is the one that `attention` would launch. Of a launch one CTA is run, as if it had its
multiprocessor alone. Persistent CTAs draw their work tiles from a counter that all share: here
every other CTA draws once between two draws of this one, as if all work tiles took equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cutedsl_fa3.calls import plan_for
from cutedsl_fa3.errors import Unsupported
from cutedsl_fa3.inputs import check_schedule, check_tensors, without_scores
from cutedsl_fa3.ledger.rates import SMS
from cutedsl_fa3.model import check, host, program, reader
from cutedsl_fa3.model.names import Names
from cutedsl_fa3.variant import Variant

from .costs import Costs, ForwardCosts, GemmCosts
from .latencies import Latencies
from .table import Timeline, from_zero
from .timed import Clockwork

if TYPE_CHECKING:
    from cutedsl_fa3.kernels.gemm import Gemm
    from cutedsl_fa3.model.launch import Launch
    from cutedsl_fa3.model.program import Function
    from cutedsl_fa3.pipelines import Schedule
    from cutedsl_fa3.plans import Plan

MOST_KEPT = 16
_traced: dict[tuple[str, str, str], dict[str, Function]] = {}


def predict(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    schedule: Schedule | None = None,
    latencies: Latencies | None = None,
    cta: int = 0,
) -> Timeline:
    """What one CTA of `attention(q, k, v, variant)` will do when.

    Only shapes of q, k and v matter: they may lie on torch's meta device.

    Units: clocks.
    Raises: Unsupported for a CTA that the launch has not; what `attention` raises before a launch;
        model.NotCovered where the kernel does what the model does not follow.
    """
    variant = Variant() if variant is None else variant
    check_tensors(q, k, v, variant)
    check_schedule(schedule, q, k)
    if without_scores(q, k):
        raise Unsupported(f"q {tuple(q.shape)}, k {tuple(k.shape)}: no kernel runs for these")
    plan = plan_for(q, k, v, variant, schedule, trace=True)  # the same steps, and its visits noted
    if plan.schedule.cluster != (1, 1):
        raise Unsupported(
            f"cluster = {plan.schedule.cluster}: a CTA alone is predicted; measure, or use (1, 1)"
        )
    plan.check()
    args, visits = arguments(plan, q, k, v, cta)
    kernel = plan.kernel
    launch, programs = interpreted(kernel, args, cta)
    costs = ForwardCosts(plan, masked_tiles(plan, visits, cta, launch.grid[0]))
    return _timeline(title(plan), kernel, programs, costs, latencies, cta)


def predict_gemm(kernel: Gemm, k_tiles: int, latencies: Latencies | None = None) -> Timeline:
    """What the only CTA of a GEMM of one tile, so many tiles deep, will do when.

    Raises: Unsupported for CTAs that share loads, and for less than one tile.
    """
    s = kernel.schedule
    if s.cluster != (1, 1) or k_tiles < 1:
        raise Unsupported(f"cluster = {s.cluster}, k_tiles = {k_tiles}: (1, 1) and from 1 on")
    element = torch.bfloat16 if "BFloat16" in kernel.dtype.__name__ else torch.float16
    depth = k_tiles * kernel.tile_k
    shapes = ((s.tile_m, depth), (s.tile_n, depth), (s.tile_m, s.tile_n))
    args = [torch.empty(shape, dtype=element, device="meta") for shape in shapes]
    _, programs = interpreted(kernel, args, 0)
    costs = GemmCosts.of(kernel, k_tiles)
    return _timeline(f"{kernel.name}, {s}", kernel, programs, costs, latencies, 0)


def _timeline(
    name: str,
    kernel: Any,
    programs: Sequence[Sequence[Any]],
    costs: Costs,
    latencies: Latencies | None,
    cta: int,
) -> Timeline:
    clockwork = Clockwork(programs, Names(kernel), costs, latencies or Latencies())
    return Timeline("predicted", name, from_zero(clockwork.run()), cta)


def title(plan: Plan) -> str:
    """Kernel and schedule of a plan, in a line."""
    return f"{plan.problem}, {plan.schedule}"


@dataclass
class SharedCounter:
    """A counter of work tiles in place of device memory: others draw whenever this CTA has."""

    first: int
    others: int
    shape: tuple[int, ...] = (1,)
    device: Any = field(default_factory=lambda: torch.device("cpu"))

    def stride(self) -> tuple[int, ...]:
        """As of a tensor."""
        return (1,)

    def is_floating_point(self) -> bool:
        """As of a tensor."""
        return False

    def detach(self) -> SharedCounter:
        """As of a tensor."""
        return self

    def as_strided(self, shape: Sequence[int], strides: Sequence[int]) -> SharedCounter:
        """As of a tensor."""
        return self

    def numpy(self) -> Any:
        """The memory."""
        return _Drawn(self.first, self.others)


class _Drawn:
    """One word."""

    def __init__(self, value: int, others: int) -> None:
        self.value, self.others = value, others

    def __len__(self) -> int:
        return 1

    def __getitem__(self, at: int) -> int:
        return self.value

    def __setitem__(self, at: int, value: int) -> None:
        self.value = value + self.others


def arguments(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cta: int
) -> tuple[tuple[Any, ...], torch.Tensor]:
    """What the kernel is launched with, as the model takes it, and where it notes its visits."""
    (batch, seqlen_q, heads, _), seqlen_k = q.shape, k.shape[1]
    meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (q, k, v)]
    out = torch.empty(batch, seqlen_q, heads, v.shape[3], dtype=q.dtype, device="meta")
    sizes = batch, heads, seqlen_q, seqlen_k
    visits = torch.full(plan.visits_shape(*sizes), -1, dtype=torch.int32)
    table = plan.table_shape(*sizes)
    captures = tuple(
        t.cpu() if not t.is_floating_point() else torch.empty_like(t, device="meta")
        for t in plan.variant.captures
    )
    s = plan.schedule
    ctas = SMS * s.residents
    args = (
        *meta,
        out,
        torch.empty(batch, heads, seqlen_q, device="meta") if plan.variant.has_lse else None,
        captures,
        None if table is None else torch.zeros(table, dtype=torch.int32),
        visits,
        SharedCounter(cta, ctas - 1) if s.persistent else None,
        ctas if s.persistent else None,
        1.0,
    )
    return args, visits


def interpreted(
    kernel: Any, args: Sequence[Any], cta: int
) -> tuple[Launch, tuple[tuple[Any, ...], ...]]:
    """The launch that hands tiles over, and the events of each warp of one of its CTAs.

    Launches before it write what it reads, so they are run too.
    Raises: Unsupported.
    """
    for launch in host.launches(_functions(kernel), args):
        if not program.hands_over(launch.function):
            for first in check.clusters(launch):
                check.run_cluster(kernel, launch, first)
            continue
        if not 0 <= cta < launch.grid[0]:
            raise Unsupported(f"cta = {cta!r}: the launch has CTAs 0 to {launch.grid[0] - 1}")
        outcome = check.run_cluster(kernel, launch, (cta, 0, 0))
        if outcome.findings:
            raise Unsupported(f"cta = {cta}: its roles cannot be timed: {outcome.findings[0]}")
        return launch, outcome.programs
    raise Unsupported("kernel: none of its launches hands anything from role to role")


def _functions(kernel: Any) -> dict[str, Function]:
    """The kernel's traced program; the last few are kept, since tracing takes longest."""
    key = kernel.name, kernel.arch, kernel.key_text
    if key not in _traced:
        while len(_traced) >= MOST_KEPT:
            _traced.pop(next(iter(_traced)))
        _traced[key] = reader.read(kernel)
    return _traced[key]


def masked_tiles(
    plan: Plan, visits: torch.Tensor, cta: int, ctas: int
) -> tuple[tuple[bool, ...], ...]:
    """Of each work tile of a CTA, in its order: whether each key tile that it visits is masked.

    Shape: visits (batch, heads / pack, m_blocks, n_blocks + 1), as the kernel noted them.
    """
    batch, packs, m_blocks, _ = visits.shape
    order = plan.kernel.order
    found = []
    for index in range(cta, order.tiles(m_blocks, batch * packs), ctas):
        m_block, head = order.at(index, m_blocks, batch * packs)
        noted = visits[head // packs, head % packs, m_block].tolist()
        found.append(tuple(word % 2 == 1 for word in noted if word >= 0))
    return tuple(found)
