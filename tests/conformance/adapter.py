"""Every way of holding a cost, behind the operations that the conformance tests are about.

The only file of these tests that knows how operators are built and how their operations are asked
for. What is asked and answered is float64 on the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from problems import LAMBDA_X, LAMBDA_Y, Problem
from torch import Tensor

from otdd_flash.operators import float64_rows, kernel, streamed, tiled
from otdd_flash.operators.base import CostFacts, Marginals
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver import problem as points_problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# So small that small problems are cut into several blocks and tiles.
SMALL = [
    (streamed, "BLOCK_ELEMENTS_CPU", 900),
    (tiled, "TILE_ELEMENTS_CPU", 300),
    (float64_rows, "CHUNK_ELEMENTS_CPU", 60),
    # Kernels use guesses and symmetry whatever the size.
    (kernel, "MANY_SCORES", 1),
]


class Held:
    """A cost with masses.

    Attributes:
        cost: the matrix (n, m) float64 that softmins are of.
        exact: the one that certificates are of.
        precision: a key of `TOLERANCE`.
    """

    def __init__(self, operator: Any, precision: str, cost: Tensor, exact: Tensor) -> None:
        self._operator, self.precision = operator, precision
        self.cost, self.exact = cost, exact

    @property
    def a(self) -> Tensor:
        """Masses of the rows."""
        return self._operator.a.cpu()

    @property
    def b(self) -> Tensor:
        """Masses of the columns."""
        return self._operator.b.cpu()

    @property
    def facts(self) -> CostFacts:
        """What is known of the cost."""
        return self._operator.costs

    def softmin_rows(self, g: Tensor, epsilon: float, guess: Tensor | None = None) -> Tensor:
        """-epsilon log sum_j b_j exp((g_j - C_ij) / epsilon)."""
        return _out(self._operator.softmin_rows(self._in(g), epsilon, self._in(guess)))

    def softmin_columns(self, f: Tensor, epsilon: float, guess: Tensor | None = None) -> Tensor:
        """-epsilon log sum_i a_i exp((f_i - C_ij) / epsilon)."""
        return _out(self._operator.softmin_columns(self._in(f), epsilon, self._in(guess)))

    def marginals(self, f: Tensor, g: Tensor, epsilon: float) -> Marginals:
        """Sums of the plan of f and g, with what they may be off by."""
        one = f.to(DEVICE)
        found = self._operator.marginals(
            one, one if g is f else g.to(DEVICE), epsilon, accurate=True
        )
        return Marginals(*map(_out, found[:4]), *found[4:])

    def _in(self, potential: Tensor | None) -> Tensor | None:
        return None if potential is None else potential.to(DEVICE, self._operator.dtype)


def _out(values: Tensor) -> Tensor:
    return values.double().cpu()


class Way(NamedTuple):
    """A way of holding a cost.

    Attributes:
        build: makes it for a problem.
        options: of the computation.
        precision: a key of `TOLERANCE`.
    """

    build: Callable[..., Held]
    options: dict[str, Any]
    precision: str


def _of_points(given: Problem, way: Way) -> Held:
    samples = [
        LabeledSamples(points, labels, tuple(map(str, range(classes))), masses)
        for points, labels, masses, classes in given.sides
    ]
    own = given.case.own
    whole = points_problem.Problem.between(
        samples[0],
        samples[-1],
        given.epsilon,
        given.block.repeat(2, 2) if own else given.table,
        GroundCost(LAMBDA_X, LAMBDA_Y),
        ComputeOptions(str(DEVICE), **way.options),
    )
    return Held(whole.operator("xx" if own else "xy"), way.precision, given.cost, given.cost)


WAYS = {
    "stored": Way(_of_points, {"backend": "torch", "memory_budget": "1GiB"}, "single"),
    "stored, double": Way(_of_points, {"precision": "double", "memory_budget": "1GiB"}, "double"),
    "streamed": Way(_of_points, {"backend": "torch", "memory_budget": 0}, "single"),
    "streamed, double": Way(_of_points, {"precision": "double", "memory_budget": 0}, "double"),
}


def held(way: str, given: Problem) -> Held:
    """The cost of a problem, held in a way."""
    return WAYS[way].build(given, WAYS[way])
