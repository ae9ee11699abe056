"""Sinkhorn's alternating updates for a cross term, accelerated.

    f <- T(g),  g <- T'(f),      T(g)_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon)

Each update makes one marginal exact. The update of g also tells how far the plan before it was from
the column masses, so checking convergence costs nothing, and neither does the dual value. The first
g comes from `approach`, the next ones from `quasi_newton`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.base import Epsilon, Operator
from otdd_flash.solver.approach import approach
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.evidence.certificate import Certificate, certify
from otdd_flash.solver.evidence.scale import magnitude, rounding_floor
from otdd_flash.solver.iteration import Iteration
from otdd_flash.solver.quasi_newton import Point, Track, advance, begin
from otdd_flash.solver.schedule import Progress
from otdd_flash.solver.sweep import State
from otdd_flash.solver.term import TransportTerm


def solve_alternating(
    operator: Operator,
    epsilon: float,
    options: Converged,
    *,
    start: Tensor | None = None,
    progress: Progress | None = None,
) -> TransportTerm:
    """OT_epsilon between the two sides of an operator.

    An operator that rounds the points iterates first; its refined form, which knows the original
    points, starts from there and ends the solve.

    Args:
        operator: the cost (n, m) and the masses.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: (m,) column potential to start from at the final epsilon, without levels.
        progress: called whenever the marginals were looked at, as progress("xy", iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    solve = Iteration("xy", alternate, epsilon, options, progress)
    # Most hopeless tolerances show before the first iteration, by the size of the costs alone.
    solve.admit(operator, rounding_floor(operator, 0.0, epsilon))
    if start is None:
        track, passes = approach(solve, operator)
    else:
        f = torch.zeros_like(operator.a, dtype=operator.dtype)
        track, passes = begin(f, start.to(operator.dtype)), 0.0

    def prove(operator: Operator, track: Track, polished: bool) -> Certificate:
        nonlocal passes
        if solve.settled:
            # The last look has taken the certificate's first two passes.
            known = track.f, track.g, epsilon, track.updated
            certificate = certify(operator, *known, polished=polished)
        else:
            certificate = certify(operator, track.f, track.updated, epsilon)
            solve.count(certificate)
        passes += certificate.passes
        return certificate

    certificate = solve.finish(operator, track, prove)
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=solve.iterations,
        passes=passes + 2 * solve.iterations,
        tolerance=solve.tolerance,
        asked=options.asked_tolerance,
        unless_converged=solve.budget,
    )


def alternate(operator: Operator, epsilon: Epsilon, state: State) -> State:
    """One iteration: look at the candidate g with f = T(g) and T'(f), and choose the next."""
    track = Track(*state)
    g = track.candidate
    f = operator.softmin_rows(g, epsilon, track.f)
    updated = operator.softmin_columns(f, epsilon, g)
    if operator.in_triton:
        # Triton is not everywhere.
        from otdd_flash.solver.quasi_newton_kernels import advance_cross

        return advance_cross(operator, epsilon, track, f, updated)
    columns = column_marginal(operator.b, g, updated, epsilon)
    seen = Point(
        f,
        g,
        updated,
        dual=operator.a @ f.double() + operator.b @ g.double(),
        gain=operator.b @ (updated.double() - g.double()),
        gap=(columns - operator.b).abs().sum(),
        size=magnitude(operator, f, g),
    )
    return advance(track, seen, operator.b, damping=1.0)


def column_marginal(masses: Tensor, g: Tensor, softmin: Tensor, epsilon: Epsilon) -> Tensor:
    """Column sums b_j exp((g_j - T(f)_j) / epsilon) of the plan of (f, g), given T(f), float64.

    The half-step that would update g thus yields the marginal of the plan before it, for free.
    """
    exponent = (g.double() - softmin.double()) / epsilon
    return masses * torch.where(masses > 0, exponent, 0).exp()
