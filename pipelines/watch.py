"""A debug build in which a warp without work watches all others, reports a hang and traps.

    watched(kernel)      the kernel's debug build: its `host` takes (arguments, report, stream)

Each warp has two words in shared memory: at which wait it is, and since when (waits.py). It writes
them before and after every wait at a ring's mbarriers and at a named barrier. A warp that has ended
its role reads them all; once no warp of the CTA has moved for the time asked for, it copies the
words and the mbarriers to the report, which lies in memory of the host, and traps.

    words of a CTA       at, since of warp 0 | at, since of warp 1 | ... | a warp watches

The watcher is the first warp that ends its role: where one warp issues the copies, one of its
neighbours. It cannot be one more warp, since setmaxnreg wants whole warpgroups; where no role has a
number of registers, it is. If no warp has ended, nobody watches, and the report's first word stays
0.

Tables and roles are those of the kernel itself: only what surrounds its waits is added. What waits
by other means than rings and `self.barriers` counts as running.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutedsl_fa3.layouts import Buffer, SmemPlan

from .debug_build import DebugBuild, derived
from .kernel import WarpSpecialized
from .ring import WORD_BYTES
from .roles import WARP
from .waits import (
    ENDED,
    HEADER,
    REPORTED,
    RUNS,
    SLOT_HEADER,
    SLOTS,
    TICK_SHIFT,
    ReportPlan,
    wait_code,
)

POLL_NS = 2000
CONFIRMED = 64  # polls in a row without progress: a CTA that was suspended gets going again first
GRACE = 4  # a watcher that has reported stays for 1 / GRACE of the limit: its peers report too


@dataclass(frozen=True)
class Report:
    """Where the host reads what happened, and after how long without progress.

    Units: `address` of `ReportPlan.total` words of host memory, `claims` of one word of device
    memory, all of them zero; `limit` in ticks.
    """

    address: Int64
    claims: Int64
    limit: Int32


def watched(kernel: WarpSpecialized) -> Watched:
    """The debug build of a kernel.

    Its `host` takes a tuple of what the kernel's own takes before the stream, a `Report`, and the
    stream.

    Raises: ScheduleError for what is no WarpSpecialized kernel.
    """
    made = derived(Watched, kernel, "watched")
    made.residents = 1  # a share of the registers leaves none for the watch
    return made


class Watched(DebugBuild):
    """Mixed into a kernel's class by `watched`."""

    kind: ClassVar[str] = "watched"
    says: ClassVar[str] = "warps note their waits, one watches"
    noter: Watcher | None  # while the kernel is traced

    @property
    def report_plan(self) -> ReportPlan:
        """The words of a launch's report."""
        return ReportPlan.of(self.shipped)

    @property
    def adds_warp(self) -> bool:
        """Whether a warp of its own watches: not beside roles that move registers."""
        return all(role.registers is None for role in self.roles.values())

    @property
    def threads(self) -> int:
        """Threads of a CTA, with the warp that watches if it is one of its own."""
        return super().threads + (WARP if self.adds_warp else 0)

    @property
    def smem(self) -> SmemPlan:
        """The kernel's plan, and behind it the words."""
        plan, warps = super().smem, self.report_plan.warps
        words = Buffer("waits", (2 * warps + 1) * WORD_BYTES, align=2 * WORD_BYTES)
        return replace(plan, buffers=(*plan.buffers, words))

    def fake_extra(self) -> Report:
        """A stand-in for the report."""
        return Report(Int64(0), Int64(0), Int32(0))

    # Traced from here on.

    def begin(self, mbarriers: cute.Pointer, extra: Report) -> Watcher:
        """The words of this CTA: all warps note that they run before any may wait."""
        plan = self.smem
        words = mbarriers + (plan.offset("waits") - plan.offset("mbarriers"))
        return Watcher(self.report_plan, words, mbarriers, extra)

    @cute.jit
    def after_roles(self):
        """A warp of its own watches."""
        if cutlass.const_expr(self.adds_warp):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.report_plan.warps:
                self.noter.observe()

    def run_role(
        self,
        name: str,
        io: object,
        smem: SimpleNamespace,
        ports: SimpleNamespace,
        thread: Int32,
    ) -> None:
        """The role, then the note that this warp has ended; the first that has may watch."""
        super().run_role(name, io, smem, ports, thread)
        self.noter.note(ENDED)
        if not self.adds_warp:
            self.noter.observe_first()


class Watcher:
    """The words of this CTA, and what is done with them.

    `words` and `mbarriers` are their addresses in shared memory. Making it notes that this warp
    runs; what opens the rings orders that before anything else.
    """

    def __init__(
        self, plan: ReportPlan, words: cute.Pointer, mbarriers: cute.Pointer, report: Report
    ) -> None:
        self.plan, self.report = plan, report
        self.words = cute.recast_ptr(words, dtype=Int32)
        self.mbarriers = cute.recast_ptr(mbarriers, dtype=Int32)
        self.warp = cute.arch.warp_idx()
        self.taken = self.words + 2 * plan.warps
        self.mine = self.words + 2 * self.warp
        self._start()

    @cute.jit
    def _start(self):
        if self.warp < self.plan.warps:
            self.note(RUNS)
        if self.warp == 0:
            _write(self.taken, 0)

    def begin_wait(
        self, place: int | Int32, index: int | Int32 = 0, phase: int | Int32 = 0
    ) -> None:
        """This warp waits."""
        self.note(wait_code(place, index, phase))

    def end_wait(self, place: int | Int32) -> None:
        """It goes on."""
        self.note(RUNS)

    def note(self, at: int | Int32) -> None:
        """Say where this warp is from now on; all lanes that are there write the same."""
        _write(self.mine, at)
        _write(self.mine + 1, _now())

    @cute.jit
    def observe_first(self):
        """Watch, unless another warp does."""
        cute.arch.sync_warp()
        taken = Int32(1)
        if cute.arch.lane_idx() == 0:
            taken = cute.arch.atomic_exch(self.taken, Int32(1), sem="relaxed", scope="cta")
        if cute.arch.shuffle_sync(taken, 0) == 0:
            self.observe()

    @cute.jit
    def observe(self):
        """Look at all warps, one a lane, until all have ended or none has moved for too long."""
        lane = cute.arch.lane_idx()
        its = self.words + 2 * cutlass.min(lane, self.plan.warps - 1)
        _write_out(self._out(0), 1)
        quiet, going = Int32(0), Int32(1)
        while going != 0:
            _sleep(POLL_NS)
            at, since = _read(its), _read(its + 1)
            if cute.arch.vote_all_sync(at == ENDED):
                going = Int32(0)
            else:
                still = cute.arch.vote_all_sync(_now() - since > self.report.limit)
                quiet = Int32(cutlass.select_(still, quiet + 1, Int32(0)))
                if quiet == CONFIRMED:
                    self.report_and_trap(lane)
                    going = Int32(0)

    @cute.jit
    def report_and_trap(self, lane):
        """Copy the words and the mbarriers of this CTA to the host; then trap."""
        slot = Int32(0)
        if lane == 0:
            claims = cute.make_ptr(
                Int32, self.report.claims, cute.AddressSpace.gmem, assumed_align=WORD_BYTES
            )
            slot = cute.arch.atomic_add(claims, Int32(1), sem="relaxed", scope="gpu")
        slot = cute.arch.shuffle_sync(slot, 0)
        begun = _now()
        if slot < SLOTS:
            self._copy_out(self._out(HEADER + slot * self.plan.slot), lane, begun)
        while _now() - begun < self.report.limit // GRACE:
            _sleep(POLL_NS)
        cute.arch.inline_ptx("trap;")

    @cute.jit
    def _copy_out(self, out, lane, now):
        """Write one slot of the report, its flag last."""
        where = (*cute.arch.block_idx(), cute.arch.block_idx_in_cluster(), cute.arch.smid())
        for i, word in enumerate((*where, now, self.warp), 1):
            _write_out(out + i, word)
        words, mbarriers = 2 * self.plan.warps, self.plan.mbarriers
        for i in cutlass.range(lane, words, WARP, unroll=1):
            _write_out(out + SLOT_HEADER + i, _read(self.words + i))
        # Mbarriers are changed by a unit of their own, and no ordinary load is sure to see that.
        cute.arch.fence_view_async_shared()
        for i in cutlass.range(lane, mbarriers, WARP, unroll=1):
            _write_out(out + SLOT_HEADER + words + i, _read(self.mbarriers + i))
        cute.arch.fence_acq_rel_sys()
        cute.arch.sync_warp()
        if lane == 0:
            _write_out(out, REPORTED)
        cute.arch.fence_acq_rel_sys()

    def _out(self, index: int | Int32) -> cute.Pointer:
        """The address of a word of the report."""
        at = self.report.address + Int64(index) * WORD_BYTES
        return cute.make_ptr(Int32, at, cute.AddressSpace.gmem, assumed_align=WORD_BYTES)


def _now() -> Int32:
    """The GPU's clock, the same for all multiprocessors, in ticks."""
    return Int32(cute.arch.globaltimer() >> TICK_SHIFT)


def _sleep(nanoseconds: int) -> None:
    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(nanoseconds)])


def _read(address: cute.Pointer) -> Int32:
    """A word of shared memory as it is now."""
    return cute.arch.load(address, Int32, sem="relaxed", scope="cta", ss="cta")


def _write(address: cute.Pointer, word: int | Int32) -> None:
    """A word of shared memory, for all warps to see."""
    cute.arch.store(address, Int32(word), sem="relaxed", scope="cta", ss="cta")


def _write_out(address: cute.Pointer, word: int | Int32) -> None:
    """A word of host memory."""
    cute.arch.store(address, Int32(word), sem="relaxed", scope="sys")
