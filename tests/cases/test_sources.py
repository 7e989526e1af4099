"""Functions from anywhere, edited at any time: what is called is what they say now."""

from __future__ import annotations

import code
import functools
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import cache, masks

from .alone import python
from .oracles import drawn, same

SIZES = (1, 70, 130, 2, 2)


def kernel_key(variant: fa3.Variant, dim: int = 64) -> str:
    """What the kernel of a variant is found by, in memory and on disk."""
    q, k, v = drawn("cpu", SIZES, dim)
    return cache.key(fa3.plan(q, k, v, variant).kernel)


# Functions without a source.

SCORE = "lambda s, b, h, q, k: s - 0.125 * torch.abs(q - k)"
DEFINED = (
    "def score(s, b, h, q, k):\n"
    "    return s - 0.125 * torch.abs(q - k)\n"
    "def mask(b, h, q, k):\n"
    "    return (k <= q) | (k < 5)\n"
)
BRANCH = "def score(s, b, h, q, k):\n    return s if k > q else -s\n"


def here(s, b, h, q, k):
    return s - 0.125 * torch.abs(q - k)


class Callee:
    """A score that is an object, a method, and one of two arguments more."""

    def __call__(self, s, b, h, q, k):
        return here(s, b, h, q, k)

    def method(self, s, b, h, q, k):
        return here(s, b, h, q, k)

    @staticmethod
    def rate(rate, s, b, h, q, k):
        return s - rate * torch.abs(q - k)


def executed() -> Callable[..., Any]:
    space = {"torch": torch}
    exec(DEFINED, space)
    return space["score"]


def in_a_cell() -> Callable[..., Any]:
    """As a notebook does it: compiled under a name that only linecache knows."""
    name = "<ipython-input-7-0123456789ab>"
    linecache.cache[name] = (len(DEFINED), None, DEFINED.splitlines(keepends=True), name)
    space = {"torch": torch}
    exec(compile(DEFINED, name, "exec"), space)
    return space["score"]


def typed() -> Callable[..., Any]:
    """At the prompt of an interactive interpreter."""
    console = code.InteractiveConsole({"torch": torch})
    for line in [*DEFINED.splitlines()[:2], ""]:
        console.push(line)
    return console.locals["score"]


def in_a_module() -> Callable[..., Any]:
    module = types.ModuleType("made_up")
    module.torch = torch
    exec(DEFINED, vars(module))
    return module.score


SOURCES = {
    "lambda": lambda: eval(SCORE, {"torch": torch}),
    "exec": executed,
    "cell": in_a_cell,
    "prompt": typed,
    "module": in_a_module,
    "object": Callee,
    "method": lambda: Callee().method,
    "partial": lambda: functools.partial(Callee.rate, 0.125),
    "wrapped": lambda: functools.wraps(here)(lambda *args: here(*args)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_function_from_anywhere_is_what_it_would_be_in_a_file(device, source):
    """Source: NVIDIA/cutlass#2636 and #3424."""
    q, k, v = drawn(device, SIZES)
    variant, written = fa3.Variant(SOURCES[source](), masks.causal), fa3.Variant(here, masks.causal)
    assert variant.text == written.text
    assert kernel_key(variant) == kernel_key(written)
    assert same(fa3.attention_with_lse(q, k, v, variant), fa3.attention_with_lse(q, k, v, written))


@pytest.mark.compile
@pytest.mark.parametrize("source", ["exec", "prompt"])
def test_a_kernel_needs_no_source_of_the_functions_in_it(source):
    variant = fa3.Variant(SOURCES[source]())
    q, k, v = drawn("cpu", SIZES)
    assert cache.get(fa3.plan(q, k, v, variant).kernel).resources.spills == 0


@pytest.mark.parametrize("how", ["exec", "cell", "prompt"])
def test_a_function_that_cannot_be_traced_is_refused_in_words_without_a_source_too(how, capsys):
    space: dict[str, Any] = {"torch": torch, "fa3": fa3}
    if how == "prompt":
        console = code.InteractiveConsole(space)
        for line in (*BRANCH.splitlines(), "", "fa3.Variant(score)", "survived = 1"):
            console.push(line)
        said = capsys.readouterr().err
        assert space["survived"] == 1
    else:
        name = "<ipython-input-8-0123456789ab>" if how == "cell" else "<string>"
        if how == "cell":
            linecache.cache[name] = (len(BRANCH), None, BRANCH.splitlines(keepends=True), name)
        exec(compile(BRANCH, name, "exec"), space)
        with pytest.raises(fa3.VariantError) as caught:
            fa3.Variant(space["score"])
        said = str(caught.value)
    assert "torch.where" in said
    assert fa3.Variant(here).score is not None


STATEMENTS = """
import torch
import cutedsl_fa3 as fa3
q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
def mask(b, h, q, k):
    return k <= q

out = fa3.attention(q, q, q + 1, fa3.Variant(lambda s, b, h, q, k: s + k, mask))
def bad(s, b, h, q, k):
    return max(s, 0)

try:
    fa3.Variant(bad)
except fa3.VariantError as error:
    print("refused:", error)

print("then:", out.sum().item())
"""


@pytest.mark.parametrize("how", ["-c", "prompt", "standard input"])
def test_a_session_without_a_file_runs_refuses_and_goes_on(how):
    """Source: NVIDIA/cutlass#2636 and #3424."""
    arguments = {"-c": ("-c", STATEMENTS), "prompt": ("-i", "-q"), "standard input": ("-",)}[how]
    said = python(*arguments, given=None if how == "-c" else STATEMENTS).stdout
    assert "then: 512.0" in said
    (refused,) = (line for line in said.splitlines() if "refused:" in line)
    assert "torch.maximum" in refused


@pytest.mark.jupyter
def test_an_ipython_session_runs_refuses_and_goes_on():
    """Source: NVIDIA/cutlass#2636."""
    from IPython.core.interactiveshell import InteractiveShell

    session = InteractiveShell.instance()
    try:
        first = session.run_cell(STATEMENTS)
        assert first.success
        edited = session.run_cell("def mask(b, h, q, k):\n    return k < 3\n")
        second = session.run_cell("text = fa3.Variant(mask=mask).text")
        assert edited.success and second.success
        assert "3" in session.user_ns["text"]
        assert session.user_ns["out"].sum().item() == 512
    finally:
        InteractiveShell.clear_instance()


WITHOUT_SOURCE = """
import cutlass.cute as cute
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.pipelines import Schedule

class Mine(GemmSm90):
    @cute.jit
    def multiply(self, mma, acc, a, b, slot, *, accumulate):
        pass

schedule = Schedule(128, 128, 2, 2, "none")
try:
    compile_kernel(Mine(schedule))
except Exception as error:
    print(error)
assert compile_kernel(GemmSm90(schedule)).cubin
print("alive")
"""


@pytest.mark.compile
@pytest.mark.slow
def test_a_kernel_whose_own_methods_have_no_source_says_which_and_what_to_do():
    """Source: NVIDIA/cutlass#2636."""
    said = python("-c", WITHOUT_SOURCE).stdout
    assert "multiply" in said and "source" in said and ".py file" in said
    assert said.rstrip().endswith("alive")


# A helper, a number or an object that changes after a kernel was made from it.


def helper(x):
    return x


WEIGHT = 1.0


class Settings:
    """Something that a function reads."""

    weight = 1.0
    weights = (1.0, 5.0)


def by_helper(s, b, h, q, k):
    return s + helper(k * 0.25)


def by_constant(s, b, h, q, k):
    return s + WEIGHT * k * 0.25


def by_default(s, b, h, q, k, weight=1.0):
    return s + weight * k * 0.25


def by_attribute(s, b, h, q, k):
    return s + Settings.weight * k * 0.25


def by_item(s, b, h, q, k):
    return s + SETTINGS["weights"][0] * k * 0.25


def by_closure() -> tuple[Callable[..., Any], Callable[[], None]]:
    weight = 1.0

    def score(s, b, h, q, k):
        return s + weight * k * 0.25

    def change() -> None:
        nonlocal weight
        weight = 2.0

    return score, change


SETTINGS = {"weights": [1.0, 5.0]}
HERE = sys.modules[__name__]


def edits(monkeypatch: pytest.MonkeyPatch, kind: str) -> tuple[Callable[..., Any], Callable]:
    """A score that adds k / 4, and the edit after which it adds k / 2."""
    if kind == "closure":
        return by_closure()
    return {
        "helper": (by_helper, lambda: monkeypatch.setattr(HERE, "helper", lambda x: 2 * x)),
        "constant": (by_constant, lambda: monkeypatch.setattr(HERE, "WEIGHT", 2.0)),
        "default": (by_default, lambda: monkeypatch.setattr(by_default, "__defaults__", (2.0,))),
        "attribute": (by_attribute, lambda: monkeypatch.setattr(Settings, "weight", 2.0)),
        "item": (by_item, lambda: monkeypatch.setitem(SETTINGS, "weights", [2.0])),
        "code": (
            by_constant,
            lambda: monkeypatch.setattr(by_constant, "__code__", twice.__code__),
        ),
    }[kind]


def twice(s, b, h, q, k):
    return s + 2.0 * k * 0.25


EDITS = ("helper", "constant", "default", "attribute", "item", "closure", "code")


@pytest.mark.parametrize("kind", EDITS)
def test_a_new_variant_of_an_edited_function_is_what_the_function_now_says(
    device, monkeypatch, kind
):
    """And the old one is what it was. Source: ROCm/FlyDSL#637."""
    q, k, v = drawn(device, SIZES)
    q.zero_()
    score, change = edits(monkeypatch, kind)
    old = fa3.Variant(score)
    before = fa3.attention_with_lse(q, k, v, old)
    change()
    new = fa3.Variant(score)
    after = fa3.attention_with_lse(q, k, v, new)
    for weight, found in ((1.0, before), (2.0, after)):
        bias = weight * 0.25 * torch.arange(130, device=device)
        assert torch.allclose(found[1], bias.logsumexp(0).expand_as(found[1]), atol=1e-3)
    assert kernel_key(old) != kernel_key(new)
    assert same(before, fa3.attention_with_lse(q, k, v, old))


def test_the_same_function_made_into_a_variant_twice_is_one_kernel():
    assert kernel_key(fa3.Variant(by_helper)) == kernel_key(fa3.Variant(by_helper))
