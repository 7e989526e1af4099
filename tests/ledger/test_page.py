"""The ledger as a plan prints it."""

from __future__ import annotations

import re

import pytest
import torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import Variant, masks, scores
from cutedsl_fa3.ledger.launch import Sizes
from cutedsl_fa3.ledger.page import Ledger
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.schedules import default_schedule

PROBLEM = Problem("bf16", 128, 128)
SIZES = Sizes(2, 4, 2048, 2048)


def grown(s, b, h, q, k):
    return torch.exp(s)


def ledger(variant: Variant, sizes: Sizes | None = None) -> Ledger:
    return Ledger(Plan.default(variant, PROBLEM), sizes)


def test_a_plan_prints_clocks_by_pipe_with_the_rows_of_its_steps():
    page = str(Plan.default(Variant(grown, masks.causal), PROBLEM))
    cost = page[page.index("\ncost\n") :]
    head, *rows = cost.splitlines()[3:13]
    assert head.split() == ["WGMMA", "MUFU", "FMA", "ALU", "LSU", "issue", "takes"]
    names = [row.split()[0] for row in rows]
    assert names[:3] == ["products", "score", "maximum"] and {"all", "mask"} <= {*names, "mask"}
    made = ledger(Variant(grown, masks.causal))
    cells = next(row for row in rows if row.split()[0] == "score").split()
    assert cells[-1] == f"{made.full.step('score').takes:.0f}"


def test_it_says_what_a_score_costs_and_on_which_pipe():
    slopes = torch.ones(4)
    for score, pipe in ((scores.softcap(30.0), "MUFU"), (scores.alibi(slopes), "FMA")):
        made = ledger(Variant(score, masks.causal))
        line = next(line for line in str(made).splitlines() if line.startswith("score    +"))
        assert f"+{made.for_score:.0f} clocks a tile, on {pipe}" in line
    plain = str(ledger(Variant(mask=masks.causal)))
    assert "score" not in [line.split()[0] for line in plain.splitlines() if line.strip()]


def test_a_dearer_score_costs_more():
    cheap = ledger(Variant(lambda s, b, h, q, k: s + 1.0))
    dear = ledger(Variant(lambda s, b, h, q, k: torch.tanh(torch.tanh(s))))
    assert 0 < cheap.for_score < dear.for_score
    assert 1 < cheap.to_plain < dear.to_plain


def test_without_lengths_there_is_no_time_and_with_them_it_is_in_units_of_plain_causal():
    assert ledger(Variant()).ms is None and "time " not in str(ledger(Variant()))
    causal = ledger(Variant(mask=masks.causal), SIZES)
    assert causal.to_causal == pytest.approx(1.0)
    window = ledger(Variant(mask=masks.window(128, 0)), SIZES)
    assert window.to_causal == pytest.approx(window.ms / causal.ms) and window.to_causal < 1
    assert f"{window.to_causal:.2f} x plain causal, on an NVIDIA H200: {SIZES}" in str(window)


def test_the_plan_of_a_call_knows_its_lengths_and_predicts_from_the_values_of_its_mask():
    q, k, v = (torch.empty(1, n, 4, 64, dtype=torch.bfloat16) for n in (512, 1024, 1024))
    documents = torch.zeros(1024, dtype=torch.int32)
    variant = Variant(mask=lambda b, h, q, k: documents[q] == documents[k])
    one = fa3.plan(q, k, v, variant)
    assert one.sizes == (1, 4, 512, 1024)
    before = one.ledger.ms
    documents[:] = torch.arange(1024) // 64
    assert one.ledger.ms < before


def test_lengths_are_not_in_the_key():
    plain = torch.empty(1, 64, 4, 128, dtype=torch.bfloat16)
    assert fa3.plan(plain, plain, plain).key_text == Plan.default(Variant(), PROBLEM).key_text


def test_nothing_to_do_has_no_time():
    empty = ledger(Variant(), SIZES._replace(seqlen_q=0))
    assert empty.ms is None and "nothing to do" in str(empty)


def test_a_schedule_of_a_kind_that_was_not_fitted_is_said_to_be_one():
    odd = Plan(Variant(), PROBLEM, Schedule(64, 64, 2, 1, "none"))
    assert "no such schedule was fitted" in str(Ledger(odd))
    assert "no such schedule" not in str(ledger(Variant()))


def test_tiles_of_ctas_that_share_a_multiprocessor_are_said_to_last_longer():
    problem = Problem("bf16", 64, 64)
    made = Ledger(Plan.default(Variant(mask=masks.window(128, 0)), problem), SIZES)
    residents = made.plan.schedule.residents
    assert residents > 1
    line = (
        f"an SM has {residents} CTAs at a time: a tile of each lasts {residents * made.clocks:.0f}"
    )
    assert line in str(made) and "CTAs at a time" not in str(ledger(Variant()))


def test_few_keys_are_held_against_plain_causal_with_the_schedule_of_few_keys():
    problem, sizes = Problem("bf16", 64, 64), Sizes(2, 4, 1024, 1024)
    causal = Variant(mask=masks.causal)
    schedule = default_schedule(causal, problem, 1024)
    assert schedule != Plan.default(causal, problem).schedule
    assert Ledger(Plan(causal, problem, schedule), sizes).to_causal == pytest.approx(1.0)


def test_shares_are_those_of_the_tile():
    made = ledger(Variant())
    row = next(line for line in str(made).splitlines() if line.startswith("share"))
    shares = [int(text) / 100 for text in re.findall(r"(\d+)%", row)]
    assert shares[0] == pytest.approx(made.full.products / made.clocks, abs=0.006)
    assert max(shares) <= 1
