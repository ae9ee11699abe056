"""The self term OT_epsilon(x, x) with one potential.

The optimal potentials of a cloud against itself are equal, and the averaged update

    f <- (f + T(f)) / 2

converges to them in ten to twenty steps at any epsilon where exp(-C / epsilon) is positive
definite, so no scaling is needed (Feydy et al. 2019, Interpolating between optimal transport and
MMD using Sinkhorn divergences). Class distances can make it indefinite; it then takes longer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.solver.certificate import certify_self, column_marginal, rounding_floor
from otdd_flash.solver.options import Progress, SolverOptions
from otdd_flash.solver.term import TransportTerm, check_reachable


def solve_symmetric(
    operator: Operator,
    epsilon: float,
    options: SolverOptions,
    *,
    name: str = "xx",
    start: Tensor | None = None,
    progress: Progress | None = None,
) -> TransportTerm:
    """OT_epsilon of a cloud with itself.

    As in `solve_alternating`, an operator that rounds the points iterates first and its refined
    form ends the solve.

    Args:
        operator: the symmetric cost (n, n), with the same masses on both sides.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        name: which term this is, for `progress`.
        start: (n,) potential to start from.
        progress: called after every iteration as progress(name, iteration, marginal error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    f = torch.zeros_like(operator.a, dtype=operator.dtype) if start is None else start
    solve = _Solve(name, epsilon, options, progress)
    f = solve.iterate(operator, f)
    refined = operator.refined
    if refined is not operator:
        f = solve.iterate(refined, f)
    return TransportTerm.from_certificate(
        certify_self(refined, f, epsilon),
        epsilon,
        iterations=solve.iterations,
        passes=solve.iterations + 1,
        tolerance=options.tolerance,
    )


class _Solve:
    """The iterations of one term, counted over all operators that take part."""

    def __init__(
        self, name: str, epsilon: float, options: SolverOptions, progress: Progress | None
    ) -> None:
        self.name, self.epsilon, self.options, self.progress = name, epsilon, options, progress
        self.iterations = 0

    def iterate(self, operator: Operator, f: Tensor) -> Tensor:
        """Average f (n,) with its softmin until converged or out of budget."""
        while self.iterations < self.options.max_iterations:
            updated = operator.softmin_rows(f, self.epsilon)
            masses = column_marginal(operator.a, f, updated, self.epsilon)
            floor = rounding_floor(operator, f, f, self.epsilon)
            error = float((masses / masses.sum() - operator.a).abs().sum()) + floor
            check_reachable(self.options.tolerance, floor, self.epsilon, operator.dtype)
            self.iterations += 1
            if self.progress is not None:
                self.progress(self.name, self.iterations, error)
            if error <= self.options.tolerance:
                break
            f = (f + updated) / 2
        return f
