"""The certificate of a term: from any potentials, bounds of its value and of its marginal error.

The lower bound is the dual value, the upper bound the lesser of the primal value and the bound by
oscillation; both are widened by the rounding-error bounds of `solver.evidence`. With forbidden
pairs neither upper bound holds: of exact marginals it is infinite then, and
`solver.matrix.transport` finds another. For a cross term f is replaced by its row update f +
epsilon log(a / r), in float64, whose plan has row sums a and mass 1, but for unresolved rows. A
self term's plan is given mass 1 by a constant; its primal value is that of the plan balanced on its
diagonal.

Relaxed marginals owe p = a e^(-f / rho_x) and q = b e^(-g / rho_y) in the place of a and b, after a
translation of the potentials that makes their masses equal. So a plan with exactly the marginals p
and q costs <C, P> + epsilon KL(P | a b^T) and what the penalties charge for p and q, and both upper
bounds hold with p and q in the place of a and b. The primal value of the plan itself, after the
update of a side that is exact (`Constraints.primal`), is a third upper bound, also with forbidden
pairs. Marginal errors are relative to the mass that the plan moves.

`certify` and `certify_self` evaluate a `Plan` (`lowered_plan`, `self_plan`), compute its
`PlanEvidence` on the device (`cross_evidence`, `self_evidence`), read its numbers (`read_numbers`),
evaluate again where rounding shows, and `conclude`. `solver.solve` and `solver.geomloss` call them.
`solver.small.pooled_solve` takes the first two steps, on a GPU recorded in CUDA graphs, and
`solver.small.route` concludes of one term (`conclude`) or of many at once (`conclude_many`). So
these two steps must not synchronize with the device, and their tensors may have a leading dimension
B, of B terms at once.

Every bound must hold for any potentials, rounding included; `tests/solver/test_certificates.py` and
`tests/solver/test_unbalanced.py` check this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts, larger, lesser
from otdd_flash.errors import EpsilonOutOfRange, InputError
from otdd_flash.formulas.evidence import (
    LEAST_MASS,
    at_least,
    at_most,
    dual_value,
    oscillation_bound,
)
from otdd_flash.formulas.marginals import EXACT, LEAST_MOVING, Constraints, Factors, Marginal
from otdd_flash.operators.base import Certifiable, Epsilon, Marginals, Operator
from otdd_flash.solver.evidence import (
    DOUBLE_UNIT,
    TINY,
    Filling,
    balancing,
    diagonal_of,
    distance,
    dot,
    filled_slack,
    filled_value,
    filling_of,
    fitting_scale,
    growth_of,
    off_diagonal_sums,
    oscillation_slack,
    oscillations,
    perturbed_spread,
    undetectable_after_update,
    updated_gap,
    widen_bounds,
)
from otdd_flash.solver.term import or_double

# A plan is accepted without another evaluation if kappa differs from 1 by at most this share of the
# missing mass, plus so many units of roundoff.
MOST_SCALED, SCALED_UNITS = 0.25, 16.0

# By how many units of roundoff a column potential is lowered, so that rounding in the softmins that
# computed it rarely leaves a column with too much mass. Only the width of bounds depends on it.
MARGIN = 4.0

# A plan that moves nothing after so many iterations is refused.
MOST_UNMOVED = 100

# A row is scaled up only if its sum is so many times the most that underflow may have taken from
# it, which is then negligible.
SCALABLE = 2.0**64


class Certificate(NamedTuple):
    """Potentials after the certifying pass, with bounds of the term's value and marginal error.

    `marginal_error` is a bound of the larger of the L1 errors of rows and of columns, of which
    `undetectable` is the part within rounding. `passes` counts evaluations of `Operator.marginals`.
    Errors are relative to `mass`, which the plan moves: 1 where marginals are exact.
    """

    f: Tensor
    g: Tensor
    value: float
    bounds: tuple[float, float]
    marginal_error: float
    undetectable: float
    passes: int
    mass: float = 1.0


def certify(
    operator: Operator,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    updated: Tensor | None = None,
    constraints: Constraints = EXACT,
    *,
    polished: bool = False,
    scaled: float = 0.0,
) -> Certificate:
    """Certify a cross term: from g (m,), f = T(g) and T'(f), then one pass for all sums.

    With `updated`, which is T'(f), of an f (n,) that is T(g) already, it takes the last pass alone;
    else f is a guess of T(g). Where the rounding of these updates is visible, or if `polished`,
    both are done once more in float64, from the sums of the plan, in two passes. It counts as
    visible only where the plan is scaled by more than `scaled`. T and T' are the updates of
    potentials by what the marginals owe.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    if updated is None:
        rows, columns = constraints.rows, constraints.columns
        f = rows.updated(operator.softmin_rows(g, epsilon, f), epsilon)
        updated = columns.updated(operator.softmin_columns(f, epsilon, g), epsilon)
    plan = lowered_plan(operator, f, g, updated, epsilon, constraints, accurate=polished)
    if not polished:
        evidence = cross_evidence(operator, plan, epsilon)
        numbers = read_numbers(CrossNumbers, evidence.numbers.tolist())
        if not shows_rounding(operator.costs, numbers, epsilon, scaled):
            return conclude(operator.costs, evidence, numbers, epsilon)
    plan = polished_plan(operator, plan, epsilon, accurate=polished)
    evidence = cross_evidence(operator, plan, epsilon)
    numbers = read_numbers(CrossNumbers, evidence.numbers.tolist())
    return conclude(operator.costs, evidence, numbers, epsilon)


def certify_self(
    operator: Operator,
    f: Tensor,
    epsilon: float,
    constraints: Constraints = EXACT,
    *,
    accurate: bool = False,
) -> Certificate:
    """Certify a self term by its potential f (n,), in one pass, or two if points are unresolved.

    The plan is made symmetric: it is the mean of the computed one and its transpose, whose costs
    are as near to C.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    plan = self_plan(operator, f.double(), epsilon, constraints, accurate=accurate)
    evidence = self_evidence(operator, plan, epsilon)
    numbers = read_numbers(SelfNumbers, evidence.numbers.tolist())
    if numbers.unresolved > 0:
        low = lowered(plan.f, plan, plan.sides[0], plan.sums.rows, epsilon)
        again = self_plan(operator, low, epsilon, constraints, accurate=accurate)
        again = again._replace(unresolved=plan.unresolved, passes=2)
        evidence = self_evidence(operator, again, epsilon)
        numbers = read_numbers(SelfNumbers, evidence.numbers.tolist())
    return conclude(operator.costs, evidence, numbers, epsilon)


def conclude(
    costs: CostFacts, evidence: PlanEvidence, numbers: PlanNumbers, epsilon: float
) -> Certificate:
    """Compute the certificate from `PlanEvidence.numbers` as the host has read them.

    Where its mass underflows, the marginal error is 1 / LEAST_MOVING, and bounds hold nevertheless.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    check_mass(costs, numbers.mass, epsilon)
    if numbers.penalties.moving < LEAST_MOVING:
        return _of_nothing(costs, evidence, numbers, epsilon)
    dual, sums = numbers.dual(epsilon), evidence.sums
    check_mass(costs, dual, epsilon)
    upper, primal = numbers.upper(costs, sums, epsilon), float(numbers.penalties.primal)
    if costs.forbidden and math.isfinite(primal):
        # Other upper bounds move mass between any two points, forbidden pairs too.
        upper = primal
    owed = max(numbers.penalties.owed, float(numbers.penalties.moving))
    error = larger(numbers.mean_error, numbers.penalties.open_error)
    size = numbers.size + numbers.penalties.size
    low, high = widen_bounds(costs, sums, (dual, upper), error, size, epsilon, owed)
    # Where numbers overflow nothing is known.
    unknown = math.isnan(high) or (costs.forbidden and not math.isfinite(primal))
    bounds = -math.inf if math.isnan(low) else low, math.inf if unknown else high
    passes, moving = evidence.passes, float(numbers.penalties.moving)
    undetectable = numbers.noise + 2 * sums.relative_error + sums.underflow / moving
    error = numbers.gap + undetectable
    return Certificate(evidence.f, evidence.g, dual, bounds, error, undetectable, passes, moving)


def _of_nothing(
    costs: CostFacts, evidence: PlanEvidence, numbers: PlanNumbers, epsilon: float
) -> Certificate:
    """Compute the certificate of a plan that moves no mass, as `conclude`.

    Its own primal value, and that of a b^T, are upper bounds. The value is the dual one, if that is
    a number, and where no cost is negative at least 0. A marginal error relative to the mass that
    moves is not known: it is said to be 1 / LEAST_MOVING.

    Raises:
        EpsilonOutOfRange: no lower bound is known.
    """
    dual, penalties = numbers.dual(epsilon), numbers.penalties
    upper = float(penalties.primal)
    error = larger(numbers.mean_error, penalties.open_error)
    size, owed = numbers.size + penalties.size, max(penalties.owed, float(penalties.moving))
    low, high = widen_bounds(costs, evidence.sums, (dual, upper), error, size, epsilon, owed)
    low = max(low if low > -math.inf else -math.inf, 0.0 if costs.lowest >= 0 else -math.inf)
    high = high if high < math.inf else math.inf
    if not costs.forbidden:
        unit = torch.finfo(costs.dtype).eps
        high = min(high, costs.highest + costs.error + unit * costs.largest)
    value = dual if dual > low else low
    check_mass(costs, value, epsilon)
    told = 1 / LEAST_MOVING, 0.0, evidence.passes, float(penalties.moving)
    return Certificate(evidence.f, evidence.g, value, (low, high), *told)


def check_moving(
    certificate: Certificate, epsilon: float, iterations: int, *, settled: bool
) -> None:
    """Refuse a plan that moves nothing when it is solved, or after many iterations.

    One that is stopped before has bounds.

    Args:
        certificate: of the plan.
        epsilon: regularisation, in units of the cost.
        iterations: that were made.
        settled: whether they have ended by themselves.

    Raises:
        InputError: the mass underflows.
    """
    if certificate.mass < LEAST_MOVING and (settled or iterations >= MOST_UNMOVED):
        raise InputError(
            f"no mass moves, or less than {LEAST_MOVING:g} of it: all costs are far above epsilon="
            f"{epsilon:g} and the penalty of unmatched mass; raise unbalanced or epsilon"
        )


def shows_rounding(
    costs: CostFacts, numbers: CrossNumbers, epsilon: float, scaled: float = 0.0
) -> bool:
    """Return whether the rounding of the updates is visible in the numbers of a plan.

    A scaling by up to `scaled` is accepted.

    Raises:
        EpsilonOutOfRange: the plan's mass overflows.
    """
    check_mass(costs, numbers.mass, epsilon)
    return bool(numbers.needs_refinement(torch.finfo(costs.dtype).eps / 2, scaled))


def conclude_many(
    numbers: PlanNumbers,
    sums: Marginals,
    unit: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute values, marginal errors and whether these suffice, (B,) each, of B terms.

    They do not where `certify` or `certify_self` would evaluate again or raise: the rounding of
    potentials with this unit is visible, or the mass over- or underflows.
    """
    error, value = numbers.gap + numbers.noise + 2 * sums.relative_error, numbers.dual(epsilon)
    fine = ~numbers.needs_refinement(unit) & (numbers.penalties.moving >= LEAST_MOVING)
    return value, error, fine & numbers.mass.isfinite() & value.isfinite()


class PlanEvidence(NamedTuple):
    """Potentials and numbers of a plan on the device, which the host has not read yet.

    Attributes:
        f: (n,) potential of rows, in the operator's type.
        g: (m,) potential of columns, in the operator's type.
        numbers: float64, `PlanNumbers` in the order of their fields.
        sums: of the plan; of B terms at once only their lengths and their errors are read.
        passes: evaluations of `Operator.marginals`.
    """

    f: Tensor
    g: Tensor
    numbers: Tensor
    sums: Marginals
    passes: int

    def every_other(self, first: int) -> PlanEvidence:
        """Return every second one of B terms, from the term `first`, 0 or 1, on."""
        part = slice(first, None, 2)
        return self._replace(f=self.f[part], g=self.g[part], numbers=self.numbers[part])


def lowered_plan(
    operator: Certifiable,
    f: Tensor,
    g: Tensor,
    updated: Tensor,
    epsilon: Epsilon,
    constraints: Constraints = EXACT,
    *,
    accurate: bool = False,
) -> Plan:
    """Evaluate the plan of f (n,) and min(g, T'(f)) (m,): no column exceeds what it owes.

    `updated` is T'(f), which may be translated; columns without mass take it.
    """
    updated = constraints.untranslated(operator.a, f, operator.b, g, updated, epsilon)
    unit = torch.finfo(operator.passes.dtype).eps / 2
    g = torch.where(operator.b > 0, torch.minimum(g, updated), updated)
    g = torch.sub(g, g.abs(), alpha=MARGIN * unit).double()
    return cross_plan(operator, f.double(), g, epsilon, constraints, accurate=accurate)


def polished_plan(operator: Certifiable, plan: Plan, epsilon: Epsilon, *, accurate: bool) -> Plan:
    """Evaluate the plan after both updates once more, in float64, from its sums.

    Unresolved points, whose factors are 1, get potentials so low that their errors are negligible.
    """
    constraints, (rows, columns) = plan.constraints, plan.sides
    logs, _ = row_update(operator, plan, epsilon)
    f = lowered(plan.f + epsilon * logs, plan, rows, plan.sums.rows, epsilon)
    g = lowered(plan.g, plan, columns, plan.sums.columns, epsilon)
    scaled = cross_plan(operator, f, g, epsilon, constraints, accurate=accurate)
    above = excess(scaled.sums.columns, scaled.owed[..., columns])
    g = g - constraints.columns.updated(epsilon * above, epsilon)
    polished = cross_plan(operator, f, g, epsilon, constraints, accurate=accurate)
    return polished._replace(unresolved=plan.unresolved, passes=3)


def cross_evidence(operator: Certifiable, plan: Plan, epsilon: Epsilon) -> PlanEvidence:
    """Compute the numbers of a cross term, with its rows updated but for the unresolved ones."""
    sums, constraints, (rows, columns) = plan.sums, plan.constraints, plan.sides
    logs, unscaled = row_update(operator, plan, epsilon)
    updated_f = plan.f + epsilon * logs
    to = constraints.translated(operator.a, updated_f, operator.b, plan.g)
    returned = to.f.to(operator.passes.dtype), to.g.to(operator.passes.dtype)
    both = torch.cat((sums.rows, sums.columns), -1)
    before = torch.cat((plan.f, plan.g), -1).masked_fill_(plan.absent, 0)
    held = torch.cat((to.f, to.g), -1).masked_fill_(plan.absent, 0)
    # Row sums of the plan of f and g, and of that which is scaled until its rows are what they owe.
    own = constraints.rows.owed(operator.a, updated_f)
    updated_rows = torch.where(unscaled, sums.rows, own)
    kappa = fitting_scale(plan.owed, plan.absent, both, sums.relative_error)
    total = sums.rows.sum(-1)
    # A mass that is not far above the underflow bound is not scaled up.
    scalable = total.clamp_min(max(SCALABLE * sums.underflow, TINY))
    reached, owed_rows, fit, share = to.adjusted(updated_rows, own, kappa, scalable)
    owed_columns = constraints.columns.owed(operator.b, to.g)
    owed = torch.cat((owed_rows, owed_columns), -1)
    # Sizes of costs are those of two potentials of one plan: before the translation, as g is.
    errors = errors_of(operator, plan, updated_f, updated_rows, epsilon)
    growth = _growth(plan, both, errors, held - torch.cat(returned, -1), epsilon)
    updated = torch.cat((reached, owed_columns), -1)
    filling = filling_of(operator, plan.masses, plan.absent, owed, both, fit)
    row_oscillation, column_oscillation = oscillations(held, plan.absent, rows, columns)
    numbers = CrossNumbers(
        kappa=kappa,
        mass=sums.columns.sum(-1),
        unresolved=(plan.masses * plan.unresolved).sum(-1),
        total=total,
        moved=distance(sums.rows, reached),
        missed=distance(sums.columns, owed_columns),
        scaled_gap=updated_gap(both, updated, share),
        row_gap=distance(reached, owed_rows),
        factor=logs.amax(-1).exp_(),
        row_growth=dot(updated_rows, growth[..., rows]),
        column_growth=dot(sums.columns, growth[..., columns]),
        largest_growth=growth[..., columns].amax(-1),
        linear=dot(plan.masses, constraints.dual(held, rows)),
        updated=updated_rows.sum(-1),
        # |phi(f)| is at most |f| times the larger of 1 and e^(-f / rho).
        size=dot(torch.maximum(plan.masses, owed), held.abs()),
        linear_before=dot(both, before),
        missing_rows=filling.rows,
        missing_columns=filling.columns,
        filling_costs=filling.costs,
        filling_entropy=filling.entropy,
        row_oscillation=row_oscillation,
        column_oscillation=column_oscillation,
        mean_error=dot(owed, plan.cost_errors),
        row_error=plan.cost_errors[..., rows].amax(-1),
        column_error=plan.cost_errors[..., columns].amax(-1),
    )
    vectors = both, before, owed, held, updated_f, updated_rows - sums.rows
    given = plan, numbers, vectors, returned
    more = () if to.factors is None else _cross_penalties(*given, to.factors, epsilon)
    told = torch.stack((*numbers[:-1], *more), -1)
    return PlanEvidence(*returned, told, sums, plan.passes)


def _cross_penalties(
    plan: Plan,
    numbers: CrossNumbers,
    vectors: tuple[Tensor, ...],
    returned: tuple[Tensor, Tensor],
    factors: Factors,
    epsilon: Epsilon,
) -> tuple[Tensor, ...]:
    """Compute the `Penalties` of a cross term.

    Args:
        plan: as it was evaluated.
        numbers: of the plan.
        vectors: (n + m,) of both sides: sums, potentials, masses owed, potentials after the update
            and the translation; and (n,) potentials of rows after the update alone, and by how much
            it moves row sums.
        returned: f (n,) and g (m,) in the type of the result.
        factors: of that translation.
        epsilon: regularisation.
    """
    constraints, (rows, columns) = plan.constraints, plan.sides
    sums, before, owed, held, updated, changed = vectors
    relative = plan.sums.relative_error
    masses, reached, potentials = (
        [each[..., side] for side in (rows, columns)] for each in (plan.masses, sums, before)
    )
    least = SCALABLE * plan.sums.underflow
    primal, most = constraints.primal(masses, reached, potentials, epsilon, relative, least)
    largest = torch.maximum(sums, torch.cat(most, -1))
    # The masses that rows owe before or after the translation, whichever are more.
    own = owed[..., rows] * torch.exp(factors.exponent.clamp_min(0))[..., None]
    size = constraints.rows.update_size(own, before[..., rows], updated, epsilon)
    exponent = factors.exponent.abs()
    tilt = factors.mass * (torch.expm1(factors.exponent) - factors.exponent)
    # The mass after the translation is as exact as its exponents.
    rounded = epsilon * (tilt + factors.mass * exponent) * (1 + exponent + factors.mass.log().abs())
    shift = numbers.updated * torch.expm1(-factors.exponent).abs()
    hidden = numbers._replace(penalties=Penalties(shift=shift)).noise
    sides = (constraints.rows, rows), (constraints.columns, columns)
    misstated = [
        _misstated(kind, plan.masses[..., side], owed[..., side], held[..., side], potential)
        for (kind, side), potential in zip(sides, returned, strict=True)
    ]
    return Penalties(
        owed=factors.mass,
        price=numbers.linear - dot(owed, held),
        shift=shift,
        moved=changed.abs().sum(-1),
        tilt=tilt,
        fit=factors.fit,
        primal=primal,
        open_error=dot(largest, plan.cost_errors) + epsilon * hidden,
        moving=numbers.updated,
        surely=_surely(numbers.updated, hidden, relative),
        misstated=torch.maximum(*misstated),
        wanted=plan.owed[..., columns].sum(-1),
        size=dot(sums, before.abs()) + size + rounded,
        uneven=_uneven(numbers, factors.mass, epsilon),
        swing=torch.ones_like(tilt) * (1 + epsilon * constraints.columns.softness),
    )


def _misstated(
    kind: Marginal, masses: Tensor, owed: Tensor, held: Tensor, returned: Tensor
) -> Tensor:
    """Bound the L1 distance, (...), of a side's owed masses from those of its returned potential.

    Its potential was `held` (..., k) before it was rounded. Owed masses are off by some units in
    the last place of float64 itself, and by those of their exponent.
    """
    apart = distance(kind.owed(masses, returned.double()), owed)
    return apart + DOUBLE_UNIT * dot(owed, 4 + kind.softness * held.abs())


def _surely(moving: Tensor, hidden: Tensor, relative: float) -> Tensor:
    """Return the least, (...), that a plan moves, of which errors hide so much.

    It is at least half of what it moves: where errors hide more the plan is refused.
    """
    return torch.maximum((1 - 2 * relative) * moving - hidden, moving / 2)


def _uneven(numbers: CrossNumbers, mass: Tensor, epsilon: Epsilon) -> Tensor:
    """Bound the cost, (), of a filling whose rows miss another mass than its columns.

    After the translation both owe the same `mass` (), as far as t / rho tells. A side that is
    relaxed may get the mass that the other misses: its mean cost, its penalty's slope and its
    logarithms.
    """
    u, v = (numbers.missing_rows.abs(), numbers.missing_columns.abs())
    less = torch.minimum(u, v).clamp_min(TINY)
    logs = numbers.filling_entropy.abs() / less - 2 * less.log() + 4
    largest = numbers.size / mass + numbers.row_oscillation + numbers.column_oscillation
    mean = numbers.filling_costs.abs() / less / torch.maximum(u, v).clamp_min(TINY)
    added: Tensor = (u - v).abs() * (mean + largest + epsilon * logs)
    return added


def self_evidence(operator: Certifiable, plan: Plan, epsilon: Epsilon) -> PlanEvidence:
    """Compute the numbers of a self term from the plan of one potential, at its best level."""
    a, sums, rows = operator.a, plan.sums, plan.sums.rows
    marginal = plan.constraints.rows
    returned, held = plan.f.to(operator.passes.dtype), plan.f.masked_fill(plan.absent, 0)
    growth = _growth(plan, rows, plan.errors, held - returned, epsilon)
    costs, errors = sums.own_costs, plan.cost_errors
    assert costs is not None
    if sums.cost_rounding:
        errors = (errors + sums.cost_rounding * costs.abs()).masked_fill_(plan.absent, 0)
    diagonal = diagonal_of(a, held, costs, epsilon)
    spread = errors / (epsilon / 4)
    (oscillation,) = oscillations(held, plan.absent, *plan.sides)
    outside = off_diagonal_sums(diagonal, rows, sums.relative_error, spread)
    numbers = SelfNumbers(
        missed=distance(rows, plan.owed),
        mass=rows.sum(-1),
        unresolved=(plan.masses * plan.unresolved).sum(-1),
        growth=dot(rows, growth),
        linear=dot(a, marginal.dual(held)),
        row_size=dot(torch.maximum(a, plan.owed), held.abs()),
        oscillation=oscillation,
        balancing=balancing(plan.owed, plan.absent, diagonal, outside),
        row_error=dot(plan.owed, plan.cost_errors),
        largest_error=plan.cost_errors.amax(-1),
    )
    more = () if plan.constraints.exact else _self_penalties(plan, numbers, returned, epsilon)
    told = torch.stack((*numbers[:-1], *more), -1)
    return PlanEvidence(returned, returned, told, sums, plan.passes)


def _self_penalties(
    plan: Plan, numbers: SelfNumbers, returned: Tensor, epsilon: Epsilon
) -> tuple[Tensor, ...]:
    """Compute the `Penalties` of a self term."""
    rows, relative, owed = plan.sums.rows, plan.sums.relative_error, plan.owed.sum(-1)
    held = plan.f.masked_fill(plan.absent, 0)
    off = torch.full_like(rows[..., :1], 2 * relative)
    charged = plan.constraints.rows.charged(plan.masses, rows, held, (-off, off))
    names = "price", "shift", "moved", "tilt", "fit", "uneven"
    unread = dict.fromkeys(names, torch.zeros_like(owed))
    return Penalties(
        owed=owed,
        **unread,
        primal=2 * charged + epsilon * (1 - numbers.mass),
        open_error=2 * dot(rows, plan.cost_errors) + epsilon * numbers.noise,
        moving=numbers.mass,
        surely=_surely(numbers.mass, numbers.noise, relative),
        misstated=_misstated(plan.constraints.rows, plan.masses, plan.owed, held, returned),
        wanted=owed,
        size=2 * dot(rows, held.abs()),
        swing=torch.ones_like(owed) * (1 + epsilon * plan.constraints.rows.softness),
    )


def _growth(plan: Plan, sums: Tensor, errors: Tensor, rounding: Tensor, epsilon: Epsilon) -> Tensor:
    """Return `growth_of` (k,) with A plus the rounding of potentials; A is 0 if unresolved."""
    return growth_of(sums, errors.masked_fill(plan.unresolved, 0) + rounding.abs(), epsilon)


class Penalties(NamedTuple):
    """Numbers of a plan with relaxed marginals; the defaults are those of exact ones.

    Attributes:
        owed: the mass mu of p and of q, of the translated potentials.
        price: rho_x KL(p | a) + rho_y KL(q | b) + <p, f> + <q, g> - <a, f> - <b, g>, which is
            <a, phi(f)> + <b, phi(g)> - <p, f> - <q, g>.
        shift: by how much the row sums of the plan of these potentials are off p, all one way.
        moved: by how much the update of rows, without the translation, moves their sums.
        tilt: mu (1 / s - 1 + log s) for the factor s that makes them p.
        fit: the factor that makes kappa P fit p and q.
        primal: primal value of the plan as it was evaluated; infinite if it is not admissible.
        open_error: the effect that errors of costs may have on it and on the dual value.
        moving: the mass that the plan moves.
        surely: the least that the plan of the returned potentials moves, to which marginal errors
            are relative.
        misstated: by how much a side owes more or less at the returned potentials, the most.
        wanted: the mass that columns owe, before the translation.
        size: of potentials, whose rounding `CrossNumbers.size` does not know of.
        uneven: addition to the primal value of the filled plan, as the mass that its rows miss is
            known to be that of its columns up to rounding.
        swing: 1 + epsilon / rho_y. Potentials g* whose plan has what g owes are softmins of costs
            plus epsilon log(q / b), so that osc g + osc g* is at most that times osc g, plus R.
    """

    owed: Any = 1.0
    price: Any = 0.0
    shift: Any = 0.0
    moved: Any = math.inf
    tilt: Any = 0.0
    fit: Any = 1.0
    primal: Any = math.inf
    open_error: Any = 0.0
    moving: Any = 1.0
    surely: Any = 1.0
    misstated: Any = 0.0
    wanted: Any = 1.0
    size: Any = 0.0
    uneven: Any = 0.0
    swing: Any = 1.0


class CrossNumbers(NamedTuple):
    """Numbers of a cross term's plan with sums r and c, before and after the update of its rows.

    Exact marginals owe p = a and q = b, at any potentials.

    Attributes:
        kappa: the largest factor <= 1 with which no row or column exceeds what it owes, before.
        mass: sum of c, before.
        unresolved: mass of the unresolved points, of which errors may hide all.
        total: sum of r, before.
        moved: sum_i r_i |s_i - 1| for the factors s that make rows p, the change of the row sums.
        missed: ||c - q||_1, before.
        scaled_gap: a bound on that after.
        row_gap: ||r - p||_1, after.
        factor: max s.
        row_growth: <r, `solver.evidence.growth_of`>, after.
        column_growth: <c, growth>, before.
        largest_growth: of a column.
        linear: the part of the dual of marginals, <a, phi(f)> + <b, phi(g)>, after.
        updated: sum of r, after.
        size: <a, |f|> + <b, |g|>, after.
        linear_before: <r, f> + <c, g>, before.
        missing_rows: `Filling.rows` of kappa P, before.
        missing_columns: `Filling.columns` of kappa P, before.
        filling_costs: `Filling.costs` of kappa P, before.
        filling_entropy: `Filling.entropy` of kappa P, before.
        row_oscillation: max f - min f, after.
        column_oscillation: max g - min g, after.
        mean_error: of costs, <p, A> + <q, B>.
        row_error: max A.
        column_error: max B.
        penalties: of relaxed marginals.
    """

    kappa: Any
    mass: Any
    unresolved: Any
    total: Any
    moved: Any
    missed: Any
    scaled_gap: Any
    row_gap: Any
    factor: Any
    row_growth: Any
    column_growth: Any
    largest_growth: Any
    linear: Any
    updated: Any
    size: Any
    linear_before: Any
    missing_rows: Any
    missing_columns: Any
    filling_costs: Any
    filling_entropy: Any
    row_oscillation: Any
    column_oscillation: Any
    mean_error: Any
    row_error: Any
    column_error: Any
    penalties: Penalties = Penalties()

    @property
    def filling(self) -> Filling[Any]:
        """The filling of kappa P up to its marginals."""
        return Filling(
            self.missing_rows, self.missing_columns, self.filling_costs, self.filling_entropy
        )

    @property
    def column_gap(self) -> Any:
        """A bound on ||c - q||_1 after the update."""
        return lesser(self.moved + self.missed, self.scaled_gap)

    @property
    def gap(self) -> Any:
        """A bound on the larger of the marginal errors after the update, but for `noise`."""
        shift = self.penalties.shift
        # Columns before the translation have moved by no more than rows by the update alone.
        columns = at_most(self.column_gap + shift, self.missed + self.penalties.moved)
        apart = larger(columns, self.row_gap + shift)
        return (apart + self.penalties.misstated) / self.penalties.surely

    @property
    def noise(self) -> Any:
        """The marginal error that errors of costs may hide, a bound."""
        moved = self.moved + self.penalties.shift
        columns = undetectable_after_update(
            self.column_growth / 2, self.largest_growth / 2, self.factor, moved
        )
        return (self.row_growth / 2 + self.unresolved + columns) / self.penalties.surely

    def dual(self, epsilon: float) -> Any:
        """Return the dual value after the update."""
        return dual_value(self.linear, self.updated, epsilon)

    def upper(self, costs: CostFacts, sums: Marginals, epsilon: float) -> float:
        """Return the lesser upper bound for the perturbed costs, on the host."""
        relative, penalties = sums.relative_error, self.penalties
        owed, fit = penalties.owed, self.kappa * penalties.fit
        spread = perturbed_spread(costs, sums, self.row_error + self.column_error)
        found = [penalties.primal]
        if fit > 0:
            plan_cost = fit * (self.linear_before + epsilon * math.log(fit) * self.total)
            retained = fit * min(self.total, self.mass)
            filled: float = filled_value(self.filling, plan_cost, retained, epsilon, owed)
            filled += filled_slack(relative, self.size, spread * max(1.0, owed), epsilon)
            found.append(filled + penalties.price + penalties.uneven)
        if self.row_gap == 0:
            dual, osc = self.dual(epsilon), self.column_oscillation * penalties.swing
            slack = oscillation_slack(relative, self.row_oscillation + osc, spread) * max(1.0, owed)
            moved = oscillation_bound(dual, self.column_gap, osc, spread)
            found.append(moved + epsilon * penalties.tilt + slack)
        # NaN bounds nothing.
        return min((bound for bound in found if not math.isnan(bound)), default=math.inf)

    def needs_refinement(self, unit: float, scaled: float = 0.0) -> Any:
        """Return whether to evaluate the plan once more.

        It is if a point is unresolved, or rounding of the potentials, of this unit, is visible:
        kappa is less than it explains. A scaling by up to `scaled` is accepted.
        """
        wanted = at_least(self.penalties.wanted, LEAST_MASS)
        most = MOST_SCALED * (1 - self.mass / wanted) + SCALED_UNITS * unit
        return (self.unresolved > 0) | (1 - (self.kappa + scaled) > most)


class SelfNumbers(NamedTuple):
    """Numbers of a self term's plan, made symmetric and given mass 1, with sums r.

    Attributes:
        missed: ||r - p||_1.
        mass: sum of r.
        unresolved: mass of the unresolved points, of which errors may hide all.
        growth: <r, `solver.evidence.growth_of`>.
        linear: <a, phi(f)>.
        row_size: <a, |f|>.
        oscillation: max f - min f.
        balancing: see `solver.evidence.balancing`.
        row_error: of costs, <p, A>.
        largest_error: max A.
        penalties: of relaxed marginals.
    """

    missed: Any
    mass: Any
    unresolved: Any
    growth: Any
    linear: Any
    row_size: Any
    oscillation: Any
    balancing: Any
    row_error: Any
    largest_error: Any
    penalties: Penalties = Penalties()

    @property
    def gap(self) -> Any:
        """The marginal error, but for `noise`."""
        return (self.missed + self.penalties.misstated) / self.penalties.surely

    @property
    def size(self) -> Any:
        """<a, |f|> of both sides."""
        return 2 * self.row_size

    @property
    def mean_error(self) -> Any:
        """<p, A> of both sides."""
        return 2 * self.row_error

    @property
    def noise(self) -> Any:
        """The marginal error that errors of costs may hide, on both sides."""
        return (self.growth + 2 * self.unresolved) / self.penalties.surely

    def dual(self, epsilon: float) -> Any:
        """Return the dual value at f on both sides."""
        return dual_value(2 * self.linear, self.mass, epsilon)

    def upper(self, costs: CostFacts, sums: Marginals, epsilon: float) -> float:
        """Return the lesser upper bound for the perturbed costs, on the host."""
        spread, owed = perturbed_spread(costs, sums, 2 * self.largest_error), self.penalties.owed
        # The primal value of the plan that is balanced on its diagonal.
        found = [self.penalties.primal, 2 * self.linear + epsilon * (self.balancing + (1 - owed))]
        if 0.5 * owed < self.mass < 2 * owed:
            # Both marginals have the same mass.
            dual, osc = self.dual(epsilon), self.oscillation * self.penalties.swing
            slack = oscillation_slack(sums.relative_error, 2 * osc, spread) * max(1.0, owed)
            found.append(oscillation_bound(dual, 2 * self.missed, osc, spread) + slack)
        # NaN bounds nothing.
        return min((bound for bound in found if not math.isnan(bound)), default=math.inf)

    def needs_refinement(self, unit: float) -> Any:
        """Return whether to evaluate the plan once more: a point is unresolved."""
        return self.unresolved > 0


# The numbers of a plan: tensors () or (B,) on the device, floats once the host has read them.
PlanNumbers = CrossNumbers | SelfNumbers
AnyNumbers = TypeVar("AnyNumbers", CrossNumbers, SelfNumbers)


def read_numbers(kind: type[AnyNumbers], numbers: Sequence[Any]) -> AnyNumbers:
    """Return the numbers as `PlanEvidence` has them, with those of relaxed marginals, if any."""
    own = len(kind._fields) - 1
    return kind(*numbers[:own])._replace(penalties=Penalties(*numbers[own:]))


class Plan(NamedTuple):
    """A plan whose entries were evaluated once.

    Vectors (k,) have an entry for each point: k = n + m in a cross term, rows before columns, and
    k = n in a self term.

    Attributes:
        f: (n,) potential of rows, float64.
        g: (m,) potential of columns, float64.
        sums: of the plan.
        masses: (k,).
        absent: (k,) bool, the points without mass.
        cost_errors: (k,) errors of costs as in `sums`, 0 where there is no mass.
        errors: (k,) A and B of `solver.evidence`, 0 where there is no mass.
        unresolved: (k,) bool, the points with mass whose error bound exceeds epsilon / 2: errors of
            costs may be as large as all of their mass. None if a marginal is relaxed: it owes a
            distant point little, and would owe a point of a lower potential more.
        constraints: exact or relaxed marginals.
        owed: (k,) masses that marginals owe, at these potentials.
        passes: evaluations of `Operator.marginals`.
    """

    f: Tensor
    g: Tensor
    sums: Marginals
    masses: Tensor
    absent: Tensor
    cost_errors: Tensor
    errors: Tensor
    unresolved: Tensor
    constraints: Constraints
    owed: Tensor
    passes: int = 1

    @property
    def sides(self) -> list[slice]:
        """The slices of rows and, in a cross term, of columns in vectors (k,)."""
        n, total = self.f.shape[-1], self.masses.shape[-1]
        return [slice(n), slice(n, total)][: 1 + (total > n)]


def check_mass(costs: CostFacts, mass: float, epsilon: float) -> None:
    """Refuse a plan with a mass, or a dual value, that is not finite.

    Raises:
        EpsilonOutOfRange: it overflows.
    """
    if not math.isfinite(mass):
        raise EpsilonOutOfRange(
            "some costs are too far above the mean at {given}: rounding alone makes the plan's "
            f"mass overflow; raise {{name}}{or_double(costs.dtype)} or leave out points that "
            "are far from all others",
            epsilon,
        )


def cross_plan(
    operator: Certifiable,
    f: Tensor,
    g: Tensor,
    epsilon: Epsilon,
    constraints: Constraints = EXACT,
    *,
    accurate: bool,
) -> Plan:
    """Evaluate the plan of f (n,) and g (m,), float64."""
    sums = operator.marginals(f, g, epsilon, accurate=accurate)
    masses = torch.cat((operator.a, operator.b), -1)
    absent, owed = masses == 0, constraints.owed(masses, f, g)
    errors = torch.cat((sums.row_errors, sums.column_errors), -1).masked_fill_(absent, 0)
    # Errors of stored costs need the rest of the plan, and unresolved points need all errors.
    plan = Plan(f, g, sums, masses, absent, errors, errors, absent, constraints, owed)
    errors = errors_of(operator, plan, f, sums.rows, epsilon)
    return plan._replace(errors=errors, unresolved=find_unresolved(errors, epsilon, constraints))


def self_plan(
    operator: Certifiable,
    f: Tensor,
    epsilon: Epsilon,
    constraints: Constraints = EXACT,
    *,
    accurate: bool,
) -> Plan:
    """Evaluate the plan of f (n,) and f, made symmetric, and given mass 1 by a constant.

    With relaxed marginals `Marginal.level` gives the constant, and the plan gets the mass that it
    then owes. A mass that is not far above the underflow bound stays as it is.
    """
    sums = operator.marginals(f, None, epsilon, accurate=accurate)
    row_errors, column_errors = sums.row_errors, sums.column_errors
    rows, marginal = (sums.rows + sums.columns) / 2, constraints.rows
    total = rows.sum(-1, keepdim=True)
    level = marginal.level(total, operator.a, f, epsilon)
    level = level.masked_fill(total < SCALABLE * sums.underflow, 1)
    f, rows = f - epsilon / 2 * level.log(), rows / level
    largest, absent = torch.maximum(row_errors, column_errors), operator.a == 0
    cost_errors = errors = largest.masked_fill(absent, 0)
    if sums.cost_rounding:
        sizes = _sizes(operator, f, f, rows, epsilon, constraints)
        x, y = (sums.cost_rounding * each for each in sizes)
        errors = torch.maximum(row_errors + x, column_errors + y).masked_fill_(absent, 0)
    sums = sums._replace(rows=rows, columns=rows, row_errors=largest, column_errors=largest)
    unresolved, owed = find_unresolved(errors, epsilon, constraints), marginal.owed(operator.a, f)
    told = operator.a, absent, cost_errors, errors, unresolved, constraints, owed
    return Plan(f, f, sums, *told)


def errors_of(
    operator: Certifiable, plan: Plan, f: Tensor, rows: Tensor, epsilon: Epsilon
) -> Tensor:
    """Return A and B (n + m,) of a plan whose f (n,) and row sums (n,) were replaced by these."""
    if not plan.sums.cost_rounding:
        return plan.cost_errors
    sizes = torch.cat(_sizes(operator, f, plan.g, rows, epsilon, plan.constraints), -1)
    return plan.cost_errors + plan.sums.cost_rounding * sizes.masked_fill_(plan.absent, 0)


def _sizes(
    operator: Certifiable,
    f: Tensor,
    g: Tensor,
    rows: Tensor,
    epsilon: Epsilon,
    constraints: Constraints,
) -> tuple[Tensor, Tensor]:
    """Return (n,) and (m,) whose sums bound |C_ij| in a plan of these potentials and row sums.

    A cost is f_i + g_j less epsilon times the exponent e. As P_ij <= r_i, e <= log(r_i / a_i) -
    log b_j; where it is negative, |e| exp(e) < 1, which is little beside a mass of 1. Unspecified
    where there is no mass.
    """
    above = (rows / operator.a).log().clamp_min(0) + 1
    if not constraints.exact:
        # Of less mass |e| exp(e) is at most that for e < -K alone, with K = -2 log(mass): 2 x
        # exp(-2 x) <= exp(-x) for x = -log(mass). It is nowhere above 1 / e = 0.367...
        mass = rows.sum(-1, keepdim=True)
        above = above + torch.where(mass < 0.36, -2 * mass.log(), 0)
    return f.abs() + epsilon * above, g.abs() - epsilon * operator.b.log()


def find_unresolved(errors: Tensor, epsilon: Epsilon, constraints: Constraints = EXACT) -> Tensor:
    """Return where 2 A_i > epsilon, (k,) bool, which is nowhere if a marginal is relaxed.

    Errors are 0 where there is no mass.
    """
    return errors > epsilon / 2 if constraints.exact else torch.zeros_like(errors, dtype=torch.bool)


def row_update(operator: Certifiable, plan: Plan, epsilon: Epsilon) -> tuple[Tensor, Tensor]:
    """Scale rows to what they owe, but unresolved ones and sums near the underflow bound.

    Returns:
        The logarithms of factors (n,), and which rows are not scaled (n,) bool.
    """
    rows, place = plan.sums.rows, plan.sides[0]
    unscaled = (rows <= SCALABLE * plan.sums.underflow * operator.a) | plan.unresolved[..., place]
    logs = plan.constraints.rows.log_factors(operator.a, rows, plan.f, epsilon)
    return logs.masked_fill_(unscaled, 0), unscaled


def lowered(potential: Tensor, plan: Plan, side: slice, sums: Tensor, epsilon: Epsilon) -> Tensor:
    """Lower a potential (n,) until unresolved points send at most a_i exp(-2 A_i / epsilon).

    That is with errors. `sums` (n,) are those at the given potential.
    """
    errors, masses = plan.errors[..., side], plan.masses[..., side]
    drop = 4 * errors + epsilon * excess(sums, masses)
    return torch.where(plan.unresolved[..., side], potential - drop, potential)


def excess(part: Tensor, masses: Tensor) -> Tensor:
    """Return log(r_i / a_i) where it is positive, else 0."""
    return torch.where(part > masses, (part / masses).log(), 0)
