"""Scores between all points of B small problems, stored, and what is known of their three costs.

A problem has two clouds, n points of x and m of y, in room for N and M of them: `points` of either
side by side, L = N + M. Its scores are one matrix (L, L) of four blocks, those of the self terms on
the diagonal and those of the cross term beside them, once for rows of x and once for rows of y.
`matrix_pool` is for a cost matrix that is given, of which nothing is stored.

Everything here is launched without asking the device anything: sizes, weights and epsilon are read
from its memory, so that one recording serves all problems that fit the room.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.recording import run_branches
from otdd_flash.kernels.adder import UNIT
from otdd_flash.kernels.stored.scores import no_scores, stored_scores
from otdd_flash.operators.labelled_cost import DOUBLE_UNIT

# Products that are in float64 at once.
PRODUCTS = 1 << 24


class Room(NamedTuple):
    """What a pool has room for.

    Attributes:
        problems: B.
        n: N, points of x in each.
        m: M, points of y.
        dim: of the points; 0 where costs are given.
        classes: of both sides together.
        dtype: of the points, or of costs that are given.
        device: where.
        aligned: whether costs that are given are, as `kernels.matrix.place` says.
    """

    problems: int
    n: int
    m: int
    dim: int
    classes: int
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True

    @property
    def points(self) -> int:
        """L = N + M."""
        return self.n + self.m

    @property
    def sides(self) -> tuple[slice, slice]:
        """Where x and y are among the points of a problem."""
        return slice(0, self.n), slice(self.n, self.points)

    @property
    def bytes(self) -> int:
        """What a pool takes, most of it scores, and what is made of points and products.

        Where costs are given, vectors, and sums of a column in hundreds of parts.
        """
        points = self.problems * self.points
        if not self.dim:
            return 256 * points + 1024 * self.m
        products = min(8 * PRODUCTS, 8 * points * max(self.n, self.m))
        return 4 * points * self.points + 2 * products + 32 * points * self.dim


class PooledCosts(NamedTuple):
    """What is known of the costs of some terms, each of one shape, float64, in units of the cost.

    Attributes:
        mean: sum_ij a_i b_j C_ij.
        lowest: of all costs.
        highest: of all costs.
    """

    mean: Tensor
    lowest: Tensor
    highest: Tensor

    @property
    def above_lowest(self) -> Tensor:
        """The mean cost, above the lowest one where that is negative."""
        return self.mean - self.lowest.clamp_max(0)

    @property
    def spread(self) -> Tensor:
        """R >= max C - min C."""
        return self.highest - self.lowest


class Pool:
    """What kernels and certificates read of B problems, whatever their scores are made of.

    Attributes:
        room: that there is.
        of_costs: (3,) float64, what the host tells of the costs, for `prepare`.
        masses: (B, L) float64, 0 where there is no point.
        asymmetry: (B, 4) float64: of the blocks [x, x] and [y, y] of W, how far entries are from
            their mirror images, and the largest entries.
        own_magnitudes: (B, L) float64: |C_ij| <= of i + of j within a side.
        cross_magnitudes: (B, L) likewise, between sides.
        cross: of the cross terms, (B,).
        own: of the self terms, (B, 2).
        error_share: error of a cost over its magnitudes.
        rounding: of a score over its magnitudes.
    """

    error_share, rounding = 0.0, 0.0

    def __init__(self, room: Room) -> None:
        self.room = room
        self.masses = self.zeros(room.points)
        self.asymmetry = self.zeros(4)
        self.of_costs = torch.zeros(3, dtype=torch.float64, device=room.device)
        self.own_magnitudes, self.cross_magnitudes = (self.zeros(room.points) for _ in range(2))
        facts = len(PooledCosts._fields)
        self.cross = PooledCosts(*self.zeros(facts).unbind(1))
        self.own = PooledCosts(*self.zeros(facts, 2).unbind(1))

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        room = self.room
        return torch.zeros((room.problems, *shape), dtype=dtype, device=room.device)

    def prepare(self, *, own: bool) -> None:
        """Everything but what was filled in, of self terms too if `own`."""
        raise NotImplementedError


class ScorePool(Pool):
    """The scores of B problems, made by `prepare` from what stands in the inputs.

    Inputs, to be filled first; where there is no point the masses are 0 and the rest is finite:

        points (B, L, d), masses (B, L) float64, labels (B, L) int64, of both sides together,
        class_distances (B, V, V) float64, W, of which the block [y, x] is not read, and
        of_costs (3,) float64, lambda_x, lambda_y and the number of the classes of x.

    Attributes:
        scores: (B, L, L) float32.
        log2_masses: (B, L) float64.
        centre: (B, 1, d) float64, the mean of both clouds' means.
        class_costs: (B, V, V) float64, lambda_y W, symmetric.
    """

    rounding = UNIT

    def __init__(self, room: Room) -> None:
        super().__init__(room)
        self.scores = no_scores(room.problems, room.points, room.device)
        self.log2_masses = self.zeros(room.points)
        self.points = self.zeros(room.points, room.dim, dtype=room.dtype)
        self.labels = self.zeros(room.points, dtype=torch.int64)
        self.class_distances = self.zeros(room.classes, room.classes)
        self.class_costs = self.zeros(room.classes, room.classes)
        self.centre = self.zeros(1, room.dim)
        # Error of a cost in float64 over the magnitudes: as `LabelledCost.cost_error_share`.
        self.error_share = (2 * room.dim + 16) * DOUBLE_UNIT

    @property
    def lambda_x(self) -> Tensor:
        """The weight of squared distances (1,)."""
        return self.of_costs[:1]

    def prepare(self, *, own: bool) -> None:
        """Compute scores and everything that is known of them, of self terms too if `own`."""
        self._symmetrize()
        x, y = self.room.sides
        points = self.points.double()
        means = [self.masses[:, None, side] @ points[:, side] for side in (x, y)]
        centre = (means[0] + means[1]) / 2
        about_mean = torch.cat(
            [points[:, side] - mean for side, mean in zip((x, y), means, strict=True)], 1
        )
        about_centre = points.sub_(centre)
        self.centre.copy_(centre)
        own_squares, squares = (part.square().sum(-1) for part in (about_mean, about_centre))
        apart = ((means[0] - centre) * (means[1] - centre)).sum((1, 2))
        run_branches(
            self.room.device,
            partial(self._learn, squares, own_squares, apart),
            partial(self._store, about_centre, squares, x, y),
            *(partial(self._store, about_mean, own_squares, side, side) for side in (x, y) if own),
        )

    def _symmetrize(self) -> None:
        """Make the class costs of self terms symmetric, as `operators.class_table` says."""
        given = self.class_distances
        of_x = torch.arange(given.shape[1], device=given.device) < self.of_costs[2]
        rows, columns = of_x[:, None], of_x[None, :]
        crossed = torch.where(rows, given, given.mT)
        symmetric = torch.where(rows == columns, given / 2 + given.mT / 2, crossed)
        torch.mul(symmetric, self.of_costs[1], out=self.class_costs)
        blocks = rows & columns, ~rows & ~columns
        numbers = [
            torch.where(block, part.abs(), 0).amax((1, 2))
            for part in (given - given.mT, given)
            for block in blocks
        ]
        self.asymmetry.copy_(torch.stack(numbers, 1))

    def _store(self, points: Tensor, squares: Tensor, rows: slice, columns: slice) -> None:
        """Store the scores of one block and its transpose, as many rows at once as fit."""
        symmetric, labels = rows is columns, self.labels
        width = columns.stop - columns.start
        height = max(1, PRODUCTS // (self.room.problems * width))
        for first in range(rows.start, rows.stop, height):
            part = slice(first, min(first + height, rows.stop))
            others = slice(first if symmetric else columns.start, columns.stop)
            stored_scores(
                torch.bmm(points[:, part], points[:, others].mT),
                (squares[:, part], squares[:, others]),
                (labels[:, part], labels[:, others]),
                self.class_costs,
                self.lambda_x,
                (self.scores[:, part, others], self.scores[:, others, part]),
                symmetric=symmetric,
            )

    def _learn(self, squares: Tensor, own_squares: Tensor, apart: Tensor) -> None:
        """Compute the facts of the costs; `apart` is the product of the means (B,)."""
        self.log2_masses.copy_(self.masses.log2())
        present, (x, y) = self.masses > 0, self.room.sides
        masses = torch.stack(
            [
                torch.zeros_like(self.class_costs[:, 0]).scatter_add_(
                    1, self.labels[:, side], self.masses[:, side]
                )
                for side in (x, y)
            ],
            1,
        )  # (B, 2, V)
        largest = self.class_costs.abs().amax(2).gather(1, self.labels)
        self.own_magnitudes.copy_(2 * self.lambda_x * own_squares + largest)
        self.cross_magnitudes.copy_(2 * self.lambda_x * squares + largest)

        def by_side(values: Tensor) -> tuple[Tensor, Tensor]:
            """The mean over a side's masses, and the most where there are any, (B, 2) each."""
            weighted, there = values * self.masses, torch.where(present, values, 0)
            return (
                torch.stack([weighted[:, side].sum(1) for side in (x, y)], 1),
                torch.stack([there[:, side].amax(1) for side in (x, y)], 1),
            )

        met = masses > 0
        met_own = met[:, :, :, None] & met[:, :, None, :]
        met_cross = met[:, 0, :, None] & met[:, 1, None, :]
        pairs = self.class_costs[:, None]
        of_classes = ((masses @ self.class_costs) * masses).sum(2)
        between = ((masses[:, :1] @ self.class_costs) * masses[:, 1:]).sum((1, 2))
        mean, highest = by_side(own_squares)
        low, high = _extremes(pairs, met_own)
        reach = 4 * self.lambda_x * highest
        _keep(self.own, 2 * self.lambda_x * mean + of_classes, low, reach + high)
        mean, highest = by_side(squares)
        low, high = _extremes(self.class_costs, met_cross)
        reach = self.lambda_x * highest.sqrt().sum(1).square()
        squared = mean.sum(1) - 2 * apart
        _keep(self.cross, self.lambda_x * squared + between, low, reach + high)


def _keep(into: PooledCosts, *numbers: Tensor) -> None:
    for known, number in zip(into, numbers, strict=True):
        known.copy_(number)


def _extremes(costs: Tensor, met: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest of costs (..., V, V) between classes that meet."""
    low = torch.where(met, costs, torch.inf).amin((-2, -1))
    return low, torch.where(met, costs, -torch.inf).amax((-2, -1))
