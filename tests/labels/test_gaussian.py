"""Gaussian distances of lists of class pairs: their last digits, their gradients, no company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussian_cases import (
    ROUTES,
    decomposing_by,
    every_route,
    moved,
    random_cloud,
)
from pairwise import named, pairwise

from otdd_flash.errors import InputError
from otdd_flash.labels import Gaussian, Means, UpperBound, gaussian
from otdd_flash.labels import pairs as pair_chunks
from otdd_flash.labels.gaussian import (
    NEGLIGIBLE,
    diagonal_gaussian_table,
    gaussian_table,
    mean_table,
    nuclear_norms,
    upper_bound_table,
)
from otdd_flash.labels.pairs import ClassCloud, all_pairs

METHODS = {
    "gaussian": Gaussian().measure,
    "diagonal": Gaussian(diagonal=True).measure,
    "means": Means().measure,
    "upper_bound": UpperBound().measure,
}
PAIR = torch.tensor([[1, 0]])

# The last digits of nuclear norms and of triangular factors.

SPECTRA = {
    "thirteen decades": lambda r: np.geomspace(1, 1e-13, r),
    "thirty decades": lambda r: np.geomspace(1, 1e-30, r),
    "half the rank": lambda r: np.repeat([1.0, 0.0], [r - r // 2, r // 2]),
    "one large": lambda r: np.array([1.0] + [1e-9] * (r - 1)),
    "all but negligible": lambda r: np.array([1.0] + [2 * NEGLIGIBLE] * (r - 1)),
    "nothing": lambda r: np.zeros(r),
}


def with_spectrum(values, rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    rank = min(rows, columns)
    left, right = (np.linalg.qr(rng.normal(size=(size, rank)))[0] for size in (rows, columns))
    return torch.from_numpy(left * values(rank) @ right.T)


@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA.keys())
@pytest.mark.parametrize("shape", [(1, 1), (9, 40), (130, 100)])
def test_products_give_the_nuclear_norm(spectrum, shape):
    matrix = with_spectrum(spectrum, *shape).unsqueeze(0)
    expected = float(torch.linalg.svdvals(matrix).sum())
    for scale in (1, 1e-60, 1e60):
        with decomposing_by("products"):
            value = float(nuclear_norms(scale * matrix))
        assert value <= scale * expected * (1 + 1e-14)
        assert value == pytest.approx(scale * expected, rel=2e-14 * max(shape) ** 0.5, abs=0)


# Distances.


def distance(one, two, **options):
    return float(gaussian_table([one, two], PAIR, **options))


@every_route
def test_points_and_triangles_give_the_same_distance(route):
    """Every point several times is the same class, large enough for the other factor."""
    one, two = random_cloud(9, 20), random_cloud(13, 20, 1)
    many = [moved(cloud, cloud.points.repeat(5, 1)) for cloud in (one, two)]
    with decomposing_by(route):
        expected = distance(one, two, unbiased=False)
        for first, second in (many, (one, many[1]), (many[0], two)):
            value = distance(first, second, unbiased=False)
            assert value == pytest.approx(expected, rel=1e-12)


def near_clouds(count, size, dim):
    """Classes so near that their distances show the last bits of fidelities."""
    base = random_cloud(size, dim).points
    return [
        ClassCloud("near", base + 1e-3 * random_cloud(size, dim, seed).points, None)
        for seed in range(count)
    ]


def mixed_clouds(dim=24):
    """Classes of one size and of very different ones, with both kinds of factors."""
    sizes = (2, 3, 5, 23, 26, 31, 57, 400)
    others = [random_cloud(size, dim, size, dtype=torch.float32) for size in sizes]
    return near_clouds(5, 20, dim) + near_clouds(4, 40, dim) + others


def check_independence(method, clouds):
    pairs = all_pairs(len(clouds))
    whole = method(clouds, pairs).values
    order = torch.randperm(len(pairs), generator=torch.manual_seed(0))
    for some in (order, order[:1], order[:2], order[20:53]):
        assert torch.equal(method(clouds, pairs[some]).values, whole[some])
    for position in range(0, len(pairs), 31):
        i, j = pairs[position].tolist()
        alone = method([clouds[j], clouds[i]], PAIR).values
        assert torch.equal(alone, whole[position : position + 1])


@pytest.mark.slow(after=4)
@pytest.mark.parametrize(
    ("method", "route", "entries"),
    [
        *((METHODS[name], "lapack", 2**13) for name in METHODS),
        *((METHODS["gaussian"], "products", entries) for entries in (1, 2**13, 2**17)),
        (METHODS["gaussian"], "lapack", 1),
    ],
)
def test_a_pair_does_not_depend_on_the_others(method, route, entries, monkeypatch):
    """To the last bit, in chunks of one pair, of several, and of all."""
    monkeypatch.setattr(pair_chunks, "CPU_ENTRIES", entries)
    with decomposing_by(route):
        check_independence(method, mixed_clouds())


@pytest.mark.parametrize("threads", [1, 2])
def test_wide_products_do_not_depend_on_the_others(threads):
    """Threads share the sums of a single wide product, and those of a batch they do not."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_independence(METHODS["gaussian"], near_clouds(3, 25, 784))
    finally:
        torch.set_num_threads(before)


def test_progress_counts_all_pairs(monkeypatch):
    monkeypatch.setattr(pair_chunks, "CPU_ENTRIES", 2**12)
    done = []
    gaussian_table(mixed_clouds(), all_pairs(17), progress=lambda *call: done.append(call))
    assert len(done) > 20
    assert done == sorted(set(done))
    assert (done[0][1], done[-1]) == (136, (136, 136))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_and_a_pair_does_not_depend_on_the_others():
    clouds = [*mixed_clouds(40), *near_clouds(40, 32, 40)]
    on_gpu = [moved(cloud, cloud.points.cuda()) for cloud in clouds]
    pairs = all_pairs(len(clouds))
    expected = gaussian_table(clouds, pairs)
    values = gaussian_table(on_gpu, pairs)
    torch.testing.assert_close(values.cpu(), expected, rtol=1e-11, atol=1e-11)
    for method in METHODS.values():
        check_independence(method, on_gpu)


# Small classes that a GPU decomposes side by side.


def stacked_cloud(size: int, dim: int = 5, seed: int = 0) -> ClassCloud:
    """Far from 0; every other size has weights, every third a constant feature."""
    cloud = random_cloud(size, dim, 100 * size + seed, weighted=size % 2 == 1, dtype=torch.float32)
    if size % 3 == 0:
        cloud.points[:, 1] = 7.0
    return moved(cloud, cloud.points + 1e3)


@pytest.mark.parametrize("unbiased", [False, True])
def test_moments_are_those_of_each_class(unbiased, monkeypatch):
    clouds = [stacked_cloud(size) for size in (1, 2, 5, 6, 7, 8, 9, 21, 33, 34, 200)]
    with decomposing_by("products"):
        found = gaussian.class_moments(clouds, unbiased)
        assert len(dict(gaussian._small_moments(clouds, unbiased))) == 8
        monkeypatch.setattr(gaussian, "MOST_STACKED", 0)
        each = gaussian.class_moments(clouds, unbiased)
    for one, alone in zip(found, each, strict=True):
        assert torch.allclose(one.mean, alone.mean, rtol=1e-14)
        assert torch.allclose(one.trace, alone.trace, rtol=1e-12)
        covariance = alone.factor.mT @ alone.factor
        assert torch.allclose(one.factor.mT @ one.factor, covariance, rtol=1e-12, atol=1e-13)


def test_a_singular_class_has_the_digits_of_its_points():
    """A factor by the covariance itself would be off by 1e-8."""
    draw = torch.Generator().manual_seed(3)
    line = torch.randn(40, 1, generator=draw) * torch.tensor([[1.0, 2.0, -1.0]])
    clouds, found = [ClassCloud("line", line + 5, None), stacked_cloud(32, 3)], []
    for route in ROUTES:
        with decomposing_by(route):
            found.append(gaussian_table(clouds, PAIR))
    assert torch.allclose(*found, rtol=1e-12)


def test_a_class_has_the_same_bits_in_any_company():
    many = [stacked_cloud(20 + k % 3, 4, seed=k) for k in range(90)]
    with decomposing_by("products"):
        found = gaussian.class_moments(many, True)
        for place in (0, 1, 63, 64, 89):
            (alone,) = gaussian.class_moments([many[place]], True)
            assert all(map(torch.equal, found[place], alone))


# Gradients.

TABLES = {
    "gaussian": gaussian_table,
    "diagonal": diagonal_gaussian_table,
    "means": lambda clouds, pairs, unbiased: mean_table(clouds, pairs),
    "upper_bound": upper_bound_table,
}
SHAPES = {
    "full rank": (5, (15, 22)),
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


@pytest.mark.slow(after=4)
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


def with_column(size, column, values):
    """A class with other values of a feature, a number or those of another feature."""
    cloud = random_cloud(size, 6)
    cloud.points[:, column] = values if isinstance(values, float) else cloud.points[:, values]
    return cloud


KINKS = {
    "a constant coordinate": [with_column(30, 1, 2.0), random_cloud(20, 6, 1)],
    "a constant coordinate of few points": [with_column(5, 1, 2.0), random_cloud(4, 6, 1)],
    "a doubled feature": [with_column(30, 2, 0), random_cloud(20, 6, 1)],
    "one sample": [random_cloud(1, 6), random_cloud(20, 6, 1)],
    "equal points": [ClassCloud("equal", torch.ones(9, 6).double(), None), random_cloud(20, 6, 1)],
    "single samples": [random_cloud(1, 6), random_cloud(1, 6, 1)],
}


@pytest.mark.slow(after=4)
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
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_a_gpu_gives_the_same_gradients(table):
    clouds = [random_cloud(size, 12, size) for size in (5, 9, 40, 41)]
    on_gpu = [moved(cloud, cloud.points.cuda()) for cloud in clouds]
    for one, two in zip(gradients(table, clouds)[1], gradients(table, on_gpu)[1], strict=True):
        torch.testing.assert_close(two.cpu(), one, rtol=1e-9, atol=1e-11)
