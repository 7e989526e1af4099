"""The ladder timed: every step and depth beside each other, and peers, after each was proved right.

All rungs of a problem take turns in one process, in an order drawn anew each round, as the
attention benchmark's providers do. Kernels come from the cache; `compile_all` puts them there,
which needs no GPU.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from . import cache, ladder
from .bench import Timing, take_turns
from .cases import Case, checked
from .checks import check, samples
from .ladder import Rung
from .named import named
from .peers import Call, Inputs, Provider
from .record import LadderRow

PEERS = ("fa2", "fa3")  # measured beside the steps: where the ladder begins and where it leads


def cases(
    head_dims: tuple[int, ...] = ladder.HEAD_DIMS,
    variants: tuple[str, ...] = ladder.VARIANTS,
    dtype: str = "bf16",
    seqlen: int = 8192,
    tokens: int = 16384,
    hidden: int = 2048,
) -> list[Case]:
    """The problems, each with every rung of the ladder.

    Raises: ValueError for a head size, a variant or a dtype that the ladder has not.
    """
    unknown = set(variants) - set(ladder.VARIANTS)
    if unknown:
        raise ValueError(
            f"variants {sorted(unknown)} are not the ladder's: {', '.join(ladder.VARIANTS)}"
        )
    found = []
    for head_dim in head_dims:
        ladder.schedules(head_dim)  # which refuses what the ladder has not
        heads, batch = max(1, hidden // head_dim), max(1, tokens // seqlen)
        sizes = (head_dim, head_dim, seqlen, seqlen, batch, heads, heads)
        found += [checked(Case(variant, dtype, *sizes)) for variant in variants]
    return found


def rungs(case: Case) -> list[Rung]:
    """What is measured on a problem: the steps, then the last at each depth that fits."""
    variant = named(case.variant, case.lengths()).variant
    return ladder.fitting(ladder.rungs(variant, case.head_dim, case.dtype))


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a rung; `faults` are the audit's."""

    case: Case
    rung: str
    resources: str
    faults: tuple[str, ...]

    def __str__(self) -> str:
        verdict = f"; FAIL {'; '.join(self.faults)}" if self.faults else ""
        return f"{self.case.kind}, {self.rung}: {self.resources}{verdict}"


def compile_all(chosen: list[Case], jobs: int = 2) -> Iterator[Compiled]:
    """Put every kernel into the disk cache and hold it against its tables; no GPU is needed."""
    work = [(case, place) for case in chosen for place in range(len(rungs(case)))]
    context = multiprocessing.get_context("spawn")  # the compiler does not survive a fork
    with ProcessPoolExecutor(max_workers=max(1, jobs), mp_context=context) as pool:
        yield from pool.map(_compile, *zip(*work, strict=True))


def _compile(case: Case, place: int) -> Compiled:
    from .audit import audit

    rung = rungs(case)[place]
    kernel = rung.kernel
    made = cache.get(kernel)
    failures = audit(kernel, made).failures
    return Compiled(case, str(rung), str(made.resources), tuple(map(str, failures)))


def ours(rung: Rung, inputs: Inputs) -> Call:
    """A launch of the rung's kernel, its output allocated by each call."""
    call = ladder.launched(rung, inputs.q, inputs.k, inputs.v)
    return lambda: call()[0]


def run(
    chosen: list[Case],
    peers: list[Provider],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
) -> Iterator[list[LadderRow]]:
    """The rows of each problem in turn, with a line for each.

    Raises: WrongResult.
    """
    for case in chosen:
        yield measure(case, peers, timing, report, seed)


def measure(
    case: Case,
    peers: list[Provider],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
    device: str = "cuda",
    prepare: Callable[[Rung, Inputs], Call] = ours,
) -> list[LadderRow]:
    """Check, then time, every rung and every peer that is there; `report` hears of each.

    Raises: WrongResult, whatever a kernel of the ladder raises.
    """
    inputs = case.inputs(device, seed)
    sampled = samples(inputs, seed)
    calls: dict[Rung | str, Call] = {}
    errors: dict[Rung | str, float] = {}
    for rung in rungs(case):
        calls[rung] = prepare(rung, inputs)
        errors[rung] = check(inputs, calls[rung], sampled)
    for peer in peers:
        try:
            call = peer.prepare(inputs)
            errors[peer.name] = check(inputs, call, sampled)
            calls[peer.name] = call
        except Exception as error:  # a peer that is absent or wrong has no row
            report(f"{peer.name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    rows = []
    for one, times in take_turns(calls, timing, seed).items():
        ms = statistics.median(times)
        made: dict[str, Any] = (
            _of_peer(one) if isinstance(one, str) else _of_rung(one, prepare is ours)
        )
        row = LadderRow(
            **made,
            variant=case.variant,
            dtype=case.dtype,
            head_dim=case.head_dim,
            seqlen=case.seqlen_q,
            batch=case.batch,
            heads=case.heads,
            ms=round(ms, 6),
            tflops=round(case.flops / ms / 1e9, 2),
            max_error=float(f"{errors[one]:.4g}"),
            samples=tuple(round(sample, 6) for sample in times),
        )
        report(f"{case}, {one}: {row.tflops:.0f} TFLOP/s")
        rows.append(row)
    return rows


def _of_rung(rung: Rung, compiled: bool) -> dict[str, Any]:
    """What a row says of a kernel; without machine code, nothing that only the compiler knows."""
    kernel, s = rung.kernel, rung.plan.schedule
    resources = cache.get(kernel).resources if compiled else None
    budgets = tuple(role.registers for role in kernel.roles.values())
    return {
        "rung": rung.name,
        "number": rung.number,
        "tile_m": s.tile_m,
        "tile_n": s.tile_n,
        "stages": s.stages,
        "threads": kernel.threads,
        "registers": resources and resources.registers,
        "budgets": None if None in budgets else budgets,
        "smem": kernel.smem.total,
        "spills": resources and resources.spills,
    }


def _of_peer(name: str) -> dict[str, Any]:
    """What a row says of a peer."""
    unknown = ("tile_m", "tile_n", "stages", "threads", "registers", "budgets", "smem", "spills")
    return {"rung": name, "number": 0, **dict.fromkeys(unknown)}
