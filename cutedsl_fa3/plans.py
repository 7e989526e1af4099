"""A plan: one variant, one problem, one schedule. Printable, checkable, and the cache's key.

The last object that needs no compiler: everything that affects the code of a kernel is in
`key_text` and is printed, so a key cannot be too coarse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .problem import Problem
from .schedules import default_schedule
from .variant import Variant
from .variant.describe import describe
from .variant.fusion import with_known_signs
from .variant.limits import bounded, limits
from .variant.linear import Linear, linear
from .variant.pairs import dense, pairs
from .variant.summaries import table_shape
from .variant.tiles import by_tile

if TYPE_CHECKING:
    from .kernels.sm90.forward import ForwardSm90
    from .ledger.launch import Sizes
    from .ledger.page import Ledger
    from .pipelines import Schedule
    from .tuned import Choice


@dataclass(frozen=True, eq=False)
class Plan:
    """What a forward kernel will do, before anything is compiled.

    `trace`: a debug build that notes the key tiles it visits. `tuned`: the measurement that chose
    the schedule, where `tune` did; `sizes`: of a call, for the time that the plan predicts. Neither
    of these two affects code.
    """

    variant: Variant
    problem: Problem
    schedule: Schedule
    trace: bool = False
    tuned: Choice | None = None
    sizes: Sizes | None = None

    @classmethod
    def default(cls, variant: Variant, problem: Problem, *, trace: bool = False) -> Plan:
        """The plan with the measured schedule for this problem."""
        return cls(variant, problem, default_schedule(variant, problem), trace)

    @cached_property
    def by_tile(self) -> bool:
        """Whether the producer decides key tiles one by one and tells the consumers."""
        return by_tile(self.variant.mask)

    @cached_property
    def pairs(self) -> frozenset[int]:
        """Captured tensors whose elements of two neighbouring keys are read by one load.

        Their layout and address allow it now, so this is part of the key.
        """
        return pairs(self.variant)

    @cached_property
    def dense(self) -> frozenset[int]:
        """Captured tensors read by query or key whose last dimension is dense: in the key too."""
        return dense(self.variant)

    @property
    def bounded(self) -> bool:
        """Whether the softmax goes without a maximum: limited scores, and P in bf16."""
        return self.problem.dtype == "bf16" and bounded(self.variant)

    @cached_property
    def linear(self) -> Linear | None:
        """The score apart, where it grows evenly with the key and a running maximum follows it."""
        variant = self.variant
        if variant.score is None or variant.weight is not None or self.bounded:
            return None
        return linear(with_known_signs(variant.score, variant.mask))

    def table_shape(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> tuple | None:
        """Shape of the table that summarises captured vectors by block; None if none is needed."""
        tile = (self.schedule.queries, self.schedule.tile_n)
        return table_shape(self.variant.mask, batch, heads, seqlen_q, seqlen_k, *tile)

    def visits_shape(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> tuple:
        """Shape of a visit trace: (batch, heads / pack, m_blocks, n_blocks + 1)."""
        s = self.schedule
        return batch, heads // s.pack, -(-seqlen_q // s.queries), -(-seqlen_k // s.tile_n) + 1

    @property
    def kernel(self) -> ForwardSm90:
        """The kernel of this plan, as tables; not kept, since it holds the plan."""
        from .kernels.sm90.forward import ForwardSm90

        return ForwardSm90(self)

    def check(self) -> None:
        """Refuse what cannot run, before anything is compiled.

        Raises:
            ScheduleError, LayoutError: naming the rule, both sides of it, and what is allowed.
        """
        self.kernel.check()

    @cached_property
    def key_text(self) -> str:
        """Everything that affects the code: equal text means equal code."""
        lines = [str(self.problem), repr(self.schedule), self.variant.text]
        if self.pairs:
            lines.append(f"read in pairs: {', '.join(f't{n}' for n in sorted(self.pairs))}")
        if self.dense:
            lines.append(f"dense rows: {', '.join(f't{n}' for n in sorted(self.dense))}")
        if self.trace:
            lines.append("traces its visits")
        return "\n".join(lines)

    def __str__(self) -> str:
        kernel = self.kernel
        lines = [f"forward on SM90: {self.problem}", "", "variant"]
        lines += [f"  {line}" for line in self.variant.text.splitlines()]
        if self.pairs:
            lines.append(f"  two keys a load: {', '.join(f't{n}' for n in sorted(self.pairs))}")
        if self.dense:
            lines.append(f"  dense rows: {', '.join(f't{n}' for n in sorted(self.dense))}")
        lines += ["", f"visits   {describe(self.variant.mask)}"]
        lines += [f"aligned  {_alignment(self.variant)}"]
        lines += [f"softmax  {_softmax(self)}"]
        lines += [f"schedule {self.schedule}, {kernel.order}"]
        lines += [] if self.tuned is None else [f"         {self.tuned}"]
        lines += ["", "tiles"]
        lines += [f"  {name:4} {tile}" for name, tile in kernel.tiles.items()]
        lines += ["", "shared memory", *_indented(kernel.smem), "", "rings"]
        for name, ring in kernel.rings.items():
            text = ring.describe(kernel.tiles, kernel.roles, kernel.cluster)
            lines.append(f"  {name:6} {text}")
        lines += ["", "roles"]
        lines += [
            f"  {name:9} {role.warps} warps"
            + (f", {role.registers} registers a thread" if role.registers else "")
            for name, role in kernel.roles.items()
        ]
        lines += [f"  named barriers: {kernel.barriers}", "", "expected instructions"]
        lines += [f"  {claim}" for claim in kernel.expected()]
        lines += ["", "cost", *_indented(self.ledger)]
        lines += ["", f"kernel   {self.why}"]
        return "\n".join(lines)

    @property
    def ledger(self) -> Ledger:
        """What this is predicted to cost, by step and pipe; printable."""
        from .ledger.page import Ledger

        return Ledger(self, self.sizes)

    @property
    def why(self) -> str:
        """Where the kernel comes from, or why it will be compiled (anew)."""
        from . import cache

        return cache.explain(self.kernel)


def _alignment(variant: Variant) -> str:
    """Which query meets which key where the lengths differ, as far as the mask says."""
    if variant.mask is None:
        return "every query sees every key"
    if {"seqlen_q", "seqlen_k"} <= variant.mask.inputs:
        return "by the lengths, which the mask reads (bottom-right in cutedsl_fa3.masks)"
    return "by raw indices: query 0 meets key 0 (top-left)"


def _softmax(plan: Plan) -> str:
    """How scores become weights, and what a row that sees nothing gives."""
    variant, online = plan.variant, "online, base 2"
    if plan.bounded:
        low, high = limits(variant.score)
        online = f"base 2, without a maximum: scores lie within {low:g} and {high:g}"
    if variant.weight is not None:
        text = "element by element, nothing is normalised; no LSE; empty rows give 0"
    elif variant.sink is not None:
        text = (
            f"{online}, with the sink t{variant.sink} as one more logit; LSE natural; empty "
            "rows give 0 and the sink"
        )
    else:
        text = f"{online}; LSE natural; empty rows give 0 and -inf"
    return text + ("; then the epilogue" if variant.epilogue is not None else "")


def _indented(text: object) -> list[str]:
    return [f"  {line}" for line in str(text).splitlines()]
