"""The package imports with any DSL or none; the first use says what is accepted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cutedsl_fa3 import versions

ROOT = Path(__file__).resolve().parent.parent
ABSENT = 'raise ModuleNotFoundError("No module named \'cutlass\'", name="cutlass")'


@pytest.mark.parametrize(
    ("stub", "said"),
    [
        ('__version__ = "4.6.0"', "4.6.0"),
        ('__version__ = "5.0.0"', "5.0.0"),
        ("", "of unknown version"),
        (ABSENT, "No module named 'cutlass'"),
        ('raise TypeError("unsupported operand")', "TypeError: unsupported operand"),
    ],
    ids=["older", "newer", "foreign", "absent", "broken"],
)
def test_first_use_of_another_dsl_names_found_and_accepted_version(tmp_path, stub, said):
    (tmp_path / "cutlass.py").write_text(stub + "\n")
    code = (
        f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT)]}\n"  # before the installed DSL
        "import cutedsl_fa3, cutedsl_fa3.compile, cutedsl_fa3.cache, cutedsl_fa3.audit\n"
        "assert 'cutlass' not in sys.modules\n"
        "try:\n"
        "    cutedsl_fa3.compile.compile_kernel(object())\n"
        "except cutedsl_fa3.versions.VersionError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert said in result.stdout
    assert versions.ACCEPTED_DSL in result.stdout
    assert versions.PIP_COMMAND in result.stdout
    assert len(result.stdout.splitlines()) == 1


def test_installed_dsl_is_accepted_and_described():
    versions.require_dsl()
    tools = versions.toolchain()
    assert tools.cutlass == versions.TESTED_DSL
    assert tools.flavour == "cu" + tools.ptxas.split(".")[0]
    assert tools.torch not in tools.compiler
    assert str(tools) == f"{tools.compiler} torch {tools.torch}"


def test_accepted_version_is_the_one_the_project_pins():
    pins = (ROOT / "pyproject.toml").read_text()
    assert f'"nvidia-cutlass-dsl[cu13]{versions.ACCEPTED_DSL}"' in pins
