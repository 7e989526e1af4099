"""What a backward is given: on a GPU that is not there, and in torch on CPU tensors."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from gradients import captured_leaves, of_reference
from torch.utils._python_dispatch import TorchDispatchMode
from twin_cases import BATCH, HEADS, KV_HEADS, drawn, exact, variants

import cutedsl_fa3 as fa3
from cutedsl_fa3 import (
    Elementwise,
    OnlineSoftmax,
    backward,
    calls_backward,
    inputs,
    masks,
    schedules_backward,
    scores,
)

NAMES = (
    "q", "k", "v", "out", "lse", "do", "dlse", "dq", "dk", "dv", "captures", "table", "lse_log2",
    "delta", "sums", "turns", "captured", "flags", "scale",
)  # fmt: skip


def leaves(*sizes: int) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in drawn(*sizes)]


def last(gpu: Any) -> dict[str, Any]:
    """What the newest launch was given, by name."""
    return dict(zip(NAMES, gpu.launches[-1][1:], strict=True))


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


# What a launch is given.


def test_the_backwards_kernels_get_their_arguments_in_the_order_of_their_host_function(gpu):
    slopes = torch.rand(4, requires_grad=True)
    variant = fa3.Variant(scores.alibi(slopes), masks.causal)
    q, k, v = leaves(2, 300, 200, 4, 2, 64)
    out, lse = fa3.attention_with_lse(q, k, v, variant, scale=0.5)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad([out, lse], [q, k, v, slopes], [do, dlse])
    assert gpu.kernels[-1].startswith("backward")
    given = last(gpu)
    kept = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "do": do, "dlse": dlse}
    assert all(same_memory(given[name], t) for name, t in kept.items())
    for name, t in zip(("dq", "dk", "dv"), found, strict=False):
        assert same_memory(given[name], t) and t.is_contiguous()
    assert given["captures"] == inputs.as_numbers(variant.captures)
    assert same_memory(given["captured"][0], found[3]) and not found[3].any()
    assert given["scale"] == 0.5 and given["turns"] is None and given["table"] is None
    problem = fa3.Problem("bf16", 64, 64)
    tile_m = schedules_backward.default_schedule(variant, problem, wanted=(0,)).tile_m
    padded = -(-300 // tile_m) * tile_m
    assert given["lse_log2"].shape == given["delta"].shape == (2, 4, padded)
    assert given["sums"].numel() == 2 * 4 * padded * 64
    assert given["flags"].shape == (2 * 2 * 256 // 16,)  # two tiles of keys of each of two heads


def test_a_fixed_order_has_turns_and_adds_no_captured_tensor_in_the_kernel(gpu):
    slopes = torch.rand(4, requires_grad=True)
    q, k, v = leaves(2, 300, 200, 4, 2, 64)
    variant = fa3.Variant(scores.alibi(slopes), masks.causal)
    out = fa3.attention(q, k, v, variant, deterministic=True)
    torch.autograd.grad(out, [q, slopes], torch.ones_like(out))
    given = last(gpu)
    assert given["turns"] is not None and given["captured"] is None
    assert "deterministic" in gpu.kernels[-1].splitlines()


def test_torchs_own_switch_asks_for_a_fixed_order_too(gpu):
    q, k, v = leaves(1, 64, 64, 2, 2, 64)
    out = fa3.attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(out, q, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert last(gpu)["turns"] is not None


def test_kernels_of_one_function_are_shared_by_all_epilogues(gpu):
    gates = [torch.rand(4, requires_grad=True) for _ in range(2)]
    made = [
        fa3.Variant(mask=masks.causal, epilogue=lambda o, lse, b, h, q, g=g, f=f: o * g[h] + f)
        for g, f in zip(gates, (1.0, 2.0), strict=True)
    ]
    q, k, v = leaves(1, 64, 64, 4, 2, 64)
    for variant in made:
        for _ in range(2):
            out = fa3.attention(q, k, v, variant)
            do = torch.ones_like(out)
            torch.autograd.grad(out, [q, *variant.captures], do)
    backwards = [text for text in gpu.kernels if text.startswith("backward")]
    assert len(set(backwards)) == 1 and len(backwards) == len(made)  # looked up once a variant


def test_an_outputs_gradient_that_no_kernel_can_read_is_copied_and_others_are_not(gpu):
    q, k, v = leaves(2, 40, 50, 4, 2, 64)
    out, lse = fa3.attention_with_lse(q, k, v)
    dense = torch.randn_like(out)
    room = dense.new_empty(dense.numel() + 1)
    readable = [dense, dense.transpose(1, 2).contiguous().transpose(1, 2), dense[:1].expand_as(out)]
    others = [
        dense[:1, :1, :1, :1].expand_as(out),  # of a sum
        torch.stack([dense, dense], -1)[..., 0],
        room[1:].view(dense.shape).copy_(dense),
        torch._neg_view(dense),
    ]
    for do in (*readable, *others):
        torch.autograd.grad(out, q, do, retain_graph=True)
        given = last(gpu)["do"]
        assert torch.equal(given, do) and (given.data_ptr() == do.data_ptr()) == any(
            do is t for t in readable
        )
    for dlse in (torch.ones(()).expand_as(lse), torch.randn(4, 2, 40).transpose(0, 1)):
        torch.autograd.grad(lse, q, dlse, retain_graph=True)
        assert torch.equal(last(gpu)["dlse"], dlse)
        assert not last(gpu)["do"].any()


def test_a_stride_that_no_tensor_map_takes_is_replaced_where_the_size_is_1(gpu):
    q, k, v = leaves(1, 64, 64, 4, 4, 64)
    out = fa3.attention(q, k, v)
    do = torch.randn_like(out)
    odd = do.as_strided(do.shape, (3, *do.stride()[1:]))
    torch.autograd.grad(out, q, odd)
    given = last(gpu)["do"]
    assert torch.equal(given, do) and given.data_ptr() == odd.data_ptr()
    assert all(stride % 8 == 0 for stride in given.stride()[:3])


def test_the_current_device_is_left_as_found_by_a_backward_even_one_that_fails(gpu):
    q, k, v = leaves(1, 64, 64, 2, 2, 64)
    gpu.current = 1
    out = fa3.attention(q, k, v)
    torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)
    assert gpu.launches[-1][0] is None and gpu.current == 1
    gpu.fail = RuntimeError("launch failed")
    with pytest.raises(RuntimeError, match="launch failed"):
        torch.autograd.grad(out, q, torch.ones_like(out))
    assert gpu.current == 1


def test_neither_a_variant_nor_its_tensors_are_held_after_a_backward(gpu):
    gate = torch.rand(4, requires_grad=True)
    variant = fa3.Variant(mask=masks.causal, epilogue=lambda o, lse, b, h, q: o * gate[h])
    q, k, v = leaves(1, 64, 64, 4, 4, 64)
    fa3.attention(q, k, v, variant).sum().backward()
    gone = [weakref.ref(variant), weakref.ref(gate), weakref.ref(q)]
    gpu.launches.clear()
    q = k = v = gate = variant = None
    gc.collect()
    assert not any(ref() is not None for ref in gone)


# What is refused.


@pytest.mark.parametrize("place", ["q", "k", "v", "captured"])
def test_a_gradient_without_a_kernel_is_refused_by_the_forward_that_asks_for_one(
    gpu, monkeypatch, place
):
    monkeypatch.setattr(schedules_backward, "TABLE", schedules_backward.TABLE[:1])
    tensors = dict(zip("qkv", drawn(1, 64, 64, 4, 4, 128), strict=True), captured=torch.rand(4))
    q, k, v, slopes = tensors.values()
    variant = fa3.Variant(scores.alibi(slopes))
    tensors[place].requires_grad_()
    said = r"head_dim, head_dim_v = 128, 128: .*reference\.attention is differentiable.*no_grad"
    with pytest.raises(fa3.Unsupported, match=said):
        fa3.attention(q, k, v, variant)
    assert not gpu.launches
    with torch.no_grad():
        assert not fa3.attention(q, k, v, variant).requires_grad


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dout": torch.zeros(1, 5, 2, 64)}, r"dout is torch\.float32 \(1, 5, 2, 64\)"),
        ({"lse": None}, "lse is None: it is needed"),
        ({"dlse": torch.zeros(1, 2, 6)}, r"dlse is torch\.float32 \(1, 2, 6\) on cpu"),
    ],
    ids=str,
)
def test_what_does_not_belong_to_the_forward_is_refused_by_name(gpu, changed, said):
    q, k, v = drawn(1, 5, 7, 2, 2, 64)
    given = {"out": q, "lse": torch.zeros(1, 2, 5), "dout": q, "dlse": None} | changed
    with pytest.raises(fa3.Unsupported, match=said):
        calls_backward.backward(q, k, v, variant=fa3.Variant(), **given)
    assert not gpu.launches


# Rows without scores, for which nothing is launched.


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5), (1, 0, 0)])
def test_without_queries_or_keys_nothing_is_launched_and_what_the_rows_read_gets_its_gradient(
    gpu, sizes
):
    sink, gate = (torch.rand(4, requires_grad=True) for _ in range(2))
    variant = fa3.Variant(
        softmax=OnlineSoftmax(sink), epilogue=lambda o, lse, b, h, q: o + gate[h] * lse
    )
    q, k, v = leaves(*sizes, 4, 2, 64)
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad([out, lse], [q, k, v, sink, gate], [do, dlse])
    assert not gpu.launches and not any(t.any() for t in found[:3])
    wanted = of_reference(*(t.detach() for t in (q, k, v)), variant, (do, dlse))
    numbers = {id(t): f"t{n}" for n, t in enumerate(variant.captures)}
    for t, part in ((sink, found[3]), (gate, found[4])):
        right = wanted[numbers[id(t)]].float()
        torch.testing.assert_close(part, right, rtol=1e-2, atol=1e-2)
        assert part.any() or 0 in (q.numel(), k.shape[0])


# Gradients of captured tensors in a fixed order.


class Waits(TorchDispatchMode):
    """Notes what would make a host wait for a device, or copy from it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = str(func)
        waiting = ("_local_scalar_dense", "nonzero", "is_nonzero", "lift_fresh", "masked_select")
        if any(word in name for word in waiting) or _by_condition(name, args):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _by_condition(name: str, args: tuple) -> bool:
    """Whether elements are chosen by a condition, whose number only the device knows."""
    indices = args[1] if "aten.index" in name and len(args) > 1 else ()
    return isinstance(indices, list | tuple) and any(
        isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in indices
    )


WITH_TABLES = [
    name
    for name, variant in variants().items()
    if backward.differentiable(variant.without_epilogue()) - {variant.sink}
]


@pytest.mark.parametrize("tile", [(13, 40), (64, 7), backward.WIDE_TILE], ids=str)
@pytest.mark.parametrize("name", WITH_TABLES)
def test_a_second_pass_gives_captured_tensors_the_same_and_waits_for_nothing(
    monkeypatch, name, tile
):
    variant = variants()[name].without_epilogue()
    q, k, v = drawn(BATCH, 60, 85, HEADS, KV_HEADS, 16)
    o, lse = exact(q, k, v, variant)
    o, lse = o.to(q.dtype), None if lse is None else lse.float()
    do = torch.randn_like(o)
    wanted = backward.differentiable(variant) - {variant.sink}
    right = backward.run(q, k, v, variant, o, lse, do, scale=0.25, wanted=wanted).captures
    delta = None if lse is None else (do.float() * o.float()).sum(-1).transpose(1, 2)
    totals = backward.zeros_of(variant, wanted)
    call = backward._Call(q, k, v, variant, 0.25, tile, totals)
    tiles = backward._may_meet(call)  # in the host's memory, whatever the tensors' device
    monkeypatch.setattr(backward, "_may_meet", lambda call: tiles)
    with Waits() as waits:
        backward.of_captures(q, k, v, variant, lse, do, delta, totals, scale=0.25, tile=tile)
    assert waits.found == [] and totals.keys() == right.keys()
    for number, t in right.items():
        size = t.abs().max().item()
        torch.testing.assert_close(totals[number], t, rtol=1e-4, atol=1e-5 * (1 + size))


def test_an_element_read_by_a_number_is_not_waited_for():
    """t[0] as torch indexes would ask for the number on the device."""
    t = torch.rand(4)
    variant = fa3.Variant(
        lambda s, b, h, q, k: s * t[0] + t[3], epilogue=lambda o, lse, b, h, q: o * t[1]
    )
    q, k, v = drawn(1, 20, 30, 2, 2, 8)
    lse = torch.zeros(1, 2, 20)
    totals = backward.zeros_of(variant, [0])
    with Waits() as waits:
        do, _ = backward.before_epilogue(variant, q, lse, q, None, seqlen_k=30, totals=totals)
        backward.of_captures(q, k, v, variant, lse, do, lse, totals, scale=1.0)
    assert totals[0][[0, 1, 3]].all() and totals[0][2] == 0
    assert [name for name in waits.found if "nonzero" not in name] == []


def test_a_second_pass_leaves_out_tiles_that_are_hidden_whatever_memory_holds(monkeypatch):
    slopes = torch.rand(2)
    q, k, v = drawn(1, 64, 64, 2, 2, 8)
    lse, delta = torch.zeros(1, 2, 64), torch.zeros(1, 2, 64)
    worked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        backward._Tile,
        "weighed",
        lambda self, seen: worked.append((self.queries.start // 16, self.keys.start // 16)),
    )
    variant = fa3.Variant(scores.alibi(slopes), masks.causal)
    totals = backward.zeros_of(variant, [0])
    backward.of_captures(q, k, v, variant, lse, q, delta, totals, scale=1.0, tile=(16, 16))
    assert worked == [(m, n) for m in range(4) for n in range(m + 1)]


def test_the_rows_of_an_epilogue_are_worked_on_without_waiting_and_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(backward, "ROWS_AT_ONCE", 4 * 8 * 7)
    gate, shift = torch.rand(4), torch.rand(())
    variant = fa3.Variant(
        epilogue=lambda o, lse, b, h, q: torch.where(o > 0.1, o * gate[h], lse) + shift * q
    )
    generator = torch.Generator().manual_seed(0)
    o, do = (torch.randn(1, 20, 4, 8, generator=generator) for _ in range(2))
    lse, dlse = (torch.randn(1, 4, 20, generator=generator) for _ in range(2))
    totals = backward.zeros_of(variant, [0, 1])
    with Waits() as waits:
        through, by_lse = backward.before_epilogue(
            variant, o, lse, do, dlse, seqlen_k=9, totals=totals
        )
    assert waits.found == []
    with captured_leaves(variant):
        leaf, of_rows = o.clone().requires_grad_(), lse.clone().requires_grad_()
        at = of_rows.transpose(1, 2)[..., None]
        q = torch.arange(20)[:, None, None]
        out = torch.where(leaf > 0.1, leaf * gate[:, None], at) + shift * q
        right = torch.autograd.grad(out, [leaf, of_rows, *variant.captures], do)
    for found, wanted in zip((through, by_lse - dlse), right, strict=False):
        torch.testing.assert_close(found, wanted)
    for number, wanted in enumerate(right[2:]):
        torch.testing.assert_close(totals[number], wanted, rtol=1e-4, atol=1e-4)


def test_a_sum_in_a_fixed_order_has_the_error_of_its_parts_not_of_their_number():
    """A slope's gradient is a sum over all pairs: added one by one in fp32 it would drift."""
    slopes = torch.zeros(1)
    variant = fa3.Variant(lambda s, b, h, q, k: s + slopes[h], softmax=Elementwise(torch.exp))
    q, k = torch.zeros(1, 600, 1, 8), torch.zeros(1, 900, 1, 8)
    v, do = torch.full((1, 900, 1, 8), 0.1), torch.ones(1, 600, 1, 8)
    totals = backward.zeros_of(variant, [0])
    backward.of_captures(q, k, v, variant, None, do, None, totals, scale=1.0)
    right = 600 * 900 * 8 * float(torch.tensor(0.1))
    assert totals[0].item() == pytest.approx(right, rel=2e-7 * math.log2(600 * 900))
