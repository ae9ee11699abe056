"""Derivatives of OT_epsilon and of the debiased divergence, in closed form from solved terms.

By the envelope theorem (Danskin) the optimal potentials count as constants (Feydy et al. 2019,
Interpolating between optimal transport and MMD using Sinkhorn divergences). What is differentiated
here is the dual value of the potentials at hand, optimal or not,

    D = <a, f> + <b, g> + epsilon (1 - sum_ij P_ij)
    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon),

so that its plan enters with the marginals r = P 1 and c = P^T 1 that it has, not with a and b (Ye
et al. 2026, arXiv:2602.03067):

    dD/dx = 2 lambda_x (r x - P y)              dD/dlambda_x = sum_ij P_ij ||x_i - y_j||^2
    dD/dy = 2 lambda_x (c y - P^T x)            dD/dlambda_y = sum_ij P_ij W[l_i, l_j]
    dD/da = f - epsilon (r / a - 1)             r / a = exp((f - T(g)) / epsilon)
    dD/db = g - epsilon (c / b - 1)             c / b = exp((g - T'(f)) / epsilon)
    dD/dW[k, l] = lambda_y K_kl,                K_kl the mass that P moves from class k to class l

with T, T' the row and column softmin. Mass gradients hold up to a constant: masses sum to 1. A self
term has one potential and one cloud on both sides, whose gradients both count.

These are by the points that the ground cost sees; `DivergenceGradient` goes on to those given.

Cost: one pass for x, W and both lambdas together, one for each of y, a and b. The plan is never
stored.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator, refined
from otdd_flash.operators.build import CostInputs, class_indices
from otdd_flash.operators.ground import SHARES
from otdd_flash.operators.labelled_cost import squared_norms
from otdd_flash.solver.centred import less_origin, origin_near
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.term.result import TransportTerm
from otdd_flash.solver.term_solves import Pulled

Input = Literal["x", "y", "a", "b", "classes", "lambda_x", "lambda_y"]
Needs = frozenset[Input]

# Derivatives by input: x (n, d) and y (m, d) in the type of the points; a (n,), b (m,), classes (a
# table of class distances) and both lambdas (0-dim) in float64. On the device of the operator.
Gradient = dict[Input, Tensor]

# Inputs that all terms of a divergence share.
SHARED: Needs = frozenset({"classes", "lambda_x", "lambda_y"})

# The points and masses of either side.
POINTS: tuple[Input, Input] = ("x", "y")
MASSES: tuple[Input, Input] = ("a", "b")


def cross_gradient(
    operator: Operator, term: TransportTerm, inputs: CostInputs, needs: Needs
) -> Gradient:
    """Derivatives of D at the potentials of a term, with respect to the inputs in `needs`.

    Args:
        operator: the cost that `inputs` describe.
        term: potentials f (n,) and g (m,), and epsilon.
        inputs: clouds, the block of W (V_x, V_y), and the ground cost.
        needs: any inputs; "classes" gives the derivative by that block.

    Returns:
        One entry per need.
    """
    plan = _Plan(operator, term, inputs)
    gradient = plan.from_rows(needs)
    if "y" in needs:
        gradient["y"] = plan.from_columns()
    if "a" in needs:
        gradient["a"] = plan.row_masses()
    if "b" in needs:
        gradient["b"] = plan.column_masses()
    return gradient


def self_gradient(
    operator: Operator, term: TransportTerm, inputs: CostInputs, needs: Needs
) -> Gradient:
    """Derivatives of the self term OT_epsilon(x, x), which moves through both of its arguments.

    Arguments as for `cross_gradient`, with one cloud on both sides; "y" and "b" are not inputs.
    """
    plan = _Plan(operator, term, inputs)
    gradient = plan.from_rows(needs)
    if "x" in gradient:
        gradient["x"] *= 2
    if "a" in needs:
        gradient["a"] = 2 * plan.row_masses()
    if "classes" in gradient:
        # The cost is that of (W + W^T) / 2.
        gradient["classes"] = (gradient["classes"] + gradient["classes"].T) / 2
    return gradient


class DivergenceGradient:
    """Derivatives of S_epsilon, gathered while `Problem.solve` solves: pass it as `solved`.

    Args:
        problem: the clouds and costs that are being solved.
        needs: the inputs to differentiate by. "classes" is the whole table (V_x + V_y, V_x + V_y);
            it is read in the blocks [x, y], [x, x] and [y, y], and the block [y, x] gets 0.
        debias: as the solve has it; terms of one side of the ground cost then cancel.

    Attributes:
        total: the sum over the terms solved so far: all of S_epsilon after the solve.
    """

    def __init__(self, problem: Problem, needs: Needs, *, debias: bool = True) -> None:
        self._problem, self._needs, self._debias = problem, needs, debias
        self.total: Gradient = {}

    def __call__(self, name: str, operator: Operator, term: TransportTerm) -> None:
        """Add the part of the term "xy", "xx" or "yy"."""
        inputs = self._problem.inputs(name)
        if name == "xy":
            gradient = cross_gradient(operator, term, inputs, self._needs)
            self._add(name, self._by_given(gradient, name), 1.0)
            return
        points: Input = "x" if name == "xx" else "y"
        masses: Input = "a" if name == "xx" else "b"
        own: dict[Input, Input] = {points: "x", masses: "a"}
        needs = (self._needs & SHARED) | {own[key] for key in self._needs & own.keys()}
        if not needs:
            return
        gradient = self_gradient(operator, term, inputs, needs)
        here: dict[Input, Input] = {seen: key for key, seen in own.items()}
        gradient = {here.get(key, key): part for key, part in gradient.items()}
        self._add(name, self._by_given(gradient, name), -0.5)

    @property
    def pulled(self) -> Pulled | None:
        """What takes the gradient by the points of each side; None if more is needed."""
        if self._problem.request.cost.ground != "sqeuclidean" or not self._needs <= {"x", "y"}:
            return None
        return {
            place: partial(self._take, place) for place in (0, 1) if POINTS[place] in self._needs
        }

    def _take(self, place: int, gradient: Tensor) -> None:
        dtype = self._problem.request.given[place].features.dtype
        self.total[POINTS[place]] = gradient.to(dtype)

    def _by_given(self, gradient: Gradient, name: str) -> Gradient:
        """By the points and weights that the ground cost was given, from those that it made."""
        request, cost = self._problem.request, self._problem.request.cost
        if cost.ground == "sqeuclidean":
            return gradient
        if "lambda_x" in gradient:
            gradient["lambda_x"] *= SHARES[cost.ground]
        sides = zip(POINTS, MASSES, request.given, request.seen, strict=True)
        for key, of_masses, side, seen in sides:
            if key not in name:
                continue
            points = side.features
            if key in gradient and side is not seen:
                gradient[key] = cost.pull_back(points, gradient[key])
            p = None if self._debias else cost.one_side(points)
            if p is None:
                continue
            # What <a, p> adds, p_i = -lambda_x ||x_i||^2 / 2.
            a = side.masses
            if key in gradient:
                gradient[key] -= (cost.lambda_x * a).to(points.dtype).unsqueeze(1) * points
            if of_masses in gradient:
                gradient[of_masses] += p
            if "lambda_x" in gradient:
                gradient["lambda_x"] -= a @ squared_norms(points) / 2
        return gradient

    def _add(self, name: str, gradient: Gradient, factor: float) -> None:
        for key, part in gradient.items():
            if key == "classes":
                part = self._in_table(name, part)
            if key in self.total:
                self.total[key].add_(part, alpha=factor)
            else:
                self.total[key] = part.mul_(factor)

    def _in_table(self, name: str, block: Tensor) -> Tensor:
        """A block of the table, zeros around it."""
        table = block.new_zeros(self._problem.table.shape)
        rows, columns = (self._problem.classes[side] for side in name)
        table[rows, columns] = block
        return table


class _Plan:
    """The plan of a term's potentials, applied to what its derivatives ask for."""

    def __init__(self, operator: Operator, term: TransportTerm, inputs: CostInputs) -> None:
        # The potentials belong to the cost of the original points.
        self.operator = refined(operator)
        self.term, self.weights = term, inputs.cost.squared
        sides = inputs.source, inputs.target
        self.points = [side.features for side in sides]
        # One origin for both, near both: r x - P y then loses nothing to their distance from 0.
        clouds = zip(self.points, (operator.a, operator.b), strict=True)
        self.origin = origin_near(clouds, operator.dtype)
        self.labels = [class_indices(side) for side in sides]
        self.class_distances = inputs.class_distances

    def from_rows(self, needs: Needs) -> Gradient:
        """What follows from P applied to the columns' points and classes, in one pass."""
        columns: dict[str, Tensor] = {}
        if needs & {"x", "lambda_x"}:
            columns["points"] = self._centred(1)
        if "lambda_x" in needs:
            columns["squares"] = columns["points"].square().sum(1, keepdim=True)
        if needs & {"classes", "lambda_y"}:
            classes = self.class_distances.shape[1]
            one_hot = torch.nn.functional.one_hot(self.labels[1], classes)
            columns["classes"] = one_hot.to(self.operator.dtype)
        if not columns:
            return {}
        images, r = self._apply(columns)
        # One copy of points at a time.
        columns.clear()
        gradient: Gradient = {}
        if "lambda_x" in needs:
            # sum P ||x - y||^2, with the same rounded plan in all three parts.
            x = self._centred(0)
            squares = x.square().sum(1).double()
            products = (x * images["points"]).sum(1).double()
            gradient["lambda_x"] = (
                r @ squares + images["squares"].double().sum() - 2 * products.sum()
            )
        if "x" in needs:
            gradient["x"] = self._pull(0, r, images["points"])
        if "classes" in images:
            coupling = torch.zeros_like(self.class_distances)
            coupling.index_add_(0, self.labels[0], images["classes"].double())
            if "classes" in needs:
                gradient["classes"] = self.weights.lambda_y * coupling
            if "lambda_y" in needs:
                gradient["lambda_y"] = (coupling * self.class_distances).sum()
        return gradient

    def from_columns(self) -> Tensor:
        """2 lambda_x (c y - P^T x), shape (m, d)."""
        f, g, epsilon = self.term.f, self.term.g, self.term.epsilon
        image, c = self.operator.apply_plan(f, g, epsilon, self._centred(0), transposed=True)
        return self._pull(1, c, image)

    def row_masses(self) -> Tensor:
        """F - epsilon (r / a - 1), shape (n,)."""
        f, g, epsilon = self.term.f, self.term.g, self.term.epsilon
        softmin = self.operator.softmin_rows(g, epsilon, guess=f)
        return _mass_gradient(self.operator.a, f, softmin, epsilon)

    def column_masses(self) -> Tensor:
        """G - epsilon (c / b - 1), shape (m,)."""
        f, g, epsilon = self.term.f, self.term.g, self.term.epsilon
        softmin = self.operator.softmin_columns(f, epsilon, guess=g)
        return _mass_gradient(self.operator.b, g, softmin, epsilon)

    def _apply(self, columns: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """P V for each V (m, k), and r (n,), of one pass over all of them."""
        if len(columns) == 1:
            ((name, values),) = columns.items()
            image, r = self.operator.apply_plan(self.term.f, self.term.g, self.term.epsilon, values)
            return {name: image}, r
        # An operator may round all columns on one scale, so they come at the same one.
        scales = [_power_of_two(values) for values in columns.values()]
        scaled = [values / scale for values, scale in zip(columns.values(), scales, strict=True)]
        f, g, epsilon = self.term.f, self.term.g, self.term.epsilon
        image, r = self.operator.apply_plan(f, g, epsilon, torch.cat(scaled, 1))
        parts = torch.split(image, [values.shape[1] for values in scaled], 1)
        named = zip(columns, parts, scales, strict=True)
        return {name: part * scale for name, part, scale in named}, r

    def _pull(self, side: int, masses: Tensor, image: Tensor) -> Tensor:
        """2 lambda_x (r x - P y), in the type of the points that it moves."""
        points = self._centred(side)
        pulled = points.mul_(masses.to(points.dtype).unsqueeze(1)).sub_(image)
        return pulled.mul_(2 * self.weights.lambda_x).to(self.points[side].dtype)

    def _centred(self, side: int) -> Tensor:
        """A new copy of the rows' points, 0, or the columns', 1, about the common origin."""
        return less_origin(self.points[side], self.origin)


def _mass_gradient(masses: Tensor, potential: Tensor, softmin: Tensor, epsilon: float) -> Tensor:
    """F - epsilon (exp((f - T) / epsilon) - 1), float64.

    A point without mass leaves D as it is, whatever its potential, which no solver then determines.
    Should mass arrive there, D is highest for the potential T.
    """
    softmin = softmin.double()
    potential = torch.where(masses > 0, potential.double(), softmin)
    return potential - epsilon * torch.expm1((potential - softmin) / epsilon)


def _power_of_two(values: Tensor) -> float:
    """The power of two next above the largest entry."""
    largest = float(values.abs().max())
    return 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0
