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


STUBS = {
    "older": '__version__ = "4.6.0"',
    "absent": ABSENT,
    "hidden": None,
}


def run_without(tmp_path: Path, stub: str | None, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` where `import cutlass` finds a stub, or nothing at all."""
    start = f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT)]}\n"
    if stub is None:
        start += "sys.modules['cutlass'] = None\n"
    else:
        (tmp_path / "cutlass.py").write_text(stub + "\n")
    command = [sys.executable, "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stub", STUBS.values(), ids=STUBS)
def test_every_public_name_that_needs_the_dsl_says_which_is_accepted(tmp_path, stub):
    code = (
        "import cutedsl_fa3 as fa3\n"
        "from cutedsl_fa3.versions import VersionError, require_dsl\n"
        "def said(use):\n"
        "    try:\n"
        "        use()\n"
        "    except VersionError as error:\n"
        "        return str(error)\n"
        "names = ('attention', 'attention_with_lse', 'plan', 'visits', 'Plan')\n"
        "names += ('Schedule', 'ScheduleError')\n"
        "print({name: said(lambda: getattr(fa3, name)) for name in names})\n"
        "assert {said(lambda: getattr(fa3, name)) for name in names} == {said(require_dsl)}\n"
        "fa3.Variant(mask=fa3.masks.causal), fa3.reference, fa3.LayoutError, fa3.Problem\n"
    )
    result = run_without(tmp_path, stub, code)
    assert result.returncode == 0, result.stdout + result.stderr
    assert versions.PIP_COMMAND in result.stdout


@pytest.mark.parametrize("stub", STUBS.values(), ids=STUBS)
def test_every_command_that_needs_the_dsl_refuses_with_the_version_error(tmp_path, stub):
    code = (
        "import typer\n"
        "from typer.testing import CliRunner\n"
        "from cutedsl_fa3.cli import app\n"
        "from cutedsl_fa3.versions import VersionError, require_dsl\n"
        "try:\n"
        "    require_dsl()\n"
        "except VersionError as error:\n"
        "    refused = f'refused: {error}\\n'\n"
        "commands = typer.main.get_command(app).commands\n"
        "assert len(commands) > 10\n"
        "for command in commands:\n"
        "    given = {'doctor': '--shape 8,64 --dtype bf16 --tile 8x64'}.get(command, '').split()\n"
        "    result = CliRunner().invoke(app, [command, *given])\n"
        "    assert (result.exit_code, result.stderr) == (2, refused), (command, result)\n"
        "    assert CliRunner().invoke(app, [command, '--help']).exit_code == 0\n"
    )
    result = run_without(tmp_path, stub, code)
    assert result.returncode == 0, result.stdout + result.stderr


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
