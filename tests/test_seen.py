"""A call that was seen is found again, and never taken for one that differs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import calls, counters, interface, seen

Q = (2, 128, 4, 64)


def three(*shape, dtype=torch.bfloat16):
    return [torch.zeros(*(shape or Q), dtype=dtype) for _ in range(3)]


def by_head(*tensors):
    def score(s, b, h, q, k):
        for t in tensors:
            s = s + t[h]
        return s

    return fa3.Variant(score)


@pytest.fixture(params=["torch's guards", "Python"])
def asked(request, monkeypatch):
    """Both ways in which tensors are compared."""
    if request.param == "Python":
        monkeypatch.setattr(seen, "TensorGuards", None)
    else:
        assert seen.TensorGuards is not None, "calls are slower without"
    return request.param


@pytest.fixture
def slow(monkeypatch):
    """The calls that were not found at once."""
    found, exactly = [], interface._exactly
    monkeypatch.setattr(interface, "_exactly", lambda *a: found.append(a) or exactly(*a))
    return found


# What may happen to a captured fp32 tensor of 4 elements between two calls, in place, and what is
# said of it; None where the call is served as it is then.
def other_memory(t):
    t.data = torch.rand(4)


def other_type_there(t):
    t.data = t.data.view(torch.int32)


def other_float_there(t):
    t.data = t.data.view(torch.bfloat16)


def shorter_there(t):
    t.data = t.data[:3]


def other_rank_there(t):
    t.data = t.data.view(2, 2)


def other_strides_there(t):
    t.data = t.data.as_strided((4,), (0,))


def signs_flipped_there(t):
    t.data = torch._neg_view(t.data)


def freed(t):
    t.untyped_storage().resize_(0)


def set_elsewhere(t):
    t.set_(torch.rand(4))


def set_beside(t):
    t.set_(t.untyped_storage(), 1, (3,), (1,))


def resized(t):
    t.resize_(2)


def swapped(t):
    torch.utils.swap_tensors(t, torch.nn.Parameter(torch.rand(4), requires_grad=False))


def swapped_for_ints(t):
    other = torch.nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
    torch.utils.swap_tensors(t, other)


def a_dimension_more(t):
    t.unsqueeze_(0)


CHANGES = [
    (other_memory, None),
    (other_type_there, "t0 is torch.int32 .* make another one"),
    (other_float_there, None),
    (shorter_there, r"t0 has shape \(3,\): its dimension 0 is read by h"),
    (other_rank_there, "t0 is torch.float32 with 2 dimensions"),
    (other_strides_there, None),
    (signs_flipped_there, "t0 is a view whose sign torch flips"),
    (freed, "t0 has no memory"),
    (set_elsewhere, None),
    (set_beside, r"t0 has shape \(3,\)"),
    (resized, r"t0 has shape \(2,\)"),
    (swapped, None),
    (swapped_for_ints, "t0 is torch.int32"),
    (a_dimension_more, "t0 is torch.float32 with 2 dimensions"),
]


@pytest.mark.parametrize(
    ("change", "said"), CHANGES, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_captured_tensor_that_changed_in_place_is_met_anew(gpu, slow, asked, change, said):
    parameter = torch.nn.Parameter(torch.rand(4), requires_grad=False)
    variant, tensors = by_head(parameter), three()
    for _ in range(3):
        fa3.attention(*tensors, variant)
    assert len(slow) == 1
    change(parameter)
    if said is not None:
        with pytest.raises(fa3.Unsupported, match=said):
            fa3.attention(*tensors, variant)
        assert len(gpu.launches) == 3
        return
    for _ in range(2):
        fa3.attention(*tensors, variant)
    (address, size, stride) = gpu.launches[-1][6][0]
    assert (address, size, stride) == (parameter.data_ptr(), *parameter.shape, *parameter.stride())
    assert len(slow) == 2 and len(gpu.launches) == 5


def test_two_captured_tensors_that_change_places_are_launched_in_theirs(gpu, asked):
    one, two = (torch.nn.Parameter(torch.rand(4), requires_grad=False) for _ in range(2))
    variant, tensors = by_head(one, two), three()
    fa3.attention(*tensors, variant)
    one.data, two.data = two.data, one.data
    fa3.attention(*tensors, variant)
    before, after = ([number for number, *_ in launch[6]] for launch in gpu.launches)
    assert after == [one.data_ptr(), two.data_ptr()] == before[::-1]


def test_new_values_in_the_same_memory_are_not_met_anew(gpu, slow, asked):
    slopes, tensors = torch.rand(4), three()
    variant = by_head(slopes)
    for _ in range(3):
        fa3.attention(*tensors, variant)
        slopes.mul_(2.0)
    assert len(slow) == 1


@pytest.mark.parametrize("place", ["q", "k", "v", "captured"])
def test_a_tensor_that_begins_to_require_a_gradient_gets_one(gpu, asked, place):
    tensors = dict(zip("qkv", three(), strict=True), captured=torch.rand(4))
    q, k, v, slopes = tensors.values()
    variant = by_head(slopes)
    for _ in range(2):
        assert not fa3.attention(q, k, v, variant).requires_grad
    tensors[place].requires_grad_()
    for _ in range(2):
        out = fa3.attention(q, k, v, variant)
        (found,) = torch.autograd.grad(out, tensors[place], torch.ones_like(out))
        assert found.shape == tensors[place].shape
        with torch.no_grad():
            assert not fa3.attention(q, k, v, variant).requires_grad
    tensors[place].requires_grad_(False)
    assert not fa3.attention(q, k, v, variant).requires_grad


def test_a_tangent_is_refused_after_a_good_call_of_the_same_tensors(gpu, asked):
    q, k, v = three()
    with torch.autograd.forward_ad.dual_level():
        fa3.attention(q, k, v)
    for _ in range(2):
        fa3.attention(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(fa3.Unsupported, match="no forward-mode derivative"):
            fa3.attention(dual, k, v)


@pytest.mark.parametrize(
    ("place", "wrong", "said"),
    [
        (0, None, "q = NoneType"),
        (1, "k", "k = str"),
        (2, [0.0], "v = list"),
        (3, "causal", "variant = str"),
        (3, fa3.masks.causal, r"variant = function.*Variant\(mask="),
        (0, torch.zeros(*Q, dtype=torch.bfloat16).to_sparse(), "q is a sparse_coo tensor"),
        (2, torch.zeros(*Q, dtype=torch.bfloat16, device="meta"), "v is on meta, q is on cpu"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name_after_a_good_call(gpu, asked, place, wrong, said):
    given = [*three(), fa3.Variant(mask=fa3.masks.causal)]
    fa3.attention(*given)
    given[place] = wrong
    with pytest.raises(fa3.Unsupported, match=said):
        fa3.attention(*given)
    assert len(gpu.launches) == 1


WRONG_V = {
    "batch": lambda v: v[:1],
    "keys": lambda v: v[:, :64],
    "heads": lambda v: v[:, :, :2],
}


@pytest.mark.parametrize("wrong", WRONG_V)
def test_sizes_of_v_that_do_not_fit_are_refused_by_name_after_a_good_call(gpu, asked, wrong):
    q, k, v = three()
    fa3.attention(q, k, v)
    with pytest.raises(fa3.Unsupported, match=f"v {wrong.replace('keys', 'seqlen')} = "):
        fa3.attention(q, k, WRONG_V[wrong](v))
    assert len(gpu.launches) == 1


def test_one_object_as_q_k_and_v_is_found_again_as_three_are(gpu, slow, asked):
    q, k, v = three()
    for tensors in ((q, k, v), (q, q, q), (q, k, k), (k, k, v), (q, k, v)):
        fa3.attention(*tensors)
    del slow[:]
    for tensors in ((q, k, v), (q, q, q), (q, k, k), (k, k, v), (q, k, v)):
        fa3.attention(*tensors)
    assert not slow


def test_as_many_kinds_as_are_kept_are_found_in_turns_and_one_more_is_served(gpu, slow):
    lengths = range(16, 16 * (seen.RECENT + 1), 16)
    for _ in range(2):
        for length in lengths:
            fa3.attention(*three(2, length, 4, 64))
    assert len(slow) == len(lengths) == seen.RECENT
    for length in (8, *lengths, 8):
        assert fa3.attention(*three(2, length, 4, 64)).shape[1] == length
    assert len(gpu.kernels) == 1


def test_equal_schedules_are_one_and_others_are_not(gpu, slow):
    tensors = three()
    schedule = fa3.Schedule(128, 64, 2, 2, "intra")
    other = replace(schedule, stages=3)
    for each in (schedule, other, None, replace(schedule), replace(other), None):
        fa3.attention(*tensors, schedule=each)
    assert len(slow) == 3 and len(set(gpu.kernels)) == 3


def test_what_was_seen_ends_with_its_variant(gpu):
    variant = by_head(torch.rand(4))
    fa3.attention(*three(), variant)
    number, kept = id(variant), weakref.ref(variant.captures[0])
    assert number in interface._calls
    gpu.launches.clear()
    gc.collect()  # what tracing left
    gc.disable()
    try:
        del variant
        assert number not in interface._calls and kept() is None
    finally:
        gc.enable()


def test_memory_that_a_captured_tensor_gave_up_is_free_before_the_next_call(gpu):
    parameter = torch.nn.Parameter(torch.rand(4), requires_grad=False)
    variant, tensors = by_head(parameter), three()
    for _ in range(2):
        fa3.attention(*tensors, variant)
    old = parameter.untyped_storage()
    freed = weakref.ref(old)
    del old
    parameter.data = torch.rand(4)
    gc.collect()
    assert freed() is None


TENSORS = {
    "as it is": lambda t: t.clone(),
    "half": lambda t: t.half(),
    "shorter": lambda t: t[:, :2].clone(),
    "transposed": lambda t: t.clone().T.contiguous().T,
    "flipped": lambda t: torch._neg_view(t.clone()),
    "with a gradient": lambda t: t.clone().requires_grad_(),
    "a parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "flat": lambda t: t.flatten(),
    "complex": lambda t: t.to(torch.complex64),
    "nowhere": lambda t: t.to("meta"),
}


@settings(max_examples=60)
@given(st.lists(st.tuples(*[st.sampled_from(sorted(TENSORS))] * 2), min_size=1, max_size=4))
def test_torch_and_python_agree_on_what_is_alike(pairs):
    now, then = ([TENSORS[pair[i]](torch.rand(4, 4)) for pair in pairs] for i in (0, 1))
    for free in range(len(pairs) + 1):
        alike = seen.alike(tuple(now[:free]), tuple(now[free:]))
        assert alike(*now)
        assert alike(*then) == (seen._described(now, free) == seen._described(then, free))


def test_an_lse_that_nobody_reads_is_written_to_memory_of_all_calls(gpu, monkeypatch):
    monkeypatch.setattr(calls, "_rows", {})
    tensors = three()
    for _ in range(3):
        fa3.attention(*tensors)
    first, second, third = (launch[5] for launch in gpu.launches)
    assert second.shape == first.shape == (2, 4, 128) and second.stride() == (0, 0, 1)
    assert first.is_contiguous()  # a call that is checked knows of no caller
    assert third.data_ptr() == second.data_ptr() != first.data_ptr()
    _, lse = fa3.attention_with_lse(*tensors)
    assert lse.is_contiguous() and lse.data_ptr() != second.data_ptr()
    assert gpu.launches[-1][5] is lse


def test_memory_of_unread_rows_grows_and_is_never_freed(gpu, monkeypatch):
    """Graphs and other streams may still write to it."""
    monkeypatch.setattr(calls, "_rows", {})
    kept = []
    for length in (100, 3000, 200, 5000):
        for _ in range(2):
            fa3.attention(*three(1, length, 1, 64))
        rows = gpu.launches[-1][5]
        assert rows.shape == (1, 1, length)
        kept.append(rows.untyped_storage().data_ptr())
    (rows,) = calls._rows.values()
    assert [each.numel() for each in rows] == [1024, 4096, 8192]
    assert kept == [rows[i].data_ptr() for i in (0, 1, 1, 2)]


def test_a_graph_allocates_an_lse_of_its_own_where_no_memory_is_ready(gpu, monkeypatch):
    monkeypatch.setattr(calls, "_rows", {})
    monkeypatch.setattr(calls, "under_capture", lambda device: True)
    tensors = three()
    for _ in range(3):
        fa3.attention(*tensors)
    assert all(launch[5].is_contiguous() for launch in gpu.launches)
    assert not any(calls._rows.values())


def test_a_captured_tensor_across_its_alignment_is_refused(gpu):
    memory = bytearray(17)
    slopes = torch.frombuffer(memory, dtype=torch.float32, count=4, offset=1)
    assert slopes.data_ptr() % 4
    with pytest.raises(fa3.LayoutError, match=r"captured tensor t0 .* a multiple of 4 .*clone"):
        fa3.attention(*three(), by_head(slopes))


def test_a_cpu_tensor_is_under_no_capture():
    assert not counters.under_capture(torch.device("cpu"))


def all_changed(t):
    """All that its memory holds, also where elements lie on one another."""
    count = t.untyped_storage().nbytes() // t.element_size()
    t.data.as_strided((count,), (1,), 0).mul_(-3.0)


@pytest.mark.gpu
@pytest.mark.parametrize("change", [other_memory, other_strides_there, set_elsewhere, swapped])
def test_a_kernel_reads_captured_tensors_as_they_are(change, monkeypatch):
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape: rand(*shape, device="cuda"))
    parameter = torch.nn.Parameter(torch.rand(4), requires_grad=False)
    variant = by_head(parameter)
    q, k, v = (torch.randn(*Q, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    for act in (lambda t: None, change, all_changed):
        act(parameter)
        for _ in range(2):
            out, lse = fa3.attention_with_lse(q, k, v, variant)
            exact = fa3.reference.attention_with_lse(q, k, v, variant)
            assert (lse - exact[1]).abs().max() < 1e-2
            assert (out.float() - exact[0]).abs().max() < 2e-2


@pytest.mark.gpu
def test_scalars_bools_and_short_types_are_read_from_their_numbers():
    keep, limit = (torch.arange(128) % 3 != 0).cuda(), torch.tensor(90, device="cuda")
    table = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)[:, ::2]
    variant = fa3.Variant(
        lambda s, b, h, q, k: s + table[h, k], lambda b, h, q, k: keep[k] & (k < limit)
    )
    q, k, v = (torch.randn(*Q, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    exact = fa3.reference.attention(q, k, v, variant)
    for _ in range(3):
        assert (fa3.attention(q, k, v, variant).float() - exact).abs().max() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("length", [100, 1024, 5000])
def test_the_output_has_the_same_bits_whether_its_lse_is_read_or_not(length):
    variant = fa3.Variant(mask=fa3.masks.causal)
    q, k, v = (torch.randn(2, length, 8, 128, dtype=torch.half, device="cuda") for _ in range(3))
    out, lse = fa3.attention_with_lse(q, k, v, variant)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            found = [fa3.attention(q, k, v, variant) for _ in range(3)]
        stream.synchronize()
        assert all(torch.equal(each, out) for each in found)
    again = fa3.attention_with_lse(q, k, v, variant)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
