"""The interval rules of operations, against every value of the range."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3.variant.bounds import PythonIntegers
from cutedsl_fa3.variant.ops import OPS

RULES = [name for name, op in OPS.items() if op.interval is not None]
BY_A_NUMBER = {"floordiv": (1, 9), "mod": (1, 9), "shl": (0, 4), "shr": (0, 4), "mul": (-4, 4)}


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_range_is_exactly_what_the_values_in_it_give(name, data):
    op = OPS[name]
    ranges = []
    for position in range(op.arity):
        if position == 1 and name in BY_A_NUMBER:
            number = data.draw(st.integers(*BY_A_NUMBER[name]))
            ranges.append((number, number))
        else:
            low = data.draw(st.integers(-20, 20))
            ranges.append((low, low + data.draw(st.integers(0, 12))))
    values = torch.meshgrid(*(torch.arange(a, b + 1) for a, b in ranges), indexing="ij")
    found = op.torch(*values)
    low, high = op.interval(PythonIntegers(), *ranges)
    assert low <= found.min() and found.max() <= high
    if name != "mod":  # a range that wraps once may not reach both ends
        assert (low, high) == (found.min(), found.max())
