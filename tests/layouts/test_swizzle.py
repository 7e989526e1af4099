"""Swizzles as byte arithmetic, against their own laws and against CuTe's."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.layouts import (
    NONE,
    SW32,
    SW64,
    SW128,
    LayoutError,
    Swizzle,
    bank,
    bank_conflicts,
    host_cute,
    picture,
    widest,
)

NAMED = (NONE, SW32, SW64, SW128)

swizzles = st.integers(0, 4).flatmap(
    lambda bits: st.builds(Swizzle, st.just(bits), st.integers(0, 6), st.integers(bits, bits + 3))
)


@given(swizzles, st.integers(0, 2**24))
def test_applying_a_swizzle_twice_gives_the_address_back(swizzle, byte):
    assert swizzle(swizzle(byte)) == byte


@given(swizzles, st.integers(0, 64))
def test_a_swizzle_permutes_the_bytes_of_each_period(swizzle, number):
    start = number * swizzle.period
    bytes_of_period = range(start, start + swizzle.period)
    assert sorted(swizzle(b) for b in bytes_of_period) == list(bytes_of_period)


@given(swizzles, st.integers(0, 2**16), st.integers(0, 64))
def test_the_pattern_repeats_after_a_period(swizzle, byte, number):
    shift = number * swizzle.period
    assert swizzle(byte + shift) == swizzle(byte) + shift


@given(swizzles, st.integers(0, 2**20))
def test_a_swizzle_moves_whole_chunks_and_stays_inside_its_span(swizzle, byte):
    assert swizzle(byte) % (1 << swizzle.base) == byte % (1 << swizzle.base)
    assert swizzle(byte) // swizzle.span == byte // swizzle.span


def test_names_spans_and_periods_are_those_of_tma():
    assert [s.name for s in NAMED] == ["none", "32B", "64B", "128B"]
    assert [s.span for s in NAMED] == [16, 32, 64, 128]
    # The driver notes the same alignment in the descriptors it encodes.
    assert [s.period for s in NAMED] == [16, 256, 512, 1024]


def test_overlapping_bit_fields_are_refused_with_the_nearest_valid_swizzle():
    with pytest.raises(LayoutError, match=r"Swizzle<3,4,2>.*nearest valid one is Swizzle<3,4,3>"):
        Swizzle(3, 4, 2)


@given(st.integers(1, 4096))
def test_widest_is_the_largest_span_that_divides_a_row(row_bytes):
    if row_bytes % 16:
        with pytest.raises(LayoutError, match=f"pad it to {-(-row_bytes // 16) * 16} bytes"):
            widest(row_bytes)
    else:
        assert widest(row_bytes).span == max(s for s in (16, 32, 64, 128) if row_bytes % s == 0)


@pytest.mark.parametrize("row_bytes", [0, -16])
def test_a_row_without_bytes_is_refused(row_bytes):
    with pytest.raises(LayoutError, match="pad it to 16 bytes"):
        widest(row_bytes)


def column(swizzle: Swizzle, chunk: int) -> list[int]:
    """Where the 16-byte chunk of that number lies in 8 consecutive rows of 128 bytes."""
    return [swizzle(128 * row + 16 * chunk) for row in range(8)]


@pytest.mark.parametrize("chunk", range(8))
def test_a_column_of_eight_rows_conflicts_eight_ways_unswizzled_and_not_at_all_with_128b(chunk):
    assert bank_conflicts(column(NONE, chunk), 16) == 7
    assert bank_conflicts(column(SW32, chunk), 16) == 3
    assert bank_conflicts(column(SW64, chunk), 16) == 1
    assert bank_conflicts(column(SW128, chunk), 16) == 0


@given(st.sampled_from(NAMED), st.sampled_from([4, 8, 16]))
def test_consecutive_addresses_never_conflict(swizzle, width):
    assert bank_conflicts([swizzle(width * lane) for lane in range(32)], width) == 0


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 1000))
def test_a_broadcast_is_no_conflict(width, index):
    assert bank_conflicts([index * width] * 32, width) == 0


def test_lanes_that_read_parts_of_one_word_do_not_conflict():
    assert bank_conflicts(range(32), 1) == 0
    assert bank_conflicts(range(0, 64, 2), 2) == 0


@given(st.integers(0, 6))
def test_a_power_of_two_stride_conflicts_as_often_as_it_skips_banks(log):
    stride = 1 << log
    ways = min(stride, 32)
    assert bank_conflicts([4 * stride * lane for lane in range(32)], 4) == ways - 1


def test_wide_accesses_run_in_halves_and_quarters_of_a_warp():
    # The same two rows of banks: one after the other within a phase, apart when in two phases.
    assert bank_conflicts([0, 128], 4) == 1
    half = [8 * lane for lane in range(16)]
    assert bank_conflicts(half + [128 + a for a in half], 8) == 0
    quarter = [16 * lane for lane in range(8)]
    assert bank_conflicts(quarter + [128 + a for a in quarter], 16) == 0
    assert bank_conflicts([*quarter[:7], 128], 16) == 1


@given(st.lists(st.integers(0, 255), min_size=1, max_size=32), st.sampled_from([4, 8, 16]))
def test_conflicts_equal_a_count_bank_by_bank(indices, width):
    addresses = [i * width for i in indices]
    lanes = 128 // width
    extra = 0
    for phase in (addresses[i : i + lanes] for i in range(0, len(addresses), lanes)):
        words = {a // 4 + k for a in phase for k in range(width // 4)}
        extra += max(sum(w % 32 == b for w in words) for b in range(32)) - 1
    assert bank_conflicts(addresses, width) == extra


def test_bank_conflicts_refuses_what_no_warp_can_do():
    with pytest.raises(LayoutError, match="33 addresses: a warp has 32 lanes"):
        bank_conflicts([0] * 33, 4)
    with pytest.raises(LayoutError, match="address 20 is not a multiple of the 16 bytes"):
        bank_conflicts([20], 16)
    with pytest.raises(LayoutError, match="not 12"):
        bank_conflicts([0], 12)


@given(st.integers(0, 2**20))
def test_a_bank_is_four_bytes_and_there_are_32(byte):
    assert bank(byte) == bank(byte + 128) == (byte % 128) // 4


def test_the_picture_shows_row_three_of_a_128b_atom_with_its_chunks_exchanged():
    lines = picture(SW128).splitlines()
    assert len(lines) == 9
    assert lines[1].split() == ["0", *"01234567"]
    assert lines[4].split() == ["3", *"32107654"]


KINDS = {
    NONE: SmemLayoutAtomKind.K_INTER,
    SW32: SmemLayoutAtomKind.K_SW32,
    SW64: SmemLayoutAtomKind.K_SW64,
    SW128: SmemLayoutAtomKind.K_SW128,
}


@pytest.mark.parametrize("swizzle", NAMED, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [cutlass.BFloat16, cutlass.Float32, cutlass.Float8E4M3FN])
def test_physical_byte_addresses_equal_cutes(swizzle, dtype):
    cols = swizzle.span * 8 // dtype.width
    with host_cute():
        atom = make_smem_layout_atom(KINDS[swizzle], dtype)
        tile = cute.tile_to_shape(atom, (16, cols), order=(0, 1))
        # The atom's swizzle acts on bytes, its layout counts elements: recast before composing.
        in_bytes = cute.recast_layout(8, dtype.width, tile.outer)
        physical = cute.make_composed_layout(tile.inner, 0, in_bytes)
        for row in range(16):
            for byte in range(0, swizzle.span, 4):
                assert physical((row, byte)) == swizzle(row * swizzle.span + byte)


def test_static_layouts_evaluate_to_integers_inside_host_cute():
    with host_cute():
        assert cute.make_layout((8, 64), stride=(64, 1))((3, 5)) == 197
