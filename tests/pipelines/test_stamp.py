"""The debug build that notes the clock: its lanes and words, its code, its interleavings."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from handover import Handover

from cutedsl_fa3.layouts import SMEM_CAPACITY
from cutedsl_fa3.pipelines import Barrier, Barriers, Role, Schedule, ScheduleError
from cutedsl_fa3.pipelines.stamp import stamped
from cutedsl_fa3.pipelines.stamps import LEAST_ROOM, MOST_ROOM, NAMED, lanes, places
from cutedsl_fa3.pipelines.watch import watched


def kernel() -> Handover:
    made = Handover(stages=2, cluster=(1, 1))
    made.barriers = Barriers({"written": Barrier(256), "turn": Barrier(256, 2)})
    made.name, made.key_text = "tables", "the tables of a test"
    return made


def test_each_warpgroup_is_a_lane_and_a_role_of_fewer_warps_is_one():
    roles = {"consumer": Role(8, 240), "producer": Role(4, 24), "other": Role(2)}
    assert lanes(roles) == (("consumer 0", 0), ("consumer 1", 4), ("producer", 8), ("other", 12))


def test_places_are_those_that_a_debug_build_notes():
    named = places(kernel())
    assert named[:4] == ("ab empty", "ab full", "scale empty", "scale full")
    barriers = kernel().barriers
    for name, copy in (("written", 0), ("turn", 0), ("turn", 1)):
        assert named[4 + barriers.number(name) + copy] == name
    assert named[4] == "all threads" and named[-len(NAMED) :] == NAMED


def test_the_build_has_the_kernels_tables_and_a_name_and_key_of_its_own():
    shipped = kernel()
    build = stamped(shipped, 256)
    assert isinstance(build, Handover)
    assert (build.tiles, build.rings, build.roles) == (shipped.tiles, shipped.rings, shipped.roles)
    assert build.barriers == shipped.barriers
    assert (build.smem, build.threads) == (shipped.smem, shipped.threads)
    assert build.name == "tables_stamped"
    assert build.key_text.startswith(shipped.key_text) and "256 stamps" in build.key_text
    assert stamped(shipped, 512).key_text != build.key_text
    assert build.stamp_plan.words == 3 * 256 * 2
    assert type(stamped(shipped)) is type(build) and type(watched(shipped)) is not type(build)
    build.check()


@pytest.mark.parametrize("room", [0, LEAST_ROOM - 1, MOST_ROOM + 1, 64.0, True, None])
def test_room_for_too_few_or_too_many_stamps_is_refused(room):
    with pytest.raises(ScheduleError, match=r"room = .*: a whole number from 16 to 1048576"):
        stamped(kernel(), room)


def test_what_is_no_kernel_of_tables_is_refused():
    with pytest.raises(ScheduleError, match="only a WarpSpecialized kernel can be stamped"):
        stamped(object())


# Machine code. Spills, in bytes a thread: where three warpgroups share the registers, a few.


def shipped() -> dict[str, tuple[object, int]]:
    from cutedsl_fa3 import configs
    from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
    from cutedsl_fa3.plans import Plan
    from cutedsl_fa3.problem import Problem

    kinds = configs.kinds()
    turns = Schedule(128, 128, stages=2, consumers=2, overlap="both")
    return {
        "three warpgroups": (Plan.default(kinds["nothing"], Problem("bf16", 64, 64)).kernel, 276),
        "early": (Plan.default(kinds["nothing"], Problem("bf16", 128, 128)).kernel, 0),
        "turns": (Plan(kinds["uniform"], Problem("bf16", 64, 64), turns).kernel, 0),
        "by tile": (Plan.default(kinds["documents"], Problem("bf16", 64, 64)).kernel, 0),
        "gemm": (GemmSm90(Schedule(128, 256, stages=4, overlap="none")), 0),
    }


@pytest.mark.parametrize("name", shipped())
def test_a_stamped_kernel_needs_no_shared_memory_more(name):
    build = stamped(shipped()[name][0])
    build.check()
    assert build.smem.total == shipped()[name][0].smem.total <= SMEM_CAPACITY


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("name", ["three warpgroups", "early", "gemm"])
def test_a_stamped_kernel_reads_the_clock_spills_little_and_serialises_nothing(name):
    from cutedsl_fa3.audit import disassemble
    from cutedsl_fa3.compile import compile_kernel

    kernel, spills = shipped()[name]
    compiled = compile_kernel(stamped(kernel))
    assert compiled.resources.spills <= spills
    assert not compiled.resources.advisories
    sass = disassemble(compiled.cubin)
    # An mbarrier is tried at one place, or at two if what to do in vain stands elsewhere.
    waits = sass.count("SYNCS.PHASECHK.TRANS64.TRYWAIT") + 2 * sass.count("WARPGROUP.DEPBAR")
    assert len(re.findall("SR_CLOCKLO", sass)) >= waits
    assert "SR_GLOBALTIMERLO" in sass


@pytest.mark.compile
@pytest.mark.slow
def test_a_kernel_that_is_not_stamped_has_nothing_of_the_stamps():
    from cutedsl_fa3.audit import disassemble
    from cutedsl_fa3.compile import compile_kernel

    kernel, _ = shipped()["gemm"]
    before = compile_kernel(kernel, name="same")
    compile_kernel(stamped(kernel))  # leaves nothing behind in the kernel or its class
    assert compile_kernel(kernel, name="same").cubin == before.cubin
    assert not re.search("CLOCK|GLOBALTIMER", disassemble(before.cubin))


@pytest.mark.compile
@pytest.mark.slow
def test_the_wait_for_values_stays_where_the_shipped_kernel_has_it():
    """Before the softmax without `early`, with it behind exponentials; see softmax.finished."""
    from cutedsl_fa3 import configs
    from cutedsl_fa3.audit import disassemble
    from cutedsl_fa3.compile import compile_kernel
    from cutedsl_fa3.plans import Plan
    from cutedsl_fa3.problem import Problem

    for early, ahead, builds in ((0, False, 2), (4, True, 1)):
        variant, problem = configs.kinds()["nothing"], Problem("bf16", 64, 64)
        plan = Plan.default(variant, problem)
        plan = replace(plan, schedule=replace(plan.schedule, narrow=False))  # one way through
        if early:
            schedule = Schedule(128, 64, stages=2, consumers=2, overlap="intra", early=early)
            plan = Plan(variant, problem, schedule)
        assert plan.schedule.early == early
        kernel = plan.kernel
        for build in (stamped(kernel), kernel)[:builds]:
            between = _between_waits(disassemble(compile_kernel(build).cubin))
            assert between and all(("MUFU.EX2" in each) == ahead for each in between), build.name


def _between_waits(sass: str) -> list[str]:
    """What stands between a wait that leaves a product running and the next one."""
    return re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", sass, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["early", "by tile", "gemm"])
def test_no_interleaving_of_a_stamped_kernel_hangs_or_races(name):
    from cutedsl_fa3.model import check_pipeline
    from cutedsl_fa3.model.works import of_gemm, of_plan

    kernel, _ = shipped()[name]
    works = of_gemm(kernel) if name == "gemm" else of_plan(kernel.plan, longest=3)
    stamps = (0, 0)  # address and CTA
    verdict = check_pipeline(
        stamped(kernel), [work._replace(args=(*work.args, *stamps)) for work in works]
    )
    assert verdict.ok, str(verdict)
