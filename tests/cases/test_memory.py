"""Three ways in which a hand-written kernel reads what it should not.

An offset that wraps past 4 GiB; a tile that reaches past the end of mapped memory; a prefetched or
left-over tile whose NaN survives a weight of 0.
"""

from __future__ import annotations

import math

import pytest
import torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import cache, masks

from .alone import alone
from .oracles import bits, drawn, same
from .pages import Memory, Pages, at_the_edge

FAR = 2**31  # elements; of 2 bytes, 4 GiB
NAN = math.nan


# Offsets past 2^31 elements and 4 GiB.


def mean_over_many_keys(seqlen_k: int) -> None:
    """Keys and values share 4 GiB; the last ones lie around 2^31 elements."""
    k = torch.zeros(1, seqlen_k, 64, 128, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(seqlen_k, device="cuda")
    heads = torch.arange(64, device="cuda")
    for part in index.split(8192):
        k[0, part] = ((part[:, None] // 1000 + heads) % 256).bfloat16()[..., None]
    q = torch.zeros(1, 1, 64, 128, device="cuda", dtype=torch.bfloat16)
    counted = torch.stack([((index // 1000 + head) % 256).double().mean() for head in heads])
    out = fa3.attention(q, k, k)
    assert ((out.double() - counted[None, None, :, None]).abs() <= counted.max() * 2**-8).all()
    first = torch.tensor(seqlen_k - 3, device="cuda")
    k[0, -3:] = torch.tensor([1.0, 2.0, 6.0], device="cuda")[:, None, None]
    out = fa3.attention(q, k, k, fa3.Variant(mask=lambda b, h, q, k: k >= first))
    assert (out == 3).all()


@pytest.mark.gpu
@pytest.mark.big
@pytest.mark.parametrize("seqlen_k", [FAR // 8192 - 1, FAR // 8192, FAR // 8192 + 1, 262272])
def test_keys_and_values_may_pass_2_to_the_31_elements(seqlen_k):
    """Source: NVIDIA/cutlass#2312, Dao-AILab/flash-attention#767."""
    alone(mean_over_many_keys, seqlen_k)


def far_apart(at: int, stride: int) -> None:
    """q, k and v in one storage, dimension `at` strided by `stride` elements."""
    shape = (2, 40, 2, 64)
    strides = [0, 0, 0]
    near = 64
    for dim in (2, 1, 0):
        strides[dim] = stride if dim == at else near
        near *= 1 if dim == at else shape[dim]
    storage = torch.empty((shape[at] - 1) * stride + 4 * near, device="cuda", dtype=torch.bfloat16)
    close = drawn("cuda", (2, 40, 40, 2, 2))
    views = [storage[i * near :].as_strided(shape, (*strides, 1), i * near) for i in range(3)]
    for view, values in zip(views, close, strict=True):
        view.copy_(values)
    assert all(torch.equal(*pair) for pair in zip(views, close, strict=True))
    variant = fa3.Variant(mask=masks.causal)
    there = fa3.attention_with_lse(*views, variant)
    torch.cuda.synchronize()
    assert same(there, fa3.attention_with_lse(*close, variant))


@pytest.mark.gpu
@pytest.mark.big
@pytest.mark.parametrize(
    ("dim", "stride"),
    [
        ("batch", FAR - 64),
        ("batch", FAR + 64),
        ("batch", 2 * FAR + 8),
        ("heads", FAR + 64),
        ("heads", 4 * FAR),
        ("seqlen", FAR // 16),
        ("seqlen", FAR // 4),
    ],
)
def test_any_stride_may_pass_4_gib(dim, stride):
    alone(far_apart, ("batch", "seqlen", "heads").index(dim), stride)


def many_outputs(seqlen_q: int, heads: int, dim: int) -> None:
    """One query and its keys for all: every row of the output and the LSE is the same."""
    one = torch.randn(1, 1, 1, dim, device="cuda").bfloat16()
    q = one.expand(1, seqlen_q, heads, dim)
    k, v = (torch.randn(1, 16, 1, dim, device="cuda").bfloat16() for _ in range(2))
    out, lse = fa3.attention_with_lse(q, k, v)
    small = fa3.attention_with_lse(one, k, v)
    for part in out.view(-1, dim).split(2**21):
        assert torch.equal(bits(part), bits(small[0].view(1, dim).expand_as(part)))
    for part in lse.flatten().split(2**28):
        assert (part == small[1].item()).all()


@pytest.mark.gpu
@pytest.mark.big
@pytest.mark.parametrize(
    ("seqlen_q", "heads", "dim"),
    [(262272, 64, 128), (1, 2**24 + 1, 128), (262272, 8192, 8)],
    ids=["outputs", "outputs of one query", "LSEs"],
)
def test_outputs_and_lses_may_pass_2_to_the_31_elements(seqlen_q, heads, dim):
    alone(many_outputs, seqlen_q, heads, dim, limit=400)


def large_table(kind: str) -> None:
    """A captured table over all pairs of 46,464 positions, more than 2^31; its last rows count."""
    length = 46464
    table = torch.zeros(length, length, device="cuda", dtype=torch.uint8)
    table[:, 0] = 1
    table[0, :] = 1
    generator = torch.Generator().manual_seed(1)
    drawn_bits = torch.randint(0, 2, (64, 256), generator=generator).cuda().to(torch.uint8)
    table[-64:, -256:] = drawn_bits
    table[-256:, -64:] |= drawn_bits.T
    seen = {"q, k": table[-64:], "k, q": table[:, -64:].T, "b, h, q, k": table[-64:]}[kind] != 0
    boolean, scores = table.view(torch.bool), table[None, None]
    variant = {
        "q, k": fa3.Variant(mask=lambda b, h, q, k: boolean[q, k]),
        "k, q": fa3.Variant(mask=lambda b, h, q, k: boolean[k, q]),
        "b, h, q, k": fa3.Variant(
            lambda s, b, h, q, k: torch.where(scores[b, h, q, k] != 0, s, -math.inf)
        ),
    }[kind]
    q = torch.zeros(1, length, 1, 64, device="cuda", dtype=torch.float16)
    values = (torch.arange(length, device="cuda") % 1024).half()
    v = values[None, :, None, None].expand(1, length, 1, 64).contiguous()
    out, lse = fa3.attention_with_lse(q, torch.randn_like(q), v, variant)
    counts = seen.sum(-1).double()
    means = (seen * values.double()).sum(-1) / counts
    assert ((out[0, -64:, 0].double() - means[:, None]).abs() <= means[:, None] * 2**-10).all()
    assert ((lse[0, 0, -64:].double() - counts.log()).abs() <= 1e-5).all()


@pytest.mark.gpu
@pytest.mark.big
@pytest.mark.parametrize("kind", ["q, k", "k, q", "b, h, q, k"])
def test_captured_tensors_may_pass_2_to_the_31_elements(kind):
    alone(large_table, kind)


def far_captures() -> None:
    """Rows of captured tensors that lie 2^31 elements and more apart, by head and by batch."""
    storage = torch.empty(3 * (FAR + 72), device="cuda", dtype=torch.float16)
    q, k, v = drawn("cuda", (2, 100, 130, 2, 2))
    for by_batch in (True, False):
        near = torch.randn(2, 130, device="cuda").half()
        far = storage.as_strided((2, 130), (FAR + 72, 1))
        far.copy_(near)

        def biased(t, by_batch=by_batch):
            return fa3.Variant(lambda s, b, h, q, k: s + t[b if by_batch else h, k])

        there = fa3.attention_with_lse(q, k, v, biased(far))
        assert same(there, fa3.attention_with_lse(q, k, v, biased(near)))


@pytest.mark.gpu
@pytest.mark.big
def test_strides_of_captured_tensors_may_pass_2_to_the_31_elements():
    alone(far_captures)


# The end of mapped memory.

ENDS = [(1, 1), (77, 77), (128, 128), (130, 257), (257, 63)]


def inputs_at_the_edge(dim: int, dim_v: int, last: bool) -> None:
    variant = fa3.Variant(mask=masks.causal)
    for seqlen_q, seqlen_k in ENDS:
        here = drawn("cuda", (1, seqlen_q, seqlen_k, 2, 1), dim, dim_v)
        edge = [at_the_edge(t, last=last) for t in here]
        assert all(torch.equal(*pair) for pair in zip(here, edge, strict=True))
        there = fa3.attention_with_lse(*edge, variant)
        torch.cuda.synchronize()
        assert same(there, fa3.attention_with_lse(*here, variant))


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False], ids=["last byte", "first byte"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (192, 128), (256, 256)], ids=str)
def test_inputs_are_not_read_past_the_end_of_mapped_memory(dims, last):
    alone(inputs_at_the_edge, *dims, last)


def views_at_the_edge() -> None:
    """The last token of a view is the last thing that is mapped."""
    variant = fa3.Variant(mask=masks.causal)
    for heads, dim in ((1, 64), (2, 64), (3, 72)):
        here = drawn("cuda", (1, 77, 77, heads, heads), dim)
        edge = []
        for t in here:
            row = heads * dim
            memory = Pages(2 * 2 * 77 * row).tensor(((2 * 77 - 1) * row,), t.dtype, last=True)
            memory.fill_(NAN)
            edge.append(memory.as_strided((1, 77, heads, dim), (2 * 77 * row, 2 * row, dim, 1)))
            edge[-1].copy_(t)
        there = fa3.attention_with_lse(*edge, variant)
        torch.cuda.synchronize()
        assert same(there, fa3.attention_with_lse(*here, variant))


@pytest.mark.gpu
def test_a_view_that_ends_with_mapped_memory_is_not_read_past_it():
    alone(views_at_the_edge)


def outputs_at_the_edge(dim: int, last: bool) -> None:
    """The kernel is launched by hand, since the interface allocates its outputs itself."""
    variant = fa3.Variant(mask=masks.causal)
    for seqlen_q, seqlen_k in ENDS:
        q, k, v = drawn("cuda", (1, seqlen_q, seqlen_k, 2, 1), dim)
        wanted = fa3.attention_with_lse(q, k, v, variant)
        out, lse = (at_the_edge(torch.full_like(t, NAN), last=last) for t in wanted)
        plan = fa3.plan(q, k, v, variant)
        assert not plan.by_tile and not variant.captures
        counter = ctas = None
        if plan.schedule.persistent:
            counter, ctas = torch.zeros(1, dtype=torch.int32, device="cuda"), 2
        arguments = (q, k, v, out, lse, None, None, None, counter, ctas, dim**-0.5)
        cache.get(plan.kernel).launch(*arguments)
        torch.cuda.synchronize()
        assert same((out, lse), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False], ids=["last byte", "first byte"])
@pytest.mark.parametrize("dim", [64, 128, 40, 256])
def test_outputs_are_not_written_past_the_end_of_mapped_memory(dim, last):
    alone(outputs_at_the_edge, dim, last)


def past_the_edge() -> None:
    """Reads 64 numbers where mapped memory holds 32: this process must not live to tell."""
    whole = Pages(128).tensor((32,), torch.int32, last=True)
    assert whole.fill_(1).sum().item() == 32
    beyond = torch.as_tensor(Memory(whole.data_ptr(), (64,), "<i4"), device="cuda")
    print("read past the end:", beyond.sum().item())


@pytest.mark.gpu
def test_a_read_past_mapped_memory_is_seen_here():
    with pytest.raises(AssertionError, match="illegal memory access"):
        alone(past_the_edge)


# Poison.


def poisoned(t: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    """The first `length` positions, in memory whose other positions hold `fill`."""
    whole = t.clone()
    whole[:, length:] = fill
    return whole[:, :length]


@pytest.mark.parametrize("fill", [NAN, math.inf], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 72, 256])
@pytest.mark.parametrize("lengths", [(1, 1), (100, 130), (128, 128), (65, 257)], ids=str)
def test_what_lies_past_the_sequences_changes_no_bit(device, lengths, dim, fill):
    seqlen_q, seqlen_k = lengths
    q, k, v = drawn(device, (2, 400, 400, 2, 1), dim)
    for variant in (fa3.Variant(), fa3.Variant(mask=masks.causal)):
        clean, other = (
            fa3.attention_with_lse(
                poisoned(q, seqlen_q, value),
                poisoned(k, seqlen_k, value),
                poisoned(v, seqlen_k, value),
                variant,
            )
            for value in (0.0, fill)
        )
        assert same(clean, other)


def documents(device: str) -> fa3.Variant:
    of = torch.tensor([0] * 300 + [1] * 500 + [2] * 700).to(device, torch.int32)
    return fa3.Variant(mask=lambda b, h, q, k: (of[q + 400] == of[k]) & (k <= q + 400))


UNVISITED = {  # variant for 128 queries, and the stretches of 1,500 keys that no tile of it needs
    "beginning": (
        lambda device: fa3.Variant(mask=lambda b, h, q, k: k >= 700),
        [(0, 512)],
    ),
    "end": (lambda device: fa3.Variant(mask=lambda b, h, q, k: k <= q), [(512, 1500)]),
    "window": (lambda device: fa3.Variant(mask=masks.window(200, 0)), [(0, 1024)]),
    "prefix and causal": (
        lambda device: fa3.Variant(mask=lambda b, h, q, k: (k < 64) | ((k >= 1200) & (k < 1300))),
        [(320, 896)],
    ),
    "documents": (documents, [(0, 128), (896, 1500)]),
}


@pytest.mark.parametrize("fill", [NAN, math.inf], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", UNVISITED)
def test_tiles_that_no_query_needs_change_no_bit(device, name, dim, fill):
    make, stretches = UNVISITED[name]
    q, k, v = drawn(device, (1, 128, 1500, 2, 2), dim)
    variant = make(device)
    clean = fa3.attention_with_lse(q, k, v, variant)
    for first, end in stretches:
        k[:, first:end], v[:, first:end] = fill, fill
    assert same(clean, fa3.attention_with_lse(q, k, v, variant))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (192, 128), (256, 256)], ids=str)
def test_what_an_earlier_call_left_in_shared_memory_changes_no_bit(dims):
    """Every tile of every SM is filled with NaN before, by this kernel and by the widest one."""
    mask = fa3.Variant(mask=masks.causal)
    cases = [
        drawn("cuda", sizes, *dims)
        for sizes in ((1, 1, 1, 1, 1), (1, 77, 3, 2, 1), (2, 130, 65, 2, 2), (1, 300, 90, 2, 2))
    ]
    clean = [fa3.attention_with_lse(*case, mask) for case in cases]
    many = (64, 256, 512, 8, 8)
    for width in ((256, 256), dims):
        filled = [torch.full_like(t, NAN) for t in drawn("cuda", many, *width)]
        for case, wanted in zip(cases, clean, strict=True):
            assert fa3.attention(*filled, fa3.Variant()).isnan().all()
            assert same(fa3.attention_with_lse(*case, mask), wanted)


@pytest.mark.parametrize("mask", ["causal", "none", "full"])
def test_every_element_of_the_outputs_is_written(device, mask):
    """Their memory held NaN before, where the allocator gives it again."""
    q, k, v = drawn(device, (2, 333, 100, 4, 4))
    variant = fa3.Variant(mask={"causal": masks.causal, "none": masks.none, "full": None}[mask])
    for shape, dtype in ((q.shape, q.dtype), ((2, 4, 333), torch.float32)):
        torch.full(shape, NAN, device=device, dtype=dtype)
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    assert not out.isnan().any() and not lse.isnan().any()
