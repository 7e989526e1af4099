"""The backward alone timed beside its peers, and the memory of a forward with its backward.

Timed as the forward is (bench.py): a group of cases and all providers take turns in an order drawn
anew each round, each after its gradients were held against fp64 in one head. Default and
`deterministic=True` are two cases of a group, a variant with and without the gradients of what it
captures likewise.

No provider stops a run: who has no time, our own kernel too, is left out, and `Absent` keeps why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from . import bench, cache
from .cases import HEAD_DIMS, PLAIN, Case, Dims, Grid, checked
from .checks_backward import check_gradients, gradient_sample
from .evidence import side_by_side
from .interface import plan
from .named import named
from .peers import OURS, Call
from .peers_backward import GRADIENTS, GradientInputs, GradientProvider
from .plans_backward import BackwardPlan
from .problem import DTYPES, Problem
from .record import BackwardRow, PeakRow, Record, RecordError, Row, Sizes
from .variant.derive import of_element

FLOPS = 2.5  # of the forward's: five products of tiles instead of two
PARTS = ("plain", "variants", "memory")
PEERS = {  # by part, with us; flex and FA4 compile for 10 to 30 s a variant
    "plain": (OURS, "fa4", "cudnn"),
    "variants": (OURS, "fa4", "flex", "flex_fa4"),
    "memory": (OURS, "fa4", "cudnn"),
}
VARIANTS = (
    PLAIN,
    "alibi",
    "softcap:30",
    "window:1024,0",
    "documents:1000",
    "bias",
    "bias+gradient",
    "sigmoid",
)
GRADIENT = "+gradient"  # after a variant's name: that of its captured tensors too
FIRST: tuple[Dims, ...] = ((64, 64), (128, 128))  # the head sizes that a run begins with
LENGTHS = (8192, 16384)  # of which the peak is measured
PEAKS = 3  # of which the largest counts
WIDTH = 200  # characters of a reason


@dataclass(frozen=True)
class GradientCase(Case):
    """A problem whose gradients are asked for, and what is asked for besides."""

    deterministic: bool = False
    captured: bool = False

    @property
    def flops(self) -> float:
        """2.5 times the forward's."""
        return FLOPS * super().flops

    @property
    def sizes(self) -> GradientCase:
        return replace(self, variant="full", deterministic=False, captured=False)

    @property
    def kind(self) -> str:
        besides = " deterministic" if self.deterministic else ""
        return f"{super().kind}{GRADIENT if self.captured else ''}{besides}"

    def inputs(self, device: str, seed: int = 0) -> GradientInputs:
        """As of a `Case`, and the gradient of the output, normally distributed too."""
        made = super().inputs(device, seed)
        random_numbers = torch.Generator(device).manual_seed(seed + 1)
        shape = (*made.q.shape[:3], self.head_dim_v)
        dout = torch.randn(shape, generator=random_numbers, device=device).to(DTYPES[self.dtype])
        asked = self.deterministic, self.captured
        return GradientInputs(made.q, made.k, made.v, made.named, dout, *asked)

    def with_tensors(self, like: Any) -> GradientInputs:
        # A variant of its own: captured tensors require gradients in one case and not in another.
        made = named(self.variant, self.lengths(like.q.device.type))
        return replace(like, named=made, deterministic=self.deterministic, captured=self.captured)


@dataclass
class Absent:
    """Why there is no time, by provider."""

    reasons: dict[str, list[str]] = field(default_factory=dict)

    def note(self, provider: str, reason: str) -> None:
        """Keep a reason, once."""
        known = self.reasons.setdefault(provider, [])
        if reason[:WIDTH] not in known:
            known.append(reason[:WIDTH])

    @property
    def ours(self) -> list[str]:
        """Why our own kernel has none."""
        return self.reasons.get(OURS, [])


def plain(
    head_dims: Iterable[Dims] = HEAD_DIMS, seqlens: tuple[int, ...] | None = None
) -> list[list[GradientCase]]:
    """Full and causal attention in the sizes of the forward's record, each with a fixed order.

    The most used head sizes come first, and of each the longest sequences.

    Raises: ValueError for what cannot be.
    """
    dims = sorted(head_dims, key=lambda d: d not in FIRST)
    cases = Grid(head_dims=tuple(dims), seqlens=seqlens).cases()
    cases.sort(key=lambda case: (dims.index((case.head_dim, case.head_dim_v)), -case.seqlen_q))
    return [
        [GradientCase(**asdict(case), deterministic=fixed) for fixed in (False, True)]
        for case in cases
    ]


def variants(
    names: Iterable[str] = VARIANTS,
    head_dims: Iterable[Dims] = ((128, 128),),
    sizes: tuple[int, int, int] = (8192, 2, 16),
) -> list[list[GradientCase]]:
    """For each pair of head sizes the variants, plain causal among them; (seqlen, batch, heads).

    Raises: ValueError for what cannot be.
    """
    seqlen, batch, heads = sizes
    found = []
    for d, dv in head_dims:
        group = []
        for name in dict.fromkeys([PLAIN, *names]):
            of, asked, _ = name.partition(GRADIENT)
            case = (of, "bf16", d, dv, seqlen, seqlen, batch, heads, heads)
            checked(Case(*case))
            group.append(GradientCase(*case, captured=bool(asked)))
        found.append(group)
    return found


def memory(lengths: Iterable[int] = LENGTHS) -> list[GradientCase]:
    """Plain causal attention of one sequence, whose peak is measured."""
    return [GradientCase(PLAIN, "bf16", 128, 128, n, n, 1, 16, 16) for n in lengths]


def chosen_providers(part: str, names: Sequence[str] = ()) -> list[GradientProvider]:
    """Those of a part, or of these names.

    Raises: ValueError for an unknown one.
    """
    return bench.known_providers(names or PEERS[part], GRADIENTS)


def compiled_ahead(
    cases: Iterable[GradientCase], workers: int, report: Callable[[str], None]
) -> None:
    """Every kernel of ours in the cache on disk: compiled side by side, forward and backward.

    What cannot be compiled is only said: it is refused again where it is measured.
    """
    wanted: dict[str, tuple[GradientCase, int]] = {}  # by the code, which lengths often share
    for case in dict.fromkeys(cases):
        try:
            for number, each in enumerate(plans(case)):
                wanted.setdefault(each.key_text, (case, number))
        except ValueError as error:
            report(f"{case}: {error}"[:WIDTH])
    report(f"{len(wanted)} kernels, those not on disk compiled by {workers} processes")
    items = list(wanted.values())
    for (case, _), refused in zip(items, side_by_side(_compiled, items, workers), strict=True):
        if refused:
            report(f"{case}: {refused}")


def _compiled(item: tuple[GradientCase, int]) -> str:
    """Compile one of a case's kernels; why that is not possible, or nothing."""
    case, number = item
    try:
        cache.get(list(plans(case))[number].kernel)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:WIDTH]
    return ""


def plans(case: GradientCase) -> Iterator[Any]:
    """The plan of the forward and that of the backward.

    Raises: Unsupported, ScheduleError, LayoutError, VariantError.
    """
    variant = named(case.variant, case.lengths()).variant
    shape, grouped = (case.batch, case.seqlen_q, case.heads), (case.batch, case.seqlen_k)
    meta = {"dtype": DTYPES[case.dtype], "device": "meta"}
    q = torch.empty(*shape, case.head_dim, **meta)
    k = torch.empty(*grouped, case.kv_heads, case.head_dim, **meta)
    v = torch.empty(*grouped, case.kv_heads, case.head_dim_v, **meta)
    yield plan(q, k, v, variant)
    derived = of_element(variant)
    read = tuple(derived.captures) if case.captured and derived is not None else ()
    made = BackwardPlan.default(
        variant, Problem(*case.problem), deterministic=case.deterministic, wanted=read
    )
    made.check()
    yield made


def run(
    grouped: Iterable[list[GradientCase]],
    providers: Sequence[GradientProvider],
    timing: bench.Timing,
    report: Callable[[str], None],
    absent: Absent,
    seed: int = 0,
) -> Iterator[list[BackwardRow]]:
    """The rows of each group in turn, with a line for each case."""

    def measure(cases, chosen, timing, once, seed):
        return measure_together(cases, chosen, timing, once, absent, seed)

    return bench.run_together(grouped, providers, timing, report, seed, measure)


def measure_together(
    cases: list[GradientCase],
    providers: Sequence[GradientProvider],
    timing: bench.Timing,
    report: Callable[[str], None],
    absent: Absent,
    seed: int = 0,
    device: str = "cuda",
) -> list[BackwardRow]:
    """Check, then time, what there is; `absent` and `report` hear of the others.

    Raises: what a GPU says that takes no more work.
    """
    inputs = bench.shared_inputs(cases, device, seed)
    sampled = {case: gradient_sample(inputs[case], seed) for case in cases if not _besides(case)}

    def checked(case: GradientCase, call: Call) -> tuple[float, float, float]:
        found = sampled.get(_alone(case)) or gradient_sample(inputs[case], seed)
        return check_gradients(inputs[case], call, found)

    def refused(provider: str, case: GradientCase, error: Exception) -> None:
        reason = bench.why_not(error, case)
        absent.note(provider, reason)
        report(f"{provider}: {reason}")
        if device == "cuda":
            torch.cuda.synchronize()  # raises where the error was the GPU's: nothing runs after it

    calls, errors = bench.prepared(inputs, providers, checked, refused, report)
    times = bench.take_turns(calls, timing, seed)
    keys = [(case, provider.name) for case in cases for provider in providers]
    return [_row(*key, times[key], errors[key]) for key in keys if key in times]


def _besides(case: GradientCase) -> bool:
    return case.deterministic or case.captured


def _alone(case: GradientCase) -> GradientCase:
    """The same problem with nothing asked for besides: its gradients are the same."""
    return replace(case, deterministic=False, captured=False)


def _row(
    case: GradientCase, provider: str, times: list[float], errors: tuple[float, float, float]
) -> BackwardRow:
    found = [float(f"{error:.4g}") for error in errors]
    return BackwardRow(
        provider=provider,
        direction="backward",
        **asdict(case),
        **bench.timed(case, times),
        max_error=max(found),
        errors=(found[0], found[1], found[2]),
    )


def peaks(
    cases: Iterable[GradientCase],
    providers: Sequence[GradientProvider],
    report: Callable[[str], None],
    absent: Absent,
    seed: int = 0,
    device: str = "cuda",
    peak: Callable[[Call], int] | None = None,
) -> Iterator[list[PeakRow]]:
    """The peak of forward and backward together, of each case and provider in turn."""
    peak = peak or peak_bytes
    for case in cases:
        inputs, rows = case.inputs(device, seed), []
        for provider in providers:
            try:
                call = provider.whole(inputs)
                call()  # compiles, and allocates what stays
                samples = tuple(peak(call) for _ in range(PEAKS))
            except Exception as error:
                absent.note(provider.name, f"no peak: {bench.why_not(error, case)}")
                report(f"{provider.name}: no peak of {case}: {error}"[:WIDTH])
                continue
            sizes = {each.name: getattr(case, each.name) for each in fields(Sizes)}
            peak_of = {"provider": provider.name, "peak_bytes": max(samples), "samples": samples}
            rows.append(PeakRow(**sizes, **peak_of))
        said = ", ".join(f"{row.provider} {row.peak_bytes / 2**20:.0f}" for row in rows)
        report(f"{case}: peak {said or 'nothing'} MiB")
        yield rows


def peak_bytes(call: Call) -> int:
    """The most bytes that a call holds besides what was there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def of_earlier(path: Path, meta: dict[str, Any]) -> tuple[Any, ...]:
    """The rows of an earlier record of the same measurement, which `meta` belongs to.

    Why providers are absent from it goes into `meta` as well.

    Raises: RecordError for a record of other sources, another machine or timing, or of no backward.
    """
    try:
        earlier = Record.read(path)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise RecordError(f"--add {path}: no record can be read there ({error})") from None
    if not all(isinstance(row, BackwardRow | PeakRow) for row in earlier.rows):
        raise RecordError(f"--add {path}: not a record of the backward")
    for name in ("device", "driver", "torch", "cutlass", "commit", "kernel_source_hash", "timing"):
        if earlier.meta.get(name) != meta.get(name):
            raise RecordError(
                f"--add {path}: its {name} is {earlier.meta.get(name)!r}, here {meta.get(name)!r}"
            )
    absent = Absent(meta["absent"])
    for provider, reasons in earlier.meta.get("absent", {}).items():
        for reason in reasons:
            absent.note(provider, reason)
    return earlier.rows


def missing(
    part: str, grouped: Iterable[list[GradientCase]], rows: Iterable[Row | PeakRow]
) -> list[list[GradientCase]]:
    """The groups of a part of which these rows have nothing."""
    of_part = PeakRow if part == "memory" else BackwardRow
    known = [row for row in rows if isinstance(row, of_part)]
    return [g for g in grouped if not any(case.is_of(row) for case in g for row in known)]
