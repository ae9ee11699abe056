"""Matrices M = X^T P Y to start from; the best that they lead to is kept.

`axes` is that of the best coupling of two Gaussians: principal axes in the order of their
eigenvalues. A Gaussian has no direction along an axis; here each takes the one in which the third
moments of both sides have one sign. So it is exact for a rotated copy whose eigenvalues differ and
whose third moments along axes are not 0. `classes` couples class means: those of least W, or of one
name. `independent` is a b^T, whose first step compares distances from the mean alone, as other
packages start. `random` is a random rotation between principal axes.

`gromov.solve` descends from each; `otdd` and `pairwise` take `STARTS` of them where no number is
given. Names are stored in results (`gromov.record`). Names, order and `SEED` must stay, so that the
same number gives the same starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor

from otdd_flash.cost.points import class_indices, mass_per_class
from otdd_flash.gromov.energy import Cloud, Energy
from otdd_flash.operators.comparison import Comparison

# The number of starts where none is given.
STARTS = 4

SEED = 0


def starts(energy: Energy, compared: Comparison, number: int) -> Iterator[tuple[str, Tensor]]:
    """Yield `number` starts: their names, and M (d_x, d_y) float64."""
    return islice(_proposals(energy, compared), number)


def _proposals(energy: Energy, compared: Comparison) -> Iterator[tuple[str, Tensor]]:
    yield "axes", _of_axes(energy)
    by_classes = _of_classes(energy, compared)
    if by_classes is not None:
        yield "classes", by_classes
    yield "independent", torch.zeros_like(energy.x.points[:1].T @ energy.y.points[:1])
    draw = torch.Generator().manual_seed(SEED)
    for number in count(1):
        yield f"random {number}", _random(energy, draw)


def _of_axes(energy: Energy) -> Tensor:
    """Return Q_x diag(+- sqrt(l_x l_y)) Q_y^T over the common number of axes."""
    first, second = (_scaled_axes(side) for side in (energy.x, energy.y))
    common = min(first.shape[1], second.shape[1])
    skews = (_skewness(side)[:common] for side in (energy.x, energy.y))
    signs = torch.where(torch.stack(tuple(skews)).prod(0) < 0, -1.0, 1.0)
    return (first[:, :common] * signs) @ second[:, :common].T


def _scaled_axes(cloud: Cloud) -> Tensor:
    values, vectors = cloud.axes
    return vectors * values.sqrt()


def _skewness(cloud: Cloud) -> Tensor:
    """Return the third moments of the coordinates along principal axes (d,)."""
    return cloud.masses @ (cloud.points @ cloud.axes[1]).pow(3)


def _of_classes(energy: Energy, compared: Comparison) -> Tensor | None:
    """Return the M of class means under a coupling of classes, or None if nothing couples them."""
    source, target = compared.transformed
    if source.labels is None or target.labels is None:
        return None
    costs = compared.block("xy").double().cpu()
    if compared.ground.lambda_y == 0 or float(costs.max()) == float(costs.min()):
        one, other = (np.array(side.class_names)[:, None] for side in (source, target))
        costs = torch.from_numpy(1.0 - (one == other.T))
        if bool((costs == 1).all()):
            return None
    # It takes seconds to import.
    import ot

    sums, masses = list[Tensor](), []
    for cloud, side in ((energy.x, source), (energy.y, target)):
        labels, shape = class_indices(side), (side.class_total, cloud.points.shape[1])
        own = mass_per_class(cloud.masses, labels, shape[0])
        total = cloud.points.new_zeros(shape)
        total.index_add_(0, labels, cloud.points * cloud.masses[:, None])
        sums.append(total / own.clamp_min(torch.finfo(own.dtype).tiny)[:, None])
        masses.append(own.cpu().numpy())
    plan = torch.from_numpy(ot.emd(*masses, costs.numpy(), check_marginals=False))
    matrix: Tensor = sums[0].T @ plan.to(sums[0]) @ sums[1]
    return matrix


def _random(energy: Energy, draw: torch.Generator) -> Tensor:
    """Return S_x^1/2 K S_y^1/2 for random K with orthonormal rows or columns."""
    first, second = (_scaled_axes(side) for side in (energy.x, energy.y))
    sizes = sorted((first.shape[1], second.shape[1]), reverse=True)
    drawn = torch.randn(*sizes, generator=draw, dtype=torch.float64)
    rotation = torch.linalg.qr(drawn).Q.to(first)
    matrix: Tensor = first @ (rotation if first.shape[1] == sizes[0] else rotation.T) @ second.T
    return matrix
