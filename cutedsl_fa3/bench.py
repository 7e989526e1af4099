"""Forward attention timed beside its peers, in one process, after each has been proved right.

A burst is `idle_ms` of rest and then a window of back-to-back calls between two CUDA events. The
card is limited by power: a kernel that follows a thrifty one runs up to 10% faster, so every round
draws the order of the providers anew, and only ratios within one run mean something. "Sustained"
is the same with a window long enough to reach the card's power limit.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import TypeVar

import torch

from . import reference
from .named import Lengths, Named, named, visible_pairs
from .peers import OURS, PROVIDERS, Call, Inputs, Provider
from .problem import DTYPES
from .record import Row
from .variant import Variant

Key = TypeVar("Key")


@dataclass(frozen=True)
class Case:
    """One problem: a variant by name and the sizes it runs on."""

    variant: str
    dtype: str
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    kv_heads: int

    @property
    def problem(self) -> tuple[str, int, int]:
        """What is fixed when a kernel is compiled: dtype and head sizes."""
        return self.dtype, self.head_dim, self.head_dim_v

    @property
    def flops(self) -> float:
        """2 x (head_dim + head_dim_v) for each visible pair, over batch and heads."""
        pairs = visible_pairs(self.variant, self.lengths())
        return 2.0 * self.batch * self.heads * pairs * (self.head_dim + self.head_dim_v)

    def lengths(self, device: str = "cpu") -> Lengths:
        """What the variant depends on."""
        return Lengths(self.heads, self.seqlen_q, self.seqlen_k, device)

    def inputs(self, device: str, seed: int = 0) -> Inputs:
        """Normally distributed tensors and the variant, on `device`."""
        random_numbers = torch.Generator(device).manual_seed(seed)

        def tensor(seqlen: int, heads: int, head_dim: int) -> torch.Tensor:
            shape = (self.batch, seqlen, heads, head_dim)
            values = torch.randn(shape, generator=random_numbers, device=device)
            return values.to(DTYPES[self.dtype])

        return Inputs(
            tensor(self.seqlen_q, self.heads, self.head_dim),
            tensor(self.seqlen_k, self.kv_heads, self.head_dim),
            tensor(self.seqlen_k, self.kv_heads, self.head_dim_v),
            named(self.variant, self.lengths(device)),
        )

    def __str__(self) -> str:
        return (
            f"{self.variant} {self.dtype} d{self.head_dim} "
            f"B={self.batch} Sq={self.seqlen_q} Sk={self.seqlen_k} H={self.heads}/{self.kv_heads}"
        )


@dataclass(frozen=True)
class Grid:
    """Which cases a run measures: every combination at a constant number of tokens and width.

    `hidden` is heads x head_dim; `group` query heads share a key head.
    """

    variants: tuple[str, ...] = ("full", "causal")
    dtypes: tuple[str, ...] = ("bf16",)
    head_dims: tuple[int, ...] = (64, 128)
    seqlens: tuple[int, ...] = (1024, 4096, 16384)
    tokens: int = 16384
    hidden: int = 2048
    group: int = 1

    def cases(self) -> list[Case]:
        """The cases, sequences longer than `tokens` as a batch of one.

        Raises: ValueError for a variant or dtype that is unknown.
        """
        cases = []
        axes = product(self.dtypes, self.head_dims, self.variants, self.seqlens)
        for dtype, head_dim, variant, seqlen in axes:
            if dtype not in DTYPES:
                raise ValueError(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPES)}")
            heads, batch = self.hidden // head_dim, max(1, self.tokens // seqlen)
            if heads % self.group:
                raise ValueError(f"group = {self.group} must divide the {heads} query heads")
            sizes = (head_dim, head_dim, seqlen, seqlen, batch, heads, heads // self.group)
            case = Case(variant, dtype, *sizes)
            named(variant, case.lengths())
            cases.append(case)
        return cases


def window(call: Call, repeats: int) -> float:
    """Milliseconds per call of back-to-back calls; the GPU is idle before and after."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # About 0.3 ms of spinning on the GPU: the first launch is queued before the clock starts, so
    # a slow host path does not count as kernel time.
    torch.cuda._sleep(500_000)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


@dataclass(frozen=True)
class Timing:
    """How long to rest, how long to measure, how often, and the clock that measures."""

    name: str
    idle_ms: float
    window_ms: float
    rounds: int
    clock: Callable[[Call, int], float] = window


BURST = Timing("burst", idle_ms=30.0, window_ms=8.0, rounds=9)
SUSTAINED = Timing("sustained", idle_ms=0.0, window_ms=300.0, rounds=3)
SLOW_TO_PREPARE = 8.0  # seconds that deserve a line of their own


class WrongResult(RuntimeError):
    """A kernel's output is farther from fp64 than its dtype explains."""


class NoDevice(RuntimeError):
    """There is no GPU here to time anything on."""


def require_gpu() -> None:
    """Check that the current device is one that the kernels run on.

    Raises: NoDevice.
    """
    if not torch.cuda.is_available():
        raise NoDevice("no CUDA device: this needs an SM90 GPU (plan, compile and audit do not)")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        found = f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}"
        raise NoDevice(f"this needs a GPU of compute capability 9.0; {found}")


def chosen_providers(names: Iterable[str]) -> list[Provider]:
    """The providers of these names.

    Raises: ValueError for an unknown one.
    """
    names = list(names)
    unknown = [name for name in names if name not in PROVIDERS]
    if unknown:
        raise ValueError(f"providers {unknown} are unknown; known: {', '.join(PROVIDERS)}")
    return [PROVIDERS[name] for name in names]


def run(
    cases: Iterable[Case],
    providers: list[Provider],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
) -> Iterator[list[Row]]:
    """The rows of each case in turn, with a line for each, and what is absent once."""
    said: set[str] = set()

    def once(line: str) -> None:
        if line not in said:
            said.add(line)
            report(line)

    for case in cases:
        start = time.perf_counter()
        measured = measure(case, providers, timing, once, seed)
        speeds = ", ".join(f"{row.provider} {row.tflops:.0f}" for row in measured)
        seconds = time.perf_counter() - start
        report(f"{case}: {speeds or 'nothing'} TFLOP/s ({seconds:.0f} s)")
        yield measured


def measure(
    case: Case,
    providers: list[Provider],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
    device: str = "cuda",
) -> list[Row]:
    """Check, then time, every provider that offers this case; `report` hears why one does not.

    Raises: whatever this project's own kernel raises, WrongResult included.
    """
    inputs = case.inputs(device, seed)
    sampled = samples(inputs, seed)
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    for provider in providers:
        start = time.perf_counter()
        try:
            call = provider.prepare(inputs)
            errors[provider.name] = check(inputs, call, sampled)
            calls[provider.name] = call
        except Exception as error:
            if provider.name == OURS:
                raise
            if isinstance(error, ImportError):
                report(f"{provider.name}: not installed ({error})")
                continue
            reason = (str(error).splitlines() or [""])[0]
            report(f"{provider.name}: no time for {case}: {type(error).__name__}: {reason}")
        seconds = time.perf_counter() - start
        if seconds > SLOW_TO_PREPARE:
            report(f"{provider.name}: {seconds:.0f} s to compile and check {case}")
    flops = case.flops
    rows = []
    for name, times in take_turns(calls, timing, seed).items():
        ms = statistics.median(times)
        rows.append(
            Row(
                provider=name,
                direction="forward",
                **asdict(case),
                ms=round(ms, 6),
                tflops=round(flops / ms / 1e9, 2),
                max_error=float(f"{errors[name]:.4g}"),
                samples=tuple(round(sample, 6) for sample in times),
            )
        )
    return rows


def take_turns(calls: dict[Key, Call], timing: Timing, seed: int = 0) -> dict[Key, list[float]]:
    """Milliseconds per call, by name and round; each round in an order of its own."""
    shuffler, repeats = random.Random(seed), {}
    for name, call in calls.items():
        timing.clock(call, 2)
        repeats[name] = max(1, round(timing.window_ms / timing.clock(call, 3)))
    times: dict[Key, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(timing.rounds):
        shuffler.shuffle(order)
        for name in order:
            time.sleep(timing.idle_ms / 1e3)
            times[name].append(timing.clock(calls[name], repeats[name]))
    return times


@dataclass(frozen=True)
class Sample:
    """Some query rows of one head: what is right in fp64, and the error that a dtype explains.

    Shape: exact (len(rows), head_dim_v).
    """

    batch: int
    head: int
    rows: list[int]
    exact: torch.Tensor
    allowed: float


def samples(inputs: Inputs, seed: int = 0, count: int = 4) -> list[Sample]:
    """Rows of `count` heads, the same for every provider that is checked with them.

    The error may be twice that of torch at the input dtype plus one rounding of the result.
    """
    picker = random.Random(seed)
    picked = []
    for _ in range(count):
        batch, head = picker.randrange(inputs.q.shape[0]), picker.randrange(inputs.q.shape[2])
        rows = sampled_rows(inputs.q.shape[1], picker)
        exact = exact_rows(inputs, batch, head, rows)
        rounded = rounded_rows(inputs, batch, head, rows)
        allowed = tolerance(exact, rounded)
        picked.append(Sample(batch, head, rows, exact, allowed))
    return picked


def tolerance(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """Twice the error of torch's own result at a dtype, plus one rounding to it."""
    error = (rounded.double() - exact).abs().max().item()
    return 2 * error + torch.finfo(rounded.dtype).eps * exact.abs().max().item()


def check(inputs: Inputs, call: Call, sampled: list[Sample] | None = None) -> float:
    """The largest error of one call against fp64 in the sampled rows.

    The memory that the call is about to use for its output is filled with NaN first, so a row that
    is never written cannot pass.

    Raises: WrongResult with the error found and the one allowed.
    """
    sampled = samples(inputs) if sampled is None else sampled
    shape = (*inputs.q.shape[:3], inputs.v.shape[3])
    poison = inputs.q.new_full(shape, float("nan"))
    del poison  # the caching allocator hands the same block to the next tensor of this size
    out = call()
    if out.shape != shape:
        raise WrongResult(f"output of shape {tuple(out.shape)} instead of {shape}")
    if not bool(torch.isfinite(out).all()):
        raise WrongResult("output with NaN or infinity")
    largest = 0.0
    for one in sampled:
        error = (out[one.batch, one.rows, one.head].double() - one.exact).abs().max().item()
        if not error <= one.allowed:
            raise WrongResult(
                f"error {error:.3g} against fp64 at batch {one.batch}, head {one.head}; torch at "
                f"{inputs.q.dtype} allows {one.allowed:.3g}"
            )
        largest = max(largest, error)
    return largest


def sampled_rows(seqlen_q: int, picker: random.Random, count: int = 62) -> list[int]:
    """The first and the last row and some between."""
    between = range(1, max(1, seqlen_q - 1))
    return sorted({0, seqlen_q - 1, *picker.sample(between, min(count, len(between)))})


def _of_head(
    inputs: Inputs, batch: int, head: int, rows: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chosen query rows of one head, with its keys and values, as (1, seqlen, 1, head_dim)."""
    kv_head = head // (inputs.q.shape[2] // inputs.k.shape[2])
    one, of_keys = slice(batch, batch + 1), slice(kv_head, kv_head + 1)
    q = inputs.q[one, rows, head : head + 1]
    return q, inputs.k[one, :, of_keys], inputs.v[one, :, of_keys]


def exact_rows(inputs: Inputs, batch: int, head: int, rows: list[int]) -> torch.Tensor:
    """Chosen query rows of one head by the reference in fp64; the variant sees true indices.

    Shape: (len(rows), head_dim_v).
    """
    indices = torch.tensor(rows, dtype=torch.int32, device=inputs.q.device)
    variant = at_indices(inputs.named, batch, head, indices)
    q, k, v = _of_head(inputs, batch, head, rows)
    return reference.attention(q, k, v, variant, dtype=torch.float64)[0, :, 0]


def rounded_rows(inputs: Inputs, batch: int, head: int, rows: list[int]) -> torch.Tensor:
    """The same rows as plain torch gives them at the input dtype: its rounding is the yardstick.

    Shape: (len(rows), head_dim_v).
    """
    q, k, v = (x[0, :, 0] for x in _of_head(inputs, batch, head, rows))
    i = torch.tensor(rows, device=q.device)[:, None]
    j = torch.arange(k.shape[0], device=q.device)
    scores = (q @ k.T).float() / math.sqrt(q.shape[1])
    if inputs.named.score is not None:
        scores = inputs.named.score(scores, batch, head, i, j)
    if inputs.named.mask is not None:
        scores = scores.masked_fill(~inputs.named.mask(batch, head, i, j), -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0).to(v.dtype) @ v


def at_indices(chosen: Named, batch: int, head: int, rows: torch.Tensor) -> Variant:
    """The variant for one batch element, one head and some query rows of the whole problem."""
    batches = rows.new_tensor([batch])
    heads = rows.new_tensor([head])
    score, mask = chosen.score, chosen.mask

    def moved_score(s, b, h, q, k):
        return score(s, batches[b], heads[h], rows[q], k)

    def moved_mask(b, h, q, k):
        return mask(batches[b], heads[h], rows[q], k)

    return Variant(score=score and moved_score, mask=mask and moved_mask)
