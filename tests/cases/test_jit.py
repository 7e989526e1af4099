"""Functions from anywhere, edited at any time; one kernel for one variant, in every process."""

from __future__ import annotations

import code
import functools
import json
import linecache
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import cache, masks
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.versions import ACCEPTED_DSL, PIP_COMMAND, TESTED_DSL

from .alone import alone, python
from .oracles import drawn, exact, hold, hold_lse, same

SIZES = (1, 70, 130, 2, 2)


def kernel_key(variant: fa3.Variant, dim: int = 64) -> str:
    """What the kernel of a variant is found by, in memory and on disk."""
    q, k, v = drawn("cpu", SIZES, dim)
    return cache.key(fa3.plan(q, k, v, variant).kernel)


# Numbers that change from call to call.


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels compiled from now on, with an empty cache in memory and on disk."""
    names: list[str] = []
    compile_kernel = cache.compile_kernel

    def counting(kernel: Any, *, name: str) -> Any:
        names.append(name)
        return compile_kernel(kernel, name=name)

    monkeypatch.setattr(cache, "compile_kernel", counting)
    monkeypatch.setattr(cache, "_memory", {})
    return names


def twenty_variants(device: str) -> list[fa3.Variant]:
    """Each with a 0-d tensor of its own, as a temperature and as a length."""
    made = []
    for i in range(20):
        temperature = torch.tensor(1.0 + i / 10, device=device)
        end = torch.tensor(100 + i, device=device)
        made.append(
            fa3.Variant(
                lambda s, b, h, q, k, t=temperature: s * t, lambda b, h, q, k, end=end: k < end
            )
        )
    return made


def test_numbers_in_0_d_tensors_are_no_part_of_what_a_kernel_is_found_by():
    """Source: Dao-AILab/flash-attention#2635, modelscope/ms-swift#9797."""
    assert len({kernel_key(variant) for variant in twenty_variants("cpu")}) == 1
    lengths = [(1, 1, 1, 1, 1), (3, 70, 300, 4, 2), (1, 512, 17, 8, 1)]
    plain = {cache.key(fa3.plan(*drawn("cpu", sizes)).kernel) for sizes in lengths}
    assert len(plain) == 1


@pytest.mark.gpu
def test_twenty_values_of_a_0_d_tensor_compile_one_kernel(monkeypatch, tmp_path):
    """Source: Dao-AILab/flash-attention#2635, modelscope/ms-swift#9797."""
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    names = counted(monkeypatch)
    for i, variant in enumerate(twenty_variants("cuda")):
        q, k, v = drawn("cuda", (1 + i % 3, 64 + i, 120 + 7 * i, 4, 2))
        fa3.attention(q, k, v, variant)
    assert len(names) == 1


def test_a_new_value_of_a_0_d_tensor_is_used_at_once(device):
    scale = torch.tensor(1.0, device=device)
    variant = fa3.Variant(lambda s, b, h, q, k: s * scale)
    q, k, v = drawn(device, SIZES)
    for value in (1.0, 0.25, -2.0):
        scale.fill_(value)
        _, lse = hold(q, k, v, variant)
        written = fa3.Variant(lambda s, b, h, q, k, value=value: s * value)
        hold_lse(lse, exact(q, k, v, written)[1])


def test_a_tensor_as_scale_is_refused_with_what_to_do_instead(device):
    q, k, v = drawn(device, SIZES)
    for scale in (torch.tensor(0.5), torch.tensor(0.5, device=device), torch.tensor([0.5])):
        with pytest.raises(fa3.Unsupported, match=r"scale = .*tensor.*Python number.*score"):
            fa3.attention(q, k, v, scale=scale)


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


# Kernels side by side, on disk and in one process.


class ShallowGemm(GemmSm90):
    """One of two kernels of one file, told apart by an attribute of the class."""

    tile_k = 32


class DeepGemm(GemmSm90):
    """The other."""

    tile_k = 128


def gemm_with(tile: int) -> type[GemmSm90]:
    class MadeGemm(GemmSm90):
        tile_k = tile

    return MadeGemm


@pytest.mark.parametrize(
    "kinds", [(ShallowGemm, DeepGemm), (gemm_with(32), gemm_with(128))], ids=["classes", "closure"]
)
def test_kernels_of_one_file_with_other_tiles_are_not_taken_for_each_other(kinds):
    """Source: Dao-AILab/quack#162."""
    schedule = Schedule(128, 128, 1, 2, "none")
    first, second = (cache.key(kind(schedule)) for kind in kinds)
    assert first != second


def several(folder: str, chosen: list[tuple[int, float]]) -> None:
    """Save what each (head_dim, slope) gives, and how many kernels were compiled for it."""
    compile_kernel, compiled = cache.compile_kernel, []

    def counting(kernel: Any, *, name: str) -> Any:
        compiled.append(name)
        return compile_kernel(kernel, name=name)

    cache.compile_kernel = counting
    outputs = []
    for dim, slope in chosen:
        q, k, v = drawn("cuda", SIZES, dim)
        variant = fa3.Variant(lambda s, b, h, q, k, slope=slope: s + slope * k, masks.causal)
        outputs.append([t.cpu() for t in fa3.attention_with_lse(q, k, v, variant)])
    torch.save(outputs, Path(folder) / "outputs.pt")
    print(json.dumps(len(compiled)))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [[(64, 0.1), (128, 0.1), (64, 0.1)], [(64, 0.1), (64, 0.2), (64, 0.1), (128, 0.2)]],
    ids=["head sizes", "scores"],
)
def test_kernels_from_disk_give_what_each_gives_in_a_fresh_process_of_its_own(tmp_path, chosen):
    """Source: Dao-AILab/quack#162."""

    def run(name: str, cases: list[tuple[int, float]], shelf: str) -> tuple[list, int]:
        folder = tmp_path / name
        folder.mkdir()
        shared = {cache.ENVIRONMENT: str(tmp_path / shelf)}
        count = json.loads(alone(several, str(folder), cases, **shared).splitlines()[-1])
        return torch.load(folder / "outputs.pt"), count

    written, compiled = run("written", chosen, "shelf")
    read, again = run("read", chosen, "shelf")
    assert (compiled, again) == (len(set(chosen)), 0)
    for case, first, second in zip(chosen, written, read, strict=True):
        (fresh,), _ = run(f"fresh{len(list(tmp_path.iterdir()))}", [case], f"empty{case}")
        assert same(first, fresh) and same(second, fresh)


# Another compiler than the tested one.

OTHERS = {
    "older": '__version__ = "4.6.0"',
    "newer patch": '__version__ = "4.8.2"',
    "one that begins alike": f'__version__ = "{TESTED_DSL}0"',
    "a development version": f'__version__ = "{TESTED_DSL}.dev0"',
    "no text": "__version__ = (4, 8, 1)",
    "absent": 'raise ModuleNotFoundError("No module named \'cutlass\'", name="cutlass")',
    "broken": 'raise OSError("libcute.so: cannot open shared object file")',
}
WITH_ANOTHER = """
import sys
sys.path.insert(0, {folder!r})
import torch
import cutedsl_fa3 as fa3
variant = fa3.Variant(lambda s, b, h, q, k: s + k, fa3.masks.causal)
q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
print(fa3.reference.attention(q, q, q + 1, variant).sum().item())
for use in (lambda: fa3.attention(q, q, q, variant), lambda: fa3.plan(q, q, q, variant)):
    try:
        use()
    except ImportError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("which", OTHERS)
def test_another_compiler_leaves_the_reference_and_says_which_one_is_accepted(tmp_path, which):
    """Source: Dao-AILab/flash-attention#2234, hao-ai-lab/FastVideo#1558."""
    (tmp_path / "cutlass.py").write_text(OTHERS[which] + "\n")
    result, *refusals = python("-c", WITH_ANOTHER.format(folder=str(tmp_path))).stdout.splitlines()
    assert float(result) == 512
    assert len(refusals) == 2 and refusals[0] == refusals[1]
    assert refusals[0].startswith("VersionError nvidia-cutlass-dsl is ")
    assert ACCEPTED_DSL in refusals[0] and PIP_COMMAND in refusals[0]
