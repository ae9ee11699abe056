"""The report of one dataset distance: csv files, pictures and the tables printed for it.

`write_report` writes class_distances, class_coupling, nearest_classes.csv and projection.png, with
relaxed marginals unmatched.csv and unmatched.png, and for numbers as labels target_histogram.
`write_contributions` writes what each source row contributes, and the images that contribute most.
`summary_table`, `nearest_table` and `unmatched_table` are tables for the terminal, of result.json,
of the nearest classes and of the mass that is left of every class. projection.png shows both
datasets in their common principal plane, with arrows for the mass that moves between classes.
`commands.compare` calls these; `DistanceResult.plot` (`result`) calls `plot_distance`.

A change must keep the names of the files and, in csv files, the order of rows, because users'
scripts read them (`tests/report/test_distance_report.py`). Classes of the source come before those
of the target, each in its dataset's own order; contributions.csv has the largest first.
`summary_table` reads result.json, so it must accept the fields of that file and no result object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import takes
from otdd_flash.errors import choose
from otdd_flash.labels.table import NearestClass
from otdd_flash.report.heat_maps import (
    ORDERS,
    Group,
    class_orders,
    draw_class_distances,
    heat_map,
)
from otdd_flash.report.page import (
    CONTENTS,
    INK,
    MARGIN,
    SOURCE_COLOR,
    TARGET_COLOR,
    Pictures,
    Report,
    Writers,
    figure_of,
    fit_title,
    new_figure,
    write_each,
)
from otdd_flash.report.planes import (
    PointName,
    ProjectedSide,
    draw_names,
    plane_frame,
    plane_of,
    side_of,
    write_legend,
)
from otdd_flash.report.tables import facts_table, named_table, write_matrix_csv, write_table_csv
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import bounded, bounded_energy, display, epsilon_shown, interval, shorten
from otdd_flash.unmatched import HEADS, MEANING, Unmatched, UnmatchedClass, by_excess, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table


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
    classes, its columns target classes. Where marginals are relaxed, unmatched (.csv and .png) says
    what is left of every class. The files of class distances are left out if none were computed
    (methods `none` and `continuous`), and those of the coupling if both sides are one class. For
    numbers there is target_histogram (.csv and .png), for each column if there are several.

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
    directory, table, coupling = Path(directory), result.class_distances, result.class_coupling()
    names, sides = result.class_names, (result.source.name, result.target.name)
    both = [f"source:{name}" for name in names[0]] + [f"target:{name}" for name in names[1]]
    # Without class distances there is nothing to order by.
    measured = result.method not in WITHOUT_CLASSES
    chosen = order if measured else "given"
    orders = class_orders(table.full, [len(side) for side in names], chosen)
    writers: Writers = {}
    pictures: Pictures = {
        directory / "projection.png": lambda: projection(
            _in_target_space(result), result.target, coupling, seed
        )
    }
    if measured:
        pictures[directory / "class_distances.png"] = lambda: draw_class_distances(
            table.full,
            names,
            _roles(sides),
            title=f"Distances between the classes of {sides[0]} and {sides[1]}",
            orders=orders,
        )
        writers |= {
            directory / "class_distances.csv": lambda path: write_matrix_csv(
                path, table.full, both, both, corner="class"
            ),
            directory / NEAREST_FILE: lambda path: write_table_csv(
                path,
                ("side", "class", "nearest", "W" if result.gromov else "squared_distance"),
                [(row.side, row.name, row.nearest, row.distance) for row in table.nearest()],
            ),
        }
    if result.target_scale is not None:
        _add_target_histograms(result, directory, sides, writers, pictures)
    if coupling.numel() > 1:
        writers[directory / "class_coupling.csv"] = lambda path: write_matrix_csv(
            path, coupling, *names, corner="source\\target"
        )
        pictures[directory / "class_coupling.png"] = lambda: draw_class_coupling(
            coupling, names, sides, orders=orders
        )
    if not result.constraints.exact:
        unmatched = result.unmatched()
        writers[directory / UNMATCHED_FILE] = lambda path: write_table_csv(
            path, UnmatchedClass._fields, unmatched.classes
        )
        pictures[directory / "unmatched.png"] = lambda: draw_unmatched(unmatched, sides)
    return write_each(
        {} if content == "none" else writers,
        pictures if content == "full" else {},
        [*sides, *names[0], *names[1]],
    )


# Methods of `labels` that compare no classes.
WITHOUT_CLASSES = ("none", "continuous")


def _add_target_histograms(
    result: DistanceResult,
    directory: Path,
    sides: tuple[str, str],
    writers: Writers,
    pictures: Pictures,
) -> None:
    """Add what writes the histograms of numbers, a table and a picture for each column."""
    changes = result.target_changes().tolist()
    for column, change in enumerate(changes):
        masses, edges = result.target_histogram(column)
        names = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges.tolist())]
        path = directory / f"target_histogram{f'_{column}' if len(changes) > 1 else ''}.csv"
        corner = "source\\target"
        writers[path] = partial(
            write_matrix_csv, matrix=masses, row_names=names, column_names=names, corner=corner
        )
        which = f"column {column} of the numbers" if len(changes) > 1 else "numbers"
        title = f"Mass moved from {which} of {sides[0]} to those of {sides[1]}"
        notes = [f"the mean change of a number is {change:.4g}"]
        draw = partial(_draw_masses, masses, [names, names], sides, title=title, notes=notes)
        pictures[path.with_suffix(".png")] = draw


def plot_distance(result: DistanceResult) -> Figure:
    """Draw the first picture of the report: the projection with the class coupling."""
    coupling = result.class_coupling()
    names = result.class_names

    def draw() -> Figure:
        return projection(_in_target_space(result), result.target, coupling, 0)

    return figure_of(draw, [result.source.name, result.target.name, *names[0], *names[1]])


def _in_target_space(result: DistanceResult) -> LabeledSamples:
    """Return the source, or where its features are others, what the plan maps its rows to.

    Rows without mass at epsilon 0, which are mapped nowhere, are left out.
    """
    source = result.source
    if result.gromov is None:
        return source
    images = result.barycentric_map()
    known = images.isfinite().all(1).nonzero().squeeze(1)
    moved = images[known].to(source.features.device)
    some = source.take(known.to(source.features.device))
    return replace(some, features=moved, name=f"{source.name} as mapped", feature_names=None)


def _roles(sides: Sequence[str]) -> list[str]:
    return [f"{role}: {name}" for role, name in zip(("source", "target"), sides, strict=True)]


def draw_class_coupling(
    coupling: Tensor,
    names: Sequence[Sequence[str]],
    sides: tuple[str, str],
    *,
    orders: Sequence[Sequence[int]],
) -> Figure:
    """Draw how much of the mass of each source class moves to each target class.

    Args:
        coupling: (Vx, Vy) masses that sum to 1; drawn in percent.
        names: the Vx source and the Vy target class names.
        sides: the names of source and target.
        orders: the order in which to show the classes of each side.
    """
    return _draw_masses(
        coupling[list(orders[0])][:, list(orders[1])],
        [[of[index] for index in order] for of, order in zip(names, orders, strict=True)],
        sides,
        title=f"Mass moved from the classes of {sides[0]} to those of {sides[1]}",
    )


def _draw_masses(
    masses: Tensor, names: Sequence[Sequence[str]], sides: tuple[str, str], **more: Any
) -> Figure:
    """Draw masses that sum to 1 in percent, between what the names of both sides stand for."""
    rows, columns = (
        [Group(role, list(of), color)]
        for role, of, color in zip(_roles(sides), names, (SOURCE_COLOR, TARGET_COLOR), strict=True)
    )
    # Cells that round to 0 stay empty.
    label = "mass, % of the total"
    return heat_map(100.0 * masses, rows, columns, value_label=label, decimals=1, zero="", **more)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Make a table of two columns with the main fields of a result.json.

    A result that did not converge gets a red row near the top.

    Args:
        summary: the content of result.json. The title uses the names `source` and `target` if both
            are given. `tolerance` is the bound on the marginal error; it is None if the solver
            stopped by the width of its bounds.
    """
    names, late = (summary.get("source"), summary.get("target")), None
    title = "dataset distance"
    if all(isinstance(name, str) for name in names):
        title = f"{display(names[0])} → {display(names[1])}"
    if not summary["converged"]:
        stopped_by = summary.get("stopped_by")
        trust = "only bounds" if "gromov" in summary else "only solver bounds"
        trust += " can be trusted"
        if summary.get("schedule") == "geomloss":
            trust = "the value is geomloss's, the solver bounds hold the converged one"
        late = f"{f'stopped by {stopped_by}' if stopped_by else 'stopped early'}; {trust}"
    shown = bounded_energy if "gromov" in summary else bounded
    found = [("distance", shown(summary["value"], *summary["bounds"]))]
    return facts_table(title, found, late, _details(summary))


def _details(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    classes = summary["classes"]
    error = f"{summary['marginal_error']:.2g}"
    tolerance = summary.get("tolerance")
    converged, stopped_by = summary["converged"], summary.get("stopped_by", "tolerance")
    reached = "" if stopped_by == "tolerance" else f", stopped by {stopped_by}"
    if tolerance is not None:
        error += f" {'≤' if summary['marginal_error'] <= tolerance else '>'} {tolerance:.2g}"
    ground = summary.get("ground", "sqeuclidean")
    # The distances between classes have an epsilon of their own if those are entropic too.
    own = summary.get("labels_epsilon")
    labels = f"{summary['labels']}" + ("" if own is None else f", epsilon {own:.6g}")
    seconds = {phase: float(spent) for phase, spent in summary["seconds"].items()}
    spent = ", ".join(f"{phase.replace('_', ' ')} {_time(took)}" for phase, took in seconds.items())
    features = f"{summary['d']}"
    if (other := summary.get("target_d", summary["d"])) != summary["d"]:
        features += f" and {other}"
    return [
        *_gromov(summary),
        *_sampling(summary),
        ("epsilon", epsilon_shown(summary["epsilon"], summary.get("mean_cost"))),
        *_penalties(summary),
        ("samples", f"{summary['n']} × {summary['m']}, {features} features"),
        ("classes", f"{_count(classes['source'])} × {_count(classes['target'])}"),
        *([] if ground == "sqeuclidean" else [("ground cost", ground)]),
        ("class distances", labels),
        *_changes(summary),
        ("converged", f"yes{reached}" if converged else "no"),
        ("marginal error", error),
        ("iterations", str(summary["iterations"])),
        ("seconds", f"{_time(sum(seconds.values()))} ({spent})"),
        ("computed on", ", ".join(str(summary[k]) for k in ("device", "backend", "precision"))),
    ]


def _gromov(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows on a Gromov-Wasserstein distance, if it is one."""
    if (found := summary.get("gromov")) is None:
        return []
    starts = (
        f"{one['name']} {one['objective']:.6g}{'' if one['finished'] else ' (not followed)'}"
        for one in found["starts"]
    )
    return [
        ("bounds", "of the least; their gap is not an error of the solver"),
        ("GW (Mémoli)", f"{found['gw']:.6g}, half the root of the energy {found['energy']:.6g}"),
        ("starts", ("with entropy: " if summary["epsilon"] else "") + ", ".join(starts)),
    ]


def _changes(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row on numbers, if rows have some."""
    if (found := summary.get("target_changes")) is None:
        return []
    pairs = zip(found, summary["target_scale"], strict=True)
    said = ", ".join(f"{change:.4g} (scale {scale:.4g})" for change, scale in pairs)
    return [("mean change of numbers", said)]


def _penalties(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row on the penalties of unmatched mass, if marginals are relaxed."""
    given = summary.get("unbalanced")
    if given is None:
        return []
    mean = summary.get("mean_cost")
    sides = ["exact" if each is None else epsilon_shown(each, mean) for each in given]
    return [("unbalanced", sides[0] if sides[0] == sides[1] else ", ".join(sides))]


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
        if "gromov" in summary:
            return [("sampling error", "not measured")]
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
    labelled = summary["labels"] not in WITHOUT_CLASSES
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


def nearest_table(rows: Sequence[NearestClass], ground: str = "sqeuclidean") -> Table:
    """Make a table of nearest classes: of source classes on the left, of target classes right.

    `ground` is that of the result; the class distances of `gromov` are no squared distances.
    """
    from rich.table import Table
    from rich.text import Text

    unit = "W" if ground == "gromov" else "squared distance W"
    table = Table(title=f"nearest classes, by {unit}", title_justify="left")
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


UNMATCHED_FILE = "unmatched.csv"


def unmatched_table(unmatched: Unmatched) -> Table:
    """Make a table of the unmatched shares of classes, those that stand out most first."""
    every = by_excess(unmatched.classes)
    notes = [MEANING] if any(each.own is not None for each in every) else []
    rows = [each for side in _first_of_sides(unmatched, MOST_ROWS) for each in side]
    if len(rows) < len(every):
        notes.append(f"{len(every) - len(rows)} more classes in {UNMATCHED_FILE}")
    title = f"unmatched mass of classes; {unmatched.moved:.4g} of all mass moves"
    return named_table(title, HEADS, map(shown, rows), ("side", "class"), notes)


def _first_of_sides(unmatched: Unmatched, most: int) -> list[list[UnmatchedClass]]:
    """Return the classes of each side that stand out most."""
    every = by_excess(unmatched.classes)
    return [[each for each in every if each.side == side][:most] for side in ("source", "target")]


# Inches: the width of the picture and of a bar with the space around it.
BARS_WIDTH, BAR = 6.1, 0.26


def draw_unmatched(unmatched: Unmatched, sides: tuple[str, str]) -> Figure:
    """Draw the unmatched share of every class as a bar, with a mark at that of its self term.

    Args:
        unmatched: of a distance with relaxed marginals.
        sides: the names of source and target.
    """
    bars = _first_of_sides(unmatched, MOST_BARS)
    heights = [max(1, len(rows)) for rows in bars]
    figure = new_figure(BARS_WIDTH, 1.8 + BAR * sum(heights))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    title = f"Unmatched mass of the classes of {sides[0]} and {sides[1]}"
    figure.suptitle(fit_title(figure, title, BARS_WIDTH - 2 * MARGIN))
    colors = SOURCE_COLOR, TARGET_COLOR
    for axes, rows, role, color in zip(panels, bars, _roles(sides), colors, strict=True):
        at = np.arange(len(rows))
        axes.barh(at, [100 * each.unmatched for each in rows], height=0.7, color=color)
        own = [(k, 100 * each.own) for k, each in enumerate(rows) if each.own is not None]
        axes.plot([x for _, x in own], [k for k, _ in own], "|", color=INK, markersize=9)
        axes.set_yticks(at, [shorten(each.name, LONGEST_CLASS) for each in rows], fontsize=8)
        axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
        axes.set_title(shorten(role, LONGEST_DATASET), fontsize=9)
    known = any(each.own for each in unmatched.classes)
    mark = "; the mark is what its self term leaves" if known else ""
    panels[-1].set(xlim=(0, 100), xlabel=f"unmatched, % of the class{mark}")
    return figure


# If a side has more classes, the bars of others are left out.
MOST_BARS = 30

# If a side has more classes, only the heaviest moves are drawn, and only their ends are named.
MOST_CLASSES, MOVES_OF_MANY, MOVES_AT_MOST = 20, 14, 40

LONGEST_DATASET = 60

SHORTEST_ARROW = 18.0  # pixels


def projection(
    source: LabeledSamples,
    target: LabeledSamples,
    coupling: Tensor,
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
        seed: of the subsamples.

    Raises:
        ValueError: the coupling's shape does not match the classes.
    """
    coupling = coupling.detach().cpu().double()
    plane = plane_of([source, target], seed)
    left = side_of(source, coupling.shape[0], plane, seed, SOURCE_COLOR, "o")
    right = side_of(target, coupling.shape[1], plane, seed, TARGET_COLOR, "^")
    if max(coupling.shape) > MOST_CLASSES:
        moves = strongest_moves(coupling, MOVES_OF_MANY)
        marked = [sorted({move.source for move in moves}), sorted({move.target for move in moves})]
        about = f"the {len(moves)} largest moves of mass between classes (width: mass)"
    else:
        # Between one class and one class all mass moves: an arrow would add nothing.
        moves = strongest_moves(coupling, MOVES_AT_MOST) if coupling.numel() > 1 else []
        marked = [list(range(count)) for count in coupling.shape]
        largest = f"its largest share and any from {WORTH_SHOWING:.0%}"
        about = f"where a class's mass goes: {largest} (width: mass)"
    title = f"{source.name} and {target.name} in their common principal plane"
    sides = (left, right)
    inside = [side.centroids for side in sides]
    figure, axes = plane_frame([side.points for side in sides], inside, plane, title)
    for side, classes in zip(sides, marked, strict=True):
        style: dict[str, Any] = {"c": side.color, "marker": side.marker}
        x, y = side.points.T
        axes.scatter(x, y, s=11, alpha=0.28, linewidths=0, **style)
        x, y = side.centroids[classes].T
        axes.scatter(x, y, s=75, edgecolors="white", linewidths=1.2, zorder=4, **style)
    _draw_moves(axes, sides, moves, plane.flat)
    _draw_labels(axes, sides, marked, moves, plane.flat)
    _draw_legend(axes, sides, about if moves else None)
    return figure


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
    axes: Axes,
    sides: tuple[ProjectedSide, ProjectedSide],
    marked: Sequence[Sequence[int]],
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
    # If all points are on a line, the arrows bow above it, so names go below.
    draw_names(axes, names, np.array(ends).reshape(-1, 2, 2), top=0.5 if flat else 1.0)


def _draw_legend(axes: Axes, sides: tuple[ProjectedSide, ProjectedSide], about: str | None) -> None:
    from matplotlib.lines import Line2D

    handles = []
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    for side in sides:
        x, y = side.points.T
        shown = int(((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1)).sum())
        part = "" if shown == side.size else f", {shown:,} shown"
        text = f"{shorten(side.name, LONGEST_DATASET)} ({side.size:,} samples{part})"
        style: dict[str, Any] = {"color": side.color, "marker": side.marker, "linestyle": "none"}
        handles.append(Line2D([], [], label=text, **style))
    if about is not None:
        style = {"color": INK, "marker": ">", "linewidth": 1.8, "markevery": [1]}
        handles.append(Line2D([], [], label=about, **style))
    write_legend(axes, *handles)


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


SHOWN, ACROSS = 12, 6

# Inches: an image with the gap beside it, the words above it, a block's heading, the title.
SIDE, WORDS, HEAD, TITLE = 1.12, 0.34, 0.4, 0.6

LONGEST_CLASS = 14


@takes()
def write_contributions(
    source: LabeledSamples,
    values: Tensor,
    directory: str | Path,
    image_shape: tuple[int, int, int] | None,
    *,
    target: str,
    content: str = "full",
) -> Report:
    """Write contributions.csv, the largest first, and contributions.png if rows are images.

    Rows without mass are left out.

    Args:
        source: the n source rows of the distance.
        values: (n,) from `DistanceResult.contributions`; NaN for rows without mass.
        directory: created if it does not exist.
        image_shape: (c, h, w) of the rows, or None if they are not images.
        target: the name of the target dataset.
        content: `full`; `table` and `none` write only the csv file.

    Returns:
        The files written and the files that could not be written.

    Warns:
        MissingFileNotice: a file could not be written.
    """
    directory, known = Path(directory), (~values.isnan()).nonzero().squeeze(1)
    order = known[torch.argsort(values[known], descending=True, stable=True)].tolist()
    masses = source.masses.cpu()
    rows = [(row, _class_of(source, row), float(masses[row]), float(values[row])) for row in order]
    writers: Writers = {
        directory / "contributions.csv": lambda path: write_table_csv(
            path, ("row", "class", "mass", "contribution"), rows
        )
    }
    pictures: Pictures = {}
    if image_shape is not None and content == "full":
        title = f"What rows of {source.name} contribute to the distance to {target}"
        most = [row for row in order[:SHOWN] if values[row] > 0]
        least = [row for row in reversed(order[-SHOWN:]) if values[row] < 0]
        named = {"carry most of the distance": most, "bring the datasets nearer": least}
        blocks = {heading: rows for heading, rows in named.items() if rows}
        blocks = blocks or {"no row carries any of it": []}
        pictures[directory / "contributions.png"] = lambda: _draw_contributions(
            source, values, image_shape, title, blocks
        )
    return write_each(writers, pictures, (source.name, target, *source.class_names))


def _class_of(source: LabeledSamples, row: int) -> str:
    if source.targets is not None and source.labels is None:
        return ", ".join(f"{number:.4g}" for number in source.targets[row].tolist())
    return "" if source.labels is None else source.class_names[int(source.labels[row])]


def _draw_contributions(
    source: LabeledSamples,
    values: Tensor,
    shape: tuple[int, int, int],
    title: str,
    blocks: Mapping[str, Sequence[int]],
) -> Figure:
    """Draw rows as images, in blocks, with class and contribution above each image."""
    downs = [max(1, math.ceil(len(rows) / ACROSS)) for rows in blocks.values()]
    figure = new_figure(ACROSS * SIDE, TITLE + len(downs) * HEAD + sum(downs) * (SIDE + WORDS))
    figure.set_layout_engine("constrained")
    left: dict[str, Any] = {"x": 0.02, "ha": "left"}
    figure.suptitle(fit_title(figure, title, ACROSS * SIDE - 2 * MARGIN), **left)
    explained = "above each image: its class, its contribution in units of the cost"
    figure.supxlabel(explained, fontsize=9, **left)
    parts = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=downs)[:, 0]
    for part, down, (heading, rows) in zip(parts, downs, blocks.items(), strict=True):
        part.suptitle(heading, fontsize=11, **left)
        for axes, row in zip_longest(part.subplots(down, ACROSS, squeeze=False).flat, rows):
            axes.axis("off")
            if row is None:
                continue
            image = source.features[row].cpu().reshape(shape).movedim(0, 2).clamp(0, 1).numpy()
            image = image[..., 0] if shape[0] == 1 else image[..., :3]
            axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            number = f"{float(values[row]):+#.3g}".rstrip(".").replace("-", "−")
            name = shorten(_class_of(source, row), LONGEST_CLASS)
            axes.set_title(f"{name}\n{number}", loc="center", fontsize=7, pad=2)
    return figure
