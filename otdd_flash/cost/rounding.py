"""Cost errors of rounded points, and points on a lattice, which float16 holds exactly.

On a lattice all coordinates are multiples of one step, as grey values of 8 bits are. float16 holds
every integer up to 2048. In units of the step, and relative to a centre on the lattice, float16
holds such points exactly, and one product of their coordinates is as exact as three products of
coordinates that are split into two float16 numbers.

`product_errors` bounds the cost errors of points x' near x that replace them in products alone:

    C'_ij = p_i + q_j - 2 lambda_x <x'_i, y'_j> + lambda_y W[l_i, l_j]

Norms p_i = lambda_x ||x_i||^2 are those of the points themselves; the distances e_i = ||x_i -
x'_i|| are measured. By Cauchy and Schwarz and s t <= (theta s^2 + t^2 / theta) / 2, the error of
products is at most

    2 lambda_x (e_i ||y_j|| + ||x'_i|| e_j) <= A_i + B_j,
    A_i = lambda_x (e_i^2 / theta + theta (||x_i|| + e_i)^2),

B_j the same for y_j, for any theta > 0; with theta = rms e / rms ||x|| the two parts are equal.

`float16_rounding` estimates, without a proof, how much rounding points to float16 changes costs.
`operators.triton_operator` and `operators.sharing` call `float16_rounding` and `lattice_of`,
`operators.blocked` the former. `operators.fixed_point` and `operators.point_scores` take
`product_errors` into their bounds on costs, so it must never be below the true error.
`tests/kernels/test_lattice.py` and `tests/solver/test_rounding.py` check lattices and the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.host_points import STREAMED_ROWS, slices
from otdd_flash.cost.points import LabelledCost, Points, squared_distances

# Steps per unit: of counts and raw grey values, and of grey values divided by 255.
SCALES = (1.0, 255.0)

# float16 holds all integers up to here.
LARGEST_INTEGER = 2048

# Relative error of a multiple of a step that was rounded to float32.
ROUNDING = torch.finfo(torch.float32).eps


class Lattice(NamedTuple):
    """A lattice on which all points of a cost lie.

    Attributes:
        scale: steps in one unit of the points.
        centre: (d,) float64, a lattice point near the points' centre.
        lowest: the smallest coordinate, in steps.
        highest: the largest coordinate, in steps.
    """

    scale: float
    centre: Tensor
    lowest: int
    highest: int


def lattice_of(cost: LabelledCost) -> Lattice | None:
    """Return the lattice of all points if there is one and float16 holds coordinates on it."""
    # All parts of a cost pack their points alike, so that the whole decides, once.
    whole = cost.whole
    if "lattice" not in whole.known:
        whole.known["lattice"] = _find_lattice(whole)
    lattice: Lattice | None = whole.known["lattice"]
    return lattice


class _CloudFacts(NamedTuple):
    """Whether some point is off the lattice of each of `SCALES`, and the range of coordinates."""

    off_lattice: tuple[bool, bool]
    lowest: float
    highest: float


def _find_lattice(cost: LabelledCost) -> Lattice | None:
    scales = [scale for scale in SCALES if cost.largest * scale + 1 <= LARGEST_INTEGER]
    lowest, highest = math.inf, -math.inf
    for facts in _all_cloud_facts(cost) if scales else ():
        scales = [scale for scale in scales if not facts.off_lattice[SCALES.index(scale)]]
        if not scales:
            return None
        lowest, highest = min(lowest, facts.lowest), max(highest, facts.highest)
    if not scales:
        return None
    scale = scales[0]
    centre = (cost.centre * scale).round() / scale
    return Lattice(scale, centre, round(lowest * scale), round(highest * scale))


def _all_cloud_facts(cost: LabelledCost) -> Iterator[_CloudFacts]:
    """Yield the lattice facts of both clouds, cached ones first, then block by block."""
    clouds = cost.clouds[: 1 if cost.symmetric else 2]
    yield from (cloud.known["lattice"] for cloud in clouds if "lattice" in cloud.known)
    new = {cloud: cloud.points for cloud in clouds if "lattice" not in cloud.known}
    held = {cloud: points for cloud, points in new.items() if isinstance(points, Tensor)}
    facts = _cloud_facts(held.values())
    for cloud, each in zip(held, facts, strict=True):
        cloud.known["lattice"] = each
    yield from facts
    for points in new.values():
        if not isinstance(points, Tensor):
            # For most points the first block rules out a lattice.
            for rows in points.stream(slices(points.shape[0], STREAMED_ROWS)):
                yield from _cloud_facts([rows])


def _cloud_facts(clouds: Collection[Tensor]) -> list[_CloudFacts]:
    if not clouds:
        return []
    # Triton is not everywhere.
    from otdd_flash.kernels.points.lattice_facts import lattice_facts

    facts = [lattice_facts(points, SCALES, ROUNDING).amax(0) for points in clouds]
    # One tensor, so that the host waits once.
    return [
        _CloudFacts((bool(first), bool(last)), -below, above)
        for first, last, below, above in torch.stack(facts).tolist()
    ]


TINY = torch.finfo(torch.float64).tiny

Pair = tuple[Tensor, Tensor]


def product_errors(cost: LabelledCost, squares: Pair, lost: Pair) -> Pair:
    """Return the bounds A (..., n) and B (..., m), float64, in units of the cost.

    Args:
        cost: of the points themselves.
        squares: ||x_i||^2 (n,) and ||y_j||^2 (m,) relative to the products' centre, float64.
        lost: e_i^2 (..., n) and e_j^2 (..., m), float64; leading dimensions are several roundings.
    """
    ratio = _total(cost, lost) / _total(cost, squares).clamp_min(TINY)
    theta = ratio.sqrt().clamp_min(TINY)[..., None]

    def errors(off: Tensor, norms: Tensor) -> Tensor:
        lengths = off.sqrt().add_(norms.sqrt()).square_()
        return (off / theta).addcmul_(lengths, theta).mul_(cost.lambda_x)

    of_x = errors(lost[0], squares[0])
    return of_x, of_x if cost.symmetric else errors(lost[1], squares[1])


def squares_about(cost: LabelledCost, centre: Tensor) -> Pair:
    """Compute ||x_i||^2 (n,) and ||y_j||^2 (m,) relative to a centre (d,), float64."""
    x, y = cost.points
    of_x = squared_distances(x, centre)
    return of_x, of_x if cost.symmetric else squared_distances(y, centre)


def magnitudes_about(cost: LabelledCost, squares: Pair) -> Pair:
    """Return `LabelledCost.magnitudes` for squared norms relative to another centre."""
    if squares is cost.squares:
        return cost.magnitudes
    x, y = (
        magnitudes + 2 * cost.lambda_x * (about - before)
        for magnitudes, about, before in zip(cost.magnitudes, squares, cost.squares, strict=True)
    )
    return x, y


def _total(cost: LabelledCost, numbers: Pair) -> Tensor:
    """Return the mean of the rows' numbers plus, unless symmetric, that of the columns'."""
    of_x = numbers[0] @ cost.a
    return of_x if cost.symmetric else of_x + numbers[1] @ cost.b


# Points of a side that `float16_rounding` reads.
SAMPLED_POINTS = 256

# Coefficients of the terms of (x - y)^2 (xi^2 + eta^2): those with eta^2, then those with xi^2.
SIGNS = 1, -2, 1, 1, -2, 1


def float16_rounding(cost: LabelledCost) -> float:
    """Estimate the root mean square of C' - C, with C' between points rounded to float16.

    Roundings xi_i and eta_j change a cost by 2 lambda_x <x_i - y_j, xi_i - eta_j>, up to their
    squares. If their signs were independent of all else, the mean of its square would be

        4 lambda_x^2 sum_k E (x_k - y_k)^2 (xi_k^2 + eta_k^2).
    """
    # Triton is not everywhere.
    from otdd_flash.kernels.points.packed_points import power_of_two_scale

    scale = power_of_two_scale(cost.largest)
    x, y = (_sampled(points) for points in cost.points)
    powers = (torch.cat((x, y)) - cost.centre).mul_(scale)
    lost = (powers - powers.to(torch.float16)).square_()
    squares = powers.square()
    means = powers.new_zeros((2, len(powers)))
    means[0, : len(x)], means[1, len(x) :] = 1 / len(x), 1 / len(y)
    # Means of 1, x_k and x_k^2, without and with xi_k^2; term t of x is multiplied by 5 - t of y.
    first, second, off = means @ powers, means @ squares, means @ lost
    of_one, of_two = means @ powers.mul_(lost), means @ squares.mul_(lost)
    terms = torch.stack((torch.ones_like(off), first, second, off, of_one, of_two))
    products = (terms[:, 0] * terms[:, 1].flip(0)).sum(1).tolist()
    total = math.fsum(map(math.prod, zip(SIGNS, products, strict=True)))
    return 2 * cost.lambda_x / scale**2 * math.sqrt(max(total, 0.0))


def _sampled(points: Points) -> Tensor:
    """Return a sample of the points (k, d), on the device."""
    step = max(1, points.shape[0] // SAMPLED_POINTS)
    if isinstance(points, Tensor):
        return points[::step]
    return points[torch.arange(0, points.shape[0], step, device=points.device)]
