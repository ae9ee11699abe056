"""A table of all measured files with the machine, the versions and the commit of each.

The line `{{ results }}` of a page becomes the table. A number may be older than the code: the
commit says of which code it is.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the table where it asks for it."""
    if "{{ results }}" not in markdown:
        return markdown
    return markdown.replace("{{ results }}", table(RESULTS))


def on_files(files: Any, config: Any) -> Any:
    """The site's files, and every file that the table leads to."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.glob("*.json")):
        name = f"repository/experiments/results/{path.name}"
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def table(folder: Path) -> str:
    """The table in Markdown, one row for every JSON file of the folder itself."""
    lines = ["| file | machine | PyTorch | commit |", "|---|---|---|---|"]
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        known = content.get("environment", content)
        cores = f", {known['cores']} cores" if known.get("cores") else ""
        machine = known.get("gpu") or f"{known.get('processor') or 'not recorded'}{cores}"
        commits = {known.get("commit")}
        commits |= {row.get("commit") for row in _rows(content)}
        lines.append(
            f"| [{path.stem}](repository/experiments/results/{path.name}) | {machine} "
            f"| {known.get('versions', {}).get('torch') or 'not recorded'} "
            f"| {', '.join(sorted(filter(None, commits))) or _committed(path)} |"
        )
    return "\n".join(lines)


def _committed(path: Path) -> str:
    """The commit that a file which records none came with, where the history is there."""
    command = ["git", "-C", str(path.parent), "log", "-1", "--format=%h", "--", path.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"came with {done.stdout.strip()}" if done.stdout.strip() else "not recorded"


def _rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    rows = content.get("rows", [])
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
