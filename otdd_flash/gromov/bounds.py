"""Lower bounds of the Gromov-Wasserstein energy E and the class cost <W, P>, rounding included.

They hold for all plans P. `gromov.solve` calls them once for a pair of datasets, and takes them
into the record and the lower bound of the result. After a change a bound must still hold for every
plan, its own rounding included: `tests/gromov/test_gromov.py` has problems that attain bounds.

`gromov.energy` defines E, u, v, M and S. Two bounds are of E:

- Eccentricities (Memoli 2011, Gromov-Wasserstein distances and the metric approach to object
  matching): for given (i, j) the sum over P_kl is the squared distance of two functions in L2(P),
  which is at least the squared difference of their norms s_i and t_j. So E is at least the squared
  2-Wasserstein distance of the numbers s and t, which sorting gives.
- Spectra: <P, u v^T> is at most the one that pairs u and v in their orders, and, with
  M = S_x^1/2 K S_y^1/2 and ||K|| <= 1, ||M||^2 = tr(S_x K S_y K^T) at most the sum of products of
  sorted eigenvalues (von Neumann). This bound is 0 on a rotated copy.

`class_bound` is the third, of <W, P>: transport between classes instead of points.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.gromov.energy import OPERATIONS, Cloud, Energy
from otdd_flash.sliced import Steps, equal_steps, weighted_steps

TINY = torch.finfo(torch.float64).tiny


def eccentricity_bound(energy: Energy) -> float:
    """Return the squared W_2 of s and t less its rounding, at least 0."""
    clouds = energy.x, energy.y
    (s, errors), (t, others) = map(_eccentricities, clouds)
    order, other = s.argsort(), t.argsort()
    (rows, columns, widths), error = _quantile_steps(energy, order, other)
    gaps = s[order][rows] - t[other][columns]
    distance = float((widths @ gaps.square()).sqrt())
    # A change of s moves W_2 by no more than its own length in L2(a).
    moved = sum(
        float((side.masses @ each.square()).sqrt())
        for side, each in zip(clouds, (errors, others), strict=True)
    )
    reach = max(float(s.max()), float(t.max()))
    lower = max(distance * (1 - (len(widths) + OPERATIONS) * DOUBLE_UNIT) - moved, 0.0)
    return max(lower**2 - error * reach**2, 0.0)


def spectral_bound(energy: Energy) -> float:
    """Return E with the largest <P, u v^T> and ||M|| that any plan could have, less rounding."""
    x, y = energy.x, energy.y
    u, v = x.centred_norms, y.centred_norms
    order, other = u.argsort(), v.argsort()
    (rows, columns, widths), error = _quantile_steps(energy, order, other)
    reach = float(u.abs().max() * v.abs().max())
    of_norms = float(widths @ (u[order][rows] * v[other][columns])) + error * reach
    common = min(len(x.covariance), len(y.covariance))
    of_axes = float((x.axes[0][:common] * y.axes[0][:common]).sum())
    lower = energy.independent - 4 * of_norms - 8 * of_axes
    # Once for the sums. Once for eigenvalues: those that are computed are of a matrix within a
    # multiple of r roundings of S, relative to tr S, and tr S tr T is at most the spreads' mean.
    return max(lower - 2 * energy.rounding, 0.0)


def class_bound(table: Tensor, rows: Tensor, columns: Tensor) -> float:
    """Return a lower bound of <W, P>: of the transport between classes (V_x, V_y) with masses.

    Any potentials g prove one, with f_i = min_j (W_ij - g_j).
    """
    if not bool(table.any()):
        return 0.0
    # It takes seconds to import.
    import ot

    costs, a, b = (each.double().cpu() for each in (table, rows, columns))
    *_, solved = ot.emd(*(each.numpy() for each in (a, b, costs)), log=True, check_marginals=False)
    g = torch.from_numpy(solved["v"])
    f = (costs - g).amin(1)
    size = float(a @ f.abs() + b @ g.abs()) + float(costs.abs().max())
    return float(a @ f + b @ g) - (len(a) + len(b) + OPERATIONS) * DOUBLE_UNIT * size


def _eccentricities(cloud: Cloud) -> tuple[Tensor, Tensor]:
    """Return s (n,), s_i^2 = sum_k a_k ||x_i - x_k||^4, and a bound on the error of each."""
    x, norms, mean = cloud.points, cloud.norms, cloud.mean_norm
    cubes = (cloud.masses * norms) @ x
    fourth = float(cloud.masses @ norms.square())
    plain = norms.square() + 2 * mean * norms + fourth
    squares = plain + 4 * ((x @ cloud.covariance) * x).sum(1) - 4 * x @ cubes
    # The sum of the absolute values of all terms: x^T S x is at most ||x||^2 m_2, and
    # ||x|| E ||x||^3 at most ||x|| (E ||x||^4)^3/4.
    terms = plain + 4 * mean * norms + 4 * norms.sqrt() * fourth**0.75
    error = 4 * ((sum(x.shape) + OPERATIONS) * DOUBLE_UNIT + cloud.turned) * terms
    s = squares.clamp_min(0).sqrt()
    # |s - s'| <= min(error / s, sqrt(error)).
    return s, torch.minimum(error.sqrt(), error / s.clamp_min(TINY))


def _quantile_steps(energy: Energy, order: Tensor, other: Tensor) -> tuple[Steps, float]:
    """Return the steps of both sides in their orders, and a bound on their lengths' errors."""
    a, b = energy.x.masses[order], energy.y.masses[other]
    if bool((a == a[0]).all()) and bool((b == b[0]).all()):
        return equal_steps(len(a), len(b), a.device), DOUBLE_UNIT
    rows, columns, widths = weighted_steps(a[None], b[None])
    # Every end is off by the rounding of the sum before it.
    return (rows[0], columns[0], widths[0]), 4 * float(len(a) + len(b)) ** 2 * DOUBLE_UNIT
