"""Transport problems between classes of one pool, all updated by two launches of Triton kernels.

Potentials lie one segment after the other, float32, those of rows in one tensor and those of
columns in another: every point holds one potential per opposite class. They belong to the cost
-2 x'_i . y'_j of `class_pool`; what is left out of it is the `offset`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otdd_flash.kernels.segmented_step import (
    RANGES,
    ROWS,
    SMALL,
    Sums,
    programs_of,
    ranges_of,
    segmented_step,
)
from otdd_flash.kernels.segmented_update import segmented_update
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.operators.kernel import PRODUCT_DEPTH
from otdd_flash.operators.segments import Update

LOG2_E = math.log2(math.e)

# What is made of potentials before the first iteration, and a segment's rows of small tables.
BYTES_PER_POTENTIAL = 24
BYTES_PER_SEGMENT = 800


class KernelSegments:
    """S problems of cost ||x - y||^2 between classes.

    Args:
        classes: the pool.
        rows: (S,) int64 indices of the classes whose points are the rows.
        columns: (S,) likewise; the same object as `rows` for classes with themselves.
        small: whether no class has more than `SMALL` points, for tiles of that size. It is part of
            what a segment's numbers depend on, so it must follow from each segment alone.
        coarse_of: the problems that these are to be a less accurate form of.
    """

    dtype = torch.float32
    steps_between_looks = 8

    def __init__(
        self,
        classes: ClassPool,
        rows: Tensor,
        columns: Tensor,
        *,
        small: bool,
        coarse_of: KernelSegments | None = None,
    ) -> None:
        self._classes, self._sides, self._small = classes, (rows, columns), small
        self._symmetric = rows is columns
        self._parts = 3 if coarse_of is None else 1
        self._set_costs(rows, columns)
        sides = ((rows, columns),) if self._symmetric else ((rows, columns), (columns, rows))
        self._tables = [_table(classes, *side) for side in sides]
        self._programs = [programs_of(table, small) for table in self._tables]
        if coarse_of is None:
            self._potentials = [_first_potentials(classes, side[0]) for side in sides]
            entries = max(int((table[:, ROWS] * table[:, RANGES]).sum()) for table in self._tables)
            empty = torch.empty((2, entries), dtype=self.dtype, device=rows.device)
            self._sums = Sums(*empty)
        else:
            self._potentials, self._sums = coarse_of._potentials, coarse_of._sums

    def coarse(self, tolerance: float) -> KernelSegments:
        """The same with the products of rounded points."""
        return KernelSegments(self._classes, *self._sides, small=self._small, coarse_of=self)

    def update(self, side: int, epsilon: Tensor, relaxation: Tensor, active: Tensor) -> Update:
        """Move the potentials of one side towards their softmin."""
        other = 0 if self._symmetric else 1 - side
        table, pool = self._tables[side], self._classes.pool
        inverse = LOG2_E / epsilon
        scales = torch.stack((inverse * self._product_scale, inverse), 1).float()
        segmented_step(
            pool,
            self._parts,
            self._small,
            self._programs[side],
            table,
            active,
            scales,
            self._potentials[other],
            self._sums,
        )
        seen = segmented_update(
            self._sums, pool.masses, table, active, epsilon, relaxation, self._potentials[side]
        )
        return Update(*seen.unbind(1))

    def keep(self, order: Tensor) -> None:
        """Go on with some segments; potentials stay where they are."""
        rows, columns = (side[order] for side in self._sides)
        self._set_costs(rows, columns)
        self._sides = (rows, rows if self._symmetric else columns)
        self._tables = [table[order] for table in self._tables]
        self._programs = [programs_of(table, self._small) for table in self._tables]

    def _set_costs(self, rows: Tensor, columns: Tensor) -> None:
        """What the solver wants to know of the costs, (S,) each."""
        classes = self._classes
        self.mean_cost = classes.variances[rows] + classes.variances[columns]
        self.offset = self.mean_cost + classes.mean_distances[rows, columns]
        reach = 2 * classes.radii[rows] * classes.radii[columns]
        self.cost_spread = 2 * reach
        steps = classes.dim * self._parts / PRODUCT_DEPTH
        self.cost_error = torch.finfo(self.dtype).eps / 2 * (3 + steps) * reach
        self._product_scale = 2 * classes.scales[rows] * classes.scales[columns]


def is_small(sizes: Tensor) -> Tensor:
    """Whether problems take small tiles, given the sizes of their classes (S, 2)."""
    return (sizes <= SMALL).all(1)


def bytes_of(sizes: Tensor) -> Tensor:
    """Bytes that problems take (S,), given the sizes of their classes (S, 2) int64."""
    partial = sizes * ranges_of(sizes.flip(1))
    return BYTES_PER_POTENTIAL * sizes.sum(1) + 8 * partial.amax(1) + BYTES_PER_SEGMENT


def _table(classes: ClassPool, rows: Tensor, columns: Tensor) -> Tensor:
    """Where the kernels find segments (S, 8), as `segmented_step` names its columns."""
    sizes = classes.sizes[rows], classes.sizes[columns]
    ranges = ranges_of(sizes[1])
    partial = sizes[0] * ranges
    offsets = (values.cumsum(0) - values for values in (*sizes, partial))
    row_offset, column_offset, partial_offset = offsets
    return torch.stack(
        (
            classes.starts[rows],
            sizes[0],
            row_offset,
            classes.starts[columns],
            sizes[1],
            column_offset,
            partial_offset,
            ranges,
        ),
        1,
    )


def _first_potentials(classes: ClassPool, side: Tensor) -> Tensor:
    """The potentials -||x'||^2, which are 0 for the whole cost between a class and itself."""
    counts = classes.sizes[side]
    starts = torch.repeat_interleave(classes.starts[side] - (counts.cumsum(0) - counts), counts)
    index = torch.arange(len(starts), device=side.device) + starts
    return -classes.squares[index]
