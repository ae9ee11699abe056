"""Sinkhorn's alternating updates for a cross term, accelerated.

    f <- T(g),  g <- T'(f),      T(g)_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon)

Each update makes one marginal exact. The update of g also tells how far the plan before it was from
the column masses, so checking convergence costs nothing, and neither does the dual value. The first
g comes from `approach`, the next ones from `quasi_newton`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import CROSS
from otdd_flash.engine.evidence.scale import rounding_floor
from otdd_flash.engine.levels import Levels
from otdd_flash.operators.base import Operator
from otdd_flash.operators.one_segment import OneSegment
from otdd_flash.solver.certificate import Certificate, certify
from otdd_flash.solver.term.approach import approach
from otdd_flash.solver.term.iteration import LITTLE_ROUNDING, Iteration
from otdd_flash.solver.term.result import SolverProgress, TransportTerm
from otdd_flash.solver.term.tolerance import Limits


def solve_alternating(
    operator: Operator,
    epsilon: float,
    options: Limits,
    *,
    start: Tensor | None = None,
    progress: SolverProgress | None = None,
) -> TransportTerm:
    """OT_epsilon between the two sides of an operator.

    An operator that rounds the points iterates first; its refined form, which knows the original
    points, starts from there and ends the solve, or proves it alone where rounding is little beside
    the tolerance.

    Args:
        operator: the cost (n, m) and the masses.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: (m,) column potential to start from at the final epsilon, without levels.
        progress: called whenever the marginals were evaluated, as progress("xy", iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    solve = Iteration("xy", CROSS, epsilon, options, progress)
    # Most hopeless tolerances show before the first iteration, by the size of the costs alone.
    solve.admit(operator, rounding_floor(operator.costs, 0.0, epsilon))
    if start is None:
        candidate, levels, passes = approach(solve, operator)
    else:
        candidate, passes = start.to(operator.dtype), 0.0
        levels = Levels.descending(torch.full((1,), epsilon, dtype=torch.float64))

    rounding = solve.rounding(operator)
    refine = rounding > LITTLE_ROUNDING

    def prove(segment: OneSegment, polished: bool) -> Certificate:
        nonlocal passes
        if solve.settled:
            # The last evaluation has taken the certificate's first two passes.
            known = segment.rows, segment.kept, epsilon, segment.updated
            scaled = 0.0 if refine else solve.tolerance
            certificate = certify(segment.operator, *known, polished=polished, scaled=scaled)
        else:
            certificate = certify(segment.operator, segment.rows, segment.updated, epsilon)
            solve.count(certificate)
        passes += certificate.passes
        return certificate

    certificate = solve.solve(
        operator, candidate, levels, prove, refine=refine, room=0.0 if refine else rounding
    )
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=solve.iterations,
        passes=passes + 2 * solve.iterations,
        tolerance=solve.tolerance,
        asked=options.asked_tolerance,
        unless_converged=solve.budget,
    )
