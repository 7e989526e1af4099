"""Rings: bytes and arrivals against what copies move and who writes where, counted one by one."""

from __future__ import annotations

from itertools import product
from math import prod

import cutlass
import cutlass.cute as cute
import pytest
from cutlass.pipeline import PipelineTmaAsync
from hypothesis import given
from hypothesis import strategies as st
from signals import signalled

from cutedsl_fa3.layouts import Tile, host_cute
from cutedsl_fa3.pipelines import Ring, Role, ScheduleError

NAMES = ("a", "b", "c")
Cta = tuple[int, int]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Ring, dict[str, Tile], dict[str, Role], Cta]:
    """A ring, its tiles, the roles and a cluster whose CTAs can share every tile evenly."""
    names = NAMES[: draw(st.integers(1, 3))]
    dtype = draw(st.sampled_from([cutlass.BFloat16, cutlass.Float32, cutlass.Float8E4M3FN]))
    tiles = {
        name: Tile(32 * draw(st.integers(1, 10)), 32 * draw(st.integers(1, 4)), dtype)
        for name in names
    }
    axes = draw(st.fixed_dictionaries({name: st.sampled_from([None, "m", "n"]) for name in names}))
    multicast = {name: axis for name, axis in axes.items() if axis}
    cluster = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2), (2, 4)]))
    roles = {
        "producer": Role(4, 24),
        "consumer": Role(4 * draw(st.integers(1, 3)), 152),
    }
    return Ring(names, draw(st.integers(1, 4)), multicast=multicast), tiles, roles, cluster


def ctas(cluster: Cta) -> list[Cta]:
    return list(product(range(cluster[0]), range(cluster[1])))


def receivers(ring: Ring, name: str, sender: Cta, cluster: Cta) -> list[Cta]:
    """The CTAs into whose slots the producer of `sender` writes its part of one tile."""
    axis = ring.multicast.get(name)
    if axis is None:
        return [sender]
    fixed = 1 - "mn".index(axis)
    return [cta for cta in ctas(cluster) if cta[fixed] == sender[fixed]]


def writers(ring: Ring, reader: Cta, cluster: Cta) -> set[Cta]:
    """The CTAs whose producers write into the slots of `reader`."""
    return {
        sender
        for sender in ctas(cluster)
        for name in ring.tiles
        if reader in receivers(ring, name, sender, cluster)
    }


@given(tables())
def test_transaction_bytes_are_those_of_the_boxes_that_reach_a_slot(table):
    ring, tiles, _, cluster = table
    for reader in ctas(cluster):
        arrived = 0
        for sender, name in product(ctas(cluster), ring.tiles):
            reached = receivers(ring, name, sender, cluster)
            if reader in reached:
                whole = tiles[name]
                part = Tile(whole.rows // len(reached), whole.cols, whole.dtype)
                arrived += part.copies * prod(part.box) * whole.dtype.width // 8
        assert ring.transaction_bytes(tiles) == arrived


@given(tables())
def test_arrivals_are_one_a_consumer_warp_of_every_cta_that_reads_what_a_producer_writes(table):
    ring, _, roles, cluster = table
    for owner in ctas(cluster):
        readers = [cta for cta in ctas(cluster) if owner in writers(ring, cta, cluster)]
        assert ring.arrivals(roles, cluster) == roles["consumer"].warps * len(readers)
        assert ring.partners(cluster) == len(writers(ring, owner, cluster))


class _Created(Exception):
    """Carries what a pipeline was asked to be."""


def asked(ring: Ring, tiles, roles, cluster) -> dict[str, object]:
    """The arguments with which the ring opens its pipeline."""

    def create(**arguments: object) -> None:
        raise _Created(arguments)

    with host_cute(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineTmaAsync, "create", staticmethod(create))
        place = cute.make_ptr(cutlass.Int64, 0, cute.AddressSpace.smem, assumed_align=8)
        with pytest.raises(_Created) as caught:
            ring.open(place, tiles, roles, cluster)
        arguments = dict(caught.value.args[0])
        arguments["shape"] = arguments["cta_layout_vmnk"].shape
    return arguments


@given(tables())
def test_a_pipeline_signals_the_ctas_that_write_and_counts_their_signals(table):
    ring, tiles, roles, cluster = table
    arguments = asked(ring, tiles, roles, cluster)
    assert arguments["tx_count"] == ring.transaction_bytes(tiles)
    assert arguments["num_stages"] == ring.stages
    by_rank = sorted(ctas(cluster), key=lambda cta: cta[::-1])  # m runs first
    arrived = dict.fromkeys(by_rank, 0)
    for rank, reader in enumerate(by_rank):
        told = [
            by_rank[to] for to in signalled(arguments["shape"], arguments["mcast_mode_mn"], rank)
        ]
        assert sorted(told) == sorted(writers(ring, reader, cluster))
        for cta in told:
            arrived[cta] += roles["consumer"].warps
    assert set(arrived.values()) == {arguments["consumer_group"].size}


@given(st.integers(1, 64))
def test_a_ring_has_a_full_and_an_empty_mbarrier_of_eight_bytes_a_stage(stages):
    assert Ring(("a",), stages).barrier_bytes == len(("full", "empty")) * 8 * stages


@given(st.integers(-5, 0))
def test_a_ring_without_slots_is_refused(stages):
    with pytest.raises(ScheduleError, match=f"stages = {stages}; 1 or more"):
        Ring(("a",), stages)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tiles": ("x", "x")}, r"ring tiles = \('x', 'x'\): .*name it once"),
        ({"tiles": ()}, r"ring tiles = \(\): one tile or more"),
        ({"tiles": "x"}, r"ring tiles = 'x': a tuple of names is needed; use \('x',\)"),
        ({"tiles": ["x"]}, r"ring tiles = \['x'\]: a tuple of names"),
        ({"stages": 2.0}, r"stages = 2.0; a whole number"),
        ({"stages": True}, r"stages = True; a whole number"),
        ({"stages": "2"}, r"stages = '2'; a whole number"),
        ({"producer": "consumer"}, r"'consumer' is producer and consumer"),
        ({"multicast": "m"}, r"multicast = 'm'; a mapping"),
    ],
    ids=str,
)
def test_a_ring_that_cannot_work_is_refused_by_field_and_value(fields, message):
    with pytest.raises(ScheduleError, match=message):
        Ring(**{"tiles": ("x",), "stages": 2, **fields})
