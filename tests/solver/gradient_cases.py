"""Problems whose gradients are checked, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.gradient import DivergenceGradient
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term_gradient import Gradient, Input, Needs

ALL: Needs = frozenset({"x", "y", "a", "b", "classes", "lambda_x", "lambda_y"})
EPSILON = 2.0
EXACT = Converged(tolerance=1e-10)


@dataclass(frozen=True)
class Point:
    """All inputs of a divergence, float64."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    table: Tensor
    labels_x: Tensor
    labels_y: Tensor
    lambda_x: Tensor
    lambda_y: Tensor

    def cost(self, term: str) -> Tensor:
        first = int(self.labels_x.max()) + 1
        sides = {"x": (self.x, self.labels_x), "y": (self.y, self.labels_y)}
        (left, labels), (right, others) = sides[term[0]], sides[term[1]]
        spans = {"x": slice(0, first), "y": slice(first, None)}
        block = self.lambda_y * self.table[spans[term[0]], spans[term[1]]]
        squares = (left[:, None, :] - right[None, :, :]).square().sum(2)
        return self.lambda_x * squares + block[labels][:, others]

    def problem(self, precision: str = "double", points: torch.dtype = torch.float64) -> Problem:
        sides = (
            LabeledSamples(
                features.to(points), labels, tuple(map(str, range(int(labels.max()) + 1))), masses
            )
            for features, labels, masses in (
                (self.x, self.labels_x, self.a),
                (self.y, self.labels_y, self.b),
            )
        )
        weights = GroundCost(float(self.lambda_x), float(self.lambda_y))
        compute = ComputeOptions(device="cpu", precision=precision)
        return Problem.between(*sides, EPSILON, self.table, weights, compute)


def draw(
    n: int = 13, m: int = 9, d: int = 3, *, classes: tuple[int, int] = (3, 2), seed: int = 0
) -> Point:
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def masses(count: int) -> Tensor:
        return (weights := uniform(count) + 0.2) / weights.sum()

    table = 2 * uniform(sum(classes), sum(classes))
    return Point(
        torch.randn(n, d, generator=generator, dtype=torch.float64),
        torch.randn(m, d, generator=generator, dtype=torch.float64) + 0.5,
        masses(n),
        masses(m),
        table + table.T,
        torch.arange(n) % classes[0],
        torch.arange(m) % classes[1],
        torch.tensor(0.6, dtype=torch.float64),
        torch.tensor(0.4, dtype=torch.float64),
    )


def without_mass(masses: Tensor, index: int) -> Tensor:
    masses = masses.clone()
    masses[index] = 0
    return masses / masses.sum()


POINTS = {
    "odd sizes": draw(),
    "one class": draw(classes=(1, 1), seed=1),
    "one point": draw(1, 7, 2, classes=(1, 2), seed=2),
    "zero weights": replace(
        draw(seed=3), a=without_mass(draw(seed=3).a, 4), b=without_mass(draw(seed=3).b, 0)
    ),
    "no class term": replace(draw(seed=4), lambda_y=torch.tensor(0.0).double()),
}


def assert_same(key: Input, found: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    """Equal, mass gradients up to a constant."""
    if key in ("a", "b"):
        found, expected = found - found.mean(), expected - expected.mean()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def gradient_of(problem: Problem, options: Converged = EXACT, needs: Needs = ALL) -> Gradient:
    gradient = DivergenceGradient(problem, needs)
    assert problem.solve(options, solved=gradient).converged
    return gradient.total
