"""The L1 marginal error of returned potentials, exact but for a stated rounding."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from experiments.exact_families.problem import Floats, Integers, Problem, Side
from experiments.exact_families.transport import Extended, extended

# Above this many pairs a plan that does not collapse is not summed.
MOST_PAIRS = 1 << 22
# Points above which exponentials are taken in float64.
MOST_EXTENDED = 1 << 17


def marginal_error(
    problem: Problem, term: str, f: Tensor, g: Tensor, epsilon: float
) -> tuple[float, float] | None:
    """The larger L1 error of rows and columns, and a bound on its own; None where too dear."""
    left, right = problem.sides(term)
    potentials = [one.detach().cpu().double().numpy() for one in (f, g)]
    costs = problem.costs(term)
    if len(costs) == 1:
        return _collapsed(left, right, potentials[0], potentials[1], costs[0], epsilon)
    if len(left.samples) * len(right.samples) > MOST_PAIRS:
        return None
    return _dense(left, right, potentials[0], potentials[1], costs, epsilon)


def _collapsed(
    left: Side, right: Side, f: Floats, g: Floats, cost: Extended, epsilon: float
) -> tuple[float, float]:
    """From sums per atom: n + m exponentials, and no n m of them.

    Points of an atom may differ in their potentials, so row i of atom k has the sum

        a_i exp(f_i / epsilon) sum_l exp(-C_kl / epsilon) M_l,

    where M_l is the sum of b_j exp(g_j / epsilon) over the points j of atom l.
    """
    rows, columns = left.factors[0].index, right.factors[0].index
    one = _atom_logs(left.masses, f, rows, len(cost), epsilon)
    other = _atom_logs(right.masses, g, columns, cost.shape[1], epsilon)
    scaled = cost / np.longdouble(epsilon)
    row_logs = _logsumexp(other[None, :] - scaled)
    column_logs = _logsumexp(one[None, :] - scaled.T)
    errors = (
        _l1(left.masses, f, row_logs[rows], epsilon),
        _l1(right.masses, g, column_logs[columns], epsilon),
    )
    large = max(len(f), len(g)) > MOST_EXTENDED
    return max(errors), _slack(left, right, f, g, float(np.abs(cost).max()), epsilon, large)


def _dense(
    left: Side, right: Side, f: Floats, g: Floats, costs: list[Extended], epsilon: float
) -> tuple[float, float]:
    """All pairs, rows in blocks, float64."""
    rows = np.empty(len(f))
    columns = np.zeros(len(g))
    step = max(1, (1 << 18) // len(g))
    pairs = list(zip(left.factors, right.factors, costs, strict=True))
    for start in range(0, len(f), step):
        part = slice(start, start + step)
        cost = sum(
            (c.astype(np.float64)[one.index[part]][:, other.index] for one, other, c in pairs),
            start=np.zeros((len(f[part]), len(g))),
        )
        with np.errstate(over="ignore"):
            plan = np.exp((f[part, None] + g - cost) / epsilon)
        rows[part] = left.masses[part] * (plan @ right.masses)
        columns += left.masses[part] @ plan
    errors = (np.abs(rows - left.masses).sum(), np.abs(columns * right.masses - right.masses).sum())
    highest = sum(float(np.abs(c).max()) for c in costs)
    return float(max(errors)), _slack(left, right, f, g, highest, epsilon, True)


def _atom_logs(masses: Floats, f: Floats, index: Integers, atoms: int, epsilon: float) -> Extended:
    """Log of the sum of a_i exp(f_i / epsilon) over the points of every atom."""
    logs = np.full(atoms, -np.inf, dtype=np.longdouble)
    for k in range(atoms):
        chosen = (index == k) & (masses > 0)
        if chosen.any():
            values, highest = _kind(f[chosen]) / _number(f, epsilon), f[chosen].max()
            top = np.longdouble(highest) / np.longdouble(epsilon)
            logs[k] = top + np.log(
                (_kind(masses[chosen]) * np.exp(values - values.max())).sum(dtype=np.longdouble)
            )
    return logs


def _l1(masses: Floats, f: Floats, logs: Extended, epsilon: float) -> float:
    kept = masses > 0
    exponents = _kind(f[kept]) / _number(f, epsilon) + logs[kept].astype(_kind(f).dtype)
    with np.errstate(over="ignore"):
        return float((_kind(masses[kept]) * np.abs(np.expm1(exponents))).sum())


def _kind(values: Floats) -> Extended | Floats:
    return extended(values) if len(values) <= MOST_EXTENDED else values


def _number(values: Floats, epsilon: float) -> np.longdouble | float:
    return np.longdouble(epsilon) if len(values) <= MOST_EXTENDED else epsilon


def _logsumexp(logs: Extended) -> Extended:
    highest = logs.max(1)
    total = np.exp(logs - np.where(np.isfinite(highest), highest, 0)[:, None]).sum(1)
    found: Extended = highest + np.log(total)
    return found


def _slack(
    left: Side, right: Side, f: Floats, g: Floats, cost: float, epsilon: float, double: bool
) -> float:
    """A unit of rounding per operand of an exponent, and what masses lack of a sum of 1."""
    unit = 2.0**-52 if double else 2.0**-62
    support = [one[side.masses > 0] for one, side in ((f, left), (g, right))]
    exponent = (sum(float(np.abs(one).max()) for one in support) + cost) / epsilon
    return unit * (4 * exponent + 100) + left.deviation + right.deviation
