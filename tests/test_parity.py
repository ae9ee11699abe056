"""Agreement with geomloss and POT at their true conventions."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("rho", [(0.5, 0.5), (0.3, 2.0)])
def test_the_relaxed_plan_is_that_of_pot(problem: Problem, rho: tuple[float, float]) -> None:
    ot = pytest.importorskip("ot")
    cost = torch.cdist(problem.source.features[:40], problem.target.features[:30]).square() / 2
    cost, a, b = cost.double(), torch.linspace(1, 2, 40).double(), torch.linspace(3, 1, 30).double()
    a, b = a / a.sum(), b / b.sum()
    given = a.numpy(), b.numpy(), cost.numpy(), 0.3, [20 * each for each in rho]
    tight = {"reg_type": "kl", "numItermax": 20_000, "stopThr": 1e-14}
    theirs = torch.from_numpy(ot.unbalanced.sinkhorn_unbalanced(*given, **tight))
    options = otdd.Converged(1e-9)
    ours = otdd.matrix_transport(cost, a, b, epsilon=0.3, unbalanced=given[-1], options=options)
    torch.testing.assert_close(ours.plan(), theirs, rtol=1e-6, atol=1e-9)
    assert ours.term.mass == pytest.approx(float(theirs.sum()), rel=1e-7)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize(("blur", "reach"), [(0.4, 0.7), (0.3, 2.0)])
def test_the_relaxed_divergence_is_geomlosses(blur: float, reach: float, debias: bool) -> None:
    """At epsilon = blur^2 and rho = reach^2, for half the squared distance."""
    geomloss = pytest.importorskip("geomloss")
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 3, generator=draw).double() for n in (40, 30))
    settings = {"p": 2, "blur": blur, "reach": reach, "debias": debias, "scaling": 0.99}
    loss = geomloss.SamplesLoss("sinkhorn", backend="tensorized", **settings)
    given = {"epsilon": blur**2, "unbalanced": reach**2, "debias": debias}
    ours = otdd.sinkhorn_divergence(x, y + 0.5, compute=DOUBLE, **given)
    assert ours.value == pytest.approx(float(loss(x, y + 0.5)), rel=2e-3)
