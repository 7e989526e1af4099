"""Run every notebook, or those given, and store their outputs in place: `make notebooks`."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 120  # of one cell, on a busy machine

# What Jupyter calls the file of a cell: a temporary path that is another in every run.
_CELL_FILE = re.compile(r"[^\s'\"(<]*ipykernel_\d+[/\\]\d+\.py")


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
                    holder[key] = _CELL_FILE.sub("<cell>", holder[key])
    return notebook


def main(paths: list[Path]) -> None:
    """Execute and write each."""
    import nbformat

    for path in paths:
        start = time.perf_counter()
        nbformat.write(execute(path), path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main([Path(arg).resolve() for arg in sys.argv[1:]] or NOTEBOOKS)
