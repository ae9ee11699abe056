"""Scores between all points of B small problems, stored, and facts of their three costs.

A pool is memory of fixed size for up to B problems, which `solver.small` makes once and fills with
one batch after another. A problem has two clouds, n points of x and m of y, in room for N and M of
them: `points` of either side by side, L = N + M. Its scores are one matrix (L, L) of four blocks,
those of the self terms on the diagonal and those of the cross term beside them, once for rows of x
and once for rows of y. `kernel_pool` computes with them in Triton, `torch_pool` on a processor;
`kernel_pool.MatrixPool` is for a cost matrix that is given, of which nothing is stored.
`derivatives.loss` makes a `Room` to ask whether its clouds suit a pool.

In Triton everything is launched without asking the device anything: sizes, weights and epsilon are
read from its memory, so that one recording serves all problems that fit the room. A change must
keep that, and must keep `error_share`, `rounding` and the magnitudes upper bounds, because they are
the error bounds of certificates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.facts import SIDES, CostFacts
from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.engine.problems import Evaluated, Start, Vectors
from otdd_flash.engine.recording import run_branches
from otdd_flash.formulas.decision import Form, Goal, Levels
from otdd_flash.formulas.evidence import PassErrors
from otdd_flash.formulas.operations import Numbers, constant, where
from otdd_flash.operators.base import Certifiable
from otdd_flash.operators.point_scores import StoredScores
from otdd_flash.operators.torch_operator import TorchOperator

# Unit roundoff of stored scores.
UNIT = torch.finfo(torch.float32).eps / 2

# Products that are in float64 at once.
PRODUCTS = 1 << 24


class Room(NamedTuple):
    """The sizes that the memory of a pool has room for: problems may be smaller.

    Attributes:
        problems: B.
        n: N, points of x in each.
        m: M, points of y.
        dim: of the points; 0 where costs are given.
        classes: of both sides together.
        dtype: of the points, or of costs that are given.
        device: where.
        in_triton: whether kernels compute with it; else PyTorch does, on a processor.
        aligned: whether costs that are given are, as `kernels.matrix.facts` says.
    """

    problems: int
    n: int
    m: int
    dim: int
    classes: int
    dtype: torch.dtype
    device: torch.device
    in_triton: bool = True
    aligned: bool = True

    @property
    def points(self) -> int:
        """L = N + M."""
        return self.n + self.m

    @property
    def sides(self) -> tuple[slice, slice]:
        """The places of x and y among the points of a problem."""
        return slice(0, self.n), slice(self.n, self.n + self.m)

    @property
    def bytes(self) -> int:
        """The bytes of a pool: scores above all, and tensors made of points and products.

        Where costs are given, they are vectors, and sums of a column in hundreds of parts.
        """
        points = self.problems * self.points
        if not self.dim:
            return 256 * points + 1024 * self.m
        products = min(8 * PRODUCTS, 8 * points * max(self.n, self.m))
        # A processor keeps anchors as large as scores.
        scores = points * self.points * (4 if self.in_triton else 8)
        return scores + 2 * products + 32 * points * self.dim


class PooledCosts(NamedTuple):
    """Facts of the costs of some terms, each of one shape, float64, in units of the cost.

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


class PooledSegments(ABC):
    """The cross terms of B problems, or their 2 B self terms, those of x and y in turn.

    Vectors of all problems lie one after the other: of rows (B N,), of columns (B M,), and of self
    terms (B L,). The errors of a pass are about those that `one_problem` states of a single one:
    certificates measure them again.

    Args:
        pool: the problems.
        own: whether these are the self terms.
    """

    dtype = sum_dtype = torch.float32

    def __init__(self, pool: Pool, *, own: bool) -> None:
        self._pool, self._own = pool, own

    @abstractmethod
    def iterations(self, form: Form) -> PooledIterations:
        """Make their iterations, before any problem."""

    def begin(
        self, iterations: PooledIterations, candidate: Tensor, settings: Tensor, start: Start
    ) -> None:
        """Begin afresh with what stands in the pool.

        Args:
            iterations: of these segments.
            candidate: potentials of columns.
            settings: a goal and two unit roundoffs (7,) float64.
            start: where to.
        """
        iterations.begin(settings, start, candidate)

    @abstractmethod
    def evaluated(self, vectors: Vectors, epsilon: Tensor) -> Evaluated:
        """Return the potentials of the last evaluation, which was at epsilon () float64."""

    @property
    def facts(self) -> PooledCosts:
        """Facts of the costs, (S,) each."""
        known = self._pool.own if self._own else self._pool.cross
        return PooledCosts(*(number.reshape(-1) for number in known))

    @property
    def mean_cost(self) -> Tensor:
        """The mean cost, above the lowest one where that is negative (S,)."""
        return self.facts.above_lowest

    @property
    def cost_spread(self) -> Tensor:
        """R >= max C - min C (S,)."""
        return self.facts.spread

    @property
    def offset(self) -> Tensor:
        """0: no term of one side is left out of the costs (S,)."""
        return torch.zeros_like(self.facts.mean)

    @property
    def errors(self) -> PassErrors:
        """Estimates of what a pass in float32 rounds (S,)."""
        return pass_errors(self.facts.mean, self.facts.lowest)

    @property
    def placeholder(self) -> tuple[Goal, Start]:
        """A goal and a start to make iterations with; `begin` replaces both."""
        ones = torch.ones(len(self.mean_cost), dtype=torch.float64)
        return Goal(1.0, 1.0, 1.0, 0), Start(Levels.descending(ones), torch.zeros_like(ones))


class PooledIterations(Protocol):
    """Iterations of pooled segments."""

    @property
    def active(self) -> Tensor:
        """Which segments are not done (S,)."""
        ...

    @property
    def terms(self) -> Tensor:
        """The `engine.problems.SegmentReport` of each, of when it was active last (S, 8)."""
        ...

    @property
    def vectors(self) -> Vectors:
        """Potentials and what else is remembered of each column."""
        ...

    def begin(self, settings: Tensor, start: Start, candidate: Tensor) -> None:
        """Begin afresh with other problems, to a goal and two unit roundoffs (7,) float64."""
        ...

    def step(self) -> None:
        """Evaluate the candidates and choose the next."""
        ...


class AskedIterations(PooledIterations, Protocol):
    """Iterations on a processor, where to ask takes no time."""

    @property
    def is_nan(self) -> bool:
        """Whether a marginal error is NaN, as costs that are not finite make it."""
        ...


class Pool(ABC):
    """The data of B problems for iterations and certificates, whatever scores are made of.

    Attributes:
        room: that there is.
        of_costs: (3,) float64, the numbers of the costs that `prepare` reads; the kind of pool says
            which.
        masses: (B, L) float64, 0 where there is no point.
        asymmetry: (B, 4) float64: of the blocks [x, x] and [y, y] of W, how far entries are from
            their mirror images, and the largest entries.
        own_magnitudes: (B, L) float64: |C_ij| <= of i + of j within a side.
        cross_magnitudes: (B, L) float64: |C_ij| <= of i + of j between sides.
        cross: of the cross terms, (B,).
        own: of the self terms, (B, 2).
        error_share: error of a cost over its magnitudes.
        rounding: of a score over its magnitudes.
        both_self_terms: those of x and of y of each problem in turn, as one term of 2 B problems,
            where that takes less time than one after the other; else None.
    """

    error_share, rounding = 0.0, 0.0
    both_self_terms: Certifiable | None = None

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

    @abstractmethod
    def prepare(self, *, own: bool) -> None:
        """Compute everything but what was filled in, of self terms too if `own`."""

    @abstractmethod
    def segments(self, tables: Sequence[Tensor], *, own: bool) -> PooledSegments:
        """The cross terms, or the self terms, for iterations.

        Args:
            tables: of `tables_of` for all that there is room for, on the device; kernels read there
                how many points there are.
            own: whether these are the self terms.
        """

    @abstractmethod
    def term(self, name: str) -> Certifiable:
        """The term "xy", "xx" or "yy", for certificates."""


class ScorePool(Pool):
    """The scores of B problems, made by `prepare` from what stands in the inputs.

    Inputs, to be filled first; where there is no point the masses are 0 and the rest is finite:

        points (B, L, d), masses (B, L) float64, labels (B, L) int64, of both sides together,
        class_distances (B, V, V) float64, W, of which the block [y, x] is not read, and
        of_costs (3,) float64, lambda_x, lambda_y and the number of the classes of x.

    Attributes:
        log2_masses: (B, L) float64.
        centre: (B, 1, d) float64, the mean of both clouds' means.
        class_costs: (B, V, V) float64, lambda_y W, symmetric.
    """

    rounding = UNIT

    def __init__(self, room: Room) -> None:
        super().__init__(room)
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
        """Make the class costs of self terms symmetric, as `cost.class_table` says."""
        given = self.class_distances
        if given.shape[1] == 1:
            # One class at no distance from itself: there is no table.
            return
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

    @abstractmethod
    def _store(self, points: Tensor, squares: Tensor, rows: slice, columns: slice) -> None:
        """Store the scores of one block and its transpose.

        Args:
            points: (B, L, d) float64 about a centre.
            squares: (B, L), their squared lengths.
            rows: of the block.
            columns: of the block; the same object as `rows` for a symmetric block.
        """

    @abstractmethod
    def block(self, rows: int, columns: int) -> Tensor:
        """Scores (B, r, c) float32 between the points of two sides, 0 for x and 1 for y."""

    @abstractmethod
    def signed_plan(
        self, cross: Tensor, own: Tensor | None, epsilon: Tensor, rows: slice
    ) -> Tensor:
        """Rows of the plans of the problems, those of self terms negative, (B, r, L) float32.

        Args:
            cross: (B, L) float32, potentials of the cross terms.
            own: (B, L) float32, of the self terms; None leaves their plans 0.
            epsilon: () float64.
            rows: which, all of them of one side.
        """

    def operator(
        self, term: str, sizes: tuple[int, int], costs: CostFacts
    ) -> TorchOperator[StoredScores]:
        """The cost of a term of the first problem, of so many points, of which so much is known."""
        starts, (one, two) = (0, self.room.n), SIDES[term]
        rows, columns = (slice(starts[k], starts[k] + sizes[k]) for k in (one, two))
        magnitudes = (self.own_magnitudes if one == two else self.cross_magnitudes)[0]
        both = magnitudes[rows], magnitudes[columns]
        scores = StoredScores(
            self.block(one, two)[0, : sizes[one], : sizes[two]],
            costs,
            magnitudes=both,
            cost_errors=(self.error_share * both[0], self.error_share * both[1]),
            cost_rounding=self.rounding,
        )
        return TorchOperator(scores, self.masses[0, rows], self.masses[0, columns])

    def _learn(self, squares: Tensor, own_squares: Tensor, apart: Tensor) -> None:
        """Compute the facts of the costs; `apart` is the product of the means (B,)."""
        self.log2_masses.copy_(self.masses.log2())
        torch.mul(own_squares, 2 * self.lambda_x, out=self.own_magnitudes)
        torch.mul(squares, 2 * self.lambda_x, out=self.cross_magnitudes)
        mean, highest = self._by_side(own_squares)
        _keep(self.own, 2 * self.lambda_x * mean, 4 * self.lambda_x * highest)
        mean, highest = self._by_side(squares)
        reach = highest.sqrt().sum(1).square()
        _keep(self.cross, self.lambda_x * (mean.sum(1) - 2 * apart), self.lambda_x * reach)
        if self.room.classes > 1:
            self._learn_classes()

    def _learn_classes(self) -> None:
        """Add what class distances are to the facts of the costs."""
        x, y = self.room.sides
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
        self.own_magnitudes.add_(largest)
        self.cross_magnitudes.add_(largest)
        met = masses > 0
        met_own = met[:, :, :, None] & met[:, :, None, :]
        met_cross = met[:, 0, :, None] & met[:, 1, None, :]
        self.own.mean.add_(((masses @ self.class_costs) * masses).sum(2))
        between = (masses[:, :1] @ self.class_costs) * masses[:, 1:]
        self.cross.mean.add_(between.sum((1, 2)))
        _widen(self.own, self.class_costs[:, None], met_own)
        _widen(self.cross, self.class_costs, met_cross)

    def _by_side(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over a side's masses, and the most where there are any, (B, 2) each."""
        weighted, there = values * self.masses, torch.where(self.masses > 0, values, 0)
        sides = self.room.sides
        return (
            torch.stack([weighted[:, side].sum(1) for side in sides], 1),
            torch.stack([there[:, side].amax(1) for side in sides], 1),
        )


def pass_errors(mean: Numbers, lowest: Numbers) -> PassErrors:
    """Estimates of what rounding does to a pass in float32, of costs of such a mean and least."""
    below = where(lowest > 0, 0.0, lowest)
    none, unit = constant(mean, 0.0), constant(mean, UNIT)
    reach = UNIT * (mean - 2 * below)
    return PassErrors(reach / 2, reach / 2, none, unit / 2, none, none, unit, reach, none)


def _keep(into: PooledCosts, mean: Tensor, highest: Tensor) -> None:
    """Keep the facts of costs without class distances, which are not negative."""
    into.mean.copy_(mean)
    into.lowest.zero_()
    into.highest.copy_(highest)


def _widen(facts: PooledCosts, costs: Tensor, met: Tensor) -> None:
    """Add costs (..., V, V) between classes that meet to the range of costs."""
    facts.lowest.add_(torch.where(met, costs, torch.inf).amin((-2, -1)))
    facts.highest.add_(torch.where(met, costs, -torch.inf).amax((-2, -1)))


def tables_of(room: Room, n: int, m: int, *, symmetric: bool) -> list[Tensor]:
    """Tables (S, 8) int64 of `segmented_step`, by which kernels find segments of so many points.

    Rows first, and then with columns as rows; a single table of self terms.
    """
    first = torch.arange(room.problems) * room.points
    one, (start_x, start_y) = torch.ones_like(first), (first, first + room.n)
    if symmetric:
        sides = ((start_x, n * one), (start_y, m * one))
        # Rows, columns and their sums all lie where the points do.
        own = [(start, size, start, start, size, start, start, one) for start, size in sides]
        return [torch.stack([torch.stack(columns, 1) for columns in own], 1).flatten(0, 1)]
    index = torch.arange(room.problems)
    of_x, of_y = (start_x, n * one, index * room.n), (start_y, m * one, index * room.m)
    return [
        torch.stack((*rows, *columns, rows[2], one), 1)
        for rows, columns in ((of_x, of_y), (of_y, of_x))
    ]
