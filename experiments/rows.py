"""A result file whose rows are written as they are measured and kept when a script runs again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from experiments.environment import RESULTS, environment, write_result


class Rows:
    """The rows of NAME.json, each known by some of its entries.

    Args:
        name: of the result.
        keys: entries that say which measurement a row holds.
        packages: whose versions are recorded.
        folder: of the file.
        again: forget the rows that are there.
    """

    def __init__(
        self,
        name: str,
        keys: tuple[str, ...],
        *packages: str,
        folder: Path = RESULTS,
        again: bool = False,
    ) -> None:
        self.name, self.keys, self.folder = name, keys, folder
        self.head: dict[str, Any] = {"environment": environment(*packages)}
        path = folder / f"{name}.json"
        self.rows: list[dict[str, Any]] = []
        if path.exists() and not again:
            self.rows = json.loads(path.read_text())["rows"]

    def has(self, **keys: Any) -> bool:
        """Whether the row with these entries is there."""
        return any(all(row[key] == keys[key] for key in self.keys) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, with the commit that it was measured at, and write the file."""
        self.rows.append({**row, "commit": self.head["environment"]["commit"]})
        write_result(self.name, {**self.head, "rows": self.rows}, self.folder)
        sys.stdout.write(f"{self.rows[-1]}\n")
        sys.stdout.flush()
