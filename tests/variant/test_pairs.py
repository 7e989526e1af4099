"""Elements of neighbouring keys by one load: when, what is read at the ends, in how many loads."""

from __future__ import annotations

import itertools

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from hypothesis import given
from hypothesis import strategies as st
from on_cpu import for_each, launchable

from cutedsl_fa3.audit import census_of, disassemble
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.variant.device import Lowering
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.graph import CAPTURE_DTYPES
from cutedsl_fa3.variant.lower import CAPTURE_ELEMENTS
from cutedsl_fa3.variant.pairs import dense, pairable, pairs, read_along_k

BIAS = torch.randn(2, 3, 20, 34)
DOC = torch.randint(-(2**31), 2**31, (34,))

READ = {
    "k": (lambda s, b, h, q, k: s + BIAS[b, h, q, k], True),
    "k plus even": (lambda s, b, h, q, k: s + BIAS[b, h, q, k + 6], True),
    "even plus k": (lambda s, b, h, q, k: s + BIAS[b, h, q, 4 + k], True),
    "k minus even": (lambda s, b, h, q, k: s + BIAS[b, h, q, k - 6], True),
    "computed rows": (lambda s, b, h, q, k: s + BIAS[b, h, (q * 7) % 20, k], True),
    "rows from memory": (lambda s, b, h, q, k: s + BIAS[b, h, DOC[q], k], True),
    "a vector": (lambda s, b, h, q, k: s + DOC[k], True),
    "k plus odd": (lambda s, b, h, q, k: s + BIAS[b, h, q, k + 5], False),
    "another order": (lambda s, b, h, q, k: s + BIAS[b, h, q, 8 - k], False),
    "a distance": (lambda s, b, h, q, k: s + BIAS[b, h, q, k - q], False),
    "a quotient": (lambda s, b, h, q, k: s + BIAS[b, h, q, k // 2], False),
    "k in two dimensions": (lambda s, b, h, q, k: s + BIAS[b, h, k, k], False),
    "k in another dimension": (lambda s, b, h, q, k: s + BIAS[b, h, k, q], False),
    "a scalar": (lambda s, b, h, q, k: s + BIAS[b, h, q, 2] * k, False),
}


@pytest.mark.parametrize("name", READ)
def test_elements_beside_each_other_are_those_at_k_plus_an_even_number(name):
    function, expected = READ[name]
    assert bool(read_along_k(Variant(score=function).score)) == expected


PAIRABLE = {
    "contiguous": (lambda: torch.zeros(3, 4, 6), True),
    "a vector": (lambda: torch.zeros(6), True),
    "a row repeated": (lambda: torch.zeros(1, 6).expand(5, 6), True),
    "an even slice": (lambda: torch.zeros(4, 12)[:, 2:8], True),
    "an odd begin": (lambda: torch.zeros(12)[1:7], False),
    "odd rows": (lambda: torch.zeros(4, 7)[:, :6], False),
    "an odd extent": (lambda: torch.zeros(4, 8)[:, :5], False),
    "transposed": (lambda: torch.zeros(6, 4).T, False),
    "one element repeated": (lambda: torch.zeros(1).expand(6), False),
    "a scalar": (lambda: torch.zeros(()), False),
    "nothing": (lambda: torch.zeros(0, 2), False),
}


@pytest.mark.parametrize("name", PAIRABLE)
def test_pairs_lie_in_rows_of_even_extent_begin_and_distance(name):
    make, expected = PAIRABLE[name]
    assert pairable(make()) == expected


@given(data=st.data(), dtype=st.sampled_from(list(CAPTURE_DTYPES)))
def test_every_pair_of_a_pairable_tensor_is_aligned(data, dtype):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    base = torch.zeros([n + 3 for n in shape], dtype=dtype)
    begins = [data.draw(st.integers(0, 3)) for _ in shape]
    tensor = base[tuple(slice(b, b + n) for b, n in zip(begins, shape, strict=True))]
    if not pairable(tensor):
        return
    for place in torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, len(shape)):
        if place[-1] % 2 == 0:
            address = tensor[tuple(place)].data_ptr()
            assert address % (2 * tensor.element_size()) == 0
            assert place[-1] + 1 < shape[-1]


def test_only_tensors_that_some_function_reads_along_k_count():
    other = torch.zeros(8, 8)
    variant = Variant(
        score=lambda s, b, h, q, k: s + BIAS[b, h, q, k] + other[q, h],
        mask=lambda b, h, q, k: DOC[k] > DOC[q],
    )
    assert pairs(variant) == {0, 2}
    assert [variant.captures[i] is t for i, t in ((0, BIAS), (2, DOC))] == [True, True]


DENSE = {
    "by key": (lambda t, q, k, h: t[h, k], True),
    "by query": (lambda t, q, k, h: t[h, q], True),
    "by distance": (lambda t, q, k, h: t[h, k - q + 4], True),
    "by head": (lambda t, q, k, h: t[k, h], False),
    "by a number": (lambda t, q, k, h: t[k, 3], False),
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("stride", [1, 2])
def test_rows_are_dense_where_what_is_read_by_position_has_no_stride(name, stride):
    function, read = DENSE[name]
    table = torch.zeros(3, 16)[:, ::stride]
    variant = Variant(lambda s, b, h, q, k: s + function(table, q, k, h))
    assert dense(variant) == ({0} if read and stride == 1 else set())


COLS = 4  # of a thread, in two pairs


@pytest.mark.parametrize("dtype", CAPTURE_DTYPES)
@pytest.mark.parametrize("shift", [0, 6, -6])
def test_pairs_are_read_as_single_elements_are_and_clamped_as_they_are(dtype, shift):
    table = BIAS > 0 if dtype == torch.bool else (BIAS * 2.0**40).to(torch.int64).to(dtype)
    graph = Variant(score=lambda s, b, h, q, k: table[b, h, q, k + shift] * 1.0).score
    places = itertools.product((0, 1), (0, 2), (0, 19, 25), range(0, 48, 2))
    given = torch.tensor(list(places), dtype=torch.int32)
    found = torch.zeros(len(given), COLS)

    def write(i, given, out):
        b, h, q, k = (given[0][i, j] for j in range(4))
        uniform = {"b": b, "h": h, "seqlen_q": Int32(0), "seqlen_k": Int32(0)}
        reader, memo = Lowering(graph, given[1:], uniform, frozenset({0})), {}
        for c in (0, 3, 1, 2):
            column = k + 8 * (c // 2) + c % 2
            out[0][i, c] = reader.at({"q": q, "k": column, **uniform}, 0, c, memo, in_pairs=True)

    for_each(len(given), [given, launchable(table)], [found], write)
    columns = given[:, 3:] + torch.tensor([0, 1, 8, 9])
    inputs = {name: given[:, i, None].long() for i, name in enumerate("bhq")}
    wanted = evaluate(graph, {**inputs, "k": columns.long()}, (table,))
    assert torch.equal(found, wanted)


class Reads:
    """out[thread, c] = the score at a thread's row and c-th column, placed as an accumulator's."""

    arch = "sm_90a"
    name = "reads"
    COLS = 16

    def __init__(self, variant: Variant, pairs: frozenset[int]) -> None:
        self.variant, self.pairs = variant, pairs

    @property
    def key_text(self) -> str:
        return f"{self.name} {sorted(self.pairs)} {self.variant.text}"

    def fake_args(self) -> tuple:
        (tensor,) = self.variant.captures
        even = 2 if self.pairs else 1
        extents = [cute.sym_int() for _ in range(tensor.ndim - 1)]
        strides = [cute.sym_int64(divisibility=even) for _ in range(tensor.ndim - 1)]
        capture = make_fake_tensor(
            CAPTURE_ELEMENTS[tensor.dtype],
            (*extents, cute.sym_int(divisibility=even)),
            (*strides, 1),
            assumed_align=even * tensor.element_size(),
        )
        out = make_fake_tensor(Float32, (cute.sym_int(), self.COLS), (self.COLS, 1))
        return (capture,), out, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def host(self, captures, out, stream):
        self.kernel(captures, out).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, captures, out):
        thread, _, _ = cute.arch.thread_idx()
        self.read(captures, out, thread)

    def read(self, captures, out, thread) -> None:
        uniform = {name: Int32(0) for name in ("b", "h", "seqlen_q", "seqlen_k")}
        reader, memo = Lowering(self.variant.score, captures, uniform, self.pairs), {}
        for c in range(self.COLS):
            k = (thread % 4) * 2 + (c // 2) * 8 + c % 2
            at = {"score": Float32(0.0), "q": thread // 4, "k": k, **uniform}
            out[thread, c] = reader.at(at, 0, c, memo, in_pairs=True)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("dtype", "one", "two"),
    [
        (torch.float32, "LDG.E", "LDG.E.64"),
        (torch.bfloat16, "LDG.E.U16", "LDG.E"),
        (torch.int64, "LDG.E.64", "LDG.E.128"),
        (torch.uint8, "LDG.E.U8", "LDG.E.U16"),
        (torch.bool, "LDG.E.U8", "LDG.E.U16"),
    ],
)
def test_a_pair_is_one_load_of_twice_the_size(dtype, one, two):
    table = (torch.arange(80).reshape(1, 2, 4, 10) % 2).to(dtype)
    variant = Variant(score=lambda s, b, h, q, k: s + table[b, h, q, k] * 2.0)
    for found, size, count in ((frozenset(), one, 16), (pairs(variant), two, 8)):
        code = disassemble(compile_kernel(Reads(variant, found)).cubin)
        loads = [word for word in code.split() if word.startswith("LDG")]
        assert census_of(code).count("LDG") == count
        assert set(loads) == {size}
