"""Execute the notebooks and write each NAME.ipynb from its NAME.py: `make notebooks`.

The text is edited in NAME.py, a pair of jupytext; the outputs are in NAME.ipynb alone. What a cell
writes to stderr, paths and times are left out, so that only what changed is written anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
NAMES = ("first_distance", "flow", "choosing_a_source")


def execute(name: str) -> None:
    """Write one notebook with its outputs."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True).execute()
    for number, cell in enumerate(notebook.cells):
        # Otherwise random, and of this run.
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or NAMES:
        execute(chosen)
