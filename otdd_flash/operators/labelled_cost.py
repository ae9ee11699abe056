"""Two labelled clouds and what every operator needs to know of the cost between them.

    C_ij = lambda_x ||x_i - y_j||^2 + lambda_y W[l_i, l_j]

The points stay as they were given; an operator takes what it needs, centred by their common mean: C
is unchanged by that and the rounding error shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from copy import copy
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import CostRange
from otdd_flash.operators.host_points import PIECE_BYTES, HostPoints, slices

# Points (n, d) on the device, or what streams them there; and some of them.
Points = Tensor | HostPoints
Cut = slice | Tensor

# Unit roundoff of float64.
DOUBLE_UNIT = 2.0**-53

# In place of log 0: far below any other, and not infinite times 0 in a product.
LOG_NOTHING = -1e200

# Coordinates that are in float64 at once: 2 MiB stay near a core's cache. A GPU has room for 32 MiB
# and takes longer to launch a pass over 16 MiB than to run it.
CHUNK_ELEMENTS_CPU = 1 << 18
CHUNK_ELEMENTS_GPU = 1 << 22


class Moments(NamedTuple):
    """Of masses q (m,) on columns, whose centred points are z, float64; those of parts add up.

    Attributes:
        total: sum_j q_j.
        first: sum_j q_j z_j (d,).
        squares: sum_j q_j ||z_j||^2.
        classes: the masses of each class (V_y,).
    """

    total: Tensor
    first: Tensor
    squares: Tensor
    classes: Tensor


class _Measured(NamedTuple):
    """What a cost tells of its points, as properties of `LabelledCost`."""

    centre: Tensor
    squares: tuple[Tensor, Tensor]
    largest: float
    farthest: float
    cost_range: CostRange
    mean_cost: float


class LabelledCost:
    """The cost between two labelled clouds.

    Args:
        x: (n, d) points, on the device or streamed to it.
        y: (m, d) points, likewise; the same object as `x` for the cost of a cloud with itself.
        a: (n,) masses, float64.
        b: (m,) masses, float64.
        labels_x: (n,) class indices, rows of W.
        labels_y: (m,) class indices, columns of W.
        class_costs: (V_x, V_y) the block of lambda_y W that these labels index, float64.
        lambda_x: weight of the squared Euclidean distance.

    Attributes:
        symmetric: whether both sides are one cloud with one set of labels and masses.
        known: what others have found out of it, and need not again.
        packed: both clouds as kernels pack them, where that is done already.
        known_of: what is found of the points of either cloud, where others take the same later.
    """

    def __init__(
        self,
        x: Points,
        y: Points,
        a: Tensor,
        b: Tensor,
        *,
        labels_x: Tensor,
        labels_y: Tensor,
        class_costs: Tensor,
        lambda_x: float,
    ) -> None:
        self.points: tuple[Points, Points] = (x, y)
        self.labels = labels_x, labels_y
        self.a, self.b = a, b
        self.class_costs, self.lambda_x = class_costs, lambda_x
        self.symmetric = x is y and labels_x is labels_y and a is b
        self._whole: LabelledCost | None = None
        self.known: dict[str, Any] = {}
        self.packed: tuple[Any, Any] = (None, None)
        self.known_of: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)

    @cached_property
    def _measured(self) -> _Measured:
        """What the points tell, once something asks for it."""
        (x, y), a, b = self.points, self.a, self.b
        mean_x = weighted_mean(x, a)
        mean_y = mean_x if self.symmetric else weighted_mean(y, b)
        centre = mean_x if self.symmetric else (mean_x + mean_y) / 2
        seen_x = _norms(x, a, centre, mean_x)
        seen_y = seen_x if self.symmetric else _norms(y, b, centre, mean_y)
        numbers = [*self._class_numbers(), *seen_x.numbers]
        if not self.symmetric:
            numbers += [*seen_y.numbers, (mean_x - centre) @ (mean_y - centre)]
        # One tensor, so that the host waits once.
        low, high, classes, *told = torch.stack(numbers).tolist()
        count = len(seen_x.numbers)
        of_x, product = _Told(*told[:count]), 0.0 if self.symmetric else told.pop()
        of_y = of_x if self.symmetric else _Told(*told[count:])
        # 0 <= ||x - y||^2 <= (max ||x|| + max ||y||)^2.
        reach = self.lambda_x * (math.sqrt(of_x.highest) + math.sqrt(of_y.highest)) ** 2
        return _Measured(
            centre,
            (seen_x.squares, seen_y.squares),
            max(of_x.largest, of_y.largest),
            max(of_x.farthest, of_y.farthest),
            CostRange(low, reach + high),
            self.lambda_x * (of_x.mean + of_y.mean - 2 * product) + classes,
        )

    def _class_numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lowest and the highest class cost on the support, and their mean."""
        costs = self.class_costs
        if costs.numel() == 1:
            # Masses add up to 1.
            one = costs.reshape(())
            return one, one, one
        class_a = _mass_per_class(self.a, self.labels[0], costs.shape[0])
        class_b = _mass_per_class(self.b, self.labels[1], costs.shape[1])
        met = (class_a > 0)[:, None] & (class_b > 0)[None, :]
        return (
            torch.where(met, costs, math.inf).min(),
            torch.where(met, costs, -math.inf).max(),
            class_a @ costs @ class_b,
        )

    @property
    def centre(self) -> Tensor:
        """(d,) float64, the mean of both clouds' means."""
        return self.whole._measured.centre

    @property
    def largest(self) -> float:
        """Of all coordinates, in absolute value, after centring."""
        return self.whole._measured.largest

    @property
    def farthest(self) -> float:
        """The largest ||x||^2 of all points, after centring."""
        return self.whole._measured.farthest

    @property
    def cost_range(self) -> CostRange:
        """An interval that holds C on the support."""
        return self.whole._measured.cost_range

    @property
    def mean_cost(self) -> float:
        """sum_ij a_i b_j C_ij."""
        return self.whole._measured.mean_cost

    @cached_property
    def squares(self) -> tuple[Tensor, Tensor]:
        """||x_i||^2 (n,) and ||y_j||^2 (m,) after centring, float64."""
        return self._measured.squares

    @property
    def whole(self) -> LabelledCost:
        """The cost that this one is a `part` of, or this one."""
        return self._whole or self

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Both clouds, for what needs all of them on the device."""
        x, y = self.points
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        return x, y

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.points[0].shape[0], self.points[1].shape[0]

    @cached_property
    def magnitudes(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,) float64, in units of the cost: what sums and products in C_ij add up to.

            lambda_x (||x_i|| + ||y_j||)^2 + |lambda_y W[l_i, l_j]| <= row_i + column_j

        by (s + t)^2 <= 2 s^2 + 2 t^2, and |W_kl| <= v_k + max_k' (|W_k'l| - v_k')_+ with the mean
        v_k of |W_kl| over the columns' masses.
        """
        (labels_x, labels_y), sizes = self.labels, self.class_costs.abs()
        means = sizes @ _mass_per_class(self.b, labels_y, sizes.shape[1])
        rest = (sizes - means[:, None]).amax(0).clamp_min(0)
        x, y = (2 * self.lambda_x * squares for squares in self.squares)
        return x + means[labels_x], y + rest[labels_y]

    @property
    def cost_error_share(self) -> float:
        """Error of costs in float64, over the magnitudes: d products and some sums in any order."""
        return (2 * self.points[0].shape[1] + 16) * DOUBLE_UNIT

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64: O((n + m) d), from q's moments."""
        return self.costs_of(self.moments(masses))

    def moments(self, masses: Tensor) -> Moments:
        """Of masses q (m,)."""
        first = torch.zeros_like(self.centre)
        for part, rows in in_float64(self.points[1], self.centre):
            first += masses[part] @ rows
        classes = _mass_per_class(masses, self.labels[1], self.class_costs.shape[1])
        return Moments(masses.sum(), first, masses @ self.squares[1], classes)

    def costs_of(self, moments: Moments) -> Tensor:
        """sum_j C_ij q_j (n,), float64, for masses of these moments."""
        total, first, squares, of_classes = moments
        found = total * self.squares[0] + squares
        products = torch.empty_like(found)
        for part, rows in in_float64(self.points[0], self.centre):
            torch.mv(rows, first, out=products[part])
        found -= products.mul_(2)
        return self.lambda_x * found + (self.class_costs @ of_classes)[self.labels[0]]

    def own_costs(self) -> Tensor:
        """C_ii (n,) of a cloud with itself, float64."""
        return self.class_costs[self.labels[0], self.labels[0]]

    def plan_entries(self, f: Tensor, g: Tensor, epsilon: float) -> Tensor:
        """P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon) (n, m), float64.

            log P_ij = u_i + v[l_i, j] + 2 lambda_x <x_i, y_j> / epsilon

        v is gathered by class, and the exponential is taken in place. Nothing else that is known of
        the cost is asked for, and potentials of points without mass are not read.
        """
        (labels_x, labels_y), n = self.labels, self.shape[0]
        masses, scale = torch.cat((self.a, self.b)), self.lambda_x / epsilon
        points = torch.cat(self.held).double()
        # About the mean of both clouds' means, wherever points without mass may be.
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

    def sample(self, rows: Tensor, columns: Tensor) -> LabelledCost:
        """The cost between some rows (k,) and columns (l,), int64; on each side of equal masses."""
        (x, y), (labels_x, labels_y) = self.points, self.labels
        return LabelledCost(
            x[rows],
            y[columns],
            equal_masses(rows),
            equal_masses(columns),
            labels_x=labels_x[rows],
            labels_y=labels_y[columns],
            class_costs=self.class_costs,
            lambda_x=self.lambda_x,
        )

    def part(
        self,
        rows: Cut,
        columns: Cut,
        points: tuple[Tensor, Tensor] | None = None,
        *,
        labels: tuple[Tensor, Tensor] | None = None,
        diagonal: bool = False,
    ) -> LabelledCost:
        """Some rows and columns, with their masses, and all else of the whole cost.

        So the centre and scale of the points, and bounds on costs, are the same for every part.
        Their `points` and `labels` may be given where they are there; on the `diagonal` both sides
        are one.
        """
        found, cuts = copy(self), (rows, columns)
        found._whole, found.known_of = self.whole, (None, None)
        packed_x, packed_y = (
            packed if isinstance(cut, slice) and cut == slice(None) else None
            for packed, cut in zip(self.packed, cuts, strict=True)
        )
        found.packed = packed_x, packed_y
        x, y = self.points
        found.points = points or (_some(x, rows), _some(y, columns))
        found.squares, found.magnitudes = (
            (pair[0][rows], pair[1][columns]) for pair in (self.squares, self.magnitudes)
        )
        of_x, of_y = self.labels
        found.labels = labels or (of_x[rows], of_y[columns])
        found.a, found.b = (side[cut] for side, cut in zip((self.a, self.b), cuts, strict=True))
        found.symmetric = diagonal and self.symmetric
        return found

    def without_points(self) -> LabelledCost:
        """The same with no point, and all that follows from these."""
        magnitudes, (x, y) = self.magnitudes, self.points
        found = copy(self)
        found.magnitudes, found.points = magnitudes, (x[:0], y[:0])
        return found

    def centred(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both clouds minus the centre, subtracted in float64 and rounded once."""
        x = _centred(self.points[0], self.centre, dtype)
        return x, x if self.symmetric else _centred(self.points[1], self.centre, dtype)


def _some(points: Points, rows: Cut) -> Points:
    """Some points; those that stream stay where they are."""
    return points[rows] if isinstance(points, Tensor) else points.part(rows)


def on_host(cost: LabelledCost) -> tuple[HostPoints, HostPoints]:
    """Both clouds of a cost that is streamed."""
    x, y = cost.points
    assert isinstance(x, HostPoints)
    assert isinstance(y, HostPoints)
    return x, y


def equal_masses(points: Tensor) -> Tensor:
    """The same mass for each of some points, (k,) float64 that add up to 1."""
    count = len(points)
    return torch.full((count,), 1 / count, dtype=torch.float64, device=points.device)


def squared_distances(points: Points, centre: Tensor) -> Tensor:
    """||x_i - c||^2 (n,), float64."""
    return _squared_norms(points, in_float64(points, centre))


def squared_norms(points: Points) -> Tensor:
    """||x_i||^2 (n,), float64."""
    return _squared_norms(points, in_float64(points))


class _Told(NamedTuple):
    """What a cloud tells about a centre.

    Attributes:
        lowest: of all coordinates.
        uppermost: likewise.
        farthest: the largest squared norm.
        highest: that on the support.
        mean: squared norm.
    """

    lowest: float
    uppermost: float
    farthest: float
    highest: float
    mean: float

    @property
    def largest(self) -> float:
        """Of all coordinates, in absolute value."""
        return max(-self.lowest, self.uppermost)


class _Norms(NamedTuple):
    """The numbers of `_Told`, each a tensor of one, and all squared norms (n,)."""

    numbers: tuple[Tensor, ...]
    squares: Tensor


def _norms(points: Points, masses: Tensor, centre: Tensor, mean: Tensor) -> _Norms:
    """What a cloud tells about a centre.

    Of points that stream also those about their mean, for the cost of the cloud with itself.
    """
    if not isinstance(points, HostPoints):
        return _found_norms(points, masses, (centre,))[0]

    def find() -> _Norms:
        found = _found_norms(points, masses, (centre, mean))
        points.recalled("norms", (masses, mean), lambda: found[1])
        return found[0]

    return points.recalled("norms", (masses, centre), find)


def _found_norms(points: Points, masses: Tensor, centres: tuple[Tensor, ...]) -> list[_Norms]:
    extremes: list[list[Tensor]] = [[] for _ in centres]
    lengths = masses.new_empty((len(centres), points.shape[0]))
    # Of one centre rows are centred on their way; of more they are read once.
    alone = centres[0] if len(centres) == 1 else None
    for part, rows in in_float64(points, alone):
        for place, centre in enumerate(centres):
            centred = rows if alone is not None else rows - centre
            extremes[place] += torch.aminmax(centred)
            torch.linalg.vector_norm(centred, dim=1, out=lengths[place, part])
    found = []
    for ends, norms in zip(extremes, lengths.square_(), strict=True):
        # Of few points all are found at once.
        lowest, uppermost = ends if len(ends) == 2 else torch.aminmax(torch.stack(ends))
        highest = torch.where(masses > 0, norms, 0.0).max()
        numbers = lowest, uppermost, norms.max(), highest, masses @ norms
        found.append(_Norms(numbers, norms))
    return found


def in_float64(points: Points, centre: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """All rows (N, d), less a centre (d,) float64, in one buffer that the caller may change.

    A few at a time. A GPU centres them as it copies them, in one pass; a CPU would make a copy of
    its own in float64 for that.
    """
    count, dim = points.shape
    elements = CHUNK_ELEMENTS_GPU if points.is_cuda else CHUNK_ELEMENTS_CPU
    size = min(count, max(1, elements // dim))
    buffer = torch.empty((size, dim), dtype=torch.float64, device=points.device)
    held: Iterable[Tensor]
    if isinstance(points, HostPoints):
        # On a GPU few blocks: each has to be waited for.
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


def _squared_norms(points: Points, pieces: Iterable[tuple[slice, Tensor]]) -> Tensor:
    lengths = torch.empty(points.shape[0], dtype=torch.float64, device=points.device)
    for part, rows in pieces:
        torch.linalg.vector_norm(rows, dim=1, out=lengths[part])
    return lengths.square_()


def weighted_mean(points: Points, masses: Tensor) -> Tensor:
    """sum_i a_i x_i (d,), float64, for masses (n,) on the device."""
    if isinstance(points, HostPoints):
        return points.recalled("mean", (masses,), partial(_found_mean, points, masses))
    return _found_mean(points, masses)


def _found_mean(points: Points, masses: Tensor) -> Tensor:
    return reduce(torch.add, (masses[part] @ rows for part, rows in in_float64(points)))


def _centred(points: Points, centre: Tensor, dtype: torch.dtype) -> Tensor:
    """A few rows at a time, so that no float64 copy of all is made."""
    out = torch.empty(points.shape, dtype=dtype, device=points.device)
    for part, rows in in_float64(points, centre):
        out[part] = rows
    return out


def _mass_per_class(masses: Tensor, labels: Tensor, classes: int) -> Tensor:
    return torch.zeros(classes, dtype=masses.dtype, device=masses.device).index_add_(
        0, labels, masses
    )
