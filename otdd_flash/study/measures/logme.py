"""`logme`: the largest log evidence of linear models of the classes in the source's features.

For the 0-1 vector y of a class and features F (n, d) the model is y = F w + noise with w from
N(0, I / alpha) and noise of precision beta, so that y comes from N(0, I / beta + F F^T / alpha).
LogME is the mean over classes of max over alpha, beta of log p(y) / n (You et al. 2021, LogME:
practical assessment of pre-trained models for transfer learning).

With F = U S V^T, z = U^T y and t = alpha / beta, the best beta for a given t is known, which leaves

    log p / n = -(1 + log(2 pi q(t) / n)) / 2 - sum_i log(1 + s_i^2 / t) / (2 n)
    q(t) = sum_i z_i^2 / (1 + s_i^2 / t) + |y - U z|^2

to maximise over one number: on a grid first, as there can be several maxima, and then in between.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.study.measures.base import NetworkView
from otdd_flash.study.measures.network import NetworkMeasure

# Of t, in units of the largest s^2; where y lies in the span of F the best t would be 0.
LOG_LOWEST, LOG_HIGHEST, GRID = math.log(1e-12), math.log(1e8), 120


class LogMe(NetworkMeasure):
    """The mean over classes of the largest log evidence per row."""

    name = "logme"
    title = "LogME"

    def score(self, view: NetworkView) -> float:
        return log_maximum_evidence(view.features, view.labels)


def log_maximum_evidence(features: Tensor, labels: Tensor) -> float:
    """LogME of features (n, d) for labels (n,), over the classes that have rows."""
    left, singular, _ = torch.linalg.svd(features.double(), full_matrices=False)
    squares = singular.square().numpy()
    present = torch.unique(labels)
    targets = (labels[:, None] == present).double()
    projected = left.T @ targets
    rest = (targets - left @ projected).square().sum(0).numpy()
    parts = projected.square().numpy()
    found = [
        _best_evidence(squares, parts[:, place], float(rest[place]), len(labels))
        for place in range(len(present))
    ]
    return float(np.mean(found))


def _best_evidence(
    squares: NDArray[np.float64], parts: NDArray[np.float64], rest: float, n: int
) -> float:
    """The largest log p / n of one class, from s^2, z^2 and |y - U z|^2."""
    from scipy.optimize import minimize_scalar

    scale = float(squares.max(initial=0.0))
    if scale == 0:
        scale = 1.0

    def negative(log_t: float) -> float:
        stretch = 1 + squares / (scale * math.exp(log_t))
        q = float((parts / stretch).sum()) + rest
        # Of a class that is fitted to the last bit.
        q = max(q, np.finfo(np.float64).tiny)
        fit = 1 + math.log(2 * math.pi * q / n)
        return (fit + float(np.log(stretch).sum()) / n) / 2

    grid = np.linspace(LOG_LOWEST, LOG_HIGHEST, GRID)
    values = [negative(point) for point in grid]
    best = int(np.argmin(values))
    bracket = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    refined = minimize_scalar(negative, bounds=bracket, method="bounded", options={"xatol": 1e-9})
    return -min(float(refined.fun), values[best])
