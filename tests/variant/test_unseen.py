"""What a warpgroup passes over: the first tiles of a work tile that its own 64 rows do not see.

And of which halves it multiplies alone: the rules of `MainLoop.unseen` and `sees` on Python ints,
held against the mask element by element.
"""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from test_bounds import FAMILIES, visible

from cutedsl_fa3 import masks
from cutedsl_fa3.kernels.sm90.mainloop import MainLoop
from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.bounds import PythonIntegers, visit_runs
from cutedsl_fa3.variant.keys import KeySet, QueryTile, key_sets
from cutedsl_fa3.variant.tiles import by_tile

ROWS = wgmma.ROWS


class WorkTile:
    """One tile of queries of `consumers` warpgroups and what each of them passes over."""

    def __init__(self, mask, consumers: int, m_block: int, lengths: tuple, tile_n: int) -> None:
        self.variant, self.consumers, self.tile_n = Variant(mask=mask), consumers, tile_n
        self.m_block, (self.seqlen_q, self.seqlen_k) = m_block, lengths
        ints = PythonIntegers(self.variant.captures)
        keys = key_sets(self.variant.mask, self.rows(m_block, ROWS * consumers), ints)
        self.runs = visit_runs(keys, tile_n, self.seqlen_k, ints)
        self.visits = [self.runs.n_block(j) for j in range(self.runs.n_total)]

    def rows(self, block: int, size: int) -> QueryTile:
        last = min((block + 1) * size, self.seqlen_q) - 1
        return QueryTile(block * size, last, 0, 0, self.seqlen_q, self.seqlen_k)

    def keys(self, block: int, size: int) -> KeySet:
        """As of `Elements`."""
        ints = PythonIntegers(self.variant.captures)
        return key_sets(self.variant.mask, self.rows(block, size), ints).possible

    def sees(self, group: int, n_block: int, half: int | None = None) -> bool:
        """The kernel's rule itself, on Python ints."""
        ints = PythonIntegers(self.variant.captures)
        elements = SimpleNamespace(
            keys=self.keys,
            meets=lambda keys, first, end: keys.meets(first, end, self.seqlen_k, ints),
        )
        schedule = Schedule(ROWS * self.consumers, self.tile_n, 2, self.consumers, "intra")
        work = SimpleNamespace(m_block=self.m_block, elements=elements)
        return MainLoop.sees(SimpleNamespace(schedule=schedule), work, group, n_block, half)

    def strip(self, group: int) -> int:
        return self.m_block * self.consumers + group

    def inside(self, group: int) -> bool:
        return self.strip(group) * ROWS < self.seqlen_q

    def passed_over(self, group: int) -> int:
        """How many tiles, from the first on."""
        inside, j = self.inside(group), 0
        while j < len(self.visits) and not (inside and self.sees(group, self.visits[j])):
            j += 1
        return j

    def seen(self, group: int, keys: int | None = None) -> set[int]:
        """The key tiles, or runs of so many keys, of which this warpgroup's rows see an element."""
        if not self.inside(group):
            return set()
        any_row = visible(self.variant, self.rows(self.strip(group), ROWS)).any(0)
        return set((any_row.nonzero()[:, 0] // (keys or self.tile_n)).tolist())

    def turns(self, group: int, intra: bool) -> int:
        """How many turns a warpgroup takes in `along_runs`."""
        first, total = self.passed_over(group), len(self.visits)
        taken = sum(j > 0 or not intra for j in range(first))
        if intra and first < total:
            taken += first > 0  # its first S is issued without a turn
            first += 1
        return taken + total - first


@st.composite
def work_tiles(draw, mask=FAMILIES):
    consumers = draw(st.integers(1, 3))
    seqlen_q = draw(st.integers(1, 500))
    m_block = draw(st.integers(0, (seqlen_q - 1) // (ROWS * consumers)))
    lengths = seqlen_q, draw(st.integers(0, 500))
    return WorkTile(draw(mask), consumers, m_block, lengths, draw(st.sampled_from([16, 64, 112])))


@given(work_tiles())
@settings(max_examples=300, deadline=None)
def test_what_is_passed_over_is_a_prefix_none_of_whose_keys_the_rows_see(work):
    if by_tile(work.variant.mask):
        return  # decided one by one: nothing is passed over
    for group in range(work.consumers):
        first = work.passed_over(group)
        seen = work.seen(group)
        assert not seen & set(work.visits[:first])
        assert seen <= set(work.visits[first:])
        if not work.inside(group):
            assert first == len(work.visits)


EXACT = st.one_of(
    st.sampled_from([masks.full, masks.causal]),
    st.builds(masks.window, st.integers(0, 200), st.integers(0, 200)),
    st.builds(masks.prefix, st.integers(0, 400)),
)


@given(work_tiles(EXACT))
@settings(max_examples=200, deadline=None)
def test_nothing_more_can_be_passed_over_where_the_bounds_are_exact(work):
    """The first tile that is computed has an element that these rows see."""
    for group in range(work.consumers):
        first = work.passed_over(group)
        if first < len(work.visits):
            assert work.visits[first] in work.seen(group)


@given(work_tiles(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_warpgroups_take_the_same_number_of_turns_whatever_each_passes_over(work, intra):
    taken = {work.turns(group, intra) for group in range(work.consumers)}
    assert taken == {max(len(work.visits) - int(intra), 0)}


def halves(work: WorkTile, half: int):
    """Of each warpgroup and tile: whether that half is multiplied, and whether a key is seen."""
    for group in filter(work.inside, range(work.consumers)):
        seen = work.seen(group, work.tile_n // 2)
        for n_block in work.visits:
            yield work.sees(group, n_block, half), 2 * n_block + half in seen


@given(work_tiles(), st.integers(0, 1))
@settings(max_examples=200, deadline=None)
def test_no_row_sees_a_key_of_a_half_that_is_not_multiplied(work, half):
    assert all(multiplied or not seen for multiplied, seen in halves(work, half))


@given(work_tiles(EXACT), st.integers(0, 1))
@settings(max_examples=200, deadline=None)
def test_each_half_that_is_multiplied_has_a_key_that_is_seen_where_the_bounds_are_exact(work, half):
    assert all(seen or not multiplied for multiplied, seen in halves(work, half))


def test_under_causality_the_upper_rows_of_two_warpgroups_see_half_of_their_first_tile():
    work = WorkTile(masks.causal, 2, 3, (1024, 1024), 128)
    assert [work.sees(group, work.visits[0], 1) for group in range(2)] == [False, True]


def test_of_a_window_the_lower_rows_see_half_of_the_last_tile_with_a_mask():
    work = WorkTile(masks.window(256, 0), 2, 3, (1024, 1024), 128)
    assert [work.sees(group, 1, 0) for group in range(2)] == [True, False]


def test_under_causality_the_upper_rows_are_spared_the_keys_of_the_lower_ones():
    work = WorkTile(masks.causal, 3, 1, (1024, 1024), 64)
    assert work.visits == [5, 4, 3, 2, 1, 0]
    assert [work.passed_over(group) for group in range(3)] == [2, 1, 0]


def test_rows_past_the_sequence_are_spared_everything():
    work = WorkTile(None, 3, 1, (200, 300), 64)  # 192 to 199 are the rows of the first warpgroup
    assert [work.passed_over(group) for group in range(3)] == [0, 5, 5]


def test_a_window_spares_only_what_lies_before_the_first_tile_that_is_seen():
    """From right to left: the last warpgroup sees its first tile, and not the others' last."""
    work = WorkTile(masks.window(70, 0), 2, 2, (512, 512), 64)
    assert sorted(work.visits) == [2, 3, 4, 5]
    assert [work.passed_over(group) for group in range(2)] == [1, 0]
    assert work.seen(1) == {3, 4, 5}
