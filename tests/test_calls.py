"""What a call costs and keeps: checked once a signature, launched at once, nothing held alive."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

import cutedsl_fa3 as fa3
from cutedsl_fa3 import calls, inputs, interface, seen

Q = (2, 128, 4, 64)
A_TILE = fa3.Schedule(128, 64, 2, 2, "intra")  # a CTA a tile


def drawn(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


def by_head(*tensors):
    def score(s, b, h, q, k):
        for t in tensors:
            s = s + t[h]
        return s

    return fa3.Variant(score)


@pytest.fixture
def checked(monkeypatch):
    """Counts the calls that are checked anew."""
    seen = []
    prepare = interface.prepare
    monkeypatch.setattr(interface, "prepare", lambda *a: seen.append(a[0].shape) or prepare(*a))
    return seen


def test_a_kernel_gets_its_arguments_in_the_order_of_its_host_function(gpu):
    q, k, v = drawn(2, 70, 4, 64), drawn(2, 90, 2, 64), drawn(2, 90, 2, 128)
    variant = by_head(torch.rand(4))
    out, lse = fa3.attention_with_lse(q, k, v, variant, scale=0.5, schedule=A_TILE)
    ((_, *given),) = gpu.launches
    assert all(a is b for a, b in zip(given[:5], (q, k, v, out, lse), strict=True))
    assert given[5:] == [inputs.as_numbers(variant.captures), None, None, None, None, 0.5]
    assert out.shape == (2, 70, 4, 128) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert lse.shape == (2, 4, 70) and lse.dtype == torch.float32 and lse.is_contiguous()


def test_arguments_that_a_plan_has_not_are_none(gpu):
    q = drawn(*Q)
    fa3.attention(q, q, q, fa3.Variant(softmax=fa3.Elementwise(torch.relu)), schedule=A_TILE)
    ((_, *given),) = gpu.launches
    assert given[4:10] == [None] * 6 and given[10:] == [1 / 8]


def test_persistent_ctas_get_the_counter_of_their_stream_and_their_number(gpu):
    q = drawn(*Q)
    schedule = replace(A_TILE, persistent=True)
    for _ in range(2):
        fa3.attention(q, q, q, schedule=schedule)
    gpu.stream = 7
    fa3.attention(q, q, q, schedule=schedule)
    counters = [launch[9] for launch in gpu.launches]
    assert all(one.dtype == torch.int32 and one.tolist() == [0] for one in counters)
    assert counters[0] is counters[1] and counters[2] is not counters[0]
    assert [launch[10] for launch in gpu.launches] == [gpu.multiprocessors] * 3
    assert [len(launch) for launch in gpu.launches] == [12] * 3


def test_a_table_of_summaries_is_made_afresh_for_each_call(gpu):
    documents = torch.arange(128, dtype=torch.int32) // 50
    variant = fa3.Variant(mask=lambda b, h, q, k: (documents[q] == documents[k]) & (k <= q))
    q = drawn(*Q)
    shape = fa3.plan(q, q, q, variant).table_shape(2, 4, 128, 128)
    for _ in range(2):
        fa3.attention(q, q, q, variant)
    one, two = (launch[7] for launch in gpu.launches)
    assert one.dtype == torch.int32 and tuple(one.shape) == shape and one.is_contiguous()
    assert one.data_ptr() != two.data_ptr()


def test_visits_launches_the_build_that_notes_them(gpu):
    q = drawn(*Q)
    schedule = fa3.Schedule(128, 64, 2, 2, "intra")
    noted = fa3.visits(q, q, q, schedule=schedule)
    ((_, *given),) = gpu.launches
    assert given[7] is noted and noted.shape == (2, 4, 1, 3) and (noted == -1).all()
    fa3.attention(q, q, q, schedule=schedule)
    assert len(set(gpu.kernels)) == 2
    assert gpu.launches[1][8] is None


def test_captured_tensors_are_launched_as_numbers_scalars_as_vectors(gpu):
    dropped, limit, table = torch.rand(128) < 0.5, torch.tensor(64), torch.rand(4, 256)[:, ::2]
    variant = fa3.Variant(
        lambda s, b, h, q, k: s + table[h, k], lambda b, h, q, k: ~dropped[k] & (k < limit)
    )
    q = drawn(*Q)
    for _ in range(2):  # checked, then kept
        fa3.attention(q, q, q, variant)
    wanted = {dropped: (128, 1), limit: (1, 1), table: (4, 128, 256, 2)}
    for launch in gpu.launches:
        given = [tuple(of_one) for of_one in launch[6]]
        assert given == [(t.data_ptr(), *wanted[t]) for t in variant.captures]


def test_a_call_is_checked_once_for_each_signature(gpu, checked):
    q, slopes = drawn(*Q), torch.rand(4)
    variant = by_head(slopes)
    for _ in range(5):
        fa3.attention(drawn(*Q), q, q, variant)
        fa3.attention_with_lse(q, q, q, variant, scale=0.5)
    assert len(checked) == len(gpu.kernels) == 1
    assert len(gpu.launches) == 10


DIFFERENT = {
    "batch": lambda q: (q[:1],) * 3,
    "queries": lambda q: (q[:, :5], q, q),
    "keys": lambda q: (q, q[:, :5], q[:, :5]),
    "heads": lambda q: (q, q[:, :, :2], q[:, :, :2]),
    "strides of q": lambda q: (drawn(2, 4, 128, 64).transpose(1, 2), q, q),
    "strides of k": lambda q: (q, drawn(2, 4, 128, 64).transpose(1, 2), q),
    "strides of v": lambda q: (q, q, drawn(2, 4, 128, 64).transpose(1, 2)),
    "head_dim_v": lambda q: (q, q, drawn(2, 128, 4, 128)),
    "dtype": lambda q: (q.half(),) * 3,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_whatever_the_checks_depend_on_is_checked_anew_or_by_the_launch(gpu, checked, name):
    q = drawn(*Q)
    fa3.attention(q, q, q)
    fa3.attention(*DIFFERENT[name](q))
    fa3.attention(q, q, q, schedule=fa3.Schedule(128, 64, 2, 2, "intra"))
    assert len(checked) == 2 + (not name.startswith("strides"))
    assert len(gpu.launches) == 3


# What a call of a known kind may be given next: by what is wrong, the tensor, and what is said.
SPOILT = {
    "address": (
        lambda t: t.new_zeros(t.numel() + 4)[4:].view(t.shape),
        "address alignment: given",
    ),
    "strides": (lambda t: t.new_zeros(*t.shape[:3], 68)[..., :64], "stride alignment: given"),
    "rows": (lambda t: t.new_zeros(*t.shape, 2)[..., 0], "has stride 2 along head_dim"),
    "dtype": (lambda t: t.half(), "one dtype is needed"),
}


def refuse_after_a_good_call(wrong, place, device):
    spoil, said = SPOILT[wrong]
    q = drawn(*Q).to(device)
    fa3.attention(q, q, q)
    tensors = [q, q, q]
    tensors[place] = spoil(q)
    for _ in range(2):
        with pytest.raises((fa3.LayoutError, fa3.Unsupported), match=said):
            fa3.attention(*tensors)
    fa3.attention(q, q, q)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("wrong", SPOILT)
def test_tensors_that_a_launch_refuses_are_refused_by_name(gpu, wrong, place):
    refuse_after_a_good_call(wrong, place, "cpu")
    assert len(gpu.launches) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("wrong", SPOILT)
def test_a_compiled_kernel_refuses_what_the_pretended_one_does(wrong, place):
    refuse_after_a_good_call(wrong, place, "cuda")


def odd_strides(t):
    """The same tensor with strides for its dimension of size 1 that no tensor map takes."""
    return t.as_strided(t.shape, (3, *t.stride()[1:]))


def test_a_dimension_of_size_1_may_have_any_stride_after_a_good_call(gpu, checked):
    q = drawn(1, 128, 4, 64)
    for tensors in ((q, q, q), (q, odd_strides(q), q), (odd_strides(q), q, q), (q, q, q)) * 2:
        fa3.attention(*tensors)
    assert len(gpu.launches) == 8 and len(checked) == 3 and len(gpu.kernels) == 1
    assert all(t.stride(0) % 8 == 0 for launch in gpu.launches for t in launch[1:4])


def test_strides_that_replaced_odd_ones_are_not_those_of_the_next_layout(gpu):
    q = drawn(1, 128, 4, 64)
    heads_first = drawn(1, 4, 128, 64).transpose(1, 2)
    fa3.attention(q, odd_strides(q), q)
    fa3.attention(q, heads_first, q)
    assert gpu.launches[0][2].stride()[1:] == q.stride()[1:]
    assert gpu.launches[1][2].stride() == heads_first.stride()


@pytest.mark.gpu
def test_a_dimension_of_size_1_gives_the_same_bits_with_any_stride():
    q, k, v = (torch.randn(1, 128, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    expected = fa3.attention(q, k, v)
    for tensors in ((odd_strides(q), k, v), (q, odd_strides(k), odd_strides(v)), (q, k, v)) * 2:
        assert torch.equal(fa3.attention(*tensors), expected)


@pytest.mark.parametrize("place", range(3))
def test_a_view_that_torch_negates_on_reading_is_refused_after_a_good_call(gpu, place):
    q = drawn(*Q, dtype=torch.float16)
    tensors = [q, q, q]
    fa3.attention(*tensors)
    tensors[place] = torch._neg_view(q)
    with pytest.raises(fa3.Unsupported, match=f"{'qkv'[place]} is a view whose sign.*resolve_neg"):
        fa3.attention(*tensors)
    assert len(gpu.launches) == 1


def test_a_captured_tensor_that_became_a_negated_view_is_refused_after_a_good_call(gpu):
    parameter, q = torch.nn.Parameter(torch.rand(4)), drawn(*Q)
    variant = by_head(parameter)
    with torch.no_grad():
        fa3.attention(q, q, q, variant)
        parameter.data = torch._neg_view(torch.rand(4))
        assert parameter.is_neg()
        with pytest.raises(fa3.Unsupported, match="captured tensor t0 is a view whose sign"):
            fa3.attention(q, q, q, variant)


def test_lengths_that_grow_need_one_kernel_and_bounded_memory(gpu, monkeypatch):
    monkeypatch.setattr(seen, "MOST", 8)
    variant = fa3.Variant(mask=fa3.masks.causal)
    k = drawn(1, 100, 4, 64)
    for length in range(1, 100):
        fa3.attention(k[:, :1], k[:, :length], k[:, :length], variant)
    assert len(gpu.kernels) == 1 and len(gpu.launches) == 99
    known = interface._calls[id(variant)]
    assert len(known.exact) <= 8 and len(known.recent) <= seen.RECENT


def test_a_parameter_that_changes_its_type_gets_another_kernel(gpu):
    parameter = torch.nn.Parameter(torch.rand(4))
    variant, q = by_head(parameter), drawn(*Q)
    for _ in range(2):
        fa3.attention(q, q, q, variant)
        parameter.data = parameter.data.half()
        fa3.attention(q, q, q, variant)
        parameter.data = parameter.data.float()
    assert len(gpu.kernels) == len(set(gpu.kernels)) == 2
    assert "t0: float32" in gpu.kernels[0] and "t0: float16" in gpu.kernels[1]


def test_a_parameter_whose_layout_allows_other_loads_gets_another_kernel(gpu):
    wide = torch.rand(4, 130)
    parameter = torch.nn.Parameter(wide[:, :128].clone())
    variant = fa3.Variant(lambda s, b, h, q, k: s + parameter[h, k])
    q = drawn(*Q)
    fa3.attention(q, q, q, variant)
    for other in (wide[:, 1:129], wide.T.contiguous().T[:, :128], torch.rand(4, 127)):
        parameter.data = other
        fa3.attention(q, q, q, variant)
    assert ["pairs" in kernel for kernel in gpu.kernels] == [True, False, False]
    assert ["dense" in kernel for kernel in gpu.kernels] == [True, True, False]
    assert len(gpu.launches) == 4


def test_a_tensor_whose_storage_was_freed_is_refused_after_a_good_call(gpu):
    parameter = torch.nn.Parameter(torch.rand(4))
    variant, q = by_head(parameter), drawn(*Q)
    fa3.attention(q, q, q, variant)
    for name, t in (("captured tensor t0", parameter), ("q", q)):
        t.untyped_storage().resize_(0)
        with pytest.raises(fa3.Unsupported, match=f"{name} has no memory .*storage was freed"):
            fa3.attention(q, drawn(*Q), drawn(*Q), variant)
        t.untyped_storage().resize_(4 * t.numel())
    assert len(gpu.launches) == 1


def test_fake_tensors_launch_nothing_after_a_good_call_with_real_ones(gpu):
    q = drawn(*Q)
    fa3.attention(q, q, q)
    with FakeTensorMode():
        fake = drawn(*Q)
        assert isinstance(fa3.attention(fake, fake, fake), FakeTensor)
    assert len(gpu.launches) == 1


def test_a_parameter_with_new_memory_is_launched_with_it(gpu):
    parameter = torch.nn.Parameter(torch.rand(4))
    variant, q = by_head(parameter), drawn(*Q)
    fa3.attention(q, q, q, variant)
    parameter.data = torch.rand(4)
    fa3.attention(q, q, q, variant)
    assert gpu.launches[1][6][0][0] == parameter.data_ptr() != gpu.launches[0][6][0][0]


def called_once(gpu) -> list[weakref.ref]:
    """What a call saw and made, of which only weak references are left."""
    q, slopes, flag = drawn(*Q), torch.rand(4), torch.tensor(True)
    variant = fa3.Variant(lambda s, b, h, q, k: s + slopes[h], lambda b, h, q, k: flag)
    out, lse = fa3.attention_with_lse(q, q, q, variant)
    noted = fa3.visits(q, q, q, variant)
    gpu.launches.clear()
    return [weakref.ref(t) for t in (q, slopes, flag, variant, out, lse, noted)]


def test_nothing_of_a_call_outlives_it(gpu):
    watched = called_once(gpu)
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_cached_call_leaves_nothing_to_the_garbage_collector(gpu):
    """Memory of a GPU must not wait for it."""
    q, variant = drawn(*Q), by_head(torch.rand(4))
    fa3.attention(q, q, q, variant)
    gc.collect()
    gc.disable()
    try:
        k = drawn(*Q)
        watched = [weakref.ref(k), weakref.ref(fa3.attention(q, k, k, variant))]
        gpu.launches.clear()
        del k
        assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


def test_a_variant_in_the_place_of_a_freed_one_gets_its_own_kernel(gpu):
    q = drawn(*Q)
    for number in range(200):  # ids are used again
        variant = fa3.Variant(mask=lambda b, h, q, k, number=number: k < number)
        fa3.attention(q, q, q, variant)
        del variant
    assert len(gpu.kernels) == len(set(gpu.kernels)) == 200


def test_the_device_is_switched_only_where_another_one_is_current(gpu, monkeypatch):
    q, switched = drawn(*Q), []
    device = calls.torch.cuda.device
    monkeypatch.setattr(calls.torch.cuda, "device", lambda d: switched.append(d) or device(d))
    fa3.attention(q, q, q)
    assert not switched
    gpu.current = 1
    fa3.attention(q, q, q)
    assert switched == [q.device] and gpu.current == 1
    assert [launch[0] for launch in gpu.launches] == [None, None]


def test_the_current_device_is_left_as_found_by_a_launch_that_fails(gpu):
    q = drawn(*Q)
    gpu.current, gpu.fail = 1, RuntimeError("launch failed")
    with pytest.raises(RuntimeError, match="launch failed"):
        fa3.attention(q, q, q)
    assert gpu.current == 1


def test_a_forward_mode_derivative_is_refused_not_dropped(gpu):
    q = drawn(*Q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(fa3.Unsupported, match=r"no forward-mode derivative.*reference"):
            fa3.attention(dual, q, q)
        assert fa3.attention(q, q, q).shape == Q


def test_a_kernel_that_spills_says_why_and_what_to_try_at_the_users_line(gpu):
    gpu.spills = 64
    q = drawn(*Q)
    for function in (fa3.attention, fa3.attention_with_lse):
        variant = fa3.Variant(mask=lambda b, h, q, k: k <= q)
        with pytest.warns(interface.SlowKernel, match=r"spills 64 B.* tile.*tile_n=") as caught:
            function(q, q, q, variant)
        assert caught[0].filename == __file__


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (2, 3, 1, 8), (1, 128, 4, 64), (3, 1, 5, 256)])
def test_outputs_are_contiguous_whatever_their_sizes(shape):
    model = calls._model(shape, torch.bfloat16, torch.device("cpu"))
    assert torch.empty_like(model).stride() == torch.empty(shape).stride()


def test_a_cached_call_takes_a_few_microseconds_before_the_launch(gpu, monkeypatch):
    """Measured against a loop that cannot be made faster, since a machine may be slow or busy."""
    (q, k, v), tensors = (drawn(*Q) for _ in range(3)), [torch.rand(4) for _ in range(3)]
    monkeypatch.setattr(gpu, "launch", lambda *arguments: None)
    monkeypatch.setattr("pretended.refuse_mismatch", lambda *arguments: None)
    least = fastest(lambda: [(t.shape, t.stride(), t.dtype, t.data_ptr()) for t in (q, k, v)])
    for variant in (by_head(), by_head(*tensors)):
        fa3.attention(q, k, v, variant)
        assert fastest(lambda variant=variant: fa3.attention(q, k, v, variant)) < 7 * least


def fastest(call) -> float:
    """Seconds of a call, the fastest of many short runs."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - start) / 20)
    return min(times)


@pytest.mark.gpu
@pytest.mark.parametrize("place", range(torch.cuda.device_count()))
def test_tensors_of_any_device_run_there_and_leave_the_current_one_as_it_was(place):
    generator = torch.Generator().manual_seed(place)
    q, k, v = torch.randn(3, 2, 100, 4, 64, generator=generator).bfloat16().to(f"cuda:{place}")
    slopes = torch.rand(4, generator=generator).to(q.device)
    variant = fa3.Variant(lambda s, b, h, q, k: s + slopes[h] * k, fa3.masks.causal)
    for _ in range(2):  # prepared, then cached
        out = fa3.attention(q, k, v, variant)
        assert torch.cuda.current_device() == 0
        assert torch.empty(1, device="cuda").device.index == 0
        exact = fa3.reference.attention(q, k, v, variant)
        assert out.device == q.device and (out.float() - exact).abs().max() < 2e-2
    stream = torch.cuda.Stream(q.device)
    stream.wait_stream(torch.cuda.current_stream(q.device))
    with torch.cuda.stream(stream):  # which makes its device the current one
        torch.cuda._sleep(20_000_000)
        q.mul_(2.0)
        late = fa3.attention(q, k, v, variant)
    stream.synchronize()
    exact = fa3.reference.attention(q, k, v, variant)
    assert (late.float() - exact).abs().max() < 4e-2
    with pytest.raises(fa3.LayoutError):
        fa3.attention(q[..., ::2], k[..., ::2], v, variant)
    assert torch.cuda.current_device() == 0
