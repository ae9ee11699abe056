"""A randomized Nystroem preconditioner for nearly singular plans.

Scaled by the masses c, a Schur complement is I - A, A = K^T K with eigenvalues in [0, 1]. The few
near 1, whose iterations are many, belong to points that share mass with hardly any other, and to
groups of them. Products with random vectors find what they span, the second ones their eigenvalues
(Halko et al. 2011, Finding structure with randomness; Frangella et al. 2023, Randomized Nystrom
preconditioning, whose approximation this is, after a power):

    Q = orth(A Omega),   A ~ A Q (Q^T A Q)^-1 Q^T A = U diag(lambda) U^T

    (I - A)^-1 ~ I + U diag(lambda / (1 - lambda)) U^T.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from otdd_flash.cost.memory import holds

# Vectors that are drawn, at the most, and rows to each of them at the least.
RANK, ROWS_PER_VECTOR = 256, 4

# Eigenvalues of A below which masses do as well, and of I - A, in units of the precision of
# products, below which these do not tell them from 0.
LEAST, UNITS = 0.25, 64

# Matrices of RANK columns float64 that are there at once, those of a product included.
MATRICES = 6


class LowRank:
    """M^-1 = D^-1 + V V^T, symmetric and positive.

    D are the masses of the system that iterates. Those of the one that V is found of may be 0 where
    these are not: rounded to float16 a plan has no entry in columns of very small mass, and with
    their 0 in place of D^-1 no direction would ever have a part there.

    Args:
        vectors: V (m, k), float64, 0 in rows that have no part in it.
    """

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def times(self, residual: Tensor, inverse: Tensor) -> Tensor:
        """M^-1 r for r (m, s), columns of stride m, and the diagonal of D^-1 (m, 1)."""
        rows = residual.T
        return (rows * inverse.T).addmm_(rows @ self.vectors, self.vectors.T).T


def rank_for(rows: int, others: int, most: int | None, device: torch.device) -> int:
    """Vectors that are drawn for so many rows in `most` bytes, half of what is free for None.

    Products go by the `others`, the points of the plan's other side, which may be many more.
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
        times: A V for V (m, k), float64.
        scale: the diagonal of D^-1/2 (m, 1), 0 in rows that have no part in it.
        rank: vectors that are drawn.
        precision: of products, relative to what they multiply.
        damping: of the matrix, 0 or more.
    """
    draw = torch.Generator(scale.device).manual_seed(0)
    drawn = torch.randn(len(scale), rank, generator=draw, dtype=torch.float64, device=scale.device)
    basis, _ = torch.linalg.qr(times(drawn))
    images = times(basis)
    # Of eigenvalues that rounding hides, and those that are small, nothing is kept.
    inner, turned = torch.linalg.eigh(_symmetric(basis.T @ images))
    kept = inner > max(LEAST, precision)
    factor = images @ (turned[:, kept] / inner[kept].sqrt())
    values, turned = torch.linalg.eigh(_symmetric(factor.T @ factor))
    # Columns of factor times turned are sqrt(lambda) U, so U lambda / (1 - lambda) U^T is
    distance = (1 + damping - values).clamp_min(UNITS * precision)
    return LowRank(scale * (factor @ (turned / distance.sqrt())))


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
