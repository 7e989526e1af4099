"""Descriptors that CuTe encodes, decoded, against the geometry written down by hand."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import pytest
import torch

from cutedsl_fa3.layouts import NONE, SW32, SW64, SW128, LayoutError, Swizzle, TensorMap
from cutedsl_fa3.tma_probe import encoded_by_cute

TYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
}
BF16, FP16, FP32 = TYPES

# (batch, seqlen, heads, head_dim) seen as (seqlen, head_dim, heads, batch): rows, cols, the rest.
BSHD = (1, 3, 2, 0)

# stored shape, permutation to (rows, cols, ...), type, tile, swizzle,
# and by hand, innermost first: sizes, strides in elements, box
CASES = [
    ((1000, 128), (0, 1), BF16, (128, 128), SW128, (128, 1000), (128,), (64, 128)),
    ((1000, 128), (0, 1), FP16, (128, 128), SW128, (128, 1000), (128,), (64, 128)),
    ((1000, 128), (0, 1), FP32, (64, 128), SW128, (128, 1000), (128,), (32, 64)),
    ((1000, 128), (0, 1), BF16, (128, 128), SW64, (128, 1000), (128,), (32, 128)),
    ((1000, 128), (0, 1), BF16, (128, 32), SW32, (128, 1000), (128,), (16, 128)),
    ((1000, 64), (0, 1), BF16, (64, 64), NONE, (64, 1000), (64,), (8, 64)),
    ((1000, 64), (0, 1), FP32, (192, 32), SW64, (64, 1000), (64,), (16, 192)),
    ((2000, 64), (0, 1), BF16, (256, 64), SW128, (64, 2000), (64,), (64, 256)),
    ((2000, 64), (0, 1), BF16, (512, 64), SW128, (64, 2000), (64,), (64, 256)),
    ((5, 300, 64), (1, 2, 0), FP16, (96, 64), SW128, (64, 300, 5), (64, 19200), (64, 96)),
    (
        (3, 1000, 8, 128),
        BSHD,
        BF16,
        (128, 128),
        SW128,
        (128, 1000, 8, 3),
        (1024, 128, 1024000),
        (64, 128),
    ),
    (
        (3, 77, 8, 64),
        BSHD,
        FP16,
        (192, 64),
        SW64,
        (64, 77, 8, 3),
        (512, 64, 39424),
        (32, 192),
    ),
    (
        (2, 100, 4, 96),
        BSHD,
        BF16,
        (80, 96),
        SW64,
        (96, 100, 4, 2),
        (384, 96, 38400),
        (32, 80),
    ),
    (
        (2, 4, 500, 256),
        (2, 3, 1, 0),
        BF16,
        (80, 256),
        SW128,
        (256, 500, 4, 2),
        (256, 128000, 512000),
        (64, 80),
    ),
    (
        (2, 100, 3, 4, 64),
        (1, 4, 3, 2, 0),
        BF16,
        (128, 64),
        SW128,
        (64, 100, 4, 3, 2),
        (768, 64, 256, 76800),
        (64, 128),
    ),
]


def by_hand(
    view: torch.Tensor,
    swizzle: Swizzle,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, int],
) -> TensorMap:
    """The map that the hardware should be given, every field spelled out."""
    size = view.element_size()
    return TensorMap(
        TYPES[view.dtype],
        view.data_ptr(),
        shape,
        tuple(s * size for s in strides),
        box + (1,) * (len(shape) - 2),
        element_strides=(1,) * len(shape),
        swizzle=swizzle,
        l2_promotion="128B",
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[2]}-{c[3]}-{c[4].name}")
def test_what_cute_encodes_is_the_geometry_written_by_hand(case, dynamic):
    stored, order, dtype, tile, swizzle, shape, strides, box = case
    view = torch.empty(stored, dtype=dtype).permute(order)
    expected = by_hand(view, swizzle, shape, strides, box)
    expected.check()
    raw = encoded_by_cute(view, tile, swizzle, dynamic)
    assert TensorMap.from_bytes(raw, TYPES[dtype]) == expected


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_slice_of_a_wider_row_keeps_its_row_stride(dynamic):
    qkv = torch.empty(200, 3, 128, dtype=BF16)
    view = qkv[:, 1]
    expected = by_hand(view, SW128, (128, 200), (384,), (64, 64))
    assert expected.address == qkv.data_ptr() + 256
    assert (
        TensorMap.from_bytes(encoded_by_cute(view, (64, 128), SW128, dynamic), cutlass.BFloat16)
        == expected
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_row_stride_of_1022_bytes_is_silently_encoded_as_1008_and_check_refuses_it(dynamic):
    view = torch.empty(100, 511, dtype=BF16)
    encoded = TensorMap.from_bytes(
        encoded_by_cute(view, (64, 64), SW128, dynamic), cutlass.BFloat16
    )
    assert encoded.strides == (1008,)
    given = by_hand(view, SW128, (511, 100), (511,), (64, 64))
    assert replace(given, strides=(1008,)) == encoded
    with pytest.raises(LayoutError, match=r"stride alignment: given 1022 bytes.*pad it to 1024"):
        given.check()
