"""What each of several processes computes of the cost of a cloud with itself: every pair once.

The points are cut into 2 R ranges of one size. Rank r has ranges r and 2 R - 1 - r, and with each
the pairs of its points with those of the same and of all later ranges. A range that is early has
many pairs and a late one few, so that all ranks have as many.

A pair (i, j) is part of the sum of i and of that of j. Rank r finds

    p_ri = -epsilon log sum_j a_j exp((f_j - C_ij) / epsilon)

over the j whose pair with i is its own, +inf without such pairs, and

    T(f)_i = -epsilon log sum_r exp(-p_ri / epsilon).

p_ri says the maximum and the sum of what it is made of in one number, float64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.operators.base import CostFacts, Epsilon, Marginals, Operator
from otdd_flash.operators.tiled import LN_2, LOG2_E, LOG2_NOTHING, TiledOperator

if TYPE_CHECKING:
    from collections.abc import Callable

    from otdd_flash.distributed.ranks import Ranks
    from otdd_flash.operators.labelled_cost import LabelledCost


class SelfShare(Protocol):
    """One rank's share of the pairs of a cloud of n points with itself.

    Attributes:
        reach: |f - T(f)| over epsilon up to which sums keep their precision.
    """

    reach: float

    def softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """The p_ri (n,), float64."""
        ...

    def repaired(self, f: Tensor, epsilon: Epsilon, rows: Tensor) -> Tensor:
        """T(f) (n,) where `rows` (n,) says so, of all pairs: there it is out of reach of f."""
        ...

    def marginals(self, f: Tensor, epsilon: Epsilon, *, accurate: bool) -> Marginals:
        """Sums (n,) over the own pairs of the plan of f and f, rows' and columns' alike.

        The plan is the mean of the computed one and its transpose.
        """
        ...

    def mean_error(self, ranks: Ranks) -> float:
        """`CostFacts.error` of the whole cost; called by all ranks together."""
        ...

    @property
    def refined(self) -> SelfShare:
        """The same at full accuracy."""
        ...


def folded(count: int, rank: int, size: int) -> list[tuple[int, int]]:
    """First and end of the two ranges of `count` places that a rank has; empty ones are left out.

    Those of all ranks cover all places.
    """
    ranges = 2 * size
    found = (
        (each * count // ranges, (each + 1) * count // ranges) for each in (rank, ranges - 1 - rank)
    )
    return [(first, end) for first, end in found if end > first]


def merged(parts: Tensor, epsilon: Epsilon) -> Tensor:
    """-epsilon log sum_r exp(-p_r / epsilon) (n,) of p (R, n) float64, added in their order.

    Where all are +inf, as of points that a part gives no mass, so is the sum.
    """
    lowest = parts.amin(0).clamp_max(torch.finfo(parts.dtype).max)
    total = torch.zeros_like(lowest)
    for part in parts:
        total += ((lowest - part) / epsilon).exp_()
    return lowest - epsilon * total.log_()


class _Piece(NamedTuple):
    """Pairs between some rows and some columns, and their cost; or of rows among themselves."""

    rows: slice
    columns: slice
    operator: TiledOperator

    @property
    def square(self) -> bool:
        return self.rows == self.columns


class TiledSelfShare:
    """A share whose costs PyTorch computes or keeps, tile by tile.

    Each range is a square of the pairs of its own points, which are computed twice, and a rectangle
    of those with later ones.

    Args:
        cost: of the cloud with itself.
        ranges: of this rank, as `folded` has them.
        build: makes the operator of a part of the cost, a `TiledOperator`.
    """

    reach = math.inf

    def __init__(
        self,
        cost: LabelledCost,
        ranges: list[tuple[int, int]],
        build: Callable[[LabelledCost], Operator],
    ) -> None:
        self._cost, count = cost, cost.shape[0]
        self._pieces = []
        for first, end in ranges:
            rows = slice(first, end)
            for columns in (rows, slice(end, count)):
                if columns.stop > columns.start:
                    operator = build(cost.part(rows, columns))
                    assert isinstance(operator, TiledOperator)
                    self._pieces.append(_Piece(rows, columns, operator))

    @property
    def refined(self) -> TiledSelfShare:
        """The same: nothing was rounded."""
        return self

    def softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """See `SelfShare`."""
        found = torch.full_like(self._cost.a, math.inf)

        def add(where: slice, part: Tensor) -> None:
            found[where] = merged(torch.stack((found[where], part)), epsilon)

        for rows, columns, operator in self._pieces:
            if rows == columns:
                add(rows, operator.softmin_rows(f[columns], epsilon).double())
            else:
                of_rows, of_columns = softmins(operator, f[rows], f[columns], epsilon)
                add(rows, of_rows)
                add(columns, of_columns)
        return found

    def repaired(self, f: Tensor, epsilon: Epsilon, rows: Tensor) -> Tensor:
        """Never asked for."""
        raise AssertionError("nothing is out of reach")

    def marginals(self, f: Tensor, epsilon: Epsilon, *, accurate: bool) -> Marginals:
        """See `SelfShare`; what costs may be off is the larger of a row's and of a column's."""
        sums, errors = torch.zeros_like(self._cost.a), torch.zeros_like(self._cost.a)
        numbers = torch.zeros(3, dtype=torch.float64)
        for piece in self._pieces:
            rows, columns, operator = piece
            found = operator.marginals(f[rows], f[columns], epsilon, accurate=accurate)
            share = 0.5 if piece.square else 1.0
            for where, part, wrong in (
                (rows, found.rows, found.row_errors),
                (columns, found.columns, found.column_errors),
            ):
                sums[where] += share * part
                errors[where] = torch.maximum(errors[where], wrong)
            own = (found.cost_rounding, found.relative_error, found.lost)
            numbers = torch.maximum(numbers, torch.tensor(own, dtype=torch.float64))
        return Marginals(sums, sums, errors, errors, *numbers.tolist())

    def mean_error(self, ranks: Ranks) -> float:
        """See `SelfShare`."""
        cost, errors, rounding = self._cost, torch.zeros_like(self._cost.a), 0.0
        for rows, columns, operator in self._pieces:
            for where, wrong in zip((rows, columns), operator.accurate_errors, strict=True):
                errors[where] = torch.maximum(errors[where], wrong)
            rounding = max(rounding, operator.cost_rounding)
        every = ranks.all_gathered(torch.cat((errors, errors.new_tensor([rounding])))).amax(0)
        facts = CostFacts(torch.float64, cost.mean_cost, *cost.cost_range, error=0.0)
        return float(every[-1]) * facts.magnitude + 2 * float(cost.a @ every[:-1])


def softmins(
    operator: TiledOperator, f: Tensor, g: Tensor, epsilon: Epsilon
) -> tuple[Tensor, Tensor]:
    """`softmin_rows` of g (m,) and `softmin_columns` of f (n,), float64, from one pass."""
    epsilon = float(epsilon)
    scale = LOG2_E / epsilon
    row_term = (operator.log2_a + (f.to(operator.dtype) - operator.row_offset) * scale).unsqueeze(1)
    column_term = operator.log2_b + g.to(operator.dtype) * scale
    logs = torch.empty_like(operator.row_offset)
    highest = torch.full_like(operator.log2_b, -math.inf)
    sums = torch.zeros_like(operator.log2_b)
    for rows, tile in operator.tiles():
        torch.add(column_term, tile.scores, alpha=scale, out=tile.scratch)
        most = tile.scratch.amax(1, keepdim=True).clamp_min_(LOG2_NOTHING)
        logs[rows] = most.squeeze(1) + tile.scratch.sub_(most).exp2_().sum(1).log2_()
        torch.add(row_term[rows], tile.scores, alpha=scale, out=tile.scratch)
        raised = torch.maximum(highest, tile.scratch.amax(0)).clamp_min_(LOG2_NOTHING)
        sums.mul_(highest.sub_(raised).exp2_())
        sums.add_(tile.scratch.sub_(raised).exp2_().sum(0))
        highest = raised
    of_rows = logs.clamp_min_(LOG2_NOTHING).double()
    of_columns = (highest + sums.log2_()).clamp_min_(LOG2_NOTHING).double()
    factor = epsilon * LN_2
    return operator.row_offset.double() - factor * of_rows, -factor * of_columns
