"""Gaussians that move: means and spreads as variables, and the distances between them.

W_kl = ||m_k - m_l||^2 + tr S_k + tr S_l - 2 tr (S_k^1/2 S_l S_k^1/2)^1/2,      S_k = F_k^T F_k

With diagonal covariances a spread is the vector s_k of standard deviations and the last three terms
are || |s_k| - |s_l| ||^2; where only means are compared there is no spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otdd_flash.labels import LabelMetric
from otdd_flash.labels.classes import pool
from otdd_flash.labels.covariance_factors import reduced_factors
from otdd_flash.labels.fidelity import fidelities
from otdd_flash.labels.moments import class_means, squared_gaps, standard_deviations
from otdd_flash.labels.pairs import all_pairs, symmetric_table
from otdd_flash.samples import LabeledSamples


@dataclass(frozen=True, eq=False)
class Gaussians:
    """K Gaussians in d dimensions, float64.

    Attributes:
        means: (K, d).
        spreads: factors F (K, r, d) of the covariances, standard deviations (K, d), or None.
    """

    means: Tensor
    spreads: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, samples: LabeledSamples, metric: LabelMetric) -> Gaussians:
        """Those of the classes of `samples`, as `gaussian` or `means` sees them.

        Raises:
            InputError: a class is empty, or has one sample where covariances divide by n - 1.
        """
        clouds, _ = pool([samples])
        means = class_means(clouds)
        if metric.method == "means":
            return cls(means, None)
        if metric.diagonal:
            return cls(means, standard_deviations(clouds, metric.unbiased))
        factors, _ = reduced_factors(clouds, metric.unbiased)
        most = max(factor.shape[0] for factor in factors)
        padded = [
            torch.nn.functional.pad(factor, (0, 0, 0, most - factor.shape[0])) for factor in factors
        ]
        return cls(means, torch.stack(padded))

    @classmethod
    def from_variables(cls, variables: Mapping[str, Tensor]) -> Gaussians:
        """What `variables` gave."""
        return cls(variables["means"], variables.get("spreads"))

    @property
    def variables(self) -> dict[str, Tensor]:
        """Means and, if there are, spreads by name."""
        named = {"means": self.means, "spreads": self.spreads}
        return {name: part for name, part in named.items() if part is not None}

    def __len__(self) -> int:
        return len(self.means)

    def take(self, which: Tensor) -> Gaussians:
        """The Gaussians with these indices, each as often as it is named."""
        return Gaussians(self.means[which], None if self.spreads is None else self.spreads[which])

    def table(self, target: Gaussians, within_target: Tensor) -> Tensor:
        """W (K + L, K + L) of these and L of a target, for autograd by means and spreads.

        Args:
            target: L fixed Gaussians.
            within_target: the block (L, L).
        """
        own, total = len(self), len(self) + len(target)
        pairs = all_pairs(total)
        pairs = pairs[(pairs < own).any(1)]
        values = squared_gaps(torch.cat((self.means, target.means)), pairs)
        if self.spreads is not None and target.spreads is not None:
            values = values + _spread_gaps(self.spreads, target.spreads, pairs)
        fixed = values.new_zeros(total, total)
        fixed[own:, own:] = within_target.to(fixed)
        return symmetric_table(values, pairs, total) + fixed


def _spread_gaps(own: Tensor, target: Tensor, pairs: Tensor) -> Tensor:
    """Squared Bures distances (P,)."""
    if own.ndim == 2:
        return squared_gaps(torch.cat((own, target)).abs(), pairs)
    factors = [*own.unbind(), *target.unbind()]
    traces = torch.cat((own.square().sum((1, 2)), target.square().sum((1, 2))))
    first, second = pairs.to(traces.device).unbind(1)
    gaps = traces[first] + traces[second] - 2 * fidelities(factors, pairs)
    # A squared distance; below zero there is only rounding.
    return gaps.clamp_min(0)
