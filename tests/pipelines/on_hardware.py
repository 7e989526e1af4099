"""The catalogue of planted faults on a GPU: which hang, fail, corrupt, or do no harm there.

    python tests/pipelines/on_hardware.py              # every fault; writes a record
    python tests/pipelines/on_hardware.py --one NAME   # one fault, in this process

Each fault has a process of its own, and they use the GPU one after the other. The debug build runs
first, which turns a hang into an exception; a kernel that ends runs again without it, with delays
where its race is, and what it writes is compared with what the sound kernel writes, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch
from faults import FAULTS, Fault
from products import Products

from cutedsl_fa3 import bench, cache, record
from cutedsl_fa3.hang import Hang, watch
from cutedsl_fa3.kernels.sm90.forward import ForwardSm90
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.pipelines.watch import watched

SCRIPT = Path(__file__)
LIMIT = 200  # seconds of a process: imports and compiles beside those of all others, then its turn
ALONE = 20  # seconds of a launch that nobody watches
SECONDS = 0.2  # without progress
LAUNCHES = 10  # of a kernel that ends
OUTCOMES = {
    "hangs": ("hangs", "fails"),
    "corrupts": ("corrupts",),
    "races": ("hangs", "fails", "corrupts", "benign"),
    "benign": ("benign",),
}


@dataclass(frozen=True)
class FaultRow:
    """One fault: what the catalogue expects of hardware, what became of it, and what was said.

    `outcome`: "hangs", "fails" (CUDA reports an error), "corrupts" or "benign"; else how its
    process ended.
    """

    name: str
    expected: str
    outcome: str
    said: str

    @property
    def as_expected(self) -> bool:
        """Whether the outcome is one of those that the catalogue allows."""
        return self.outcome in OUTCOMES[self.expected]


def sound(kernel: Any) -> Any:
    """The kernel without the fault."""
    if isinstance(kernel, Products):
        return Products(kernel.depth)
    if isinstance(kernel, GemmSm90):
        return GemmSm90(kernel.schedule)
    return ForwardSm90(kernel.plan)


def run(fault: Fault) -> tuple[str, str]:
    """What becomes of a fault, and what is said of it."""
    kernels = {"watched": watched(fault.slow()), "slow": fault.slow(), "sound": sound(fault.slow())}
    compiled = {name: cache.get(kernel) for name, kernel in kernels.items()}
    torch.cuda.init()
    turn = Path(tempfile.gettempdir(), "cutedsl_fa3_hanging.lock")
    with filelock.FileLock(turn):  # one kernel at a time that hangs
        try:
            watch(fault.slow(), *fault.arguments("cuda"), seconds=SECONDS)
        except Hang as error:
            return "hangs", error.explanation or str(error)
        except RuntimeError as error:
            return "fails", str(error).partition("\n")[0]
        expected = fault.arguments("cuda")
        compiled["sound"].launch(*expected)
        signal.alarm(ALONE)
        different = set()
        for _ in range(LAUNCHES):
            given = fault.arguments("cuda")
            compiled["slow"].launch(*given)
            torch.cuda.synchronize()
            pairs = zip(given, expected, strict=True)
            different |= {i for i, (got, right) in enumerate(pairs) if not same(got, right)}
        signal.alarm(0)
    if different:
        return "corrupts", f"arguments {sorted(different)} differ from the sound kernel's"
    return "benign", f"equal to the sound kernel's in {LAUNCHES} launches"


def same(got: Any, right: Any) -> bool:
    """Whether two arguments hold the same bits."""
    if isinstance(got, torch.Tensor):
        return torch.equal(got.view(torch.uint8), right.view(torch.uint8))
    return isinstance(got, tuple) or got == right


def elsewhere(fault: Fault) -> FaultRow:
    """A fault in a process of its own."""
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--one", fault.name],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return FaultRow(fault.name, fault.hardware, f"not done after {LIMIT} s", "")
    if done.returncode == -signal.SIGALRM:
        return FaultRow(fault.name, fault.hardware, "hangs", "only where nobody watches")
    try:
        return FaultRow(fault.name, fault.hardware, *json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        end = f"ended with {done.returncode}"
        return FaultRow(fault.name, fault.hardware, end, done.stderr[-500:])


def main(arguments: list[str] | None = None) -> int:
    """Run all or one; 0 if every outcome is the expected one, 1 if not, 2 if refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--one", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--jobs", type=int, default=12, help="processes side by side")
    parser.add_argument("--out", type=Path, help="folder or .json file of the record")
    parser.add_argument("--commit", help="the commit of these sources, where .git is absent")
    parser.add_argument("--allow-dirty", action="store_true", help="record uncommitted changes")
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(run(next(fault for fault in FAULTS if fault.name == options.one))))
        sys.stdout.flush()
        os._exit(0)  # where the context is lost, nothing can be freed in order
    try:
        bench.require_gpu()
        meta = record.collect(options.commit, options.allow_dirty)
    except (record.RecordError, bench.NoDevice) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(elsewhere, FAULTS))
    for row in rows:
        mark = " " if row.as_expected else "!"
        print(f"{mark} {row.name}: {row.outcome} ({row.expected} expected)\n    {row.said}")
    meta |= {"what": "planted faults on hardware", "launches": LAUNCHES}
    written = record.Record(meta, tuple(rows)).write(record.place(meta, options.out, "faults"))
    print(f"{dict(Counter(row.outcome for row in rows))}\nrecord: {written}")
    return int(not all(row.as_expected for row in rows))


if __name__ == "__main__":
    sys.exit(main())
