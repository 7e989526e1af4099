"""Kernels with a fault each end in an exception that says why; sound ones end as ever."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from cases.alone import python
from hanging import FAULTS, Relay, arguments

from cutedsl_fa3 import Schedule, Variant, attention_with_lse, hang, masks, watched
from cutedsl_fa3.gemm import ELEMENTS
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90

SCRIPT = Path(__file__).with_name("hanging.py")
LIMIT = 150  # seconds: imports and a compile beside those of all others, then its turn
NAMES = (*FAULTS, "the forward")


def run(fault: str) -> str:
    """What a process that runs the fault prints.

    Raises: AssertionError where it takes too long or dies.
    """
    return python(str(SCRIPT), fault, limit=LIMIT).stdout


@cache
def started() -> dict[str, Future[str]]:
    """All faults, side by side; the one that leaves the GPU busy comes last and alone."""
    pool = ThreadPoolExecutor(len(NAMES))
    found = {name: pool.submit(run, name) for name in NAMES if name != "no idle warp"}

    def last() -> str:
        for each in found.values():
            each.exception()
        return run("no idle warp")

    return {**found, "no idle warp": ThreadPoolExecutor(1).submit(last)}


def outcome(fault: str) -> str:
    """What its process printed; where tests run in several processes each starts its own."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return run(fault)
    return started()[fault].result()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("fault", NAMES)
def test_a_planted_fault_ends_in_an_exception_that_names_the_waits(fault):
    printed = outcome(fault)
    assert "Hang: " in printed, printed
    for said in FAULTS.get(fault, ("ring k slot 0 to become empty (phase 0): 372 of 384",)):
        assert said in printed, printed
    assert "AFTERWARDS: CUDA works" not in printed, printed
    assert float(printed.split("SECONDS ")[1]) < 60, printed


@pytest.mark.gpu
def test_a_sound_kernel_is_watched_to_its_end():
    kernel = Relay()
    x, y, tiles = arguments(kernel)
    hang.watch(kernel, x, y, tiles, seconds=1.0)
    assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("name, overlap", [("causal", "both"), ("documents", "none")])
def test_watched_attention_is_attention(name, overlap):
    q, k, v = (torch.randn(2, 700, 4, 64, device="cuda").bfloat16() for _ in range(3))
    document = torch.arange(700, device="cuda") // 150

    def documents(b, h, q, k):
        return (document[q] == document[k]) & (k <= q)

    variant = Variant(mask=masks.causal if name == "causal" else documents)
    schedule = Schedule(128, 96, stages=2, consumers=2, overlap=overlap)
    out, lse = watched(q, k, v, variant, schedule=schedule, seconds=1.0)
    expected, expected_lse = attention_with_lse(q, k, v, variant, schedule=schedule)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (2, 2)])
def test_a_watched_gemm_is_a_gemm(cluster):
    a, b = (torch.randn(1000, 512, device="cuda").bfloat16() for _ in range(2))
    c = torch.zeros(1000, 1000, device="cuda", dtype=a.dtype)
    schedule = Schedule(128, 128, stages=3, consumers=2, overlap="none", cluster=cluster)
    hang.watch(GemmSm90(schedule, ELEMENTS[a.dtype]), a, b, c, seconds=1.0)
    exact = a.double() @ b.double().T
    rounded = exact.to(a.dtype).double()
    assert (c.double() - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 1e-3
