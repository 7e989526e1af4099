"""What the README promises: its example runs, its commands and links exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_as_far_as_this_machine_goes(capsys: pytest.CaptureFixture[str]) -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["out"].shape == scope["q"].shape
    assert "visits   k in [0, q1" in capsys.readouterr().out


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in README
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    "target",
    [
        "test",
        "demo",
        "bench",
        "bench-variants",
        "bench-call",
        "bench-gemm",
        "tune",
        "sanitize",
        "notebooks",
        "lint",
        "format",
    ],
)
def test_make_knows_every_documented_target(target: str) -> None:
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "notebooks/README.md"])
def test_relative_links_lead_somewhere(file: str) -> None:
    text = (ROOT / file).read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
        assert ((ROOT / file).parent / link).exists(), f"{file} links to {link}"
