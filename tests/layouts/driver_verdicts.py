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


# The driver's name of each type; TMA moves bits, and takes others by their width.
NAMES = {
    "Uint8": "UINT8",
    "Uint16": "UINT16",
    "Uint32": "UINT32",
    "Int32": "INT32",
    "Uint64": "UINT64",
    "Int64": "INT64",
    "Float16": "FLOAT16",
    "BFloat16": "BFLOAT16",
    "Float32": "FLOAT32",
    "Float64": "FLOAT64",
}


MOST_RANK = 5


def encode(tmap: TensorMap) -> bytes | None:
    """The descriptor that this machine's driver makes of a map, or None where it refuses."""
    from cuda.bindings import driver

    if tmap.rank > MOST_RANK:
        return None  # cuda-python's own check: the driver is never asked

    by_width = f"Uint{tmap.dtype.width}"
    name = NAMES.get(tmap.dtype.__name__) or NAMES[by_width]

    def filled(values: tuple[int, ...], plain: int) -> list[int]:
        # Where the driver's array would be null it refuses a null pointer, whatever the rank; a
        # map of one dimension has no stride.
        return list(values) or [plain]

    result, made = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
        tmap.rank,
        tmap.address,
        [driver.cuuint64_t(s) for s in filled(tmap.shape, 1)],
        # A stride below zero reaches the driver as the large number that has its bits.
        [driver.cuuint64_t(s % 2**64) for s in filled(tmap.strides, 0)],
        [driver.cuuint32_t(b) for b in filled(tmap.box, 1)],
        [driver.cuuint32_t(e) for e in filled(tmap.steps, 1)],
        driver.CUtensorMapInterleave(INTERLEAVES.index(tmap.interleave)),
        driver.CUtensorMapSwizzle(SWIZZLES.index(tmap.swizzle)),
        driver.CUtensorMapL2promotion(L2_PROMOTIONS.index(tmap.l2_promotion)),
        driver.CUtensorMapFloatOOBfill(OOB_FILLS.index(tmap.oob_fill)),
    )
    if result != driver.CUresult.CUDA_SUCCESS:
        return None
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)
