"""Named barriers: their numbers, and turns taken under every order in which warpgroups may run."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3.pipelines import Barrier, Barriers, ScheduleError, Turns

WARPGROUP = 128

copies = st.lists(st.integers(1, 8), min_size=1, max_size=6)


def table(sizes: list[int]) -> dict[str, Barrier]:
    return {f"use{i}": Barrier(32 * (i + 1), size) for i, size in enumerate(sizes)}


@given(copies.filter(lambda sizes: sum(sizes) <= 15))
def test_no_two_uses_share_a_hardware_barrier_and_none_is_that_of_sync_threads(sizes):
    barriers = Barriers(table(sizes))
    found = [
        (barriers[name, copy].barrier_id, barriers[name, copy].num_threads)
        for name, barrier in barriers.table.items()
        for copy in range(barrier.copies)
    ]
    numbers = [number for number, _ in found]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(range(1, 16))
    assert [threads for _, threads in found] == [
        barrier.threads for barrier in barriers.table.values() for _ in range(barrier.copies)
    ]
    assert all(barriers[name].barrier_id == barriers.number(name) for name in barriers.table)


@given(copies.filter(lambda sizes: sum(sizes) > 15))
def test_more_than_fifteen_are_refused(sizes):
    with pytest.raises(ScheduleError, match=f"{sum(sizes)} asked, 15 exist besides barrier 0"):
        Barriers(table(sizes))


@given(st.integers(-32, 1024).filter(lambda threads: threads < 32 or threads % 32))
def test_a_barrier_for_part_of_a_warp_is_refused(threads):
    with pytest.raises(ScheduleError, match=f"'x' threads = {threads}: whole warps"):
        Barriers({"x": Barrier(threads)})


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1"], ids=repr)
def test_a_barrier_without_a_copy_is_refused(value):
    with pytest.raises(ScheduleError, match=f"'x' copies = {value!r}: a whole number from 1"):
        Barriers({"x": Barrier(32, value), "y": Barrier(32)})


@pytest.mark.parametrize("copy", [-1, 2])
def test_a_copy_that_does_not_exist_is_refused(copy):
    barriers = Barriers({"x": Barrier(32), "turn": Barrier(32, 2), "y": Barrier(32)})
    with pytest.raises(ScheduleError, match=f"'turn' copy = {copy}: 0 to 1 exist"):
        barriers["turn", copy]


def test_printed_barriers_show_numbers_and_threads():
    barriers = Barriers({"written": Barrier(256), "turn": Barrier(256, 3)})
    assert str(barriers) == "1 written (256 threads), 2-4 turn (256 threads)"


# Turns. What one warpgroup waits on and arrives at is recorded from the class itself, run on the
# CPU; the hardware's barriers, which there are none of here, are a few lines below.


class Recorded:
    """In place of named barriers: writes which copy is used into the present column of a log."""

    def __init__(self, log: cute.Tensor, group: cutlass.Int32, count: int) -> None:
        self.log, self.group, self.column = log, group, 0
        self.table = {"turn": Barrier(2 * WARPGROUP, count)}

    def __getitem__(self, key: tuple[str, object]) -> Recorded:
        self.copy = cutlass.Int32(key[1])
        return self

    def arrive_unaligned(self) -> None:
        self.log[self.group, self.column] = self.copy

    wait_unaligned = arrive_unaligned


@cute.jit
def _take_a_turn(log: cute.Tensor, group: cutlass.Int32, count: cutlass.Constexpr):
    barriers = Recorded(log, group, count)
    turns = Turns(barriers, "turn", group)
    barriers.column = 1
    turns.wait()
    barriers.column = 2
    turns.pass_on()


def copies_used(count: int) -> list[tuple[int, int, int]]:
    """(arrived at when created, or -1; waited on; passed on to) of each of `count` warpgroups."""
    log = torch.full((count, 3), -1, dtype=torch.int32)
    for group in range(count):
        _take_a_turn(from_dlpack(log), cutlass.Int32(group), count)
    return [tuple(row) for row in log.tolist()]


USED = {count: copies_used(count) for count in (2, 3)}


class HardwareBarrier:
    """bar.sync and bar.arrive in units of warpgroups: it opens when the expected number came."""

    def __init__(self, expected: int) -> None:
        self.expected, self.arrived, self.waiting = expected, 0, []

    def come(self, waiter: int | None = None) -> list[int]:
        """One more warpgroup is here, to wait if it is named; those that it wakes."""
        self.waiting += [] if waiter is None else [waiter]
        self.arrived += 1
        if self.arrived < self.expected:
            return []
        woken, self.waiting, self.arrived = self.waiting, [], 0
        assert woken, "a barrier opened with nobody waiting: a turn is lost"
        return woken


def run(turns: list[int], random: Random) -> tuple[list[int], bool]:
    """(who had each turn, whether all ended) when warpgroup w takes turns[w] turns."""
    count = len(turns)
    barriers = [HardwareBarrier(2) for _ in range(count)]
    order: list[int] = []

    def program(group: int):
        created, waited, passed = USED[count][group]
        if created >= 0:
            yield from (("ready", g) for g in barriers[created].come())
        for _ in range(turns[group]):
            woken = barriers[waited].come(waiter=group)
            if group not in woken:
                yield ("asleep", group)
            order.append(group)
            yield ("busy", group)
            yield from (("ready", g) for g in barriers[passed].come())

    programs = {group: program(group) for group in range(count)}
    ready, ended = set(programs), set()
    while ready:
        group = random.choice(sorted(ready))
        step = next(programs[group], None)
        if step is None:
            ended.add(group)
            ready.discard(group)
        elif step[0] == "asleep":
            ready.discard(group)
        elif step[0] == "ready":
            ready.add(step[1])
    return order, len(ended) == count


@given(st.sampled_from([2, 3]), st.integers(0, 8), st.randoms(use_true_random=False))
def test_equal_turns_are_taken_in_cyclic_order_and_all_end(count, turns, random):
    order, ended = run([turns] * count, random)
    assert ended
    assert order == list(range(count)) * turns


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=3),
    st.randoms(use_true_random=False),
)
def test_a_turn_whose_predecessor_never_comes_waits_for_ever(turns, random):
    follows = all(later <= earlier for earlier, later in pairwise(turns))
    first_has_a_predecessor = turns[0] <= turns[-1] + 1
    order, ended = run(turns, random)
    assert ended == (follows and first_has_a_predecessor)
    assert order == [i % len(turns) for i in range(len(order))]
