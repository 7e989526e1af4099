"""The command line: plan, compile and audit a kernel anywhere; run and time it on a GPU.

A command that refuses (a rule of the layouts, the schedule or the variant is broken) prints the
rule and exits with 2; an audit that finds a difference, or a command without its GPU, with 1.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="cutedsl-fa3",
    help="Attention variants as readable, inspectable Hopper kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
WIDE = 200  # columns of a table that goes into a file or a pipe


def chosen_plan(
    variant: Annotated[
        str, typer.Option(help="full, causal, alibi, softcap:30, window:1024,0 or prefix:256.")
    ] = "causal",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    head_dim: Annotated[int, typer.Option(help="64 or 128.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Of V and O, if not head_dim.")] = None,
    tile_m: Annotated[int | None, typer.Option(help="Queries of a tile.")] = None,
    tile_n: Annotated[int | None, typer.Option(help="Keys of a tile.")] = None,
    stages: Annotated[int | None, typer.Option(help="Depth of the K and V rings.")] = None,
    consumers: Annotated[int | None, typer.Option(help="Consumer warpgroups.")] = None,
    overlap: Annotated[str | None, typer.Option(help="none, pingpong, intra or both.")] = None,
) -> Any:
    """The plan that the shared options describe, for any lengths, batch and number of heads.

    An option left out keeps the measured schedule's choice.
    """
    from .named import Lengths, named
    from .plans import Plan
    from .problem import Problem
    from .schedules import default_schedule

    problem = Problem(dtype, head_dim, head_dim_v or head_dim)
    traced = named(variant, Lengths(heads=1, seqlen_q=1, seqlen_k=1)).variant  # sizes stay dynamic
    asked = {
        "tile_m": tile_m,
        "tile_n": tile_n,
        "stages": stages,
        "consumers": consumers,
        "overlap": overlap,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    plan = Plan(traced, problem, replace(default_schedule(traced, problem), **given))
    plan.check()
    return plan


def planned(action: Callable[..., None]) -> Callable[..., None]:
    """A command whose options are those of `chosen_plan`, then those of `action` past its plan."""
    shared = list(inspect.signature(chosen_plan).parameters.values())
    own = list(inspect.signature(action).parameters.values())[1:]

    def command(**options: Any) -> None:
        _need_compiler()
        extra = {parameter.name: options.pop(parameter.name) for parameter in own}
        try:
            plan = chosen_plan(**options)
        except ValueError as error:  # every refusal of a plan is one
            typer.echo(f"refused: {error}", err=True)
            raise typer.Exit(2) from None
        action(plan, **extra)

    command.__name__, command.__doc__ = action.__name__, action.__doc__
    command.__signature__ = inspect.Signature([*shared, *own])
    command.__annotations__ = {p.name: p.annotation for p in [*shared, *own]}
    return command


def _need_compiler() -> None:
    """Exit with 2 where the DSL is absent or of another version, saying which is accepted."""
    from .versions import VersionError, require_dsl

    try:
        require_dsl()
    except VersionError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(2) from None


def _compiled(plan: Any) -> tuple[Any, Any]:
    """The plan's kernel and its machine code, from the cache or compiled now."""
    from . import cache

    return plan.kernel, cache.get(plan.kernel)


@app.command("plan")
@planned
def show_plan(plan: Any) -> None:
    """Print what a kernel would do, and whether it is on disk or why it has to be compiled."""
    print(plan)


@app.command("compile")
@planned
def compile_plan(
    plan: Any,
    output: Annotated[Path | None, typer.Option(help="Also write the cubin here.")] = None,
) -> None:
    """Compile to an sm_90a cubin; no GPU is needed."""
    from . import cache

    kernel, compiled = _compiled(plan)
    print(f"{compiled.name} for {compiled.arch}: {len(compiled.cubin)} bytes")
    print(cache.explain(kernel))
    print(compiled.resources)
    if output is not None:
        output.write_bytes(compiled.cubin)
        print(f"written to {output}")


@app.command("audit")
@planned
def audit_plan(plan: Any) -> None:
    """Hold the machine code against what tiles, rings and roles promise; exit 1 on a difference."""
    from .audit import audit

    report = audit(*_compiled(plan))
    print(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command("configs")
def show_configs() -> None:
    """Print every supported configuration: head sizes, variants, schedules, SMEM, registers."""
    _need_compiler()
    from rich.console import Console

    from . import configs

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(configs.table())
    print(f"\n{configs.NOTE}")


@app.command("demo")
def run_demo() -> None:
    """Causal ALiBi from plain Python: compiled and audited, and on a GPU also run and timed."""
    _need_compiler()
    from . import demo

    raise typer.Exit(0 if demo.main() else 1)


@app.command("gallery")
def write_gallery(
    folder: Annotated[Path | None, typer.Option(help="Not notebooks/gallery.")] = None,
) -> None:
    """Draw every shipped mask and score and count the tiles that they visit; needs matplotlib."""
    _need_compiler()
    from . import gallery_page

    for path in gallery_page.write(folder or gallery_page.FOLDER):
        print(path)


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
    _need_compiler()
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
    _need_compiler()
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
    _need_compiler()
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
    _need_compiler()
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
    _need_compiler()
    from . import bench, cases, record, tune

    timing = bench.BURST if rounds is None else replace(bench.BURST, rounds=rounds)
    with _refusals():
        grid = cases.Grid(
            variants=tuple(variant or ("full", "causal")),
            dtypes=(dtype,),
            head_dims=cases.head_dims(head_dims),
            seqlens=_lengths(seqlens),
            tokens=tokens,
        )
        plans = [(case, tune.candidates(case)) for case in grid.cases()]
        bench.require_gpu()
        meta = record.collect(commit, allow_dirty) | {"timing": timing.name}
    measured = tune.run(plans, timing, report=_say, seed=seed)
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
