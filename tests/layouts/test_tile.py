"""Tiles: the bytes that CuTe's layouts address and the boxes that TMA moves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3.layouts import (
    NONE,
    SW32,
    SW64,
    SW128,
    LayoutError,
    TensorMap,
    Tile,
    host_cute,
    transposed,
)

DTYPES = (
    cutlass.Int8,
    cutlass.Float8E4M3FN,
    cutlass.Float16,
    cutlass.BFloat16,
    cutlass.Float32,
    cutlass.Float64,
)
CHUNK = 16


@st.composite
def tiles(draw: st.DrawFn, max_rows: int = 512, max_row_bytes: int = 512) -> Tile:
    dtype = draw(st.sampled_from(DTYPES))
    chunks = draw(st.integers(1, max_row_bytes // CHUNK))
    pieces = draw(st.sampled_from([n for n in (1, 2, 3) if chunks % n == 0]))
    rows, cols = 8 * draw(st.integers(1, max_rows // 8)), chunks * CHUNK * 8 // dtype.width
    return Tile(rows, cols, dtype, pieces)


def logical(tile: Tile, row: int, col: int, stage: int) -> int:
    """Where TMA puts an element before the swizzle: one span-wide strip of rows after another."""
    span, size = tile.swizzle.span, tile.dtype.width // 8
    strip, inside = divmod(col * size, span)
    return stage * tile.bytes + strip * tile.rows * span + row * span + inside


def in_bytes(layout: cute.ComposedLayout, dtype: type) -> cute.ComposedLayout:
    """The same layout over bytes: what CuTe's swizzle, which is one of byte addresses, acts on."""
    outer = cute.recast_layout(8, dtype.width, layout.outer)
    return cute.make_composed_layout(layout.inner, 0, outer)


@settings(max_examples=50)
@given(tiles(), st.integers(1, 4), st.data())
def test_an_element_lies_where_the_swizzle_puts_its_logical_byte(tile, stages, data):
    size = tile.dtype.width // 8
    with host_cute():
        layout = in_bytes(tile.layout(stages), tile.dtype)
        for _ in range(16):
            row = data.draw(st.integers(0, tile.rows - 1))
            col = data.draw(st.integers(0, tile.cols - 1))
            stage = data.draw(st.integers(0, stages - 1))
            physical = layout((row, col * size, stage))
            assert physical == tile.swizzle(logical(tile, row, col, stage))


@settings(max_examples=50)
@given(tiles(max_rows=1024))
def test_boxes_cover_a_tile_exactly_once_and_each_fills_one_stretch_of_bytes(tile):
    cols, rows = tile.box
    size = tile.dtype.width // 8
    corners = list(product(range(0, tile.cols, cols), range(0, tile.rows, rows)))
    assert len(corners) == tile.copies
    assert tile.cols % cols == 0 and tile.rows % rows == 0
    assert rows <= 256 and cols * size == tile.swizzle.span
    stretch = rows * cols * size
    chunks = range(0, cols, CHUNK // size)
    filled: list[int] = []
    for col, row in corners:
        places = [
            tile.swizzle(logical(tile, row + r, col + c, 0)) for r in range(rows) for c in chunks
        ]
        start = min(places)
        assert sorted(places) == list(range(start, start + stretch, CHUNK))
        filled += places
    assert sorted(filled) == list(range(0, tile.bytes, CHUNK))


@given(tiles(), st.integers(1, 4))
def test_bytes_of_a_tile_are_the_extent_of_its_layout(tile, stages):
    with host_cute():
        one, staged = tile.layout(), tile.layout(stages)
        assert cute.cosize(one.outer) * tile.dtype.width // 8 == tile.bytes
        assert cute.cosize(staged.outer) * tile.dtype.width // 8 == stages * tile.bytes
        assert cute.size(one.outer) == tile.rows * tile.cols


@given(tiles())
def test_bytes_of_a_tile_are_those_of_the_boxes_that_tma_moves(tile):
    rows, cols = 3 * tile.rows, 2 * tile.cols
    one = tile.tensor_map(0, (cols, rows), (cols * tile.dtype.width // 8,))
    assert one.bytes_per_box * tile.copies == tile.bytes


@settings(max_examples=25)
@given(tiles(), st.integers(1, 4), st.data())
def test_the_transposed_view_addresses_the_same_bytes(tile, stages, data):
    with host_cute():
        base = cute.make_ptr(cutlass.Uint8, 0, cute.AddressSpace.smem, assumed_align=1024)
        straight = tile.tensor(base, stages)
        turned = transposed(straight)
        assert str(turned.iterator) == str(straight.iterator)  # address, type, alignment, swizzle
        for _ in range(8):
            row = data.draw(st.integers(0, tile.rows - 1))
            col = data.draw(st.integers(0, tile.cols - 1))
            stage = data.draw(st.integers(0, stages - 1))
            assert turned.layout((col, row, stage)) == straight.layout((row, col, stage))


@pytest.mark.parametrize(
    "cols, swizzle", [(8, NONE), (16, SW32), (32, SW64), (64, SW128), (96, SW64), (128, SW128)]
)
def test_the_swizzle_is_the_widest_that_divides_a_row(cols, swizzle):
    assert Tile(64, cols, cutlass.BFloat16).swizzle == swizzle


@given(st.integers(-8, 600).filter(lambda rows: rows < 1 or rows % 8))
def test_rows_that_are_no_whole_swizzle_atoms_are_refused_with_the_next_that_is(rows):
    following = max(8, rows + -rows % 8)
    with pytest.raises(LayoutError, match=rf"rows = {rows}: .* use {following}$"):
        Tile(rows, 64, cutlass.BFloat16)


@given(st.integers(1, 600).filter(lambda cols: cols % 8))
def test_rows_of_broken_chunks_are_refused_with_the_padded_size(cols):
    padded = -(-2 * cols // CHUNK) * CHUNK
    with pytest.raises(LayoutError, match=f"row of {2 * cols} bytes.*pad it to {padded} bytes"):
        Tile(64, cols, cutlass.BFloat16)


def test_a_printed_tile_shows_its_boxes_bytes_and_swizzle():
    text = str(Tile(128, 128, cutlass.BFloat16))
    assert text == "128 x 128 BFloat16, 32768 B, 128B swizzle, 2 TMA boxes of 128 x 64"


# Descriptors: what the compiler encodes for a tile against what the tile says.

ELEMENTS = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


@cute.jit
def _encode(tensor: cute.Tensor, out: cute.Tensor, bind: cutlass.Constexpr):
    target = cute.make_ptr(
        cutlass.Int64, out.iterator.toint(), cute.AddressSpace.gmem, assumed_align=64
    )
    cpasync.copy_tensormap(bind(tensor).atom, target)


def encoded(view: torch.Tensor, bind) -> TensorMap:
    """The descriptor that `bind(tensor)` encodes for a view (rows, cols, ...), sizes dynamic."""
    space = torch.zeros(256, dtype=torch.uint8)
    start = -space.data_ptr() % 128
    out = space[start : start + 128]
    tensor = from_dlpack(view, assumed_align=16).mark_layout_dynamic(leading_dim=1)
    _encode(tensor, from_dlpack(out.view(torch.int64), assumed_align=64), bind)
    return TensorMap.from_bytes(out.numpy().tobytes(), ELEMENTS[view.dtype])


def stated(tile: Tile, view: torch.Tensor) -> TensorMap:
    """The descriptor that the tile states for the same view."""
    order = (1, 0, *range(2, view.dim()))
    shape = tuple(view.shape[i] for i in order)
    strides = tuple(view.stride(i) * view.element_size() for i in order[1:])
    told = tile.tensor_map(view.data_ptr(), shape, strides)
    told.check()
    return replace(told, element_strides=(1,) * view.dim())


def attention_view(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(batch, seqlen, heads, head_dim) seen as (seqlen, head_dim, heads, batch)."""
    return torch.empty(2, 500, 3, head_dim, dtype=dtype).permute(1, 3, 2, 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", range(64, 257, 16))
def test_the_compiler_encodes_the_descriptor_that_the_tile_states(rows, head_dim):
    view = attention_view(head_dim)
    tile = Tile(rows, head_dim, cutlass.BFloat16)
    assert encoded(view, tile.load_atom) == stated(tile, view)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_store_is_encoded_as_the_tile_states(head_dim):
    view = attention_view(head_dim, torch.float16)
    tile = Tile(64, head_dim, cutlass.Float16)
    assert encoded(view, tile.store_atom) == stated(tile, view)


@given(st.sampled_from(DTYPES), st.integers(1, 64), st.integers(1, 16), st.data())
def test_a_plain_tile_lies_row_after_row_in_boxes_of_whole_rows(dtype, eights, chunks, data):
    tile = Tile(8 * eights, chunks * CHUNK * 8 // dtype.width, dtype, plain=True)
    assert (tile.swizzle, tile.box[0]) == (NONE, tile.cols)
    assert tile.copies * tile.box[1] == tile.rows
    row, col = data.draw(st.integers(0, tile.rows - 1)), data.draw(st.integers(0, tile.cols - 1))
    with host_cute():
        places = [
            cute.crd2idx((row, col), tile.layout()), cute.crd2idx((row, col, 2), tile.layout(3))
        ]  # fmt: skip
    once = row * tile.cols + col
    assert places == [once, 2 * tile.rows * tile.cols + once]


@pytest.mark.parametrize("fields", [{"pieces": 2}, {"cols": 512}])
def test_a_plain_tile_that_boxes_would_not_lay_row_after_row_is_refused(fields):
    with pytest.raises(LayoutError, match="at most 256 columns"):
        Tile(**{"rows": 64, "cols": 128, "dtype": cutlass.BFloat16, "plain": True, **fields})


@pytest.mark.parametrize(("cols", "pieces", "span"), [(192, 2, 64), (256, 2, 128), (96, 2, 32)])
def test_every_piece_of_a_row_begins_with_a_swizzle_span(cols, pieces, span):
    tile = Tile(64, cols, cutlass.BFloat16, pieces)
    assert tile.swizzle.span == span and 2 * cols // pieces % span == 0
    assert tile.copies == 2 * cols // span
    with pytest.raises(LayoutError, match="pieces = 5"):
        Tile(64, cols, cutlass.BFloat16, pieces=5)


@pytest.mark.parametrize("rows", [264, 320, 400, 512, 520, 776, 1048])
def test_tiles_taller_than_a_box_are_split_as_the_compiler_splits_them(rows):
    view = attention_view(64)
    tile = Tile(rows, 64, cutlass.BFloat16)
    assert encoded(view, tile.load_atom) == stated(tile, view)


@pytest.mark.parametrize("partners", [2, 4])
def test_multicast_partners_each_copy_their_part_of_the_rows(partners):
    view = attention_view(128)
    tile = Tile(128, 128, cutlass.BFloat16)
    part = Tile(128 // partners, 128, cutlass.BFloat16)
    assert encoded(view, lambda t: tile.load_atom(t, partners)) == stated(part, view)


@pytest.mark.parametrize("dtype", [torch.bfloat16, float, None], ids=str)
def test_another_dtype_than_one_of_cutlass_is_refused(dtype):
    with pytest.raises(LayoutError) as caught:
        Tile(128, 64, dtype)
    assert str(caught.value) == (
        f"tile dtype = {dtype!r}: a cutlass type is needed, e.g. cutlass.BFloat16"
    )


@given(tiles(), tiles())
def test_a_tile_holds_the_rows_of_another_if_each_of_its_bytes_lies_within_the_same_row(a, b):
    """Rows of boxes, by the address of each box's row."""

    def bytes_of_row(tile: Tile, row: int) -> set[int]:
        span = min(tile.swizzle.span, tile.row_bytes)
        boxes = tile.row_bytes // span
        starts = (box * tile.rows * span + row * span for box in range(boxes))
        return {byte for start in starts for byte in range(start, start + span)}

    if a.holds_rows_of(b):
        assert all(bytes_of_row(b, row) <= bytes_of_row(a, row) for row in range(b.rows))


def test_queries_hold_the_rows_of_outputs_that_are_no_wider():
    q = Tile(128, 192, cutlass.BFloat16)
    assert q.holds_rows_of(Tile(128, 128, cutlass.BFloat16))
    assert not Tile(128, 128, cutlass.BFloat16).holds_rows_of(q)
    assert not q.holds_rows_of(Tile(128, 96, cutlass.BFloat16))  # another swizzle
