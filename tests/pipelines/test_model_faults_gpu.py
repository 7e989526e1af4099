"""What the model says of planted faults is what becomes of them on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from faults import FAULTS, Fault

SCRIPT = Path(__file__).with_name("run_fault.py")
LIMIT = 120  # seconds: imports and a compile beside those of others
AT_ONCE = 12
BECOMES = {
    "hangs": ("HANGS",),
    "corrupts": ("WRONG", "HANGS"),
    "races": ("HANGS", "WRONG", "RIGHT"),
    "benign": ("RIGHT",),
}


def run(name: str) -> str:
    """What the process that runs the fault prints, or how it ended."""
    root = str(SCRIPT.parent.parent.parent)
    path = os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))
    try:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), name],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"NOT DONE after {LIMIT} s"
    last = done.stdout.strip().splitlines()
    return last[0] if last else f"DIED {done.returncode}: {done.stderr[-1500:]}"


@cache
def started() -> dict[str, Future[str]]:
    """All faults, some side by side."""
    pool = ThreadPoolExecutor(AT_ONCE)
    return {fault.name: pool.submit(run, fault.name) for fault in FAULTS}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_becomes_what_is_said_of_it(fault: Fault) -> None:
    alone = "PYTEST_XDIST_WORKER" in os.environ
    printed = run(fault.name) if alone else started()[fault.name].result()
    print(f"{fault.name} ({fault.hardware}): {printed}")
    assert printed.startswith(BECOMES[fault.hardware]), printed
