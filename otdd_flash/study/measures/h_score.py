"""`h_score`: how much of the variance of the source's features lies between the target's classes.

    H = tr(cov(F)^+ cov(E[F | class]))

(Bao et al. 2019, An information-theoretic approach to transferability in task transfer learning).
With centred features U S V^T and Q (n, V) the orthonormal basis of functions of the class, it is
|U^T Q|^2, which needs no inverse; singular values of 0 have no part in U.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.study.measures.base import NetworkView
from otdd_flash.study.measures.network import NetworkMeasure


class HScore(NetworkMeasure):
    """The H-score, at most the number of classes less 1."""

    name = "h_score"
    title = "H-score"

    def score(self, view: NetworkView) -> float:
        return h_score(view.features, view.labels)


def h_score(features: Tensor, labels: Tensor) -> float:
    """The H-score of features (n, d) for labels (n,)."""
    centred = features.double() - features.double().mean(0)
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    # Rounding of the products that make the singular values.
    least = max(centred.shape) * torch.finfo(torch.float64).eps * singular.max()
    left = left[:, singular > least]
    present = torch.unique(labels)
    members = (labels[:, None] == present).double()
    basis = members / members.sum(0).sqrt()
    return float((left.T @ basis).square().sum())
