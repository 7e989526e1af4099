"""Words told by one warp to all warps of a role: storage, refusals, machine code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.audit import audit
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.layouts import host_cute
from cutedsl_fa3.pipelines import Role, ScheduleError, WarpSpecialized, WordRing, put, take
from cutedsl_fa3.pipelines.roles import WARP


@dataclass(frozen=True)
class Io:
    """Numbers to tell, and where each consumer warp writes what it heard."""

    said: cute.Tensor
    heard: cute.Tensor


class Telling(WarpSpecialized):
    """One warp tells the numbers of a tensor, one after the other, and each consumer warp adds.

    The other words of a slot are the number plus 1, plus 2 and so on.
    """

    arch, name = "sm_90a", "telling"
    tiles: ClassVar[dict] = {}

    def __init__(self, stages: int, consumers: int, words: int = 1) -> None:
        self.rings = {"numbers": WordRing(stages=stages, words=words)}
        self.roles = {"producer": Role(warps=4), "consumer": Role(warps=4 * consumers)}

    @property
    def key_text(self) -> str:
        return f"telling {self.rings} {self.roles}"

    def expected(self):
        return self.common_expectations({}, {})

    def fake_args(self):
        said = make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,), assumed_align=4)
        heard = make_fake_tensor(cutlass.Int32, (cute.sym_int(), 2), (2, 1), assumed_align=4)
        return said, heard, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def host(self, said, heard, stream):
        self.launch(Io(said, heard), (1, 1, 1), stream)

    @cute.jit
    def producer(self, io, smem, ports, thread):
        ring = ports.numbers
        if cute.arch.make_warp_uniform(thread // WARP) == 0:
            for i in cutlass.range(cute.size(io.said), unroll=1):
                ring = self.tell(ring, smem, io.said[i])

    def tell(self, ring, smem, number):
        return put(ring, smem.numbers, *(number + n for n in range(self.rings["numbers"].words)))

    def hear(self, ring, smem):
        """The ring's end, and the words of a slot added up, each times its place from 1 on."""
        ring, *words = take(ring, smem.numbers)
        return ring, sum((n + 1) * word for n, word in enumerate(words))

    @cute.jit
    def consumer(self, io, smem, ports, thread):
        ring, total, weighted = ports.numbers, cutlass.Int32(0), cutlass.Int32(0)
        for i in cutlass.range(cute.size(io.said), unroll=1):
            ring, word = self.hear(ring, smem)
            total += word
            weighted += word * (i + 1)
        if thread % WARP == 31:
            io.heard[thread // WARP, 0] = total
            io.heard[thread // WARP, 1] = weighted


@given(st.integers(1, 9), st.integers(1, 9))
def test_words_lie_behind_the_mbarriers_and_the_next_ring_begins_on_a_whole_one(stages, words):
    ring = WordRing(stages=stages, words=words)
    assert ring.barrier_bytes == 16 * stages
    assert ring.bytes % 8 == 0 and 0 <= ring.bytes - ring.barrier_bytes - 4 * stages * words < 8


@given(st.integers(1, 5), st.integers(1, 5))
def test_each_word_of_each_slot_has_a_place_of_its_own(stages, words):
    ring = WordRing(stages=stages, words=words)

    with host_cute():
        base = cute.make_ptr(cutlass.Uint8, 0, cute.AddressSpace.smem, assumed_align=8)
        made = ring.tensor(base)
        places = [made.layout((slot, n)) for slot in range(stages) for n in range(words)]
    assert places == list(range(stages * words))
    assert ring.barrier_bytes + 4 * len(places) <= ring.bytes


@pytest.mark.parametrize("words", [0, -1, 1.0, True, "3", None], ids=repr)
def test_a_number_of_words_that_makes_no_sense_is_refused_by_its_value(words):
    with pytest.raises(ScheduleError) as caught:
        WordRing(words=words)
    assert str(caught.value) == (
        f"ring words = {words!r}: a whole number of words a slot from 1 is needed"
    )


@pytest.mark.parametrize("words, said", [(1, "a word"), (3, "3 words")])
def test_a_word_ring_is_described_with_its_words_and_who_says_and_reads_them(words, said):
    roles = {"producer": Role(warps=4), "consumer": Role(warps=8)}
    assert WordRing(stages=2, words=words).describe({}, roles) == (
        f"producer -> consumer: 2 slots of {said}, full at 32 arrivals, empty at 8 arrivals"
    )


def test_a_word_ring_names_no_tiles():
    with pytest.raises(ScheduleError, match="carries words; name none"):
        WordRing(("k",))


@pytest.mark.compile
@pytest.mark.parametrize("words", [1, 3])
@pytest.mark.parametrize("consumers", [1, 2])
def test_a_kernel_with_a_word_ring_compiles_to_what_its_tables_promise(consumers, words):
    kernel = Telling(3, consumers, words)
    kernel.check()
    report = audit(kernel, compile_kernel(kernel))
    assert report.ok, report


@pytest.mark.gpu
@pytest.mark.parametrize("words", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_consumer_warp_hears_every_word_in_order(stages, words):
    kernel = Telling(stages, 2, words)
    said = torch.randint(-1000, 1000, (1000,), dtype=torch.int32, device="cuda")
    heard = torch.zeros(8, 2, dtype=torch.int32, device="cuda")
    compile_kernel(kernel).launch(said, heard)
    places = torch.arange(1, 1001, device="cuda")
    heard_of = sum((n + 1) * (said + n) for n in range(words))
    assert (heard[:, 0] == heard_of.sum()).all()
    assert (heard[:, 1] == (heard_of * places).sum()).all()
