"""The notebooks: they run from top to bottom, and what is stored in them is fit to be read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_notebooks import NOTEBOOKS, README, ROOT, SAID, execute, said, with_table

# A path of the machine that ran it: of a home, a temporary folder, a checkout, an interpreter.
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|var|usr|opt|mnt|work|workspace|Users|private)/\w|[A-Z]:\\\\"
)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def stored_text(cell: dict) -> str:
    """The text of a cell's outputs: streams, errors, and every form of text of a value."""
    parts = []
    for output in cell["outputs"]:
        parts += [output.get("text", ""), output.get("traceback", "")]
        parts += [text for form, text in output.get("data", {}).items() if "text" in form]
    return "\n".join("".join(part) for part in parts)


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.jupyter
@pytest.mark.slow
@pytest.mark.compile
@every_notebook
def test_a_notebook_runs_from_top_to_bottom(path: Path) -> None:
    for cell in execute(path).cells:
        for output in cell.get("outputs", ()):
            assert (output["output_type"], output.get("name")) != ("stream", "stderr"), output


@pytest.mark.gpu
@pytest.mark.slow
@every_notebook
def test_a_notebook_runs_on_a_gpu(path: Path, tmp_path: Path) -> None:
    """As a script, for want of Jupyter there, and without its figures."""
    script = tmp_path / f"notebook_{path.stem}.py"
    code = [c for c in cells(path, "code") if "figure" not in c["metadata"].get("tags", ())]
    script.write_text("\n\n".join("".join(cell["source"]) for cell in code))
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(
        [sys.executable, script],
        cwd=path.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@every_notebook
def test_every_code_cell_was_run_in_order_without_an_error(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error", output["evalue"]
            assert output.get("name") != "stderr", output["text"]


@every_notebook
def test_no_output_names_a_place_on_the_machine_that_made_it(path: Path) -> None:
    for cell in cells(path, "code"):
        text = stored_text(cell)
        assert not MACHINE_PATH.search(text), MACHINE_PATH.search(text)
        for place in (ROOT, sys.prefix, Path.home()):
            assert f"{place}/" not in text


def test_the_search_for_paths_finds_them_and_nothing_else() -> None:
    for text in ("in /tmp/x.py", '"/home/me/a"', "(/opt/conda)", "at /Users/me/a.py:3"):
        assert MACHINE_PATH.search(text), text
    for text in ("m/tmp", "tiles/work", "TFLOP/s", "notebooks/data/x.json", "a / b"):
        assert not MACHINE_PATH.search(text), text


@every_notebook
def test_a_notebook_opens_with_what_it_shows_needs_and_takes(path: Path) -> None:
    first = json.loads(path.read_text())["cells"][0]
    text = "".join(first["source"])
    assert first["cell_type"] == "markdown"
    assert text.startswith("# ")
    assert [name for name, text in said(path).items() if text] == list(SAID)


@every_notebook
def test_a_notebook_is_plain_python_without_magics(path: Path) -> None:
    """So that it runs as a script too."""
    for cell in cells(path, "code"):
        compile("".join(cell["source"]), path.name, "exec")


def test_the_table_of_notebooks_has_what_each_says_of_itself() -> None:
    text = README.read_text()
    assert text == with_table(text, NOTEBOOKS), "run: python tests/run_notebooks.py --table"


def test_the_table_takes_a_sentence_of_each_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "07_made_up.ipynb"

    def write(text: str) -> None:
        path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": [text]}]}))

    write("# 7. X\n\n**Shows** a | b\nand c. More.\n\n**Needs** 1.5 GB\n\n**Takes** 3 s.\n")
    text = with_table("a\n<!-- notebooks:start -->\nold\n<!-- notebooks:end -->\nb", [path])
    assert "| [07_made_up](07_made_up.ipynb) | a \\| b and c | 1.5 GB | 3 s |\n" in text
    assert "old" not in text and text.startswith("a\n<") and text.endswith(">\nb")
    write("# 7. X\n\n**Shows** a\n\n**Takes** 3 s.\n")
    with pytest.raises(ValueError, match=r"07_made_up.ipynb: .* \*\*Needs\*\*"):
        said(path)
