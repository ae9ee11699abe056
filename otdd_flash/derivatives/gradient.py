"""First derivatives of OT_epsilon and of the debiased divergence, from the potentials of terms.

By the envelope theorem (Danskin) the optimal potentials count as constants (Feydy et al. 2019,
Interpolating between optimal transport and MMD using Sinkhorn divergences). Differentiated here is
the dual value of the given potentials, optimal or not,

    D = <a, f> + <b, g> + epsilon (1 - sum_ij P_ij)
    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon),

so that the plan enters with its own marginals r = P 1 and c = P^T 1, not with a and b (Ye et al.
2026, arXiv:2602.03067):

    dD/dx = 2 lambda_x (r x - P y)              dD/dlambda_x = sum_ij P_ij ||x_i - y_j||^2
    dD/dy = 2 lambda_x (c y - P^T x)            dD/dlambda_y = sum_ij P_ij W[l_i, l_j]
    dD/da = f - epsilon (r / a - 1)             r / a = exp((f - T(g)) / epsilon)
    dD/db = g - epsilon (c / b - 1)             c / b = exp((g - T'(f)) / epsilon)
    dD/dW[k, l] = lambda_y K_kl,                K_kl the mass that P moves from class k to class l

with T, T' the row and column softmin. Where marginals are relaxed, only the gradients by masses
differ: they have phi(f) and phi(g) of `formulas.marginals` in the place of f and g. Mass gradients
are defined up to a constant, as masses sum to 1. A self term has one cloud and one potential on
both sides; its gradient is the sum over both. These are derivatives by the points after the
transformation of the ground cost (`cosine` normalizes them). `DivergenceGradient` sums them over
the terms of

    dS = dOT(x, y) - dOT(x, x) / 2 - dOT(y, y) / 2

and applies the chain rule to the points given. `derivatives.loss`, `derivatives.hessian` and
`flows.objective` make a `DivergenceGradient` and pass it to the solve, which calls it with every
solved term; `contributions` calls it with the terms of a result. On ranks `flows.stepping` makes
one for terms whose points no rank has whole, and calls `pulled` for the rows of a rank.
`solver.matrix.gradients` calls `mass_gradient`.

Cost: one pass for x, W and both lambdas together, one for each of y, a and b. The plan must never
be stored, nor streamed points be on the device as a whole
(`tests/derivatives/test_streamed_points.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from otdd_flash.cost.facts import SIDES
from otdd_flash.cost.ground import SHARES
from otdd_flash.cost.points import Cut, LessOrigin, class_indices, less_origin, squared_norms
from otdd_flash.derivatives.centred import Assembled, blocks_of, origin_near
from otdd_flash.derivatives.groups import Groups, report_groups, settled
from otdd_flash.errors import InputError
from otdd_flash.formulas.marginals import Constraints
from otdd_flash.operators.base import Operator, PlanBlock
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.label_costs import LabelEmbedding
from otdd_flash.solver.divergence import GradientCallbacks
from otdd_flash.solver.term import TransportTerm

Input = Literal["x", "y", "a", "b", "classes", "lambda_x", "lambda_y"]
Needs = frozenset[Input]

# Derivatives by input: x (n, d) and y (m, d) in the type of the points and where these are; a (n,),
# b (m,), classes (a table of class distances) and both lambdas (0-dim) in float64 on the device of
# the operator.
Gradient = dict[Input, Tensor]


def cross_gradient(
    operator: Operator, term: TransportTerm, comparison: Comparison, needs: Needs
) -> Gradient:
    """Compute derivatives of D at the potentials of a term by the inputs in `needs`.

    Args:
        operator: of the cross term.
        term: potentials f (n,) and g (m,), and epsilon.
        comparison: the clouds, class distances and ground cost.
        needs: any inputs; "classes" gives the derivative by that block.

    Returns:
        One entry per need.
    """
    plan = _Plan(operator, term, comparison, "xy")
    gradient = plan.from_rows(needs)
    if "y" in needs:
        gradient["y"] = plan.from_columns()
    if "a" in needs:
        gradient["a"] = mass_gradient(plan.operator, term, comparison.constraints)
    if "b" in needs:
        gradient["b"] = mass_gradient(plan.operator, term, comparison.constraints, columns=True)
    return gradient


def self_gradient(
    operator: Operator, term: TransportTerm, comparison: Comparison, name: str, needs: Needs
) -> Gradient:
    """Compute derivatives of the self term OT_epsilon(x, x), by both arguments together.

    Arguments as for `cross_gradient`, with the operator of the term of this name, "xx" or "yy",
    whose points are called x either way; "y" and "b" are not inputs.
    """
    plan = _Plan(operator, term, comparison, name)
    gradient = plan.from_rows(needs, sides=2)
    if "a" in needs:
        constraints = comparison.constraints.between(*SIDES[name])
        gradient["a"] = 2 * mass_gradient(plan.operator, term, constraints)
    if "classes" in gradient:
        # The cost is that of (W + W^T) / 2.
        gradient["classes"] = (gradient["classes"] + gradient["classes"].T) / 2
    return gradient


class _Plan:
    """The plan of a term's potentials, with the products that derivatives need."""

    def __init__(
        self, operator: Operator, term: TransportTerm, comparison: Comparison, name: str
    ) -> None:
        # The potentials belong to the cost of the original points.
        self.operator = operator.refined
        self.term, self.weights = term, comparison.ground.squared
        self.points = comparison.points(name)
        # One origin near both clouds: r x - P y then does not cancel their distance from 0.
        clouds = zip(self.points, (operator.a, operator.b), strict=True)
        self.origin = origin_near(clouds, operator.passes.dtype)
        sides = comparison.sides(name)
        self.labels = [class_indices(side).to(operator.a.device) for side in sides]
        self.class_distances = comparison.block(name)

    def from_rows(self, needs: Needs, sides: int = 1) -> Gradient:
        """Compute all that one product of P with the columns' points and classes gives.

        `sides` is on how many sides of the cost the points of the rows stand: 2 for a self term.
        """
        names = self._names(needs)
        if not names:
            return {}
        scales = self._scales(names)

        def make(which: Cut, points: Tensor) -> Tensor:
            parts = self._columns(names, which, points)
            if len(parts) == 1:
                return parts[0]
            return torch.cat([part / scale for part, scale in zip(parts, scales, strict=True)], 1)

        by_x, table = Assembled(self.points[0]), self.class_distances
        shapes = {"squares": (), "classes": table.shape}
        sums = {name: table.new_zeros(shapes[name]) for name in names if name in shapes}
        alone = names == ["points"]
        for block, points, (image, r) in self._applied(LessOrigin(self.origin) if alone else make):
            images = self._named(names, image, scales)
            if "lambda_x" in needs:
                # sum P ||x - y||^2, with the same rounded plan in all three parts.
                x = less_origin(points, self.origin)
                products = (x * images["points"]).sum(1).double()
                squares = r @ x.square().sum(1).double() + images["squares"].double().sum()
                sums["squares"] += squares
                sums["squares"] -= 2 * products.sum()
            if "x" in needs:
                by_x.put(block, self._pull(points, r, images["points"], sides))
            if "classes" in images:
                classes = images["classes"].double()
                sums["classes"].index_add_(0, self.labels[0][block.rows], classes)
        gradient: Gradient = {}
        if "lambda_x" in needs:
            gradient["lambda_x"] = sums["squares"]
        if "x" in needs:
            gradient["x"] = by_x.rows
        if "classes" in needs:
            gradient["classes"] = self.weights.lambda_y * sums["classes"]
        if "lambda_y" in needs:
            gradient["lambda_y"] = (sums["classes"] * self.class_distances).sum()
        return gradient

    def from_columns(self) -> Tensor:
        """Return 2 lambda_x (c y - P^T x), shape (m, d)."""
        found = Assembled(self.points[1])
        for block, points, (image, c) in self._applied(LessOrigin(self.origin), transposed=True):
            found.put(block, self._pull(points, c, image))
        return found.rows

    def _applied(
        self, make: Callable[[Cut, Tensor], Tensor], *, transposed: bool = False
    ) -> Iterator[PlanBlock]:
        plan = self.operator.plan(self.term.f, self.term.g, self.term.epsilon)
        return plan.blocks(self.points, make, transposed=transposed)

    def _names(self, needs: Needs) -> list[str]:
        """Return the names of the parts of V that P is applied to."""
        points = ["points"] if needs & {"x", "lambda_x"} else []
        squares = ["squares"] if "lambda_x" in needs else []
        classes = ["classes"] if needs & {"classes", "lambda_y"} else []
        return points + squares + classes

    def _columns(self, names: Sequence[str], which: Cut, points: Tensor) -> list[Tensor]:
        """Return the parts of V (k, .) for some points (k, d) of the columns."""
        made: dict[str, Tensor] = {}
        if "points" in names:
            made["points"] = less_origin(points, self.origin)
        if "squares" in names:
            made["squares"] = made["points"].square().sum(1, keepdim=True)
        if "classes" in names:
            classes = self.class_distances.shape[1]
            one_hot = torch.nn.functional.one_hot(self.labels[1][which], classes)
            made["classes"] = one_hot.to(self.operator.passes.dtype)
        return list(made.values())

    def _scales(self, names: Sequence[str]) -> list[float]:
        """Return powers of two that scale all parts of V to one size.

        An operator may round V relative to its largest entry. The scale of a single part is 1.
        """
        if len(names) == 1:
            return [1.0]
        largest = torch.zeros(len(names), dtype=torch.float64, device=self.origin.device)
        for which, points in blocks_of(self.points[1]):
            parts = self._columns(names, which, points)
            there = torch.stack([part.abs().max().double() for part in parts])
            largest = torch.maximum(largest, there)
        return [_power_of_two(each) for each in largest.tolist()]

    def _named(
        self, names: Sequence[str], image: Tensor, scales: Sequence[float]
    ) -> dict[str, Tensor]:
        """Split P V into its parts by name, and undo their scales."""
        if len(names) == 1:
            return {names[0]: image}
        sizes = {"points": self.points[1].shape[1], "squares": 1}
        widths = [sizes.get(name, self.class_distances.shape[1]) for name in names]
        named = zip(names, torch.split(image, widths, 1), scales, strict=True)
        return {name: part * scale for name, part, scale in named}

    def _pull(self, points: Tensor, masses: Tensor, image: Tensor, sides: int = 1) -> Tensor:
        """Return 2 lambda_x (r x - P y) of some points (k, d), in their type, times `sides`."""
        return pulled(points, masses, image, self.origin, 2 * sides * self.weights.lambda_x)


def pulled(points: Tensor, masses: Tensor, image: Tensor, origin: Tensor, weight: float) -> Tensor:
    """Return weight * (r x - P y), in the type of the points.

    Args:
        points: x (k, d).
        masses: r (k,), the sums of the plan's rows.
        image: P (y - o) (k, d), in the type of the operator.
        origin: o (d,), in that type.
        weight: 2 lambda_x, times the sides of the cost on which the points stand.
    """
    found = less_origin(points, origin)
    found.mul_(masses.to(found.dtype).unsqueeze(1)).sub_(image)
    return found.mul_(weight).to(points.dtype)


def mass_gradient(
    operator: Operator, term: TransportTerm, constraints: Constraints, *, columns: bool = False
) -> Tensor:
    """Return f - epsilon (r / a - 1) (n,), or of `columns` g - epsilon (c / b - 1) (m,), float64.

    Of relaxed marginals it has phi(f) for f. It is f - epsilon (exp((f - T) / epsilon) - 1) with T
    the softmin. D does not depend on the potential of a point without mass, which no solver
    determines. If it got mass, the potential T, or the update that it gives, would maximize D.
    """
    f, g, epsilon = term.f, term.g, term.epsilon
    if columns:
        masses, potential, marginal = operator.b, g, constraints.columns
        guess = marginal.softmin_of(g, epsilon)
        softmin = operator.softmin_columns(f, epsilon, guess=guess).double()
    else:
        masses, potential, marginal = operator.a, f, constraints.rows
        guess = marginal.softmin_of(f, epsilon)
        softmin = operator.softmin_rows(g, epsilon, guess=guess).double()
    best = marginal.updated(softmin, epsilon)
    potential = torch.where(masses > 0, potential.double(), best)
    return marginal.dual(potential) - epsilon * torch.expm1((potential - softmin) / epsilon)


def _power_of_two(largest: float) -> float:
    """Return the least power of two not below a number; 1 for 0."""
    return 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0


# Inputs that all terms of a divergence share.
SHARED: Needs = frozenset({"classes", "lambda_x", "lambda_y"})

# The points and masses of either side.
POINTS: tuple[Input, Input] = ("x", "y")
MASSES: tuple[Input, Input] = ("a", "b")


class DivergenceGradient:
    """Derivatives of S_epsilon, summed up during `solve`: pass it as `solved`.

    With debiasing, terms of one side of the ground cost cancel.

    Args:
        comparison: the clouds and costs.
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
            if self._needs & {*MASSES}:
                # Other derivatives depend on the plan alone, which offsets do not change.
                term, self.groups[name] = settled(comparison, term, "xx" if self._one else "xy")
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
            if name == "xy" or not self._one:
                rows = self._comparison.given[SIDES[name][0]]
                report_groups(groups, what, rows, required=required)

    @cached_property
    def _one(self) -> bool:
        """Whether all terms are that of one cloud with itself, and so have its potential f = g."""
        return self._comparison.debias and self._comparison.identical

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
        if (embedding := self._comparison.embedding) is not None:
            gradient = gradient[:, : embedding.dim] * embedding.weight
        self.total[POINTS[place]] = gradient.to(dtype)

    def _by_given(self, gradient: Gradient, name: str) -> Gradient:
        """Apply the chain rule from the transformed points to the given points and weights."""
        comparison, ground = self._comparison, self._comparison.ground
        if (embedding := comparison.embedding) is not None:
            gradient = self._without_embedding(gradient, embedding, name)
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

    def _without_embedding(
        self, gradient: Gradient, embedding: LabelEmbedding, name: str
    ) -> Gradient:
        """Leave out the gradient by columns of labels; add that of their terms of one side."""
        comparison = self._comparison
        if gradient.keys() & SHARED:
            raise InputError(
                "no gradient by classes and weights of the cost where labels are compared as "
                "columns of features: numbers, and many sets of labels; use flow.mode=features, or "
                "keep fewer labels with classes=[...]"
            )
        for place, (key, masses) in enumerate(zip(POINTS, MASSES, strict=True)):
            if key in gradient:
                kept = gradient[key][:, : embedding.dim] * embedding.weight
                gradient[key] = kept.to(comparison.given[place].features.dtype)
            alone = None if comparison.debias else embedding.one_side(comparison.transformed[place])
            if masses in gradient and key in name and alone is not None:
                gradient[masses] += alone.to(gradient[masses].device)
        return gradient

    def _add(self, name: str, gradient: Gradient, factor: float) -> None:
        for key, part in gradient.items():
            if key == "classes":
                part = self._comparison.by_labels(self._comparison.classes.around(name, part))
            if key in self.total:
                self.total[key].add_(part, alpha=factor)
            else:
                self.total[key] = part if factor == 1 else part.mul_(factor)
