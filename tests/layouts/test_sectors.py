"""Bytes and sectors of one instruction, against a count of every byte."""

from __future__ import annotations

import itertools
from dataclasses import replace

import cutlass
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cutedsl_fa3.layouts import SW32, SW128, LayoutError, TensorMap, explain, traffic
from cutedsl_fa3.layouts.doctor.sectors import last_box

BF16 = cutlass.BFloat16
DENSE = TensorMap(BF16, 0, (64, 1000), (128,), (64, 128), swizzle=SW128)


def by_byte(tmap: TensorMap, at: tuple[int, ...]) -> tuple[int, int]:
    """(bytes read, sectors) by visiting every element of the box."""
    size = tmap.element_bytes
    ranges = [range(0, extent, step) for extent, step in zip(tmap.box, tmap.steps, strict=True)]
    read, sectors = 0, set()
    for offset in itertools.product(*ranges):
        index = [c + o for c, o in zip(at, offset, strict=True)]
        if all(0 <= i < n for i, n in zip(index, tmap.shape, strict=True)):
            strides = (size, *tmap.strides)
            start = tmap.address + sum(i * s for i, s in zip(index, strides, strict=True))
            read += size
            sectors |= {byte // 32 for byte in range(start, start + size)}
    return read, len(sectors)


@given(st.data())
def test_sectors_are_those_that_the_bytes_inside_of_the_tensor_lie_in(data):
    rank = data.draw(st.integers(1, 3))

    def several(*values: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.sampled_from(values), min_size=rank, max_size=rank)))

    tmap = TensorMap(
        data.draw(st.sampled_from([BF16, cutlass.Float32, cutlass.Uint8])),
        data.draw(st.sampled_from([0, 16, 32, 48])),
        several(1, 5, 16, 33),
        several(0, 16, 48, 64, 112)[1:],
        (16, *several(1, 2, 4, 6)[1:]),
        (1, *several(1, 1, 2)[1:]),
    )
    assume(all(rule.ok for rule in tmap.rules()))
    at = several(-9, -1, 0, 2, 8, 40)
    found = traffic(tmap, at)
    assert (found.read, found.sectors) == by_byte(tmap, at)
    assert found.smem == tmap.bytes_per_box == found.read + found.filled
    assert found.best == -(-found.read // 32)


def test_rows_that_begin_in_the_middle_of_a_sector_cost_one_more_each():
    aligned = traffic(DENSE)
    assert (aligned.sectors, aligned.wasted) == (512, 0)
    apart = replace(DENSE, address=16, strides=(160,))
    assert (traffic(apart).sectors, traffic(apart).wasted) == (640, 128)
    assert "128 more than they need" in str(traffic(apart))


def test_rows_side_by_side_share_the_sectors_between_them():
    assert traffic(replace(DENSE, address=16)).sectors == 513


def test_the_mbarrier_counts_bytes_outside_and_they_are_not_read():
    last = traffic(DENSE, last_box(DENSE))
    assert last.coordinate == (0, 896)
    assert (last.smem, last.read, last.filled) == (16384, 104 * 128, 24 * 128)
    outside = traffic(DENSE, (0, 1000))
    assert (outside.smem, outside.read, outside.sectors) == (16384, 0, 0)


def test_a_repeated_row_lies_in_the_same_sectors_however_often_it_is_read():
    assert traffic(replace(DENSE, strides=(0,))).sectors == 4


@pytest.mark.parametrize(
    ("tmap", "at", "said"),
    [
        (replace(DENSE, strides=(130,)), None, "stride alignment"),
        (DENSE, (0, 0, 0), "3 entries, the map 2 dimensions"),
        (
            TensorMap(BF16, 0, (64, 9, 9), (128, 1280), (16, 8, 1), swizzle=SW32, interleave="32B"),
            None,
            "interleave = 32B",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(tmap, at, said):
    with pytest.raises(LayoutError, match=said):
        traffic(tmap, at)


def test_a_report_says_what_alignment_would_save():
    text = str(explain(replace(DENSE, address=16, strides=(160,))))
    assert "640 sectors where 512 would do" in text
    assert "multiples of 32 bytes" in text
    assert "would do" not in str(explain(DENSE))
