"""The report of one dataset distance: csv files, pictures and the tables printed for it.

The module writes class_distances, class_coupling, nearest_classes.csv and projection.png, and makes
two tables for the terminal: a summary of result.json and the nearest classes. projection.png shows
both datasets in their common principal plane, with arrows for the mass that moves between classes.
`commands.compare` calls `write_report` and prints both tables; `DistanceResult.plot` (`result`)
calls `plot_distance`.

A change must keep the names of the files and, in csv files, the order of rows, because users'
scripts read them: source classes come before target classes, each in its dataset's own order.
`summary_table` reads result.json, so it must accept the fields of that file and no result object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import takes
from otdd_flash.errors import choose
from otdd_flash.labels import ClassDistances
from otdd_flash.labels.table import NearestClass
from otdd_flash.report.csv_tables import write_matrix_csv, write_table_csv
from otdd_flash.report.figures.class_pictures import draw_class_coupling, draw_class_distances
from otdd_flash.report.figures.heat_maps import ORDERS, class_orders
from otdd_flash.report.figures.page import (
    CONTENTS,
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    Report,
    Writers,
    figure_of,
    notice_missing_glyphs,
    save_picture,
    wanted,
    write_each,
)
from otdd_flash.report.figures.planes import (
    ProjectedSide,
    axis_name,
    fit_plane,
    name_axes,
    plane_frame,
    rows_with_mass,
    side_of,
    write_legend,
    write_title,
)
from otdd_flash.report.figures.point_names import PointName, draw_names
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import bounded, display, epsilon_shown, interval, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table


Names = tuple[tuple[str, ...], tuple[str, ...]]

Orders = list[list[int]]


@takes()
def write_report(
    result: DistanceResult,
    directory: str | Path,
    *,
    seed: int = 0,
    order: str = "given",
    content: str = "full",
) -> Report:
    """Write the csv files and pictures of a distance.

    These are class_distances and class_coupling (each .csv and .png), nearest_classes.csv and
    projection.png. Rows and columns of class_distances are all source classes and then all target
    classes, marked `source:` and `target:` in the csv file. Rows of class_coupling are source
    classes, its columns target classes. The files of class distances are left out if none were
    computed (method `none`), and those of the coupling if both sides are one class.

    Args:
        result: the result of `dataset_distance`.
        directory: created if it does not exist.
        seed: of the rows that the projection draws.
        order: how the pictures order the classes of each dataset, one of `ORDERS`; csv files keep
            the dataset's order.
        content: `full`, `table` for no pictures or `none` for no files.

    Returns:
        The files written and the files that could not be written.

    Raises:
        InputError: `order` or `content` is not one of the choices.

    Warns:
        MissingFileNotice: a file could not be written; the others are written.
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
    """Draw the first picture of the report: the projection with the class coupling."""
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


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Make a table of two columns with the main fields of a result.json.

    A result that did not converge gets a red row near the top.

    Args:
        summary: the content of result.json. The title uses the names `source` and `target` if both
            are given. `tolerance` is the bound on the marginal error; it is None if the solver
            stopped by the width of its bounds.
    """
    from rich.table import Table
    from rich.text import Text

    title = Text(_title(summary), style="table.title")
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("distance", bounded(summary["value"], *summary["bounds"]))
    if not summary["converged"]:
        reason = (
            f"stopped by {summary['stopped_by']}" if summary.get("stopped_by") else "stopped early"
        )
        trust = "only solver bounds can be trusted"
        if summary.get("schedule") == "geomloss":
            trust = "the value is geomloss's, the solver bounds hold the converged one"
        table.add_row("NOT CONVERGED", Text(f"{reason}; {trust}"), style="bold red")
    for name, text in _details(summary):
        table.add_row(name, Text(text))
    return table


def _title(summary: Mapping[str, Any]) -> str:
    names = (summary.get("source"), summary.get("target"))
    if all(isinstance(name, str) for name in names):
        return f"{display(names[0])} → {display(names[1])}"
    return "dataset distance"


def _details(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    classes = summary["classes"]
    error = f"{summary['marginal_error']:.2g}"
    tolerance = summary.get("tolerance")
    converged, stopped_by = summary["converged"], summary.get("stopped_by", "tolerance")
    reached = "" if stopped_by == "tolerance" else f", stopped by {stopped_by}"
    if tolerance is not None:
        error += f" {'≤' if summary['marginal_error'] <= tolerance else '>'} {tolerance:.2g}"
    ground = summary.get("ground", "sqeuclidean")
    seconds = {phase: float(spent) for phase, spent in summary["seconds"].items()}
    spent = ", ".join(f"{phase.replace('_', ' ')} {_time(took)}" for phase, took in seconds.items())
    return [
        *_sampling(summary),
        ("epsilon", epsilon_shown(summary["epsilon"], summary.get("mean_cost"))),
        ("samples", f"{summary['n']} × {summary['m']}, {summary['d']} features"),
        ("classes", f"{_count(classes['source'])} × {_count(classes['target'])}"),
        *([] if ground == "sqeuclidean" else [("ground cost", ground)]),
        ("class distances", str(summary["labels"]) + _own_epsilon(summary)),
        ("converged", f"yes{reached}" if converged else "no"),
        ("marginal error", error),
        ("iterations", str(summary["iterations"])),
        ("seconds", f"{_time(sum(seconds.values()))} ({spent})"),
        ("computed on", ", ".join(str(summary[k]) for k in ("device", "backend", "precision"))),
    ]


def _own_epsilon(summary: Mapping[str, Any]) -> str:
    """Return ", epsilon ..." for class distances by `sinkhorn`, and "" for other methods."""
    epsilon = summary.get("labels_epsilon")
    return "" if epsilon is None else f", epsilon {epsilon:.6g}"


def _sampling(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows on the sampling error, or a row that says it was not measured."""
    rows = []
    if (found := summary.get("subsample")) is not None:
        shown = interval(summary["value"], found["lower"], found["upper"])
        drawn = "{} subsamples of {} × {}".format(found["count"], *found["size"])
        drawn = "none drawn: both datasets are one" if found["identical"] else drawn
        rows.append((f"sampling interval ({found['level']:.0%})", f"{shown} ({drawn})"))
    elif any((summary["value"], *summary["bounds"])):
        way_out = "subsample=50 gives an interval"
        if not _subsamples_fit(summary):
            way_out = "subsamples need more rows, over two of each class"
        rows.append(("sampling error", f"not measured; {way_out}"))
    if (floor := summary.get("noise_floor")) is not None:
        size = floor["size"]
        source, target, between = (
            bounded(*(floor[key][part] for part in ("value", "lower", "upper")))
            for key in ("source", "target", "between")
        )
        rows.append((f"noise floor at {size} × {size}", f"{source}, {target}"))
        rows.append((f"distance at {size} × {size}", between))
    return rows


def _subsamples_fit(summary: Mapping[str, Any]) -> bool:
    """Return whether a proper part of both sides, the same for both, has two rows of each class."""
    labelled = summary["labels"] != "none"
    rows = summary["n"], summary["m"]
    classes = (_count(summary["classes"][side]) * labelled for side in ("source", "target"))
    part = max(2 * max(count, 1) / total for count, total in zip(classes, rows, strict=True))
    return all(round(part * total) < total for total in rows)


def _count(classes: Any) -> int:
    return classes if isinstance(classes, int) else len(classes or ())


def _time(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


MOST_ROWS = 12

LONGEST_NAME = 24

NEAREST_FILE = "nearest_classes.csv"


def write_nearest_csv(rows: Sequence[NearestClass], path: str | Path) -> None:
    """Write one line per class, source classes first.

    Raises:
        InputError: the file cannot be written.
    """
    body = [(row.side, row.name, row.nearest, row.distance) for row in rows]
    write_table_csv(path, ("side", "class", "nearest", "squared_distance"), body)


def nearest_table(rows: Sequence[NearestClass]) -> Table:
    """Make a table of nearest classes: of source classes on the left, of target classes right."""
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
        table.caption = f"{left} more classes in {NEAREST_FILE}"
    return table


ROWS_FITTED = 5000

# If a side has more classes, only the heaviest moves are drawn, and only their ends are named.
MOST_CLASSES, MOVES_OF_MANY, MOVES_AT_MOST = 20, 14, 40

LONGEST_DATASET = 60

SHORTEST_ARROW = 18.0  # pixels


def projection(
    source: LabeledSamples,
    target: LabeledSamples,
    coupling: Tensor,
    path: str | Path | None,
    seed: int,
) -> Figure:
    """Draw two datasets in their common principal plane, with class means and the class coupling.

    An arrow from a source class to a target class is drawn if it is the largest of the source class
    or carries at least a quarter of the class's mass; its width is proportional to the mass. If a
    side has more than 20 classes, only the 14 heaviest arrows and the classes at their ends are
    shown. The axes are fitted to at most 5,000 rows of each side and at most 2,000 rows are drawn;
    one in a hundred of these may lie outside the frame. Class means use all rows.

    Args:
        source: features of any dimension; labels may be None.
        target: features of the same dimension.
        coupling: (Vx, Vy) masses that sum to 1. A side with one row or column counts as one class.
        path: the PNG file; None writes no file.
        seed: of the subsamples.

    Raises:
        ValueError: the coupling's shape does not match the classes.
        InputError: the file cannot be written.
    """
    coupling = coupling.detach().cpu().double()
    fitted = [
        samples.features[torch.from_numpy(rows_with_mass(samples, ROWS_FITTED, seed))]
        for samples in (source, target)
    ]
    plane = fit_plane(fitted, seed)
    left = side_of(source, coupling.shape[0], plane, seed, SOURCE_COLOR, "o")
    right = side_of(target, coupling.shape[1], plane, seed, TARGET_COLOR, "^")
    moves, marked = _moves_and_classes(coupling)

    figure, axes = plane_frame([left.points, right.points], [left.centroids, right.centroids])
    name_axes(axes, axis_name(plane, 0), axis_name(plane, 1))
    for side, classes in zip((left, right), marked, strict=True):
        _draw_points(axes, side, classes)
    flat = plane.explained[1] < 1e-9
    _draw_moves(axes, (left, right), moves, flat)
    _draw_labels(figure, axes, (left, right), marked, moves, flat)
    _draw_legend(figure, axes, (left, right), _about(moves, coupling))
    title = f"{source.name} and {target.name} in their common principal plane"
    write_title(figure, axes, title)
    save_picture(figure, path)
    return figure


def _moves_and_classes(coupling: Tensor) -> tuple[list[Move], tuple[list[int], list[int]]]:
    """Return the arrows, and for each side the classes that are marked and named."""
    if max(coupling.shape) > MOST_CLASSES:
        moves = strongest_moves(coupling, MOVES_OF_MANY)
        return moves, (sorted({m.source for m in moves}), sorted({m.target for m in moves}))
    # Between one class and one class all mass moves: an arrow would add nothing.
    moves = strongest_moves(coupling, MOVES_AT_MOST) if coupling.numel() > 1 else []
    return moves, (list(range(coupling.shape[0])), list(range(coupling.shape[1])))


def _draw_points(axes: Axes, side: ProjectedSide, marked: Sequence[int]) -> None:
    color, marker = side.color, side.marker
    x, y = side.points.T
    axes.scatter(x, y, s=11, c=color, marker=marker, alpha=0.28, linewidths=0)
    x, y = side.centroids[marked].T
    axes.scatter(x, y, s=75, c=color, marker=marker, edgecolors="white", linewidths=1.2, zorder=4)


def _draw_moves(
    axes: Axes, sides: tuple[ProjectedSide, ProjectedSide], moves: Sequence[Move], flat: bool
) -> None:
    """Draw arrows between class means, the lightest last; on a line of points they bow upwards."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.patheffects import Normal, Stroke

    for move in moves:
        start, end = sides[0].centroids[move.source], sides[1].centroids[move.target]
        run = axes.transData.transform(end) - axes.transData.transform(start)
        if np.linalg.norm(run) < SHORTEST_ARROW:
            continue
        width = 0.7 + 2.8 * move.mass / moves[0].mass
        bow = float(-0.45 * np.sign(run[0])) if flat else 0.0
        axes.add_patch(
            FancyArrowPatch(
                tuple(start),
                tuple(end),
                arrowstyle="-|>",
                connectionstyle=f"arc3,rad={bow}",
                mutation_scale=7 + 2.5 * width,
                linewidth=width,
                color=INK,
                alpha=0.85,
                shrinkA=3,
                shrinkB=4,
                zorder=3,
                path_effects=[Stroke(linewidth=width + 1.6, foreground="white"), Normal()],
            )
        )


def _draw_labels(
    figure: Figure,
    axes: Axes,
    sides: tuple[ProjectedSide, ProjectedSide],
    marked: tuple[list[int], list[int]],
    moves: Sequence[Move],
    flat: bool,
) -> None:
    """Name class means in their dataset's colour, the heaviest first; target names are italic."""
    named = [
        (side, k)
        for i, side in enumerate(sides)
        for k in marked[i]
        if side.masses[k] > 0 and side.class_names[k]
    ]
    named.sort(key=lambda entry: -entry[0].masses[entry[1]])
    names = [
        PointName(side.class_names[k], tuple(side.centroids[k]), side.color, side is sides[1])
        for side, k in named
    ]
    ends = [(sides[0].centroids[m.source], sides[1].centroids[m.target]) for m in moves]
    x0, y0, x1, y1 = axes.get_window_extent().extents
    # If all points are on a line, the arrows bow above it, so names go below.
    frame = (x0, y0, x1, (y0 + y1) / 2 if flat else y1)
    draw_names(figure, axes, names, np.array(ends).reshape(-1, 2, 2), frame)


def _about(moves: Sequence[Move], coupling: Tensor) -> str | None:
    if not moves:
        return None
    if max(coupling.shape) > MOST_CLASSES:
        return f"the {len(moves)} largest moves of mass between classes (width: mass)"
    largest = f"its largest share and any from {WORTH_SHOWING:.0%}"
    return f"where a class's mass goes: {largest} (width: mass)"


def _draw_legend(
    figure: Figure, axes: Axes, sides: tuple[ProjectedSide, ProjectedSide], about: str | None
) -> None:
    from matplotlib.lines import Line2D

    handles, texts = [], []
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    for side in sides:
        x, y = side.points.T
        shown = int(((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1)).sum())
        part = "" if shown == side.size else f", {shown:,} shown"
        texts.append(f"{shorten(side.name, LONGEST_DATASET)} ({side.size:,} samples{part})")
        handles.append(Line2D([], [], color=side.color, marker=side.marker, linestyle="none"))
    if about is not None:
        texts.append(about)
        handles.append(Line2D([], [], color=INK, marker=">", linewidth=1.8, markevery=[1]))
    write_legend(figure, axes, handles, texts)


WORTH_SHOWING = 0.25


class Move(NamedTuple):
    """The `mass` that goes from class `source` to class `target`, as a share of the total mass."""

    source: int
    target: int
    mass: float


def strongest_moves(coupling: Tensor, limit: int) -> list[Move]:
    """Return the largest move of each source class, and all with a quarter or more of its mass.

    Args:
        coupling: (Vx, Vy) non-negative masses, on the CPU.
        limit: the largest number of moves to return.

    Returns:
        The moves, the heaviest first.
    """
    largest = coupling.max(dim=1, keepdim=True).values
    enough = (coupling >= WORTH_SHOWING * coupling.sum(1, keepdim=True)) | (coupling == largest)
    rows, columns = (enough & (coupling > 0)).nonzero(as_tuple=True)
    order = coupling[rows, columns].argsort(descending=True, stable=True)[:limit]
    return [
        Move(int(rows[k]), int(columns[k]), float(coupling[rows[k], columns[k]])) for k in order
    ]
