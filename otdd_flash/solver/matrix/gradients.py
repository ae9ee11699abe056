"""OT_epsilon, S_epsilon and the plan of cost matrices as differentiable functions of tensors.

`otdd_flash` exports `matrix_loss` and `matrix_plan`; users alone call them. Both solve by
`solve_matrix` (`solver.matrix.transport`), and of a solve gradients need the potentials alone.
`matrix_loss` must keep nothing of n x m entries for its backward pass beside the costs, and
gradients must be those of the formulas below (`tests/matrix/test_matrix_loss.py`,
`tests/matrix/test_plan.py`).

Value. By the envelope theorem potentials are held fixed. The dual value of the given potentials

    D = <a, f> + <b, g> + epsilon (1 - sum_ij P_ij),    r = P 1,  c = P^T 1,

has the derivatives

    dD/dC = P,    dD/da = f - epsilon (r / a - 1),    dD/db = g - epsilon (c / b - 1),

with r / a = exp((f - T(g)) / epsilon) and c / b = exp((g - T'(f)) / epsilon) for the softmins T and
T'. Of relaxed marginals D and its slopes by masses have phi(f), phi(g) (`Constraints.dual`) for f
and g. S_epsilon = OT(C) - OT(C_xx) / 2 - OT(C_yy) / 2 has the gradient -P / 2 by C_xx; in a self
term the masses are on both sides, and their gradient counts twice.

Plan. For a plan P with sums r = P 1, c = P^T 1 and a cotangent G (n, m), with M = G o P,

    [alpha diag(r) P; P^T beta diag(c)] [u; v] = [M 1; M^T 1],

    alpha = 1 + epsilon / rho_x,    beta = 1 + epsilon / rho_y,

    dL/dC = -P o (G - u 1^T - 1 v^T) / epsilon,    dL/da = u,    dL/db = v    along the simplex.

The marginals r and c are the plan's own; alpha and beta are 1 if marginals are exact. At a row
without mass u_i is the mean of G_ij - v_j under the conditional plan of that row, over alpha. With
relaxed marginals dL/da = alpha r / a o u, and dL/db = beta c / b o v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from otdd_flash.arguments import Positive, takes
from otdd_flash.checks import optional, sequence, tensor
from otdd_flash.cost.compute import Compute
from otdd_flash.cost.facts import SIDES
from otdd_flash.derivatives.adjoint import Density, potentials_everywhere
from otdd_flash.derivatives.autograd import Inputs, Solved
from otdd_flash.derivatives.gradient import mass_gradient
from otdd_flash.derivatives.groups import Groups, report_groups, settle, settled
from otdd_flash.derivatives.plan_system import DEFAULTS, CGOptions, held_plan, largest
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.operators.base import Operator
from otdd_flash.operators.given_costs import CostBlocks, GivenCosts, matrix_operator
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver.divergence import Potentials
from otdd_flash.solver.matrix.transport import check_one_epsilon, solve_matrix
from otdd_flash.solver.matrix_comparison import MatrixComparison
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced
from otdd_flash.solver.schedules import Converged, Schedule
from otdd_flash.solver.term import TransportTerm

# The term of each cost, the terms that each side's masses enter, and the weights of terms.
COSTS = {"costs": "xy", "self_costs[0]": "xx", "self_costs[1]": "yy"}
MASSES = {"a": ("xy", "xx"), "b": ("xy", "yy")}
SHARES = {"xy": 1.0, "xx": -0.5, "yy": -0.5}


@computes
@takes(
    a=optional(tensor("(n,)")),
    b=optional(tensor("(m,)")),
    self_costs=optional(sequence(tensor("(n, n) or (m, m)"), length=2)),
)
def matrix_loss(
    costs: Tensor | CostBlocks,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    epsilon: Positive,
    self_costs: Sequence[Tensor] | None = None,
    unbalanced: Unbalanced | None = None,
    start: Potentials | None = None,
    options: Schedule | None = None,
    compute: Compute | None = None,
) -> Tensor:
    """Compute OT_epsilon of a cost matrix C, or S_epsilon with self costs, for autograd.

    Differentiable once, by matrices and masses. The gradient by C is the plan: the backward pass
    computes it from the potentials f and g in one buffer of its size, and scales it before rounding
    to the type of C. The forward pass keeps nothing of that size. Gradients are exact for the dual
    value of the potentials that the solver returned. Gradients by masses are along the simplex: <a,
    gradient> = 0.

    Args:
        costs: C (n, m) as for `matrix_transport`; `otdd.CostBlocks` get no gradient.
        a: (n,) non-negative masses that sum to 1; uniform by default.
        b: (m,) masses of columns, under the same rules.
        epsilon: regularisation, in units of the cost.
        self_costs: C_xx (n, n) and C_yy (m, m), finite and symmetric but for rounding, for the
            value S_epsilon = OT(C) - OT(C_xx) / 2 - OT(C_yy) / 2.
        unbalanced: rho, the price of mass that is not matched, in units of the cost; without
            `self_costs` also [rho_x, rho_y], as for `matrix_transport`.
        start: potentials by term to start from, {"xy": g, "xx": f, "yy": g}.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        compute: `otdd.ComputeOptions`, or only a device; by default where the costs are.

    Returns:
        0-dim tensor in units of the cost, float64 if the costs are and else float32.

    Raises:
        InputError: as `matrix_transport`; float16 costs that require a gradient; self costs that
            do not fit, or are not finite or not symmetric; in a backward pass, an input that was
            changed in place, or a second derivative.
        ConvergenceError: `options.require_convergence` is set and a term stopped early, or leaves
            gradients by masses undetermined.

    Warns:
        NotConvergedWarning: the same, without `require_convergence`; or no plan has these masses.
    """
    own = (None, None) if self_costs is None else self_costs
    given = {"costs": costs, "self_costs[0]": own[0], "self_costs[1]": own[1], "a": a, "b": b}
    inputs, options = Inputs(given), options or Converged()
    for name in COSTS.keys() & inputs.tensors.keys():
        check_gradient_type(name, inputs.tensors[name])
    refuse_unbalanced(unbalanced, None, options, debias=self_costs is not None)
    comparison = MatrixComparison.prepare(costs, a, b, compute, self_costs)
    comparison = comparison.with_penalties(unbalanced)
    backward = LossGradient(comparison, frozenset(inputs.tensors))
    with torch.no_grad():
        divergence, short = solve_matrix(
            comparison, epsilon, None, options, start=start, solved=backward.solved
        )
    if not len(short):
        required = options.require_convergence
        for groups in backward.groups.values():
            report_groups(groups, "gradients by masses", required=required)
    dtype = torch.float64 if comparison.source.dtype == torch.float64 else torch.float32
    home = costs.device if isinstance(costs, Tensor) else comparison.device
    value = torch.tensor(divergence.value, dtype=dtype, device=home)
    if not inputs.tensors:
        return value
    found = Solved.apply("matrix_loss", backward, inputs, (value,), *inputs.tensors.values())
    return cast(Tensor, found[0])


def check_gradient_type(name: str, costs: Tensor) -> None:
    """Refuse float16, in which most entries of a plan underflow.

    Raises:
        InputError: the costs are float16.
    """
    if costs.dtype == torch.float16:
        raise InputError(
            f"{name} requires a gradient and is float16, in which entries of a plan underflow; "
            "convert it with .bfloat16() or .float()"
        )


class LossGradient:
    """The backward pass of `matrix_loss`.

    Args:
        comparison: costs and masses.
        needs: inputs to differentiate by.

    Attributes:
        groups: by term, groups of points between which gradients by masses are undetermined.
    """

    def __init__(self, comparison: MatrixComparison, needs: frozenset[str]) -> None:
        self._comparison, self._needs = comparison, needs
        self._terms: dict[str, TransportTerm] = {}
        self._by_masses: dict[str, Tensor] = {}
        self.groups: dict[str, Groups | None] = {}

    def solved(self, name: str, operator: Operator, term: TransportTerm) -> None:
        """Keep the potentials of a term, and compute its gradients by masses."""
        self._terms[name] = term
        if any(key in self._needs and name in terms for key, terms in MASSES.items()):
            term, self.groups[name] = settled(self._comparison, term, name)
        for key, terms in MASSES.items():
            if key in self._needs and name in terms:
                constraints = self._comparison.constraints.between(*SIDES[name])
                columns = key == "b"
                found = mass_gradient(operator.refined, term, constraints, columns=columns)
                # The masses are on both sides of a self term.
                share = SHARES[name] * (1 if name == "xy" else 2)
                self._by_masses[key] = self._by_masses.get(key, 0) + share * found

    def __call__(self, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return gradients by key, for a cotangent () of the value."""
        comparison, found = self._comparison, {}
        scale = cotangents[0].to(comparison.device, torch.float64)
        for key, name in COSTS.items():
            if key in self._needs:
                term = self._terms[name]
                operator = comparison.torch_operator(name)
                found[key] = operator.plan_entries(
                    term.f, term.g, term.epsilon, operator.source.costs.dtype, scale * SHARES[name]
                )
        for key, gradient in self._by_masses.items():
            masses = comparison.a if key == "a" else comparison.b
            present = torch.where(masses > 0, gradient, 0)
            found[key] = scale * (gradient - masses @ present)
        return found


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
        b: (m,) masses of columns, under the same rules.
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
    comparison = comparison.with_penalties(unbalanced, unbalanced_relative)
    with torch.no_grad():
        divergence, _ = solve_matrix(comparison, epsilon, epsilon_relative, options, start=start)
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
            alone = (t - density.times((a * w1)[:, None], transposed=True)[:, 0]) / (
                beta * density.p
            )
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
