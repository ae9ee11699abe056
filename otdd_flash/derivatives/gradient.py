"""Derivatives of the debiased divergence by its inputs, summed over its terms.

    dS = dOT(x, y) - dOT(x, x) / 2 - dOT(y, y) / 2

with the derivatives of `term_gradient`, by the points after the transformation of the ground cost,
and the chain rule to the points given.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from otdd_flash.cost.facts import SIDES
from otdd_flash.cost.ground import SHARES
from otdd_flash.cost.points import squared_norms
from otdd_flash.derivatives.groups import Groups, report_groups, settled
from otdd_flash.derivatives.term_gradient import (
    Gradient,
    Input,
    Needs,
    cross_gradient,
    self_gradient,
)
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import GradientCallbacks
from otdd_flash.solver.term.result import TransportTerm

# Inputs that all terms of a divergence share.
SHARED: Needs = frozenset({"classes", "lambda_x", "lambda_y"})

# The points and masses of either side.
POINTS: tuple[Input, Input] = ("x", "y")
MASSES: tuple[Input, Input] = ("a", "b")


class DivergenceGradient:
    """Derivatives of S_epsilon, summed up during `solve`: pass it as `solved`.

    With debiasing, terms of one side of the ground cost cancel.

    Args:
        comparison: what is being solved.
        needs: the inputs to differentiate by. "classes" is the whole table (V_x + V_y, V_x + V_y);
            it is read in the blocks [x, y], [x, x] and [y, y], and the block [y, x] gets 0.

    Attributes:
        total: the sum over the terms solved so far; complete after the solve.
        groups: by term, once it is solved, groups between which derivatives by masses are
            undetermined; none if these are not asked for.
    """

    def __init__(self, comparison: Comparison, needs: Needs) -> None:
        self._comparison, self._needs = comparison, needs
        self.total: Gradient = {}
        self.groups: dict[str, Groups | None] = {}

    def __call__(self, name: str, operator: Operator, term: TransportTerm) -> None:
        """Add the derivatives of the term "xy", "xx" or "yy"."""
        comparison = self._comparison
        if name == "xy":
            # Between a cloud and itself f = g, so that no group has an offset: it would be added
            # and subtracted at once.
            if self._needs & {*MASSES} and not (comparison.debias and comparison.identical):
                # Other derivatives depend on the plan alone, which offsets do not change.
                term, self.groups[name] = settled(comparison, term)
            gradient = cross_gradient(operator, term, comparison, self._needs)
            self._add(name, self._by_given(gradient, name), 1.0)
            return
        points: Input = "x" if name == "xx" else "y"
        masses: Input = "a" if name == "xx" else "b"
        own: dict[Input, Input] = {points: "x", masses: "a"}
        needs = (self._needs & SHARED) | {own[key] for key in self._needs & own.keys()}
        if not needs:
            return
        if "a" in needs:
            term, self.groups[name] = settled(comparison, term, name)
        gradient = self_gradient(operator, term, comparison, name, needs)
        here: dict[Input, Input] = {seen: key for key, seen in own.items()}
        gradient = {here.get(key, key): part for key, part in gradient.items()}
        self._add(name, self._by_given(gradient, name), -0.5)

    def report(self, what: str, *, required: bool) -> None:
        """Warn, or raise if `required`, where derivatives by masses are undetermined.

        Raises:
            ConvergenceError: they are undetermined, and `required`.
        """
        for name, groups in self.groups.items():
            rows = self._comparison.given[SIDES[name][0]]
            report_groups(groups, what, rows, required=required)

    @property
    def callbacks(self) -> GradientCallbacks | None:
        """Callbacks for the gradients by the points of each side; None if these are not enough."""
        if self._comparison.ground.ground != "sqeuclidean" or not self._needs <= {"x", "y"}:
            return None
        return {
            place: partial(self._take, place) for place in (0, 1) if POINTS[place] in self._needs
        }

    def _take(self, place: int, gradient: Tensor) -> None:
        dtype = self._comparison.given[place].features.dtype
        self.total[POINTS[place]] = gradient.to(dtype)

    def _by_given(self, gradient: Gradient, name: str) -> Gradient:
        """Apply the chain rule from the transformed points to the given points and weights."""
        comparison, ground = self._comparison, self._comparison.ground
        if ground.ground == "sqeuclidean":
            return gradient
        if "lambda_x" in gradient:
            gradient["lambda_x"] *= SHARES[ground.ground]
        sides = zip(POINTS, MASSES, comparison.given, comparison.transformed, strict=True)
        for key, of_masses, side, transformed in sides:
            if key not in name:
                continue
            points = side.features
            if key in gradient and side is not transformed:
                gradient[key] = ground.pull_back(points, gradient[key])
            p = None if comparison.debias else ground.one_side(points)
            if p is None:
                continue
            # What <a, p> adds, p_i = -lambda_x ||x_i||^2 / 2.
            a, device = side.masses, comparison.device
            if key in gradient:
                gradient[key] -= (ground.lambda_x * a).to(points.dtype).unsqueeze(1) * points
            if of_masses in gradient:
                gradient[of_masses] += p.to(device)
            if "lambda_x" in gradient:
                gradient["lambda_x"] -= (a @ squared_norms(points) / 2).to(device)
        return gradient

    def _add(self, name: str, gradient: Gradient, factor: float) -> None:
        for key, part in gradient.items():
            if key == "classes":
                part = self._comparison.classes.around(name, part)
            if key in self.total:
                self.total[key].add_(part, alpha=factor)
            else:
                self.total[key] = part if factor == 1 else part.mul_(factor)
