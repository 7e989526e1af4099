"""What is said when a kernel is compiled anew: the cause, by its name, with old and new value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutedsl_fa3 import Elementwise, OnlineSoftmax, Variant, masks, scores
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.why import EDITED, Identity, differences, reason

SOURCES = {"cutedsl_fa3/kernels/sm90/forward.py": "1", "layouts/tile.py": "2"}
SCHEDULE = Schedule(128, 128, 2, 2, "intra")
CAUSAL = Variant(mask=masks.causal)
SLOPES = torch.rand(4)


def identity(
    variant=CAUSAL, schedule=SCHEDULE, problem=("bf16", 64, 64), trace=False, **others
) -> Identity:
    text = Plan(variant, Problem(*problem), schedule, trace).key_text
    known = Identity(
        "forward_sm90", "sm_90a", text, "cutlass 4.8.1 cu13 ptxas 13.4", SOURCES, "program"
    )
    return replace(known, **others)


def mask(function):
    return Variant(mask=function)


BASE = identity()
CAUSES = {
    "schedule: tile_n 128 -> 96": identity(schedule=replace(SCHEDULE, tile_n=96)),
    "schedule: stages 2 -> 3, overlap 'intra' -> 'both'": identity(
        schedule=replace(SCHEDULE, stages=3, overlap="both")
    ),
    "bf16 -> fp16": identity(problem=("fp16", 64, 64)),
    "head_dim 64 -> 128": identity(problem=("bf16", 128, 128)),
    "mask: le(k, add(q, sub(seqlen_k, seqlen_q))) -> lt(k, q)": identity(
        mask(lambda b, h, q, k: k < q)
    ),
    "mask: le(k, add(q, sub(seqlen_k, seqlen_q))) -> none": identity(Variant()),
    "score: none -> tanh(score)": identity(
        Variant(lambda s, b, h, q, k: torch.tanh(s), masks.causal)
    ),
    "t0: none -> float32[?]; score: none -> add(score, t0[h])": identity(
        Variant(lambda s, b, h, q, k: s + SLOPES[h], masks.causal)
    ),
    "t0: none -> float32[?]; sink: none -> t0": identity(
        Variant(mask=masks.causal, softmax=OnlineSoftmax(SLOPES))
    ),
    "weight: none -> sigmoid(score)": identity(
        Variant(mask=masks.causal, softmax=Elementwise(torch.sigmoid))
    ),
    "epilogue: none -> mul(o, 2.0)": identity(
        Variant(mask=masks.causal, epilogue=lambda o, lse, b, h, q: o * 2.0)
    ),
    "now traces its visits": identity(trace=True),
    "cutlass 4.8.1 -> 4.8.2": identity(compiler="cutlass 4.8.2 cu13 ptxas 13.4"),
    "cu13 -> cu12, ptxas 13.4 -> 12.9": identity(compiler="cutlass 4.8.1 cu12 ptxas 12.9"),
    "arch sm_90a -> sm_100a": identity(arch="sm_100a"),
    "sources changed: layouts/tile.py": identity(sources=SOURCES | {"layouts/tile.py": "3"}),
    "sources changed: layouts/new.py (new)": identity(sources=SOURCES | {"layouts/new.py": "3"}),
    "sources changed: layouts/tile.py (gone)": identity(
        sources={name: SOURCES[name] for name in SOURCES if "tile" not in name}
    ),
    "the kernel's class, which is not of this package, traces to other code": identity(
        program="another"
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_said_by_name_with_what_was_and_what_is(cause):
    if "sigmoid" in cause:  # how it is spelled is for the language to say
        assert reason(CAUSES[cause], [BASE]).startswith("recompiled because weight: none -> ")
    else:
        assert reason(CAUSES[cause], [BASE]) == f"recompiled because {cause}"


@pytest.mark.parametrize("cause", CAUSES)
def test_what_has_another_key_has_a_cause_and_what_has_none_has_the_same_key(cause):
    assert CAUSES[cause].key != BASE.key
    assert differences(BASE, CAUSES[cause]) and differences(CAUSES[cause], BASE)
    assert not differences(BASE, identity()) and identity().key == BASE.key


def test_a_file_edited_meanwhile_says_what_that_means():
    edited = identity(sources=SOURCES | {"layouts/tile.py": f"{EDITED}5"})
    said = reason(edited, [BASE])
    assert "layouts/tile.py (edited since this process started" in said and "alone" in said


def test_the_nearest_of_many_is_compared():
    far = identity(Variant(scores.alibi(SLOPES), masks.causal), replace(SCHEDULE, stages=1))
    near = identity(schedule=replace(SCHEDULE, tile_n=64))
    wanted = identity(schedule=replace(SCHEDULE, tile_n=96))
    assert reason(wanted, [far, near, identity(problem=("fp16", 96, 96))]) == (
        "recompiled because schedule: tile_n 64 -> 96"
    )


def test_several_causes_are_all_said():
    other = identity(
        schedule=replace(SCHEDULE, tile_n=64), compiler="cutlass 4.9.0 cu13 ptxas 13.5"
    )
    assert reason(other, [BASE]) == (
        "recompiled because schedule: tile_n 128 -> 64; cutlass 4.8.1 -> 4.9.0, ptxas 13.4 -> 13.5"
    )


def test_many_files_are_counted_and_long_expressions_cut():
    many = identity(sources={f"layouts/{i}.py": "1" for i in range(9)} | SOURCES)
    assert reason(many, [BASE]).endswith("layouts/2.py (new) and 6 more")

    def long(number):
        def score(s, b, h, q, k):
            for i in range(20):
                s = torch.tanh(s * 2.0 + i)
            return s * number

        return Variant(score)

    said = reason(identity(long(2.0)), [identity(long(3.0))])
    assert said.startswith("recompiled because score: ") and len(said) < 250


def test_the_first_kernel_of_a_name_is_said_to_be_the_first():
    other = replace(BASE, name="gemm_sm90")
    for known in ([], [other]):
        assert reason(BASE, known) == "compiled as the first forward_sm90 that is known here"


def test_an_entry_that_should_have_served_is_said_to_be_damaged():
    assert "damaged or removed" in reason(BASE, [BASE])
