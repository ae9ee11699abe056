"""Nuclear norms and polar factors of batches of float64 matrices.

||M||_* is the sum of M's singular values s, and <M, U> with the polar factor U = sum u v^T over the
non-zero ones, which is also its gradient.

On the CPU both come from LAPACK's SVD. On a GPU, where an SVD is slow and matrix products are not,
U comes from a scaled Newton-Schulz iteration: from X = M / ||M||_F,

    X <- 3/2 (a X) - 1/2 (a X) (a X)^T (a X),

which moves every singular value x to 3/2 a x - 1/2 (a x)^3 and keeps the vectors. If all x lie in
[l, 1], then a^2 = 3 / (1 + l + l^2) brings them closest to 1 (Chen & Chow 2014, "A stable scaling
of Newton-Schulz for improving the sign function computation of a Hermitian matrix"): small ones
grow by 2.6 a step. Their bound on a keeps a large x from being moved near 0, where rounding would
spoil its vectors. The steps are the same for every matrix: those for l = `NEGLIGIBLE`.

A singular value s whose x has come to y <= 1 counts s y in <M, U>: the result is never above the
norm but for rounding, and below it by a share of at most min(rows, columns) NEGLIGIBLE, wherever
the singular values lie.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

# Singular values below this share of the Frobenius norm count as zero: no digits of theirs are
# left in a product that was rounded to float64.
NEGLIGIBLE = 1e-13
# At this scale the largest singular value, 1, moves to 0.1 (Chen & Chow).
LARGEST_SCALE = 1.69770248526


def nuclear_norms(matrices: Tensor) -> Tensor:
    """Sums of the singular values of (B, r, c) float64, as (B,)."""
    if by_products(matrices):
        return (matrices * iterated_polar_factors(matrices)).sum((-2, -1))
    values: Tensor = torch.linalg.svdvals(matrices)
    return values.sum(-1)


def polar_factors(matrices: Tensor) -> Tensor:
    """U (B, r, c) of M = U (M^T M)^1/2, from the singular values that are not negligible."""
    if by_products(matrices):
        return iterated_polar_factors(matrices)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    floor = NEGLIGIBLE * torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    factors: Tensor = (left * (values > floor).unsqueeze(-2)) @ right
    return factors


def by_products(matrices: Tensor) -> bool:
    """Whether matrix products are the fast way to decompositions on this device."""
    return matrices.is_cuda


def iterated_polar_factors(matrices: Tensor) -> Tensor:
    """As `polar_factors`, by matrix products only; negligible singular values count in part."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return iterated_polar_factors(matrices.mT).mT
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    factors = matrices / torch.where(norms > 0, norms, 1.0)
    for scale in newton_schulz_scales():
        gram = factors @ factors.mT
        factors = torch.baddbmm(factors, gram, factors, beta=1.5 * scale, alpha=-0.5 * scale**3)
    return factors


@cache
def newton_schulz_scales() -> tuple[float, ...]:
    """The scale a of every step from [NEGLIGIBLE, 1] to 1."""
    scales = []
    lower = NEGLIGIBLE
    while lower < 1 - 1e-14:
        scale = min(LARGEST_SCALE, math.sqrt(3 / (1 + lower + lower**2)))
        lower *= scale * (3 - (scale * lower) ** 2) / 2
        scales.append(scale)
    return tuple(scales)
