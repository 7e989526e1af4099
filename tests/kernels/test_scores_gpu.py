"""Scores in few instructions on an SM90 GPU: extremes, NaN beside others, tables by distance."""

from __future__ import annotations

import math

import pytest
import torch
from twin_cases import plain

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, Variant, masks, reference, scores

pytestmark = pytest.mark.gpu

KEYS = 512  # more than two tiles, so that some need no element mask
EXTREMES = (0.0, 1.0, -1.0, 40.0, -40.0, 700.0, -700.0, 3e4, -3e4, math.inf, -math.inf)


def with_scores(raw: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one head, the first of two rows of queries having these products with k."""
    q = torch.zeros(1, 300, 1, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.zeros(1, len(raw), 1, dim, device="cuda", dtype=torch.bfloat16)
    q[:, ::2, :, 0] = 1.0
    k[0, :, 0, 0] = raw.bfloat16()
    v = torch.randn(1, len(raw), 1, dim, device="cuda").bfloat16()
    return q, k, v


def hold(q, k, v, variant, scale=None) -> torch.Tensor:
    """At most twice torch's error at the input type, plus one rounding; NaN where it has NaN."""
    out = fa3.attention(q, k, v, variant, scale=scale)
    exact = reference.attention(q, k, v, variant, scale=scale, dtype=torch.float64)
    assert torch.equal(out.isnan(), exact.isnan())
    known = ~exact.isnan()
    errors = (plain(q, k, v, variant, scale).double() - exact)[known].abs()
    error = errors[errors.isfinite()].max()  # torch multiplies hidden values, and 0 * NaN is NaN
    allowed = 2 * error + torch.finfo(q.dtype).eps * exact[known].abs().max()
    assert (out.double() - exact)[known].abs().max() <= allowed
    return out


def sunk() -> Variant:
    sink = torch.tensor(1.5, device="cuda")
    return Variant(scores.softcap(20.0), softmax=OnlineSoftmax(sink))


KINDS = {
    "softcap": lambda: Variant(scores.softcap(30.0)),
    "softcap of 50": lambda: Variant(scores.softcap(50.0), masks.causal),
    "softcap and a sink": sunk,
    "large softcap": lambda: Variant(scores.softcap(100.0), masks.causal),
    "sigmoid weights": lambda: Variant(softmax=Elementwise(torch.sigmoid)),
    "tanh weights": lambda: Variant(mask=masks.causal, softmax=Elementwise(torch.tanh)),
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", KINDS)
def test_scores_of_any_size_are_right_beside_each_other(name, dim):
    torch.manual_seed(0)
    raw = torch.tensor(EXTREMES[:-2])[torch.randint(len(EXTREMES) - 2, (KEYS,))]
    hold(*with_scores(raw, dim), KINDS[name](), scale=1.0)
    hold(*with_scores(torch.randn(KEYS) * 20, dim), KINDS[name](), scale=1.0)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["softcap of 50", "large softcap", "tanh weights"])
def test_a_key_that_is_not_finite_reaches_the_rows_that_see_it_alone(name, value, dim):
    """Key 100 lies in a tile that later queries see without an element mask."""
    q, k, v = (torch.randn(1, KEYS, 2, dim, device="cuda").bfloat16() for _ in range(3))
    k[0, 100, 0, 3] = value
    out = hold(q.abs(), k, v, KINDS[name]())
    clean = k.clone()
    clean[0, 100, 0, 3] = 0.0
    without = fa3.attention(q.abs(), clean, v, KINDS[name]())
    assert torch.equal(out[:, :100], without[:, :100])
    assert torch.equal(out[:, :, 1], without[:, :, 1])


def test_values_near_the_end_of_what_a_softmax_without_maximum_sums_are_right():
    q, k, v = with_scores(torch.full((KEYS,), 1e4), 64)
    for size in (2.0**27, 2.0**-40):
        hold(q, k, (v.float() * size).bfloat16(), KINDS["softcap of 50"](), scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["dense", "a slice", "transposed", "short"])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_table_by_distance_is_read_in_every_layout(dim, layout, dtype):
    table = torch.randn(2, 2 * KEYS + 1, device="cuda").to(dtype)
    table = {
        "dense": table,
        "a slice": torch.randn(2, 4 * KEYS + 2, device="cuda").to(dtype)[:, 1::2],
        "transposed": table.T.contiguous().T,
        "short": table[:, 400:521],  # most distances lie beyond its ends
    }[layout]
    q, k, v = (torch.randn(2, KEYS, 2, dim, device="cuda").bfloat16() for _ in range(3))
    center = table.shape[1] // 2
    score = lambda s, b, h, q, k: s + table[h, k - q + center]  # noqa: E731
    inside = lambda b, h, q, k: (k <= q) & (q - k <= center)  # noqa: E731
    hold(q, k, v, Variant(score, masks.causal if layout != "short" else inside))


@pytest.mark.parametrize(
    "mask", [None, masks.causal, masks.window(300, 40)], ids=["full", "causal", "window"]
)
def test_alibi_is_that_of_the_reference_with_slopes_of_any_sign(mask):
    slopes = torch.tensor([0.7, -0.01, 1e-4, 0.0], device="cuda")
    q, k, v = (torch.randn(1, 700, 4, 64, device="cuda").bfloat16() for _ in range(3))
    hold(q, k, v, Variant(scores.alibi(slopes), mask))
    hold(q, k, v, Variant(lambda s, b, h, q, k: s + slopes[h] * (k - q), mask))


def distant(slopes):
    """ALiBi as it is mostly written."""
    return lambda s, b, h, q, k: s + slopes[h] * (k - q)


@pytest.mark.parametrize("scale", [0.0, 1e-25, 0.03, 1.0, 3.0])
def test_alibi_is_that_of_the_reference_at_every_scale(scale):
    """Up to 1 in units of the product; beyond, and where it is next to nothing, in natural ones."""
    slopes = torch.tensor([0.7, -0.01, 1e-4, 0.0], device="cuda")
    q, k, v = (torch.randn(1, 700, 4, 64, device="cuda").bfloat16() for _ in range(3))
    for mask in (None, masks.causal):
        hold(q, k, v, Variant(distant(slopes), mask), scale)


@pytest.mark.parametrize("kv_heads", [8, 1], ids=["a head a tile", "packed"])
@pytest.mark.parametrize("slope", [math.nan, math.inf, -math.inf, 1e30, -1e30, 1e6], ids=str)
def test_a_slope_beyond_all_use_is_that_of_its_own_head(slope, kv_heads):
    slopes = torch.linspace(0.1, 0.8, 8, device="cuda")
    slopes[3] = slope
    q = torch.randn(1, 40, 8, 64, device="cuda").bfloat16()
    k, v = (torch.randn(1, 700, kv_heads, 64, device="cuda").bfloat16() for _ in range(2))
    hold(q, k, v, Variant(scores.alibi(slopes), masks.causal))


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_far_before_every_query_weigh_as_near_ones_do(dim):
    """Scores are 5,000 or more below 0, all that a row sees."""
    slopes = torch.tensor([0.25, 0.5], device="cuda")
    q = torch.randn(1, 200, 2, dim, device="cuda").bfloat16()
    k, v = (torch.randn(1, 22_000, 2, dim, device="cuda").bfloat16() for _ in range(2))
    offset = torch.tensor(20_000, device="cuda")
    score = lambda s, b, h, q, k: s + slopes[h] * (k - q - offset)  # noqa: E731
    hold(q, k, v, Variant(score, lambda b, h, q, k: k <= q + 1000))


def test_values_that_are_not_finite_reach_the_rows_of_alibi_that_see_them_alone():
    """The rows that a hidden one would spoil are computed again, in the same units."""
    slopes = torch.tensor([0.3, 0.01], device="cuda")
    q, k, v = (torch.randn(1, KEYS, 2, 64, device="cuda").bfloat16() for _ in range(3))
    v[0, 300, 0, 5] = math.nan
    hold(q, k, v, Variant(distant(slopes), masks.causal))
