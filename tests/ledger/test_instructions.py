"""Instructions predicted from a graph are those of the machine code, entry by entry.

The loops of every shipped kernel are held by contracts (tests/contracts/sass.json); what these do
not count, and variants that are not shipped, is compiled here.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cutedsl_fa3 import Variant, configs, contract, masks, scores
from cutedsl_fa3.audit import disassemble
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.ledger.instructions import columns, score_instructions
from cutedsl_fa3.ledger.rates import ALONE, ALSO, FAMILIES, OPS, SHARED
from cutedsl_fa3.ledger.tile import instructions
from cutedsl_fa3.named import Lengths, named
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.sass import functions
from cutedsl_fa3.variant.ops import OPS as LANGUAGE
from cutedsl_fa3.variant.shared import MOST

LOOPS = {False: "full tiles", True: "masked tiles"}
# Instructions a tile beside what a table can say: of the loop, of where the tile lies.
BESIDE, BESIDE_INTEGERS = 8, 32
WHICH_HALF = 30  # that ask whether a tile is multiplied whole
INTEGERS = ("IMAD", "VIADD", "SEL", "SHF", "LEA", "LOP3")


def predicted(plan: Plan, masked: bool) -> dict[str, Counter]:
    """Instructions of a tile by family, each with the steps that they are of.

    The loop over tiles with a mask has two ways where halves of them may be seen alone.
    """
    found: dict[str, Counter] = {}
    ways = [plan]
    if masked and plan.kernel.second_halves:
        s = plan.schedule
        ways.append(replace(plan, schedule=replace(s, tile_n=s.tile_n // 2, narrow=False)))
        found["bookkeeping"] = Counter({"which half is seen": WHICH_HALF})
    for way in ways:
        for step, counts in instructions(way, masked).items():
            for family, count in counts.items():
                found.setdefault(family, Counter())[step] += round(count)
    return found


def families(opcodes: dict[str, int]) -> Counter:
    """Instructions by family, those that ptxas writes in several ways under one name."""
    found: Counter = Counter()
    for opcode, count in opcodes.items():
        family = opcode.partition(".")[0]
        names = [name for name, others in ALSO.items() if family in others]
        found[names[0] if names else family] += count
    return found


def differences(plan: Plan, masked: bool, code: Counter, names: Iterable[str]) -> list[str]:
    """A line for each family that is further off than what stands beside the table allows."""
    table, lines = predicted(plan, masked), []
    for family in sorted(names):
        steps = table.get(family, Counter())
        allowed = BESIDE_INTEGERS if family in INTEGERS else BESIDE
        if abs(steps.total() - code[family]) > max(allowed, 0.05 * code[family]):
            said = ", ".join(f"{step} {count}" for step, count in steps.items()) or "none"
            lines.append(f"{family}: {code[family]} in the machine code, {steps.total()} ({said})")
    return lines


@functools.cache
def contracts() -> contract.Contracts:
    return contract.Contracts.read()


@pytest.mark.parametrize("masked", [False, True], ids=LOOPS.get)
@pytest.mark.parametrize("plan", configs.every(), ids=configs.label)
def test_a_tile_of_every_shipped_kernel_has_the_instructions_that_the_table_says(plan, masked):
    parts = contracts().kernels[contract.label(plan.kernel)].parts
    code = families(dict(parts[contract.part_named(parts, LOOPS[masked])]))
    counted = {*contract.FAMILIES, "MUFU", "LDG"} & set(FAMILIES)
    if plan.problem.dtype == "fp16" and plan.variant.weight is not None:
        counted -= {"FSEL"}  # weights are hidden as rounded halves, by what contracts do not count
    if plan.schedule.pack > 8 and plan.by_tile:
        counted -= {"ISETP"}  # int64 ids of two rows of one query take 5 comparisons each and not 6
    assert not (lines := differences(plan, masked, code, counted)), lines
    total = sum(steps.total() for steps in predicted(plan, masked).values())
    assert total == pytest.approx(code[contract.TOTAL], rel=0.12)


def small(variant: Variant, tile_n: int, dtype: str = "bf16", pack: int = 1) -> Plan:
    """A plan that compiles fast."""
    return Plan(variant, Problem(dtype, 64, 64), Schedule(64, tile_n, 2, 1, "none", pack=pack))


def compiled_code(plan: Plan) -> dict[str, Counter]:
    """Instructions of the loops with products, by loop and family."""
    found = {}
    for function in functions(disassemble(compile_kernel(plan.kernel).cubin)):
        for name, loop in contract._named(function, function.loops, ""):
            if name in LOOPS.values():
                opcodes = Counter(i.opcode for i in function.instructions(loop.own))
                found[name] = families(opcodes)
    return found


@pytest.mark.compile
@pytest.mark.parametrize("name", ["bias", "window:1024,0", "documents:1000"])
def test_integers_and_loads_are_those_of_the_machine_code_too(name):
    plan = small(named(name, Lengths(4, 4096, 4096)).variant, 64)
    code = compiled_code(plan)
    for masked, loop in LOOPS.items():
        lines = differences(plan, masked, code[loop], FAMILIES)
        assert not lines, (loop, lines)


SCALES = torch.linspace(0.5, 1.5, 16)
FUNCTIONS = {
    "of the unit": (torch.exp, torch.exp2, torch.log2, torch.log, torch.sqrt, torch.sin, torch.cos),
    "cancelling": (torch.expm1, torch.log1p, torch.erf),
    "activations": (F.silu, F.gelu, F.softplus, functools.partial(F.gelu, approximate="tanh")),
    "capped": (lambda x: 30.0 * torch.tanh(x + x * x),),
    "rounding and saturating": (torch.floor, torch.ceil, torch.trunc, torch.tanh, torch.sigmoid),
}


def of_all(group: str) -> Variant:
    """A score of several functions, each of an argument of its own."""
    applied = FUNCTIONS[group]

    def score(s, b, h, q, k):
        values = (f(s * SCALES[h + n]) for n, f in enumerate(applied))
        return functools.reduce(torch.maximum, values)

    return Variant(score)


@pytest.mark.compile
@pytest.mark.parametrize("group", FUNCTIONS)
def test_functions_of_a_float_become_the_instructions_of_their_entries(group):
    plan = small(of_all(group), 32)
    lines = differences(plan, False, compiled_code(plan)[LOOPS[False]], FAMILIES)
    assert not lines, lines


def test_every_operation_of_the_language_has_an_entry():
    sums = {("add", "int"), ("sub", "int"), ("neg", "int")}  # counted where they are read
    wanted = {(name, kind) for name, op in LANGUAGE.items() for kind in op.accepts} - sums
    assert wanted <= {*OPS, *((name, "float") for name in ALONE)}
    tables = (*OPS.values(), *ALONE.values(), *SHARED.values())
    assert {family for counts in tables for family in counts} <= set(FAMILIES)
    assert SHARED.keys() == ALONE.keys()


def test_what_is_the_same_at_equal_distances_is_read_once():
    table = torch.zeros(4, 2049)
    tile_n = 128
    variant = Variant(lambda s, b, h, q, k: s + table[h, k - q + 1024])
    distances = {k - q for k in columns(tile_n) for q in (0, 8)}
    counts = score_instructions(small(variant, tile_n))
    assert counts["LDG"] == len(distances) < len(columns(tile_n)) * 2
    assert counts["FFMA"] == len(columns(tile_n)) * 2


def test_values_of_a_query_of_a_key_and_of_a_tile_are_counted_once_each():
    rows, keys = torch.zeros(64), torch.zeros(63)  # an odd length is not read in pairs
    n = len(columns(96))

    def loads(score) -> int:
        return score_instructions(small(Variant(score), 96))["LDG"]

    assert loads(lambda s, b, h, q, k: s + rows[q]) == 2
    assert loads(lambda s, b, h, q, k: s + keys[k]) == n
    assert loads(lambda s, b, h, q, k: s + rows[k]) == n / 2
    assert loads(lambda s, b, h, q, k: s + keys[h] * keys[b]) == 0


def test_neighbours_share_a_reciprocal_unless_a_mask_may_hide_them():
    plan = small(Variant(score=lambda s, b, h, q, k: torch.tanh(s)), 64, "fp16")
    full, masked = score_instructions(plan), score_instructions(plan, masked=True)
    assert (full["MUFU"], masked["MUFU"]) == ((1 + 1 / MOST["tanh"]) * 32, 2 * 32)


@pytest.mark.parametrize("masked", [False, True], ids=LOOPS.get)
def test_a_cap_under_a_bounded_softmax_is_the_units_tanh_between_two_products(masked):
    variant = Variant(scores.softcap(30.0))
    plan = small(variant, 64)
    assert plan.bounded and not small(variant, 64, "fp16").bounded
    assert score_instructions(plan, masked) == {"FMUL": 2 * 32, "MUFU": 32}


def test_what_is_read_by_distance_has_no_address_of_its_own_where_no_mask_is_needed():
    table = torch.zeros(4, 2049)
    plan = small(Variant(lambda s, b, h, q, k: s + table[h, k - q + 1024]), 64)
    full, masked = score_instructions(plan), score_instructions(plan, masked=True)
    assert full["LDG"] == masked["LDG"] and full["FFMA"] == masked["FFMA"]
    assert full["IMAD"] == 1 < masked["IMAD"] == masked["LDG"]
    assert full["VIADD"] == 1 < masked["VIADD"]
    across = table.T
    apart = small(Variant(lambda s, b, h, q, k: s + across[k - q + 1024, h]), 64)
    assert score_instructions(apart) == score_instructions(apart, masked=True)


def test_rows_of_several_heads_share_what_is_the_same_for_their_heads_and_queries():
    table, keys = torch.zeros(16, 2049), torch.zeros(16, 63)
    n = len(columns(64))

    def loads(score, pack: int) -> int:
        return score_instructions(small(Variant(score), 64, pack=pack))["LDG"]

    def by_distance(s, b, h, q, k):
        return s + table[h, k - q + 1024]

    queries_apart = {1: 8, 2: 4, 4: 2, 8: 1}
    for pack, apart in queries_apart.items():
        distances = {k - q for k in columns(64) for q in (0, apart)}
        assert loads(by_distance, pack) == len(distances)
    assert loads(by_distance, 16) == 2 * n  # of one query, and each of a head of its own
    assert loads(lambda s, b, h, q, k: s + keys[0, k], 16) == n
    assert loads(lambda s, b, h, q, k: s + keys[h, k], 8) == n
    assert loads(lambda s, b, h, q, k: s + keys[h, k], 16) == 2 * n


def test_a_mask_in_spans_selects_once_and_any_other_for_each_condition_that_must_hold():
    def selections(mask) -> float:
        return instructions(small(Variant(mask=mask), 64), True)["mask"]["FSEL"] / 32

    for mask in (None, masks.causal, masks.window(100, 0), masks.prefix_lm(64)):
        assert selections(mask) == 1
    dilated = masks.dilated(None, 2)
    assert selections(dilated) > 1
    assert selections(masks.and_masks(dilated, masks.causal)) > selections(dilated)


@pytest.mark.parametrize(
    ("mask", "rows", "ends"),
    [
        (None, 1, 1),
        (masks.causal, 2, 1),
        (masks.window(100, 0), 2, 2),
        (masks.prefix(64), 1, 1),
        (masks.prefix_lm(64), 2, 2),
    ],
)
def test_bits_are_made_once_for_rows_that_see_the_same(mask, rows, ends):
    found = instructions(small(Variant(mask=mask), 64), True)["mask"]
    assert (found["R2P"], found["SHF"]) == (rows * 16 // 8, rows * ends * 2)
