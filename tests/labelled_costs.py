"""Costs of labelled clouds with unequal masses, for tests of what is made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.cost.points import Cloud, LabelledCost


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
    return cost_between(
        x, y, a, b, labels_x=labels_x, labels_y=labels_y, class_costs=table, lambda_x=lambda_x
    )


def cost_between(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    labels_x: Tensor | None = None,
    labels_y: Tensor | None = None,
    class_costs: Tensor | None = None,
    lambda_x: float = 0.5,
) -> LabelledCost:
    """Of points, masses and labels; of one cloud with itself where both sides are the same.

    Without masses these are equal, and without labels there is one class.
    """

    def cloud(points: Tensor, masses: Tensor | None, labels: Tensor | None) -> Cloud:
        count, here = len(points), points.device
        if masses is None:
            masses = torch.full((count,), 1 / count, dtype=torch.float64, device=here)
        if labels is None:
            labels = torch.zeros(count, dtype=torch.int64, device=here)
        return Cloud(points, masses, labels)

    if class_costs is None:
        class_costs = torch.zeros(1, 1, dtype=torch.float64, device=x.device)
    of_x = cloud(x, a, labels_x)
    same = x is y and a is b and labels_x is labels_y
    return LabelledCost(of_x, of_x if same else cloud(y, b, labels_y), class_costs, lambda_x)


def dense_labelled_cost(cost: LabelledCost, points: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Its matrix (n, m) float64; with other points if they are given."""
    import reference

    given = cost.points if points is None else points
    return reference.dense_cost(*given, cost.lambda_x, cost.class_costs, *cost.labels)
