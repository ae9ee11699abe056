"""The two heat maps between classes: class distances, and the mass moved between classes.

The reports of distances and of pairwise distances call it; `heat_maps` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from otdd_flash.report.figures.heat_maps import heat_map
from otdd_flash.report.figures.page import SOURCE_COLOR, TARGET_COLOR


def draw_class_distances(
    full: Tensor,
    names: tuple[Sequence[str], Sequence[str]],
    datasets: tuple[str, str],
    path: str | Path,
    *,
    orders: Sequence[Sequence[int]] | None = None,
) -> None:
    """Draw the full matrix of class distances: within each dataset and between both.

    Args:
        full: (Vx + Vy, Vx + Vy) squared 2-Wasserstein distances, source classes first.
        names: the Vx source and the Vy target class names.
        datasets: the names of source and target.
        path: the PNG file.
        orders: the order in which to show the classes of each dataset; None keeps the dataset's.
    """
    _draw_table(
        full,
        names,
        tuple(f"{role}: {name}" for role, name in zip(("source", "target"), datasets, strict=True)),
        path,
        title=f"Distances between the classes of {datasets[0]} and {datasets[1]}",
        orders=orders,
    )


def draw_joint_class_distances(
    full: Tensor,
    names: Sequence[Sequence[str]],
    datasets: Sequence[str],
    path: str | Path,
    *,
    orders: Sequence[Sequence[int]] | None = None,
) -> None:
    """Draw the class distances of K datasets; arguments are those of `draw_class_distances`."""
    title = f"Distances between the classes of {len(datasets)} datasets"
    _draw_table(full, names, datasets, path, title=title, orders=orders)


def _draw_table(
    full: Tensor,
    names: Sequence[Sequence[str]],
    brackets: Sequence[str],
    path: str | Path,
    *,
    title: str,
    orders: Sequence[Sequence[int]] | None,
) -> None:
    groups = [(bracket, len(classes)) for bracket, classes in zip(brackets, names, strict=True)]
    shown = [name for classes in names for name in classes]
    if orders is not None:
        starts = accumulate((len(classes) for classes in names), initial=0)
        places = [
            start + index for start, order in zip(starts, orders, strict=False) for index in order
        ]
        full, shown = full[places][:, places], [shown[place] for place in places]
    heat_map(
        full,
        shown,
        shown,
        path,
        title=title,
        value_label="squared 2-Wasserstein distance",
        row_groups=groups,
        column_groups=groups,
    )


def draw_class_coupling(
    coupling: Tensor,
    names: tuple[Sequence[str], Sequence[str]],
    datasets: tuple[str, str],
    path: str | Path,
    *,
    orders: Sequence[Sequence[int]] | None = None,
) -> None:
    """Draw how much of the mass of each source class moves to each target class.

    Args:
        coupling: (Vx, Vy) masses that sum to 1; drawn in percent.
        names: the Vx source and the Vy target class names.
        datasets: the names of source and target.
        path: the PNG file.
        orders: the order in which to show the classes of each dataset; None keeps the dataset's.
    """
    if orders is not None:
        rows, columns = orders
        coupling = coupling[list(rows)][:, list(columns)]
        names = [names[0][row] for row in rows], [names[1][column] for column in columns]
    heat_map(
        100.0 * coupling,
        names[0],
        names[1],
        path,
        title=f"Mass moved from the classes of {datasets[0]} to those of {datasets[1]}",
        value_label="mass, % of the total",
        row_groups=[(f"source: {datasets[0]}", len(names[0]))],
        column_groups=[(f"target: {datasets[1]}", len(names[1]))],
        row_colors=[SOURCE_COLOR],
        column_colors=[TARGET_COLOR],
        decimals=1,
        zero="",
    )
