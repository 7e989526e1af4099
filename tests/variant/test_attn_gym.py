"""The masks and scores of the attn-gym package run as they come, and as eager torch computes them.

Eager torch is the published function called with tensors of indices, and mapped over single
indices as FlexAttention calls it; where both can be called they are one value.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_gym_variants import CASES, OTHERS, Case

import cutedsl_fa3.variant
from cutedsl_fa3 import reference
from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.evaluate import evaluate

pytestmark = pytest.mark.attn_gym

EVERY = pytest.mark.parametrize("name", CASES)
# Called with a row of 0-d indices: `t[i][0]`, dot products, `unsqueeze`.
SINGLE_INDICES = (
    "generate_vision_cross_attention_mask_mod",
    "generate_mla_rope_score_mod",
    "generate_mla_rope_score_mod of any values",
)


def shape(case: Case) -> tuple[int, int, int, int]:
    return case.batch, case.heads, case.seqlen_q, case.seqlen_k


def positions(case: Case) -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(size).reshape(-1, *[1] * (3 - axis))
        for axis, (name, size) in enumerate(zip("bhqk", shape(case), strict=True))
    }


def scores(case: Case) -> torch.Tensor:
    made = torch.randn(shape(case), generator=torch.Generator().manual_seed(1)) * 3
    made[..., 0, :7] = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 3e38])
    return made


def mapped(function: Callable[..., Any], given: list[torch.Tensor], score: bool) -> torch.Tensor:
    """The function of single indices, mapped over keys, queries, heads and batch entries."""
    first = (0,) if score else ()
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if i == axis else None for i in range(4))
        function = torch.vmap(function, in_dims=(*first, *dims))
    return function(*given[: len(first)], *(x.flatten() for x in given[len(first) :]))


def eager(name: str, role: str, function: Callable[..., Any]) -> list[torch.Tensor]:
    case = CASES[name]
    given = [*([scores(case)] if role == "score" else []), *positions(case).values()]
    results = [mapped(function, given, role == "score")]
    if name not in SINGLE_INDICES:
        results.append(function(*given))
    return [torch.broadcast_to(result, shape(case)) for result in results]


def read(case: Case, role: str) -> torch.Tensor:
    variant = case.variant()
    graph = variant.graphs.get(role)
    if graph is None:
        return torch.broadcast_to(torch.tensor(True), shape(case))
    inputs = {"score": scores(case), **positions(case)}
    return torch.broadcast_to(evaluate(graph, inputs, variant.captures), shape(case))


@EVERY
def test_every_function_is_what_eager_torch_computes_to_the_bit(name):
    case = CASES[name]
    for role, function in case.functions("cpu").items():
        found = read(case, role)
        for expected in eager(name, role, function):
            assert found.dtype == expected.dtype
            if case.exact:
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            else:  # torch does not say in which order it sums
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if name != "generate_spatial_head_mask_mod as given":  # made for 17,776 tokens
            assert found.min() < found.max()


@EVERY
def test_the_reference_sees_the_keys_that_the_published_mask_shows(name):
    case = CASES[name]
    functions = case.functions("cpu")
    if "mask" not in functions:
        return
    dense = eager(name, "mask", functions["mask"])[0].contiguous()
    table = Variant(mask=lambda b, h, q, k: dense[b, h, q, k])
    q = torch.randn(case.batch, case.seqlen_q, case.heads, 8)
    k, v = (torch.randn(case.batch, case.seqlen_k, case.heads, 8) for _ in range(2))
    found = reference.attention_with_lse(q, k, v, Variant(mask=functions["mask"]))
    expected = reference.attention_with_lse(q, k, v, table)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def published() -> set[str]:
    """Every public function of attn_gym.masks and attn_gym.mods, whichever module it lies in."""
    found = set()
    for package in ("attn_gym.masks", "attn_gym.mods"):
        module = importlib.import_module(package)
        for entry in pkgutil.iter_modules(module.__path__):
            part = importlib.import_module(f"{package}.{entry.name}")
            found |= {
                name
                for name, value in vars(part).items()
                if inspect.isfunction(value)
                and value.__module__.startswith("attn_gym.m")
                and not name.startswith("_")
                and name != "main"
            }
        found |= {name for name in dir(module) if inspect.isfunction(getattr(module, name))}
    return found


def test_every_public_function_of_the_package_is_a_case_or_said_to_be_something_else():
    tested = {name.split(" ")[0] for name in CASES} - {
        *("and_masks", "or_masks"),  # torch's
        "alibi",  # two of the package together
    }
    assert tested | set(OTHERS) == published()
    assert not tested & set(OTHERS)


def test_the_documentation_names_every_function_that_runs_and_every_other():
    text = (Path(cutedsl_fa3.variant.__file__).parent / "README.md").read_text()
    for name in published():
        assert f"`{name}`" in text, name


def test_a_block_mask_is_refused_with_what_to_give_instead():
    from attn_gym.masks.causal import create_causal_block_mask_fast

    block_mask = create_causal_block_mask_fast(1, 1, 256, 256, torch.device("cpu"))
    with pytest.raises(VariantError, match=r"not a BlockMask.*give its mask_mod"):
        Variant(mask=block_mask)
    assert Variant(mask=block_mask.mask_mod).mask is not None
