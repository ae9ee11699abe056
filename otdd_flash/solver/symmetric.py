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
    for iteration in range(1, options.max_iterations + 1):
        updated = operator.softmin_rows(f, epsilon)
        masses = column_marginal(operator.a, f, updated, epsilon)
        floor = rounding_floor(operator, f, f, epsilon)
        error = float((masses / masses.sum() - operator.a).abs().sum()) + floor
        check_reachable(options.tolerance, floor, epsilon, operator.dtype)
        if progress is not None:
            progress(name, iteration, error)
        if error <= options.tolerance:
            break
        f = (f + updated) / 2
    return TransportTerm.from_certificate(
        certify_self(operator, f, epsilon),
        epsilon,
        iterations=iteration,
        passes=iteration + 1,
        tolerance=options.tolerance,
    )
