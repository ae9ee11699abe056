"""The energy E of a plan between two centred clouds, and the cost that linearises it.

With both clouds centred by their masses, u = ||x||^2 - E ||x||^2, v = ||y||^2 - E ||y||^2 and
M = X^T P Y,

    E(P) = E(a b^T) - 4 <P, u v^T> - 8 ||M||^2
    E(a b^T) = <a, D_x^2 a> + <b, D_y^2 b> - 8 E ||x||^2 E ||y||^2
    <a, D_x^2 a> = 2 E ||x||^4 + 2 (E ||x||^2)^2 + 4 ||S||^2,     S = E x x^T.

The last term of E(P) is concave, so that it is below its tangent at any M_0:

    E(P) <= E(a b^T) + 8 ||M_0||^2 + <C, P>,    C_ij = -4 u_i v_j - 16 x_i^T M_0 y_j,

with equality where X^T P Y = M_0. The plan of least <C, P> (+ epsilon KL) therefore has no larger E
(+ epsilon KL) than the plan M_0 is of. C is minus an inner product in min(d_x, d_y) + 1
coordinates, for which no n x m matrix is needed.

`Cloud` holds the moments of one side, computed once, and `Energy` those of a pair; all is float64.
`gromov.distance` and `gromov.problem` make both; `gromov.bounds` and `gromov.starts` read an
`Energy`. `gromov.bounds` and `gromov.solve` widen bounds by `Energy.rounding`, so after a change it
must still bound the error of E (`tests/gromov/test_gromov.py`). Saved results hold `coordinates`,
from which `Cloud.of` must make the same cloud again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.cost.points import DOUBLE_UNIT, centred, weighted_sum
from otdd_flash.samples import LabeledSamples

# Rounding errors of sums of n, m, d_x and d_y summands, in units of these numbers times the unit
# roundoff times <a, D_x^2 a> + <b, D_y^2 b>. Absolute values of all terms of E, and of what errors
# of centring add to them, sum to less than 20 of these: by the Cauchy-Schwarz inequality
# 4 <P, |u| |v|> and 8 ||M||^2 are at most their mean each.
TERMS = 20
# Roundings of a summand besides those of the sums.
OPERATIONS = 64


@dataclass(frozen=True, eq=False)
class Cloud:
    """A cloud centred by its masses, with the moments that E takes of it.

    Attributes:
        points: (n, r), of mean 0: centred features, or where n < d their coordinates in the span of
            all rows, which has at most n dimensions.
        masses: (n,), summing to 1.
        norms: (n,) ||x||^2.
        mean_norm: E ||x||^2.
        covariance: S (r, r).
        spread: <a, D^2 a>, the mean of ||x - x'||^4.
        turned: a bound on what coordinates in the span change of <x_i, x_j>, over ||x_i|| ||x_j||.
    """

    points: Tensor
    masses: Tensor
    norms: Tensor
    mean_norm: float
    covariance: Tensor
    spread: float
    turned: float = 0.0

    @classmethod
    def of(cls, samples: LabeledSamples, coordinates: Tensor | None = None) -> Cloud:
        """Centre the points of samples, twice, as the first mean is off by its rounding.

        `coordinates` (n, r) are `points` of an earlier call: a basis is not unique.
        """
        masses = samples.masses
        points = centred(samples.features, weighted_sum(samples.features, masses), torch.float64)
        points -= masses @ points
        if bool((points == points[0]).all()):
            # Only the rounding of the mean is left.
            points.zero_()
        turned = 0.0
        if len(points) < points.shape[1]:
            points, turned = _in_span(points, coordinates)
        norms = points.square().sum(1)
        mean_norm, fourth = float(masses @ norms), float(masses @ norms.square())
        covariance = (points * masses[:, None]).T @ points
        # Products, as a power of a float that overflows raises.
        spread = 2 * fourth + 2 * mean_norm * mean_norm + 4 * float(covariance.square().sum())
        return cls(points, masses, norms, mean_norm, covariance, spread, turned)

    @property
    def coordinates(self) -> Tensor | None:
        """The points on the host, if they are coordinates in the span."""
        return self.points.cpu() if self.turned else None

    @property
    def centred_norms(self) -> Tensor:
        """Return ||x||^2 - E ||x||^2, (n,)."""
        return self.norms - self.mean_norm

    @cached_property
    def axes(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues (r,) of S, the largest first, and eigenvectors (r, r) as columns."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return values.flip(0).clamp_min(0), vectors.flip(1)


def _in_span(points: Tensor, coordinates: Tensor | None) -> tuple[Tensor, float]:
    """Return coordinates (n, n) of points (n, d) in their span, and `Cloud.turned` of them."""
    if coordinates is None:
        coordinates = torch.linalg.qr(points.T, mode="r").R.T
    coordinates = coordinates.to(points)
    lengths = torch.linalg.vector_norm(points, dim=1)
    changes = (coordinates @ coordinates.T - points @ points.T).abs_()
    scale = (lengths[:, None] * lengths).clamp_min_(torch.finfo(torch.float64).tiny)
    # And the rounding of both products.
    rounding = 4 * sum(points.shape) * DOUBLE_UNIT
    return coordinates, float(changes.div_(scale).max()) + rounding


@dataclass(frozen=True, eq=False)
class Energy:
    """E between two clouds.

    Attributes:
        x: the cloud of rows.
        y: the cloud of columns.
    """

    x: Cloud
    y: Cloud

    @property
    def independent(self) -> float:
        """E(a b^T), the unit of `epsilon_relative`."""
        return self.x.spread + self.y.spread - 8 * self.x.mean_norm * self.y.mean_norm

    @property
    def rounding(self) -> float:
        """A bound on the error of `value`, and of eigenvalues and sorted sums in its place."""
        sizes = sum(self.x.points.shape) + sum(self.y.points.shape) + OPERATIONS
        # Products <x_i, x_k> that are off by t ||x_i|| ||x_k|| move the root of E, which is a
        # distance in L2(P x P), by 4 t sqrt(spread / 2), and so E by less than TERMS t spread.
        error = sizes * DOUBLE_UNIT + self.x.turned + self.y.turned
        return TERMS * error * (self.x.spread + self.y.spread)

    def value(self, norms: float, matrix: Tensor) -> float:
        """Return E of the plan with <P, u v^T> and M = X^T P Y (d_x, d_y)."""
        return self.independent - 4 * norms - 8 * float(matrix.square().sum())

    def linear(self, matrix: Tensor, norms: float, following: Tensor) -> float:
        """Return <C, P> for C at M = `matrix` and P with `norms` and M = `following`."""
        return -4 * norms - 16 * float((matrix * following).sum())

    def linear_points(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (n, k) and w (m, k) with C_ij = -<z_i, w_j> at M, of about equal lengths."""
        x, y = self.x, self.y
        if x.points.shape[1] >= y.points.shape[1]:
            rows, columns = x.points @ matrix, y.points
        else:
            rows, columns = x.points, y.points @ matrix.T
        z = _scaled(4.0, x.centred_norms[:, None], y.centred_norms[:, None])
        w = _scaled(16.0, rows, columns)
        return torch.cat((z[0], w[0]), 1), torch.cat((z[1], w[1]), 1)


def _scaled(factor: float, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply both sides by numbers whose product is `factor`, so that they have one size.

    The passes compute squared distances, whose rounding is that of the longer points.
    """
    sizes = [float(side.abs().max()) for side in (rows, columns)]
    if min(sizes) == 0:
        # The other side would not count in products, but in the rounding of squared distances.
        return torch.zeros_like(rows), torch.zeros_like(columns)
    ratio = math.sqrt(factor * (sizes[1] / sizes[0]))
    return rows * ratio, columns * (factor / ratio)
