"""Covariances as small factors: F (r, d) with F^T F = S and r near the rank that S can have.

Where a class has no more samples than features that vary, F holds its scaled centred points. Else F
is triangular, of the QR decomposition of the points: Householder's on the CPU, and on a GPU, where
its narrow panels are slow, three passes of shifted Cholesky QR (Fukaya et al. 2020, "Shifted
Cholesky QR for computing the QR factorization of ill-conditioned matrices").

Both are as good as the points. A factor of S itself, by Cholesky or eigenvectors, has half the
digits of small singular values: it puts errors of 1e-8 of the traces into distances from a class
whose covariance is singular, against 1e-15 here. One pass of shifted Cholesky QR is such a factor;
the singular values it cannot see are taken up by the next pass, in units of the shift's root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.moments import covariance_factor
from otdd_flash.labels.nuclear_norm import by_products
from otdd_flash.solver.known_gradient import OnceDifferentiable

UNIT_ROUNDOFF = 2.0**-53


def reduced_factors(clouds: Sequence[ClassCloud], unbiased: bool) -> tuple[list[Tensor], Tensor]:
    """Factors (r_c, d) of all covariances and their traces (V,), differentiable in the points.

    The gradient of a factor is right for functions of its covariance, which do not change when the
    factor is multiplied by an orthogonal matrix from the left.
    """
    factors, traces = [], []
    varying = [_varying(cloud) for cloud in clouds]
    # In one transfer, and not one for each class.
    counts: list[int] = torch.stack([features.sum() for features in varying]).tolist()
    for cloud, features, count in zip(clouds, varying, counts, strict=True):
        factor = covariance_factor(cloud, unbiased)
        traces.append(factor.square().sum())
        if len(cloud) > count:
            factor = _Triangle.apply(factor, torch.nonzero(features).squeeze(1))
        missing = padded_rows(factor.shape[0]) - factor.shape[0]
        factors.append(torch.nn.functional.pad(factor, (0, 0, 0, missing)))
    return factors, torch.stack(traces)


def padded_rows(rows: int) -> int:
    """Rows with zeros below, so that classes of similar sizes share their batches.

    Multiples of 4 also align every matrix of a batch alike, on which LAPACK's rounding depends.
    """
    step = 1 << min(4, max(2, rows.bit_length() - 4))
    return max(step, -(-rows // step) * step)


def cholesky_qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Q (n, c) and R (c, c) with Q R = A for (n, c) float64, n >= c, by products and Cholesky.

    R^T R is A^T A to rounding. Q is orthonormal on the range of A, and small on the rest.
    """
    columns = matrix.shape[1]
    # The rounding of a product of unit columns, with room.
    shift = 100 * columns * UNIT_ROUNDOFF
    norms = torch.linalg.vector_norm(matrix, dim=0)
    q = matrix / torch.where(norms > 0, norms, 1.0)
    r = torch.diag(norms)
    for _ in range(3):
        gram = q.mT @ q
        gram.diagonal().add_(shift)
        step = torch.linalg.cholesky(gram, upper=True)
        q = torch.linalg.solve_triangular(step, q, upper=True, left=False)
        r = step @ r
    # R^T R has grown by the shifts of the last two passes, in units of A^T A; the first pass's
    # counts only as the product of all three, far below rounding.
    return q, r / (1 + shift + shift**2) ** 0.5


def _varying(cloud: ClassCloud) -> Tensor:
    """Which features (d,) differ within the class; others (the border of an image) add no rank."""
    points = cloud.points.detach()
    return points.amax(0) > points.amin(0)


class _Triangle(torch.autograd.Function):
    """R (c, d) of the QR decomposition of A's (n, d) non-zero columns, zeros in the others.

    With A = Q R and a function of R^T R, whose gradient in R is R T for some T, the gradient in A
    is A T = Q R T: Q times the gradient in R.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, columns: Tensor) -> Tensor:
        dense = matrix[:, columns]
        needs_q = ctx.needs_input_grad[0]
        if by_products(dense):
            q, r = cholesky_qr(dense)
        else:
            q, r = torch.linalg.qr(dense, mode="reduced" if needs_q else "r")
        if needs_q:
            ctx.save_for_backward(q, matrix)
        triangle = matrix.new_zeros(len(columns), matrix.shape[1])
        triangle[:, columns] = r
        return triangle

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        q, matrix = ctx.saved_tensors
        by_matrix = q @ gradient.detach()
        # Of create_graph=True.
        if torch.is_grad_enabled():
            by_matrix = cast(Tensor, OnceDifferentiable.apply(by_matrix, gradient, matrix))
        return by_matrix, None
