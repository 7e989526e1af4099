"""Captured tensors are read where the mask shows a key, and nowhere outside the tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutedsl_fa3 as fa3

from .alone import alone
from .oracles import drawn, exact, hold, hold_lse, same
from .pages import at_the_edge

Reader = Callable[..., Any]
SIZES = (2, 128, 128, 4, 2)
SHORT = 127  # one element less than there are positions


@dataclass(frozen=True)
class Read:
    """How a score reads a captured tensor that has no element more than the mask shows.

    `score` and `mask` take the tensor first.
    """

    shape: tuple[int, ...]
    score: Reader
    mask: Reader
    dtype: torch.dtype = torch.float32


def causal_but_the_last_key(t, b, h, q, k):
    return (k < SHORT) & (q >= k)


def both_but_the_last(t, b, h, q, k):
    return (k < SHORT) & (q < SHORT)


def all_but_the_last_query(t, b, h, q, k):
    return q < SHORT


READS = {
    "by k": Read((SHORT,), lambda t, s, b, h, q, k: s + t[k], causal_but_the_last_key),
    "by q": Read((SHORT,), lambda t, s, b, h, q, k: s + t[q], all_but_the_last_query),
    "by k - q": Read(
        (SHORT,), lambda t, s, b, h, q, k: s + t[k - q], lambda t, b, h, q, k: (k >= q) & (k < 127)
    ),
    "by q - k": Read(
        (50,), lambda t, s, b, h, q, k: s + t[q - k], lambda t, b, h, q, k: (q >= k) & (q - k < 50)
    ),
    "by k - q + center": Read(
        (4, 2 * SHORT - 1),
        lambda t, s, b, h, q, k: s + t[h, k - q + SHORT - 1],
        both_but_the_last,
    ),
    "by 2 * k": Read(
        (253,), lambda t, s, b, h, q, k: s + t[2 * k], lambda t, b, h, q, k: (k < SHORT) & (k <= q)
    ),
    "by k // 8": Read(
        (16,), lambda t, s, b, h, q, k: s + t[k // 8], lambda t, b, h, q, k: k < SHORT
    ),
    "by k + 1": Read(
        (128,), lambda t, s, b, h, q, k: s + t[k + 1], lambda t, b, h, q, k: k < SHORT
    ),
    "by q and k": Read((SHORT, SHORT), lambda t, s, b, h, q, k: s + t[q, k], both_but_the_last),
    "by k and q": Read((SHORT, SHORT), lambda t, s, b, h, q, k: s + t[k, q], both_but_the_last),
    "rank 3": Read((4, SHORT, SHORT), lambda t, s, b, h, q, k: s + t[h, q, k], both_but_the_last),
    "rank 4": Read(
        (2, 4, SHORT, SHORT), lambda t, s, b, h, q, k: s + t[b, h, q, k], both_but_the_last
    ),
    "rank 5": Read(
        (2, 4, 3, 8, 16),
        lambda t, s, b, h, q, k: s + t[b, h, q % 3, q // 16, k // 8],
        both_but_the_last,
    ),
    "rank 0": Read((), lambda t, s, b, h, q, k: s + t * k, causal_but_the_last_key),
    **{
        f"{str(dtype)[6:]} by k": Read(
            (SHORT,), lambda t, s, b, h, q, k: s + t[k], causal_but_the_last_key, dtype
        )
        for dtype in (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
        )
    },
    "bool by k": Read(
        (SHORT,),
        lambda t, s, b, h, q, k: torch.where(t[k], s, s - 2.0),
        causal_but_the_last_key,
        torch.bool,
    ),
    "bool by q and k": Read(
        (SHORT, SHORT),
        lambda t, s, b, h, q, k: s,
        lambda t, b, h, q, k: (q < SHORT) & (k < SHORT) & (t[q, k] | (q == k)),
        torch.bool,
    ),
    "int64 in the mask": Read(
        (SHORT,),
        lambda t, s, b, h, q, k: s,
        lambda t, b, h, q, k: (k < SHORT) & ((t[k] > 1) | (k == 0)),
        torch.int64,
    ),
}


def values(read: Read, device: str, seed: int = 3) -> torch.Tensor:
    """The captured tensor of a read: small numbers, exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if read.dtype == torch.bool else 5
    numbers = torch.randint(0, top, read.shape, generator=generator)
    return (numbers / 4 if read.dtype.is_floating_point else numbers).to(device, read.dtype)


def variant_of(read: Read, t: torch.Tensor) -> fa3.Variant:
    return fa3.Variant(
        lambda s, b, h, q, k: read.score(t, s, b, h, q, k),
        lambda b, h, q, k: read.mask(t, b, h, q, k),
    )


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("name", READS)
def test_a_tensor_may_end_where_the_mask_does(device, name, dim):
    """Source: pytorch/pytorch#150321."""
    read = READS[name]
    hold(*drawn(device, SIZES, dim), variant_of(read, values(read, device)))


@pytest.mark.parametrize("dim", [16, 64])
def test_a_buffer_of_one_element_less_equals_the_attention_over_one_key_less(device, dim):
    """Source: pytorch/pytorch#150321."""
    q, k, v = drawn(device, (1, 128, 128, 1, 1), dim)
    buffer = torch.randn(127).to(device)

    def biased(s, b, h, q, k):
        return s + buffer[k]

    out, lse = hold(q, k, v, fa3.Variant(biased, lambda b, h, q, k: (k < 127) & (q >= k)))
    short = fa3.Variant(biased, lambda b, h, q, k: q >= k)
    wanted, wanted_lse = exact(q, k[:, :127], v[:, :127], short)
    assert (out.double() - wanted).abs().max() <= 2**-7 * v.abs().max()
    hold_lse(lse, wanted_lse)


POISON = {torch.bool: True, torch.uint8: 255}


def surrounded(t: torch.Tensor, before: int, step: int) -> torch.Tensor:
    """The same values as a view into memory that holds other, extreme values all around.

    The view starts `before` elements into its storage and takes every `step`-th of a row.
    """
    if t.ndim == 0:
        return surrounded(t[None], before, step)[0]
    extreme = math.nan if t.dtype.is_floating_point else POISON.get(t.dtype, -100)
    width = before + t.shape[-1] * step + 5
    around = torch.full((*(n + 2 for n in t.shape[:-1]), width), extreme, dtype=t.dtype).to(
        t.device
    )
    inner = around[(*(slice(1, -1) for _ in t.shape[:-1]), slice(before, width - 5, step))]
    inner.copy_(t)
    return inner


@pytest.mark.parametrize("name", READS)
@settings(max_examples=6)
@given(before=st.integers(0, 9), step=st.sampled_from((1, 1, 2, 3)), turned=st.booleans())
def test_a_view_equals_its_contiguous_copy_whatever_lies_around_it(
    device, name, before, step, turned
):
    """Any alignment, any strides: wide loads must not take a neighbour's value."""
    read = READS[name]
    t = values(read, device)
    view = (
        surrounded(t.mT, before, step).mT if turned and t.ndim > 1 else surrounded(t, before, step)
    )
    assert torch.equal(view, t)
    q, k, v = drawn(device, SIZES)
    here = fa3.attention_with_lse(q, k, v, variant_of(read, view))
    assert same(here, fa3.attention_with_lse(q, k, v, variant_of(read, t)))


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (2,)], ids=str)
def test_expanded_dimensions_of_a_captured_tensor_are_read_by_their_stride(device, dims):
    shape = tuple(1 if i in dims else n for i, n in enumerate((4, 128, 128)))
    table = torch.randn(shape).to(device).expand(4, 128, 128)
    q, k, v = drawn(device, SIZES)

    def biased(t):
        return fa3.Variant(lambda s, b, h, q, k: s + t[h, q, k])

    here = fa3.attention_with_lse(q, k, v, biased(table))
    assert same(here, fa3.attention_with_lse(q, k, v, biased(table.contiguous())))


@settings(max_examples=25)
@given(length=st.integers(1, 200), seqlen_k=st.integers(1, 200), extreme=st.booleans())
def test_a_buffer_of_any_length_serves_the_keys_below_it(device, length, seqlen_k, extreme):
    """Indices that point anywhere at hidden keys, through a tensor of indices too."""
    buffer = torch.randn(length).to(device)
    far = 2**31 - 1 if extreme else length
    index = torch.arange(200) % length
    index[min(length, seqlen_k) :] = far
    index = index.to(device, torch.int32)
    end = torch.tensor(length, device=device)
    q, k, v = drawn(device, (1, 70, seqlen_k, 2, 2))
    hold(
        q,
        k,
        v,
        fa3.Variant(lambda s, b, h, q, k: s + buffer[index[k]], lambda b, h, q, k: k < end),
    )


def test_what_a_score_makes_of_a_hidden_key_never_counts(device):
    """It is NaN, or infinite: a logarithm of 0 and below, a division by 0, a NaN in a table."""
    table = torch.full((300,), math.nan, device=device)
    table[:130] = torch.randn(130).to(device)
    q, k, v = drawn(device, (1, 130, 130, 2, 2))
    visible = {
        "log": lambda s, b, h, q, k: s - torch.log(q - k + 1.0),
        "division": lambda s, b, h, q, k: s + 1.0 / (q - k + 1),
        "table": lambda s, b, h, q, k: s + table[k - q + 129],
    }
    for score in (visible["log"], visible["division"]):
        hold(q, k, v, fa3.Variant(score, lambda b, h, q, k: k <= q))
    hold(q, k, v, fa3.Variant(visible["table"], lambda b, h, q, k: k <= q))


# The end of mapped memory.


def at_the_end_of_memory(names: list[str], last: bool) -> None:
    q, k, v = drawn("cuda", SIZES)
    for name in names:
        read = READS[name]
        t = values(read, "cuda")
        edge = at_the_edge(t, last=last)
        assert torch.equal(edge, t)
        here = fa3.attention_with_lse(q, k, v, variant_of(read, edge))
        torch.cuda.synchronize()
        assert same(here, fa3.attention_with_lse(q, k, v, variant_of(read, t))), name


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False], ids=["last byte", "first byte"])
def test_captured_tensors_are_not_read_past_the_end_of_mapped_memory(last):
    """Source: pytorch/pytorch#150321."""
    alone(at_the_end_of_memory, list(READS), last, limit=400)
