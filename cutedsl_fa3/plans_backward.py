"""A plan of a backward: one variant, one problem, one schedule; printable, and the cache's key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .problem import Problem
from .variant import Variant
from .variant.derive import of_element
from .variant.pairs import dense
from .variant.summaries import table_shape
from .variant.tiles import by_tile

if TYPE_CHECKING:
    from .kernels.sm90.backward.kernel import BackwardSm90
    from .kernels.sm90.backward.schedule import BackwardSchedule


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """What a backward's kernels will do, before anything is compiled.

    `has_dlse`: whether a gradient of LSE is given besides that of O. `deterministic`: dQ is summed
    in a fixed order, one tile of keys after the other. `wanted`: numbers of the captured tensors
    that the score or the weight function reads and whose gradients are asked for.
    """

    variant: Variant
    problem: Problem
    schedule: BackwardSchedule
    has_dlse: bool = False
    deterministic: bool = False
    wanted: tuple[int, ...] = ()

    @classmethod
    def default(
        cls,
        variant: Variant,
        problem: Problem,
        *,
        has_dlse: bool = False,
        deterministic: bool = False,
        wanted: tuple[int, ...] = (),
    ) -> BackwardPlan:
        """The plan with the schedule of the table.

        Raises: ScheduleError.
        """
        from .schedules_backward import default_schedule

        schedule = default_schedule(variant, problem, deterministic, wanted)
        return cls(variant, problem, schedule, has_dlse, deterministic, wanted)

    @cached_property
    def tile_dims(self) -> tuple[int, int]:
        """The head sizes of the tiles.

        Raises: ScheduleError.
        """
        from .schedules_backward import tile_dims

        return tile_dims(self.problem)

    @cached_property
    def by_tile(self) -> bool:
        """Whether visited tiles hang on more than bounds of positions."""
        return by_tile(self.variant.mask)

    def table_shape(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> tuple | None:
        """Shape of the table that summarises captured vectors by block; None if none is needed."""
        tile = (self.schedule.tile_m, self.schedule.tile_n)
        return table_shape(self.variant.mask, batch, heads, seqlen_q, seqlen_k, *tile)

    @property
    def kernel(self) -> BackwardSm90:
        """The kernels of this plan, as tables; not kept, since they hold the plan."""
        from .kernels.sm90.backward.kernel import BackwardSm90

        return BackwardSm90(self)

    def check(self) -> None:
        """Refuse what cannot run, before anything is compiled.

        Raises: ScheduleError, LayoutError.
        """
        self.kernel.check()

    @cached_property
    def key_text(self) -> str:
        """Everything that affects the code: equal text means equal code."""
        lines = ["backward", str(self.problem), repr(self.schedule), self.variant.text]
        derived = of_element(self.variant)  # which equal functions may differ in, by `detach`
        if derived is not None:
            lines += [f"by {name}:\n{graph.text}" for name, graph in derived.inputs.items()]
            lines += [repr(loaded) for loaded in derived.loads]
        rows = dense(self.variant)
        lines += [f"dense rows: {', '.join(f't{n}' for n in sorted(rows))}"] if rows else []
        lines += ["deterministic"] if self.deterministic else []
        lines += [f"gradients of {', '.join(f't{n}' for n in self.wanted)}"] if self.wanted else []
        lines += ["with a gradient of LSE"] if self.has_dlse else []
        return "\n".join(lines)
