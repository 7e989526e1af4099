"""A plan says everything that affects the code, and nothing else is in its key."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cutedsl_fa3 import Elementwise, OnlineSoftmax, Variant, masks, scores
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem

PROBLEM = Problem("bf16", 64, 64)


def key(variant=None, problem=PROBLEM, **changes) -> str:
    made = Plan.default(variant or Variant(), problem)
    return dataclasses.replace(
        made, schedule=dataclasses.replace(made.schedule, **changes)
    ).key_text


def test_equal_functions_have_equal_keys_whatever_their_names_and_objects():
    def one(b, h, q, k):
        return k <= q

    assert key(Variant(mask=one)) == key(Variant(mask=lambda b, h, q, kv: kv <= q))


def test_a_changed_number_changes_the_key():
    assert key(Variant(scores.softcap(30.0))) != key(Variant(scores.softcap(31.0)))


def test_values_of_captured_tensors_are_not_in_the_key_but_type_and_rank_are():
    one, other = torch.ones(4), torch.zeros(4)

    def bias(t):
        return Variant(lambda s, b, h, q, k: s + t[h])

    assert key(bias(one)) == key(bias(other))
    assert key(bias(one)) != key(bias(one.double().half()))
    scalar = torch.tensor(1.0)
    assert key(bias(one)) != key(Variant(lambda s, b, h, q, k: s + scalar))


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": 1},
        {"overlap": "none"},
        {"tile_n": 64},
        {"head_group": 3},
        {"tile_m": 128, "consumers": 2},
    ],
)
def test_every_field_of_the_schedule_is_in_the_key(changes):
    assert key(**changes) != key()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Schedule)])
def test_the_key_names_every_field_of_the_schedule(field):
    assert f"{field}=" in key()


def test_the_problem_is_in_the_key():
    problems = [Problem(d, a, b) for d in ("bf16", "fp16") for a in (64, 128) for b in (64, 128)]
    assert len({key(problem=p, tile_m=128, tile_n=64, consumers=2) for p in problems}) == 8


def test_the_plan_says_how_queries_and_keys_are_aligned():
    raw = Plan.default(Variant(mask=lambda b, h, q, k: k <= q), PROBLEM)
    assert "top-left" in str(raw)
    assert "bottom-right" in str(Plan.default(Variant(mask=masks.causal), PROBLEM))
    assert "every query sees every key" in str(Plan.default(Variant(), PROBLEM))


def test_the_plan_prints_variant_tiles_rings_roles_and_expectations():
    slopes = torch.ones(4)
    page = str(Plan.default(Variant(scores.alibi(slopes), masks.causal), PROBLEM))
    for piece in ("t0: float32[?]", "visits", "shared memory", "a thread", "UTMALDG", "HGMMA"):
        assert piece in page


def test_a_plan_whose_roles_keep_their_registers_names_none():
    plan = Plan.default(Variant(mask=masks.window(127, 0)), PROBLEM)
    assert all(role.registers is None for role in plan.kernel.roles.values())
    assert "4 warps\n" in str(plan) and "None" not in str(plan)


def test_the_plan_says_how_scores_become_weights():
    sink = torch.zeros(4)
    pages = {
        "-inf": Variant(),
        "the sink t0 as one more logit": Variant(softmax=OnlineSoftmax(sink)),
        "no LSE": Variant(softmax=Elementwise(torch.relu)),
        "then the epilogue": Variant(epilogue=lambda o, lse, b, h, q: o * lse),
    }
    for words, variant in pages.items():
        assert words in str(Plan.default(variant, PROBLEM))


def test_the_plan_says_why_its_kernel_will_be_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTEDSL_FA3_CACHE", str(tmp_path))
    plan = Plan.default(Variant(scores.softcap(12.5)), PROBLEM)
    assert plan.why.startswith(("will be compiled", "will be recompiled because"))
    assert str(plan).endswith(plan.why)


def test_a_plan_whose_tiles_are_decided_one_by_one_has_a_ring_of_words_and_a_table():
    documents = torch.arange(100) // 10
    plan = Plan.default(Variant(mask=lambda b, h, q, k: documents[q] == documents[k]), PROBLEM)
    assert plan.by_tile and "slots of a word" in str(plan)
    batch, heads, blocks, words = plan.table_shape(3, 5, 1000, 700)
    assert (words, batch, heads) == (4, 1, 1)
    assert blocks == max(-(-1000 // plan.schedule.tile_m), -(-700 // plan.schedule.tile_n))
    plain = Plan.default(Variant(mask=masks.causal), PROBLEM)
    assert not plain.by_tile and plain.table_shape(3, 5, 1000, 700) is None


def test_a_trace_of_visits_is_in_the_key():
    assert Plan.default(Variant(), PROBLEM, trace=True).key_text != key()
