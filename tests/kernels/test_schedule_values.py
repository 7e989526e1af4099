"""What values of a schedule make of the machine code: no spill, and what each of them promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutedsl_fa3 import Variant, masks
from cutedsl_fa3.audit import audit, disassemble, take_census
from cutedsl_fa3.compile import Compiled, compile_kernel
from cutedsl_fa3.model import check_pipeline
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.sass import Instruction, functions

BASE = {
    64: Schedule(192, 128, 2, 3, "both"),
    128: Schedule(128, 128, 2, 2, "intra"),
    256: Schedule(128, 80, 2, 2, "intra"),
}


def compiled(head_dim: int, **fields) -> tuple[Plan, Compiled]:
    schedule = replace(BASE[head_dim], **fields)
    plan = Plan(Variant(mask=masks.causal), Problem("bf16", head_dim, head_dim), schedule)
    plan.check()
    made = compile_kernel(plan.kernel)
    report = audit(plan.kernel, made)
    assert report.ok, report
    return plan, made


@pytest.mark.compile
@pytest.mark.parametrize("store", ["tma", "direct"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("head_dim", BASE)
def test_persistent_ctas_and_both_ways_of_the_output_keep_what_the_tables_promise(
    head_dim, persistent, store
):
    _, made = compiled(head_dim, persistent=persistent, store=store)
    census = take_census(made.cubin)
    draws = 2  # places: before the last K of a work tile, and where it visits no tile
    assert census.count("ATOMG") == (draws if persistent else 0)
    direct = store == "direct"
    assert (census.count("STSM") == 0) == direct
    assert (census.count("UTMASTG") == 0) == direct
    vectors = 2 * head_dim // 32  # of 16 bytes, of a thread's two rows
    assert census.count("STG.E.128") == (vectors if direct else 0)


@pytest.mark.compile
@pytest.mark.parametrize(("head_dim", "fields"), [(64, {"tile_n": 160}), (128, {})])
def test_p_in_shared_memory_is_stored_in_every_place_of_a_product(head_dim, fields):
    """And leaves registers for tiles that are too wide with P in them."""
    from_registers = take_census(compiled(head_dim, store="direct")[1].cubin)
    plan, made = compiled(head_dim, store="direct", p_from="shared", **fields)
    assert from_registers.count("STSM") == 0
    places = 3 if plan.schedule.intra else 2
    stores = plan.schedule.tile_n // 16  # of 16 rows and columns, a warp
    assert take_census(made.cubin).count("STSM") == places * stores


@pytest.mark.compile
@pytest.mark.parametrize("persistent", [False, True])
def test_ctas_of_a_cluster_copy_their_part_of_k_and_v_into_both(persistent):
    plan = Plan.default(Variant(), Problem("bf16", 128, 128))
    schedule = replace(plan.schedule, cluster=(2, 1), persistent=persistent)
    plan = replace(plan, schedule=schedule)
    plan.check()
    made = compile_kernel(plan.kernel)
    report = audit(plan.kernel, made)
    assert report.ok, report
    census = take_census(made.cubin)
    assert census.count("UTMALDG.4D.MULTICAST") == 4  # halves of 64 columns, of K and of V
    assert census.count("ATOMG") == 0, "clusters take their work tiles in turn"
    assert check_pipeline(plan).ok


def loop_over_full_tiles(made: Compiled) -> list[Instruction]:
    """The last loop with products, in the order of its addresses."""
    found = []
    for function in functions(disassemble(made.cubin)):
        for outer in function.loops:
            for loop in outer.walk():
                code = [i for b in sorted(loop.own) for i in function.blocks[b]]
                if any(i.family == "HGMMA" for i in code):
                    found.append(code)
    return found[-1]


def exponentials_behind_the_last_wait(made: Compiled) -> int:
    code = loop_over_full_tiles(made)
    waits = [at for at, i in enumerate(code) if i.opcode.startswith("WARPGROUP.DEPBAR")]
    assert waits
    return sum(i.opcode.startswith("MUFU.EX2") for i in code[waits[-1] :])


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", [128])
def test_early_exponentials_are_not_left_behind_the_wait_for_the_product_with_v(head_dim):
    found = [
        exponentials_behind_the_last_wait(compiled(head_dim, early=early)[1])
        for early in (0, 2, 4, 6, 8)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0 and found[-1] == 0
