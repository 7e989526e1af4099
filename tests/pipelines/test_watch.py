"""Watched kernels: words and their meaning, the cycle of waits, machine code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from handover import Handover
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.layouts import SMEM_CAPACITY
from cutedsl_fa3.pipelines import Barrier, Barriers, Ring, Role, ScheduleError, WordRing, waits
from cutedsl_fa3.pipelines.deadlock import cycle, explain, groups
from cutedsl_fa3.pipelines.waits import (
    ENDED,
    HEADER,
    RUNS,
    SLOT_HEADER,
    Mbarrier,
    ReportPlan,
    decode,
    wait_code,
)
from cutedsl_fa3.pipelines.watch import watched


class Tables(Handover):
    """Two rings of tiles, one of words, barriers with copies; one CTA a cluster."""

    def __init__(self, cluster: tuple[int, int] = (1, 1)) -> None:
        super().__init__(stages=2, cluster=cluster)
        self.rings["words"] = WordRing(stages=3)
        self.barriers = Barriers({"written": Barrier(256), "turn": Barrier(256, 2)})


EMPTY, FULL = 0, 1
NOW = -5  # the clock's words wrap


def mbarrier(arrivals: int, missing: int, missing_bytes: int = 0) -> tuple[int, int]:
    """The words of an mbarrier, low first, as signed as the report has them."""
    raw = ((1 << 20) - arrivals) << 1 | missing_bytes << 21 | ((1 << 20) - missing) << 43
    return tuple(word - (word >> 31 << 32) for word in (raw & 0xFFFFFFFF, raw >> 32))


def report(kernel: Handover, *ctas: tuple) -> list[int]:
    """The words of a report: of each CTA its place, where each warp is, its mbarriers."""
    plan = ReportPlan.of(kernel)
    words = [1, *[0] * (waits.HEADER - 1)]
    for block, at, states in ctas:
        slot = [waits.REPORTED, *block, 0, 17, NOW, 3]
        for warp in range(plan.warps):
            slot += [at.get(warp, ENDED), NOW - waits.ticks(2.5)]
        for name, ring in kernel.rings.items():
            for kind in ("full", "empty"):
                for stage in range(ring.stages):
                    slot += mbarrier(*states.get((name, kind, stage), (1, 1)))
            slot += [0] * ((ring.bytes - ring.barrier_bytes) // 4)
        words += slot
    return words + [0] * (plan.total - len(words))


def rings(kernel: Handover, name: str) -> int:
    return 2 * list(kernel.rings).index(name)


CROSSED = {
    0: wait_code(EMPTY, 1, 0),
    **dict.fromkeys(range(4, 12), wait_code(2 + FULL, 0, 1)),
}


@given(st.data())
def test_a_wait_is_read_as_it_was_written(data):
    kernel = Tables()
    name = data.draw(st.sampled_from(list(kernel.rings)))
    stage = data.draw(st.integers(0, kernel.rings[name].stages - 1))
    phase = data.draw(st.integers(0, 1))
    kind = data.draw(st.sampled_from(["empty", "full"]))
    at = wait_code(rings(kernel, name) + (kind == "full"), stage, phase)
    (cta,) = decode(kernel, report(kernel, ((3, 2, 1), {5: at}, {})))
    found = cta.waits[5]
    assert (found.kind, found.name, found.stage, found.phase) == (kind, name, stage, phase)
    assert (found.role, found.warp) == ("consumer", 5)
    assert found.seconds == pytest.approx(2.5, abs=1e-5)
    assert (cta.block, cta.multiprocessor, cta.watcher) == ((3, 2, 1), 17, 3)
    assert {wait.kind for wait in cta.waits if wait.warp != 5} == {"ended"}


@pytest.mark.parametrize("copy", [0, 1])
def test_a_named_barrier_is_read_by_name_and_copy(copy):
    kernel = Tables()
    number = kernel.barriers.number("turn") + copy
    at = {6: wait_code(2 * len(kernel.rings) + number), 7: RUNS}
    (cta,) = decode(kernel, report(kernel, ((0, 0, 0), at, {})))
    assert (cta.waits[6].kind, cta.waits[6].name) == ("barrier", "turn")
    assert cta.waits[7].kind == "runs"
    said = explain(kernel, [cta])
    assert (
        f"consumer warp 6 waits at named barrier turn copy {copy} (hardware barrier {number}): of "
        "256 threads that it needs, 32 wait there" in said
    )
    assert "consumer warp 7 runs, at no wait since 2.5 s" in said


@given(st.integers(1, 1000), st.data())
def test_an_mbarrier_says_what_is_missing(arrivals, data):
    missing = data.draw(st.integers(0, arrivals))
    missing_bytes = data.draw(st.integers(0, (1 << 20) - 1))
    low, high = mbarrier(arrivals, missing, missing_bytes)
    raw = (high % (1 << 32)) << 32 | low % (1 << 32)
    assert Mbarrier.of(raw) == Mbarrier(arrivals, missing, missing_bytes)


def test_words_that_an_h200_reported_are_read_as_what_its_kernel_lacked():
    """A kibibyte more was announced than copied, and no consumer had released its slot."""
    assert Mbarrier.of(0x000003FF_801FFFFE) == Mbarrier(1, 0, 1024)
    assert Mbarrier.of(0x7FFFC000_001FFFF0) == Mbarrier(8, 8, 0)


def test_zeros_are_no_state_of_an_mbarrier_and_nothing_is_concluded_from_them():
    kernel = Tables()
    words = report(kernel, ((0, 0, 0), dict.fromkeys(range(4, 12), wait_code(FULL, 1, 0)), {}))
    slot = HEADER + SLOT_HEADER + 2 * ReportPlan.of(kernel).warps
    words[slot : HEADER + ReportPlan.of(kernel).slot] = [0] * ReportPlan.of(kernel).mbarriers
    said = explain(kernel, decode(kernel, words))
    assert (
        "expects 24,576 bytes, its mbarrier was read as zeros, so what is missing is not known"
        in said
    )


def test_mbarriers_are_found_behind_the_words_of_a_word_ring():
    kernel = Tables()
    kernel.rings = {"words": WordRing(stages=3), **kernel.rings, "last": Ring(("a",), 1)}
    states = {("words", "empty", 2): (8, 5), ("last", "full", 0): (1, 0, 4096)}
    (cta,) = decode(kernel, report(kernel, ((0, 0, 0), {}, states)))
    assert cta.mbarriers["words", "empty", 2] == Mbarrier(8, 5, 0)
    assert cta.mbarriers["last", "full", 0] == Mbarrier(1, 0, 4096)


def test_a_cycle_is_told_in_the_words_of_the_tables():
    kernel = Tables()
    states = {("ab", "empty", 1): (8, 4), ("scale", "full", 0): (1, 1)}
    ctas = decode(kernel, report(kernel, ((0, 0, 0), CROSSED, states)))
    assert explain(kernel, ctas).splitlines() == [
        "CTA (0, 0, 0):",
        "  producer warp 0 waits for ring ab slot 1 to become empty (phase 0): 4 of 8 arrivals are "
        "missing, from consumer warps 4-11",
        "  consumer warps 4-11 wait for ring scale slot 0 to become full (phase 1): expects 128 "
        "bytes, 1 of 1 arrivals are missing, from producer warp 0",
        "  producer warps 1-3 have ended",
        "the cycle: producer warp 0 -> consumer warps 4-11 -> producer warp 0",
    ]


def test_bytes_that_have_not_come_are_counted():
    kernel = Tables()
    at = dict.fromkeys(range(4, 12), wait_code(FULL, 1, 0))
    (cta,) = decode(kernel, report(kernel, ((0, 0, 0), at, {("ab", "full", 1): (1, 0, 8192)})))
    said = explain(kernel, [cta])
    assert (
        "consumer warps 4-11 wait for ring ab slot 1 to become full (phase 0): expects 24,576 "
        "bytes, 8,192 bytes are missing, and every producer warp has ended" in said
    )
    assert "no cycle" in said


def test_warps_of_one_role_that_wait_for_different_things_are_told_apart():
    kernel = Tables()
    at = {4: wait_code(FULL, 0, 0), 6: wait_code(FULL, 0, 0), 7: wait_code(FULL, 1, 0)}
    ctas = decode(kernel, report(kernel, ((0, 0, 0), at, {})))
    waiting = [str(g) for g in groups(ctas) if g.at.kind == "full"]
    assert waiting == ["consumer warps 4, 6", "consumer warp 7"]


def test_a_cycle_through_two_ctas_of_a_cluster_is_found():
    kernel = Tables(cluster=(2, 1))
    producer_waits = {0: wait_code(EMPTY, 0, 1)}
    consumers_wait = dict.fromkeys(range(4, 12), wait_code(FULL, 1, 0))
    words = report(
        kernel,
        ((2, 0, 0), producer_waits, {("ab", "empty", 0): (16, 8)}),
        ((3, 0, 0), consumers_wait, {}),
        ((4, 0, 0), producer_waits, {}),
    )
    ctas = decode(kernel, words)
    said = explain(kernel, ctas)
    assert (
        "the cycle: producer warp 0 of CTA (2, 0, 0) -> consumer warps 4-11 of CTA (3, 0, 0) -> "
        "producer warp 0 of CTA (2, 0, 0)" in said
    )
    assert "1 more CTAs reported, 1 of them the waits of CTA (2, 0, 0)" in said


@given(st.data())
def test_every_cycle_is_one_of_waits(data):
    kernel = Tables()
    places = st.builds(wait_code, st.integers(0, 5), st.just(0), st.integers(0, 1))
    barriers = st.builds(wait_code, st.integers(7, 9))
    each = st.one_of(st.sampled_from([RUNS, ENDED]), places, barriers)
    at = data.draw(st.fixed_dictionaries({warp: each for warp in range(12)}))
    ctas = decode(kernel, report(kernel, ((0, 0, 0), at, {})))
    among = groups(ctas)
    found = cycle(kernel, among)
    assert all(group.at.kind in ("empty", "full", "barrier") for group in found)
    assert len({id(group) for group in found}) == len(found)
    said = explain(kernel, ctas)
    assert sum(len(group.warps) for group in among) == 12
    assert all(str(group) in said for group in among)


def test_the_debug_build_is_another_kernel_with_the_same_tables():
    kernel = named(Tables())
    build = watched(kernel)
    assert isinstance(build, Tables)
    assert (build.tiles, build.rings, build.roles) == (kernel.tiles, kernel.rings, kernel.roles)
    assert build.barriers == kernel.barriers
    assert build.name == "tables_watched"
    assert build.key_text.startswith(kernel.key_text) and "debug build" in build.key_text
    assert type(watched(kernel)) is type(build) and watched(build) is build
    build.check()


def named(kernel: Handover) -> Handover:
    kernel.name, kernel.key_text = "tables", "the tables of a test"
    return kernel


def test_the_words_lie_behind_everything_else():
    kernel = Tables()
    plan = watched(kernel).smem
    assert plan.offset("waits") >= kernel.smem.total and plan.offset("waits") % 8 == 0
    assert plan.total == plan.offset("waits") + 4 * (2 * 12 + 1)
    assert all(plan.offset(name) == kernel.smem.offset(name) for name in kernel.tiles)


def test_roles_that_move_registers_get_no_warp_more():
    assert watched(Tables()).threads == Tables().threads == 384


def test_where_no_role_moves_registers_a_warp_more_watches():
    kernel = Tables()
    kernel.roles = {name: replace(role, registers=None) for name, role in kernel.roles.items()}
    assert watched(kernel).threads == 384 + 32
    kernel.roles["producer"] = Role(4, 40)
    assert watched(kernel).threads == 384


def test_what_is_no_kernel_of_tables_is_refused():
    with pytest.raises(ScheduleError, match="only a WarpSpecialized kernel can be watched"):
        watched(object())


# Machine code.


def shipped() -> dict[str, object]:
    from cutedsl_fa3 import configs
    from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
    from cutedsl_fa3.kernels.sm100.gemm import GemmSm100
    from cutedsl_fa3.pipelines import Schedule
    from cutedsl_fa3.plans import Plan
    from cutedsl_fa3.problem import Problem

    kinds = configs.kinds()
    turns = Schedule(128, 128, stages=2, consumers=2, overlap="both")
    several = Schedule(128, 128, overlap="intra", persistent=True, pack=16)
    return {
        "heads in a tile": Plan(kinds["light"], Problem("bf16", 128, 128), several).kernel,
        "largest": Plan.default(kinds["nothing"], Problem("bf16", 256, 256)).kernel,
        "by tile": Plan.default(kinds["documents"], Problem("bf16", 64, 64)).kernel,
        "turns": Plan(kinds["uniform"], Problem("bf16", 64, 64), turns).kernel,
        "gemm": GemmSm90(Schedule(128, 256, stages=4, overlap="none", cluster=(2, 1))),
        "sm100": GemmSm100(Schedule(128, 128, stages=3, consumers=1, overlap="none")),
    }


@pytest.mark.parametrize("name", shipped())
def test_every_kind_of_kernel_leaves_room_for_the_words(name):
    kernel = shipped()[name]
    watched(kernel).check()
    assert watched(kernel).smem.total <= SMEM_CAPACITY


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("name", shipped())
def test_a_watched_kernel_compiles_without_spills_and_can_report_and_trap(name):
    from cutedsl_fa3.audit import disassemble
    from cutedsl_fa3.compile import compile_kernel

    compiled = compile_kernel(watched(shipped()[name]))
    assert compiled.resources.spills == 0
    sass = disassemble(compiled.cubin)
    assert "BPT.TRAP" in sass
    assert "NANOSLEEP" in sass and "MEMBAR.ALL.SYS" in sass
    assert not [each for each in compiled.resources.advisories if "setmaxnreg" in each]


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("name", ["by tile", "turns", "gemm"])
def test_a_kernel_that_is_not_watched_has_nothing_of_the_watch(name):
    from cutedsl_fa3.audit import disassemble
    from cutedsl_fa3.compile import compile_kernel

    kernel = shipped()[name]
    before = compile_kernel(kernel, name="same")
    debug = compile_kernel(watched(kernel))  # leaves nothing behind in the kernel or its class
    after = compile_kernel(kernel, name="same")
    assert after.cubin == before.cubin
    sass = disassemble(before.cubin)
    assert not re.search(r"GLOBALTIMER|BPT\.TRAP|MEMBAR\.ALL\.SYS", sass)
    moves = sass.count("USETMAXREG")
    assert (moves > 0) == any(role.registers is not None for role in kernel.roles.values())
    assert disassemble(debug.cubin).count("USETMAXREG") == moves
