"""Transport problems of one padded shape whose costs are stored, in float64 and plain PyTorch.

`labels.sinkhorn_pairs` makes `StoredSegments` of the pairs of classes that are padded to one shape;
each pair is a segment of `engine.problems`. `solver.solve.solve_segments` iterates on their faster
form, `AnchoredSegments`, and then on the stored costs themselves. Class distances are cached, so a
change of a pair's digits must raise `labels.pair_cache.ENTRY_FORMAT`.

The results of a row of scores must not depend on the place of the row in a tensor. So all
reductions run along rows (a column's scores are copied into a row first), and the exponential is
`exp`, which unlike `exp2` is the same function at the end of a tensor as in its middle. Exponents
are cut off at -700: below it `exp` is slow, and adds nothing to a sum that contains 1.

Error bounds of a pass, v = 2^-53, for d coordinates and n terms in a sum, each summed in any order:
a cost, (2 d + 16) v (||x_i|| + ||y_j||)^2, of centring both points, of their product and of three
additions; a sum, (n + 512) v, of the logarithm of the mass, of the exponential, of additions and of
the cut, n e^-700. Rounding an exponent costs less than `TRIFLE` of `formulas.evidence`, 32
roundings, relative to the largest cost or potential.

Anchors. A softmin T° that was computed once, at potentials g° and epsilon, is an anchor for those
near it: with

    p_ij = b_j exp((g°_j - C_ij + T°_i) / epsilon),    sum_j p_ij = 1,

the softmin at g is T_i = T°_i - epsilon log sum_j p_ij exp((g_j - g°_j) / epsilon), one product and
one sum per score. The anchor is moved when a potential is more than 20 epsilon from it, or epsilon
is another (Schmitzer 2019, Stabilized sparse scaling algorithms for entropy regularized transport
problems, absorbs potentials into the kernel in this way).

The p are held in float32, of rows and of columns. Potentials and anchors stay in float64, so that
the marginals have errors of some 1e-7 however small epsilon is against the costs; where that is too
much, p is float64 too. An entry of p that underflows is smaller than e^-87, and e^-47 of its sum
after all shifts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from otdd_flash.cost.host_points import spans
from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.engine.problems import Segments, Start, WeightedPoints
from otdd_flash.engine.quasi_newton import ManyVectors, QuasiNewton
from otdd_flash.formulas.decision import Form, Goal
from otdd_flash.formulas.evidence import TRIFLE, PassErrors
from otdd_flash.formulas.marginals import EXACT
from otdd_flash.operators.torch_operator import (
    LEAST_EXPONENT,
    TILE_ELEMENTS_CPU,
    TILE_ELEMENTS_GPU,
)

# Stands for log(0): finite, so that differences of two of them are 0 and not NaN.
LOG_ZERO = -1e30

# Differences that are remembered: more of them save few iterations, and half of the memory that
# potentials take is theirs.
MEMORY = 4

# Padded sizes are multiples of it, so that rows are whole vectors.
SIZE_STEP = 16

# How far, in units of epsilon, a potential may be from that of an anchor.
MOST_SHIFT = 20.0

# Rows and columns are rounded apart, so float32 leaves an imbalance that is never settled.
LEAST_TOLERANCE_IN_FLOAT32 = 1e-5


class PaddedSegments(ABC):
    """S problems that are padded to one shape (n, m), with vectors in PyTorch; see `Segments`.

    Attributes:
        symmetric: whether they are clouds with themselves.
        masses: of rows (S, n) and of columns (S, m), float64; one of clouds with themselves.
    """

    dtype = sum_dtype = torch.float64
    constraints = EXACT
    symmetric: bool
    masses: list[Tensor]
    mean_cost: Tensor
    cost_spread: Tensor
    offset: Tensor
    errors: PassErrors

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

    @abstractmethod
    def softmin(self, side: int, potential: Tensor, epsilon: Tensor) -> Tensor:
        """Compute the softmin of rows (side 0) or columns (side 1) at the other potentials."""

    def softmins(
        self,
        g: Tensor,
        before: Tensor | None,
        epsilon: Sequence[float] | Tensor,
        active: Sequence[bool] | Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        assert isinstance(epsilon, Tensor)
        f = self.softmin(0, g, epsilon)
        return (None, f) if before is None else (f, self.softmin(1, f, epsilon))

    def keep(self, order: Tensor) -> None:
        """Go on with some segments."""
        self.masses = [values[order] for values in self.masses]
        self.mean_cost, self.cost_spread = self.mean_cost[order], self.cost_spread[order]
        self.offset = self.offset[order]
        self.errors = PassErrors(*(numbers[order] for numbers in self.errors))


class StoredSegments(PaddedSegments):
    """S problems of cost ||x - y||^2 in float64, padded to one shape (n, m); 8 S n m bytes.

    Args:
        sides: of each problem, its rows' cloud and its columns'; twice the same object in all of
            them for clouds with themselves.
        shape: (n, m), at least the sizes of any of them, multiples of `SIZE_STEP`.
    """

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
        sums = torch.full_like(none, DOUBLE_UNIT * (max(shape) + 512))
        self.errors = PassErrors(mean, largest, peak, sums, *4 * (none,), none + TRIFLE)
        self.masses = [
            torch.stack([_padded(pair[side].masses, shape[side]) for pair in sides])
            for side in ((0,) if self.symmetric else (0, 1))
        ]

    def coarse(self, tolerance: float) -> Segments:
        """The same problems with sums of stored exponentials."""
        return AnchoredSegments(self, tolerance)

    def other(self, side: int) -> int:
        """The side whose potentials an update of `side` reads."""
        return 0 if self.symmetric else 1 - side

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
        super().keep(order)
        self.costs = moved(self.costs, order)

    def softmin(self, side: int, potential: Tensor, epsilon: Tensor) -> Tensor:
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
    error = DOUBLE_UNIT * (2 * x.shape[1] + 16)
    # (||x|| + ||y||)^2 <= 2 ||x||^2 + 2 ||y||^2.
    mean = 2 * error * (rows.masses @ squares_x + columns.masses @ squares_y)
    largest = 2 * error * (squares_x.max() + squares_y.max())
    peak = torch.where(mean > 0, largest / mean, 0)
    spread = cost.max() - cost.min() + 2 * largest
    return torch.stack((rows.masses @ cost @ columns.masses, spread, mean, largest, peak))


def _padded(masses: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(masses, (0, size - len(masses)))


class AnchoredSegments(PaddedSegments):
    """All problems of `StoredSegments` in a faster form; 8 or 16 S n m bytes more."""

    def __init__(self, stored: StoredSegments, tolerance: float) -> None:
        self.symmetric, self.masses = stored.symmetric, stored.masses
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

    def coarse(self, tolerance: float) -> None:
        return

    def softmin(self, side: int, potential: Tensor, epsilon: Tensor) -> Tensor:
        return self._anchors[side].softmin(potential, self._index, epsilon)

    def keep(self, order: Tensor) -> None:
        super().keep(order)
        self._index = self._index[order]
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


def moved(values: Tensor, order: Tensor) -> Tensor:
    """Rows `order` of a large tensor within its own memory: only those not in place are copied."""
    places = torch.arange(len(order), device=order.device)
    free = torch.nonzero(order != places).squeeze(1)
    values[free] = values[order[free]]
    return values[: len(order)]


def tiles(
    size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Cut (S, n, m) into cache-sized tiles of whole problems, or of rows of one, with scratch."""
    count, n, m = size
    budget = TILE_ELEMENTS_GPU if device.type == "cuda" else TILE_ELEMENTS_CPU
    together, height = max(1, min(count, budget // (n * m))), max(1, min(n, budget // m))
    scratch = torch.empty(together * height * m, dtype=dtype, device=device)
    for segments in spans(0, count, together):
        for rows in spans(0, n, height):
            shape = (segments.stop - segments.start, rows.stop - rows.start, m)
            yield segments, rows, scratch[: shape[0] * shape[1] * m].view(shape)
