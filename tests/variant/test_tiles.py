"""Key tiles decided by evaluation on ranges, against brute force on every element."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from cutedsl_fa3 import masks
from cutedsl_fa3.variant import Graph, Ref, Variant, seqlen_k, seqlen_q
from cutedsl_fa3.variant.bounds import PythonIntegers, Runs, visit_runs
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.graph import Node
from cutedsl_fa3.variant.intervals import Interval, combined
from cutedsl_fa3.variant.keys import QueryTile, key_sets
from cutedsl_fa3.variant.ops import OPS
from cutedsl_fa3.variant.summaries import reader, summaries, summarise
from cutedsl_fa3.variant.tiles import Scan, by_tile, candidates, verdict

INT32 = -(2**31), 2**31 - 1
LENGTH = 60
EDGES = st.sampled_from([INT32[0], INT32[0] + 1, -(2**30), -1, 0, 1, 2**30, INT32[1] - 1, INT32[1]])


def wrapped(graph: Graph, inputs: dict, captures) -> torch.Tensor:
    """The graph's value with every integer wrapped to 32 bits, as on the device."""
    values: list[torch.Tensor] = []
    for node in graph.nodes:
        args = [values[a.id] if isinstance(a, Ref) else torch.tensor(a) for a in node.operands]
        if node.op in ("input", "const", "load"):
            names = [Node("input", (f"i{n}",), "int", frozenset()) for n in range(len(args))]
            load = Node(
                "load", (node.args[0], *map(Ref, range(len(args)))), node.dtype, node.depends
            )
            one = Graph((*names, load), len(args)) if node.op == "load" else Graph((node,), 0)
            given = {f"i{n}": value for n, value in enumerate(args)}
            value = evaluate(one, {**inputs, **given}, captures)
        else:
            value = OPS[node.op].torch(*args)
        values.append(value.to(torch.int32).long() if node.dtype == "int" else value)
    return values[graph.output]


def seen_by(variant: Variant, b: int, h: int, seqlens: tuple[int, int]) -> torch.Tensor:
    """Which query sees which key, element by element."""
    inputs = {
        "q": torch.arange(seqlens[0])[:, None],
        "k": torch.arange(seqlens[1])[None, :],
        "b": torch.tensor(b),
        "h": torch.tensor(h),
        "seqlen_q": torch.tensor(seqlens[0]),
        "seqlen_k": torch.tensor(seqlens[1]),
    }
    return wrapped(variant.mask, inputs, variant.captures).broadcast_to(seqlens)


def check(variant: Variant, seqlens: tuple[int, int], tile_m: int, tile_n: int) -> None:
    """No tile is called empty or full that is not, whatever decides: verdict alone, or Scan."""
    mask, captures = variant.mask, variant.captures
    if mask is None:
        return
    note(variant.text)
    ints = PythonIntegers(captures)
    table = summarise(mask, captures, 2, 2, *seqlens, tile_m, tile_n)
    for b in range(2 if "b" in mask.inputs else 1):
        for h in range(2 if "h" in mask.inputs else 1):
            seen = seen_by(variant, b, h, seqlens)
            read = reader(mask, table, b, h)
            for m, q0 in enumerate(range(0, seqlens[0], tile_m)):
                tile = QueryTile(q0, min(q0 + tile_m, seqlens[0]) - 1, b, h, *seqlens)
                scan = Scan(mask, tile, m, tile_n, ints, read)
                for n, k0 in enumerate(range(0, seqlens[1], tile_n)):
                    k1 = min(k0 + tile_n, seqlens[1]) - 1
                    there = seen[q0 : tile.q1 + 1, k0 : k1 + 1]

                    def ranges(i: int, read=read, blocks=(m, n)) -> tuple:
                        return read(i, blocks[summaries(mask)[i].position == "k"])

                    possible, hidden = verdict(mask, tile, k0, k1, ints, ranges)
                    assert possible or not there.any()
                    assert hidden or there.all()
                    visited, masked = scan.decide(n)
                    assert visited or not there.any()
                    assert masked or not visited or (there.all() and k0 + tile_n <= seqlens[1])
                    assert not visited or (scan.first <= n < scan.end and possible)


@st.composite
def vectors(draw) -> torch.Tensor:
    """Captured integers: sorted, random, mixed with the ends of 32 bits, or a few long runs."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["sorted", "random", "extreme", "runs"]))
    values = torch.randint(-9, 10, (LENGTH,), generator=generator)
    if kind == "sorted":
        values = values.abs().sort().values
    elif kind == "extreme":
        ends = torch.tensor([*INT32, INT32[0] + 1, INT32[1] - 1, 2**30, -(2**30)])
        picked = ends[torch.randint(0, len(ends), (LENGTH,), generator=generator)]
        values = torch.where(values > 0, picked, values)
    elif kind == "runs":
        values = values[torch.arange(LENGTH) // 17]
    return values.to(draw(st.sampled_from([torch.int32, torch.int64])))


DIVISORS = st.sampled_from([1, 2, 3, 4, 7, 16, 64])
COMPARE = st.sampled_from(
    [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
)
PER_BATCH = torch.arange(2 * LENGTH, dtype=torch.int32).reshape(2, LENGTH) // 11
PER_HEAD = (torch.arange(2 * LENGTH).reshape(2, LENGTH) % 23 - 5).to(torch.int16)
GRID = torch.randint(-3, 4, (4, 5), generator=torch.Generator().manual_seed(1))
FLOATS = torch.linspace(-1, 1, LENGTH)
LENGTHS = torch.tensor([17, 40])
FLAGS = torch.arange(LENGTH) % 20 < 12


@st.composite
def numbers(draw, depth: int = 3):
    """An integer expression of b, h, q, k and captured tensors, as a function."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        vector = draw(vectors())
        return draw(
            st.sampled_from(
                [
                    lambda b, h, q, k: q,
                    lambda b, h, q, k: k,
                    lambda b, h, q, k: vector[q],
                    lambda b, h, q, k: vector[k],
                    lambda b, h, q, k: vector[vector[k]],
                    lambda b, h, q, k: vector[k] * 3 + k,
                    lambda b, h, q, k: vector[q - 5] - q,
                    lambda b, h, q, k: PER_BATCH[b, q],
                    lambda b, h, q, k: PER_HEAD[h, k],
                    lambda b, h, q, k: LENGTHS[b] + 0,
                    lambda b, h, q, k: LENGTHS[h & 1],
                    lambda b, h, q, k: vector[q - k],
                    lambda b, h, q, k: GRID[q // 16, k // 16],
                    lambda b, h, q, k: GRID[vector[q], vector[k]],
                    lambda b, h, q, k: q + (seqlen_k - seqlen_q),
                ]
            )
        )
    a, b = draw(numbers(depth - 1)), draw(numbers(depth - 1))
    number = draw(st.integers(-40, 40) | EDGES)
    divisor = draw(DIVISORS)
    return draw(
        st.sampled_from(
            [
                lambda *x: a(*x) + b(*x),
                lambda *x: a(*x) - b(*x),
                lambda *x: a(*x) * b(*x),
                lambda *x: a(*x) * number,
                lambda *x: a(*x) + number,
                lambda *x: number - a(*x),
                lambda *x: -a(*x),
                lambda *x: abs(a(*x)),
                lambda *x: torch.minimum(a(*x), b(*x)),
                lambda *x: torch.maximum(a(*x), b(*x)),
                lambda *x: a(*x) // divisor,
                lambda *x: a(*x) // -divisor,
                lambda *x: torch.div(a(*x), divisor, rounding_mode="trunc"),
                lambda *x: a(*x) % divisor,
                lambda *x: torch.fmod(a(*x), divisor),
                lambda *x: a(*x) >> 3,
                lambda *x: a(*x) << 2,
                lambda *x: a(*x) & b(*x),
                lambda *x: a(*x) & (divisor - 1),
                lambda *x: a(*x) & -divisor,
                lambda *x: a(*x) | b(*x),
                lambda *x: a(*x) ^ b(*x),
                lambda *x: ~a(*x),
                lambda *x: torch.where(a(*x) < b(*x), a(*x), b(*x)),
                lambda *x: (a(*x) < b(*x)) * 5 + 1,
            ]
        )
    )


@st.composite
def conditions(draw, depth: int = 2):
    """A mask built from comparisons of such expressions, and conditions of one position."""
    if depth == 0 or draw(st.booleans()):
        a, b, compare = draw(numbers()), draw(numbers()), draw(COMPARE)
        simple = lambda *x: compare(a(*x), b(*x))  # noqa: E731
        return draw(
            st.sampled_from(
                [
                    simple,
                    simple,
                    masks.causal,
                    masks.window(9, 4),
                    lambda b, h, q, k: FLAGS[k],
                    lambda b, h, q, k: FLOATS[q] * 2 < 0.3,
                    lambda b, h, q, k: FLOATS[q] < FLOATS[k],
                ]
            )
        )
    a, b, c = (draw(conditions(depth - 1)) for _ in range(3))
    return draw(
        st.sampled_from(
            [
                lambda *x: a(*x) & b(*x),
                lambda *x: a(*x) | b(*x),
                lambda *x: a(*x) ^ b(*x),
                lambda *x: ~(a(*x) & (x[3] >= 0)),
                lambda *x: torch.where(a(*x), b(*x), c(*x)),
            ]
        )
    )


@given(
    mask=conditions(),
    seqlens=st.tuples(st.integers(1, LENGTH), st.integers(1, LENGTH)),
    sizes=st.sampled_from([(16, 16), (24, 16), (8, 32), (1, 1)]),
)
@settings(max_examples=120, deadline=None)
def test_no_visible_tile_is_left_out_and_no_hidden_element_goes_unmasked(mask, seqlens, sizes):
    if sizes == (1, 1):
        seqlens = (min(seqlens[0], 12), min(seqlens[1], 12))
    check(Variant(mask=mask), seqlens, *sizes)


@given(
    keys=st.tuples(vectors(), vectors()),
    others=st.tuples(vectors(), vectors(), vectors()),
    compare=COMPARE,
    seqlens=st.tuples(st.integers(1, LENGTH), st.integers(1, LENGTH)),
)
@settings(max_examples=100, deadline=None)
def test_values_at_the_ends_of_an_equality_leave_no_visible_tile_out(
    keys, others, compare, seqlens
):
    a, b, c = others

    def packed(b_, h, q, k):
        inside = compare(q - a[keys[0][q]], k - b[k]) | (c[k] == 3)
        return (keys[0][q] == keys[1][k]) & inside

    assert len(summaries(Variant(mask=packed).mask)) == 11
    check(Variant(mask=packed), seqlens, 16, 16)


@given(
    op=st.sampled_from(["add", "sub", "mul", "neg", "abs", "bit_or", "bit_xor", "bit_and", "shl"]),
    data=st.data(),
)
@settings(max_examples=400, deadline=None)
def test_ranges_whose_operation_may_wrap_hold_every_wrapped_value(op, data):
    def interval() -> Interval:
        ends = sorted(data.draw(st.lists(EDGES | st.integers(*INT32), min_size=2, max_size=2)))
        return Interval(*ends)

    args = [interval() for _ in range(OPS[op].arity)]
    if op == "shl":
        shift = data.draw(st.integers(0, 30))
        args[1] = Interval(shift, shift, shift, shift, True)
    found = combined(PythonIntegers(), op, tuple(args))
    for _ in range(8):
        at = [torch.tensor(data.draw(st.integers(a.low, a.high))) for a in args]
        value = OPS[op].torch(*at).to(torch.int32).item()
        assert found.low <= value <= found.high


DOCUMENT = torch.arange(4096) // 300

BY_TILE = {
    "documents": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (k <= q),
    "flags of keys": lambda b, h, q, k: FLAGS[k] & (k <= q),
    "floats of keys": lambda b, h, q, k: FLOATS[k] > 0.5,
    "per batch": lambda b, h, q, k: PER_BATCH[b, q] >= PER_BATCH[b, k],
    "strided blocks": lambda b, h, q, k: (k // 128) % 4 == 0,
    "strided blocks under a captured length": lambda b, h, q, k: (
        (k < LENGTHS[b]) & ((k // 128) % 4 == 0)
    ),
    "local or strided blocks": lambda b, h, q, k: (
        (k <= q) & ((q // 64 == k // 64) | ((k // 64) % 8 == 7))
    ),
    "wide strides": lambda b, h, q, k: (k // 8192) % 2 == 0,
    "a checkerboard": lambda b, h, q, k: (q // 256 + k // 256) % 2 == 0,
}
BY_RUNS = {
    "everything": masks.full,
    "nothing": masks.none,
    "causal": masks.causal,
    "window": masks.window(511, 0),
    "captured window": lambda b, h, q, k: (k <= q) & (q - k < LENGTHS[b]),
    "prefix": masks.prefix(torch.tensor([5, 7])),
    "chunks": lambda b, h, q, k: (k // 256 == q // 256) & (k <= q),
    "heads": lambda b, h, q, k: (h % 2 == 0) | (k <= q),
    "dilated": lambda b, h, q, k: (k <= q) & ((q - k) % 4 == 0),
    "read by both": lambda b, h, q, k: DOCUMENT[q - k] == 0,
    "floats": lambda b, h, q, k: FLOATS[q] < FLOATS[k],
}


@pytest.mark.parametrize("name", BY_TILE)
def test_masks_whose_tiles_are_no_few_intervals_are_decided_by_tile(name):
    assert by_tile(Variant(mask=BY_TILE[name]).mask)


@pytest.mark.parametrize("name", BY_RUNS)
def test_masks_that_few_intervals_hold_are_not(name):
    assert not by_tile(Variant(mask=BY_RUNS[name]).mask)


def test_a_tile_of_one_document_needs_no_mask_and_one_of_another_no_visit():
    variant = Variant(mask=lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k])
    table = summarise(variant.mask, variant.captures, 1, 1, 4096, 4096, 100, 100)
    scan = Scan(
        variant.mask,
        QueryTile(300, 399, 0, 0, 4096, 4096),
        3,
        100,
        PythonIntegers(variant.captures),
        reader(variant.mask, table, 0, 0),
    )
    decided = {n: scan.decide(n) for n in range(41)}
    assert decided[2] == (False, True)
    assert decided[3] == decided[4] == decided[5] == (True, False)
    assert not decided[6][0]


def test_a_table_of_pairs_of_documents_is_read_where_a_tile_has_one_or_two_neighbours():
    seen = torch.eye(15, dtype=torch.bool)
    seen[3, 1] = True
    variant = Variant(mask=lambda b, h, q, k: seen[DOCUMENT[q], DOCUMENT[k]])
    table = summarise(variant.mask, variant.captures, 1, 1, 4096, 4096, 100, 100)
    read = reader(variant.mask, table, 0, 0)
    ints, tile = PythonIntegers(variant.captures), QueryTile(900, 999, 0, 0, 4096, 4096)
    scan = Scan(variant.mask, tile, 9, 100, ints, read)
    decided = {n: scan.decide(n) for n in range(41)}
    assert [n for n, (visited, _) in decided.items() if visited] == [3, 4, 5, 9, 10, 11]
    assert not any(decided[n][1] for n in (3, 4, 5, 9, 10, 11))


@given(runs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=5))
def test_candidates_are_the_hull_of_the_runs_that_are_not_empty(runs):
    first, end = candidates(Runs(tuple(runs[:2]), tuple(runs[2:]), PythonIntegers()))
    there = [n for start, count in runs for n in range(start, start + count)]
    assert (first, end) == (min(there), max(there) + 1) if there else first >= end


@pytest.mark.parametrize("name", ["window", "causal", "captured window"])
def test_the_runs_alone_decide_where_ranges_say_nothing(name):
    variant = Variant(mask=BY_RUNS[name])
    ints = PythonIntegers(variant.captures)
    tile = QueryTile(512, 639, 0, 0, 1024, 1000)
    runs = visit_runs(key_sets(variant.mask, tile, ints), 128, 1000, ints)
    scan = Scan(variant.mask, tile, 4, 128, ints, reader(variant.mask, None, 0, 0))
    found = [(n, scan.decide(n)[1]) for n in range(8) if scan.decide(n)[0]]
    listed = [(runs.n_block(j), j < runs.n_partial) for j in range(runs.n_total)]
    assert sorted(found) == sorted(listed)
