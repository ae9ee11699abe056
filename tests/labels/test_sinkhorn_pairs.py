"""Debiased entropic transport between classes: limits, invariances, an independent solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.labels import sinkhorn_pairs
from otdd_flash.labels.methods import LabelMetric, measure_classes
from otdd_flash.samples import LabeledSamples


def entropic(epsilon, tolerance=1e-8):
    return LabelMetric("sinkhorn", epsilon=epsilon, tolerance=tolerance)


def pot_divergence(one, two, epsilon):
    """S_eps from POT's plans, each valued as <P, C> + eps KL(P | a b^T)."""
    ot = pytest.importorskip("ot")

    def cost_of(x, y):
        cost = cdist(x, y, "sqeuclidean")
        a, b = np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y))
        plan = ot.bregman.sinkhorn_log(a, b, cost, epsilon, numItermax=5_000, stopThr=1e-8)
        return (plan * cost).sum() + epsilon * (plan * np.log(plan / np.outer(a, b))).sum()

    return cost_of(one, two) - cost_of(one, one) / 2 - cost_of(two, two) / 2


def points_of(samples, index):
    return samples.features[samples.labels == index].numpy()


@pytest.fixture
def pair(blobs):
    return blobs((9, 14), 3), blobs((12, 9, 5), 3, seed=1)


def test_every_pair_matches_pot(pair):
    table = measure_classes(*pair, entropic(2.0))
    for i, j in np.ndindex(*table.xy.shape):
        expected = pot_divergence(points_of(pair[0], i), points_of(pair[1], j), 2.0)
        assert float(table.xy[i, j]) == pytest.approx(expected, rel=1e-6)
    within = pot_divergence(points_of(pair[1], 0), points_of(pair[1], 2), 2.0)
    assert float(table.yy[0, 2]) == pytest.approx(within, rel=1e-6)


def test_symmetric_with_zero_diagonal(pair):
    table = measure_classes(*pair, entropic(0.3)).full
    assert torch.equal(table, table.T)
    assert torch.equal(table.diagonal(), torch.zeros(5, dtype=torch.float64))
    assert float((table + torch.eye(5)).min()) > 0


def test_small_epsilon_is_exact_and_large_epsilon_is_means(pair):
    small = measure_classes(*pair, entropic(0.003, 1e-4)).full
    exact = measure_classes(*pair, LabelMetric("exact")).full
    torch.testing.assert_close(small, exact, rtol=0.01, atol=0.01)
    large = measure_classes(*pair, entropic(1e6)).full
    torch.testing.assert_close(
        large, measure_classes(*pair, LabelMetric("means")).full, rtol=1e-3, atol=1e-3
    )


def test_moving_and_scaling(pair):
    moved = [
        LabeledSamples(3 * samples.features + 7, samples.labels, samples.class_names)
        for samples in pair
    ]
    shuffled = [samples.take(torch.arange(len(samples)).flip(0)) for samples in moved]
    torch.testing.assert_close(
        measure_classes(*shuffled, entropic(9 * 0.4)).full,
        9 * measure_classes(*pair, entropic(0.4)).full,
        rtol=1e-6,
        atol=1e-8,
    )


def test_whole_weights_count_as_repetitions(pair):
    samples, other = pair
    repeats = torch.arange(len(samples)) % 3 + 1
    repeated = samples.take(torch.repeat_interleave(torch.arange(len(samples)), repeats))
    weighted = LabeledSamples(samples.features, samples.labels, samples.class_names, repeats)
    torch.testing.assert_close(
        measure_classes(weighted, other, entropic(0.5)).full,
        measure_classes(repeated, other, entropic(0.5)).full,
        rtol=1e-6,
        atol=1e-8,
    )


def test_the_inner_sinkhorn_is_not_debiased_so_a_dataset_differs_from_itself(pair):
    """Every sample twice is the same measure; without self terms it is far from itself."""
    samples = pair[0]
    twice = samples.take(torch.arange(len(samples)).repeat(2))
    table = measure_classes(samples, twice, entropic(1.0, 1e-6))
    assert float(table.xy.diagonal().abs().max()) < 1e-6
    assert measure_classes(samples, samples, entropic(1.0)).xy.diagonal().tolist() == [0.0, 0.0]


def test_self_terms_are_solved_once_per_distinct_class(pair, monkeypatch):
    solved = []
    solve = sinkhorn_pairs.solve_symmetric

    def counting(operator, *args, **kwargs):
        solved.append(operator.shape)
        return solve(operator, *args, **kwargs)

    monkeypatch.setattr(sinkhorn_pairs, "solve_symmetric", counting)
    measure_classes(*pair, entropic(1.0, 1e-3))
    assert solved == [(9, 9), (14, 14), (12, 12), (9, 9), (5, 5)]
    solved.clear()
    measure_classes(pair[0], pair[0], entropic(1.0, 1e-3))
    assert solved == [(9, 9), (14, 14)]


def test_stopping_early_is_said(pair, monkeypatch):
    options = sinkhorn_pairs.SolverOptions
    monkeypatch.setattr(
        sinkhorn_pairs,
        "SolverOptions",
        lambda tolerance: options(tolerance=tolerance, max_iterations=2),
    )
    with pytest.warns(NotConvergedWarning, match=r"after 2 iterations for '0' of blobs.* \d more"):
        measure_classes(*pair, entropic(0.1))


def test_classes_too_large_are_refused(pair, monkeypatch):
    monkeypatch.setattr(sinkhorn_pairs, "MAX_PAIRS_OF_POINTS", 100)
    with pytest.raises(InputError, match=r"'1' of blobs has 14 samples, more than the 10 it takes"):
        measure_classes(*pair, entropic(1.0))
