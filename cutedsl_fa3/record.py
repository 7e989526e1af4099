"""Measurement records: what ran where, as JSON, and the README tables made from them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .peers import OURS, PROVIDERS

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "notebooks" / "data"
README = ROOT / "README.md"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
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
class Row:
    """One provider's time on one problem.

    Units: `ms` is the median of `samples` (milliseconds per call); `tflops` counts
    2 x (head_dim + head_dim_v) for each visible pair of query and key, causal as half of all pairs.
    """

    provider: str
    direction: str
    variant: str
    dtype: str
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    kv_heads: int
    ms: float
    tflops: float
    samples: tuple[float, ...]

    @property
    def problem(self) -> tuple[Any, ...]:
        """What rows of different providers have in common."""
        row = asdict(self)
        return tuple(row[name] for name in row if name not in _MEASURED)


_MEASURED = ("provider", "ms", "tflops", "samples")


@dataclass(frozen=True)
class Record:
    """Rows of one run with everything needed to repeat it."""

    meta: dict[str, Any]
    rows: tuple[Row, ...] = field(default=())

    def write(self, path: Path) -> Path:
        """Write as JSON: a row a line.

        Raises: RecordError when meta lacks a field.
        """
        missing = [name for name in META if not self.meta.get(name)]
        if missing:
            raise RecordError(f"record without {', '.join(missing)}: every number has an origin")
        rows = ",\n".join(f"    {json.dumps(asdict(row))}" for row in self.rows)
        meta = json.dumps(self.meta, indent=2).replace("\n", "\n  ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{\n  "meta": {meta},\n  "rows": [\n{rows}\n  ]\n}}\n')
        return path

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record in a file."""
        content = json.loads(path.read_text())
        rows = (Row(**{**row, "samples": tuple(row["samples"])}) for row in content["rows"])
        return cls(content["meta"], tuple(rows))


def place(meta: dict[str, Any], out: Path | None = None) -> Path:
    """Where a record goes: `out` itself if it names a .json file, else a dated file in it."""
    if out is not None and out.suffix == ".json":
        return out
    device = meta["device"].lower().removeprefix("nvidia ").replace(" ", "-")
    moment = datetime.fromisoformat(meta["date"]).strftime("%Y%m%d-%H%M%S")
    kind = "" if meta["timing"] == "burst" else f"{meta['timing']}-"
    return (out or DATA) / f"bench-{kind}{device}-{moment}.json"


def newest(folder: Path = DATA) -> Record | None:
    """The latest burst record by its own date, or None where there is none yet."""
    records = (Record.read(path) for path in sorted(folder.glob("bench-*.json")))
    bursts = [record for record in records if record.meta.get("timing", "burst") == "burst"]
    return max(bursts, key=lambda record: record.meta["date"], default=None)


def collect(commit: str | None = None, allow_dirty: bool = False) -> dict[str, Any]:
    """Everything a record says besides its rows, of this machine and this checkout.

    `commit` names the commit where the tree came without its history.

    Raises: RecordError for uncommitted changes, or a commit that is unknown or contradicted.
    """
    import torch

    from .cache import source_fingerprint
    from .versions import toolchain

    dirty = False
    if (ROOT / ".git").exists():
        head = _run("git", "-C", str(ROOT), "rev-parse", "HEAD")
        if commit and not head.startswith(commit):
            raise RecordError(f"--commit {commit}: this tree is at {head}")
        commit = head
        dirty = bool(_run("git", "-C", str(ROOT), "status", "--porcelain"))
    if not commit:
        raise RecordError("no .git here: name the commit of these sources with --commit")
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
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "peers": {p.name: p.version for p in PROVIDERS.values() if p.name != OURS and p.version},
    }
    return meta | ({"dirty": True} if dirty else {})


def driver_version() -> str:
    """The driver's release, as nvidia-smi says it."""
    return _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def tables(record: Record | None) -> str:
    """The README's numbers: one table of TFLOP/s per provider, with their origin above it."""
    if record is None:
        return "Nothing recorded yet: `make bench` on an SM90 GPU writes a record and this table.\n"
    meta = record.meta
    peers = ", ".join(f"{name} {version}" for name, version in meta.get("peers", {}).items())
    origin = (
        f"{meta['device']}, driver {meta['driver']}, torch {meta['torch']}, "
        f"nvidia-cutlass-dsl {meta['cutlass']} ({meta['toolchain']}), {meta['date'][:10]}, commit "
        f"{meta['commit'][:10]}{' with uncommitted changes' if meta.get('dirty') else ''}."
        f"{f' Peers: {peers}.' if peers else ''}"
    )
    names = [name for name in PROVIDERS if any(row.provider == name for row in record.rows)]
    head = ["variant", "dtype", "head_dim", "seqlen", *names, "ours / best peer"]
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [_line(cells) for cells in _cells(record.rows, names)]
    note = (
        "TFLOP/s of the forward, median of bursts; providers take turns in an order drawn anew "
        "each round, so only ratios within a row mean something. `-`: not offered or not there."
    )
    return "\n".join([origin, "", note, "", *lines, ""])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(rows: tuple[Row, ...], names: list[str]) -> Iterable[list[str]]:
    """The table's body: a line for each problem, in the record's order."""
    by_problem: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row.direction == "forward":
            by_problem.setdefault(row.problem, {})[row.provider] = row
    for found in by_problem.values():
        any_row = next(iter(found.values()))
        speed = {name: row.tflops for name, row in found.items()}
        peers = [value for name, value in speed.items() if name != OURS]
        ratio = f"{speed[OURS] / max(peers):.2f}" if peers and OURS in speed else "-"
        length = str(any_row.seqlen_k)
        if any_row.seqlen_q != any_row.seqlen_k:
            length = f"{any_row.seqlen_q} x {any_row.seqlen_k}"
        width = str(any_row.head_dim)
        if any_row.head_dim != any_row.head_dim_v:
            width = f"{any_row.head_dim}, {any_row.head_dim_v}"
        yield [
            any_row.variant,
            any_row.dtype,
            width,
            length,
            *(f"{speed[name]:.0f}" if name in speed else "-" for name in names),
            ratio,
        ]


def with_tables(text: str, record: Record | None) -> str:
    """A README's text with what stands between the markers made from a record.

    Raises: RecordError when the markers are missing.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise RecordError(f"README without the markers {START} and {END}")
    return f"{before}{START}\n{tables(record)}{END}{after}"
