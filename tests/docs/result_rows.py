"""Rows of the files of experiments/results, which the tables of docs/benchmarks.md are made of."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
EPSILONS = (0.1, 0.01, 0.001)
# The first cell of a row, and the numbers of the others but of machine and run.
Claim = tuple[str, list[float]]
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


@cache
def content(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def row(name: str, **keys: Any) -> dict[str, Any]:
    """The only row of a file that has these values."""
    rows = [r for r in content(name)["rows"] if all(r[key] == keys[key] for key in keys)]
    assert len(rows) == 1, (name, keys, len(rows))
    found: dict[str, Any] = rows[0]
    return found


def seconds_to_converge(name: str, **keys: Any) -> list[float]:
    """Our time, and how many times as long the best of the others takes, or more than that."""
    rows = [r for r in content(name)["rows"] if all(r[key] == keys[key] for key in keys)]
    ours = next(r for r in rows if r["method"] == "ours")["seconds_to_target"]
    others = [r for r in rows if not r["method"].startswith(("ours", "plain"))]
    reached = [r["seconds_to_target"] for r in others if r.get("seconds_to_target")]
    floors = [r["at_least_seconds"] for r in others if r.get("at_least_seconds")]
    # What was stopped counts down to its whole multiple.
    return [ours, min(reached) / ours if reached else int(min(floors) / ours)]


def shows(text: str, values: list[float]) -> bool:
    """Whether the numbers of a text are these, each to the digits that are shown."""
    shown = _NUMBER.findall(text)
    return len(shown) == len(values) and all(map(_agree, shown, values))


def _agree(shown: str, value: float) -> bool:
    number, _, power = shown.replace(",", "").partition("e")
    unit = 10.0 ** (int(power or 0) - len(number.partition(".")[2]))
    return abs(float(f"{number}e{power or 0}") - value) <= 0.5 * unit * (1 + 1e-6)
