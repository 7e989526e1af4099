"""What the doctor says of a tensor and a tile, legal or not, and what CuTe would make of it."""

from __future__ import annotations

import shlex
from dataclasses import replace

import cutlass
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import cutedsl_fa3 as fa3
from cutedsl_fa3.cli import app
from cutedsl_fa3.layouts import (
    SW64,
    SW128,
    Geometry,
    LayoutError,
    TensorMap,
    Tile,
    encoded,
    explain,
)
from cutedsl_fa3.tma_probe import encoded_by_cute

BF16 = cutlass.BFloat16
TILE = Tile(128, 64, BF16)
Q = (2, 100, 4, 64)  # (batch, seqlen, heads, head_dim)


def test_a_legal_map_is_the_one_that_the_tile_makes():
    q = torch.empty(Q, dtype=torch.bfloat16)
    found = explain(q, TILE)
    shape, strides = (64, 100, 4, 2), (512, 128, 51200)
    made = TILE.tensor_map(q.data_ptr(), shape, strides)
    assert found.legal and found.map == replace(made, element_strides=(1, 1, 1, 1))
    assert not found.remedies and not found.broken
    assert {rule.name for rule in made.rules()} < {rule.name for rule in found.rules}


def test_a_report_names_every_field_every_rule_and_what_an_instruction_moves():
    text = str(explain(torch.empty(Q, dtype=torch.bfloat16), TILE, name="q"))
    assert text.startswith("q (2, 100, 4, 64) of BFloat16, tile 128 x 64, swizzle 128B: legal")
    for line in (
        "dimension 0     64 elements side by side (dimension 3 of the tensor, the tile's columns)",
        "dimension 1     100 elements 512 bytes apart (dimension 1 of the tensor, its rows); 1 box",
        "box             64 x 128 x 1 x 1: 128 rows of 128 bytes",
        "swizzle         128B: 16-byte chunks move within 128 bytes, repeating every 1024",
        "into SMEM       16384 bytes",
        "first box       at (0, 0, 0, 0): 12800 bytes read in 400 sectors of 32; 3584 bytes filled",
        "all boxes       8 instructions, 131072 bytes, 28672 of them (21.9%) fill",
        "a tile          1 instruction, 16384 bytes",
    ):
        assert line in text
    for rule in explain(torch.empty(Q, dtype=torch.bfloat16), TILE).rules:
        assert f"ok     {rule.name}" in text


def test_a_tensor_may_be_of_torch_meta_fake_numpy_or_only_described():
    strides = (51200, 512, 128, 2)
    with FakeTensorMode():
        fake = torch.empty(Q, dtype=torch.float16)
    tensors = [
        torch.empty(Q, dtype=torch.float16),
        torch.empty(Q, dtype=torch.float16, device="meta"),
        fake,
        np.zeros(Q, np.float16),
        Geometry(Q, strides, "float16"),
        Geometry(Q, strides, cutlass.Float16, 0x1000),
        Geometry.dense(Q, "fp16"),
    ]
    for tensor in tensors:
        found = explain(tensor, (128, 64))
        assert found.legal and found.map.shape == (64, 100, 4, 2), tensor
        assert found.map.strides == (512, 128, 51200) and found.map.dtype is cutlass.Float16
    assert [explain(t, (128, 64)).binding.tensor.address for t in tensors[1:3]] == [None, None]
    assert "not known yet" in str(explain(tensors[1], (128, 64)))


def test_a_map_is_explained_as_it_is():
    given = TensorMap(BF16, 0x1008, (64, 1), (2,), (64, 1), swizzle=SW128)
    found = explain(given)
    assert found.map == replace(given, element_strides=(1, 1))
    assert {rule.name for rule in found.broken} == {"address alignment", "stride alignment"}
    assert found.remedies[0].after.map.address == 0


def test_the_stride_of_a_single_row_is_never_followed_and_so_never_refused():
    assert explain(torch.empty_strided((1, 64), (7, 1), dtype=torch.bfloat16), TILE).legal
    assert explain(torch.zeros(64, 1, dtype=torch.bfloat16).t(), TILE).legal


def test_a_transposed_matrix_is_refused_for_a_tile_and_taken_for_a_box():
    turned = torch.zeros(64, 128, dtype=torch.bfloat16).t()
    found = explain(turned, TILE)
    assert [rule.name for rule in found.broken] == ["contiguous dimension", "stride alignment"]
    by_box = explain(turned, box=(64, 8))
    assert by_box.legal and by_box.map.box == (64, 8) and by_box.map.strides == (256,)


def test_values_that_the_library_negates_or_conjugates_on_reading_are_refused():
    negated = torch.zeros(8, 64, dtype=torch.complex64).conj().imag
    found = explain(negated, (8, 64))
    assert "memory as it lies" in {rule.name for rule in found.broken}
    assert ".resolve_neg()" in found.remedies[0].code
    assert (
        ".resolve_conj()"
        in explain(torch.zeros(8, 64, dtype=torch.complex64).conj(), (8, 64)).remedies[0].code
    )


@pytest.mark.parametrize(
    "x",
    [
        np.arange(640, dtype=np.float32).reshape(10, 64)[:, ::-1],
        np.arange(640, dtype=np.float32).reshape(10, 64)[::-1],
        np.arange(640, dtype=">f4").reshape(10, 64),
        np.arange(640, dtype=np.float32).reshape(64, 10).T,
    ],
    ids=["columns", "rows", "bytes", "transposed"],
)
def test_arrays_with_strides_below_zero_and_foreign_bytes_are_mended_in_words_of_numpy(x):
    found = explain(x, (8, 64))
    assert not found.legal
    scope = {"x": x}
    exec(found.remedies[0].code, scope)
    assert explain(scope["x"], (8, 64)).legal
    assert np.array_equal(scope["x"], x) and scope["x"].dtype.isnative


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: explain(torch.zeros(8, 64)), "give one of both"),
        (lambda: explain(torch.zeros(8, 64), (8, 64), box=(8, 64)), "give one of both"),
        (lambda: explain(torch.zeros(8, 64), box=(8,)), "box .* has 1 entries, the tensor 2"),
        (lambda: explain(torch.zeros(8, 64), (8,)), "tile = .*rows, cols"),
        (lambda: explain(torch.zeros(8, 64), (8, 64), rows=1), "rows = 1: .*from 0 to 0"),
        (lambda: explain(torch.zeros(8, 64), (8, 64), swizzle="9B"), "none, 32B, 64B, 128B"),
        (lambda: explain(torch.zeros(8, 64), (8, 64), fill="nan"), "fill: no field of a map"),
        (lambda: explain([1, 2], (8, 64)), "tensor = list"),
        (lambda: explain(torch.zeros(8, 64).to_sparse(), (8, 64)), "sparse_coo tensor"),
        (lambda: explain(np.array([[object()]]), (8, 64)), "Python objects"),
        (lambda: Geometry((1, 2), (2,), "bf16"), "one stride a dimension"),
        (lambda: Geometry((1, 2), (4, 2), "bf17"), "size of its elements is not known"),
        (
            lambda: explain(TensorMap(BF16, 0, (64, 8), (), (64, 8))),
            "lengths: given 0 strides",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_by_name(call, said):
    with pytest.raises(LayoutError, match=said):
        call()


# What CuTe encodes without an error.


def numpy_view(rows: int, row_stride: int, offset: int = 0) -> torch.Tensor:
    """A (rows, 64) tensor of fp16 whose rows are `row_stride` bytes apart, never read."""
    storage = np.zeros(1 << 12, np.uint8)
    start = -storage.ctypes.data % 128 + offset
    return torch.from_numpy(
        as_strided(storage[start : start + 256].view(np.float16), (rows, 64), (row_stride, 2))
    )


STRIDES = [128, 130, 142, 144, 1022, 2**40 - 16, 2**40 - 2, 2**40, 2**40 + 48, 2**41 + 130]


@pytest.mark.parametrize("stride", STRIDES)
def test_what_cute_encodes_in_silence_is_what_the_doctor_says_it_would(stride):
    view = numpy_view(100, stride)
    asked = explain(view, Tile(64, 64, cutlass.Float16)).map
    for dynamic in (False, True):
        made = TensorMap.from_bytes(
            encoded_by_cute(view, (64, 64), SW128, dynamic), cutlass.Float16
        )
        assert made == encoded(asked)


@settings(max_examples=30)
@given(st.integers(64, 2**20))
def test_a_row_of_any_length_is_rounded_down_to_16_bytes_in_silence_and_said(elements):
    view = numpy_view(10, 2 * elements)
    found = explain(view, Tile(64, 64, cutlass.Float16))
    made = TensorMap.from_bytes(encoded_by_cute(view, (64, 64), SW128, True), cutlass.Float16)
    assert made == found.encoded
    assert found.legal == (made.strides == found.map.strides)
    if not found.legal:
        said = f"stride {made.strides[0]} bytes instead of {2 * elements} in dimension 1"
        assert said in str(found)


def test_the_1022_bytes_that_become_1008_are_told_with_what_would_be_read():
    text = str(explain(torch.zeros(100, 511, dtype=torch.bfloat16), TILE))
    assert (
        "stride 1008 bytes instead of 1022 in dimension 1: index 1 along it would be read 14 bytes "
        "(7 elements) early"
    ) in text
    assert "pad the row to 1024 bytes (512 elements) instead of 1022" in text


def test_a_static_size_beyond_32_bits_wraps_in_silence_as_the_doctor_says():
    view = numpy_view(2**33 + 5, 128)
    found = explain(view, Tile(64, 64, cutlass.Float16))
    made = TensorMap.from_bytes(encoded_by_cute(view, (64, 64), SW128, False), cutlass.Float16)
    assert made == found.encoded and made.shape == (64, 5)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_stride_below_zero_wraps_in_silence_as_the_doctor_says(dynamic):
    array = np.zeros((100, 64), np.float16)[::-1]
    found = explain(array, Tile(64, 64, cutlass.Float16))
    made = TensorMap.from_bytes(encoded_by_cute(array, (64, 64), SW128, dynamic), cutlass.Float16)
    assert made == found.encoded and made.strides == (2**40 - 128,)
    assert "stride 1099511627648 bytes instead of -128" in str(found)


def test_no_element_is_encoded_as_all_that_32_bits_count():
    empty = torch.zeros(0, 64, dtype=torch.float16)
    found = explain(empty, Tile(64, 64, cutlass.Float16))
    made = TensorMap.from_bytes(encoded_by_cute(empty, (64, 64), SW128, True), cutlass.Float16)
    assert made.shape == found.encoded.shape == (64, 2**32)
    assert "4294967296 elements instead of 0 in dimension 1: memory past the end" in str(found)


def test_addresses_sizes_and_inner_strides_that_are_lost_in_silence_are_told():
    late = str(explain(numpy_view(100, 128, offset=8), (64, 64)))
    assert "everything would be read 8 bytes (4 elements) early" in late
    huge = str(explain(Geometry.dense((2**33 + 5, 64), "bf16"), TILE))
    assert "5 elements instead of 8589934597 in dimension 1" in huge
    every_other = torch.zeros(100, 128, dtype=torch.bfloat16)[:, ::2]
    assert "would be what lies 2 bytes on, not 4" in str(explain(every_other, TILE))


# Where a call is refused.


@pytest.mark.parametrize(
    ("view", "rule"),
    [
        (torch.zeros(2, 128, 4, 65, dtype=torch.bfloat16)[..., :64], "stride alignment"),
        (torch.zeros(2, 128, 4, 72, dtype=torch.bfloat16)[..., 1:65], "address alignment"),
        (torch.zeros(2, 64, 4, 128, dtype=torch.bfloat16).transpose(1, 3), "contiguous dimension"),
    ],
)
def test_a_refused_call_carries_its_diagnosis_and_the_command_that_prints_it(view, rule):
    q = torch.zeros(2, 128, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(fa3.LayoutError) as caught:
        fa3.attention(q, view, q)
    error = caught.value
    assert rule in {broken.name for broken in error.diagnosis.broken}
    assert len(str(error)) < 800 and "print(error.diagnosis)" in str(error)
    command = str(error).partition("python -m cutedsl_fa3 ")[2]
    printed = CliRunner().invoke(app, shlex.split(command))
    assert printed.exit_code == 1
    assert f"BROKEN {rule}" in printed.output
    own = str(error.diagnosis)
    assert own.startswith("k (2, 128, 4, 64)")
    rules = [line for line in own.splitlines() if "BROKEN" in line]
    assert rules == [line for line in printed.output.splitlines() if "BROKEN" in line]


# The command line.


def run(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_command_prints_what_explain_says_and_exits_with_0_where_it_is_legal():
    result = run("--shape", "2,4096,16,64", "--dtype", "bf16", "--tile", "128x64")
    assert result.exit_code == 0, result.output
    described = Geometry.dense((2, 4096, 16, 64), "bf16", library="torch")
    assert result.output.strip() == str(explain(described, (128, 64)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--strides", "511,1", "--tile", "64x64"), "pad the row to 1024 bytes"),
        (("--strides", "1022B,2B", "--tile", "64x64"), "stride 1008 bytes instead of 1022"),
        (("--address", "0x1008", "--tile", "64x64"), "BROKEN address alignment"),
        (("--tile", "60x64"), "use a tile of 64 rows instead of 60"),
        (("--tile", "64x64", "--tile-dtype", "fp32"), "make the tile of BFloat16"),
        (("--box", "300,64"), "2 boxes of 150 along dimension 0"),
        (("--box", "8,128", "--swizzle", "128B"), "2 boxes of 64 elements"),
        (("--box", "8,64", "--element-strides", "3,1"), "a box of 9"),
        (("--tile", "64x64", "--interleave", "16B"), "use interleave none"),
    ],
)
def test_the_command_exits_with_1_and_the_change_where_a_map_is_illegal(options, said):
    result = run("--shape", "100,511", "--dtype", "bf16", *options)
    if "--strides" not in options:
        result = run("--shape", "100,512", "--dtype", "bf16", *options)
    assert result.exit_code == 1, result.output
    assert said in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--shape", "2,x", "--dtype", "bf16", "--tile", "8x8"), "--shape: 'x' is no whole number"),
        (("--shape", "8,8", "--dtype", "bf17", "--tile", "8x8"), "--dtype bf17: no element type"),
        (("--shape", "8,8", "--dtype", "bf16", "--tile", "8"), "--tile 8: rows x columns"),
        (("--shape", "8,8", "--dtype", "bf16"), "give one of both"),
        (("--shape", "8,8", "--dtype", "bf16", "--box", "8"), "box (8,) has 1 entries"),
        (
            ("--shape", "8,8", "--strides", "8", "--dtype", "bf16", "--tile", "8x8"),
            "--strides 8: 1 entries, but --shape 8,8 has 2",
        ),
        (
            ("--shape", "8,8", "--dtype", "bf16", "--tile", "8x8", "--swizzle", "5B"),
            "none, 32B, 64B, 128B",
        ),
        (
            ("--shape", "8,8", "--dtype", "bf16", "--tile", "8x8", "--address", "here"),
            "--address: 'here' is no whole number",
        ),
        (
            ("--shape", "8,8", "--dtype", "bf16", "--tile", "8x8", "--tile-dtype", "bool"),
            "--tile-dtype bool",
        ),
    ],
)
def test_bad_options_are_refused_naming_what_is_valid_and_exit_with_2(options, said):
    result = run(*options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("refused: ") and said in result.stderr


@pytest.mark.parametrize(
    "found",
    [
        explain(Geometry((100, 60), (122, 2), "bf16", 0x1002), box=(300, 60), swizzle=SW64),
        explain(Geometry.dense((2, 3, 100, 64), "fp32"), Tile(8, 64, BF16), rows=2),
        explain(Geometry.dense((100, 64), "int8"), box=(9, 64), element_strides=(3, 1)),
        explain(Geometry.dense((9, 100, 64), "fp16"), (8, 64), interleave="16B", oob_fill="nan"),
    ],
)
def test_the_command_that_a_diagnosis_names_says_the_same(found):
    arguments = shlex.split(found.command.partition("python -m cutedsl_fa3 ")[2])
    result = CliRunner().invoke(app, arguments)
    head = str(found).split("\n\nThe smallest change")[0]
    assert result.output.startswith(head)
