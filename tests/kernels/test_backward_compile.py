"""The backward in machine code, in the pipeline model, and what its tables refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sound import assert_sound

from cutedsl_fa3 import Variant, configs_backward, contract, masks
from cutedsl_fa3.audit import disassemble
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.kernels.sm90.backward.schedule import BackwardSchedule
from cutedsl_fa3.kernels.sm90.backward.sums import strip, whole
from cutedsl_fa3.kernels.sm90.backward.weights import Weigher
from cutedsl_fa3.kernels.sm90.backward.work import FLAGGED
from cutedsl_fa3.layouts import LayoutError
from cutedsl_fa3.layouts.tile import Row
from cutedsl_fa3.model import check_pipeline
from cutedsl_fa3.pipelines import ScheduleError
from cutedsl_fa3.plans_backward import BackwardPlan
from cutedsl_fa3.problem import NATIVE, Problem
from cutedsl_fa3.schedules import NEEDS, needs
from cutedsl_fa3.schedules_backward import TABLE, serving_row, tile_dims

CONFIGS = configs_backward.configs()
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
    d, dv, s = plan.problem.head_dim, plan.problem.head_dim_v, plan.schedule
    tiles = -(-seqlen_q // s.tile_m)
    rows = tiles * s.tile_m

    def tensor(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    def given(seqlen, heads, dim):
        return tensor(batch, seqlen, heads, dim, dtype=torch.bfloat16)

    q, o = given(seqlen_q, heads, d), given(seqlen_q, heads, dv)
    k, v = given(seqlen_k, kv_heads, d), given(seqlen_k, kv_heads, dv)
    of_rows, padded = tensor(batch, heads, seqlen_q), tensor(batch, heads, rows)
    sums = tensor(batch * heads * rows * plan.tile_dims[0] // 32, 32)
    turns = None
    if plan.deterministic:
        turns = tensor(batch, heads, tiles, dtype=torch.int32).permute(2, 1, 0)
    of_keys = batch * kv_heads * -(-seqlen_k // s.tile_n)
    flags = tensor(of_keys * s.tile_n // FLAGGED, dtype=torch.int32)
    results = (q, k, v, None, None, padded, padded, sums, turns)
    return (q, k, v, o, of_rows, o, None, *results, None, flags, 1.0)


@pytest.mark.compile
@pytest.mark.parametrize("name", CONFIGS)
def test_every_backward_configuration_compiles_without_spilling_to_the_code_accepted(name):
    plan = CONFIGS[name]
    broken = contract.broken(contract.label(plan.kernel), assert_sound(plan))
    assert not broken, broken


def test_every_row_of_the_table_and_every_kind_of_variant_is_among_the_configurations():
    plans = CONFIGS.values()
    used = {serving_row(p.variant, p.problem, p.deterministic, p.wanted) for p in plans}
    assert used == set(TABLE)
    assert {needs(p.variant) for p in plans} == set(NEEDS)
    of_size = {(p.tile_dims, p.problem.dtype) for p in plans if needs(p.variant) == NEEDS[0]}
    assert of_size == {(dims, t) for dims in tile_sizes() for t in ("bf16", "fp16")}


def tile_sizes() -> set[tuple[int, int]]:
    return {(row.head_dim, row.head_dim_v) for row in TABLE}


def test_every_head_size_of_the_forward_is_served_for_every_need_and_order():
    for dims in NATIVE:
        assert all(n <= d for n, d in zip(dims, tile_dims(Problem("bf16", *dims)), strict=True))
    for dims in tile_sizes():
        for order in (False, True):
            of_order = [
                r for r in TABLE if (r.head_dim, r.head_dim_v, r.deterministic) == (*dims, order)
            ]
            assert of_order[-1].needs == NEEDS[-1]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_schedule_of_the_table_fits(row):
    problem = Problem("bf16", row.head_dim, row.head_dim_v)
    BackwardPlan(Variant(), problem, row.schedule, deterministic=row.deterministic).check()


@pytest.mark.parametrize(
    ("dims", "deterministic"), [((256, 256), False), ((192, 128), True)], ids=str
)
def test_warpgroups_that_share_keys_neither_hang_nor_race(dims, deterministic):
    plan = configs_backward.plan("nothing", dims, deterministic=deterministic)
    assert plan.schedule.sharing == 2
    verdict = check_pipeline(plan.kernel, [arguments(plan, 1, 200, 130, 2, 1)])
    assert verdict.ok, verdict
    assert max(outcome.fills["q"] for outcome in verdict.outcomes) > plan.schedule.stages


@pytest.mark.compile
@pytest.mark.parametrize("dim", [64, 128])
def test_ds_is_transposed_when_it_is_stored_and_not_when_it_is_read(dim):
    plan = backward_plan(dim)
    code = disassemble(compile_kernel(plan.kernel).cubin)
    assert ".tnspA" not in code
    assert code.count("STSM.16.MT88") == 2 * plan.schedule.tile_m // 16  # 16 queries, two loops


@pytest.mark.compile
@pytest.mark.parametrize("eighths", [0, 8])
def test_as_much_of_p_as_asked_comes_before_the_wait_for_dp(eighths):
    code = disassemble(compile_kernel(backward_plan(128, early=eighths).kernel).cubin)
    steps = code.split("gsb0, 0x1")[1:]  # from the wait for S, and from that for dQ, by turns
    meanwhile = [step.split("gsb0, 0x0")[0].count("MUFU.EX2") for step in steps[::2]]
    assert len(meanwhile) == 2
    assert all(n == 32 for n in meanwhile) if eighths else all(n < 32 for n in meanwhile)


@pytest.mark.compile
def test_numbers_of_rows_that_lanes_share_are_read_once_and_asked_for():
    def reads(spread):
        code = disassemble(compile_kernel(backward_plan(128, spread=spread).kernel).cubin)
        loop = code[code.rindex("MUFU.EX2") - 40_000 : code.rindex("MUFU.EX2")]
        return loop.count("LDS.64"), loop.count("SHFL.IDX")

    (each, few), (once, answers) = reads(False), reads(True)
    assert each >= 8 * once > 0
    assert answers >= few + 16


def test_dk_that_is_written_before_all_have_read_k_is_a_race():
    plan = backward_plan(128, add="direct")

    class Hasty(type(plan.kernel)):
        """The warpgroups do not wait for each other before they write to K's memory."""

        def all_have_read(self, group, odd):
            pass

    verdict = check_pipeline(Hasty(plan), [arguments(plan, *SIZES[0])])
    assert not verdict.ok


def ordered(dim: int) -> BackwardPlan:
    return configs_backward.plan("nothing", (dim, dim), deterministic=True)


@pytest.mark.parametrize("dim", [64, 128])
def test_two_warps_that_add_by_turns_neither_hang_nor_race(dim):
    plan = ordered(dim)
    assert plan.kernel.barriers.table["full"].copies == 2 * plan.schedule.consumers
    verdict = check_pipeline(plan.kernel, [arguments(plan, 1, 300, 130, 2, 1)])
    assert verdict.ok, verdict
    assert max(outcome.fills["q"] for outcome in verdict.outcomes) > 2


def test_a_warp_that_does_not_hand_on_its_turn_to_add_is_noticed():
    class Selfish(type(ordered(128).kernel)):
        """Both warps say that the strips may be written for a tile of the first."""

        def emptied(self, adder):
            super().emptied(0)

    plan = ordered(128)
    verdict = check_pipeline(Selfish(plan), [arguments(plan, 1, 300, 130, 1, 1)])
    assert not verdict.ok


def test_p_that_is_read_before_all_have_written_it_is_a_race():
    class Hasty(type(configs_backward.plan("nothing", (192, 128)).kernel)):
        """Each warpgroup goes on as soon as its own P and dS are written."""

        def __init__(self, plan):
            super().__init__(plan)
            table = dict(self.barriers.table)
            table["ds"] = replace(table["ds"], threads=128, copies=2)
            self.barriers = replace(self.barriers, table=table)

        def meet(self, group):
            self.barriers["ds", group].arrive_and_wait()

    plan = configs_backward.plan("nothing", (192, 128))
    verdict = check_pipeline(Hasty(plan), [arguments(plan, 1, 64, 64, 1, 1)])
    assert not verdict.ok


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

        def add_tile(self, io, smem, first, turn, counter, adder):
            for group in range(self.schedule.consumers):
                mine = smem.sums
                self.store(self.tiles["sums"], io.sums, mine, (first + group, 0), wait=False)
            self.stored()

    verdict = check_pipeline(Hasty(plan), [arguments(plan, *SIZES[0])])
    assert not verdict.ok


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_warp_moves_whole_rows_of_sums_and_strips_fill_the_tile(row):
    s, d = row.schedule, row.head_dim
    assert strip(s, d).bytes * s.consumers == whole(s, d).bytes
    assert whole(s, d).bytes == 4 * s.tile_m * d


def test_head_sizes_are_served_by_the_next_of_the_table():
    served = {d: tile_dims(Problem("bf16", d, d))[0] for d in (8, 64, 72, 104, 136, 200, 256)}
    assert served == {8: 64, 64: 64, 72: 96, 104: 128, 136: 192, 200: 256, 256: 256}
    assert tile_dims(Problem("bf16", 64, 128)) == (128, 128)
    assert tile_dims(Problem("bf16", 192, 128)) == (192, 128)
    assert tile_dims(Problem("bf16", 128, 192)) == (192, 192)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tile_m", 80),
        ("tile_n", 64),
        ("stages", 0),
        ("places", 3),
        ("consumers", 4),
        ("sharing", 3),
        ("spread", 1),
        ("early", 9),
        ("add", "atomic"),
        ("head_group", 0),
        ("stages", 2.0),
    ],
)
def test_a_schedule_outside_its_range_is_refused_by_field_and_value(field, value):
    with pytest.raises(ScheduleError, match=f"{field} = {value!r}"):
        BackwardSchedule(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("spread", True), ("early", 1)])
def test_what_one_warpgroup_has_of_its_keys_is_refused_where_two_share_them(field, value):
    with pytest.raises(ScheduleError, match=f"{field} = {value}: .*sharing|{field} = {value}: 0"):
        BackwardSchedule(tile_n=64, sharing=2, **{field: value})


def test_what_is_rounded_together_is_computed_together():
    with pytest.raises(ValueError, match="at_once = 2: a multiple of 4"):
        Weigher(None, Variant(), at_once=2)


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
