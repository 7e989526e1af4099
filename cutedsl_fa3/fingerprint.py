"""The sources that can affect a kernel's code, file by file.

A file edited since this process started may not be what the process has imported. Its text would
then vouch for code made from the older text, so such a fingerprint is good for this process alone.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("cutedsl_fa3", "cutedsl_fa3.layouts", "cutedsl_fa3.pipelines")
# These read, check, report or write variants: what they choose reaches a kernel through its key
# text only, and nothing of theirs runs while one is traced. Two hold kernels of their own, which no
# cache keeps: `inline_ptx.py` and `tma_probe.py`. A name that ends in / is a folder.
WITHOUT_CODE = frozenset(
    {
        "__main__.py",
        "arguments.py",
        "audit.py",
        "backward.py",
        "bars.py",
        "bench.py",
        "bench_call.py",
        "bench_gallery.py",
        "bench_gemm.py",
        "bench_ladder.py",
        "cache.py",
        "calls.py",
        "calls_backward.py",
        "cases.py",
        "checks.py",
        "cli.py",
        "cli_bench.py",
        "cli_contract.py",
        "cli_doctor.py",
        "cli_ladder.py",
        "cli_ledger.py",
        "cli_model.py",
        "cli_timeline.py",
        "cli_train.py",
        "configs.py",
        "contract.py",
        "counters.py",
        "demo.py",
        "emulate.py",
        "evidence.py",
        "figures.py",
        "fingerprint.py",
        "gallery.py",
        "gallery_page.py",
        "gemm.py",
        "global_tensor.py",
        "hang.py",
        "hang_attention.py",
        "inline_ptx.py",
        "inputs.py",
        "interface.py",
        "ladder.py",
        "ladder_page.py",
        "layouts/copy_engine.py",
        "layouts/doctor/",
        "ledger/",
        "masks.py",
        "model/",
        "named.py",
        "operators.py",
        "packing.py",
        "peers.py",
        "record.py",
        "reference.py",
        "reproducer.py",
        "sampled.py",
        "sass.py",
        "schedules.py",
        "seen.py",
        "scores.py",
        "shadow.py",
        "smem_pictures.py",
        "tables.py",
        "timeline/",
        "tma_probe.py",
        "training.py",
        "tuned.py",
        "tuning.py",
        "why.py",
    }
)
EDITED = "edited "  # before the fingerprint of a file that is good for this process alone

_LOADED_AT = time.time()


def sources() -> dict[str, str]:
    """A fingerprint of each of the package's files that can affect code, by "package/file".

    They are read anew for each kernel that is not in memory: a few milliseconds beside a load from
    disk, and a package reloaded in a notebook is not given its older self's kernels.
    """
    return files_in(_folders())


def source_fingerprint() -> str:
    """One hash of all of `sources()`."""
    return combined(sources())


def combined(fingerprints: Mapping[str, str]) -> str:
    """One hash of the fingerprints of files."""
    lines = "".join(f"{name} {each}\n" for name, each in sorted(fingerprints.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def files_in(folders: Mapping[str, Path]) -> dict[str, str]:
    """A fingerprint of every .py file below `folders` (import name to place) that affects code."""
    found = {}
    for name, folder in sorted(folders.items()):
        start = len(str(folder)) + 1
        for path in sorted(map(str, folder.rglob("*.py"))):
            relative = path[start:].replace(os.sep, "/")
            file = f"{name.removeprefix('cutedsl_fa3.')}/{relative}"
            if not _without_code(file.removeprefix("cutedsl_fa3/")):
                found[file] = _of_file(path)
    return found


def _without_code(file: str) -> bool:
    """Whether a file is one of `WITHOUT_CODE`, or lies in a folder of it."""
    folders = (file[: i + 1] for i, letter in enumerate(file) if letter == "/")
    return file in WITHOUT_CODE or any(folder in WITHOUT_CODE for folder in folders)


def _of_file(path: str) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read())
        edited = os.fstat(file.fileno()).st_mtime > _LOADED_AT
    if edited:
        digest.update(_this_process())
    return f"{EDITED if edited else ''}{digest.hexdigest()[:32]}"


@functools.cache
def _folders() -> dict[str, Path]:
    folders = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders[name] = Path(next(iter(spec.submodule_search_locations)))
    return folders


def _this_process() -> bytes:
    return f"edited after import, process {os.getpid()} {_LOADED_AT!r}".encode()


def is_ours(kernel_class: type) -> bool:
    """Whether all that a kernel's class inherits is of this package, and so in `sources`."""
    modules = {base.__module__.partition(".")[0] for base in kernel_class.__mro__}
    return modules <= {"cutedsl_fa3", "cutlass", *sys.stdlib_module_names}
