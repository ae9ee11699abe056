"""Class distances against independent formulas and solvers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussian_cases import decomposing_by, every_route, squared_bures_wasserstein
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from otdd_flash.labels import Exact, Gaussian, Means, UpperBound, measure_classes
from otdd_flash.samples import LabeledSamples


def points_of(samples, index):
    return samples.features[samples.labels == index].numpy().astype(np.float64)


def by_pairs(source, target, formula):
    return np.array(
        [
            [
                formula(points_of(source, i), points_of(target, j))
                for j in range(len(target.class_names))
            ]
            for i in range(len(source.class_names))
        ]
    )


@pytest.mark.parametrize(
    ("sizes", "others", "unbiased", "route"),
    [
        ((60, 33), (45, 90), True, "lapack"),
        ((60, 33), (45, 90), False, "products"),
        ((60, 33), (5, 9), True, "products"),
        ((7, 3), (5, 9), False, "lapack"),
        ((7, 3), (5, 9), True, "products"),
    ],
)
def test_gaussian_matches_dense_square_roots(blobs, sizes, others, unbiased, route):
    """By d x d triangles, by n x n products of points, and mixed."""
    source, target = blobs(sizes, 12), blobs(others, 12, seed=1)
    with decomposing_by(route):
        table = measure_classes(source, target, Gaussian(unbiased=unbiased))
    # The square root of a singular matrix is only good to half the digits.
    tolerance = 1e-11 if min(sizes + others) > 12 else 1e-6
    expected = by_pairs(
        source, target, lambda one, two: squared_bures_wasserstein(one, two, unbiased=unbiased)
    )
    np.testing.assert_allclose(table.xy.numpy(), expected, rtol=tolerance)


@pytest.mark.parametrize(
    ("dim", "diagonal", "route"),
    [(1, False, "lapack"), (1, False, "products"), (1, True, "lapack"), (6, True, "lapack")],
)
def test_deviations_are_compared_in_one_dimension_and_by_each(blobs, dim, diagonal, route):
    source, target = blobs((30, 4), dim), blobs((8, 50, 2), dim, seed=1)
    with decomposing_by(route):
        table = measure_classes(source, target, Gaussian(diagonal=diagonal))
    expected = by_pairs(
        source,
        target,
        lambda one, two: (
            ((one.mean(0) - two.mean(0)) ** 2).sum()
            + ((one.std(0, ddof=1) - two.std(0, ddof=1)) ** 2).sum()
        ),
    )
    np.testing.assert_allclose(table.xy.numpy(), expected, rtol=1e-12)


def test_features_constant_within_a_class_are_kept():
    """Constant features are cut out of the factorisation, and must come back in their place."""
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(50, 6)), rng.normal(size=(40, 6))
    one[:, [0, 3]], two[:, [1, 3]] = 2.0, -1.0
    labels = np.zeros(50, dtype=np.int64)
    table = measure_classes(
        LabeledSamples.from_arrays(torch.from_numpy(one), labels),
        LabeledSamples.from_arrays(torch.from_numpy(two), labels[:40]),
        Gaussian(),
    )
    assert float(table.xy) == pytest.approx(squared_bures_wasserstein(one, two), rel=1e-6)


def test_float32_features_are_good_to_nine_digits():
    """With eigenvalues over ten decades, of which float32 square roots lose two percent."""
    rng = np.random.default_rng(0)
    scales = np.geomspace(1e-5, 1, 40)
    pair, points = [], []
    for size in (200, 300):
        turn = np.linalg.qr(rng.normal(size=(40, 40)))[0]
        points.append((rng.normal(size=(size, 40)) * scales @ turn).astype(np.float32))
        pair.append(LabeledSamples.from_arrays(points[-1], np.zeros(size, int)))
    table = measure_classes(*pair, Gaussian())
    expected = squared_bures_wasserstein(*(one.astype(np.float64) for one in points))
    assert float(table.xy) == pytest.approx(expected, rel=1e-9)


@every_route
def test_degenerate_covariances_are_nothing_special(route):
    """Orthogonal pieces share nothing: a line, a plane of doubled features, equal points."""
    points = torch.zeros(94, 30, dtype=torch.float64)
    points[:4, 0] = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    points[4:54, 1] = points[4:54, 2] = torch.linspace(-1, 1, 50).double()
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 50, 40]))
    samples = LabeledSamples(points, labels, ("line", "plane", "equal"))
    with decomposing_by(route):
        table = measure_classes(samples, samples, Gaussian()).xx
    variances = torch.stack([points[labels == k].var(0).sum() for k in range(3)])
    expected = (variances[:, None] + variances).fill_diagonal_(0)
    torch.testing.assert_close(table, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("source", "target", "metric", "value"),
    [
        # Quantile functions: 1/3 stay, 1/6 go 0 -> 1, 1/6 stay at 1, 1/3 go 1 -> 2.
        ([[0.0], [1.0]], [[0.0], [1.0], [2.0]], Exact(), 0.5),
        # Unbiased deviations are sqrt 2 times larger: no lower bound of the exact distance.
        ([[-1.0], [1.0]], [[-2.0], [2.0]], Gaussian(), 2.0),
        ([[-1.0], [1.0]], [[-2.0], [2.0]], Gaussian(unbiased=False), 1.0),
        ([[-1.0], [1.0]], [[-2.0], [2.0]], Exact(), 1.0),
        # Single samples are points where no unbiased covariance is asked for.
        ([[0.0, 0.0]], [[3.0, 4.0]], Gaussian(unbiased=False), 25.0),
        ([[0.0, 0.0]], [[3.0, 4.0]], UpperBound(unbiased=False), 25.0),
        ([[0.0, 0.0]], [[3.0, 4.0]], Means(), 25.0),
        ([[0.0, 0.0]], [[3.0, 4.0]], Exact(), 25.0),
    ],
)
def test_small_classes_have_closed_forms(source, target, metric, value):
    sides = [LabeledSamples.from_arrays(np.array(x), [0] * len(x)) for x in (source, target)]
    assert float(measure_classes(*sides, metric).xy) == pytest.approx(value)


@pytest.mark.parametrize("scale", [1, 1e-20, 1e-7, 1e20])
def test_exact_is_the_best_assignment_between_equal_classes(blobs, scale):
    source, target = (
        LabeledSamples(side.features.double() * scale, side.labels, side.class_names)
        for side in (blobs((17, 17), 5), blobs((17, 17), 5, seed=1))
    )

    def assignment(one, two):
        cost = cdist(one, two, "sqeuclidean")
        return cost[linear_sum_assignment(cost)].mean()

    table = measure_classes(source, target, Exact())
    np.testing.assert_allclose(table.xy.numpy(), by_pairs(source, target, assignment), rtol=1e-10)


def test_statistics_can_come_from_the_whole_datasets(blobs):
    whole = blobs((40, 30, 20), 4), blobs((25, 35), 4, seed=1)
    subsets = whole[0].take(torch.arange(30)).keep_classes([2, 0]), whole[1].take(torch.arange(20))
    table = measure_classes(*subsets, Gaussian(), statistics=whole)
    expected = measure_classes(*whole, Gaussian())
    assert table.names_x == ("2", "0")
    torch.testing.assert_close(table.xy, expected.xy[[2, 0]])
    torch.testing.assert_close(table.xx, expected.xx[[2, 0]][:, [2, 0]])


@pytest.mark.slow
def test_real_digits_match_dense_square_roots(real_data):
    """Pixels of handwritten digits: dead border pixels, fewer samples than pixels, float32."""
    raw = np.frombuffer(
        (real_data / "USPS/raw/train-images-idx3-ubyte").read_bytes()[16:], np.uint8
    )
    labels = (real_data / "USPS/raw/train-labels-idx1-ubyte").read_bytes()[8:]
    rows = slice(0, 2000)
    pixels = raw.reshape(-1, 256)[rows].astype(np.float32) / 255
    samples = LabeledSamples.from_arrays(pixels, list(labels)[rows])
    halves = samples.take(torch.arange(0, 2000, 2)), samples.take(torch.arange(1, 2000, 2))
    table = measure_classes(*halves, Gaussian())
    for i, j in ((0, 1), (3, 8), (5, 5)):
        expected = squared_bures_wasserstein(points_of(halves[0], i), points_of(halves[1], j))
        assert float(table.xy[i, j]) == pytest.approx(expected, rel=1e-5)
    assert bool((table.xy.argmin(1) == torch.arange(10)).all())
