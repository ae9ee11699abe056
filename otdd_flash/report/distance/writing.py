"""All tables and pictures of one result, in one directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from otdd_flash.arguments.values import FOLDER
from otdd_flash.checks import takes
from otdd_flash.errors import choose
from otdd_flash.labels import ClassDistances
from otdd_flash.report.class_order import ORDERS, class_orders
from otdd_flash.report.class_pictures import draw_class_coupling, draw_class_distances
from otdd_flash.report.csv_tables import write_matrix_csv
from otdd_flash.report.distance.nearest_classes import FILE as NEAREST_FILE
from otdd_flash.report.distance.nearest_classes import write_nearest_csv
from otdd_flash.report.distance.projections import projection
from otdd_flash.report.figures.drawing import CONTENTS, Report, Writers, wanted, write_each
from otdd_flash.report.figures.fonts import notice_missing_glyphs
from otdd_flash.report.figures.page import figure_of
from otdd_flash.result import DistanceResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Names = tuple[tuple[str, ...], tuple[str, ...]]
Orders = list[list[int]]


@takes(FOLDER)
def write_report(
    result: DistanceResult,
    directory: str | Path,
    *,
    seed: int = 0,
    order: str = "given",
    content: str = "full",
) -> Report:
    """Write tables and pictures of a distance.

    These are class_distances and class_coupling (each .csv and .png), nearest_classes.csv and
    projection.png. The distances' rows and columns are all source classes and then all target
    classes, in the csv marked `source:` and `target:`; the coupling's rows are source classes, its
    columns target classes. There are no class distances to show where none were measured (method
    `none`), and no coupling where either side is one class.

    Args:
        result: of `dataset_distance`.
        directory: made if it does not exist.
        seed: of the rows that the projection draws.
        order: how the pictures order the classes of each dataset, one of `ORDERS`; tables keep
            the dataset's order.
        content: `full`, `table` for no pictures or `none` for nothing.

    Returns:
        The files written, and those that could not be.

    Raises:
        InputError: no such order or content.

    Warns:
        MissingFileNotice: a file could not be written; the others are.
    """
    choose("report.order", order, ORDERS)
    choose("report", content, CONTENTS)
    directory, table = Path(directory), result.class_distances
    names, datasets = result.class_names, (result.source.name, result.target.name)
    if content == "full":
        notice_missing_glyphs([*datasets, *names[0], *names[1]])
    coupling = result.class_coupling()
    # Without class distances there is nothing to order by.
    chosen = order if result.method != "none" else "given"
    orders = class_orders(table.full, [len(side) for side in names], chosen)
    writers: Writers = {
        directory / "projection.png": lambda path: projection(
            result.source, result.target, coupling, path, seed
        )
    }
    if result.method != "none":
        writers |= _class_distances(table, names, datasets, directory, orders)
    if coupling.numel() > 1:
        writers |= _class_coupling(coupling, names, datasets, directory, orders)
    return write_each(wanted(writers, content))


def plot_distance(result: DistanceResult) -> Figure:
    """Draw the projection with the class coupling, which leads the report."""
    coupling = result.class_coupling()
    names = result.class_names

    def draw() -> Figure:
        return projection(result.source, result.target, coupling, None, 0)

    return figure_of(draw, [result.source.name, result.target.name, *names[0], *names[1]])


def _class_distances(
    table: ClassDistances, names: Names, datasets: tuple[str, str], directory: Path, orders: Orders
) -> Writers:
    both = [f"source:{name}" for name in names[0]] + [f"target:{name}" for name in names[1]]
    return {
        directory / "class_distances.csv": lambda path: write_matrix_csv(
            path, table.full, both, both, corner="class"
        ),
        directory / "class_distances.png": lambda path: draw_class_distances(
            table.full, names, datasets, path, orders=orders
        ),
        directory / NEAREST_FILE: lambda path: write_nearest_csv(table.nearest(), path),
    }


def _class_coupling(
    coupling: Tensor, names: Names, datasets: tuple[str, str], directory: Path, orders: Orders
) -> Writers:
    return {
        directory / "class_coupling.csv": lambda path: write_matrix_csv(
            path, coupling, *names, corner="source\\target"
        ),
        directory / "class_coupling.png": lambda path: draw_class_coupling(
            coupling, names, datasets, path, orders=orders
        ),
    }
