"""The two tables between classes: how far they are apart, and what mass goes where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from otdd_flash.report.heat_maps import heat_map
from otdd_flash.report.page import SOURCE_COLOR, TARGET_COLOR


def draw_class_distances(
    full: Tensor,
    names: tuple[Sequence[str], Sequence[str]],
    datasets: tuple[str, str],
    path: str | Path,
) -> None:
    """Draw the full table of class distances: within each dataset, and across.

    Args:
        full: (Vx + Vy, Vx + Vy) squared 2-Wasserstein distances, source classes first.
        names: the Vx source and the Vy target class names.
        datasets: the names of source and target.
        path: the PNG file.
    """
    groups = [
        (f"{role}: {dataset}", len(classes))
        for role, dataset, classes in zip(("source", "target"), datasets, names, strict=True)
    ]
    both = [*names[0], *names[1]]
    heat_map(
        full,
        both,
        both,
        path,
        title=f"Distances between the classes of {datasets[0]} and {datasets[1]}",
        value_label="squared 2-Wasserstein distance",
        row_groups=groups,
        column_groups=groups,
    )


def draw_class_coupling(
    coupling: Tensor,
    names: tuple[Sequence[str], Sequence[str]],
    datasets: tuple[str, str],
    path: str | Path,
) -> None:
    """Draw how much of the mass of each source class is moved to each target class.

    Args:
        coupling: (Vx, Vy) masses that sum to 1; drawn in percent.
        names: the Vx source and the Vy target class names.
        datasets: the names of source and target.
        path: the PNG file.
    """
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
