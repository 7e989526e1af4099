"""Counters of persistent launches: one a stream, one a captured launch, on a GPU not there."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from cutedsl_fa3 import counters


class Cuda:
    """What the counters ask of CUDA: the current stream of a device, and whether it is captured."""

    def __init__(self) -> None:
        self.stream, self.captured, self.made, self.waits = 0, False, [], []

    def zeros(self, count: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        self.made.append((count, dtype, device, self.captured))
        return ZEROS(count, dtype=dtype)

    def current_stream(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: self.waits.append(index))


ZEROS = torch.zeros


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(counters, "_of_streams", {})
    monkeypatch.setattr(counters, "_spare", {})
    monkeypatch.setattr(counters, "_blocks", [])
    monkeypatch.setattr(counters, "capturing", lambda: made.captured)
    monkeypatch.setattr(counters, "current_stream", lambda index: made.stream)
    monkeypatch.setattr(torch, "zeros", made.zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    return made


def addresses(found: list[torch.Tensor]) -> set[int]:
    return {counter.data_ptr() for counter in found}


def test_a_counter_is_one_zero(cuda):
    counter = counters.counter(0)
    assert (counter.shape, counter.dtype, counter.tolist()) == ((1,), torch.int32, [0])
    assert all(device == "cuda:0" for _, _, device, _ in cuda.made)


def test_launches_of_one_stream_share_a_counter_and_others_have_their_own(cuda):
    found = {}
    for device in (0, 1):
        for cuda.stream in (0, 7):
            found[device, cuda.stream] = counters.counter(device)
    assert len(addresses(list(found.values()))) == 4
    for device, cuda.stream in found:
        assert counters.counter(device) is found[device, cuda.stream]
    assert {device for _, _, device, _ in cuda.made} == {"cuda:0", "cuda:1"}


def test_a_later_call_makes_nothing_and_waits_for_nothing(cuda):
    counters.counter(0)
    cuda.made.clear()
    cuda.waits.clear()
    for _ in range(100):
        counters.counter(0)
    assert not cuda.made and not cuda.waits


def test_captured_launches_have_counters_that_no_other_launch_has(cuda):
    eager = counters.counter(0)
    cuda.captured = True
    found = [counters.counter(0) for _ in range(100)]
    assert len(addresses([eager, *found])) == 101
    assert all((t.shape, t.dtype, t.tolist()) == ((1,), torch.int32, [0]) for t in found)


def test_a_capture_after_an_eager_call_allocates_nothing_and_its_zeros_are_there(cuda):
    """What is allocated while a graph is captured belongs to the graph and its memory."""
    counters.counter(0)
    assert cuda.waits == [0]  # the block is 0 before a graph, on whatever stream, has one of it
    cuda.captured = True
    cuda.made.clear()
    for _ in range(counters.BLOCK):
        counters.counter(0)
    assert not cuda.made


def test_a_graph_that_finds_none_zeroes_a_counter_of_its_own(cuda):
    cuda.captured = True
    found = [counters.counter(0) for _ in range(3)]
    assert cuda.made == [(1, torch.int32, "cuda:0", True)] * 3
    assert len(addresses(found)) == 3 and not cuda.waits


def test_new_streams_fill_up_what_graphs_have_taken(cuda):
    counters.counter(0)
    cuda.captured = True
    taken = [counters.counter(0) for _ in range(counters.BLOCK // 2 + 1)]
    cuda.captured, cuda.stream = False, 5
    counters.counter(0)
    assert len(counters._spare[0]) >= counters.BLOCK
    cuda.captured = True
    more = [counters.counter(0) for _ in range(counters.BLOCK)]
    assert len(addresses([*taken, *more])) == len(taken) + len(more)


def test_many_streams_make_one_block(cuda):
    for cuda.stream in range(10):
        counters.counter(0)
    assert [count for count, *_ in cuda.made].count(counters.BLOCK) == 1


def test_threads_on_one_stream_get_one_counter(cuda):
    found, ready = [], threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        found.append(counters.counter(0))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(addresses(found)) == 1


@pytest.mark.gpu
def test_graphs_of_persistent_launches_run_beside_eager_ones():
    """Two captured calls of one graph on two streams, replayed while eager calls run on a third."""
    import cutedsl_fa3 as fa3

    schedule = fa3.Schedule(128, 128, 2, 2, "intra", persistent=True)
    variant = fa3.Variant(mask=fa3.masks.causal)
    q = torch.randn(2, 2048, 8, 128, device="cuda", dtype=torch.bfloat16)
    wanted = fa3.attention(q, q, q, variant, schedule=schedule)
    streams = [torch.cuda.Stream() for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outs.append(fa3.attention(q, q, q, variant, schedule=schedule))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
    beside = torch.cuda.Stream()
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(beside):
            eager = fa3.attention(q, q, q, variant, schedule=schedule)
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for out in (*outs, eager))


def test_memory_that_a_graph_was_given_outlives_the_views_of_it(cuda):
    counters.counter(0)
    cuda.captured = True
    given = [counters.counter(0) for _ in range(counters.BLOCK)]
    first = weakref.ref(given[0].untyped_storage())
    given.clear()
    gc.collect()
    assert not counters._spare[0] and first() is not None
