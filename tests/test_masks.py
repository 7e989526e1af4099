"""Every shipped mask against its definition, pair by pair, in plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3 import masks, packing
from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.evaluate import evaluate

LENGTHS = st.integers(1, 40)
SIZES = st.integers(1, 9)


def shown(mask: masks.Mask, seqlen_q: int, seqlen_k: int, b: int = 0, h: int = 0) -> torch.Tensor:
    """What a mask shows of each query's keys, as the reference reads it."""
    variant = Variant(mask=mask)
    if variant.mask is None:
        return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    inputs = {
        "b": b,
        "h": h,
        "q": torch.arange(seqlen_q)[:, None],
        "k": torch.arange(seqlen_k),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
    }
    return evaluate(variant.mask, inputs, variant.captures).expand(seqlen_q, seqlen_k)


def agree(
    mask: masks.Mask,
    seqlen_q: int,
    seqlen_k: int,
    defined: Callable[[int, int], bool],
    b: int = 0,
    h: int = 0,
) -> None:
    """`defined(p, k)` says whether the query at key position p sees key k."""
    found = shown(mask, seqlen_q, seqlen_k, b, h).tolist()
    shift = seqlen_k - seqlen_q
    assert found == [[defined(q + shift, k) for k in range(seqlen_k)] for q in range(seqlen_q)]


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.integers(-1, 12), st.integers(-1, 12), st.booleans())
def test_a_window_has_both_of_its_ends(seqlen_q, seqlen_k, left, right, causal):
    def defined(p, k):
        before, after = p - k, k - p
        return (left == -1 or before <= left) and (
            after <= 0 if causal else right == -1 or after <= right
        )

    agree(masks.window(left, right, causal=causal), seqlen_q, seqlen_k, defined)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.integers(0, 45))
def test_a_prefix_is_seen_by_all_and_the_rest_causally(seqlen_q, seqlen_k, length):
    agree(masks.prefix(length), seqlen_q, seqlen_k, lambda p, k: k < length)
    agree(masks.prefix_lm(length), seqlen_q, seqlen_k, lambda p, k: k < length or k <= p)
    lengths = torch.tensor([0, length])
    agree(masks.prefix(lengths), seqlen_q, seqlen_k, lambda p, k: k < length, b=1)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.integers(0, 40), st.integers(0, 40))
def test_padding_hides_what_lies_beside_the_sequences(seqlen_q, seqlen_k, many_k, many_q):
    many_k, many_q = min(many_k, seqlen_k), min(many_q, seqlen_q)
    key_lengths, query_lengths = torch.tensor([1, many_k]), torch.tensor([1, many_q])
    for side in ("right", "left"):
        keys = range(many_k) if side == "right" else range(seqlen_k - many_k, seqlen_k)
        queries = range(many_q) if side == "right" else range(seqlen_q - many_q, seqlen_q)
        found = shown(masks.padding(key_lengths, side=side), seqlen_q, seqlen_k, b=1)
        assert found.tolist() == [[k in keys for k in range(seqlen_k)]] * seqlen_q
        both = masks.padding(key_lengths, query_lengths, side=side)
        found = shown(both, seqlen_q, seqlen_k, b=1)
        assert found.tolist() == [
            [q in queries and k in keys for k in range(seqlen_k)] for q in range(seqlen_q)
        ]


@settings(deadline=None)
@given(st.data(), LENGTHS, LENGTHS)
def test_documents_are_equal_ids_sorted_or_not(data, seqlen_q, seqlen_k):
    ids = data.draw(st.lists(st.integers(-2, 3), min_size=seqlen_k, max_size=seqlen_k))
    others = data.draw(st.lists(st.integers(-2, 3), min_size=seqlen_q, max_size=seqlen_q))

    def same(p, k):
        return p >= 0 and ids[p] == ids[k]

    agree(masks.documents(torch.tensor(ids)), seqlen_q, seqlen_k, same)
    batched = torch.tensor([[9] * seqlen_k, ids], dtype=torch.int16)
    agree(masks.documents(batched), seqlen_q, seqlen_k, same, b=1)
    causal = masks.and_masks(masks.causal, masks.documents(batched))
    agree(causal, seqlen_q, seqlen_k, lambda p, k: same(p, k) and k <= p, b=1)

    crossed = masks.documents(torch.tensor(others), torch.tensor([ids]))
    found = shown(crossed, seqlen_q, seqlen_k)
    assert found.tolist() == [[other == own for own in ids] for other in others]


PARTS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@settings(deadline=None)
@given(PARTS, st.integers(0, 5), st.integers(0, 3))
def test_a_packed_mask_treats_each_document_as_if_it_were_alone(lengths, left, padding):
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    total = sum(lengths)
    ids = packing.document_ids(offsets.int(), total + padding)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [d for d, many in enumerate([*lengths, padding]) for _ in range(many)]
    for inner in (masks.causal, masks.window(left, 1), masks.prefix_lm(2), masks.chunked(3)):
        expected = torch.zeros(total, total, dtype=torch.bool)
        for start, many in zip(offsets.tolist(), lengths, strict=False):
            own = slice(start, start + many)
            expected[own, own] = shown(inner, many, many)
        mask = masks.packed(inner, ids[:total], offsets)
        assert torch.equal(shown(mask, total, total), expected)
        batched = masks.packed(inner, ids[None, :total], offsets[None])
        assert torch.equal(shown(batched, total, total), expected)
        last = total // 2 + 1  # as a decoder has it that already holds the first half
        assert torch.equal(shown(mask, last, total), expected[-last:])


@settings(deadline=None)
@given(st.lists(st.integers(-2, 2), min_size=1, max_size=30), LENGTHS)
def test_a_span_is_a_run_of_equal_ids_from_0(ids, seqlen_q):
    def defined(p, k):
        between = range(min(p, k), max(p, k) + 1)
        return p >= 0 and ids[p] >= 0 and all(ids[i] == ids[p] for i in between)

    starts, ends = packing.span_bounds(torch.tensor(ids))
    assert starts.dtype == ends.dtype == torch.int32
    agree(masks.spans(starts, ends), seqlen_q, len(ids), defined)
    both = packing.span_bounds(torch.tensor([[9] * len(ids), ids], dtype=torch.int8))
    agree(masks.spans(*both), seqlen_q, len(ids), defined, b=1)


def test_a_packed_query_before_the_first_key_is_of_no_document():
    ids, offsets = torch.tensor([0, 0]), torch.tensor([0, 2])
    found = shown(masks.packed(masks.full, ids, offsets), 3, 2)
    assert found.tolist() == [[False, False], [True, True], [True, True]]


@st.composite
def trees(draw) -> list[int]:
    """Parents in depth-first order: each the token before, or one of its ancestors, or none."""
    parents: list[int] = []
    for token in range(draw(st.integers(1, 24))):
        path, at = [-1], token - 1
        while at >= 0:
            path.append(at)
            at = parents[at]
        parents.append(draw(st.sampled_from(path)))
    return parents


@settings(deadline=None)
@given(trees(), st.integers(1, 30))
def test_a_tree_shows_the_ancestors(parents, seqlen_q):
    def defined(p, k):
        while p >= 0:
            if p == k:
                return True
            p = parents[p]
        return False

    ends = packing.tree_ends(parents)
    assert ends.dtype == torch.int32
    agree(masks.tree(ends), seqlen_q, len(parents), defined)
    agree(masks.tree(ends[None]), seqlen_q, len(parents), defined)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, SIZES, st.integers(1, 4))
def test_chunks_and_blocks_count_from_the_first_key(seqlen_q, seqlen_k, size, stride):
    agree(masks.chunked(size), seqlen_q, seqlen_k, lambda p, k: p // size == k // size)
    agree(masks.block_causal(size), seqlen_q, seqlen_k, lambda p, k: k // size <= p // size)
    agree(
        masks.block_strided(size, stride),
        seqlen_q,
        seqlen_k,
        lambda p, k: abs(p // size - k // size) % stride == 0,
    )


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.integers(0, 20), SIZES)
def test_dilated_keys_lie_whole_steps_away(seqlen_q, seqlen_k, window, step):
    def defined(p, k):
        return any(abs(p - k) == i * step for i in range(window // step + 1))

    agree(masks.dilated(window, step), seqlen_q, seqlen_k, defined)
    for unbounded in (None, -1):
        mask = masks.dilated(unbounded, step)
        agree(mask, seqlen_q, seqlen_k, lambda p, k: abs(p - k) % step == 0)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, SIZES, SIZES, st.integers(0, 9))
def test_streaming_and_global_windows_keep_their_first_tokens(
    seqlen_q, seqlen_k, first, left, right
):
    def streaming(p, k):
        return k in range(p + 1) and (k in range(first) or k in range(p - left, p + 1))

    agree(masks.streaming(first, left), seqlen_q, seqlen_k, streaming)

    def longformer(p, k):
        return p < first or k < first or k in range(p - left, p + right + 1)

    agree(masks.global_window(first, left, right), seqlen_q, seqlen_k, longformer)


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_a_neighborhood_is_the_nearest_cells_in_each_dimension(data, shape):
    kernel = [data.draw(st.sampled_from(range(1, size + 1, 2))) for size in shape]
    cells = list(itertools.product(*map(range, shape)))

    def near(own, its, size, width):
        # The window of `width` cells that lies within the grid and is centred best.
        starts = range(size - width + 1)
        start = min(starts, key=lambda first: abs(first + width // 2 - own))
        return its in range(start, start + width)

    def defined(p, k):
        dimensions = zip(cells[p], cells[k], shape, kernel, strict=True)
        return all(near(*dimension) for dimension in dimensions)

    agree(masks.neighborhood(shape, kernel), len(cells), len(cells), defined)
    smallest = min(kernel)
    same = masks.neighborhood(tuple(shape), smallest)
    each = masks.neighborhood(shape, [smallest] * len(shape))
    assert torch.equal(shown(same, *[len(cells)] * 2), shown(each, *[len(cells)] * 2))


@settings(deadline=None)
@given(st.integers(1, 30), SIZES, st.integers(2, 4), st.integers(0, 999))
def test_a_block_table_marks_blocks_of_keys_for_blocks_of_positions(seqlen, size, rank, seed):
    blocks = -(-seqlen // size)
    shape = (2, 3, blocks, blocks)[4 - rank :]
    table = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    own = table.expand(2, 3, blocks, blocks)[1, 2].tolist()
    agree(
        masks.block_sparse(table, size),
        seqlen,
        seqlen,
        lambda p, k: own[p // size][k // size],
        b=1,
        h=2,
    )


def test_negative_positions_of_a_block_table_read_its_first_row():
    table = torch.tensor([[True, False], [True, True]])
    found = shown(masks.block_sparse(table, 2), 6, 4)
    assert found[:4].tolist() == [[True, True, False, False]] * 4


IDS = torch.zeros(8, dtype=torch.int32)
FLOAT = torch.zeros(8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: masks.padding(None), r"masks\.padding: key_lengths is None; valid is a tensor"),
        (lambda: masks.padding(IDS, FLOAT), r"masks\.padding: query_lengths is float32 of shape"),
        (
            lambda: masks.padding(IDS[None]),
            r"\(1, 8\); valid are int64.* of shape \(batch,\)",
        ),
        (lambda: masks.padding(IDS, side="top"), r"side is 'top'; valid are 'right' and 'left'"),
        (lambda: masks.documents([0, 1]), r"masks\.documents: ids is \[0, 1\]; valid is a tensor"),
        (lambda: masks.documents(FLOAT), r"masks\.documents: ids is float32 of shape \(8,\)"),
        (lambda: masks.documents(IDS, FLOAT), r"masks\.documents: key_ids is float32"),
        (lambda: masks.documents(IDS[None, None]), r"\(seqlen,\) or \(batch, seqlen\)"),
        (lambda: masks.packed(IDS, IDS, IDS), r"masks\.packed: argument 0 is tensor.*functions"),
        (lambda: masks.packed(masks.full, FLOAT, IDS), r"masks\.packed: ids is float32"),
        (lambda: masks.packed(masks.full, IDS, 3), r"masks\.packed: offsets is 3; valid is a"),
        (lambda: packing.document_ids(IDS, 0), r"document_ids: seqlen is 0; valid are ints from 1"),
        (lambda: packing.document_ids(IDS[None], 8), r"document_ids: offsets is int32 of shape"),
        (lambda: masks.spans(FLOAT, IDS), r"masks\.spans: starts is float32"),
        (lambda: masks.spans(IDS, FLOAT), r"masks\.spans: ends is float32"),
        (lambda: packing.span_bounds(FLOAT), r"packing\.span_bounds: ids is float32"),
        (lambda: masks.tree(FLOAT), r"masks\.tree: ends is float32"),
        (lambda: packing.tree_ends([-1, 0, 0, 1]), r"the parent of token 3 is 1; valid are -1"),
        (lambda: packing.tree_ends([0]), r"the parent of token 0 is 0"),
        (lambda: packing.tree_ends([-1, None]), r"the parent of token 1 is None"),
        (lambda: masks.chunked(0), r"masks\.chunked: size is 0; valid are ints from 1"),
        (lambda: masks.block_causal(1.0), r"masks\.block_causal: size is 1\.0"),
        (lambda: masks.block_strided(8, 0), r"masks\.block_strided: stride is 0"),
        (lambda: masks.dilated(-2, 2), r"masks\.dilated: window is -2; valid are ints from 0"),
        (lambda: masks.dilated(2, 0), r"masks\.dilated: dilation is 0; valid are ints from 1"),
        (lambda: masks.streaming(-1, 4), r"masks\.streaming: sinks is -1; valid are ints from 0"),
        (lambda: masks.streaming(4, None), r"masks\.streaming: left is None"),
        (lambda: masks.global_window(4, 4, True), r"masks\.global_window: right is True"),
        (lambda: masks.neighborhood(32, 3), r"shape is 32; valid are sizes such as \(32, 32\)"),
        (lambda: masks.neighborhood((8, 0), 3), r"shape\[1\] is 0; valid are ints from 1"),
        (lambda: masks.neighborhood((8, 8), 4), r"kernel\[0\] is 4; valid are odd sizes up to"),
        (lambda: masks.neighborhood((8, 2), 3), r"kernel\[1\] is 3; .* up to the grid's 2"),
        (lambda: masks.neighborhood((8, 8), (3,)), r"kernel has 1 sizes; valid are one, and 2"),
        (lambda: masks.block_sparse(IDS, 8), r"masks\.block_sparse: table is int32.*bool of shape"),
        (lambda: masks.block_sparse(IDS[None].bool(), 0), r"masks\.block_sparse: size is 0"),
    ],
)
def test_wrong_arguments_are_refused_by_function_and_argument(make, words):
    with pytest.raises(VariantError, match=words):
        make()


def test_captured_ids_are_read_anew_and_need_no_new_variant():
    ids = torch.tensor([0, 0, 1])
    variant = Variant(mask=masks.documents(ids))
    assert variant.captures == (ids,)
    other = Variant(mask=masks.documents(torch.zeros(9, dtype=torch.int64)))
    assert variant.text == other.text


@pytest.mark.parametrize("worst", [2**31, -(2**31) - 1, 2**40])
def test_document_ids_that_would_count_as_equal_are_refused(worst):
    ids = torch.tensor([1, worst, 2])
    for make in (masks.documents, lambda t: masks.documents(torch.tensor([1]), t)):
        with pytest.raises(VariantError, match=rf"holds {worst}; valid are 32-bit"):
            make(ids)
    masks.documents(torch.tensor([2**31 - 1, 1 - 2**31]))
