"""Labels from the Gaussians that particles carry."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.flows.gaussians import Gaussians


def recluster(gaussians: Gaussians, labels: Tensor, masses: Tensor) -> Tensor:
    """Class indices (n,) of particles, by k-means over their Gaussians.

    It starts at the centres of the classes `labels`, so that a cluster keeps the number of the
    class it came from. Gaussians are compared by ||m_i - m_j||^2 + ||S_i^1/2 - S_j^1/2||^2, which
    for diagonal covariances is their squared 2-Wasserstein distance and else bounds it from above.

    Args:
        gaussians: of n particles.
        labels: (n,) what they were; every class among them has mass.
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
    """(n, d) means beside spreads: deviations (n, d), or roots of covariances (n, d d)."""
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
