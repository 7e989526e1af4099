"""mma.sync: which thread holds which element, and what ldmatrix brings it, by the hardware's rules.

A product is right where each lane's registers hold what the instruction takes them for. Fragments
are compared with the PTX ISA, then ldmatrix is carried out on coordinates: what it leaves in a
lane's registers must be what the fragment there is taken for.
"""

from __future__ import annotations

from itertools import product

import cutlass
import cutlass.cute as cute
import pytest
from on_sm90 import on_sm90

from cutedsl_fa3.layouts import Tile, bank_conflicts, mma_sync, transposed

BF16 = cutlass.BFloat16

# rows, columns, warps: score tiles of the ladder's kernels, several rows or columns a thread
TILES = [(64, 64, 4), (128, 64, 4), (128, 96, 4), (128, 48, 8)]


def documented(thread: int, r: int, c: int, warps: int) -> tuple[int, int]:
    """(row, col) of a thread's element (r, c). Source: PTX ISA, fragments of mma.m16n8k16, C."""
    warp, lane = divmod(thread, 32)
    block, half = divmod(r, 2)
    group, pair = divmod(c, 2)
    return 16 * (warps * block + warp) + lane // 4 + 8 * half, 8 * group + 2 * (lane % 4) + pair


def of_a(lane: int, v: int) -> tuple[int, int]:
    """(row, k) of a lane's element v of A. Source: as above, A."""
    return lane // 4 + 8 * (v // 2 % 2), 2 * (lane % 4) + v % 2 + 8 * (v // 4)


def of_b(lane: int, v: int) -> tuple[int, int]:
    """(n, k) of a lane's element v of B. Source: as above, B."""
    return lane // 4, 2 * (lane % 4) + v % 2 + 8 * (v // 2)


@pytest.mark.parametrize("rows, cols, warps", TILES)
def test_places_are_those_of_the_hardware(rows, cols, warps):
    held = product(range(rows // (16 * warps) * 2), range(cols // 4))
    elements = list(held)

    def compute():
        mma = mma_sync.tiled_mma(BF16, warps)
        found = {}
        for thread in range(32 * warps):
            at = mma_sync.places(mma, rows, cols, thread)
            for r, c in elements:
                where = at.row + at.row_offsets[r], at.col + at.col_offsets[c]
                found[thread, r, c] = where
        return found

    found = on_sm90(compute)
    assert found == {key: documented(*key, warps) for key in found}
    assert sorted(found.values()) == list(product(range(rows), range(cols)))


@pytest.mark.parametrize("rows, cols, warps", TILES)
def test_as_rows_cols_names_registers_by_their_place_in_the_tile(rows, cols, warps):
    def compute():
        mma = mma_sync.tiled_mma(BF16, warps)
        share = cute.make_identity_tensor((rows, cols))
        registers = mma_sync.as_rows_cols(mma_sync.accumulator(mma, rows, cols))
        held = [range(cute.size(registers, mode=[i])) for i in range(2)]
        found = {}
        for thread in (0, 37, 32 * warps - 1):
            mine = mma.get_slice(thread).partition_C(share)
            for r, c in product(*held):
                found[thread, r, c] = tuple(mine[registers.layout((r, c))])
        return found

    found = on_sm90(compute)
    assert found == {key: documented(*key, warps) for key in found}
    assert len(found) == 3 * rows * cols // (32 * warps)


@pytest.mark.parametrize("rows, cols, warps", TILES)
def test_the_scores_of_a_thread_are_what_the_second_product_reads_from_it(rows, cols, warps):
    """P @ V from registers: element (row, k) of k step j is column 16 j + k of the scores."""

    def compute():
        mma = mma_sync.tiled_mma(BF16, warps)
        share = cute.make_identity_tensor((rows, cols))
        registers = mma_sync.as_operand(mma_sync.accumulator(mma, rows, cols))
        blocks, steps = (cute.size(registers, mode=[i]) for i in (1, 2))
        pairs = []
        for thread in (0, 37, 32 * warps - 1):
            scores = mma.get_slice(thread).partition_C(share)
            for v, m, j in product(range(8), range(blocks), range(steps)):
                row, k = of_a(thread % 32, v)
                wanted = 16 * (warps * m + thread // 32) + row, 16 * j + k
                pairs.append((tuple(scores[registers.layout((v, m, j))]), wanted))
        return pairs

    pairs = on_sm90(compute)
    assert len(pairs) == 3 * rows * cols // (32 * warps)
    assert all(given == wanted for given, wanted in pairs)


def loaded(sources: list, trans: bool) -> list[list]:
    """What ldmatrix of four 8 x 8 matrices leaves in each lane's eight half registers.

    `sources`: the eight elements behind each lane's address; lanes 8 i to 8 i + 7 point at the rows
    of matrix i. Source: PTX ISA, ldmatrix.
    """
    left = []
    for lane in range(32):
        mine = []
        for matrix, e in product(range(4), range(2)):
            row, col = lane // 4, 2 * (lane % 4) + e
            if trans:
                row, col = col, row
            mine.append(sources[8 * matrix + row][col])
        left.append(mine)
    return left


@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_ldmatrix_brings_each_lane_what_its_fragment_is_taken_for(operand, warp=3):
    """Q as A, K as B and V as B from its transposed view; a wrong order of matrices shows here."""
    rows, cols = (64, 64) if operand == "q" else (32, 32)

    def compute():
        mma = mma_sync.tiled_mma(BF16, 4)
        base = cute.make_ptr(cutlass.Uint8, 0, cute.AddressSpace.smem, assumed_align=1024)
        smem = Tile(rows, cols, BF16).tensor(base, 1)
        share = cute.make_identity_tensor((rows, cols))
        if operand == "v":
            share = transposed(share)
        sources, filled, wanted = {}, None, {}
        for lane in range(32):
            thread = 32 * warp + lane
            if operand == "q":
                made = mma_sync.operand_a(mma, smem, thread)
                mine = mma.get_slice(thread).partition_A(share)
            else:
                made = mma_sync.operand_b(mma, smem, thread, k_first=operand == "v")
                mine = mma.get_slice(thread).partition_B(share)
            source = made.copy.get_slice(thread).partition_S(share)
            blocks, steps = (range(cute.size(source, mode=[i])) for i in (1, 2))
            for n, k in product(blocks, steps):
                sources[lane, n, k] = [tuple(source[e, n, k]) for e in range(8)]
            registers = {
                made.fragment.layout((v, n, k)): tuple(mine[v, n, k])
                for v, n, k in product(*(range(cute.size(mine, mode=[i])) for i in range(3)))
            }
            wanted[lane] = registers
            filled = {
                (v, n, k): made.filled.layout((v, n, k))
                for v, n, k in product(range(8), blocks, steps)
            }
        return sources, filled, wanted, (len(blocks), len(steps))

    sources, filled, wanted, (blocks, steps) = on_sm90(compute)
    assert len(filled) == len(wanted[0])
    for n, k in product(range(blocks), range(steps)):
        left = loaded([sources[lane, n, k] for lane in range(32)], operand == "v")
        for lane, v in product(range(32), range(8)):
            assert left[lane][v] == wanted[lane][filled[v, n, k]], (lane, v, n, k)


def test_stmatrix_writes_each_element_of_an_accumulator_to_its_place(warp=3):
    """The reverse of ldmatrix: lane 8 i + r points at row r of matrix i, all lanes give it."""

    def compute():
        mma = mma_sync.tiled_mma(BF16, 4)
        copy = mma_sync.stmatrix(mma, BF16)
        share = cute.make_identity_tensor((64, 32))
        registers = mma_sync.accumulator(mma, 64, 32)
        given = copy.retile(registers)
        blocks = list(product(*(range(cute.size(given, mode=[i])) for i in (1, 2))))
        targets, held = {}, {}
        for lane in range(32):
            thread = 32 * warp + lane
            target = copy.get_slice(thread).partition_D(share)
            mine = mma.get_slice(thread).partition_C(share)
            for m, n in blocks:
                targets[lane, m, n] = [tuple(target[e, m, n]) for e in range(8)]
                held[lane, m, n] = [tuple(mine[given.layout((v, m, n))]) for v in range(8)]
        return blocks, targets, held

    blocks, targets, held = on_sm90(compute)
    assert len(blocks) * 8 == 64 * 32 // 128
    for (m, n), lane, matrix, e in product(blocks, range(32), range(4), range(2)):
        place = targets[8 * matrix + lane // 4, m, n][2 * (lane % 4) + e]
        assert held[lane, m, n][2 * matrix + e] == place


def test_fragments_are_those_of_the_instruction(warp=3):
    def compute():
        mma = mma_sync.tiled_mma(BF16, 4)
        found = {}
        for lane in range(32):
            mine = mma.get_slice(32 * warp + lane)
            a = mine.partition_A(cute.make_identity_tensor((128, 32)))
            b = mine.partition_B(cute.make_identity_tensor((32, 32)))
            for v, m, k in product(range(8), range(2), range(2)):
                found["a", lane, v, m, k] = tuple(a[v, m, k])
            for v, n, k in product(range(4), range(4), range(2)):
                found["b", lane, v, n, k] = tuple(b[v, n, k])
        return found

    for (operand, lane, v, block, k), given in on_sm90(compute).items():
        row, depth = (of_a if operand == "a" else of_b)(lane, v)
        row += 64 * block + 16 * warp if operand == "a" else 8 * block
        assert given == (row, depth + 16 * k)


def test_eight_rows_of_a_tile_lie_in_different_banks_for_ldmatrix():
    """The swizzle of a tile is what lets ldmatrix read eight rows at once."""
    for cols in (64, 128):
        tile = Tile(64, cols, BF16)
        span = tile.swizzle.span
        for chunk in range(span // 16):
            rows = [tile.swizzle(row * span + 16 * chunk) for row in range(8)]
            assert bank_conflicts(rows, 16) == 0
            assert bank_conflicts([row * span + 16 * chunk for row in range(8)], 16) > 0


def test_instructions_are_counted_from_the_shape():
    assert mma_sync.instructions(128, 64, 128, 4) == ("HMMA.16816.F32", 128)
    assert (mma_sync.loads_of_a(128, 128, 4), mma_sync.loads_of_b(64, 128)) == (16, 32)
