"""Transport problems between classes of one pool, all evaluated and moved by five Triton kernels.

Potentials lie one segment after the other, float32, those of rows in one tensor and those of
columns in another, and so do the other vectors of the columns: every point holds one of each per
opposite class. Potentials belong to the cost -2 x'_i . y'_j of `class_pool`; what is left out of it
is the `offset`. `labels.sinkhorn_pairs` makes `KernelSegments`.

What a pass of the exact form may get wrong, u = 2^-24, for n terms in a sum:

    operation                                        bound                       in `PassErrors`
    product x'_i . y'_j                              P ||y'|| + ||x'|| P' + Q    mean, largest
    exponent t <= 1 after the shift, base 2          u (2 |t| + 3)               sums
    exp2 of the card (PTX: 2^-22), of NumPy          4 u                         sums
    eight terms in float32, any order                7 u                         sums
    log2 b, g / epsilon, sums, merges, logarithms    float64                     sums, `TRIFLE`
    f_i as it is stored                              u |f_i|                     stored

Two roundings are relative to t: that of the whole part of the bias added to the first piece of h h'
scale, and that of the rest added to both. The 3 is for the rest of the bias, below 1 / 2 + 2^-10.
Of a sum of terms 2^t with one of at least 1 / 2, the weighted mean of |t| is at most log2 n + 1:
with weights p_j = 2^t_j / s it is their entropy, no more than log2 n, less log2 s. So the
exponents make

    sums = u (11 + ln 2 (2 (log2 n + 1) + 3)) (1 + 2^-8) + (n + 512) 2^-52.

Norms over a plan whose marginals are t off: sum_j c_j ||y'_j||^2 <= V' + t A'^2, so `peak` is
A^2 / V + A'^2 / V': sqrt(1 + t p) sqrt(1 + t p') <= 1 + t (p + p').
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otdd_flash.engine.problems import Start
from otdd_flash.engine.quasi_newton_kernels import (
    KernelVectors,
    Pace,
    QuasiNewtonKernels,
    SegmentLayout,
)
from otdd_flash.formulas.decision import Form, Goal
from otdd_flash.formulas.evidence import TRIFLE, PassErrors
from otdd_flash.kernels.adder import UNIT
from otdd_flash.kernels.segments.step import (
    PARTS,
    RANGES,
    ROWS,
    SMALL,
    TERMS_IN_FLOAT32,
    Sums,
    programs_of,
    ranges_of,
    segmented_step,
)
from otdd_flash.operators.class_pool import ClassPool

# Differences that are remembered: more of them save few iterations, and half of the memory that
# potentials take is theirs already.
MEMORY = 4

# What is made of potentials before the first iteration, a column's vectors, and a segment's rows of
# small tables.
BYTES_PER_POTENTIAL = 24
BYTES_PER_COLUMN = 4 * (5 + 2 * MEMORY)
BYTES_PER_SEGMENT = 4000


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

    dtype = sum_dtype = torch.float32
    pace: Pace = "ahead"
    layouts: list[SegmentLayout]

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
        self._parts = PARTS if coarse_of is None else 1
        self._set_costs(rows, columns)
        sides = ((rows, columns),) if self._symmetric else ((rows, columns), (columns, rows))
        self._tables: list[Tensor] = (
            # Potentials stay where they were when segments went.
            coarse_of._tables if coarse_of else [table_of(classes, *side) for side in sides]
        )
        self._programs = [programs_of(table, small) for table in self._tables]
        self.masses = classes.pool.masses, classes.pool.masses
        if coarse_of is None:
            self._entries = [int(table[:, ROWS].sum()) for table in self._tables]
            self._set_layouts()
            entries = max(int((table[:, ROWS] * table[:, RANGES]).sum()) for table in self._tables)
            highest = torch.empty(entries, dtype=torch.float32, device=rows.device)
            self._sums = Sums(highest, highest.new_empty(entries, dtype=torch.float64))
        else:
            self._entries, self.layouts = coarse_of._entries, coarse_of.layouts
            self._sums = coarse_of._sums

    @property
    def first(self) -> Tensor:
        """The potentials -||x'||^2, which are 0 for the whole cost between a class and itself."""
        classes, side = self._classes, self._sides[1]
        counts = classes.sizes[side]
        starts = torch.repeat_interleave(classes.starts[side] - (counts.cumsum(0) - counts), counts)
        index = torch.arange(len(starts), device=side.device) + starts
        return -classes.squares[index]

    @property
    def softness(self) -> None:
        """None: class distances are of exact marginals."""
        return None

    def iterations(
        self, candidate: Tensor, goal: Goal, form: Form, start: Start
    ) -> QuasiNewtonKernels:
        vectors = KernelVectors(self, candidate, MEMORY)
        return QuasiNewtonKernels(self, vectors, goal, form, start)

    @property
    def device(self) -> torch.device:
        return self.mean_cost.device

    def coarse(self, tolerance: float) -> KernelSegments:
        """The same problems with products of rounded points."""
        return KernelSegments(self._classes, *self._sides, small=self._small, coarse_of=self)

    def softmin_rows(self, g: Tensor, before: Tensor, epsilon: Tensor, active: Tensor) -> Sums:
        """Return the sums that T(g) is made of."""
        return self._half_step(0, epsilon, g, active)

    def softmin_columns(self, f: Tensor, before: Tensor, epsilon: Tensor, active: Tensor) -> Sums:
        """Return the sums that T'(f) is made of, or T(f) of classes with themselves."""
        return self._half_step(-1, epsilon, f, active)

    def keep(self, order: Tensor) -> None:
        """Go on with some segments; potentials stay where they are."""
        rows, columns = (side[order] for side in self._sides)
        self._set_costs(rows, columns)
        self._sides = (rows, rows if self._symmetric else columns)
        self._tables = [table[order] for table in self._tables]
        self._programs = [programs_of(table, self._small) for table in self._tables]
        self._set_layouts()

    def _set_layouts(self) -> None:
        pairs = zip(self._tables, self._entries, strict=True)
        self.layouts = [SegmentLayout.of(table, entries) for table, entries in pairs]

    def _half_step(self, side: int, epsilon: Tensor, other: Tensor, active: Tensor) -> Sums:
        """Sums of one side's rows over what the potentials of the other are for."""
        segmented_step(
            self._classes.pool,
            self._parts,
            self._small,
            self._programs[side],
            self._tables[side],
            active,
            epsilon,
            self._product_scale,
            other,
            self._sums,
        )
        return self._sums

    def _set_costs(self, rows: Tensor, columns: Tensor) -> None:
        """Compute the facts of the costs that the solver asks for, (S,) each."""
        classes = self._classes
        self.mean_cost = classes.variances[rows] + classes.variances[columns]
        self.offset = self.mean_cost + classes.mean_distances[rows, columns]
        reach = 2 * classes.radii[rows] * classes.radii[columns]
        # Norms are those of x - mean, rounded.
        self.cost_spread = 2 * reach * (1 + 2.0**-50 * (classes.dim + 8))
        self.errors = self._errors(rows, columns)
        self._product_scale = 2 * classes.units[rows] * classes.units[columns]

    def _errors(self, rows: Tensor, columns: Tensor) -> PassErrors:
        """Errors of a pass: as in the table above, or one rounding for the coarse form."""
        classes, unit = self._classes, torch.full_like(self.mean_cost, UNIT)
        if self._parts == 1:
            mean = unit * self.mean_cost
            return PassErrors(mean, mean, 0 * unit, 2 * unit, unit, *4 * (0 * unit,))
        terms = torch.maximum(classes.sizes[rows], classes.sizes[columns]).double()
        exponents = math.log(2) * (2 * (terms.log2() + 1) + 3)
        sums = unit * (4 + TERMS_IN_FLOAT32 - 1 + exponents) * (1 + 2.0**-8)
        sums = sums + 2.0**-52 * (terms + 512)
        mean, largest = (2 * errors for errors in classes.product_errors(rows, columns))
        variances = classes.variances[rows], classes.variances[columns]
        peaks = [
            torch.where(variance > 0, classes.radii[side].square() / variance, 0)
            for side, variance in zip((rows, columns), variances, strict=True)
        ]
        sizes = [variance.sqrt() for variance in variances]
        apart = classes.mean_distances[rows, columns].sqrt()
        # The means of x' and y' are 0 but for rounding, and meet D in the cost.
        drift = classes.drifts[rows] + classes.drifts[columns]
        drift = drift + 2.0**-52 * (terms + 4) * (sizes[0] + sizes[1])
        none = 0 * unit
        moments = self.mean_cost + apart.square()
        offset = 2 * drift * apart + 2.0**-52 * (terms + classes.dim + 8) * moments
        others = none, none, none + TRIFLE
        return PassErrors(mean, largest, peaks[0] + peaks[1], sums, unit, offset, *others)


def is_small(sizes: Tensor) -> Tensor:
    """Whether problems take small tiles, given the sizes of their classes (S, 2)."""
    return (sizes <= SMALL).all(1)


def bytes_of(sizes: Tensor) -> Tensor:
    """Bytes that problems take (S,), given the sizes of their classes (S, 2) int64."""
    partial = sizes * ranges_of(sizes.flip(1))
    vectors = BYTES_PER_POTENTIAL * sizes.sum(1) + BYTES_PER_COLUMN * sizes[:, 1]
    return vectors + 12 * partial.amax(1) + BYTES_PER_SEGMENT


def table_of(classes: ClassPool, rows: Tensor, columns: Tensor) -> Tensor:
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
