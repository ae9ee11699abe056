"""The plane in which several point clouds together spread most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROWS_AT_ONCE = 4096
BLOCK, ROUNDS = 12, 8


@dataclass(frozen=True)
class PrincipalPlane:
    """`axes` (d, 2) through `mean` (d,), both float64; `explained` are their shares of variance.

    With d = 1, or points on a line, the second share is 0.
    """

    mean: Tensor
    axes: Tensor
    explained: tuple[float, float]

    def project(self, features: Tensor) -> Tensor:
        """Coordinates (n, 2), float64, on the CPU, of features (n, d) on any device."""
        return torch.cat([(rows - self.mean) @ self.axes for rows in _chunks(features)])


def fit_plane(clouds: Sequence[Tensor], seed: int) -> PrincipalPlane:
    """Fit the first two principal axes to several clouds, each counting as a whole equally much.

    By block power iteration (Halko, Martinsson & Tropp 2011), so that neither a (d, d) covariance
    nor a float64 copy of the features is ever held. An axis's largest entry is positive.

    Args:
        clouds: matrices (n_k, d) of one d, any device.
        seed: of the block that the iteration starts from.
    """
    d = clouds[0].shape[1]
    mean = _average(clouds, lambda rows: rows.sum(0))
    total = float(_average(clouds, lambda rows: (rows - mean).square().sum()))

    def spread(block: Tensor) -> Tensor:
        """The covariance times a block (d, k)."""
        return _average(clouds, lambda rows: (rows - mean).T @ ((rows - mean) @ block))

    start = np.random.default_rng(seed).normal(size=(d, min(d, BLOCK)))
    block = torch.linalg.qr(torch.from_numpy(start)).Q
    for _ in range(ROUNDS):
        block = torch.linalg.qr(spread(block)).Q
    variances, vectors = torch.linalg.eigh(block.T @ spread(block))
    axes = torch.zeros(d, 2, dtype=torch.float64)
    explained = [0.0, 0.0]
    for k in range(min(2, d)):
        axis = block @ vectors[:, -1 - k]
        axes[:, k] = axis * torch.sign(axis[axis.abs().argmax()])
        explained[k] = max(float(variances[-1 - k]) / total, 0.0) if total > 0 else 0.0
    return PrincipalPlane(mean, axes, (explained[0], explained[1]))


def _average(clouds: Sequence[Tensor], part: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over clouds of the mean over rows of what `part` sums over a chunk of rows."""
    means = [torch.stack([part(rows) for rows in _chunks(c)]).sum(0) / len(c) for c in clouds]
    return torch.stack(means).mean(0)


def _chunks(features: Tensor) -> Iterator[Tensor]:
    """The rows in float64 on the CPU, a few thousand at a time."""
    for start in range(0, len(features), ROWS_AT_ONCE):
        yield features[start : start + ROWS_AT_ONCE].detach().cpu().double()
