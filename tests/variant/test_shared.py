"""Functions that share a reciprocal: exact to fp32 over all of it, whoever the neighbour is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutedsl_fa3.variant import shared
from cutedsl_fa3.variant.fusion import LARGEST_CAP, SMALLEST_CAP


class TorchUnit:
    """fp32 by torch; results below its normal numbers are 0, as the special-function unit's are."""

    lesser = staticmethod(lambda a, b: torch.minimum(a, torch.tensor(b)))

    @staticmethod
    def fma(a, b, c):
        return torch.as_tensor(a * b + c, dtype=torch.float32)

    @staticmethod
    def exp2(a):
        return _flushed(torch.exp2(a))

    @staticmethod
    def reciprocal(a):
        return _flushed(torch.reciprocal(a))


def _flushed(a: torch.Tensor) -> torch.Tensor:
    return torch.where(a.abs() < 2.0**-126, a * 0.0, a)


UNIT = TorchUnit()
EXTREMES = (0.0, -0.0, math.inf, -math.inf, 3e38, -3e38, 1e-38, 59.0, 61.0, 126.0, 129.0, -150.0)
exponents = st.one_of(
    st.sampled_from(EXTREMES),
    st.floats(-200.0, 200.0, width=32),
    st.floats(-3.0, 3.0, width=32),
    st.floats(width=32, allow_nan=False),
)
caps = st.floats(SMALLEST_CAP, LARGEST_CAP, width=32).flatmap(lambda c: st.sampled_from([c, -c]))


groups = st.sampled_from([2, 4]).flatmap(lambda n: st.lists(exponents, min_size=n, max_size=n))


def together(function, group: list[float]) -> list[float]:
    """The function's values at exponents that share a reciprocal."""
    return [float(value) for value in function([torch.tensor(exponent) for exponent in group])]


def sigmoid(exponent: float) -> float:
    """In fp64, by whichever exponential does not overflow."""
    small = 2.0 ** -min(abs(exponent), 1000.0)
    return small / (1 + small) if exponent < 0 else 1 / (1 + small)


def of_cap(cap: float, exponent: float) -> float:
    """cap * tanh, of an exponent that is 2 log2(e) times its argument."""
    return cap * float(np.tanh(exponent / (2 * math.log2(math.e))))


@settings(max_examples=400)
@given(groups)
def test_a_sigmoid_is_right_relatively_beside_any_neighbour(group):
    found = together(lambda e: shared.sigmoids(e, UNIT), group)
    for value, exponent in zip(found, group, strict=True):
        wanted = sigmoid(exponent)
        assert abs(value - wanted) <= max(wanted * 2.0**-20, 2.0**-125)


@settings(max_examples=400)
@given(groups, caps)
def test_a_capped_value_is_right_to_the_caps_precision_beside_any_neighbour(group, cap):
    found = together(lambda e: shared.steps(e, -cap, cap, UNIT), group)
    for value, exponent in zip(found, group, strict=True):
        assert abs(value - of_cap(cap, exponent)) <= abs(cap) * 2.0**-21


@pytest.mark.parametrize("exponent", EXTREMES)
@pytest.mark.parametrize("function", [shared.sigmoids, lambda e, u: shared.steps(e, -9.0, 9.0, u)])
def test_one_alone_has_the_value_that_it_has_in_company(function, exponent):
    value = torch.tensor(exponent)
    (alone,) = function([value], UNIT)
    for other in EXTREMES:
        for found in (
            function([value, torch.tensor(other)], UNIT)[0],
            function([torch.tensor(other), value], UNIT)[1],
        ):
            torch.testing.assert_close(found, alone, rtol=2e-6, atol=4e-6)


@given(exponents)
def test_a_nan_stays_one(exponent):
    for function in (shared.sigmoids, lambda e, u: shared.steps(e, -9.0, 9.0, u)):
        values = [torch.tensor(math.nan), torch.tensor(exponent)]
        assert function(values, UNIT)[0].isnan() and function(values[::-1], UNIT)[1].isnan()
        assert function(values[:1], UNIT)[0].isnan()


def test_a_sigmoid_of_minus_infinity_weighs_exactly_nothing():
    for other in EXTREMES:
        pair = [torch.tensor(-math.inf), torch.tensor(other)]
        assert shared.sigmoids(pair, UNIT)[0] == 0 == shared.sigmoids(pair[::-1], UNIT)[1]
