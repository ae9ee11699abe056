"""The points of many classes on one device, each centred by its own mean, as kernels read them.

    ||x_i - y_j||^2 = -2 x'_i . y'_j + ||x'_i||^2 + ||y'_j||^2 + 2 (x'_i - y'_j) . D + ||D||^2

with x' = x - mean, y' = y - mean and D the difference of the means. All but the product depends on
one side only, so it changes potentials and leaves the plan as it is: its mean is the sum of both
variances and ||D||^2. Products of class-centred points are the smallest there are, and so is their
rounding error. A class is rounded without regard to the others: its mean and its scale, a power of
two as in `packed_points`, are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.kernels.packed_points import power_of_two_scale
from otdd_flash.kernels.segmented_step import OVERRUN, Pool
from otdd_flash.operators.segments import WeightedPoints

# Of cdist: no cancellation.
DIFFERENCES = "donot_use_mm_for_euclid_dist"


class ClassPool:
    """V classes, one after the other.

    Attributes:
        pool: the points as kernels read them, n rows with the padding.
        starts: (V,) int64, the first row of each class.
        sizes: (V,) int64.
        mean_distances: (V, V) float64, ||D||^2 between the means of two classes.
        variances: (V,) float64, the mean of ||x'||^2.
        radii: (V,) float64, the largest ||x'||.
        scales: (V,) float64, powers of two; x' is so many times the coordinates.
        squares: (n,) float32, ||x'||^2.
    """

    def __init__(self, classes: Sequence[WeightedPoints]) -> None:
        device, dim = classes[0].points.device, classes[0].points.shape[1]
        sizes = torch.tensor([len(cloud.points) for cloud in classes])
        self.starts, self.sizes = (sizes.cumsum(0) - sizes).to(device), sizes.to(device)
        n = int(sizes.sum()) + OVERRUN
        means, largest = zip(*(_mean_and_reach(cloud) for cloud in classes), strict=True)
        scales = [power_of_two_scale(size) for size in torch.stack(largest).tolist()]
        coordinates = torch.zeros((2 * n, -(-dim // 8) * 8), dtype=torch.float16, device=device)
        squares = torch.zeros(n, dtype=torch.float64, device=device)
        start, variances = 0, []
        for cloud, mean, scale in zip(classes, means, scales, strict=True):
            centred = cloud.points.double() - mean
            stop = start + len(centred)
            # Of a tensor of its own: a sum over a part of another one rounds as its address says.
            own_squares = centred.square().sum(1)
            variances.append(cloud.masses @ own_squares)
            squares[start:stop] = own_squares
            centred *= scale
            high = centred.float().half()
            coordinates[start:stop, :dim] = high
            coordinates[n + start : n + stop, :dim] = (centred - high.double()).float().half()
            start = stop
        masses = torch.cat([cloud.masses for cloud in classes])
        masses = torch.nn.functional.pad(masses, (0, OVERRUN))
        self.pool = Pool(coordinates, masses.log2().clamp_min(-1e30).float(), masses)
        gaps = torch.cdist(*2 * (torch.stack(means),), compute_mode=DIFFERENCES)
        self.mean_distances = gaps.square_()
        pieces = torch.split(squares[:start], sizes.tolist())
        self.variances = torch.stack(variances)
        self.radii = torch.stack([piece.max() for piece in pieces]).sqrt()
        self.scales = 1 / torch.tensor(scales, dtype=torch.float64, device=device)
        self.squares = squares.float()

    @property
    def dim(self) -> int:
        """Of the coordinates, padding included."""
        return self.pool.coordinates.shape[1]


def _mean_and_reach(cloud: WeightedPoints) -> tuple[Tensor, Tensor]:
    """The mean (d,), and the largest coordinate in absolute value after centring."""
    points = cloud.points.double()
    mean = cloud.masses @ points
    return mean, (points - mean).abs().max()
