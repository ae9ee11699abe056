"""Transport problems between classes of one pool, side by side in Triton, with bounds on errors.

`labels.sinkhorn_pairs` makes a `ClassPool` of the points of all classes, each centred by its own
mean, and `KernelSegments` of some of their pairs, which `solver.solve.solve_segments` solves. Class
distances are cached, so a segment's numbers must not depend on the segments beside it, and a change
of its digits must raise `labels.pair_cache.ENTRY_FORMAT`. Bounds on class distances rest on the
errors below, which must stay upper bounds (`tests/operators/test_segment_errors.py`,
`tests/operators/test_class_pool.py`, `tests/labels/test_segmented_bounds.py`).

Potentials lie one segment after the other, float32, those of rows in one tensor and those of
columns in another, and so do the other vectors of the columns: every point holds one of each per
opposite class. Potentials belong to the cost -2 x'_i . y'_j of the pool; the terms left out of it
are the `offset`:

    ||x_i - y_j||^2 = -2 x'_i . y'_j + ||x'_i||^2 + ||y'_j||^2 + 2 (x'_i - y'_j) . D + ||D||^2

with x' = x - mean, y' = y - mean and D the difference of the means. All but the product depends on
one side only, so it changes potentials and leaves the plan as it is: its mean is the sum of both
variances and ||D||^2. Products of class-centred points are the smallest there are, and so is their
rounding error. A class is rounded without regard to the others: its mean and its unit are its own,
and its sums round as if it were alone (below).

Errors are bounded by numbers of each class, a prime for those of y: A is the largest norm of x', L,
R and E are those of parts of its digits (below), T = L + R, and c bounds the relative error of sums
of products of its smaller digits. u = 2^-24 is the unit roundoff of float32.

Means. The identity holds for any two numbers in place of the means, so the rounding error of a mean
is no error of a cost. It only leaves a mean of x' that is not quite 0, which `drifts` measures, and
||D||^2 is that of the same two numbers. Only the difference x - mean is rounded, each coordinate
once and relative to the difference itself, by 2^-53 however far the class lies from the origin; its
quotient by the unit is rounded once more. Both move x' by at most 2^-52 A, to first order. The rest
of 2^-50 A is for the norms and variances that bounds are made of: their rounding is relative, some
2^-53 (log2 n + log2 d + 8), and of E + c T, which is far below A.

Digits. In units of the class, x' = h + l + r + e: h are whole numbers with ||h|| <= 2^12 and
|h_k| <= 2^11, l is float16 of x' - h, and r of x' - h - l. The error of x' . y' in the exact form
of `segmented_step` is bounded by A and by the largest norms L, R and E of l, r and e in a class,
all measured:

    operation                                     bound on |error|
    e is left out                                 E ||y'|| + ||x'|| E' + E E'
    l r', r l' and r r' are left out              L R' + R L' + R R'
    smaller digits: products, chains, additions   c (||h|| T' + T ||h'|| + L L')
    h h' scale in pieces                          2^-31 A A'
    x - mean and its quotient by the unit         2^-50 (A ||y'|| + ||x'|| A').

c is `adder.chain_error` of one chain, u per chain that is added to the others, and 8 u for
operations on their sum (its product with the scale, three additions). The scale turns a product of
digits into an exponent in base 2. The pieces: h h' is exact; of its product with the scale, the
last 12 bits of h h' and those of the scale past 12 are rounded, 2^-11 of the whole, six times at
most, u each. As ||h|| <= ||x'|| + T + E, all of it is at most

    P ||y'|| + ||x'|| P' + Q,    P = E + c T + 2^-50 A,
    Q = 2^-31 A A' + E E' + L R' + R L' + R R' + c ((T + E) T' + T (T' + E') + L L').

Sums. PyTorch chooses the order of a sum by the shape of the whole batch and by addresses. Here the
last part of a list is added to the first, element by element, until one is left:

    v_i <- v_i + v_(i + h),    h the largest power of two below the number that is left.

An addition of two numbers rounds the same whatever stands beside them, and which two are added
follows from the length of the list alone. Padding to a common length adds nothing but -0.0, which
leaves every number as it is, 0.0 and -0.0 too. A sum of n numbers passes ceil(log2 n) additions, so

    |error| <= ceil(log2 n) 2^-53 sum_i |v_i|    to first order.

Passes. Error bounds of a pass of the exact form, u = 2^-24, for n terms in a sum:

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
with weights p_j = 2^t_j / s it is their entropy, no more than log2 n, less log2 s. So the exponents
make

    sums = u (11 + ln 2 (2 (log2 n + 1) + 3)) (1 + 2^-8) + (n + 512) 2^-52.

Norms. V is the variance of a class, the mean of ||x'||^2, and p = A^2 / V. Over a plan whose
marginals are t off, the mean of ||y'||^2 is at most V' + t A'^2 = V' (1 + t p'). As
sqrt(1 + t p) sqrt(1 + t p') <= 1 + t (p + p'), `peak` is p + p'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.problems import Start, WeightedPoints
from otdd_flash.engine.quasi_newton_kernels import (
    KernelVectors,
    Pace,
    QuasiNewtonKernels,
    SegmentLayout,
)
from otdd_flash.formulas.decision import Form, Goal
from otdd_flash.formulas.evidence import TRIFLE, PassErrors
from otdd_flash.kernels.adder import UNIT, adder_of, chain_error
from otdd_flash.kernels.segments.step import (
    CHAIN_PRODUCTS,
    DIGITS,
    OVERRUN,
    PARTS,
    RANGES,
    ROWS,
    SMALL,
    TERMS_IN_FLOAT32,
    Pool,
    Sums,
    programs_of,
    ranges_of,
    segmented_step,
)

# Of cdist: no cancellation.
DIFFERENCES = "donot_use_mm_for_euclid_dist"

# Largest norm of whole digits, and the largest of them.
WHOLE_NORM, LARGEST_WHOLE = 4096.0, 2047.0

# Coordinates of classes that are rounded together, so that a GPU has few launches and their float64
# arrays are small beside the points: 16 MiB an array.
TOGETHER = 1 << 21


class ClassPool:
    """V classes, one after the other.

    Attributes:
        pool: the points as kernels read them, n rows with the padding.
        starts: (V,) int64, the first row of each class.
        sizes: (V,) int64.
        mean_distances: (V, V) float64, ||D||^2 between the means of two classes.
        variances: (V,) float64, the mean of ||x'||^2.
        units: (V,) float64; x' is so many times its digits.
        norms: (V, 4) float64, the largest norms A, L, R and E.
        drifts: (V,) float64, the norm of the mean of x', which is 0 but for rounding.
        squares: (n,) float32, ||x'||^2.
        chain_error: c.
    """

    def __init__(self, classes: Sequence[WeightedPoints]) -> None:
        device, dim = classes[0].points.device, classes[0].points.shape[1]
        counts = [len(cloud.points) for cloud in classes]
        sizes = torch.tensor(counts)
        self.starts, self.sizes = (sizes.cumsum(0) - sizes).to(device), sizes.to(device)
        n, wide = sum(counts) + OVERRUN, -(-dim // 8) * 8
        coordinates = torch.zeros((DIGITS, n, wide), dtype=torch.float16, device=device)
        self.squares = torch.zeros(n, dtype=torch.float32, device=device)
        means = torch.empty((len(counts), dim), dtype=torch.float64, device=device)
        self.variances, self.units, self.drifts = means.new_empty((3, len(counts))).unbind()
        self.norms = means.new_empty((len(counts), DIGITS))
        for members in _groups(counts, dim):
            chosen = [classes[k] for k in members]
            rows = ClassRows([counts[k] for k in members], device)
            which = torch.tensor(members).to(device)
            places = self.starts[which][rows.owners] + rows.places
            centred = _centred(chosen, rows)
            points, squares = centred.points, centred.squares
            extremes = rows.largest(torch.stack((squares, points.abs().amax(1)), 1))
            unit = _unit(extremes[:, 0].sqrt(), extremes[:, 1], dim)
            parts = digits(points.div_(unit[rows.owners, None]))
            for digit, part in zip(coordinates, parts, strict=False):
                digit[places, :dim] = part
            errors = [halved_sum(part.double().square_()) for part in parts[2:]]
            scales = unit.square()[rows.owners]
            norms = torch.stack((squares, *(error * scales for error in errors)), 1)
            self.squares[places] = squares.float()
            self.norms[which], self.units[which] = rows.largest(norms).sqrt(), unit
            means[which], self.drifts[which] = centred.mean, centred.drift
            self.variances[which] = centred.variance
        masses = torch.cat([cloud.masses for cloud in classes])
        masses = torch.nn.functional.pad(masses, (0, OVERRUN))
        self.pool = Pool(coordinates.flatten(0, 1), masses.log2().clamp_min(-1e30), masses)
        gaps = torch.cdist(means, means, compute_mode=DIFFERENCES)
        self.mean_distances = gaps.square_()
        # One chain may be shorter at the end of its part, and blocks of coordinates are filled up.
        chains = 2 + PARTS * (dim + 64) / CHAIN_PRODUCTS
        self.chain_error = chain_error(CHAIN_PRODUCTS, adder_of(device)) + UNIT * (chains + 8)

    @property
    def dim(self) -> int:
        """The number of coordinates, padding included."""
        return self.pool.coordinates.shape[1]

    @property
    def radii(self) -> Tensor:
        """A (V,) float64, the largest ||x'||."""
        return self.norms[:, 0]

    def product_errors(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on the mean and on the largest error of x' . y' (S,), of exact forms."""
        (reach, low, rest, left), (reach_y, low_y, rest_y, left_y) = (
            self.norms[side].unbind(1) for side in (rows, columns)
        )
        digits_x, digits_y = low + rest, low_y + rest_y
        point, point_y = (
            norms[:, 3] + self.chain_error * (norms[:, 1] + norms[:, 2]) + 2.0**-50 * norms[:, 0]
            for norms in (self.norms[rows], self.norms[columns])
        )
        chains = (digits_x + left) * digits_y + digits_x * (digits_y + left_y) + low * low_y
        both = 2.0**-31 * reach * reach_y + left * left_y + self.chain_error * chains
        both = both + low * rest_y + rest * low_y + rest * rest_y
        # Means of norms over a plan that has the marginals, by Cauchy and Schwarz.
        sizes = self.variances[rows].sqrt(), self.variances[columns].sqrt()
        mean = point * sizes[1] + sizes[0] * point_y + both
        return mean, point * reach_y + reach * point_y + both


class _Centred(NamedTuple):
    """Rows about the means of their k classes: x' (N, d), ||x'||^2 (N,), and numbers of classes.

    The means are (k, d), variances and drifts (k,) as the pool has them.
    """

    points: Tensor
    squares: Tensor
    mean: Tensor
    variance: Tensor
    drift: Tensor


def _centred(classes: Sequence[WeightedPoints], rows: ClassRows) -> _Centred:
    """Classes about their means, and their sums. Products are rounded before they are added."""
    points = torch.cat([cloud.points for cloud in classes]).double()
    masses = torch.cat([cloud.masses for cloud in classes])
    mean = rows.sums(masses[:, None] * points)
    points = points.sub_(mean[rows.owners])
    squares = halved_sum(points.square())
    drift = rows.sums(masses[:, None] * points)
    drift = halved_sum(drift.square()).sqrt()
    return _Centred(points, squares, mean, rows.sums(masses * squares), drift)


def _groups(sizes: Sequence[int], dim: int) -> Iterator[list[int]]:
    """Indices of classes of similar sizes, as many as padded to one have so few coordinates."""
    group: list[int] = []
    for k in sorted(range(len(sizes)), key=sizes.__getitem__):
        # The sizes ascend, so all are padded to this one.
        if group and (len(group) + 1) * sizes[k] * dim > TOGETHER:
            yield group
            group = []
        group.append(k)
    yield group


def digits(points: Tensor) -> tuple[Tensor, ...]:
    """Rounded points, h, l, r, of float16, and e, all of the shape of points in units."""
    whole = points.round()
    left = points - whole
    low = left.half()
    left = left - low.double()
    rest = left.half()
    left = left - rest.double()
    return points.float().half(), whole.half(), low, rest, left


def _unit(reach: Tensor, largest: Tensor, dim: int) -> Tensor:
    """The unit in which points of that largest norm and coordinate have whole digits."""
    # Rounding adds at most half a unit per coordinate.
    unit = torch.maximum(reach / (WHOLE_NORM - dim**0.5 / 2 - 1), largest / LARGEST_WHOLE)
    return torch.where(unit > 0, unit, 1.0)


class ClassRows:
    """N rows that are those of k classes, one class after the other.

    Args:
        sizes: the number of rows of each class.
        device: where the rows are.

    Attributes:
        owners: (N,) int64, which class a row is of.
        places: (N,) int64, which of its class's rows it is.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        counts = torch.tensor(sizes).to(device)
        self._shape, count = (len(sizes), max(sizes)), sum(sizes)
        # Given the number of rows, PyTorch does not wait for the GPU to count them.
        self.owners = torch.repeat_interleave(counts, output_size=count)
        firsts = (counts.cumsum(0) - counts)[self.owners]
        self.places = torch.arange(count, device=device) - firsts

    def sums(self, values: Tensor) -> Tensor:
        """The sums (k, ...) of rows (N, ...) of each class; `values` are overwritten."""
        return halved_sum(self._padded(values, -0.0))

    def largest(self, values: Tensor) -> Tensor:
        """The largest (k, ...) of rows (N, ...) that are not negative, of each class."""
        return self._padded(values, 0.0).amax(1)

    def _padded(self, values: Tensor, filling: float) -> Tensor:
        """The rows (k, most, ...) of each class, the same memory if all have equally many."""
        if self._shape[0] * self._shape[1] == len(values):
            return values.unflatten(0, self._shape)  # type: ignore[no-untyped-call, no-any-return]
        padded = values.new_full((*self._shape, *values.shape[1:]), filling)
        padded[self.owners, self.places] = values
        return padded


def halved_sum(values: Tensor) -> Tensor:
    """The sum over the second dimension; `values` are overwritten."""
    count = values.shape[1]
    while count > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        values[:, : count - half].add_(values[:, half:count])
        count = half
    # All of the values would be kept for a part of them.
    return values[:, 0].clone()


# Differences that are remembered: more of them save few iterations, and half of the memory that
# potentials take is theirs already.
MEMORY = 4

# Bytes of tensors made of potentials before the first iteration, of a column's vectors, and of a
# segment's rows of small tables.
BYTES_PER_POTENTIAL = 24
BYTES_PER_COLUMN = 4 * (5 + 2 * MEMORY)
BYTES_PER_SEGMENT = 4000


class KernelSegments:
    """S problems of cost ||x - y||^2 between classes.

    Args:
        classes: the pool.
        rows: (S,) int64 indices of the classes whose points are the rows.
        columns: (S,) int64 indices of the classes of the columns; the same object as `rows` for
            classes with themselves.
        small: whether no class has more than `SMALL` points, for tiles of that size. A segment's
            numbers depend on it, so it must follow from each segment alone.
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
    """The table (S, 8) of `segmented_step`, by which the kernels find segments."""
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
