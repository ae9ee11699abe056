"""Gradients of gaussian distances with respect to the points of the classes."""

from __future__ import annotations

import pytest
import torch
from gaussian_cases import ROUTES, decomposing_by, every_route, moved, random_cloud
from pairwise import named, pairwise

from otdd_flash.errors import InputError
from otdd_flash.labels import pair_chunks
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.gaussian import diagonal_gaussian_table, gaussian_distances, gaussian_table
from otdd_flash.labels.moments import mean_table, upper_bound_table
from otdd_flash.labels.pairs import all_pairs

TABLES = {
    "gaussian": gaussian_table,
    "diagonal": diagonal_gaussian_table,
    "means": lambda clouds, pairs, unbiased: mean_table(clouds, pairs),
    "upper_bound": upper_bound_table,
}
every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
SHAPES = {
    "full rank": (5, (15, 22)),
    "fewer points than features": (9, (4, 6)),
    "one of each": (6, (4, 20)),
    "one dimension": (1, (3, 5)),
    "three classes": (4, (9, 9, 3)),
}


def as_function(table, clouds, unbiased):
    """The distances of all pairs as a function of the points."""
    pairs = all_pairs(len(clouds))

    def measured(*points):
        return table(list(map(moved, clouds, points)), pairs, unbiased)

    return measured, [cloud.points.clone().requires_grad_() for cloud in clouds]


def gradients(table, clouds, unbiased=False):
    measured, points = as_function(table, clouds, unbiased)
    values = measured(*points)
    return values.detach(), torch.autograd.grad(values.sum(), points)


@pytest.mark.slow(after=5)
@pairwise(
    route=ROUTES,
    table=named(TABLES),
    shape=named(SHAPES),
    unbiased=[True, False],
    weighted=[True, False],
)
def test_finite_differences_agree(route, table, shape, unbiased, weighted):
    dim, sizes = shape
    clouds = [random_cloud(size, dim, k, weighted=weighted) for k, size in enumerate(sizes)]
    with decomposing_by(route):
        measured, points = as_function(table, clouds, unbiased)
        assert torch.autograd.gradcheck(
            measured, points, eps=1e-5, atol=1e-7, rtol=1e-6, fast_mode=True
        )


@every_route
def test_only_the_points_that_move_need_a_gradient_in_any_chunks(route, monkeypatch):
    clouds = [random_cloud(size, 5, size) for size in (4, 4, 20)]
    moving = [moved(clouds[2], clouds[2].points.clone().requires_grad_())]
    with decomposing_by(route):
        values, expected = gradients(gaussian_table, clouds, unbiased=True)
        alone = gaussian_table([*clouds[:2], *moving], all_pairs(3))
        (found,) = torch.autograd.grad(alone.sum(), moving[0].points)
        torch.testing.assert_close(found, expected[2])
        monkeypatch.setattr(pair_chunks, "CPU_ENTRIES", 60)
        in_chunks, others = gradients(gaussian_table, clouds, unbiased=True)
    torch.testing.assert_close(in_chunks, values)
    for one, two in zip(others, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@every_table
def test_values_are_those_without_gradient_and_dtypes_are_the_points(table):
    clouds = [random_cloud(size, 6, size, dtype=torch.float32) for size in (4, 40)]
    values, found = gradients(table, clouds)
    assert values.dtype == torch.float64
    assert all(gradient.dtype == torch.float32 for gradient in found)
    if table is gaussian_table:
        plain = gaussian_distances(clouds, all_pairs(2), unbiased=False)
        assert torch.equal(plain.values, values)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sizes", [(4, 6), (20, 30)], ids=["points", "triangles"])
def test_a_second_derivative_is_refused(scaled, sizes):
    """Also where it is the derivative by the points alone, and not by a weight of the distance."""
    clouds = [random_cloud(size, 5, size) for size in sizes]
    measured, points = as_function(gaussian_table, clouds, unbiased=True)
    value = measured(*points).sum()
    value = value.square() if scaled else value
    for gradient in torch.autograd.grad(value, points, create_graph=True):
        with pytest.raises(InputError, match=r"^the loss is differentiable once, .*; detach"):
            torch.autograd.grad(gradient.sum(), points, retain_graph=True)


def constant_coordinate(size, dim):
    cloud = random_cloud(size, dim)
    cloud.points[:, 1] = 2.0
    return cloud


def doubled_feature(size, dim):
    cloud = random_cloud(size, dim)
    cloud.points[:, 2] = cloud.points[:, 0]
    return cloud


KINKS = {
    "a constant coordinate": [constant_coordinate(30, 6), random_cloud(20, 6, 1)],
    "a constant coordinate of few points": [constant_coordinate(5, 6), random_cloud(4, 6, 1)],
    "a doubled feature": [doubled_feature(30, 6), random_cloud(20, 6, 1)],
    "constant in both": [constant_coordinate(30, 6), constant_coordinate(40, 6)],
    "one sample": [random_cloud(1, 6), random_cloud(20, 6, 1)],
    "one sample and few": [random_cloud(1, 6), random_cloud(3, 6, 1)],
    "equal points": [ClassCloud("equal", torch.ones(9, 6).double(), None), random_cloud(20, 6, 1)],
    "single samples": [random_cloud(1, 6), random_cloud(1, 6, 1)],
}


@pytest.mark.slow(after=8)
@pairwise(clouds=named(KINKS), table=named(TABLES), route=ROUTES)
def test_a_small_step_descends_at_kinks(route, table, clouds):
    """By as much as the gradient says, or more: the distance is concave across these kinks."""
    rate = 1e-6
    with decomposing_by(route):
        value, found = gradients(table, clouds)
        steps = [cloud.points - rate * step for cloud, step in zip(clouds, found, strict=True)]
        after, _ = gradients(table, list(map(moved, clouds, steps)))
    expected = rate * sum(float(step.square().sum()) for step in found)
    assert expected > 0
    assert float(value - after) > 0.99 * expected


@every_route
@pytest.mark.parametrize("size", [30, 4, 1])
def test_identical_classes_are_at_rest(route, size):
    cloud = random_cloud(size, 6)
    for name in ("gaussian", "diagonal", "means"):
        with decomposing_by(route):
            values, found = gradients(TABLES[name], [cloud, cloud])
        assert float(values) == pytest.approx(0, abs=1e-13), name
        for gradient in found:
            torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.gpu
@every_table
def test_a_gpu_gives_the_same_gradients(table):
    clouds = [random_cloud(size, 12, size) for size in (5, 9, 40, 41)]
    on_gpu = [moved(cloud, cloud.points.cuda()) for cloud in clouds]
    for one, two in zip(gradients(table, clouds)[1], gradients(table, on_gpu)[1], strict=True):
        torch.testing.assert_close(two.cpu(), one, rtol=1e-9, atol=1e-11)
