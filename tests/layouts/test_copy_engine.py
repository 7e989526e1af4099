"""The emulated copy engine, against torch's indexing and CuTe's layouts."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import copy_cases
import cutlass
import cutlass.cute as cute
import pytest
import torch
from copy_cases import DTYPES, FLOATING, POISON, SMEM_BYTES, SWIZZLES, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3.global_tensor import global_tensor
from cutedsl_fa3.layouts import (
    NONE,
    SW32,
    SW64,
    SW128,
    GlobalTensor,
    LayoutError,
    TensorMap,
    Tile,
    bank,
    copy_engine,
    host_cute,
)

BF16 = cutlass.BFloat16
FEATURES = ("narrow", "shifted", "steps", "nan", "expanded", "inward")


@st.composite
def copies(draw: st.DrawFn, *always: str, without: tuple[str, ...] = ()) -> Case:
    chosen = {f for f in FEATURES if f not in without and draw(st.booleans())} | set(always)
    dtype = draw(st.sampled_from(FLOATING if "nan" in chosen else DTYPES))
    rng = random.Random(draw(st.integers(0, 2**32)))
    rank, swizzle = draw(st.integers(1, 5)), draw(st.sampled_from(SWIZZLES))
    return copy_cases.case(rng, rank, swizzle, dtype, *sorted(chosen))


def poisoned() -> bytearray:
    return bytearray([POISON]) * SMEM_BYTES


def loaded(case: Case) -> copy_engine.Load:
    return copy_engine.load(case.tmap, case.memory, case.coordinate, smem=poisoned(), at=case.at)


# Boxes


@settings(max_examples=200)
@given(copies())
def test_a_load_leaves_the_bytes_that_indexing_and_the_swizzle_formula_say(case):
    found = loaded(case)
    smem, filled = copy_cases.expected(case)
    assert found.smem == smem.numpy().tobytes(), case
    assert found.filled == filled


def between(case: copy_cases.Case) -> int:
    """Elements between the columns at which a box may begin."""
    return copy_engine.INNER_ALIGN // case.tmap.element_bytes


@given(copies())
def test_the_mbarrier_is_told_whole_boxes_whatever_lies_outside(case):
    whole = copy_cases.elements(case) * case.tmap.element_bytes
    assert loaded(case).transaction_bytes == case.tmap.bytes_per_box == whole


@given(copies(), st.integers(0, 4), st.sampled_from(["before", "behind"]))
def test_a_box_wholly_outside_in_any_dimension_is_all_fill(case, dimension, side):
    d = dimension % case.tmap.rank
    far = -case.tmap.box[d] if side == "before" else case.tmap.shape[d]
    if d == 0:  # and where the next 16 bytes of a row begin
        up = between(case) - 1 if side == "behind" else 0
        far = (far + up) // between(case) * between(case)
    away = (*case.coordinate[:d], far, *case.coordinate[d + 1 :])
    found = loaded(replace(case, coordinate=away, memory=b""))  # and nothing is read
    assert found.filled == copy_cases.elements(case)


@given(copies("nan", without=("expanded",)))
def test_nan_fill_is_a_nan_of_every_floating_type(case):
    tmap = case.tmap
    away = (-(-tmap.shape[0] // between(case)) * between(case), *case.coordinate[1:])
    found = loaded(replace(case, coordinate=away, at=0)).smem
    box = found[: copy_engine.footprint(tmap)]
    dtype = getattr(torch, tmap.dtype.__name__.lower())
    values = torch.frombuffer(box, dtype=dtype)
    poison = torch.frombuffer(poisoned(), dtype=dtype)[0]
    assert (values.isnan() | (values == poison)).all()
    assert int(values.isnan().sum()) == copy_cases.elements(case)


# Where an element lies, and which lies there


@settings(max_examples=200)
@given(copies(without=("nan",)), st.data())
def test_the_element_named_at_an_address_is_the_one_whose_bytes_lie_there(case, data):
    tmap, found = case.tmap, loaded(case).smem
    offset = data.draw(st.integers(0, copy_engine.footprint(tmap) - 1))
    element = copy_engine.element_at(tmap, case.at + offset, case.coordinate, at=case.at)
    there = found[case.at + offset]
    if element is None:
        assert there == POISON
        return
    assert element.bank == bank(case.at + offset)
    if not element.within(tmap.shape):
        assert there == 0
        return
    strides = (tmap.element_bytes, *tmap.strides)
    start = sum(i * s for i, s in zip(element.index, strides, strict=True))
    assert there == case.memory[start + element.byte]


@given(copies(), st.data())
def test_addresses_and_elements_are_inverse(case, data):
    counts = (-(-b // e) for b, e in zip(case.tmap.box, case.tmap.steps, strict=True))
    place = tuple(data.draw(st.integers(0, n - 1)) for n in counts)
    address = copy_engine.address_of(case.tmap, place, at=case.at)
    element = copy_engine.element_at(case.tmap, address, at=case.at)
    assert element == copy_engine.Element(place, place, 0, bank(address))


def test_rows_shorter_than_the_swizzle_leave_gaps_that_hold_no_element():
    tmap = TensorMap(BF16, 0, (64, 8), (128,), (32, 8), swizzle=SW128)
    found = [copy_engine.element_at(tmap, 16 * i) for i in range(8 * 8)]
    assert copy_engine.footprint(tmap) == 8 * 128
    assert [e.place if e else None for e in found[:9]] == [
        *((8 * i, 0) for i in range(4)),
        None,
        None,
        None,
        None,
        (8, 1),
    ]
    assert sum(e is not None for e in found) == 8 * 4


# Tiles


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    dtype = draw(st.sampled_from((cutlass.Int8, BF16, cutlass.Float32, cutlass.Float64)))
    chunks = draw(st.integers(1, 24))
    return Tile(8 * draw(st.integers(1, 9)), chunks * 128 // dtype.width, dtype)


def byte_layout(tile: Tile, stages: int) -> cute.ComposedLayout:
    """CuTe's layout of the tile over bytes, which is what its swizzle acts on."""
    layout = tile.layout(stages)
    outer = cute.recast_layout(8, tile.dtype.width, layout.outer)
    return cute.make_composed_layout(layout.inner, 0, outer)


@settings(max_examples=40)
@given(tiles(), st.integers(1, 3), st.data())
def test_an_element_of_a_tile_lies_where_cutes_layout_says(tile, stages, data):
    size = tile.dtype.width // 8
    with host_cute():
        layout = byte_layout(tile, stages)
        for _ in range(24):
            row = data.draw(st.integers(0, tile.rows - 1))
            col = data.draw(st.integers(0, tile.cols - 1))
            stage = data.draw(st.integers(0, stages - 1))
            at = stage * tile.bytes
            address = copy_engine.address_of(tile, (col, row), at=at)
            assert address == layout((row, col * size, stage))
            assert copy_engine.element_at(tile, address, at=at).place == (col, row)


@settings(max_examples=25)
@given(tiles(), st.integers(-3, 3), st.integers(-3, 3), st.data())
def test_a_tile_of_several_boxes_is_the_padded_tensor_in_cutes_layout(tile, m, n, data):
    """Every element: a tensor of two heads, rows in a wider row, zeros on all sides."""
    dtype = copy_cases.WORDS[tile.dtype.width // 8]
    rows = data.draw(st.integers(1, 2 * tile.rows))
    cols = data.draw(st.integers(1, 2 * tile.cols))
    apart = 16 // dtype.itemsize
    wide = -(-cols // apart) * apart
    storage = torch.randint(1, 120, (rows, 2, wide), dtype=dtype)
    view = storage[:, :, :cols].permute(0, 2, 1)
    head = data.draw(st.integers(0, 1))
    row, col = m * tile.rows // 3, n * (tile.cols // 3 // apart) * apart
    tensor = global_tensor(view)
    found = copy_engine.load(tile, tensor, (col, row, head))
    assert found.transaction_bytes == tile.bytes == len(found.smem)

    padded = torch.zeros(rows + 4 * tile.rows, cols + 4 * tile.cols, dtype=dtype)
    corner = 2 * tile.rows, 2 * tile.cols
    padded[corner[0] : corner[0] + rows, corner[1] : corner[1] + cols] = view[:, :, head]
    wanted = padded[corner[0] + row :, corner[1] + col :][: tile.rows, : tile.cols]
    with host_cute():
        layout = byte_layout(tile, 1)
        chunks = tile.row_bytes // 16
        places = [[layout((r, 16 * c, 0)) for c in range(chunks)] for r in range(tile.rows)]
    smem = torch.frombuffer(found.smem, dtype=torch.uint8)
    index = torch.tensor(places)[..., None] + torch.arange(16)
    assert torch.equal(smem[index].view(tile.rows, -1).view(dtype), wanted)
    assert found.filled == int((wanted == 0).sum())


def test_a_tile_is_quick_enough_to_look_at_every_one_of_a_kernel():
    tensor = global_tensor(torch.zeros(100, 64, dtype=torch.bfloat16))
    tile, times = Tile(128, 64, BF16), []
    for _ in range(5):
        start = time.perf_counter()
        copy_engine.load(tile, tensor, (0, 0))
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02


# Stores


@settings(max_examples=100)
@given(copies("inward", without=("expanded",)), st.integers(0, 99))
def test_a_store_writes_what_the_tensor_has_and_drops_the_rest(case, seed):
    smem = random.Random(seed).randbytes(SMEM_BYTES)
    memory = bytearray(case.memory)
    written = copy_engine.store(case.tmap, memory, case.coordinate, smem, at=case.at)
    image = torch.frombuffer(bytearray(smem), dtype=torch.uint8)
    assert memory == copy_cases.expected_store(case, image).numpy().tobytes()
    inside = (copy_cases.elements(case) - loaded(case).filled) * case.tmap.element_bytes
    rows = copy_cases.elements(case) // case.tmap.box[0]
    assert inside <= written <= inside + 15 * rows


def test_a_tile_stored_is_the_tile_loaded_and_lands_in_a_torch_tensor():
    source = torch.randn(50, 128).bfloat16()
    target = torch.zeros_like(source)
    tile = Tile(64, 128, BF16)
    load = copy_engine.load(tile, global_tensor(source), (0, 0))
    written = copy_engine.store(tile, global_tensor(target), (0, 0), load.smem)
    assert torch.equal(source, target)
    assert written == source.numel() * 2


# Refusals


def plain(**fields: object) -> TensorMap:
    return replace(TensorMap(BF16, 0, (64, 32), (128,), (64, 16), swizzle=SW128), **fields)


MEMORY = bytes(64 * 32 * 2)


@pytest.mark.parametrize(
    ("tmap", "coordinate", "options", "message"),
    [
        (plain(), (0,), {}, r"coordinate \(0,\): 2 signed 32-bit integers"),
        (plain(), (0, 2**31), {}, "signed 32-bit"),
        (plain(), (4, 0), {}, "begin 8 bytes into a row.*begin at element 0 or 8"),
        (plain(), (-1, 0), {}, "begin -2 bytes into a row.*begin at element -8 or 0"),
        (plain(), (0, 0), {"at": 64}, "box 0 would begin at byte 64.*multiples of 128"),
        (
            plain(),
            (0, 0),
            {"smem": bytearray(2000)},
            "smem has 2000 bytes.* needs 2048",
        ),
        (plain(strides=(136,)), (0, 0), {}, "breaks 1 rule"),
        (plain(shape=(64, 33)), (0, 32), {}, "memory has 4096 bytes.* reach byte 4223"),
    ],
)
def test_what_no_copy_can_do_is_refused(tmap, coordinate, options, message):
    with pytest.raises(LayoutError, match=message):
        copy_engine.load(tmap, MEMORY, coordinate, **options)


def test_interleaved_layouts_are_refused():
    tmap = TensorMap(cutlass.Uint8, 0, (16, 4, 4), (16, 64), (16, 4, 4), interleave="16B")
    with pytest.raises(LayoutError, match=r"interleave 16B: .* not emulated"):
        copy_engine.load(tmap, bytes(4096), (0, 0, 0))


def test_a_tile_that_would_put_a_box_between_lines_is_refused():
    tile = Tile(520, 8, BF16)  # four boxes of 130 rows of 16 bytes
    tensor = global_tensor(torch.zeros(520, 8, dtype=torch.bfloat16))
    with pytest.raises(LayoutError, match="box 1 would begin at byte 2080"):
        copy_engine.load(tile, tensor, (0, 0))


def test_a_tile_needs_to_know_how_the_tensor_lies():
    with pytest.raises(LayoutError, match="memory of a tile's copy is bytes: a GlobalTensor"):
        copy_engine.load(Tile(8, 64, BF16), b"", (0, 0))


def test_a_store_before_the_tensor_or_to_bytes_is_refused():
    smem = bytes(2048)
    with pytest.raises(LayoutError, match=r"store at coordinate \(0, -1\): a store begins at 0"):
        copy_engine.store(plain(), bytearray(MEMORY), (0, -1), smem)
    with pytest.raises(LayoutError, match="memory is read-only"):
        copy_engine.store(plain(), MEMORY, (0, 0), smem)


def test_places_and_addresses_outside_are_refused():
    with pytest.raises(LayoutError, match=r"place \(64, 0\): outside 64 x 16 elements"):
        copy_engine.address_of(plain(), (64, 0))
    with pytest.raises(LayoutError, match="place"):
        copy_engine.address_of(Tile(8, 64, BF16), (0, 0, 0))
    with pytest.raises(LayoutError, match=r"address 2048: outside .* 0 to 2047"):
        copy_engine.element_at(plain(), 2048)


def test_memory_with_gaps_is_refused():
    with pytest.raises(LayoutError, match="memory is a view with gaps"):
        copy_engine.load(plain(), memoryview(MEMORY)[::2], (0, 0))


# Torch tensors


def test_a_tensor_is_seen_with_its_columns_first_and_keeps_its_memory():
    qkv = torch.arange(6 * 3 * 64, dtype=torch.int16).view(6, 3, 64).view(torch.bfloat16)
    k = global_tensor(qkv[:, 1])
    del qkv
    assert isinstance(k, GlobalTensor)
    assert (k.shape, k.strides) == ((64, 6), (384,))
    load = copy_engine.load(Tile(8, 64, BF16), k, (0, 5))
    row = torch.frombuffer(load.smem, dtype=torch.int16)[:64]
    assert row.tolist() == list(range(64 * 16, 64 * 17))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(5), "rows and columns are needed"),
        (torch.zeros(0, 8), "at least one each"),
        (torch.zeros(8, 4).T, "its columns, must be contiguous"),
    ],
)
def test_a_tensor_without_rows_of_contiguous_columns_is_refused(tensor, message):
    with pytest.raises(LayoutError, match=message):
        global_tensor(tensor)


def test_swizzles_give_the_same_bytes_in_another_order():
    memory = random.Random(0).randbytes(64 * 16 * 2)
    found = []
    for swizzle, cols in ((NONE, 8), (SW32, 16), (SW64, 32), (SW128, 64)):
        tmap = TensorMap(BF16, 0, (64, 16), (128,), (cols, 16), swizzle=swizzle)
        load = copy_engine.load(tmap, memory, (0, 0))
        rows = [memory[128 * r :][: 2 * cols] for r in range(16)]
        assert sorted(load.smem) == sorted(b"".join(rows))
        found.append(bytes(load.smem))
    assert found[0] == b"".join(memory[128 * r :][:16] for r in range(16))
