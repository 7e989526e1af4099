"""A catalogue of planted faults: small kernels that are wrong in one place each.

    for fault in FAULTS: check_pipeline(fault.kernel(), fault.works()); fault.arguments("cuda")

`said`: what the model must say, as regular expressions. `hardware`: what becomes of it on a GPU:

    hangs      always, or CUDA reports an error
    corrupts   always, with `slow()`: the same kernel with a delay where its race is
    races      any of hanging, wrong and right, as it happens
    benign     the result is right: the compiler repairs it, or nothing is lost on this hardware
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import faulty_ends as ends
import faulty_shipped as shipped
import faulty_steps as steps
import torch
from drawing import drawing
from products import COLS, DEPTH, GROUPS, ROWS

from cutedsl_fa3 import masks
from cutedsl_fa3.kernels.sm90.forward import ForwardSm90
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.model.works import Work, of_gemm, of_plan
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.variant import Variant

DELAY = 20_000  # nanoseconds: a hundred times what a tile takes
WORKS, K_TILES, STAGES = 3, 4, 2


Hardware = Literal["hangs", "corrupts", "races", "benign"]


@dataclass(frozen=True)
class Fault:
    """One planted fault: the kernel, what the model says of it, what hardware makes of it.

    `made`: the kernel, with delays of so many nanoseconds where it has a place for them. `works`:
    what the model looks at. `arguments`: of a launch on a device, without the stream.
    """

    name: str
    made: Callable[[int], Any]
    hardware: Hardware
    said: tuple[str, ...]
    works: Callable[[], list[Work]]
    arguments: Callable[[str], tuple]

    def kernel(self) -> Any:
        """The kernel as it is."""
        return self.made(0)

    def slow(self) -> Any:
        """The kernel with delays where its race is."""
        return self.made(DELAY)


def arguments(device: str, works: int = WORKS, k_tiles: int = K_TILES) -> tuple:
    """a, b, c and the number of work tiles of `Products`."""
    rows, depth = GROUPS * ROWS * works, DEPTH * k_tiles
    return (*_matrices(device, (rows, depth), (COLS, depth), (rows, COLS)), works)


def _matrices(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    made = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    if device != "meta":
        generator = torch.Generator(device).manual_seed(0)
        for matrix in made:
            matrix.normal_(generator=generator)
    return made


def products_works(stages: int = STAGES) -> list[Work]:
    """One to three work tiles of stages + 2 k tiles, and three of one."""
    works = [Work(f"{WORKS} work tiles of 1 k tile", arguments("meta", WORKS, 1))]
    for number in range(1, WORKS + 1):
        given = arguments("meta", number, stages + 2)
        works.append(Work(f"{number} work tiles of {stages + 2} k tiles", given))
    return works


def in_products(
    name: str, made: Callable[..., Any], hardware: Hardware, *said: str, k_tiles: int = K_TILES
) -> Fault:
    """A fault in the small kernel, launched with so many k tiles."""
    return Fault(
        name,
        lambda delay: made(STAGES, delay),
        hardware,
        said,
        products_works,
        lambda device: arguments(device, WORKS, k_tiles),
    )


CLUSTER = Schedule(128, 128, stages=2, consumers=2, overlap="none", cluster=(2, 1))


def in_gemm(name: str, made: type[GemmSm90], hardware: Hardware, *said: str) -> Fault:
    """A fault in the GEMM of a cluster."""

    def given(device: str) -> tuple:
        return tuple(_matrices(device, (256, 512), (128, 512), (256, 128)))

    return Fault(
        name,
        lambda delay: made(CLUSTER),
        hardware,
        said,
        lambda: list(of_gemm(GemmSm90(CLUSTER))),
        given,
    )


ROOMY = Schedule(128, 128, 2, 2, "intra", persistent=True)  # with room for O beside Q at 128
TURNS = Schedule(128, 64, 2, 2, "pingpong")


def plan(
    by_tile: bool = False, schedule: Schedule | None = None, dims: tuple[int, int] = (128, 128)
) -> Plan:
    """A forward of two warpgroups, by runs or by tiles; causal where a schedule is given."""
    documents = torch.arange(64) // 8

    def packed(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (k <= q)

    if schedule is not None:
        return Plan(Variant(mask=masks.causal), Problem("bf16", *dims), schedule)
    mask = packed if by_tile else None
    return Plan.default(Variant(mask=mask), Problem("bf16", *dims))


def delayed(kernel: ForwardSm90, delay: int) -> ForwardSm90:
    """The kernel, with this delay where it has a place for one."""
    if hasattr(kernel, "delay"):
        kernel.delay = delay
    return kernel


def in_forward(
    name: str,
    made: type[ForwardSm90],
    hardware: Hardware,
    *said: str,
    by_tile: bool = False,
    schedule: Schedule | None = None,
    dims: tuple[int, int] = (128, 128),
) -> Fault:
    """A fault in the forward; one persistent CTA computes all work tiles."""
    of_all = by_tile, schedule, dims

    def given(device: str) -> tuple:
        rows = 1152  # nine key tiles: the last V lies where O goes, if it goes there
        d, dv = dims
        q, k, v, o = _matrices(device, *[(1, rows, 1, dim) for dim in (d, d, dv, dv)])
        lse = torch.empty(1, 1, rows, device=device)
        drawn_from = drawing(plan(*of_all).schedule, device, ctas=1)
        if not by_tile:
            return q, k, v, o, lse, None, None, None, *drawn_from, 0.1
        documents = torch.zeros(rows, dtype=torch.int64, device=device)  # one of them
        shape = plan(*of_all).table_shape(1, 1, rows, rows)
        table = torch.zeros(shape, dtype=torch.int32, device=device)
        return q, k, v, o, lse, (documents,), table, None, *drawn_from, 0.1

    return Fault(
        name,
        lambda delay: delayed(made(plan(*of_all)), delay),
        hardware,
        said,
        lambda: list(of_plan(plan(*of_all), None if schedule is None else 1)),
        given,
    )


FAULTS: tuple[Fault, ...] = (
    in_products(
        "no release",
        steps.ReleasesNothing,
        "hangs",
        r"producer warp 0: waits on ring 'b' empty, stage 0, phase 0 \(0 of 8 arrivals",
        "the cycle: consumer -> producer -> consumer",
    ),
    in_products(
        "a warp releases nothing",
        steps.OneWarpReleasesNothing,
        "hangs",
        r"waits on ring 'b' empty, stage 0, phase 0 \(7 of 8 arrivals from consumer\)",
    ),
    in_products(
        "two releases", steps.ReleasesTwice, "races", "phase may end early: ring 'b' empty, stage 0"
    ),
    in_products(
        "a count in threads",
        steps.counted_in(steps.InThreads),
        "hangs",
        "ring 'a' empty, stage 0 is initialised for 256 arrivals, its 8 consumer warps bring 8",
    ),
    in_products(
        "a count of one too few",
        steps.counted_in(steps.OneTooFew),
        "races",
        "phase may end early: ring 'a' empty, stage 0: an arrival by consumer warp 7",
        "overwritten before read: tile 'a' stage 0",
        k_tiles=64,  # one arrival is left over each time: in the end they make a phase
    ),
    in_products(
        "too many bytes",
        steps.counted_in(steps.TooManyBytes),
        "hangs",
        "bytes differ: ring 'b' full, stage 0: 9216 B are announced, and 8192 B are copied",
        r"waits on ring 'a' full, stage 0, phase 0 \(17408 B announced, 16384 B copied\)",
    ),
    in_products(
        "too few bytes",
        steps.counted_in(steps.TooFewBytes),
        "races",
        "bytes differ: ring 'a' full, stage 0: 8192 B are announced, and 16384 B are copied",
    ),
    in_products(
        "two announcements",
        ends.AnnouncesTwice,
        "races",
        "too many arrivals: ring 'b' full, stage 0, phase 0: producer warp 0 brings 1 arrivals "
        "where 0 of 1",
    ),
    in_products(
        "two copies",
        ends.CopiesTwice,
        "races",
        "bytes differ: ring 'b' full, stage 0: 8192 B are announced, and 16384 B are copied",
    ),
    in_products(
        "copies that signal each other's ring",
        ends.SignalsTheOtherRing,
        "hangs",
        "bytes differ: ring 'a' full, stage 0: 16384 B are announced, and 8192 B are copied",
    ),
    in_products(
        "all warps copy",
        ends.AllWarpsCopy,
        "races",
        "two writers: tile 'a' stage 0: .* by producer warp 0 and .* by producer warp 1",
    ),
    # Order, phases and stages.
    in_products(
        "release before the read",
        steps.ReleasesBeforeItHasRead,
        "corrupts",
        "overwritten before read: tile 'a' stage 0: a TMA copy into it by producer warp 0 may "
        "come before a WGMMA that reads it by consumer warp 0",
    ),
    in_products(
        "release before wait_group",
        steps.ReleasesWhileWgmmaReads,
        "races",
        "overwritten before read: tile 'b' stage 0: a TMA copy .* before a WGMMA that reads it",
    ),
    in_products(
        "no wait_group",
        steps.WaitsForNoGroup,
        "races",
        r"registers in use: consumer warp \d reads the accumulator of a WGMMA that still runs",
        "overwritten before read: tile 'a' stage 0",
    ),
    in_products(
        "no fence",
        steps.NoFence,
        "benign",
        "fence missing: consumer warp 0 multiplies tile 'a' stage 0",
    ),
    in_products(
        "the last tile without a wait",
        steps.LastTileWithoutAWait,
        "races",
        "read before full: tile 'b' stage 0: a WGMMA that reads it by consumer warp 0",
    ),
    in_products(
        "a consumer that keeps its stage",
        steps.ConsumerKeepsItsStage,
        "hangs",
        "wrong phase: ring 'b' full, stage 0: phase 1 may end before consumer warp 0",
        "deadlock",
    ),
    in_products(
        "a producer that keeps its stage",
        ends.ProducerKeepsItsStage,
        "hangs",
        "two writers: tile 'b' stage 0",
        "deadlock",
    ),
    in_products(
        "a producer of the wrong first phase",
        steps.starting_late("producer"),
        "hangs",
        r"producer warp 0: waits on ring 'a' empty, stage 0, phase 0 \(0 of 8 arrivals",
    ),
    in_products(
        "a consumer of the wrong first phase",
        steps.starting_late("consumer"),
        "races",
        "wrong phase: ring 'a' full, stage 0: phase 0 may end before consumer warp 7 looks",
    ),
    in_products(
        "all of A before any B",
        ends.AllOfABeforeB,
        "hangs",
        r"consumer warps 0 to 7: waits on ring 'b' full, stage 0, phase 0 \(0 of 1 arrivals",
        "the cycle: consumer -> producer -> consumer",
    ),
    in_products("B before A", ends.BBeforeA, "benign"),
    in_products(
        "a tile too few",
        ends.OneTileTooFew,
        "hangs",
        "consumer warps 0 to 7: waits on ring 'b' full",
        "producer warps 0 to 3: ended",
    ),
    in_products(
        "a tile too many",
        ends.OneTileTooMany,
        "benign",
        "ends too soon: tile 'a' stage 1: the CTA may end before a copy of producer warp 0",
        "never read: tile 'a' stage 1",
    ),
    in_products(
        "a warp leaves early",
        steps.WarpLeavesEarly,
        "hangs",
        r"waits at named barrier 1 'written' \(224 of 256 threads\)",
    ),
    # Turns and named barriers.
    in_products(
        "a turn is kept",
        ends.KeepsItsTurn,
        "hangs",
        r"consumer warps 0 to 3: waits at named barrier 2 'turn'\[0\] \(128 of 256 threads\)",
    ),
    in_products(
        "nobody waits for a turn",
        ends.WaitsForNoTurn,
        "benign",
        r"out of turn: named barrier 2 'turn'\[0\]: consumer warp 4 comes twice in round 0",
    ),
    in_products(
        "nobody has the first turn",
        ends.NobodyHasTheFirstTurn,
        "hangs",
        r"consumer warps 4 to 7: waits at named barrier 3 'turn'\[1\] \(128 of 256 threads\)",
    ),
    in_products(
        "turns passed on to oneself",
        ends.PassesTurnsToItself,
        "hangs",
        r"waits at named barrier 3 'turn'\[1\]",
    ),
    in_products(
        "a barrier of two uses",
        ends.BarrierOfTwoUses,
        "races",
        "out of turn: named barrier 1 .*: consumer warp 4 comes twice",
    ),
    in_products(
        "a producer at the consumers' barrier",
        ends.ProducerAtTheConsumersBarrier,
        "hangs",
        "out of turn: named barrier 1 'written': producer warp 0 comes twice in round 0",
    ),
    in_products("no barrier before C, but turns", ends.NoBarrierBeforeC, "benign"),
    in_products(
        "no barrier before C, and no turns",
        ends.NoBarrierBeforeCNorTurns,
        "races",
        "overwritten before read: tile 'c': a write of threads .* before a TMA store that reads it",
        k_tiles=1,  # a warpgroup gets so far ahead that it writes the next C
    ),
    in_products(
        "no barrier after C",
        ends.NoBarrierAfterC,
        "corrupts",
        "read before full: tile 'c': a TMA store that reads it by consumer warp 0",
    ),
    in_products(
        "no fence before the store", ends.NoProxyFence, "races", "proxy fence missing: tile 'c'"
    ),
    in_products(
        "a store that nobody waits for",
        ends.StoreIsNotAwaited,
        "races",
        "overwritten before read: tile 'c'",
        "ends too soon: consumer warp 0 ends while a TMA store may still read",
        k_tiles=1,
    ),
    in_products(
        "nobody waits for the mbarriers",
        ends.NobodyWaitsForTheRings,
        "races",
        "not initialised: consumer warp 0 may use ring 'a' full, stage 0 before it is initialised",
    ),
    # Shipped kernels.
    in_gemm(
        "no tail",
        shipped.NoTail,
        "benign",
        "ends too soon: CTA 0 ring 'ab' empty, stage 0: its CTA may end before CTA 1 consumer",
    ),
    in_gemm(
        "partners forgotten",
        shipped.ForgetsPartners,
        "races",
        "phase may end early: CTA [01] ring 'ab' empty, stage 0: an arrival by CTA",
    ),
    in_forward(
        "keys counted in threads",
        shipped.KeysInThreads,
        "hangs",
        "ring 'k' empty, stage 0 is initialised for 256 arrivals, its 8 consumer warps bring 8",
    ),
    in_forward(
        "O over V",
        shipped.OutputOverValues,
        "races",
        "overwritten before read: tile 'v' stage 0 and tile 'o'",
    ),
    in_forward(
        "V ahead of K",
        shipped.ValuesAheadOfKeys,
        "hangs",
        r"producer warp 0: waits on ring 'v' empty, stage 0, phase 0 \(0 of 8 arrivals",
    ),
    in_forward(
        "words counted in threads",
        shipped.VisitsInThreads,
        "hangs",
        "waits on ring 'visits' empty, stage 0",
        by_tile=True,
    ),
    # Work tile after work tile.
    in_forward(
        "Q released at once",
        shipped.QueriesReleasedAtOnce,
        "races",
        "overwritten before read: tile 'q': a TMA copy into it by producer warp 0 may come before "
        "a WGMMA that reads it",
        schedule=ROOMY,
    ),
    in_forward(
        "Q kept",
        shipped.QueriesKept,
        "hangs",
        r"producer warp 0: waits on ring 'q' empty, stage 0, phase 0 \(0 of 8 arrivals",
        schedule=ROOMY,
    ),
    in_forward(
        "Q over an O that is stored",
        shipped.QueriesOverOutput,
        "races",
        "overwritten before read: tile 'q' and tile 'o': a TMA copy into it by producer warp 0 may "
        "come before a TMA store that reads it",
        schedule=ROOMY,
        dims=(192, 128),
    ),
    in_forward(
        "O over an O that is stored",
        shipped.OutputOverOutput,
        "races",
        "overwritten before read: tile 'o': a write of threads to it .* a TMA store that reads it",
        "ends too soon: consumer warp 0 ends while a TMA store may still read",
        schedule=ROOMY,
    ),
    in_forward(
        "no last word",
        shipped.NoLastWord,
        "hangs",
        "consumer warps 0 to 7: waits on ring 'work' full",
        "producer warps 0 to 3: ended",
        schedule=ROOMY,
    ),
    in_forward(
        "work counted in threads",
        shipped.WorkInThreads,
        "hangs",
        "waits on ring 'work' empty, stage 0",
        schedule=ROOMY,
    ),
    in_forward(
        "a work tile's words overwritten",
        shipped.WorkOneTooFew,
        "races",
        "phase may end early: ring 'work' empty, stage 0: an arrival by consumer warp 7",
        schedule=ROOMY,
    ),
    in_forward(
        "passing over without a turn",
        shipped.PassesOverWithoutATurn,
        "hangs",
        r"waits at named barrier \d+ 'turn'",
        schedule=TURNS,
    ),
    in_forward(
        "a word overwritten",
        shipped.VisitsOneTooFew,
        "races",
        "phase may end early: ring 'visits' empty, stage 0: an arrival by consumer warp 7",
        by_tile=True,
    ),
)
