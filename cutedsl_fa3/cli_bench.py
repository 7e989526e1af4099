"""Commands that measure on a GPU and write a record; parts of the command line in cli.py."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer()

Rounds = Annotated[int | None, typer.Option(help="Rounds, each in an order of its own.")]
Seed = Annotated[int, typer.Option(help="Of inputs, orders and sampled rows.")]
Out = Annotated[Path | None, typer.Option(help="Folder or .json file of the record.")]
Commit = Annotated[
    str | None, typer.Option(help="The commit of these sources, where .git is absent.")
]
AllowDirty = Annotated[bool, typer.Option(help="Record uncommitted changes, and say so.")]
HeadDims = Annotated[
    str, typer.Option(help="Head sizes by comma; 192x128 is 192 of Q and K beside 128 of V.")
]
NATIVE = "64,96,128,192x128,192,256"  # head sizes whose tiles are of their own size


def need_compiler() -> None:
    """Exit with 2 where the DSL is absent or of another version, saying which is accepted."""
    from .versions import VersionError, require_dsl

    try:
        require_dsl()
    except VersionError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(2) from None


@app.command("bench")
def run_bench(
    variant: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: full and causal.")
    ] = None,
    providers: Annotated[
        str, typer.Option(help="Kernels to time, by comma; fa2 and flex only where named here.")
    ] = "cutedsl_fa3,fa3,fa4,cudnn",
    dtypes: Annotated[str, typer.Option(help="bf16, fp16, by comma.")] = "bf16",
    head_dims: HeadDims = NATIVE,
    seqlens: Annotated[
        str | None,
        typer.Option(
            help="Lengths, by comma; default: 4096 and 16384, at head sizes 64 and 128 also 1024."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of all sequences together.")] = 16384,
    hidden: Annotated[int, typer.Option(help="heads x head_dim, rounded down to heads.")] = 2048,
    group: Annotated[int, typer.Option(help="Query heads that share a key head.")] = 1,
    rounds: Rounds = None,
    sustained: Annotated[
        bool, typer.Option(help="Long windows at the power limit instead of bursts.")
    ] = False,
    seed: Seed = 0,
    out: Out = None,
    commit: Commit = None,
    allow_dirty: AllowDirty = False,
    readme: Annotated[
        bool, typer.Option(help="Measure nothing: put the newest records' tables in README.md.")
    ] = False,
) -> None:
    """Time the forward beside its peers, and write a record with everything needed to repeat it.

    After every case the record is on disk, marked as partial; a run that ends early leaves it.
    By default: plain full and causal attention at every native head size.
    """
    if readme:
        from . import tables

        tables.README.write_text(tables.refreshed(tables.README.read_text()))
        return
    need_compiler()
    from . import bench, cases, peers, record

    timing = bench.SUSTAINED if sustained else bench.BURST
    timing = timing if rounds is None else replace(timing, rounds=rounds)
    with _refusals():
        grid = cases.Grid(
            variants=tuple(variant or ("full", "causal")),
            dtypes=tuple(dtypes.split(",")),
            head_dims=cases.head_dims(head_dims),
            seqlens=None if seqlens is None else _lengths(seqlens),
            tokens=tokens,
            hidden=hidden,
            group=group,
        )
        chosen, every = bench.chosen_providers(providers.split(",")), grid.cases()
        bench.require_gpu()
        meta = record.collect(commit, allow_dirty) | {"timing": timing.name}
    meta |= {"peers": peers.versions()}
    _kept(bench.run(every, chosen, timing, report=_say, seed=seed), meta, record.place(meta, out))


@app.command("bench-variants")
def run_bench_variants(
    variant: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; default: ten of them. Plain causal always takes part."),
    ] = None,
    providers: Annotated[
        str, typer.Option(help="Kernels to time, by comma.")
    ] = "cutedsl_fa3,fa4,flex",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    head_dims: HeadDims = "64,128",
    seqlen: Annotated[int, typer.Option(help="Length of queries and keys.")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 2,
    heads: Annotated[int, typer.Option(help="Of queries and of keys.")] = 16,
    rounds: Rounds = None,
    seed: Seed = 0,
    out: Out = None,
    commit: Commit = None,
    allow_dirty: AllowDirty = False,
) -> None:
    """Time variants beside our own plain causal and beside the peers, and write a record.

    All variants of a head size, and all kernels, take turns in one order drawn anew each round.
    """
    need_compiler()
    from . import bench, cases, peers, record

    timing = bench.BURST if rounds is None else replace(bench.BURST, rounds=rounds)
    with _refusals():
        names, dims = variant or cases.VARIANTS, cases.head_dims(head_dims)
        groups = cases.groups(names, dtype, dims, seqlen, batch, heads)
        chosen = bench.chosen_providers(providers.split(","))
        bench.require_gpu()
        meta = record.collect(commit, allow_dirty) | {"timing": timing.name}
    meta |= {"peers": peers.versions()}
    path = record.place(meta, out, "variants")
    _kept(bench.run_together(groups, chosen, timing, report=_say, seed=seed), meta, path)


@app.command("bench-gemm")
def run_bench_gemm(
    size: Annotated[str, typer.Option(help="m, n and k by comma, or one for all.")] = "8192",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    tile_m: Annotated[int, typer.Option(help="Rows of a tile of C.")] = 128,
    tile_n: Annotated[int, typer.Option(help="Columns of a tile of C.")] = 256,
    consumers: Annotated[int, typer.Option(help="Consumer warpgroups.")] = 2,
    stages: Annotated[str, typer.Option(help="Ring depths, by comma.")] = "1,2,3,4",
    clusters: Annotated[str, typer.Option(help="CTAs along m x n, by comma.")] = "1x1,2x1,1x2",
    rounds: Rounds = None,
    seed: Seed = 0,
    out: Out = None,
    commit: Commit = None,
    allow_dirty: AllowDirty = False,
) -> None:
    """Time the GEMM at every depth and cluster shape beside cuBLAS, and write a record."""
    need_compiler()
    from . import bench, bench_gemm, record

    timing = bench.BURST if rounds is None else replace(bench.BURST, rounds=rounds)
    with _refusals():
        lengths = [int(part) for part in size.split(",")]
        if len(lengths) not in (1, 3):
            raise ValueError(f"--size {size}: one number, or m,n,k")
        problem = bench_gemm.Size(*(lengths * 3)[:3], dtype=dtype)
        chosen = bench_gemm.schedules(
            tile_m,
            tile_n,
            consumers,
            tuple(map(int, stages.split(","))),
            tuple(_extents(shape) for shape in clusters.split(",")),
        )
        bench_gemm.require_fit(chosen, dtype)
        bench.require_gpu()
        meta = record.collect(commit, allow_dirty) | {"timing": timing.name}
    rows = bench_gemm.measure(problem, chosen, timing, report=_say, seed=seed)
    path = record.place(meta, out, "gemm")
    _say(f"record: {record.Record(meta, tuple(rows)).write(path)}")


@app.command("bench-call")
def run_bench_call(
    out: Out = None,
    commit: Commit = None,
    allow_dirty: AllowDirty = False,
) -> None:
    """Time what the host spends on a call, cached and first, and write a record."""
    need_compiler()
    from . import bench, bench_call, record

    with _refusals():
        bench.require_gpu()
        meta = record.collect(commit, allow_dirty)
    rows = bench_call.measure(report=_say)
    _say(f"record: {record.Record(meta, tuple(rows)).write(record.place(meta, out, 'call'))}")


@app.command("tune")
def run_tune(
    variant: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: full and causal.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    head_dims: HeadDims = "64,128",
    seqlens: Annotated[str, typer.Option(help="Lengths, by comma.")] = "8192",
    tokens: Annotated[int, typer.Option(help="Tokens of all sequences together.")] = 16384,
    rounds: Rounds = None,
    seed: Seed = 0,
    out: Out = None,
    commit: Commit = None,
    allow_dirty: AllowDirty = False,
) -> None:
    """Time every schedule that differs in one field from the default, and write a record."""
    need_compiler()
    from . import bench, cases, record, tuning

    timing = bench.BURST if rounds is None else replace(bench.BURST, rounds=rounds)
    with _refusals():
        grid = cases.Grid(
            variants=tuple(variant or ("full", "causal")),
            dtypes=(dtype,),
            head_dims=cases.head_dims(head_dims),
            seqlens=_lengths(seqlens),
            tokens=tokens,
        )
        plans = [(case, tuning.candidates(case)) for case in grid.cases()]
        bench.require_gpu()
        meta = record.collect(commit, allow_dirty) | {"timing": timing.name}
    measured = tuning.run(plans, timing, report=_say, seed=seed)
    _kept(measured, meta, record.place(meta, out, "tune"))


def _kept(measured: Iterator[list[Any]], meta: dict[str, Any], path: Path) -> None:
    """Write the record after each list of rows, as partial until the last."""
    from .record import Record

    _say(f"record, partial until the last case: {path}")
    rows: list[Any] = []
    for more in measured:
        rows += more
        Record(meta | {"partial": True}, tuple(rows)).write(path)
    _say(f"record: {Record(meta, tuple(rows)).write(path)}")


def _lengths(text: str) -> tuple[int, ...]:
    """Raises: ValueError for what is no list of lengths."""
    lengths = text.split(",")
    if not all(length.isdecimal() and int(length) for length in lengths):
        raise ValueError(f"--seqlens {text}: valid are lengths from 1 by comma, as in '1024,4096'")
    return tuple(map(int, lengths))


def _extents(shape: str) -> tuple[int, int]:
    """A cluster as "2x1".

    Raises: ValueError.
    """
    m, _, n = shape.partition("x")
    if not (m.isdigit() and n.isdigit()):
        raise ValueError(f"cluster {shape!r}: CTAs along m x n are needed, as in '2x1'")
    return int(m), int(n)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Say what is refused and exit with 2, or with 1 where only the GPU is missing."""
    from . import bench

    try:
        yield
    except (ValueError, bench.NoDevice) as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, bench.NoDevice) else 2) from None


def _say(line: str) -> None:
    """Print at once: a run is followed through a pipe."""
    print(line, flush=True)
