"""What a function of a variant may say, and what its graph is."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from cutedsl_fa3 import masks
from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Variant, seqlen_k, seqlen_q
from cutedsl_fa3.variant.evaluate import evaluate

W = torch.arange(4.0)
TABLE = torch.arange(12.0).reshape(3, 4)
SCALAR = torch.tensor(2.0)
COUNT = torch.tensor(3)


def score_text(function) -> str:
    return Variant(score=function).score.text


def refused(score=None, mask=None) -> str:
    with pytest.raises(VariantError) as caught:
        Variant(score=score, mask=mask)
    return str(caught.value)


# What the graph is


def test_the_text_of_causal_is_canonical_and_readable():
    assert Variant(mask=masks.causal).text.splitlines() == [
        "mask(b, h, q, k)",
        "  %0 = input(k): int",
        "  %1 = input(q): int",
        "  %2 = input(seqlen_k): int",
        "  %3 = input(seqlen_q): int",
        "  %4 = sub(%2, %3): int",
        "  %5 = add(%1, %4): int",
        "  %6 = le(%0, %5): bool",
        "  return %6",
    ]


def test_captured_tensors_appear_by_rank_and_dtype_only():
    text = Variant(score=lambda s, b, h, q, k: s + W[h] * SCALAR).text
    assert text.startswith("t0: float32[?]\nt1: float32[]\nscore(s, b, h, q, k)")
    other = torch.full((9,), 7.0), torch.tensor(-1.0)
    assert text == Variant(score=lambda s, b, h, q, k: s + other[0][h] * other[1]).text


def test_python_numbers_are_frozen_by_value_and_tensors_kept_by_reference():
    factor, w = 2.0, torch.ones(4)
    variant = Variant(score=lambda s, b, h, q, k: s * factor + w[h])
    factor = 3.0
    w[1] = 5.0
    assert variant.captures[0] is w
    s = torch.tensor([1.0])
    assert evaluate(variant.score, {"score": s, "h": 1}, variant.captures).item() == 7.0


def test_common_subexpressions_merge_and_dead_code_goes():
    def written_twice(s, b, h, q, k):
        unused = torch.sin(s)  # noqa: F841
        return (s + W[h]) * (s + W[h])

    def written_once(s, b, h, q, k):
        t = s + W[h]
        return t * t

    assert score_text(written_twice) == score_text(written_once)


def test_statement_order_does_not_change_the_text():
    def one(s, b, h, q, k):
        bias = W[h] * 2
        capped = torch.tanh(s)
        return capped + bias

    def other(s, b, h, q, k):
        capped = torch.tanh(s)
        return capped + W[h] * 2

    assert score_text(one) == score_text(other)


def test_commutative_arguments_keep_their_order():
    assert score_text(lambda s, b, h, q, k: s + q) != score_text(lambda s, b, h, q, k: q + s)


def test_floats_are_written_by_repr_so_that_close_constants_differ():
    first = score_text(lambda s, b, h, q, k: s * 0.1)
    second = score_text(lambda s, b, h, q, k: s * (0.1 + 1e-17 + 2e-17))
    assert "0.1" in first and first != second


def test_constants_fold():
    text = score_text(
        lambda s, b, h, q, k: s * (torch.tensor(2.0) * 3) + (q * 0).float() + torch.tensor(1) * 4
    )
    assert "mul(%0, 6.0)" in text and "4.0" in text and "input(q)" not in text


def test_a_score_that_returns_s_and_a_mask_that_shows_all_are_plain_attention():
    variant = Variant(score=lambda s, b, h, q, k: s, mask=masks.full)
    assert (variant.score, variant.mask, variant.text) == (None, None, "plain attention")


def test_types_follow_torch():
    def types(function):
        return [str(n).rsplit(": ", 1)[1] for n in Variant(score=function).score.nodes]

    assert types(lambda s, b, h, q, k: q / 2)[-1] == "float"
    assert "floordiv" in score_text(lambda s, b, h, q, k: q // 2)
    assert "or" in score_text(lambda s, b, h, q, k: ((q > k) + (q < 3)) * s)
    assert "and" in score_text(lambda s, b, h, q, k: ((q > k) * (q < 3)) * s)
    assert "- of two" in refused(score=lambda s, b, h, q, k: (q > k) - (q < 3)).replace("`", "")


def test_comparing_an_int_with_a_float_number_is_a_comparison_of_integers():
    window = 513
    halves = Variant(mask=lambda b, h, q, k: q - k < window / 2)
    assert halves.text == Variant(mask=lambda b, h, q, k: q - k < 257).text
    assert Variant(mask=lambda b, h, q, k: q < math.inf).mask is None


def test_the_graph_names_what_each_value_depends_on():
    graph = Variant(score=lambda s, b, h, q, k: s + W[h] * (k - q)).score
    by_op = {node.op: node.depends for node in graph.nodes}
    assert by_op["load"] == {"h"} and by_op["sub"] == {"q", "k"}
    assert graph.inputs == {"score", "h", "q", "k"}


def test_score_and_mask_share_captured_tensors_numbered_by_first_use():
    variant = Variant(
        score=lambda s, b, h, q, k: s + TABLE[b, h] + W[h],
        mask=lambda b, h, q, k: (k < COUNT) | (W[h] > 1),
    )
    assert [c is t for c, t in zip(variant.captures, (TABLE, W, COUNT), strict=True)] == [True] * 3
    assert variant.mask.captures == (2, 1)


def test_chained_indices_are_one_load():
    assert score_text(lambda s, b, h, q, k: s + TABLE[b][h]) == score_text(
        lambda s, b, h, q, k: s + TABLE[b, h]
    )


def test_negative_constant_indices_count_from_the_end():
    assert "load(t0, 3)" in score_text(lambda s, b, h, q, k: s + W[-1])


def test_a_copy_of_a_variant_is_the_variant_and_pickling_is_refused_with_the_reason():
    variant = Variant(score=lambda s, b, h, q, k: s * W[h])
    assert copy.copy(variant) is variant and copy.deepcopy([variant])[0] is variant
    with pytest.raises(TypeError, match="captured tensors are references"):
        pickle.dumps(variant)


def test_a_variant_cannot_be_changed():
    variant = Variant(mask=masks.causal)
    with pytest.raises(AttributeError, match="snapshot"):
        variant.mask = None


# What is traced


@pytest.mark.parametrize(
    "code",
    [
        "lambda s, b, h, q, k: s * 2 + q",
        "functools.partial(lambda f, s, b, h, q, k: s * f + q, 2)",
        "type('C', (), {'__call__': lambda self, s, b, h, q, k: s * 2 + q})()",
    ],
)
def test_functions_without_source_partials_and_callable_objects_are_traced(code):
    made = eval(code, {"functools": functools})
    assert score_text(made) == score_text(lambda s, b, h, q, k: s * 2 + q)


def test_functions_given_on_the_command_line_are_traced_and_refused_by_name():
    program = """
from cutedsl_fa3.variant import Variant
print(Variant(mask=lambda b, h, q, k: k <= q).mask.nodes[-1].op)
try:
    Variant(mask=lambda b, h, q, k: k <= q and k > 3)
except ValueError as error:
    print(error)
print("alive")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = found.stdout.splitlines()
    assert lines[0] == "le" and "`&` for `and`" in lines[1] and lines[2] == "alive", found


def test_helpers_globals_and_constants_are_read_when_the_variant_is_made():
    namespace = {"factor": 2.0}
    exec("def helper(x): return x * factor\ndef f(s, b, h, q, k): return helper(s)", namespace)
    first = Variant(score=namespace["f"])
    namespace["factor"] = 4.0
    assert "2.0" in first.text and "4.0" in Variant(score=namespace["f"]).text
    exec("def helper(x): return x + factor", namespace)
    assert "add" in Variant(score=namespace["f"]).text


def test_parameters_can_be_captured():
    weight = torch.nn.Parameter(torch.ones(4))
    variant = Variant(score=lambda s, b, h, q, k: s * weight[h] + weight[0])
    assert variant.captures == (weight,)


def test_published_masks_run_unmodified():
    def noop_mask(batch, head, token_q, token_kv):
        return batch.new_ones(size=(), dtype=torch.bool, device=batch.device)

    def alibi_bias(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / 16))
        return score + (kv_idx - q_idx) * scale

    def soft_capped(score, b, h, q_idx, kv_idx):
        return 30.0 * torch.tanh(score / 30.0)

    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < COUNT) | (q_idx >= kv_idx)

    def dilated(b, h, q_idx, kv_idx):
        return ((q_idx - kv_idx) % 4 == 0) & (torch.abs(q_idx - kv_idx) <= 64)

    assert Variant(mask=noop_mask).mask is None
    assert Variant(score=alibi_bias).score.inputs == {"score", "h", "q", "k"}
    assert Variant(score=soft_capped, mask=prefix_lm).captures == (COUNT,)
    assert Variant(mask=dilated).mask.result.op == "and"


def test_numpy_scalars_count_as_numbers():
    text = score_text(lambda s, b, h, q, k: np.float64(2) * s + np.int32(3) * q)
    assert "mul(2.0, " in text and "mul(3, " in text


def test_operations_on_0d_captured_tensors_stay_live():
    variant = Variant(score=lambda s, b, h, q, k: s * torch.tanh(SCALAR) * (COUNT + 1))
    assert {"tanh", "load"} <= {node.op for node in variant.score.nodes}


def test_length_symbols_combine_with_each_other_and_with_torch_functions():
    text = Variant(
        mask=lambda b, h, q, k: torch.minimum(seqlen_q, k) < 2 * seqlen_k - seqlen_q + abs(seqlen_q)
    ).text
    assert "minimum" in text and "mul(2, " in text
    assert "to_float" in score_text(lambda s, b, h, q, k: s / seqlen_k.float().log())


def test_length_symbols_have_no_value_outside_a_trace():
    for use in (lambda: seqlen_q + 1, lambda: 3 < seqlen_k, lambda: torch.abs(seqlen_k)):
        with pytest.raises(VariantError, match="only inside a function of a variant"):
            use()


def test_tracing_takes_at_most_5_ms():
    def window_alibi(s, b, h, q, k):
        return torch.where(q - k < 512, 30.0 * torch.tanh((s + W[h] * (k - q)) / 30.0), s)

    times = []
    for _ in range(5):
        start = time.perf_counter()
        Variant(score=window_alibi, mask=masks.window(511, 0))
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3
