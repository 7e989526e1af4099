"""Measurement records: what ran where, as JSON.

A record is a file of `meta` (everything needed to repeat the run) and `rows`; the first word of its
name says what was measured: `bench` and `variants` (rows of `Row`), `gemm` (`GemmRow`), `tune`,
`table` and `leads` (`ScheduleRow`), `ladder` (`LadderRow`), `call` (`CallRow`), `train`
(`TrainRow`), `timeline` (`TimelineRow`) or `backward` (`BackwardRow`, `PeakRow`). One marked
`partial` holds what was measured before a run ended early; no table is made from it.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "notebooks" / "data"
META = (
    "device",
    "driver",
    "torch",
    "cutlass",
    "toolchain",
    "commit",
    "kernel_source_hash",
    "date",
)


class RecordError(ValueError):
    """A record that would not say what was measured; the message says what is missing."""


@dataclass(frozen=True)
class Sizes:
    """A variant by name, and the type and sizes of what it runs on."""

    variant: str
    dtype: str
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class Row(Sizes):
    """One provider's time on one problem.

    Units: `ms` is the median of `samples` (milliseconds per call); `tflops` counts
    2 x (head_dim + head_dim_v) for each visible pair of query and key, causal as half of all pairs.
    `max_error` is the largest difference from fp64 in rows that are the same for every provider.
    """

    provider: str
    direction: str
    ms: float
    tflops: float
    max_error: float
    samples: tuple[float, ...]

    @property
    def problem(self) -> tuple[Any, ...]:
        """What rows of different providers have in common."""
        row = asdict(self)
        return tuple(row[name] for name in row if name not in _MEASURED)

    @property
    def title(self) -> str:
        """The variant as a table names it."""
        return self.variant

    @property
    def all_errors(self) -> tuple[float, ...]:
        """Each largest error, of a backward those of its three results."""
        return (self.max_error,)

    def beside(self, variant: str) -> Row:
        """A row of another variant on these sizes, as one looks for it."""
        return replace(self, variant=variant)


@dataclass(frozen=True)
class BackwardRow(Row):
    """One provider's time for the gradients of one problem, the forward not counted.

    `deterministic`: equal bits each time were asked for; `captured`: gradients of the variant's
    captured tensors besides. `errors`: of dq, dk, dv in one head, the same for every provider.
    Units: as for `Row`; `tflops` counts 2.5 times the forward's; `max_error` is the largest of
    `errors`.
    """

    deterministic: bool = False
    captured: bool = False
    errors: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def title(self) -> str:
        """The variant, and what was asked for besides."""
        besides = " + gradient" if self.captured else ""
        return f"{self.variant}{besides}{', deterministic' if self.deterministic else ''}"

    @property
    def all_errors(self) -> tuple[float, ...]:
        return self.errors

    def beside(self, variant: str) -> BackwardRow:
        """As of a `Row`, without what was asked for besides."""
        return replace(self, variant=variant, deterministic=False, captured=False)


@dataclass(frozen=True)
class PeakRow(Sizes):
    """The most memory that a forward with its backward holds besides its inputs.

    Units: bytes, of which `peak_bytes` is the most of `samples`.
    """

    provider: str
    peak_bytes: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class GemmRow:
    """One kernel's time on C = A @ B^T; where cuBLAS chose tiles and depth, these are None.

    Units: as for `Row`; `cluster` counts CTAs along (m, n).
    """

    provider: str
    m: int
    n: int
    k: int
    dtype: str
    tile_m: int | None
    tile_n: int | None
    stages: int | None
    consumers: int | None
    cluster: tuple[int, int] | None
    ms: float
    tflops: float
    max_error: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class ScheduleRow(Sizes):
    """One schedule's time on one problem; units as for `Row`.

    `schedule` has the fields of a `Schedule`, as far as it had them when this was measured.
    """

    schedule: dict[str, Any]
    ms: float
    tflops: float
    samples: tuple[float, ...]

    def follows(self, schedule: Any) -> bool:
        """Whether this row is of that schedule; a field that it lacks had the default then."""
        defaults = {each.name: each.default for each in fields(schedule)}
        return defaults | self.schedule == asdict(schedule)


@dataclass(frozen=True)
class LadderRow:
    """One step of the ladder, or a peer, on one problem; None is what is not known of a peer.

    `number`: of the step, 0 for a peer; other depths of the last step have its number. `registers`:
    of a thread at launch; `budgets`: of each role after setmaxnreg, None where it is not used.
    Units: `smem` in bytes a CTA, `spills` in bytes a thread, others as for `Row`.
    """

    rung: str
    number: int
    variant: str
    dtype: str
    head_dim: int
    seqlen: int
    batch: int
    heads: int
    tile_m: int | None
    tile_n: int | None
    stages: int | None
    threads: int | None
    registers: int | None
    budgets: tuple[int, ...] | None
    smem: int | None
    spills: int | None
    ms: float
    tflops: float
    max_error: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class CallRow:
    """Host time of one step of a call; `captures` counts captured tensors.

    Units: `us` is the median of `samples` (microseconds).
    """

    step: str
    captures: int
    us: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class TrainRow:
    """One training of a small model (training.py), by one kind of attention.

    `losses`: of each step; `floor`: the least that is possible on these tokens; `bias`: what was
    learned, by layer, head and distance; empty where there is none. `weight_error`, `bias_error`:
    of the first step's gradients beside fp64, |difference| / |its| in norm.
    Units: losses in nats a token; `ms` is the median of `samples` (milliseconds a step).
    """

    attention: str
    dtype: str
    seqlen: int
    window: int
    lags: tuple[int, int]
    heads: int
    head_dim: int
    layers: int
    batch: int
    floor: float
    losses: tuple[float, ...]
    bias: tuple[tuple[tuple[float, ...], ...], ...]
    weight_error: float | None
    bias_error: float | None
    ms: float
    samples: tuple[float, ...]
    peak_bytes: int


@dataclass(frozen=True)
class TimelineRow(Sizes):
    """What one CTA of a call did when (timeline/); `schedule` has the fields of a `Schedule`.

    `intervals`: (lane, kind, what, tile, start, end). `dropped`: stamps that found no room. `ghz`:
    how fast its multiprocessor ran, None where that is not known. `slowdown`: time of the kernel
    that notes the clock over that of the shipped one.
    Units: clocks.
    """

    schedule: dict[str, Any]
    title: str
    cta: int
    dropped: int
    ghz: float | None
    slowdown: float
    intervals: tuple[tuple[str, str, str, int, float, float], ...]


_MEASURED = ("provider", "ms", "tflops", "max_error", "errors", "samples")


@dataclass(frozen=True)
class Record:
    """Rows of one run with everything needed to repeat it."""

    meta: dict[str, Any]
    rows: tuple[Any, ...] = field(default=())

    def write(self, path: Path) -> Path:
        """Write as JSON, a row a line, in one step: a run may be killed at any moment.

        Raises: RecordError when meta lacks a field.
        """
        missing = [name for name in META if not self.meta.get(name)]
        if missing:
            raise RecordError(f"record without {', '.join(missing)}: every number has an origin")
        rows = ",\n".join(f"    {json.dumps(asdict(row))}" for row in self.rows)
        meta = json.dumps(self.meta, indent=2).replace("\n", "\n  ")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text(f'{{\n  "meta": {meta},\n  "rows": [\n{rows}\n  ]\n}}\n')
        return beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record in a file."""
        content = json.loads(path.read_text())
        return cls(content["meta"], tuple(_row(fields) for fields in content["rows"]))


def _row(
    written: dict[str, Any],
) -> Row | PeakRow | GemmRow | ScheduleRow | LadderRow | CallRow | TrainRow | TimelineRow:
    read = _tuples(written)
    if "losses" in read:
        return TrainRow(**{name: _deep(value) for name, value in written.items()})
    if "intervals" in read:
        kept = _tuples(written["schedule"])
        return TimelineRow(**{n: _deep(v) for n, v in written.items()} | {"schedule": kept})
    if "peak_bytes" in read:
        return PeakRow(**read)
    if "deterministic" in read:
        return BackwardRow(**read)
    if "step" in read:
        return CallRow(**read)
    if "rung" in read:
        return LadderRow(**read)
    if "schedule" in read:
        return ScheduleRow(**{**read, "schedule": _tuples(read["schedule"])})
    if "overlap" in read:
        return _first_kind(read)
    return GemmRow(**read) if "cluster" in read else Row(**read)


def _tuples(written: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in written.items()}


def _deep(value: Any) -> Any:
    return tuple(map(_deep, value)) if isinstance(value, list) else value


def _first_kind(read: dict[str, Any]) -> ScheduleRow:
    """A row of the first records: one head size, the schedule's fields among the others, spills."""
    own = {each.name for each in fields(ScheduleRow)}
    schedule = {name: v for name, v in read.items() if name not in own and name != "spills"}
    rest = {name: v for name, v in read.items() if name in own}
    return ScheduleRow(**{"head_dim_v": rest["head_dim"], **rest, "schedule": schedule})


def place(meta: dict[str, Any], out: Path | None = None, kind: str = "bench") -> Path:
    """Where a record goes: `out` itself if it names a .json file, else a dated file in it."""
    if out is not None and out.suffix == ".json":
        return out
    device = meta["device"].lower().removeprefix("nvidia ").replace(" ", "-")
    moment = datetime.fromisoformat(meta["date"]).strftime("%Y%m%d-%H%M%S")
    timing = "" if meta.get("timing", "burst") == "burst" else f"{meta['timing']}-"
    return (out or DATA) / f"{kind}-{timing}{device}-{moment}.json"


def newest(folder: Path = DATA, kind: str = "bench", timing: str = "burst") -> Record | None:
    """The latest complete record of a timing by its own date, or None where there is none yet."""
    records = (Record.read(path) for path in sorted(folder.glob(f"{kind}-*.json")))
    whole = [
        record
        for record in records
        if record.meta.get("timing", "burst") == timing and not record.meta.get("partial")
    ]
    return max(whole, key=lambda record: record.meta["date"], default=None)


def sustained_beside(record: Record, folder: Path = DATA, kind: str = "bench") -> Record | None:
    """The newest sustained record of the same commit, if there is one."""
    found = newest(folder, kind, "sustained")
    same = found is not None and found.meta["commit"] == record.meta["commit"]
    return found if same else None


def collect(commit: str | None = None, allow_dirty: bool = False) -> dict[str, Any]:
    """Everything a record says besides its rows, of this machine and this checkout.

    `commit` names the commit where the tree came without its history.

    Raises: RecordError for uncommitted changes, or a commit that is unknown or contradicted.
    """
    import torch

    from .cache import source_fingerprint
    from .schedules import table_fingerprint
    from .versions import toolchain

    dirty = False
    head = _head()
    if head:
        if commit and not head.startswith(commit):
            raise RecordError(f"--commit {commit}: this tree is at {head}")
        commit = head
        dirty = bool(_run("git", "-C", str(ROOT), "status", "--porcelain"))
    if not commit:
        raise RecordError("no history here: name the commit of these sources with --commit")
    if dirty and not allow_dirty:
        raise RecordError(
            "uncommitted changes: commit them, or pass --allow-dirty for a record that says so"
        )
    tools = toolchain()
    meta = {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cutlass": tools.cutlass,
        "toolchain": f"{tools.flavour} ptxas {tools.ptxas}",
        "commit": commit,
        "kernel_source_hash": source_fingerprint(),
        "schedules": table_fingerprint(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return meta | ({"dirty": True} if dirty else {})


def _head() -> str:
    """The commit checked out here; empty where the tree came without its history."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        return _run("git", "-C", str(ROOT), "rev-parse", "--verify", "HEAD")
    except subprocess.CalledProcessError:  # a repository without a commit
        return ""


def here() -> str:
    """This machine in a line, to stand before what it prints: a notebook's stored outputs.

    Where an SM90 GPU runs kernels, all that a record says of it; else only what compiles them.
    """
    import torch

    from .compile import device_capabilities
    from .versions import toolchain

    tools = toolchain()
    made = f"nvidia-cutlass-dsl {tools.cutlass} ({tools.flavour} ptxas {tools.ptxas})"
    if (9, 0) not in device_capabilities():
        return f"no GPU of capability 9.0 here: nothing below ran on one; {made}"
    from .cache import source_fingerprint

    commit = f"commit {head[:10]}, " if (head := _head()) else ""
    return (
        f"{torch.cuda.get_device_name()}, driver {driver_version()}, torch {torch.__version__}, "
        f"{made}, {datetime.now(UTC):%Y-%m-%d}, {commit}kernel sources {source_fingerprint()[:10]}"
    )


def driver_version() -> str:
    """The driver's release, as nvidia-smi says it."""
    return _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
