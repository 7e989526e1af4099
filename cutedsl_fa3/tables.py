"""The README's numbers, made from the newest records; a test holds the README to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from .cases import PLAIN, shown
from .peers import OURS, PROVIDERS
from .record import (
    DATA,
    ROOT,
    BackwardRow,
    CallRow,
    GemmRow,
    PeakRow,
    Record,
    RecordError,
    Row,
    newest,
    sustained_beside,
)

README = ROOT / "README.md"
NOTHING = "Nothing recorded yet: {} on an SM90 GPU writes a record and this table.\n"
COMPARED = "fa4"  # the peer whose error stands beside ours
SUSTAINED = "`sustained`: {} in windows at the power limit, of a run of its own."


def refreshed(text: str, folder: Path = DATA) -> str:
    """A README's text with its tables made from the newest records in `folder`.

    Raises: RecordError when a table's markers are missing.
    """
    for kind, table in TABLES.items():
        record = newest(folder, kind)
        sustained = None if record is None else sustained_beside(record, folder, kind)
        text = filled(text, kind, table(record, sustained))
    return text


def filled(text: str, name: str, content: str) -> str:
    """`text` with `content` between the markers of this name.

    Raises: RecordError when the markers are missing.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found_start, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not found_start or not found_end:
        raise RecordError(f"README without the markers {start} and {end}")
    return f"{before}{start}\n{content}{end}{after}"


def attention_table(record: Record | None, sustained: Record | None = None) -> str:
    """TFLOP/s per provider, how fast and how exact ours is beside the peers, and the origin.

    With a sustained record of the same commit also how fast it is under sustained load.
    """
    if record is None:
        return NOTHING.format("`make bench`")
    names = _named_in(record.rows)
    ratios = ["speed / best peer", *(["sustained"] if sustained else []), f"error / {COMPARED}"]
    head = ["variant", "dtype", "head_dim", "seqlen", *names, *ratios]
    note = (
        "TFLOP/s of the forward, median of bursts; providers take turns in an order drawn anew "
        "each round, so only ratios within a row mean something. Speed and error are ours over "
        f"that of the fastest peer and of {COMPARED}; errors are the largest against fp64 in the "
        "same sampled rows, so below 1 is more exact. `-`: not offered or not there."
        f"{' ' + SUSTAINED.format('speed over the best peer') if sustained else ''}"
    )
    return _table(record, note, head, _attention_cells(record.rows, names, sustained))


def variants_table(record: Record | None, sustained: Record | None = None) -> str:
    """What each variant costs beside our own plain causal and beside the peers, and the origin.

    With a sustained record of the same commit also what it costs under sustained load.
    """
    if record is None:
        return NOTHING.format("`python -m cutedsl_fa3 bench-variants`")
    peers = [name for name in _named_in(record.rows) if name != OURS]
    head = _variant_head(peers, sustained)
    sizes = dict.fromkeys(f"batch {row.batch}, {row.heads} heads" for row in record.rows)
    note = (
        f"Ours in ms and TFLOP/s, median of bursts, at {'; '.join(sizes)}. All variants of a head "
        "size and all kernels take turns in an order drawn anew each round. TFLOP/s count visible "
        f"pairs, causal as half of all; `time / {PLAIN}` is our time over that of our own plain "
        "causal, and beside a peer's time stands its time over ours. `flex` is its kernel alone, "
        "its block mask made outside of the time; ours finds its tiles within it. `-`: not offered."
        f"{' `flex_fa4` is the same on the kernel of FA4.' if 'flex_fa4' in peers else ''}"
        f"{' ' + SUSTAINED.format(f'time / {PLAIN}') if sustained else ''}"
    )
    return _table(record, note, head, _variant_cells(record.rows, peers, sustained))


def backward_table(record: Record | None, sustained: Record | None = None) -> str:
    """The backward of plain attention, then of variants, then the memory of a step; the origin."""
    if record is None:
        return NOTHING.format("`python -m cutedsl_fa3 bench-backward`")
    plain = plain_backward(record)
    others = tuple(r for r in record.rows if isinstance(r, BackwardRow) and r not in plain)
    parts = [_origin(record.meta)]
    parts += [_backward_plain(plain, sustained)] if plain else []
    parts += [_backward_variants(others, sustained)] if others else []
    parts += [_peaks([row for row in record.rows if isinstance(row, PeakRow)])]
    return "\n\n".join(filter(None, parts)) + "\n"


def plain_backward(record: Record) -> tuple[BackwardRow, ...]:
    """The rows of full and causal attention, without those that took turns with variants."""
    rows = [row for row in record.rows if isinstance(row, BackwardRow)]
    varied = {_lengths(row) for row in rows if row.variant not in ("full", PLAIN)}
    return tuple(row for row in rows if _lengths(row) not in varied)


def _backward_plain(rows: tuple[Row, ...], sustained: Record | None) -> str:
    names = _named_in(rows)
    head = ["variant", "dtype", "head_dim", "seqlen", *names, "speed / best peer"]
    head += ["sustained"] if sustained else []
    head += [f"error / {COMPARED}", "time of deterministic / default"]
    found = _by_problem(rows).values()
    speeds = [speed for one in found if (speed := _speed_over(one))]
    mean = f" Their geometric mean is {geometric_mean(speeds):.2f}." if speeds else ""
    note = (
        "TFLOP/s of the backward alone, 2.5 times the forward's operations, median of bursts, "
        f"providers in turns as above.{mean} Errors are the largest of dq, dk and dv against fp64 "
        "in one head, the worst of the three over that of the peer. `deterministic`: dq is summed "
        "in a fixed order."
    )
    return f"{note}\n\n{_grid(head, _backward_cells(rows, names, sustained))}"


def _backward_cells(
    rows: tuple[Row, ...], names: list[str], sustained: Record | None
) -> Iterable[list[str]]:
    """A line for each problem without what is asked for besides."""
    times = _times(rows)
    chosen = tuple(row for row in rows if row == row.beside(row.variant))
    for row, cells in zip(
        (next(iter(found.values())) for found in _by_problem(chosen).values()),
        _attention_cells(chosen, names, sustained),
        strict=True,
    ):
        default = times.get((row.problem, OURS))
        fixed = times.get((replace(row, deterministic=True).problem, OURS))
        yield [*cells, f"{fixed / default:.2f}" if fixed and default else "-"]


def _backward_variants(rows: tuple[Row, ...], sustained: Record | None) -> str:
    peers = [name for name in _named_in(rows) if name != OURS]
    sizes = dict.fromkeys(f"batch {row.batch}, {row.heads} heads" for row in rows)
    note = (
        f"The backward of variants in ms and TFLOP/s, at {'; '.join(sizes)}, beside our own plain "
        f"{PLAIN} and the peers as for the forward. `+ gradient`: with that of the captured tensor."
    )
    head = _variant_head(peers, sustained)
    return f"{note}\n\n{_grid(head, _variant_cells(rows, peers, sustained))}"


def _peaks(rows: list[PeakRow]) -> str:
    """MiB by length and provider, and how ours grows with the length."""
    if not rows:
        return ""
    names = [name for name in PROVIDERS if any(row.provider == name for row in rows)]
    by_length: dict[int, dict[str, PeakRow]] = {}
    for row in sorted(rows, key=lambda row: row.seqlen_q):
        by_length.setdefault(row.seqlen_q, {})[row.provider] = row
    one = rows[0]
    note = (
        "Memory that a forward with its backward holds besides its inputs at its peak, in MiB, of "
        f"{one.variant} {one.dtype} at head size {shown((one.head_dim, one.head_dim_v))}, batch "
        f"{one.batch}, {one.heads} heads; and ours for each query, in KiB."
    )
    cells = []
    for length, found in by_length.items():
        mebi = (f"{found[n].peak_bytes / 2**20:.0f}" if n in found else "-" for n in names)
        ours = found.get(OURS)
        each = f"{ours.peak_bytes / 2**10 / (length * ours.batch):.1f}" if ours else "-"
        cells.append([str(length), *mebi, each])
    return f"{note}\n\n{_grid(['seqlen', *names, 'ours / query'], cells)}"


def gemm_table(record: Record | None, sustained: Record | None = None) -> str:
    """TFLOP/s by cluster and depth, the best depth as a share of cuBLAS, and the origin."""
    if record is None:
        return NOTHING.format("`make bench-gemm`")
    ours = [row for row in record.rows if row.provider == OURS]
    (cublas,) = (row for row in record.rows if row.provider != OURS)
    depths = sorted({row.stages for row in ours})
    best = max(ours, key=lambda row: row.tflops)
    note = (
        f"TFLOP/s of C = A @ B^T at m, n, k = {best.m}, {best.n}, {best.k} in {best.dtype} with "
        f"tiles of {best.tile_m} x {best.tile_n}, all taking turns with cuBLAS, which reaches "
        f"{cublas.tflops:.0f}. The best, {best.stages} stages in clusters of {_cluster(best)}, is "
        f"{best.tflops / cublas.tflops:.2f} of it."
    )
    head = ["cluster", *(f"{n} stage{'s' if n > 1 else ''}" for n in depths), "best / cuBLAS"]
    return _table(record, note, head, _gemm_cells(ours, depths, cublas))


def call_table(record: Record | None, sustained: Record | None = None) -> str:
    """What the host spends on a call, cached and first, in lines, and the origin."""
    if record is None:
        return NOTHING.format("`python -m cutedsl_fa3 bench-call`")
    note = (
        "Time of the host: of a call of a kind that was seen before, until its launch is queued; "
        "of the first call of a process, imports apart, until its result is there. Medians."
    )
    head = ["step", "captured tensors", "time"]
    return _table(record, note, head, _call_cells(record.rows))


def _call_cells(rows: Iterable[CallRow]) -> Iterable[list[str]]:
    for row in rows:
        if row.step == "cached call" or row.step.startswith("first call"):
            time = f"{row.us:.1f} us" if row.us < 1000 else f"{row.us / 1000:.0f} ms"
            yield [row.step, str(row.captures), time]


def _table(record: Record, note: str, head: list[str], body: Iterable[list[str]]) -> str:
    return "\n".join([_origin(record.meta), "", note, "", _grid(head, body), ""])


def _grid(head: list[str], body: Iterable[list[str]]) -> str:
    return "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, body)])


def _named_in(rows: Iterable[Row]) -> list[str]:
    """The providers of these rows, in the order of all."""
    found = {row.provider for row in rows}
    return [name for name in PROVIDERS if name in found]


def _variant_head(peers: list[str], sustained: Record | None) -> list[str]:
    head = ["variant", "dtype", "head_dim", "seqlen", "ms", "TFLOP/s", f"time / {PLAIN}"]
    head += ["sustained"] if sustained else []
    return head + [title for name in peers for title in (f"{name} ms", f"{name} / ours")]


def _origin(meta: dict[str, Any]) -> str:
    wheels = {PROVIDERS[n].distribution: version for n, version in meta.get("peers", {}).items()}
    peers = ", ".join(f"{name} {version}" for name, version in wheels.items() if name != "torch")
    return (
        f"{meta['device']}, driver {meta['driver']}, torch {meta['torch']}, "
        f"nvidia-cutlass-dsl {meta['cutlass']} ({meta['toolchain']}), {meta['date'][:10]}, commit "
        f"{meta['commit'][:10]}{' with uncommitted changes' if meta.get('dirty') else ''}."
        f"{f' Peers: {peers}; the others are torch.' if peers else ''}"
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _attention_cells(
    rows: tuple[Row, ...], names: list[str], sustained: Record | None
) -> Iterable[list[str]]:
    """A line for each problem, in the record's order."""
    held = _by_problem(sustained.rows) if sustained else {}
    for problem, found in _by_problem(rows).items():
        row = next(iter(found.values()))
        speeds = (f"{found[name].tflops:.0f}" if name in found else "-" for name in names)
        ratios = [_speed(found), *([_speed(held.get(problem, {}))] if sustained else [])]
        yield [row.variant, row.dtype, *_sizes(row), *speeds, *ratios, _error(found)]


def _by_problem(rows: tuple[Row, ...]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """The rows by problem, then by provider, in the record's order."""
    by_problem: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if isinstance(row, Row):
            by_problem.setdefault(row.problem, {})[row.provider] = row
    return by_problem


def _lengths(row: Row) -> tuple[int, ...]:
    """What rows of variants have in common: all sizes but those of a head."""
    return row.seqlen_q, row.seqlen_k, row.batch, row.heads, row.kv_heads


def _sizes(row: Row) -> tuple[str, str]:
    """Head sizes and lengths, two where they differ."""
    lengths = dict.fromkeys((row.seqlen_q, row.seqlen_k))
    return shown((row.head_dim, row.head_dim_v)), " x ".join(map(str, lengths))


def _variant_cells(
    rows: tuple[Row, ...], peers: list[str], sustained: Record | None
) -> Iterable[list[str]]:
    """A line for each variant and size that we have a time for, in the record's order."""
    times = _times(rows)
    for row in (row for row in rows if row.provider == OURS):
        cells = [row.title, row.dtype, *_sizes(row), f"{row.ms:.3f}", f"{row.tflops:.0f}"]
        cells += [_cost(row, times)]
        cells += [_cost(row, _times(sustained.rows))] if sustained else []
        for peer in peers:
            ms = times.get((row.problem, peer))
            cells += [f"{ms:.3f}", f"{ms / row.ms:.2f}"] if ms else ["-", "-"]
        yield cells


def _times(rows: Iterable[Row]) -> dict[tuple[Any, ...], float]:
    return {(row.problem, row.provider): row.ms for row in rows if isinstance(row, Row)}


def _cost(row: Row, times: dict[tuple[Any, ...], float]) -> str:
    """Our time over that of our own plain causal of the same sizes."""
    plain = times.get((row.beside(PLAIN).problem, OURS))
    ours = times.get((row.problem, OURS))
    return f"{ours / plain:.2f}" if ours and plain else "-"


def _speed(found: dict[str, Row]) -> str:
    """Our speed over the best peer's, as text."""
    speed = _speed_over(found)
    return f"{speed:.2f}" if speed else "-"


def _speed_over(found: dict[str, Row]) -> float | None:
    """Our speed over the best peer's."""
    ours, speeds = found.get(OURS), [row.tflops for name, row in found.items() if name != OURS]
    return ours.tflops / max(speeds) if ours and speeds else None


def _error(found: dict[str, Row]) -> str:
    """Our error over that of the peer to compare with; the worst of several."""
    ours, peer = found.get(OURS), found.get(COMPARED)
    if not ours or not peer or not all(peer.all_errors):
        return "-"
    ratios = (a / b for a, b in zip(ours.all_errors, peer.all_errors, strict=True))
    return f"{max(ratios):.2f}"


def _gemm_cells(ours: list[GemmRow], depths: list[int], cublas: GemmRow) -> Iterable[list[str]]:
    """A line for each cluster shape, in the record's order."""
    by_cluster: dict[str, dict[int | None, float]] = {}
    for row in ours:
        by_cluster.setdefault(_cluster(row), {})[row.stages] = row.tflops
    for cluster, speed in by_cluster.items():
        cells = (f"{speed[depth]:.0f}" if depth in speed else "-" for depth in depths)
        yield [cluster, *cells, f"{max(speed.values()) / cublas.tflops:.2f}"]


def _cluster(row: GemmRow) -> str:
    m, n = row.cluster or (1, 1)
    return f"{m} x {n}"


TABLES: dict[str, Callable[[Record | None, Record | None], str]] = {
    "bench": attention_table,
    "variants": variants_table,
    "gemm": gemm_table,
    "call": call_table,
    "backward": backward_table,
}
