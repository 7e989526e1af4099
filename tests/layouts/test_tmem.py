"""Tensor memory: columns by name, and where a thread's share of an accumulator lies."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
from cutlass.cute.nvgpu import tcgen05 as nvgpu
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.layouts import Accumulator, Columns, LayoutError, TmemPlan, host_cute, tcgen05

parts = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 3)), min_size=1, max_size=5).map(
    lambda sizes: tuple(Columns(f"p{i}", c, s) for i, (c, s) in enumerate(sizes))
)


@given(parts)
def test_no_two_accumulators_share_a_column(columns):
    plan = TmemPlan(columns)
    taken = [
        column
        for part in columns
        for column in range(plan.offset(part.name), plan.offset(part.name) + part.size)
    ]
    assert len(set(taken)) == len(taken) == plan.used


@given(parts)
def test_the_allocation_is_the_smallest_power_of_two_from_32_that_holds_the_plan(columns):
    plan = TmemPlan(columns)
    assert plan.allocated & (plan.allocated - 1) == 0
    assert plan.allocated >= max(32, plan.used)
    assert plan.allocated == 32 or plan.allocated < 2 * plan.used


@given(parts)
def test_a_plan_is_refused_exactly_when_it_exceeds_512_columns(columns):
    plan = TmemPlan(columns)
    if plan.used <= 512:
        plan.check()
    else:
        with pytest.raises(LayoutError, match=f"{plan.used} columns are needed and an SM has 512"):
            plan.check()


def test_a_refused_plan_says_how_many_stages_would_fit():
    plan = TmemPlan((Columns("acc_s", 128, 3), Columns("acc_o", 256)))
    with pytest.raises(LayoutError, match=r"acc_s 384 \(3 x 128\).* 2 stages of 'acc_s' would fit"):
        plan.check()


def test_a_plan_prints_a_map():
    plan = TmemPlan((Columns("acc_s", 128, 2), Columns("acc_o", 64)))
    assert str(plan).splitlines() == [
        "  column  columns  stages  accumulator",
        "       0      256       2  acc_s        |################                |",
        "     256       64       1  acc_o        |                ####            |",
        "    used      320  of 512 columns: fits; 512 are allocated",
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((Columns("acc", 32), Columns("acc", 32)), "two accumulators are called 'acc'"),
        ((Columns("acc", 0),), "'acc': 1 stages of 0 columns"),
    ],
)
def test_nameless_and_empty_plans_are_refused(columns, message):
    with pytest.raises(LayoutError, match=message):
        TmemPlan(columns)


def test_an_unknown_accumulator_is_refused_with_those_there_are():
    with pytest.raises(LayoutError, match=r"'acc_o'; there are \['acc_s'\]"):
        TmemPlan((Columns("acc_s", 32),)).offset("acc_o")


@pytest.mark.parametrize(("rows", "nearest"), [(64, 128), (200, 256), (0, 128)])
def test_an_accumulator_has_whole_sets_of_lanes(rows, nearest):
    with pytest.raises(LayoutError, match=f"rows = {rows}: .* use {nearest}"):
        Accumulator(rows, 128)


@pytest.mark.parametrize(("n", "nearest"), [(8, 16), (20, 16), (272, 256)])
def test_widths_that_umma_does_not_have_are_refused(n, nearest):
    with host_cute(), pytest.raises(LayoutError, match=f"n = {n}: .* use {nearest}"):
        tcgen05.tiled_mma(cutlass.BFloat16, n)


@pytest.mark.parametrize(("rows", "cols"), [(128, 16), (128, 48), (128, 256), (256, 96)])
def test_an_accumulator_takes_the_columns_that_its_umma_writes(rows, cols):
    with host_cute():
        mma = tcgen05.tiled_mma(cutlass.BFloat16, cols)
        layout = mma.make_fragment_C(mma.partition_shape_C((rows, cols))).layout
        lane = 1 << 16  # an address holds the lane above the column
        assert cute.cosize(layout) - 1 == 127 * lane + Accumulator(rows, cols).columns - 1


@pytest.mark.parametrize(("rows", "cols"), [(128, 48), (256, 64)])
def test_a_thread_gets_the_row_of_its_lane_chunk_by_chunk(rows, cols):
    width = tcgen05.chunk_columns(cols)
    with host_cute():
        mma = tcgen05.tiled_mma(cutlass.BFloat16, cols)
        acc = mma.make_fragment_C(mma.partition_shape_C((rows, cols)))
        atom = cute.make_copy_atom(nvgpu.Ld32x32bOp(nvgpu.Repetition(width)), cutlass.Float32)
        block = rows // 128 - 1
        shape = (128, width)
        columns = cute.flat_divide(acc[(None, None), block, 0], shape)[None, None, 0, None]
        places = cute.flat_divide(cute.make_identity_tensor((rows, cols)), shape)
        load = nvgpu.make_tmem_copy(atom, columns[None, None, 0])
        for thread in range(128):
            mine = load.get_slice(thread).partition_D(places[None, None, block, None])
            for part in range(cols // width):
                chunk = mine[None, None, None, part]
                assert [chunk[i] for i in range(width)] == [
                    (128 * block + thread, width * part + i) for i in range(width)
                ]
