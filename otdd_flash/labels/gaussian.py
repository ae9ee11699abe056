"""Squared Bures-Wasserstein distance between the Gaussians of all class pairs.

W_ij = ||m_i - m_j||^2 + tr S_i + tr S_j - 2 tr (S_i^1/2 S_j S_i^1/2)^1/2.

With any factors S_i = F_i^T F_i the last trace is the nuclear norm of F_i F_j^T: with polar
decompositions F = U S^1/2, F_i F_j^T = U_i (S_i^1/2 S_j^1/2) U_j^T, whose singular values are those
of S_i^1/2 S_j^1/2. No matrix square root is taken, and rank-deficient classes are nothing special.
F_i is the (n_i, d) matrix of scaled centred points where n_i <= d, and else the triangular factor
of its QR decomposition, so that it never has more than d rows.

Singular values come from an SVD in float64. The eigenvalues of the Gram matrix would be no faster
and would lose half the digits of the small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.moments import class_means, covariance_factor, squared_distances

Progress = Callable[[int, int], None]


def gaussian_distances(
    clouds: Sequence[ClassCloud], *, unbiased: bool = True, progress: Progress | None = None
) -> Tensor:
    """Bures-Wasserstein table of Gaussian classes.

    Args:
        clouds: V classes.
        unbiased: whether covariances divide by n - 1 (for weights: by 1 - sum w^2) or by n.
        progress: called with the number of class pairs done and their total.

    Returns:
        (V, V) float64, symmetric, with a zero diagonal.

    Raises:
        InputError: `unbiased` and a class has one sample.
    """
    factors = [reduced_factor(cloud, unbiased) for cloud in clouds]
    traces = torch.stack([factor.square().sum() for factor in factors])
    fidelity = _nuclear_norms(factors, progress)
    spread = traces.unsqueeze(1) + traces - 2 * fidelity
    # The Bures part is a squared distance; below zero there is only rounding.
    table = squared_distances(class_means(clouds)) + spread.clamp_min(0)
    return table.fill_diagonal_(0)


def diagonal_gaussian_distances(clouds: Sequence[ClassCloud], *, unbiased: bool = True) -> Tensor:
    """As `gaussian_distances`, with all covariances between features taken as zero.

    Commuting covariances make it ||m_i - m_j||^2 + ||s_i - s_j||^2, s the standard deviations.
    """
    deviations = torch.stack(
        [covariance_factor(cloud, unbiased).square().sum(0).sqrt() for cloud in clouds]
    )
    return squared_distances(class_means(clouds)) + squared_distances(deviations)


def reduced_factor(cloud: ClassCloud, unbiased: bool) -> Tensor:
    """F (r, d), r <= min(n, d), with F^T F the covariance of the class."""
    factor = covariance_factor(cloud, unbiased)
    size, dim = factor.shape
    if size <= dim:
        return factor
    # Features that are constant within a class (the border of an image) add no rank.
    varying = torch.nonzero(cloud.points.amax(0) > cloud.points.amin(0)).squeeze(1)
    triangle = torch.linalg.qr(factor[:, varying], mode="r").R
    reduced = factor.new_zeros(triangle.shape[0], dim)
    reduced[:, varying] = triangle
    return reduced


def _nuclear_norms(factors: Sequence[Tensor], progress: Progress | None) -> Tensor:
    """(V, V) nuclear norms of F_i F_j^T; the diagonal is left at 0."""
    count = len(factors)
    norms = factors[0].new_zeros(count, count)
    # Classes of equal rank make batches of equal matrices.
    by_rank = sorted(range(count), key=lambda c: factors[c].shape[0])
    done = 0
    for position, i in enumerate(by_rank):
        later = by_rank[position + 1 :]
        for rank, members in groupby(later, key=lambda c: factors[c].shape[0]):
            columns = list(members)
            for group in _chunks(columns, factors[i].shape[0] * rank):
                others = torch.stack([factors[j] for j in group])
                values = torch.linalg.svdvals(factors[i] @ others.mT).sum(-1)
                norms[i, group] = norms[group, i] = values
                done += len(group)
                if progress is not None:
                    progress(done, count * (count - 1) // 2)
    return norms


def _chunks(columns: list[int], entries: int, limit: int = 4_000_000) -> list[list[int]]:
    """Runs of columns whose (entries)-sized products stay under `limit` float64 numbers in all."""
    step = max(1, limit // max(1, entries))
    return [columns[start : start + step] for start in range(0, len(columns), step)]
