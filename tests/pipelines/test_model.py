"""The pipeline model on what ships and on the small kernels; its reduction against all orders."""

from __future__ import annotations

import random
from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from faults import arguments
from faulty_shipped import KeysInThreads
from hanging import FAULTS as HANGING
from hanging import Relay
from mutations import Programs, mutations, projected
from products import Products
from small_kernel import EDGE, TileGemm
from test_word_ring import Telling
from typer.testing import CliRunner

from cutedsl_fa3 import configs, masks
from cutedsl_fa3.cli import app
from cutedsl_fa3.gemm import DEFAULT
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.kernels.sm90.operands import Fragments
from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.model import check_pipeline
from cutedsl_fa3.model.check import Outcome, replay
from cutedsl_fa3.model.explore import TooMany, explore
from cutedsl_fa3.model.works import Work, of_plan
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.variant import Elementwise, Variant

ONE_OF_EACH = (0, 4, 8)  # the producer's warp that copies, and one of each warpgroup of consumers
EVERY = 23  # of the mutations, in CI
MOST_STATES = 20_000


def of_shape(plan: Plan) -> tuple:
    """What of a plan its roles' barriers depend on; the sizes of tiles do not count."""
    kernel, s = plan.kernel, plan.schedule
    return (
        *(s.overlap, s.consumers, s.stages),
        *(plan.by_tile, kernel.ever_full, kernel.repairs, plan.variant.has_lse),
        *(kernel.narrow, kernel.second_halves),
        *(str(kernel.rings), str(kernel.barriers), str(kernel.aliases)),
    )


EACH = [plan for plan in configs.every() if plan.problem.dtype == "bf16"]
SHAPES = {of_shape(plan): plan for plan in configs.configs() if plan.problem.dtype == "bf16"}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("plan", SHAPES.values(), ids=configs.label)
def test_no_shipped_forward_can_hang_race_or_lose_a_tile(plan: Plan) -> None:
    verdict = check_pipeline(plan)
    assert verdict.ok, verdict
    visited, turn = {o.fills.get("k", 0) for o in verdict.outcomes}, plan.schedule.stages + 2
    # There are as many queries as keys, and one CTA; or rows that see few keys each.
    if plan.kernel.second_halves or (plan.by_tile and plan.schedule.persistent):
        assert visited >= {0, 1} and max(visited) > turn  # copies the keys of all work tiles
    else:
        assert visited >= set(range(turn + 1))


@pytest.mark.parametrize(
    ("kind", "pack"), [("nothing", 16), ("gated", 4), ("documents", 2), ("light", 8)]
)
def test_tiles_of_several_heads_hang_race_and_lose_no_more(kind: str, pack: int) -> None:
    plan = Plan.default(configs.kinds()[kind], Problem("bf16", 64, 64))
    plan = replace(plan, schedule=replace(plan.schedule, pack=pack))
    verdict = check_pipeline(plan)
    assert verdict.ok, verdict
    copied = {name: {o.fills.get(name, 0) for o in verdict.outcomes} for name in ("q", "k")}
    assert max(copied["q"]) >= 3 and max(copied["k"]) > plan.schedule.stages + 2


def test_heads_in_a_tile_whose_reads_end_apart_leave_no_warp_in_another_loop() -> None:
    """Where the table ends for one head of a tile it does not for the next: all reads are clamped.

    The warps of 64 rows, which see different heads, multiply together: they must not disagree.
    """
    flat = torch.zeros(8 * 129)
    variant = Variant(lambda s, b, h, q, k: s + flat[h * 129 + k - q + 64], masks.causal)
    plan = Plan.default(variant, Problem("bf16", 128, 128))
    verdict = check_pipeline(replace(plan, schedule=replace(plan.schedule, pack=64)))
    assert verdict.ok, str(verdict)


def test_types_of_one_width_have_the_same_roles() -> None:
    """So the model looks at one of them."""

    def looks(plan: Plan) -> tuple:
        sizes = tuple(tile.bytes for tile in plan.kernel.tiles.values())
        of_heads = plan.problem.head_dim, plan.problem.head_dim_v
        return (*of_shape(plan), configs.kind(plan), plan.schedule, of_heads, sizes)

    assert {looks(plan) for plan in configs.every()} == {looks(plan) for plan in EACH}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [plan for plan in EACH if plan not in SHAPES.values()], ids=configs.label
)
def test_no_other_configuration_can_hang_race_or_lose_a_tile(plan: Plan) -> None:
    verdict = check_pipeline(plan)
    assert verdict.ok, verdict


@pytest.mark.parametrize("overlap", ["none", "pingpong", "intra", "both"])
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_overlap_holds_at_any_depth(stages: int, overlap: str) -> None:
    schedule = Schedule(128, 64, stages=stages, consumers=2, overlap=overlap)
    verdict = check_pipeline(Plan(Variant(mask=masks.causal), Problem("bf16", 64, 64), schedule))
    assert verdict.ok, verdict


# One persistent CTA, three work tiles.


def packed(b, h, q, k):
    return (DOCUMENTS[q] == DOCUMENTS[k]) & (k <= q)


DOCUMENTS = torch.arange(64) // 8
CAUSAL, PACKED = Variant(mask=masks.causal), Variant(mask=packed)
SIGMOID = Variant(mask=masks.causal, softmax=Elementwise(torch.sigmoid))
# Variant, head sizes, schedule, whether O takes the place of Q. In each group the overlaps and
# numbers of warpgroups of the table; the sizes of tiles do not count, but for O's place.
PERSISTENT = {
    "none": (CAUSAL, (64, 64), Schedule(64, 64, 1, 1, "none"), False),
    "pingpong": (CAUSAL, (64, 64), Schedule(128, 64, 1, 2, "pingpong"), False),
    "intra": (CAUSAL, (64, 64), Schedule(128, 64, 2, 2, "intra", early=8), False),
    "both": (CAUSAL, (64, 64), Schedule(192, 128, 2, 3, "both"), False),
    "a stage": (CAUSAL, (64, 64), Schedule(192, 128, 1, 3, "both"), False),
    "weights": (SIGMOID, (64, 64), Schedule(128, 128, 2, 2, "intra"), False),
    "o over q": (CAUSAL, (192, 128), Schedule(128, 128, 2, 2, "intra"), True),
    "o over q, a stage": (CAUSAL, (256, 256), Schedule(128, 144, 1, 2, "both"), True),
    "by tile": (PACKED, (64, 64), Schedule(128, 128, 2, 2, "intra"), False),
    "by tile, o over q": (PACKED, (192, 128), Schedule(128, 128, 2, 2, "both"), True),
}


def persistent(name: str, store: str, **fields) -> Plan:
    variant, dims, schedule, _ = PERSISTENT[name]
    schedule = replace(schedule, persistent=True, store=store, **fields)
    return Plan(variant, Problem("bf16", *dims), schedule)


def three_work_tiles(plan: Plan, ctas: int = 1) -> Work:
    """As many queries as keys, the longest work tile first, for so many CTAs."""
    *_, work = of_plan(plan, 0)
    given = ctas if plan.schedule.persistent else None
    return Work(work.what, (*work.args[:9], given, work.args[10]))


@pytest.mark.parametrize("overlap", ["none", "both"])
def test_p_through_shared_memory_is_read_before_the_next_is_written(overlap: str) -> None:
    schedule = Schedule(128, 64, stages=2, overlap=overlap, p_from="shared")
    verdict = check_pipeline(Plan(Variant(), Problem("bf16", 64, 64), schedule))
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("missing", ["read", "written"])
def test_p_in_shared_memory_without_one_of_its_barriers_is_found(monkeypatch, missing) -> None:
    def store_p(self):
        barrier = self.barriers["p", self.group]
        if missing != "read":
            barrier.arrive_and_wait()
        strip, thread = self.p_strip, self.thread % wgmma.WARPGROUP
        wgmma.to_smem(self.p, strip, self.qk_strip, thread)
        cute.arch.fence_view_async_shared()
        if missing != "written":
            barrier.arrive_and_wait()

    monkeypatch.setattr(Fragments, "store_p", store_p)
    schedule = Schedule(128, 64, stages=2, overlap="none", p_from="shared")
    verdict = check_pipeline(Plan(Variant(), Problem("bf16", 64, 64), schedule))
    kinds = {finding.kind for finding in verdict.findings}
    assert kinds & {"read before full", "overwritten before read"} and "tile 'p'" in str(verdict)


@pytest.mark.parametrize("store", ["tma", "direct"])
@pytest.mark.parametrize("name", PERSISTENT)
def test_a_cta_that_draws_three_work_tiles_cannot_hang_race_or_lose_a_tile(name, store) -> None:
    plan = persistent(name, store)
    plan.check()
    assert ("o" in plan.kernel.aliases) == (PERSISTENT[name][3] and store == "tma")
    work = three_work_tiles(plan)
    verdict = check_pipeline(plan, [*of_plan(plan, 1), work])
    assert verdict.ok, verdict
    last = verdict.outcomes[-1]
    assert last.fills["q"] == 3 and last.fills["k"] == last.fills["v"]
    assert work.args[8].tolist() == [0]


@pytest.mark.parametrize("ctas", [2, 3, 132])
def test_work_tiles_are_computed_once_by_whichever_cta(ctas) -> None:
    plan = persistent("intra", "direct")
    work = three_work_tiles(plan, ctas)
    verdict = check_pipeline(plan, [work])
    assert verdict.ok, verdict
    found = [outcome.fills["q"] for outcome in verdict.outcomes]
    assert found == ([2, 1] if ctas == 2 else [1, 1, 1])
    assert work.args[8].tolist() == [0]


@pytest.mark.parametrize("store", ["tma", "direct"])
@pytest.mark.parametrize("overlap", ["intra", "both"])
def test_a_work_tile_that_sees_nothing_loads_no_q_and_the_next_one_is_right(overlap, store) -> None:
    """The second of three: nobody fills or empties Q's slot for it."""
    mask = masks.and_masks(masks.causal, lambda b, h, q, k: (q < 128) | (q >= 256))
    schedule = Schedule(128, 64, 1, 2, overlap, persistent=True, store=store)
    plan = Plan(Variant(mask=mask), Problem("bf16", 64, 64), schedule)
    assert not plan.by_tile
    verdict = check_pipeline(plan, [three_work_tiles(plan)])
    assert verdict.ok, verdict
    assert {outcome.fills["q"] for outcome in verdict.outcomes} == {2}
    assert {outcome.fills["k"] for outcome in verdict.outcomes} == {6 + 2}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("overlap", ["none", "pingpong", "intra", "both"])
def test_a_warpgroup_whose_rows_see_nothing_takes_its_turns_and_releases_what_it_skips(
    overlap, again
) -> None:
    """Rows past the sequence: the second warpgroup passes over every tile."""
    schedule = Schedule(128, 64, 2, 2, overlap, persistent=again)
    plan = Plan(CAUSAL, Problem("bf16", 64, 64), schedule)
    work = three_work_tiles(plan)
    short = [t[:, :40] if i in (0, 3) else t for i, t in enumerate(work.args[:4])]
    lse = work.args[4][..., :40]
    verdict = check_pipeline(plan, [Work("40 queries", (*short, lse, *work.args[5:]))])
    assert verdict.ok, verdict
    assert verdict.outcomes[0].fills["k"] == 384 // 64


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_gemm_can_hang_race_or_lose_a_tile(stages: int, cluster: tuple[int, int]) -> None:
    schedule = Schedule(128, 128, stages=stages, consumers=2, overlap="none", cluster=cluster)
    verdict = check_pipeline(GemmSm90(schedule))
    assert verdict.ok, verdict
    assert verdict.outcomes[-1].what.startswith(f"{stages + 2} tiles along k")


def test_the_default_gemm_holds() -> None:
    assert check_pipeline(GemmSm90(DEFAULT)).ok


def test_a_kernel_without_tables_is_followed_by_addresses() -> None:
    tile = meta(EDGE, EDGE)
    works = [(tile, tile, meta(EDGE, EDGE, dtype=torch.float32), 1.0)]
    assert check_pipeline(TileGemm(), works).ok
    verdict = check_pipeline(TileGemm(wait=False), works)
    assert "registers in use: warp 0 reads the accumulator" in str(verdict)


@pytest.mark.parametrize("words", [1, 3])
@pytest.mark.parametrize("stages", [1, 3])
def test_words_that_one_role_tells_another_are_read_before_they_are_overwritten(
    stages, words
) -> None:
    said, heard = torch.arange(5, 5 + stages + 2), torch.zeros(8, 2, dtype=torch.int32)
    verdict = check_pipeline(Telling(stages, 2, words), [(said.int(), heard)])
    assert verdict.ok, verdict
    of_each = sum((n + 1) * (said + n) for n in range(words))  # what the model's warps have heard
    places = torch.arange(1, len(said) + 1)
    assert heard.tolist() == [[of_each.sum(), (of_each * places).sum()]] * 8


def relay_works(kernel: Relay, tiles: int = 5) -> list[tuple]:
    rows = 128 * tiles * 4
    return [(meta(rows // kernel.cluster[0], 64), meta(rows, 64), tiles)]


@pytest.mark.parametrize("fault", [name for name in HANGING if name != "an endless loop"])
def test_what_hangs_on_a_gpu_is_found_without_one(fault: str) -> None:
    kernel = Relay(fault)
    verdict = check_pipeline(kernel, relay_works(kernel))
    assert not verdict.ok
    assert "deadlock" in {finding.kind for finding in verdict.findings}


def test_the_kernel_that_hangs_at_choice_holds_without_a_fault() -> None:
    verdict = check_pipeline(Relay(), relay_works(Relay()))
    assert verdict.ok, verdict


def test_a_loop_without_a_barrier_is_taken_to_end() -> None:
    kernel = Relay("an endless loop")
    assert check_pipeline(kernel, relay_works(kernel)).ok


def test_a_user_s_kernel_needs_arguments() -> None:
    with pytest.raises(TypeError, match="give the arguments of its launches"):
        check_pipeline(Products())


def test_the_command_says_what_was_checked_and_fails_on_a_fault(monkeypatch) -> None:
    runner, options = CliRunner(), ["model", "--head-dim", "64", "--variant", "full"]
    done = runner.invoke(app, options)
    assert done.exit_code == 0, done.output
    assert "no interleaving hangs, races or loses a tile" in done.output
    assert "'k' copied 0, 1, 2, 3, 4" in done.output
    monkeypatch.setattr(Plan, "kernel", property(KeysInThreads))
    done = runner.invoke(app, options)
    assert done.exit_code == 1
    assert "deadlock" in done.output and "ring 'k' empty, stage 0" in done.output


# The reduction.


def small_programs(works: int, k_tiles: int) -> Programs:
    """The steps of three warps of `Products`, with barriers for so many."""
    verdict = check_pipeline(Products(2), [arguments("meta", works, k_tiles)])
    return projected(verdict.outcomes[0].programs, ONE_OF_EACH)


def judged(programs: Programs) -> Outcome:
    return replay(Products(2), programs, ONE_OF_EACH, 96)


@pytest.mark.parametrize("works, k_tiles", [(1, 0), (1, 1), (1, 4), (2, 1), (3, 1)])
def test_where_the_model_finds_nothing_every_interleaving_ends_alike(works, k_tiles) -> None:
    programs = small_programs(works, k_tiles)
    assert not judged(programs).findings
    explored = explore(programs)
    assert explored.ok and explored.results
    assert explored.states > 100


def every_mutation(programs: Programs) -> list[tuple[str, Programs]]:
    """Of the producer, of one consumer, of both alike."""
    roles = {"producer": (0,), "consumer 0": (1,), "consumers": (1, 2)}
    return [
        (f"{role}: {name}", mutated)
        for role, of in roles.items()
        for name, mutated in mutations(programs, of)
    ]


def held_against_all_orders(chosen: list[tuple[str, Programs]], plain: Outcome) -> list[str]:
    """How the model's verdicts on mutations compare with a walk of all interleavings."""
    seen = []
    for name, mutated in chosen:
        outcome = judged(mutated)
        try:
            explored = explore(mutated, MOST_STATES)
        except TooMany:
            continue
        if outcome.findings:
            seen.append("rejected")
            continue
        assert explored.ok, f"{name}: nothing found, but {explored}"
        same = (outcome.reads, outcome.fills) == (plain.reads, plain.fills)
        seen.append("equivalent" if same else "another result")
    return seen


def test_no_mutation_passes_that_some_interleaving_breaks() -> None:
    programs = small_programs(2, 3)
    chosen = random.Random(7).sample(every_mutation(programs), 25)
    seen = held_against_all_orders(chosen, judged(programs))
    assert {"rejected", "equivalent"} <= set(seen)


@pytest.mark.slow
def test_none_of_the_mutations_passes_that_some_interleaving_breaks() -> None:
    programs = small_programs(2, 3)
    chosen = random.Random(1).sample(every_mutation(programs), 200)
    seen = held_against_all_orders(chosen, judged(programs))
    assert len(seen) > 150


def test_waits_arrivals_copies_and_bytes_cannot_be_left_out_of_a_shipped_kernel() -> None:
    plan = SHAPES[next(key for key in SHAPES if key[0] == "both")]
    outcomes = check_pipeline(plan).outcomes
    outcome = next(o for o in outcomes if o.fills.get("k") == plan.schedule.stages + 2)
    programs, kernel = outcome.programs, plan.kernel
    warps, threads = range(len(programs)), 32 * len(programs)
    plain = replay(kernel, programs, warps, threads)
    assert not plain.findings
    first = {"producer": [0], "consumer": list(range(4, len(programs)))}
    passed, checked = [], 0
    for role, of in first.items():
        for name, mutated in list(mutations(programs, of))[::EVERY]:
            checked += 1
            again = replay(kernel, mutated, warps, threads)
            if not again.findings and (again.reads, again.fills) == (plain.reads, plain.fills):
                passed.append(f"{role}: {name}")
    assert checked > 20
    # An arrival elsewhere may be one of the last, which nobody waits for.
    never = ("drop copy", "more bytes", "fewer bytes", "phase wait")
    assert not [name for name in passed if name.split(": ")[1].startswith(never)]
    assert not [name for name in passed if name.startswith("consumer: drop wait")]
    assert len(passed) < checked / 2
