"""compute-sanitizer over one small case of each kind: memory errors and shared-memory races.

    make sanitize        # needs an SM90 GPU and compute-sanitizer; writes a record

Kernels are compiled into the disk cache first, so that the tools wait for no compiler. Torch's
memory cache is off meanwhile: each tensor is an allocation of its own, and what is read or written
past one is seen. Calls that the driver answers with an error are not reported: a look-up of a
function that it lacks, for one, is no memory error, and the kernels' own failures still end a run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from small_cases import CASES

from cutedsl_fa3 import bench, record

SCRIPT = Path(__file__).with_name("small_cases.py")
NAME = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}

# What the tools print at their end, as of the toolkit's release 13.
_MEMCHECK = re.compile(r"ERROR SUMMARY: (\d+) errors?")
_RACECHECK = re.compile(
    r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)"
)


class SanitizerError(RuntimeError):
    """A tool that is absent, or that ended without saying what it found."""


@dataclass(frozen=True)
class Found:
    """What one tool said about the cases.

    `errors` are memory errors or races; `hazards` are all that racecheck displays, warnings too.
    """

    tool: str
    cases: tuple[str, ...]
    errors: int
    hazards: int
    seconds: float

    @property
    def clean(self) -> bool:
        """Whether there is nothing to look at."""
        return not self.errors and not self.hazards


def find_tool() -> str:
    """The path of compute-sanitizer.

    Raises: SanitizerError where it is absent.
    """
    found = shutil.which(NAME) or shutil.which(NAME, path=os.pathsep.join(PLACES))
    if found is None:
        raise SanitizerError(
            f"{NAME} is neither on PATH nor in {' or '.join(PLACES)}: it comes with the CUDA "
            "toolkit (package cuda-sanitizer)"
        )
    return found


def summary(tool: str, output: str) -> tuple[int, int]:
    """(errors, hazards) as the tool sums them up.

    Raises: SanitizerError where it does not: the program may have died under it.
    """
    found = (_MEMCHECK if tool == "memcheck" else _RACECHECK).search(output)
    if found is None:
        raise SanitizerError(f"{tool} ended without its summary:\n{output[-2000:]}")
    if tool == "memcheck":
        return int(found.group(1)), 0
    return int(found.group(2)), int(found.group(1))


def examine(path: str, tool: str) -> Found:
    """Run every case under one tool, its output passed on line by line.

    Raises: SanitizerError where the cases did not all run and come out right.
    """
    command = [path, "--tool", tool, *OPTIONS[tool], sys.executable, str(SCRIPT)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start, lines = time.perf_counter(), []
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    output = "".join(lines)
    errors, hazards = summary(tool, output)
    if not errors and (process.returncode or f"{len(CASES)} cases right" not in output):
        raise SanitizerError(
            f"{tool} found no error, but the cases ended with {process.returncode}:\n"
            f"{output[-2000:]}"
        )
    seconds = round(time.perf_counter() - start, 1)
    return Found(tool, tuple(CASES), errors, hazards, seconds)


def main(arguments: list[str] | None = None) -> int:
    """Compile, examine, write a record; 0 if clean, 1 if not or not possible, 2 if refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tools", default=",".join(OPTIONS), help="by comma")
    parser.add_argument("--out", type=Path, help="folder or .json file of the record")
    parser.add_argument("--commit", help="the commit of these sources, where .git is absent")
    parser.add_argument("--allow-dirty", action="store_true", help="record uncommitted changes")
    options = parser.parse_args(arguments)
    try:
        path = find_tool()
        bench.require_gpu()
        meta = record.collect(options.commit, options.allow_dirty)
        subprocess.run([sys.executable, str(SCRIPT), "--compile"], check=True)
        found = tuple(examine(path, tool) for tool in options.tools.split(","))
    except record.RecordError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    except (SanitizerError, bench.NoDevice, subprocess.CalledProcessError) as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 1
    written = record.Record(meta, found).write(record.place(meta, options.out, "sanitizer"))
    for each in found:
        print(
            f"{each.tool}: {each.errors} errors, {each.hazards} hazards in {len(each.cases)} "
            f"cases ({each.seconds:.0f} s)"
        )
    print(f"record: {written}")
    return 0 if all(each.clean for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
