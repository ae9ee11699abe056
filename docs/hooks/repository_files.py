"""Files of the repository that pages link to, measured numbers above all, become part of the site.

A page links to `../experiments/results/NAME.json`, which leads to the file where the repository is
browsed. In the site the file lies under `repository/`, in the same folders.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """The site's files, and those of the repository that they lead to."""
    from mkdocs.structure.files import File

    wanted: set[Path] = set()
    for page in list(files.documentation_pages()):
        # Pages made of notebooks are no files, and link to none.
        if page.abs_src_path is not None:
            _follow(Path(page.abs_src_path), Path(config["docs_dir"]), wanted)
    for path in sorted(wanted):
        name = f"repository/{path.relative_to(ROOT)}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of the folder of pages lead to the copies inside the site."""
    if page.file.src_uri.startswith("repository/"):
        return markdown
    return re.sub(r"\]\(\.\./", "](repository/", markdown)


def _follow(page: Path, pages: Path, wanted: set[Path]) -> None:
    """Add the files outside `pages` that a page links to, and what these link to if pages."""
    for match in _LINK.finditer(page.read_text("utf-8")):
        if "://" in match[1]:
            continue
        path = (page.parent / match[1]).resolve()
        if path in wanted or path.is_relative_to(pages) or not path.is_file():
            continue
        wanted.add(path)
        if path.suffix == ".md":
            _follow(path, pages, wanted)
