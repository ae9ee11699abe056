"""Agreement with geomloss, POT, OTT-JAX and flash-sinkhorn at their true conventions."""

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


# OTT-JAX 0.6.0 with JAX 0.10.2 in float64: `sinkhorn.Sinkhorn(threshold=1e-13)` of
# `LinearProblem(Geometry(cost, epsilon=0.3), a, b, tau_a=..., tau_b=...)`, tau = rho / (rho + 0.3)
# and 1 of an exact side; its `matrix.sum()`, `(matrix * cost).sum()` and `matrix[2, 3]`.
OTT = [
    ((0.5, 0.5), (1.8012869853004982, 0.5872832903060969, 0.000582784593687948)),
    ((0.3, 2.0), (1.3304228503169095, 0.47953700844908553, 0.0005862498316453482)),
    ((None, 0.7), (1.0, 0.38948337077141576, 0.0004436343410768969)),
    ((20.0, 20.0), (1.0163201397848538, 0.49938624141428967, 0.0010652319136543614)),
]


def masses() -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.arange(1, 13).double(), torch.arange(9, 0, -1).double()
    return a / a.sum(), b / b.sum()


@pytest.mark.parametrize(("rho", "theirs"), OTT)
def test_the_relaxed_plan_is_that_of_ott(
    rho: tuple[float | None, float | None], theirs: tuple[float, float, float]
) -> None:
    """Whose entropy is that of P, not of P beside a b^T, which matters once marginals are free."""
    i, j = torch.arange(12).double()[:, None], torch.arange(9).double()
    cost, (a, b) = torch.sin(1 + 3 * i + 7 * j * j) + 1, masses()
    beside = cost + 0.3 * (a[:, None] * b).log()
    options = otdd.Converged(1e-10)
    plan = otdd.matrix_transport(beside, a, b, epsilon=0.3, unbalanced=rho, options=options).plan()
    ours = float(plan.sum()), float((plan * cost).sum()), float(plan[2, 3])
    assert ours == pytest.approx(theirs, rel=1e-8)


# The dense float64 solution by which flash-sinkhorn 0.4.1 tests its kernels, 20,000 iterations of
# `unbalanced_sinkhorn_ref` and `unbalanced_value_and_grad_ref`, at eps = blur^2 and rho = reach^2:
# the value, the norm of the gradient by x, and the difference between the gradients by the first
# and the last of the masses a, (rho + eps) (1 - exp(-f / rho)), or f of an exact side.
FLASH_SINKHORN = [
    ((0.7, 0.7), (0.6434778465262954, 0.19736256248945003, -0.0002184058063989247)),
    ((0.5, 2.0), (0.9604864485717919, 0.4868245831913761, 0.266319063327083)),
    ((1.0, None), (1.1863636759573577, 0.6739001590956528, 0.8298364103064265)),
    ((None, 0.6), (0.9414557229102717, 0.46504382297045793, -0.11341348839337373)),
]


@pytest.mark.parametrize(("reach", "theirs"), FLASH_SINKHORN)
def test_the_relaxed_loss_is_that_of_flash_sinkhorn(
    reach: tuple[float | None, float | None], theirs: tuple[float, float, float]
) -> None:
    i, j, k = (torch.arange(size).double() for size in (12, 9, 3))
    x = torch.sin(1 + 3 * i[:, None] + 5 * k).requires_grad_()
    y, (a, b) = torch.sin(2 + 4 * j[:, None] + 7 * k) + 0.5, masses()
    rho = [None if each is None else each**2 for each in reach]
    given = {"epsilon": 0.4**2, "lambda_x": 1.0, "unbalanced": rho, "debias": False}
    options = otdd.Converged(1e-10)
    value = otdd.sinkhorn_loss(x, y, a.requires_grad_(), b, **given, options=options)
    by_x, by_a = torch.autograd.grad(value, (x, a))
    ours = value.item(), float(by_x.norm()), float(by_a[0] - by_a[-1])
    assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-9)
