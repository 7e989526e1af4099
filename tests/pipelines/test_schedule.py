"""Schedules: every field that cannot work is refused by name and value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.pipelines import PACKS, Schedule, ScheduleError

WHOLE = ("tile_m", "tile_n", "stages", "consumers", "head_group", "early", "pack")


def test_the_default_is_valid():
    assert Schedule() == Schedule(128, 128, 2, 2, "both", (1, 1), 8, False, "tma", 0, False, 1, 1)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"stages": 0}, r"stages = 0: 1 or more"),
        ({"residents": 0}, r"residents = 0: 1 to 4"),
        ({"residents": 5}, r"residents = 5: 1 to 4"),
        ({"stages": -2}, r"stages = -2: 1 or more"),
        ({"consumers": 0}, r"consumers = 0: 1, 2 or 3 warpgroups"),
        ({"consumers": 4, "tile_m": 256}, r"consumers = 4: 1, 2 or 3 warpgroups"),
        ({"overlap": "ping-pong"}, r"overlap = 'ping-pong': one of none, pingpong, intra, both"),
        ({"overlap": ""}, r"overlap = '': one of"),
        ({"consumers": 1, "overlap": "pingpong"}, r"overlap = 'pingpong': .*needs 2 or 3"),
        ({"consumers": 1, "overlap": "both"}, r"overlap = 'both': .*use 'intra' or 'none'"),
        ({"tile_n": 0}, r"tile_n = 0: 16 to 256, by 16"),
        ({"tile_n": 120}, r"tile_n = 120: 16 to 256, by 16"),
        ({"tile_n": 272}, r"tile_n = 272: 16 to 256, by 16"),
        ({"tile_m": 0}, r"tile_m = 0: a multiple of 64 rows for each of 2"),
        ({"tile_m": 192}, r"tile_m = 192: a multiple of 64 rows for each of 2"),
        ({"tile_m": -128}, r"tile_m = -128: a multiple of 64"),
        ({"tile_m": 128, "consumers": 3}, r"tile_m = 128: a multiple of 64 rows for each of 3"),
        ({"cluster": (2,)}, r"cluster = \(2,\): two extents of 1, 2 or 4"),
        ({"cluster": (3, 1)}, r"cluster = \(3, 1\): two extents"),
        ({"cluster": (4, 4)}, r"cluster = \(4, 4\): .*product of at most 8"),
        ({"head_group": 0}, r"head_group = 0: 1 to 64"),
        ({"head_group": 65}, r"head_group = 65: 1 to 64"),
        ({"persistent": 1}, r"persistent = 1: True or False"),
        ({"persistent": "yes"}, r"persistent = 'yes': True or False"),
        ({"persistent": None}, r"persistent = None: True or False"),
        ({"store": "registers"}, r"store = 'registers': one of tma, direct"),
        ({"store": ""}, r"store = '': one of tma, direct"),
        ({"store": None}, r"store = None: one of tma, direct"),
        ({"early": -1}, r"early = -1: 0 to 8"),
        ({"early": 9}, r"early = 9: 0 to 8"),
        ({"pack": 0}, r"pack = 0: one of 1, 2, 4, 8, 16, 32, 64 heads in a tile"),
        ({"pack": 3}, r"pack = 3: one of"),
        ({"pack": 128}, r"pack = 128: one of"),
        ({"lazy": 0}, r"lazy = 0: True or False"),
        ({"lazy": None}, r"lazy = None: True or False"),
        ({"narrow": 1}, r"narrow = 1: True or False"),
    ],
    ids=str,
)
def test_a_field_that_cannot_work_is_refused_by_name_and_value(fields, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule(**fields)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 16),
    st.integers(1, 4),
    st.sampled_from(["none", "intra", "pingpong", "both"]),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]),
    st.booleans(),
    st.sampled_from(["tma", "direct"]),
    st.integers(0, 8),
    st.booleans(),
    st.sampled_from(PACKS),
)
def test_what_the_hardware_allows_is_accepted_and_printed(
    consumers, rows, keys, stages, overlap, cluster, persistent, store, early, lazy, pack
):
    if consumers == 1 and overlap in ("pingpong", "both"):
        overlap = "intra"
    tiles = (64 * consumers * rows, 16 * keys, stages, consumers, overlap, cluster)
    made = Schedule(*tiles, persistent=persistent, store=store, early=early, lazy=lazy, pack=pack)
    assert made.queries * pack == made.tile_m
    assert made.intra == (overlap in ("intra", "both"))
    assert made.pingpong == (overlap in ("pingpong", "both"))
    assert str(made) == (
        f"tile {made.tile_m} x {made.tile_n}, {stages} stages, {consumers} consumer warpgroups, "
        f"overlap {overlap}, cluster {cluster[0]}x{cluster[1]}, "
        f"{'persistent CTAs' if persistent else 'a CTA a tile'}, store {store}, early {early}/8, "
        f"rescale {'lazy' if lazy else 'always'}"
        f"{f', {pack} heads in a tile' if pack > 1 else ''}"
    )


@pytest.mark.parametrize("value", [1.5, 2.0, True, "2", 128.0, None, [2]], ids=repr)
@pytest.mark.parametrize("field", WHOLE)
def test_what_is_no_whole_number_is_refused_by_field_and_value(field, value):
    with pytest.raises(ScheduleError) as caught:
        Schedule(**{field: value})
    assert str(caught.value) == f"{field} = {value!r}: a whole number (int) is needed"


@pytest.mark.parametrize("cluster", [[2, 1], 2, (2.0, 1), (True, 1), ("2", 1), None], ids=repr)
def test_a_cluster_is_a_tuple_of_two_whole_numbers(cluster):
    with pytest.raises(ScheduleError) as caught:
        Schedule(cluster=cluster)
    assert str(caught.value).startswith(f"cluster = {cluster!r}: two extents")
    assert hash(Schedule(cluster=(2, 1))) == hash(Schedule(cluster=(2, 1)))
