"""What the catalogue says of planted faults is what becomes of them on a GPU."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import pytest
from faults import FAULTS, Fault
from on_hardware import FaultRow, elsewhere

AT_ONCE = 12


@cache
def started() -> dict[str, Future[FaultRow]]:
    """All faults: they compile side by side."""
    pool = ThreadPoolExecutor(AT_ONCE)
    return {fault.name: pool.submit(elsewhere, fault) for fault in FAULTS}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_becomes_what_is_said_of_it(fault: Fault) -> None:
    alone = "PYTEST_XDIST_WORKER" in os.environ
    row = elsewhere(fault) if alone else started()[fault.name].result()
    assert row.as_expected, row
