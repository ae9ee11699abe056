"""`ExactTerm`: an unregularised transport term with its plan, which has few entries.

It is a `TransportTerm` at epsilon 0, so that divergences and results hold either. What asks for a
plan asks the term first (`DistanceResult`, `MatrixTransport`). `solver.exact.solve` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from otdd_flash.cost.points import Points
from otdd_flash.operators.base import Applied
from otdd_flash.solver.term import TransportTerm

# Numbers of values that are multiplied at once.
VALUES_AT_ONCE = 1 << 24

# The names of a plan's tensors in files, after that of the term.
PLAN_TENSORS = ("rows", "columns", "masses")


@dataclass(frozen=True, eq=False)
class ExactTerm(TransportTerm):
    """OT_0 between two clouds: a plan with few entries, potentials, and a proven interval.

    Attributes of a `TransportTerm` mean the following at epsilon 0.

    Attributes:
        f: (n,) row potential, in units of the cost: f_i = min_j (C_ij - g_j). Potentials are those
            of the lower end; others may prove as much.
        g: (m,) column potential.
        epsilon: 0.
        value: the cost of the plan as computed, within `bounds`; inf if there is none.
        bounds: (lower, upper): an interval that holds OT_0.
        marginal_error: bound of the larger L1 error of the plan's marginals, which is rounding.
        tolerance: None.
        iterations: linear programs solved.
        passes: evaluations of all costs, those of the potentials that it starts from included.
        converged: whether the width that was asked for was reached, or the plan proved `optimal`.
        stopped_by: `optimal`, the plan is optimal and the interval as narrow as rounding allows;
            `rounding`, that leaves it wider, as where few costs are far above the others;
            `infeasible`, no plan without forbidden pairs has these masses; else as elsewhere.
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
        rows, columns, masses = plan
        known = {each.name: getattr(term, each.name) for each in fields(TransportTerm)}
        return cls(**known, rows=rows, columns=columns, masses=masses)

    def plan(self) -> Tensor:
        """Return the plan P (n, m), sparse COO, coalesced, float64."""
        shape = len(self.f), len(self.g)
        found = torch.sparse_coo_tensor(
            torch.stack((self.rows, self.columns)), self.masses, shape, check_invariants=True
        )
        return found.coalesce()

    def applied(self, values: Points, *, transposed: bool = False) -> Applied:
        """Compute P V (n, k) for V (m, k) and P 1 (n,), or P^T U (m, k) and P^T 1, in float64."""
        to, of, count = self.rows, self.columns, len(self.f)
        if transposed:
            to, of, count = of, to, len(self.g)
        device, width = self.masses.device, values.shape[1]
        found = self.masses.new_zeros((count, width))
        size = max(1, VALUES_AT_ONCE // max(1, width))
        parts = zip(*(torch.split(each, size) for each in (to, of, self.masses)), strict=True)
        for into, out_of, masses in parts:
            some = values[out_of.to(values.device)].to(device, torch.float64)
            found.index_add_(0, into, some * masses[:, None])
        return Applied(found, self.masses.new_zeros(count).index_add_(0, to, self.masses))

    def moved(self, device: torch.device) -> Self:
        """Return the term on another device."""
        names = ("f", "g", *PLAN_TENSORS)
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def plan_tensors(name: str, term: TransportTerm) -> dict[str, Tensor]:
    """Return the tensors of a term's plan for a file, by names that begin with that of the term."""
    if not isinstance(term, ExactTerm):
        return {}
    return {f"{name}.plan.{each}": getattr(term, each) for each in PLAN_TENSORS}


def with_plan(name: str, term: TransportTerm, tensors: Mapping[str, Tensor]) -> TransportTerm:
    """Return the term that `plan_tensors` stored the plan of; as it is if there is none."""
    rows, columns, masses = (tensors.get(f"{name}.plan.{each}") for each in PLAN_TENSORS)
    if rows is None or columns is None or masses is None:
        return term
    return ExactTerm.of(term, (rows, columns, masses))
