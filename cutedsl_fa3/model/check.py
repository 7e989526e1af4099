"""`check_pipeline`: whether the roles of a kernel can hang, race or lose a tile, and how."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from . import host, program, reader, warp
from .analyse import Reads, analyse
from .events import Event
from .launch import Launch, WarpState
from .names import Names
from .search import Run
from .shapes import size
from .state import Finding, Process
from .works import Work, of_gemm, of_plan

WARP = 32


@dataclass
class Outcome:
    """One launch and CTA, run through: its faults, what its reads found, how much there was.

    `fills`: how often each tile was copied into shared memory.
    """

    what: str
    findings: list[Finding]
    reads: Reads
    steps: int
    fills: dict[str, int]
    programs: tuple[tuple[Any, ...], ...] = field(repr=False, default=())
    guesses: bool = False


@dataclass
class Verdict:
    """What was checked of a kernel, and what was found."""

    name: str
    outcomes: list[Outcome]

    @property
    def findings(self) -> list[Finding]:
        """All faults, those of the smallest work first."""
        return [finding for outcome in self.outcomes for finding in outcome.findings]

    @property
    def ok(self) -> bool:
        """Whether no interleaving of what was checked goes wrong."""
        return not self.findings

    @property
    def copied(self) -> list[tuple[str, str]]:
        """How often the tile of a ring was copied, over all pieces of work."""
        names = dict.fromkeys(name for outcome in self.outcomes for name in outcome.fills)
        return [
            (name, ", ".join(map(str, sorted({o.fills.get(name, 0) for o in self.outcomes}))))
            for name in names
        ]

    def __str__(self) -> str:
        steps = sum(outcome.steps for outcome in self.outcomes)
        head = f"{self.name}: {len(self.outcomes)} pieces of work, {steps} steps"
        if self.ok:
            copied = "".join(f"\n  {name!r} copied {times} times" for name, times in self.copied)
            return f"{head}; no interleaving hangs, races or loses a tile{copied}"
        lines = [f"{head}; {len(self.findings)} faults"]
        told: set[tuple[str, str]] = set()
        for outcome in self.outcomes:
            for finding in outcome.findings:
                if (finding.kind, finding.text) in told or len(told) >= 6:
                    continue
                told.add((finding.kind, finding.text))
                lines += ["", f"{outcome.what}", str(finding)]
        return "\n".join(lines)


def check_pipeline(kernel: Any, works: Iterable[Work | Sequence[Any]] | None = None) -> Verdict:
    """Run the roles of a kernel on each piece of work and look at all interleavings.

    `kernel`: a plan, or a kernel as `compile_kernel` takes it. `works`: for each piece of work the
    arguments of the compiled kernel without the stream: tensors on the CPU (on torch's meta device
    where their values do not matter), numbers, None. Plans and GEMMs have works of their own.

    Raises: NotCovered; what tracing the kernel raises.
    """
    kernel, works = given(kernel, works)
    functions = reader.read(kernel)
    outcomes = []
    for work in works:
        outcomes += run_work(kernel, functions, work)
    return Verdict(getattr(kernel, "name", type(kernel).__name__), outcomes)


def given(kernel: Any, works: Iterable[Any] | None) -> tuple[Any, list[Work]]:
    """The kernel of a plan, and the works as such."""
    from cutedsl_fa3.kernels.gemm import Gemm
    from cutedsl_fa3.plans import Plan

    if isinstance(kernel, Plan):
        works = of_plan(kernel) if works is None else works
        kernel = kernel.kernel
    elif works is None and isinstance(kernel, Gemm):
        works = of_gemm(kernel)
    if works is None:
        raise TypeError(
            f"works = None: for {type(kernel).__name__} give the arguments of its launches, such "
            "as [(tensor, tensor, number)]"
        )
    return kernel, [
        work if isinstance(work, Work) else Work(f"work {number}", work)
        for number, work in enumerate(works)
    ]


def run_work(kernel: Any, functions: dict[str, Any], work: Work) -> list[Outcome]:
    """One outcome for each cluster of CTAs of each launch that hands anything over.

    A launch without barriers comes before the others and writes what they read, so all of its CTAs
    run.
    """
    outcomes = []
    for launch in host.launches(functions, work.args):
        hands_over = program.hands_over(launch.function)
        chosen = clusters(launch)[: work.ctas if hands_over else None]
        for first in chosen:
            outcome = run_cluster(kernel, launch, first)
            if not hands_over and not outcome.findings:
                continue
            outcome.what = f"{work.what}, CTA {first}" if len(chosen) > 1 else work.what
            outcomes.append(outcome)
            if outcome.guesses:
                other = run_cluster(kernel, launch, first, taken=True)
                other.what = f"{outcome.what}, data-dependent branches taken"
                outcomes.append(other)
    return outcomes


def clusters(launch: Launch) -> list[tuple[int, int, int]]:
    """The first CTA of each cluster."""
    steps = [range(0, n, c) for n, c in zip(launch.grid, launch.cluster, strict=True)]
    return [(x, y, z) for z in steps[2] for y in steps[1] for x in steps[0]]


def run_cluster(
    kernel: Any, launch: Launch, first: tuple[int, int, int], taken: bool = False
) -> Outcome:
    """All warps of one cluster."""
    run, states = prepared(Run, kernel, launch, first, taken)
    run.run()
    reads = analyse(run)
    programs = tuple(tuple(process.taken) for process in run.processes)
    guesses = any(state.guesses for state in states)
    return Outcome("", run.findings, reads, len(run.past), fills(run), programs, guesses)


AnyRun = TypeVar("AnyRun", bound=Run)


def prepared(
    kind: type[AnyRun],
    kernel: Any,
    launch: Launch,
    first: tuple[int, int, int],
    taken: bool = False,
) -> tuple[AnyRun, list[WarpState]]:
    """All warps of one cluster, about to run."""
    names = Names(kernel, size(launch.cluster))
    processes, states = [], []
    width, height, _ = launch.cluster
    for rank in range(size(launch.cluster)):
        at = (rank % width, rank // width % height, rank // width // height)
        cta = tuple(f + a for f, a in zip(first, at, strict=True))
        for number in range(-(-size(launch.block) // WARP)):
            state = WarpState(launch, cta, number, rank, taken)
            states.append(state)
            processes.append(Process(rank, number, warp.run(launch.function, state)))
    return kind(processes, names, size(launch.block)), states


def replay(
    kernel: Any, programs: Sequence[Sequence[Event]], warps: Sequence[int], threads: int
) -> Outcome:
    """The verdict on given steps of given warps of one CTA, as `Outcome.programs` has them."""
    processes = [
        Process(0, number, iter(program)) for number, program in zip(warps, programs, strict=True)
    ]
    run = Run(processes, Names(kernel), threads)
    run.run()
    reads = analyse(run)
    return Outcome("", run.findings, reads, len(run.past), fills(run), tuple(map(tuple, programs)))


def fills(run: Run) -> dict[str, int]:
    """How often each tile of a ring was copied, by its name in the tables."""
    found: dict[str, int] = {}
    for access in run.accesses:
        if access.kind == "copy":
            for name in run.names.tiles(access.region):
                found[name] = found.get(name, 0) + 1
    return found
