"""What a function of a variant may not say, and with which words it is refused."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from cutedsl_fa3 import masks
from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Variant, seqlen_k

W = torch.arange(4.0)
TABLE = torch.arange(12.0).reshape(3, 4)
SCALAR = torch.tensor(2.0)
COUNT = torch.tensor(3)
LONG, WIDE, COUNTS = torch.ones(3, 200), torch.ones(3, 16), torch.ones(3, 4).long()
HOLDER = type("Holder", (), {"w": W})()


def score_text(function) -> str:
    return Variant(score=function).score.text


def refused(score=None, mask=None) -> str:
    with pytest.raises(VariantError) as caught:
        Variant(score=score, mask=mask)
    return str(caught.value)


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
    assert "test_refused.py:" in message


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
    assert "not int" in refused(score=lambda s, b, h, q, k: s + W[h / 2])
    assert "out of range" in refused(score=lambda s, b, h, q, k: s + W[4])


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s * TABLE.T[h, b],
        lambda s, b, h, q, k: s * W.detach()[h],
        lambda s, b, h, q, k: s * TABLE.view(-1)[h],
        lambda s, b, h, q, k: s * TABLE.reshape(4, 3)[h, b],
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
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is nested"),
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


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_a_tensor_of_an_unsupported_dtype_is_refused_by_dtype(dtype):
    table = torch.zeros(4, dtype=dtype)
    message = refused(score=lambda s, b, h, q, k: s + table[h])
    assert f"has dtype {str(dtype)[6:]}; convert it outside to one of float64" in message


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


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (lambda s, b, h, q, k: TABLE[h], "row of shape (4,), not one value"),
        (lambda s, b, h, q, k: s + TABLE[h][:1], "row of shape (1,), not one value"),
        (lambda s, b, h, q, k: s + LONG[h].sum(), "200 elements of a captured tensor"),
        (lambda s, b, h, q, k: s + (WIDE[h] * WIDE[h].unsqueeze(1)).sum(), "up to 128 elements"),
        (lambda s, b, h, q, k: s + torch.dot(TABLE[h], WIDE[h]), "shapes (4,) and (16,)"),
        (lambda s, b, h, q, k: s + (TABLE[h] + WIDE[h]).sum(), "(4,) and (16,) do not go together"),
        (lambda s, b, h, q, k: s @ s, "rows of shapes () and ()"),
        (lambda s, b, h, q, k: s + (TABLE[h] * 2)[q], "traced index is for captured tensors"),
        (lambda s, b, h, q, k: s + (TABLE[h] * 2)[4], "index 4 is out of range for a row"),
        (lambda s, b, h, q, k: s + (TABLE[h] * 2)[4:].sum(), "is empty"),
        (lambda s, b, h, q, k: s + (TABLE[h] * 2)[0, 0], "is indexed with 2"),
        (lambda s, b, h, q, k: s + TABLE[h].sum(1), "dim is 1 of a row of shape (4,)"),
        (lambda s, b, h, q, k: s + TABLE[h].max(0)[0], "write torch.amax"),
        (lambda s, b, h, q, k: s + TABLE[h].view(3), "has no shape (3,)"),
        (lambda s, b, h, q, k: s + COUNTS[h].mean(), "torch.mean takes float values"),
        (lambda s, b, h, q, k: s + TABLE[h, 4:].sum(), "a slice of a dimension of size 4 is empty"),
        (lambda s, b, h, q, k: s + TABLE[h, :q].sum(), "no fixed size"),
        (lambda s, b, h, q, k: s + TABLE[h, ::-1].sum(), "step -1; valid are positive ones"),
        (lambda s, b, h, q, k: s + TABLE[None, h, q], "None in an index"),
        (lambda s, b, h, q, k: s + TABLE[COUNTS[h]].sum(), "one index for each dimension"),
        (lambda s, b, h, q, k: s + W[h > 1], "an index is bool, not int"),
    ],
)
def test_rows_are_refused_where_they_make_no_single_value(score, words):
    message = refused(score=score)
    assert words in message, message


@pytest.mark.filterwarnings("ignore")  # scripting is deprecated, and still in use
def test_functions_that_take_real_tensors_only_are_refused_as_such():
    scripted = torch.jit.script(hyperbolic)
    assert "takes real tensors only" in refused(score=lambda s, b, h, q, k: scripted(s))


def test_an_if_statement_is_refused_as_such():
    def branching(s, b, h, q, k):
        if q > k:
            return s
        return -s

    message = refused(score=branching)
    assert "`if`" in message and "torch.where" in message and "test_refused.py" in message


@pytest.mark.parametrize(
    ("score", "word"),
    [
        (lambda s, b, h, q, k: torch.erfinv(s), "torch.erfinv"),
        (lambda s, b, h, q, k: s.cumsum(0), ".cumsum()"),
        (lambda s, b, h, q, k: TABLE[h].cumsum(0)[0], ".cumsum()"),
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
