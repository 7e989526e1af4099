"""What `attention` and `plan` refuse, before any compile or launch, and what they accept."""

from __future__ import annotations

import pytest
import torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import cache, interface
from cutedsl_fa3.pipelines import Schedule


def drawn(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


Q = (2, 128, 4, 64)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(cache, "get", lambda kernel: pytest.fail("compiled"))


@pytest.mark.parametrize(
    ("q", "k", "v", "said"),
    [
        (drawn(2, 128, 64), drawn(*Q), drawn(*Q), r"q has shape \(2, 128, 64\)"),
        (drawn(*Q), drawn(3, 128, 4, 64), drawn(3, 128, 4, 64), "k batch = 3"),
        (drawn(*Q), drawn(*Q), drawn(2, 127, 4, 64), "v seqlen = 127"),
        (drawn(*Q), drawn(*Q), drawn(2, 128, 2, 64), "v heads = 2"),
        (drawn(*Q), drawn(2, 128, 4, 128), drawn(*Q), "k head_dim = 128"),
        (drawn(*Q), drawn(2, 128, 3, 64), drawn(2, 128, 3, 64), "q has 4 heads, k has 3"),
        (drawn(2, 128, 6, 64), drawn(*Q), drawn(*Q), "q has 6 heads, k has 4"),
        (drawn(*Q, dtype=torch.float32),) * 3 + ("q is torch.float32: supported are",),
        (drawn(*Q), drawn(*Q, dtype=torch.float16), drawn(*Q), "k is torch.float16 but q is"),
        (drawn(2, 128, 4, 72),) * 3 + ("head_dim = 72: supported are 64, 128",),
        (drawn(2, 128, 4, 264),) * 3 + ("head_dim = 264: supported are 64, 128",),
        ("q", drawn(*Q), drawn(*Q), "q = str"),
    ],
)
def test_a_bad_tensor_is_refused_by_argument_value_and_rule(q, k, v, said):
    with pytest.raises(fa3.Unsupported, match=said):
        fa3.plan(q, k, v)
    with pytest.raises(fa3.Unsupported, match=said):
        fa3.attention(q, k, v)


def test_a_cpu_tensor_is_refused_naming_the_reference():
    with pytest.raises(fa3.Unsupported, match=r"q is on cpu.*reference"):
        fa3.attention(drawn(*Q), drawn(*Q), drawn(*Q))


def test_a_function_instead_of_a_variant_is_refused():
    with pytest.raises(fa3.Unsupported, match="variant = function"):
        fa3.plan(drawn(*Q), drawn(*Q), drawn(*Q), lambda b, h, q, k: k <= q)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), "1", torch.tensor(1.0)])
def test_a_scale_that_the_softmax_cannot_take_is_refused(scale):
    with pytest.raises(fa3.Unsupported, match="scale = "):
        interface._checked_scale(scale, 64)


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (drawn(2, 128, 4, 72)[..., 1:65], "k .*address alignment: given"),
        (drawn(2, 128, 4, 65)[..., :64], "k .*stride alignment: given 520 bytes in dimension 1"),
        (drawn(2, 64, 4, 128).transpose(1, 3), "k has stride 512 along head_dim"),
    ],
)
def test_what_tma_cannot_address_is_refused_naming_a_way_out(view, said):
    with pytest.raises(fa3.LayoutError, match=said + ".*(contiguous|copy|clone)"):
        interface._addressable("k", view)


@pytest.mark.parametrize(
    "view",
    [
        drawn(2, 128, 3, 4, 64)[:, :, 1],
        drawn(2, 4, 128, 64).transpose(1, 2),
        drawn(1, 1, 1, 64).expand(2, 128, 4, 64),
        torch.zeros(64, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1)),
        drawn(2, 256, 4, 64)[:, ::2],
    ],
)
def test_what_tma_can_address_is_taken_without_a_copy(view):
    taken = interface._addressable("q", view)
    assert taken.data_ptr() == view.data_ptr() and taken.shape == view.shape
    assert all(stride * 2 % 16 == 0 for stride in taken.stride()[:3])


def test_addressing_rules_agree_with_the_tensor_map():
    """The short checks of the launch path refuse exactly what the tile's tensor map refuses."""
    made = fa3.plan(drawn(*Q), drawn(*Q), drawn(*Q))
    tile = made.kernel.tiles["q"]
    for strides in some_strides():
        t = torch.zeros(1 << 16, dtype=torch.bfloat16).as_strided((2, 3, 4, 64), (*strides, 1))
        byte_strides = [2 * t.stride(d) for d in (1, 2, 0)]
        shape = tuple(t.shape[d] for d in (3, 1, 2, 0))
        tensor_map = tile.tensor_map(t.data_ptr(), shape, tuple(byte_strides))
        refused = any(not rule.ok for rule in tensor_map.rules())
        try:
            interface._addressable("q", t)
        except fa3.LayoutError:
            assert refused
        else:
            assert not refused


def some_strides():
    """Some legal and some illegal (batch, seqlen, heads) strides, in elements."""
    for stride in (0, 4, 8, 12, 64, 65, 72, 100, 256, 1000):
        yield from ((stride, 256, 64), (256, stride, 64), (2048, 512, stride))


def test_a_kernel_that_spills_says_why_and_what_to_try(monkeypatch):
    class Spilling:
        launch = None

        class resources:
            spills = 64

    monkeypatch.setattr(cache, "get", lambda kernel: Spilling)
    with pytest.warns(interface.SlowKernel, match=r"spills 64 B.*192 x 128 tile.*tile_n=96"):
        interface._launcher(fa3.Variant(), torch.bfloat16, 64, 64, None)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (Schedule(256, 64, consumers=2), "tile_m = 256 with consumers = 2.*use tile_m=128"),
        (Schedule(128, 64, cluster=(2, 1)), r"cluster = \(2, 1\).*use \(1, 1\)"),
    ],
)
def test_a_schedule_that_the_forward_cannot_follow_is_refused(schedule, said):
    with pytest.raises(fa3.ScheduleError, match=said):
        fa3.plan(drawn(*Q), drawn(*Q), drawn(*Q), schedule=schedule)


def test_a_ring_too_deep_is_refused_naming_bytes_and_limit():
    q = drawn(2, 128, 4, 128)
    with pytest.raises(fa3.LayoutError, match=r"295056 .*232448.* 3 stages of 'k', 'v' would"):
        fa3.plan(q, q, q, schedule=Schedule(128, 128, stages=4))


def test_a_captured_tensor_without_elements_is_refused():
    with pytest.raises(fa3.Unsupported, match=r"shape \(3, 0\) has no elements"):
        interface._launchable(torch.zeros(3, 0))


def test_a_captured_tensor_must_cover_the_heads_and_batches_it_is_read_by():
    q, slopes, ends = drawn(*Q), torch.rand(2), torch.tensor([3])
    with pytest.raises(fa3.Unsupported, match=r"t0 has shape \(2,\).*dimension 0 is read by h"):
        fa3.plan(q, q, q, fa3.Variant(lambda s, b, h, q, k: s + slopes[h]))
    with pytest.raises(fa3.Unsupported, match=r"t0 has shape \(1,\).*read by b, of which.* 2"):
        fa3.plan(q, q, q, fa3.Variant(mask=lambda b, h, q, k: k < ends[b]))


def test_a_captured_tensor_may_end_before_the_keys_that_the_mask_hides():
    q, table = drawn(*Q), torch.rand(127)
    fa3.plan(q, q, q, fa3.Variant(lambda s, b, h, q, k: s + table[k], lambda b, h, q, k: k < 127))


def test_positions_beyond_the_arithmetic_of_masks_are_refused():
    k = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16).expand(1, 2**30, 4, 64)
    with pytest.raises(fa3.Unsupported, match=r"k seqlen = 1073741824: at most 536870912"):
        fa3.plan(drawn(1, 128, 4, 64), k, k)


def test_a_dictionary_is_no_schedule():
    with pytest.raises(fa3.Unsupported, match="schedule = dict"):
        fa3.plan(drawn(*Q), drawn(*Q), drawn(*Q), schedule={"tile_m": 128})
