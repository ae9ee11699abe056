"""Costs of labelled clouds with unequal masses, for tests of what is made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.cost.points import LabelledCost


def labelled_cost(
    x: Tensor,
    y: Tensor | None = None,
    classes: int = 3,
    lambda_x: float = 0.5,
    *,
    massless: bool = False,
) -> LabelledCost:
    """Between two clouds, or of one with itself; with `massless` a point of each has no mass."""
    draw = torch.Generator().manual_seed(2)
    table, sides = torch.rand(classes, classes, generator=draw).double(), []
    for place, points in enumerate([x] if y is None else [x, y]):
        masses = torch.rand(len(points), generator=draw).double() + 0.1
        if massless:
            masses[0 if place else len(points) // 2] = 0
        labels = torch.arange(len(points)) % classes
        sides.append((points, (masses / masses.sum()).to(x.device), labels.to(x.device)))
    (x, a, labels_x), (y, b, labels_y) = sides[0], sides[-1]
    table = (table + table.T).to(x.device)
    return LabelledCost(
        x, y, a, b, labels_x=labels_x, labels_y=labels_y, class_costs=table, lambda_x=lambda_x
    )


def dense_labelled_cost(cost: LabelledCost, points: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Its matrix (n, m) float64; with other points if they are given."""
    import reference

    given = cost.points if points is None else points
    return reference.dense_cost(*given, cost.lambda_x, cost.class_costs, *cost.labels)
