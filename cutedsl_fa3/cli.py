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

from . import (
    cli_bench,
    cli_contract,
    cli_doctor,
    cli_ladder,  # noqa: F401  # whose command is one of cli_bench's
    cli_ledger,
    cli_model,
    cli_timeline,
    cli_train,  # noqa: F401  # likewise
)

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
        str,
        typer.Option(
            help="full, causal, window:1024,0, prefix:256, documents:1000, alibi, bias, "
            "softcap:30, sigmoid, sink or laborious."
        ),
    ] = "causal",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    head_dim: Annotated[int, typer.Option(help="Of Q and K: a multiple of 8 up to 256.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Of V and O, if not head_dim.")] = None,
    tile_m: Annotated[int | None, typer.Option(help="Queries of a tile.")] = None,
    tile_n: Annotated[int | None, typer.Option(help="Keys of a tile.")] = None,
    stages: Annotated[int | None, typer.Option(help="Depth of the K and V rings.")] = None,
    consumers: Annotated[int | None, typer.Option(help="Consumer warpgroups.")] = None,
    overlap: Annotated[str | None, typer.Option(help="none, pingpong, intra or both.")] = None,
    pack: Annotated[int | None, typer.Option(help="Query heads that share a tile.")] = None,
    *,
    sizes: Any = None,
    device: str = "cpu",
) -> Any:
    """The plan that the shared options describe, for any lengths, batch and number of heads.

    An option left out keeps the measured schedule's choice. `sizes` (no option) are the `Extents`
    of one call, whose captured tensors lie on `device`.
    """
    from .named import Lengths, named
    from .plans import Plan
    from .problem import Problem
    from .schedules import default_schedule, schedule_for

    problem = Problem(dtype, head_dim, head_dim_v or head_dim)
    if sizes is None:  # they stay dynamic
        traced = named(variant, Lengths(heads=1, seqlen_q=1, seqlen_k=1)).variant
        usual = default_schedule(traced, problem)
    else:
        lengths = Lengths(sizes.heads, sizes.seqlen_q, sizes.seqlen_k, device)
        traced = named(variant, lengths).variant
        usual = schedule_for(traced, problem, sizes)
    asked = {
        "tile_m": tile_m,
        "tile_n": tile_n,
        "stages": stages,
        "consumers": consumers,
        "overlap": overlap,
        "pack": pack,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    plan = Plan(traced, problem, replace(usual, **given))
    plan.check()
    return plan


def planned(
    action: Callable[..., None], of_call: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> Callable[..., None]:
    """A command whose options are those of `chosen_plan`, then those of `action` past its plan.

    `of_call`: from the action's options to `sizes` and `device` of one call; the action is then
    also given the variant's name.
    """
    every = inspect.signature(chosen_plan).parameters.values()
    shared = [each for each in every if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    given = 1 if of_call is None else 2
    own = list(inspect.signature(action, eval_str=True).parameters.values())[given:]

    def command(**options: Any) -> None:
        cli_bench.need_compiler()
        extra = {parameter.name: options.pop(parameter.name) for parameter in own}
        try:
            plan = chosen_plan(**options, **({} if of_call is None else of_call(extra)))
        except ValueError as error:  # every refusal of a plan is one
            typer.echo(f"refused: {error}", err=True)
            raise typer.Exit(2) from None
        action(plan, *([] if of_call is None else [options["variant"]]), **extra)

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
    cli_bench.need_compiler()
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
    cli_bench.need_compiler()
    from . import demo

    raise typer.Exit(0 if demo.main() else 1)


@app.command("gallery")
def write_gallery(
    folder: Annotated[Path | None, typer.Option(help="Not notebooks/gallery.")] = None,
) -> None:
    """Draw masks, scores and shared memory; count the tiles that each visits. Needs matplotlib."""
    cli_bench.need_compiler()
    from . import gallery_page, smem_pictures

    folder = folder or gallery_page.FOLDER
    for path in (*gallery_page.write(folder), *smem_pictures.write(folder / "smem")):
        print(path)


app.command("contract")(cli_contract.run_contract)
app.add_typer(cli_bench.app)
app.command("doctor")(cli_doctor.run_doctor)
app.command("ledger")(cli_ledger.run_ledger)
app.command("model")(planned(cli_model.run_model))
app.command("timeline")(planned(cli_timeline.run_timeline, cli_timeline.of_call))
