"""`solver=geomloss`: the fixed schedule of geomloss's `SamplesLoss("sinkhorn", p=2)`.

Potentials start as f = T(0), g = T'(0) at epsilon = diameter^2. Then, for every value of epsilon in

    diameter^2, diameter^2, scaling^2 diameter^2, scaling^4 diameter^2, ..., epsilon

both are averaged with their updates, simultaneously, as in Algorithm 3.5 of Feydy 2020, Geometric
data analysis, beyond convolutions:

    f <- (f + T(g)) / 2,  g <- (g + T'(f)) / 2,        in a self term  f <- (f + T(f)) / 2,

and last f <- T(g), g <- T'(f). The value is <a, f> + <b, g> at these, whatever the marginals of
their plan. It is geomloss's number and no bound of OT_epsilon: if the schedule ends before its plan
has the right marginals, `bounds` contain OT_epsilon but not necessarily the value.

`diameter` defaults to the diagonal of the box around the features, as in geomloss, whose `blur` is
epsilon^(1/2). The original OTDD code passes labels as one more coordinate, so that its diameter is
the diagonal of a box with one more side, the highest class index.

`solver.divergence` calls `solve_by_schedule` by its table `SOLVES`, `solver.solving` fills in the
diameter, and `otdd_flash` exports `GeomlossSchedule`. A change must keep the value that of geomloss
(`tests/solver/test_geomloss_schedule.py`). The fields are keys of `conf/solver/geomloss.yaml`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import MarginalError, Positive, Share
from otdd_flash.formulas.decision import Form
from otdd_flash.operators.base import Operator
from otdd_flash.solver.certificate import certify, certify_self
from otdd_flash.solver.schedules import Schedule
from otdd_flash.solver.term import TermProgress, TransportTerm


@dataclass(frozen=True)
class GeomlossSchedule(Schedule):
    """The updates and the value of geomloss, with certified bounds.

    Args:
        scaling: ratio of successive blurs epsilon^(1/2), in (0, 1).
        diameter: the first blur, a length in units of the features; None is the diagonal of the
            box around both clouds.
        tolerance: marginal error, as in `Converged`, up to which a result counts as converged; None
            is 1e-3. The number of updates does not depend on it.
        require_convergence: raise a `ConvergenceError` instead of warning if the result is not
            converged.

    Raises:
        InputError: one of them is out of its range.
    """

    name = "geomloss"
    exact_alone = (
        "solver.schedule=geomloss takes exact marginals; leave out unbalanced, or use the schedule "
        "converged, whose values agree with geomloss at rho = reach^2"
    )

    tolerance: MarginalError | None = field(default=None, kw_only=True)
    scaling: Share = 0.5
    diameter: Positive | None = None


def solve_by_schedule(
    operator: Operator,
    epsilon: float,
    options: GeomlossSchedule,
    form: Form,
    *,
    start: Tensor | None,
    progress: TermProgress | None,
) -> TransportTerm:
    """Run the schedule: the value is geomloss's, bounds and plan are certified.

    The refined form of `operator` runs throughout; `start` is not used; `progress` is called once,
    at the end. Other arguments are as for `solver.solve.solve_term`.
    """
    assert options.diameter is not None
    refined = operator.refined
    epsilons = schedule(epsilon, options.diameter, options.scaling)
    if form.symmetric:
        f = g = _self(refined, epsilons)
        certificate = certify_self(refined, f, epsilon)
    else:
        f, g = _cross(refined, epsilons)
        certificate = certify(refined, f, g, epsilon)
    iterations = len(epsilons) + 3
    # Of a self term the last iteration is the certificate.
    passes = (iterations - 1 if form.symmetric else 2 * iterations) + certificate.passes
    term = TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=iterations,
        passes=passes,
        tolerance=options.asked_tolerance,
        asked=options.asked_tolerance,
        unless_converged="schedule",
    )
    if progress is not None:
        progress(iterations, certificate.marginal_error)
    value = float(refined.a @ f.double() + refined.b @ g.double())
    return replace(term, value=value, stopped_by="schedule")


def schedule(epsilon: float, diameter: float, scaling: float) -> list[float]:
    """Return every epsilon of the loop, in order, from diameter^2 down to `epsilon` itself."""
    # Steps of the blur, sqrt(epsilon), computed as there: rounding may decide about a last one.
    top, bottom = 2 * math.log(diameter), 2 * math.log(math.sqrt(epsilon))
    between = np.exp(np.arange(top, bottom, 2 * math.log(scaling)))
    return [diameter**2, *between.tolist(), epsilon]


def _cross(operator: Operator, epsilons: list[float]) -> tuple[Tensor, Tensor]:
    """Run the updates of a cross term; return the last f (n,) and g (m,)."""
    f = torch.zeros_like(operator.a, dtype=operator.costs.dtype)
    g = torch.zeros_like(operator.b, dtype=operator.costs.dtype)
    f, g = _updates(operator, f, g, epsilons[0])
    for epsilon in epsilons:
        new_f, new_g = _updates(operator, f, g, epsilon)
        f, g = (f + new_f) / 2, (g + new_g) / 2
    return _updates(operator, f, g, epsilons[-1])


def _updates(operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return T(g) and T'(f)."""
    return operator.softmin_rows(g, epsilon, f), operator.softmin_columns(f, epsilon, g)


def _self(operator: Operator, epsilons: list[float]) -> Tensor:
    """Run the updates of a self term; return the last f (n,)."""
    f = torch.zeros_like(operator.a, dtype=operator.costs.dtype)
    f = operator.softmin_self(f, epsilons[0])
    for epsilon in epsilons:
        f = (f + operator.softmin_self(f, epsilon)) / 2
    return operator.softmin_self(f, epsilons[-1])
