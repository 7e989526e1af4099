"""The command line: plan, compile and audit a kernel anywhere; run and time it on a GPU.

A command that refuses (a rule of the layouts, the schedule or the variant is broken) prints the
rule and exits with 2; an audit that finds a difference, or a command without its GPU, with 1.
"""

import inspect
from collections.abc import Callable
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


def _compiled(plan: Any) -> tuple[Any, Any]:
    """The plan's kernel and its machine code, from the cache or compiled now."""
    from . import cache

    return plan.kernel, cache.get(plan.kernel)


@app.command("plan")
@planned
def show_plan(plan: Any) -> None:
    """Print what a kernel would do: score, mask, visited tiles, SMEM, registers, instructions."""
    print(plan)


@app.command("compile")
@planned
def compile_plan(
    plan: Any,
    output: Annotated[Path | None, typer.Option(help="Also write the cubin here.")] = None,
) -> None:
    """Compile to an sm_90a cubin; no GPU is needed."""
    _, compiled = _compiled(plan)
    print(f"{compiled.name} for {compiled.arch}: {len(compiled.cubin)} bytes")
    print(f"compiled in {compiled.seconds:.1f} s; {compiled.resources}")
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


@app.command("demo")
def run_demo() -> None:
    """Causal ALiBi from plain Python: compiled and audited, and on a GPU also run and timed."""
    from . import demo

    raise typer.Exit(0 if demo.main() else 1)


@app.command("bench")
def run_bench(
    variant: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: full and causal.")
    ] = None,
    providers: Annotated[
        str, typer.Option(help="Kernels to time, by comma.")
    ] = "cutedsl_fa3,fa3,fa4,cudnn,fa2,flex",
    dtypes: Annotated[str, typer.Option(help="bf16, fp16, by comma.")] = "bf16",
    head_dims: Annotated[str, typer.Option(help="Head sizes, by comma.")] = "64,128",
    seqlens: Annotated[str, typer.Option(help="Lengths, by comma.")] = "1024,4096,8192,16384",
    tokens: Annotated[int, typer.Option(help="Tokens of all sequences together.")] = 16384,
    hidden: Annotated[int, typer.Option(help="heads x head_dim.")] = 2048,
    group: Annotated[int, typer.Option(help="Query heads that share a key head.")] = 1,
    rounds: Annotated[int | None, typer.Option(help="Rounds, each in an order of its own.")] = None,
    sustained: Annotated[
        bool, typer.Option(help="Long windows at the power limit instead of bursts.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of inputs, orders and sampled rows.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder or .json file of the record.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="The commit of these sources, where .git is absent.")
    ] = None,
    allow_dirty: Annotated[
        bool, typer.Option(help="Record uncommitted changes, and say so.")
    ] = False,
    readme: Annotated[
        bool, typer.Option(help="Measure nothing: put the newest record's table in README.md.")
    ] = False,
) -> None:
    """Time the forward beside its peers, and write a record with everything needed to repeat it."""
    from . import bench, record

    if readme:
        text = record.README.read_text()
        record.README.write_text(record.with_tables(text, record.newest()))
        return
    timing = bench.SUSTAINED if sustained else bench.BURST
    if rounds is not None:
        timing = replace(timing, rounds=rounds)
    try:
        grid = bench.Grid(
            variants=tuple(variant or ("full", "causal")),
            dtypes=tuple(dtypes.split(",")),
            head_dims=tuple(map(int, head_dims.split(","))),
            seqlens=tuple(map(int, seqlens.split(","))),
            tokens=tokens,
            hidden=hidden,
            group=group,
        )
        chosen = bench.chosen_providers(providers.split(","))
        cases = grid.cases()
        bench.require_gpu()
        meta = record.collect(commit, allow_dirty) | {"timing": timing.name}
    except (ValueError, bench.NoDevice) as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, bench.NoDevice) else 2) from None
    rows = bench.run(cases, chosen, timing, report=print, seed=seed)
    print(f"record: {record.Record(meta, tuple(rows)).write(record.place(meta, out))}")
