"""The reference against closed forms, torch's own attention and the hard inputs of others."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

import cutedsl_fa3
from cutedsl_fa3 import masks, reference, scores
from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Variant

F64 = torch.float64


def ramp(seqlen_q, seqlen_k, *, heads=1, batch=1, dim=8):
    """q = 0 and v[j] = j: the output is the mean of the visible indices."""
    q = torch.zeros(batch, seqlen_q, heads, dim)
    k = torch.randn(batch, seqlen_k, heads, dim)
    v = torch.arange(float(seqlen_k))[None, :, None, None].expand(batch, -1, heads, dim)
    return q, k, v


def run(q, k, v, variant=None, **options):
    return reference.attention_with_lse(q, k, v, variant, dtype=F64, **options)


def rows(out):
    return out[0, :, 0, 0].tolist()


# Closed forms


def test_without_a_mask_every_row_is_the_mean_and_lse_the_log_of_the_count():
    out, lse = run(*ramp(3, 10))
    assert rows(out) == pytest.approx([4.5] * 3)
    torch.testing.assert_close(lse, torch.full((1, 1, 3), math.log(10), dtype=F64))


def test_causal_rows_before_the_first_key_are_exactly_zero_with_lse_minus_infinity():
    out, lse = run(*ramp(5, 2), Variant(mask=masks.causal))
    assert rows(out) == [0, 0, 0, 0, 0.5]
    assert lse[0, 0].tolist() == pytest.approx([-math.inf] * 3 + [0, math.log(2)])


def test_a_window_of_three_before_and_none_after_sees_four_keys():
    out, _ = run(*ramp(8, 8), Variant(mask=masks.window(3, 0)))
    assert rows(out) == pytest.approx([0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5])
    out, _ = run(*ramp(8, 8), Variant(mask=masks.window(4, 0)))
    assert rows(out)[4] == pytest.approx(2.0)


@pytest.mark.parametrize("sides", [(None, None), (-1, -1), (-1, 0), (None, 0)])
def test_causal_windows_of_unbounded_left_side_equal_plain_causal(sides):
    q, k, v = torch.randn(2, 33, 2, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    plain = Variant(mask=masks.causal)
    windowed = Variant(mask=masks.window(*sides, causal=True))
    assert torch.equal(run(q, k, v, plain)[0], run(q, k, v, windowed)[0])


def test_other_negative_window_sizes_are_refused_by_name():
    for sides, name in (((-2, 0), "left"), ((0, -3), "right")):
        with pytest.raises(ValueError, match=f"{name} is -"):
            masks.window(*sides)


@pytest.mark.parametrize("shape", [(12,), (2, 12)])
def test_alibi_slopes_of_one_or_each_batch_give_the_documented_output_and_lse(shape):
    slopes = torch.full(shape, 0.5)
    variant = Variant(score=scores.alibi(slopes), mask=masks.causal)
    out, lse = run(*ramp(4, 4, heads=12, batch=2), variant)
    assert rows(out) == pytest.approx([0, 0.6225, 1.3202, 2.0846], abs=1e-4)
    assert lse[1, 11].tolist() == pytest.approx([0, 0.4741, 0.6803, 0.7873], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_alibi_slopes_are_refused(dtype):
    with pytest.raises(VariantError, match="float32"):
        scores.alibi(torch.ones(4, dtype=dtype))


@pytest.mark.parametrize(
    ("level", "expected"), [(-20000, -1323.704), (-60000, -4864.895), (-120000, -10182.338)]
)
def test_rows_of_very_low_logits_are_not_taken_for_empty(level, expected):
    q = torch.ones(1, 1, 16, 128, dtype=torch.bfloat16)
    k = torch.full((1, 64, 1, 128), level / 128, dtype=torch.bfloat16)
    k[:, 0] = (level + 5000) / 128
    v = torch.arange(1.0, 65)[None, :, None, None].expand(1, 64, 1, 128).bfloat16()
    out, lse = run(q, k, v)
    assert out.unique().tolist() == [1.0]
    assert lse[0, 0, 0].item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("variant", [None, Variant(mask=masks.causal)])
def test_no_keys_give_zero_and_minus_infinity(variant):
    q, k = torch.randn(2, 128, 4, 64), torch.randn(2, 0, 4, 64)
    out, lse = run(q, k, k, variant)
    assert out.shape == q.shape and lse.shape == (2, 4, 128)
    assert not out.any() and (lse == -math.inf).all()


def test_no_batch_and_no_queries_give_empty_outputs():
    for q, k in (((0, 3, 2, 8), (0, 5, 2, 8)), ((2, 0, 2, 8), (2, 5, 2, 8))):
        out, lse = run(torch.ones(q), torch.ones(k), torch.ones(k))
        assert out.shape == q and lse.shape == (q[0], q[2], q[1])


def test_softcap_is_cap_times_tanh_and_zero_leaves_scores_alone():
    q = torch.full((1, 1, 1, 1), 10.0)
    one = torch.ones(1, 1, 1, 1)
    _, lse = run(q, one, one, Variant(score=scores.softcap(10.0)), scale=1.0)
    assert lse.item() == pytest.approx(7.61594, abs=1e-5)
    assert Variant(score=scores.softcap(0)).score is None
    with pytest.raises(ValueError, match="cap is -1"):
        scores.softcap(-1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (lambda cap=cap: scores.softcap(cap), r"scores\.softcap: cap is .*valid are positive")
            for cap in (
                math.nan,
                math.inf,
                -math.inf,
                -1,
                1e-50,
                "30",
                None,
                True,
                torch.tensor(3.0),
            )
        ),
        *(
            (lambda n=n: masks.prefix(n), r"masks\.prefix: length is .*valid are an int")
            for n in (2.5, True, math.nan, "3", None)
        ),
        (lambda: masks.prefix(torch.ones(2, 2).long()), r"masks\.prefix: length is int64 of shape"),
        (lambda: masks.window(3, 0, causal="no"), r"masks\.window: causal is 'no'; valid are True"),
        (lambda: masks.window(3, 0, causal=1), r"masks\.window: causal is 1; valid are True"),
        (lambda: masks.window(2.5, 0), r"masks\.window: left is 2\.5; valid are ints"),
        (lambda: masks.window(2, True), r"masks\.window: right is True; valid are ints"),
        (lambda: scores.alibi([1, 2]), r"scores\.alibi: slopes is \[1, 2\]; valid is a tensor"),
        (lambda: scores.alibi(0.5), r"scores\.alibi: slopes is 0\.5; valid is a tensor"),
        (lambda: scores.alibi(torch.ones(2).double()), r"float64; .*give slopes\.float\(\)"),
        (lambda: scores.alibi(torch.ones(2).half()), r"float16; .*bring the bits back"),
        (lambda: scores.relative_bias(None), r"scores\.relative_bias: table is None; valid is a"),
        (lambda: masks.and_masks([masks.causal]), r"masks\.and_masks: .*and_masks\(\*masks\)"),
        (lambda: masks.or_masks(masks.causal, 3), r"masks\.or_masks: argument 1 is 3; valid are"),
        (lambda: masks.not_mask(3), r"masks\.not_mask: argument 0 is 3; valid are functions"),
    ],
)
def test_wrong_arguments_of_masks_and_scores_are_refused_by_function_and_argument(make, words):
    with pytest.raises(VariantError, match=words):
        make()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"variant": masks.causal}, r"variant is <function causal.*Variant\(mask="),
        ({"variant": "causal"}, "variant is 'causal'; valid are a Variant and None$"),
        *(
            ({"scale": scale}, "scale is .*; valid are finite numbers")
            for scale in (math.nan, math.inf, "1", True, torch.tensor(1.0))
        ),
    ],
)
def test_options_of_the_reference_are_refused_by_name(options, words):
    q = torch.ones(1, 2, 1, 8)
    with pytest.raises(ValueError, match=words):
        reference.attention(q, q, q, **options)


def test_a_relative_bias_is_read_at_the_distance_and_only_where_visible():
    table = torch.randn(2, 7)
    variant = Variant(score=scores.relative_bias(table), mask=masks.window(3, 3))
    q, k, v = ramp(10, 10, heads=2)
    _, lse = run(q, k, v, variant)
    distance = torch.arange(10)[None, :] - torch.arange(10)[:, None]
    bias = table.double()[:, distance.clamp(-3, 3) + 3].masked_fill(distance.abs() > 3, -math.inf)
    torch.testing.assert_close(lse[0], bias.logsumexp(-1))
    with pytest.raises(IndexError, match="captured tensor t0"):
        run(q, k, v, Variant(score=scores.relative_bias(table)))
    with pytest.raises(VariantError, match="odd"):
        scores.relative_bias(torch.ones(2, 6))


def test_a_buffer_shorter_than_the_keys_is_fine_where_the_mask_hides_the_rest():
    buffer = torch.randn(127)
    variant = Variant(
        score=lambda s, b, h, q, k: s + buffer[k], mask=lambda b, h, q, k: (k < 127) & (q >= k)
    )
    q, k, v = (torch.randn(1, 128, 1, 16) for _ in range(3))
    out, _ = run(q, k, v, variant)
    short, _ = run(q[:, :127], k[:, :127], v[:, :127], variant)
    torch.testing.assert_close(out[:, :127], short)


def test_prefixes_may_be_a_number_or_one_for_each_batch_entry():
    q, k, v = ramp(3, 10, batch=2)
    assert rows(run(q, k, v, Variant(mask=masks.prefix(4)))[0]) == pytest.approx([1.5] * 3)
    out, _ = run(q, k, v, Variant(mask=masks.prefix(torch.tensor([3, 0]))))
    assert out[:, 0, 0, 0].tolist() == [1, 0]
    with pytest.raises(VariantError, match="length is float32"):
        masks.prefix(torch.ones(2))


def test_masks_join_and_negate():
    inside = masks.window(2, 0)
    both = masks.and_masks(inside, masks.not_mask(masks.window(0, 0)))
    assert rows(run(*ramp(4, 4), Variant(mask=both))[0]) == pytest.approx([0, 0, 0.5, 1.5])
    either = masks.or_masks(masks.prefix(1), masks.window(0, 0))
    assert rows(run(*ramp(4, 4), Variant(mask=either))[0]) == pytest.approx([0, 0.5, 1, 1.5])
    assert rows(run(*ramp(2, 4), Variant(mask=masks.none))[0]) == [0, 0]


# Against torch


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [True, False])
def test_it_equals_torch_attention_with_repeated_heads(kv_heads, causal):
    q = torch.randn(2, 37, 6, 16, dtype=F64)
    k, v = (torch.randn(2, 37, kv_heads, 16, dtype=F64) for _ in range(2))
    v = torch.cat([v, v], -1)
    out, _ = run(q, k, v, Variant(mask=masks.causal) if causal else None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_float32_is_close_to_float64():
    q, k, v = (torch.randn(1, 64, 2, 32) for _ in range(3))
    variant = Variant(score=scores.softcap(5.0), mask=masks.causal)
    single, lse = reference.attention_with_lse(q, k, v, variant)
    double, lse64 = run(q, k, v, variant)
    assert single.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), lse64, rtol=1e-5, atol=1e-5)
    assert torch.equal(reference.attention(q, k, v, variant), single)


def test_memory_layout_does_not_change_a_bit():
    buffer = torch.randn(2, 4, 40, 16)
    k = torch.randn(2, 80, 4, 16)[:, ::2]
    v = torch.randn(2, 40, 4, 3, 16)[:, :, :, 1]
    q = buffer.transpose(1, 2)
    expected = run(q.contiguous(), k.contiguous(), v.contiguous(), Variant(mask=masks.causal))
    found = run(q, k, v, Variant(mask=masks.causal))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_working_in_small_pieces_changes_nothing(monkeypatch):
    q, k, v = torch.randn(2, 50, 4, 8), torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 8)
    slopes = torch.rand(2, 4)
    variant = Variant(score=scores.alibi(slopes), mask=masks.window(9, 3))
    whole = run(q, k, v, variant)
    for size in (1, 100, 3100):
        monkeypatch.setattr(reference, "SCORES_AT_ONCE", size)
        pieces = run(q, k, v, variant)
        torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)


# NaN and infinities


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["k", "v"])
def test_hidden_keys_cannot_poison_a_row_whatever_they_hold(poison, what):
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    variant = Variant(mask=masks.causal)
    clean = run(q, k, v, variant)
    (k if what == "k" else v)[:, 7:] = poison
    found = run(q, k, v, variant)
    assert torch.equal(found[0][:, :7], clean[0][:, :7])
    assert torch.equal(found[1][..., :7], clean[1][..., :7])


def test_nan_in_a_key_or_value_reaches_exactly_the_rows_that_see_it():
    for what in ("k", "v"):
        q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
        (k if what == "k" else v)[0, 5, 1] = math.nan
        out, _ = run(q, k, v, Variant(mask=masks.window(2, 0)))
        assert out[0, :, 1].isnan().any(-1).nonzero().flatten().tolist() == [5, 6, 7]
        assert not out[0, :, 0].isnan().any()


def test_nan_in_a_visible_value_reaches_rows_that_weigh_it_with_nothing():
    q = torch.full((1, 1, 1, 1), 1e4)
    k = torch.tensor([1.0, -1.0]).reshape(1, 2, 1, 1)
    v = torch.tensor([1.0, math.nan]).reshape(1, 2, 1, 1)
    assert run(q, k, v)[0].isnan().all()


def test_nan_in_a_query_reaches_its_own_row_only_if_it_sees_a_key():
    q, k, v = ramp(5, 2)
    q[0, [0, 4]] = math.nan
    out, _ = run(q, k, v, Variant(mask=masks.causal))
    assert out[0, :, 0, 0].isnan().tolist() == [False, False, False, False, True]


# Refusals


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, 4, 6, 8), (1, 4, 4, 8), (1, 4, 4, 8)), "q has 6 heads and k has 4"),
        (((1, 4, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8)), "k has batch 2"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)), "v has seqlen_k 5"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 1, 8)), "v has kv_heads 1"),
        (((1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 8)), "k has head_dim 16"),
        (((4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "q has shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_argument_and_value(shapes, words):
    with pytest.raises(ValueError, match=words):
        reference.attention(*(torch.ones(shape) for shape in shapes))


def test_other_dtypes_are_refused():
    q = torch.ones(1, 2, 1, 8)
    with pytest.raises(ValueError, match=r"dtype is torch\.float16"):
        reference.attention(q, q, q, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"k has dtype torch\.int64"):
        reference.attention(q, q.long(), q)


def test_the_reference_and_the_language_import_no_kernel_and_no_compiler():
    package = Path(cutedsl_fa3.__file__).parent
    files = [package / f"{name}.py" for name in ("reference", "masks", "scores")]
    files += [
        path
        for path in (package / "variant").glob("*.py")
        if path.name not in ("lower.py", "device.py")
    ]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                assert "cutlass" not in name and "kernels" not in name, f"{path.name}: {name}"
                assert "lower" not in name.split("."), f"{path.name}: {name}"
