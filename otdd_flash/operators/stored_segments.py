"""Transport problems of one padded shape whose costs are stored, in float64 and plain PyTorch.

`labels.sinkhorn_pairs` solves the pairs of classes of one size by them, each of which is a segment
of `engine.problems`. They iterate on `anchored_segments` first, which are faster, and then on their
own costs.

What a row of scores gives must not depend on where the row lies. So all reductions run along rows
(a column's scores are copied into a row first), and the exponential is `exp`, which unlike `exp2`
is the same function at the end of a tensor as in its middle. Below -700 it is cut off: there it is
slow, and adds nothing to a sum that contains 1.

What a pass may get wrong, v = 2^-53, for d coordinates and n terms in a sum, each summed in any
order: a cost, (2 d + 16) v (||x_i|| + ||y_j||)^2, of centring both points, of their product and of
three additions; a sum, (n + 512) v, of the logarithm of the mass, of the exponential, of additions
and of the cut, n e^-700. Rounding an exponent costs less than `TRIFLE` of `formulas.evidence`, 32
roundings, relative to the largest cost or potential.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from otdd_flash.engine.problems import Segments, Start, WeightedPoints
from otdd_flash.engine.quasi_newton import ManyVectors, QuasiNewton
from otdd_flash.formulas.decision import Form, Goal
from otdd_flash.formulas.evidence import TRIFLE, PassErrors
from otdd_flash.operators.anchored_segments import AnchoredSegments
from otdd_flash.operators.segment_tiles import moved, tiles

# Stands for log(0): finite, so that differences of two of them are 0 and not NaN.
LOG_ZERO = -1e30
LEAST_EXPONENT = -700.0

# Differences that are remembered: more of them save few iterations, and half of the memory that
# potentials take is theirs.
MEMORY = 4

# Unit roundoff.
UNIT = 2.0**-53

# Padded sizes are multiples of it, so that rows are whole vectors.
SIZE_STEP = 16


class StoredSegments:
    """S problems of cost ||x - y||^2 in float64, padded to one shape (n, m); 8 S n m bytes.

    Args:
        sides: of each problem, its rows' cloud and its columns'; twice the same object in all of
            them for clouds with themselves.
        shape: (n, m), at least the sizes of any of them, multiples of `SIZE_STEP`.
    """

    dtype = sum_dtype = torch.float64

    def __init__(
        self, sides: Sequence[tuple[WeightedPoints, WeightedPoints]], shape: tuple[int, int]
    ) -> None:
        self.symmetric = sides[0][0] is sides[0][1]
        device = sides[0][0].points.device
        self.costs = torch.zeros((len(sides), *shape), dtype=self.dtype, device=device)
        facts = torch.stack([_fill(self.costs[k], *pair) for k, pair in enumerate(sides)])
        self.mean_cost, self.cost_spread, mean, largest, peak = facts.unbind(1)
        self.offset = torch.zeros_like(self.mean_cost)
        none = self.offset
        sums = torch.full_like(none, UNIT * (max(shape) + 512))
        self.errors = PassErrors(mean, largest, peak, sums, *4 * (none,), none + TRIFLE)
        self.masses = [
            torch.stack([_padded(pair[side].masses, shape[side]) for pair in sides])
            for side in ((0,) if self.symmetric else (0, 1))
        ]

    @property
    def row_masses(self) -> Tensor | None:
        return None if self.symmetric else self.masses[0]

    @property
    def column_masses(self) -> Tensor:
        return self.masses[-1]

    @property
    def first(self) -> Tensor:
        """Potentials 0 (S, m)."""
        return torch.zeros_like(self.column_masses)

    def iterations(self, candidate: Tensor, goal: Goal, form: Form, start: Start) -> QuasiNewton:
        return QuasiNewton(self, ManyVectors(self, candidate, MEMORY), goal, form, start)

    def coarse(self, tolerance: float) -> Segments:
        """The same problems with sums of stored exponentials."""
        return AnchoredSegments(self, tolerance)

    def other(self, side: int) -> int:
        """The side whose potentials an update of `side` reads."""
        return 0 if self.symmetric else 1 - side

    def softmins(
        self,
        g: Tensor,
        before: Tensor | None,
        epsilon: Sequence[float] | Tensor,
        active: Sequence[bool] | Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        assert isinstance(epsilon, Tensor)
        if before is None:
            return None, self._softmin(0, g, epsilon)
        f = self._softmin(0, g, epsilon)
        return f, self._softmin(1, f, epsilon)

    def shifted_scores(
        self, side: int, potential: Tensor, chosen: Tensor, epsilon: Tensor, highest: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield tiles of exp(log b_j + (g_j - C_ij) / epsilon - h_i), h_i its largest logarithm.

        Args:
            side: whose softmin it is; for columns, C and the rest are transposed.
            potential: (S', m), the g of the chosen.
            chosen: (S',) int64, of the problems.
            epsilon: (S',), of the chosen.
            highest: (S', n), overwritten with h.

        Yields:
            Which of the chosen and which of their rows, and the tile (., ., m) of them, in a buffer
            that the next one overwrites.
        """
        other = self.other(side)
        logs = self.masses[other][chosen].log().clamp_min(LOG_ZERO)
        term = logs + potential / epsilon[:, None]
        inverse = (-1 / epsilon)[:, None, None]
        costs = self.costs if side == 0 else self.costs.mT
        size = (len(chosen), *costs.shape[1:])
        for segments, rows, scratch in tiles(size, self.dtype, costs.device):
            few = chosen[segments]
            part = costs[few] if len(few) > 1 else costs[int(few[0])].unsqueeze(0)
            torch.mul(part[:, rows], inverse[segments], out=scratch)
            scratch += term[segments, None, :]
            top = scratch.amax(-1, keepdim=True)
            highest[segments, rows] = top.squeeze(-1)
            yield segments, rows, scratch.sub_(top).clamp_min_(LEAST_EXPONENT).exp_()

    def keep(self, order: Tensor) -> None:
        self.costs = moved(self.costs, order)
        self.masses = [values[order] for values in self.masses]
        self.mean_cost, self.cost_spread = self.mean_cost[order], self.cost_spread[order]
        self.offset = self.offset[order]
        self.errors = PassErrors(*(numbers[order] for numbers in self.errors))

    def _softmin(self, side: int, potential: Tensor, epsilon: Tensor) -> Tensor:
        chosen = torch.arange(len(self.costs), device=self.costs.device)
        logs = torch.empty_like(self.masses[side])
        for segments, rows, scores in self.shifted_scores(side, potential, chosen, epsilon, logs):
            logs[segments, rows] += scores.sum(-1).log_()
        return -epsilon[:, None] * logs


def _fill(out: Tensor, rows: WeightedPoints, columns: WeightedPoints) -> Tensor:
    """Write the costs of one problem; returns mean, spread, and three numbers of `PassErrors`.

    Both clouds are centred by the columns' mean, so that products lose few of float64's digits, and
    of a class of one sample none.
    """
    points = columns.points.double()
    centre = columns.masses @ points
    y = points - centre
    x = y if rows is columns else rows.points.double() - centre
    squares_x, squares_y = x.square().sum(1), y.square().sum(1)
    cost = torch.addmm(squares_y, x, y.T, alpha=-2).add_(squares_x[:, None])
    out[: cost.shape[0], : cost.shape[1]] = cost
    error = UNIT * (2 * x.shape[1] + 16)
    # (||x|| + ||y||)^2 <= 2 ||x||^2 + 2 ||y||^2.
    mean = 2 * error * (rows.masses @ squares_x + columns.masses @ squares_y)
    largest = 2 * error * (squares_x.max() + squares_y.max())
    peak = torch.where(mean > 0, largest / mean, 0)
    spread = cost.max() - cost.min() + 2 * largest
    return torch.stack((rows.masses @ cost @ columns.masses, spread, mean, largest, peak))


def _padded(masses: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(masses, (0, size - len(masses)))
