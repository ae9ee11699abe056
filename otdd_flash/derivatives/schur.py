"""The linear system of a plan P with marginals r and c, for implicit derivatives of potentials.

    diag(r) w1 + P w2   = s1
    P^T w1 + diag(c) w2 = s2

Eliminating w1 = (s1 - P w2) / r leaves the Schur complement

    S w2 = s2 - P^T (s1 / r),      S = diag(c) - P^T diag(1 / r) P.

It is symmetric and positive semi-definite, with constants in its kernel; scaled by c^(-1/2) on both
sides its eigenvalues lie in [0, 1]. For a self term, with one potential, the system is
(diag(r) + P) w = s; scaled likewise its eigenvalues lie in [0, 2], in [1, 2] for squared distances.

Systems of a small stored plan are factorized, see `direct`. Others are solved by
`conjugate_gradients`, preconditioned by the masses and, where that is slow, by `low_rank` as well.
Their products may be those of a plan rounded to lower precision, with its own marginals; the
residual of the plan itself then corrects the solution (iterative refinement, Higham 2002, Accuracy
and stability of numerical algorithms).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from otdd_flash.arguments import Count, NotNegative, Share, check_fields
from otdd_flash.derivatives.conjugate_gradients import (
    MANY_ROWS,
    Iterates,
    Limits,
    Metric,
    Near,
    System,
)
from otdd_flash.derivatives.direct import Direct, OfRows, is_decomposed, of_columns, of_self
from otdd_flash.derivatives.low_rank import LowRank, low_rank, rank_for
from otdd_flash.engine.run import LateReader
from otdd_flash.operators.base import KeptPlan, Products

if TYPE_CHECKING:
    # These need Triton.
    from otdd_flash.derivatives.conjugate_gradients_kernels import KernelIterates
    from otdd_flash.kernels.linear.cg_step import Image
    from otdd_flash.kernels.points.packed_points import Layout

# Steps of iterative refinement, at the most.
REFINEMENTS = 3

# Iterations preconditioned by the masses after which a better preconditioner pays, which takes
# products with 1,024 columns.
PATIENCE = 32


@dataclass(frozen=True)
class CGOptions:
    """When a linear system counts as solved, and when conjugate gradients stop.

    Up to 3,000 points on the smaller side, 512 on a CPU, a system is factorized. Conjugate
    gradients take over where that leaves a residual above the tolerance.

    Attributes:
        tolerance: relative residual, in the norm scaled by the masses.
        max_iterations: of conjugate gradients, for every right-hand side and system.
        damping: delta >= 0; solve with S + delta diag(c), or (1 + delta) diag(r) + P, for systems
            that are nearly singular. It changes the solution.

    Raises:
        InputError: a tolerance outside of (0, 1), no iteration, a negative damping.
    """

    tolerance: Share = 1e-5
    max_iterations: Count = 1000
    damping: NotNegative = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "cg.")


DEFAULTS = CGOptions()


class SchurSystem:
    """The matrix S + delta diag(c) of a plan between two clouds.

    Args:
        plan: its products.
        damping: delta.
        most: bytes that a preconditioner may take, half of free memory by default.
    """

    def __init__(self, plan: Products, damping: float = 0.0, most: int | None = None) -> None:
        self._plan, self.precision = plan, plan.precision
        self._damping, self._most = damping, most

    @cached_property
    def metric(self) -> Metric:
        """The metric of the column sums c; without damping the kernel holds constants."""
        return Metric(self._plan.columns, constants=self._damping == 0)

    @property
    def direct(self) -> Direct | None:
        """The factorization on the smaller side, if the plan is stored and small."""
        entries = _decomposed(self._plan)
        if entries is None:
            return None
        fewer_rows = entries.shape[0] < entries.shape[1]
        decomposed = OfRows if fewer_rows else of_columns
        return decomposed(entries, self._rows, self.metric, self._damping)

    @property
    def layout(self) -> Layout | None:
        """The packed order of the columns; None if products are not of packed points."""
        half_products = self._plan.half_products
        return None if half_products is None else half_products[0].layouts[1]

    @cached_property
    def _rows(self) -> Metric:
        """The metric of the row sums r."""
        return Metric(self._plan.rows, constants=self._damping == 0)

    @property
    def by_row(self) -> Tensor:
        """1 / r (n, 1), 0 where there is no mass."""
        return self._rows.inverse

    @cached_property
    def _scaled_masses(self) -> Tensor:
        return (
            self.metric.masses if self._damping == 0 else (1 + self._damping) * self.metric.masses
        )

    @cached_property
    def _between(self) -> tuple[Tensor, Tensor]:
        """Weights between the products with P, in packed order, and with P^T."""
        assert self._plan.half_products is not None
        there, back = self._plan.half_products
        weights = self.by_row[:, 0] * there.weights
        if back.given is not None:
            weights *= back.given
        return there.layouts[0].spread(weights, 0.0), -back.weights

    def preconditioner(self) -> LowRank | None:
        """Build a low-rank preconditioner, of a rank that rows and memory allow."""
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

        return low_rank(times, metric.scale, rank, self.precision, self._damping)

    def times(self, values: Tensor) -> Tensor:
        """Return (S + delta diag(c)) w (m, s)."""
        return torch.addcmul(self._taken(values).neg_(), self._scaled_masses, values)

    def _taken(self, values: Tensor) -> Tensor:
        """Return P^T diag(1 / r) P w (m, s)."""
        return self._plan.transposed_times(self._plan.times(values).mul_(self.by_row))

    def image(self, packed: Tensor, scales: Tensor) -> Image:
        """Return the product with w, given in packed float16, in the form that kernels read."""
        from otdd_flash.kernels.linear.cg_step import Image
        from otdd_flash.kernels.linear.onward import onward

        assert self._plan.half_products is not None
        there, back = self._plan.half_products
        weights, taken = self._between
        packed, scales = onward(there.multiply(packed), scales, weights)
        position = back.layouts[0].position
        return Image(back.multiply(packed), scales, taken, self._scaled_masses, position)


class SelfSystem:
    """The matrix (1 + delta) diag(r) + P of a symmetric plan."""

    def __init__(self, plan: Products, damping: float = 0.0) -> None:
        self._plan, self.precision, self._damping = plan, plan.precision, damping

    @cached_property
    def metric(self) -> Metric:
        """The metric of the row sums r."""
        return Metric(self._plan.rows, constants=False)

    @property
    def direct(self) -> Direct | None:
        """The factorization, if the plan is stored and small."""
        entries = _decomposed(self._plan)
        return None if entries is None else of_self(entries, self.metric, self._damping)

    @property
    def layout(self) -> Layout | None:
        """The layout of rows and columns, which are the same points."""
        half_products = self._plan.half_products
        return None if half_products is None else half_products[0].layouts[1]

    @cached_property
    def _scaled_masses(self) -> Tensor:
        return (
            self.metric.masses if self._damping == 0 else (1 + self._damping) * self.metric.masses
        )

    def preconditioner(self) -> None:
        """Return None: scaled by masses, the condition is at most 2 for squared distances."""

    def times(self, values: Tensor) -> Tensor:
        """Return ((1 + delta) diag(r) + P) w (n, s)."""
        return torch.addcmul(self._plan.times(values), self._scaled_masses, values)

    def image(self, packed: Tensor, scales: Tensor) -> Image:
        """Return the product with w, given in packed float16, in the form that kernels read."""
        from otdd_flash.kernels.linear.cg_step import Image

        assert self._plan.half_products is not None
        there, _ = self._plan.half_products
        position = there.layouts[0].position
        found = there.multiply(packed)
        return Image(found, scales, there.weights, self._scaled_masses, position)


def _decomposed(plan: Products) -> Tensor | None:
    """Return the entries of a stored plan that is small enough to factorize, else None."""
    return plan.entries if isinstance(plan, KeptPlan) and is_decomposed(plan.entries) else None


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


class Solver:
    """A solver of one matrix, for one set of right-hand sides after another.

    A factorization is used until it leaves a residual above the tolerance. From then on, and where
    there is none, conjugate gradients are. Right-hand sides are divided by their `largest` entries.

    If a refinement step no longer halves the recomputed residual, the rounded matrix is too far
    from the matrix, with which iterations then go on. If its steps no longer halve the residual
    either, only rounding is left, and that right-hand side is given up.

    Args:
        system: the matrix.
        rounded: the same, or one near it with faster products.
        options: when to stop.
    """

    def __init__(self, system: System, rounded: System, options: CGOptions) -> None:
        self._system, self._rounded = system, rounded
        self._limits = Limits(options.tolerance, options.max_iterations)
        self._iterates: Iterates | KernelIterates | None = None
        self._direct = system.direct
        # The masses alone precondition so many iterations; a low-rank part follows if needed.
        self._patience: int | None = PATIENCE
        self._preconditioner: LowRank | None = None

    def solve(self, right: Tensor) -> Solution:
        """Solve for right-hand sides (m, s) float64, in the matrix's range up to rounding."""
        return self.directly(right) or self.by_iterations(right)

    def directly(self, right: Tensor) -> Solution | None:
        """Solve by the factorization; return None without one, or if it is too inaccurate."""
        metric, direct = self._system.metric, self._direct
        if direct is None:
            return None
        unit = largest(right, dim=0)
        right = metric.less_constants(right / unit)
        values = direct.solve(right)
        left = right - self._system.times(values)
        residual = metric.size(left) / metric.size(right).clamp_min(torch.finfo(right.dtype).tiny)
        converged = residual <= self._limits.tolerance
        # One synchronization with the host, for all conditions.
        if not bool(converged.all() & direct.sound):
            self._direct = None
            return None
        none = torch.zeros_like(residual, dtype=torch.int64)
        return Solution(values.mul_(unit), left.mul_(unit), residual, none, converged)

    def by_iterations(self, right: Tensor) -> Solution:
        iterates, unit = self._iterates_for(right), largest(right, dim=0)
        iterates.begin(right / unit, self._near(self._rounded))
        if self._improve(iterates, self._rounded) and self._rounded is not self._system:
            iterates.resume(self._near(self._system))
            self._improve(iterates, self._system)
        size, now = iterates.size, iterates.now
        residual = now / size.clamp_min(torch.finfo(size.dtype).tiny)
        found = iterates.values * unit, iterates.left * unit
        return Solution(*found, residual, iterates.taken.clone(), now <= iterates.target)

    def _iterates_for(self, right: Tensor) -> Iterates | KernelIterates:
        """Return the last solve's iterates for reuse, or new ones: in Triton where products are."""
        metric, last = self._system.metric, self._iterates
        if last is not None and last.values.shape == right.shape:
            return last
        if self._system.layout is None and self._rounded.layout is None:
            found: Iterates | KernelIterates = Iterates(metric, self._limits)
        else:
            from otdd_flash.derivatives.conjugate_gradients_kernels import KernelIterates

            found = KernelIterates(metric, self._limits, (len(right), right.shape[1]))
        self._iterates = found
        return found

    def _near(self, system: System) -> Near:
        return Near(system, self._preconditioner, self._patience)

    def _improve(self, iterates: Iterates | KernelIterates, system: System) -> bool:
        """Iterate, with a better preconditioner once that is slow; return if a target is missed."""
        missed = self._correct(iterates)
        if missed and self._patience is not None and bool((iterates.taken >= self._patience).any()):
            self._patience, self._preconditioner = None, self._rounded.preconditioner()
            iterates.resume(self._near(system))
            missed = self._correct(iterates)
        return missed

    def _correct(self, iterates: Iterates | KernelIterates) -> bool:
        """Refine until that no longer helps; return whether a target is missed."""
        for _ in range(1 + REFINEMENTS):
            pending, missed = iterates.wanted()
            if not pending:
                return missed
            reader: LateReader[None] = LateReader(wait=len(iterates.values) >= MANY_ROWS)
            reading = None
            while reading is None or any(reading.numbers):
                iterates.repeat()
                reading = reader.exchange(iterates.active, None)
            iterates.correct(self._system)
        return iterates.wanted()[1]


def solve(system: System, rounded: System, right: Tensor, options: CGOptions) -> Solution:
    """Solve for one set of right-hand sides, as `Solver` does."""
    return Solver(system, rounded, options).solve(right)


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
