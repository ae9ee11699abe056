"""Bounds and marginal errors against exact truths: duplicates that collapse, and product measures.

A few hundred problems of `experiments.verify_bounds`, which draws them by the ten thousand, and the
sizes and epsilons at which single sums of many equal terms go wrong.
"""

from __future__ import annotations

import numpy as np
import pytest

from experiments.exact_families.building import Frame
from experiments.exact_families.checking import Outcome, check, has_pairs
from experiments.exact_families.duplicates import clusters, two_clusters
from experiments.exact_families.families import FAMILIES, draw_problem
from experiments.exact_families.settings import Settings, draw_settings

PROBLEMS_PER_FAMILY = 8


def frame(seed: int, n: int, m: int, device: str = "cpu", elements: int = 1 << 20) -> Frame:
    return Frame(np.random.default_rng(seed), n, m, device, elements)


def assert_held(outcome: Outcome) -> None:
    assert outcome.status in ("held", "refused"), outcome


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    """Any route, precision, epsilon and stopping rule, at small sizes and a few of thousands."""
    undecided = 0
    for seed in range(PROBLEMS_PER_FAMILY):
        n, m = ((7, 50), (64, 1), (300, 2), (40, 2500))[seed % 4]
        one = frame(seed, *((n, m) if seed % 8 < 4 else (m, n)))
        problem = draw_problem(one, family)
        settings = draw_settings(one.random, 60)
        outcome = check(problem, settings)
        undecided += outcome.status == "undecided"
        assert outcome.status != "violated", (seed, settings, outcome)
    assert undecided <= 1


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("precision", ["double", "fast"])
@pytest.mark.parametrize(
    ("relative_epsilon", "n", "m", "separation", "seed"),
    [
        (3.0, 10_000, 10, 0.6287387, 933),
        (100.0, 10_000, 6, 1.653666, 146),
        (1000.0, 8_000, 128, 1.7918938, 246),
        (1.0, 66_000, 64, 1.6984092, 448),
        (30.0, 66_000, 64, 1.4447239, 718),
    ],
)
def test_many_equal_terms(
    precision: str, relative_epsilon: float, n: int, m: int, separation: float, seed: int
) -> None:
    """Sums whose terms are all equal, whose roundings do not average out."""
    problem = two_clusters(frame(seed, n, m), separation)
    settings = Settings(
        "cross", relative_epsilon, precision, streamed=True, options={"max_iterations": 50}
    )
    assert_held(check(problem, settings))


@pytest.mark.slow
@pytest.mark.parametrize("relative_epsilon", [0.01, 1.0, 100.0])
def test_pairs_of_classes(relative_epsilon: float) -> None:
    """labels=sinkhorn: bounds of every pair, classes of a few atoms each."""
    settings = Settings("class_pairs", relative_epsilon)
    problems = [clusters(frame(seed, 400, 300)) for seed in range(20)]
    paired = [problem for problem in problems if has_pairs(problem, settings)]
    assert len(paired) >= 4
    for problem in paired:
        assert_held(check(problem, settings))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fast", "high"])
def test_products_in_long_chains_that_round_one_way(precision: str) -> None:
    """d = 100,000: what is summed is the same product again and again."""
    for seed in range(2):
        problem = draw_problem(frame(seed, 4, 4, elements=1 << 20), "nearly_constant")
        for relative_epsilon in (0.01, 1.0):
            assert_held(check(problem, Settings("divergence", relative_epsilon, precision)))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_a_gpu(family: str) -> None:
    for seed in range(12):
        n, m = ((50, 700), (3000, 64), (20_000, 2000), (70_000, 5000))[seed % 4]
        one = frame(seed, n, m, "cuda", 1 << 24)
        problem = draw_problem(one, family)
        settings = draw_settings(one.random, 100)
        outcome = check(problem, settings, "cuda")
        assert outcome.status != "violated", (seed, settings, outcome)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("relative_epsilon", [0.2, 1.0, 3.0, 100.0])
@pytest.mark.parametrize(
    ("n", "m"), [(10_000, 10_000), (65_536, 65_536), (262_144, 65_536), (1_048_576, 131_072)]
)
def test_many_equal_terms_on_a_gpu(n: int, m: int, relative_epsilon: float, precision: str) -> None:
    for seed in range(3 if n < 200_000 else 1):
        problem = two_clusters(frame(seed, n, m, "cuda"))
        settings = Settings("cross", relative_epsilon, precision, options={"max_iterations": 10})
        assert_held(check(problem, settings, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gaussian_grid", "clusters", "labels_alone", "one_hot"])
def test_a_million_points_on_a_gpu(family: str) -> None:
    problem = draw_problem(frame(3, 1_000_000, 20_000, "cuda", 1 << 24), family)
    assert_held(check(problem, Settings("cross", 10.0, options={"max_iterations": 5}), "cuda"))
