"""A debug build whose roles note the clock before and after every wait, of one CTA.

    stamped(kernel)      the kernel's debug build: its `host` takes (arguments, stamps, stream)

One thread of each warpgroup notes a pair (what, clock) in global memory (stamps.py), the others
nothing. It is a store under a predicate, not a branch: between the issue of a WGMMA and its wait a
branch would serialise it. How far a lane is stands in a register, so nothing is read; a lane whose
room is used up goes on counting.

The clock is the SM's own counter (%clock): one step is a clock of the SM, and all warps of a CTA
read the same. Differences of its low 32 bits are right for two seconds. %globaltimer counts
nanoseconds and is updated every 32 ns or less often, 60 clocks, which is as long as most waits; a
lane notes it at its ends, which says how fast the SM ran.

What lies between two waits is noted only by them: the compiler moves arithmetic across a stamp, but
no wait and no other stamp. So a stamp at a wait that the compiler moves up would hold it where the
source has it. There is one such wait in the forward, and a kernel that has a `waits_early` is told
to wait there in the first place.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .debug_build import DebugBuild, derived
from .kernel import WarpSpecialized
from .stamps import FIRST, ROOM, StampPlan

BEYOND = 1 << 30  # more pairs than any plan has


@dataclass(frozen=True)
class Stamps:
    """Where the stamps of which CTA go.

    Units: `address` of `StampPlan.words` words of device memory; `cta` counts CTAs along x first.
    """

    address: Int64
    cta: Int32


def stamped(kernel: WarpSpecialized, room: int = ROOM) -> Stamped:
    """The debug build of a kernel, with room for so many stamps a lane.

    Its `host` takes a tuple of what the kernel's own takes before the stream, `Stamps`, and the
    stream.

    Raises: ScheduleError for what is no WarpSpecialized kernel, and for room that makes no sense.
    """
    made = derived(Stamped, kernel, "stamped")
    made.waits_early = True
    made.stamp_plan = StampPlan.of(kernel, room)
    return made


class Stamped(DebugBuild):
    """Mixed into a kernel's class by `stamped`."""

    kind: ClassVar[str] = "stamped"
    noter: Stamper | None  # while the kernel is traced
    stamp_plan: StampPlan
    waits_early: bool

    @property
    def says(self) -> str:  # type: ignore[override]
        """What its key text says besides."""
        return f"warps note the clock at their waits, {self.stamp_plan.room} stamps a lane"

    def fake_extra(self) -> Stamps:
        """A stand-in for the stamps' place."""
        return Stamps(Int64(0), Int32(0))

    # Traced from here on.

    def begin(self, mbarriers: cute.Pointer, extra: Stamps) -> Stamper:
        """What notes the clock for this thread."""
        return Stamper(self.stamp_plan, extra)

    def run_role(
        self,
        name: str,
        io: object,
        smem: SimpleNamespace,
        ports: SimpleNamespace,
        thread: Int32,
    ) -> None:
        """The role, with its beginning and its end."""
        self._stamper.open()
        super().run_role(name, io, smem, ports, thread)
        self._stamper.close()

    def complete(self, product: str, running: int = 0) -> None:
        """Wait for products, noted."""
        self._stamper.note(self.stamp_plan.code(product))
        super().complete(product, running)
        self._stamper.note(self.stamp_plan.code(product, ends=True))

    def stored(self) -> None:
        """Wait for stores, noted."""
        self._stamper.note(self.stamp_plan.code("store"))
        super().stored()
        self._stamper.note(self.stamp_plan.code("store", ends=True))

    def epilogue(self, *arguments: Any) -> Any:
        """The kernel's own, with its beginning and its end."""
        self._stamper.note(self.stamp_plan.code("epilogue"))
        found = self._of.epilogue(self, *arguments)  # type: ignore[attr-defined]
        self._stamper.note(self.stamp_plan.code("epilogue", ends=True))
        return found

    @property
    def _stamper(self) -> Stamper:
        assert self.noter is not None
        return self.noter


class Stamper:
    """Where this thread's next stamp goes; nowhere for a thread that stands for no lane.

    `end` is that of its warp's lane, 0 where it has none, so that it needs no register of each
    thread; `next` is beyond every end in threads but a warp's first.
    """

    def __init__(self, plan: StampPlan, stamps: Stamps) -> None:
        self.plan, self.address = plan, stamps.address
        block, (width, _, _) = cute.arch.block_idx(), cute.arch.grid_dim()
        here = block[0] + width * block[1] == stamps.cta
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        end = Int32(0)
        for number, (_, first) in enumerate(plan.lanes):
            end = Int32(cutlass.select_(here & (warp == first), (number + 1) * plan.room, end))
        self.end = cute.arch.make_warp_uniform(end)
        elected = cute.arch.lane_idx() == 0
        start = self.end - plan.room + FIRST
        self.next = cute.make_rmem_tensor(1, Int32)
        self.next[0] = Int32(cutlass.select_(elected, start, BEYOND))
        self.clock = cute.make_rmem_tensor(
            1, Int32
        )  # of the last stamp, which is still to be stored
        self.clock[0] = Int32(0)

    def begin_wait(self, place: int | Int32, index: Any = 0, phase: Any = 0) -> None:
        """A wait begins."""
        self.note(2 * place)

    def end_wait(self, place: int | Int32) -> None:
        """A wait ends."""
        self.note(2 * place + 1)

    def note(self, code: int | Int32) -> None:
        """Note the clock. It is stored with the next stamp: nothing waits until it is read."""
        at = self.next[0]
        cute.arch.inline_ptx(
            "{ .reg .pred inside, before; .reg .b32 last; .reg .b64 place; sub.u32 last, {$r0}, 1; "
            "setp.lt.u32 inside, {$r0}, {$r1}; setp.lt.u32 before, last, {$r1}; "
            "mad.wide.u32 place, {$r0}, 8, {$r2}; @before st.global.b32 [place + -4], {$r4}; "
            "@inside st.global.b32 [place], {$r3}; }",
            read_only_args=[at, self.end, self.address, Int32(code), self.clock[0]],
        )
        self.next[0] = at + 1
        self.clock[0] = cute.arch.clock()

    def open(self) -> None:
        """The role begins."""
        self.note(self.plan.code("role"))
        self._store(self.next[0] - FIRST, self.clock[0], cute.arch.globaltimer_lo())

    def close(self) -> None:
        """The role ends: its last stamp, and how many there were."""
        ends = self.plan.code("role", ends=True)
        self.note(ends)
        following = self.next[0]
        self._store(following - 1, Int32(ends), self.clock[0])
        start = self.end - self.plan.room
        count = following - start - FIRST
        self._store(start + (following & BEYOND), count, cute.arch.globaltimer_lo())

    def _store(self, at: Int32, word: Int32, other: Int32) -> None:
        """A pair, where there is room."""
        cute.arch.inline_ptx(
            "{ .reg .pred inside; .reg .b64 place; setp.lt.u32 inside, {$r0}, {$r1}; "
            "mad.wide.u32 place, {$r0}, 8, {$r2}; @inside st.global.b32 [place], {$r3}; "
            "@inside st.global.b32 [place + 4], {$r4}; }",
            read_only_args=[at, self.end, self.address, word, other],
        )
