"""What counts as a summary, and the table of smallest and largest values."""

from __future__ import annotations

import pytest
import torch

from cutedsl_fa3 import masks
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.summaries import reader, summaries, summarise, table_shape

DOC = torch.tensor([0, 0, 3, 1, 1, -7, 9])
OFFSETS = torch.tensor([0, 5, 2, 4])
TABLE = torch.arange(12, dtype=torch.int32).reshape(2, 6)
FLOATS = torch.tensor([0.5, -1.0, 2.0])
FLAGS = torch.tensor([True, False, False, True])
SIZES = (2, 3, 7, 5, 4, 2)  # batch, heads, seqlen_q, seqlen_k, tile_m, tile_n


def packed(b, h, q, k):
    position_q, position_k = q - OFFSETS[DOC[q]], k - OFFSETS[DOC[k]]
    return (DOC[q] == DOC[k]) & (position_q >= position_k)


FOUND = {
    "nothing read": (masks.causal, ""),
    "read by no position": (masks.prefix(torch.tensor([3, 4])), ""),
    "read by both positions": (lambda b, h, q, k: DOC[q - k] > 0, ""),
    "documents": (lambda b, h, q, k: DOC[q] == DOC[k], "qk"),
    "a condition of one position": (lambda b, h, q, k: (DOC[k] > 0) & (k <= q), "k"),
    "bools": (lambda b, h, q, k: FLAGS[q] | (k <= q), "q"),
    "a whole mask of one position": (lambda b, h, q, k: FLAGS[k] & (k > 3), "k"),
    "positions inside documents": (packed, "qkqk" + "qqkk"),
    "floats compared at one position": (lambda b, h, q, k: (FLOATS[q] > 0) & (k <= q), "q"),
    "floats compared across positions": (lambda b, h, q, k: FLOATS[q] > FLOATS[k], ""),
    "sums across positions": (lambda b, h, q, k: DOC[q] * 2 + DOC[k] > k - q, "qk"),
    "behind what no range passes": (lambda b, h, q, k: (DOC[q] / DOC[k]) > 1.5, ""),
}


@pytest.mark.parametrize("name", FOUND)
def test_summaries_are_the_largest_parts_that_read_memory_by_one_position(name):
    mask, positions = FOUND[name]
    assert "".join(s.position for s in summaries(Variant(mask=mask).mask)) == positions


def test_beside_an_equality_the_others_are_kept_for_its_ends_alone():
    variant = Variant(mask=packed)
    found = summaries(variant.mask)
    assert [s.given for s in found] == [None] * 4 + [
        (key, end) for key in (0, 1) for end in ("low", "high")
    ]
    table = summarise(variant.mask, variant.captures, *SIZES)
    # Queries 0-3 lie in documents 0, 0, 3, 1, at 0, 1, 2 - 4 and 3 - 5.
    assert table[0, 0, 0, 0:2].tolist() == [0, 3]
    inside, first, last = (table[0, 0, 0, 2 * i : 2 * i + 2].tolist() for i in (2, 4, 5))
    assert (inside, first, last) == ([-2, 1], [0, 1], [-2, -2])


def test_only_an_equality_that_every_visible_key_fulfils_counts():
    for mask in (
        lambda b, h, q, k: (DOC[q] == DOC[k]) | (OFFSETS[q] > OFFSETS[k]),
        lambda b, h, q, k: (DOC[q] != DOC[k]) & (OFFSETS[q] > OFFSETS[k]),
        lambda b, h, q, k: (DOC[q] == k) & (OFFSETS[q] > OFFSETS[k]),
    ):
        assert all(s.given is None for s in summaries(Variant(mask=mask).mask))


def table_of(mask, *sizes) -> tuple[Variant, torch.Tensor]:
    variant = Variant(mask=mask)
    return variant, summarise(variant.mask, variant.captures, *(sizes or SIZES))


def test_each_block_has_the_smallest_and_largest_value_inside_its_sequence():
    variant, table = table_of(lambda b, h, q, k: DOC[q] == DOC[k] * 2)
    assert table.dtype == torch.int32
    assert table.shape == table_shape(variant.mask, *SIZES) == (1, 1, 3, 4)
    of_q, of_k = table[0, 0, :, :2].T, table[0, 0, :, 2:].T
    assert of_q[:, :2].tolist() == [[0, -7], [3, 9]]  # queries 0-3 and 4-6
    assert of_k.tolist() == [[0, 2, 2], [0, 6, 2]]  # keys 0-1, 2-3, 4
    assert of_q[0, 2] > of_q[1, 2], "a block without queries holds no value"


def test_entries_are_for_each_batch_entry_and_head_only_where_they_differ():
    _, table = table_of(lambda b, h, q, k: TABLE[b, q] < k)
    assert table.shape[:2] == (2, 1)
    _, table = table_of(lambda b, h, q, k: TABLE[h & 1, q] < k)
    assert table.shape[:2] == (1, 3)
    assert table[0, :, 1, 0].tolist() == [4, 10, 4]
    variant, table = table_of(lambda b, h, q, k: TABLE[b, q] < k)
    assert reader(variant.mask, table, 1, 2)(0, 0) == (6, 9)


def test_conditions_are_0_and_1():
    _, table = table_of(lambda b, h, q, k: (FLOATS[k % 3] > 0) & (k <= q))
    assert table[0, 0].T.tolist() == [[0, 1, 0], [1, 1, 0]]  # keys 0-1, 2-3, 4


def test_loads_are_clamped_and_int64_elements_saturate():
    big = torch.tensor([2**40, -(2**40), 5])
    _, table = table_of(lambda b, h, q, k: big[q - 2] > k)
    assert table[0, 0, 0].tolist() == [-(2**31 - 1), 2**31 - 1]
    assert table[0, 0, 1].tolist() == [5, 5]


def test_arithmetic_wraps_at_32_bits_as_in_the_kernel():
    big = torch.tensor([2**31 - 1, 7], dtype=torch.int32)
    _, table = table_of(lambda b, h, q, k: big[k] + 1 < q)
    assert table[0, 0, 0].tolist() == [-(2**31), 8]


def test_no_summaries_no_table():
    mask = Variant(mask=masks.causal).mask
    assert table_shape(mask, *SIZES) is None and summarise(mask, (), *SIZES) is None


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_side_has_blocks_without_values(seqlens):
    variant, table = table_of(lambda b, h, q, k: DOC[q] == DOC[k], 1, 1, *seqlens, 4, 2)
    assert table.shape == table_shape(variant.mask, 1, 1, *seqlens, 4, 2)
    for i, length in enumerate(seqlens):
        assert length or (table[..., 2 * i] > table[..., 2 * i + 1]).all()
