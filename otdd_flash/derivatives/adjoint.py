"""Adjoints of a solved plan: derivatives of functions of the plan or its potentials by the inputs.

Everything is written in terms of the plan's density e with respect to a b^T,

    e_ij = exp((f_i + g_j - C_ij) / epsilon),    P_ij = a_i e_ij b_j,
    q = e b,  p = e^T a,                         r = a o q,  c = b o p,

so that nothing is divided by a mass of 0: the potential of a point without mass is the softmin of
the others', and its row or column of e is the conditional plan that this potential defines. At the
optimum q and p are 1. After an earlier stop they are held fixed: what is differentiated is the
problem whose masses are r and c.

The adjoint of any such function is a weight M_ij for each cost C_ij, see `cost_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.cost.points import equal_masses
from otdd_flash.derivatives.dense_plan import dense_plan
from otdd_flash.derivatives.direct import is_small
from otdd_flash.derivatives.schur import CGOptions, SchurSystem, Solver
from otdd_flash.derivatives.solved_gradient import report_system
from otdd_flash.errors import InputError
from otdd_flash.operators.base import Factors, KeptPlan, Operator, Plan, Products
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import all_finite
from otdd_flash.solver.schedules.base import Schedule

# Bytes that a stored plan, and a preconditioner, may take; a larger plan is recomputed in every
# product.
MOST_HELD = 1 << 28


class Entries:
    """Products with the density e and the plan P of two potentials, float64.

    Args:
        masses: a (n,) and b (m,).
        plan: makes the plan from potentials that points without mass have as well: with the masses
            a and b, or called with False with equal masses, by which products are then divided.
        epsilon: regularisation, in units of the cost.

    Attributes:
        a: (n,) masses.
        b: (m,) masses.
        whole: whether all masses are positive.
        plan: with these masses if all are positive, else with equal ones.
        masses: those of the plan, (n,) and (m,).
    """

    def __init__(
        self, masses: tuple[Tensor, Tensor], plan: Callable[[bool], Plan], epsilon: float
    ) -> None:
        self.a, self.b = masses
        self._epsilon = epsilon
        self.whole = bool(torch.cat(masses).amin() > 0)
        self.plan = plan(self.whole)
        self.masses = masses
        if not self.whole:
            self.masses = equal_masses(self.a), equal_masses(self.b)

    @classmethod
    def of(cls, comparison: Comparison, f: Tensor, g: Tensor) -> Entries:
        """Build the products for the cross term of two clouds."""
        source, target = comparison.sides("xy")

        def plan(weighted: bool) -> Plan:
            given = comparison
            if not weighted:
                equal = (replace(side, weights=None) for side in (source, target))
                given = comparison.with_points(*equal)
            found = dense_plan(given, "xy", f, g)
            return found or held_plan(given.operator("xy"), f, g, comparison.epsilon)

        return cls((source.masses, target.masses), plan, comparison.epsilon)

    def times(
        self, values: Tensor, factors: Factors | None = None, weights: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return e V (n, k) for V (m, k), or (e o A B^T) V.

        With weights w (m,), the products with w o V, side by side.
        """
        left, right = self.masses
        return self.plan.times(_weighted(values, weights, right), factors).div_(left[:, None])

    def transposed_times(
        self, values: Tensor, factors: Factors | None = None, weights: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return e^T U (m, k) for U (n, k), or (e o A B^T)^T U; weights (n,) as in `times`."""
        left, right = self.masses
        found = self.plan.transposed_times(_weighted(values, weights, left), factors)
        return found.div_(right[:, None])

    @cached_property
    def q(self) -> Tensor:
        """Sums e b (n,)."""
        if self.whole:
            return self.plan.rows / self.a
        found = self.times(self.b[:, None])[:, 0]
        check_sums(found[self.a == 0], self._epsilon)
        return found

    @cached_property
    def p(self) -> Tensor:
        """Sums e^T a (m,)."""
        if self.whole:
            return self.plan.columns / self.b
        found = self.transposed_times(self.a[:, None])[:, 0]
        check_sums(found[self.b == 0], self._epsilon)
        return found

    def solve(
        self, s: Tensor | None, t: Tensor, cg: CGOptions, options: Schedule
    ) -> tuple[Tensor, Tensor]:
        """Solve r o w1 + P w2 = s, P^T w1 + c o w2 = t for w1 (n,) and w2 (m,); 0 without mass.

        Without s it is 0, and t must be at most of the size of c. Return NaN if s or t are not
        finite.

        Raises:
            ConvergenceError: `options` require convergence, and the system was not solved.
        """
        products = self._products
        near = self.plan.quick if self.whole else products
        system = rounded = SchurSystem(products, cg.damping, MOST_HELD)
        if near is not products:
            rounded = SchurSystem(near, cg.damping, MOST_HELD)
        right, taken = t[:, None], None
        if s is not None:
            taken = products.transposed_times(system.by_row * s[:, None])
            right = right - taken
        solver = Solver(system, rounded, cg)
        found = solver.directly(right)
        if found is None:
            if not all_finite(right):
                return torch.full_like(self.a, torch.nan), torch.full_like(t, torch.nan)
            if taken is not None:
                # For a plan that is a permutation only rounding is left: it counts as 0.
                rounding = products.precision * (t.abs()[:, None] + taken.abs())
                right = torch.where(right.abs() > rounding, right, 0)
                first, right = _first_step(products, system, right, cg)
            found = solver.by_iterations(right)
            report_system(found, options)
            if taken is not None:
                found = found._replace(values=found.values + first)
        w1 = products.times(found.values).mul_(-system.by_row)
        if s is not None:
            w1 += system.by_row * s[:, None]
        return w1[:, 0], found.values[:, 0]

    @property
    def _products(self) -> Products:
        if self.whole:
            return self.plan
        if not isinstance(self.plan, KeptPlan):
            return _Weighted(self)
        rows, columns = (
            side / of_plan for side, of_plan in zip((self.a, self.b), self.masses, strict=True)
        )
        return KeptPlan((self.plan.entries * rows[:, None]).mul_(columns))

    @property
    def small(self) -> Tensor | None:
        """The entries of the plan (n, m) if it is stored and small, else None."""
        plan = self.plan
        return plan.entries if isinstance(plan, KeptPlan) and is_small(plan.entries.shape) else None


def _first_step(
    products: Products, system: SchurSystem, right: Tensor, cg: CGOptions
) -> tuple[Tensor, Tensor]:
    """Return the solution (m, 1) of the diagonal part, and the right-hand side (m, 1) that remains.

    Residuals are scaled by the masses, so that an entry much larger than a small mass of its point
    would outweigh all others. What remains, P^T (P first / r), is of the size of the masses.
    """
    metric = system.metric
    first = metric.inverse * metric.in_range(right) / (1 + cg.damping)
    images = products.times(torch.cat((first, first.abs()), 1))
    moved = products.transposed_times(system.by_row * images)
    rest, rounding = metric.in_range(moved[:, :1]), products.precision * moved[:, 1:]
    return first, torch.where(rest.abs() > rounding, rest, 0)


def held_plan(operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> Plan:
    """Return the plan of f (n,) and g (m,) on the `refined` form of an operator."""
    return operator.refined.plan(f, g, epsilon, MOST_HELD).prepared


def check_sums(sums: Tensor, epsilon: float) -> None:
    """Check the row sums q of e (n,), by which conditional plans are divided.

    They are 1 up to rounding where the potential is a softmin, or the solve has converged.

    Raises:
        InputError: a sum underflows or overflows, as the rounding of that point's costs is far
            above epsilon.
    """
    if not bool(((sums > 0) & sums.isfinite()).all()):
        raise InputError(
            f"epsilon={epsilon:g} is too small for the costs of points of little or no mass: "
            "rounding alone decides where their plan sends them; raise epsilon, set "
            "precision=double or leave those points out"
        )


class _Weighted:
    """P as a product of masses and e, where some masses are 0."""

    half_products = None

    def __init__(self, entries: Entries) -> None:
        self._entries, self.precision = entries, entries.plan.precision
        self.rows, self.columns = entries.a * entries.q, entries.b * entries.p

    def times(self, values: Tensor) -> Tensor:
        """Return P V (n, k)."""
        return self._entries.a[:, None] * self._entries.times(self._entries.b[:, None] * values)

    def transposed_times(self, values: Tensor) -> Tensor:
        """Return P^T U (m, k)."""
        entries = self._entries
        return entries.b[:, None] * entries.transposed_times(entries.a[:, None] * values)


def _weighted(values: Tensor, weights: Sequence[Tensor], masses: Tensor) -> Tensor:
    """Return w o V / masses for every weight w, side by side; V / masses without weights."""
    if not weights:
        return values / masses[:, None]
    if len(weights) == 1 and weights[0] is masses:
        return values
    count = values.shape[1]
    found = values.new_empty((len(values), count * len(weights)))
    for part, weight in zip(torch.split(found, count, 1), weights, strict=True):
        torch.mul(values, (weight / masses)[:, None], out=part)
    return found


def potentials_everywhere(comparison: Comparison, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Replace potentials of points without mass by softmins of the others."""
    a, b = (side.masses for side in comparison.sides("xy"))
    if bool((a > 0).all()) and bool((b > 0).all()):
        return f, g
    operator = comparison.operator("xy", keep_scores=False).refined
    return (
        torch.where(a > 0, f, operator.softmin_rows(g, comparison.epsilon)),
        torch.where(b > 0, g, operator.softmin_columns(f, comparison.epsilon)),
    )
