"""What costs lose where points are rounded, and points that lose nothing.

A lattice: whole multiples of one step, as grey values of 8 bits are. float16 holds every integer up
to 2048. In units of the step, and less a centre on the same lattice, such points lose nothing to
it, and one product of their coordinates is as exact as three.

`product_errors`: points are replaced by points nearby in products, but not in norms.

    C'_ij = p_i + q_j - 2 lambda_x <x'_i, y'_j> + lambda_y W[l_i, l_j]

Norms p_i = lambda_x ||x_i||^2 are those of the points themselves; x'_i is off by e_i = ||x_i -
x'_i||, which is measured. By Cauchy and Schwarz and s t <= (theta s^2 + t^2 / theta) / 2, products
are off by at most

    2 lambda_x (e_i ||y_j|| + ||x'_i|| e_j) <= A_i + B_j,
    A_i = lambda_x (e_i^2 / theta + theta (||x_i|| + e_i)^2),

B_j likewise, for any theta > 0; with theta = rms e / rms ||x|| the two parts are equal.

`float16_rounding`: what rounding points to float16 changes in costs, about; it proves nothing.
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

# How far a multiple of a step that was rounded to float32 may be off, relatively.
ROUNDING = torch.finfo(torch.float32).eps


class Lattice(NamedTuple):
    """Where all points of a cost lie.

    Attributes:
        scale: steps between neighbouring values of a coordinate in one unit of the points.
        centre: (d,) float64, a point of it near the points' centre.
        lowest: of all coordinates, in steps.
        highest: likewise.
    """

    scale: float
    centre: Tensor
    lowest: int
    highest: int


def lattice_of(cost: LabelledCost) -> Lattice | None:
    """The lattice that holds all points, if float16 holds their coordinates on it."""
    # Parts of a cost take the points as the others do, and ask once.
    whole = cost.whole
    if "lattice" not in whole.known:
        whole.known["lattice"] = _found(whole)
    lattice: Lattice | None = whole.known["lattice"]
    return lattice


class _Told(NamedTuple):
    """Of some points: whether one is beside the lattice of each of `SCALES`, and their ends."""

    beside: tuple[bool, bool]
    lowest: float
    highest: float


def _found(cost: LabelledCost) -> Lattice | None:
    scales = [scale for scale in SCALES if cost.largest * scale + 1 <= LARGEST_INTEGER]
    lowest, highest = math.inf, -math.inf
    for told in _told(cost) if scales else ():
        scales = [scale for scale in scales if not told.beside[SCALES.index(scale)]]
        if not scales:
            return None
        lowest, highest = min(lowest, told.lowest), max(highest, told.highest)
    if not scales:
        return None
    scale = scales[0]
    centre = (cost.centre * scale).round() / scale
    return Lattice(scale, centre, round(lowest * scale), round(highest * scale))


def _told(cost: LabelledCost) -> Iterator[_Told]:
    """Yield the lattice facts of both clouds, cached ones first, then block by block."""
    clouds = cost.clouds[: 1 if cost.symmetric else 2]
    yield from (cloud.known["lattice"] for cloud in clouds if "lattice" in cloud.known)
    new = {cloud: cloud.points for cloud in clouds if "lattice" not in cloud.known}
    held = {cloud: points for cloud, points in new.items() if isinstance(points, Tensor)}
    told = _asked(held.values())
    for cloud, each in zip(held, told, strict=True):
        cloud.known["lattice"] = each
    yield from told
    for points in new.values():
        if not isinstance(points, Tensor):
            # As a rule the first block says that there is no lattice.
            for rows in points.stream(slices(points.shape[0], STREAMED_ROWS)):
                yield from _asked([rows])


def _asked(clouds: Collection[Tensor]) -> list[_Told]:
    if not clouds:
        return []
    # Triton is not everywhere.
    from otdd_flash.kernels.points.lattice_facts import lattice_facts

    facts = [lattice_facts(points, SCALES, ROUNDING).amax(0) for points in clouds]
    # One tensor, so that the host waits once.
    return [
        _Told((bool(first), bool(last)), -below, above)
        for first, last, below, above in torch.stack(facts).tolist()
    ]


TINY = torch.finfo(torch.float64).tiny

Pair = tuple[Tensor, Tensor]


def product_errors(cost: LabelledCost, squares: Pair, lost: Pair) -> Pair:
    """A (..., n) and B (..., m), float64, in units of the cost.

    Args:
        cost: of the points themselves.
        squares: ||x_i||^2 (n,) and ||y_j||^2 (m,) about the centre of the products, float64.
        lost: e_i^2 (..., n) and e_j^2 (..., m), float64, of one or of several points nearby.
    """
    ratio = _total(cost, lost) / _total(cost, squares).clamp_min(TINY)
    theta = ratio.sqrt().clamp_min(TINY)[..., None]

    def errors(off: Tensor, norms: Tensor) -> Tensor:
        lengths = off.sqrt().add_(norms.sqrt()).square_()
        return (off / theta).addcmul_(lengths, theta).mul_(cost.lambda_x)

    of_x = errors(lost[0], squares[0])
    return of_x, of_x if cost.symmetric else errors(lost[1], squares[1])


def squares_about(cost: LabelledCost, centre: Tensor) -> Pair:
    """||x_i||^2 (n,) and ||y_j||^2 (m,) about a centre (d,), float64."""
    x, y = cost.points
    of_x = squared_distances(x, centre)
    return of_x, of_x if cost.symmetric else squared_distances(y, centre)


def magnitudes_about(cost: LabelledCost, squares: Pair) -> Pair:
    """Return `LabelledCost.magnitudes` about the point that gives these squared norms."""
    if squares is cost.squares:
        return cost.magnitudes
    x, y = (
        magnitudes + 2 * cost.lambda_x * (about - before)
        for magnitudes, about, before in zip(cost.magnitudes, squares, cost.squares, strict=True)
    )
    return x, y


def _total(cost: LabelledCost, numbers: Pair) -> Tensor:
    """The mean of numbers of rows, and that of columns if they are others, together."""
    of_x = numbers[0] @ cost.a
    return of_x if cost.symmetric else of_x + numbers[1] @ cost.b


# Points of a side that tell it.
TELLING = 256

# Of the terms of (x - y)^2, in xi^2 and in eta^2.
SIGNS = 1, -2, 1, 1, -2, 1


def float16_rounding(cost: LabelledCost) -> float:
    """Root mean square of C' - C, with C' between points that were rounded to float16.

    Roundings xi_i and eta_j change a cost by 2 lambda_x <x_i - y_j, xi_i - eta_j>, but for their
    squares. If their signs were independent of all else, its square would be on average

        4 lambda_x^2 sum_k E (x_k - y_k)^2 (xi_k^2 + eta_k^2).
    """
    # Triton is not everywhere.
    from otdd_flash.kernels.points.packed_points import power_of_two_scale

    scale = power_of_two_scale(cost.largest)
    x, y = (_telling(points) for points in cost.points)
    powers = (torch.cat((x, y)) - cost.centre).mul_(scale)
    lost = (powers - powers.to(torch.float16)).square_()
    squares = powers.square()
    means = powers.new_zeros((2, len(powers)))
    means[0, : len(x)], means[1, len(x) :] = 1 / len(x), 1 / len(y)
    # On average 1, x_k and x_k^2, without and with xi_k^2: each faces what it is multiplied by.
    first, second, off = means @ powers, means @ squares, means @ lost
    of_one, of_two = means @ powers.mul_(lost), means @ squares.mul_(lost)
    terms = torch.stack((torch.ones_like(off), first, second, off, of_one, of_two))
    products = (terms[:, 0] * terms[:, 1].flip(0)).sum(1).tolist()
    total = math.fsum(map(math.prod, zip(SIGNS, products, strict=True)))
    return 2 * cost.lambda_x / scale**2 * math.sqrt(max(total, 0.0))


def _telling(points: Points) -> Tensor:
    """Return a sample of the points (k, d), on the device."""
    step = max(1, points.shape[0] // TELLING)
    if isinstance(points, Tensor):
        return points[::step]
    return points[torch.arange(0, points.shape[0], step, device=points.device)]
