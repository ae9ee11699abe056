"""The self term OT_epsilon(x, x) with one potential.

The optimal potentials of a cloud against itself are equal, and the averaged update

    f <- (f + T(f)) / 2

converges to them in ten to twenty steps at any epsilon where exp(-C / epsilon) is positive
definite, so no scaling is needed (Feydy et al. 2019, Interpolating between optimal transport and
MMD using Sinkhorn divergences). Class distances can make it indefinite, and the averaged update
slow; the next f comes from `quasi_newton`.

Adding k to f lowers T(f) by k, so every evaluation of f first gives its plan mass 1. The dual value
is then 2 <a, f>, and because it is concave and symmetric in both potentials, the averaged update
raises it by no less than the update of one of them would: <a, T(f) - f>.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import SELF
from otdd_flash.engine.evidence.scale import rounding_floor
from otdd_flash.engine.levels import Levels
from otdd_flash.operators.base import Operator
from otdd_flash.operators.one_segment import OneSegment
from otdd_flash.solver.certificate import Certificate, certify_self
from otdd_flash.solver.term.iteration import Iteration
from otdd_flash.solver.term.result import SolverProgress, TransportTerm
from otdd_flash.solver.term.tolerance import Limits


def solve_symmetric(
    operator: Operator,
    epsilon: float,
    options: Limits,
    *,
    name: str = "xx",
    start: Tensor | None = None,
    progress: SolverProgress | None = None,
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
        progress: called whenever the marginals were evaluated, as progress(name, iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    f = (_constant(operator, epsilon) if start is None else start).to(operator.dtype)
    # The certificate evaluates one update more, which at least halves the marginal error as a rule.
    solve = Iteration(name, SELF, epsilon, options, progress, aim=2.0)
    solve.admit(operator, rounding_floor(operator.costs, 0.0, epsilon))

    passes = 0

    def prove(segment: OneSegment, polished: bool) -> Certificate:
        nonlocal passes
        f = (segment.kept + segment.updated) / 2
        certificate = certify_self(segment.operator, f, epsilon, accurate=polished)
        solve.count(certificate)
        passes += certificate.passes - 1
        return certificate

    levels = Levels.descending(torch.full((1,), epsilon, dtype=torch.float64))
    certificate = solve.solve(operator, f, levels, prove, refine=False)
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=solve.iterations,
        passes=passes + solve.iterations,
        tolerance=solve.tolerance,
        asked=options.asked_tolerance,
        unless_converged=solve.budget,
    )


def _constant(operator: Operator, epsilon: float) -> Tensor:
    """A constant potential (n,) whose plan has about mass 1: -epsilon log of its mass at 0, halved.

    By Jensen's inequality the mass at 0 is no less than exp(-mean cost / epsilon), its value far
    above the costs, nor less than that of the diagonal, sum_i a_i^2 exp(-C_ii / epsilon), all
    there is far below them.
    """
    highest = min(operator.costs.mean, -epsilon * float(operator.a.square().sum().log()))
    return torch.full_like(operator.a, highest / 2)
