"""Softmins, sums of plans and products of a cost that comes in pairs of blocks, put together.

    f_i = -epsilon log sum_c w_c exp(-f_i^c / epsilon)

with the softmin f^c of block c of the columns, whose masses are divided by their sum w_c. Each pair
of blocks is a cost like any other, and its operator is made when its turn comes. Sums of plans and
products add up in the order in which pairs come; softmins are joined in float64. Where blocks come
from is for others to say: from host memory or a file (`blocked`), or from other ranks (`ring`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.host_points import Block
from otdd_flash.cost.points import DOUBLE_UNIT, LabelledCost
from otdd_flash.operators.base import Applied, Epsilon, Marginals, refined
from otdd_flash.operators.block_tiles import BlockOperator, Build, Joined, Tile
from otdd_flash.operators.packed_blocks import Packing, There

# Roundings of a mass that is divided by its block's and multiplied again.
ROUNDINGS = 8


class BlockSums(ABC):
    """The operations of `Operator` over pairs of blocks that a subclass provides.

    Args:
        cost: the whole.
        build: makes the operator of a pair of blocks.
        coarse: what this one is to refine; it has the same costs in `marginals`.
    """

    def __init__(
        self, cost: LabelledCost, build: Build, *, coarse: BlockSums | None = None
    ) -> None:
        self.cost, self._build, self._coarse = cost, build, coarse
        self.a, self.b, self.shape = cost.a, cost.b, cost.shape
        # By side and block; these live as long as this.
        self._masses: dict[tuple[int, int], tuple[Tensor, float]] = {}

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of the potentials."""

    @abstractmethod
    def tiles(self, *, upper: bool = False, points: bool = False) -> Iterator[Tile]:
        """All pairs of blocks; their points themselves are there if asked for.

        Of a cloud with itself if `upper`: each pair once, and none of a block's own twice.
        """

    @property
    @abstractmethod
    def additions(self) -> int:
        """Pairs of blocks whose sums make one, at the most."""

    def measured_tiles(self) -> Iterator[Tile]:
        """Yield the pairs of blocks that determine the errors of the costs."""
        return self.tiles(upper=self.cost.symmetric, points=True)

    @property
    @abstractmethod
    def packing(self) -> Packing | None:
        """How blocks are packed; None where operators take points as they are, and no guess."""

    def is_near(self, joined: Joined, guess: Tensor) -> bool:
        """Whether softmins are so near a guess that float32 holds the sums beside it."""
        return self.packing is None or bool(joined.are_near(guess))

    def tile(self, sides: tuple[There, There]) -> Tile:
        """The cost between two blocks, of a cloud with itself if they are one."""
        x, y = sides
        diagonal = x is y
        rows, points = x.block.rows, (x.points, y.points)
        part = self.cost.part(rows, rows if diagonal else y.block.rows, points, diagonal=diagonal)
        part.packed, part.known_of = (x.packed, y.packed), (x.known, y.known)
        part.a, row_mass = self._normalised(0, x.block, part.a)
        part.b, column_mass = self._normalised(0 if diagonal else 1, y.block, part.b)
        operator = self._build(part)
        if self._coarse is not None:
            operator = cast(BlockOperator, refined(operator))
        return Tile(sides, operator, (row_mass, column_mass), diagonal)

    def _normalised(self, side: int, block: Block, masses: Tensor) -> tuple[Tensor, float]:
        """Masses (k,) of a block over their sum, and the sum; found once, as the host waits."""
        key = side, id(block)
        if key not in self._masses:
            mass = float(masses.sum())
            self._masses[key] = masses / (mass or 1.0), mass
        return self._masses[key]

    @property
    def costs(self) -> CostFacts:
        """Facts of the costs, from all pairs of blocks."""
        return self._costs

    @cached_property
    def _costs(self) -> CostFacts:
        of_rows, of_columns = self.accurate_errors
        error = self.rounding + float(self.a @ of_rows + self.b @ of_columns)
        return CostFacts(self.dtype, self.cost.mean_cost, *self.cost.cost_range, error)

    @property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): errors of costs in accurate `marginals`, but for `rounding`."""
        return self._errors[0]

    @property
    def rounding(self) -> float:
        """The mean error of costs where they are stored."""
        return self._errors[1]

    @cached_property
    def _errors(self) -> tuple[tuple[Tensor, Tensor], float]:
        if self._coarse is not None:
            return self._coarse._errors
        of_rows, of_columns = torch.zeros_like(self.a), torch.zeros_like(self.b)
        if self.cost.symmetric:
            of_columns = of_rows
        rounding = 0.0
        for tile in self.measured_tiles():
            rows, columns = tile.operator.accurate_errors
            _raise(of_rows, tile.rows, rows)
            _raise(of_columns, tile.columns, columns)
            rounding = max(rounding, tile.operator.rounding)
        return (of_rows, of_columns), rounding

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        if self.cost.symmetric and guess is g:
            return self._symmetric_softmin(g, epsilon)
        return self._softmin(g, epsilon, guess, columns=False)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        return self._softmin(f, epsilon, guess, columns=True)

    def _softmin(
        self, potential: Tensor, epsilon: Epsilon, guess: Tensor | None, *, columns: bool
    ) -> Tensor:
        """The softmin of rows or of columns; a guess too far from it costs another pass."""
        joined = Joined(self.b if columns else self.a, epsilon)
        for tile in self.tiles():
            own, other, mass = tile.rows, tile.columns, tile.masses[1]
            if columns:
                own, other, mass = tile.columns, tile.rows, tile.masses[0]
            near = None if guess is None else guess[own]
            found = tile.operator.softmin_part(potential[other], epsilon, near, columns=columns)
            joined.add(own, found, mass)
        if guess is not None and not self.is_near(joined, guess):
            return self._softmin(potential, epsilon, None, columns=columns)
        return joined.potential.to(self.dtype)

    def _symmetric_softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """The softmin of one potential, each pair of blocks computed once."""
        joined = self.joined_pairs(f, epsilon)
        if not self.is_near(joined, f):
            return self._softmin(f, epsilon, None, columns=False)
        return joined.potential.to(self.dtype)

    def joined_pairs(self, f: Tensor, epsilon: Epsilon) -> Joined:
        """What pairs of blocks, each taken once, give to the softmin of one potential (n,)."""
        joined = Joined(self.a, epsilon)
        for tile in self.tiles(upper=True):
            one, other = tile.some(f, f)
            of_rows, of_columns = tile.operator.softmin_pair(one, other, epsilon)
            joined.add(tile.rows, of_rows, tile.masses[1])
            if not tile.diagonal:
                joined.add(tile.columns, of_columns, tile.masses[0])
        return joined

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,)."""
        rows, row_errors = torch.zeros_like(self.a), torch.zeros_like(self.a)
        columns, column_errors = torch.zeros_like(self.b), torch.zeros_like(self.b)
        if once := self.cost.symmetric and f is g:
            columns, column_errors = rows, row_errors
        cost_rounding = relative_error = lost = 0.0
        for tile in self.tiles(upper=once, points=True):
            here, there, mass = tile.rows, tile.columns, tile.mass
            found = tile.operator.marginals(*tile.some(f, g), epsilon, accurate=accurate)
            _raise(row_errors, here, found.row_errors)
            _raise(column_errors, there, found.column_errors)
            rows[here] += mass * found.rows
            if not tile.diagonal:
                columns[there] += mass * found.columns
            cost_rounding = max(cost_rounding, found.cost_rounding)
            relative_error = max(relative_error, found.relative_error)
            lost = max(lost, found.lost)
        return Marginals(
            rows,
            columns,
            row_errors,
            column_errors,
            cost_rounding,
            relative_error + (self.additions + ROUNDINGS) * DOUBLE_UNIT,
            lost,
        )

    def apply_plan(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        values: Tensor,
        *,
        transposed: bool = False,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> Applied:
        """P V (n, k) and P 1 (n,), or P^T U (m, k) and P^T 1 (m,); of P o A B^T with `factors`."""
        masses = torch.zeros_like(self.b if transposed else self.a)
        out = values.new_zeros((len(masses), values.shape[1]), dtype=self.dtype)
        for tile in self.tiles(points=True):
            own, other = (tile.columns, tile.rows) if transposed else (tile.rows, tile.columns)
            found = applied(tile, f, g, epsilon, values[other], transposed, factors)
            if found is not None:
                out[own] += found.values
                masses[own] += found.masses
        return Applied(out, masses)


def applied(
    tile: Tile,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    values: Tensor,
    transposed: bool,
    factors: tuple[Tensor, Tensor] | None,
) -> Applied | None:
    """What a pair of blocks adds to a product with the plan of f (n,) and g (m,), if anything.

    Rows of a tile that adds nothing have no plan.
    """
    if tile.masses[0 if transposed else 1] == 0:
        return None
    found = tile.operator.apply_plan(
        f[tile.rows],
        g[tile.columns],
        epsilon,
        values,
        transposed=transposed,
        factors=factors and (factors[0][tile.rows], factors[1][tile.columns]),
    )
    return Applied(tile.mass * found.values, tile.mass * found.masses)


def _raise(errors: Tensor, rows: slice | Tensor, found: Tensor) -> None:
    """Raise the errors of some rows to those given, where they are larger."""
    errors[rows] = torch.maximum(errors[rows], found)
