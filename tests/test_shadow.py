"""A new kernel's first result is compared where that is asked for, and a wrong one can be repeated.

The emulation on the CPU stands for a kernel here; what it returns is spoilt in one place.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from twin_cases import BATCH, HEADS, KV_HEADS, drawn, variants

import cutedsl_fa3 as fa3
from cutedsl_fa3 import calls, emulate, interface, reproducer, sampled, shadow

LENGTHS = (70, 90)
AT = (1, 2, 5, 3)  # batch, head, row, column


@pytest.fixture
def compared(monkeypatch, tmp_path) -> list:
    """The results that were compared; folders of wrong calls go to a place of their own."""
    seen = []
    compare = sampled.compare
    monkeypatch.setattr(sampled, "compare", lambda *a: seen.append(a[-1]) or compare(*a))
    monkeypatch.setattr(shadow, "_environment", shadow.Asked())
    monkeypatch.delenv(shadow.ENVIRONMENT, raising=False)
    monkeypatch.chdir(tmp_path)
    interface._calls.clear()
    return seen


def spoil(monkeypatch, change) -> None:
    """From now on what the emulation returns is changed in place before anyone sees it."""
    run = emulate.run

    def spoilt(*arguments):
        made = run(*arguments)
        change(made.out, made.lse)
        return made

    monkeypatch.setattr(emulate, "run", spoilt)


def off_by(value: float):
    b, h, row, column = AT

    def change(out, lse):
        out[b, row, h, column] += value

    return change


def inputs(dim: int = 64, dim_v: int | None = None, dtype=torch.bfloat16, device="cpu"):
    """q, k and v with several query heads for each key head; other memory each time."""
    return drawn(BATCH, *LENGTHS, HEADS, KV_HEADS, dim, dim_v, dtype=dtype, device=device)


def run(q, k, v, variant, **options):
    if variant.has_lse:
        return fa3.attention_with_lse(q, k, v, variant, **options)
    return fa3.attention(q, k, v, variant, **options), None


@pytest.mark.parametrize("name", list(variants()))
def test_a_right_result_of_any_kind_of_variant_is_returned_as_it_is(name, compared):
    variant = variants()[name]
    for dims, dtype in (((64, 64), torch.bfloat16), ((40, 72), torch.float16)):
        out, lse = run(*inputs(*dims, dtype), variant)
        with fa3.shadow_check():
            again, lse_again = run(*inputs(*dims, dtype), variant)
        assert torch.equal(out, again)
        assert lse is None or torch.equal(lse, lse_again)
    assert len(compared) == 2


@pytest.mark.parametrize("name", list(variants()))
def test_one_wrong_number_of_any_kind_of_variant_raises_with_its_place(
    name, compared, monkeypatch, tmp_path
):
    spoil(monkeypatch, off_by(8.0))
    with fa3.shadow_check(), pytest.raises(fa3.ShadowMismatch) as caught:
        run(*inputs(), variants()[name])
    found = caught.value.mismatch
    assert (found.batch, found.head, found.row, found.column) == AT
    assert found.what == "output" and found.wrong == 1
    assert abs(found.got - found.expected - 8.0) <= found.allowed + 0.125 < 1.0
    for part in ("batch 1, head 2, row 5, column 3", "got ", "expected ", "allowed "):
        assert part in str(caught.value)
    assert caught.value.folder.is_relative_to(tmp_path)
    case = reproducer.load(caught.value.folder, "cpu")
    assert case.variant.text == variants()[name].text
    assert case.compare(case.stored) == found


@pytest.mark.parametrize("name", [n for n, v in variants().items() if v.has_lse])
def test_a_wrong_lse_is_told_by_what_the_weights_add_up_to(name, compared, monkeypatch):
    b, h, row, _ = AT
    row = 60  # which sees keys in every variant that shows some

    def change(out, lse):
        lse[b, h, row] = 0.5 if lse[b, h, row] == -math.inf else lse[b, h, row] + 0.5

    spoil(monkeypatch, change)
    with fa3.shadow_check(), pytest.raises(fa3.ShadowMismatch) as caught:
        run(*inputs(), variants()[name])
    found = caught.value.mismatch
    assert (found.what, found.column) == ("LSE", None)
    assert (found.batch, found.head, found.row) == (b, h, row)
    if found.expected != -math.inf:
        assert "adds up to 0.606" in str(found)  # exp(-0.5)


def test_a_result_that_is_not_finite_is_wrong_only_where_the_reference_is_finite(
    compared, monkeypatch
):
    q, k, v = inputs()
    causal = fa3.Variant(mask=fa3.masks.causal)
    k[0, 80] = v[0, 80] = math.nan  # seen by the last queries alone: row 60 and after
    with fa3.shadow_check():
        out, _ = run(q, k, v, causal)
    assert out[0, -1].isnan().any() and not out[0, 0].isnan().any()
    for value in (math.nan, math.inf):
        spoil(monkeypatch, off_by(value))
        with fa3.shadow_check(), pytest.raises(fa3.ShadowMismatch, match="error inf") as caught:
            run(q, k, v, causal)
        assert caught.value.mismatch.row == AT[2] and caught.value.mismatch.error == math.inf


def test_an_output_that_rounds_to_infinity_is_right_only_near_the_largest_number(compared):
    q, k, v = (torch.zeros(1, n, 1, 8, dtype=torch.float16) for n in (1, 2, 2))
    v[0, :, 0, 0], v[0, :, 0, 1] = torch.finfo(torch.float16).max, 1.0
    variant = fa3.Variant(softmax=fa3.Elementwise(lambda s: s + 0.50005))
    out = torch.zeros_like(q)
    out[..., 0], out[..., 1] = math.inf, 1.0
    assert sampled.compare(q, k, v, variant, 1.0, (out, None)) is None
    out[..., 1] = math.inf
    found = sampled.compare(q, k, v, variant, 1.0, (out, None))
    assert found is not None and (found.column, found.error) == (1, math.inf)


def test_values_that_no_query_may_see_do_not_widen_what_is_allowed(compared, monkeypatch):
    q, k, v = inputs()
    v[:, 85:] = math.nan
    variant = fa3.Variant(mask=lambda b, h, q, k: k < 85)
    with fa3.shadow_check():
        run(q, k, v, variant)
    spoil(monkeypatch, off_by(0.1))
    with fa3.shadow_check(), pytest.raises(fa3.ShadowMismatch):
        run(q, k, v, variant)


def test_a_row_that_is_never_written_is_wrong(compared, monkeypatch):
    def change(out, lse):
        out[-1, -1] = 0

    spoil(monkeypatch, change)
    with fa3.shadow_check(), pytest.raises(fa3.ShadowMismatch) as caught:
        run(*inputs(), fa3.Variant())
    assert caught.value.mismatch.row == LENGTHS[0] - 1


def test_nothing_is_compared_unless_it_is_asked_for(compared, monkeypatch):
    spoil(monkeypatch, off_by(0.5))
    for text in (None, *shadow.OFF):
        if text is not None:
            monkeypatch.setenv(shadow.ENVIRONMENT, text)
        interface._calls.clear()
        run(*inputs(), fa3.Variant())
    assert not compared


def test_a_kernel_is_compared_once_whatever_the_lengths(compared):
    variant = fa3.Variant(mask=fa3.masks.causal)
    with fa3.shadow_check():
        for length in (70, 40, 70, 40):
            q, k, v = inputs()
            run(q[:, :length], k, v, variant)
            run(*inputs(), fa3.Variant(mask=fa3.masks.causal))  # the same code
        assert len(compared) == 1
        run(*inputs(), variant, schedule=fa3.Schedule(128, 64, 2, 2, "none"))
        run(*inputs(128), variant)
        run(*inputs(dtype=torch.float16), variant)
    assert len(compared) == 4
    run(*inputs(96), variant)
    assert len(compared) == 4


def test_a_call_that_was_met_before_is_compared_within(compared):
    variant, (q, k, v) = fa3.Variant(), inputs()
    run(q, k, v, variant)
    for _ in range(2):
        with fa3.shadow_check():
            run(q, k, v, variant)
    assert len(compared) == 2


def test_every_call_is_compared_where_every_one_is_asked_for(compared, monkeypatch):
    variant, (q, k, v) = fa3.Variant(), inputs()
    with fa3.shadow_check(every_call=True):
        for _ in range(3):
            run(q, k, v, variant)
        assert len(compared) == 3
        spoil(monkeypatch, off_by(0.5))
        with pytest.raises(fa3.ShadowMismatch):
            run(q, k, v, variant)


def test_a_kernel_that_was_wrong_is_compared_again(compared, monkeypatch):
    variant, (q, k, v) = fa3.Variant(), inputs()
    with fa3.shadow_check():
        with monkeypatch.context() as patched:
            spoil(patched, off_by(0.5))
            for _ in range(2):
                with pytest.raises(fa3.ShadowMismatch):
                    run(q, k, v, variant)
        run(q, k, v, variant)
        run(q, k, v, variant)
    assert len(compared) == 3


def test_the_environment_asks_for_it_and_may_name_the_folder(compared, monkeypatch, tmp_path):
    spoil(monkeypatch, off_by(0.5))
    for text, folder in (("1", tmp_path / shadow.FOLDER), ("some/where", tmp_path / "some/where")):
        monkeypatch.setenv(shadow.ENVIRONMENT, text)
        with pytest.raises(fa3.ShadowMismatch) as caught:
            run(*inputs(), fa3.Variant())
        assert caught.value.folder.parent == folder


def test_a_call_that_asks_for_gradients_is_compared_too(compared, monkeypatch):
    q, k, v = inputs()
    spoil(monkeypatch, off_by(0.5))
    with fa3.shadow_check(), pytest.raises(fa3.ShadowMismatch):
        run(q.requires_grad_(), k, v, fa3.Variant())


def test_a_call_without_scores_runs_no_kernel_and_compares_nothing(compared):
    q, k, v = inputs()
    with fa3.shadow_check():
        run(q, k[:, :0], v[:, :0], fa3.Variant())
        run(q[:0], k[:0], v[:0], fa3.Variant())
    assert not compared


def test_a_call_in_a_graph_capture_is_not_compared_and_says_so(compared, monkeypatch):
    variant, (q, k, v) = fa3.Variant(), inputs()
    with fa3.shadow_check():
        with monkeypatch.context() as patched:
            patched.setattr(shadow, "under_capture", lambda device: True)
            with pytest.warns(shadow.NotChecked, match="CUDA graph is being captured") as caught:
                fa3.attention(q, k, v, variant)
            assert caught[0].filename == __file__
        assert not compared
        fa3.attention(q, k, v, variant)
    assert len(compared) == 1


def test_a_comparison_leaves_the_random_numbers_of_the_caller_alone(compared):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with fa3.shadow_check():
        run(*inputs(), fa3.Variant())
    assert torch.equal(torch.rand(3), expected)


def test_the_script_that_is_left_repeats_the_comparison(compared, monkeypatch):
    """The spoilt number is in the stored result; a new process has the right one."""
    slopes = torch.rand(HEADS)
    variant = fa3.Variant(lambda s, b, h, q, k: s + slopes[h], fa3.masks.causal)
    spoil(monkeypatch, off_by(0.5))
    with fa3.shadow_check(), pytest.raises(fa3.ShadowMismatch) as caught:
        run(*inputs(), variant, scale=0.25, schedule=fa3.Schedule(128, 64, 2, 2, "intra"))
    folder = caught.value.folder
    assert {path.name for path in folder.iterdir()} == {
        "tensors.pt", "variant.json", "variant.txt", "plan.txt", "versions.txt", "mismatch.txt",
        "reproduce.py",
    }  # fmt: skip
    assert "forward on SM90" in (folder / "plan.txt").read_text()
    assert "cutlass" in (folder / "versions.txt").read_text()
    path = Path(fa3.__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, folder / "reproduce.py", "cpu"],
        env={"PYTHONPATH": str(path), "PATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    stored, again = done.stdout.splitlines()
    assert stored == f"stored result: {caught.value.mismatch}"
    assert again == "result on cpu: right"
    case = reproducer.load(folder, "cpu")
    assert case.plan.key_text == (fa3.plan(*inputs(), variant, schedule=case.schedule)).key_text
    assert case.compare(case.run()) == caught.value.mismatch  # spoilt in this process


@pytest.mark.parametrize("name", list(variants()))
def test_a_variant_from_its_stored_graphs_is_the_same_variant(name):
    variant = variants()[name]
    graphs = {role: reproducer._as_data(graph) for role, graph in variant.graphs.items()}
    read = {role: reproducer._as_graph(data) for role, data in graphs.items()}
    made = reproducer.variant_of(read, variant.captures, variant.sink)
    assert made.text == variant.text and made.graphs == variant.graphs
    assert (made.sink, made.has_lse) == (variant.sink, variant.has_lse)
    assert all(a.depends == b.depends for r in read for a, b in zip(
        read[r].nodes, variant.graphs[r].nodes, strict=True))  # fmt: skip


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_a_tensor_on_disk_keeps_its_strides_and_its_place_in_memory(shape, data):
    pad = data.draw(st.integers(0, 9))
    order = data.draw(st.permutations(range(len(shape))))
    whole = torch.arange(pad + 2 * math.prod(shape), dtype=torch.bfloat16)
    strides = torch.empty([shape[i] for i in order]).permute(
        [order.index(i) for i in range(len(shape))]
    ).stride()  # fmt: skip
    factor = data.draw(st.integers(0, 2))  # 0: one element seen many times
    t = whole.as_strided(shape, [factor * s for s in strides], pad)
    copy = reproducer.laid_out(t, "cpu")
    assert torch.equal(copy, t) and copy.stride() == t.stride()
    assert (copy.data_ptr() - t.data_ptr()) % reproducer.ALIGNMENT == 0
    assert copy.untyped_storage().nbytes() <= 2 * whole.nbytes + 2 * reproducer.ALIGNMENT


def test_a_mismatch_is_raised_even_where_nothing_can_be_left_on_disk(
    compared, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(shadow.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    spoil(monkeypatch, off_by(0.5))
    with (
        fa3.shadow_check(tmp_path / "file"),
        pytest.raises(fa3.ShadowMismatch, match=r"could not be left on disk .*file") as caught,
    ):
        run(*inputs(), fa3.Variant())
    assert caught.value.folder is None and caught.value.mismatch.row == AT[2]


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 300_000), st.integers(1, 32))


@settings(max_examples=50)
@given(SIZES, st.integers(1, 1_000_000))
def test_what_is_compared_is_a_few_rows_of_a_long_sequence_and_all_of_a_short_one(size, seqlen_k):
    batch, seqlen_q, heads = size
    found = sampled.places((batch, seqlen_q, heads, 64), seqlen_k, torch.device("cpu"))
    numbers = [(b, h) for b, h, _ in found]
    assert numbers[0] == (0, 0) and numbers[-1] == (batch - 1, heads - 1)
    assert len(set(numbers)) == len(numbers) <= sampled.HEADS
    for _, _, rows in found:
        assert rows[0] == 0 and rows[-1] == seqlen_q - 1 and (rows.diff() > 0).all()
    scores = sum(len(rows) for _, _, rows in found) * seqlen_k
    assert scores <= max(sampled.SCORES, sampled.FEW_HEADS * sampled.FEWEST * seqlen_k)
    if batch * heads * seqlen_q * seqlen_k <= sampled.SCORES and batch * heads <= sampled.HEADS:
        assert all(len(rows) == seqlen_q for _, _, rows in found)


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, tuple | list) else [made]:
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return made


def test_a_long_sequence_is_never_compared_all_at_once():
    seqlen = 30_000
    q, k, v = (torch.randn(1, seqlen, 1, 8, dtype=torch.bfloat16) for _ in range(3))
    out, lse = torch.zeros_like(q), torch.zeros(1, 1, seqlen)
    with Largest() as largest:
        found = sampled.compare(q, k, v, fa3.Variant(mask=fa3.masks.causal), 1.0, (out, lse))
    assert found is not None
    assert seqlen < largest.elements <= sampled.SCORES + seqlen


def test_memory_is_nan_while_a_kernel_is_about_to_write_it_and_settings_are_restored():
    for enabled, warn_only in ((False, False), (True, True), (True, False)):
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        try:
            with shadow._filled():
                made = [
                    torch.empty_like(torch.zeros(300, dtype=d)) for d in (torch.float32, torch.half)
                ]
            assert all(t.isnan().all() for t in made)
            assert torch.are_deterministic_algorithms_enabled() == enabled
            assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        finally:
            torch.use_deterministic_algorithms(False)


DIMS = [(64, 64), (40, 72), (256, 256)]
ON_GPU = [
    *((name, (128, 128)) for name in variants()),
    *((name, dims) for name in ("plain", "documents", "one sink", "relu weights") for dims in DIMS),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dims"), ON_GPU)
def test_a_kernel_of_any_kind_of_variant_and_head_size_is_right_when_it_is_new(
    name, dims, compared
):
    with fa3.shadow_check():
        run(*inputs(*dims, device="cuda"), variants("cuda")[name])
    assert len(compared) == 1


@pytest.mark.gpu
def test_a_kernel_that_writes_nothing_is_wrong_though_its_memory_held_what_is_right(
    compared, monkeypatch
):
    q, k, v = inputs(device="cuda")
    variant, made = fa3.Variant(mask=fa3.masks.causal), calls.launcher

    def idle(*arguments):
        found = made(*arguments)
        return calls.Launcher(lambda *arguments: None, found.problem, found.schedule)

    run(q, k, v, variant)  # its memory is free again, and holds the right result
    monkeypatch.setattr(calls, "launcher", idle)
    with fa3.shadow_check(), pytest.raises(fa3.ShadowMismatch) as caught:
        run(q, k, v, variant)
    assert caught.value.mismatch.error == math.inf
    case = reproducer.load(caught.value.folder, "cuda")
    assert case.q.is_cuda and case.compare(case.stored) is not None


@pytest.mark.gpu
def test_a_kernel_in_a_captured_graph_is_compared_by_its_next_call(compared):
    q, k, v = inputs(device="cuda")
    variant = fa3.Variant(mask=fa3.masks.causal)
    expected = run(q, k, v, variant)[0]
    with fa3.shadow_check():
        graph = torch.cuda.CUDAGraph()
        with pytest.warns(shadow.NotChecked), torch.cuda.graph(graph):
            out, _ = run(q, k, v, variant)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected) and not compared
        run(q, k, v, variant)
    assert len(compared) == 1
