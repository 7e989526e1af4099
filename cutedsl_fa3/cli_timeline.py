"""The command `timeline`: what each role of a CTA does when, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_bench import Recorded, _refusals, _say

DEVICE = "cuda"  # on which it is measured


def of_call(options: dict[str, Any]) -> dict[str, Any]:
    """The sizes of the call that the options describe, and where its tensors lie.

    Raises: ValueError for sizes below 1, and for options that do not go together; bench.NoDevice.
    """
    from . import bench
    from .schedules import Extents

    for name in ("seqlen", "batch", "heads"):
        if options[name] < 1:
            raise ValueError(f"--{name} {options[name]}: a whole number from 1 is needed")
    out = options["out"]
    if out is not None and out.suffix != ".png":
        raise ValueError(f"--out {out}: a .png is needed")
    if options["record"] and not options["measured"]:
        raise ValueError("--record keeps what is measured: it needs --measured")
    seqlen, heads = options["seqlen"], options["heads"]
    sizes = Extents(options["batch"], seqlen, seqlen, heads, heads)
    with _refusals():
        if options["measured"] or options["series"]:
            bench.require_gpu()
    return {"sizes": sizes, "device": DEVICE if options["measured"] else "cpu"}


def run_timeline(
    plan: Any,
    name: str,
    seqlen: Annotated[int, typer.Option(help="Length of queries and keys.")] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 2,
    heads: Annotated[int, typer.Option(help="Heads of Q, K and V.")] = 16,
    cta: Annotated[int, typer.Option(help="Which CTA of the launch.")] = 0,
    predicted: Annotated[
        bool, typer.Option("--predicted", help="Predict it; the default, needs no GPU.")
    ] = False,
    measured: Annotated[
        bool, typer.Option("--measured", help="Measure it, on an SM90 GPU.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print every interval as JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Draw into this .png, side by side. Needs matplotlib.")
    ] = None,
    start: Annotated[float, typer.Option(help="First clock that is drawn.")] = 0.0,
    end: Annotated[float | None, typer.Option(help="Last clock that is drawn.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Keep what is measured in a record.")
    ] = False,
    series: Annotated[
        bool, typer.Option("--series", help="Measure and keep those of notebook 6 instead.")
    ] = False,
    record_out: Annotated[
        Path | None, typer.Option(help="Folder or .json file of the record.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="The commit of these sources, where .git is absent.")
    ] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Record uncommitted changes, and say so.")
    ] = False,
) -> None:
    """Show what each role of one CTA does when: works, waits and for what, in clocks of the SM.

    Predicted by running the traced kernel against a clock, with the cost ledger's rates; measured
    by a debug build that notes the clock at every wait. Both print the same and are drawn on one
    scale.
    """
    how = Recorded(record_out, commit, allow_dirty)
    sizes = batch, seqlen, heads
    with _refusals():
        meta = how.meta() if record or series else None
        if series:
            from .timeline.measured import series as measured_series

            how.keep("timeline", measured_series(_say), meta)
            return
        shown = []
        if predicted or not measured:
            shown.append(_predicted(plan, sizes, cta))
        if measured:
            shown.append(_measured(plan, name, sizes, cta, how, meta))
    if json:
        _say(f"[{', '.join(each.to_json() for each in shown)}]")
    else:
        _say("\n\n".join(map(str, shown)))
    if out is not None:
        _draw(out, shown, start, end, quiet=json)


def _predicted(plan: Any, sizes: tuple[int, int, int], cta: int) -> Any:
    from .timeline import predict

    q, k, v = _tensors(plan, sizes, "meta")
    return predict(q, k, v, plan.variant, schedule=plan.schedule, cta=cta)


def _measured(
    plan: Any, name: str, sizes: tuple[int, int, int], cta: int, how: Recorded, meta: Any
) -> Any:
    from .timeline import measure
    from .timeline.measured import row, slowdown

    q, k, v = _tensors(plan, sizes, DEVICE)
    found = measure(q, k, v, plan.variant, schedule=plan.schedule, cta=cta)
    if meta is not None:
        slower = slowdown(q, k, v, plan.variant, schedule=plan.schedule)
        how.keep("timeline", [row(found, name, q, k, v, plan.schedule, slower)], meta)
    return found


def _tensors(plan: Any, sizes: tuple[int, int, int], device: str) -> list:
    """Q, K and V of (batch, seqlen, heads), with values where a kernel reads them."""
    import torch

    problem = plan.problem
    dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
    dims = (problem.head_dim, problem.head_dim, problem.head_dim_v)
    make = torch.empty if device == "meta" else torch.randn
    return [make(*sizes, d, device=device, dtype=dtype) for d in dims]


def _draw(out: Path, shown: list, start: float, end: float | None, quiet: bool) -> None:
    from .timeline import draw

    draw(*shown, start=start, end=end).savefig(out, facecolor="white")
    if not quiet:
        _say(f"drawn: {out}")
