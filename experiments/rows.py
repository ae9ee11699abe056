"""A result file whose rows are written as they are measured and kept when a script runs again.

What a row keeps under `trace`, a list as long as a solve, is no summary: it goes into a compressed
table beside the file, NAME.traces.parquet, and comes back to its row when the file is read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.environment import RESULTS, environment, write_result
from otdd_flash.files.atomic import replacing

TRACE = "trace"


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
        self.rows: list[dict[str, Any]] = []
        if (folder / f"{name}.json").exists() and not again:
            self.rows = read_rows(name, folder)

    def has(self, **keys: Any) -> bool:
        """Whether the row with these entries is there."""
        return any(all(row[key] == keys[key] for key in self.keys) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, with the commit that it was measured at, and write the file."""
        self.rows.append({**row, "commit": self.head["environment"]["commit"]})
        write_rows(self.name, self.head, self.rows, self.folder)
        sys.stdout.write(f"{self.rows[-1]}\n")
        sys.stdout.flush()


def write_rows(
    name: str, head: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path = RESULTS
) -> None:
    """Write NAME.json, and where rows have traces NAME.traces.parquet: (row's place, trace)."""
    places = [place for place, row in enumerate(rows) if TRACE in row]
    short = [{key: value for key, value in row.items() if key != TRACE} for row in rows]
    if places:
        traces = [json.dumps(rows[place][TRACE]) for place in places]
        table = pa.table({"row": pa.array(places, pa.int32()), TRACE: traces})
        # Before the rows: one that is listed has its trace.
        with replacing(folder / _traces_of(name)) as partial:
            pq.write_table(table, partial, compression="zstd", compression_level=19)
    write_result(name, {**head, "rows": short}, folder)


def read_rows(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of NAME.json, with their traces."""
    rows: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    if (folder / _traces_of(name)).exists():
        table = pq.read_table(folder / _traces_of(name)).to_pydict()
        for place, trace in zip(table["row"], table[TRACE], strict=True):
            if place < len(rows):
                rows[place][TRACE] = json.loads(trace)
    return rows


def _traces_of(name: str) -> str:
    return f"{name}.traces.parquet"
