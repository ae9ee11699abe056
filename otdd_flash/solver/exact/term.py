"""`ExactTerm`: an unregularised transport term with its plan, which has few entries.

It is a `TransportTerm` at epsilon 0, so that divergences and results hold either. What asks for a
plan asks the term first (`DistanceResult`, `MatrixTransport`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from otdd_flash.operators.base import Applied
from otdd_flash.solver.term.result import TransportTerm


@dataclass(frozen=True, eq=False)
class ExactTerm(TransportTerm):
    """OT_0 between two clouds: a plan with few entries, potentials, and a proven interval.

    Attributes of a `TransportTerm` mean the following at epsilon 0.

    Attributes:
        f: (n,) row potential, in units of the cost: f_i = min_j (C_ij - g_j). Potentials are those
            of the lower end; others may prove as much.
        g: (m,) column potential.
        epsilon: 0.
        value: the cost of the plan, with what its rounding adds: the upper end of `bounds`.
        bounds: (lower, upper): an interval that holds OT_0.
        marginal_error: bound of the larger L1 error of the plan's marginals, which is rounding.
        tolerance: None.
        iterations: linear programs solved.
        passes: evaluations of all costs, those of the potentials that it starts from included.
        converged: whether the width that was asked for was reached, or the plan proved `optimal`.
        stopped_by: `optimal`, the interval is as narrow as rounding allows; else as elsewhere.
        rows: (k,) int64, the rows of the entries of the plan, k at most n + m - 1.
        columns: (k,) int64, their columns.
        masses: (k,) float64, their masses.
    """

    rows: Tensor
    columns: Tensor
    masses: Tensor

    @classmethod
    def of(cls, term: TransportTerm, plan: tuple[Tensor, Tensor, Tensor]) -> Self:
        """Add rows, columns and masses of its plan to a term."""
        return cls(*(getattr(term, each.name) for each in fields(TransportTerm)), *plan)

    def plan(self) -> Tensor:
        """Return the plan P (n, m), sparse COO, coalesced, float64."""
        shape = len(self.f), len(self.g)
        found = torch.sparse_coo_tensor(
            torch.stack((self.rows, self.columns)), self.masses, shape, check_invariants=True
        )
        return found.coalesce()

    def applied(self, values: Tensor, *, transposed: bool = False) -> Applied:
        """Compute P V (n, k) for V (m, k) and P 1 (n,), or P^T U (m, k) and P^T 1, in float64."""
        to, of, count = self.rows, self.columns, len(self.f)
        if transposed:
            to, of, count = of, to, len(self.g)
        values = values.to(self.masses.device)
        found = values.new_zeros((count, values.shape[1]), dtype=torch.float64)
        found.index_add_(0, to, values[of].double().mul_(self.masses[:, None]))
        return Applied(found, self.masses.new_zeros(count).index_add_(0, to, self.masses))

    def widened(self, error: float) -> Self:
        """Widen the interval for a cost that is off by at most `error`."""
        low, high = self.bounds
        return replace(self, value=high + error, bounds=(low - error, high + error))
