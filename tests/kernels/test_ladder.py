"""The ladder in tables and machine code: each step changes one thing, and it shows."""

from __future__ import annotations

import importlib.util
import inspect
import re
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from types import SimpleNamespace

import cutlass.cute as cute
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3 import Variant, configs, ladder, masks
from cutedsl_fa3.audit import audit, disassemble, take_census
from cutedsl_fa3.compile import Compiled, compile_kernel
from cutedsl_fa3.errors import LayoutError
from cutedsl_fa3.kernels.sm90.ladder import cp_async
from cutedsl_fa3.kernels.sm90.ladder.cp_async import CpAsync
from cutedsl_fa3.kernels.sm90.ladder.order import FirstRowsFirst
from cutedsl_fa3.kernels.sm90.ladder.tma import TmaSync, TmaWgmma
from cutedsl_fa3.ladder import STEPS, Rung
from cutedsl_fa3.model import check_pipeline
from cutedsl_fa3.model.works import of_plan
from cutedsl_fa3.pipelines import Schedule, ScheduleError
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem

CAUSAL = Variant(mask=masks.causal)
FULL = Variant()

# What each step's code has of the units that it is about: True for some, False for none.
UNITS = {
    #                       LDGSTS  LDSM   HMMA   UTMALDG HGMMA  USETMAXREG
    "cp.async, mma.sync":  (True,  True,  True,  False,  False, False),
    "TMA":                 (False, True,  True,  True,   False, False),
    "WGMMA":               (False, False, False, True,   True,  False),
    "warp specialisation": (False, False, False, True,   True,  False),
    "setmaxnreg":          (False, False, False, True,   True,  True),
}  # fmt: skip
OPCODES = ("LDGSTS", "LDSM", "HMMA", "UTMALDG", "HGMMA", "USETMAXREG")


def step(name: str, variant: Variant, head_dim: int) -> Rung:
    return next(rung for rung in ladder.rungs(variant, head_dim) if rung.name == name)


def plan(head_dim: int = 64, variant: Variant = CAUSAL, **schedule) -> Plan:
    values = {"tile_m": 128, "tile_n": 64, "consumers": 1, "overlap": "none", **schedule}
    return Plan(variant, Problem("bf16", head_dim, head_dim), Schedule(**values))


@cache
def machine_code(name: str, head_dim: int, causal: bool = True) -> Compiled:
    return compile_kernel(step(name, CAUSAL if causal else FULL, head_dim).kernel)


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", ladder.HEAD_DIMS)
@pytest.mark.parametrize("name", UNITS)
def test_a_step_s_code_has_the_units_that_it_is_about_and_no_spill(name, head_dim):
    kernel = step(name, CAUSAL, head_dim).kernel
    compiled = machine_code(name, head_dim)
    resources = compiled.resources
    assert (resources.spills, resources.stack, resources.advisories) == (0, 0, ())
    assert resources.smem_dynamic == kernel.smem.total
    report = audit(kernel, compiled)
    assert report.ok, report
    census = take_census(compiled.cubin)
    assert tuple(census.count(opcode) > 0 for opcode in OPCODES) == UNITS[name]


@pytest.mark.compile
@pytest.mark.parametrize("name", ["cp.async, mma.sync", "TMA"])
def test_full_attention_by_mma_sync_does_not_spill_either(name):
    """Its registers are those that are short: 255 of 255."""
    kernel = step(name, FULL, 128).kernel
    report = audit(kernel, machine_code(name, 128, causal=False))
    assert report.ok, report


@pytest.mark.compile
def test_every_cp_async_copies_sixteen_bytes_or_fills_them_with_zeros():
    """Its last operand, a predicate, chooses; an instruction that is skipped would have a guard.

    ptxas makes this of a source of 16 or 0 bytes and of the operand ignore-src alike; a guard is
    what it makes of a copy that a predicate leaves out.
    """
    code = disassemble(machine_code("cp.async, mma.sync", 64).cubin)
    lines = [line for line in code.splitlines() if "LDGSTS" in line]
    assert lines
    form = re.compile(
        r"/\*[0-9a-f]+\*/\s+LDGSTS\.E\.BYPASS\.128 \[.*\], desc\[.*\]\[.*\], !?U?P\d "
    )
    assert all(form.search(line) for line in lines), lines


@pytest.mark.parametrize("head_dim", ladder.HEAD_DIMS)
def test_each_step_changes_a_kernel_or_values_of_the_schedule_and_nothing_else(head_dim):
    made = ladder.schedules(head_dim)
    for i in range(1, len(STEPS)):
        before, after = asdict(made[i - 1]), asdict(made[i])
        changed = {name for name in after if after[name] != before[name]}
        named = {*STEPS[i].schedule, *STEPS[i].tiles.get(head_dim, {})}
        assert changed <= named
        if STEPS[i].kernel == STEPS[i - 1].kernel:
            assert len(changed) == 1
        else:
            assert not changed - {"tile_m", "tile_n", "consumers"}
    assert len({(s.kernel, *asdict(m).values()) for s, m in zip(STEPS, made, strict=True)}) == len(
        made
    )


@pytest.mark.parametrize("head_dim", ladder.HEAD_DIMS)
def test_every_step_fits_and_has_a_key_of_its_own(head_dim):
    for variant in (FULL, CAUSAL):
        found = ladder.rungs(variant, head_dim)
        assert ladder.fitting(found)[: len(STEPS)] == found[: len(STEPS)]
        kernels = [rung.kernel for rung in found]
        assert len({(kernel.name, kernel.key_text) for kernel in kernels}) == len(kernels)


def test_the_depths_are_one_to_four_slots_and_the_fourth_does_not_fit_at_128():
    for head_dim, refused in ((64, set()), (128, {4})):
        found = ladder.rungs(CAUSAL, head_dim)
        depths = {rung.plan.schedule.stages: rung for rung in found[len(STEPS) - 1 :]}
        assert set(depths) == set(ladder.DEPTHS)
        assert {depth for depth, rung in depths.items() if ladder.refusal(rung)} == refused
        fixed = set()
        for depth in sorted({1, 2, 3, 4} - refused):
            kernel = depths[depth].kernel
            shared = kernel.tiles["o"].bytes * ("o" in kernel.aliases)  # where O has Q's place
            slot = 2 * 128 * head_dim * 2 + 2 * 2 * 8  # K and V of 128 keys, their mbarriers
            fixed.add(kernel.smem.total + shared - depth * slot)
        assert len(fixed) == 1
    assert "bytes are needed and a block has 232448" in ladder.refusal(depths[4])


@pytest.mark.parametrize(
    ("name", "head_dim", "total"),
    [
        # Q once and two slots of K and of V, in 16 bits; mbarriers: two a slot of 8 bytes each.
        ("cp.async, mma.sync", 64, 2 * 64 * (128 + 2 * 2 * 96)),
        ("cp.async, mma.sync", 128, 2 * 128 * (128 + 2 * 2 * 64)),
        ("TMA", 64, 2 * 64 * (128 + 2 * 2 * 96) + 2 * 5 * 8),
        ("WGMMA", 128, 2 * 128 * (128 + 2 * 2 * 128) + 2 * 5 * 8),
    ],
)
def test_shared_memory_is_what_tiles_slots_and_mbarriers_add_up_to(name, head_dim, total):
    assert step(name, CAUSAL, head_dim).kernel.smem.total == total


@pytest.mark.parametrize("variant", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_warps_that_load_and_multiply_alike_cannot_hang_race_or_lose_a_tile(stages, variant):
    made = plan(64, variant, consumers=2, stages=stages)
    verdict = check_pipeline(TmaWgmma(made), of_plan(made))
    assert verdict.ok, verdict
    most = stages + 2
    assert dict(verdict.copied)["k"].startswith("0, 1, 2")
    assert str(most) in dict(verdict.copied)["v"]


def test_a_slot_is_read_by_ldmatrix_when_it_is_full_and_filled_when_it_is_read():
    """With one slot, since where ldmatrix reads within a row of slots is not followed; the rings of
    step 2 are those of step 3, which is checked at every depth."""
    made = plan(64, stages=1)
    verdict = check_pipeline(TmaSync(made), of_plan(made))
    assert verdict.ok, verdict
    verdict = check_pipeline(ReadsTooLate(made), of_plan(made))
    assert "overwritten before read" in {finding.kind for finding in verdict.findings}


class ReadsTooLate(TmaSync):
    """Step 2 with fragments that are read once more after their slot was released."""

    def fragments(self, smem, thread):
        made = super().fragments(smem, thread)
        multiply = made.rows_cols

        def late(acc_s):
            made.k.load(0, 0)
            return multiply(acc_s)

        made.rows_cols = late
        return made


@pytest.mark.parametrize("head_dim", ladder.HEAD_DIMS)
def test_a_single_producer_warp_behind_the_consumers_cannot_hang_or_race(head_dim):
    rung = step("warp specialisation", FULL, head_dim)
    assert rung.kernel.threads == 128 * rung.plan.schedule.consumers + 32
    verdict = check_pipeline(rung.kernel, of_plan(rung.plan))
    assert verdict.ok, verdict


def scored(s, b, h, q, k):
    return s + (k - q)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CpAsync(plan(stages=1)), "stages = 1: copies run a tile ahead"),
        (lambda: TmaWgmma(plan()), "tile_m = 128 with consumers = 1: .* use tile_m=64"),
        (lambda: TmaSync(plan(variant=Variant(scored))), "the ladder takes plain attention"),
        (lambda: TmaSync(plan(variant=configs.kinds()["documents"])), "masks of positions"),
        (lambda: CpAsync(plan(head_dim=72)), "head sizes that fill their tiles"),
    ],
)
def test_what_the_ladder_s_kernels_do_not_do_is_refused(make, message):
    with pytest.raises(ScheduleError, match=message):
        make().check()


def test_a_tile_that_does_not_fit_is_refused_with_its_bytes():
    with pytest.raises(LayoutError, match="bytes are needed and a block has 232448"):
        TmaSync(plan(128, tile_n=128, stages=4)).check()


@pytest.mark.parametrize("head_dim", [96, 256])
def test_other_head_sizes_are_refused(head_dim):
    with pytest.raises(ValueError, match=f"head_dim = {head_dim}: the ladder has 64, 128"):
        ladder.rungs(CAUSAL, head_dim)


@given(m_blocks=st.integers(1, 40), heads=st.integers(1, 20), group=st.integers(1, 8))
def test_first_rows_first_visits_every_tile_once_from_the_first_rows_of_a_group_on(
    m_blocks, heads, group
):
    order = FirstRowsFirst(group)
    tiles = [order.at(index, m_blocks, heads) for index in range(order.tiles(m_blocks, heads))]
    assert sorted(tiles) == [(m, h) for m in range(m_blocks) for h in range(heads)]
    alone = [order.at(i, m_blocks, heads) for i in range(m_blocks)] if group == 1 else []
    assert alone == [(m, 0) for m in range(len(alone))]


def test_tensors_that_attention_refuses_are_refused_before_anything_is_compiled():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"kv_heads|heads"):
        ladder.launched(step("TMA", FULL, 64), q, q[:, :, :1].expand(1, 8, 3, 64), q)


class Groups:
    """cp.async as one thread sees it: groups land in their order, a barrier shows them to all.

    `slots`: what lies in each slot of "k" and "v"; a copy may land at any time after its issue, so
    a slot that is read between the last barrier and a copy into it counts as spoilt.
    """

    def __init__(self, monkeypatch) -> None:
        self.groups: list[list[tuple]] = [[]]
        self.landed: set[tuple] = set()
        self.seen: set[tuple] = set()
        self.slots: dict[tuple, int] = {}
        self.read_since_barrier: set[tuple] = set()
        arch = cute.arch
        monkeypatch.setattr(arch, "cp_async_commit_group", lambda: self.groups.append([]))
        monkeypatch.setattr(arch, "cp_async_wait_group", self.wait)
        monkeypatch.setattr(arch, "sync_threads", self.barrier)

    def wait(self, pending: int) -> None:
        for group in self.groups[: len(self.groups) - 1 - pending]:
            self.landed.update(group)

    def barrier(self) -> None:
        self.seen |= self.landed
        self.read_since_barrier.clear()

    def copy(self, name: str):
        def issue(block: int, stage: int) -> None:
            assert (name, stage) not in self.read_since_barrier, "others may still read this slot"
            self.slots[name, stage] = block
            self.groups[-1].append((name, stage, block))

        return issue

    def read(self, name: str, stage: int, block: int) -> None:
        assert self.slots[name, stage] == block, "another tile lies in this slot"
        assert (name, stage, block) in self.seen, "this copy may not have landed"
        self.read_since_barrier.add((name, stage))


def fresh_class() -> type:
    """CpAsync from a module of its own: the compiler rewrites the methods of a class it traces."""
    name = f"{cp_async.__package__}.untraced"
    spec = importlib.util.spec_from_file_location(name, cp_async.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CpAsync


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("wrong", [None, "waits for one group less", "no barrier"])
def test_cp_async_s_groups_have_landed_and_no_slot_is_filled_that_is_still_read(
    monkeypatch, stages, tiles, wrong
):
    """The bodies of its loop, run as plain Python on numbers."""
    groups = Groups(monkeypatch)
    untraced = fresh_class()
    kernel = untraced(plan(64, FULL, stages=stages))
    if wrong == "waits for one group less":
        kernel.pending += 1
    fetch, body = (inspect.unwrap(f).__get__(kernel) for f in (untraced.fetch, untraced.step))
    monkeypatch.setattr(untraced, "fetch", lambda self, *args: fetch(*args))
    monkeypatch.setattr(untraced, "modify", lambda self, *args: None)
    runs = SimpleNamespace(n_total=tiles, n_block=lambda j: 100 + j)
    w, softmax = SimpleNamespace(runs=runs), SimpleNamespace(step=id, rescale=id)
    now = SimpleNamespace(j=0)
    f = SimpleNamespace(
        rows_cols=id,
        round_p=id,
        output=None,
        multiply_qk=lambda slot: groups.read("k", slot.index, 100 + now.j),
        multiply_pv=lambda slot: groups.read("v", slot.index, 100 + now.j),
    )
    copies = groups.copy("k"), groups.copy("v")
    if wrong == "no barrier":
        monkeypatch.setattr(cute.arch, "sync_threads", lambda: None)
    with pytest.raises(AssertionError) if wrong and tiles else nullcontext():
        for ahead in range(stages - 1):
            for copy in copies:
                fetch(w, copy, ahead)
        for now.j in range(tiles):
            body(w, f, softmax, copies, now.j, False)
