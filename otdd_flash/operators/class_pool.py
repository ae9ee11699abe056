"""The points of many classes on one device, each centred by its own mean, as kernels read them.

    ||x_i - y_j||^2 = -2 x'_i . y'_j + ||x'_i||^2 + ||y'_j||^2 + 2 (x'_i - y'_j) . D + ||D||^2

with x' = x - mean, y' = y - mean and D the difference of the means. All but the product depends on
one side only, so it changes potentials and leaves the plan as it is: its mean is the sum of both
variances and ||D||^2. Products of class-centred points are the smallest there are, and so is their
rounding error. A class is rounded without regard to the others: its mean and its unit are its own.

Digits. In units of the class, x' = h + l + r + e: h are whole numbers with ||h|| <= 2^12 and
|h_k| <= 2^11, l is float16 of x' - h, and r of what is left then. What the exact form of
`segmented_step` gets wrong about x' . y' is bounded by the largest norms L, R and E of l, r and e
in
a class, all measured; T = L + R, and A is the largest norm of x':

    operation                                     bound on |error|
    e is not there                                E ||y'|| + ||x'|| E' + E E'
    l r', r l' and r r' are not there             L R' + R L' + R R'
    smaller digits: products, chains, additions   c (||h|| T' + T ||h'|| + L L')
    h h' scale in pieces                          2^-31 A A'
    x - mean in float64                           2^-50 (A ||y'|| + ||x'|| A').

c is `adder.chain_error` of one chain, u per chain that is added to the others, and 8 u for what is
done to their sum (its product with the scale, three additions). The pieces: h h' is exact; of its
product with the scale, the last 12 bits of h h' and those of the scale past 12 are rounded, 2^-11
of
the whole, six times at most, u each. As ||h|| <= ||x'|| + T + E, all of it is at most

    P ||y'|| + ||x'|| P' + Q,    P = E + c T + 2^-50 A,
    Q = 2^-31 A A' + E E' + L R' + R L' + R R' + c ((T + E) T' + T (T' + E') + L L').
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.kernels.adder import UNIT, adder_of, chain_error
from otdd_flash.kernels.segments.step import CHAIN_PRODUCTS, DIGITS, OVERRUN, PARTS, Pool

# Of cdist: no cancellation.
DIFFERENCES = "donot_use_mm_for_euclid_dist"

# Largest norm of whole digits, and the largest of them.
WHOLE_NORM, LARGEST_WHOLE = 4096.0, 2047.0

# Coordinates of classes that are rounded together, so that a GPU has few launches and what is in
# float64 meanwhile is little beside the points: 16 MiB an array.
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
        sizes = torch.tensor([len(cloud.points) for cloud in classes])
        self.starts, self.sizes = (sizes.cumsum(0) - sizes).to(device), sizes.to(device)
        n = int(sizes.sum()) + OVERRUN
        shape = (DIGITS, n, -(-dim // 8) * 8)
        coordinates = torch.zeros(shape, dtype=torch.float16, device=device)
        squares = torch.zeros((n, DIGITS), dtype=torch.float64, device=device)
        means, facts, start = [], [], 0
        for group in _groups(classes):
            centred = [_centred(cloud) for cloud in group]
            points = torch.cat([each.points for each in centred])
            own_squares = torch.cat([each.squares for each in centred])
            counts = [len(cloud.points) for cloud in group]
            owners = torch.repeat_interleave(torch.tensor(counts)).to(device)
            rows = slice(start, start + len(points))
            sizes_of = torch.stack((own_squares, points.abs().amax(1)), 1)
            reach, largest = _largest(sizes_of, owners, len(group)).unbind(1)
            unit = _unit(reach.sqrt(), largest, dim)
            parts = digits(points / unit[owners, None])
            for digit, part in zip(coordinates, parts, strict=False):
                digit[rows, :dim] = part
            squares[rows, 0] = own_squares
            for column, part in enumerate(parts[2:], 1):
                lost = torch.split(part.double().square_(), counts)
                # Of tensors of their own, as in `_centred`.
                errors = torch.cat([each.clone().sum(1) for each in lost])
                squares[rows, column] = errors * unit.square()[owners]
            means += [each.mean for each in centred]
            variances = torch.stack([each.variance for each in centred])
            drifts = torch.stack([each.drift for each in centred])
            facts.append(torch.stack((variances, unit, drifts)))
            start = rows.stop
        masses = torch.cat([cloud.masses for cloud in classes])
        masses = torch.nn.functional.pad(masses, (0, OVERRUN))
        self.pool = Pool(coordinates.flatten(0, 1), masses.log2().clamp_min(-1e30), masses)
        gaps = torch.cdist(*2 * (torch.stack(means),), compute_mode=DIFFERENCES)
        self.mean_distances = gaps.square_()
        self.variances, self.units, self.drifts = torch.cat(facts, 1).unbind()
        owners = torch.repeat_interleave(self.sizes)
        self.norms = _largest(squares[:start], owners, len(sizes)).sqrt()
        self.squares = squares[:, 0].float()
        # One chain may be shorter at the end of its part, and blocks of coordinates are filled up.
        chains = 2 + PARTS * (dim + 64) / CHAIN_PRODUCTS
        self.chain_error = chain_error(CHAIN_PRODUCTS, adder_of(device)) + UNIT * (chains + 8)

    @property
    def dim(self) -> int:
        """Of the coordinates, padding included."""
        return self.pool.coordinates.shape[1]

    @property
    def radii(self) -> Tensor:
        """A (V,) float64, the largest ||x'||."""
        return self.norms[:, 0]

    def product_errors(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on the mean and on the largest error of x' . y' (S,), of exact forms."""
        (reach, low, rest, lost), (reach_y, low_y, rest_y, lost_y) = (
            self.norms[side].unbind(1) for side in (rows, columns)
        )
        digits_x, digits_y = low + rest, low_y + rest_y
        point, point_y = (
            norms[:, 3] + self.chain_error * (norms[:, 1] + norms[:, 2]) + 2.0**-50 * norms[:, 0]
            for norms in (self.norms[rows], self.norms[columns])
        )
        chains = (digits_x + lost) * digits_y + digits_x * (digits_y + lost_y) + low * low_y
        both = 2.0**-31 * reach * reach_y + lost * lost_y + self.chain_error * chains
        both = both + low * rest_y + rest * low_y + rest * rest_y
        # Means of norms over a plan that has the marginals, by Cauchy and Schwarz.
        sizes = self.variances[rows].sqrt(), self.variances[columns].sqrt()
        mean = point * sizes[1] + sizes[0] * point_y + both
        return mean, point * reach_y + reach * point_y + both


class _Centred(NamedTuple):
    """A class about its mean: x' (n, d), ||x'||^2 (n,), the mean (d,), and numbers of the pool."""

    points: Tensor
    squares: Tensor
    mean: Tensor
    variance: Tensor
    drift: Tensor


def _centred(cloud: WeightedPoints) -> _Centred:
    """A class about its mean, and its sums.

    Each is of a tensor of its own: a sum over a part of another one rounds as its address says.
    """
    points = cloud.points.double()
    mean = cloud.masses @ points
    points = points - mean
    squares = points.square().sum(1)
    return _Centred(points, squares, mean, cloud.masses @ squares, (cloud.masses @ points).norm())


def _groups(classes: Sequence[WeightedPoints]) -> Iterator[list[WeightedPoints]]:
    """Classes one after the other, as many as have so few coordinates together."""
    group: list[WeightedPoints] = []
    held = 0
    for cloud in classes:
        held += cloud.points.numel()
        if group and held > TOGETHER:
            yield group
            group, held = [], cloud.points.numel()
        group.append(cloud)
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
    """What makes whole digits of points of that largest norm and largest coordinate."""
    # Rounding adds at most half a unit per coordinate.
    unit = torch.maximum(reach / (WHOLE_NORM - dim**0.5 / 2 - 1), largest / LARGEST_WHOLE)
    return torch.where(unit > 0, unit, 1.0)


def _largest(values: Tensor, owners: Tensor, count: int) -> Tensor:
    """The largest of every column (N, c) over the rows of each of so many classes, (count, c)."""
    out = values.new_zeros((count, values.shape[1]))
    return out.scatter_reduce_(0, owners[:, None].expand_as(values), values, "amax")
