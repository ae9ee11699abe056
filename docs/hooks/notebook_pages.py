"""Each executed notebook becomes a page: its text, code, outputs and figures.

`notebooks/NAME.ipynb` is the page `notebooks/NAME.md`, converted by nbconvert. Pages link to
`../notebooks/NAME.ipynb`, which leads to the notebook where the repository is browsed, and to this
page in the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
_LINK = re.compile(r"\]\(\.\./notebooks/(\w+)\.ipynb\)")


def on_files(files: Any, config: Any) -> Any:
    """Add a page and its figures for every notebook."""
    from mkdocs.structure.files import File
    from nbconvert import MarkdownExporter

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        names = {"output_files_dir": f"{path.stem}_files", "unique_key": path.stem}
        body, resources = MarkdownExporter().from_filename(str(path), {**names})
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=_python(body)))
        for name, figure in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=figure))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to notebooks to their pages."""
    return _LINK.sub(r"](notebooks/\1.md)", markdown)


def _python(markdown: str) -> str:
    """Name the language of cells, which a notebook's metadata names only once it has run."""
    parts = markdown.split("```")
    cells = range(1, len(parts), 2)
    for k in cells:
        parts[k] = parts[k] if parts[k].startswith("python") else f"python{parts[k]}"
    return "```".join(parts)
