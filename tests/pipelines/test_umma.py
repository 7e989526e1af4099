"""Rings and roles around the tensor core of SM100, as tables."""

from __future__ import annotations

import cutlass
import pytest

from cutedsl_fa3.layouts import Accumulator, LayoutError, Tile
from cutedsl_fa3.pipelines import (
    AccumulatorRing,
    Role,
    ScheduleError,
    UmmaRing,
    WarpSpecialized,
    check_registers,
)


class Product(WarpSpecialized):
    """Tables of a kernel with an accumulator in tensor memory, never compiled."""

    def __init__(self, roles=None, columns=128, stages=2) -> None:
        self.tiles = {"a": Tile(128, 64, cutlass.BFloat16)}
        self.accumulators = {"acc": Accumulator(128, columns)}
        self.rings = {
            "a": UmmaRing(("a",), 3, multicast={"a": "n"}),
            "acc": AccumulatorRing(("acc",), stages),
        }
        self.roles = roles or {"epilogue": Role(4), "mma": Role(1), "producer": Role(1)}

    def epilogue(self, io, smem, ports, thread):
        """Read the accumulator."""

    def mma(self, io, smem, ports, thread):
        """Multiply."""

    def producer(self, io, smem, ports, thread):
        """Load."""


def test_a_commit_arrives_once_for_each_partner_whatever_the_warps():
    ring, roles = UmmaRing(("a",), 2, multicast={"a": "n"}), {"mma": Role(1)}
    assert ring.arrivals(roles, (1, 1)) == 1
    assert ring.arrivals(roles, (2, 4)) == 4


def test_every_thread_that_reads_an_accumulator_gives_it_back():
    ring = AccumulatorRing(("acc",), 2)
    assert ring.arrivals({"epilogue": Role(4)}, (2, 1)) == 128


def test_shared_memory_holds_both_rings_mbarriers_and_the_address_of_tensor_memory():
    plan = Product().smem
    assert plan.offset("tmem address") - plan.offset("mbarriers") == 2 * 8 * (3 + 2)
    assert plan.total == plan.offset("tmem address") + 4


def test_an_accumulator_has_the_stages_of_its_ring():
    plan = Product(columns=96, stages=2).tmem
    assert (plan.used, plan.allocated) == (192, 256)


def test_too_many_accumulators_are_refused_naming_columns_and_limit():
    with pytest.raises(LayoutError, match="768 columns are needed and an SM has 512"):
        Product(columns=256, stages=3).check()


@pytest.mark.parametrize(
    ("roles", "where"),
    [
        ({"mma": Role(1), "producer": Role(1), "epilogue": Role(4)}, "warps 2 to 5"),
        ({"epilogue": Role(2), "mma": Role(1), "producer": Role(1)}, "warps 0 to 1"),
    ],
)
def test_only_a_whole_warpgroup_reads_tensor_memory(roles, where):
    with pytest.raises(ScheduleError, match=f"{where}: .*whole warpgroup"):
        Product(roles).check()


def test_a_ring_of_accumulators_carries_accumulators():
    kernel = Product()
    kernel.rings["acc"] = AccumulatorRing(("a",), 1)
    with pytest.raises(ScheduleError, match="carries 'a', which is no accumulator"):
        kernel.check()


def test_a_role_without_a_budget_may_have_any_number_of_warps_and_keeps_its_registers():
    assert Role(3).registers is None
    check_registers({"epilogue": Role(4), "mma": Role(1)})
    promised = {e.opcode: e.rule for e in Product().common_expectations({"a": 1}, {})}
    assert promised["USETMAXREG.DEALLOC"] == promised["USETMAXREG.TRY_ALLOC"] == "none"


def test_a_role_with_a_budget_begins_at_a_warpgroup():
    with pytest.raises(ScheduleError, match=r"'consumer' begins at warp 1: .*whole warpgroups"):
        check_registers({"producer": Role(1), "consumer": Role(4, 64)})


def test_a_role_without_a_budget_counts_with_what_the_launch_grants():
    roles = {"consumer": Role(8, 240), "other": Role(4)}
    with pytest.raises(ScheduleError, match=r"consumer 256 x 240 \+ other 128 x 168 = 82944"):
        check_registers(roles)
