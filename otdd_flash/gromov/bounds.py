"""Lower bounds of E over all plans, rounding included, and of the cost between classes.

`solve` calls them once for a pair of datasets. Two of them are of E:

- Eccentricities (Memoli 2011, Gromov-Wasserstein distances and the metric approach to object
  matching): for given (i, j) the sum over P_kl is the squared distance of two functions in L2(P),
  which is at least the squared difference of their norms s_i and t_j. So E is at least the squared
  2-Wasserstein distance of the numbers s and t, which sorting gives.
- Spectra: <P, u v^T> is at most the sum of the sorted products of u and v, and
  ||M||^2 = tr(S_x K S_y K^T) with ||K|| <= 1 at most the sum of products of sorted eigenvalues
  (von Neumann). It is 0 on a rotated copy.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.gromov.energy import OPERATIONS, Cloud, Energy

Vector = NDArray[np.float64]

TINY = float(np.finfo(np.float64).tiny)


def eccentricity_bound(energy: Energy) -> float:
    """Return the squared W_2 of s and t less its rounding, at least 0."""
    sizes, errors = zip(*map(_eccentricities, (energy.x, energy.y)), strict=True)
    masses = [_host(side.masses) for side in (energy.x, energy.y)]
    s, t, widths, error = _sorted_together(sizes, masses)
    distance = float(np.sqrt(widths @ np.square(s - t)))
    # A change of s moves W_2 by no more than its own length in L2(a).
    moved = sum(float(np.sqrt(w @ np.square(e))) for w, e in zip(masses, errors, strict=True))
    reach = float(max(s.max(), t.max()))
    lower = max(distance * (1 - (len(s) + OPERATIONS) * DOUBLE_UNIT) - moved, 0.0)
    return max(lower**2 - error * reach**2, 0.0)


def spectral_bound(energy: Energy) -> float:
    """Return E with the largest <P, u v^T> and ||M|| that any plan could have, less rounding."""
    x, y = energy.x, energy.y
    masses = [_host(side.masses) for side in (x, y)]
    norms = [_host(side.centred_norms) for side in (x, y)]
    u, v, widths, error = _sorted_together(norms, masses)
    reach = float(np.abs(u).max() * np.abs(v).max())
    of_norms = float(widths @ (u * v)) + error * reach
    common = min(len(x.covariance), len(y.covariance))
    of_axes = float((x.axes[0][:common] * y.axes[0][:common]).sum())
    lower = energy.independent - 4 * of_norms - 8 * of_axes
    # Errors of eigenvalues are those of sums of d products, relative to the trace.
    return max(lower - 2 * energy.rounding, 0.0)


def class_bound(table: Tensor, rows: Tensor, columns: Tensor) -> float:
    """Return a lower bound of <W, P>: of the transport between classes (V_x, V_y) with masses.

    Any potentials g prove one, with f_i = min_j (W_ij - g_j).
    """
    # It takes seconds to import.
    import ot

    costs, a, b = (_host(each) for each in (table, rows, columns))
    *_, found = ot.emd(a, b, costs, log=True, check_marginals=False)
    g = np.asarray(found["v"])
    f = (costs - g).min(1)
    size = float(a @ np.abs(f) + b @ np.abs(g)) + float(np.abs(costs).max())
    return float(a @ f + b @ g) - (len(a) + len(b) + OPERATIONS) * DOUBLE_UNIT * size


def _eccentricities(cloud: Cloud) -> tuple[Vector, Vector]:
    """Return s (n,), s_i^2 = sum_k a_k ||x_i - x_k||^4, and a bound on the error of each."""
    x, norms, mean = cloud.points, cloud.norms, cloud.mean_norm
    cubes = (cloud.masses * norms) @ x
    fourth = float(cloud.masses @ norms.square())
    plain = norms.square() + 2 * mean * norms + fourth
    squares = plain + 4 * ((x @ cloud.covariance) * x).sum(1) - 4 * x @ cubes
    # What is summed, in absolute values: x^T S x is at most ||x||^2 m_2, and
    # ||x|| E ||x||^3 at most ||x|| (E ||x||^4)^3/4.
    terms = plain + 4 * mean * norms + 4 * norms.sqrt() * fourth**0.75
    error = (sum(x.shape) + OPERATIONS) * 4 * DOUBLE_UNIT * terms
    s = squares.clamp_min(0).sqrt()
    # |s - s'| <= min(error / s, sqrt(error)).
    return _host(s), _host(torch.minimum(error.sqrt(), error / s.clamp_min(TINY)))


def _sorted_together(
    values: tuple[Vector, Vector] | list[Vector], masses: list[Vector]
) -> tuple[Vector, Vector, Vector, float]:
    """Couple two sets of numbers in their order.

    Returns:
        The values of both sides on each common interval of quantiles, the length of each, and a
        bound on the sum of the errors of these lengths.
    """
    ends, ordered = [], []
    for numbers, own in zip(values, masses, strict=True):
        order = np.argsort(numbers)
        ordered.append(numbers[order])
        if (own == own[0]).all():
            # Exact but for one rounding, and the same for sides of one length.
            ends.append(np.arange(1, len(own) + 1, dtype=np.longdouble) / len(own))
        else:
            sums = np.cumsum(own[order].astype(np.longdouble))
            ends.append(sums / sums[-1])
    steps = np.unique(np.concatenate(ends))
    places = [
        np.minimum(np.searchsorted(each, steps), len(own) - 1)
        for each, own in zip(ends, masses, strict=True)
    ]
    widths = np.diff(steps, prepend=np.longdouble(0)).astype(np.float64)
    # Every end is off by the rounding of the sum before it.
    error = 4 * float(sum(map(len, masses))) ** 2 * float(np.finfo(np.longdouble).eps)
    return ordered[0][places[0]], ordered[1][places[1]], widths, error


def _host(values: Tensor) -> Vector:
    found: Vector = values.double().cpu().numpy()
    return found
