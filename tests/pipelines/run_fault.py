"""Runs one planted fault on a GPU, in a process of its own, and prints what became of it.

python tests/pipelines/run_fault.py NAME [SECONDS]      prints HANGS, WRONG or RIGHT
"""

from __future__ import annotations

import os
import sys

import torch
from faults import FAULTS, Fault

from cutedsl_fa3.hang import Hang, watch

TOLERANCE = 0.05  # of the largest value: a tile too many or too few changes far more


def outcome(fault: Fault, seconds: float) -> str:
    """What a launch of the fault's debug build ends in."""
    kernel = fault.slow() if fault.hardware == "corrupts" else fault.kernel()
    given = fault.arguments("cuda")
    right = fault.right(given)
    out = given[3] if len(given) > 4 else given[2]
    out.fill_(0.0)
    torch.cuda.synchronize()
    try:
        watch(kernel, *given, seconds=seconds)
    except Hang as error:
        return f"HANGS: {error}"
    wrong = (out.float() - right).abs().max() / right.abs().max()
    return f"{'WRONG' if not wrong < TOLERANCE else 'RIGHT'}: off by {wrong:.3g} of the largest"


def main(name: str, seconds: float = 0.5) -> None:
    print(outcome(next(fault for fault in FAULTS if fault.name == name), seconds), flush=True)
    os._exit(0)  # a kernel that cannot be stopped must not be waited for


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
