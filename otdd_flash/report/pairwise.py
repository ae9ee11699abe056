"""The distances between several datasets: a table to print, csv files and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from otdd_flash.arguments.values import FOLDER
from otdd_flash.checks import takes
from otdd_flash.errors import choose
from otdd_flash.report.class_order import ORDERS, class_orders
from otdd_flash.report.class_pictures import draw_joint_class_distances
from otdd_flash.report.csv_tables import write_matrix_csv, write_table_csv
from otdd_flash.report.distance.heat_maps import heat_map
from otdd_flash.report.figures.drawing import Report, Writers, write_each
from otdd_flash.report.figures.fonts import notice_missing_glyphs
from otdd_flash.report.figures.page import INK
from otdd_flash.shown import epsilon_shown, interval, shorten

if TYPE_CHECKING:
    from rich.table import Table

    from otdd_flash.pairwise_result import PairwiseResult

LONGEST_NAME = 32


def pairwise_table(result: PairwiseResult) -> Table:
    """The distances with their bounds, the nearest pair first; red where not converged."""
    from rich.table import Table
    from rich.text import Text

    epsilon = epsilon_shown(result.epsilon, result.mean_cost)
    title = f"distances between {len(result.names)} datasets, epsilon {epsilon}"
    if (own := result.details.get("labels_epsilon")) is not None:
        title += f", class distances by sinkhorn, epsilon {own:.6g}"
    table = Table("", "", "distance", "marginal error", title=title, title_justify="left")
    for pair in result.pairs():
        table.add_row(
            *(Text(shorten(name, LONGEST_NAME)) for name in (pair.source, pair.target)),
            interval(pair.value, pair.lower, pair.upper),
            f"{pair.marginal_error:.1e}" + ("" if pair.converged else " NOT CONVERGED"),
            style="" if pair.converged else "bold red",
        )
    return table


@takes(FOLDER)
def write_pairwise_report(
    result: PairwiseResult, directory: str | Path, *, order: str = "given"
) -> Report:
    """Write distances.csv and .png, and class_distances.csv and .png.

    distances.csv has one line per pair of datasets, the nearest first, with bounds; the pictures
    are tables of all datasets and of all their classes. There are no class distances to show where
    none were measured (method `none`).

    Args:
        result: of `pairwise_distances`.
        directory: made if it does not exist.
        order: how pictures order the datasets, and the classes of each, one of `ORDERS`; tables
            keep the given order.

    Returns:
        The files written, and those that could not be.

    Raises:
        InputError: no such order.

    Warns:
        MissingFileNotice: a file could not be written; the others are.
    """
    choose("order", order, ORDERS)
    directory, pairs = Path(directory), result.pairs()
    classes = [name for names in result.class_distances.class_names for name in names]
    notice_missing_glyphs([*result.names, *classes])
    writers: Writers = {
        directory / "distances.csv": lambda path: write_table_csv(path, pairs[0]._fields, pairs),
        directory / "distances.png": lambda path: _draw_distances(result, path, order),
    }
    if result.method != "none":
        writers |= _class_distances(result, directory, order)
    return write_each(writers)


def _draw_distances(result: PairwiseResult, path: Path, order: str) -> None:
    # A divergence is like a squared distance.
    (places,) = class_orders(result.values, [len(result.names)], order)
    names = [result.names[place] for place in places]
    groups = [("datasets", len(names))]
    heat_map(
        result.values[places][:, places],
        names,
        names,
        path,
        title=f"Distances between {len(names)} datasets",
        value_label="dataset distance, in units of the cost",
        row_groups=groups,
        column_groups=groups,
        row_colors=[INK],
        column_colors=[INK],
    )


def _class_distances(result: PairwiseResult, directory: Path, order: str) -> Writers:
    table = result.class_distances
    names = [
        f"{dataset}:{name}"
        for dataset, classes in zip(result.names, table.class_names, strict=True)
        for name in classes
    ]
    orders = class_orders(table.full, [len(classes) for classes in table.class_names], order)
    return {
        directory / "class_distances.csv": lambda path: write_matrix_csv(
            path, table.full, names, names, corner="class"
        ),
        directory / "class_distances.png": lambda path: draw_joint_class_distances(
            table.full, table.class_names, result.names, path, orders=orders
        ),
    }
