"""Barriers, tiles and warps in the words of a kernel's tables."""

from __future__ import annotations

from typing import Any

from .events import CTA_BYTES, Region, overlap

BARRIER_BYTES = 8
WARP = 32


class Names:
    """What lies where, by the tables of `kernel`; by address where it has none."""

    def __init__(self, kernel: Any, ctas: int = 1) -> None:
        self.ctas = ctas
        self.barriers: dict[int, tuple[str, str, int]] = {}
        self.places: list[tuple[str, int | None, Region]] = []
        self.rings = dict(getattr(kernel, "rings", {}))
        self.roles: list[tuple[str, int, int]] = []
        first = 0
        for name, role in getattr(kernel, "roles", {}).items():
            self.roles.append((name, first, first + role.warps))
            first += role.warps
        self.named: dict[int, str] = {0: "all threads of the CTA (sync_threads)"}
        table = getattr(getattr(kernel, "barriers", None), "table", {})
        for name, barrier in table.items():
            number = kernel.barriers.number(name)
            for copy in range(barrier.copies):
                many = f"[{copy}]" if barrier.copies > 1 else ""
                self.named[number + copy] = f"{name!r}{many}"
        if self.rings or getattr(kernel, "tiles", None):
            self._lay_out(kernel)

    def _lay_out(self, kernel: Any) -> None:
        plan = kernel.smem
        for name, tile in kernel.tiles.items():
            start, stages = plan.offset(name), kernel.stages(name)
            for stage in range(stages):
                at = start + stage * tile.bytes
                place = stage if stages > 1 else None
                self.places.append((f"tile {name!r}", place, ((at, at + tile.bytes),)))
        at = plan.offset("mbarriers")
        for name, ring in self.rings.items():
            for end, begin in (("full", 0), ("empty", ring.stages)):
                for stage in range(ring.stages):
                    self.barriers[at + (begin + stage) * BARRIER_BYTES] = (name, end, stage)
            words = at + 2 * ring.stages * BARRIER_BYTES
            if ring.bytes > 2 * ring.stages * BARRIER_BYTES:
                for stage in range(ring.stages):
                    word = words + 4 * stage
                    self.places.append((f"word of {name!r}", stage, ((word, word + 4),)))
            at += ring.bytes

    def role(self, warp: int) -> tuple[str, int]:
        """The role of a warp and its number within it."""
        for name, first, end in self.roles:
            if first <= warp < end:
                return name, warp - first
        return "warp", warp

    def who(self, cta: int, warp: int) -> str:
        """A warp, as in "consumer warp 3"."""
        name, number = self.role(warp)
        where = f"CTA {cta} " if self.ctas > 1 else ""
        return f"{where}{name} warp {number}" if name != "warp" else f"{where}warp {number}"

    def end_of(self, address: int) -> tuple[str, str, int] | None:
        """(ring, "full" or "empty", stage) of an mbarrier, if it is a ring's."""
        return self.barriers.get(address % CTA_BYTES)

    def barrier(self, address: int) -> str:
        """An mbarrier, as in "ring 'k' full, stage 1"."""
        where = f"CTA {address // CTA_BYTES - 1} " if self.ctas > 1 else ""
        found = self.end_of(address)
        if found is None:
            return f"{where}mbarrier at byte {address % CTA_BYTES}"
        ring, end, stage = found
        return f"{where}ring {ring!r} {end}, stage {stage}"

    def named_barrier(self, number: int) -> str:
        """A named barrier, as in "named barrier 3 'turn'[1]"."""
        where = f"CTA {number // 16} " if self.ctas > 1 else ""
        name = self.named.get(number % 16)
        return f"{where}named barrier {number % 16}" + (f" {name}" if name else "")

    def tiles(self, region: Region) -> list[str]:
        """The tiles of rings that lie in these bytes, by name."""
        local = _local(region)
        carried = {tile for ring in self.rings.values() for tile in ring.tiles}
        found = [
            name.split("'")[1]
            for name, _, place in self.places
            if name.startswith("tile") and overlap(place, local)
        ]
        return [name for name in dict.fromkeys(found) if name in carried]

    def region(self, region: Region) -> str:
        """What lies in these bytes, as in "tile 'k', stage 1"."""
        if not region:
            return "nothing"
        cta = region[0][0] // CTA_BYTES - 1
        where = f"CTA {cta} " if self.ctas > 1 else ""
        local = _local(region)
        found = [
            name if stage is None else f"{name} stage {stage}"
            for name, stage, place in self.places
            if overlap(place, local)
        ]
        if not found:
            return f"{where}bytes {local[0][0]} to {local[-1][1]}"
        return where + " and ".join(dict.fromkeys(found))


def _local(region: Region) -> Region:
    """The same bytes as one CTA counts them."""
    return tuple((lo % CTA_BYTES, (hi - 1) % CTA_BYTES + 1) for lo, hi in region)
