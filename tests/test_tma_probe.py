"""Single loads on the GPU at hand, and what is refused before one is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cutlass import BFloat16, Float32

from cutedsl_fa3 import tma_probe
from cutedsl_fa3.global_tensor import global_tensor
from cutedsl_fa3.layouts import SW64, LayoutError, TensorMap, Tile, copy_engine

TILE = Tile(64, 64, BFloat16)


def map_of(matrix: torch.Tensor, tile: Tile = TILE, **fields: object) -> TensorMap:
    """The map of a matrix (rows, cols) in bf16."""
    rows, cols = matrix.shape
    return tile.tensor_map(matrix.data_ptr(), (cols, rows), (2 * matrix.stride(0),), **fields)


MATRIX = torch.arange(100 * 64, dtype=torch.int32).view(100, 64).remainder(251).bfloat16()


@pytest.mark.parametrize(
    ("coordinate", "at", "said"),
    [
        ((4, 0), 0, "multiples of 16; begin at element 0 or 8"),
        ((0,), 0, "2 signed 32-bit integers are needed"),
        ((0, 0), 64, "multiples of 128"),
        ((0, 0), tma_probe.SMEM_BYTES - 1024, "the copy to 48128 needs"),
    ],
)
def test_what_no_instruction_does_is_refused_before_any_launch(coordinate, at, said):
    with pytest.raises(LayoutError, match=said):
        tma_probe.load(map_of(MATRIX), coordinate, at=at)


@pytest.mark.parametrize(
    "wrong",
    [
        map_of(MATRIX, Tile(32, 64, BFloat16)),
        replace(map_of(MATRIX), swizzle=SW64, box=(32, 64)),
        TensorMap(Float32, 0, (32, 64), (128,), (32, 64)),
    ],
)
def test_a_product_of_other_tiles_is_refused(wrong):
    with pytest.raises(LayoutError, match="map of b: one of a tile of 64 x 64"):
        tma_probe.product(map_of(MATRIX), (0, 0), wrong, (0, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("coordinate", [(0, 0), (0, 64), (8, -3), (64, 0)])
def test_a_load_leaves_what_is_emulated_and_ends_its_phase(coordinate):
    device = MATRIX.cuda()
    tmap = map_of(device)
    smem = bytearray([tma_probe.POISON]) * tma_probe.SMEM_BYTES
    copy_engine.load(tmap, global_tensor(MATRIX), coordinate, smem=smem, at=1024)
    found = tma_probe.load(tmap, coordinate, at=1024)
    assert found.smem == bytes(smem) and found.ended
    assert not tma_probe.load(tmap, coordinate, beyond=16).ended


@pytest.mark.gpu
def test_a_product_is_that_of_the_tiles_and_nan_fill_reaches_its_rows():
    device = MATRIX.cuda()
    whole, filled = map_of(device), map_of(device, oob_fill="nan")
    found = tma_probe.product(filled, (0, 64), whole, (0, 0))
    wanted = MATRIX[64:].double() @ MATRIX[:64].double().T
    assert torch.equal(found[:36].double(), wanted)
    assert found[36:].isnan().all()
