"""Stored transport problems that iterate on exponentials instead of taking them anew.

A softmin that was computed once, at potentials g° and epsilon, is an anchor for those near it: with

    p_ij = b_j exp((g°_j - C_ij + T°_i) / epsilon),    sum_j p_ij = 1,

the softmin at g is T_i = T°_i - epsilon log sum_j p_ij exp((g_j - g°_j) / epsilon), one product and
one sum per score. The anchor is moved when a potential is more than 20 epsilon from it, or epsilon
is another (Schmitzer 2019, Stabilized sparse scaling algorithms for entropy regularized transport
problems, absorbs potentials into the kernel in this way).

The p are held in float32, of rows and of columns. Potentials and anchors stay in float64, so that
the marginals have errors of some 1e-7 however small epsilon is against the costs; where that is too
much, p is float64 too. What underflows in p is smaller than e^-87, and e^-47 of its sum after all
shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from otdd_flash.engine.problems import Start
from otdd_flash.engine.quasi_newton import ManyVectors, QuasiNewton
from otdd_flash.formulas.decision import Form, Goal
from otdd_flash.formulas.evidence import PassErrors
from otdd_flash.operators.segment_tiles import moved, tiles

if TYPE_CHECKING:
    from otdd_flash.operators.stored_segments import StoredSegments

MOST_SHIFT = 20.0
# Differences that are remembered, as of stored ones.
MEMORY = 4
# Rows and columns are rounded apart, so what float32 leaves out of balance is never settled.
LEAST_TOLERANCE_IN_FLOAT32 = 1e-5


class AnchoredSegments:
    """All problems of `StoredSegments` in a faster form; 8 or 16 S n m bytes more."""

    dtype = torch.float64

    def __init__(self, stored: StoredSegments, tolerance: float) -> None:
        self._stored, self.symmetric = stored, stored.symmetric
        self._index = torch.arange(len(stored.costs), device=stored.costs.device)
        self.mean_cost, self.cost_spread = stored.mean_cost, stored.cost_spread
        self.offset = stored.offset
        single = tolerance >= LEAST_TOLERANCE_IN_FLOAT32
        self.sum_dtype = torch.float32 if single else torch.float64
        unit = torch.full_like(self.offset, torch.finfo(self.sum_dtype).eps / 2)
        # Nothing that is reported rests on them: about what sums of rounded exponentials lose.
        self.errors = stored.errors._replace(sums=2 * unit)
        sides = range(len(stored.masses))
        self._anchors = [_Anchor(stored, side, self.sum_dtype) for side in sides]
        self.row_masses, self.column_masses = stored.row_masses, stored.column_masses
        self.first = stored.first

    def iterations(self, candidate: Tensor, goal: Goal, form: Form, start: Start) -> QuasiNewton:
        return QuasiNewton(self, ManyVectors(self, candidate, MEMORY), goal, form, start)

    def coarse(self, tolerance: float) -> None:
        return

    def softmins(
        self,
        g: Tensor,
        before: Tensor | None,
        epsilon: Sequence[float] | Tensor,
        active: Sequence[bool] | Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        assert isinstance(epsilon, Tensor)
        if before is None:
            return None, self._anchors[0].softmin(g, self._index, epsilon)
        f = self._anchors[0].softmin(g, self._index, epsilon)
        return f, self._anchors[1].softmin(f, self._index, epsilon)

    def keep(self, order: Tensor) -> None:
        """Go on with some segments."""
        self._index = self._index[order]
        self.column_masses = self.column_masses[order]
        if self.row_masses is not None:
            self.row_masses = self.row_masses[order]
        self.mean_cost, self.cost_spread = self.mean_cost[order], self.cost_spread[order]
        self.offset = self.offset[order]
        self.errors = PassErrors(*(numbers[order] for numbers in self.errors))
        for anchor in self._anchors:
            anchor.keep(order)


class _Anchor:
    """p of one side (S, n, m), T° (S, n), g° (S, m), and the epsilon (S,) that they are for."""

    def __init__(self, stored: StoredSegments, side: int, dtype: torch.dtype) -> None:
        self._stored, self._side = stored, side
        count, n, m = stored.costs.shape if side == 0 else stored.costs.mT.shape
        self._plan = torch.empty((count, n, m), dtype=dtype, device=stored.costs.device)
        self._softmin = stored.costs.new_empty((count, n))
        self._potential = stored.costs.new_zeros((count, m))
        self._epsilon = stored.costs.new_zeros(count)

    def softmin(self, potential: Tensor, index: Tensor, epsilon: Tensor) -> Tensor:
        """The softmin (S, n) at potentials (S, m) of the problems `index` (S,)."""
        shift = self._shift(potential, index, epsilon)
        stale = (shift.abs().amax(1) > MOST_SHIFT) | (epsilon != self._epsilon)
        places = torch.nonzero(stale).squeeze(1)
        if len(places):
            self._move(places, potential, index, epsilon)
            shift[places] = 0
        factors = shift.exp_().to(self._plan.dtype).unsqueeze(1)
        sums = torch.empty_like(self._softmin)
        for segments, rows, scratch in tiles(self._plan.shape, self._plan.dtype, sums.device):
            torch.mul(self._plan[segments, rows], factors[segments], out=scratch)
            sums[segments, rows] = scratch.sum(-1).double()
        return self._softmin - epsilon[:, None] * sums.log_()

    def keep(self, order: Tensor) -> None:
        self._plan = moved(self._plan, order)
        self._softmin, self._potential = self._softmin[order], self._potential[order]
        self._epsilon = self._epsilon[order]

    def _shift(self, potential: Tensor, index: Tensor, epsilon: Tensor) -> Tensor:
        """How far the potentials are from the anchor, in units of epsilon (S, m)."""
        other = self._stored.other(self._side)
        shift = (potential - self._potential) / epsilon[:, None]
        return torch.where(self._stored.masses[other][index] > 0, shift, 0.0)

    def _move(self, places: Tensor, potential: Tensor, index: Tensor, epsilon: Tensor) -> None:
        """Take the potentials of the problems index[places] as the anchor."""
        stored, chosen, some = self._stored, index[places], potential[places]
        logs = self._softmin.new_empty((len(places), self._softmin.shape[1]))
        scores = stored.shifted_scores(self._side, some, chosen, epsilon[places], logs)
        for segments, rows, scratch in scores:
            sums = scratch.sum(-1, keepdim=True)
            self._plan[places[segments], rows] = scratch.div_(sums).to(self._plan.dtype)
            logs[segments, rows] += sums.squeeze(-1).log_()
        self._softmin[places] = -epsilon[places, None] * logs
        self._potential[places] = some
        self._epsilon[places] = epsilon[places]
