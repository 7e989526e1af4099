"""The smallest kernel tables that use everything: two rings, an alias, a multicast, a barrier."""

from __future__ import annotations

import cutlass

from cutedsl_fa3.layouts import Tile
from cutedsl_fa3.pipelines import Barrier, Barriers, Ring, Role, WarpSpecialized


class Handover(WarpSpecialized):
    """Tables of a kernel that is described but never compiled."""

    def __init__(self, stages: int = 3, cluster: tuple[int, int] = (2, 1)) -> None:
        self.tiles = {
            "a": Tile(128, 64, cutlass.BFloat16),
            "b": Tile(64, 64, cutlass.BFloat16),
            "scale": Tile(8, 8, cutlass.BFloat16),
            "out": Tile(128, 64, cutlass.BFloat16),
        }
        self.rings = {
            "ab": Ring(("a", "b"), stages, multicast={"b": "m"}),
            "scale": Ring(("scale",), 1),
        }
        self.roles = {
            "producer": Role(warps=4, registers=24),
            "consumer": Role(warps=8, registers=240),
        }
        self.barriers = Barriers({"written": Barrier(256)})
        self.aliases = {"out": "a"}
        self.cluster = cluster

    def producer(self, io, smem, ports, thread):
        """Fill the rings."""

    def consumer(self, io, smem, ports, thread):
        """Empty the rings."""
