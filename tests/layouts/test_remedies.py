"""The changes that the doctor proposes are true: applied to a tensor, every rule then holds."""

from __future__ import annotations

import itertools

import cutlass
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cutedsl_fa3.layouts import NONE, SW32, SW64, SW128, Geometry, Tile, explain
from cutedsl_fa3.layouts.doctor.retile import fitted

DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.uint8,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
ELEMENTS = [cutlass.BFloat16, cutlass.Float32, cutlass.Float8E4M3FN]
SWIZZLES = st.sampled_from([NONE, SW32, SW64, SW128])


@st.composite
def views(draw) -> torch.Tensor:
    """A view of real memory: any offset, strides in any order, gaps, overlaps, repeats."""
    dtype = draw(st.sampled_from(DTYPES))
    rank = draw(st.integers(0, 6))
    shape = draw(st.lists(st.sampled_from([1, 1, 2, 3, 5, 16, 63]), min_size=rank, max_size=rank))
    assume(torch.Size(shape).numel() < 20_000)
    kind = draw(st.sampled_from(["dense", "sliced", "permuted", "strided"]))
    storage = torch.zeros(1 << 18, dtype=dtype)
    offset = draw(st.sampled_from([0, 0, 0, 1, 3, 8]))
    if kind == "strided":
        steps = st.sampled_from([0, 1, 2, 7, 16, 64, 100, 1000])
        strides = draw(st.lists(steps, min_size=rank, max_size=rank))
        assume(sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) < 60_000)
        return storage.as_strided(shape, strides, offset)
    extra = draw(st.integers(0, 9)) if kind == "sliced" else 0
    wide = [*shape[:-1], shape[-1] + extra] if rank else shape
    whole = storage[offset : offset + torch.Size(wide).numel()].view(wide)
    if kind == "permuted":
        return whole.permute(draw(st.permutations(range(rank))))
    return whole[..., : shape[-1]] if rank else whole


@st.composite
def far_views(draw) -> torch.Tensor:
    """Tensors that no machine holds: meta tensors of huge sizes and strides."""
    rank = draw(st.integers(2, 5))
    sizes = st.sampled_from([1, 2, 64, 2**20, 2**31 - 1, 2**31 + 5, 2**32, 2**33 + 7])
    shape = draw(st.lists(sizes, min_size=rank, max_size=rank))
    strides = draw(
        st.lists(st.sampled_from([1, 64, 2**20, 2**39, 2**41]), min_size=rank, max_size=rank)
    )
    assume(torch.Size(shape).numel() < 2**55)
    assume(sum(n * s for n, s in zip(shape, strides, strict=True)) < 2**57)
    try:
        return torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
    except RuntimeError:  # larger than torch can count
        assume(False)


@st.composite
def asked(draw, tensor: torch.Tensor) -> dict:
    """A tile or a box for a tensor, legal or not."""
    kind = draw(st.sampled_from(["tile", "pair", "box"]))
    rank = tensor.dim()
    rows = draw(st.integers(0, rank - 2)) if rank > 2 and kind != "box" else None
    if kind == "tile":
        size = draw(st.sampled_from([(8, 16), (64, 64), (128, 96), (256, 256), (1024, 64)]))
        return {"tile": Tile(*size, draw(st.sampled_from(ELEMENTS))), "rows": rows}
    if kind == "pair":
        pair = (draw(st.integers(1, 300)), draw(st.integers(1, 300)))
        return {"tile": pair, "rows": rows}
    extents = st.sampled_from([1, 1, 1, 2, 8, 16, 60, 64, 256, 300])
    box = tuple(draw(st.lists(extents, min_size=rank, max_size=rank)))
    given = {"box": box, "swizzle": draw(SWIZZLES)}
    if draw(st.booleans()):
        steps = st.sampled_from([1, 1, 1, 2, 3, 8, 9])
        given["element_strides"] = tuple(draw(st.lists(steps, min_size=rank, max_size=rank)))
    return given


NAMES = ("tile", "box", "swizzle", "rows", "element_strides")


def applied(code: str, x: torch.Tensor, given: dict) -> tuple[list[torch.Tensor], dict]:
    """The tensors and the arguments after a remedy's own Python has run."""
    scope = {"torch": torch, "cutlass": cutlass, "Tile": Tile, "x": x, **given}
    scope |= {"NONE": NONE, "SW32": SW32, "SW64": SW64, "SW128": SW128}
    exec(code, scope)
    return list(scope.get("xs", [scope["x"]])), {n: scope[n] for n in NAMES if n in scope}


def hold(x: torch.Tensor, given: dict) -> None:
    """Every remedy of a tensor, applied, leaves no rule broken; there is one for each."""
    found = explain(x, **given)
    assert found.legal == (not found.remedies)
    for remedy in found.remedies:
        if remedy.after is None:
            assert 0 in x.shape
            continue
        assert remedy.after.legal, remedy
        tensors, arguments = applied(remedy.code, x, given)
        for tensor in tensors:
            after = explain(tensor, **arguments)
            assert after.legal, f"{remedy.code}\n{after}"
        assert explain(tensors[0], **arguments).map.box == remedy.after.map.box


@settings(max_examples=120)
@given(st.data())
def test_each_change_proposed_for_a_torch_view_makes_every_rule_hold_when_it_is_run(data):
    x = data.draw(views())
    hold(x, data.draw(asked(x)))


@settings(max_examples=100)
@given(st.data())
def test_each_change_proposed_for_a_tensor_beyond_32_bits_makes_every_rule_hold(data):
    x = data.draw(far_views())
    found = data.draw(asked(x))
    # A stride that has to be taken apart index by index would make a list of that length.
    remedies = explain(x, **found).remedies
    assume(all(r.after is None or r.after.maps < 1000 for r in remedies))
    hold(x, found)


@settings(max_examples=100)
@given(st.data())
def test_a_copy_holds_the_elements_of_what_it_replaces(data):
    x = data.draw(views())
    if x.numel():
        flat = x.new_empty(x.shape).copy_(
            torch.arange(x.numel()).remainder(199).view(x.shape).to(x.dtype)
        )
        if not any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
            assume(torch._debug_has_internal_overlap(x) == 0)
            x.copy_(flat)
    for remedy in explain(x, (64, 64)).remedies:
        kinds = {step.kind for step in remedy.steps}
        if kinds <= {"copy", "pad"}:
            (after, *_), _ = applied(remedy.code, x, {"tile": (64, 64)})
            assert after.shape == x.shape and torch.equal(after, x)


@given(st.integers(1, 300), st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]))
def test_a_padded_row_is_the_next_that_is_legal(cols, dtype):
    x = torch.zeros(40, cols, dtype=dtype)
    found = explain(x, (8, 16))
    if found.legal:
        return
    (remedy,) = found.remedies
    (after,), _ = applied(remedy.code, x, {"tile": (8, 16)})
    assert torch.equal(after, x)
    for row in range(cols, after.stride(0)):  # every shorter one that holds the row
        between = torch.zeros(40 * row, dtype=dtype).as_strided((40, cols), (row, 1))
        assert not explain(between, (8, 16)).legal


@given(st.integers(1, 5000), st.integers(1, 256), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_a_box_is_split_into_the_fewest_and_then_the_smallest(extent, limit, multiple):
    assume(limit >= multiple)
    boxes, each = fitted(extent, limit, multiple)
    assert boxes * each >= extent and each % multiple == 0 and each <= limit
    assert (boxes - 1) * (limit // multiple * multiple) < extent
    smaller = each - multiple
    assert smaller < 1 or boxes * smaller < extent


@settings(max_examples=60)
@given(st.data())
def test_nothing_is_copied_where_only_the_box_is_wrong_and_the_first_remedy_is_the_cheapest(data):
    x = torch.zeros(2, 80, 4, 64, dtype=data.draw(st.sampled_from([torch.bfloat16, torch.uint8])))
    found = explain(x, **data.draw(asked(x).filter(lambda given: not _typed(given))))
    assert all(remedy.copied == 0 and remedy.after.maps == 1 for remedy in found.remedies)
    asked_for = found.binding.swizzle.bits
    costs = [
        (max(0, asked_for - remedy.after.swizzle.bits), remedy.after.pieces)
        for remedy in found.remedies
    ]
    assert costs == sorted(costs)


def _typed(given: dict) -> bool:
    return hasattr(given.get("tile"), "dtype")


# One case of every kind of illegality, with the words that the smallest change must have.

BF16 = cutlass.BFloat16
TILE = Tile(64, 64, BF16)


def plain(shape, strides=None, dtype="bfloat16", address=0x1000, **more) -> Geometry:
    """A tensor that needs no memory, its strides in bytes."""
    if strides is None:
        return Geometry.dense(shape, dtype, address=address, **more)
    return Geometry(shape, strides, dtype, address, **more)


CASES = [
    ("data type", plain((100, 64), dtype="bool"), {"tile": (64, 64)}, "view it as uint8"),
    ("data type", plain((9, 64), dtype="complex128"), {"tile": (8, 8)}, "float64, 2 for each"),
    ("rank", plain(()), {"tile": (64, 64)}, "shape (1, 1)"),
    ("rank", plain((1, 2, 3, 4, 8, 64)), {"tile": TILE, "rows": 4}, "drop dimension 0"),
    ("rank", plain((2, 2, 3, 4, 8, 64)), {"tile": TILE, "rows": 4}, "merge dimensions 0 and 1"),
    ("tile dimensions", plain((64,)), {"tile": TILE}, "a matrix of one row"),
    ("tile rows", plain((100, 64)), {"tile": (100, 64)}, "104 rows instead of 100"),
    ("tile columns", plain((100, 64)), {"tile": (64, 60)}, "64 columns instead of 60"),
    ("tile bytes", plain((100, 64)), {"tile": (2048, 64)}, "1816 rows instead of 2048"),
    ("element size", plain((100, 64), dtype="float32"), {"tile": TILE}, "make the tile of Float32"),
    ("address alignment", plain((100, 64), address=0x1008), {"tile": TILE}, "copy it without gaps"),
    ("stride alignment", plain((100, 511)), {"tile": TILE}, "pad the row to 1024 bytes (512"),
    ("stride alignment", plain((100, 64), (1022, 2)), {"tile": TILE}, "copy it without gaps"),
    ("stride range", plain((100, 64), (2**40, 2)), {"tile": TILE}, "copy it without gaps"),
    ("stride range", plain((100, 64), (-128, 2)), {"tile": TILE}, "copy it without gaps"),
    (
        "stride range",
        plain((2, 2**20, 2**20), (2**41, 2**21, 2)),
        {"tile": TILE},
        "use 2 maps, each of 1 along dimension 0",
    ),
    ("contiguous dimension", plain((64, 64), (2, 128)), {"tile": TILE}, "copy it without gaps"),
    ("size", plain((2**32 + 1, 64)), {"tile": TILE}, "use 3 maps, each of 2147483648"),
    ("int32 coordinates", plain((2**31 + 1, 64)), {"tile": TILE}, "use 2 maps"),
    ("size", plain((0, 64)), {"tile": TILE}, "launch nothing"),
    ("box extent", plain((512, 64)), {"box": (300, 8)}, "2 boxes of 150 along dimension 0"),
    ("box extent", plain((512, 64)), {"box": (0, 8)}, "a box of 1 along dimension 0"),
    ("inner box bytes", plain((512, 64)), {"box": (8, 12)}, "16 elements instead of 12"),
    (
        "inner box within the swizzle span",
        plain((512, 128)),
        {"box": (8, 128), "swizzle": "128B"},
        "2 boxes of 64 elements (128 bytes)",
    ),
    (
        "inner box within the swizzle span",
        plain((512, 128)),
        {"box": (8, 64), "swizzle": "64B"},
        "use swizzle 128B instead of 64B",
    ),
    (
        "inner box within the swizzle span",
        plain((512, 512)),
        {"box": (8, 512), "swizzle": "128B"},
        "8 boxes of 64 elements (128 bytes)",
    ),
    ("box bytes", plain((512, 8, 64)), {"box": (256, 8, 64)}, "2 boxes of 128 along dimension 0"),
    (
        "element stride",
        plain((512, 64)),
        {"box": (72, 64), "element_strides": (9, 1)},
        "element strides (8, 1)",
    ),
    (
        "element stride of dimension 0",
        plain((512, 64)),
        {"box": (8, 64), "element_strides": (1, 2)},
        "element strides (1, 1)",
    ),
    (
        "box against element stride",
        plain((512, 64)),
        {"box": (8, 64), "element_strides": (3, 1)},
        "a box of 9 along dimension 0",
    ),
    ("address range", plain((100, 64), address=2**57), {"tile": TILE}, "that the device sees"),
    ("interleave", plain((9, 9, 64)), {"tile": TILE, "interleave": "64B"}, "interleave none"),
    ("rank", plain((9, 64)), {"tile": TILE, "interleave": "16B"}, "interleave none"),
    (
        "swizzle with interleave 32B",
        plain((9, 9, 64)),
        {"tile": TILE, "interleave": "32B"},
        "interleave none",
    ),
    ("out-of-bounds fill", plain((9, 64)), {"tile": TILE, "oob_fill": "ones"}, "oob_fill zeros"),
    (
        "NaN fill of a floating type",
        plain((9, 64), dtype="int32"),
        {"tile": (64, 64), "oob_fill": "nan"},
        "oob_fill zeros",
    ),
    ("L2 promotion", plain((9, 64)), {"tile": TILE, "l2_promotion": "1B"}, "l2_promotion 128B"),
    ("cache hint", plain((9, 64)), {"tile": TILE, "cache_hint": "x"}, "cache_hint evict_normal"),
    ("prefetch", plain((9, 64)), {"tile": TILE, "prefetch": "x"}, "prefetch descriptor"),
]


@pytest.mark.parametrize(("rule", "tensor", "given", "words"), CASES, ids=lambda c: str(c)[:60])
def test_every_kind_of_illegal_map_has_a_change_that_makes_it_legal(rule, tensor, given, words):
    found = explain(tensor, **given)
    assert rule in {broken.name for broken in found.broken}
    first = found.remedies[0]
    assert words in str(first)
    assert first.after is None or first.after.legal
    assert "ILLEGAL" in str(found) and rule in str(found)


def test_every_rule_has_a_change_or_says_why_not():
    from cutedsl_fa3.layouts.doctor.remedies import MEND

    names = {rule.name for rule in explain(plain((9, 9, 64)), TILE).rules}
    assert names - set(MEND) == {"lengths"}  # refused as an argument, with what is needed


@pytest.mark.parametrize("address", [0, 2, 8, 14])
def test_a_view_that_starts_late_starts_earlier_without_a_copy_where_its_storage_does(address):
    x = torch.arange(64 * 80, dtype=torch.int16).view(64, 80)[:, address // 2 : address // 2 + 64]
    found = explain(x, (8, 64))
    assert found.legal == (address == 0)
    for remedy in itertools.islice(found.remedies, 1):
        assert remedy.copied == 0
        (after,), _ = applied(remedy.code, x, {"tile": (8, 64)})
        assert torch.equal(after[:, address // 2 :], x)
        assert after.data_ptr() == x.data_ptr() - address
