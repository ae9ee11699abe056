"""OT_epsilon and S_epsilon of cost matrices as differentiable functions of tensors.

By the envelope theorem potentials are held fixed. The dual value of the given potentials

    D = <a, f> + <b, g> + epsilon (1 - sum_ij P_ij),    r = P 1,  c = P^T 1,

has the derivatives

    dD/dC = P,    dD/da = f - epsilon (r / a - 1),    dD/db = g - epsilon (c / b - 1),

with r / a = exp((f - T(g)) / epsilon) for the softmin T, and likewise c / b. S_epsilon = OT(C) -
OT(C_xx) / 2 - OT(C_yy) / 2 has the gradient -P / 2 by C_xx; in a self term the masses are on both
sides, and their gradient counts twice. `otdd_flash` exports `matrix_loss`; `matrix.plan`
takes `check_gradient_type`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from otdd_flash.arguments import Positive, takes
from otdd_flash.checks import optional, sequence, tensor
from otdd_flash.cost.compute import Compute
from otdd_flash.cost.facts import SIDES
from otdd_flash.derivatives.autograd import Inputs, Solved
from otdd_flash.derivatives.gradient import mass_gradient
from otdd_flash.derivatives.groups import Groups, report_groups, settled
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.operators.base import Operator
from otdd_flash.operators.given_costs import CostBlocks
from otdd_flash.solver.divergence import Potentials, report_convergence
from otdd_flash.solver.matrix.transport import report_infeasible, solve_matrix
from otdd_flash.solver.matrix_comparison import MatrixComparison
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
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
        costs: C (n, m) as for `matrix_transport`; of `otdd.CostBlocks` there is no gradient.
        a: (n,) non-negative masses that sum to 1; uniform by default.
        b: (m,) masses, likewise.
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
    constraints = resolve_constraints(unbalanced, None, lambda: comparison.facts.mean)
    comparison = comparison.with_constraints(constraints)
    backward = LossGradient(comparison, frozenset(inputs.tensors))
    with torch.no_grad():
        divergence, short = solve_matrix(
            comparison, epsilon, None, options, start=start, solved=backward.solved
        )
    if len(short):
        report_infeasible(short, options)
    else:
        report_convergence(divergence, options)
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
