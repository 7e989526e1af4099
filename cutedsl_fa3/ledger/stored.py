"""The fit that is kept: where it comes from, how it is renewed, how it does.

`fitted.py` holds it as Python, README.md says how it does; both are written by
`python -m cutedsl_fa3 ledger --accept`, and a test fits the records again and compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutedsl_fa3.record import DATA, Record, newest, place
from cutedsl_fa3.tables import filled

from .fit import (
    Compared,
    Kernels,
    Measured,
    Sample,
    compared,
    fit,
    plain,
    samples,
    todays_kernels,
)
from .launch import Parameters

FITTED = Path(__file__).with_name("fitted.py")
README = Path(__file__).with_name("README.md")
NEEDED = ("bench", "variants")  # kinds of records: plain attention, and variants beside it
BESIDE = "tune"  # plain attention with other overlaps, where it is of the same sources
ALLOWED = 0.15  # error of a variant's time in units of plain causal

HEAD = '''"""The cost ledger's fit. Written by `python -m cutedsl_fa3 ledger --accept`: do not edit.

`KERNELS` are those that the rows of `RECORDS` ran with: their schedules, and the clocks of a tile
beside its products that were predicted for them.
"""

'''


@dataclass(frozen=True)
class Stored:
    """A fit with its origin: records in notebooks/data and the kernels that were measured."""

    device: str
    records: tuple[str, ...]
    kernels: Kernels
    parameters: Parameters

    @property
    def samples(self) -> list[Sample]:
        """Our rows of the records, of plain attention and of variants."""
        read = [Record.read(DATA / name) for name in self.records]
        return [sample for record in read for sample in samples(record, self.kernels)]


def load() -> Stored:
    """The fit in `fitted.py`."""
    from . import fitted

    kernels = {name: Measured(**kept) for name, kept in fitted.KERNELS.items()}
    return Stored(fitted.DEVICE, fitted.RECORDS, kernels, Parameters(**fitted.PARAMETERS))


def renewed(same_kernels: bool = False) -> Stored:
    """A fit of the newest records.

    A record of `BESIDE` is left out where it is not of the sources of the others.

    Raises: ValueError where a record is missing, of another device, or of other sources or another
        table of schedules than today's, so that its kernels are not known; `same_kernels` says that
        they are today's. Also where its rows of plain attention are too few.
    """
    before = load()
    found = {kind: newest(DATA, kind) for kind in (*NEEDED, BESIDE)}
    if missing := [kind for kind in NEEDED if found[kind] is None]:
        raise ValueError(f"no record of {', '.join(missing)} in {DATA}")
    records = {_file(kind, record): record for kind, record in found.items() if record is not None}
    needed = dict(list(records.items())[: len(NEEDED)])
    if needed.keys() <= set(before.records):
        records = {name: Record.read(DATA / name) for name in before.records}
        kernels = before.kernels
    else:
        if not same_kernels:
            _check_kernels(needed)
            known = table_and_sources()
            records = {name: r for name, r in records.items() if of(r) == known}
        kernels = todays_kernels(records.values())
    devices = {record.meta["device"] for record in records.values()}
    if len(devices) > 1:
        raise ValueError(f"records of {' and '.join(sorted(devices))}: one device is fitted")
    by_record = {name: samples(record, kernels) for name, record in records.items()}
    used = {name: rows for name, rows in by_record.items() if rows}
    rows = [sample for rows in used.values() for sample in rows]
    return Stored(devices.pop(), tuple(used), kernels, fit(plain(rows)))


def _file(kind: str, record: Record) -> str:
    return place(record.meta, None, kind).name


def table_and_sources() -> tuple[str, str]:
    """What decides today which kernels rows are measured with."""
    from cutedsl_fa3.cache import source_fingerprint
    from cutedsl_fa3.schedules import table_fingerprint

    return source_fingerprint(), table_fingerprint()


def of(record: Record) -> tuple[str, str | None]:
    """The same of a record; None for the table where it does not say it."""
    return record.meta["kernel_source_hash"], record.meta.get("schedules")


def _check_kernels(records: Mapping[str, Record]) -> None:
    what = ("sources", "schedules")
    for name, record in records.items():
        pairs = zip(what, of(record), table_and_sources(), strict=True)
        if other := [each for each, its, today in pairs if its != today]:
            raise ValueError(
                f"{name} does not say that it is of today's {' and '.join(other)}, so its kernels "
                "are not known; measure again, or pass --same-kernels if schedules and lowering "
                "are the same"
            )


def write(made: Stored, path: Path = FITTED) -> Path:
    """Write a fit as Python."""
    p = made.parameters
    lines = [f"DEVICE = {json.dumps(made.device)}", "RECORDS = ("]
    lines += [f"    {json.dumps(name)}," for name in made.records]
    lines += [")", "PARAMETERS = {"]
    lines += [f'    "clock": {p.clock!r},', f'    "launch": {p.launch!r},']
    for name, values in (("work_tile", p.work_tile), ("exposed", p.exposed)):
        lines += [f'    "{name}": {{']
        lines += [f"        {json.dumps(kind)}: {v!r}," for kind, v in values.items()]
        lines += ["    },"]
    lines += ["}", "KERNELS = {"]
    for name, kernel in sorted(made.kernels.items()):
        lines += [f"    {json.dumps(name)}: {{", '        "schedule": {']
        lines += [f"            {json.dumps(k)}: {_said(v)}," for k, v in kernel.schedule.items()]
        lines += ["        },", f'        "elements": {kernel.elements},']
        lines += [f'        "passes_over": {kernel.passes_over},', "    },"]
    path.write_text(HEAD + "\n".join([*lines, "}", ""]))
    return path


def older(made: Stored) -> str:
    """A line that says so if the records are of other kernels than today's; empty if not."""
    sources, table = table_and_sources()
    its = {name: of(Record.read(DATA / name)) for name in made.records}
    old = [name for name, (s, t) in its.items() if s != sources or (t is not None and t != table)]
    return f"of kernels other than today's, so measure and fit again: {', '.join(old)}" * bool(old)


def explain(made: Stored, path: Path = README) -> Path:
    """Write the report of a fit into a README."""
    path.write_text(filled(path.read_text(), "ledger", f"```\n{report(made)}\n```\n"))
    return path


def _said(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def report(made: Stored | None = None) -> str:
    """The parameters, how well they fit, and each variant's time beside its prediction."""
    made = load() if made is None else made
    p, rows = made.parameters, made.samples
    fitted = plain(rows)
    errors = [math.log(s.predicted(p) / s.row.ms) for s in fitted]
    rms = math.sqrt(sum(e * e for e in errors) / len(errors))
    lines = [f"fitted on plain rows of {', '.join(made.records)} ({made.device})"]
    lines += [f"  clock {p.clock:.2f} GHz, launch {p.launch:.0f} clocks"]
    lines += [f"  work tile {v:.0f} clocks: {kind}" for kind, v in p.work_tile.items()]
    lines += [f"  not hidden {v:.0%}: {kind}" for kind, v in p.exposed.items()]
    lines += [f"  {len(fitted)} rows, errors: rms {rms:.1%}, largest {max(map(abs, errors)):.1%}"]
    lines += ["", "variants, not fitted: time in units of plain causal"]
    lines += [f"  {'variant':15} head_dim  seqlen  predicted  measured   error"]
    variants = [each for each in compared(rows, p) if each.row.variant != "full"]
    lines += [_line(each) for each in variants]
    return "\n".join([*lines, "", _verdict(variants)])


def _verdict(variants: list[Compared]) -> str:
    """Which variants are further off than `ALLOWED`."""
    off = [each for each in variants if abs(each.error) > ALLOWED]
    named = [
        f"{each.row.variant} {each.error:+.1%} at {each.row.head_dim}, {each.row.seqlen_q}"
        for each in off
    ]
    if not named:
        return f"all {len(variants)} within {ALLOWED:.0%}"
    return f"beyond {ALLOWED:.0%}, {len(off)} of {len(variants)}: {'; '.join(named)}"


def _line(each: Compared) -> str:
    row = each.row
    beyond = f"  beyond {ALLOWED:.0%}" if abs(each.error) > ALLOWED else ""
    return (
        f"  {row.variant:15} {row.head_dim:8} {row.seqlen_q:7} {each.predicted:10.3f} "
        f"{each.measured:9.3f} {each.error:+7.1%}{beyond}"
    )
