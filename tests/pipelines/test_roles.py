"""Register budgets: what a launch grants, and that not one step more is asked."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cutedsl_fa3.pipelines import (
    CP_ASYNC_BUDGETS,
    TMA_BUDGETS,
    Role,
    ScheduleError,
    check_registers,
    launch_registers,
)
from cutedsl_fa3.pipelines.roles import first_warps

PUBLISHED = [
    *((n, *budget) for n, budget in TMA_BUDGETS.items()),
    *((n, *budget) for n, budget in CP_ASYNC_BUDGETS.items()),
]
budgets = st.integers(3, 32).map(lambda steps: 8 * steps)


def roles(consumers: int, producer: int, consumer: int) -> dict[str, Role]:
    return {"producer": Role(4, producer), "consumer": Role(4 * consumers, consumer)}


def test_the_published_budgets_are_the_tables():
    assert PUBLISHED == [(1, 56, 256), (2, 24, 240), (3, 32, 160), (2, 40, 232)]


@pytest.mark.parametrize("consumers, producer, consumer", PUBLISHED)
def test_published_budgets_pass(consumers, producer, consumer):
    check_registers(roles(consumers, producer, consumer))


def test_two_consumers_are_checked_against_the_launch_and_not_the_register_file():
    assert launch_registers(384) * 384 == 168 * 384 == 64512
    with pytest.raises(ScheduleError) as caught:
        check_registers(roles(2, 32, 240))  # 65,536 in all, the whole file, and yet it would hang
    assert "producer 128 x 32 + consumer 256 x 240 = 65536" in str(caught.value)
    assert "384 threads x 168 registers = 64512" in str(caught.value)


@pytest.mark.parametrize("consumers, producer, consumer", [b for b in PUBLISHED if b[0] > 1])
@pytest.mark.parametrize("step", [(8, 0), (0, 8)], ids=["producer", "consumer"])
def test_one_step_above_a_published_budget_is_refused_with_both_sums(
    consumers, producer, consumer, step
):
    raised = producer + step[0], consumer + step[1]
    asked = 128 * raised[0] + 128 * consumers * raised[1]
    threads = 128 * (consumers + 1)
    granted = 65536 // threads // 8 * 8 * threads
    with pytest.raises(ScheduleError, match=rf"= {asked} exceeds .* = {granted};"):
        check_registers(roles(consumers, *raised))


def test_one_consumer_has_the_most_that_setmaxnreg_takes():
    with pytest.raises(ScheduleError, match=r"registers = 264: .* multiples of 8 from 24 to 256"):
        Role(4, 264)


@given(st.integers(1, 3), budgets, budgets)
def test_exactly_what_the_launch_grants_may_be_asked(consumers, producer, consumer):
    threads = 128 * (1 + consumers)
    fits = 128 * producer + 128 * consumers * consumer <= launch_registers(threads) * threads
    if fits:
        check_registers(roles(consumers, producer, consumer))
    else:
        with pytest.raises(ScheduleError, match="would wait for ever"):
            check_registers(roles(consumers, producer, consumer))


@given(st.integers(1, 32))
def test_a_launch_grants_the_most_whole_steps_of_8_that_the_file_holds(warps):
    granted = launch_registers(32 * warps)
    assert granted % 8 == 0 and granted * 32 * warps <= 65536
    assert granted == 256 or (granted + 8) * 32 * warps > 65536


def test_a_kernel_compiled_to_fewer_registers_grants_fewer():
    check_registers(roles(2, 24, 240), launched=168)
    with pytest.raises(ScheduleError, match="384 threads x 160 registers = 61440"):
        check_registers(roles(2, 24, 240), launched=160)


@given(st.integers(1, 32).filter(lambda warps: warps % 4))
def test_a_budget_is_for_whole_warpgroups(warps):
    with pytest.raises(ScheduleError, match=f"warps = {warps}: .* multiple of 4"):
        Role(warps, 240)


@given(st.integers(-64, 400).filter(lambda r: r % 8 or not 24 <= r <= 256))
def test_registers_that_setmaxnreg_does_not_take_are_refused(registers):
    with pytest.raises(ScheduleError, match=f"registers = {registers}: .* from 24 to 256"):
        Role(4, registers)


@given(st.integers(-3, 0))
def test_a_role_without_warps_is_refused(warps):
    with pytest.raises(ScheduleError, match=f"warps = {warps}: 1 or more"):
        Role(warps)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_roles_divide_the_warps_of_a_cta_in_table_order_without_gap_or_overlap(sizes):
    table = {f"role{i}": Role(warps) for i, warps in enumerate(sizes)}
    owner = [
        name
        for warp in range(sum(sizes))
        for name, first in first_warps(table).items()
        if first <= warp < first + table[name].warps
    ]
    assert owner == [f"role{i}" for i, warps in enumerate(sizes) for _ in range(warps)]


@given(st.integers(1, 7), st.integers(1, 3))
def test_a_budget_that_begins_inside_a_warpgroup_is_refused(before, groups):
    assume(before % 4)
    table = {"first": Role(before), "second": Role(4 * groups, 64)}
    with pytest.raises(ScheduleError, match=f"'second' begins at warp {before}"):
        check_registers(table)
    check_registers(dict(reversed(table.items())))


def test_more_threads_than_a_cta_has_are_refused():
    with pytest.raises(ScheduleError, match="1152 threads; a CTA has at most 1024"):
        check_registers({"all": Role(36)})


@pytest.mark.parametrize("value", [1.5, 4.0, True, "4", 128.0], ids=repr)
@pytest.mark.parametrize("field", ["warps", "registers"])
def test_what_is_no_whole_number_is_refused_by_field_and_value(field, value):
    with pytest.raises(ScheduleError, match=f"role {field} = {value!r}: a whole number"):
        Role(**{"warps": 4, field: value})
