"""F of plans between two datasets, its linearisation, and plans with corrected sums.

    F(P) = lambda_x E(P) + lambda_y <W, P>

`gromov.energy` has E and its linearisation. `gromov.distance` makes the `Problem` of two datasets,
and `gromov.solve` that of a loaded result. `gromov.solve` descends on F + epsilon KL(P | a b^T): it
solves the comparison that `linearised` returns, continues from the moments of its plan, and reports
F of the plan with corrected sums (`round_plan`) as value, and with its rounding as upper bound. So
`round_plan` must evaluate a plan with the marginals a and b, in float64 whatever the precision of
the solve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.points import DOUBLE_UNIT, class_indices, mass_per_class
from otdd_flash.errors import InputError
from otdd_flash.gromov.energy import OPERATIONS, Cloud, Energy
from otdd_flash.gromov.record import Coordinates
from otdd_flash.operators.base import Applied
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.term import ExactTerm, TransportTerm

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class Problem:
    """Two datasets and F of the plans between them.

    Attributes:
        compared: the datasets at an epsilon, with W, and `ground="inner"`.
        energy: E, of the same rows.
    """

    compared: Comparison
    energy: Energy

    @classmethod
    def of(cls, compared: Comparison, coordinates: Coordinates = (None, None)) -> Problem:
        """Return the problem of a comparison whose points are the given ones.

        Raises:
            InputError: fourth powers of features overflow.
        """
        return cls(compared, Energy(*map(Cloud.of, compared.transformed, coordinates)))

    def __post_init__(self) -> None:
        if not math.isfinite(self.independent):
            raise InputError(
                "ground=gromov takes fourth powers of features, which overflow; scale them down"
            )

    @cached_property
    def independent(self) -> float:
        """F(a b^T)."""
        return self.value(self.energy.independent, torch.outer(*self.class_masses))

    @cached_property
    def most_entropy(self) -> float:
        """The largest epsilon KL(P | a b^T) of a plan: it is at most the entropy of either side."""
        sides = (self.energy.x.masses, self.energy.y.masses)
        return self.compared.epsilon * min(-float(torch.xlogy(a, a).sum()) for a in sides)

    @cached_property
    def table(self) -> Tensor:
        """W (V_x, V_y), float64 on the points' device; a single 0 where all are."""
        found = self.compared.block("xy").to(self.energy.x.points)
        return found if bool(found.any()) else found.new_zeros(1, 1)

    @cached_property
    def class_masses(self) -> tuple[Tensor, Tensor]:
        """The masses of classes (V_x,) and (V_y,), or all mass where W is 0."""
        rows, columns = self.table.shape
        return (
            mass_per_class(self.energy.x.masses, self.classes_of(0), rows),
            mass_per_class(self.energy.y.masses, self.classes_of(1), columns),
        )

    def classes_of(self, side: int) -> Tensor:
        """Return the class of each row (n,) of a side; 0 where W is 0."""
        labels = class_indices(self.compared.transformed[side])
        return labels if self.table.numel() > 1 else torch.zeros_like(labels)

    def class_cost(self, classes: Tensor) -> float:
        """Return <W, P> of masses between classes (V_x, V_y)."""
        return float((self.table * classes).sum())

    def value(self, energy: float, classes: Tensor) -> float:
        """Return lambda_x E + lambda_y <W, P>."""
        ground = self.compared.ground
        return ground.lambda_x * energy + ground.lambda_y * self.class_cost(classes)

    def linearised(self, matrix: Tensor) -> Comparison:
        """Return the comparison by the linearised cost at M (d_x, d_y)."""
        points = self.energy.linear_points(matrix)
        pairs = zip(self.compared.transformed, points, strict=True)
        moved = tuple(replace(side, features=each, feature_names=None) for side, each in pairs)
        return replace(self.compared, transformed=moved)

    def lengths(self, side: LabeledSamples) -> Tensor:
        """Return what squared distances of linearised points add to inner products, by row."""
        return self.compared.ground.lambda_x / 2 * side.features.square().sum(1)

    @cached_property
    def values(self) -> Tensor:
        """Columns that a plan multiplies: v, Y and for sums 1 and classes, (m, 1 + d_y + 1 + V)."""
        y, count = self.energy.y, self.table.shape[1]
        one = torch.ones_like(y.masses)[:, None]
        kinds = (
            [torch.nn.functional.one_hot(self.classes_of(1), count).to(one)] if count > 1 else []
        )
        return torch.cat((y.centred_norms[:, None], y.points, one, *kinds), 1)

    @property
    def moving(self) -> int:
        """The number of columns of `values` that M and <P, u v^T> need, 1 + d_y."""
        return 1 + self.energy.y.points.shape[1]

    def moments(self, product: Tensor) -> tuple[float, Tensor]:
        """Return <P, u v^T> and X^T P Y of a plan from its product with `values`, float64."""
        x = self.energy.x
        return float(x.centred_norms @ product[:, 0]), x.points.T @ product[:, 1 : self.moving]

    def class_sums(self, product: Tensor) -> Tensor:
        """Return the masses between classes (V_x, V_y) of a plan from its product with `values`."""
        kinds = product[:, -self.table.shape[1] :]
        return kinds.new_zeros(self.table.shape).index_add_(0, self.classes_of(0), kinds)


class RoundedPlan(NamedTuple):
    """A plan whose sums were corrected, as evaluated in float64.

    Attributes:
        energy: E.
        class_cost: <W, P>.
        value: F.
        rounding: a bound on the relative error of entries, by which passes may differ.
    """

    energy: float
    class_cost: float
    value: float
    rounding: float


# P V for V (m, k), or if True P^T U for U (n, k).
Product = Callable[[Tensor, bool], Applied]


def plan_of(linear: Comparison, term: TransportTerm, *, double: bool = False) -> Product:
    """Return the product of a term's plan with values (m, k), or if True its transpose's (n, k)."""
    if isinstance(term, ExactTerm):
        return lambda values, transposed: term.applied(values, transposed=transposed)
    if double:
        in_double = replace(linear.compute, precision="double", backend="torch")
        linear = replace(linear, compute=in_double)
    plan = linear.operator("xy", keep_scores=False).refined.plan(term.f, term.g, term.epsilon)
    return lambda values, transposed: plan.applied(values, transposed=transposed)


def round_plan(problem: Problem, matrix: Tensor, term: TransportTerm) -> RoundedPlan:
    """Evaluate the plan of the term at M (d_x, d_y) in float64, with its sums corrected.

    Rows and columns that have too much are scaled down, and the missing mass is added as the
    product of that of rows and that of columns.
    """
    a, b, values = problem.energy.x.masses, problem.energy.y.masses, problem.values
    linear = problem.linearised(matrix)
    apply = plan_of(linear, term, double=True)
    left = _share(a, apply(torch.ones_like(b)[:, None], False).masses)
    columns = apply(left[:, None], True).values.double().squeeze(1)
    right = _share(b, columns)
    product = left[:, None] * apply(right[:, None] * values, False).values.double()
    missing = (a - product[:, problem.moving]).clamp_min(0), (b - right * columns).clamp_min(0)
    share = missing[1] / missing[1].sum().clamp_min(TINY)
    product += missing[0][:, None] * (share @ values)
    classes = problem.class_sums(product)
    energy, rounding = max(problem.energy.value(*problem.moments(product)), 0.0), 0.0
    if not isinstance(term, ExactTerm):
        # The rounding of f + g - C, over epsilon.
        lengths = (problem.lengths(side) for side in linear.transformed)
        reach = sum(float(each.abs().max()) for each in (*lengths, term.f, term.g))
        rounding = (linear.transformed[0].dim + OPERATIONS) * DOUBLE_UNIT * 2 * reach / term.epsilon
    value = problem.value(energy, classes)
    return RoundedPlan(energy, problem.class_cost(classes), value, rounding)


def _share(wanted: Tensor, sums: Tensor) -> Tensor:
    """Return factors of at most 1 that scale sums down to those that are wanted."""
    return torch.where(sums > wanted, wanted / sums, torch.ones_like(wanted))
