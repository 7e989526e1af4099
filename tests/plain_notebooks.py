"""Run a notebook without Jupyter, which a GPU host may not have, and store its outputs in place.

`python tests/run_notebooks.py` does this where Jupyter is missing; this file runs one notebook in
its own process.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_notebooks import CELL_FILE, ROOT

NOTEBOOK_SECONDS = 600


def execute_plainly(notebook: dict[str, Any]) -> None:
    """Run the cells in this process and put their outputs into the notebook.

    Shown are what cells print, the value of a last expression, and open figures of pyplot. A value
    with `_repr_png_` is a picture.

    Raises: what a cell raises.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as scratch:
        for number, cell in enumerate(cells, start=1):
            # A file, because kernels read their source from one; its name is one of Jupyter's.
            file = Path(scratch, "ipykernel_1", f"{number}.py")
            file.parent.mkdir(exist_ok=True)
            source = "".join(cell["source"])
            file.write_text(source)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                value = _run_cell(source, str(file), namespace)
            cell["execution_count"] = number
            cell["outputs"] = list(_outputs(printed.getvalue(), value, number))


def _run_cell(source: str, file: str, namespace: dict[str, Any]) -> Any:
    """The value of the last statement, if that is an expression."""
    body = ast.parse(source, file).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), file, "exec"), namespace)
    if last is None or source.rstrip().endswith(";"):
        return None
    return eval(compile(ast.Expression(last.value), file, "eval"), namespace)


def _outputs(printed: str, value: Any, number: int) -> Iterator[dict[str, Any]]:
    if printed:
        text = CELL_FILE.sub("<cell>", printed).splitlines(keepends=True)
        yield {"name": "stdout", "output_type": "stream", "text": text}
    if value is not None:
        shown = {"text/plain": CELL_FILE.sub("<cell>", repr(value)).splitlines(keepends=True)}
        if hasattr(value, "_repr_png_"):
            shown["image/png"] = _base64(value._repr_png_())
        result = {"data": shown, "execution_count": number, "metadata": {}}
        yield {**result, "output_type": "execute_result"}
    if "matplotlib.pyplot" in sys.modules:
        pyplot = sys.modules["matplotlib.pyplot"]
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            picture = io.BytesIO()
            figure.savefig(picture, format="png", bbox_inches="tight")
            data = {"image/png": _base64(picture.getvalue()), "text/plain": [repr(figure)]}
            yield {"data": data, "metadata": {}, "output_type": "display_data"}
        pyplot.close("all")


def _base64(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def run_plainly(path: Path) -> None:
    """Run a notebook in this process and write it, as nbformat does."""
    notebook = json.loads(path.read_text())
    sys.path.insert(0, str(path.parent))  # as in Jupyter
    with contextlib.chdir(path.parent):
        execute_plainly(notebook)
    text = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n")


def run_apart(path: Path) -> None:
    """Run a notebook without Jupyter in a process of its own, with a cache of its own."""
    with tempfile.TemporaryDirectory(prefix="notebook_") as scratch:
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "CUTEDSL_FA3_CACHE": f"{scratch}/cache",
            "MPLBACKEND": "agg",
        }
        command = [sys.executable, __file__, str(path)]
        subprocess.run(command, env=environment, check=True, timeout=NOTEBOOK_SECONDS)


if __name__ == "__main__":
    run_plainly(Path(sys.argv[1]).resolve())
