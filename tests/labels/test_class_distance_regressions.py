"""Defects of the original OTDD code in its class distances, each named after what goes wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference_bures import squared_bures_wasserstein

from otdd_flash.labels import Gaussian, Means, UpperBound, measure_classes, metric_of
from otdd_flash.samples import LabeledSamples


def test_means_is_not_squared():
    source = LabeledSamples.from_arrays(np.array([[0.0, 0.0]]), [0])
    target = LabeledSamples.from_arrays(np.array([[3.0, 4.0]]), [0])
    assert measure_classes(source, target, Means()).xy.tolist() == [[25.0]]


def test_upper_bound_is_not_zero_between_a_class_and_itself(blobs):
    samples = blobs((9, 12), 4)
    table = measure_classes(samples, samples, UpperBound())
    for block in (table.xx, table.xy, table.yy):
        assert block.diagonal().tolist() == [0.0, 0.0]
    assert float(table.xy[0, 1]) > 1


def test_float32_square_roots_lose_two_percent():
    """Float32 features, eigenvalues over ten decades: the distance is good to nine digits."""
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


def test_rank_deficient_classes_raise():
    """Fewer samples than features, duplicated and constant features; the pieces are orthogonal."""
    ones, zeros = torch.zeros(4, 30, dtype=torch.float64), torch.zeros(50, 30, dtype=torch.float64)
    ones[:, 0] = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    zeros[:, 1] = zeros[:, 2] = torch.linspace(-1, 1, 50, dtype=torch.float64)
    source = LabeledSamples(ones, torch.zeros(4, dtype=torch.int64), ("a",))
    target = LabeledSamples(zeros, torch.zeros(50, dtype=torch.int64), ("b",))
    table = measure_classes(source, target, Gaussian())
    # Orthogonal supports share nothing: the distance is the sum of the variances.
    expected = float(ones.var(0).sum() + zeros.var(0).sum())
    assert float(table.xy) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", ["gaussian", "means", "upper_bound"])
def test_class_moments_become_global_moments(method, blobs):
    """A class's distances depend on its own points only, whatever else the dataset holds."""
    source, target = blobs((9, 12, 7), 4), blobs((8, 10), 4, seed=1)
    whole = measure_classes(source, target, metric_of(method))
    alone = measure_classes(source.keep_classes([1]), target, metric_of(method))
    torch.testing.assert_close(alone.xy[0], whole.xy[1], rtol=1e-12, atol=0)
    assert float(whole.xx[0, 1]) > 0.1
