"""The plan of a cost matrix as a differentiable function of tensors.

For a plan P with sums r = P 1, c = P^T 1 and a cotangent G (n, m), with M = G o P,

    [alpha diag(r) P; P^T beta diag(c)] [u; v] = [M 1; M^T 1],

    dL/dC = -P o (G - u 1^T - 1 v^T) / epsilon,    dL/da = u,    dL/db = v    along the simplex.

The marginals r and c are the plan's own, and alpha and beta 1 where marginals are exact. At a row
without mass u_i is the mean of G_ij - v_j under the conditional plan of that row, over alpha. Of
relaxed marginals dL/da = alpha r / a o u, and likewise dL/db. `otdd_flash` exports `matrix_plan`;
users alone call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from otdd_flash.arguments import Positive, takes
from otdd_flash.checks import optional, tensor
from otdd_flash.cost.compute import Compute
from otdd_flash.derivatives.adjoint import Density, potentials_everywhere
from otdd_flash.derivatives.autograd import Inputs, Solved
from otdd_flash.derivatives.groups import settle
from otdd_flash.derivatives.plan_system import DEFAULTS, CGOptions, held_plan, largest
from otdd_flash.eager import computes
from otdd_flash.operators.given_costs import GivenCosts, matrix_operator
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver.divergence import Potentials, report_convergence
from otdd_flash.solver.matrix.loss import check_gradient_type
from otdd_flash.solver.matrix.transport import check_one_epsilon, report_infeasible, solve_matrix
from otdd_flash.solver.matrix_comparison import MatrixComparison
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term import TransportTerm

# Masses of a side, or 1 for all; and a function that iterates over rows and their density.
Weights = Tensor | float
Tiles = Callable[[], Iterator[tuple[slice, Tensor]]]


@computes
@takes(costs=tensor("(n, m)"), a=optional(tensor("(n,)")), b=optional(tensor("(m,)")))
def matrix_plan(
    costs: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    epsilon: Positive | None = None,
    epsilon_relative: Positive | None = None,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    start: Potentials | None = None,
    options: Schedule | None = None,
    cg: CGOptions = DEFAULTS,
    compute: Compute | None = None,
) -> Tensor:
    """Compute the optimal plan a_i b_j exp((f_i + g_j - C_ij) / epsilon), for autograd.

    Differentiable once, by costs and masses. The backward pass solves one linear system (see
    `CGOptions`) from the potentials alone: memory is that of the inputs and the plan, however many
    iterations the solve took. The gradient is the implicit one of the optimum at the plan's own
    marginals, not that of the iterations. By masses it is the one along the simplex. An epsilon by
    `epsilon_relative` counts as a constant. An incoming gradient that is not finite gives NaN.

    Args:
        costs: C (n, m) as for `matrix_transport`.
        a: (n,) non-negative masses that sum to 1; uniform by default.
        b: (m,) masses, likewise.
        epsilon: regularisation, in units of the cost.
        epsilon_relative: epsilon as a multiple of the mean finite cost; give one of the two.
        unbalanced: the price of mass that is not matched, rho or [rho_x, rho_y], as in
            `matrix_transport`.
        unbalanced_relative: the same as multiples of the mean finite cost, which counts as a
            constant.
        start: a column potential to start from, {"xy": g}.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        cg: options of the linear system of the backward pass.
        compute: `otdd.ComputeOptions`, or only a device; by default where the costs are.

    Returns:
        P (n, m), float64 if the costs are and else float32, on the device of the costs.

    Raises:
        InputError: as `matrix_loss`.
        ConvergenceError: `options.require_convergence` is set and the solve stopped early, or, in
            the backward pass, the linear system was not solved.

    Warns:
        NotConvergedWarning: the same, without `require_convergence`; or no plan has these masses.
    """
    check_one_epsilon(epsilon, epsilon_relative)
    inputs, options = Inputs({"costs": costs, "a": a, "b": b}), options or Converged()
    if "costs" in inputs.tensors:
        check_gradient_type("costs", costs)
    refuse_unbalanced(unbalanced, unbalanced_relative, options)
    comparison = MatrixComparison.prepare(costs, a, b, compute)
    constraints = resolve_constraints(
        unbalanced, unbalanced_relative, lambda: comparison.facts.mean
    )
    comparison = comparison.with_constraints(constraints)
    with torch.no_grad():
        divergence, short = solve_matrix(
            comparison, epsilon, epsilon_relative, options, start=start
        )
        if len(short):
            report_infeasible(short, options)
        else:
            report_convergence(divergence, options)
        term = divergence.xy
        if inputs.tensors.keys() & {"a", "b"}:
            required = options.require_convergence
            term = settle(comparison, term, "gradients by masses", required=required)
        dtype = torch.promote_types(comparison.source.dtype, torch.float32)
        plan = comparison.torch_operator("xy").plan_entries(term.f, term.g, term.epsilon, dtype)
        plan = plan.to(costs.device)
    if not inputs.tensors:
        return plan
    backward = PlanGradient(comparison, term, frozenset(inputs.tensors), options, cg)
    found = Solved.apply("matrix_plan", backward, inputs, (plan,), *inputs.tensors.values())
    result: Tensor = found[0]
    return result


class PlanGradient:
    """The backward pass of `matrix_plan`.

    Args:
        comparison: costs and masses.
        term: potentials f (n,) and g (m,), and epsilon.
        needs: inputs to differentiate by.
        options: whether a missed tolerance is an error.
        cg: the tolerance of the linear system.
    """

    def __init__(
        self,
        comparison: MatrixComparison,
        term: TransportTerm,
        needs: frozenset[str],
        options: Schedule,
        cg: CGOptions,
    ) -> None:
        self._comparison, self._term, self._needs = comparison, term, needs
        self._options, self._cg = options, cg

    def __call__(self, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return gradients by key, for a cotangent G (n, m)."""
        comparison, epsilon = self._comparison, self._term.epsilon
        a, b, cotangent = comparison.a, comparison.b, cotangents[0].to(comparison.device)
        potentials = potentials_everywhere(comparison, self._term)
        density = Density(
            (a, b),
            lambda weighted: held_plan(self._operator(weighted), *potentials, epsilon),
            epsilon,
            comparison.constraints,
        )
        unit = largest(cotangent)
        (left, right), tiles = self._weighted_tiles(density, potentials)
        # Factors that turn entries of the tiles into a_i e_ij b_j.
        of_rows, of_columns = a / left, b / right
        # s_i = sum_j e_ij G_ij b_j and t_j = sum_i a_i e_ij G_ij, divided by `unit`.
        s, t = torch.empty_like(a), torch.zeros_like(b)
        for rows, e in tiles():
            weighted = e * (cotangent[rows] / unit)
            s[rows] = weighted @ of_columns
            t += of_rows[rows] @ weighted
        s, t = s / left, t / right
        w1, w2 = density.solve(a * s, b * t, self._cg, self._options)
        found, (alpha, beta) = {}, density.diagonal
        if "costs" in self._needs:
            shape, dtype = cotangent.shape, comparison.source.dtype
            gradient = torch.empty(shape, dtype=dtype, device=comparison.device)
            for rows, e in tiles():
                change = (cotangent[rows] / unit - w1[rows, None]).sub_(w2).mul_(e)
                weights = of_rows[rows, None] * (unit / -epsilon)
                gradient[rows] = change.mul_(weights).mul_(of_columns)
            found["costs"] = gradient
        if "a" in self._needs:
            alone = (s - density.times((b * w2)[:, None])[:, 0]) / (alpha * density.q)
            slope = torch.where(a > 0, w1, alone)
            slope = comparison.constraints.rows.mass_slope(slope, density.q, epsilon)
            found["a"] = unit * _along_simplex(slope, a)
        if "b" in self._needs:
            alone = (t - density.transposed_times((a * w1)[:, None])[:, 0]) / (beta * density.p)
            slope = torch.where(b > 0, w2, alone)
            slope = comparison.constraints.columns.mass_slope(slope, density.p, epsilon)
            found["b"] = unit * _along_simplex(slope, b)
        return found

    def _weighted_tiles(
        self, density: Density, potentials: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Weights, Weights], Tiles]:
        """Return weights of both sides, and an iteration over rows of e times these; read only.

        A small plan is stored as one tile, times its masses.
        """
        if (plan := density.small) is not None:
            return density.masses, lambda: iter([(slice(0, len(plan)), plan)])
        operator, at = self._operator(density.whole), (*potentials, self._term.epsilon)
        return (1.0, 1.0), lambda: operator.exact_tiles(*at)

    def _operator(self, weighted: bool) -> TorchOperator[GivenCosts]:
        """Return the operator with the given masses, or with equal ones if not `weighted`."""
        comparison = self._comparison
        if weighted:
            return comparison.torch_operator("xy")
        masses = (torch.full_like(side, 1 / len(side)) for side in (comparison.a, comparison.b))
        return matrix_operator(
            comparison.source, *masses, dtype=comparison.dtype, facts=comparison.facts
        )


def _along_simplex(gradient: Tensor, masses: Tensor) -> Tensor:
    return gradient - masses @ gradient
