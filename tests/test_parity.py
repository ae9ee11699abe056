"""Agreement with geomloss and POT at their true conventions."""

from __future__ import annotations

import pytest

import otdd_flash as otdd
from experiments.peers import Problem, geomloss_divergence, pot_sinkhorn_log
from otdd_flash.labels import measure_classes

DOUBLE = otdd.ComputeOptions(device="cpu", precision="double")


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Two halves of the digits, 60 samples each, one half rotated."""
    source, target = (
        otdd.embed(otdd.load("digits", max_samples=60, **side), otdd.extractors.pixels())
        for side in ({"split": "train"}, {"split": "test", "rotate": 30.0})
    )
    table = measure_classes(source, target, otdd.labels.Gaussian()).full
    return Problem(source, target, table, otdd.GroundCost())


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("epsilon", [1.0, 0.1])
def test_the_divergence_is_geomlosses(problem: Problem, epsilon: float) -> None:
    ours = otdd.sinkhorn_divergence(
        problem.source, problem.target, epsilon=epsilon, class_table=problem.class_table
    )
    theirs = geomloss_divergence(problem, epsilon, scaling=0.99)
    assert ours.value == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("epsilon", [1.0, 0.3])
def test_value_and_potentials_are_those_of_pot(problem: Problem, epsilon: float) -> None:
    ours = otdd.sinkhorn(
        problem.source,
        problem.target,
        epsilon=epsilon,
        class_table=problem.class_table,
        options=otdd.Converged(tolerance=1e-9),
        compute=DOUBLE,
    )
    value, f, g = pot_sinkhorn_log(problem, epsilon)
    assert ours.value == pytest.approx(value, rel=1e-6)
    # Potentials are unique up to a constant that moves from one to the other.
    for mine, theirs in ((ours.f, f), (ours.g, g)):
        mine, theirs = mine - mine.mean(), theirs - theirs.mean()
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5
