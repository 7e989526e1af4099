"""The backward on an SM90 GPU, held to fp64 beside torch in the input type."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases.alone import alone
from cases.oracles import hold_parts

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Variant, masks
from cutedsl_fa3.calls_backward import backward
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.schedules_backward import TABLE, default_schedule
from cutedsl_fa3.variant import Elementwise

pytestmark = pytest.mark.gpu

SHAPES = [  # batch, seqlen_q, seqlen_k, heads, kv_heads
    (1, 1, 1, 1, 1),
    (1, 64, 128, 1, 1),
    (2, 77, 201, 2, 2),
    (2, 333, 517, 2, 2),
    (2, 300, 400, 8, 2),
    (1, 700, 333, 6, 1),
]


def drawn(batch, seqlen_q, seqlen_k, heads, kv_heads, dim, dtype=torch.bfloat16):
    """q, k, v and the gradient of the output; `dim` is of all, or (of q and k, of v)."""
    d, dv = dim if isinstance(dim, tuple) else (dim, dim)
    queries, keys = (seqlen_q, heads), (seqlen_k, kv_heads)
    shapes = ((*queries, d), (*keys, d), (*keys, dv), (*queries, dv))
    return tuple(torch.randn(batch, *s, device="cuda").to(dtype) for s in shapes)


def gradients(q, k, v, do, variant, **options):
    """The kernel's, by name."""
    if variant.has_lse:
        out, lse = fa3.attention_with_lse(q, k, v, variant)
    else:
        out, lse = fa3.attention(q, k, v, variant), None
    found = backward(q, k, v, out, lse, do, variant, **options)
    return {"q": found.q, "k": found.k, "v": found.v} | {
        f"t{n}": t for n, t in found.captures.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [40, 64, 80, 96, 128, (192, 128), 160, 192, 248, 256], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [None, masks.causal, masks.window(100, 30)])
def test_gradients_match_fp64_on_every_tail_and_ratio(dtype, dim, shape, mask):
    variant = Variant(mask=mask)
    q, k, v, do = drawn(*shape, dim, dtype=dtype)
    hold_parts(gradients(q, k, v, do, variant), q, k, v, variant, do)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_gradient_of_a_sum_has_no_strides(dim):
    variant = Variant(mask=masks.causal)
    q, k, v, do = drawn(2, 200, 200, 2, 2, dim)
    do = torch.ones((), device="cuda", dtype=q.dtype).expand(do.shape)
    hold_parts(gradients(q, k, v, do, variant), q, k, v, variant, do)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("add", ["tma", "direct"])
def test_both_ways_to_add_dq_agree_with_fp64(dim, add):
    variant = Variant(mask=masks.causal)
    schedule = replace(default_schedule(variant, Problem("bf16", dim, dim)), add=add)
    q, k, v, do = drawn(2, 333, 517, 2, 2, dim)
    hold_parts(gradients(q, k, v, do, variant, schedule=schedule), q, k, v, variant, do)


@pytest.mark.parametrize("row", TABLE, ids=str)
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_every_schedule_of_the_table_agrees_with_fp64(row, kind):
    document = torch.arange(600, device="cuda") // 150
    packed = Variant(mask=lambda b, h, q, k: (document[q] == document[k]) & (k <= q))
    variant = Variant(mask=masks.causal) if kind == "causal" else packed
    q, k, v, do = drawn(2, 333, 517, 4, 2, (row.head_dim, row.head_dim_v))
    options = {"schedule": row.schedule, "deterministic": row.deterministic}
    hold_parts(gradients(q, k, v, do, variant, **options), q, k, v, variant, do)


OTHERS = [  # schedules of no row, by what differs from the default of that head size
    (64, {"tile_m": 64, "spread": False, "stages": 3}),
    (64, {"add": "direct"}),
    (64, {"early": 8}),
    (96, {"spread": True, "early": 0}),
    (128, {"spread": True}),
    (128, {"early": 8, "head_group": 16}),
    (128, {"places": 1, "add": "direct"}),
    (192, {"places": 1}),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dim", "changes"), OTHERS, ids=str)
def test_schedules_to_measure_agree_with_fp64(dim, changes, deterministic):
    if deterministic and changes.get("add") == "direct":
        pytest.skip("a fixed order needs the warp that adds")
    variant = Variant(mask=masks.causal)
    schedule = replace(default_schedule(variant, Problem("bf16", dim, dim)), **changes)
    q, k, v, do = drawn(2, 333, 517, 4, 2, dim)
    options = {"schedule": schedule, "deterministic": deterministic}
    hold_parts(gradients(q, k, v, do, variant, **options), q, k, v, variant, do)


def test_rows_that_see_nothing_and_keys_that_nobody_sees_get_exactly_0():
    variant = Variant(mask=lambda b, h, q, k: (q >= 150) & (k < 300) & (k <= q))
    q, k, v, do = drawn(1, 400, 400, 2, 2, 128)
    found = gradients(q, k, v, do, variant)
    assert not found["q"][:, :150].any()
    assert not found["k"][:, 300:].any()
    assert not found["v"][:, 300:].any()


ORDERED = {"full": None, "causal": masks.causal, "window": masks.window(300, 0)}


@pytest.mark.parametrize("dim", [64, 96, 128, (192, 128), 192, 256], ids=str)
@pytest.mark.parametrize("mask", ORDERED)
def test_a_fixed_order_gives_equal_bits_in_30_runs(dim, mask):
    alone(run_again, dim, mask)


def run_again(dim: int, mask: str) -> None:
    """In a process of its own: an order that is kept by waiting could wait for ever."""
    variant = Variant(mask=ORDERED[mask])
    q, k, v, do = drawn(2, 1500, 1500, 4, 2, dim)
    first = gradients(q, k, v, do, variant, deterministic=True)
    hold_parts(first, q, k, v, variant, do)
    for _ in range(30):
        again = gradients(q, k, v, do, variant, deterministic=True)
        assert all(torch.equal(first[name], t) for name, t in again.items())


def captured_cases():
    slopes, table = torch.rand(4, device="cuda"), torch.randn(4, 512, device="cuda")
    temperature = torch.tensor(0.7, device="cuda")
    return {
        "slopes": Variant(lambda s, b, h, q, k: s + slopes[h] * 0.1 * (k - q), masks.causal),
        "keys": Variant(lambda s, b, h, q, k: s + table[h, k], masks.causal),
        "distances": Variant(
            lambda s, b, h, q, k: s + table[h, torch.clamp(q - k, 0, 511)], masks.causal
        ),
        "temperature": Variant(
            lambda s, b, h, q, k: 5.0 * torch.tanh(s * temperature / 5.0), masks.causal
        ),
        "weights": Variant(
            lambda s, b, h, q, k: s + slopes[h], masks.causal, Elementwise(torch.sigmoid)
        ),
    }


CAPTURED = ("slopes", "keys", "distances", "temperature", "weights")


@pytest.mark.parametrize("dim", [64, 96, 128, (192, 128), 256], ids=str)
@pytest.mark.parametrize("name", CAPTURED)
def test_scores_weights_and_what_they_capture_get_gradients(dim, name):
    variant = captured_cases()[name]
    q, k, v, do = drawn(2, 300, 400, 4, 2, dim)
    found = gradients(q, k, v, do, variant, wanted=(0,))
    hold_parts(found, q, k, v, variant, do)


@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_captured_gets_its_gradient_in_a_fixed_order_too(dim):
    alone(capture_in_order, dim)


def capture_in_order(dim: int) -> None:
    for name in CAPTURED:
        variant = captured_cases()[name]
        q, k, v, do = drawn(2, 300, 400, 4, 2, dim)
        found = gradients(q, k, v, do, variant, wanted=(0,), deterministic=True)
        hold_parts(found, q, k, v, variant, do)
        again = gradients(q, k, v, do, variant, wanted=(0,), deterministic=True)
        assert all(torch.equal(found[part], t) for part, t in again.items()), name


def test_an_epilogue_takes_the_output_before_it_and_the_gradient_after_it():
    gate = torch.rand(4, device="cuda")
    variant = Variant(mask=masks.causal, epilogue=lambda o, lse, b, h, q: o * torch.tanh(gate[h]))
    q, k, v, do = drawn(2, 200, 300, 4, 2, 64)
    out, lse = fa3.attention_with_lse(q, k, v, variant.without_epilogue())
    found = backward(q, k, v, out, lse, do, variant, wanted=(0,))
    hold_parts(
        {"q": found.q, "k": found.k, "v": found.v, "t0": found.captures[0]}, q, k, v, variant, do
    )
