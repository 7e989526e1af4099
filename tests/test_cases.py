"""Which problems are measured, and what each counts."""

from __future__ import annotations

from collections import Counter

import pytest

from cutedsl_fa3.cases import HEAD_DIMS, VARIANTS, Case, Grid, groups, head_dims
from cutedsl_fa3.problem import NATIVE


def test_flops_count_both_products_and_half_the_pairs_when_causal() -> None:
    full = Case("full", "bf16", 64, 128, 1024, 1024, 4, 8, 8)
    causal = Case("causal", "bf16", 64, 128, 1024, 1024, 4, 8, 8)
    assert full.flops == 2 * 4 * 8 * 1024 * 1024 * (64 + 128)
    assert causal.flops == full.flops / 2


def test_a_grid_is_every_combination_at_constant_tokens_and_width() -> None:
    cases = Grid(head_dims=((64, 64), (128, 128)), seqlens=(1024, 32768)).cases()
    assert Counter((case.head_dim, case.heads) for case in cases) == {(64, 32): 4, (128, 16): 4}
    assert {(case.seqlen_q, case.batch) for case in cases} == {(1024, 16), (32768, 1)}


def test_a_grid_takes_each_head_size_with_as_many_heads_as_fit_the_width() -> None:
    cases = Grid(head_dims=((96, 96), (192, 128), (256, 256)), hidden=2048).cases()
    assert {(c.head_dim, c.head_dim_v, c.heads) for c in cases} == {
        (96, 96, 21),
        (192, 128, 10),
        (256, 256, 8),
    }
    assert {case.heads for case in Grid(hidden=64).cases()} == {1}


def test_the_usual_grid_has_every_native_size_and_short_lengths_at_two_of_them() -> None:
    cases = Grid().cases()
    assert {(c.head_dim, c.head_dim_v) for c in cases} == set(HEAD_DIMS) <= set(NATIVE)
    assert {pair for pair in NATIVE if pair[0] == pair[1]} < set(HEAD_DIMS)
    assert {c.variant for c in cases} == {"full", "causal"}
    assert {c.head_dim for c in cases if c.seqlen_q == 1024} == {64, 128, 256}
    assert {(c.head_dim, c.head_dim_v) for c in cases if c.seqlen_q == 16384} == set(HEAD_DIMS)
    assert len(cases) == 30


def test_head_sizes_are_given_as_one_number_or_two() -> None:
    assert head_dims("64,192x128,8") == ((64, 64), (192, 128), (8, 8))
    assert str(Case("causal", "bf16", 192, 128, 8, 8, 1, 2, 2)).startswith("causal bf16 d192x128 ")
    assert str(Case("causal", "bf16", 64, 64, 8, 8, 1, 2, 2)).startswith("causal bf16 d64 ")


@pytest.mark.parametrize("text", ["", "64,", "64x", "x64", "64x64x64", "-64", "64.0", "d64"])
def test_what_is_no_head_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="head size"):
        head_dims(text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dims": ((64, 60),)}, "head_dim_v = 60"),
        ({"dtypes": ("fp8",)}, "fp8"),
        ({"variants": ("causa",)}, "causa"),
        ({"group": 3}, "group = 3 must divide the query heads, 32 at head_dim 64"),
    ],
)
def test_a_grid_refuses_what_cannot_be(changes: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Grid(**changes).cases()


def test_a_group_holds_every_variant_of_one_size_and_plain_causal() -> None:
    first, second = groups()
    assert [case.variant for case in first] == list(VARIANTS) and "causal" in VARIANTS
    assert {case.problem for case in first} == {("bf16", 64, 64)}
    assert {case.problem for case in second} == {("bf16", 128, 128)}
    sizes = {(c.batch, c.heads, c.kv_heads, c.seqlen_q, c.seqlen_k) for c in first + second}
    assert sizes == {(2, 16, 16, 8192, 8192)}
    (only,) = groups(["alibi", "alibi"], head_dims=((64, 64),))
    assert [case.variant for case in only] == ["alibi", "causal"]
    with pytest.raises(ValueError, match="nothing"):
        groups(["nothing"])
