"""The numbers that a device sums up of a plan, and what the host makes of them.

They are tensors () or (B,) where they are computed, and numbers once the host has read them all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from otdd_flash.engine.evidence.dual import dual_value
from otdd_flash.engine.evidence.perturbed_costs import hidden_after_update
from otdd_flash.engine.evidence.primal import Filling
from otdd_flash.operators.base import lesser


class CrossNumbers(NamedTuple):
    """Of the plan of a cross term with sums r and c, before and after the update of its rows.

    Attributes:
        kappa: what scales it down to rows and columns of no more than their masses, before.
        mass: sum of c, before.
        lost: masses of points of which errors may hide all.
        total: sum of r, before.
        moved: sum_i r_i |s_i - 1| for the factors s of the update.
        missed: ||c - b||_1, before.
        scaled_gap: a bound on that after.
        row_gap: ||r - a||_1, after.
        factor: max s.
        row_growth: <r, `perturbed_costs.growth`>, after.
        column_growth: <c, growth>, before.
        largest_growth: of a column.
        paid: <a, f> + <b, g>, after.
        updated: sum of r, after.
        size: <a, |f|> + <b, |g|>, after.
        paid_before: <r, f> + <c, g>, before.
        missing_rows: `Filling.rows` of kappa P, before.
        missing_columns: likewise.
        filling_costs: likewise.
        filling_entropy: likewise.
        row_swing: max f - min f, after.
        column_swing: max g - min g.
        mean_error: of costs, <a, A> + <b, B>.
        row_error: max A.
        column_error: max B.
    """

    kappa: Any
    mass: Any
    lost: Any
    total: Any
    moved: Any
    missed: Any
    scaled_gap: Any
    row_gap: Any
    factor: Any
    row_growth: Any
    column_growth: Any
    largest_growth: Any
    paid: Any
    updated: Any
    size: Any
    paid_before: Any
    missing_rows: Any
    missing_columns: Any
    filling_costs: Any
    filling_entropy: Any
    row_swing: Any
    column_swing: Any
    mean_error: Any
    row_error: Any
    column_error: Any

    @property
    def filling(self) -> Filling[Any]:
        """What kappa P misses of its masses."""
        return Filling(
            self.missing_rows, self.missing_columns, self.filling_costs, self.filling_entropy
        )

    @property
    def gap(self) -> Any:
        """Bound on ||c - b||_1 after the update."""
        return lesser(self.moved + self.missed, self.scaled_gap)

    @property
    def noise(self) -> Any:
        """The marginal error that errors of costs may hide."""
        columns = hidden_after_update(
            self.column_growth / 2, self.largest_growth / 2, self.factor, self.moved
        )
        return self.row_growth / 2 + self.lost + columns

    def dual(self, epsilon: float) -> Any:
        """The dual value after the update."""
        return dual_value(self.paid, self.updated, epsilon)


class SelfNumbers(NamedTuple):
    """Of the plan of one potential f, made symmetric and given mass 1, with sums r.

    Attributes:
        gap: ||r - a||_1.
        mass: sum of r.
        lost: masses of points of which errors may hide all.
        growth: <r, `perturbed_costs.growth`>.
        paid: <a, f>.
        size: <a, |f|>.
        swing: max f - min f.
        balancing: see `primal.balancing`.
        mean_error: of costs, <a, A>.
        largest_error: max A.
    """

    gap: Any
    mass: Any
    lost: Any
    growth: Any
    paid: Any
    size: Any
    swing: Any
    balancing: Any
    mean_error: Any
    largest_error: Any

    @property
    def noise(self) -> Any:
        """The marginal error that errors of costs may hide, on both sides."""
        return self.growth + 2 * self.lost

    def dual(self, epsilon: float) -> Any:
        return dual_value(2 * self.paid, self.mass, epsilon)
