"""Key bounds against brute force: which keys, which tiles, on which arithmetic."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3 import masks
from cutedsl_fa3.variant import Variant, seqlen_k, seqlen_q
from cutedsl_fa3.variant.bounds import PythonIntegers, classify, spans, visit_runs
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.keys import Keys, QueryTile, key_sets

LENGTHS = torch.tensor([5, 0, 37], dtype=torch.int32)
WIDTHS = torch.tensor([3, 0, 11, 64])
FLAGS = torch.tensor([True, False, True, False])
SCALAR = torch.tensor(9)
DOCUMENT = torch.arange(200) // 7


def visible(variant: Variant, tile: QueryTile) -> torch.Tensor:
    """The mask of each row and key, by evaluation of every element."""
    if variant.mask is None:
        return torch.ones(tile.q1 - tile.q0 + 1, tile.seqlen_k, dtype=torch.bool)
    inputs = dict(tile._asdict())
    inputs["q"] = torch.arange(inputs.pop("q0"), inputs.pop("q1") + 1)[:, None]
    inputs["k"] = torch.arange(tile.seqlen_k)[None, :]
    seen = evaluate(variant.mask, inputs, variant.captures)
    return torch.broadcast_to(seen, (tile.q1 - tile.q0 + 1, tile.seqlen_k))


def as_keys(found: tuple, seqlen: int) -> torch.Tensor:
    keys = torch.zeros(seqlen, dtype=torch.bool)
    for low, high in found:
        keys[low:high] = True
    return keys


class Opaque:
    """An integer or condition that the host may not look at, like a value inside a kernel."""

    def __init__(self, value: int) -> None:
        assert isinstance(value, bool) or -(2**31) <= value < 2**31, "left 32 bits"
        self.value = value

    def __bool__(self) -> bool:
        raise AssertionError("the host branched on a device value")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("the host compared a device value")

    __hash__ = None


class OpaqueIntegers:
    """Arithmetic in which everything known only at run time stays opaque, and stays in 32 bits."""

    def __init__(self, captures: tuple) -> None:
        self.python = PythonIntegers(captures)
        self.operations = 0

    def _lifted(self, function, *values):
        if not any(isinstance(v, Opaque) for v in values):
            return function(*values)
        self.operations += 1
        return Opaque(function(*(v.value if isinstance(v, Opaque) else v for v in values)))

    def add(self, a, b):
        return self._lifted(operator.add, a, b)

    def sub(self, a, b):
        return self._lifted(operator.sub, a, b)

    def mul(self, a, b):
        return self._lifted(operator.mul, a, b)

    def floordiv(self, a, b):
        assert isinstance(b, int) and b > 0
        return self._lifted(operator.floordiv, a, b)

    def minimum(self, a, b):
        return self._lifted(min, a, b)

    def maximum(self, a, b):
        return self._lifted(max, a, b)

    def less(self, a, b):
        return self._lifted(operator.lt, a, b)

    def where(self, c, a, b):
        if isinstance(c, bool):
            return a if c else b
        return self._lifted(lambda c, a, b: a if c else b, c, a, b)

    def and_(self, a, b):
        return self._lifted(lambda a, b: a and b, a, b)

    def or_(self, a, b):
        return self._lifted(lambda a, b: a or b, a, b)

    def not_(self, a):
        return self._lifted(operator.not_, a)

    def load(self, capture, indices):
        bare = tuple(i.value if isinstance(i, Opaque) else i for i in indices)
        return Opaque(self.python.load(capture, bare))


def check_sound(variant: Variant, tile: QueryTile) -> Keys:
    keys = key_sets(variant.mask, tile, PythonIntegers(variant.captures))
    seen = visible(variant, tile)
    possible = as_keys(spans(keys.possible, tile.seqlen_k), tile.seqlen_k)
    hidden = as_keys(spans(keys.hidden, tile.seqlen_k), tile.seqlen_k)
    assert not (seen.any(0) & ~possible).any(), "a visible key is missing from `possible`"
    assert not (~seen.all(0) & ~hidden).any(), "a hidden key is missing from `hidden`"
    return keys


def check_exact(variant: Variant, tile: QueryTile) -> None:
    keys = check_sound(variant, tile)
    seen = visible(variant, tile)
    assert torch.equal(as_keys(spans(keys.possible, tile.seqlen_k), tile.seqlen_k), seen.any(0))
    assert torch.equal(as_keys(spans(keys.hidden, tile.seqlen_k), tile.seqlen_k), ~seen.all(0))


def check_runs(variant: Variant, tile: QueryTile, tile_n: int) -> None:
    """The runs hold each tile that classify does not call empty, once and in the right list.

    They are visited from right to left, the partial ones first.
    """
    ints = PythonIntegers(variant.captures)
    runs = visit_runs(key_sets(variant.mask, tile, ints), tile_n, tile.seqlen_k, ints)
    partial = [start + i for start, count in runs.partial for i in range(count)]
    full = [start + i for start, count in runs.full for i in range(count)]
    assert len({*partial, *full}) == len(partial) + len(full)
    for n in range(-(-tile.seqlen_k // tile_n)):
        last = (n + 1) * tile_n - 1
        kind = classify(variant.mask, tile, (n * tile_n, last), variant.captures)
        assert kind == ("full" if n in full else "partial" if n in partial else "empty")
    assert all(0 <= n * tile_n < tile.seqlen_k for n in [*partial, *full])
    visited = [runs.n_block(j) for j in range(runs.n_total)]
    assert visited == sorted(partial, reverse=True) + sorted(full, reverse=True)
    assert (runs.n_partial, runs.n_full) == (len(partial), len(full))


def check_opaque(variant: Variant, tile: QueryTile, tile_n: int) -> int:
    """Opaque values give the same tiles as Python ints; returns the number of operations."""
    ints = PythonIntegers(variant.captures)
    runs = visit_runs(key_sets(variant.mask, tile, ints), tile_n, tile.seqlen_k, ints)
    hidden = OpaqueIntegers(variant.captures)
    device = QueryTile(*(Opaque(value) for value in tile))
    found = visit_runs(key_sets(variant.mask, device, hidden), tile_n, device.seqlen_k, hidden)
    operations = hidden.operations

    def tiles(part):
        bare = [[v.value if isinstance(v, Opaque) else v for v in run] for run in part]
        return sorted(start + i for start, count in bare for i in range(count))

    assert tiles(found.partial) == tiles(runs.partial)
    assert tiles(found.full) == tiles(runs.full)
    for n in range(-(-tile.seqlen_k // tile_n) + 1):
        keys = n * tile_n, (n + 1) * tile_n
        seen, unseen = (
            key_sets(variant.mask, of_tile, of_ints).possible.meets(
                *ends, of_tile.seqlen_k, of_ints
            )
            for of_tile, of_ints, ends in (
                (tile, ints, keys),
                (device, hidden, [Opaque(key) for key in keys]),
            )
        )
        assert (unseen.value if isinstance(unseen, Opaque) else unseen) == seen
    return operations


@st.composite
def tiles(draw, longest: int = 70) -> QueryTile:
    seqlen_q = draw(st.integers(1, longest))
    q0 = draw(st.integers(0, seqlen_q - 1))
    q1 = draw(st.integers(q0, min(seqlen_q - 1, q0 + 40)))
    return QueryTile(
        q0, q1, draw(st.integers(0, 2)), draw(st.integers(0, 3)), seqlen_q,
        draw(st.integers(0, longest)),
    )  # fmt: skip


SIZES = st.none() | st.integers(0, 20)
FAMILIES = st.one_of(
    st.sampled_from(
        [
            masks.full,
            masks.none,
            masks.causal,
            lambda b, h, q, k: k <= q,
            lambda b, h, q, k: k < LENGTHS[b],
            lambda b, h, q, k: k >= SCALAR,
            lambda b, h, q, k: (q - k).abs() <= WIDTHS[h],
            lambda b, h, q, k: (k <= q) & (q - k < WIDTHS[h]),
            lambda b, h, q, k: q - k < 25 / 2,
            lambda b, h, q, k: q < 30,
            lambda b, h, q, k: (k > 3) & (k != 17),
            lambda b, h, q, k: FLAGS[h] | (k <= q),
            lambda b, h, q, k: h % 2 == 0,
        ]
    ),
    st.builds(masks.window, SIZES, SIZES),
    st.builds(masks.prefix, st.integers(0, 80)),
)
TILES_N = st.sampled_from([1, 4, 16, 64])


@given(mask=FAMILIES, tile=tiles(), tile_n=TILES_N)
@settings(max_examples=300, deadline=None)
def test_causal_windows_and_prefixes_are_exact(mask, tile, tile_n):
    check_exact(Variant(mask=mask), tile)
    check_runs(Variant(mask=mask), tile, tile_n)


@given(a=FAMILIES, b=FAMILIES, join=st.sampled_from(["and", "or"]), tile=tiles(), tile_n=TILES_N)
@settings(max_examples=400, deadline=None)
def test_conjunctions_and_disjunctions_are_exact(a, b, join, tile, tile_n):
    joined = masks.and_masks if join == "and" else masks.or_masks
    check_exact(Variant(mask=joined(a, b)), tile)
    check_runs(Variant(mask=joined(a, b)), tile, tile_n)


@given(a=FAMILIES, b=FAMILIES, c=FAMILIES, tile=tiles())
@settings(max_examples=200, deadline=None)
def test_three_joined_masks_are_sound_and_agree_on_opaque_values(a, b, c, tile):
    variant = Variant(mask=masks.or_masks(masks.and_masks(a, masks.not_mask(b)), c))
    check_sound(variant, tile)
    check_runs(variant, tile, 16)
    check_opaque(variant, tile, 16)


@given(tile=tiles(), size=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_chunks_are_exact_alone_and_with_causality(tile, size):
    check_exact(Variant(mask=lambda b, h, q, k: k // size == q // size), tile)
    check_exact(Variant(mask=lambda b, h, q, k: (k // size == q // size) & (k <= q)), tile)


@given(tile=tiles(), shift=st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_scaled_positions_are_exact_for_half_lines(tile, shift):
    check_exact(Variant(mask=lambda b, h, q, k: k * 3 <= q * 2 + shift), tile)
    check_exact(Variant(mask=lambda b, h, q, k: k >> shift >= q >> 2), tile)


UNKNOWN = [
    lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k],
    lambda b, h, q, k: (q + k) % 3 == 0,
    lambda b, h, q, k: q * k < 100,
    lambda b, h, q, k: torch.sin(q / 3) > 0,
    lambda b, h, q, k: (k % 5 == 0) | (k - k // 3 < 7),
]


@given(a=FAMILIES, unknown=st.sampled_from(UNKNOWN), negate=st.booleans(), tile=tiles())
@settings(max_examples=150, deadline=None)
def test_unsolved_conditions_hide_nothing_visible(a, unknown, negate, tile):
    part = masks.not_mask(unknown) if negate else unknown
    for joined in (masks.and_masks, masks.or_masks):
        variant = Variant(mask=joined(a, part))
        check_sound(variant, tile)
        check_runs(variant, tile, 4)


def test_documents_within_a_window_visit_only_the_window():
    variant = Variant(
        mask=lambda b, h, q, k: (k <= q) & (q - k < 20) & (DOCUMENT[q] == DOCUMENT[k])
    )
    keys = check_sound(variant, QueryTile(100, 131, 0, 0, 200, 200))
    assert spans(keys.possible, 200) == ((81, 132),)
    assert spans(keys.hidden, 200) == ((0, 200),)


CONSTANT = st.integers(-8, 40)
DIVISOR = st.integers(1, 9)


def _number(inner):
    two = st.tuples(inner, inner)
    return st.one_of(
        two.map(lambda p: lambda *x: p[0](*x) + p[1](*x)),
        two.map(lambda p: lambda *x: p[0](*x) - p[1](*x)),
        two.map(lambda p: lambda *x: torch.minimum(p[0](*x), p[1](*x))),
        two.map(lambda p: lambda *x: torch.maximum(p[0](*x), p[1](*x))),
        st.tuples(inner, CONSTANT).map(lambda p: lambda *x: p[0](*x) * p[1]),
        st.tuples(inner, CONSTANT).map(lambda p: lambda *x: p[1] - p[0](*x)),
        st.tuples(inner, DIVISOR).map(lambda p: lambda *x: p[0](*x) // p[1]),
        st.tuples(inner, DIVISOR).map(lambda p: lambda *x: p[0](*x) % p[1]),
        st.tuples(inner, inner, inner).map(
            lambda p: lambda *x: torch.where(p[0](*x) < p[1](*x), p[1](*x), p[2](*x))
        ),
        inner.map(lambda p: lambda *x: abs(p(*x))),
        inner.map(lambda p: lambda *x: LENGTHS[p(*x) % 3]),
    )


NUMBERS = st.recursive(
    st.sampled_from(
        [
            lambda b, h, q, k: q,
            lambda b, h, q, k: k,
            lambda b, h, q, k: k - q,
            lambda b, h, q, k: LENGTHS[b],
            lambda b, h, q, k: WIDTHS[h],
            lambda b, h, q, k: seqlen_k - seqlen_q,
            lambda b, h, q, k: torch.where(k < 9, q, h),
        ]
    )
    | CONSTANT.map(lambda c: lambda b, h, q, k: torch.tensor(c)),
    _number,
    max_leaves=5,
)
COMPARISONS = st.tuples(
    st.sampled_from([operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]),
    NUMBERS,
    NUMBERS,
).map(lambda p: lambda *x: p[0](p[1](*x), p[2](*x)))


def _condition(inner):
    joins = st.sampled_from([operator.and_, operator.or_, operator.xor])
    return st.one_of(
        st.tuples(joins, inner, inner).map(lambda p: lambda *x: p[0](p[1](*x), p[2](*x))),
        inner.map(masks.not_mask),
        st.tuples(inner, inner, inner).map(
            lambda p: lambda *x: torch.where(p[0](*x), p[1](*x), p[2](*x))
        ),
    )


MASKS = st.recursive(
    COMPARISONS | FAMILIES.map(lambda m: lambda *x: m(*x) & (x[3] == x[3])),
    _condition,
    max_leaves=4,
)


@given(mask=MASKS, tile=tiles(40), tile_n=st.sampled_from([1, 8, 32]))
@settings(max_examples=500, deadline=None)
def test_random_masks_are_sound_and_their_runs_are_whole(mask, tile, tile_n):
    variant = Variant(mask=mask)
    check_sound(variant, tile)
    check_runs(variant, tile, tile_n)
    check_opaque(variant, tile, tile_n)


@pytest.mark.parametrize("size", [2**31 - 1, 2**30, 10**6])
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_constants_and_captured_values_stay_in_32_bits(size, sign):
    sentinel = torch.tensor([sign * size])
    for mask in (
        lambda b, h, q, k: k <= q + sign * size,
        lambda b, h, q, k: k - sentinel[0] < q,
        lambda b, h, q, k: (q - k) // 64 <= sentinel[0],
        lambda b, h, q, k: sentinel[0] > 5 - sign * (size - 10),
    ):
        variant = Variant(mask=mask)
        tile = QueryTile(64, 127, 0, 0, 1000, 900)
        check_exact(variant, tile)
        check_opaque(variant, tile, 64)


@pytest.mark.parametrize("size", [2**31 - 1, 2**30, 10**6])
@pytest.mark.parametrize("sign", [1, -1])
def test_products_that_could_leave_32_bits_skip_nothing(size, sign):
    sentinel = torch.tensor([sign * size])
    variant = Variant(mask=lambda b, h, q, k: k // 100000 <= q + sentinel[0] // 2)
    tile = QueryTile(64, 127, 0, 0, 1000, 900)
    check_sound(variant, tile)
    check_opaque(variant, tile, 64)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k // 1024 <= q // 512,
        lambda b, h, q, k: k // 2048 == q // 2048,
        lambda b, h, q, k: k <= q % 64 * 4096,
    ],
)
def test_multiples_of_what_is_small_are_solved(mask):
    check_exact(Variant(mask=mask), QueryTile(2040, 2070, 0, 0, 5000, 5000))


@pytest.mark.parametrize(("value", "seen"), [(2**40, "full"), (-(2**40), "empty")])
def test_captured_int64_lengths_saturate_at_32_bits(value, seen):
    variant = Variant(mask=masks.prefix(torch.tensor(value)))
    tile = QueryTile(0, 63, 0, 0, 64, 64)
    assert classify(variant.mask, tile, (0, 63), variant.captures) == seen
    assert abs(PythonIntegers(variant.captures).load(0, ())) == 2**31 - 1


def test_a_tile_covered_by_two_neighbouring_ranges_is_full():
    # keys 0..9 through one range and 10.. through another: tile 0 (0..15) needs both
    variant = Variant(mask=lambda b, h, q, k: (k < 10) | (k >= LENGTHS[b] + 5))
    ints = PythonIntegers(variant.captures)
    keys = key_sets(variant.mask, QueryTile(0, 15, 0, 0, 64, 64), ints)
    runs = visit_runs(keys, 16, 64, ints)
    assert runs.n_partial == 0 and [runs.n_block(j) for j in range(4)] == [3, 2, 1, 0]


def test_the_last_tile_is_partial_only_if_it_reaches_past_the_sequence():
    ints = PythonIntegers()
    for seqlen, partial, full in ((128, 0, 2), (130, 1, 2), (0, 0, 0), (3, 1, 0)):
        runs = visit_runs(
            key_sets(None, QueryTile(0, 63, 0, 0, 64, seqlen), ints), 64, seqlen, ints
        )
        assert (runs.n_partial, runs.n_full) == (partial, full)


def test_rows_before_the_first_key_visit_nothing():
    # causal, 5 queries and 2 keys: the first three rows see no key
    variant = Variant(mask=masks.causal)
    ints = PythonIntegers()
    runs = visit_runs(key_sets(variant.mask, QueryTile(0, 2, 0, 0, 5, 2), ints), 1, 2, ints)
    assert runs.n_total == 0


@pytest.mark.parametrize(
    ("mask", "most_operations", "partial", "full"),
    [
        (masks.full, 6, 1, 1),
        (masks.causal, 15, 1, 1),
        (masks.window(511, 0), 32, 2, 1),
        (masks.prefix(100), 9, 1, 1),
    ],
)
def test_common_masks_cost_few_operations_and_few_runs(mask, most_operations, partial, full):
    variant = Variant(mask=mask)
    tile = QueryTile(1024, 1151, 0, 0, 4096, 4096)
    assert check_opaque(variant, tile, 128) <= most_operations
    ints = OpaqueIntegers(())
    device = QueryTile(*(Opaque(value) for value in tile))
    runs = visit_runs(key_sets(variant.mask, device, ints), 128, device.seqlen_k, ints)
    assert (len(runs.partial), len(runs.full)) == (partial, full)


def test_a_causal_tile_visits_its_diagonal_as_partial_and_the_rest_as_full():
    ints = PythonIntegers()
    tile = QueryTile(256, 383, 0, 0, 1024, 1024)
    runs = visit_runs(key_sets(Variant(mask=masks.causal).mask, tile, ints), 128, 1024, ints)
    assert [runs.n_block(j) for j in range(runs.n_total)] == [2, 1, 0]
    assert (runs.n_partial, runs.n_full) == (1, 2)
