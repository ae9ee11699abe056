"""Optimal potentials as differentiable functions of tensors.

For cotangents f' (n,) and g' (m,) of the potentials, at points with mass,

    r o h + P k = f',    P^T h + c o k = g'

and M = P o (h 1^T + 1 k^T) is dL/dC. The potential of a point without mass is the softmin of the
others', whose derivative is the conditional plan: its cotangent passes through that to costs, to
the other side's potentials and to masses, with f'_i / q_i in place of a_i h_i. With h and k that
include the masses,

    dL/da = -epsilon e k,    dL/db = -epsilon e^T h.

Potentials are normalized to <b, g> = 0: f + t and g - t with t = <b, g>. So b (sum f' - sum g') is
added to g', and g (sum f' - sum g') to dL/db. The cotangents then have equal sums, without which
the system has no solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from otdd_flash.arguments import TENSORS_OF_A_PAIR, Count, NotNegative, Positive, takes
from otdd_flash.cost.compute import Compute
from otdd_flash.cost.ground import GroundCost
from otdd_flash.derivatives.adjoint import (
    CostWeights,
    Density,
    cost_gradient,
    potentials_everywhere,
)
from otdd_flash.derivatives.autograd import Inputs, Solved
from otdd_flash.derivatives.groups import report_groups, settled
from otdd_flash.derivatives.loss import plain_number
from otdd_flash.derivatives.plan_system import DEFAULTS, CGOptions, largest
from otdd_flash.eager import computes
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import Potentials, checked_start, report_convergence
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.solving import solve
from otdd_flash.solver.tensors import compared_tensors


@computes
@takes(TENSORS_OF_A_PAIR)
def sinkhorn_potentials(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    epsilon: Positive,
    labels_x: Tensor | None = None,
    labels_y: Tensor | None = None,
    class_table: Tensor | None = None,
    class_totals: tuple[Count, Count] | None = None,
    lambda_x: NotNegative | Tensor = 0.5,
    lambda_y: NotNegative | Tensor = 0.5,
    start: Potentials | None = None,
    options: Schedule | None = None,
    cg: CGOptions = DEFAULTS,
    compute: Compute | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute optimal potentials f (n,), g (m,) of OT_epsilon(x, y) with <b, g> = 0, for autograd.

    Differentiable once by x, y, a, b, class_table, lambda_x and lambda_y. The backward pass solves
    one linear system, by a factorization where points are few and else by conjugate gradients (see
    `CGOptions`), from the potentials alone: memory is that of the inputs, however many iterations
    the solve took. The gradient is the implicit one of the optimum at the plan's own marginals, not
    that of the iterations. By masses it is the one along the simplex, up to a constant. A cotangent
    that is not finite gives NaN.

    Between groups of points that exchange almost no mass, potentials are balanced to far below the
    marginal error, by the logarithms of the exchanged masses. Where the rounding of the masses is
    larger than these, a common offset of each group is undetermined, and a warning says so.

    Args:
        x: (n, d) points; all arguments as in `sinkhorn_loss`.
        y: (m, d) points.
        a: (n,) masses, uniform by default. The potential of a point without mass is a softmin.
        b: (m,) masses, likewise.
        epsilon: regularisation, in units of the cost.
        labels_x: (n,) class indices.
        labels_y: (m,) class indices.
        class_table: W (V_x + V_y, V_x + V_y), of which the block [x, y] is read.
        class_totals: (V_x, V_y).
        lambda_x: weight of ||x_i - y_j||^2.
        lambda_y: weight of W.
        start: potentials by term to start from, {"xy": g}.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        cg: the tolerance of the linear system of the backward pass.
        compute: where and how passes run.

    Returns:
        f and g in units of the cost, float64, on the points' device.

    Raises:
        InputError: as `sinkhorn_loss`; in the backward pass an input that was changed in place, or
            an epsilon that is far below the rounding of costs of points without mass; a second
            derivative.
        ConvergenceError: `options.require_convergence` is set and the solve stopped early, or
            leaves potentials undetermined, or, in the backward pass, the linear system was not
            solved.

    Warns:
        NotConvergedWarning: one of these.
    """
    weights = GroundCost(plain_number("lambda_x", lambda_x), plain_number("lambda_y", lambda_y))
    sides = (x, a, labels_x), (y, b, labels_y)
    table = class_table, class_totals
    comparison = compared_tensors(*sides, epsilon, *table, weights, compute, debias=False)
    options = options or Converged()
    inputs = Inputs(
        {"x": x, "y": y, "a": a, "b": b}
        | {"classes": class_table, "lambda_x": lambda_x, "lambda_y": lambda_y},
        *(labels_x, labels_y),
    )
    with torch.no_grad():
        divergence = solve(comparison, options, start=checked_start(comparison, start))
        report_convergence(divergence, options)
        with comparison.within_memory():
            term, groups = settled(comparison, divergence.xy)
        required = options.require_convergence
        report_groups(groups, "potentials", comparison.given[0], required=required)
        with comparison.within_memory():
            solved = potentials_everywhere(comparison, term.f, term.g)
        f, g = (potential.double() for potential in solved)
        shift = comparison.transformed[1].masses @ g
        results = (f + shift).to(x.device), (g - shift).to(x.device)
    if not inputs.tensors:
        return results
    backward = PotentialGradient(comparison, solved, frozenset(inputs.tensors), options, cg)
    found = Solved.apply("sinkhorn_potentials", backward, inputs, results, *inputs.tensors.values())
    return cast(tuple[Tensor, Tensor], found)


class PotentialGradient:
    """The backward pass of `sinkhorn_potentials`.

    Args:
        comparison: the clouds and costs.
        potentials: f (n,) and g (m,), of points without mass as well.
        needs: inputs to differentiate by.
        options: whether a missed tolerance is an error.
        cg: the tolerance of the linear system.
    """

    def __init__(
        self,
        comparison: Comparison,
        potentials: tuple[Tensor, Tensor],
        needs: frozenset[str],
        options: Schedule,
        cg: CGOptions,
    ) -> None:
        self._comparison, self._potentials, self._needs = comparison, potentials, needs
        self._options, self._cg = options, cg

    def __call__(self, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return gradients by key, for cotangents of f (n,) and g (m,)."""
        device = self._comparison.device
        of_f, of_g = (cotangent.to(device, torch.float64) for cotangent in cotangents)
        unit = largest(of_f, of_g)
        with self._comparison.within_memory():
            found = self._gradient(of_f / unit, of_g / unit)
        return {key: gradient.mul_(unit) for key, gradient in found.items()}

    def _gradient(self, of_f: Tensor, of_g: Tensor) -> dict[str, Tensor]:
        comparison, epsilon = self._comparison, self._comparison.epsilon
        density = Density.of(comparison, *self._potentials)
        a, b = density.a, density.b
        surplus = of_f.sum() - of_g.sum()
        of_g = of_g + b * surplus
        s, t = of_f, of_g
        if not density.whole:
            # Potentials of points without mass are softmins: their cotangents pass to the others'.
            h = torch.where(a > 0, 0, of_f / density.q)
            k = torch.where(b > 0, 0, of_g / density.p)
            s = torch.where(a > 0, of_f, 0) - a * density.times(k[:, None])[:, 0]
            t = torch.where(b > 0, of_g, 0) - b * density.transposed_times(h[:, None])[:, 0]
        w1, w2 = density.solve(s, t, self._cg, self._options)
        if density.whole:
            h, k = a * w1, b * w2
        else:
            h, k = h + a * w1, k + b * w2
        gradient = cost_gradient(comparison, CostWeights(density, h, k), self._needs)
        if "a" in self._needs:
            gradient["a"] = -epsilon * density.times(k[:, None])[:, 0]
        if "b" in self._needs:
            gradient["b"] = -epsilon * density.transposed_times(h[:, None])[:, 0]
            gradient["b"] += self._potentials[1].double() * surplus
        return gradient
