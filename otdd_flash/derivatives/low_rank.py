"""A randomized Nystroem preconditioner for nearly singular plans.

Scaled by the masses c, a Schur complement is I - A, A = K^T K with eigenvalues in [0, 1]. The few
eigenvalues near 1, which make conjugate gradients slow, belong to points, or groups of points, that
share mass with hardly any other. Products of A with random vectors find the space that their
eigenvectors span, a second product the eigenvalues (Halko et al. 2011, Finding structure with
randomness; Frangella et al. 2023, Randomized Nystrom preconditioning; here after one power of A):

    Q = orth(A Omega),   A ~ A Q (Q^T A Q)^-1 Q^T A = U diag(lambda) U^T

    (I - A)^-1 ~ I + U diag(lambda / (1 - lambda)) U^T.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from otdd_flash.memory import holds

# Random vectors at the most, and the fewest rows for each of them.
RANK, ROWS_PER_VECTOR = 256, 4

# Eigenvalues of A below LEAST are left to the scaling by masses. Those of I - A below UNITS times
# the precision of products are indistinguishable from 0.
LEAST, UNITS = 0.25, 64

# Matrices of RANK columns, float64, in memory at once, those of a product included.
MATRICES = 6


class LowRank:
    """A preconditioner M^-1 = D^-1 + V V^T, symmetric and positive definite.

    D holds the masses of the system that is iterated on. V may come from a rounded plan, in which
    columns of very small mass have no entry in float16, and so mass 0: D is never taken from that,
    as no direction would then have a component there.

    Args:
        vectors: V (m, k), float64, 0 in rows without mass.
    """

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def times(self, residual: Tensor, inverse: Tensor) -> Tensor:
        """Return M^-1 r for r (m, s), with columns of stride m, and the diagonal of D^-1 (m, 1)."""
        rows = residual.T
        return (rows * inverse.T).addmm_(rows @ self.vectors, self.vectors.T).T


def rank_for(rows: int, others: int, most: int | None, device: torch.device) -> int:
    """Return the number of random vectors for so many rows in `most` bytes.

    None takes half of free memory. `others` is the number of points on the plan's other side, which
    products pass through.
    """
    rank = min(RANK, rows // ROWS_PER_VECTOR)
    while rank and not holds(8 * MATRICES * max(rows, others) * rank, most, device):
        rank //= 2
    return rank


def low_rank(
    times: Callable[[Tensor], Tensor], scale: Tensor, rank: int, precision: float, damping: float
) -> LowRank:
    """Build the preconditioner of D^1/2 ((1 + damping) I - A) D^1/2, up to a factor.

    Args:
        times: returns A V for V (m, k), float64.
        scale: the diagonal of D^-1/2 (m, 1), 0 in rows without mass.
        rank: number of random vectors.
        precision: relative error of the products.
        damping: of the matrix, 0 or more.
    """
    draw = torch.Generator(scale.device).manual_seed(0)
    drawn = torch.randn(len(scale), rank, generator=draw, dtype=torch.float64, device=scale.device)
    basis, _ = torch.linalg.qr(times(drawn))
    images = times(basis)
    # Drop eigenvalues that are small or only rounding.
    inner, turned = torch.linalg.eigh(_symmetric(basis.T @ images))
    kept = inner > max(LEAST, precision)
    factor = images @ (turned[:, kept] / inner[kept].sqrt())
    values, turned = torch.linalg.eigh(_symmetric(factor.T @ factor))
    # Columns of factor times turned are sqrt(lambda) U, so U lambda / (1 - lambda) U^T is
    distance = (1 + damping - values).clamp_min(UNITS * precision)
    return LowRank(scale * (factor @ (turned / distance.sqrt())))


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
