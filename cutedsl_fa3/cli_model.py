"""The command that checks what a kernel's roles do to each other, over all interleavings."""

from typing import Any

import typer


def run_model(plan: Any) -> None:
    """Interpret the roles of the kernel on small work and look at every interleaving; 1 on a fault.

    Nothing is compiled and no GPU is needed: what is interpreted is the traced program.
    """
    from .model import check_pipeline

    verdict = check_pipeline(plan)
    print(verdict)
    if not verdict.ok:
        raise typer.Exit(1)
