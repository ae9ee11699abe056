"""Gaussian distances of lists of class pairs: invariants, closed forms, no effect of the list."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussian_cases import ROUTES, decomposing_by, every_route, moved, random_cloud

from otdd_flash.labels import pair_chunks
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.gaussian import (
    diagonal_gaussian_distances,
    gaussian_distances,
)
from otdd_flash.labels.moments import mean_distances, upper_bound_distances
from otdd_flash.labels.pairs import all_pairs

METHODS = {
    "gaussian": gaussian_distances,
    "diagonal": diagonal_gaussian_distances,
    "means": mean_distances,
    "upper_bound": upper_bound_distances,
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
PAIR = torch.tensor([[1, 0]])


def distance(one, two, **options):
    return float(gaussian_distances([one, two], PAIR, **options).values)


def random_pair(seed, dim, sizes, **options):
    return [random_cloud(size, dim, seed + k, **options) for k, size in enumerate(sizes)]


@every_route
def test_points_and_triangles_give_the_same_distance(route):
    """Every point several times is the same class, large enough for the other factor."""
    one, two = random_pair(0, 20, (9, 13))
    many = [moved(cloud, cloud.points.repeat(5, 1)) for cloud in (one, two)]
    with decomposing_by(route):
        expected = distance(one, two, unbiased=False)
        for first, second in (many, (one, many[1]), (many[0], two)):
            value = distance(first, second, unbiased=False)
            assert value == pytest.approx(expected, rel=1e-12)


@every_route
def test_commuting_covariances_have_a_closed_form(route):
    """Grids scaled along common, turned axes: the difference of the standard deviations."""
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[[-1.0, 0.0, 1.0]] * 4), -1).reshape(-1, 4)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    scales = np.array([[1, 2, 3, 4], [4, 1e-3, 5, 0]])
    one, two = (ClassCloud("grid", torch.from_numpy(grid * scale @ turn), None) for scale in scales)
    expected = ((scales[0] - scales[1]) ** 2).sum() * 2 / 3
    with decomposing_by(route):
        assert distance(one, two, unbiased=False) == pytest.approx(expected, rel=1e-13)


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
    assert torch.equal(method(clouds, pairs[order]).values, whole[order])
    for some in (order[:1], order[:2], order[5:12], order[20:53]):
        assert torch.equal(method(clouds, pairs[some]).values, whole[some])
    for position in range(0, len(pairs), 11):
        i, j = pairs[position].tolist()
        alone = method([clouds[j], clouds[i]], PAIR).values
        assert torch.equal(alone, whole[position : position + 1])


@pytest.mark.slow(after=5)
@pytest.mark.parametrize(
    ("method", "route", "entries"),
    [
        *((METHODS["gaussian"], route, 2**13) for route in ROUTES),
        *((METHODS[name], "lapack", 2**13) for name in ("diagonal", "means", "upper_bound")),
        *((METHODS["gaussian"], route, entries) for route in ROUTES for entries in (1, 2**17)),
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
        check_independence(gaussian_distances, near_clouds(4, 25, 784))
    finally:
        torch.set_num_threads(before)


@every_method
def test_values_are_their_own_bounds_and_need_no_gradient(method):
    one, two = random_pair(0, 4, (7, 9))
    one.points.requires_grad_()
    result = method([one, two], PAIR)
    assert result.lower.item() == result.values.item() == result.upper.item()
    assert not result.values.requires_grad


def test_progress_counts_all_pairs(monkeypatch):
    monkeypatch.setattr(pair_chunks, "CPU_ENTRIES", 2**12)
    calls = []
    gaussian_distances(mixed_clouds(), all_pairs(17), progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {136}
    assert len(done) > 20
    assert list(done) == sorted(set(done))
    assert done[-1] == 136


@pytest.mark.gpu
def test_a_gpu_gives_the_same_and_a_pair_does_not_depend_on_the_others():
    clouds = [*mixed_clouds(40), *near_clouds(40, 32, 40)]
    on_gpu = [moved(cloud, cloud.points.cuda()) for cloud in clouds]
    pairs = all_pairs(len(clouds))
    expected = gaussian_distances(clouds, pairs).values
    values = gaussian_distances(on_gpu, pairs).values
    torch.testing.assert_close(values.cpu(), expected, rtol=1e-11, atol=1e-11)
    for method in METHODS.values():
        check_independence(method, on_gpu)
