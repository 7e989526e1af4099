"""The command that climbs the ladder: compiles its kernels anywhere, times them on a GPU."""

from typing import Annotated

import typer

from .cli_bench import Timed, Tokens, Variants, _refusals, _say, measuring, need_compiler


@measuring("ladder")
def run_ladder(
    how: Timed,
    head_dims: Annotated[str, typer.Option(help="64, 128, by comma.")] = "64,128",
    variant: Variants = None,
    seqlen: Annotated[int, typer.Option(help="Length of queries and keys.")] = 8192,
    tokens: Tokens = 16384,
    peers: Annotated[
        str, typer.Option(help="Kernels to time beside the steps, by comma; may be empty.")
    ] = "fa2,fa3",
    compile_only: Annotated[
        bool, typer.Option("--compile", help="Only put the kernels into the cache; needs no GPU.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Kernels compiled side by side.")] = 2,
) -> None:
    """Time each step from cp.async and mma.sync to the project's forward, and write a record.

    With --compile: compile and audit every kernel, and exit 1 where one spills or differs from what
    its tables promise.
    """
    need_compiler()
    from . import bench, bench_ladder
    from .peers import versions

    with _refusals():
        variants = tuple(variant or ("full", "causal"))
        cases = bench_ladder.cases(_numbers(head_dims), variants, seqlen=seqlen, tokens=tokens)
        chosen = bench.chosen_providers([name for name in peers.split(",") if name])
    if compile_only:
        _compile(cases, jobs)
        return
    with _refusals():
        meta = how.meta(peers=versions())
    measured = bench_ladder.run(cases, chosen, how.timing, report=_say, seed=how.seed)
    how.keep("ladder", measured, meta)


def _compile(cases: list, jobs: int) -> None:
    """Compile and audit all kernels of these cases, with a line for each."""
    from . import bench_ladder

    made = []
    for one in bench_ladder.compile_all(cases, jobs):
        made.append(one)
        _say(str(one))
    failed = sum(bool(one.faults) for one in made)
    _say(f"{len(made)} kernels compiled, {failed} fail their audit")
    raise typer.Exit(1 if failed else 0)


def _numbers(text: str) -> tuple[int, ...]:
    """Raises: ValueError for what is no list of numbers."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--head-dims {text}: valid are numbers by comma, as in '64,128'")
    return tuple(map(int, parts))
