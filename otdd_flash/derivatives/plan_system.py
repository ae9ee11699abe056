"""The one linear system of a plan P with marginals r and c, behind implicit and second derivatives.

    alpha diag(r) u + P v  = s
    P^T u + beta diag(c) v = t

tells how potentials and plan answer to a change of costs or masses. The factors alpha and beta are
those of `formulas.marginals`: 1 of an exact side, 1 + epsilon / rho of a relaxed one. Hessians
(`curvature`), maps and potentials (`adjoint`), given matrices (`solver.matrix.gradients`) and the
upper bound of matrices with forbidden pairs (`solver.matrix.transport`) solve it. Eliminating u =
(s - P v) / (alpha r) leaves the Schur complement

    S v = t - P^T (s / (alpha r)),      S = beta diag(c) - P^T diag(1 / (alpha r)) P.

It is symmetric and positive semi-definite, and positive definite unless alpha and beta are 1, when
constants are in its kernel; scaled by c^(-1/2) on both sides its eigenvalues lie in [beta - 1 /
alpha, beta]. For a self term, with one potential, the system is (alpha diag(r) + P) w = s; scaled
by r^(-1/2) on both sides its eigenvalues lie in [alpha - 1, alpha + 1], from alpha on for squared
distances. With damping delta the matrices are S + delta diag(c) and (alpha + delta) diag(r) + P.

With exact marginals the kernel is larger for a plan of separate blocks, whose potentials have an
undetermined offset each; `groups` finds and reports them. Right-hand sides of Hessians, maps and
plans have no part along these offsets but for rounding. Those of potentials may have one; their
system is then not solved.

A small plan is stored (`dense_plan`), and its matrix factorized, on a CPU only of fewer points
(`is_factorized`). Other systems are solved by `engine.conjugate_gradients`, preconditioned by the
masses and, where that is slow and the plan is no self term's, by a `LowRank` part. Products may be
those of a plan rounded to lower precision, with its own marginals; the residual of the plan itself
then corrects the solution (iterative refinement, Higham 2002, Accuracy and stability of numerical
algorithms).

A solution counts as converged only by a residual that was recomputed with the plan itself;
`report_unsolved` warns or raises for any other (`tests/derivatives/test_plan_system.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from otdd_flash.arguments import Count, NotNegative, Share, check_fields
from otdd_flash.engine.conjugate_gradients import (
    MANY_ROWS,
    Iterates,
    Limits,
    Metric,
    Near,
)
from otdd_flash.engine.problems import LateReader
from otdd_flash.errors import ConvergenceError, NotConvergedWarning, warn
from otdd_flash.memory import holds, stated_budget
from otdd_flash.operators.base import Operator, Plan, Products, StoredPlan
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import all_finite

if TYPE_CHECKING:
    # These need Triton.
    from otdd_flash.engine.conjugate_gradients_kernels import KernelIterates
    from otdd_flash.kernels.linear.cg_step import Image
    from otdd_flash.kernels.points.packed_points import Layout

# The factors alpha and beta of exact marginals.
EXACT = 1.0, 1.0

# Points of the smaller side, and entries, up to which a plan is stored and its systems factorized:
# 128 MiB, and as much again for the factor.
MOST_POINTS, MOST_ENTRIES = 3000, 1 << 24

# The same for a factorization on a CPU: for 1,000 points it takes as long as 100 iterations of
# conjugate gradients, of which ten are enough at an epsilon of a tenth of the mean cost.
MOST_POINTS_CPU = 512

# Bytes that a larger plan, and a preconditioner, may take where a backward pass needs them; beyond
# that the plan is recomputed in every product.
MOST_HELD = 1 << 28

# Steps of iterative refinement, at the most.
REFINEMENTS = 3

# Iterations preconditioned by the masses after which a better preconditioner pays, which takes
# products with 1,024 columns.
PATIENCE = 32

# Random vectors of a low-rank preconditioner at the most, and the fewest rows for each of them.
RANK, ROWS_PER_VECTOR = 256, 4

# Eigenvalues of A below LEAST are left to the scaling by masses. Those of I - A below UNITS times
# the precision of products are indistinguishable from 0.
LEAST, UNITS = 0.25, 64

# Matrices of RANK columns, float64, in memory at once, those of a product included.
MATRICES = 6


@dataclass(frozen=True)
class CGOptions:
    """Settings of the linear systems behind implicit and second derivatives.

    A system of at most 3,000 points on the smaller side (512 on a CPU) and 2^24 pairs is factorized
    if its plan fits in memory, whole and on one device. Conjugate gradients solve other systems,
    and those whose factorization leaves a residual above the tolerance.

    Attributes:
        tolerance: relative residual, in the norm scaled by the masses.
        max_iterations: limit of conjugate gradient iterations, for every right-hand side and
            system.
        damping: delta >= 0, for nearly singular systems. With r and c the marginals of the plan,
            delta diag(c) is added to the matrix of a cross term, delta diag(r) to that of a self
            term. It changes the solution.

    Raises:
        InputError: `tolerance` is not in (0, 1), `max_iterations` is below 1, or `damping` is
            negative.
    """

    tolerance: Share = 1e-5
    max_iterations: Count = 1000
    damping: NotNegative = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "cg.")


DEFAULTS = CGOptions()


class Solution(NamedTuple):
    """Solutions of one system with s right-hand sides.

    Attributes:
        values: (m, s) float64.
        left: (m, s), the residual of `values`, recomputed.
        residual: (s,), its norm over that of the right-hand side.
        iterations: (s,) int64, of conjugate gradients; 0 where there were none.
        converged: (s,) bool.
    """

    values: Tensor
    left: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor


class PlanSystem:
    """The linear system of one plan, solved for one set of right-hand sides after another.

    A factorization is used until it leaves a residual above the tolerance. From then on, and where
    there is none, conjugate gradients are. Right-hand sides are divided by their `largest` entries.

    If a refinement step no longer halves the recomputed residual, the rounded matrix is too far
    from the matrix, with which iterations then go on. If its steps no longer halve the residual
    either, only rounding is left, and that right-hand side is given up.

    Args:
        plan: its products.
        options: when to stop, and the damping.
        quick: products with the plan, or one near it, that are faster; `plan` if there are none.
        diagonal: alpha and beta; a symmetric plan reads the second.
        symmetric: whether the plan is symmetric and has one potential, as that of a self term.
        most: bytes that a preconditioner may take, half of free memory by default.

    Attributes:
        plan: its products.
        matrix: the matrix of the system.
    """

    def __init__(
        self,
        plan: Products,
        options: CGOptions,
        quick: Products,
        *,
        diagonal: tuple[float, float] = EXACT,
        symmetric: bool = False,
        most: int | None = None,
    ) -> None:
        damping = options.damping
        self.plan = plan
        self.matrix = PlanMatrix(plan, damping, diagonal=diagonal, symmetric=symmetric, most=most)
        self._rounded = self.matrix
        if quick is not plan:
            self._rounded = PlanMatrix(
                quick, damping, diagonal=diagonal, symmetric=symmetric, most=most
            )
        self._limits = Limits(options.tolerance, options.max_iterations)
        self._iterates: Iterates | KernelIterates | None = None
        self._factorization = self.matrix.factorization()
        # The masses alone precondition so many iterations; a low-rank part follows if needed.
        self._patience: int | None = PATIENCE
        self._preconditioner: LowRank | None = None

    def solve_both(self, s: Tensor | None, t: Tensor) -> tuple[Tensor, Tensor, Solution | None]:
        """Solve for u (n,) and v (m,), 0 without mass.

        Args:
            s: (n,) float64; None for 0, and t must be at most of the size of c then.
            t: (m,) float64.

        Returns:
            u, v, NaN if s or t are not finite, and the solution for v by conjugate gradients, None
            where there were none: a factorization meets the tolerance.
        """
        plan, by_row = self.plan, self.matrix.by_row
        right, taken, first = t[:, None], None, None
        if s is not None:
            taken = plan.times(by_row * s[:, None], transposed=True)
            right = right - taken
        found, iterated = self.directly(right), None
        if found is None:
            if not all_finite(right):
                return torch.full_like(by_row[:, 0], torch.nan), torch.full_like(t, torch.nan), None
            if taken is not None:
                # For a plan that is a permutation only rounding is left: it counts as 0.
                rounding = plan.precision * (t.abs()[:, None] + taken.abs())
                right = torch.where(right.abs() > rounding, right, 0)
                first, right = self._first_step(right)
            found = iterated = self.by_iterations(right)
            if first is not None:
                found = found._replace(values=found.values + first)
        u = plan.times(found.values).mul_(-by_row)
        if s is not None:
            u += by_row * s[:, None]
        return u[:, 0], found.values[:, 0], iterated

    def _first_step(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the solution (m, 1) of the diagonal part, and the right-hand side that remains.

        Residuals are scaled by the masses, so that an entry much larger than a small mass of its
        point would outweigh all others. The rest, P^T (P first / r), is of the size of the masses.
        """
        plan, metric = self.plan, self.matrix.metric
        first = metric.inverse * metric.in_range(right) / self.matrix.factor
        images = plan.times(torch.cat((first, first.abs()), 1))
        moved = plan.times(self.matrix.by_row * images, transposed=True)
        rest, rounding = metric.in_range(moved[:, :1]), plan.precision * moved[:, 1:]
        return first, torch.where(rest.abs() > rounding, rest, 0)

    def solve(self, right: Tensor) -> Solution:
        """Solve for right-hand sides (m, s) float64 of the matrix, in its range up to rounding."""
        return self.directly(right) or self.by_iterations(right)

    def directly(self, right: Tensor) -> Solution | None:
        """Solve by the factorization; return None without one, or if it is too inaccurate."""
        metric, factorization = self.matrix.metric, self._factorization
        if factorization is None:
            return None
        unit = largest(right, dim=0)
        right = metric.less_constants(right / unit)
        values = factorization.solve(right)
        left = right - self.matrix.times(values)
        residual = metric.size(left) / metric.size(right).clamp_min(torch.finfo(right.dtype).tiny)
        converged = residual <= self._limits.tolerance
        # One synchronization with the host, for all conditions.
        if not bool(converged.all() & factorization.sound):
            self._factorization = None
            return None
        none = torch.zeros_like(residual, dtype=torch.int64)
        return Solution(values.mul_(unit), left.mul_(unit), residual, none, converged)

    def by_iterations(self, right: Tensor) -> Solution:
        iterates, unit = self._iterates_for(right), largest(right, dim=0)
        iterates.begin(right / unit, self._near(self._rounded))
        if self._improve(iterates, self._rounded) and self._rounded is not self.matrix:
            iterates.resume(self._near(self.matrix))
            self._improve(iterates, self.matrix)
        size, now = iterates.size, iterates.now
        residual = now / size.clamp_min(torch.finfo(size.dtype).tiny)
        found = iterates.values * unit, iterates.left * unit
        return Solution(*found, residual, iterates.taken.clone(), now <= iterates.target)

    def columns_lost(self, solved: Solution) -> Tensor:
        """Return (s, m) by how much P^T u + c v falls short of t.

        It is the residual, and the shares of damping and of relaxed marginals.
        """
        added = self.matrix.factor - 1
        if added == 0:
            return solved.left.T
        return torch.addcmul(solved.left, self.matrix.metric.masses, solved.values, value=added).T

    def _iterates_for(self, right: Tensor) -> Iterates | KernelIterates:
        """Return the last solve's iterates for reuse, or new ones: in Triton where products are."""
        metric, last = self.matrix.metric, self._iterates
        if last is not None and last.values.shape == right.shape:
            return last
        if self.matrix.layout is None and self._rounded.layout is None:
            found: Iterates | KernelIterates = Iterates(metric, self._limits)
        else:
            from otdd_flash.engine.conjugate_gradients_kernels import KernelIterates

            found = KernelIterates(metric, self._limits, (len(right), right.shape[1]))
        self._iterates = found
        return found

    def _near(self, matrix: PlanMatrix) -> Near:
        return Near(matrix, self._preconditioner, self._patience)

    def _improve(self, iterates: Iterates | KernelIterates, matrix: PlanMatrix) -> bool:
        """Iterate, with a better preconditioner once that is slow; return if a target is missed."""
        missed = self._correct(iterates)
        if missed and self._patience is not None and bool((iterates.taken >= self._patience).any()):
            self._patience, self._preconditioner = None, self._rounded.preconditioner()
            iterates.resume(self._near(matrix))
            missed = self._correct(iterates)
        return missed

    def _correct(self, iterates: Iterates | KernelIterates) -> bool:
        """Refine until that no longer helps; return whether a target is missed."""
        for _ in range(1 + REFINEMENTS):
            pending, missed = iterates.wanted()
            if not pending:
                return missed
            reader = LateReader(wait=len(iterates.values) >= MANY_ROWS)
            active = None
            while active is None or any(active):
                iterates.repeat()
                active = reader.exchange(iterates.active)
            iterates.correct(self.matrix)
        return iterates.wanted()[1]


class PlanMatrix:
    """S + delta diag(c) of a plan of two clouds, or (beta + delta) diag(r) + P of a symmetric one.

    Args:
        plan: its products.
        damping: delta.
        diagonal: alpha and beta.
        symmetric: whether the plan is that of a self term.
        most: bytes that a preconditioner may take, half of free memory by default.

    Attributes:
        damping: delta.
        factor: beta + delta.
        precision: relative error of products, in the norm scaled by the masses.
    """

    def __init__(
        self,
        plan: Products,
        damping: float = 0.0,
        *,
        diagonal: tuple[float, float] = EXACT,
        symmetric: bool = False,
        most: int | None = None,
    ) -> None:
        self._plan, self.precision = plan, plan.precision
        self.damping, self._symmetric, self._most = damping, symmetric, most
        self._of_rows, self.factor = diagonal[0], diagonal[1] + damping

    @cached_property
    def metric(self) -> Metric:
        """The metric of c, or of r; the kernel of S holds constants where both factors are 1."""
        if self._symmetric:
            return Metric(self._plan.rows, constants=False)
        return Metric(self._plan.columns, constants=self._constants)

    @cached_property
    def _rows(self) -> Metric:
        """The metric of the row sums r."""
        return Metric(self._plan.rows, constants=self._constants)

    @property
    def _constants(self) -> bool:
        return self._of_rows == 1 and self.factor == 1

    @cached_property
    def by_row(self) -> Tensor:
        """1 / (alpha r) (n, 1), 0 where there is no mass."""
        inverse = self._rows.inverse
        return inverse if self._of_rows == 1 else inverse / self._of_rows

    @property
    def layout(self) -> Layout | None:
        """The packed order of the columns; None if products are not of packed points."""
        half_products = self._plan.half_products
        return None if half_products is None else half_products.layout

    @cached_property
    def _scaled_masses(self) -> Tensor:
        return self.metric.masses if self.factor == 1 else self.factor * self.metric.masses

    def times(self, values: Tensor) -> Tensor:
        """Return the product (m, s) with values (m, s)."""
        if self._symmetric:
            return torch.addcmul(self._plan.times(values), self._scaled_masses, values)
        return torch.addcmul(self._taken(values).neg_(), self._scaled_masses, values)

    def _taken(self, values: Tensor) -> Tensor:
        """Return P^T diag(1 / (alpha r)) P v (m, s)."""
        images = self._plan.times(values).mul_(self.by_row)
        return self._plan.times(images, transposed=True)

    def image(self, packed: Tensor, scales: Tensor) -> Image:
        """Return the product with values packed in float16, in the form that kernels read."""
        products = self._plan.half_products
        assert products is not None
        if self._symmetric:
            return products.image(packed, scales, self._scaled_masses)
        return products.schur_image(packed, scales, self._between, self._scaled_masses)

    @cached_property
    def _between(self) -> tuple[Tensor, Tensor]:
        """Weights between the products with P, in packed order, and with P^T."""
        assert self._plan.half_products is not None
        return self._plan.half_products.between(self.by_row[:, 0])

    def factorization(self) -> Factorization | None:
        """Factorize the matrix of a stored plan that is small enough, else return None."""
        plan = self._plan
        if not isinstance(plan, StoredPlan) or not is_factorized(plan.entries):
            return None
        own = self.metric if self._symmetric else self._rows
        factors = self._of_rows, self.factor
        return Factorization(plan.entries, own, self.metric, factors, self._symmetric)

    def preconditioner(self) -> LowRank | None:
        """Build a low-rank preconditioner, of a rank that rows and memory allow.

        None for a symmetric plan: scaled by masses, its condition is at most 2 for squared
        distances.
        """
        if self._symmetric:
            return None
        metric, constant = self.metric, self.metric.constant[:, None]
        rank = rank_for(len(constant), len(self.by_row), self._most, constant.device)
        if rank == 0:
            return None

        def times(values: Tensor) -> Tensor:
            """Return K^T K V (m, k), with constants deflated if they are in the kernel."""
            taken = metric.scale * self._taken(metric.scale * values)
            if metric.constants:
                taken -= constant * (constant.T @ values)
            return taken

        return low_rank(times, metric.scale, rank, self.precision, self.factor - 1)


class Factorization:
    """The Cholesky factorization of a `PlanMatrix` of a small stored plan P (n, m).

    Scaled by the masses on both sides, the matrices are

        alpha beta' I - K^T K,    beta' I + K,    K = diag(r)^(-1/2) P diag(c)^(-1/2),

    with beta' = beta + delta, the first times alpha. With fewer rows than columns, S v = t is
    solved for u first, with K K^T in place of K^T K:

        (alpha beta' diag(r) - P diag(1 / c) P^T) u = -P (t / c)
        v = (t - P^T u) / (beta' c)

    Where both factors are 1 the kernel of the first matrix is c^(1/2). Adding omega omega^T with
    omega = c^(1/2) / |c^(1/2)| moves that eigenvalue to 1 and changes no other: the matrix is
    positive definite and has a Cholesky factorization.

    The kernel is larger for a plan of separate blocks, or nearly so: one that is almost a
    permutation, at a small epsilon, or one of a self term with distances between classes. A pivot
    is then of the size of rounding, `sound` is false, and conjugate gradients solve instead. Points
    without mass have rows of the identity, and solutions of 0.

    Args:
        entries: P (n, m) float64.
        rows: the metric of its row sums.
        columns: the metric of its column sums.
        factors: alpha and beta'.
        symmetric: whether the matrix is that of a symmetric plan.

    Attributes:
        sound: whether it succeeded, (): positive definite by more than rounding.
    """

    def __init__(
        self,
        entries: Tensor,
        rows: Metric,
        columns: Metric,
        factors: tuple[float, float],
        symmetric: bool,
    ) -> None:
        self._entries, self._columns, (self._of_rows, self._of_columns) = entries, columns, factors
        diagonal = self._of_columns if symmetric else self._of_rows * self._of_columns
        self._by_rows = not symmetric and entries.shape[0] < entries.shape[1]
        if self._by_rows:
            entries, rows, columns = entries.T, columns, rows
        scaled = (entries * rows.scale).mul_(columns.scale.T)
        # The number of terms in the sum of each entry bounds the rounding of a pivot.
        size, terms = len(columns.masses), 1 if symmetric else len(entries)
        identity = torch.eye(size, dtype=entries.dtype, device=entries.device)
        if diagonal != 1:
            identity.mul_(diagonal)
        if symmetric:
            matrix = scaled.add_(identity)
        else:
            matrix = torch.addmm(identity, scaled.T, scaled, alpha=-1)
            if columns.constants:
                matrix.addr_(columns.constant, columns.constant)
        self._scale, self._symmetric = columns.scale, symmetric
        self._factor, failed = torch.linalg.cholesky_ex(matrix)
        rounding = (terms + size) * torch.finfo(torch.float64).eps
        self.sound = (self._factor.diagonal().amin() > rounding**0.5) & (failed == 0)

    def solve(self, right: Tensor) -> Tensor:
        """Solve for right-hand sides (m, s), float64, in the range; rows without mass are 0."""
        if not self._by_rows:
            found = self._solve(right)
            return found if self._symmetric or self._of_rows == 1 else found.mul_(self._of_rows)
        by_column = self._columns.inverse
        moved = self._solve(self._entries @ (-by_column * right))
        return by_column * (right - self._entries.T @ moved) / self._of_columns

    def _solve(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(self._scale * right, self._factor).mul_(self._scale)


class LowRank:
    """A preconditioner M^-1 = D^-1 + V V^T, symmetric and positive definite, for plans in groups.

    Scaled by the masses c, a Schur complement is I - A, A = K^T K with eigenvalues in [0, 1]. The
    few eigenvalues near 1, which make conjugate gradients slow, belong to points, or groups of
    points, that share mass with hardly any other. `low_rank` finds them.

    D holds the masses of the system that is iterated on. V may come from a rounded plan, in which
    columns of very small mass have no entry in float16, and so mass 0: D is never taken from that,
    as no direction would then have a component there.

    Args:
        vectors: V (m, k), float64, 0 in rows without mass.
    """

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def times(self, residual: Tensor, inverse: Tensor) -> Tensor:
        """Return M^-1 r for r (m, s), with columns of stride m, and the diagonal of D^-1 (m, 1)."""
        rows = residual.T
        return (rows * inverse.T).addmm_(rows @ self.vectors, self.vectors.T).T


def rank_for(rows: int, others: int, most: int | None, device: torch.device) -> int:
    """Return the number of random vectors for so many rows in `most` bytes.

    None takes half of free memory. `others` is the number of points on the plan's other side, which
    products pass through.
    """
    rank = min(RANK, rows // ROWS_PER_VECTOR)
    while rank and not holds(8 * MATRICES * max(rows, others) * rank, most, device):
        rank //= 2
    return rank


def low_rank(
    times: Callable[[Tensor], Tensor], scale: Tensor, rank: int, precision: float, damping: float
) -> LowRank:
    """Build the preconditioner of D^1/2 ((1 + damping) I - A) D^1/2, up to a factor.

    Products of A with random vectors find the space that the eigenvectors of its large eigenvalues
    span, a second product the eigenvalues (Halko et al. 2011, Finding structure with randomness;
    Frangella et al. 2023, Randomized Nystrom preconditioning; here after one power of A):

        Q = orth(A Omega),   A ~ A Q (Q^T A Q)^-1 Q^T A = U diag(lambda) U^T

        (I - A)^-1 ~ I + U diag(lambda / (1 - lambda)) U^T.

    Args:
        times: returns A V for V (m, k), float64.
        scale: the diagonal of D^-1/2 (m, 1), 0 in rows without mass.
        rank: number of random vectors.
        precision: relative error of the products.
        damping: of the matrix, 0 or more.
    """
    draw = torch.Generator(scale.device).manual_seed(0)
    drawn = torch.randn(len(scale), rank, generator=draw, dtype=torch.float64, device=scale.device)
    basis, _ = torch.linalg.qr(times(drawn))
    images = times(basis)
    # Drop eigenvalues that are small or only rounding.
    inner, turned = torch.linalg.eigh(_symmetric(basis.T @ images))
    kept = inner > max(LEAST, precision)
    factor = images @ (turned[:, kept] / inner[kept].sqrt())
    values, turned = torch.linalg.eigh(_symmetric(factor.T @ factor))
    # Columns of factor times turned are sqrt(lambda) U, so U lambda / (1 - lambda) U^T is
    distance = (1 + damping - values).clamp_min(UNITS * precision)
    return LowRank(scale * (factor @ (turned / distance.sqrt())))


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2


def is_small(shape: Sequence[int]) -> bool:
    """Return whether a plan of this shape (n, m) is stored."""
    n, m = shape
    return min(n, m) <= MOST_POINTS and n * m <= MOST_ENTRIES


def is_factorized(entries: Tensor) -> bool:
    """Return whether systems of a stored plan P (n, m) are factorized."""
    most = MOST_POINTS if entries.is_cuda else MOST_POINTS_CPU
    return is_small(entries.shape) and min(entries.shape) <= most


def dense_plan(comparison: Comparison, name: str, f: Tensor, g: Tensor | None) -> StoredPlan | None:
    """Compute the plan of f (n,) and g (m,) of a term of a small problem, from its clouds alone.

    It is that of the original points in float64, on any backend. No operator is built for it, which
    takes longer than the plan. None where the problem is not small, where points stream or are
    shared between processes, or where memory is short.
    """
    if comparison.streaming is not None or comparison.compute.group is not None:
        return None
    source, target = comparison.sides(name)
    shape, device = (len(source), len(target)), source.features.device
    if not is_small(shape):
        return None
    # All points at once, as they are and in float64.
    entries, points = 8 * shape[0] * shape[1], 12 * sum(shape) * source.dim
    stated = stated_budget(comparison.compute.memory_budget)
    # Tensors made of a plan take as much again.
    short = stated is not None and entries + points > stated
    if short or not holds(2 * entries + points, None, device):
        return None
    g = f if g is None else g
    return StoredPlan(comparison.cost(name).plan_entries(f, g, comparison.epsilon))


def held_plan(operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> Plan:
    """Return the plan of f (n,) and g (m,) on the `refined` form of an operator."""
    return operator.refined.plan(f, g, epsilon, MOST_HELD).prepared


def report_unsolved(
    residual: Tensor, converged: Tensor, way_out: str, *, required: bool, where: str | None = None
) -> None:
    """Warn, or raise if `required`, where a linear system was not solved.

    Args:
        residual: (s,) relative residuals.
        converged: (s,), whether they are within the tolerance.
        way_out: the advice that ends the message.
        required: whether to raise.
        where: the name of the system in the message; by default it counts directions.

    Raises:
        ConvergenceError: `required`, and a system was not solved.
    """
    if bool(converged.all()):
        return
    if where is None:
        where = f"{int((~converged).sum())} of {len(converged)} directions"
    message = (
        f"conjugate gradients left a relative residual of {float(residual.max()):.1e} in "
        f"{where}; {way_out}"
    )
    if required:
        raise ConvergenceError(message)
    warn(message, NotConvergedWarning)


def largest(*values: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the largest absolute value of all entries, or of those along dimensions, float64.

    It is the unit of cotangents and right-hand sides, which results are linear in: their squares
    are 0 or infinite near the ends of float64, and their products with a plan in float32 long
    before. It is positive, so that it can be divided by: that of zeros is the smallest normal
    number of their type. NaN where there is one.
    """
    sizes = [torch.linalg.vector_norm(one, torch.inf, dim, dtype=torch.float64) for one in values]
    found: Tensor = reduce(torch.maximum, sizes).clamp_min(torch.finfo(values[0].dtype).tiny)
    return found
