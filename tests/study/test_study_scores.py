"""Scores of a trained source's features against float64 formulas written another way."""

import math

import numpy as np
import pytest
import torch
from reference import (
    bures_wasserstein,
    h_score_by_inverse,
    leep_by_loops,
    log_evidence,
    transport_entropy,
)

import otdd_flash as otdd
from otdd_flash.study.measures.distances import conditional_entropy, frechet_distance
from otdd_flash.study.measures.network import HScore, Knn, Leep, LogMe, NetworkView


def rows(n, d, classes, *, apart, seed=0):
    """Features in classes that are some way apart, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = apart * torch.randn(classes, d, generator=generator, dtype=torch.float64)
    return centres[labels] + torch.randn(n, d, generator=generator, dtype=torch.float64), labels


def h_score(features, labels):
    return HScore().score(NetworkView(features, features, labels))


def leep(probabilities, labels):
    # Logits of these probabilities.
    return Leep().score(NetworkView(probabilities, probabilities.double().log(), labels))


SHAPES = [(33, 40, 4), (40, 1, 2), (100, 84, 10)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "apart"),
    [((40, 1, 2), 0.5), ((60, 5, 3), 0.0), ((33, 40, 4), 0.5)],
)
def test_logme_is_the_largest_evidence_of_dense_gaussians(shape, apart):
    from scipy.optimize import minimize

    features, labels = rows(*shape, apart=apart)
    best = []
    for c in range(shape[2]):
        y = (labels == c).double()
        starts = [(a, 0.0) for a in (-4.0, 0.0, 6.0, 12.0)]
        ends = [
            minimize(
                lambda logs, y=y: -log_evidence(features, y, *np.exp(logs)),
                start,
                method="Nelder-Mead",
                options={"xatol": 1e-7, "fatol": 1e-12, "maxiter": 4000},
                bounds=[(-25, 40), (-25, 40)],
            ).fun
            for start in starts
        ]
        best.append(-min(ends))
    assert LogMe().score(NetworkView(features, features, labels)) == pytest.approx(
        np.mean(best), abs=1e-6
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_h_score_and_leep_are_those_of_inverse_covariances_and_of_loops(shape):
    n, sources, _ = shape
    features, labels = rows(*shape, apart=1.0)
    expected = h_score_by_inverse(features, labels)
    assert h_score(features, labels) == pytest.approx(expected, rel=1e-6)
    theta = torch.randn(n, sources + 1, dtype=torch.float64).softmax(1)
    assert leep(theta, labels) == pytest.approx(leep_by_loops(theta, labels), rel=1e-9)


def test_perfect_constant_and_repeated_features_have_their_scores():
    features, labels = rows(60, 5, 3, apart=1.0)
    more = torch.cat((features, features[:, :2] * 3, torch.ones(60, 2)), 1)
    assert h_score(more, labels) == pytest.approx(h_score(features, labels), rel=1e-9)
    assert h_score(torch.ones(6, 2), torch.arange(6) % 2) == 0
    # The number of classes less 1.
    labels = torch.arange(40) % 4
    assert h_score(torch.nn.functional.one_hot(labels).double(), labels) == pytest.approx(3)
    assert leep(torch.nn.functional.one_hot(labels, 5), labels) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 2), (4, 2, 2)])
def test_knn_is_that_of_loops(shape):
    features, labels = rows(*shape, apart=1.0)
    # Ties of distance and of votes.
    features = (2 * features).round() / 2
    right = 0
    for i in range(len(features)):
        gaps = (features - features[i]).square().sum(1)
        others = sorted((float(gaps[k]), k) for k in range(len(features)) if k != i)[:5]
        voters = [int(labels[k]) for _, k in others]
        most = max(voters.count(c) for c in voters)
        winner = next(c for c in voters if voters.count(c) == most)
        right += winner == int(labels[i])
    assert Knn().score(NetworkView(features, features, labels)) == right / len(features)


@pytest.mark.parametrize("weighted", [False, True])
def test_frechet_is_bures_wasserstein_of_the_whole_clouds(weighted):
    (x, lx), (y, ly) = rows(50, 4, 3, apart=1.0), rows(30, 4, 2, apart=2.0, seed=1)
    a = torch.rand(50, dtype=torch.float64) if weighted else torch.ones(50, dtype=torch.float64)
    a[:3] = 0 if weighted else a[:3]
    one = otdd.LabeledSamples(x, lx, ("a", "b", "c"), a if weighted else None)
    other = otdd.LabeledSamples(y, ly, ("a", "b"))
    masses = a / a.sum(), torch.full((30,), 1 / 30, dtype=torch.float64)
    expected = bures_wasserstein(x, masses[0], y, masses[1])
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(one, one) == 0


def test_otce_is_the_entropy_of_columns_given_rows():
    coupling = torch.rand(4, 3, dtype=torch.float64)
    coupling[1] = 0
    coupling[0, 2] = 0
    coupling /= coupling.sum()
    assert conditional_entropy(coupling) == pytest.approx(transport_entropy(coupling), abs=1e-12)
    assert conditional_entropy(torch.eye(3) / 3) == 0
    assert conditional_entropy(torch.full((2, 4), 1 / 8)) == pytest.approx(math.log(4))
