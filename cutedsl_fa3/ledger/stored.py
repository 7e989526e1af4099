"""The fit that is kept: where it comes from, how it is renewed, how it does.

`fitted.py` holds it as Python, README.md says how it does; both are written by
`python -m cutedsl_fa3 ledger --accept`, and a test fits the records again and compares.
"""

from __future__ import annotations

import json
import math
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
KINDS = ("bench", "variants", "tune")  # of records with rows of plain attention
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

    Raises: ValueError where a record is missing, of another device, or of other sources than
        today's, so that its kernels are not known; `same_kernels` says that they are today's.
    """
    before = load()
    found = [newest(DATA, kind) for kind in KINDS]
    if missing := [kind for kind, record in zip(KINDS, found, strict=True) if record is None]:
        raise ValueError(f"no record of {', '.join(missing)} in {DATA}")
    records = [record for record in found if record is not None]
    names = tuple(
        place(record.meta, None, kind).name for kind, record in zip(KINDS, records, strict=True)
    )
    devices = {record.meta["device"] for record in records}
    if len(devices) > 1:
        raise ValueError(f"records of {' and '.join(sorted(devices))}: one device is fitted")
    if names == before.records:
        kernels = before.kernels
    else:
        if not same_kernels:
            _check_sources(names, records)
        kernels = todays_kernels(records)
    rows = [sample for record in records for sample in samples(record, kernels)]
    return Stored(devices.pop(), names, kernels, fit(plain(rows)))


def _check_sources(names: tuple[str, ...], records: list[Record]) -> None:
    from cutedsl_fa3.cache import source_fingerprint

    today = source_fingerprint()
    for name, record in list(zip(names, records, strict=True))[:2]:  # tune says its schedules
        if record.meta["kernel_source_hash"] != today:
            raise ValueError(
                f"{name} is of other sources than today's, so its kernels are not known; measure "
                "again, or pass --same-kernels if schedules and lowering are the same"
            )


def write(made: Stored, path: Path = FITTED) -> Path:
    """Write a fit as Python."""
    p = made.parameters
    lines = [f"DEVICE = {json.dumps(made.device)}", "RECORDS = ("]
    lines += [f"    {json.dumps(name)}," for name in made.records]
    lines += [")", "PARAMETERS = {"]
    lines += [f'    "clock": {p.clock:.4f},', f'    "launch": {p.launch:.1f},']
    for name, values, digits in (("work_tile", p.work_tile, 1), ("exposed", p.exposed, 4)):
        lines += [f'    "{name}": {{']
        lines += [f"        {json.dumps(kind)}: {v:.{digits}f}," for kind, v in values.items()]
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
    """A line that says so if the records are of other sources than today's; empty if not."""
    from cutedsl_fa3.cache import source_fingerprint

    hashes = {name: Record.read(DATA / name).meta["kernel_source_hash"] for name in made.records}
    old = [name for name, its in hashes.items() if its != source_fingerprint()]
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
    lines += [_line(each) for each in compared(rows, p) if each.row.variant != "full"]
    return "\n".join(lines)


def _line(each: Compared) -> str:
    row = each.row
    beyond = "  beyond 15%" if abs(each.error) > ALLOWED else ""
    return (
        f"  {row.variant:15} {row.head_dim:8} {row.seqlen_q:7} {each.predicted:10.3f} "
        f"{each.measured:9.3f} {each.error:+7.1%}{beyond}"
    )
