"""What a score costs: instructions of the loop over tiles without an element mask, for each score.

Time follows them: the special-function unit takes one (MUFU) a quarter clock and lane, and whatever
is issued beside the products' instructions delays them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from cutedsl_fa3 import named
from cutedsl_fa3.audit import disassemble
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.contract import part_named, parts_of
from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.sass import functions
from cutedsl_fa3.variant.shared import MOST

LENGTHS = named.Lengths(heads=16, seqlen_q=8192, seqlen_k=8192)

# By variant: reciprocals and exponentials and loads a score; all instructions a score more than
# plain causal attention at most. Both rows of a thread's 8 x 8 blocks share what is at one distance
# from the diagonal, so half of a bias is loaded, and one more pair at the tile's edge.
COSTS = {
    "causal": {"RCP": 0.0, "EX2": 1.0, "TANH": 0.0, "LDG": 0.0, "more": 0.0},
    "alibi": {"RCP": 0.0, "EX2": 1.0, "TANH": 0.0, "LDG": 0.0, "more": 1.45},
    "bias": {"RCP": 0.0, "EX2": 1.0, "TANH": 0.0, "LDG": 0.5, "more": 2.21},
    "softcap:30": {"RCP": 0.0, "EX2": 1.0, "TANH": 1.0, "LDG": 0.0, "more": -0.4},
    "sigmoid": {"RCP": 1 / MOST["sigmoid"], "EX2": 1.0, "TANH": 0.0, "LDG": 0.0, "more": 1.3},
}


# By mask: instructions a score of a tile that needs it beyond those of one that does not, at most.
# A bit and a selection where keys are spans of a row; else a comparison for each condition too.
MASKS = {"causal": 1.8, "window:1024,0": 2.25, "prefix:256": 2.25, "documents:1000": 9.1}


def planned(name: str, head_dim: int) -> Plan:
    """The variant's own schedule, of a CTA a tile: what stays in registers for the next is none.

    Of whole tiles, so that each loop has one way through.
    """
    plan = Plan.default(named.named(name, LENGTHS).variant, Problem("bf16", head_dim, head_dim))
    return replace(plan, schedule=replace(plan.schedule, persistent=False, narrow=False))


@cache
def loops(name: str, head_dim: int, like: str = "") -> dict[str, Counter[str]]:
    """Instructions a score of both loops over tiles, by kind; `like` has the schedule, or it."""
    plan = planned(name, head_dim)
    plan = replace(plan, schedule=planned(like or name, head_dim).schedule)
    parts = parts_of(functions(disassemble(compile_kernel(plan.kernel).cubin)))
    s = plan.schedule
    held = s.tile_m * s.tile_n / (wgmma.WARPGROUP * s.consumers)
    return {
        loop: Counter(
            {kind: number / held for kind, number in parts[part_named(parts, loop)].items()}
        )
        for loop in ("full tiles", "masked tiles")
    }


def of(kind: str, found: Counter[str]) -> float:
    return sum(number for mnemonic, number in found.items() if kind in mnemonic)


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", COSTS)
def test_a_score_costs_no_more_instructions_than_it_needs(name, head_dim):
    found, cost = loops(name, head_dim)["full tiles"], COSTS[name]
    a_row = 2 / 56  # of two rows, by each thread, to rescale
    for kind in ("RCP", "EX2", "TANH", "LDG"):
        assert cost[kind] <= of(kind, found) <= cost[kind] * (1 + a_row) + a_row, kind
    plain = loops("causal", head_dim, like=name)["full tiles"]
    assert found["instructions"] <= plain["instructions"] + cost["more"]


@pytest.mark.compile
def test_scores_that_a_mask_may_hide_share_no_reciprocal():
    assert of("RCP", loops("sigmoid", 128)["masked tiles"]) == 1.0


@pytest.mark.compile
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_costs_no_more_instructions_than_it_needs(name):
    found = loops(name, 128, like="causal" if name != "causal" else "")
    more = found["masked tiles"]["instructions"] - found["full tiles"]["instructions"]
    assert more <= MASKS[name]
