"""Accumulators: which thread holds which element, against the hardware's own rule."""

from __future__ import annotations

from itertools import product

import cutlass
import cutlass.cute as cute
import pytest
from on_sm90 import on_sm90

from cutedsl_fa3.layouts import LayoutError, Tile, host_cute, wgmma

BF16 = cutlass.BFloat16

# rows, columns, warpgroups: attention's score and output tiles, several rows or columns a thread
TILES = [(64, 64, 1), (128, 128, 2), (128, 176, 2), (192, 128, 3), (192, 16, 3), (128, 64, 1)]


def documented(thread: int, r: int, c: int, warpgroups: int) -> tuple[int, int]:
    """(row, col) of a thread's element (r, c). Source: PTX ISA, wgmma register fragments."""
    warp, lane = divmod(thread, 32)
    block, half = divmod(r, 2)
    group, pair = divmod(c, 2)
    row = 64 * warpgroups * block + 16 * warp + lane // 4 + 8 * half
    return row, 8 * group + 2 * (lane % 4) + pair


def elements(rows: int, cols: int, warpgroups: int) -> list[tuple[int, int]]:
    """(r, c) of everything one thread holds."""
    return list(product(range(rows // (64 * warpgroups) * 2), range(cols // 4)))


@pytest.mark.parametrize(
    "rows, cols, warpgroups", [(64, 64, 1), (128, 128, 2), (192, 16, 3), (128, 64, 1)]
)
def test_places_are_those_of_the_hardware(rows, cols, warpgroups):
    def compute():
        mma = wgmma.tiled_mma(BF16, cols, warpgroups)
        found = {}
        for thread in range(128 * warpgroups):
            at = wgmma.places(mma, rows, cols, thread)
            for r, c in elements(rows, cols, warpgroups):
                where = at.row + at.row_offsets[r], at.col + at.col_offsets[c]
                found[thread, r, c] = where
        return found

    found = on_sm90(compute)
    assert found == {key: documented(*key, warpgroups) for key in found}
    assert sorted(found.values()) == list(product(range(rows), range(cols)))


@pytest.mark.parametrize("rows, cols, warpgroups", TILES)
def test_as_rows_cols_names_registers_by_their_place_in_the_tile(rows, cols, warpgroups):
    def compute():
        mma = wgmma.tiled_mma(BF16, cols, warpgroups)
        share = cute.make_identity_tensor((rows, cols))
        acc = wgmma.accumulator(mma, rows, cols)
        registers = wgmma.as_rows_cols(acc)
        found = {}
        for thread in (0, 37, 128 * warpgroups - 1):
            mine = mma.get_slice(thread).partition_C(share)
            for r, c in elements(rows, cols, warpgroups):
                found[thread, r, c] = tuple(mine[registers.layout((r, c))])
        sizes = cute.size(registers, mode=[0]), cute.size(registers, mode=[1]), cute.size(acc)
        return found, sizes

    found, (held_rows, held_cols, registers) = on_sm90(compute)
    assert (held_rows, held_cols) == (rows // (64 * warpgroups) * 2, cols // 4)
    assert registers == held_rows * held_cols == rows * cols // (128 * warpgroups)
    assert found == {key: documented(*key, warpgroups) for key in found}


@pytest.mark.parametrize("head_dim_v", [64, 128])
@pytest.mark.parametrize("rows, cols, warpgroups", TILES)
def test_the_scores_of_a_thread_are_what_the_second_product_reads_from_it(
    rows, cols, warpgroups, head_dim_v
):
    """P @ V from registers: element (row, k) of k step j is column 16 j + k of the scores."""

    def compute():
        qk = wgmma.tiled_mma(BF16, cols, warpgroups)
        pv = wgmma.tiled_mma(BF16, head_dim_v, warpgroups, a_from="registers", b_major="n")
        share = cute.make_identity_tensor((rows, cols))
        registers = wgmma.as_operand(wgmma.accumulator(qk, rows, cols))
        pairs = []
        for thread in (0, 37, 128 * warpgroups - 1):
            scores = qk.get_slice(thread).partition_C(share)
            wanted = pv.get_slice(thread).partition_A(share)
            assert cute.size(wanted) == cute.size(registers)
            blocks, steps = cute.size(wanted, mode=[1]), cute.size(wanted, mode=[2])
            for v, m, j in product(range(8), range(blocks), range(steps)):
                given = scores[registers.layout((v, m, j))]
                pairs.append((j, tuple(given), tuple(wanted[v, m, j])))
        return steps, pairs

    steps, pairs = on_sm90(compute)
    assert steps == cols // 16
    assert all(given == wanted for _, given, wanted in pairs)
    assert all(wanted[1] // 16 == j for j, _, wanted in pairs)


def test_the_register_operand_has_the_layout_of_the_instructions_own_fragment():
    def compute():
        qk = wgmma.tiled_mma(BF16, 128, 2)
        pv = wgmma.tiled_mma(BF16, 64, 2, a_from="registers", b_major="n")
        base = cute.make_ptr(cutlass.Uint8, 0, cute.AddressSpace.smem, assumed_align=1024)
        tile = Tile(128, 128, BF16).tensor(base)
        fragment = pv.make_fragment_A(pv.get_slice(0).partition_A(tile))
        operand = wgmma.as_operand(wgmma.accumulator(qk, 128, 128))
        places = list(product(range(8), range(1), range(8)))
        return [[x.layout(at) for at in places] for x in (fragment, operand)]

    fragment, operand = on_sm90(compute)
    assert fragment == operand


@pytest.mark.parametrize("n", [0, 4, 12, 264])
def test_widths_that_wgmma_does_not_have_are_refused(n):
    with host_cute(), pytest.raises(LayoutError, match=f"n = {n}: a multiple of 8 from 8 to 256"):
        wgmma.tiled_mma(BF16, n, 1)


def test_instructions_are_counted_from_the_shape():
    assert wgmma.instructions(128, 128, 64, 2) == ("HGMMA.64x128x16", 4)
    assert wgmma.instructions(256, 64, 128, 2) == ("HGMMA.64x64x16", 16)
