"""Every ground cost against dense formulas: intervals, potentials, gradients, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError
from tests.reference import entropic_transport

GROUNDS = ("sqeuclidean", "cosine", "inner")
LAMBDA_X, LAMBDA_Y = 0.7, 0.4


def dense(ground, x, y, table=None, labels=None, lambda_x=LAMBDA_X, lambda_y=LAMBDA_Y):
    x, y = x.double(), y.double()
    if ground == "cosine":
        cost = 1 - (x / x.norm(dim=1, keepdim=True)) @ (y / y.norm(dim=1, keepdim=True)).T
    elif ground == "inner":
        cost = -x @ y.T
    else:
        cost = (x[:, None] - y[None]).square().sum(2)
    cost = lambda_x * cost
    return cost if table is None else cost + lambda_y * table[labels[0]][:, labels[1]]


class Case:
    """Two labelled clouds away from the origin, with masses and a table."""

    def __init__(self, n=40, m=30, dim=4, dtype=torch.float32):
        draw = torch.Generator().manual_seed(3)
        self.x = (torch.randn(n, dim, generator=draw) + 1).to(dtype)
        self.y = (torch.randn(m, dim, generator=draw) * 1.5).to(dtype)
        self.a, self.b = (torch.rand(size, generator=draw).double() + 0.1 for size in (n, m))
        self.a, self.b = self.a / self.a.sum(), self.b / self.b.sum()
        self.labels = torch.arange(n) % 3, torch.arange(m) % 2
        table = torch.rand(5, 5, generator=draw).double()
        self.table = (table + table.T).fill_diagonal_(0)

    def sides(self):
        return (
            otdd.LabeledSamples(self.x, self.labels[0], ("a", "b", "c"), self.a),
            otdd.LabeledSamples(self.y, self.labels[1], ("d", "e"), self.b),
        )

    def truths(self, ground, epsilon):
        """OT of (x, y), (x, x) and (y, y) with the first one's potentials."""
        clouds = {"x": (self.x, self.a, 0, slice(0, 3)), "y": (self.y, self.b, 1, slice(3, 5))}
        found = []
        for name in ("xy", "xx", "yy"):
            (p, a, i, rows), (q, b, j, columns) = (clouds[side] for side in name)
            labels = self.labels[i], self.labels[j]
            cost = dense(ground, p, q, self.table[rows, columns], labels)
            found.append(entropic_transport(cost, a, b, epsilon))
        return found


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("ground", "backend", "precision"),
    [
        *(("cosine", "torch", "fast"), ("inner", "torch", "double")),
        *(("sqeuclidean", "torch", "fast"), ("inner", "torch", "fast")),
        ("inner", "triton", "fast"),
    ],
)
def test_intervals_hold_the_dense_value(ground, backend, precision):
    # In the interpreter every iteration takes seconds.
    case, epsilon = (Case(18, 13), 4.0) if backend == "triton" else (Case(), 1.0)
    settings = {
        "epsilon": epsilon,
        "class_table": case.table,
        "cost": otdd.GroundCost(LAMBDA_X, LAMBDA_Y, ground),
        "compute": otdd.ComputeOptions(backend=backend, precision=precision),
        # Points that are nearly each other's alone have potentials that are found last.
        "options": otdd.Converged(1e-4),
    }
    (value, f, g), (of_x, *_), (of_y, *_) = case.truths(ground, epsilon)
    term = otdd.sinkhorn(*case.sides(), **settings)
    lower, upper = term.bounds
    assert lower <= value <= upper
    assert upper - lower < 0.01 * max(1, abs(value))
    # Potentials are unique up to a constant.
    for found, exact in ((term.f, f), (term.g, g)):
        off = (found.double() - exact).sub_((found.double() - exact).mean())
        assert float(off.abs().max()) < 0.02
    divergence = otdd.sinkhorn_divergence(*case.sides(), **settings)
    lower, upper = divergence.bounds
    assert lower <= value - (of_x + of_y) / 2 <= upper
    alone = otdd.sinkhorn_divergence(*case.sides(), **settings, debias=False)
    assert alone.bounds[0] <= value <= alone.bounds[1]
    assert math.isclose(alone.value, term.value, rel_tol=1e-12)


def test_cosine_does_not_see_lengths():
    case = Case(dtype=torch.float64)
    lengths = torch.logspace(-200, 200, len(case.x), dtype=torch.float64)[:, None]
    table, cost = torch.zeros(2, 2), otdd.GroundCost(ground="cosine")
    double = otdd.ComputeOptions(precision="double")
    found = [
        otdd.sinkhorn(x, case.y, epsilon=0.1, class_table=table, cost=cost, compute=double)
        for x in (case.x, case.x / case.x.norm(dim=1, keepdim=True) * lengths.clamp(1e-100, 1e100))
    ]
    assert math.isclose(found[0].value, found[1].value, rel_tol=1e-9)


def test_classes_are_measured_between_directions():
    source, target = Case().sides()
    units = [
        otdd.LabeledSamples(
            torch.nn.functional.normalize(side.features.double()),
            side.labels,
            side.class_names,
            side.weights,
        )
        for side in (source, target)
    ]
    expected = otdd.dataset_distance(*units, epsilon=1.0, lambda_x=0.25)
    settings = {"epsilon": 1.0, "ground": "cosine"}
    result = otdd.dataset_distance(source, target, **settings)
    assert torch.allclose(result.class_distances.full, expected.class_distances.full)
    assert math.isclose(result.value, expected.value, rel_tol=1e-6)
    joint = otdd.class_distances([source, target], ground="cosine").between(0, 1)
    assert torch.allclose(joint.full, result.class_distances.full)
    pairs = otdd.pairwise_distances([source, target], **settings)
    assert math.isclose(float(pairs.values[0, 1]), result.value, rel_tol=1e-6)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("ground", ["cosine", "inner"])
def test_a_result_knows_its_plan_and_comes_back(ground, tmp_path):
    case = Case()
    result = otdd.dataset_distance(
        *case.sides(), labels="none", epsilon=0.1, ground=ground, debias=False
    )
    source, target = case.sides()
    cost = dense(ground, source.features, target.features, lambda_x=0.5)
    _, f, g = entropic_transport(cost, case.a, case.b, 0.1)
    plan = case.a[:, None] * case.b * ((f[:, None] + g - cost) / 0.1).exp()
    images = plan @ target.features.double()
    assert torch.allclose(result.apply_plan(target.features).double(), images, atol=1e-3)
    means = images / plan.sum(1, keepdim=True)
    assert torch.allclose(result.barycentric_map().double(), means, atol=5e-2)
    loaded = otdd.DistanceResult.load(result.save(tmp_path / "kept"))
    assert loaded.cost == result.cost
    assert (loaded.value, loaded.bounds) == (result.value, result.bounds)


def test_what_a_ground_cost_cannot_compare_is_refused():
    case = Case()
    x = case.x.clone()
    x[7] = 0
    with pytest.raises(InputError, match=r"row 7 of .* is 0, which has no direction"):
        otdd.sinkhorn(x, case.y, epsilon=0.1, cost=otdd.GroundCost(ground="cosine"))
    sides = list(case.sides())
    for name, refused in {
        "gaussian": lambda: otdd.dataset_distance(*sides, ground="inner"),
        "gaussian ": lambda: otdd.pairwise_distances(sides, ground="inner"),
        "means": lambda: otdd.class_distances(sides, "means", ground="inner"),
    }.items():
        with pytest.raises(InputError, match=f"labels={name.strip()} .* ground=inner"):
            refused()
    with pytest.raises(InputError, match=r"unknown ground .*: sqeuclidean, cosine, inner"):
        otdd.GroundCost(ground="manhattan")


def test_directions_that_float64_cannot_tell_apart_are_refused() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (1e7 + torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in (40, 30))
    with pytest.raises(InputError, match=r"^epsilon_relative=0\.01 is too small for ground=cosine"):
        otdd.dataset_distance(x, y, labels="none", ground="cosine")
    advised = otdd.dataset_distance(x, y, labels="none", ground="cosine", epsilon=1e-9)
    assert advised.divergence.marginal_error <= 2e-3


def test_parallel_rows_have_no_mean_cost_to_take_a_share_of() -> None:
    """Of directions that are equal but for rounding: the default is 1, as of any constant cost."""
    found = otdd.dataset_distance(
        np.ones((20, 3)), 2 * np.ones((10, 3)), labels="none", ground="cosine"
    )
    assert found.epsilon == 1
    assert found.bounds[0] <= 0 <= found.bounds[1]
