"""The list of supported configurations is complete, and each of them passes the rules of a plan."""

from __future__ import annotations

from itertools import product

import pytest
from typer.testing import CliRunner

from cutedsl_fa3 import configs
from cutedsl_fa3.cli import app
from cutedsl_fa3.problem import DTYPES, NATIVE, Problem
from cutedsl_fa3.schedules import NEEDS, needs

EVERY = configs.every()


def test_there_is_a_plan_for_every_native_size_dtype_and_need():
    found = {
        (p.problem.head_dim, p.problem.head_dim_v, p.problem.dtype, needs(p.variant))
        for p in configs.configs()
    }
    assert found == {(*native, *rest) for native, *rest in product(NATIVE, DTYPES, NEEDS)}


# Kinds that are called after what they are; the others after what they need.
CALLED = {"weights": "elementwise", "tables": "elements", "elements": "documents"}


def test_every_need_is_that_of_a_kind():
    kinds = {need: configs.kinds()[CALLED.get(need, need)] for need in NEEDS}
    assert {need: needs(variant) for need, variant in kinds.items()} == {n: n for n in NEEDS}


def test_tiles_of_several_heads_are_listed_for_every_kind_of_variant():
    for pack in (8, 16):
        found = {configs.kind(plan) for plan in configs.packed() if plan.schedule.pack == pack}
        assert found == set(configs.kinds())


@pytest.mark.parametrize("plan", EVERY, ids=configs.label)
def test_every_configuration_is_one_that_its_plan_accepts(plan):
    plan.check()


def test_labels_tell_configurations_apart():
    labels = [configs.label(plan) for plan in EVERY]
    assert len(set(labels)) == len(labels)


def test_every_head_size_that_is_served_stands_in_exactly_one_row():
    sizes = []
    for d, dv in NATIVE:
        if d == dv:
            low, _, high = configs.served((d, dv)).partition("-")
            sizes += range(int(low), int(high or low) + 1, 8)
    assert sorted(sizes) == list(range(8, 257, 8))
    assert configs.served((192, 128)) == "136-192, v 8-128"
    assert Problem("bf16", 136, 8).tile_dims == (192, 128)


def test_the_command_prints_each_configuration_once():
    result = CliRunner().invoke(app, ["configs"])
    assert result.exit_code == 0, result.output
    rows = [line.replace(",", "").split() for line in result.output.splitlines()]
    assert sum(row.count(dtype) for row in rows for dtype in DTYPES) == len(EVERY)
    parts = ("head_dim", "registers a thread", "136-192, v 8-128", "one by one", "elementwise")
    for part in (*parts, "online, sink, epilogue"):
        assert part in result.output
