"""What a variant says of weights, sinks and outputs, and with which words it is refused."""

from __future__ import annotations

import re

import pytest
import torch

import cutedsl_fa3
from cutedsl_fa3 import masks
from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Elementwise, OnlineSoftmax, Variant, seqlen_q

SINK = torch.tensor([0.5, 1.5])
BIAS = torch.tensor(0.25)
GATE = torch.ones(2, 3)


def refused(make) -> str:
    with pytest.raises(VariantError) as caught:
        make()
    return str(caught.value)


# What it is


def test_both_kinds_of_softmax_are_names_of_the_package():
    assert cutedsl_fa3.OnlineSoftmax is OnlineSoftmax
    assert cutedsl_fa3.Elementwise is Elementwise


def test_a_variant_without_more_is_the_online_softmax_without_a_sink():
    variant = Variant()
    assert isinstance(variant.softmax, OnlineSoftmax) and variant.softmax.sink is None
    assert (variant.weight, variant.sink, variant.epilogue) == (None, None, None)
    assert variant.has_lse and variant.graphs == {} and variant.text == "plain attention"


def test_the_text_names_weights_sinks_and_the_epilogue():
    sigmoid = Variant(softmax=Elementwise(lambda s: torch.sigmoid(s + BIAS)))
    assert sigmoid.text.splitlines() == [
        "t0: float32[]",
        "weight(s)",
        "  %0 = input(score): float",
        "  %1 = load(t0): float",
        "  %2 = add(%0, %1): float",
        "  %3 = sigmoid(%2): float",
        "  return %3",
    ]
    sunk = Variant(softmax=OnlineSoftmax(SINK), epilogue=lambda o, lse, b, h, q: o * GATE[b, h])
    assert sunk.text.splitlines() == [
        "t0: float32[?]",
        "t1: float32[?, ?]",
        "epilogue(o, lse, b, h, q)",
        "  %0 = input(o): float",
        "  %1 = input(b): int",
        "  %2 = input(h): int",
        "  %3 = load(t1, %1, %2): float",
        "  %4 = mul(%0, %3): float",
        "  return %4",
        "sink: t0",
    ]
    texts = {
        Variant(softmax=softmax).text
        for softmax in (
            OnlineSoftmax(),
            OnlineSoftmax(SINK),
            OnlineSoftmax(SINK[0]),
            OnlineSoftmax(SINK.half()),
            Elementwise(torch.relu),
            Elementwise(torch.sigmoid),
        )
    }
    assert len(texts) == 6


def test_captured_tensors_are_numbered_score_mask_weight_epilogue_each_once():
    table, length, scalar, gate = torch.ones(2, 3), torch.tensor([4]), BIAS, GATE
    variant = Variant(
        score=lambda s, b, h, q, k: s + table[b, h],
        mask=lambda b, h, q, k: k < length[b],
        softmax=Elementwise(lambda s: torch.relu(s) * scalar),
        epilogue=lambda o, lse, b, h, q: o * gate[b, h] * scalar + table[b, h],
    )
    expected = (table, length, scalar, gate)
    assert all(a is b for a, b in zip(variant.captures, expected, strict=True))
    assert list(variant.graphs) == ["score", "mask", "weight", "epilogue"]
    assert variant.epilogue.captures == (3, 2, 0) and not variant.has_lse


def test_a_sink_that_functions_read_too_is_one_captured_tensor():
    sink = torch.tensor([1.0, 2.0])
    variant = Variant(
        score=lambda s, b, h, q, k: s + sink[h],
        softmax=OnlineSoftmax(sink),
        epilogue=lambda o, lse, b, h, q: o * sink[h],
    )
    assert variant.captures == (sink,) and variant.sink == 0
    late = Variant(softmax=OnlineSoftmax(sink), epilogue=lambda o, lse, b, h, q: o * GATE[b, h])
    assert late.sink == 0 and late.captures[1] is GATE
    after = Variant(score=lambda s, b, h, q, k: s * BIAS, softmax=OnlineSoftmax(sink))
    assert after.sink == 1 and after.captures[1] is sink


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (12,)])
def test_sinks_are_one_number_or_one_for_each_head(dtype, shape):
    sink = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    variant = Variant(softmax=OnlineSoftmax(sink))
    assert variant.captures[variant.sink] is sink


def test_an_epilogue_that_returns_o_is_none_and_one_that_returns_lse_is_not():
    assert Variant(epilogue=lambda o, lse, b, h, q: o).epilogue is None
    assert Variant(epilogue=lambda o, lse, b, h, q: lse).epilogue is not None


def test_weights_equal_to_the_score_are_not_the_online_softmax():
    variant = Variant(softmax=Elementwise(lambda s: s))
    assert variant.weight.text == "%0 = input(score): float\nreturn %0" and not variant.has_lse


@pytest.mark.parametrize(
    "result", [lambda x: x > 0, lambda x: 3, lambda x: True, lambda x: x.int()]
)
def test_weights_and_outputs_of_other_types_become_floats(result):
    variant = Variant(softmax=Elementwise(result), epilogue=lambda o, lse, b, h, q: result(o))
    assert variant.weight.result.dtype == variant.epilogue.result.dtype == "float"


@pytest.mark.parametrize(
    "made", [torch.sigmoid, torch.nn.ReLU(), torch.nn.functional.relu, torch.tanh]
)
def test_torch_functions_and_modules_are_weights_as_they_are(made):
    assert Variant(softmax=Elementwise(made)).weight.result.op in ("sigmoid", "maximum", "tanh")


def test_lengths_may_be_used_in_weights_and_epilogues():
    variant = Variant(
        softmax=Elementwise(lambda s: torch.relu(s) / seqlen_q),
        epilogue=lambda o, lse, b, h, q: torch.where(q == seqlen_q - 1, 0.0, o),
    )
    assert variant.weight.inputs == {"score", "seqlen_q"}
    assert variant.epilogue.inputs == {"o", "q", "seqlen_q"}


def test_an_elementwise_function_is_traced_when_the_variant_is_made():
    namespace = {"torch": torch, "factor": 2.0}
    exec("def f(s): return torch.relu(s) * factor", namespace)
    elementwise = Elementwise(namespace["f"])
    first = Variant(softmax=elementwise)
    namespace["factor"] = 4.0
    assert "2.0" in first.text and "4.0" in Variant(softmax=elementwise).text
    assert first.softmax is elementwise


def test_softmaxes_and_variants_of_them_cannot_be_changed():
    for made, name in (
        (OnlineSoftmax(SINK), "sink"),
        (Elementwise(torch.relu), "f"),
        (Variant(), "softmax"),
    ):
        with pytest.raises(AttributeError, match="snapshot"):
            setattr(made, name, None)
        with pytest.raises(AttributeError):
            made.other = 1
        assert not hasattr(made, "__dict__")


def test_softmaxes_print_what_they_are():
    assert repr(OnlineSoftmax()) == "OnlineSoftmax()"
    assert repr(OnlineSoftmax(SINK)) == "OnlineSoftmax(sink=a float32 tensor of shape (2,))"
    assert repr(Elementwise(torch.relu)) == "Elementwise(torch.relu)"


# What it is not


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("sigmoid", "softmax is 'sigmoid'; valid are .* as Elementwise(torch.sigmoid)"),
        (torch.sigmoid, "the function `torch.sigmoid`; .*; give Elementwise(torch.sigmoid)"),
        (masks.causal, "the function `causal`; .*; give Elementwise(causal)"),
        (SINK, "a float32 tensor of shape (2,); .*give a sink as OnlineSoftmax(sink=...)"),
        (OnlineSoftmax, "the class OnlineSoftmax; .*make one, as OnlineSoftmax()"),
        (Elementwise, "the class Elementwise; .*make one, as Elementwise(torch.sigmoid)"),
        (None, "softmax is None; valid are OnlineSoftmax(sink=None) and Elementwise(f)"),
        (3, "softmax is 3; valid are OnlineSoftmax(sink=None) and Elementwise(f)"),
    ],
)
def test_what_is_no_softmax_is_refused_with_how_to_make_one(given, words):
    pattern = re.escape(words).replace(r"\.\*", ".*")
    assert re.search(pattern, refused(lambda: Variant(softmax=given)))


@pytest.mark.filterwarnings("ignore")  # torch warns that sparse layouts are in beta
@pytest.mark.parametrize(
    ("sink", "said"),
    [
        (1.0, "sink is 1.0"),
        ([1.0], "sink is [1.0]"),
        (torch.ones(2, 3), "sink is a float32 tensor of shape (2, 3)"),
        (torch.ones(2).long(), "sink is a int64 tensor of shape (2,)"),
        (torch.ones(2).double(), "sink is a float64 tensor of shape (2,)"),
        (torch.ones(0), "sink is a float32 tensor of shape (0,)"),
        (torch.ones(2, device="meta"), "sink is a float32 tensor of shape (2,) on device meta"),
        (torch.ones(2).to_sparse(), "sink is a sparse_coo float32 tensor of shape (2,)"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "sink is a nested tensor"),
    ],
)
def test_sinks_of_another_kind_are_refused_with_what_was_given_and_what_is_valid(sink, said):
    message = refused(lambda: OnlineSoftmax(sink))
    assert message.startswith(said + "; valid is a tensor of shape () or (heads,)"), message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Elementwise("relu"), "f of Elementwise must be a function f(s), not 'relu'"),
        (lambda: Elementwise(lambda s, b, h, q, k: s), "cannot be called as f(s)"),
        (lambda: Elementwise(lambda s, b, h, q, k: s), "positions belong in score="),
        (lambda: Elementwise(lambda: 1.0), "cannot be called as f(s)"),
        (lambda: Variant(epilogue=lambda o: o), "called as epilogue(o, lse, b, h, q)"),
        (lambda: Variant(epilogue=SINK), "epilogue must be a function epilogue(o, lse, b, h, q)"),
        (lambda: Variant(epilogue=lambda o, lse, b, h, q: None), "return` missing"),
        (lambda: Variant(softmax=Elementwise(lambda s: None)), "f of Elementwise `"),
        (lambda: Variant(softmax=Elementwise(lambda s: s if s > 0 else 0)), "torch.where"),
        (lambda: Variant(softmax=Elementwise(lambda s: s + SINK)), "index it to one element"),
        (lambda: Variant(epilogue=lambda o, lse, b, h, q: o * torch.tanh(SINK)[h]), "outside"),
    ],
)
def test_functions_that_do_not_fit_their_role_are_refused(make, words):
    assert words in refused(make)


def test_an_epilogue_cannot_read_the_lse_of_elementwise_weights():
    relu = Elementwise(torch.relu)
    reads = refused(lambda: Variant(softmax=relu, epilogue=lambda o, lse, b, h, q: o * lse))
    assert "epilogue reads lse" in reads and "valid are o, b, h and q" in reads
    assert Variant(softmax=relu, epilogue=lambda o, lse, b, h, q: o * h).epilogue is not None
