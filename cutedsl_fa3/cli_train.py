"""The command that trains a small model with a variant of its own, and writes a record."""

from dataclasses import replace
from typing import Annotated

import typer

from .cli_bench import Recorded, _refusals, _say, measuring, need_compiler


@measuring("train")
def run_train(
    how: Recorded,
    steps: Annotated[int | None, typer.Option(help="Of each run; default: all.")] = None,
) -> None:
    """Train a small model with a learned bias in a window: by attention, by dense torch, without.

    Writes losses, what was learned, gradients beside fp64, time and memory of a step.
    """
    need_compiler()
    from . import training

    sizes = training.LARGE if steps is None else replace(training.LARGE, steps=steps)
    with _refusals():
        meta = how.meta()
    how.keep("train", training.run(sizes, "cuda", report=_say), meta)
