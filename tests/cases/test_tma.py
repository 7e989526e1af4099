"""What the copy engine would refuse at launch is refused before, and reads only what was fenced."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cutlass
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, cache, ladder, masks, scores
from cutedsl_fa3.audit import audit
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.kernels.sm100.gemm import GemmSm100
from cutedsl_fa3.layouts import NONE, SW32, SW64, SW128, LayoutError, TensorMap, Tile
from cutedsl_fa3.pipelines import Schedule, WordRing
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem

from . import ptx
from .ptx import Flow

SWIZZLES = (SW32, SW64, SW128)


# A box wider than its swizzle.


def mapped(cols: int, swizzle: Any, dtype: type = cutlass.BFloat16) -> TensorMap:
    """A map whose box has rows of `cols` elements."""
    row = 4096 * dtype.width // 8
    return TensorMap(dtype, 0, (4096, 512), (row,), (cols, 64), swizzle=swizzle)


@pytest.mark.parametrize(
    ("cols", "swizzle", "limit"), [(48, SW32, 32), (96, SW128, 128), (64, SW64, 64)]
)
def test_a_box_wider_than_its_swizzle_is_refused_with_its_bytes_and_the_limit(cols, swizzle, limit):
    """Source: tile-ai/tilelang#2630."""
    with pytest.raises(LayoutError, match=rf"(?s)swizzle.*{2 * cols} bytes.*{limit}"):
        mapped(cols, swizzle).check()


DTYPES = (cutlass.Int8, cutlass.BFloat16, cutlass.Float32, cutlass.Float64)


@given(st.sampled_from(DTYPES), st.integers(1, 16), st.sampled_from((NONE, *SWIZZLES)))
def test_a_box_is_refused_just_where_it_is_wider_than_its_swizzle(dtype, chunks, swizzle):
    rules = mapped(16 * chunks * 8 // dtype.width, swizzle, dtype).rules()
    broken = [rule for rule in rules if not rule.ok]
    assert bool(broken) == (swizzle != NONE and 16 * chunks > swizzle.span), broken


@given(st.integers(1, 64), st.sampled_from((cutlass.Int8, cutlass.BFloat16, cutlass.Float32)))
def test_a_tile_of_any_row_is_split_into_boxes_that_its_swizzle_takes(chunks, dtype):
    tile = Tile(64, chunks * 16 * 8 // dtype.width, dtype)
    cols, rows = tile.box
    assert cols * dtype.width // 8 <= tile.swizzle.span
    assert cols * rows * tile.copies == tile.rows * tile.cols
    row = tile.cols * dtype.width // 8
    tile.tensor_map(0, (tile.cols, 512), (row,)).check()


class NarrowGemm(GemmSm90):
    """Rows of 96 bytes, which only the 32-byte swizzle divides."""

    tile_k = 48


class MiddleGemm(GemmSm90):
    """Rows of 192 bytes, which the 64-byte swizzle divides."""

    tile_k = 96


@pytest.mark.compile
@pytest.mark.parametrize("kind", [NarrowGemm, MiddleGemm])
def test_a_users_tile_of_an_odd_width_compiles_to_the_boxes_that_its_tables_state(kind):
    kernel = kind(Schedule(128, 128, 2, 2, "none"))
    assert kernel.tiles["a"].copies == 3
    report = audit(kernel, cache.get(kernel))
    assert report.ok, report


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [NarrowGemm, MiddleGemm])
def test_a_users_tile_of_an_odd_width_multiplies_right(kind):
    kernel = kind(Schedule(128, 128, 2, 2, "none"))
    a, b = (torch.randn(rows, 200, device="cuda").bfloat16() for rows in (300, 264))
    c = torch.full((300, 264), torch.nan, device="cuda", dtype=torch.bfloat16)
    cache.get(kernel).launch(a, b, c)
    wanted = a.double() @ b.double().T
    assert (c.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


# Generic writes and asynchronous reads of shared memory.

SLOPES, OF, SINK = torch.rand(4), torch.arange(4096) // 100, torch.rand(4)


def forward(
    dims: tuple[int, int] = (64, 64),
    schedule: Schedule | None = None,
    persistent: bool = True,
    **variant: Any,
) -> Any:
    """The kernel of a variant, which stores by TMA."""
    q, k, v = (torch.zeros(1, 64, 4, d, dtype=torch.bfloat16) for d in (dims[0], *dims))
    plan = fa3.plan(q, k, v, fa3.Variant(**variant), schedule=schedule)
    if schedule is None:
        plan = replace(plan, schedule=replace(plan.schedule, store="tma", persistent=persistent))
    return plan.kernel


def gemm(kind: type, warpgroups: int, cluster: tuple[int, int]) -> Any:
    return kind(Schedule(128, 128, 3, warpgroups, "none", cluster=cluster))


def step(number: int) -> Any:
    """The kernel of a step of the ladder."""
    return ladder.rungs(fa3.Variant(mask=masks.causal), 64)[number - 1].kernel


def documents(b, h, q, k):
    return (OF[q] == OF[k]) & (k <= q)


KERNELS: dict[str, Callable[[], Any]] = {
    **{
        f"forward {dims[0]}, {dims[1]}{name}": partial(
            forward, dims, persistent=not name, mask=masks.causal
        )
        for dims in ((64, 64), (192, 128), (256, 256), (40, 72))
        for name in ("", ", a CTA a tile")
    },
    **{
        f"forward overlap {overlap}": partial(
            forward, (128, 128), Schedule(128, 64, 2, 2, overlap), mask=masks.causal
        )
        for overlap in ("none", "intra", "pingpong", "both")
    },
    "forward without a mask": forward,
    "forward by tile": lambda: forward((128, 128), mask=documents),
    "forward that records its visits": lambda: (
        Plan.default(fa3.Variant(mask=masks.causal), Problem("bf16", 128, 128), trace=True).kernel
    ),
    "forward of hidden keys": lambda: forward(mask=masks.none),
    "forward with all functions": lambda: forward(
        score=scores.alibi(SLOPES),
        mask=documents,
        softmax=OnlineSoftmax(sink=SINK),
        epilogue=lambda o, lse, b, h, q: o * SLOPES[h],
    ),
    **{f"ladder step {number}": partial(step, number) for number in (2, 3, 4)},
    "forward with weights": lambda: forward(softmax=Elementwise(torch.sigmoid)),
    "forward with weights, a CTA a tile": lambda: forward(
        softmax=Elementwise(torch.sigmoid), persistent=False
    ),
    **{
        f"gemm on {arch} in clusters of {cluster}": partial(gemm, kind, warpgroups, cluster)
        for kind, arch, warpgroups in ((GemmSm90, "SM90", 2), (GemmSm100, "SM100", 1))
        for cluster in ((1, 1), (2, 1))
    },
}


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Any, str]]:
    """Kernels and their PTX by name, each compiled once."""
    return {}


def flows(made: dict[str, tuple[Any, str]], name: str, without: str = "") -> list[Flow]:
    if name not in made:
        kernel = KERNELS[name]()
        made[name] = kernel, ptx.of_kernel(kernel)
    # What keeps exponentials before a wait is a store that is never executed (softmax.finished).
    text = re.sub(r"@odd st\.volatile\.shared\S* \[bits\], \S+;", "", made[name][1])
    text = re.sub(without, "", text) if without else text
    found = [Flow(body) for body in ptx.bodies(text)]
    assert any(flow.count(ptx.STORES) for flow in found), "no kernel here stores by TMA"
    return found


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_no_path_leads_from_a_write_of_shared_memory_to_its_store_without_a_fence(made, name):
    """Nor to a product that reads shared memory. Source: MoonshotAI/FlashKDA#24."""
    for flow in flows(made, name):
        assert flow.unfenced(ptx.STORES) == []
        # A ring of words is written by one role for another; no product reads it, but the text of
        # both roles is one path here.
        if not any(isinstance(ring, WordRing) for ring in made[name][0].rings.values()):
            assert flow.unfenced(ptx.PRODUCTS) == []


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward 64, 64", "gemm on SM90 in clusters of (1, 1)"])
def test_the_scan_sees_a_fence_that_is_missing(made, name):
    fenceless = flows(made, name, without=r"fence\.proxy\.async\S*;")
    assert any(flow.unfenced(ptx.STORES) for flow in fenceless)


STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r1, %r2}], [%r3];"
FENCE = "fence.proxy.async.shared::cta;"
WRITE = "st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};"


@pytest.mark.parametrize(
    ("right", "body"),
    [
        (True, f"{WRITE} {FENCE} bar.sync 1; {STORE}"),
        (False, f"{WRITE} bar.sync 1; {STORE}"),
        (False, f"{FENCE} {WRITE} {STORE}"),
        (False, f"{WRITE} @%p1 bra $L; {FENCE} $L: {STORE}"),
        (True, f"{WRITE} @%p1 bra $L; {FENCE} bra $M; $L: {FENCE} $M: {STORE}"),
        (False, f"{WRITE} @%p1 {FENCE} {STORE}"),
        (False, f"@!%p1 {WRITE} {STORE}"),
        (True, f"$L: {WRITE} {FENCE} @%p1 bra $L; {STORE}"),
        (False, f"$L: {STORE} {WRITE} @%p1 bra.uni $L; ret;"),
        (True, f"{STORE} {WRITE} ret;"),
        (True, f"{WRITE} @%p1 bra $L; ret; $L: {FENCE} {STORE}"),
        (False, f"{WRITE} @%p1 ret; {STORE}"),
        (False, f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {{%r2, %r3}}; {STORE}"),
        (False, f"st.b32 [%rd1], %r2; {STORE}"),
        (True, f"st.global.b32 [%rd1], %r2; {STORE}"),
        (False, f"red.shared.add.u32 [%r1], %r2; {STORE}"),
        (False, f"{WRITE} fence.proxy.async.global; {STORE}"),
        (True, f"{WRITE} fence.proxy.async; {STORE}"),
        (False, f"{WRITE} cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1];"),
        (False, f"{WRITE} {{ .reg .pred P; W: {FENCE} @P bra D; bra W; D: {WRITE} }} {STORE}"),
        (True, f"{WRITE} {{ W: @P bra D; bra W; D: }} {{ W: {FENCE} @P bra D; D: }} {STORE}"),
    ],
)
def test_the_scan_follows_branches_loops_guards_and_inner_labels(right, body):
    text = f".visible .entry kernel(\n.param .b64 kernel_param_0\n)\n.reqntid 128\n{{\n{body}\n}}\n"
    (found,) = ptx.bodies(text)
    assert (Flow(found).unfenced(ptx.STORES) == []) == right


@pytest.mark.parametrize("body", ["brx.idx %r1, targets;", "bra $missing;", "st.shared"])
def test_the_scan_refuses_what_it_cannot_follow(body):
    with pytest.raises(ValueError):
        Flow(f"{WRITE} {body}").unfenced(ptx.STORES)
