"""Run every notebook, or those given, and store their outputs in place: `make notebooks`.

Each time the table of notebooks/README.md is made anew, of what every notebook says of itself;
with --table alone, nothing else is done. Where Jupyter is missing, as on some GPU hosts, the cells
are run as plain Python (`plain_notebooks.py`) and leave the same outputs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = ROOT / "notebooks" / "README.md"
START, END = "<!-- notebooks:start -->", "<!-- notebooks:end -->"
SAID = ("Shows", "Needs", "Takes")  # by each notebook's first cell, a paragraph each
CELL_SECONDS = 120  # of one cell, on a busy machine

# What Jupyter calls the file of a cell: a temporary path that is another in every run.
CELL_FILE = re.compile(r"[^\s'\"(<]*ipykernel_\d+[/\\]\d+\.py")


def execute(path: Path) -> NotebookNode:
    """The notebook with the outputs of a fresh kernel, which is the interpreter that runs this.

    Raises: nbclient's CellExecutionError where a cell fails, CellTimeoutError where one hangs.
    """
    import nbformat
    from jupyter_client import KernelManager
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from nbclient import NotebookClient

    class ThisPython(KernelSpecManager):
        """Whatever kernel the notebook names: a user may have others of the same name."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

    notebook = nbformat.read(path, as_version=4)
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    with tempfile.TemporaryDirectory(prefix="notebook_") as scratch:
        kernel = KernelManager(
            kernel_spec_manager=ThisPython(), transport="ipc", ip=f"{scratch}/kernel"
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=CELL_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent)}},
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "CUTEDSL_FA3_CACHE": f"{scratch}/cache",  # outputs say what had to be compiled
        }
        try:
            client.execute(env=environment)
        finally:  # nbclient leaves a kernel that it was given running
            if kernel.has_kernel:
                kernel.shutdown_kernel(now=True)
    return _portable(notebook)


def _portable(notebook: NotebookNode) -> NotebookNode:
    """Without what differs between two machines that run the same code."""
    for name in set(notebook.metadata) - {"kernelspec", "language_info"}:
        del notebook.metadata[name]
    notebook.metadata.kernelspec = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            for holder, key in ((output, "text"), (output.get("data", {}), "text/plain")):
                if key in holder:
                    holder[key] = CELL_FILE.sub("<cell>", holder[key])
    return notebook


def said(path: Path) -> dict[str, str]:
    """What a notebook shows, needs and takes, in the words of its first cell: a sentence each.

    Raises: ValueError naming the paragraph that is missing.
    """
    first = "".join(json.loads(path.read_text())["cells"][0]["source"])
    found = {}
    for name in SAID:
        paragraph = re.search(rf"^\*\*{name}\*\* (.+?)(?:\n\n|\Z)", first, re.DOTALL | re.MULTILINE)
        if paragraph is None:
            raise ValueError(f"{path.name}: its first cell has no paragraph that begins **{name}**")
        text = " ".join(paragraph[1].split())
        found[name] = re.split(r"(?<=[^.])\.(?= |$)", text)[0]
    return found


def table(paths: list[Path]) -> str:
    """The notebooks as a table in Markdown, with what each says of itself."""
    lines = [f"| notebook | {' | '.join(map(str.lower, SAID))} |", "|---|---|---|---|"]
    for path in paths:
        cells = (text.replace("|", "\\|") for text in said(path).values())
        lines.append(f"| [{path.stem}]({path.name}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(text: str, paths: list[Path]) -> str:
    """The README's text with its table made anew."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table(paths)}\n{END}{after}"


def main(paths: list[Path]) -> None:
    """Execute and write each, then the table."""
    jupyter = all(find_spec(name) for name in ("nbclient", "ipykernel", "nbformat"))
    for path in paths:
        start = time.perf_counter()
        if jupyter:
            import nbformat

            nbformat.write(execute(path), path)
        else:
            from plain_notebooks import run_apart

            run_apart(path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
    README.write_text(with_table(README.read_text(), NOTEBOOKS))


if __name__ == "__main__":
    given = [Path(arg).resolve() for arg in sys.argv[1:] if arg != "--table"]
    main(given or ([] if "--table" in sys.argv else NOTEBOOKS))
