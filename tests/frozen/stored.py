"""`frozen.json`: the summaries of cases that agree in all settings, one case a line."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "frozen.json"


def read(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """The summaries of every case, by the names of their fields; none without a file."""
    if not file.exists():
        return {}
    cases: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cases"]
    return cases


def agreed_with(file: Path = FILE) -> list[str]:
    """The settings in which every case of the file agreed."""
    settings: list[str] = json.loads(file.read_text(encoding="utf-8"))["agreed with"]
    return settings


def write(
    cases: Mapping[str, Mapping[str, Any]], settings: Sequence[str], file: Path = FILE
) -> None:
    """Write summaries, and the settings in which they agreed."""
    import numpy
    import torch

    about = {
        "written by": "python -m tests.frozen --write",
        "agreed with": list(settings),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
    }
    lines = [f'"{name}": {json.dumps(fields)}' for name, fields in cases.items()]
    head = json.dumps(about, indent=1)[:-2]
    body = ",\n".join(lines)
    file.write_text(f'{head},\n "cases": {{\n{body}\n }}\n}}\n', encoding="utf-8")
