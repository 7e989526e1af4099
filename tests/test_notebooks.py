"""The notebooks: they run from top to bottom, and what is stored in them is fit to be read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plain_notebooks import execute_plainly, run_apart
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
    # As in Jupyter, files beside the notebook can be imported.
    paths = filter(None, (str(ROOT), str(path.parent), os.environ.get("PYTHONPATH")))
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


CELLS = (
    "def twice(x):\n    return 2 * x\n\nprint('twice is', twice(3))",
    "import inspect\n\ninspect.getsource(twice)",
    "class Dot:\n    def _repr_png_(self):\n        return b'png'\n\n\nDot()",
    "print(twice.__code__.co_filename)\ntwice(4)",
    "twice(5);",
    "try:\n    twice()\nexcept TypeError as error:\n    print(error)",
)


def notebook_of(*sources: str) -> dict:
    empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    made = [{**empty, "id": f"cell-{i}", "source": source} for i, source in enumerate(sources)]
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def test_without_jupyter_cells_leave_what_they_print_return_and_draw() -> None:
    notebook = notebook_of(*CELLS)
    execute_plainly(notebook)
    texts = [stored_text(cell).strip() for cell in notebook["cells"]]
    assert texts[0] == "twice is 6" and texts[5].startswith("twice() missing 1 required")
    assert texts[1] == repr("def twice(x):\n    return 2 * x\n")
    assert notebook["cells"][2]["outputs"][0]["data"]["image/png"] == "cG5n"
    assert texts[3].split() == ["<cell>", "8"] and texts[4] == ""
    assert [cell["execution_count"] for cell in notebook["cells"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.jupyter
@pytest.mark.slow
def test_without_jupyter_a_notebook_is_stored_as_with_it(tmp_path: Path) -> None:
    import nbformat

    path = tmp_path / "some.ipynb"
    path.write_text(json.dumps(notebook_of(*CELLS[:2], *CELLS[3:])))  # an object has its address
    nbformat.write(execute(path), path)
    stored = path.read_text()
    emptied = json.loads(stored)
    for cell in emptied["cells"]:
        cell["outputs"], cell["execution_count"] = [], None
    path.write_text(json.dumps(emptied))
    run_apart(path)
    assert path.read_text() == stored


def test_a_cell_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "some.ipynb"
    path.write_text(before := json.dumps(notebook_of("1 + 1", "1 / 0")))
    with pytest.raises(subprocess.CalledProcessError):
        run_apart(path)
    assert path.read_text() == before


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


_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
_TEST = re.compile(r"\btest_\w{16,}\b(?!\.py)")  # a claim, not a module


def all_markdown(path: Path) -> str:
    return "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))


@every_notebook
def test_files_that_a_notebook_links_to_exist(path: Path) -> None:
    for target in _LINK.findall(all_markdown(path)):
        assert (path.parent / target).exists(), target


@every_notebook
def test_tests_that_a_notebook_names_exist(path: Path) -> None:
    named = set(_TEST.findall(all_markdown(path)))
    files = (
        [file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py"))] if named else []
    )
    for name in named:
        assert any(f"def {name}(" in text for text in files), name


_PLACE = re.compile(r"\]\(\.\./([\w/]+\.py)\) `([\w.]+)`")


def test_the_map_names_places_that_exist_and_tests() -> None:
    text = all_markdown(ROOT / "notebooks" / "03_map.ipynb")
    assert len(_TEST.findall(text)) >= 10
    places = _PLACE.findall(text)
    assert len(places) >= 20
    for file, name in places:
        last = name.rpartition(".")[2]
        defined = rf"^\s*(def|class) {last}\b|^\s*{last}\s*[:=]"
        assert re.search(defined, (ROOT / file).read_text(), re.MULTILINE), (file, name)
