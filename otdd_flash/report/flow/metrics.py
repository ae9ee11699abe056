"""metrics.csv: what a flow recorded of each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from otdd_flash.flows.history import StepRecord
from otdd_flash.report.csv_tables import write_table_csv


def write_metrics_csv(history: Sequence[StepRecord], path: str | Path) -> None:
    """Write one line per record; a functional that a record lacks is an empty cell.

    Raises:
        InputError: the file cannot be written.
    """
    rows = [record.row() for record in history]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    write_table_csv(path, columns, ([row.get(column) for column in columns] for row in rows))
