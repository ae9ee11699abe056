"""How a function of a solved plan, or of its potentials, changes with what the plan was solved for.

Everything is said in the entries without masses,

    e_ij = exp((f_i + g_j - C_ij) / epsilon),    P_ij = a_i e_ij b_j,
    q = e b,  p = e^T a,                         r = a o q,  c = b o p,

of which no mass of 0 divides anything: the potential of a point without mass is the softmin of the
others', and its row or column of e is the conditional plan that this defines. At the optimum q and
p are 1. Where the solve was stopped earlier they are held: what is differentiated is the problem
whose masses are r and c.

Whatever is asked for, the plan answers by a weight for each of its costs,

    dL/dC = M,    M_ij = e_ij (A_i . B_j b_j + h_i b_j + a_i k_j),

of which x, y, the class distances and both lambdas see M V and M^T U alone:

    dL/dx = 2 lambda_x ((M 1) o x - M y)         dL/dlambda_x = sum_ij M_ij ||x_i - y_j||^2
    dL/dy = 2 lambda_x ((M^T 1) o y - M^T x)     dL/dlambda_y = sum_ij M_ij W[l_i, l_j]
    dL/dW[k, l] = lambda_y sum of M over the pairs of classes k, l.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.operators.base import Operator, refined
from otdd_flash.operators.build import build_operator, class_indices
from otdd_flash.operators.plan import Factors, Plan, Products, plan_of
from otdd_flash.solver.centred import less_origin, origin_near
from otdd_flash.solver.conjugate_gradients import inverse
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schur import CGOptions, SchurSystem, solve
from otdd_flash.solver.solved_gradient import report_system

# Bytes of a plan that is held; a larger one is evaluated anew for every product.
MOST_HELD = 1 << 28


class Entries:
    """Products with e and with P of two potentials, float64.

    Args:
        masses: a (n,) and b (m,).
        operator: makes the operator, on the `refined` form of which products run: of these masses,
            or called with False of any that are positive, by which products are then divided.
        potentials: f (n,) and g (m,), of points without mass as well.
        epsilon: regularisation, in units of the cost.

    Attributes:
        a: (n,) masses.
        b: (m,) masses.
        whole: whether all masses are positive.
        plan: of the operator.
    """

    def __init__(
        self,
        masses: tuple[Tensor, Tensor],
        operator: Callable[[bool], Operator],
        potentials: tuple[Tensor, Tensor],
        epsilon: float,
    ) -> None:
        self.a, self.b = masses
        self.whole = bool((self.a > 0).all()) and bool((self.b > 0).all())
        self._epsilon = epsilon
        exact = refined(operator(self.whole))
        self._masses = exact.a[:, None], exact.b[:, None]
        self.plan: Plan = plan_of(exact, *potentials, epsilon, MOST_HELD)

    @classmethod
    def of(cls, problem: Problem, f: Tensor, g: Tensor) -> Entries:
        """Of the cross term of two clouds."""
        inputs = problem.inputs("xy")

        def operator(weighted: bool) -> Operator:
            sides = inputs.source, inputs.target
            if not weighted:
                sides = replace(sides[0], weights=None), replace(sides[1], weights=None)
            return build_operator(replace(inputs, source=sides[0], target=sides[1]))

        masses = inputs.source.masses, inputs.target.masses
        return cls(masses, operator, (f, g), problem.epsilon)

    def times(
        self, values: Tensor, factors: Factors | None = None, weights: Sequence[Tensor] = ()
    ) -> Tensor:
        """The product e V (n, k) for V (m, k), or (e o A B^T) V.

        With weights (m,) that of w o V, side by side for several of them.
        """
        left, right = self._masses
        return self.plan.times(_weighted(values, weights, right), factors).div_(left)

    def transposed_times(
        self, values: Tensor, factors: Factors | None = None, weights: Sequence[Tensor] = ()
    ) -> Tensor:
        """The product e^T U (m, k) for U (n, k), or (e o A B^T)^T U; weights (n,) as above."""
        left, right = self._masses
        return self.plan.transposed_times(_weighted(values, weights, left), factors).div_(right)

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
        self, s: Tensor, t: Tensor, cg: CGOptions, options: Schedule
    ) -> tuple[Tensor, Tensor]:
        """Both w1 (n,) and w2 (m,) with r o w1 + P w2 = s and P^T w1 + c o w2 = t; 0 at no mass.

        Where s or t are not finite, NaN.

        Raises:
            ConvergenceError: `options` require convergence, and the system was not solved.
        """
        if not bool(s.isfinite().all() & t.isfinite().all()):
            return torch.full_like(s, torch.nan), torch.full_like(t, torch.nan)
        products: Products = self.plan if self.whole else _Weighted(self)
        near = self.plan.quick if self.whole else products
        per_row = inverse(products.rows)[:, None]
        taken = products.transposed_times(per_row * s[:, None])
        right = t[:, None] - taken
        # Of a permutation nothing else is left, and no direction of it is to be trusted.
        rounding = products.precision * (t.abs()[:, None] + taken.abs())
        right = torch.where(right.abs() > rounding, right, 0)
        system = SchurSystem(products, cg.damping)
        rounded = system if near is products else SchurSystem(near, cg.damping)
        found = solve(system, rounded, right, cg)
        report_system(found, options)
        w1 = per_row * (s[:, None] - products.times(found.values))
        return w1[:, 0], found.values[:, 0]


def check_sums(sums: Tensor, epsilon: float) -> None:
    """Refuse sums of rows of e (n,) by which conditional plans cannot be divided.

    They are 1 but for rounding where the potential is a softmin, or the solve has converged.

    Raises:
        InputError: the costs of such a point are rounded by so much more than epsilon that its sum
            underflows or overflows.
    """
    if not bool(((sums > 0) & sums.isfinite()).all()):
        raise InputError(
            f"epsilon={epsilon:g} is too small for the costs of points of little or no mass: "
            "rounding alone decides where their plan sends them; raise epsilon, set "
            "precision=double or leave those points out"
        )


class _Weighted:
    """P as a product of masses and e, where some masses are 0."""

    ways = None

    def __init__(self, entries: Entries) -> None:
        self._entries, self.precision = entries, entries.plan.precision
        self.rows, self.columns = entries.a * entries.q, entries.b * entries.p

    def times(self, values: Tensor) -> Tensor:
        """P V (n, k)."""
        return self._entries.a[:, None] * self._entries.times(self._entries.b[:, None] * values)

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (m, k)."""
        entries = self._entries
        return entries.b[:, None] * entries.transposed_times(entries.a[:, None] * values)


def _weighted(values: Tensor, weights: Sequence[Tensor], masses: Tensor) -> Tensor:
    """All w o V over masses (m, 1), side by side, of values V (m, k); V itself without weights."""
    if not weights:
        return values / masses
    count = values.shape[1]
    found = values.new_empty((len(values), count * len(weights)))
    for part, weight in zip(torch.split(found, count, 1), weights, strict=True):
        torch.mul(values, weight[:, None] / masses, out=part)
    return found


class CostWeights:
    """M of the head of this file.

    Args:
        entries: e, with a and b.
        h: (n,) float64, as is what follows.
        k: (m,).
        factors: A (n, r) and B (m, r), if there are any.
    """

    def __init__(
        self, entries: Entries, h: Tensor, k: Tensor, factors: Factors | None = None
    ) -> None:
        self._entries, self._factors = entries, factors
        self._h, self._k = h, k

    def times(self, values: Tensor) -> Tensor:
        """M V (n, j)."""
        entries, b = self._entries, self._entries.b
        of_b, of_k = entries.times(values, weights=(b, self._k)).chunk(2, 1)
        found = torch.addcmul(self._h[:, None] * of_b, entries.a[:, None], of_k)
        del of_b, of_k
        if self._factors is not None:
            found += entries.times(values, self._factors, (b,))
        return found

    def transposed_times(self, values: Tensor) -> Tensor:
        """M^T U (m, j)."""
        entries, b = self._entries, self._entries.b[:, None]
        of_h, of_a = entries.transposed_times(values, weights=(self._h, entries.a)).chunk(2, 1)
        found = torch.addcmul(b * of_h, self._k[:, None], of_a)
        del of_h, of_a
        if self._factors is not None:
            found += entries.transposed_times(values, self._factors).mul_(b)
        return found


def cost_gradient(
    problem: Problem, weights: CostWeights, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Derivatives by "x", "y", "classes" and both lambdas, those of them that are needed, float64.

    "classes" is the table (V_x + V_y, V_x + V_y), 0 outside of the block [x, y].
    """
    inputs = problem.inputs("xy")
    gradient: dict[str, Tensor] = {}
    source, target = inputs.source, inputs.target
    clouds = ((side.features, side.masses) for side in (source, target))
    origin = origin_near(clouds, torch.float64)
    # Made where they are used: nothing takes more memory than products, which need one of them.
    x, y = (partial(less_origin, side.features, origin) for side in (source, target))
    factor, dim = 2 * inputs.cost.squared.lambda_x, source.features.shape[1]
    by_class = bool(needs & {"classes", "lambda_y"})
    if needs & {"x", "lambda_x"} or by_class:
        parts: list[Callable[[], Tensor]] = [lambda: torch.ones_like(target.masses)[:, None]]
        if needs & {"x", "lambda_x"}:
            parts.append(y)
        if by_class:
            classes = inputs.class_distances.shape[1]
            belonging = partial(torch.nn.functional.one_hot, class_indices(target), classes)
            parts.append(lambda: belonging().double())
        found = weights.times(torch.cat([part() for part in parts], 1))
        rows, moved = found[:, :1], found[:, 1 : 1 + dim]
        if "x" in needs:
            gradient["x"] = factor * (rows * x() - moved)
        if by_class:
            block = torch.zeros_like(inputs.class_distances)
            block.index_add_(0, class_indices(source), found[:, -classes:])
            gradient["lambda_y"] = (block * inputs.class_distances).sum()
            table = block.new_zeros(problem.table.shape)
            table[problem.classes["x"], problem.classes["y"]] = inputs.cost.lambda_y * block
            gradient["classes"] = table
    if needs & {"y", "lambda_x"}:
        ones = torch.ones_like(source.masses)[:, None]
        back = weights.transposed_times(torch.cat((ones, x()), 1) if "y" in needs else ones)
        if "y" in needs:
            gradient["y"] = factor * (back[:, :1] * y() - back[:, 1:])
        if "lambda_x" in needs:
            of_squares = (rows * x().square()).sum() + (back[:, :1] * y().square()).sum()
            gradient["lambda_x"] = of_squares - 2 * (x() * moved).sum()
    return gradient


def potentials_everywhere(problem: Problem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The same where there is mass, and elsewhere the softmins of those."""
    inputs = problem.inputs("xy")
    a, b = inputs.source.masses, inputs.target.masses
    if bool((a > 0).all()) and bool((b > 0).all()):
        return f, g
    operator = refined(build_operator(inputs, keep_scores=False))
    return (
        torch.where(a > 0, f, operator.softmin_rows(g, problem.epsilon)),
        torch.where(b > 0, g, operator.softmin_columns(f, problem.epsilon)),
    )
