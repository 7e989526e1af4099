"""Storage plans, against a brute-force map of every byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.layouts import SMEM_CAPACITY, Buffer, LayoutError, SmemPlan


@st.composite
def plans(draw) -> SmemPlan:
    owners = []
    for number in range(draw(st.integers(1, 6))):
        align = 1 << draw(st.integers(0, 7))
        stages = draw(st.integers(1, 4))
        size = draw(st.integers(1, 40))
        owners.append(Buffer(f"b{number}", size * align if stages > 1 else size, align, stages))
    aliases = []
    for number in range(draw(st.integers(0, 3))):
        owner = draw(st.sampled_from(owners))
        size = draw(st.integers(1, owner.size))
        aliases.append(Buffer(f"a{number}", size, 1 << draw(st.integers(0, 8)), alias=owner.name))
    return SmemPlan(tuple(draw(st.permutations(owners + aliases))))


def bytes_of(plan: SmemPlan, buffer: Buffer) -> set[int]:
    start = plan.offset(buffer.name)
    return set(range(start, start + buffer.size))


@given(plans())
def test_buffers_share_bytes_only_where_an_alias_says_so(plan):
    for one in plan.buffers:
        for other in plan.buffers:
            if one is other:
                continue
            storage = (one.alias or one.name, other.alias or other.name)
            if storage[0] == storage[1]:
                assert plan.offset(one.name) == plan.offset(other.name)
            else:
                assert not bytes_of(plan, one) & bytes_of(plan, other)


@given(plans())
def test_every_stage_of_every_buffer_is_aligned(plan):
    for buffer in plan.buffers:
        for stage in range(buffer.stages):
            assert (plan.offset(buffer.name) + stage * buffer.bytes) % buffer.align == 0


@given(plans())
def test_the_total_is_the_last_byte_and_no_gap_is_as_large_as_an_alignment(plan):
    used = set().union(*(bytes_of(plan, b) for b in plan.buffers))
    assert plan.total == max(used) + 1
    gaps = plan.total - len(used)
    owners = [b for b in plan.buffers if b.alias is None]
    largest = {
        o.name: max(b.align for b in plan.buffers if o.name in (b.name, b.alias)) for o in owners
    }
    assert gaps <= sum(align - 1 for align in largest.values())


@given(plans(), st.integers(-3, 3))
def test_a_plan_is_refused_exactly_when_its_total_exceeds_the_capacity(plan, slack):
    tight = SmemPlan(plan.buffers, capacity=plan.total + slack)
    if slack >= 0:
        tight.check()
    else:
        with pytest.raises(LayoutError, match=f"{plan.total} bytes are needed"):
            tight.check()


def test_the_capacity_is_227_kib():
    assert SmemPlan(()).capacity == SMEM_CAPACITY == 232448
    SmemPlan((Buffer("all", SMEM_CAPACITY),)).check()
    with pytest.raises(LayoutError):
        SmemPlan((Buffer("all", SMEM_CAPACITY + 1),)).check()


def test_a_ring_too_deep_is_refused_naming_bytes_limit_largest_buffer_and_depth_that_fits():
    buffers = (Buffer("q", 32768), Buffer("kv", 65536, stages=4))
    with pytest.raises(LayoutError) as refused:
        SmemPlan(buffers).check()
    text = str(refused.value)
    for part in ("294912", "232448", "62464 too many", "largest: 'kv'", "262144 (4 x 65536)"):
        assert part in text
    assert "3 stages of 'kv' would fit" in text
    SmemPlan((Buffer("q", 32768), Buffer("kv", 65536, stages=3))).check()


def test_when_no_depth_fits_the_message_asks_for_a_smaller_tile():
    with pytest.raises(LayoutError, match="choose a smaller tile"):
        SmemPlan((Buffer("a", 200_000), Buffer("b", 200_000))).check()


def test_an_alias_larger_than_the_storage_it_shares_is_refused():
    with pytest.raises(LayoutError, match=r"'o' \(2048 bytes\) is larger than 'q' \(1024 bytes\)"):
        SmemPlan((Buffer("q", 1024), Buffer("o", 2048, alias="q")))
    SmemPlan((Buffer("q", 1024), Buffer("o", 1024, alias="q")))


@pytest.mark.parametrize("target", ["nothing", "o", "p"])
def test_an_alias_must_name_a_buffer_with_storage_of_its_own(target):
    with pytest.raises(LayoutError, match=r"choose one of \['q'\]"):
        SmemPlan((Buffer("q", 64), Buffer("p", 64, alias="q"), Buffer("o", 64, alias=target)))


def test_two_buffers_of_one_name_are_refused():
    with pytest.raises(LayoutError, match="two buffers are called 'k'"):
        SmemPlan((Buffer("k", 64), Buffer("k", 64)))


def test_a_buffer_that_cannot_exist_is_refused():
    with pytest.raises(LayoutError, match="0 stages"):
        Buffer("k", 64, stages=0)
    with pytest.raises(LayoutError, match="of 0 bytes"):
        Buffer("k", 0)
    with pytest.raises(LayoutError, match="alignment 24 is not a power of two; the next is 32"):
        Buffer("k", 64, align=24)
    with pytest.raises(LayoutError, match="pad a stage to 2048 bytes"):
        Buffer("k", 1040, stages=2)


def test_an_unknown_name_has_no_offset():
    with pytest.raises(LayoutError, match=r"no buffer is called 'v'; there are \['k'\]"):
        SmemPlan((Buffer("k", 64),)).offset("v")


def test_the_text_map_names_every_buffer_with_offset_bytes_stages_and_alias():
    text = str(
        SmemPlan((Buffer("q", 1024), Buffer("k", 2048, stages=2), Buffer("o", 512, alias="q")))
    )
    rows = {line.split()[3]: line.split()[:3] for line in text.splitlines()[1:-1]}
    assert rows == {"q": ["0", "1024", "1"], "o": ["0", "512", "1"], "k": ["1024", "4096", "2"]}
    assert "shares q" in text
    assert text.splitlines()[-1].split() == "total 5120 of 232448 bytes: fits".split()
