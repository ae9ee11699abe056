"""Which class of the other dataset is nearest to each class: a csv file and a short table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from otdd_flash.labels.table import NearestClass
from otdd_flash.report.csv_tables import write_table_csv
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 12
LONGEST_NAME = 24
FILE = "nearest_classes.csv"


def write_nearest_csv(rows: Sequence[NearestClass], path: str | Path) -> None:
    """Write one line per class, source classes first.

    Raises:
        InputError: the file cannot be written.
    """
    body = [(row.side, row.name, row.nearest, row.distance) for row in rows]
    write_table_csv(path, ("side", "class", "nearest", "squared_distance"), body)


def nearest_table(rows: Sequence[NearestClass]) -> Table:
    """Source classes with their nearest target classes on the left, the reverse on the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="nearest classes, by squared distance W", title_justify="left")
    for side, other in (("source", "target"), ("target", "source")):
        table.add_column(side, no_wrap=True, overflow="ellipsis")
        table.add_column(f"nearest {other}", no_wrap=True, overflow="ellipsis")
        table.add_column("W", justify="right", no_wrap=True)
    sides = [[row for row in rows if row.side == side] for side in ("source", "target")]
    for pair in zip_longest(*(side[:MOST_ROWS] for side in sides)):
        cells: list[str | Text] = []
        for row in pair:
            names = ("", "") if row is None else (row.name, row.nearest)
            cells += [Text(shorten(name, LONGEST_NAME)) for name in names]
            cells.append("" if row is None else f"{row.distance:.4g}")
        table.add_row(*cells)
    left = sum(max(0, len(side) - MOST_ROWS) for side in sides)
    if left:
        table.caption = f"{left} more classes in {FILE}"
    return table
