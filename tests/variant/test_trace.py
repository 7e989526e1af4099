"""What a score or mask may say, what its graph is, and what is refused with which words."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import re
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
HOLDER = type("Holder", (), {"w": W})()


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
        with pytest.raises(VariantError, match="only inside a score or mask"):
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


# What is refused


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda s, b, h, q, k: s * torch.tanh(W)[h], "torch.tanh"),
        (lambda s, b, h, q, k: s * (W * 2)[h], "Tensor.mul"),
        (lambda s, b, h, q, k: s * W.T[h], ".T"),
        (lambda s, b, h, q, k: s * W.float()[h], "Tensor.float"),
        (lambda s, b, h, q, k: s * SCALAR.item(), "Tensor.item"),
        (lambda s, b, h, q, k: s * W.sum(), "Tensor.sum"),
        (lambda s, b, h, q, k: s * W.add_(0)[h], "Tensor.add_"),
        (lambda s, b, h, q, k: s * W.data[h], ".data"),
        (lambda s, b, h, q, k: s * HOLDER.w.exp()[h], "Tensor.exp"),
        (lambda s, b, h, q, k, w=W: s * torch.relu(w)[h], "torch.relu"),
        (lambda s, b, h, q, k: s * torch.ops.aten.tanh(W)[h], "torch.tanh"),
        (lambda s, b, h, q, k: s * sum(W), "unbind"),
        (lambda s, b, h, q, k: s * torch.stack([W, W])[0, h], "torch.stack"),
        (lambda s, b, h, q, k: torch.where(W > 0, s, 0), "Tensor.gt"),
        (lambda s, b, h, q, k: s * np.tanh(W)[0], "__array__"),
    ],
)
def test_operations_on_captured_tensors_only_are_refused_by_name(function, named):
    message = refused(score=function)
    assert named in message and ("outside" in message), message
    assert "test_trace.py:" in message


def hyperbolic(x):
    return torch.tanh(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


@pytest.mark.filterwarnings("ignore")  # scripting is deprecated, and still in use
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.jit.script(hyperbolic),
        lambda: torch.compile(hyperbolic, backend="eager"),
        torch.nn.Tanh,
        lambda: Doubled.apply,
    ],
)
def test_compiled_scripted_and_autograd_helpers_cannot_freeze_a_captured_tensor(made):
    helper = made()
    assert "outside" in refused(score=lambda s, b, h, q, k: s * helper(W)[h])


def test_captured_tensors_used_whole_or_half_indexed_are_refused():
    assert "index it to one element" in refused(score=lambda s, b, h, q, k: s + W)
    assert "one index for each dimension" in refused(score=lambda s, b, h, q, k: s + TABLE[h])
    assert "indexed with 2" in refused(score=lambda s, b, h, q, k: s + W[b, h])
    assert "slices" in refused(score=lambda s, b, h, q, k: s + W[1:][h])
    assert "not int" in refused(score=lambda s, b, h, q, k: s + W[h / 2])
    assert "out of range" in refused(score=lambda s, b, h, q, k: s + W[4])


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s * TABLE.T[h, b],
        lambda s, b, h, q, k: s * W.detach()[h],
        lambda s, b, h, q, k: s * TABLE.view(-1)[h],
        lambda s, b, h, q, k: s * TABLE.reshape(4, 3)[h, b],
        lambda s, b, h, q, k: s * SCALAR.detach(),
    ],
)
def test_views_of_captured_tensors_are_refused_as_views(function):
    message = refused(score=function)
    assert "do the view outside the function and capture the result" in message, message
    assert "frozen" not in message


@pytest.mark.filterwarnings("ignore")  # torch warns that sparse layouts are in beta
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), r"shape \(3, 3\) has layout sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), r"shape \(3, 3\) has layout sparse_csr"),
        (lambda: torch.empty(3, 3, device="meta"), r"shape \(3, 3\) is on device meta"),
        (lambda: torch.empty(3, 0), r"shape \(3, 0\) has no elements"),
    ],
)
def test_captured_tensors_that_hold_no_dense_elements_are_refused(made, words):
    tensor = made()
    for index in (lambda h: tensor[h, h], lambda h: tensor[h][h]):
        assert re.search(words, refused(score=lambda s, b, h, q, k, i=index: s + i(h)))


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s + q // 0,
        lambda s, b, h, q, k: s + q % 0,
        lambda s, b, h, q, k: s + q % False,
        lambda s, b, h, q, k: s + q // torch.tensor(0),
        lambda s, b, h, q, k: s + torch.div(q, 0, rounding_mode="trunc"),
        lambda s, b, h, q, k: s + torch.fmod(q, 0),
        lambda s, b, h, q, k: s + q // (h * 0),
        lambda s, b, h, q, k: s + 5 % (h * 0),
        lambda s, b, h, q, k: s + seqlen_k // 0,
        lambda s, b, h, q, k: s + COUNT // 0,
    ],
)
def test_integers_divided_by_a_zero_known_now_are_refused(function):
    assert "has no value; valid are other divisors" in refused(score=function)
    assert "fmod" in score_text(lambda s, b, h, q, k: s % 0.0)


def test_a_tensor_of_an_unsupported_dtype_is_refused_by_dtype():
    doubles = W.double()
    assert "float64" in refused(score=lambda s, b, h, q, k: s + doubles[h])


@pytest.mark.parametrize(
    ("code", "construct", "instead"),
    [
        ("lambda s, b, h, q, k: s if q > 3 else -s", "conditional expression", "torch.where"),
        ("lambda s, b, h, q, k: s + max(q, k)", "`max()`", "torch.maximum"),
        ("lambda s, b, h, q, k: s + min(q, k)", "`min()`", "torch.minimum"),
        ("lambda s, b, h, q, k: s + int(q)", "`int()`", ".int()"),
        ("lambda s, b, h, q, k: s + float(q)", "`float()`", ".float()"),
        ("lambda s, b, h, q, k: s + len(range(q))", "`range()`", "Python number"),
        ("lambda s, b, h, q, k: math.exp(s)", "math", "torch.exp"),
        ("lambda s, b, h, q, k: s + [1, 2][q]", "index", "captured tensor"),
        ("lambda s, b, h, q, k: s + {1: 2}[q]", "dict", "captured tensor"),
        ("lambda s, b, h, q, k: s if SCALAR > 0 else -s", "conditional", "torch.where"),
        ("lambda b, h, q, k: k <= q and k > 3", "`and`", "`&`"),
        ("lambda b, h, q, k: k <= q or k > 3", "`or`", "`|`"),
        ("lambda b, h, q, k: not k <= q", "`not`", "`~`"),
        ("lambda b, h, q, k: 0 <= k < q", "chained comparison", "(a <= x) & (x < b)"),
        ("lambda b, h, q, k: q in (1, 2)", "`in`", "`|`"),
    ],
)
@pytest.mark.parametrize("with_source", [True, False])
def test_python_control_flow_is_refused_by_name_with_the_replacement(
    tmp_path, code, construct, instead, with_source
):
    names = {"math": math, "SCALAR": SCALAR}
    path = tmp_path / "written.py"
    if with_source:
        path.write_text(f"f = {code}\n")
        exec(compile(path.read_text(), str(path), "exec"), names)
    else:
        names["f"] = eval(code, names)
    kind = "score" if "s, b" in code else "mask"
    message = refused(**{kind: names["f"]})
    assert instead in message, message
    if with_source:
        assert construct in message and f"{path}:1" in message, message


def test_an_if_statement_is_refused_as_such():
    def branching(s, b, h, q, k):
        if q > k:
            return s
        return -s

    message = refused(score=branching)
    assert "`if`" in message and "torch.where" in message and "test_trace.py" in message


@pytest.mark.parametrize(
    ("score", "word"),
    [
        (lambda s, b, h, q, k: torch.erf(s), "torch.erf"),
        (lambda s, b, h, q, k: s.cumsum(0), ".cumsum()"),
        (lambda s, b, h, q, k: s @ s, "`@`"),
        (lambda s, b, h, q, k: s.double(), ".double()"),
        (lambda s, b, h, q, k: np.exp(s), "numpy.exp"),
    ],
)
def test_unsupported_functions_are_refused_with_the_list_of_supported_ones(score, word):
    message = refused(score=score)
    assert word in message and "torch.exp" in message


def test_in_place_changes_of_traced_values_are_refused():
    assert "in place" in refused(score=lambda s, b, h, q, k: s.add_(1))


def test_tensors_made_inside_are_refused_unless_they_are_numbers():
    assert "torch.arange" in refused(score=lambda s, b, h, q, k: s + torch.arange(4)[h])
    assert "torch.rand" in refused(score=lambda s, b, h, q, k: s + torch.rand(()))
    assert "1.5" in score_text(lambda s, b, h, q, k: s + torch.tensor(1.5))


def test_wrong_results_are_refused():
    assert "return` missing" in refused(score=lambda s, b, h, q, k: None)
    assert "tuple" in refused(score=lambda s, b, h, q, k: (s, s))
    assert "not bool" in refused(mask=lambda b, h, q, k: q - k)
    assert "not bool" in refused(mask=lambda b, h, q, k: 1)
    assert "belongs in mask" in refused(score=lambda s, b, h, q, k: q > k)
    assert "index it" in refused(score=lambda s, b, h, q, k: W)


def test_wrong_parameters_are_refused_and_a_mask_given_as_score_is_recognised():
    assert "score(s, b, h, q, k)" in refused(score=lambda s, q: s)
    assert "did you mean Variant(mask=...)" in refused(score=masks.causal)
    assert "must be a function" in refused(mask=3)


def test_integers_beyond_32_bits_are_refused():
    assert "32-bit" in refused(score=lambda s, b, h, q, k: s + 2**40 * q)


def test_a_value_kept_from_another_trace_is_refused():
    kept = []
    Variant(score=lambda s, b, h, q, k: kept.append(s) or s)
    assert "another trace" in refused(score=lambda s, b, h, q, k: s + kept[0])


def test_an_error_of_the_users_own_is_not_wrapped():
    with pytest.raises(ZeroDivisionError):
        Variant(score=lambda s, b, h, q, k: s * (1 / 0))


def test_a_failed_trace_leaves_torch_as_it_was():
    refused(score=lambda s, b, h, q, k: s * torch.tanh(W)[h])
    assert torch.tanh(W)[0].item() == 0.0
