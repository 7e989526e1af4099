"""A kernel's tables become storage, shares and errors, before anything is compiled."""

from __future__ import annotations

from itertools import pairwise

import cutlass
import pytest
from cutlass.memory import SmemAllocator
from handover import Handover
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.layouts import LayoutError, Tile
from cutedsl_fa3.pipelines import Barrier, Barriers, Ring, Role, ScheduleError


def extent(kernel: Handover, name: str) -> range:
    """The bytes of one tile, all stages."""
    stages = next((r.stages for r in kernel.rings.values() if name in r.tiles), 1)
    start = kernel.smem.offset(name)
    return range(start, start + stages * kernel.tiles[name].bytes)


@given(st.integers(1, 4))
def test_tiles_that_live_at_one_time_share_no_byte(stages):
    kernel = Handover(stages)
    owners = [name for name in kernel.tiles if name not in kernel.aliases]
    places = sorted((extent(kernel, name) for name in owners), key=lambda place: place.start)
    for earlier, later in pairwise(places):
        assert earlier.stop <= later.start
    mbarriers = kernel.smem.offset("mbarriers")
    assert mbarriers >= places[-1].stop and mbarriers % 8 == 0
    assert kernel.smem.total == mbarriers + 2 * 8 * (stages + 1)


def test_every_tile_begins_where_its_swizzle_begins():
    kernel = Handover()
    assert all(kernel.smem.offset(name) % 1024 == 0 for name in kernel.tiles)


def test_an_alias_lies_on_its_owner():
    kernel = Handover()
    assert kernel.smem.offset("out") == kernel.smem.offset("a")


class Address(int):
    """A shared-memory address that remembers being one."""

    def __add__(self, other: int) -> Address:
        return Address(int(self) + other)


@given(st.integers(1, 4))
def test_storage_is_opened_at_the_planned_offsets_with_the_stages_of_the_rings(stages):
    kernel, asked = Handover(stages), []

    def allocate(self, size: int, byte_alignment: int) -> Address:
        asked.append((size, byte_alignment))
        return Address(4096)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SmemAllocator, "__init__", lambda self: None)
        patch.setattr(SmemAllocator, "allocate", allocate)
        patch.setattr(Tile, "tensor", lambda self, base, stages=None: (self, int(base), stages))
        smem, mbarriers = kernel.open_storage()
    assert asked == [(kernel.smem.total, 1024)]
    assert mbarriers == 4096 + kernel.smem.offset("mbarriers")
    ring_stages = {"a": stages, "b": stages, "scale": 1, "out": None}
    assert vars(smem) == {
        name: (tile, 4096 + kernel.smem.offset(name), ring_stages[name])
        for name, tile in kernel.tiles.items()
    }


def test_a_role_gets_its_own_end_of_its_own_rings():
    kernel = Handover()
    kernel.rings["back"] = Ring(("out",), 1, producer="consumer", consumer="producer")
    ends = {name: (f"{name} in", f"{name} out") for name in kernel.rings}
    assert vars(kernel.ports("producer", ends)) == {
        "ab": "ab in",
        "scale": "scale in",
        "back": "back out",
    }
    assert vars(kernel.ports("consumer", ends)) == {
        "ab": "ab out",
        "scale": "scale out",
        "back": "back in",
    }


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_shares_of_a_multicast_tile_are_the_tile(cluster):
    kernel = Handover(cluster=cluster)
    assert kernel.parts("a") == 1 and kernel.share("a") == kernel.tiles["a"]
    assert kernel.parts("b") == cluster[0]
    assert kernel.parts("b") * kernel.share("b").bytes == kernel.tiles["b"].bytes


def test_valid_tables_pass():
    Handover().check()


def test_a_ring_of_no_tile_is_refused():
    kernel = Handover()
    kernel.rings["ab"] = Ring(("a", "c"), 2)
    with pytest.raises(ScheduleError, match="ring 'ab' carries 'c', which is no tile"):
        kernel.check()


@pytest.mark.parametrize("end", ["producer", "consumer"])
def test_a_ring_to_no_role_is_refused(end):
    kernel = Handover()
    kernel.rings["ab"] = Ring(("a", "b"), 2, **{end: "softmax"})
    with pytest.raises(ScheduleError, match="ring 'ab' names 'softmax', which is no role"):
        kernel.check()


def test_a_role_without_a_method_is_refused():
    kernel = Handover()
    kernel.roles = {**kernel.roles, "correction": Role(4)}
    with pytest.raises(ScheduleError, match=r"role 'correction' has no method correction\(\)"):
        kernel.check()


def test_registers_beyond_the_launch_are_refused():
    kernel = Handover()
    kernel.roles = {"producer": Role(4, 32), "consumer": Role(8, 240)}
    with pytest.raises(ScheduleError, match=r"= 65536 exceeds .* = 64512"):
        kernel.check()


def test_too_many_stages_are_refused_with_bytes_limit_and_the_number_that_fits():
    kernel = Handover()
    kernel.tiles["a"] = Tile(256, 128, cutlass.BFloat16)
    needed = kernel.smem.total
    assert needed > 232448 - 65536
    kernel.rings["ab"] = Ring(("a", "b"), 4)
    with pytest.raises(LayoutError, match=r"bytes are needed and a block has 232448.*'a'.*fit"):
        kernel.check()


def test_unknown_aliases_are_refused():
    kernel = Handover()
    kernel.aliases = {"out": "q"}
    with pytest.raises(LayoutError, match="'out' shares the storage of 'q'"):
        kernel.check()


def test_a_tile_in_two_rings_is_refused():
    kernel = Handover()
    kernel.rings["again"] = Ring(("b",), 1)
    with pytest.raises(ScheduleError, match="rings 'ab' and 'again' both carry 'b'"):
        kernel.check()


def test_a_named_barrier_for_more_threads_than_the_cta_has_is_refused():
    kernel = Handover()
    kernel.barriers = Barriers({"all": Barrier(kernel.threads), "more": Barrier(1024)})
    with pytest.raises(ScheduleError, match=f"'more' threads = 1024: the CTA has {kernel.threads}"):
        kernel.check()
