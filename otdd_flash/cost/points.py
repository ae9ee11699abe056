"""Labelled clouds of points, and the cost between two of them.

    C_ij = lambda_x ||x_i - y_j||^2 + lambda_y W[l_i, l_j]

Points stay as they were given, on the device or streamed to it. Statistics are computed in float64
from a few rows at a time (`in_float64`), without a float64 copy of all points. Those that bound the
cost (`cost_range`, `magnitudes`, `lost_errors`) enter certificates, so they must be true bounds.

A `Cloud` is part of several costs, those with other clouds and that with itself. Its statistics are
computed once for all of them, and for all steps of a flow towards it.

A `LabelledCost` has the data and the statistics from which operators are built. They read points
relative to the mean of both clouds' means: C is unchanged by that and the rounding error shrinks.
`operators.comparison`, `operators.sharing` and `labels.sinkhorn_pairs` make a `LabelledCost`;
derivatives, flows and others call functions of points, such as `squared_distances` and
`less_origin`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostRange
from otdd_flash.cost.host_points import PIECE_BYTES, HostPoints, Streaming, slices
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.fingerprint import forget, remembered
from otdd_flash.samples import LabeledSamples

# Points (n, d) on the device, or what streams them there.
Points = Tensor | HostPoints

# Coordinates that are in float64 at once: 2 MiB fit a core's cache. A GPU has room for 32 MiB, and
# takes longer to launch a pass over 16 MiB than to run it.
CHUNK_ELEMENTS_CPU = 1 << 18
CHUNK_ELEMENTS_GPU = 1 << 22


class Extent(NamedTuple):
    """The mean and the bounding box of a cloud.

    Attributes:
        mean: sum_i a_i x_i (d,), float64, within the ends however sums are rounded: so the costs of
            equal points are 0.
        ends: the lowest and the highest value of every coordinate, (d,) each.
    """

    mean: Tensor
    ends: tuple[Tensor, Tensor]


def in_float64(points: Points, centre: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of rows and their points (k, d), less a centre (d,), in a reused float64 buffer.

    The caller may overwrite the buffer. A GPU subtracts the centre as it copies, in one pass; on a
    CPU that would allocate another float64 copy.
    """
    count, dim = points.shape
    elements = CHUNK_ELEMENTS_GPU if points.is_cuda else CHUNK_ELEMENTS_CPU
    size = min(count, max(1, elements // dim))
    buffer = torch.empty((size, dim), dtype=torch.float64, device=points.device)
    held: Iterable[Tensor]
    if isinstance(points, HostPoints):
        # On a GPU few blocks: the host waits for each.
        blocks = max(1, PIECE_BYTES // (4 * elements)) if points.is_cuda else 1
        held = points.stream(slices(count, blocks * size))
    else:
        held = [points]
    first = 0
    for there in held:
        for rows in torch.split(there, size):
            some = buffer[: len(rows)]
            if centre is None:
                some.copy_(rows)
            elif rows.device.type == "cpu":
                some.copy_(rows).sub_(centre)
            else:
                torch.sub(rows, centre, out=some)
            yield slice(first, first + len(rows)), some
            first += len(rows)


def squared_distances(points: Points, *centres: Tensor) -> Tensor:
    """Compute ||x_i - c||^2 (n,), float64, or (k, n) for k centres (d,); points are read once."""
    shape = len(centres), points.shape[0]
    lengths = torch.empty(shape, dtype=torch.float64, device=points.device)
    alone = centres[0] if len(centres) == 1 else None
    for part, rows in in_float64(points, alone):
        for place, centre in enumerate(centres):
            centred = rows if alone is not None else rows - centre
            torch.linalg.vector_norm(centred, dim=1, out=lengths[place, part])
    found = lengths.square_()
    return found if alone is None else found[0]


def squared_norms(points: Points) -> Tensor:
    """Compute ||x_i||^2 (n,), float64."""
    lengths = torch.empty(points.shape[0], dtype=torch.float64, device=points.device)
    for part, rows in in_float64(points):
        torch.linalg.vector_norm(rows, dim=1, out=lengths[part])
    return lengths.square_()


def weighted_sum(points: Points, masses: Tensor, centre: Tensor | None = None) -> Tensor:
    """Compute sum_i a_i x_i (d,) or sum_i a_i (x_i - c), float64, for masses (n,) on the device."""
    total = masses.new_zeros((1, points.shape[1]))
    for part, rows in in_float64(points, centre):
        total.addmm_(masses[None, part], rows)
    return total[0]


def weighted_mean(points: Points, masses: Tensor) -> Tensor:
    """Compute sum_i a_i x_i (d,), float64, for masses (n,); streamed points are read once."""
    if isinstance(points, HostPoints):
        return extent(points, masses).mean
    return weighted_sum(points, masses)


def extent(points: Points, masses: Tensor) -> Extent:
    """Compute mean and bounding box of points with masses (n,); streamed ones are read once."""
    if isinstance(points, HostPoints):
        return points.recalled("extent", (masses,), partial(_extent_read, points, masses))
    if isinstance(points, FileFeatures):
        return _extent_read(points, masses)
    return _extent_of(weighted_sum(points, masses), points.amin(0), points.amax(0))


def centred(points: Points, centre: Tensor, dtype: torch.dtype) -> Tensor:
    """Return points minus a centre (d,), subtracted in float64 and rounded once."""
    out = torch.empty(points.shape, dtype=dtype, device=points.device)
    for part, rows in in_float64(points, centre):
        out[part] = rows
    return out


def _extent_read(points: Points, masses: Tensor) -> Extent:
    total = masses.new_zeros((1, points.shape[1]))
    lowest, highest = torch.full_like(total[0], torch.inf), torch.full_like(total[0], -torch.inf)
    for part, rows in in_float64(points):
        total.addmm_(masses[None, part], rows)
        torch.minimum(lowest, rows.amin(0), out=lowest)
        torch.maximum(highest, rows.amax(0), out=highest)
    return _extent_of(total[0], lowest, highest)


def _extent_of(mean: Tensor, lowest: Tensor, highest: Tensor) -> Extent:
    return Extent(mean.clamp(lowest.double(), highest.double()), (lowest, highest))


T = TypeVar("T")

# The name by which a `Cloud` is cached with its samples.
CLOUD = "cloud"


class Distances(NamedTuple):
    """Squared distances of a cloud from a centre c.

    Attributes:
        farthest: the largest square, ().
        highest: the largest square of a point with mass, ().
        mean: sum_i a_i ||x_i - c||^2, ().
    """

    farthest: Tensor
    highest: Tensor
    mean: Tensor


class Cloud:
    """Points with their masses, labels and cached statistics.

    Args:
        points: (n, d), on the device or streamed to it.
        masses: (n,) float64 that sum to 1.
        labels: (n,) class indices.
        equal: whether all masses are 1 / n.

    Attributes:
        known: cached results for all costs, by name.
    """

    def __init__(
        self, points: Points, masses: Tensor, labels: Tensor, *, equal: bool = False
    ) -> None:
        self.points, self.masses, self.labels, self._equal = points, masses, labels, equal
        self.known: dict[Hashable, Any] = {}

    def kept(self, name: Hashable, find: Callable[[], T]) -> T:
        """Return `find()`, cached by `name`."""
        if name not in self.known:
            self.known[name] = find()
        found: T = self.known[name]
        return found

    @cached_property
    def extent(self) -> Extent:
        return extent(self.points, self.masses)

    def distances(self, squares: Tensor) -> Distances:
        """Summarize squared distances (n,) from a centre."""
        farthest = highest = squares.max()
        if not self._equal:
            highest = squares.masked_fill(self._absent, 0.0).max()
        return Distances(farthest, highest, self.masses @ squares)

    def class_masses(self, classes: int) -> Tensor:
        """Return the mass of each class (V,)."""
        return self.kept(
            ("classes", classes), lambda: mass_per_class(self.masses, self.labels, classes)
        )

    def share(self, rows: slice | Tensor, name: Hashable) -> tuple[Tensor, float]:
        """Return the masses (k,) of some rows over their sum, and the sum; cached by `name`."""

        def find() -> tuple[Tensor, float]:
            whole = self.masses
            if not self._equal:
                return normalised(whole[rows])
            # Known on the host without waiting for the device.
            count = len(range(len(whole))[rows] if isinstance(rows, slice) else rows)
            return whole.new_full((count,), 1 / max(1, count)), count / len(whole)

        return self.kept(("share", name), find)

    @cached_property
    def _absent(self) -> Tensor:
        """Which points have no mass (n,)."""
        return self.masses <= 0

    def squares(self, centre: Tensor) -> Tensor:
        """Compute ||x_i - c||^2 (n,), float64, for a centre c (d,) float64."""
        points = self.points
        if not isinstance(points, HostPoints):
            return squared_distances(points, centre)

        def find() -> Tensor:
            # Distances from the cloud's own mean as well, for its cost with itself.
            mean = self.extent.mean
            about, about_mean = squared_distances(points, centre, mean).unbind()
            points.recalled("squares", (mean,), lambda: about_mean)
            return about

        return points.recalled("squares", (centre,), find)


def cloud_of(samples: LabeledSamples, streaming: Streaming | None) -> Cloud:
    """Return the samples as a `Cloud`; the same object as long as the samples are unchanged."""

    def find() -> Cloud:
        points, equal = points_of(samples, streaming), samples.weights is None
        masses, labels = (
            each.to(points.device) for each in (samples.masses, class_indices(samples))
        )
        return Cloud(points, masses, labels, equal=equal)

    if streaming is not None or isinstance(samples.features, FileFeatures):
        # Results for streamed points are cached in `Streaming` instead.
        return find()
    return remembered(samples, CLOUD, find)


def forget_cloud(samples: LabeledSamples) -> None:
    """Drop the cached cloud: the tensors may have been modified in place since the last call."""
    forget(samples, CLOUD)


def points_of(samples: LabeledSamples, streaming: Streaming | None) -> Points:
    """Return the points (n, d), as a tensor or as `HostPoints` that are streamed."""
    return samples.features if streaming is None else HostPoints(samples.features, streaming)


def class_indices(samples: LabeledSamples) -> Tensor:
    """Return the labels (n,); all 0 for unlabelled samples."""
    if samples.labels is not None:
        return samples.labels
    return torch.zeros(len(samples), dtype=torch.int64, device=samples.features.device)


def mass_per_class(masses: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the sum (V,) of masses (n,) in each class."""
    return masses.new_zeros(classes).index_add_(0, labels, masses)


def normalised(masses: Tensor) -> tuple[Tensor, float]:
    """Return masses over their sum, and the sum; masses that are all 0 as they are, and 1."""
    mass = float(masses.sum()) or 1.0
    return masses / mass, mass


def inverse(masses: Tensor) -> Tensor:
    """Return 1 / a_i, and 0 where a_i is 0."""
    return torch.where(masses > 0, 1 / masses, 0)


def per_mass_(gradient: Tensor, masses: Tensor) -> Tensor:
    """Divide the rows of a gradient (n, ...) by masses (n,) in place; by 0 gives 0."""
    return gradient.mul_(inverse(masses).to(gradient).reshape(-1, *(1,) * (gradient.ndim - 1)))


# A selection of points of a cloud: a range, or indices (k,) int64.
Cut = slice | Tensor

# Masses of rows and of columns, float64.
Masses = tuple[Tensor, Tensor]

# Unit roundoff of float64.
DOUBLE_UNIT = 2.0**-53

# The least number above 0 of float64: a product that underflows loses up to half of it.
UNDERFLOW = 2.0**-1074

# In place of log 0: far below any other logarithm, and finite, as 0 times infinity is NaN.
LOG_NOTHING = -1e200


class Moments(NamedTuple):
    """Moments of masses q (m,) on columns with centred points z, float64; moments of parts add up.

    Attributes:
        total: sum_j q_j.
        first: sum_j q_j z_j (d,).
        squares: sum_j q_j ||z_j||^2.
        classes: the mass of each class (V_y,).
    """

    total: Tensor
    first: Tensor
    squares: Tensor
    classes: Tensor


class _Measured(NamedTuple):
    """Statistics of a cost's points; each is a property of `LabelledCost`."""

    largest: float
    farthest: float
    cost_range: CostRange
    mean_cost: float


class LabelledCost:
    """The cost between two labelled clouds.

    Args:
        x: the cloud of the rows, n points.
        y: the cloud of the columns, m points; the same object as `x` for the cost of a cloud with
            itself.
        class_costs: (V_x, V_y) the block of lambda_y W that the labels index, float64.
        lambda_x: weight of the squared Euclidean distance.

    Attributes:
        clouds: both, with their statistics.
        symmetric: whether both sides are one cloud.
        known: cached results of callers, by name.
        packed: both clouds as kernels pack them, or None if that is still to be done.
        known_of: cached results for the points of either cloud, shared with later costs of them.
    """

    def __init__(self, x: Cloud, y: Cloud, class_costs: Tensor, lambda_x: float) -> None:
        self.clouds, self.symmetric = (x, y), x is y
        self.points: tuple[Points, Points] = (x.points, y.points)
        self.labels, self.a, self.b = (x.labels, y.labels), x.masses, y.masses
        self.class_costs, self.lambda_x = class_costs, lambda_x
        self._whole: LabelledCost | None = None
        self.known: dict[str, Any] = {}
        self.packed: tuple[Any, Any] = (None, None)
        self.known_of: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)

    @classmethod
    def of(
        cls,
        source: LabeledSamples,
        target: LabeledSamples,
        class_distances: Tensor,
        *,
        lambda_x: float,
        lambda_y: float,
        streaming: Streaming | None = None,
    ) -> LabelledCost:
        """Build the cost between two datasets, which reuses their clouds' cached statistics.

        Args:
            source: n points.
            target: m points; the same object as `source` for the cost of a cloud with itself.
            class_distances: the block of W (V_x, V_y) between their classes, on any device.
            lambda_x: weight of the squared Euclidean distance.
            lambda_y: weight of W.
            streaming: for points that are streamed; None if they are on the device.
        """
        x = cloud_of(source, streaming)
        y = x if source is target else cloud_of(target, streaming)
        table = class_distances.to(x.masses.device, torch.float64)
        return cls(x, y, lambda_y * table, lambda_x)

    @cached_property
    def _measured(self) -> _Measured:
        """Statistics of the points, computed when they are first asked for."""
        (x, y), symmetric = self.clouds, self.symmetric
        centre, (squares_x, squares_y) = self._own_centre, self.squares
        ends = torch.stack(x.extent.ends if symmetric else (*x.extent.ends, *y.extent.ends))
        numbers = [*self._class_numbers(), torch.linalg.vector_norm(ends - centre, ord=math.inf)]
        numbers += x.distances(squares_x)
        if not symmetric:
            apart = x.extent.mean - y.extent.mean
            numbers += (*y.distances(squares_y), apart @ apart)
        # One tensor, so that the host waits once.
        low, high, classes, largest, *told = torch.stack(numbers).tolist()
        (far_x, high_x, spread_x), (far_y, high_y, spread_y) = told[:3], told[:3]
        between = 0.0
        if not symmetric:
            far_y, high_y, spread_y, between = told[3:]
        # 0 <= ||x - y||^2 <= (max ||x|| + max ||y||)^2 over points with mass.
        reach = self.lambda_x * (math.sqrt(high_x) + math.sqrt(high_y)) ** 2
        return _Measured(
            largest,
            max(far_x, far_y),
            CostRange(low, reach + high),
            # Both means are equally far from the centre, on opposite sides of it.
            self.lambda_x * (spread_x + spread_y + between / 2) + classes,
        )

    def _class_numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the lowest and the highest class cost between classes with mass, and the mean."""
        costs = self.class_costs
        if costs.numel() == 1:
            # Masses sum to 1.
            one = costs.reshape(())
            return one, one, one
        of_x, of_y = self._class_masses
        never = torch.minimum(of_x[:, None], of_y) <= 0
        return (
            costs.masked_fill(never, math.inf).min(),
            costs.masked_fill(never, -math.inf).max(),
            of_x @ (costs @ of_y),
        )

    @property
    def _class_masses(self) -> tuple[Tensor, Tensor]:
        """The mass of each class, (V_x,) and (V_y,)."""
        (x, y), (rows, columns) = self.clouds, self.class_costs.shape
        return x.class_masses(rows), y.class_masses(columns)

    @property
    def centre(self) -> Tensor:
        """The mean (d,), float64, of both clouds' means."""
        return self.whole._own_centre

    @cached_property
    def _own_centre(self) -> Tensor:
        """The centre of a cost that is no part of another."""
        (x, y), symmetric = self.clouds, self.symmetric
        return x.extent.mean if symmetric else (x.extent.mean + y.extent.mean) / 2

    @property
    def largest(self) -> float:
        """The largest absolute coordinate, after centring."""
        return self.whole._measured.largest

    @property
    def farthest(self) -> float:
        """The largest ||x||^2 of all points, after centring."""
        return self.whole._measured.farthest

    @property
    def cost_range(self) -> CostRange:
        """Bounds on C_ij between points with mass."""
        return self.whole._measured.cost_range

    @property
    def mean_cost(self) -> float:
        """sum_ij a_i b_j C_ij."""
        return self.whole._measured.mean_cost

    @cached_property
    def squares(self) -> tuple[Tensor, Tensor]:
        """||x_i||^2 (n,) and ||y_j||^2 (m,) after centring, float64.

        Processes that all have the points may set these before statistics are asked for.
        """
        (x, y), centre = self.clouds, self._own_centre
        of_x = x.squares(centre)
        return of_x, of_x if self.symmetric else y.squares(centre)

    @property
    def whole(self) -> LabelledCost:
        """The cost that this one is a `part` of, or this one."""
        return self._whole or self

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Both clouds as tensors on the device."""
        x, y = self.points
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        return x, y

    @property
    def shape(self) -> tuple[int, int]:
        return self.points[0].shape[0], self.points[1].shape[0]

    @cached_property
    def magnitudes(self) -> tuple[Tensor, Tensor]:
        """Bounds on the terms of C_ij, (n,) and (m,) float64, in units of the cost.

            lambda_x (||x_i|| + ||y_j||)^2 + |lambda_y W[l_i, l_j]| <= row_i + column_j

        by (s + t)^2 <= 2 s^2 + 2 t^2, and |W_kl| <= v_k + max_k' (|W_k'l| - v_k')_+ with the mean
        v_k of |W_kl| over the columns' masses.
        """
        (labels_x, labels_y), sizes = self.labels, self.class_costs.abs()
        means = sizes @ self._class_masses[1]
        rest = (sizes - means[:, None]).amax(0).clamp_min(0)
        of_x, of_y = means[labels_x], rest[labels_y]
        x, y = self.squares
        return of_x.add_(x, alpha=2 * self.lambda_x), of_y.add_(y, alpha=2 * self.lambda_x)

    @property
    def cost_error_share(self) -> float:
        """Error of float64 costs over `magnitudes`: d products and some sums, in any order."""
        return (2 * self.points[0].shape[1] + 16) * DOUBLE_UNIT

    @property
    def lost_errors(self) -> tuple[Tensor, Tensor]:
        """Bounds on what products that underflow take from C_ij, (n,) + (m,) float64.

        Of lambda_x (||x||^2 + ||y||^2 - 2 <x, y>) each of 4 d products loses 2^-1075 before it is
        multiplied by lambda_x, or by y where x was multiplied first; some sums and products follow.
        A lambda_x that was halved lost as much itself.
        """
        most = max(1.0, self.lambda_x, math.sqrt(self.farthest))
        each = (self.points[0].shape[1] + 8) * UNDERFLOW * most
        x, y = self.squares
        return each + UNDERFLOW * x, each + UNDERFLOW * y

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,), float64, for masses q (m,): O((n + m) d), by q's moments."""
        return self.costs_of(self.moments(masses))

    def moments(self, masses: Tensor) -> Moments:
        """Compute the moments of masses q (m,) on the columns."""
        first = weighted_sum(self.points[1], masses, self.centre)
        classes = mass_per_class(masses, self.labels[1], self.class_costs.shape[1])
        return Moments(masses.sum(), first, masses @ self.squares[1], classes)

    def costs_of(self, moments: Moments) -> Tensor:
        """Compute sum_j C_ij q_j (n,), float64, for masses q of these moments."""
        total, first, squares, of_classes = moments
        found = total * self.squares[0] + squares
        products = torch.empty_like(found)
        for part, rows in in_float64(self.points[0], self.centre):
            torch.mv(rows, first, out=products[part])
        found -= products.mul_(2)
        return self.lambda_x * found + (self.class_costs @ of_classes)[self.labels[0]]

    def own_costs(self) -> Tensor:
        """Return C_ii (n,) of a cloud with itself, float64."""
        return self.class_costs[self.labels[0], self.labels[0]]

    def plan_entries(self, f: Tensor, g: Tensor, epsilon: float) -> Tensor:
        """Compute P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon) (n, m), float64.

            log P_ij = u_i + v[l_i, j] + 2 lambda_x <x_i, y_j> / epsilon

        v is gathered by class, and the exponential is taken in place. No statistics of the cost are
        computed for it, and potentials of points without mass are not read.
        """
        (labels_x, labels_y), n = self.labels, self.shape[0]
        masses, scale = torch.cat((self.a, self.b)), self.lambda_x / epsilon
        points = torch.cat(self.held).double()
        # Relative to the mean of both clouds' means; points without mass have no part in it.
        points -= (masses @ points) / 2
        logs = masses.log().add_(torch.cat((f, g)), alpha=1 / epsilon)
        logs = torch.where(masses > 0, logs, LOG_NOTHING)
        logs.sub_(torch.linalg.vector_norm(points, dim=1).square_(), alpha=scale)
        (u, v), (x, y) = (part.tensor_split((n,)) for part in (logs, points))
        costs = self.class_costs / epsilon
        if costs.numel() == 1:
            found = torch.addmm(v - costs, x, y.T, alpha=2 * scale)
        else:
            by_class = v - costs[:, labels_y]
            found = by_class.index_select(0, labels_x).addmm_(x, y.T, alpha=2 * scale)
        return found.add_(u[:, None]).exp_()

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> LabelledCost:
        """Return the cost of rows (k,) and columns (l,) with other masses and their own centre."""
        (x, y), (labels_x, labels_y) = self.points, self.labels
        of_rows = Cloud(x[rows], masses[0], labels_x[rows])
        of_columns = Cloud(y[columns], masses[1], labels_y[columns])
        return LabelledCost(of_rows, of_columns, self.class_costs, self.lambda_x)

    def part(
        self,
        rows: Cut,
        columns: Cut,
        points: tuple[Tensor, Tensor] | None = None,
        *,
        labels: tuple[Tensor, Tensor] | None = None,
        masses: tuple[Tensor, Tensor] | None = None,
        diagonal: bool = False,
    ) -> LabelledCost:
        """Return the cost between some rows and columns, with the statistics of the whole.

        So the centre and scale of the points, and bounds on costs, are the same for every part.
        `points`, `labels` and `masses` of the part may be given instead of being cut; on the
        `diagonal` both sides are one.
        """
        found, cuts = copy(self), (rows, columns)
        found._whole, found.known_of = self.whole, (None, None)
        packed_x, packed_y = (
            packed if isinstance(cut, slice) and cut == slice(None) else None
            for packed, cut in zip(self.packed, cuts, strict=True)
        )
        found.packed = packed_x, packed_y
        x, y = self.points
        found.points = points or (_some_points(x, rows), _some_points(y, columns))

        def some_of(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return _some(pair[0], rows), _some(pair[1], columns)

        found.squares, found.magnitudes = some_of(self.squares), some_of(self.magnitudes)
        found.labels = labels or some_of(self.labels)
        found.a, found.b = masses or some_of((self.a, self.b))
        found.symmetric = diagonal and self.symmetric
        return found

    def without_points(self) -> LabelledCost:
        """Return the cost without its points, with the statistics that were computed before."""
        # All statistics are computed, those that come with the mean cost too.
        magnitudes, _, (x, y) = self.magnitudes, self.mean_cost, self.points
        found = copy(self)
        found.magnitudes, found.points = magnitudes, (x[:0], y[:0])
        # Statistics that were not computed cannot be computed from here on.
        del found.clouds
        return found

    def centred(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return both clouds minus the centre, subtracted in float64 and rounded once."""
        x = centred(self.points[0], self.centre, dtype)
        return x, x if self.symmetric else centred(self.points[1], self.centre, dtype)


def _some(values: Tensor, rows: Cut) -> Tensor:
    """Return the numbers of some points; the tensor itself for all."""
    return values if isinstance(rows, slice) and rows == slice(None) else values[rows]


def _some_points(points: Points, rows: Cut) -> Points:
    """Return some of the points; streamed points are not copied."""
    return _some(points, rows) if isinstance(points, Tensor) else points.part(rows)


def on_host(cost: LabelledCost) -> tuple[HostPoints, HostPoints]:
    """Return both clouds of a streamed cost."""
    x, y = cost.points
    assert isinstance(x, HostPoints)
    assert isinstance(y, HostPoints)
    return x, y


def equal_masses(points: Tensor) -> Tensor:
    """Return equal masses (k,) float64 that sum to 1, for k points."""
    count = len(points)
    return torch.full((count,), 1 / count, dtype=torch.float64, device=points.device)


@dataclass(frozen=True, eq=False)
class LessOrigin:
    """Values to multiply a plan by: the points of one side of the cost, less an origin (d,).

    Every process that has the points can compute them, so that they need not be sent.
    """

    origin: Tensor

    def __call__(self, which: Cut, points: Tensor) -> Tensor:
        """Return the values of some points (k, d)."""
        return less_origin(points, self.origin)


def less_origin(points: Tensor, origin: Tensor) -> Tensor:
    """Return a copy of points (n, d) less an origin, in its type, subtracted in the wider type."""
    return (points - origin).to(origin.dtype)
