"""The notebooks: NAME.py runs, and NAME.ipynb holds the same cells with small outputs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def _cells_of_script(name: str) -> list[tuple[str, str]]:
    """(kind, source) of the cells of a script in jupytext's percent format."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    cells = []
    for part in re.split(r"^# %%", text, flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", body.strip()))
    return cells


def _notebook(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_both_halves_of_a_pair_hold_the_same_cells_and_outputs_are_small(name):
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in _notebook(name)["cells"]]
    assert cells == _cells_of_script(name), "run `make notebooks`"
    outputs = [cell["outputs"] for cell in _notebook(name)["cells"] if cell["cell_type"] == "code"]
    assert any(outputs)
    assert not [output for cell in outputs for output in cell if output["output_type"] == "error"]
    assert (FOLDER / f"{name}.ipynb").stat().st_size <= 60_000


def _run(name: str, folder: Path) -> str:
    """What a notebook's script prints."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.xdist_group("apart")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_prints_what_it_shows(name, tmp_path, apart):
    shown = [
        line
        for cell in _notebook(name)["cells"]
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
        for line in "".join(output["text"]).splitlines()
    ]
    # Numbers may differ in their last digits from one processor to another.
    words = [re.sub(r"[\d.,%\[\]-]+", "", line) for line in shown]
    printed = apart(_run, name, tmp_path).splitlines()
    assert [re.sub(r"[\d.,%\[\]-]+", "", line) for line in printed] == words
