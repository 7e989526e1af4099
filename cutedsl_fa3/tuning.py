"""`tune`: the legal schedules of a variant beside each other, on the GPU at hand.

    result = fa3.tune(q, k, v, variant)    # from now on attention(q, k, v, variant) uses the best
    print(result)

Every candidate differs from the default schedule in one field of `VALUES`; those of the next pass
differ in one from the best so far. Rules alone say which are legal; the others are compiled and
left out where they spill. Of each result the rows that differ most from the default's are held
against fp64: a wrong one is an error and not a time. Those that are left take turns in an order
drawn anew each round; medians count, and speed is always that of the same turns over the default's.
Of so many one is fast by chance: the default and the fastest take turns once more, which decides.

`measure` is the same for a named case, as rows of a record, with which the table of schedules is
chosen.
"""

from __future__ import annotations

import contextlib
import io
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import cache, sampled, tuned
from .bench import BURST, Timing, take_turns
from .calls import Result
from .cases import Case
from .checks import WrongResult
from .errors import Unsupported
from .inputs import check_device, check_schedule, check_tensors, checked_scale, without_scores
from .interface import PLAIN, attention, attention_with_lse
from .named import named
from .pipelines import PACKS, Overlap, Schedule, Source
from .plans import Plan
from .problem import Problem
from .record import ScheduleRow
from .schedules import Extents, schedule_for
from .variant import Variant
from .variant.evaluate import evaluate

__all__ = ["Tried", "Tuning", "tune"]

# What is tried of each field; a plan refuses what does not fit.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "overlap": get_args(Overlap),
    "tile_n": (48, 64, 80, 96, 112, 128, 144, 160, 176),
    "stages": (1, 2, 3, 4),
    "consumers": (1, 2, 3),
    "head_group": (1, 2, 4, 8, 16, 32, 64),
    "persistent": (False, True),
    "residents": (1, 2, 3, 4),
    "store": ("tma", "direct"),
    "early": (0, 2, 4, 6, 8),
    "lazy": (False, True),
    "pack": PACKS,
    "p_from": get_args(Source),
    "narrow": (False, True),
}
# 64 rows for each consumer warpgroup; clusters are for variants without a mask alone.
NOT_TRIED = ("tile_m", "cluster")
ALONE = {"both": "intra", "pingpong": "none"}  # one warpgroup has nobody to take turns with
MARGIN = 1.005  # medians repeat to about 0.3%: what is faster by less changes nothing
FINALISTS = 3  # that take turns with the default once more
DIFFERENT = 16  # rows that are held against fp64
SCORES = 1 << 22  # pairs whose visibility is looked at together


@dataclass(frozen=True)
class Tried:
    """One candidate: its time, or why it was left out.

    `change` is what is different from the default; `schedule` is None where there cannot be one.
    Units: `ms` is the median of `samples` (milliseconds per call); `speed` that over the default's
    in the same turns; `tflops` counts 2 x (head_dim + head_dim_v) for each visible pair.
    """

    change: str
    schedule: Schedule | None
    why_not: str = ""
    ms: float = math.nan
    speed: float = math.nan
    tflops: float = math.nan
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tuning:
    """What `tune` found: every candidate, fastest first, and what is used from now on.

    `path` is the file that keeps the choice for later processes, if one does.
    """

    rows: tuple[Tried, ...]
    default: Schedule
    best: Schedule
    choice: tuned.Choice
    path: Path | None

    @property
    def speed(self) -> float:
        """That of the best over that of the default."""
        return self.choice.default_ms / self.choice.ms

    def __rich__(self) -> Table:
        table = Table("schedule", "ms", "TFLOP/s", "speed", "", box=None, pad_edge=False)
        table.title, table.title_justify = f"default: {_shown(self.default)}", "left"
        for row in self.rows:
            numbers = ("-", "-", "-")
            if not row.why_not:
                numbers = (f"{row.ms:.4f}", f"{row.tflops:.0f}", f"{row.speed:.3f}")
            note = "best" if row.schedule == self.best else row.why_not
            table.add_row(row.change, *numbers, note)
        where = "this process" if self.path is None else f"later processes, in {self.path}"
        table.caption, table.caption_justify = f"{self.choice}; kept for {where}", "left"
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160, color_system=None)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    __repr__ = __str__


def tune(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    schedules: Iterable[Schedule] | None = None,
    passes: int = 2,
    timing: Timing = BURST,
    seed: int = 0,
    progress: bool = True,
    on_disk: bool = True,
) -> Tuning:
    """Measure schedules for calls such as this one, and use the fastest from now on.

    `attention` takes it where no schedule is given: for this variant, dtype, head sizes, query
    heads for each key head and GPU, at lengths near these (`tuned.REACH`), in this process and,
    `on_disk`, in later ones. `tuned.forget()` undoes it. The default stays unless another is
    faster by `MARGIN`.

    `schedules` are the candidates, instead of those that differ from the default in a field, and
    then, in up to `passes` passes, from the best so far.

    It takes seconds, and one or two more for each candidate that has to be compiled.

    Shape: as for `attention`, on an SM90 GPU.
    Raises: as `attention`; ScheduleError, LayoutError for one of `schedules` that is not legal;
        WrongResult for a candidate whose result is wrong.
    """
    variant = PLAIN if variant is None else variant
    _check(q, k, v, variant, passes)
    q, k, v = (t.detach() for t in (q, k, v))
    problem = Problem(tuned.NAMES[q.dtype], q.shape[3], v.shape[3])
    heads, kv_heads = q.shape[2], k.shape[2]
    extents = Extents(q.shape[0], q.shape[1], k.shape[1], heads, kv_heads)
    default = schedule_for(variant, problem, extents)
    given = None if schedules is None else _given((q, k), variant, problem, default, schedules)

    def look(best: Schedule) -> Mapping[str, Schedule | str]:
        if given is not None:
            return given
        return around(variant, problem, best, default, heads // kv_heads)

    with torch.no_grad(), _bar(progress) as bar:
        trial = Trial(q, k, v, variant, default)
        rows = _searched(trial, look, passes, timing, seed, bar)
        flops = 2.0 * (q.shape[3] + v.shape[3]) * visible_pairs(variant, q, k)
    rows = [replace(row, tflops=flops / row.ms / 1e9) for row in rows]
    timed = sorted((row for row in rows if row.samples), key=lambda row: -row.speed)
    ours = next(row for row in timed if row.schedule == default)
    best = timed[0] if timed[0].speed > MARGIN else ours
    assert best.schedule is not None
    made = tuned.Choice(
        best.schedule,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        batch=q.shape[0],
        heads=q.shape[2],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        ms=round(best.ms, 6),
        default_ms=round(best.ms * best.speed, 6),
    )
    path = tuned.keep(q, k, v, variant, made, on_disk)
    left_out = [row for row in rows if row.why_not]
    return Tuning((*timed, *left_out), default, best.schedule, made, path)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, passes: int
) -> None:
    """That there is something to measure, and a GPU to measure on.

    Raises: Unsupported.
    """
    check_tensors(q, k, v, variant)
    check_device(q, k, v, variant)
    if tuned.device_name(q.device) is None:
        raise Unsupported(f"q is on {q.device}: schedules are timed on a CUDA device")
    if without_scores(q, k):
        raise Unsupported(f"q {tuple(q.shape)}, k {tuple(k.shape)}: no kernel runs for these")
    if type(passes) is not int or passes < 1:
        raise Unsupported(f"passes = {passes!r}: a whole number from 1 is needed")


def _given(
    q_and_k: tuple[torch.Tensor, torch.Tensor],
    variant: Variant,
    problem: Problem,
    default: Schedule,
    schedules: Iterable[Schedule],
) -> dict[str, Schedule]:
    """The candidates of a caller, by what is different from the default.

    Raises: Unsupported, ScheduleError, LayoutError.
    """
    found = {}
    for each in schedules:
        check_schedule(each, *q_and_k)
        Plan(variant, problem, each).check()
        found[_change(default, each)] = each
    return found


def _searched(
    trial: Trial,
    look: Callable[[Schedule], Mapping[str, Schedule | str]],
    passes: int,
    timing: Timing,
    seed: int,
    bar: Progress,
) -> list[Tried]:
    """Every candidate, in the order in which they were tried; `look` names those around one.

    The default and the best so far take turns with each pass, so that its speeds mean something,
    and the finalists once more after the last.
    """

    def timed(schedules: Iterable[Schedule], seed: int) -> dict[str, Tried]:
        task = bar.add_task("time", total=timing.rounds)
        calls = {each: trial.call(each) for each in schedules}
        times = take_turns(calls, timing, seed, lambda: bar.advance(task))
        return {row.change: row for row in _timed(times, trial.default)}

    best, tried = trial.default, dict[str, Tried]()
    for number in range(passes):
        turns = dict.fromkeys((trial.default, best))
        new = [(change, one) for change, one in look(best).items() if change not in tried]
        new = [(change, one) for change, one in new if one not in turns]
        for change, one in bar.track(new, description="compile, check"):
            schedule = one if isinstance(one, Schedule) else None
            why_not = one if isinstance(one, str) else trial.why_not(one)
            if why_not:
                tried[change] = Tried(change, schedule, why_not)
            else:
                turns[one] = None
        if number and len(turns) == len({trial.default, best}):
            break
        tried = timed(turns, seed + number) | tried  # what has a time keeps it
        fastest, *_ = _fastest(tried.values())
        if fastest == best:
            break
        best = fastest
    finalists = _fastest(tried.values())[:FINALISTS]
    tried |= timed(dict.fromkeys((trial.default, *finalists)), seed + passes)
    return list(tried.values())


def _fastest(tried: Iterable[Tried]) -> list[Schedule]:
    """The schedules that have a time, fastest first."""
    rows = [row for row in tried if row.samples]
    rows.sort(key=lambda row: -row.speed)
    return [row.schedule for row in rows if row.schedule is not None]


def _timed(times: Mapping[Schedule, list[float]], default: Schedule) -> Iterator[Tried]:
    """A row for each schedule that took turns."""
    of_default = statistics.median(times[default])
    for schedule, samples in times.items():
        ms = statistics.median(samples)
        yield Tried(
            _change(default, schedule), schedule, "", ms, of_default / ms, samples=tuple(samples)
        )


class Trial:
    """One problem's calls, each compiled and proved right before it is timed.

    Raises: WrongResult for the default, whose result the others are held against.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: Variant,
        default: Schedule,
    ) -> None:
        self.q, self.k, self.v, self.variant, self.default = q, k, v, variant, default
        self.scale = checked_scale(None, q.shape[3])
        self.right = self.result(default)
        self.need_right(default, self.right, None)

    def plan(self, schedule: Schedule) -> Plan:
        """What a schedule runs."""
        problem = Problem(tuned.NAMES[self.q.dtype], self.q.shape[3], self.v.shape[3])
        return Plan(self.variant, problem, schedule)

    def call(self, schedule: Schedule) -> Callable[[], torch.Tensor]:
        """The call to time."""
        q, k, v, variant = self.q, self.k, self.v, self.variant
        return lambda: attention(q, k, v, variant, schedule=schedule)

    def why_not(self, schedule: Schedule) -> str:
        """Why a schedule is not timed; empty where it is, its result having been found right.

        Raises: WrongResult.
        """
        if spills := cache.get(self.plan(schedule).kernel).resources.spills:
            return f"spills {spills} B a thread"
        result = self.result(schedule)
        rows = differing(result, self.right)
        if rows:
            self.need_right(schedule, result, rows)
        return ""

    def result(self, schedule: Schedule) -> Result:
        """Output and LSE, through memory that held NaN: a row never written cannot look right."""
        q, k, v, variant = self.q, self.k, self.v, self.variant
        poison = q.new_full((*q.shape[:3], v.shape[3]), math.nan)
        del poison  # the caching allocator hands the same block to the next tensor of this size
        if not variant.has_lse:
            return attention(q, k, v, variant, schedule=schedule), None
        return attention_with_lse(q, k, v, variant, schedule=schedule)

    def need_right(
        self, schedule: Schedule, result: Result, rows: list[sampled.Place] | None
    ) -> None:
        """Hold these rows, or sampled ones, against fp64.

        Raises: WrongResult.
        """
        given = (self.q, self.k, self.v, self.variant, self.scale)
        mismatch = sampled.compare(*given, result, rows)
        if mismatch is not None:
            raise WrongResult(f"{_shown(schedule)}: {mismatch}")


def differing(one: Result, other: Result) -> list[sampled.Place]:
    """The rows in which two results differ most, by batch entry and head; none where they agree.

    A NaN or an infinity on one side only is the largest of all differences.
    """
    largest = _distance(one[0], other[0]).amax(3)  # (batch, seqlen_q, heads)
    if one[1] is not None and other[1] is not None:
        largest = torch.maximum(largest, _distance(one[1], other[1]).transpose(1, 2))
    count = min(DIFFERENT, int(torch.count_nonzero(largest)))
    heads = largest.shape[2]
    found: dict[tuple[int, int], list[int]] = {}
    for place in largest.flatten().topk(count).indices.tolist():
        row, head = divmod(place, heads)
        b, row = divmod(row, largest.shape[1])
        found.setdefault((b, head), []).append(row)
    device = largest.device
    return [(*at, torch.tensor(sorted(rows), device=device)) for at, rows in found.items()]


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """|one - other|; 0 where both are the same or both NaN, infinite where one is NaN."""
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one.float() - other.float()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.where(same, 0.0, apart)


def around(
    variant: Variant,
    problem: Problem,
    base: Schedule,
    default: Schedule | None = None,
    group: int = 1,
) -> dict[str, Schedule | str]:
    """`base`, then what differs from it in one field: a schedule, or why there is none.

    The key says what is different from the default schedule, without one that of this problem.
    `group` query heads share a key head: tiles are of as many as divide it.
    """
    default = Plan.default(variant, problem).schedule if default is None else default
    found: dict[str, Schedule | str] = {_change(default, base): base}
    for field, values in VALUES.items():
        for value in values:
            if field == "pack" and group % value:
                continue
            wanted = asdict(base) | {field: value}
            if field == "consumers":
                wanted["tile_m"] = 64 * value
                if value == 1:
                    wanted["overlap"] = ALONE.get(base.overlap, base.overlap)
            change = _change(default, wanted)
            if change not in found:
                try:
                    schedule = Schedule(**wanted)
                    Plan(variant, problem, schedule).check()
                except ValueError as error:
                    found[change] = str(error)
                else:
                    found[change] = schedule
    return found


def candidates(case: Case) -> list[Schedule]:
    """The default schedule, then every legal one that differs from it in one field of `VALUES`."""
    variant, problem = named(case.variant, case.lengths()).variant, Problem(*case.problem)
    default = schedule_for(variant, problem, case.extents)
    found = around(variant, problem, default, default, case.heads // case.kv_heads)
    return [one for one in found.values() if isinstance(one, Schedule)]


def visible_pairs(variant: Variant, q: torch.Tensor, k: torch.Tensor) -> int:
    """How many pairs of query and key the mask shows, in all heads and batch entries."""
    (batch, seqlen_q, heads, _), seqlen_k = q.shape, k.shape[1]
    if variant.mask is None:
        return batch * heads * seqlen_q * seqlen_k
    reads, device = variant.mask.inputs, q.device
    shape = (batch if "b" in reads else 1, heads if "h" in reads else 1)
    at = {
        "b": torch.arange(shape[0], device=device).view(-1, 1, 1, 1),
        "h": torch.arange(shape[1], device=device).view(-1, 1, 1),
        "k": torch.arange(seqlen_k, device=device),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
    }
    count = 0
    rows = torch.arange(seqlen_q, device=device)
    for some in rows.split(max(1, SCORES // (shape[0] * shape[1] * seqlen_k))):
        shown = evaluate(variant.mask, at | {"q": some[:, None]}, variant.captures)
        count += int(shown.expand(*shape, len(some), seqlen_k).sum())
    return count * (batch // shape[0]) * (heads // shape[1])


def run(
    plans: Iterable[tuple[Case, list[Schedule]]],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
) -> Iterator[list[ScheduleRow]]:
    """The rows of each case and its schedules in turn.

    Raises: WrongResult.
    """
    for case, chosen in plans:
        report(f"{case}: {len(chosen)} schedules")
        yield measure(case, chosen, timing, report, seed)


def measure(
    case: Case,
    chosen: list[Schedule],
    timing: Timing,
    report: Callable[[str], None],
    seed: int = 0,
    device: str = "cuda",
) -> list[ScheduleRow]:
    """Check, then time, each schedule, the default first; fastest first, with a line for each.

    Raises: WrongResult.
    """
    inputs = case.inputs(device, seed)
    default, *others = chosen
    with torch.no_grad():
        trial = Trial(inputs.q, inputs.k, inputs.v, inputs.named.variant, default)
        turns = [default]
        for each in others:
            if why_not := trial.why_not(each):
                report(f"left out: {_change(default, each)} {why_not}")
            else:
                turns.append(each)
        timed = take_turns({each: trial.call(each) for each in turns}, timing, seed)
    rows = []
    for one in sorted(_timed(timed, default), key=lambda row: row.ms):
        tflops = case.flops / one.ms / 1e9
        report(f"{tflops:6.0f} TFLOP/s  {one.change}")
        assert one.schedule is not None
        rows.append(
            ScheduleRow(
                **asdict(case),
                schedule=asdict(one.schedule),
                ms=round(one.ms, 6),
                tflops=round(tflops, 2),
                samples=tuple(round(sample, 6) for sample in one.samples),
            )
        )
    return rows


def _change(default: Schedule, other: Schedule | Mapping[str, Any]) -> str:
    """What is different in another schedule, as in "tile_n 112"."""
    wanted = asdict(other) if isinstance(other, Schedule) else other
    changed = [name for name, value in asdict(default).items() if wanted[name] != value]
    return ", ".join(f"{name} {wanted[name]}" for name in changed) or "default"


def _shown(schedule: Schedule) -> str:
    """All fields of a schedule, in a line."""
    return ", ".join(f"{name} {value}" for name, value in asdict(schedule).items())


@contextlib.contextmanager
def _bar(shown: bool) -> Iterator[Progress]:
    """A progress bar on stderr, where that is looked at."""
    console = Console(stderr=True)
    live = shown and (console.is_terminal or console.is_jupyter)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not live) as bar:
        yield bar
