"""What docs/extending.md shows: its package, as installers leave it, with variants; single files.

The page is the only place where this code stands.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def files_between(start: str, end: str) -> dict[str, str]:
    """The files of a part of the page, by the paths that stand above them."""
    text = PAGE.read_text(encoding="utf-8")
    text = text[text.index(start) : text.index(end)]
    files: dict[str, str] = {}
    for said, code in re.findall(r"([^`]*(?:`[^`\n]+`[^`]*)*)```\w+\n(.*?)```", text, re.S):
        for path in re.findall(r"`([\w/]+\.(?:py|yaml|toml))`", said):
            files[path] = code
    return files


def shown_files() -> dict[str, str]:
    """The files of the package, by path, as the page has them."""
    files = files_between("## A package of your own", "With the package installed")
    power = files["ring_data/conf/labels/power.yaml"].replace("method: power", "method: medians")
    files["ring_data/conf/labels/medians.yaml"] = "\n".join(power.splitlines()[:4])
    return files


def shown_module(name: str) -> ModuleType:
    """The module of a single file NAME.py of the page."""
    code = files_between("## A class distance", "## A functional")[f"{name}.py"]
    # Dataclasses look their module up.
    module = sys.modules[f"shown_{name}"] = ModuleType(f"shown_{name}")
    exec(compile(code, f"{PAGE.name}: {name}.py", "exec"), vars(module))
    return module


def install(site: Path, files: dict[str, str]) -> Path:
    """Write files of a package, and the metadata that installers make of its pyproject.toml."""
    for path, code in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(code, encoding="utf-8")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    (site / "pyproject.toml").unlink()
    name, version = project["name"], project["version"]
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in groups
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return site


def other(name: str, module: str, code: str, **groups: dict[str, str]) -> dict[str, str]:
    """Files of a package of one module, with entry points by group."""
    entries = "".join(
        f'[project.entry-points."otdd_flash.{group}"]\n'
        + "".join(f'{key} = "{value}"\n' for key, value in parts.items())
        for group, parts in groups.items()
    )
    project = f'[project]\nname = "{name}"\nversion = "2.0"\n{entries}'
    return {"pyproject.toml": project, f"{module}/__init__.py": code}
