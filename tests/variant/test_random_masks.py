"""Random masks and scores: every reader against eager torch at every score."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from random_variants import Written, masks, positions, scores, variants

from cutedsl_fa3 import reference
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.visits import all_visits

SIZES = st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 90), st.integers(1, 90))


def read(written: Written, role: str, s: torch.Tensor) -> torch.Tensor:
    variant = written.variant()
    note(variant.text)
    graph = variant.graphs.get(role)
    if graph is None:
        return torch.ones_like(s, dtype=torch.bool) if role == "mask" else s
    inputs = {"score": s, **positions(*s.shape), "seqlen_q": s.shape[2], "seqlen_k": s.shape[3]}
    return torch.broadcast_to(evaluate(graph, inputs, variant.captures), s.shape)


def scores_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3


@given(written=masks(), shape=SIZES)
@settings(max_examples=400)
def test_masks_show_the_keys_that_eager_torch_shows(written, shape):
    assert torch.equal(read(written, "mask", scores_of(shape)), written.visible(*shape))


@given(written=scores(), shape=SIZES)
@settings(max_examples=300)
def test_scores_are_those_of_eager_torch_to_the_bit(written, shape):
    s = scores_of(shape)
    expected = written.scored(s).float()
    torch.testing.assert_close(read(written, "score", s), expected, rtol=0, atol=0, equal_nan=True)


@given(written=variants(), shape=SIZES)
@settings(max_examples=100)
def test_the_reference_is_a_softmax_of_those_scores_over_those_keys(written, shape):
    batch, heads, seqlen_q, seqlen_k = shape
    g = torch.Generator().manual_seed(1)
    q = torch.randn(batch, seqlen_q, heads, 8, generator=g, dtype=torch.float64)
    k, v = (
        torch.randn(batch, seqlen_k, heads, 8, generator=g, dtype=torch.float64) for _ in range(2)
    )
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    logits = torch.where(written.visible(*shape), written.scored(s).double(), -torch.inf)
    out, lse = reference.attention_with_lse(q, k, v, written.variant(), dtype=torch.float64)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    weights = torch.exp(logits - lse[..., None]).nan_to_num(nan=0.0)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@given(
    written=masks(),
    shape=st.tuples(st.just(2), st.just(2), st.integers(1, 200), st.integers(1, 200)),
    tile=st.sampled_from([(16, 16), (64, 32), (128, 128), (192, 80)]),
)
@settings(max_examples=300)
def test_no_visible_key_lies_in_a_tile_that_is_not_visited_and_no_hidden_one_in_a_full_tile(
    written, shape, tile
):
    variant = written.variant()
    note(variant.text)
    visible = written.visible(*shape)
    visits = all_visits(variant.mask, variant.captures, *shape, *tile)
    pad = (-shape[3] % tile[1], -shape[2] % tile[0])
    for b in range(shape[0]):
        for h in range(shape[1]):
            beyond = torch.nn.functional.pad(~visible[b, h], (0, pad[0], 0, 0), value=True)
            rows = torch.nn.functional.pad(beyond, (0, 0, 0, pad[1]), value=True)
            hidden = rows.unfold(0, tile[0], tile[0]).unfold(1, tile[1], tile[1])
            inside = torch.nn.functional.pad(beyond, (0, 0, 0, pad[1]), value=False)
            some = inside.unfold(0, tile[0], tile[0]).unfold(1, tile[1], tile[1])
            entries = visits[b, h].long()
            listed = entries.clamp(min=0)
            visited = torch.zeros(hidden.shape[:2], dtype=torch.bool)
            full = torch.zeros_like(visited)
            for m in range(hidden.shape[0]):
                mine = listed[m][entries[m] >= 0]
                assert len((mine // 2).unique()) == len(mine)
                visited[m, mine // 2] = True
                full[m, mine[mine % 2 == 0] // 2] = True
            assert not (~hidden.all(-1).all(-1) & ~visited).any(), "a visible key is not visited"
            assert not (some.any(-1).any(-1) & full).any(), "a hidden key lies in a full tile"


@pytest.mark.slow
@given(written=variants(), shape=SIZES)
@settings(max_examples=40)
def test_the_twin_agrees_with_the_reference_within_the_rounding_of_its_input(written, shape):
    from cutedsl_fa3 import emulate

    batch, heads, seqlen_q, seqlen_k = shape
    g = torch.Generator().manual_seed(1)
    q = torch.randn(batch, seqlen_q, heads, 64, generator=g).bfloat16()
    k, v = (torch.randn(batch, seqlen_k, heads, 64, generator=g).bfloat16() for _ in range(2))
    variant = written.variant()
    note(variant.text)
    found = emulate.attention_with_visits(q, k, v, variant)
    exact, lse = reference.attention_with_lse(q, k, v, variant)
    torch.testing.assert_close(found.out.float(), exact, rtol=2e-2, atol=3e-2)
    torch.testing.assert_close(found.lse, lse, rtol=1e-4, atol=1e-4)
