"""Gradients of inputs that broke other backward passes: right, finite, and from any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Elementwise, OnlineSoftmax, masks, scores

from .alone import alone
from .oracles import drawn, gradients, hold_gradients, ramp, same
from .pages import at_the_edge
from .test_captures import READS, values, variant_of

# Rows that see nothing: Dao-AILab/flash-attention#1778, pytorch/pytorch#41508.


def test_causal_with_more_queries_than_keys_has_zeros_for_rows_before_the_first_key(device):
    q, k, v = drawn(device, (1, 2048, 1024, 1, 1))
    found = hold_gradients(q, k, v, fa3.Variant(mask=masks.causal))
    assert all(t.isfinite().all() for t in found.values())
    assert (found["q"][:, :1024] == 0).all()
    assert (found["q"][:, 1025:] != 0).any(-1).all()  # one key alone weighs 1, whatever its score


def test_five_queries_and_two_keys_have_known_gradients(device):
    """Visible counts 0, 0, 0, 1, 2; with q = 0 the weights are 1 over the count."""
    q, k, v = ramp(device, (1, 5, 2, 1, 1))
    variant = fa3.Variant(mask=masks.causal)
    found = gradients(q, k, v, variant, torch.ones_like(q))
    assert (found["v"][0, :, 0] == torch.tensor([[1.5], [0.5]], device=device)).all()
    # d out / d score is p0 * p1 = 1 / 4 for each of 64 channels whose values differ by 1
    dq = 0.25 * 64 * 64**-0.5 * (k[0, 1, 0].double() - k[0, 0, 0].double())
    torch.testing.assert_close(found["q"][0, 4, 0].double(), dq, rtol=2e-3, atol=2e-3)
    assert (found["q"][0, :4] == 0).all() and (found["k"] == 0).all()  # q is 0


EMPTY = {
    "causal": lambda device: fa3.Variant(mask=masks.causal),
    "window behind": lambda device: fa3.Variant(mask=lambda b, h, q, k: k < q - 70),
    "nothing": lambda device: fa3.Variant(mask=masks.none),
    "sink": lambda device: fa3.Variant(
        mask=masks.causal, softmax=OnlineSoftmax(torch.tensor([0.5, -1.0], device=device))
    ),
    "weights": lambda device: fa3.Variant(mask=masks.causal, softmax=Elementwise(torch.sigmoid)),
    "epilogue": lambda device: fa3.Variant(
        mask=masks.causal, epilogue=lambda o, lse, b, h, q: o * torch.sigmoid(lse)
    ),
    "score of -inf": lambda device: fa3.Variant(
        lambda s, b, h, q, k: torch.where(k < q - 70, s, -math.inf)
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_rows_that_see_nothing_pass_nothing_on_and_spoil_nothing(device, name):
    q, k, v = drawn(device, (1, 200, 90, 2, 1))
    variant = EMPTY[name](device)
    found = hold_gradients(q, k, v, variant)
    assert all(t.isfinite().all() for t in found.values())
    at = torch.arange(200, device=device)
    empty = {"nothing": at >= 0, "window behind": at <= 70, "score of -inf": at <= 70}
    assert (found["q"][:, empty.get(name, at < 110)] == 0).all()
    for t in (q, do := torch.randn_like(q)):
        t[:, empty.get(name, at < 110)] = math.nan
    again = gradients(q, k, v, variant, do)
    assert all(again[part].isfinite().all() for part in "qkv")


@pytest.mark.parametrize("lengths", [(128, 0), (0, 5), (0, 0)], ids=str)
def test_without_keys_or_queries_gradients_are_0(device, lengths):
    """Source: Dao-AILab/flash-attention#2470."""
    q, k, v = drawn(device, (2, *lengths, 4, 4))
    found = gradients(q, k, v, fa3.Variant(mask=masks.causal), torch.randn_like(q))
    for name, t in zip("qkv", (q, k, v), strict=True):
        assert found[name].shape == t.shape and not found[name].any()


# Layouts of an output's gradient: Dao-AILab/flash-attention#355, pytorch/pytorch#167263.


def layouts(do: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values: transposed, sliced in each dimension, at an odd address."""
    yield do.transpose(1, 2).contiguous().transpose(1, 2)
    yield do.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    yield torch.stack([do, -do], 2)[:, :, 0]
    yield torch.cat([do, do], -1)[..., : do.shape[-1]]
    yield torch.stack([do, do], -1)[..., 0]
    room = do.new_empty(do.numel() + 1)
    yield room[1:].view(do.shape).copy_(do)


@pytest.mark.parametrize(
    ("sizes", "dim"), [((2, 32, 32, 4, 1), 128), ((1, 130, 70, 1, 1), 64)], ids=str
)
def test_any_layout_of_an_outputs_gradient_gives_the_same_gradients(device, sizes, dim):
    q, k, v = drawn(device, sizes, dim, dtype=torch.float16)
    do = torch.randn_like(q)
    wanted = gradients(q, k, v, fa3.Variant(), do)
    for strided in layouts(do):
        found = gradients(q, k, v, fa3.Variant(), strided)
        assert same(found.values(), wanted.values())


def test_a_sum_whose_gradient_has_strides_0_gives_the_same_as_a_tensor_of_ones(device):
    given = drawn(device, (2, 32, 32, 4, 1), 128, dtype=torch.float16)
    q, k, v = (t.requires_grad_() for t in given)
    fa3.attention(q, k, v).sum().backward()
    wanted = gradients(*(t.detach() for t in given), fa3.Variant(), torch.ones_like(q))
    assert same((q.grad, k.grad, v.grad), wanted.values())


def test_a_dimension_of_size_1_may_have_any_stride_in_an_outputs_gradient(device):
    """Source: NVIDIA/cutlass#3031 and pytorch/pytorch#134001."""
    q, k, v = drawn(device, (1, 40, 40, 1, 1))
    do = torch.randn_like(q)
    wanted = gradients(q, k, v, fa3.Variant(), do)
    for strides in ((3, 64, 5, 1), (1, 64, 1, 1), (0, 64, 0, 1)):
        strided = do.as_strided(do.shape, strides)
        found = gradients(q, k, v, fa3.Variant(), strided)
        assert same(found.values(), wanted.values())


@settings(max_examples=10)
@given(sizes=st.tuples(*(st.integers(1, n) for n in (2, 90, 90, 3, 2))), seed=st.integers(0, 99))
def test_strided_inputs_give_the_same_gradients_as_contiguous_ones(device, sizes, seed):
    batch, seqlen_q, seqlen_k, group, kv_heads = sizes
    sizes = (batch, seqlen_q, seqlen_k, group * kv_heads, kv_heads)
    given = drawn(device, sizes, seed=seed)
    variant = fa3.Variant(mask=masks.causal)
    wanted = gradients(*given, variant, torch.ones_like(given[0]))
    strided = [torch.stack([t, t], 3).transpose(1, 2).contiguous().transpose(1, 2)[:, :, :, 1]
               for t in given]  # fmt: skip
    found = gradients(*strided, variant, torch.ones_like(given[0]))
    assert same(found.values(), wanted.values())


# Softcap: Dao-AILab/flash-attention#2466.

CAPPED = {"cpu": (1, 200, 4, 128), "cuda": (2, 1024, 32, 128)}


def softcapped(device: str) -> None:
    batch, seqlen, heads, dim = CAPPED[device]
    q, k, v = drawn(device, (batch, seqlen, seqlen, heads, heads), dim)
    hold_gradients(q, k, v, fa3.Variant(scores.softcap(10.0), masks.causal))


def test_the_backward_of_softcap_returns_and_is_right(device):
    alone(softcapped, device)


@pytest.mark.parametrize("cap", [0.2, 3.0, 50.0, 1e4])
def test_softcaps_of_any_size_have_the_right_gradients(device, cap):
    q, k, v = drawn(device, (1, 150, 170, 2, 1), dtype=torch.float16)
    hold_gradients(3 * q, k, v, fa3.Variant(scores.softcap(cap), masks.causal))


def test_a_softcap_of_0_is_none_bit_by_bit(device):
    q, k, v = drawn(device, (1, 150, 170, 2, 1))
    do = torch.randn_like(q)
    found = [
        gradients(q, k, v, variant, do).values()
        for variant in (
            fa3.Variant(scores.softcap(0), masks.causal),
            fa3.Variant(mask=masks.causal),
        )
    ]
    assert same(*found)


# Graphs of torch: Dao-AILab/flash-attention#2013, pytorch/pytorch#144540.


def compiled(device: str) -> None:
    """Forward and backward in one graph, for lengths that change; in a process of its own."""
    from torch._dynamo.testing import CompileCounterWithBackend

    slopes = torch.rand(4, device=device, requires_grad=True)
    variant = fa3.Variant(scores.alibi(slopes), masks.causal)
    counted = CompileCounterWithBackend("aot_eager")

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = fa3.attention(q * 2, k, v, variant, deterministic=True)
        return out.float().square().sum()

    in_graph = torch.compile(step, fullgraph=True, backend=counted, dynamic=True)
    for seqlen in (40, 77, 130):  # none is another size, which torch would take for the same
        given = [t.requires_grad_() for t in drawn(device, (2, seqlen, seqlen, 4, 2))]
        given.append(slopes)
        found = torch.autograd.grad(in_graph(*given[:3]), given)
        assert same(found, torch.autograd.grad(step(*given[:3]), given))
    assert counted.frame_count == 1


def test_forward_and_backward_are_one_graph_at_all_lengths_and_need_no_compiler_of_c(device):
    alone(compiled, device, CXX="/nowhere/c++", CC="/nowhere/cc", PATH="/nowhere")


def test_fake_tensors_flow_through_forward_and_backward(device):
    real = drawn(device, (2, 40, 50, 4, 2))
    wanted = gradients(*real, fa3.Variant(), torch.ones_like(real[0]))
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t).requires_grad_() for t in real)
        out, lse = fa3.attention_with_lse(q, k, v)
        assert isinstance(out, FakeTensor) and lse.shape == (2, 4, 40)
        found = torch.autograd.grad(out.sum(), [q, k, v])
    for fake, right in zip(found, wanted.values(), strict=True):
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
            right.shape, right.stride(), right.dtype, right.device
        )  # fmt: skip


def test_the_operators_pass_torchs_checks(device):
    variant = fa3.Variant(mask=masks.causal)
    q, k, v = (t.requires_grad_() for t in drawn(device, (1, 20, 30, 4, 2)))
    given = (q, k, v, [], variant.handle, None, "", False)
    assert set(torch.library.opcheck(torch.ops.cutedsl_fa3.attention, given).values()) == {
        "SUCCESS"
    }


# Captured tensors: pytorch/pytorch#150321.


@pytest.mark.parametrize("name", READS)
def test_a_captured_tensor_gets_its_gradient_from_visible_pairs_alone(device, name):
    """Hidden pairs read out of range: clamped, they would add to its first and last elements."""
    read = READS[name]
    if not read.dtype.is_floating_point:
        return
    t = torch.randn(read.shape, generator=torch.Generator().manual_seed(0))
    t = t.to(device, read.dtype)
    variant = fa3.Variant(*(bound(f, t) for f in (read.score, read.mask)))
    q, k, v = drawn(device, (2, 128, 128, 4, 2))
    found = hold_gradients(q, k, v, variant)
    assert "t0" not in found or found["t0"].shape == t.shape


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False], ids=["last byte", "first byte"])
def test_a_backward_reads_captured_tensors_within_mapped_memory_alone(last):
    alone(at_the_end_of_memory, list(READS), last, limit=400)


def at_the_end_of_memory(names: list[str], last: bool) -> None:
    """Beside the tensor, on one side, no address is mapped: to read one is a fault."""
    for name in names:
        read, t = READS[name], values(READS[name], "cuda")
        q, k, v = drawn("cuda", (2, 128, 128, 4, 2))
        variants = (variant_of(read, each) for each in (at_the_edge(t, last=last), t))
        found, wanted = (gradients(q, k, v, variant, torch.ones_like(q)) for variant in variants)
        torch.cuda.synchronize()
        for part, right in zip(found.values(), wanted.values(), strict=True):
            size = right.abs().max().item()
            torch.testing.assert_close(part, right, rtol=0.02, atol=0.02 * size, msg=name)


def bound(function: Callable, t: torch.Tensor) -> Callable:
    return lambda *indices: function(t, *indices)


@pytest.mark.parametrize("dim", [16, 64])
def test_a_buffer_one_element_too_short_gets_the_gradient_of_keys_before_its_end(device, dim):
    buffer = torch.randn(127, device=device)
    short = fa3.Variant(
        lambda s, b, h, q, k: s + buffer[k], lambda b, h, q, k: (k < 127) & (q >= k)
    )
    q, k, v = drawn(device, (1, 128, 128, 1, 1), dim)
    do = torch.randn_like(q)
    found = gradients(q, k, v, short, do)
    causal = fa3.Variant(lambda s, b, h, q, k: s + buffer[k], lambda b, h, q, k: q >= k)
    cut = gradients(q[:, :127], k[:, :127], v[:, :127], causal, do[:, :127])
    last = gradients(q[:, 127:], k[:, :127], v[:, :127], fa3.Variant(
        lambda s, b, h, q, k: s + buffer[k]), do[:, 127:])  # fmt: skip
    assert (found["k"][:, 127] == 0).all() and (found["v"][:, 127] == 0).all()
    torch.testing.assert_close(found["t0"], cut["t0"] + last["t0"], rtol=0.02, atol=0.02)
    hold_gradients(q, k, v, short)
