"""One kernel for one variant, in every process, and with one compiler."""

from __future__ import annotations

import json
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
