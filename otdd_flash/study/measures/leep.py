"""`leep`: the likelihood of the target's classes given what the source's network takes rows for.

    LEEP = mean_i log sum_z P(y_i | z) theta_z(x_i),    P(y, z) = mean_i [y_i = y] theta_z(x_i)

with theta(x) the source classes' probabilities (Nguyen et al. 2020, LEEP: a new measure to evaluate
transferability of learned representations).
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.study.measures.base import NetworkView
from otdd_flash.study.measures.network import NetworkMeasure


class Leep(NetworkMeasure):
    """The log expected empirical prediction, at most 0."""

    name = "leep"
    title = "LEEP"

    def score(self, view: NetworkView) -> float:
        return leep(view.outputs.double().softmax(1), view.labels)


def leep(probabilities: Tensor, labels: Tensor) -> float:
    """LEEP of probabilities (n, Z), whose rows sum to 1, for labels (n,)."""
    theta = probabilities.double()
    members = torch.nn.functional.one_hot(labels).double()
    joint = members.T @ theta / len(theta)
    # A source class that no row is taken for has no part in any sum.
    given = joint / joint.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    expected = theta @ given.T
    return float(expected.gather(1, labels.unsqueeze(1)).log().mean())
