"""What belongs to the caller stays his: the stream, the device, a graph's data, and equal bits."""

from __future__ import annotations

import warnings

import pytest
import torch
from training import KINDS, SIZES, gradients, leaves, of_all_kinds

import cutedsl_fa3 as fa3
from cutedsl_fa3 import OnlineSoftmax, masks

from .alone import alone
from .oracles import Sizes, drawn, same

# Streams and graphs: pytorch/helion PR#2817, pytorch/pytorch PR#163242.


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_forward_and_backward_gives_the_gradients_of_new_data(kind, deterministic):
    alone(in_a_graph, kind, deterministic)


def in_a_graph(kind: str, deterministic: bool) -> None:
    """Warmed up and captured on a side stream, replayed on other inputs of the same shapes."""
    variant, given = KINDS[kind]("cuda"), leaves("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients(variant, given, deterministic)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an empty graph
        with torch.cuda.graph(graph, stream=side):
            found = gradients(variant, given, deterministic)
    for seed in (1, 2):
        with torch.no_grad():
            for t, new in zip(given, drawn("cuda", SIZES, seed=seed), strict=True):
                t.copy_(new)
            for t in variant.captures:
                t.mul_(0.9)
            for t in found:
                t.fill_(torch.nan)
        graph.replay()
        replayed = [t.clone() for t in found]
        eager = gradients(variant, given, deterministic)
        if deterministic:
            assert same(replayed, eager)
        for t, wanted in zip(replayed, eager, strict=True):
            size = wanted.float().abs().max().item()
            torch.testing.assert_close(t, wanted, rtol=2e-2, atol=2e-2 * size)


@pytest.mark.gpu
def test_a_replay_needs_nothing_of_the_default_stream():
    alone(replayed_beside_a_stream_that_stands_still)


def replayed_beside_a_stream_that_stands_still() -> None:
    q, k, v = drawn("cuda", SIZES)
    variant, side = fa3.Variant(mask=masks.causal), torch.cuda.Stream()
    fa3.attention(q, k, v, variant)  # on the default stream, which must not be kept
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.cuda.graph(graph, stream=side):
            out = fa3.attention(q, k, v, variant)
    q.mul_(0.5)
    wanted = fa3.attention(q, k, v, variant)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # clocks: a second
    ended = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(side):
        graph.replay()
    side.synchronize()
    assert not ended.query()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_a_backward_runs_on_the_stream_of_its_forward():
    alone(on_a_side_stream)


def on_a_side_stream() -> None:
    """Inputs are written late on a side stream: whoever does not follow it reads the old ones."""
    variant = of_all_kinds("cuda")
    wanted = gradients(variant, leaves("cuda", seed=5))
    new = drawn("cuda", SIZES, seed=5)
    given = [torch.zeros_like(t).requires_grad_() for t in new]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # clocks: a tenth of a second
        with torch.no_grad():
            for t, right in zip(given, new, strict=True):
                t.copy_(right)
        found = gradients(variant, given)
    side.synchronize()
    assert same(found, wanted)


# Devices: NVIDIA/cutlass#2808.


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed, here is one")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_another_device_leave_the_current_one_as_found(kind):
    alone(on_another_device, kind)


def on_another_device(kind: str) -> None:
    """Forward and backward; then calls that are refused."""
    variant, given = KINDS[kind]("cuda"), leaves("cuda")
    wanted = gradients(variant, given)
    moved = [t.detach().to("cuda:1").requires_grad_() for t in given]
    there = variant.bound_to([t.detach().to("cuda:1") for t in variant.captures])
    found = gradients(there, moved)
    assert stays_at_home()
    assert all(t.get_device() == 1 for t in found)
    assert same([t.to("cuda:0") for t in found], wanted)
    with pytest.raises(fa3.Unsupported, match="k is on cuda:0, q is on cuda:1"):
        fa3.attention(moved[0], given[1], given[2])
    assert stays_at_home()
    strided = torch.stack([moved[0]] * 3, -1)[..., 0]
    with pytest.raises(fa3.LayoutError):
        fa3.attention(strided, moved[1], moved[2], there)
    assert stays_at_home()


def stays_at_home() -> bool:
    """Whether device 0 is the current one, as it was."""
    return torch.cuda.current_device() == torch.empty(1, device="cuda").get_device() == 0


# A fixed order: Dao-AILab/flash-attention#2244.

RUNS = {"cpu": 3, "cuda": 30}
ORDERED: dict[str, list[tuple[Sizes, int]]] = {
    "cpu": [((2, 70, 70, 4, 2), 16)],
    "cuda": [
        ((2, 1024, 1024, 12, 12), 64),
        ((2, 512, 512, 8, 8), 64),
        ((1, 700, 700, 16, 2), 128),
    ],
}


EACH = [
    *(("cpu", *each) for each in ORDERED["cpu"]),
    *(pytest.param("cuda", *each, marks=pytest.mark.gpu) for each in ORDERED["cuda"]),
]


@pytest.mark.parametrize(("where", "sizes", "dim"), EACH, ids=str)
def test_gradients_in_a_fixed_order_have_equal_bits_in_each_run(where, sizes, dim):
    alone(run_again, where, sizes, dim)


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "dim"), ORDERED["cuda"], ids=str)
def test_gradients_in_a_fixed_order_have_equal_bits_beside_a_busy_stream(sizes, dim):
    alone(run_again, "cuda", sizes, dim, True)


def run_again(device: str, sizes: Sizes, dim: int, busy: bool = False) -> None:
    """Captured tensors too: by head, by key, by distance with one place for many pairs, a sink."""
    heads, length = sizes[3], sizes[1]
    slopes, sink = (torch.rand(heads, device=device) for _ in range(2))
    near, by_key = torch.rand(heads, 64, device=device), torch.rand(length, device=device)
    variant = fa3.Variant(
        lambda s, b, h, q, k: s * slopes[h] + near[h, torch.clamp(q - k, 0, 63)] + by_key[k],
        masks.causal,
        OnlineSoftmax(sink),
    )
    given = leaves(device, sizes, dim, torch.float16)
    first = gradients(variant, given)
    assert [t.any().item() and t.isfinite().all().item() for t in first] == [True] * len(first)
    if busy:
        beside, a = torch.cuda.Stream(), torch.randn(1024, 1024, device=device)
    for run in range(RUNS[device]):
        if busy:
            with torch.cuda.stream(beside):
                for _ in range(4):
                    a = torch.tanh(a @ a)
        again = gradients(variant, given)
        other = [n for n, (a, b) in enumerate(zip(again, first, strict=True)) if not same([a], [b])]
        assert not other, f"run {run}, of q, k, v and the captured tensors: {other}"
