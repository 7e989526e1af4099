"""What captured tensors get of a gradient: the right places, however the sums are made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3.variant import shares
from cutedsl_fa3.variant.shares import Load, add_loads


@settings(max_examples=40)
@given(
    sizes=st.tuples(*(st.integers(1, 6) for _ in range(3))),
    along=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=0, max_size=2),
    seed=st.integers(0, 99),
)
def test_every_element_goes_to_its_place_whichever_dimensions_an_index_depends_on(
    sizes, along, seed
):
    """An index that is the same along a dimension is summed along it first."""
    generator = torch.Generator().manual_seed(seed)
    gradient, factor = (torch.randn(sizes, generator=generator).double() for _ in range(2))
    seen = torch.rand(sizes, generator=generator) < 0.7
    indices = [
        torch.randint(-2, 7, [n if moves else 1 for n, moves in zip(sizes, each, strict=True)],
                      generator=generator)
        for each in along
    ]  # fmt: skip
    shape = [5, 4][: len(along)]
    totals = {3: torch.zeros(shape, dtype=torch.float64)}
    add_loads(totals, [Load(3, factor, indices)], gradient, seen)
    wanted = torch.zeros(shape, dtype=torch.float64)
    for cell in torch.cartesian_prod(*(torch.arange(n) for n in sizes)).tolist():
        at = tuple(
            int(index.expand(sizes)[tuple(cell)].clamp(0, size - 1))
            for index, size in zip(indices, shape, strict=True)
        )
        if seen[tuple(cell)]:
            wanted[at] += gradient[tuple(cell)] * factor[tuple(cell)]
    torch.testing.assert_close(totals[3], wanted)


def test_what_is_hidden_adds_nothing_even_if_it_is_not_finite():
    gradient = torch.tensor([1.0, torch.nan, torch.inf])
    totals = {0: torch.zeros(())}
    seen = torch.tensor([True, False, False])
    add_loads(totals, [Load(0, torch.ones(3), [])], gradient, seen)
    assert totals[0] == 1.0


@pytest.mark.parametrize("size", [1, 7, 1 << 12, 1 << 21])
def test_sums_apart_are_the_sums_of_their_parts(size):
    """As a GPU makes them, where many elements of one place would be added one by one."""
    generator = torch.Generator().manual_seed(size)
    place = torch.randint(0, size, (5000,), generator=generator)
    place[:3000] = size - 1
    share = torch.randn(5000, generator=generator).double()
    total = torch.zeros(size, dtype=torch.float64)
    shares._add_apart(total, place, share)
    torch.testing.assert_close(total, torch.zeros_like(total).index_add_(0, place, share))
