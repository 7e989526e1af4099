"""Print each requirement of pyproject.toml that this interpreter lacks, and exit 1 if any.

Arguments are extras that are needed too, besides `test`.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,-]+\])?(?P<rule>==|>=)(?P<version>[\d.]+)")


def release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.11.0+cu130" gives (2, 11, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def unmet(requirement: str) -> str | None:
    """What is wrong with an installed package, or None when it meets the requirement."""
    wanted = REQUIREMENT.fullmatch(requirement)
    if wanted is None:
        return f"{requirement}: only NAME==VERSION and NAME>=VERSION are understood here"
    try:
        found = version(wanted["name"])
    except PackageNotFoundError:
        return f"{requirement}: not installed"
    have, want = release(found), release(wanted["version"])
    met = have == want if wanted["rule"] == "==" else have >= want
    return None if met else f"{requirement}: found {found}"


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - any python on PATH may run this
        print(f"python >= 3.11: found {sys.version.split()[0]}")
        return 1
    import tomllib

    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in ("test", *sys.argv[1:]):
        requirements += project["optional-dependencies"][extra]
    problems = [problem for problem in map(unmet, requirements) if problem]
    # CUDA's own disassembler serves as well as the packaged one.
    cuda = "/usr/local/cuda/bin"
    if not shutil.which("nvdisasm") and not shutil.which("nvdisasm", path=cuda):
        problems += filter(None, map(unmet, project["optional-dependencies"]["inspect"]))
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
