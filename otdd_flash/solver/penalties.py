"""The arguments `unbalanced` and `unbalanced_relative`: the relaxed marginals that users ask for.

Entry points call `refuse_unbalanced` before costs are computed, and `resolve_constraints` once the
mean cost is known; its `Constraints` (`formulas.marginals`) go to the solver with the cost.
`MatrixComparison.with_penalties`, `batched.plans`, `study.measures.distances` and loaded results
call `resolve_constraints` too. `solver.solve`, `solver.small.route` and `batched.plans` refuse
penalties `beyond_digits`. A change must keep that solvers read `Constraints` alone. Results and
their files hold `penalties_of` under the key `unbalanced`, in units of the cost, so its form must
stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from otdd_flash.cost.facts import CostFacts, larger
from otdd_flash.errors import InputError
from otdd_flash.formulas.marginals import EXACT, Constraints, Exact, Marginal, RelaxedByKL
from otdd_flash.solver.schedules import Schedule

# One penalty of both sides, or one of each; None is an exact marginal.
Unbalanced = float | Sequence[float | None]

# Penalties in units of the cost. Potentials are of the size of a small one, in float32 too; a large
# one is taken as a float64 times epsilon.
LEAST_PENALTY, MOST_PENALTY = 1e-30, 1e100

# Most penalties, in units of the largest cost: e^(-f / rho) is 1 to all digits of float64 beyond.
MOST_COSTS = 1e15


def refuse_unbalanced(
    unbalanced: Unbalanced | None,
    relative: Unbalanced | None,
    options: Schedule,
    *,
    debias: bool = False,
    ground: str = "sqeuclidean",
) -> None:
    """Refuse penalties that cannot be used, before costs are computed.

    Args:
        unbalanced: penalties, in units of the cost.
        relative: penalties, as multiples of the mean cost.
        options: how terms are solved.
        debias: whether there are self terms.
        ground: the cost between features.

    Raises:
        InputError: both are given, they differ while self terms are subtracted, or the schedule
            or the ground cost `inner` is for exact marginals alone.
    """
    if unbalanced is not None and relative is not None:
        raise InputError(
            "give unbalanced or unbalanced_relative, one of them; got both, "
            f"unbalanced={shown_penalties(unbalanced)} and unbalanced_relative="
            f"{shown_penalties(relative)}"
        )
    if unbalanced is None and relative is None:
        return
    one, other = sides = _sides(unbalanced if relative is None else relative)
    if one is None and other is None:
        return
    if options.exact_alone:
        raise InputError(options.exact_alone)
    if debias and one != other:
        raise InputError(
            "debiased values with two different penalties are not known to be positive; give one "
            f"number in the place of {shown_penalties(sides)}, or set debias=false"
        )
    if ground == "inner":
        raise InputError(
            "unbalanced needs costs of which 0 is the least; ground=inner has costs of any sign, "
            "use ground=sqeuclidean or ground=cosine"
        )


def resolve_constraints(
    unbalanced: Unbalanced | None, relative: Unbalanced | None, mean_cost: Callable[[], float]
) -> Constraints:
    """Return the constraints on both marginals, of arguments that `refuse_unbalanced` has passed.

    Args:
        unbalanced: rho or [rho_x, rho_y], in units of the cost; None is exact.
        relative: the same as multiples of the mean cost.
        mean_cost: computes the mean cost; called for `relative` alone.

    Raises:
        InputError: `relative` with a mean cost that is not positive, or a penalty out of the range
            of numbers.
    """
    if unbalanced is None and relative is None:
        return EXACT
    sides, unit = _sides(unbalanced if relative is None else relative), 1.0
    if sides == (None, None):
        return EXACT
    if relative is not None:
        unit = mean_cost()
        if not unit > 0:
            raise InputError(
                f"unbalanced_relative needs a positive mean cost; here it is {unit:g}: set "
                "unbalanced"
            )
    name = "unbalanced" if relative is None else "unbalanced_relative"
    return Constraints(*(_marginal(penalty, unit, name) for penalty in sides))


def refuse_beyond_digits(constraints: Constraints, costs: CostFacts, epsilon: float) -> None:
    """Refuse penalties so far above all costs that float64 does not hold what potentials owe.

    Raises:
        InputError: a penalty is more than 1e15 times the largest cost and epsilon.
    """
    if beyond_digits(constraints, larger(costs.largest, epsilon)):
        raise InputError(beyond_digits_text(constraints))


def beyond_digits(constraints: Constraints, largest: float | Tensor) -> Any:
    """Return whether float64 does not hold what potentials owe at these penalties.

    Args:
        constraints: exact or relaxed marginals.
        largest: of the costs and epsilon; a tensor (B,) of many problems, then so is the answer.
    """
    return _largest_penalty(constraints) > MOST_COSTS * largest


def beyond_digits_text(constraints: Constraints) -> str:
    """Return the sentence that refuses penalties `beyond_digits`."""
    return (
        f"a penalty of {_largest_penalty(constraints):g} is more than {MOST_COSTS:g} times the "
        "largest cost and epsilon; leave unbalanced out, or give None for that side: at such a "
        "penalty marginals are exact to rounding"
    )


def _largest_penalty(constraints: Constraints) -> float:
    sides = constraints.rows, constraints.columns
    return max((float(side.rho) for side in sides if not side.exact), default=0.0)


def penalties_of(constraints: Constraints) -> list[float | None] | None:
    """Return [rho_x, rho_y] in units of the cost, as files have them; None if both are exact."""
    if constraints.exact:
        return None
    sides = constraints.rows, constraints.columns
    return [None if side.exact else float(side.rho) for side in sides]


def _sides(given: Unbalanced | None) -> tuple[float | None, float | None]:
    if given is None or isinstance(given, int | float):
        return given, given
    one, other = given
    return one, other


def _marginal(penalty: float | None, unit: float, name: str) -> Marginal:
    """Return the marginal of a penalty in some unit.

    Raises:
        InputError: potentials, which are of the size of a small penalty, would vanish in the least
            precise type, or the penalty is too large for a number.
    """
    if penalty is None:
        return Exact()
    rho = penalty * unit
    if rho < LEAST_PENALTY:
        raise InputError(
            f"{name}={penalty:g} is a penalty of {rho:g}, and potentials as small as this vanish; "
            f"it has to be at least {LEAST_PENALTY:g}: raise {name}, or multiply all costs"
        )
    if rho > MOST_PENALTY:
        raise InputError(
            f"{name}={penalty:g} is a penalty of {rho:g}, which is out of range; leave it out, as "
            "marginals are exact without it"
        )
    return RelaxedByKL(rho)


def penalties_text(penalties: list[float | None] | None) -> str:
    """Return what a line of text says of `penalties_of` before what follows; "" of exact ones."""
    return "" if penalties is None else f"unbalanced={shown_penalties(penalties)}, "


def shown_penalties(given: Unbalanced) -> str:
    """Return penalties as text: one number, or both between brackets, null for exact."""
    if isinstance(given, int | float):
        return f"{given:g}"
    return f"[{', '.join('null' if each is None else f'{each:g}' for each in given)}]"
