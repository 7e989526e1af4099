"""What lies where in a kernel's shared memory: offsets, aliases, and the total against capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .errors import LayoutError

# Shared memory that one block can ask for, sm_90 and sm_100 alike.
# Source: CUDA C++ Programming Guide, compute capabilities: 227 KB per thread block.
SMEM_CAPACITY = 227 * 1024

# Shared memory of a multiprocessor, a KB of which is the system's. Source: ibid.
SMEM_OF_ALL_BLOCKS = 228 * 1024


def capacity_of_each(residents: int) -> int:
    """Shared memory that each of so many blocks of a multiprocessor can ask for."""
    return SMEM_OF_ALL_BLOCKS // residents - (SMEM_OF_ALL_BLOCKS - SMEM_CAPACITY)


_BAR_WIDTH = 40


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Buffer:
    """One thing in shared memory; with `alias`, it reuses the storage of the buffer of that name.

    Units: `bytes` of one stage; stages lie one after another. `align` in bytes, for every stage.
    Raises: LayoutError if a field is out of range or a later stage would start misaligned.
    """

    name: str
    bytes: int
    align: int = 1024
    stages: int = 1
    alias: str | None = None

    def __post_init__(self) -> None:
        if self.bytes < 1 or self.stages < 1:
            raise LayoutError(
                f"buffer {self.name!r}: {self.stages} stages of {self.bytes} bytes; both must be "
                "at least 1, leave an unused buffer out"
            )
        if self.align < 1 or self.align & (self.align - 1):
            raise LayoutError(
                f"buffer {self.name!r}: alignment {self.align} is not a power of two; the next is "
                f"{1 << max(self.align, 0).bit_length()}"
            )
        if self.stages > 1 and self.bytes % self.align:
            raise LayoutError(
                f"buffer {self.name!r}: stages of {self.bytes} bytes leave stage 1 misaligned to "
                f"{self.align}; pad a stage to {_round_up(self.bytes, self.align)} bytes"
            )

    @property
    def size(self) -> int:
        """Bytes of all stages."""
        return self.bytes * self.stages


@dataclass(frozen=True)
class SmemPlan:
    """Buffers in the order they are stored; offsets count from a base aligned to the largest align.

    Raises: LayoutError if names repeat, an alias names no storage, or is larger than it.
    """

    buffers: tuple[Buffer, ...]
    capacity: int = SMEM_CAPACITY

    def __post_init__(self) -> None:
        owners = {b.name: b for b in self.buffers if b.alias is None}
        names = [b.name for b in self.buffers]
        for name in names:
            if names.count(name) > 1:
                raise LayoutError(f"two buffers are called {name!r}; each needs its own name")
        for buffer in self.buffers:
            if buffer.alias is None:
                continue
            if buffer.alias not in owners:
                raise LayoutError(
                    f"buffer {buffer.name!r} shares the storage of {buffer.alias!r}, which is no "
                    f"buffer with storage of its own; choose one of {sorted(owners)}"
                )
            owner = owners[buffer.alias]
            if buffer.size > owner.size:
                raise LayoutError(
                    f"buffer {buffer.name!r} ({buffer.size} bytes) is larger than {owner.name!r} "
                    f"({owner.size} bytes), whose storage it shares; make {buffer.name!r} the "
                    f"owner and {owner.name!r} the alias, or give {owner.name!r} "
                    f"{buffer.size} bytes"
                )

    def _offsets(self) -> dict[str, int]:
        offsets: dict[str, int] = {}
        end = 0
        for buffer in self.buffers:
            if buffer.alias is None:
                # An alias may ask for a stricter alignment than the buffer that owns the storage.
                sharers = [b.align for b in self.buffers if b.alias == buffer.name]
                offsets[buffer.name] = _round_up(end, max([buffer.align, *sharers]))
                end = offsets[buffer.name] + buffer.size
        for buffer in self.buffers:
            if buffer.alias is not None:
                offsets[buffer.name] = offsets[buffer.alias]
        return offsets

    def offset(self, name: str) -> int:
        """Where a buffer starts, in bytes from the base."""
        offsets = self._offsets()
        if name not in offsets:
            raise LayoutError(f"no buffer is called {name!r}; there are {list(offsets)}")
        return offsets[name]

    @property
    def total(self) -> int:
        """Bytes from the base to the end of the last buffer, padding included."""
        offsets = self._offsets()
        return max((offsets[b.name] + b.size for b in self.buffers), default=0)

    def _stages_that_fit(self, together: Sequence[Buffer]) -> int:
        """The most stages of these buffers alike that fit, the rest unchanged; 0 if none do."""
        for stages in range(together[0].stages - 1, 0, -1):
            fewer = tuple(replace(b, stages=stages) if b in together else b for b in self.buffers)
            sizes = {b.name: b.size for b in fewer}
            if any(b.alias and b.size > sizes[b.alias] for b in fewer):
                return 0
            if replace(self, buffers=fewer).total <= self.capacity:
                return stages
        return 0

    def check(self) -> None:
        """Refuse a plan that does not fit: the compiler accepts it, only the launch fails.

        Raises: LayoutError naming the total, the limit, and what takes most.
        """
        if self.total <= self.capacity:
            return
        owners = [b for b in self.buffers if b.alias is None]
        by_size = sorted(owners, key=lambda b: b.size, reverse=True)
        shares = ", ".join(f"{b.name} {b.size} ({b.stages} x {b.bytes})" for b in by_size)
        largest = by_size[0]
        over = self.total - self.capacity
        together = [b for b in owners if b.stages == largest.stages]  # rings of one depth
        names = ", ".join(repr(b.name) for b in together)
        fitting = self._stages_that_fit(together)
        if fitting:
            advice = f"{fitting} stage{'s' if fitting > 1 else ''} of {names} would fit"
        else:
            advice = (
                f"fewer stages of {names} alone cannot save {over} bytes: choose a "
                "smaller tile or share storage with `alias`"
            )
        raise LayoutError(
            f"shared memory: {self.total} bytes are needed and a block has {self.capacity}, {over} "
            f"too many; largest: {largest.name!r}. Bytes by buffer: {shares}. {advice}"
        )

    def __str__(self) -> str:
        offsets = self._offsets()
        rows = sorted(self.buffers, key=lambda b: (offsets[b.name], b.alias is not None))
        width = max([len(b.name) for b in rows] + [6])
        scale = max(self.total, self.capacity, 1)
        lines = [f"{'offset':>8} {'bytes':>8}  {'stages':>6}  {'buffer':<{width}}"]
        for buffer in rows:
            start = offsets[buffer.name] * _BAR_WIDTH // scale
            length = max(1, round(buffer.size * _BAR_WIDTH / scale))
            bar = " " * start + ("." if buffer.alias else "#") * length
            shared = f"  shares {buffer.alias}" if buffer.alias else ""
            lines.append(
                f"{offsets[buffer.name]:8d} {buffer.size:8d}  {buffer.stages:6d}  "
                f"{buffer.name:<{width}}  |{bar:<{_BAR_WIDTH}.{_BAR_WIDTH}}|{shared}"
            )
        state = "fits" if self.total <= self.capacity else "DOES NOT FIT"
        lines.append(f"   total {self.total:8d}  of {self.capacity} bytes: {state}")
        return "\n".join(lines)
