"""Gaussians that move in a flow: means and spreads as variables, their distances, and clustering.

    W_kl = ||m_k - m_l||^2 + tr S_k + tr S_l - 2 tr (S_k^1/2 S_l S_k^1/2)^1/2,      S_k = F_k^T F_k

With diagonal covariances a spread is the vector s_k of standard deviations and the last three terms
are || |s_k| - |s_l| ||^2; if the metric compares only means, there is no spread.
`flows.modes.jointly_driven` moves Gaussians; `flows.modes.feature_driven` only uses `beside`.
Everything is float64, because small distances are differences of large traces. The tables must
stay differentiable by means and spreads, which are moved along their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otdd_flash.labels import Gaussian, LabelMetric
from otdd_flash.labels.classes import pool
from otdd_flash.labels.gaussian import fidelities, reduced_factors
from otdd_flash.labels.moments import class_means, squared_gaps, standard_deviations
from otdd_flash.labels.pairs import Progress, all_pairs, symmetric_table
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
        """Compute the Gaussians of the classes of `samples`, for the metric `Gaussian` or `Means`.

        Raises:
            InputError: a class is empty, or has one sample where covariances divide by n - 1.
        """
        clouds, _ = pool([samples])
        means = class_means(clouds)
        if not isinstance(metric, Gaussian):
            return cls(means, None)
        if metric.diagonal:
            return cls(means, standard_deviations(clouds, metric.unbiased))
        factors, _ = reduced_factors(clouds, metric.unbiased)
        most = max(factor.shape[0] for factor in factors)
        padded = [
            torch.nn.functional.pad(factor, (0, 0, 0, most - factor.shape[0])) for factor in factors
        ]
        stack = torch.stack(padded)
        # Rows that are 0 for all classes would be decomposed with every pair.
        return cls(means, stack[:, stack.any(2).any(0)])

    @classmethod
    def from_variables(cls, variables: Mapping[str, Tensor]) -> Gaussians:
        return cls(variables["means"], variables.get("spreads"))

    @property
    def variables(self) -> dict[str, Tensor]:
        """The means and, if there are any, spreads by name."""
        named = {"means": self.means, "spreads": self.spreads}
        return {name: part for name, part in named.items() if part is not None}

    def __len__(self) -> int:
        return len(self.means)

    def take(self, which: Tensor) -> Gaussians:
        """Return the Gaussians with these indices, which may repeat."""
        return Gaussians(self.means[which], None if self.spreads is None else self.spreads[which])

    def table(
        self,
        target: Gaussians,
        within_target: Tensor,
        needed: Tensor | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """Return W (K + L, K + L) of these and L of a target, differentiable by means and spreads.

        Args:
            target: L fixed Gaussians.
            within_target: the block (L, L).
            needed: (K, K + L) bool, symmetric in its first K columns: the pairs whose spreads are
                compared; the others get lower bounds as in `lower_bounds`. None: all.
            progress: called with the number of pairs compared and their total.
        """
        own, total = len(self), len(self) + len(target)
        pairs = all_pairs(total)
        pairs = pairs[(pairs < own).any(1)]
        values = squared_gaps(torch.cat((self.means, target.means)), pairs)
        if self.spreads is not None and target.spreads is not None:
            chosen = torch.ones(len(pairs), dtype=torch.bool)
            if needed is not None:
                # In each pair the larger index comes first, and the smaller one is below K.
                chosen = needed.cpu()[pairs[:, 1], pairs[:, 0]]
            values = values + _spread_gaps(self.spreads, target.spreads, pairs, chosen, progress)
        return symmetric_table(values, pairs, total) + beside(own, within_target.to(values))

    @torch.no_grad()
    def lower_bounds(self) -> Tensor:
        """Return lower bounds (K, K) of the distances between these, with full covariances.

        They are ||m_k - m_l||^2 + (||F_k|| - ||F_l||)^2, because the trace of (S_k^1/2 S_l
        S_k^1/2)^1/2 is at most ||F_k|| ||F_l||.
        """
        assert self.spreads is not None
        norms = torch.linalg.matrix_norm(self.spreads)
        bounds: Tensor = (norms.unsqueeze(1) - norms).square()
        return bounds.add_(torch.cdist(self.means, self.means).square())


def _spread_gaps(
    own: Tensor,
    target: Tensor,
    pairs: Tensor,
    chosen: Tensor,
    progress: Progress | None,
) -> Tensor:
    """Return squared Bures distances (P,) of the chosen pairs, and lower bounds for the others."""
    if own.ndim == 2:
        return squared_gaps(torch.cat((own, target)).abs(), pairs)
    factors = [*own.unbind(), *target.unbind()]
    traces = torch.cat((own.square().sum((1, 2)), target.square().sum((1, 2))))
    first, second = pairs.to(traces.device).unbind(1)
    most = (traces[first] * traces[second]).detach().sqrt()
    places = chosen.nonzero().squeeze(1).to(traces.device)
    fidelity = most.index_put((places,), fidelities(factors, pairs[chosen], progress))
    gaps = traces[first] + traces[second] - 2 * fidelity
    # A squared distance is negative only by rounding.
    return gaps.clamp_min(0)


def beside(own: int, within_target: Tensor) -> Tensor:
    """Return W (own + L, own + L) with the fixed block (L, L) and 0 elsewhere."""
    return torch.nn.functional.pad(within_target, (own, 0, own, 0))


def recluster(gaussians: Gaussians, labels: Tensor, masses: Tensor) -> Tensor:
    """Return class indices (n,) of particles, by k-means over their Gaussians.

    k-means starts at the centres of the classes `labels`, so that a cluster keeps the index of the
    class it started from. Gaussians are compared by ||m_i - m_j||^2 + ||S_i^1/2 - S_j^1/2||^2,
    which for diagonal covariances is their squared 2-Wasserstein distance and otherwise an upper
    bound of it.

    Args:
        gaussians: of n particles.
        labels: (n,) the classes at the start; each of them has mass.
        masses: (n,) of the particles; one without mass joins the nearest cluster.
    """
    from sklearn.cluster import KMeans

    vectors, masses = _vectors(gaussians).cpu(), masses.cpu()
    classes, places = torch.unique(labels.cpu(), return_inverse=True)
    members = torch.nn.functional.one_hot(places).to(masses) * masses[:, None]
    centres = (members / members.sum(0)).T @ vectors
    kmeans = KMeans(len(classes), init=centres.numpy(), n_init=1)
    found = kmeans.fit_predict(vectors.numpy(), sample_weight=masses.numpy())
    new: Tensor = classes[torch.from_numpy(found).long()]
    return new.to(labels.device)


def _vectors(gaussians: Gaussians) -> Tensor:
    """Return (n, d) means, with deviations (n, d) or roots of covariances (n, d d) beside them."""
    means, spreads = gaussians.means.detach(), gaussians.spreads
    if spreads is None:
        return means
    spreads = spreads.detach()
    if spreads.ndim == 2:
        return torch.cat((means, spreads.abs()), 1)
    # S^1/2 = V diag(s) V^T for F = U diag(s) V^T.
    _, values, rows = torch.linalg.svd(spreads, full_matrices=False)
    roots = rows.mT @ (values.unsqueeze(2) * rows)
    return torch.cat((means, roots.flatten(1)), 1)
