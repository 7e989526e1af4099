"""Steps from 4 on: the project's own forward, with one thing less or in another order.

Specialised    one producer warp behind the consumers, which all keep the launch's registers
InOrder        tiles in the plainest order; setmaxnreg and overlap are those of the schedule
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutedsl_fa3.pipelines import Role
from cutedsl_fa3.pipelines.roles import WARP, WARPS_PER_GROUP, first_warps

from ..forward import ForwardSm90
from .order import IN_ORDER

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan


class InOrder(ForwardSm90):
    """The forward with first rows first, head after head."""

    name = "ladder_in_order"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.order = IN_ORDER

    @property
    def key_text(self) -> str:
        """Everything that affects the code."""
        return f"{self.name}\n{super().key_text}"


class Specialised(InOrder):
    """Roles without setmaxnreg, so that the producer need not be a whole warpgroup.

    WGMMA wants warpgroups that begin at a multiple of four warps: consumers come first.
    """

    name = "ladder_specialised"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.roles = {
            "consumer": Role(WARPS_PER_GROUP * plan.schedule.consumers),
            "producer": Role(1),
        }
        self.first_consumer_thread = WARP * first_warps(self.roles)["consumer"]
