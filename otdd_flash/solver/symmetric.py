"""The self term OT_epsilon(x, x) with one potential.

The optimal potentials of a cloud against itself are equal, and the averaged update

    f <- (f + T(f)) / 2

converges to them in ten to twenty steps at any epsilon where exp(-C / epsilon) is positive
definite, so no scaling is needed (Feydy et al. 2019, Interpolating between optimal transport and
MMD using Sinkhorn divergences). Class distances can make it indefinite, and the averaged update
slow; the next f comes from `quasi_newton`.

Adding k to f lowers T(f) by k, so every look at f first gives its plan mass 1. The dual value is
then 2 <a, f>, and because it is concave and symmetric in both potentials, the averaged update
raises it by no less than the update of one of them would: <a, T(f) - f>.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.base import Epsilon, Operator
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.evidence.certificate import Certificate, certify_self
from otdd_flash.solver.evidence.scale import magnitude, rounding_floor
from otdd_flash.solver.iteration import Iteration
from otdd_flash.solver.quasi_newton import Point, Track, advance, begin
from otdd_flash.solver.schedule import Progress
from otdd_flash.solver.sweep import State
from otdd_flash.solver.term import TransportTerm


def solve_symmetric(
    operator: Operator,
    epsilon: float,
    options: Converged,
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
        progress: called whenever the marginals were looked at, as progress(name, iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    f = (torch.zeros_like(operator.a) if start is None else start).to(operator.dtype)
    # The certificate looks at one update more, which at least halves the marginal error as a rule.
    solve = Iteration(name, average, epsilon, options, progress, aim=2.0)
    solve.admit(operator, rounding_floor(operator, 0.0, epsilon))

    passes = 0

    def prove(operator: Operator, track: Track, polished: bool) -> Certificate:
        nonlocal passes
        f = (track.f + track.updated) / 2
        certificate = certify_self(operator, f, epsilon, accurate=polished)
        solve.count(certificate)
        passes += certificate.passes - 1
        return certificate

    certificate = solve.finish(operator, begin(f, f), prove, refine=False)
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=solve.iterations,
        passes=passes + solve.iterations,
        tolerance=solve.tolerance,
        asked=options.asked_tolerance,
        unless_converged=solve.budget,
    )


def average(operator: Operator, epsilon: Epsilon, state: State) -> State:
    """One iteration: look at the candidate f with T(f), and choose the next."""
    track = Track(*state)
    f = track.candidate
    softmin = operator.softmin_rows(f, epsilon, f)
    if operator.in_triton:
        # Triton is not everywhere.
        from otdd_flash.solver.quasi_newton_kernels import advance_self

        return advance_self(operator, epsilon, track, softmin)
    exponent = (f.double() - softmin.double()) / epsilon
    log_masses = operator.a.log() + torch.where(operator.a > 0, exponent, 0)
    log_total = log_masses.logsumexp(0)
    shift = (epsilon / 2 * log_total).to(f.dtype)
    f, softmin = f - shift, softmin + shift
    dual, after = operator.a @ f.double(), operator.a @ softmin.double()
    seen = Point(
        f,
        f,
        softmin,
        dual=2 * dual,
        gain=after - dual,
        gap=((log_masses - log_total).exp() - operator.a).abs().sum(),
        size=magnitude(operator, f, f),
    )
    return advance(track, seen, operator.a, damping=0.5)
