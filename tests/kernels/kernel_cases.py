"""Labelled clouds and their dense cost, for the tests of every kernel."""

from __future__ import annotations

import torch

from otdd_flash.operators.labelled_cost import LabelledCost

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Rows, columns, coordinates and classes of either side, for a GPU.
LARGE = [
    (4000, 3500, 128, 10, 10),
    (5000, 3001, 512, 10, 10),
    (2500, 2049, 300, 3, 7),
    (2000, 2500, 784, 100, 3),
    (1000, 900, 4096, 2, 2),
    (3000, 2000, 100, 3000, 500),
    (700, 600, 16, 300, 200),
]
LAMBDA_X = 0.7
EPSILON = 0.3


def clouds(n, m, d, classes_x, classes_y):
    """Random labelled clouds, some masses zero."""
    draw = torch.Generator().manual_seed(n + m + d)
    x, y = torch.randn(n, d, generator=draw), torch.randn(m, d, generator=draw)
    x, y = x / d**0.5 + 1, y / d**0.5
    a, b = torch.rand(n, generator=draw).double(), torch.rand(m, generator=draw).double()
    if min(n, m) > 1:
        a[n // 2] = b[0] = 0
    labels_x = torch.randint(0, classes_x, (n,), generator=draw)
    labels_y = torch.randint(0, classes_y, (m,), generator=draw)
    costs = torch.rand(classes_x, classes_y, generator=draw).double() * 3
    return x, y, a / a.sum(), b / b.sum(), labels_x, labels_y, costs


def cost_of(case):
    x, y, a, b, labels_x, labels_y, costs = (part.to(DEVICE) for part in clouds(*case))
    return LabelledCost(
        x, y, a, b, labels_x=labels_x, labels_y=labels_y, class_costs=costs, lambda_x=LAMBDA_X
    )


def self_cost_of(case):
    """The first cloud of a case with itself."""
    n, m, d, classes, _ = case
    x, _, a, _, labels, _, _ = (part.to(DEVICE) for part in clouds(n, m, d, classes, 1))
    draw = torch.Generator().manual_seed(1)
    costs = torch.rand(classes, classes, generator=draw).double().to(DEVICE) * 3
    costs = (costs + costs.T).fill_diagonal_(0)
    return LabelledCost(
        x, x, a, a, labels_x=labels, labels_y=labels, class_costs=costs, lambda_x=LAMBDA_X
    )


def largest_error(operator):
    """What a cost of a half-step may be off by: a unit for 16 products and for six operations."""
    steps = operator.packed[0].coordinates.shape[1] * operator._parts / 16
    return 2.0**-24 * (6 + steps) * operator.costs.highest


def dense_cost(operator):
    """The cost of the points that the kernel sees, (n, m) float64."""
    x, y = operator.seen_points()
    # By products, because differences of 5,000 x 5,000 x 512 would fill any memory.
    squares = x.square().sum(1)[:, None] + y.square().sum(1)[None, :] - 2 * x @ y.T
    cost = operator.cost
    return LAMBDA_X * squares + cost.class_costs[cost.labels[0]][:, cost.labels[1]]


def potentials(operator, scale=1.0):
    draw = torch.Generator().manual_seed(0)
    f, g = (torch.randn(size, generator=draw).to(DEVICE) * scale for size in operator.shape)
    return f, g
