"""A function in a process of its own: one that hangs or faults takes nothing with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
LIMIT = 180  # seconds: two imports of torch on a busy machine, a few compiles, then milliseconds


def alone(
    function: Callable[..., Any], *args: Any, limit: float = LIMIT, **environment: str
) -> str:
    """Call a function of a module in a fresh process, its output returned.

    Arguments must be what `repr` prints; keywords are environment variables.
    Raises: AssertionError with the end of its output where it fails or takes longer than `limit`.
    """
    module = sys.modules[function.__module__]
    folder = str(Path(module.__file__ or "").parent)
    code = "" if "." in module.__name__ else f"import sys\nsys.path.append({folder!r})\n"
    code += (
        f"from {function.__module__} import {function.__qualname__} as function\n"
        f"function(*{args!r})\n"
    )
    return python("-c", code, limit=limit, **environment).stdout


def python(
    *arguments: str, limit: float = LIMIT, given: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout on its path, `given` on its standard input.

    Raises: AssertionError with the end of its output where it fails or takes longer than `limit`.
    """
    path = os.pathsep.join((str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")))
    try:
        result = subprocess.run(
            [sys.executable, *arguments],
            input=given,
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        said = _ends(arguments, expired.stdout, expired.stderr)
        raise AssertionError(f"not done after {limit} s: {said}") from None
    said = _ends(arguments, result.stdout, result.stderr)
    assert result.returncode == 0, f"ended with {result.returncode}: {said}"
    return result


def _ends(arguments: tuple[str, ...], *outputs: str | bytes | None) -> str:
    """What was run, and the end of what it said."""
    return "\n".join((arguments[-1][-200:], *map(_end, outputs)))


def _end(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return text[-4000:]
