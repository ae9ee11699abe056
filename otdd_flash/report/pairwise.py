"""The report of distances between several datasets: csv files and pictures.

Users call `write_pairwise_report`. `PairwiseResult.plot` calls `plot_distances`,
`SlicedResult.plot` calls `plot_sliced_distances`, and `report.study.writing` uses `rows_text` and
`bounds_text`. `order` may change the pictures only, never the rows of csv files, whose order
`write_pairwise_report` promises (`tests/report/test_many_report.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otdd_flash.arguments import takes
from otdd_flash.errors import choose
from otdd_flash.report.distance import WITHOUT_CLASSES
from otdd_flash.report.heat_maps import (
    ORDERS,
    Group,
    class_orders,
    draw_class_distances,
    heat_map,
)
from otdd_flash.report.page import INK, Pictures, Report, Writers, figure_of, write_each
from otdd_flash.report.tables import write_matrix_csv, write_table_csv
from otdd_flash.shown import epsilon_shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from otdd_flash.pairwise import PairwiseResult
    from otdd_flash.sliced import SlicedResult


# `takes` checks arguments by their annotations.
@takes()
def write_pairwise_report(
    result: PairwiseResult, directory: str | Path, *, order: str = "given"
) -> Report:
    """Write distances.csv and .png, and class_distances.csv and .png.

    distances.csv has one line per pair of datasets, the nearest first, with its solver bounds
    `lower` and `upper`. The pictures are matrices over all datasets and over all their classes. The
    files of class distances are left out if none were computed (method `none`).

    Args:
        result: the result of `pairwise_distances`.
        directory: created if it does not exist.
        order: how pictures order the datasets, and the classes of each, one of `ORDERS`. It changes
            no csv file: distances.csv has the nearest pair first, class_distances.csv the given
            order.

    Returns:
        The files written and the files that could not be written.

    Raises:
        InputError: `order` is not one of the choices.

    Warns:
        MissingFileNotice: a file could not be written; the others are written.
    """
    choose("order", order, ORDERS)
    directory, pairs, datasets = Path(directory), result.pairs(), result.names
    table = result.class_distances
    # The names of all classes, each behind that of its dataset.
    names = [
        f"{dataset}:{name}"
        for dataset, classes in zip(datasets, table.class_names, strict=True)
        for name in classes
    ]
    writers: Writers = {
        directory / "distances.csv": lambda path: write_table_csv(path, pairs[0]._fields, pairs)
    }
    pictures: Pictures = {directory / "distances.png": lambda: _draw_distances(result, order)}
    if result.method not in WITHOUT_CLASSES:
        orders = class_orders(table.full, [len(classes) for classes in table.class_names], order)
        title = f"Distances between the classes of {len(datasets)} datasets"
        writers[directory / "class_distances.csv"] = lambda path: write_matrix_csv(
            path, table.full, names, names, corner="class"
        )
        pictures[directory / "class_distances.png"] = lambda: draw_class_distances(
            table.full,
            table.class_names,
            datasets,
            title=title,
            orders=orders,
        )
    # The names are checked for characters that no installed font has.
    return write_each(writers, pictures, names)


def plot_distances(result: PairwiseResult, order: str) -> Figure:
    """Draw the matrix of distances."""
    choose("order", order, ORDERS)
    # The names are checked for characters that no installed font has.
    return figure_of(lambda: _draw_distances(result, order), result.names)


def plot_sliced_distances(result: SlicedResult, order: str) -> Figure:
    """Draw the matrix of sliced distances, with the largest standard error in the title."""
    choose("order", order, ORDERS)
    label = f"mean over {result.projections:,} draws, in squared units of features"
    title = (
        f"Sliced distances between {len(result.names)} datasets, standard errors up to "
        f"{float(result.standard_errors.max()):.2g}"
    )

    def draw() -> Figure:
        return _draw_table(result.values, result.names, order, title=title, value_label=label)

    return figure_of(draw, result.names)


def _draw_distances(result: PairwiseResult, order: str) -> Figure:
    return _draw_table(
        result.values,
        result.names,
        order,
        title=f"Distances between {len(result.names)} datasets",
        value_label="dataset distance, in units of the cost",
        notes=(
            f"epsilon {epsilon_shown(result.epsilon, result.mean_cost)}, "
            f"{rows_text(result.details['n'])}",
            bounds_text(
                [(one.lower, one.upper, one.converged) for one in result.pairs()],
                False,
                "bounds" if result.details.get("ground") == "gromov" else "solver bounds",
            ),
        ),
    )


def _draw_table(values: Tensor, datasets: Sequence[str], order: str, **texts: Any) -> Figure:
    # `class_orders` takes square roots, as its tables are squared distances; entropic and sliced
    # distances are in squared units, too. Each dataset is here what a class is there.
    (places,) = class_orders(values, [len(datasets)], order)
    groups = [Group("datasets", [datasets[place] for place in places], INK)]
    return heat_map(values[places][:, places], groups, groups, **texts)


def rows_text(rows: Sequence[int]) -> str:
    """Return a phrase that says how many rows datasets have."""
    least, most = min(rows), max(rows)
    return f"{least:,} rows each" if least == most else f"{least:,} to {most:,} rows"


def bounds_text(
    pairs: Sequence[tuple[float, float, bool]], sampled: bool, kind: str = "solver bounds"
) -> str:
    """Return a phrase on the widest solver bounds and on pairs that did not converge.

    Args:
        pairs: lower bound, upper bound and convergence of each pair.
        sampled: whether sampling intervals were computed; if not, the phrase says that sampling
            error is missing.
        kind: the name of the bounds.
    """
    widest = max(upper - lower for lower, upper, _ in pairs)
    late = sum(not converged for *_, converged in pairs)
    parts = [f"{kind} at most {widest:.2g} apart"]
    if late:
        parts.append(f"{late} of {len(pairs)} pairs not converged")
    if not sampled:
        parts.append("sampling error not measured")
    return ", ".join(parts)
