"""A debug build in which a warp without work watches all others, reports a hang and traps.

    watched(kernel)      the kernel's debug build: its `host` takes (arguments, report, stream)

Each warp has two words in shared memory: at which wait it is, and since when. It writes them before
and after every wait at a ring's mbarriers and at a named barrier. A warp that has ended its role
reads them all; once no warp of the CTA has moved for the time that was asked, it copies the words
and the mbarriers to the report, which lies in memory of the host, and traps.

    words   at, since of warp 0 | at, since of warp 1 | ... | taken
    at      0: runs; -1: has ended; else (1 + place) << 16 | stage << 1 | phase
    place   2 * ring: waits for `empty`, 2 * ring + 1: for `full`, then the named barriers by number

The watcher comes from the role with the fewest registers, where one warp issues the copies and the
others have nothing to do: the first that ends. It may not be taken from elsewhere, since setmaxnreg
wants whole warpgroups. Where no role has a number of registers, one more warp is launched instead.
Tables and roles are those of the kernel itself: only what surrounds its waits is added.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.pipeline import NamedBarrier, PipelineAsync

from cutedsl_fa3.layouts import Buffer, SmemPlan

from .barriers import Barriers
from .kernel import WarpSpecialized
from .ring import WORD_BYTES
from .roles import WARP
from .roles import threads as threads_of
from .schedule import ScheduleError

RUNS, ENDED = 0, -1
TICK_SHIFT = 10  # since: ticks of 1,024 ns, so that 32 bits hold an hour
POLL_NS = 2000
CONFIRMED = 64  # polls in a row without progress: a CTA that was suspended gets going again first
GRACE = 4  # a watcher that has reported waits for 1 / GRACE of the limit: its peers report too

HEADER = 4  # words of a report before its first slot; the first says that somebody watches
SLOTS = 256  # CTAs that can report: more than a GPU has multiprocessors
SLOT_HEADER = 8  # flag, CTA x, y, z, rank in its cluster, multiprocessor, now, watching warp
REPORTED = 0x48414E47


@dataclass(frozen=True)
class Report:
    """Where the host reads what happened, and when something has.

    Units: `address` of `Watched.report_words` words of host memory, `claims` of one word of device
    memory, both zero; `limit` in ticks of 1,024 ns.
    """

    address: Int64
    claims: Int64
    limit: Int32


def ticks(seconds: float) -> int:
    """A time in the unit of `since`."""
    return max(1, round(seconds * 1e9) >> TICK_SHIFT)


def watched(kernel: WarpSpecialized) -> Watched:
    """The debug build of a kernel: the same tables, watched.

    `host` takes (arguments, report, stream): a tuple of those of the kernel's own `host` but for the
    stream, which it must take last; a `Report`; the stream.

    Raises: ScheduleError for what is no WarpSpecialized kernel.
    """
    if not isinstance(kernel, WarpSpecialized):
        raise ScheduleError(
            f"kernel = {kernel!r}: only a WarpSpecialized kernel can be watched, whose waits are "
            "known by its tables"
        )
    if isinstance(kernel, Watched):
        return kernel
    made = object.__new__(_class(type(kernel)))
    made.__dict__.update(vars(kernel))
    made.own_barriers = kernel.barriers
    made.progress = None
    return made


@functools.cache
def _class(of: type) -> type:
    return type(f"Watched{of.__name__}", (Watched, of), {"of": of, "__module__": __name__})


class Watched(WarpSpecialized):
    """Mixed into a kernel's class by `watched`."""

    of: ClassVar[type]
    own_barriers: Barriers
    progress: Progress | None

    @property
    def barriers(self) -> Barriers:
        """The kernel's named barriers, which note their waits while it is traced."""
        if self.progress is None:
            return self.own_barriers
        return WatchedBarriers(self.own_barriers.table, self.progress, 2 * len(self.rings))

    @property
    def name(self) -> str:
        return f"{self.of.name}_watched"

    @property
    def key_text(self) -> str:
        """The kernel's own, and that this is another build of it."""
        return f"{super().key_text}\ndebug build: warps note their waits, one watches"

    @property
    def watcher(self) -> str | None:
        """The role whose first warp to end watches the others; None for a warp of its own."""
        sizes = {n: r.registers for n, r in self.roles.items() if r.registers is not None}
        return min(sizes, key=lambda name: sizes[name]) if sizes else None

    @property
    def warps(self) -> int:
        """Warps of the kernel's roles, which are watched."""
        return threads_of(self.roles) // WARP

    @property
    def threads(self) -> int:
        """Threads of a CTA, with the warp that watches where no role can spare one."""
        return super().threads + (WARP if self.watcher is None else 0)

    @property
    def smem(self) -> SmemPlan:
        """The kernel's plan, and behind it the words."""
        plan = super().smem
        words = Buffer("waits", (2 * self.warps + 1) * WORD_BYTES, align=2 * WORD_BYTES)
        return replace(plan, buffers=(*plan.buffers, words))

    @property
    def mbarrier_words(self) -> int:
        """Words that the rings' mbarriers take in shared memory and in a report."""
        return sum(ring.bytes for ring in self.rings.values()) // WORD_BYTES

    @property
    def slot_words(self) -> int:
        """Words of one CTA's report."""
        return SLOT_HEADER + 2 * self.warps + self.mbarrier_words

    @property
    def report_words(self) -> int:
        """Words of host memory that a launch needs."""
        return HEADER + SLOTS * self.slot_words

    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `host`."""
        *arguments, stream = super().fake_args()
        return tuple(arguments), Report(Int64(0), Int64(0), Int32(0)), stream

    # Traced from here on.

    @cute.jit
    def host(self, arguments, report: Report, stream):
        """The kernel's own host function, whose launch is watched."""
        self._launch_own(arguments, report, stream)

    def _launch_own(self, arguments: tuple, report: Report, stream: object) -> None:
        self.report, self.launched = report, False
        self.of.host(self, *arguments, stream)
        if not self.launched:
            raise ScheduleError(f"{self.of.__name__}.host launches nothing by self.launch")

    def staged(self, io: object) -> object:
        """What is launched: the watched kernel, with the report as a second argument."""
        self.launched = True
        return self.watched_kernel(io, self.report)

    @cute.kernel
    def watched_kernel(self, io, report: Report):
        """As `kernel`, where all warps note that they run before any may wait."""
        smem, mbarriers = self.open_storage()
        self.begin(mbarriers)
        if cutlass.const_expr(bool(self.accumulators)):
            self.allocate_tmem(smem)
        ends = self.open_rings(mbarriers)
        smem.report = report
        self.run_roles(io, smem, ends)
        self.end(smem, mbarriers)

    def begin(self, mbarriers: cute.Pointer) -> None:
        """Note that this warp runs."""
        plan = self.smem
        words = mbarriers + (plan.offset("waits") - plan.offset("mbarriers"))
        words = cute.recast_ptr(words, dtype=Int32)
        self.progress = Progress(words, cute.arch.warp_idx())
        self.mbarriers = cute.recast_ptr(mbarriers, dtype=Int32)
        self.progress.note(RUNS)
        _write(words + 2 * self.warps, 0)  # by all: what opens the rings orders it

    @cute.jit
    def end(self, smem, mbarriers):
        """The warp of its own, where there is one, watches."""
        if cutlass.const_expr(self.watcher is None):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.warps:
                self.observe(smem.report)
        self.progress = None

    def participants(self, name: str, pipeline: PipelineAsync) -> tuple:
        """The ends of a ring, which note their waits."""
        ring = list(self.rings).index(name)
        noted = replace(
            pipeline,
            sync_object_empty=WatchedMbarriers(pipeline.sync_object_empty, self.progress, 2 * ring),
            sync_object_full=WatchedMbarriers(
                pipeline.sync_object_full, self.progress, 2 * ring + 1
            ),
        )
        return noted.make_participants()

    def run_role(
        self,
        name: str,
        io: object,
        smem: SimpleNamespace,
        ports: SimpleNamespace,
        thread: Int32,
    ) -> None:
        """The role, then the note that this warp has ended; the first of the watcher's watches."""
        super().run_role(name, io, smem, ports, thread)
        self.progress.note(ENDED)
        if name == self.watcher:
            self.observe_first(smem.report)

    @cute.jit
    def observe_first(self, report):
        """Watch, unless another warp does."""
        cute.arch.sync_warp()
        taken = Int32(1)
        if cute.arch.lane_idx() == 0:
            taken = cute.arch.atomic_exch(
                self.progress.words + 2 * self.warps, Int32(1), sem="relaxed", scope="cta"
            )
        if cute.arch.shuffle_sync(taken, 0) == 0:
            self.observe(report)

    @cute.jit
    def observe(self, report):
        """Look at all warps, one a lane, until all have ended or none has moved for too long."""
        lane = cute.arch.lane_idx()
        mine = self.progress.words + 2 * cutlass.min(lane, self.warps - 1)
        _write_out(_word(report.address, 0), 1)
        quiet, going = Int32(0), Int32(1)
        while going != 0:
            _sleep(POLL_NS)
            at, since = _read(mine), _read(mine + 1)
            if cute.arch.vote_all_sync(at == ENDED):
                going = Int32(0)
            else:
                still = cute.arch.vote_all_sync(_now() - since > report.limit)
                quiet = Int32(cutlass.select_(still, quiet + 1, Int32(0)))
                if quiet == CONFIRMED:
                    self.write_report(report, lane)
                    going = Int32(0)

    @cute.jit
    def write_report(self, report, lane):
        """Copy the words and the mbarriers of this CTA to the host; then trap."""
        slot = Int32(0)
        if lane == 0:
            claims = cute.make_ptr(Int32, report.claims, cute.AddressSpace.gmem, assumed_align=4)
            slot = cute.arch.atomic_add(claims, Int32(1), sem="relaxed", scope="gpu")
        slot = cute.arch.shuffle_sync(slot, 0)
        now = _now()
        if slot < SLOTS:
            out = _word(report.address, HEADER + slot * self.slot_words)
            warp = cute.arch.warp_idx()
            about = (*cute.arch.block_idx(), cute.arch.block_idx_in_cluster(), cute.arch.smid())
            for i, word in enumerate((*about, now, warp), 1):
                _write_out(out + i, word)
            for i in cutlass.range(lane, 2 * self.warps, WARP, unroll=1):
                _write_out(out + SLOT_HEADER + i, _read(self.progress.words + i))
            for i in cutlass.range(lane, self.mbarrier_words, WARP, unroll=1):
                _write_out(out + SLOT_HEADER + 2 * self.warps + i, _read(self.mbarriers + i))
            cute.arch.fence_acq_rel_sys()
            cute.arch.sync_warp()
            if lane == 0:
                _write_out(out, REPORTED)
            cute.arch.fence_acq_rel_sys()
        while _now() - now < report.limit // GRACE:
            _sleep(POLL_NS)
        cute.arch.inline_ptx("trap;")


class Progress:
    """Where this warp notes its waits."""

    def __init__(self, words: cute.Pointer, warp: Int32) -> None:
        self.words = words
        self.mine = words + 2 * warp

    def note(self, at: int | Int32) -> None:
        """Say where this warp is, from now on; all lanes that are there write the same."""
        _write(self.mine, at)
        _write(self.mine + 1, _now())


def code(place: int | Int32, stage: int | Int32 = 0, phase: int | Int32 = 0) -> int | Int32:
    """The word of a wait."""
    return (1 + place) * 65536 + stage * 2 + phase


class WatchedMbarriers:
    """A row of a ring's mbarriers, where every wait is noted."""

    def __init__(self, mbarriers: Any, progress: Progress, place: int) -> None:
        self.mbarriers, self.progress, self.place = mbarriers, progress, place

    def wait(self, index: Int32, phase: Int32, **where: Any) -> None:
        """Note the wait, wait, note that it is over."""
        self.progress.note(code(self.place, index, phase))
        self.mbarriers.wait(index, phase, **where)
        self.progress.note(RUNS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mbarriers, name)


@dataclass(frozen=True)
class WatchedBarrier(NamedBarrier):
    """A named barrier where every wait is noted."""

    progress: Progress
    place: int | Int32

    def wait_unaligned(self, **where: Any) -> None:
        """Note the wait, wait, note that it is over."""
        self.progress.note(code(self.place))
        super().wait_unaligned(**where)
        self.progress.note(RUNS)

    def arrive_and_wait(self, **where: Any) -> None:
        """Note the wait, wait, note that it is over."""
        self.progress.note(code(self.place))
        super().arrive_and_wait(**where)
        self.progress.note(RUNS)


class WatchedBarriers(Barriers):
    """The named barriers of a kernel, where every wait is noted; their places begin at `first`."""

    def __init__(self, table: Mapping[str, Any], progress: Progress, first: int) -> None:
        super().__init__(table)
        object.__setattr__(self, "progress", progress)
        object.__setattr__(self, "first", first)

    def __getitem__(self, key: tuple[str, int | Int32] | str) -> NamedBarrier:
        found = super().__getitem__(key)
        number = found.barrier_id
        return WatchedBarrier(number, found.num_threads, self.progress, self.first + number)


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


def _word(address: Int64, index: int | Int32) -> cute.Pointer:
    """The address of a word of the report."""
    at = address + Int64(index) * WORD_BYTES
    return cute.make_ptr(Int32, at, cute.AddressSpace.gmem, assumed_align=WORD_BYTES)


def _write_out(address: cute.Pointer, word: int | Int32) -> None:
    """A word of host memory."""
    cute.arch.store(address, Int32(word), sem="relaxed", scope="sys")
