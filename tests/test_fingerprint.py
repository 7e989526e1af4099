"""A kernel's key follows the sources that can affect its code, and no others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cutedsl_fa3
from cutedsl_fa3 import fingerprint
from cutedsl_fa3.kernels.sm90.forward import ForwardSm90
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def sources(tmp_path) -> dict[str, Path]:
    """A copy of the package, last changed before this process started."""
    package = Path(cutedsl_fa3.__file__).parent
    for name in ("cutedsl_fa3", "layouts", "pipelines"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package.parent / name, tmp_path / name, ignore=ignored)
    for path in tmp_path.rglob("*.py"):
        os.utime(path, (1e9, 1e9))
    return {
        "cutedsl_fa3": tmp_path / "cutedsl_fa3",
        "cutedsl_fa3.layouts": tmp_path / "layouts",
        "cutedsl_fa3.pipelines": tmp_path / "pipelines",
    }


@pytest.mark.parametrize(
    ("package", "file"),
    [
        ("cutedsl_fa3", "compile.py"),
        ("cutedsl_fa3.layouts", "errors.py"),
        ("cutedsl_fa3.pipelines", "expect.py"),
    ],
)
def test_fingerprint_changes_with_one_byte_of_source(sources, package, file):
    before = fingerprint.combined(fingerprint.files_in(sources))
    assert fingerprint.combined(fingerprint.files_in(sources)) == before
    path = sources[package] / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, (1e9, 1e9))
    changed = fingerprint.combined(fingerprint.files_in(sources))
    assert changed != before
    (path.parent / "added.py").write_text("")
    os.utime(path.parent / "added.py", (1e9, 1e9))
    assert fingerprint.combined(fingerprint.files_in(sources)) not in (before, changed)


def test_fingerprint_ignores_what_only_reads_checks_or_reports(sources):
    before = fingerprint.files_in(sources)
    for name in fingerprint.WITHOUT_CODE:
        of_layouts = name.startswith("layouts/")
        path = sources["cutedsl_fa3.layouts" if of_layouts else "cutedsl_fa3"]
        path /= name.removeprefix("layouts/")
        files = list(path.rglob("*.py")) if name.endswith("/") else [path]
        assert files
        for file in files:
            file.write_text(file.read_text() + "\n")
    assert fingerprint.files_in(sources) == before


def test_every_other_file_has_a_fingerprint_of_its_own(sources):
    found = fingerprint.files_in(sources)
    names = {"cutedsl_fa3/compile.py", "layouts/tile.py", "pipelines/ring.py"}
    assert names | {"cutedsl_fa3/kernels/sm90/forward.py"} <= set(found)
    path = sources["cutedsl_fa3.layouts"] / "tile.py"
    path.write_text(path.read_text() + "\n")
    os.utime(path, (1e9, 1e9))
    changed = fingerprint.files_in(sources)
    assert {name for name in found if found[name] != changed[name]} == {"layouts/tile.py"}


def test_no_kernel_imports_what_the_fingerprint_ignores():
    kernels = ROOT / "cutedsl_fa3" / "kernels"
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in kernels.rglob("*.py")
        if path.stem != "__init__"
    ]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    ignored = tuple(
        f"cutedsl_fa3.{name.removesuffix('.py').removesuffix('/').replace('/', '.')}"
        for name in fingerprint.WITHOUT_CODE
    )
    assert len(modules) > 4
    assert not {
        name
        for name in result.stdout.split()
        if f"{name}.".startswith(tuple(f"{i}." for i in ignored))
    }


def test_source_edited_after_import_vouches_for_this_process_only(sources, monkeypatch):
    path = sources["cutedsl_fa3"] / "compile.py"
    os.utime(path, (time.time() + 60, time.time() + 60))
    here = fingerprint.combined(fingerprint.files_in(sources))
    assert fingerprint.combined(fingerprint.files_in(sources)) == here
    file = "cutedsl_fa3/compile.py"
    assert fingerprint.files_in(sources)[file].startswith(fingerprint.EDITED)
    monkeypatch.setattr(fingerprint, "_LOADED_AT", fingerprint._LOADED_AT + 1e-3)  # another process
    assert fingerprint.combined(fingerprint.files_in(sources)) != here


def test_fingerprint_is_cheap():
    folders = fingerprint._folders()
    assert set(folders) == {"cutedsl_fa3", "cutedsl_fa3.layouts", "cutedsl_fa3.pipelines"}
    times = []
    for _ in range(5):  # the machine may be busy: the fastest is what it costs
        start = time.perf_counter()
        fingerprint.files_in(folders)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1


def test_a_class_is_ours_only_if_all_that_it_inherits_is():
    class Mine(GemmSm90):
        """From outside, whatever it changes."""

    assert fingerprint.is_ours(GemmSm90) and fingerprint.is_ours(ForwardSm90)
    assert not fingerprint.is_ours(Mine) and not fingerprint.is_ours(type("Deep", (Mine,), {}))
