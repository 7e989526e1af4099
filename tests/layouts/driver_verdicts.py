"""What the CUDA driver says about a tensor map: recorded verdicts, and live ones on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import cutlass

from cutedsl_fa3.layouts import TensorMap
from cutedsl_fa3.layouts.tma_rules import INTERLEAVES, L2_PROMOTIONS, OOB_FILLS, SWIZZLES

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


def encode(tmap: TensorMap) -> bytes | None:
    """The descriptor that this machine's driver makes of a map, or None where it refuses."""
    from cuda.bindings import driver

    types = {
        "Uint8": "UINT8",
        "Uint16": "UINT16",
        "Float16": "FLOAT16",
        "BFloat16": "BFLOAT16",
        "Float32": "FLOAT32",
        "Int32": "INT32",
    }
    code = getattr(
        driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{types[tmap.dtype.__name__]}"
    )
    result, made = driver.cuTensorMapEncodeTiled(
        code,
        tmap.rank,
        tmap.address,
        [driver.cuuint64_t(s) for s in tmap.shape],
        # A map of one dimension has no stride, yet the driver refuses a null pointer to none.
        [driver.cuuint64_t(s) for s in tmap.strides or (0,)],
        [driver.cuuint32_t(b) for b in tmap.box],
        [driver.cuuint32_t(e) for e in tmap.steps],
        driver.CUtensorMapInterleave(INTERLEAVES.index(tmap.interleave)),
        driver.CUtensorMapSwizzle(SWIZZLES.index(tmap.swizzle)),
        driver.CUtensorMapL2promotion(L2_PROMOTIONS.index(tmap.l2_promotion)),
        driver.CUtensorMapFloatOOBfill(OOB_FILLS.index(tmap.oob_fill)),
    )
    if result != driver.CUresult.CUDA_SUCCESS:
        return None
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)
