"""Tiles that CTAs draw: each by one CTA, and the counter as it was, whoever is how fast."""

from __future__ import annotations

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.audit import take_census
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.model import check_pipeline
from cutedsl_fa3.pipelines import draw, drawn_tile

# The protocol, step by step.


class Counter:
    """The word that CTAs draw from, and how often it was put back."""

    def __init__(self) -> None:
        self.word, self.drawn, self.resets = 0, [], 0

    def draw(self) -> int:
        self.drawn.append(self.word)
        self.word += 1
        return self.drawn[-1]


def cta(index: int, ctas: int, tiles: int, counter: Counter, computed: list[int]) -> Iterator[None]:
    """What one CTA does; another may act wherever it yields."""
    while index < tiles:
        computed.append(index)
        yield
        number = counter.draw()
        yield
        if number == tiles - 1:
            counter.word, counter.resets = 0, counter.resets + 1
        yield
        index = number + ctas


def launch(counter: Counter, tiles: int, most: int, pick) -> list[int]:
    """The tiles in the order in which they begin; `pick` says which of n CTAs goes on."""
    ctas, computed = min(tiles, most), []
    going = [cta(index, ctas, tiles, counter, computed) for index in range(ctas)]
    while going:
        one = going[pick(len(going))]
        if next(one, "ended") == "ended":
            going.remove(one)
    return computed


sizes = st.tuples(st.integers(1, 40), st.integers(1, 12))


@given(sizes, st.randoms(use_true_random=False), st.integers(1, 3))
def test_each_tile_is_drawn_once_and_the_counter_ends_at_0_in_any_order(size, random, launches):
    tiles, most = size
    counter = Counter()
    for number in range(launches):
        computed = launch(counter, tiles, most, random.randrange)
        assert sorted(computed) == list(range(tiles))
        assert counter.word == 0 and counter.resets == number + 1
        assert counter.drawn == list(range(tiles)) * (number + 1)


@given(sizes)
def test_a_cta_that_is_never_done_costs_the_others_nothing(size):
    """The first CTA stands still in its first tile: the others compute all that is left."""
    tiles, most = size
    counter = Counter()
    computed = launch(counter, tiles, most, lambda going: going - 1)
    assert sorted(computed) == list(range(tiles)) and counter.word == 0
    ctas = min(tiles, most)
    assert computed.index(0) >= (0 if ctas == 1 else tiles - 1)


# The code itself.


@cute.jit
def note(times: cute.Tensor, by: cute.Tensor, index: cutlass.Int32, this: cutlass.Int32):
    """That a CTA computes a tile."""
    if cute.arch.lane_idx() == 0:
        times[index] = times[index] + 1
        by[index] = this


class Drawing:
    """One warp a CTA notes which tiles it draws: how often each, and by whom."""

    arch, name = "sm_90a", "drawing"
    key_text = "tiles that CTAs draw"

    def fake_args(self) -> tuple:
        def words() -> cute.Tensor:
            return make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,), assumed_align=4)

        counter = make_fake_compact_tensor(cutlass.Int32, (1,), assumed_align=4)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return counter, words(), words(), cutlass.Int32(1), stream

    @cute.jit
    def host(self, counter, times, by, ctas, stream):
        grid = cutlass.min(ctas, cute.size(times))
        self.kernel(counter, times, by).launch(grid=(grid, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, counter: cute.Tensor, times: cute.Tensor, by: cute.Tensor):
        this, _, _ = cute.arch.block_idx()
        index, tiles = cutlass.Int32(this), cute.size(times)
        while index < tiles:
            note(times, by, index, this)
            number = draw(counter)
            index = drawn_tile(number, counter, tiles)


@pytest.mark.parametrize("ctas", [1, 2, 3, 7])
@pytest.mark.parametrize("tiles", [1, 2, 5, 7, 12])
def test_the_kernel_s_code_draws_by_this_rule(tiles, ctas):
    """Interpreted; CTAs run one after the other, so the first takes what it can draw."""
    counter = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        times, by = torch.zeros(tiles, dtype=torch.int32), torch.full((tiles,), -1).int()
        verdict = check_pipeline(Drawing(), [(counter, times, by, ctas)])
        assert verdict.ok, verdict
        assert times.tolist() == [1] * tiles
        assert counter.tolist() == [0]
        launched = min(ctas, tiles)
        assert by.tolist() == [*range(launched), *[0] * (tiles - launched)]


@pytest.mark.compile
def test_a_draw_is_one_atomic_addition_and_one_store():
    census = take_census(compile_kernel(Drawing()).cubin)
    assert census.count("ATOMG") == 1 and census.count("RED") == 0
    assert census.count("STG") == 3  # two of what the kernel notes, one that puts the counter back


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [1, 131, 132, 133, 10_000])
def test_ctas_on_a_gpu_draw_each_tile_once_launch_after_launch(tiles):
    compiled = compile_kernel(Drawing())
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(5):
        times, by = (torch.zeros(tiles, dtype=torch.int32, device="cuda") for _ in range(2))
        compiled.launch(counter, times, by, 132)
        assert (times == 1).all() and counter.item() == 0
        assert by[: min(tiles, 132)].tolist() == list(range(min(tiles, 132)))
