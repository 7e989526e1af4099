"""When heads that share a key head share work tiles; what tells one table from another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import masks
from cutedsl_fa3.errors import Unsupported
from cutedsl_fa3.inputs import LARGEST_ROW, check_grid
from cutedsl_fa3.pipelines import PACKS, Schedule, ScheduleError
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.schedules import (
    FEWER,
    TABLE,
    default_schedule,
    largest_pack,
    packed,
    table_fingerprint,
)

CAUSAL = fa3.Variant(mask=masks.causal)
BY_HEAD = fa3.Variant(mask=lambda b, h, q, k: q - k < 50 * (h + 1))


def drawn(seqlen, heads, batch=2):
    return torch.zeros(batch, seqlen, heads, 64, dtype=torch.bfloat16)


def chosen(seqlen_q, heads, kv_heads, variant=CAUSAL, **options):
    """The schedule of a call's plan."""
    q, k = drawn(seqlen_q, heads), drawn(300, kv_heads)
    return fa3.plan(q, k, k, variant, **options).schedule


def work_tiles(schedule, seqlen_q, heads):
    return -(-seqlen_q // (schedule.tile_m // schedule.pack)) * heads // schedule.pack


@given(
    st.sampled_from([64, 128, 192]),
    st.integers(1, 5000),
    st.integers(1, 8),
    st.integers(1, 96),
)
def test_heads_share_tiles_where_that_leaves_fewer_and_only_heads_of_one_key_head(
    tile_m, seqlen_q, kv_heads, group
):
    heads, base = kv_heads * group, Schedule(tile_m, 128, 2, tile_m // 64, "intra")
    made = packed(base, CAUSAL, seqlen_q, heads, kv_heads)
    assert made.pack in PACKS and group % made.pack == 0
    before, after = (work_tiles(each, seqlen_q, heads) for each in (base, made))
    fewest = min(
        work_tiles(Schedule(tile_m, 128, 2, tile_m // 64, "intra", pack=pack), seqlen_q, heads)
        for pack in PACKS
        if group % pack == 0
    )
    if made.pack > 1:
        assert after == fewest <= FEWER * before
    else:
        assert made == base and fewest > FEWER * before


@pytest.mark.parametrize(
    ("seqlen_q", "heads", "kv_heads", "pack"),
    [
        (1, 8, 2, 4),
        (1, 16, 1, 16),
        (17, 12, 1, 4),  # 12 heads share a key head, and 4 is the power of 2 in it
        (1, 6, 1, 2),
        (1, 9, 3, 1),
        (1, 128, 1, 64),
        (1, 8, 8, 1),
        (4096, 8, 2, 1),
    ],
)
def test_a_call_with_few_queries_packs_its_heads(seqlen_q, heads, kv_heads, pack):
    made = chosen(seqlen_q, heads, kv_heads)
    default = default_schedule(CAUSAL, Problem("bf16", 64, 64), 300)
    assert made == replace(default, pack=pack)


def test_the_kernel_of_a_call_is_that_of_its_lengths(gpu):
    k = drawn(300, 2)
    for seqlen in (1, 4096, 2, 1):
        fa3.attention(drawn(seqlen, 8), k, k, CAUSAL)
    packs = [kernel.partition("pack=")[2].partition(")")[0] for kernel in gpu.kernels]
    assert packs == ["4", "1"]
    assert len(gpu.launches) == 4


def test_heads_that_see_different_keys_share_no_tile():
    assert chosen(1, 8, 2, BY_HEAD).pack == 1
    with pytest.raises(ScheduleError, match=r"pack = 4: the mask reads h.*use pack=1"):
        chosen(1, 8, 2, BY_HEAD, schedule=Schedule(pack=4))


def test_a_schedule_that_is_given_is_kept():
    assert chosen(1, 8, 2, schedule=Schedule()).pack == 1
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


@given(st.integers(0, 300), st.integers(1, 8))
def test_the_largest_pack_divides_the_heads_that_share_a_key_head(group, kv_heads):
    largest = largest_pack(group * kv_heads, kv_heads)
    assert group % largest == 0
    assert not [pack for pack in PACKS if pack > largest and group and group % pack == 0]


def test_a_table_that_chooses_otherwise_has_another_fingerprint(monkeypatch):
    today = table_fingerprint()
    first, *rest = TABLE

    def with_first(**changes):
        monkeypatch.setattr("cutedsl_fa3.schedules.TABLE", (replace(first, **changes), *rest))
        return table_fingerprint()

    assert with_first(why="another reason", record="a.json") == today
    changes = ({"tile_n": 112}, {"needs": "nothing"}, {"residents": 2}, {"keys": 9}, {"lazy": True})
    assert len({today, *(with_first(**each) for each in changes)}) == 1 + len(changes)
    monkeypatch.setattr("cutedsl_fa3.schedules.TABLE", tuple(rest))
    assert table_fingerprint() != today
    monkeypatch.undo()
    monkeypatch.setattr("cutedsl_fa3.schedules.SHORT", ())
    assert table_fingerprint() != today
