"""The command `ledger`: how the cost ledger does on each variant, and its renewal."""

from __future__ import annotations

from typing import Annotated

import typer

from . import cli_bench


def run_ledger(
    accept: Annotated[
        bool, typer.Option(help="Fit the newest records anew and keep the result.")
    ] = False,
    same_kernels: Annotated[
        bool,
        typer.Option(help="With --accept: the records ran with today's kernels, I know it."),
    ] = False,
) -> None:
    """Predicted beside measured times of variants; --accept fits the newest records of plain rows.

    No GPU is needed: records come from `bench` and `bench-variants`, and from `tune` where it is of
    the same sources.
    """
    cli_bench.need_compiler()
    from .ledger import stored

    if accept:
        try:
            made = stored.renewed(same_kernels)
        except ValueError as error:
            typer.echo(f"refused: {error}", err=True)
            raise typer.Exit(2) from None
        print(stored.report(made))
        print(f"\nwritten to {stored.write(made)} and {stored.explain(made)}")
        return
    print(stored.report())
    if line := stored.older(stored.load()):
        print(f"\n{line}")
