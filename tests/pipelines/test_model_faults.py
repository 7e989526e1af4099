"""Every planted fault is found and said in the tables' words; what is none is let pass."""

from __future__ import annotations

import re

import pytest
from faults import FAULTS, Fault, in_products
from products import Products

from cutedsl_fa3.model import check_pipeline

LINES = 20  # of one counter-example


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    verdict = check_pipeline(fault.kernel(), fault.works())
    text = str(verdict)
    assert verdict.ok == (not fault.said), text
    for said in fault.said:
        assert re.search(said, "\n".join(map(str, verdict.findings)), re.DOTALL), text


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_has_a_name_of_its_own_and_arguments_to_launch(fault: Fault) -> None:
    assert sum(other.name == fault.name for other in FAULTS) == 1
    assert fault.hardware == "benign" or fault.said
    assert len(fault.arguments("meta")) == len(fault.kernel().fake_args()) - 1


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_kernel_without_a_fault_takes_three_work_tiles_at_any_depth(stages: int) -> None:
    fault = in_products("none", Products, "benign")
    verdict = check_pipeline(Products(stages), fault.works())
    assert verdict.ok, verdict


def test_a_counter_example_is_short_and_ends_with_the_step_that_goes_wrong() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "release before wait_group")
    finding = check_pipeline(fault.kernel(), fault.works()).findings[0]
    assert len(finding.trace) <= LINES
    assert finding.trace[-1] == "producer warp 0: issue a copy of 16384 B to tile 'a' stage 0"
    assert any(
        "consumer warps 0 to 7: arrive at ring 'a' empty, stage 0" in t for t in finding.trace
    )
    assert not any("wait until" in line for line in finding.trace)
