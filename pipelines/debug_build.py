"""Another build of a kernel with the same tables and roles, where something notes their waits.

    derived(Watched, kernel, "watched")     watch.py: who waits, for one who watches
    derived(Stamped, kernel, "stamped")     stamp.py: when, for a timeline

The kernel itself is not touched. Its class gets a subclass, in which a `noter` is told of every
wait at a ring's mbarriers and at a named barrier:

    noter.begin_wait(place, index, phase)       place: 2 * ring: waits for `empty`, 2 * ring + 1:
    noter.end_wait(place)                       for `full`, then the named barriers by number

The build's `host` takes a tuple of what the kernel's own takes before the stream, one argument
more, and the stream.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import NamedBarrier, PipelineAsync

from .barriers import Barriers
from .kernel import WarpSpecialized
from .schedule import ScheduleError

Build = TypeVar("Build", bound="DebugBuild")


class Noter(Protocol):
    """What is told of waits."""

    def begin_wait(
        self, place: int | Int32, index: int | Int32 = 0, phase: int | Int32 = 0
    ) -> None: ...

    def end_wait(self, place: int | Int32) -> None: ...


def derived(mixin: type[Build], kernel: WarpSpecialized, done: str) -> Build:
    """The build of a kernel by this class; `done` is what becomes of it, for the error.

    Raises: ScheduleError for what is no WarpSpecialized kernel.
    """
    if not isinstance(kernel, WarpSpecialized):
        raise ScheduleError(
            f"kernel = {kernel!r}: only a WarpSpecialized kernel can be {done}, because its waits "
            "are known by its tables"
        )
    if isinstance(kernel, mixin):
        return kernel
    made = object.__new__(_class(mixin, type(kernel)))
    made.__dict__.update(vars(kernel))
    made.shipped, made.noter = kernel, None
    return made


@functools.cache
def _class(mixin: type, of: type) -> Any:
    name = f"{mixin.__name__}{of.__name__}"
    return type(name, (mixin, of), {"_of": of, "__module__": mixin.__module__})


class DebugBuild(WarpSpecialized):
    """Mixed into a kernel's class by `derived`.

    `kind` ends the build's name, `says` is what its key text says besides.
    """

    kind: ClassVar[str]
    says: ClassVar[str]
    _of: ClassVar[type]
    shipped: WarpSpecialized
    noter: Any  # while the kernel is traced

    @property
    def barriers(self) -> Barriers:
        """The kernel's named barriers, whose waits are noted while it is traced."""
        found = self.shipped.barriers
        if self.noter is None:
            return found
        return NotedBarriers(found.table, self.noter, 2 * len(self.rings))

    @property
    def name(self) -> str:
        """The kernel's own, and which build this is."""
        return f"{self.shipped.name}_{self.kind}"

    @property
    def key_text(self) -> str:
        """The kernel's own, and that this is another build of it."""
        return f"{self.shipped.key_text}\ndebug build: {self.says}"

    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `host`."""
        *arguments, stream = self.shipped.fake_args()
        return tuple(arguments), self.fake_extra(), stream

    def fake_extra(self) -> Any:
        """A stand-in for the argument that this build has besides."""
        raise NotImplementedError

    # Traced from here on.

    @cute.jit
    def host(self, arguments, extra, stream):
        """The kernel's own host function, which launches this build."""
        self._launch_own(arguments, extra, stream)

    def _launch_own(self, arguments: tuple, extra: Any, stream: object) -> None:
        self._extra, self._launched = extra, False
        self._of.host(self, *arguments, stream)
        if not self._launched:
            raise ScheduleError(
                f"{self._of.__name__}.host: its kernel is not launched by self.launch(), so its "
                f"waits cannot be noted"
            )

    def staged(self, io: object) -> object:
        """What is launched: this build, with its own argument as a second one."""
        self._launched = True
        return self.debug_kernel(io, self._extra)

    @cute.kernel
    def debug_kernel(self, io, extra):
        """As `kernel`, with a noter before any warp may wait."""
        smem, mbarriers = self.open_storage()
        self._begin(mbarriers, extra)
        if cutlass.const_expr(bool(self.accumulators)):
            self.allocate_tmem(smem)
        ends = self.open_rings(mbarriers)
        self.run_roles(io, smem, ends)
        self.after_roles()
        self._end()

    def _begin(self, mbarriers: cute.Pointer, extra: Any) -> None:
        self.noter = self.begin(mbarriers, extra)

    def begin(self, mbarriers: cute.Pointer, extra: Any) -> Noter:
        """The noter of this CTA."""
        raise NotImplementedError

    def after_roles(self) -> None:
        """What warps do that have ended their roles."""

    def _end(self) -> None:
        self.noter = None

    def participants(self, name: str, pipeline: PipelineAsync) -> tuple:
        """The ends of a ring, whose waits are noted."""
        place = 2 * list(self.rings).index(name)
        empty, full = pipeline.sync_object_empty, pipeline.sync_object_full
        noted = replace(
            pipeline,
            sync_object_empty=NotedMbarriers(empty, self.noter, place),
            sync_object_full=NotedMbarriers(full, self.noter, place + 1),
        )
        return noted.make_participants()


class NotedMbarriers:
    """A row of a ring's mbarriers, where every wait is noted."""

    def __init__(self, mbarriers: Any, noter: Noter, place: int) -> None:
        self.mbarriers, self.noter, self.place = mbarriers, noter, place

    def wait(self, index: Int32, phase: Int32, **where: Any) -> None:
        """Note the wait, wait, note that it is over."""
        self.noter.begin_wait(self.place, index, phase)
        self.mbarriers.wait(index, phase, **where)
        self.noter.end_wait(self.place)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mbarriers, name)


@dataclass(frozen=True)
class NotedBarrier(NamedBarrier):
    """A named barrier where every wait is noted."""

    noter: Any
    place: int | Int32

    def wait_unaligned(self, **where: Any) -> None:
        """Note the wait, wait, note that it is over."""
        self.noter.begin_wait(self.place)
        super().wait_unaligned(**where)
        self.noter.end_wait(self.place)

    def arrive_and_wait(self, **where: Any) -> None:
        """Note the wait, wait, note that it is over."""
        self.noter.begin_wait(self.place)
        super().arrive_and_wait(**where)
        self.noter.end_wait(self.place)


class NotedBarriers(Barriers):
    """The named barriers of a kernel, where every wait is noted; their places begin at `first`."""

    def __init__(self, table: Mapping[str, Any], noter: Noter, first: int) -> None:
        super().__init__(table)
        object.__setattr__(self, "noter", noter)
        object.__setattr__(self, "first", first)

    def __getitem__(self, key: tuple[str, int | Int32] | str) -> NamedBarrier:
        found = super().__getitem__(key)
        number = found.barrier_id
        return NotedBarrier(number, found.num_threads, self.noter, self.first + number)
