"""What the CUDA driver says about a tensor map: recorded verdicts (`tma_probe.encode` asks it)."""

from __future__ import annotations

import json
from pathlib import Path

import cutlass

from cutedsl_fa3.layouts import TensorMap
from cutedsl_fa3.layouts.tma_rules import SWIZZLES

_RECORD = Path(__file__).with_suffix(".json")


def recorded() -> list[tuple[TensorMap, bool, bytes]]:
    """Every recorded map, whether the driver took it, and its descriptor where that was kept."""
    record = json.loads(_RECORD.read_text())
    found = []
    for row in record["rows"]:
        fields = dict(zip(record["columns"], row, strict=True))
        accepted, descriptor = fields.pop("accepted"), fields.pop("descriptor")
        fields["dtype"] = getattr(cutlass, fields["dtype"])
        fields["swizzle"] = next(s for s in SWIZZLES if s.name == fields["swizzle"])
        for name in ("shape", "strides", "box", "element_strides"):
            fields[name] = tuple(fields[name])
        # Trailing zeros are not in the record.
        found.append((TensorMap(**fields), accepted, bytes.fromhex(descriptor.ljust(256, "0"))))
    return found
