"""When heads that share a key head share work tiles, and what is refused of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import masks
from cutedsl_fa3.errors import Unsupported
from cutedsl_fa3.inputs import LARGEST_ROW, check_grid
from cutedsl_fa3.pipelines import MAX_HEAD_GROUP, PACKS, Schedule, ScheduleError
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.schedules import (
    FEW,
    FEWER,
    L2_BYTES,
    MANY,
    MORE,
    TABLE,
    Extents,
    default_schedule,
    packed,
    schedule_for,
    table_fingerprint,
)

CAUSAL = fa3.Variant(mask=masks.causal)
BY_HEAD = fa3.Variant(mask=lambda b, h, q, k: q - k < 50 * (h + 1))


def drawn(seqlen, heads, batch=2):
    return torch.zeros(batch, seqlen, heads, 64, dtype=torch.bfloat16)


def chosen(seqlen_q, heads, kv_heads, variant=CAUSAL, batch=64, **options):
    """The schedule of a call's plan."""
    q, k = drawn(seqlen_q, heads, batch), drawn(300, kv_heads, batch)
    return fa3.plan(q, k, k, variant, **options).schedule


def turns(base, pack, extents):
    """Of the CTAs of 132 multiprocessors, counted one by one: the most tiles that one has."""
    ctas = [0] * (132 * base.residents)
    tiles = extents.batch * extents.heads // pack * -(-extents.seqlen_q * pack // base.tile_m)
    for tile in range(tiles):
        ctas[tile % len(ctas)] += 1
    return max(ctas)


@given(
    st.sampled_from([(64, 4), (64, 1), (128, 1), (192, 1)]),
    st.integers(1, 20),
    st.integers(1, 700),
    st.integers(1, 4),
    st.integers(1, 48),
)
def test_heads_share_tiles_where_that_leaves_fewer_turns_and_only_heads_of_one_key_head(
    tile, batch, seqlen_q, kv_heads, group
):
    tile_m, residents = tile
    base = Schedule(tile_m, 128, 2, tile_m // 64, "intra", residents=residents)
    extents = Extents(batch, seqlen_q, 300, kv_heads * group, kv_heads)
    pack = packed(base, extents)
    assert pack in PACKS and group % pack == 0
    others = {each: turns(base, each, extents) for each in PACKS if group % each == 0}
    fewest = min(others.values())
    if pack > 1:
        assert others[pack] == fewest <= FEWER * others[1]
        assert pack == min(each for each, count in others.items() if count == fewest)
    else:
        assert fewest > FEWER * others[1]


@pytest.mark.parametrize(
    ("seqlen_q", "heads", "kv_heads", "pack"),
    [
        (1, 8, 2, 1),  # 512 work tiles of 528 at a time
        (1, 16, 2, 2),
        (1, 32, 8, 4),
        (1, 64, 4, 8),
        (17, 48, 4, 2),  # 4 divides 12 as well, and leaves no fewer
        (1, 18, 6, 1),
        (1, 8, 8, 1),
        (4096, 8, 2, 1),
    ],
)
def test_a_call_with_few_queries_packs_its_heads(seqlen_q, heads, kv_heads, pack):
    made = chosen(seqlen_q, heads, kv_heads)
    default = default_schedule(CAUSAL, Problem("bf16", 64, 64), 300)
    assert default.residents == 4
    assert made == replace(default, pack=pack, head_group=MAX_HEAD_GROUP)  # 300 keys are few


def test_tiles_that_all_run_at_a_time_are_not_made_fewer():
    for batch, pack in ((1, 1), (8, 1), (16, 1), (17, 2), (33, 2), (34, 4)):
        assert chosen(1, 32, 8, batch=batch).pack == pack


def test_the_kernel_of_a_call_is_that_of_its_lengths(gpu):
    k = drawn(300, 2, 64)
    for seqlen in (1, 4096, 2, 1):
        fa3.attention(drawn(seqlen, 16, 64), k, k, CAUSAL)
    packs = [re.search(r"pack=(\d+)", kernel)[1] for kernel in gpu.kernels]
    assert packs == ["2", "1"]
    assert len(gpu.launches) == 4


def test_heads_that_see_different_keys_share_no_tile():
    assert chosen(1, 32, 8).pack == 4
    assert chosen(1, 32, 8, BY_HEAD).pack == 1
    with pytest.raises(ScheduleError, match=r"pack = 4: the mask reads h.*use pack=1"):
        chosen(1, 8, 2, BY_HEAD, schedule=Schedule(pack=4))


def test_a_schedule_that_is_given_is_kept():
    assert chosen(1, 32, 8, schedule=Schedule()).pack == 1
    assert chosen(4096, 8, 2, schedule=Schedule(pack=2)).pack == 2


@pytest.mark.parametrize("call", [fa3.attention, fa3.attention_with_lse, fa3.plan, fa3.visits])
@pytest.mark.parametrize(("heads", "kv_heads", "use"), [(6, 2, 1), (6, 1, 2), (4, 4, 1)])
def test_a_tile_of_heads_of_two_key_heads_is_refused_with_what_divides(call, heads, kv_heads, use):
    q, k = drawn(5, heads), drawn(7, kv_heads)
    with pytest.raises(ScheduleError) as caught:
        call(q, k, k, schedule=Schedule(pack=4))
    said = str(caught.value)
    assert f"schedule.pack = 4: q has {heads} heads and k {kv_heads}" in said
    assert said.endswith(f"use pack={use}")
    call(q, k, k, schedule=Schedule(pack=use))


def test_rows_of_packed_heads_are_refused_where_their_numbers_overflow():
    fits = LARGEST_ROW // 64 - 2
    check_grid(drawn(1, 64, 1).expand(1, fits, 64, 64), Schedule(pack=64))
    with pytest.raises(Unsupported, match=rf"at most {LARGEST_ROW}; use pack=1"):
        check_grid(drawn(1, 64, 1).expand(1, fits + 2, 64, 64), Schedule(pack=64))
    check_grid(drawn(1, 64, 1).expand(1, fits + 2, 64, 64), Schedule())


FULL = fa3.Variant()


@pytest.mark.parametrize(
    ("variant", "d", "keys", "tile", "early", "lazy"),
    [
        (CAUSAL, 64, FEW[1], (64, 64), 0, False),
        (CAUSAL, 64, FEW[1] + 1, (192, 128), 0, False),
        (CAUSAL, 64, MANY[0], (192, 128), 0, False),
        (FULL, 64, MANY[0] - 1, (192, 128), 0, False),
        (FULL, 64, MANY[0], (192, 128), 0, True),
        (CAUSAL, 96, MANY[0], (192, 96), 0, True),
        (FULL, 96, MORE[0] - 1, (192, 96), 2, True),
        (FULL, 96, MORE[0], (192, 112), 3, True),
        (CAUSAL, 128, MANY[0] - 1, (128, 128), 1, False),
        (CAUSAL, 128, MANY[0], (128, 160), 2, False),
        (CAUSAL, 128, None, (128, 128), 1, False),
        (FULL, 128, MANY[0], (128, 128), 2, False),
    ],
)
def test_a_row_for_some_lengths_or_masks_serves_those_of_its_head_size_alone(
    variant, d, keys, tile, early, lazy
):
    made = default_schedule(variant, Problem("bf16", d, d), keys)
    assert (made.tile_m, made.tile_n) == tile
    assert (made.early, made.lazy) == (early, lazy)


@pytest.mark.parametrize(
    ("d", "keys", "kv_heads", "group"),
    [
        (64, 512, 16, 64),
        (64, 1024, 16, 64),
        (64, 1025, 16, 32),
        (128, 2048, 16, 16),
        (128, 2049, 16, 8),
        (256, 1024, 16, 16),
        (64, 24576, 16, 8),
        (64, 24577, 16, 4),
        (96, 16384, 16, 8),
        (128, 8192, 16, 8),
        (128, 16384, 16, 4),
        (128, 16384, 8, 8),  # two heads share K and V
        (256, 16384, 16, 2),
        (256, 1 << 20, 16, 1),
    ],
)
def test_the_keys_and_values_of_heads_side_by_side_stay_in_l2(d, keys, kv_heads, group):
    problem, extents = Problem("bf16", d, d), Extents(1, keys, keys, 16, kv_heads)
    assert schedule_for(CAUSAL, problem, extents).head_group == group
    assert schedule_for(FULL, problem, extents).head_group == 1
    shared = -(-group * kv_heads // 16)
    assert shared * keys * 4 * d <= L2_BYTES or group == 1


def test_a_table_that_chooses_otherwise_has_another_fingerprint(monkeypatch):
    today = table_fingerprint()
    first, *rest = TABLE

    def with_first(**changes):
        monkeypatch.setattr("cutedsl_fa3.schedules.TABLE", (replace(first, **changes), *rest))
        return table_fingerprint()

    assert with_first(why="another reason", record="a.json") == today
    changes = (
        {"tile_n": 112},
        {"needs": "nothing"},
        {"residents": 2},
        {"keys": (1, 9)},
        {"masked": True},
        {"lazy": True},
    )
    assert len({today, *(with_first(**each) for each in changes)}) == 1 + len(changes)
    monkeypatch.setattr("cutedsl_fa3.schedules.TABLE", tuple(rest))
    assert table_fingerprint() != today
    monkeypatch.undo()
    monkeypatch.setattr("cutedsl_fa3.schedules.SPECIAL", ())
    assert table_fingerprint() != today
