"""The GEMM at every depth and cluster shape beside cuBLAS, after each has been proved right.

All take turns in one process, as the attention benchmark's providers do, each writing its result
into the same matrix through memory that holds NaN before the check.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import torch

from . import cache
from .bench import Timing, take_turns
from .checks import WrongResult, sampled_rows, tolerance
from .gemm import ELEMENTS
from .kernels.sm90.gemm import GemmSm90
from .peers import OURS, Call
from .pipelines import Schedule
from .problem import DTYPES
from .record import GemmRow

CUBLAS = "cublas"
STAGES = (1, 2, 3, 4)
CLUSTERS = ((1, 1), (2, 1), (1, 2))


@dataclass(frozen=True)
class Size:
    """A product of (m, k) by (n, k).

    Raises: ValueError for a dtype that is unknown.
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; known: {', '.join(DTYPES)}")

    @property
    def flops(self) -> float:
        """A multiplication and an addition for each of m x n x k."""
        return 2.0 * self.m * self.n * self.k

    def matrices(self, device: str, seed: int = 0) -> Matrices:
        """Normally distributed A and B, and room for C."""
        random_numbers, dtype = torch.Generator(device).manual_seed(seed), DTYPES[self.dtype]

        def matrix(rows: int) -> torch.Tensor:
            values = torch.randn(rows, self.k, generator=random_numbers, device=device)
            return values.to(dtype)

        return Matrices(
            matrix(self.m), matrix(self.n), torch.empty(self.m, self.n, dtype=dtype, device=device)
        )

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k} {self.dtype}"


@dataclass(frozen=True)
class Matrices:
    """What every kernel reads and where it writes.

    Shape: a (m, k), b (n, k), c (m, n).
    """

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor


def schedules(
    tile_m: int = 128,
    tile_n: int = 256,
    consumers: int = 2,
    stages: Iterable[int] = STAGES,
    clusters: Iterable[tuple[int, int]] = CLUSTERS,
) -> list[Schedule]:
    """Every depth in every cluster shape."""
    pairs = product(clusters, stages)
    return [
        Schedule(tile_m, tile_n, depth, consumers, overlap="none", cluster=cluster)
        for cluster, depth in pairs
    ]


def require_fit(chosen: Iterable[Schedule], dtype: str) -> None:
    """Check that every schedule makes a kernel; nothing is compiled.

    Raises: ScheduleError, LayoutError.
    """
    for schedule in chosen:
        GemmSm90(schedule, ELEMENTS[DTYPES[dtype]])


def ours(schedule: Schedule, matrices: Matrices) -> Call:
    """A launch of the compiled GEMM."""
    a, b, c = matrices.a, matrices.b, matrices.c
    launch = cache.get(GemmSm90(schedule, ELEMENTS[a.dtype])).launch

    def call() -> torch.Tensor:
        launch(a, b, c)
        return c

    return call


def cublas(matrices: Matrices) -> Call:
    """The same product by torch."""
    a, b, c = matrices.a, matrices.b.T, matrices.c
    return lambda: torch.mm(a, b, out=c)


def measure(
    size: Size,
    chosen: list[Schedule],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
    device: str = "cuda",
    prepare: Callable[[Schedule, Matrices], Call] = ours,
) -> list[GemmRow]:
    """Check, then time, every schedule and cuBLAS, with a line for each.

    Raises: WrongResult.
    """
    matrices = size.matrices(device, seed)
    rows = sampled_rows(size.m, random.Random(seed))
    exact = matrices.a[rows].double() @ matrices.b.double().T
    allowed = tolerance(exact, matrices.a[rows] @ matrices.b.T)
    calls: dict[Schedule | None, Call] = {None: cublas(matrices)}
    errors: dict[Schedule | None, float] = {}
    for schedule in chosen:
        calls[schedule] = prepare(schedule, matrices)
    for schedule, call in calls.items():
        errors[schedule] = check(matrices, call, rows, exact, allowed, _name(schedule))
    measured = []
    for schedule, times in take_turns(calls, timing, seed).items():
        ms = statistics.median(times)
        tflops = size.flops / ms / 1e9
        report(f"{size}, {_name(schedule)}: {tflops:.0f} TFLOP/s")
        measured.append(
            GemmRow(
                provider=OURS if schedule else CUBLAS,
                m=size.m,
                n=size.n,
                k=size.k,
                dtype=size.dtype,
                tile_m=schedule and schedule.tile_m,
                tile_n=schedule and schedule.tile_n,
                stages=schedule and schedule.stages,
                consumers=schedule and schedule.consumers,
                cluster=schedule and schedule.cluster,
                ms=round(ms, 6),
                tflops=round(tflops, 2),
                max_error=float(f"{errors[schedule]:.4g}"),
                samples=tuple(round(sample, 6) for sample in times),
            )
        )
    return measured


def check(
    matrices: Matrices,
    call: Call,
    rows: list[int],
    exact: torch.Tensor,
    allowed: float,
    name: str,
) -> float:
    """The largest error of one call against fp64 in the sampled rows; C holds NaN before.

    Raises: WrongResult with the error found and the one allowed.
    """
    matrices.c.fill_(float("nan"))
    c = call()
    if not bool(torch.isfinite(c).all()):
        raise WrongResult(f"{name}: a result with NaN or infinity")
    error = (c[rows].double() - exact).abs().max().item()
    if not error <= allowed:
        raise WrongResult(
            f"{name}: error {error:.3g} against fp64; torch at {c.dtype} allows {allowed:.3g}"
        )
    return error


def _name(schedule: Schedule | None) -> str:
    if schedule is None:
        return CUBLAS
    m, n = schedule.cluster
    tile = f"{schedule.tile_m} x {schedule.tile_n}"
    return f"{OURS} {tile}, {schedule.stages} stages, cluster {m} x {n}"
