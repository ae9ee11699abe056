"""Adjoints of a solved plan: derivatives of functions of the plan or its potentials by the inputs.

Everything is written in terms of the plan's density e with respect to a b^T,

    e_ij = exp((f_i + g_j - C_ij) / epsilon),    P_ij = a_i e_ij b_j,
    q = e b,  p = e^T a,                         r = a o q,  c = b o p,

so that nothing is divided by a mass of 0: the potential of a point without mass is the softmin of
the others', or the update that it gives, and its row or column of e is the conditional plan that
this potential defines, times q or p. At the optimum q and p are 1 for exact marginals, and for
relaxed ones exp(-f / rho) and exp(-g / rho). After an earlier stop the sums of exact marginals are
held fixed: the problem with the masses r and c is differentiated.

The adjoint of any such function is a weight for each cost,

    dL/dC = M,    M_ij = e_ij (A_i . B_j b_j + h_i b_j + a_i k_j),

with h, k, A, B of the function that is differentiated, which `potentials` gives. The derivatives by
x, y, the class distances and both lambdas need only products M V and M^T U:

    dL/dx = 2 lambda_x ((M 1) o x - M y)         dL/dlambda_x = sum_ij M_ij ||x_i - y_j||^2
    dL/dy = 2 lambda_x ((M^T 1) o y - M^T x)     dL/dlambda_y = sum_ij M_ij W[l_i, l_j]
    dL/dW[k, l] = lambda_y sum of M over the pairs of classes k, l.

`potentials` makes a `Density`, solves the linear system of the plan by it and takes the derivatives
from `cost_gradient`. `solver.matrix.gradients` uses `Density` and `potentials_everywhere`, and
computes the gradient of a given matrix itself. A change must hold for masses of 0, for relaxed
marginals and after an early stop (`tests/derivatives/test_solved_gradients.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from otdd_flash.cost.points import class_indices, equal_masses, less_origin
from otdd_flash.derivatives.centred import mean_near
from otdd_flash.derivatives.groups import Compared, masses_of
from otdd_flash.derivatives.plan_system import (
    MOST_HELD,
    CGOptions,
    PlanSystem,
    dense_plan,
    held_plan,
    is_small,
    report_unsolved,
)
from otdd_flash.errors import InputError
from otdd_flash.formulas.marginals import Constraints, Marginal
from otdd_flash.operators.base import Factors, Operator, Plan, Products, StoredPlan
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.schedules import Schedule
from otdd_flash.solver.term import TransportTerm

# The least share of its mass that a point has to move for derivatives of its potential.
LEAST_SHARE = 1e-290


class Density:
    """Products with the density e and the plan P of two potentials, float64.

    Args:
        masses: a (n,) and b (m,).
        plan: makes the plan from potentials that points without mass have as well: with the masses
            a and b, or called with False with equal masses, by which products are then divided.
        epsilon: regularisation, in units of the cost.
        constraints: exact or relaxed marginals.

    Attributes:
        a: (n,) masses.
        b: (m,) masses.
        diagonal: alpha and beta of the plan's linear system.
        whole: whether all masses are positive.
        plan: with these masses if all are positive, else with equal ones.
        masses: those of the plan, (n,) and (m,).
    """

    def __init__(
        self,
        masses: tuple[Tensor, Tensor],
        plan: Callable[[bool], Plan],
        epsilon: float,
        constraints: Constraints,
    ) -> None:
        self.a, self.b = masses
        self._epsilon, self._constraints = epsilon, constraints
        self.diagonal = constraints.diagonal(epsilon)
        self.whole = bool(torch.cat(masses).amin() > 0)
        self.plan = plan(self.whole)
        self.masses = masses
        if not self.whole:
            self.masses = equal_masses(self.a), equal_masses(self.b)

    @classmethod
    def of(cls, comparison: Comparison, f: Tensor, g: Tensor) -> Density:
        """Build the products for the cross term of two clouds."""
        source, target = comparison.sides("xy")

        def plan(weighted: bool) -> Plan:
            given = comparison
            if not weighted:
                given = comparison.unweighted(0, 1)
            found = dense_plan(given, "xy", f, g)
            return found or held_plan(given.operator("xy"), f, g, comparison.epsilon)

        masses = source.masses, target.masses
        return cls(masses, plan, comparison.epsilon, comparison.constraints)

    def times(
        self,
        values: Tensor,
        pairs: Sequence[Factors] = (),
        weights: Sequence[Tensor] = (),
        *,
        transposed: bool = False,
    ) -> Tensor:
        """Return e V (n, k) for V (m, k), or if `transposed` e^T U; see `Plan.times` for pairs.

        With weights w (m,), the products with w o V, side by side.
        """
        own, other = self.masses[::-1] if transposed else self.masses
        weighted = _weighted(values, weights, other)
        return self.plan.times(weighted, pairs, transposed=transposed).div_(own[:, None])

    @cached_property
    def q(self) -> Tensor:
        """Sums e b (n,)."""
        if self.whole:
            return self.plan.rows / self.a
        found = self.times(self.b[:, None])[:, 0]
        self._check_absent(found[self.a == 0], self._constraints.rows)
        return found

    @cached_property
    def p(self) -> Tensor:
        """Sums e^T a (m,)."""
        if self.whole:
            return self.plan.columns / self.b
        found = self.times(self.a[:, None], transposed=True)[:, 0]
        self._check_absent(found[self.b == 0], self._constraints.columns)
        return found

    def _check_absent(self, sums: Tensor, owed: Marginal) -> None:
        """Check the sums of points without mass."""
        _check_share(sums, owed)
        check_sums(sums, self._epsilon)

    def check_moving(self) -> None:
        """Check that every point of a relaxed side moves a mass that float64 holds.

        Raises:
            InputError: one does not, and how it reacts cannot be told.
        """
        # Sums of exact sides are not computed for this.
        if not self._constraints.exact:
            _check_share(self.q, self._constraints.rows)
            _check_share(self.p, self._constraints.columns)

    def solve(
        self, s: Tensor | None, t: Tensor, cg: CGOptions, options: Schedule
    ) -> tuple[Tensor, Tensor]:
        """Solve the plan's linear system for u (n,) and v (m,), as `PlanSystem.solve_both` does.

        Raises:
            ConvergenceError: `options` require convergence, and the system was not solved.
        """
        products = self._products
        quick = self.plan.quick if self.whole else products
        system = PlanSystem(products, cg, quick, diagonal=self.diagonal, most=MOST_HELD)
        u, v, iterated = system.solve_both(s, t)
        if iterated is not None:
            report_unsolved(
                iterated.residual,
                iterated.converged,
                "raise cg.tolerance or cg.max_iterations, or set precision=double",
                required=options.require_convergence,
                where="the system of the gradient",
            )
        return u, v

    @property
    def _products(self) -> Products:
        if self.whole:
            return self.plan
        if not isinstance(self.plan, StoredPlan):
            return _Weighted(self)
        rows, columns = (
            side / of_plan for side, of_plan in zip((self.a, self.b), self.masses, strict=True)
        )
        return StoredPlan((self.plan.entries * rows[:, None]).mul_(columns))

    @property
    def small(self) -> Tensor | None:
        """The entries of the plan (n, m) if it is stored and small, else None."""
        plan = self.plan
        return (
            plan.entries if isinstance(plan, StoredPlan) and is_small(plan.entries.shape) else None
        )


def _check_share(sums: Tensor, owed: Marginal) -> None:
    """Check that points of a relaxed side move a share of their masses that float64 holds.

    Raises:
        InputError: one does not, and how it reacts cannot be told.
    """
    if not (owed.exact or bool((sums > LEAST_SHARE).all())):
        raise InputError(
            f"unbalanced={float(owed.rho):g} is so far below the costs of a point that it moves "
            "less of its mass than float64 holds, and there is no derivative of its potential or "
            "image; raise unbalanced, or leave such points out"
        )


def check_sums(sums: Tensor, epsilon: float) -> None:
    """Check the row sums q of e (n,), by which conditional plans are divided.

    They are 1 up to rounding where the potential is a softmin, or exact marginals are met. That of
    a relaxed point is exp(-f / rho).

    Raises:
        InputError: a sum underflows or overflows.
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

    def __init__(self, density: Density) -> None:
        self._density, self.precision = density, density.plan.precision
        self.rows, self.columns = density.a * density.q, density.b * density.p

    def times(self, values: Tensor, *, transposed: bool = False) -> Tensor:
        """Return P V (n, k), or if `transposed` P^T U (m, k)."""
        density, own, other = self._density, self._density.a, self._density.b
        if transposed:
            own, other = other, own
        return own[:, None] * density.times(other[:, None] * values, transposed=transposed)


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


def potentials_everywhere(comparison: Compared, term: TransportTerm) -> tuple[Tensor, Tensor]:
    """Return f (n,) and g (m,) of a cross term, of points without mass updates by the others."""
    f, g, epsilon, (a, b) = term.f, term.g, term.epsilon, masses_of(comparison)
    if bool((a > 0).all()) and bool((b > 0).all()):
        return f, g
    operator: Operator
    if isinstance(comparison, Comparison):
        operator = comparison.operator("xy", keep_scores=False).refined
    else:
        operator = comparison.torch_operator("xy")
    rows, columns = comparison.constraints.rows, comparison.constraints.columns
    return (
        torch.where(a > 0, f, rows.updated(operator.softmin_rows(g, epsilon), epsilon)),
        torch.where(b > 0, g, columns.updated(operator.softmin_columns(f, epsilon), epsilon)),
    )


class CostWeights:
    """M of the module docstring: dL/dC.

    Args:
        density: e, with a and b.
        h: (n,) float64.
        k: (m,) float64.
        factors: A (n, r) and B (m, r), float64; None for 0.

    Attributes:
        density: e, with a and b.
    """

    def __init__(
        self, density: Density, h: Tensor, k: Tensor, factors: Factors | None = None
    ) -> None:
        self.density, self._factors = density, factors
        self._h, self._k = h, k

    def times(self, values: Tensor, *, transposed: bool = False) -> Tensor:
        """Return M V (n, j) for V (m, j), or if `transposed` M^T U (m, j) for U (n, j)."""
        if self._held is not None:
            return (self._held.T if transposed else self._held) @ values
        density, b = self.density, self.density.b
        # Of h_i b_j + a_i k_j.
        own, other = (self._h, density.a), (b, self._k)
        if transposed:
            own, other = other, own
        first, second = density.times(values, weights=other, transposed=transposed).chunk(2, 1)
        found = torch.addcmul(own[0][:, None] * first, own[1][:, None], second)
        del first, second
        if self._factors is not None:
            pairs = [self._factors]
            if transposed:
                found += density.times(values, pairs, transposed=True).mul_(b[:, None])
            else:
                found += density.times(values, pairs, (b,))
        return found

    @cached_property
    def _held(self) -> Tensor | None:
        """M itself (n, m) if the plan is stored and small, else None."""
        density, held = self.density, self.density.small
        if held is None:
            return None
        left, right = density.masses
        h, k = self._h / left, self._k / right
        if density.whole:
            found = h[:, None] + k
        else:
            found = torch.outer(h, density.b / right).addr_(density.a / left, k)
        if self._factors is not None:
            of_rows, of_columns = self._factors
            if not density.whole:
                of_columns = of_columns * (density.b / right)[:, None]
            found.addmm_(of_rows / left[:, None], of_columns.T)
        return found.mul_(held)


def cost_gradient(
    comparison: Comparison, weights: CostWeights, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Compute the derivatives in `needs`: by "x", "y", "classes" and both lambdas, float64.

    "classes" is the table (V_x + V_y, V_x + V_y), 0 outside of the block [x, y].
    """
    gradient: dict[str, Tensor] = {}
    ground, (source, target) = comparison.ground, comparison.sides("xy")
    # Points of x are about as far from it as from the points that the plan sends them to.
    origin = mean_near(target.features, weights.density.b)
    # Computed where they are used, as a product needs only one of them in memory.
    x, y = (partial(less_origin, side.features, origin) for side in (source, target))
    factor, dim = 2 * ground.squared.lambda_x, source.features.shape[1]
    by_class = bool(needs & {"classes", "lambda_y"})
    if needs & {"x", "lambda_x"} or by_class:
        parts: list[Callable[[], Tensor]] = [lambda: origin.new_ones((len(target), 1))]
        if needs & {"x", "lambda_x"}:
            parts.append(y)
        if by_class:
            distances = comparison.block("xy")
            classes = distances.shape[1]
            belonging = partial(torch.nn.functional.one_hot, class_indices(target), classes)
            parts.append(lambda: belonging().double())
        found = weights.times(torch.cat([part() for part in parts], 1))
        rows, moved = found[:, :1], found[:, 1 : 1 + dim]
        if "x" in needs:
            gradient["x"] = factor * (rows * x() - moved)
        if by_class:
            block = torch.zeros_like(distances)
            block.index_add_(0, class_indices(source), found[:, -classes:])
            gradient["lambda_y"] = (block * distances).sum()
            gradient["classes"] = comparison.classes.around("xy", ground.lambda_y * block)
    if needs & {"y", "lambda_x"}:
        ones = origin.new_ones((len(source), 1))
        back = weights.times(torch.cat((ones, x()), 1) if "y" in needs else ones, transposed=True)
        if "y" in needs:
            gradient["y"] = factor * (back[:, :1] * y() - back[:, 1:])
        if "lambda_x" in needs:
            of_squares = (rows * x().square()).sum() + (back[:, :1] * y().square()).sum()
            gradient["lambda_x"] = of_squares - 2 * (x() * moved).sum()
    return gradient
