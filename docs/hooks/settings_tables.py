"""Tables of every key of the commands with its default, made of the files in conf/.

A key's description is the comment beside it, or else the comment above it. The line
`{{ settings }}` of a page becomes these tables.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

CONF = Path(__file__).resolve().parents[2] / "conf"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[a-z_]+):(?: +(?P<value>.*?))? *$")
# Of the commands' own files: what Hydra reads, not a user's setting.
_HYDRAS = ("defaults", "hydra")
# Which choice a file is, known from its name.
_CHOICES = ("name", "method", "schedule", "content", "tracker")
_COMMANDS = ("distance", "flow", "study", "nearest", "mix", "shift")
# (folder, what stands before its keys, its heading)
_GROUPS = (
    ("dataset", "source.", "Datasets: `source=` and `target=`"),
    ("extractor", "extractor.", "Extractors: `extractor=`"),
    ("labels", "labels.", "Class distances: `labels=`"),
    ("solver", "solver.", "Solvers: `solver=`"),
    ("report", "report.", "Reports: `report=`"),
    ("log", "log.", "Trackers: `log=`"),
    ("tasks", "tasks.", "Tasks of a study: `tasks=`"),
)


class Setting(NamedTuple):
    """One key of a file."""

    key: str
    default: str
    description: str


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the tables where it asks for them."""
    if "{{ settings }}" not in markdown:
        return markdown
    return markdown.replace("{{ settings }}", tables())


def tables() -> str:
    """All tables, in Markdown."""
    parts = ["### Where and how any command runs\n", _table("", settings(CONF / "runtime.yaml"))]
    for name in _COMMANDS:
        parts += [
            f"### `python -m otdd_flash.{name}`\n",
            _table("", settings(CONF / f"{name}.yaml")),
        ]
    for folder, prefix, heading in _GROUPS:
        parts += [f"### {heading}\n", *_group(folder, prefix)]
    return "\n".join(parts)


def _group(folder: str, prefix: str) -> list[str]:
    """The keys that every choice of a group has, in one table, and what each has beside them."""
    choices = {path: settings(path) for path in sorted((CONF / folder).glob("*.yaml"))}
    common = set.intersection(*({row.key for row in rows} for rows in choices.values()))
    shared: list[Setting] = []
    for row in next(iter(choices.values())):
        defaults = {
            path.stem: other.default
            for path, rows in choices.items()
            for other in rows
            if other.key == row.key
        }
        if row.key in common and row.key not in _CHOICES:
            shared.append(row._replace(default=_together(defaults)))
    parts = ["Keys of every choice:\n", _table(prefix, shared)] if shared else []
    for path, rows in choices.items():
        own = [row for row in rows if row.key not in common and row.key not in _CHOICES]
        parts.append(f"**`{path.stem}`** {_code(_opening(path))}\n")
        parts += [_table(prefix, own)] if own else []
    return parts


def _together(defaults: dict[str, str]) -> str:
    """One default where all choices have the same, and otherwise each with the choices it is of."""
    values = list(dict.fromkeys(defaults.values()))
    if len(values) == 1:
        return values[0]
    named = {value: [name for name in defaults if defaults[name] == value] for value in values}
    common = max(values, key=lambda value: len(named[value]))
    others = [f"{value} ({', '.join(named[value])})" for value in values if value != common]
    return "; ".join([common, *others])


def settings(path: Path) -> list[Setting]:
    """The keys of one file in their order, those of mappings as `mapping.key`."""
    found: list[Setting] = []
    above: list[str] = []
    parents: list[tuple[int, str]] = []
    skipped, first = False, True
    for line in path.read_text("utf-8").splitlines():
        if line.strip().startswith("#"):
            above.append(line.strip().lstrip("#").strip())
            continue
        match = _KEY.match(line)
        if match is None:
            if not line.strip():
                above = []
            continue
        indent, value = len(match["indent"]), match["value"] or ""
        if indent == 0:
            skipped = match["key"] in _HYDRAS
        if skipped:
            continue
        while parents and parents[-1][0] >= indent:
            parents.pop()
        key = ".".join([*(name for _, name in parents), match["key"]])
        value, _, beside = value.partition("  # ")
        if not value:
            parents.append((indent, match["key"]))
        # The first comment of a file of a group is about the choice, not about its first key.
        opening = first and path.parent != CONF
        description = beside or ("" if opening else " ".join(above))
        above, first = [], False
        if value:
            found.append(Setting(key, value.strip(), description))
    return found


def _opening(path: Path) -> str:
    """The comment that a file begins with."""
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return " ".join(lines)


def _table(prefix: str, rows: list[Setting]) -> str:
    lines = ["| key | default | what it is |", "|---|---|---|"]
    for row in rows:
        default, description = (text.replace("|", "\\|") for text in (row.default, row.description))
        lines.append(f"| `{prefix}{row.key}` | `{default}` | {_code(description)} |")
    return "\n".join(lines) + "\n"


def _code(description: str) -> str:
    """Formulas and names of a comment as they stand, which Markdown would read as its own signs."""
    return re.sub(r"([_*<>\[\]])", r"\\\1", description)
