"""The command that climbs the ladder: compiles its kernels anywhere, times them on a GPU."""

from dataclasses import replace
from typing import Annotated

import typer

from .cli_bench import (
    AllowDirty,
    Commit,
    Out,
    Rounds,
    Seed,
    _kept,
    _refusals,
    _say,
    need_compiler,
)


def run_ladder(
    head_dims: Annotated[str, typer.Option(help="64, 128, by comma.")] = "64,128",
    variant: Annotated[
        list[str] | None, typer.Option(help="May be repeated; default: full and causal.")
    ] = None,
    seqlen: Annotated[int, typer.Option(help="Length of queries and keys.")] = 8192,
    tokens: Annotated[int, typer.Option(help="Tokens of all sequences together.")] = 16384,
    peers: Annotated[
        str, typer.Option(help="Kernels to time beside the steps, by comma; may be empty.")
    ] = "fa2,fa3",
    compile_only: Annotated[
        bool, typer.Option("--compile", help="Only put the kernels into the cache; needs no GPU.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Kernels compiled side by side.")] = 2,
    rounds: Rounds = None,
    seed: Seed = 0,
    out: Out = None,
    commit: Commit = None,
    allow_dirty: AllowDirty = False,
) -> None:
    """Time each step from cp.async and mma.sync to the project's forward, and write a record.

    With --compile: compile and audit every kernel, and exit 1 where one spills or differs from what
    its tables promise.
    """
    need_compiler()
    from . import bench, bench_ladder, record
    from . import peers as all_peers

    timing = bench.BURST if rounds is None else replace(bench.BURST, rounds=rounds)
    with _refusals():
        dims = _whole_numbers(head_dims)
        variants = tuple(variant or ("full", "causal"))
        cases = bench_ladder.cases(dims, variants, seqlen=seqlen, tokens=tokens)
        chosen = bench.chosen_providers([name for name in peers.split(",") if name])
        if not compile_only:
            bench.require_gpu()
            meta = record.collect(commit, allow_dirty) | {"timing": timing.name}
    if compile_only:
        made = []
        for one in bench_ladder.compile_all(cases, jobs):
            made.append(one)
            _say(str(one))
        failed = sum(bool(one.faults) for one in made)
        _say(f"{len(made)} kernels compiled, {failed} fail their audit")
        raise typer.Exit(1 if failed else 0)
    meta |= {"peers": all_peers.versions()}
    measured = bench_ladder.run(cases, chosen, timing, report=_say, seed=seed)
    _kept(measured, meta, record.place(meta, out, "ladder"))


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Raises: ValueError for what is no list of numbers."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--head-dims {text}: valid are numbers by comma, as in '64,128'")
    return tuple(map(int, parts))
