"""Variants by name: every form of one shows the same keys and gives the same numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3 import reference
from cutedsl_fa3.cases import VARIANTS, Case
from cutedsl_fa3.checks import exact_rows, rounded_rows
from cutedsl_fa3.named import EXAMPLES, Lengths, named, visible_pairs


def small(name: str) -> str:
    """The example with numbers that matter at short lengths."""
    for number, smaller in (("1024", "9"), ("256", "11"), ("1000", "13")):
        name = name.replace(number, smaller)
    return name


def test_window_pairs_are_counted_exactly() -> None:
    lengths = Lengths(heads=1, seqlen_q=50, seqlen_k=70)
    inside = sum(0 <= k <= q + 20 and k >= q + 20 - 7 for q in range(50) for k in range(70))
    assert visible_pairs("window:7,0", lengths) == inside


@pytest.mark.parametrize("lengths", [(33, 47), (33, 33), (47, 33)])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_named_variant_and_its_flex_functions_agree(name: str, lengths: tuple) -> None:
    case = Case(small(name), "bf16", 64, 64, *lengths, 1, 4, 4)
    inputs = case.inputs("cpu")
    whole = reference.attention(
        inputs.q, inputs.k, inputs.v, inputs.named.variant, dtype=torch.float64
    )
    rows = [0, 5, lengths[0] - 1]
    found = exact_rows(inputs, 0, 3, rows)
    torch.testing.assert_close(found, whole[0, rows, 3], rtol=1e-10, atol=1e-12)
    rounded = rounded_rows(inputs, 0, 3, rows)
    torch.testing.assert_close(rounded.double(), found, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("left", [-1, 0, 7])
@pytest.mark.parametrize("right", [-1, 0, 3])
def test_a_named_window_shows_every_kernel_the_same_keys(left: int, right: int) -> None:
    chosen = named(f"window:{left},{right}", Lengths(heads=1, seqlen_q=20, seqlen_k=30))
    q, k, v = (torch.ones(1, n, 1, 1) for n in (20, 30, 30))
    v[0, :, 0, 0] = torch.arange(30)
    ours = reference.attention(q, k, v, chosen.variant)
    i, j = torch.arange(20)[:, None], torch.arange(30)[None, :]
    by_function = torch.ones(20, 30, dtype=torch.bool)
    if chosen.mask is not None:
        by_function &= chosen.mask(0, 0, i, j)
    before, after = chosen.window or (None, None)
    by_option = torch.ones(20, 30, dtype=torch.bool)
    if before is not None:
        by_option &= j >= i + 10 - before
    if after is not None:
        by_option &= j <= i + 10 + after
    assert torch.equal(by_function, by_option)
    means = (by_function * torch.arange(30.0)).sum(1) / by_function.sum(1)
    torch.testing.assert_close(ours[0, :, 0, 0].float(), means)


@pytest.mark.parametrize(
    "name",
    ["nothing", "window:1", "softcap:x", "softcap:nan", "causal:3", "documents:0", "sink:1"],
)
def test_an_unknown_variant_or_wrong_numbers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="variant"):
        named(name, Lengths(1, 8, 8))


def test_every_variant_of_the_record_has_an_example() -> None:
    kinds = {name.partition(":")[0] for name in EXAMPLES}
    assert {name.partition(":")[0] for name in VARIANTS} == kinds - {"laborious"}


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 70))
def test_pairs_of_documents_are_those_that_the_mask_shows(q: int, k: int, mean: int) -> None:
    lengths = Lengths(heads=1, seqlen_q=q, seqlen_k=k)
    mask = named(f"documents:{mean}", lengths).mask
    shown = torch.broadcast_to(mask(0, 0, torch.arange(q)[:, None], torch.arange(k)), (q, k))
    assert visible_pairs(f"documents:{mean}", lengths) == shown.sum()


def test_documents_are_sorted_of_the_mean_length_and_the_same_every_time() -> None:
    def ids() -> torch.Tensor:
        (found,) = named("documents:1000", Lengths(1, 65536, 65536)).variant.captures
        return found

    found = ids()
    assert found.dtype == torch.int32 and torch.equal(found, ids())
    steps = found.diff()
    assert int(steps.min()) == 0 and int(steps.max()) == 1
    assert len(found) / (int(found[-1]) + 1) == pytest.approx(1000, rel=0.01)
    lengths = found.bincount()
    assert int(lengths.max()) > 2 * int(lengths.min())


def test_pairs_of_long_documents_are_known_without_looking_at_each(monkeypatch) -> None:
    monkeypatch.setattr("cutedsl_fa3.named._counted", lambda mask, lengths: pytest.fail())
    length = 1 << 20
    pairs = visible_pairs("documents:1000", Lengths(1, length, length))
    assert length < pairs < 4 * 1000 * length


def test_the_values_of_bias_and_sink_differ_by_head_and_not_by_run() -> None:
    lengths = Lengths(heads=4, seqlen_q=16, seqlen_k=16)
    for name, shape in (("bias", (4, 31)), ("sink", (4,))):
        (first,), (second,) = (named(name, lengths).variant.captures for _ in range(2))
        assert first.shape == shape and torch.equal(first, second)
        assert len(first.reshape(4, -1)[:, 0].unique()) == 4


def test_a_bias_is_read_by_distance_without_leaving_its_table() -> None:
    lengths = Lengths(heads=2, seqlen_q=8, seqlen_k=12)
    chosen = named("bias", lengths)
    (table,) = chosen.variant.captures
    assert table.shape == (2, 23)
    h, q, k = torch.meshgrid(*(torch.arange(n) for n in (2, 8, 12)), indexing="ij")
    assert torch.equal(chosen.score(torch.zeros(()), 0, h, q, k), table[h, k - q + 11])


def test_weights_of_sigmoid_are_not_normalised_and_sinks_take_their_share() -> None:
    lengths = Lengths(heads=2, seqlen_q=4, seqlen_k=4)
    q, k, v = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), torch.ones(1, 4, 2, 8)
    keys = torch.arange(1, 5.0)
    out = reference.attention(q, k, v, named("sigmoid", lengths).variant)
    # A score of 0 weighs sigmoid(-log 4) = 1/5, and row i sees i + 1 keys.
    torch.testing.assert_close(out[0, :, 0, 0], keys / 5)
    chosen = named("sink", lengths)
    out = reference.attention(q, k, v, chosen.variant)
    torch.testing.assert_close(out[0, :, 1, 0], keys / (keys + chosen.sink[1].exp()))
