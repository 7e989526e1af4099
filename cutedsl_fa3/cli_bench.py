"""Commands that measure on a GPU and write a record; parts of the command line in cli.py.

Options that commands share stand once, in `Recorded` and `Timed`: a command's own are the
parameters of its function past the first.
"""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer()

HeadDims = Annotated[
    str, typer.Option(help="Head sizes by comma; 192x128 is 192 of Q and K beside 128 of V.")
]
Dtype = Annotated[str, typer.Option(help="bf16 or fp16.")]
Variants = Annotated[list[str] | None, typer.Option(help="May be repeated; default: the usual.")]
Tokens = Annotated[int, typer.Option(help="Tokens of all sequences together.")]
NATIVE = "64,96,128,192x128,192,256"  # head sizes whose tiles are of their own size
PEERS = ("bench", "variants", "gemm", "call", "backward")  # kinds that README has tables of


@dataclass(frozen=True)
class Recorded:
    """What every command takes that writes a record."""

    out: Annotated[Path | None, typer.Option(help="Folder or .json file of the record.")] = None
    commit: Annotated[
        str | None, typer.Option(help="The commit of these sources, where .git is absent.")
    ] = None
    allow_dirty: Annotated[bool, typer.Option(help="Record uncommitted changes, and say so.")] = (
        False
    )

    def meta(self, **more: Any) -> dict[str, Any]:
        """What the record says besides its rows; `bench.NoDevice` where there is no GPU.

        Raises: NoDevice, RecordError.
        """
        from . import bench, record

        bench.require_gpu()
        return record.collect(self.commit, self.allow_dirty) | more

    def keep(self, kind: str, measured: Iterable[Any], meta: dict[str, Any]) -> Path:
        """Write the record, after each list of rows as partial; where it lies."""
        from . import record, tuned

        path = record.place(meta, self.out, kind)
        _say(f"record, partial until the end: {path}")
        rows: list[Any] = []
        with tuned.set_aside():  # what is measured are the defaults, whatever was tuned here
            for more in measured:
                rows += more if isinstance(more, list) else [more]
                record.Record(meta | {"partial": True}, tuple(rows)).write(path)
        _say(f"record: {record.Record(meta, tuple(rows)).write(path)}")
        return path


@dataclass(frozen=True)
class Timed(Recorded):
    """What every command takes besides that times kernels in turns."""

    rounds: Annotated[int | None, typer.Option(help="Rounds, each in an order of its own.")] = None
    seed: Annotated[int, typer.Option(help="Of inputs, orders and sampled rows.")] = 0
    sustained: Annotated[
        bool, typer.Option(help="Long windows at the power limit instead of bursts.")
    ] = False

    @property
    def timing(self) -> Any:
        """How long to rest and to measure, and how often."""
        from . import bench

        timing = bench.SUSTAINED if self.sustained else bench.BURST
        return timing if self.rounds is None else replace(timing, rounds=self.rounds)

    def meta(self, **more: Any) -> dict[str, Any]:
        return super().meta(timing=self.timing.name, **more)


def measuring(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose options are its own, then those of its first parameter's class."""

    def decorate(action: Callable[..., None]) -> Callable[..., None]:
        first, *own = inspect.signature(action, eval_str=True).parameters.values()
        kind = first.annotation
        shared = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field.type,
            )
            for field in fields(kind)
        ]

        def command(**options: Any) -> None:
            given = {field.name: options.pop(field.name) for field in fields(kind)}
            action(kind(**given), **options)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
        command.__name__, command.__doc__ = action.__name__, action.__doc__
        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name)(command)
        return action

    return decorate


def need_compiler() -> None:
    """Exit with 2 where the DSL is absent or of another version, saying which is accepted."""
    from .versions import VersionError, require_dsl

    try:
        require_dsl()
    except VersionError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(2) from None


@measuring("bench")
def run_bench(
    how: Timed,
    variant: Variants = None,
    providers: Annotated[
        str, typer.Option(help="Kernels to time, by comma; fa2 and flex only where named here.")
    ] = "cutedsl_fa3,fa3,fa4,cudnn",
    dtypes: Annotated[str, typer.Option(help="bf16, fp16, by comma.")] = "bf16",
    head_dims: HeadDims = NATIVE,
    seqlens: Annotated[
        str | None,
        typer.Option(
            help="Lengths, by comma; default: 4096 and 16384, at head sizes 64, 128 also 1024."
        ),
    ] = None,
    tokens: Tokens = 16384,
    hidden: Annotated[int, typer.Option(help="heads x head_dim, rounded down to heads.")] = 2048,
    group: Annotated[int, typer.Option(help="Query heads that share a key head.")] = 1,
    peers: Annotated[
        bool,
        typer.Option(
            help="All of the README: each kind of --tables as its own command does it by default, "
            "then tables and bars; with --sustained both timings."
        ),
    ] = False,
    tables: Annotated[
        str, typer.Option(help=f"With --peers, which, by comma; known: {', '.join(PEERS)}.")
    ] = ",".join(PEERS),
    readme: Annotated[
        bool, typer.Option(help="Measure nothing: put the newest records' tables in README.md.")
    ] = False,
    draw: Annotated[
        bool, typer.Option(help="Measure nothing: draw the newest records' bars. Needs matplotlib.")
    ] = False,
) -> None:
    """Time the forward beside its peers, and write a record with everything needed to repeat it.

    After every case the record is on disk, marked as partial; a run that ends early leaves it.
    By default: plain full and causal attention at every native head size.
    """
    own = {"variant": variant, "providers": providers, "dtypes": dtypes, "head_dims": head_dims}
    own |= {"seqlens": seqlens, "tokens": tokens, "hidden": hidden, "group": group}
    if readme:
        _write_tables()
    if draw:
        _draw()
    if readme or draw:
        return
    need_compiler()
    if peers:
        with _refusals():
            _need_defaults(run_bench, own)
        _everything(how, tables)
        return
    from . import bench, cases
    from .peers import versions

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
        meta = how.meta(peers=versions())
    how.keep("bench", bench.run(every, chosen, how.timing, report=_say, seed=how.seed), meta)


@measuring("bench-variants")
def run_bench_variants(
    how: Timed,
    variant: Variants = None,
    providers: Annotated[
        str, typer.Option(help="Kernels to time, by comma.")
    ] = "cutedsl_fa3,fa4,flex,flex_fa4",
    dtype: Dtype = "bf16",
    head_dims: HeadDims = "64,128",
    seqlen: Annotated[int, typer.Option(help="Length of queries and keys.")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 2,
    heads: Annotated[int, typer.Option(help="Of queries and of keys.")] = 16,
) -> None:
    """Time variants beside our own plain causal and beside the peers, and write a record.

    All variants of a head size, and all kernels, take turns in one order drawn anew each round. By
    default: ten variants; plain causal always takes part.
    """
    need_compiler()
    from . import bench, cases
    from .peers import versions

    with _refusals():
        names, dims = variant or cases.VARIANTS, cases.head_dims(head_dims)
        groups = cases.groups(names, dtype, dims, seqlen, batch, heads)
        chosen = bench.chosen_providers(providers.split(","))
        meta = how.meta(peers=versions())
    measured = bench.run_together(groups, chosen, how.timing, report=_say, seed=how.seed)
    how.keep("variants", measured, meta)


@measuring("bench-backward")
def run_bench_backward(
    how: Timed,
    part: Annotated[
        str, typer.Option(help="plain, variants, memory, by comma; memory only in bursts.")
    ] = "plain,variants,memory",
    variant: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; bias+gradient: with that of its table."),
    ] = None,
    providers: Annotated[
        str | None, typer.Option(help="Backwards to time, by comma; default: by part.")
    ] = None,
    head_dims: Annotated[str, typer.Option(help="Of plain; variants have 128.")] = NATIVE,
    seqlens: Annotated[
        str | None, typer.Option(help="Of plain, by comma; default: as bench.")
    ] = None,
    add: Annotated[
        Path | None,
        typer.Option(help="A record of a run that ended early: its rows, then what it lacks."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that compile; default: the cores.")
    ] = None,
) -> None:
    """Time the backward alone beside its peers, and write a record; then the peak of memory.

    Plain attention with and without a fixed order of sums, then variants beside our own plain
    causal. Who has no time is left out, and the record says why; where that is our own kernel,
    this exits with 1 at the end.
    """
    need_compiler()
    from . import bench_backward as backward
    from . import cases
    from .peers import versions

    with _refusals():
        parts = part.split(",")
        if unknown := [each for each in parts if each not in backward.PARTS]:
            known = ", ".join(backward.PARTS)
            raise ValueError(f"--part {','.join(unknown)}: known are {known}")
        names = providers.split(",") if providers else ()
        chosen = {each: backward.chosen_providers(each, names) for each in parts}
        lengths = None if seqlens is None else _lengths(seqlens)
        groups = {
            "plain": backward.plain(cases.head_dims(head_dims), lengths),
            "variants": backward.variants(variant or backward.VARIANTS),
            "memory": [] if how.sustained else [[case] for case in backward.memory()],
        }
        absent = backward.Absent()
        meta = how.meta(peers=versions(), absent=absent.reasons)
        earlier = () if add is None else backward.of_earlier(add, meta)
    wanted = {each: backward.missing(each, groups[each], earlier) for each in parts}

    def measured() -> Iterator[Any]:
        yield list(earlier)
        for each, grouped in wanted.items():
            if each == "memory":
                flat = [case for group in grouped for case in group]
                yield from backward.peaks(flat, chosen[each], _say, absent, how.seed)
            else:
                yield from backward.run(grouped, chosen[each], how.timing, _say, absent, how.seed)

    every = [case for each in parts for group in wanted[each] for case in group]
    if any(one.name == backward.OURS for one in chosen[parts[0]]):
        backward.compiled_ahead(every, workers or os.cpu_count() or 1, _say)
    how.keep("backward", measured(), meta)
    for reason in absent.ours:
        typer.echo(f"ours has no time: {reason}", err=True)
    if absent.ours:
        raise typer.Exit(1)


@measuring("bench-gemm")
def run_bench_gemm(
    how: Timed,
    size: Annotated[str, typer.Option(help="m, n and k by comma, or one for all.")] = "8192",
    dtype: Dtype = "bf16",
    tile_m: Annotated[int, typer.Option(help="Rows of a tile of C.")] = 128,
    tile_n: Annotated[int, typer.Option(help="Columns of a tile of C.")] = 256,
    consumers: Annotated[int, typer.Option(help="Consumer warpgroups.")] = 2,
    stages: Annotated[str, typer.Option(help="Ring depths, by comma.")] = "1,2,3,4",
    clusters: Annotated[str, typer.Option(help="CTAs along m x n, by comma.")] = "1x1,2x1,1x2",
) -> None:
    """Time the GEMM at every depth and cluster shape beside cuBLAS, and write a record."""
    need_compiler()
    from . import bench_gemm

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
        meta = how.meta()
    how.keep("gemm", [bench_gemm.measure(problem, chosen, how.timing, _say, how.seed)], meta)


@measuring("bench-gallery")
def run_bench_gallery(how: Timed) -> None:
    """Time every mask and score of the gallery beside plain causal and full attention, and write a
    record; notebooks/08_variants.ipynb shows it beside the predictions.
    """
    need_compiler()
    from . import bench_gallery

    with _refusals():
        meta = how.meta()
    how.keep("gallery", [bench_gallery.measure(how.timing, _say, how.seed)], meta)


@measuring("bench-call")
def run_bench_call(how: Recorded) -> None:
    """Time what the host spends on a call, cached and first, and write a record."""
    need_compiler()
    from . import bench_call

    with _refusals():
        meta = how.meta()
    how.keep("call", bench_call.measure(report=_say), meta)


@measuring("tune")
def run_tune(
    how: Timed,
    variant: Variants = None,
    dtype: Dtype = "bf16",
    head_dims: HeadDims = "64,128",
    seqlens: Annotated[str, typer.Option(help="Lengths, by comma.")] = "8192",
    tokens: Tokens = 16384,
    table: Annotated[
        bool,
        typer.Option(
            help="Instead every row of the schedule table, with its variants or those given."
        ),
    ] = False,
    read: Annotated[
        Path | None, typer.Option(help="With --table, measure nothing: what this record says.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="With --table, processes that compile; default: the cores.")
    ] = None,
) -> None:
    """Time every schedule that differs in one field from the default, and write a record.

    By default of full and causal attention.
    """
    need_compiler()
    if table:
        _tune_table(how, read, workers or os.cpu_count() or 1, variant or ())
        return
    from . import cases, tuning

    with _refusals():
        grid = cases.Grid(
            variants=tuple(variant or ("full", "causal")),
            dtypes=(dtype,),
            head_dims=cases.head_dims(head_dims),
            seqlens=_lengths(seqlens),
            tokens=tokens,
        )
        plans = [(case, tuning.candidates(case)) for case in grid.cases()]
        meta = how.meta()
    how.keep("tune", tuning.run(plans, how.timing, report=_say, seed=how.seed), meta)


def _tune_table(how: Timed, read: Path | None, workers: int, variants: Sequence[str]) -> None:
    """Measure the rows of the schedule table in one record, and say what it makes of each.

    Of the variants that a row serves only `variants`, unless that is empty.
    """
    from . import evidence, record, tuning

    if read is None:
        how = how if how.rounds else replace(how, rounds=5)
        with _refusals():
            meta = how.meta()
            plans = evidence.plans(variants=variants)
        plans = evidence.compiled_ahead(plans, workers, _say)
        measured = tuning.run(plans, how.timing, report=_say, seed=how.seed)
        read = how.keep("table", measured, meta)
    _say(evidence.summary(record.Record.read(read)))


@measuring("leads")
def run_leads(
    how: Timed,
    workers: Annotated[
        int | None, typer.Option(help="Processes that compile; default: the cores.")
    ] = None,
    read: Annotated[
        bool, typer.Option(help="Measure nothing: write the page of the newest record.")
    ] = False,
) -> None:
    """Time what was tried to make the forward faster, write a record and the page of it."""
    need_compiler()
    from . import evidence, leads, record, tuning

    if not read:
        how = how if how.rounds else replace(how, rounds=5)
        with _refusals():
            meta = how.meta()
        plans = evidence.compiled_ahead(leads.plans(), workers or os.cpu_count() or 1, _say)
        measured = tuning.run(plans, how.timing, report=_say, seed=how.seed)
        how.keep("leads", measured, meta)
    if read or how.out is None:
        newest = record.newest(kind="leads")
        if newest is None:
            typer.echo("refused: there is no record of leads; measure them on a GPU", err=True)
            raise typer.Exit(1)
        leads.PAGE.write_text(leads.page(newest))
        _say(f"written: {leads.PAGE}")


def _everything(how: Timed, kinds: str) -> None:
    """Each kind of record in turn, in bursts and where asked for sustained; tables and bars."""
    chosen = kinds.split(",")
    with _refusals():
        if unknown := [kind for kind in chosen if kind not in PEERS]:
            raise ValueError(f"--tables {','.join(unknown)}: known are {', '.join(PEERS)}")
        if how.out is not None and how.out.suffix == ".json":
            raise ValueError(f"--out {how.out}: several records need a folder")
        how.meta()  # what is missing is said before anything runs
    recorded = Recorded(how.out, how.commit, how.allow_dirty)
    timings = [replace(how, sustained=False), *([how] if how.sustained else [])]
    for timed in timings:
        for kind in chosen:
            _say(f"{kind}, {timed.timing.name}" if kind != "call" else kind)
            if kind == "bench":
                run_bench(timed)
            elif kind == "variants":
                run_bench_variants(timed)
            elif kind == "gemm":
                run_bench_gemm(timed)
            elif kind == "backward":
                with contextlib.suppress(typer.Exit):  # it has said what of ours has no time
                    run_bench_backward(timed)
            elif not timed.sustained:  # the host's time has no bursts
                run_bench_call(recorded)
    if how.out is None:
        _write_tables()
        _draw()


def _need_defaults(action: Callable[..., None], given: dict[str, Any]) -> None:
    """That --peers comes without options of one table, which the others would not follow.

    Raises: ValueError.
    """
    parameters = inspect.signature(action).parameters
    for name, value in given.items():
        if value != parameters[name].default:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"--peers with {option} {value}: give {option} without --peers")


def _write_tables() -> None:
    from . import tables

    tables.README.write_text(tables.refreshed(tables.README.read_text()))


def _draw() -> None:
    from . import bars

    try:
        for path in bars.write():
            _say(f"drawn: {path}")
    except ModuleNotFoundError as error:
        typer.echo(f"not drawn: {error}", err=True)
        raise typer.Exit(1) from None


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
