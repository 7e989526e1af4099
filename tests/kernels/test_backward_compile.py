"""The backward in machine code, in the pipeline model, and what its tables refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutedsl_fa3 import Variant, masks
from cutedsl_fa3.audit import audit
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.kernels.sm90.backward.schedule import TABLE, BackwardSchedule, tile_dims
from cutedsl_fa3.kernels.sm90.backward.sums import strip, whole
from cutedsl_fa3.kernels.sm90.backward.work import FLAGGED
from cutedsl_fa3.layouts import LayoutError
from cutedsl_fa3.layouts.tile import Row
from cutedsl_fa3.model import check_pipeline
from cutedsl_fa3.pipelines import ScheduleError
from cutedsl_fa3.plans_backward import BackwardPlan
from cutedsl_fa3.problem import Problem

SIZES = ((1, 64, 128, 1, 1), (1, 200, 200, 2, 1), (1, 500, 300, 1, 1))  # b, sq, sk, h, kv heads


def backward_plan(head_dim: int, mask=None, **changes) -> BackwardPlan:
    plan = BackwardPlan.default(Variant(mask=mask), Problem("bf16", head_dim, head_dim))
    return replace(plan, schedule=replace(plan.schedule, **changes))


def test_equal_functions_with_other_derivatives_are_other_kernels():
    moving = Variant(lambda s, b, h, q, k: s * 0.5 + s)
    still = Variant(lambda s, b, h, q, k: s * 0.5 + s.detach())
    assert moving.text == still.text
    problem = Problem("bf16", 64, 64)
    keys = {BackwardPlan.default(variant, problem).key_text for variant in (moving, still)}
    assert len(keys) == 2


def arguments(plan: BackwardPlan, batch, seqlen_q, seqlen_k, heads, kv_heads) -> tuple:
    """Of the compiled host function, on torch's meta device."""
    d, s = plan.problem.head_dim, plan.schedule
    rows = -(-seqlen_q // s.tile_m) * s.tile_m

    def tensor(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q = tensor(batch, seqlen_q, heads, d, dtype=torch.bfloat16)
    k = tensor(batch, seqlen_k, kv_heads, d, dtype=torch.bfloat16)
    of_rows, padded = tensor(batch, heads, seqlen_q), tensor(batch, heads, rows)
    sums = tensor(batch * heads * rows * d // 32, 32)
    given = (q, k, k, q, of_rows, q, None, q, k, k, None, None, padded, padded, sums)
    tiles = batch * kv_heads * -(-seqlen_k // s.tile_n)
    flags = tensor(tiles * s.tile_n // FLAGGED, dtype=torch.int32)
    return (*given, None, None, flags, 1.0)


@pytest.mark.compile
@pytest.mark.parametrize("mask", [None, masks.causal])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_plain_and_causal_backward_compile_without_spills_to_what_the_tables_promise(
    head_dim, mask
):
    plan = backward_plan(head_dim, mask)
    plan.check()
    compiled = compile_kernel(plan.kernel)
    assert compiled.resources.advisories == ()
    report = audit(plan.kernel, compiled)
    assert report.ok, report


@pytest.mark.parametrize("add", ["tma", "direct"])
def test_no_interleaving_of_the_backwards_roles_hangs_races_or_loses_a_tile(add):
    plan = backward_plan(128, masks.causal, add=add)
    verdict = check_pipeline(plan.kernel, [arguments(plan, *size) for size in SIZES])
    assert verdict.ok, verdict
    copied = {outcome.fills["q"] for outcome in verdict.outcomes}
    assert {outcome.fills["k"] for outcome in verdict.outcomes} == {1}
    assert max(copied) > 1


def test_a_place_of_dq_that_is_written_without_waiting_is_a_race():
    plan = backward_plan(128)
    kernel = plan.kernel

    class Hasty(type(kernel)):
        """Adds the strips to the sums without waiting until they are written."""

        def add_tile(self, io, smem, first, turn):
            for group in range(self.schedule.consumers):
                mine = smem.sums
                self.store(self.tiles["sums"], io.sums, mine, (first + group, 0), wait=False)
            self.stored()

    verdict = check_pipeline(Hasty(plan), [arguments(plan, *SIZES[0])])
    assert not verdict.ok


@pytest.mark.parametrize("dims", TABLE)
def test_a_warp_moves_whole_rows_of_sums_and_strips_fill_the_tile(dims):
    s = TABLE[dims]
    assert strip(s, dims[0]).bytes * s.consumers == whole(s, dims[0]).bytes
    assert whole(s, dims[0]).bytes == 4 * s.tile_m * dims[0]


def test_head_sizes_are_served_by_the_next_of_the_table():
    served = {d: tile_dims(Problem("bf16", d, d)) for d in (8, 64, 72, 96, 128)}
    assert served == {8: (64, 64), 64: (64, 64), 72: (128,) * 2, 96: (128,) * 2, 128: (128,) * 2}
    assert tile_dims(Problem("bf16", 64, 128)) == (128, 128)
    with pytest.raises(ScheduleError, match="head_dim, head_dim_v = 192, 128"):
        tile_dims(Problem("bf16", 192, 128))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tile_m", 80),
        ("tile_n", 64),
        ("stages", 0),
        ("places", 3),
        ("parts", 3),
        ("consumers", 4),
        ("add", "atomic"),
        ("head_group", 0),
        ("stages", 2.0),
    ],
)
def test_a_schedule_outside_its_range_is_refused_by_field_and_value(field, value):
    with pytest.raises(ScheduleError, match=f"{field} = {value!r}"):
        BackwardSchedule(**{field: value})


def test_a_fixed_order_of_additions_needs_the_warp_that_adds():
    plan = replace(backward_plan(128, add="direct"), deterministic=True)
    with pytest.raises(ScheduleError, match="add = 'direct'"):
        plan.check()


def test_what_affects_the_code_is_in_the_key():
    plan = backward_plan(128)
    others = [
        backward_plan(64),
        backward_plan(128, masks.causal),
        backward_plan(128, stages=1),
        replace(plan, has_dlse=True),
        replace(plan, deterministic=True),
        replace(plan, wanted=(0,)),
    ]
    assert len({plan.key_text, *(p.key_text for p in others)}) == 1 + len(others)


def test_a_row_that_no_bulk_copy_moves_is_refused():
    import cutlass

    assert Row(64, cutlass.Float32).bytes == 256
    with pytest.raises(LayoutError, match="row of 3 elements"):
        Row(3, cutlass.Float32)
