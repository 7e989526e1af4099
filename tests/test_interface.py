"""What `attention` and `plan` refuse, before any compile or launch, and what they accept."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutedsl_fa3 as fa3
from cutedsl_fa3 import emulate, inputs, interface, masks, reference
from cutedsl_fa3.pipelines import Schedule


def drawn(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


Q = (2, 128, 4, 64)


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
        (drawn(2, 128, 4, 64), drawn(2, 128, 0, 64), drawn(2, 128, 0, 64), "k has 0"),
        (drawn(*Q, dtype=torch.float32),) * 3 + ("q is torch.float32: supported are",),
        (drawn(*Q), drawn(*Q, dtype=torch.float16), drawn(*Q), "k is torch.float16 but q is"),
        (drawn(2, 128, 4, 63),) * 3 + (r"head_dim = 63: .*multiples of 8 from 8 to 256",),
        (drawn(2, 128, 4, 264),) * 3 + (r"head_dim = 264: .*multiples of 8 from 8 to 256",),
        (drawn(*Q), drawn(*Q), drawn(2, 128, 4, 4), r"head_dim_v = 4: .*multiples of 8"),
        ("q", drawn(*Q), drawn(*Q), "q = str"),
        (drawn(*Q), None, drawn(*Q), "k = NoneType"),
        (drawn(*Q).to_sparse(), drawn(*Q), drawn(*Q), "q is a sparse_coo tensor: a dense one"),
    ],
)
def test_a_bad_tensor_is_refused_by_argument_value_and_rule(q, k, v, said):
    for function in (fa3.plan, fa3.attention, fa3.visits):
        with pytest.raises(fa3.Unsupported, match=said):
            function(q, k, v)


def test_a_nested_tensor_is_refused_by_name():
    nested = torch.nested.nested_tensor([torch.zeros(3, 4, 64), torch.zeros(5, 4, 64)])
    with pytest.raises(fa3.Unsupported, match="k is a nested tensor: a dense one is needed"):
        fa3.attention(drawn(*Q), nested.bfloat16(), drawn(*Q))


def test_tensors_that_are_nowhere_are_refused_naming_where_they_may_be():
    q = drawn(*Q)
    with pytest.raises(fa3.Unsupported, match=r"q is on meta: a CUDA device .*9\.0 or cpu"):
        fa3.attention(q.to("meta"), q, q)
    with pytest.raises(fa3.Unsupported, match="v is on meta, q is on cpu: one device is needed"):
        fa3.attention(q, q, q.to("meta"))
    slopes = torch.rand(4, device="meta")
    with pytest.raises((fa3.Unsupported, fa3.VariantError), match="meta"):
        fa3.attention(q, q, q, fa3.Variant(lambda s, b, h, q, k: s + slopes[h]))


def test_a_torch_transform_is_refused_saying_that_there_is_no_memory():
    q = drawn(3, *Q)
    with pytest.raises(fa3.Unsupported, match=r"q has no memory.*torch\.func transform"):
        torch.func.vmap(fa3.attention)(q, q, q)


def test_a_function_instead_of_a_variant_is_refused():
    for function in (fa3.plan, fa3.attention, fa3.attention_with_lse):
        with pytest.raises(fa3.Unsupported, match=r"variant = function.*Variant\(mask="):
            function(drawn(*Q), drawn(*Q), drawn(*Q), lambda b, h, q, k: k <= q)
    with pytest.raises(fa3.Unsupported, match=r"variant = str: a cutedsl_fa3\.Variant is needed$"):
        fa3.attention(drawn(*Q), drawn(*Q), drawn(*Q), "causal")


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf, 1e39, "1", True, 1j, [1.0]])
def test_a_scale_that_the_softmax_cannot_take_is_refused(scale):
    with pytest.raises(fa3.Unsupported, match=r"scale = .*from 0 to 2e"):
        fa3.attention(drawn(*Q), drawn(*Q), drawn(*Q), scale=scale)


@pytest.mark.parametrize("scale", [torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1)])
def test_a_tensor_as_scale_is_refused_naming_two_ways_out(scale):
    with pytest.raises(fa3.Unsupported, match=r"scale = a tensor .*\.item\(\).*score function"):
        fa3.attention(drawn(*Q), drawn(*Q), drawn(*Q), scale=scale)


@pytest.mark.parametrize("scale", [0, 0.0, 1, Fraction(1, 8), numpy.float32(0.125), 1e-40, 2e38])
def test_every_finite_real_number_from_0_is_a_scale(scale):
    assert inputs.checked_scale(scale, 64) == max(float(scale), inputs.SMALLEST_SCALE)


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (drawn(2, 128, 4, 72)[..., 1:65], "k .*address alignment: given"),
        (drawn(2 * 128 * 4 * 64 + 1)[1:].view(Q), r"k .*address alignment: given .*with k\."),
        (drawn(2, 128, 4, 65)[..., :64], "k .*stride alignment: given 520 bytes in dimension 1"),
        (drawn(2, 64, 4, 128).transpose(1, 3), "k has stride 512 along head_dim"),
        (drawn(2, 128, 4, 1).expand(2, 128, 4, 64), "k has stride 0 along head_dim"),
        (drawn(2, 128, 4, 128)[..., ::2], "k has stride 2 along head_dim"),
        (drawn(76).as_strided((2, 128, 4, 64), (0, 0, 4, 1)), "k .* 8 bytes in dimension 2"),
    ],
)
def test_what_tma_cannot_address_is_refused_naming_a_way_out(view, said, gpu):
    q = drawn(*Q)
    with pytest.raises(fa3.LayoutError, match=said + ".*(contiguous|copy|clone)"):
        fa3.attention(q, view, q)
    assert not gpu.launches


def test_the_emulator_refuses_the_layouts_that_the_kernel_refuses():
    with pytest.raises(fa3.LayoutError, match="v has stride 512 along head_dim"):
        fa3.attention(drawn(*Q), drawn(*Q), drawn(2, 64, 4, 128).transpose(1, 3))


def test_strides_from_a_tebibyte_on_are_refused_before_anything_reads_them():
    class Far:
        """As much of a tensor as the rules of addresses look at."""

        shape, dtype = torch.Size((2, 128, 4, 64)), torch.bfloat16

        def is_contiguous(self):
            return False

        def element_size(self):
            return 2

        def data_ptr(self):
            return 1 << 20

        def stride(self, dim=None):
            strides = (2**39, 256, 64, 1)
            return strides if dim is None else strides[dim]

    with pytest.raises(fa3.LayoutError, match=r"stride range: .*1099511627776 bytes"):
        inputs.addressable("q", Far())


VIEWS = {
    "packed": drawn(2, 128, 3, 4, 64)[:, :, 1],
    "transposed": drawn(2, 4, 128, 64).transpose(1, 2),
    "expanded in all dimensions": drawn(1, 1, 1, 64).expand(2, 128, 4, 64),
    "expanded heads": drawn(2, 128, 1, 64).expand(2, 128, 4, 64),
    "odd strides of single entries": drawn(64).as_strided((1, 1, 1, 64), (3, 5, 7, 1)),
    "one head of many": drawn(2, 128, 3, 64)[:, :, 1:2],
    "every second token": drawn(2, 256, 4, 64)[:, ::2],
    "offset": drawn(2, 256, 4, 64)[:, 77:205],
    "columns of a wider row": drawn(2, 128, 4, 200)[..., 64:128],
    "sequence first": drawn(128, 2, 4, 64).transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_tma_can_address_is_taken_without_a_copy(view, gpu):
    out = fa3.attention(view, view, view)
    ((_, q, k, v, o, *_),) = gpu.launches
    for taken in (q, k, v):
        assert taken.data_ptr() == view.data_ptr() and taken.shape == view.shape
        assert all(stride * 2 % 16 == 0 for stride in taken.stride()[:3])
    assert o is out and out.is_contiguous() and out.shape == view.shape


def addresses() -> st.SearchStrategy:
    """Strides in elements of dimensions of 1 to 3 entries, some of them multiples of 8."""
    stride = st.one_of(st.integers(0, 300), st.integers(0, 40).map(lambda n: 8 * n))
    return st.lists(st.tuples(st.integers(1, 3), stride), min_size=3, max_size=3)


@given(addresses(), st.integers(0, 16), st.sampled_from((8, 64, 72, 256)))
def test_addressing_rules_are_those_of_the_tensor_map(dims, offset, head_dim):
    """The short checks of the launch path refuse exactly what the tile's tensor map refuses."""
    shape, strides = [n for n, _ in dims], [s for _, s in dims]
    t = torch.zeros(4096, dtype=torch.bfloat16)[offset:]
    t = t.as_strided((*shape, head_dim), (*strides, 1))
    # The stride of a single entry is never used: one that is not legal is replaced.
    used = [s if n > 1 or s % 8 == 0 else head_dim for n, s in dims]
    tile = inputs.Tile(64, 64, fa3.Problem("bf16", 64, 64).element)
    tensor_map = tile.tensor_map(
        t.data_ptr(), (head_dim, *(shape[d] for d in (1, 2, 0))), [2 * used[d] for d in (1, 2, 0)]
    )
    refused = any(not rule.ok for rule in tensor_map.rules())
    try:
        taken = inputs.addressable("q", t)
    except fa3.LayoutError:
        assert refused
    else:
        assert not refused
        assert taken.stride() == (*used, 1) and taken.data_ptr() == t.data_ptr()
        assert (taken is t) == (t.stride() == taken.stride())


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (Schedule(256, 64, consumers=2), "tile_m = 256 with consumers = 2.*use tile_m=128"),
        (Schedule(128, 64, cluster=(1, 2)), r"cluster = \(1, 2\).*use \(1, 1\)"),
    ],
)
def test_a_schedule_that_the_forward_cannot_follow_is_refused(schedule, said):
    q = drawn(*Q)
    for k in (q, q[:, :0]):  # with no keys there is nothing to run, and the same refusal
        for function in (fa3.plan, fa3.attention):
            with pytest.raises(fa3.ScheduleError, match=said):
                function(q, k, k, schedule=schedule)


def test_ctas_that_would_visit_different_key_tiles_share_none():
    q, schedule = drawn(*Q), Schedule(128, 64, cluster=(2, 1))
    fa3.plan(q, q, q, schedule=schedule)
    with pytest.raises(fa3.ScheduleError, match=r"cluster = \(2, 1\).*a mask.*use \(1, 1\)"):
        fa3.plan(q, q, q, fa3.Variant(mask=fa3.masks.causal), schedule=schedule)
    with pytest.raises(fa3.ScheduleError, match=r"cluster = \(2, 1\).*no visits; use \(1, 1\)"):
        fa3.visits(q, q, q, schedule=schedule)


def test_a_ring_too_deep_is_refused_naming_bytes_and_limit():
    q = drawn(2, 128, 4, 128)
    with pytest.raises(fa3.LayoutError, match=r"bytes.*232448.* 3 stages of 'k', 'v' would"):
        fa3.plan(q, q, q, schedule=Schedule(128, 128, stages=4))


def test_a_dictionary_is_no_schedule():
    for function in (fa3.plan, fa3.attention, fa3.visits):
        with pytest.raises(fa3.Unsupported, match="schedule = dict"):
            function(drawn(*Q), drawn(*Q), drawn(*Q), schedule={"tile_m": 128})


def test_more_tiles_than_a_grid_has_are_refused(gpu):
    q = drawn(1, 1, 1, 64).expand(2**31, 1, 1, 64)
    with pytest.raises(fa3.Unsupported, match=r"q has 2147483648 tiles .*at most 2147479552"):
        fa3.attention(q, q, q)
    fits = q[: 2**31 - 2**12]
    gpu.fail = InterruptedError("launched")
    with pytest.raises((InterruptedError, RuntimeError), match=r"launched|allocate|memory"):
        fa3.attention(fits, fits, fits)


def test_positions_beyond_the_arithmetic_of_masks_are_refused():
    k = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16).expand(1, 2**30, 4, 64)
    with pytest.raises(fa3.Unsupported, match=r"k seqlen = 1073741824: at most 536870912"):
        fa3.plan(drawn(1, 128, 4, 64), k, k)


def by_head(t):
    return fa3.Variant(lambda s, b, h, q, k: s + t[h])


def test_a_captured_tensor_must_cover_the_heads_and_batches_it_is_read_by():
    q, slopes, ends = drawn(*Q), torch.rand(2), torch.tensor([3])
    with pytest.raises(fa3.Unsupported, match=r"t0 has shape \(2,\).*dimension 0 is read by h"):
        fa3.plan(q, q, q, by_head(slopes))
    with pytest.raises(fa3.Unsupported, match=r"t0 has shape \(1,\).*read by b, of which.* 2"):
        fa3.plan(q, q, q, fa3.Variant(mask=lambda b, h, q, k: k < ends[b]))
    with pytest.raises(fa3.Unsupported, match=r"t0 has shape \(2,\).*dimension 0 is read by h"):
        fa3.plan(q, q, q, fa3.Variant(epilogue=lambda o, lse, b, h, q: o * slopes[h]))
    with pytest.raises(fa3.Unsupported, match=r"t0 has shape \(2,\).*dimension 0 is read by h"):
        gate = fa3.Variant(lambda s, b, h, q, k: s * slopes[h], softmax=fa3.Elementwise(torch.relu))
        fa3.plan(q, q, q, gate)


def test_a_captured_tensor_may_end_before_the_keys_that_the_mask_hides():
    q, table = drawn(*Q), torch.rand(127)
    fa3.plan(q, q, q, fa3.Variant(lambda s, b, h, q, k: s + table[k], lambda b, h, q, k: k < 127))


@pytest.mark.parametrize("shape", [(3,), (5,), (1,)])
def test_a_sink_is_one_number_or_one_a_head(shape):
    q, sink = drawn(*Q), torch.zeros(shape)
    with pytest.raises(fa3.Unsupported, match=r"sink has shape .*\(heads,\) = \(4,\) is needed"):
        fa3.plan(q, q, q, fa3.Variant(softmax=fa3.OnlineSoftmax(sink)))
    for good in (torch.zeros(()), torch.zeros(4)):
        fa3.plan(q, q, q, fa3.Variant(softmax=fa3.OnlineSoftmax(good)))


def test_a_captured_tensor_that_changed_since_it_was_traced_is_refused():
    q, parameter = drawn(*Q), torch.nn.Parameter(torch.rand(4))
    variant = by_head(parameter)
    fa3.attention(q, q, q, variant)
    for other, said in (
        (torch.rand(4, 2), "2 dimensions, but was float with 1 when the Variant was made"),
        (torch.rand(0), "has no elements"),
        (torch.rand(3), r"shape \(3,\).*dimension 0 is read by h, of which there are 4"),
    ):
        parameter.data = other
        with pytest.raises(fa3.Unsupported, match=said):
            fa3.attention(q, q, q, variant)


def test_captured_tensors_may_be_empty_where_nothing_is_read():
    """As the last batch of a loader may be, its documents with it."""
    q = drawn(*Q)
    none = fa3.Variant(mask=masks.documents(torch.zeros(0, q.shape[1], dtype=torch.int32)))
    assert fa3.attention(q[:0], q[:0], q[:0], none).shape == q[:0].shape
    without_keys = fa3.Variant(mask=masks.documents(torch.zeros(0, dtype=torch.int32)))
    out, lse = fa3.attention_with_lse(q, q[:, :0], q[:, :0], without_keys)
    assert (out == 0).all() and (lse == -math.inf).all()
    for variant in (none, without_keys):
        with pytest.raises(fa3.Unsupported, match="has no elements: a kernel reads at least one"):
            fa3.attention(q, q, q, variant)
    gate = torch.zeros(0)
    gated = fa3.Variant(epilogue=lambda o, lse, b, h, q: o * gate[q])
    with pytest.raises(fa3.Unsupported, match="has no elements"):
        fa3.attention(q, q[:, :0], q[:, :0], gated)


def test_a_captured_view_that_torch_negates_on_reading_is_refused():
    bias = torch.rand(4, dtype=torch.complex64).conj().imag
    with pytest.raises((fa3.Unsupported, fa3.VariantError), match=r"resolve_neg|sign"):
        fa3.plan(drawn(*Q), drawn(*Q), drawn(*Q), by_head(bias))


def test_weights_without_a_sum_have_no_lse_and_say_so():
    q, sigmoid = drawn(*Q), fa3.Variant(softmax=fa3.Elementwise(torch.sigmoid))
    with pytest.raises(fa3.Unsupported, match=r"attention_with_lse: .*Elementwise.*use attention"):
        fa3.attention_with_lse(q, q, q, sigmoid)


def test_cpu_tensors_run_the_emulator_of_the_same_plan():
    random_numbers = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 70, 4, 64, generator=random_numbers).bfloat16()
    schedule = Schedule(64, 32, 2, 1, "intra")
    variant = by_head(torch.rand(4))
    out, lse = fa3.attention_with_lse(q, k, v, variant, scale=0.3, schedule=schedule)
    made = fa3.plan(q, k, v, variant, schedule=schedule)
    here = emulate.run(made, q, k, v, 0.3)
    assert torch.equal(out, here.out) and torch.equal(lse, here.lse)
    exact = reference.attention(q, k, v, variant, scale=0.3)
    assert (out.float() - exact).abs().max() < 2e-2
    assert torch.equal(fa3.attention(q, k, v, variant, scale=0.3, schedule=schedule), out)
    assert torch.equal(fa3.visits(q, k, v, variant, schedule=schedule), here.visits)


def test_the_emulator_runs_elementwise_weights_and_gives_no_lse():
    q, k, v = torch.randn(3, 1, 40, 2, 64).bfloat16()
    variant = fa3.Variant(softmax=fa3.Elementwise(torch.relu))
    out = fa3.attention(q, k, v, variant)
    assert (out.float() - reference.attention(q, k, v, variant)).abs().max() < 0.1


def without_keys(variant):
    """(attention's output, LSE) of 2 x 3 queries of 4 heads that have no key."""
    q, k = torch.randn(2, 3, 4, 64).bfloat16(), drawn(2, 0, 4, 64)
    v = drawn(2, 0, 4, 72)
    if not variant.has_lse:
        return fa3.attention(q, k, v, variant), None
    return fa3.attention_with_lse(q, k, v, variant)


GATE = torch.tensor([1.0, 2.0, 3.0, 4.0])
KEYLESS = {
    "plain": fa3.Variant(),
    "causal": fa3.Variant(mask=fa3.masks.causal),
    "sink": fa3.Variant(softmax=fa3.OnlineSoftmax(torch.tensor([0.5, -1.0, 100.0, 0.0]))),
    "one sink": fa3.Variant(softmax=fa3.OnlineSoftmax(torch.tensor(0.5))),
    "elementwise": fa3.Variant(softmax=fa3.Elementwise(torch.sigmoid)),
    "epilogue": fa3.Variant(epilogue=lambda o, lse, b, h, q: o + GATE[h] + 10 * b + q),
    "epilogue of lse": fa3.Variant(
        softmax=fa3.OnlineSoftmax(torch.tensor([0.5, -1.0, 100.0, 0.0])),
        epilogue=lambda o, lse, b, h, q: torch.exp(o) * lse,
    ),
}


@pytest.mark.parametrize("name", KEYLESS)
def test_without_keys_a_kernel_is_neither_compiled_nor_launched(name, gpu):
    out, lse = without_keys(KEYLESS[name])
    assert not gpu.kernels and not gpu.launches
    q, k, v = torch.zeros(2, 3, 4, 64), torch.zeros(2, 0, 4, 64), torch.zeros(2, 0, 4, 72)
    exact = reference.attention(q, k, v, KEYLESS[name])
    assert out.dtype == torch.bfloat16 and out.shape == (2, 3, 4, 72)
    assert torch.equal(out, exact.bfloat16())
    if lse is not None:
        assert lse.dtype == torch.float32
        assert torch.equal(lse, reference.attention_with_lse(q, k, v, KEYLESS[name])[1])


@pytest.mark.parametrize("name", KEYLESS)
def test_without_keys_kernel_and_emulator_agree(name):
    out, lse = without_keys(KEYLESS[name])
    variant = KEYLESS[name]
    q, k, v = torch.randn(2, 3, 4, 64).bfloat16(), drawn(2, 0, 4, 64), drawn(2, 0, 4, 72)
    call = interface.prepare(q, k, v, variant, None)
    there = call(q, k, v, variant, call.scale)
    assert torch.equal(out, there[0])
    assert (lse is None and there[1] is None) or torch.equal(lse, there[1])


@pytest.mark.parametrize("name", KEYLESS)
@pytest.mark.parametrize("shape", [(0, 5, 4, 64), (2, 0, 4, 64), (2, 5, 0, 64)])
def test_without_queries_a_kernel_is_neither_compiled_nor_launched(name, shape, gpu):
    variant, q = KEYLESS[name], drawn(*shape)
    k = drawn(shape[0], 7, shape[2], 64)
    if variant.sink is not None and shape[2] == 0:
        variant = fa3.Variant()
    if name == "epilogue" and shape[2] == 0:
        variant = fa3.Variant(epilogue=lambda o, lse, b, h, q: o + 1)
    out = fa3.attention(q, k, k, variant)
    assert out.shape == shape and out.dtype == q.dtype
    if variant.has_lse:
        assert fa3.attention_with_lse(q, k, k, variant)[1].shape == (shape[0], shape[2], shape[1])
    assert not gpu.kernels and not gpu.launches


def test_visits_of_nothing_are_empty():
    q = drawn(2, 200, 4, 64)
    noted = fa3.visits(q, q[:, :0], q[:, :0], schedule=Schedule(128, 64, 2, 2, "intra"))
    assert noted.shape == (2, 4, 2, 1) and (noted == -1).all()
    assert fa3.visits(q[:0], q[:0], q[:0]).shape[0] == 0
