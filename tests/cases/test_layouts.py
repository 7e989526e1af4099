"""Strides, offsets and sizes of 1: a view gives what its contiguous copy gives, without a copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import masks

from .oracles import drawn, same

Values = torch.Tensor  # (batch, seqlen, heads, dim), contiguous


def every_second_token(t: Values) -> torch.Tensor:
    wide = t.new_full((t.shape[0], 2 * t.shape[1], *t.shape[2:]), torch.nan)
    wide[:, ::2] = t
    return wide[:, ::2]


def heads_first(t: Values) -> torch.Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def batch_inside(t: Values) -> torch.Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def batch_innermost_of_heads(t: Values) -> torch.Tensor:
    return t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


def middle_of_a_packed_row(t: Values) -> torch.Tensor:
    """As k lies in (batch, seqlen, 3 * heads * dim)."""
    packed = t.new_full((*t.shape[:2], 3, *t.shape[2:]), torch.nan)
    packed[:, :, 1] = t
    return packed.flatten(2).split(t.shape[2] * t.shape[3], dim=2)[1].unflatten(2, t.shape[2:])


def part_of_wider_heads(t: Values) -> torch.Tensor:
    wide = t.new_full((*t.shape[:3], t.shape[3] + 24), torch.nan)
    wide[..., 16 : 16 + t.shape[3]] = t
    return wide[..., 16 : 16 + t.shape[3]]


def after_an_offset(t: Values) -> torch.Tensor:
    """16 bytes, the least that TMA takes, past the start of the storage."""
    storage = t.new_full((t.numel() + 8,), torch.nan)
    storage[8:] = t.flatten()
    return storage[8:].view(t.shape)


def end_of_a_longer_batch(t: Values) -> torch.Tensor:
    return torch.cat((torch.full_like(t, torch.nan), t))[t.shape[0] :]


LAYOUTS: dict[str, Callable[[Values], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    **{
        make.__name__.replace("_", " "): make
        for make in (
            every_second_token,
            heads_first,
            batch_inside,
            batch_innermost_of_heads,
            middle_of_a_packed_row,
            part_of_wider_heads,
            after_an_offset,
            end_of_a_longer_batch,
        )
    },
}


def call(q, k, v, mask=masks.causal):
    return fa3.attention_with_lse(q, k, v, fa3.Variant(mask=mask))


@pytest.mark.parametrize("length", [64, 1024])
@pytest.mark.parametrize("strided", ["k", "v", "q", "both"])
def test_each_tensor_is_addressed_by_its_own_strides(device, strided, length):
    """Source: flagos-ai/FlagAttention#45."""
    q, k, v = drawn(device, (1, length, length, 2, 2), dtype=torch.float16)
    views = {
        "k": (q, every_second_token(k), v),
        "v": (q, k, every_second_token(v)),
        "q": (heads_first(q), k, v),
        "both": (heads_first(q), every_second_token(k), heads_first(v)),
    }
    assert same(call(*views[strided]), call(q, k, v))


@settings(max_examples=40)
@given(names=st.tuples(*(st.sampled_from(sorted(LAYOUTS)),) * 3), data=st.data())
def test_any_mix_of_layouts_equals_contiguous_copies(device, names, data):
    """What lies between the elements of a view is NaN here, and stays out."""
    sizes = (data.draw(st.integers(1, 3)), 70, 130, data.draw(st.sampled_from((1, 2, 4))), 1)
    tensors = drawn(device, sizes, data.draw(st.sampled_from((64, 72, 128))))
    views = [LAYOUTS[name](t) for name, t in zip(names, tensors, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(views, tensors, strict=True))
    assert same(call(*views), call(*tensors))


@pytest.mark.parametrize("length", [1, 30, 77, 256])
@pytest.mark.parametrize("heads", [1, 4])
def test_slices_of_a_packed_projection_are_taken_as_they_lie(device, heads, length):
    """Source: vllm-project/flash-attention#185."""
    width = heads * 64
    packed = torch.randn(2, length, 3 * width, generator=torch.Generator().manual_seed(1))
    parts = packed.to(device, torch.bfloat16).split(width, dim=2)
    q, k, v = (part.unflatten(2, (heads, 64)) for part in parts)
    assert k.storage_offset() == width and not k.is_contiguous()
    assert same(call(q, k, v), call(*(t.contiguous() for t in (q, k, v))))


@pytest.mark.parametrize("dim", ["batch", "seqlen", "heads"])
@pytest.mark.parametrize("which", ["k and v", "q"])
def test_expanded_dimensions_are_read_without_a_copy(device, which, dim):
    at = ("batch", "seqlen", "heads").index(dim)
    q, k, v = drawn(device, (3, 100, 100, 4, 4))
    q, k, v = (
        t[(slice(None),) * at + (slice(0, 1),)].expand(t.shape)
        if (name == "q") == (which == "q")
        else t
        for name, t in (("q", q), ("k", k), ("v", v))
    )
    assert (q if which == "q" else k).stride(at) == 0
    assert same(call(q, k, v), call(*(t.contiguous() for t in (q, k, v))))


# A dimension of size 1 has a stride that nothing reads.


@pytest.mark.parametrize("stride", [0, 1, 3, 7, 2**40, 2**62], ids=str)
@pytest.mark.parametrize("ones", ["b", "s", "h", "bs", "bh", "sh", "bsh"])
def test_the_stride_of_a_size_1_dimension_does_not_matter(device, ones, stride):
    """Source: NVIDIA/cutlass#3031, pytorch/pytorch#134001."""
    batch, length, heads = (
        1 if name in ones else size for name, size in (("b", 3), ("s", 70), ("h", 2))
    )
    tensors = drawn(device, (batch, length, length, heads, heads))
    views = [
        t.as_strided(
            t.shape, [stride if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)]
        )
        for t in tensors
    ]
    assert same(call(*views), call(*tensors))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (1, 1, 300, 1, 1), (2, 1, 1, 8, 1)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_single_positions_and_heads_have_no_ambiguous_layout(device, name, sizes):
    tensors = drawn(device, sizes)
    assert same(call(*(LAYOUTS[name](t) for t in tensors)), call(*tensors))


def test_a_view_is_not_copied(device, monkeypatch):
    tensors = drawn(device, (2, 70, 130, 4, 2))
    views = [every_second_token(t) for t in tensors]
    wanted = call(*tensors)

    def refused(self, *args, **kwargs):
        pytest.fail("copied")

    if device == "cuda":  # the emulator may copy as it likes
        for copy in ("contiguous", "clone", "copy_"):
            monkeypatch.setattr(torch.Tensor, copy, refused)
    result = call(*views)
    monkeypatch.undo()
    assert same(result, wanted)


# What TMA cannot address is refused by argument, rule and way out, on both devices alike.


def odd_columns(t: Values) -> torch.Tensor:
    wide = t.new_zeros(*t.shape[:3], 2 * t.shape[3])
    return wide[..., ::2]


def columns_outside(t: Values) -> torch.Tensor:
    return t.transpose(1, 3).contiguous().transpose(1, 3)


def off_by_one_element(t: Values) -> torch.Tensor:
    return t.new_zeros(t.numel() + 8)[1 : t.numel() + 1].view(t.shape)


def off_by_eight_bytes(t: Values) -> torch.Tensor:
    return t.new_zeros(t.numel() + 8)[4 : t.numel() + 4].view(t.shape)


def rows_of_broken_chunks(t: Values) -> torch.Tensor:
    return t.new_zeros(*t.shape[:3], t.shape[3] + 4)[..., : t.shape[3]]


REFUSED = (
    odd_columns,
    columns_outside,
    off_by_one_element,
    off_by_eight_bytes,
    rows_of_broken_chunks,
)


@pytest.mark.parametrize("at", ["q", "k", "v"])
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_tma_cannot_address_is_refused_naming_a_way_out(device, make, at):
    tensors = dict(zip("qkv", drawn(device, (2, 70, 130, 4, 2)), strict=True))
    tensors[at] = make(tensors[at])
    with pytest.raises(fa3.LayoutError, match=rf"^{at} .*\.(contiguous|clone)\(\)"):
        call(**tensors)


@pytest.mark.parametrize("at", ["q", "k", "v"])
def test_the_way_out_that_an_error_names_works(device, at):
    tensors = dict(zip("qkv", drawn(device, (2, 70, 130, 4, 2)), strict=True))
    wanted = call(**tensors)
    broken = tensors[at].new_zeros(tensors[at].numel() + 8)[1:-7].view(tensors[at].shape)
    broken.copy_(tensors[at])
    tensors[at] = broken
    with pytest.raises(fa3.LayoutError) as caught:
        call(**tensors)
    way = "clone" if ".clone()" in str(caught.value) else "contiguous"
    tensors[at] = getattr(broken, way)()
    assert same(call(**tensors), wanted)
