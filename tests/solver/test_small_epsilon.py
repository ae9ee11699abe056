"""From large to small epsilon: OT_epsilon falls, S_epsilon ends at the unregularised optimum."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import otdd_flash as otdd
from experiments.peers import Problem, pot_emd2
from otdd_flash.errors import InputError
from otdd_flash.labels import measure_classes
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence

# Over the mean cost.
EPSILONS = (1.0, 0.1, 0.01, 1e-3, 1e-4)


def labelled(source: LabeledSamples, target: LabeledSamples) -> Problem:
    table = measure_classes(source, target, otdd.labels.Gaussian()).full
    return Problem(source, target, table, otdd.GroundCost())


@pytest.fixture(scope="module")
def clouds() -> Problem:
    """Labelled clouds of 60 points each."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    x, y = (torch.randn(60, 8, generator=draw) + labels[:, None] + shift for shift in (0, 1))
    return labelled(*(LabeledSamples(side, labels, tuple("abc")) for side in (x, y)))


def mean_cost(problem: Problem) -> float:
    return float(problem.source.masses @ problem.matrix() @ problem.target.masses)


def solve(problem: Problem, epsilon: float, precision: str, options: otdd.Converged) -> Divergence:
    return otdd.sinkhorn_divergence(
        problem.source,
        problem.target,
        epsilon=epsilon,
        class_table=problem.class_table,
        options=options,
        compute=otdd.ComputeOptions("auto", precision=precision),
    )


def check_descent(problem: Problem, precision: str, options: otdd.Converged) -> None:
    """Every bound that theory gives for OT_epsilon, its order, and the limit of S_epsilon."""
    exact = pot_emd2(problem)
    mean = mean_cost(problem)
    points = min(len(problem.source), len(problem.target))
    found = [solve(problem, mean * relative, precision, options) for relative in EPSILONS]
    for one in found:
        assert one.converged
        # KL(P | a b^T) lies between 0 and log n where all weights are equal.
        entropy = one.xy.epsilon * math.log(points)
        assert one.xy.bounds[1] >= exact
        assert one.xy.bounds[0] <= min(exact + entropy, mean)
        assert one.bounds[0] <= one.value <= one.bounds[1]
    for larger, smaller in pairwise(found):
        assert smaller.xy.value < larger.xy.bounds[1]
        assert smaller.xy.bounds[0] < larger.xy.value
    gaps = [abs(one.value / exact - 1) for one in found]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.3
    assert gaps[-2] < 1e-3
    assert gaps[-1] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fast", otdd.Converged(1e-2)),
        ("double", otdd.Converged(1e-2)),
        # A width can be asked for at any epsilon, and the default tolerance gives way to rounding.
        ("high", otdd.Converged(bound_width=5e-3)),
        ("fast", otdd.Converged()),
    ],
)
def test_epsilon_falls_to_a_ten_thousandth_of_the_mean_cost(
    clouds: Problem, precision: str, options: otdd.Converged
) -> None:
    check_descent(clouds, precision, options)


@pytest.mark.parametrize("precision", ["fast", "high"])
def test_the_default_tolerance_gives_way_to_rounding(clouds: Problem, precision: str) -> None:
    found = solve(clouds, 1e-4 * mean_cost(clouds), precision, otdd.Converged())
    assert found.stopped_by == "rounding"
    assert found.tolerance is not None
    assert 1e-3 < found.marginal_error <= found.tolerance < 5e-3
    f, g, epsilon = found.xy.f, found.xy.g, found.xy.epsilon
    size = float(clouds.source.masses @ f.abs().double() + clouds.target.masses @ g.abs().double())
    floor = 2.0**-24 * ((size + 2 * mean_cost(clouds)) / epsilon + 1)
    assert found.xy.tolerance == pytest.approx(2 * floor, rel=1e-4)


TOO_SMALL = r"^epsilon=.* is too small for float32.*; raise epsilon .* or set precision=double$"
TOO_TIGHT = r"too tight for float32.*precision=double"


def test_an_epsilon_of_which_no_larger_one_can_be_advised_is_refused() -> None:
    """By as much as rounding moves the marginals, which is beyond any float."""
    x, y = 1e20 * torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0)).double()
    with pytest.raises(
        InputError, match=r"for float64: rounding leaves nothing .*; raise epsilon$"
    ):
        otdd.sinkhorn(x, y, epsilon=1e-300, compute=otdd.ComputeOptions("cpu", precision="double"))


@pytest.mark.parametrize(
    ("relative", "precision", "options", "message"),
    [
        # Where rounding leaves no marginals, and nothing of the plan.
        (1e-6, "high", {}, r"too small for float32.*precision=double"),
        (1e-8, "high", {}, TOO_SMALL),
        (1e-13, "high", {"tolerance": 1.0}, TOO_SMALL),
        (1e-8, "fast", {"bound_width": 0.01}, TOO_SMALL),
        (1e-4, "fast", {"tolerance": 1e-3}, TOO_TIGHT),
        (1e-4, "high", {"tolerance": 1e-3}, TOO_TIGHT),
    ],
)
def test_what_float32_does_not_reach_is_refused_with_a_way_out(
    clouds: Problem, relative: float, precision: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        solve(clouds, relative * mean_cost(clouds), precision, otdd.Converged(**options))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (1e19, r"costs of up to .* overflow in .*scale the features down or set precision=double"),
        (1e-20, r"epsilon=.* underflows in .*, scale the features up or set precision=double"),
    ],
)
def test_scales_out_of_the_range_of_float32_are_refused(scale: float, message: str) -> None:
    x, y = torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0)) * scale
    epsilon = 0.1 * scale**2
    with pytest.raises(InputError, match=message):
        otdd.sinkhorn(x, y, epsilon=epsilon, compute=otdd.ComputeOptions("cpu"))
    double = otdd.ComputeOptions("cpu", precision="double")
    assert otdd.sinkhorn(x, y, epsilon=epsilon, compute=double).converged


def test_a_plan_whose_mass_overflows_by_rounding_is_refused() -> None:
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(300, 3, generator=draw), torch.randn(150, 3, generator=draw)
    y[0] = 1e6
    masses = torch.ones(150, dtype=torch.float64)
    masses[0] = 1e-8
    far = LabeledSamples(y, None, (), masses)
    options = otdd.Converged(bound_width=0.01, max_iterations=20)
    with pytest.raises(InputError, match=r"too far above the mean.*leave out points"):
        otdd.sinkhorn(x, far, epsilon=0.02, options=options, compute=otdd.ComputeOptions("cpu"))


@pytest.mark.parametrize(
    ("precision", "scale", "given", "message"),
    [
        ("fast", 1, {"epsilon": 1e39}, r"^epsilon=1e\+39 overflows .*; lower .* precision=double$"),
        ("fast", 1, {"epsilon_relative": 1e300}, r"^epsilon_relative=1e\+300 overflows in "),
        ("double", 1, {"epsilon_relative": 1.5e308}, r"^epsilon_relative=1\.5e\+308 overflows in "),
        ("double", 1, {"epsilon": 1e308}, r"^epsilon=1e\+308 overflows in .*; lower epsilon$"),
        (
            "double",
            1e-150,
            {"epsilon": 1e-312, "lambda_x": 1e-12},
            r"^epsilon=1e-312 underflows in precision=double; raise epsilon or scale the .* up$",
        ),
    ],
)
def test_an_epsilon_out_of_the_range_of_the_precision_is_refused(
    precision: str, scale: float, given: dict[str, float], message: str
) -> None:
    """Double precision is no way out of double precision."""
    points = 3 * scale * torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0)).double()
    compute = otdd.ComputeOptions("cpu", precision=precision)
    with pytest.raises(InputError, match=message):
        otdd.dataset_distance(*points, labels="none", compute=compute, **given)


@pytest.mark.slow
def test_real_images_from_large_to_small_epsilon(real_data: Path) -> None:
    pixels = otdd.extractors.pixels(size=28)
    sides = (
        otdd.embed(otdd.load(name, root=real_data, max_samples=500), pixels)
        for name in ("mnist", "usps")
    )
    check_descent(labelled(*sides), "high", otdd.Converged(1e-2))
