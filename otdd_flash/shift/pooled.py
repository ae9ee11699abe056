"""The statistic T of pooled rows, for many permutations at once, and its permutation test.

    T(a, b) = OT(a, b) - OT(a, a) / 2 - OT(b, b) / 2,    a, b >= 0 on the N pooled rows

Every permutation of rows between two sides is a problem (a, b) of the same costs C (N, N), with
mass 0 on the rows of the other side: costs and kernels are stored once, only masses differ. With

    K_ij = exp((f0_i + f0_j - C_ij) / epsilon)

a step of Sinkhorn's iteration of B problems is one product K @ (N, B). f0 is a potential of the
pooled rows, so that scalings of all problems are moderate. For self terms it is that of the self
term of all rows; for cross terms, in which no row meets itself, that of the same term without its
diagonal. Rows without mass cost a product at least four times the work that gathered kernels (B, n,
m) of sides of n and m rows take, but those are read from memory in every step and are slower on
processors and GPUs alike.

Bounds need the same products. Potentials (f, g) after a step of columns have a plan P = a b exp((f
+ g - C) / epsilon) with exact columns, so <a, f> + <b, g> + epsilon (1 - sum P) is a lower bound.
With s = min(1, a / P 1) the plan diag(s) P is below both marginals; the remainders r of rows and c
of columns, each of sum delta, make it a plan of exact marginals, diag(s) P + r c^T / delta
(Altschuler, Weed & Rigollet 2017), whose primal value is an upper bound. Its logarithms are those
of potentials, so no entry of P is formed, and by the log-sum inequality KL of the sum is at most

    KL(diag(s) P) + KL(r c^T / delta) - delta log delta - (1 - delta) log(1 - delta).

All is float64. A problem is solved alone by `matrix_transport` if its scalings leave the range of
float64, as with outliers at a tiny epsilon, or if MOST_STEPS steps of its cross term do not decide
it.

Permutation k of a seed must be the same whatever is computed beside it, and hits are counted in the
order drawn, not in that of finishing. A hit is a permutation whose T is not proven to be below that
of the rows as they are: upper(T_k) >= lower(T). There are at least as many of them as permutations
with T_k >= T, so

    p = (1 + hits) / (1 + B)

is valid: P(p <= alpha) <= alpha for exchangeable units, at any size. With an early end after h hits
p = h / l at the l-th permutation, if that is the h-th hit (Besag & Clifford 1991, Sequential Monte
Carlo p-values).

`shift.joint` and `shift.parts` make a `PooledCost` and call `permutation_test`; `shift.parts` also
calls `label_test` and reads `potentials`, and `shift.effect` calls `statistics` and `transport`. A
change must keep bounds and p-values valid (`tests/shift/test_shift.py`,
`experiments.shift_validity`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from itertools import starmap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import Progress
from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.shift.rows import Mask, PooledRows
from otdd_flash.solver.matrix.result import MatrixTransport
from otdd_flash.solver.matrix.transport import matrix_transport
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.term import UnreachableTolerance

# Width of bounds over the mean cost at which any solve ends; self terms, which converge fast, do.
LEAST_WIDTH = 1e-6
# Width over T where potentials are read, whose error is of first order.
POTENTIALS_WIDTH = 1e-6
# Problems side by side, bounded by the bytes of one array of theirs.
MOST_PROBLEMS, MOST_BYTES = 256, 1 << 28
# Steps after which bounds are evaluated first, and the most steps.
FIRST_LOOK, MOST_STEPS = 6, 1100
# Logarithms of scalings, of both sides together, up to which the loss of K by underflow is below
# exp(600 - 745) of the mass; and the least product that counts as positive.
MOST_LOG, TINY = 600.0, 1e-300
STABILISING_STEPS = 6
UNIT = 2.0**-53


class Until(NamedTuple):
    """When a problem is done.

    Attributes:
        width: stop when the bounds of T differ by at most this, over the value.
        threshold: stop also when T is proven to be at or above this number, or below it, and its
            bounds differ by at most `decided_width`.
        decided_width: over the value; a value that is only proven to be on one side of the
            threshold may be far off.
    """

    width: float = 1e-4
    threshold: float = math.nan
    decided_width: float = math.inf


CONVERGED = Until()


class Statistics(NamedTuple):
    """Values of T of B problems with bounds, each (B,) float64 on the CPU.

    Attributes:
        value: by dual values, whose error is of second order; within the bounds.
        lower: a lower bound of T.
        upper: an upper bound of T.
    """

    value: Tensor
    lower: Tensor
    upper: Tensor


class Term(NamedTuple):
    """State of B problems of one term: bounds (B,) and logarithms of scalings (N, B)."""

    lower: Tensor
    upper: Tensor
    log_u: Tensor
    log_v: Tensor


class PooledCost:
    """Costs between N pooled rows, stored with their kernels, at one epsilon.

    Args:
        cost: C (N, N) float64, symmetric.
        masses: (N,) positive, sum 1: of the pooled rows.
        epsilon: in units of the cost, or None.
        relative: epsilon over the mean cost of the pooled rows, in its place. Where all costs are 0
            any epsilon gives 0.

    Attributes:
        mean: the mean cost of the pooled rows, the unit of effects.
    """

    def __init__(
        self, cost: Tensor, masses: Tensor, epsilon: float | None, relative: float | None
    ) -> None:
        masses = masses.to(cost.device)
        self.cost, self.mean = cost, max(0.0, float(masses @ (cost @ masses)))
        self.epsilon = epsilon = epsilon or (relative or 0.0) * self.mean or 1.0
        # Where all costs are 0, epsilon is the only scale.
        self._least_width = LEAST_WIDTH * (self.mean or epsilon)
        self._largest = float(cost.abs().max())
        self._own_base = _stabiliser(cost, masses, epsilon)
        self._own = _kernel(cost, self._own_base, epsilon)
        apart = cost.clone().fill_diagonal_(torch.inf)
        self._cross_base = _stabiliser(apart, masses, epsilon)
        self._cross = _kernel(apart, self._cross_base, epsilon)

    def __len__(self) -> int:
        return len(self.cost)

    @property
    def batch(self) -> int:
        """How many problems are solved side by side."""
        return max(1, min(MOST_PROBLEMS, MOST_BYTES // (8 * len(self))))

    def statistics(self, a: Tensor, b: Tensor, until: Until = CONVERGED) -> Statistics:
        """Compute T of B problems.

        Args:
            a: (N, B) masses of one side, of sum 1.
            b: (N, B) masses of the other side, on other rows.
            until: when a problem is done.
        """
        return Statistics(*self._solved(a, b, until, debias=True))

    def transport(self, a: Tensor, b: Tensor, width: float) -> Tensor:
        """Return OT(a, b) of B problems (N, B) on different rows, (B,) float64 on the CPU.

        Args:
            a: (N, B) masses of one side, of sum 1.
            b: (N, B) masses of the other side, on other rows.
            width: of bounds at which a problem is done, over the value.
        """
        return self._solved(a, b, Until(width=width), debias=False)[0]

    def _solved(self, a: Tensor, b: Tensor, until: Until, *, debias: bool) -> Tensor:
        """Return value and bounds (3, B) of T, or without `debias` of OT(a, b), on the CPU."""
        found, parts = [], (torch.split(side, self.batch, 1) for side in (a, b))
        for one, other in zip(*parts, strict=True):
            if debias:
                own = self._self_terms(one, other)
            else:
                # No self terms are taken off.
                nothing = one.new_zeros(2 * one.shape[1])
                own = Term(nothing, nothing, nothing, nothing)
            numbers = self._cross_terms(one, other, own, until)[0].cpu()
            for k in (~numbers.isfinite().all(0)).nonzero()[:, 0].tolist():
                x, y = one[:, k], other[:, k]
                pairs = ((x, y), (x, x), (y, y)) if debias else ((x, y),)
                cross, *selfs = starmap(self._alone, pairs)
                # Each end takes the opposite ends of the self terms.
                ends = (cross.value, *cross.bounds), *((s.value, *s.bounds[::-1]) for s in selfs)
                factors = numbers.new_tensor((1.0, -0.5, -0.5))[: len(ends)]
                numbers[:, k] = factors @ numbers.new_tensor(ends)
            found.append(numbers)
        return torch.cat(found, 1)

    def potentials(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the potentials (N,) of one problem (N, 1): f and g, and those of self terms."""
        own = self._self_terms(a, b)
        numbers, cross = self._cross_terms(a, b, own, Until(width=POTENTIALS_WIDTH))
        if not bool(numbers.isfinite().all()):
            (a, b), (f, g, on_sides) = (a[:, 0], b[:, 0]), self.cost.new_zeros(3, len(self))
            of_both, of_a, of_b = starmap(self._alone, ((a, b), (a, a), (b, b)))
            f[a > 0], g[b > 0] = of_both.f.to(f), of_both.g.to(g)
            for side, term in ((a > 0, of_a), (b > 0, of_b)):
                on_sides[side] = (term.f + term.g).to(f) / 2
            return f, g, on_sides
        f, g = (self._cross_base + self.epsilon * part[:, 0] for part in (cross.log_u, cross.log_v))
        log_own = torch.where(b > 0, own.log_u[:, 1:], own.log_u[:, :1])[:, 0]
        return f, g, self._own_base + self.epsilon * log_own

    def _self_terms(self, a: Tensor, b: Tensor) -> Term:
        """Solve OT(a, a) and OT(b, b): 2 B problems, by averaged steps, which converge fast."""
        masses = torch.cat((a, b), 1)
        log_u = torch.zeros_like(masses)
        for step in range(1, MOST_STEPS + 1):
            log_u = (log_u - _log_sums(self._own, log_u, masses)) / 2
            if step % FIRST_LOOK == 0:
                term = self._certified(self._own, self._own_base, log_u, masses, masses)
                # An infinite bound is out of range: the problem will be solved alone.
                width = (term.upper - term.lower).nan_to_num(posinf=0.0)
                if float(width.max()) <= self._least_width:
                    break
        return term

    def _cross_terms(self, a: Tensor, b: Tensor, own: Term, until: Until) -> tuple[Tensor, Term]:
        """Solve OT(a, b) until T is decided; return value and bounds of T (3, B), and the term.

        Problems that are done leave the iterations, so the term is that of the last ones.
        """
        count = a.shape[1]
        least, most = ((end[:count] + end[count:]) / 2 for end in (own.lower, own.upper))
        found = a.new_empty(3, count)
        here = torch.arange(count, device=a.device)
        log_u, look = torch.zeros_like(a), FIRST_LOOK
        for step in range(1, MOST_STEPS + 1):
            log_v = -_log_sums(self._cross, log_u, a)
            log_u = -_log_sums(self._cross, log_v, b)
            if step < look:
                continue
            term = self._certified(self._cross, self._cross_base, log_u, a, b)
            lower, upper = term.lower - most[here], term.upper - least[here]
            found[:, here] = torch.stack((term.lower - least[here], lower, upper))
            width = upper - lower
            going = width > (until.width * lower.abs()).clamp_min(self._least_width)
            decided = (lower >= until.threshold) | (upper < until.threshold)
            going &= ~(decided & (width <= until.decided_width * lower.abs()))
            # Infinite bounds: the problem will be solved alone.
            going &= lower.isfinite() & upper.isfinite()
            if not bool(going.any()):
                break
            if not bool(going.all()):
                here, log_u, a, b = here[going], log_u[:, going], a[:, going], b[:, going]
            look = min(step + max(FIRST_LOOK, step // 2), MOST_STEPS)
        else:
            # Not decided: it will be solved alone, too.
            found[:, here] = torch.nan
        return found, term

    def _certified(self, kernel: Tensor, base: Tensor, log_u: Tensor, a: Tensor, b: Tensor) -> Term:
        """Return bounds of B terms from row potentials; infinite ones where sums leave the range.

        Args:
            kernel: K (N, N).
            base: f0 (N,).
            log_u: (N, B) logarithms of scalings of rows; those of columns follow.
            a: (N, B) masses of rows.
            b: (N, B) masses of columns.
        """
        rows, columns = a > 0, b > 0
        log_v = -_log_sums(kernel, log_u, a)
        from_u, from_v = log_u.exp() * a, log_v.exp() * b
        # P 1 / a, and the plan below both marginals.
        ratio = torch.where(rows, log_u.exp() * (kernel @ from_v), 1.0)
        scale = ratio.reciprocal().clamp_max(1.0)
        kept_rows = a * (ratio * scale)
        kept_columns = torch.where(columns, log_v.exp() * (kernel @ (scale * from_u)), 1.0) * b
        short, over = (a - kept_rows).clamp_min(0), (b - kept_columns).clamp_min(0)
        delta = torch.maximum(short.sum(0), over.sum(0)).clamp(TINY, 1 - UNIT)
        f, g = (base[:, None] + self.epsilon * part for part in (log_u, log_v))
        lower = (a * f).sum(0) + (b * g).sum(0) + self.epsilon * (1 - (a * ratio).sum(0))
        upper = (kept_rows * (f + self.epsilon * scale.log())).sum(0) + (kept_columns * g).sum(0)
        upper += (short * (self.cost @ over)).sum(0) / delta
        # xlogy(x, x / mass), 0 without mass.
        entropy = torch.xlogy(short, short / torch.where(rows, a, 1.0)).sum(0)
        entropy += torch.xlogy(over, over / torch.where(columns, b, 1.0)).sum(0)
        upper += self.epsilon * (
            entropy - 2 * delta * delta.log() - (1 - delta) * torch.log1p(-delta)
        )
        most_u, most_v = (
            torch.where(side, part, -torch.inf).amax(0)
            for side, part in ((rows, log_u), (columns, log_v))
        )
        # Sums of N positive products, of potentials times masses and of costs, each rounded.
        size = self._largest + f.abs().mul(rows).amax(0) + g.abs().mul(columns).amax(0)
        slack = 8 * (len(self) + 64) * UNIT * (size + self.epsilon)
        outside = most_u + most_v > MOST_LOG
        lower, upper = lower - slack, upper + slack
        return Term(
            torch.where(outside, -torch.inf, lower),
            torch.where(outside, torch.inf, upper),
            log_u,
            log_v,
        )

    def _alone(self, a: Tensor, b: Tensor) -> MatrixTransport:
        """Solve OT(a, b) of one problem (N,) by the library's own iterations."""
        rows, columns = a.nonzero()[:, 0], b.nonzero()[:, 0]
        with warnings.catch_warnings():
            # Bounds hold where a solve stops early.
            warnings.simplefilter("ignore", NotConvergedWarning)
            try:
                return matrix_transport(
                    self.cost[rows][:, columns],
                    a[rows],
                    b[columns],
                    epsilon=self.epsilon,
                    options=Converged(tolerance=1e-5),
                )
            except UnreachableTolerance as error:
                raise InputError(
                    f"epsilon={self.epsilon:.3g} is too small beside the largest cost, "
                    f"{self._largest:.3g}: rounding decides; raise epsilon, or leave out rows that "
                    "are far from all others"
                ) from error


def _log_sums(kernel: Tensor, log_scaling: Tensor, masses: Tensor) -> Tensor:
    """Return log K (u o a), (N, B)."""
    return (kernel @ (log_scaling.exp() * masses)).clamp_min_(TINY).log_()


def _kernel(cost: Tensor, base: Tensor, epsilon: float) -> Tensor:
    return ((base[:, None] + base - cost) / epsilon).exp_()


def _stabiliser(cost: Tensor, masses: Tensor, epsilon: float) -> Tensor:
    """Return a potential (N,) near that of OT(masses, masses), by averaged steps."""
    f = torch.zeros_like(masses)
    for _ in range(STABILISING_STEPS):
        scores = (f - cost).div_(epsilon).add_(masses.log())
        f = (f - epsilon * torch.logsumexp(scores, 1)) / 2
    return f


# Statistics that are sums of counts are equal up to this share of the larger one.
EQUAL = 1e-9
# Width of bounds over T up to which a permutation is solved once it is decided, so that the mean of
# all is that of converged values.
NULL_WIDTH = 0.05


class PermutationTest(NamedTuple):
    """A statistic among its permutations.

    Attributes:
        p_value: valid at any number of rows.
        statistic: T of the rows as they are.
        bounds: of the statistic.
        null: (l,) float64, T of the permutations in the order drawn, by dual values, whose error is
            of second order in that of the plan.
        hits: permutations whose T may be as large.
    """

    p_value: float
    statistic: float
    bounds: tuple[float, float]
    null: Tensor
    hits: int


def rejects(p_value: float, alpha: float) -> bool:
    """Return whether a p-value is at most a level; with windows it may be it up to rounding."""
    return p_value <= alpha * (1 + 1e-12)


def draws(rows: PooledRows, count: int, seed: int | tuple[int, ...], size: int) -> Iterator[Mask]:
    """Yield which units (U, k) are on the reference's side, of `count` permutations in all.

    Args:
        rows: the units that are exchanged; as many as there are stay on each side.
        count: permutations, each a uniform draw.
        seed: of the draws.
        size: k, but for the last.
    """
    generator, units = np.random.default_rng(seed), rows.unit_in_reference
    for start in range(0, count, size):
        yield np.stack([generator.permutation(units) for _ in range(min(size, count - start))], 1)


def permutation_test(
    pooled: PooledCost,
    rows: PooledRows,
    count: int,
    seed: int | tuple[int, ...],
    *,
    stop_after: int | None = None,
    null_width: float = NULL_WIDTH,
    progress: Progress | None = None,
) -> PermutationTest:
    """Compare T of the rows as they are with T of permutations.

    Args:
        pooled: costs of all rows.
        rows: the rows, their weights and units.
        count: B, the permutations drawn at most.
        seed: of the draws.
        stop_after: h, hits after which no more are drawn.
        null_width: of bounds over T, up to which decided permutations are solved; infinite where
            only hits matter.
        progress: called as progress(permutations done, B).
    """
    device = pooled.cost.device
    observed = pooled.statistics(*rows.sides(rows.unit_in_reference[:, None], device))
    threshold = float(observed.lower)
    until = Until(threshold=threshold, decided_width=null_width)
    values, hits, done = list[Tensor](), 0, 0
    size = pooled.batch if stop_after is None else min(pooled.batch, max(32, 2 * stop_after))
    for drawn in draws(rows, count, seed, size):
        found = pooled.statistics(*rows.sides(drawn, device), until)
        counted = hits + (found.upper >= threshold).cumsum(0)
        last = len(counted)
        if stop_after is not None and int(counted[-1]) >= stop_after:
            last = int((counted == stop_after).nonzero()[0]) + 1
        values.append(found.value[:last])
        hits, done = int(counted[last - 1]), done + last
        if progress is not None:
            progress(done, count)
        if hits == stop_after:
            break
    p_value = hits / done if hits == stop_after else (1 + hits) / (1 + count)
    bounds = (threshold, float(observed.upper))
    return PermutationTest(p_value, float(observed.value), bounds, torch.cat(values), hits)


def label_test(rows: PooledRows, count: int, seed: int) -> tuple[float, float]:
    """Return the p-value of class proportions alone, and Pearson's chi-square of the sides.

    With weights, the shares of the classes are those of masses. Permutations are those of the joint
    test.

    Args:
        rows: rows of one class each.
        count: permutations.
        seed: of the draws.
    """
    assert rows.labels is not None
    within = torch.nn.functional.one_hot(rows.labels).double().T
    pooled = within @ rows.samples.masses.cpu()

    def statistic(units: Mask) -> Tensor:
        """sum_c (p_c - q_c)^2 / pooled_c times n m / (n + m): Pearson's, of equal weights."""
        ours, others = rows.sides(units, within.device)
        n = (ours > 0).sum(0)
        gaps = (within @ (ours - others)).square() / pooled[:, None]
        return gaps.sum(0) * n * (len(rows) - n) / len(rows)

    observed = float(statistic(rows.unit_in_reference[:, None]))
    least = observed * (1 - EQUAL) - EQUAL
    hits = sum(int((statistic(drawn) >= least).sum()) for drawn in draws(rows, count, seed, 256))
    return (1 + hits) / (1 + count), observed
