"""The table W of classes whose points have different dimensions, in units of E, length^4.

`distance` and `otdd_flash.pairwise` call `gromov_table`. The method `gaussian` is the
Gromov-Wasserstein distance between Gaussians over Gaussian couplings (Delon, Desolneux and Salmona
2022, Gromov-Wasserstein distances between Gaussian distributions), an upper bound of that over all
couplings of these Gaussians:

    4 (tr S - tr T)^2 + 8 sum_k (l_k - h_k)^2

with sorted eigenvalues l of S and h of T, the shorter list padded with 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.labels import Gaussian, JointClassDistances, LabelMetric, NoLabels, Tree
from otdd_flash.labels.gaussian import covariance_factor
from otdd_flash.labels.metrics import Continuous, Given
from otdd_flash.labels.pairs import ClassCloud, split_classes
from otdd_flash.labels.table import class_names, joint_table
from otdd_flash.samples import LabeledSamples

MEASURED = "gaussian, given, none, or a tree that adds nothing"


def check_metric(metric: LabelMetric | None, lambda_x: float, lambda_y: float | None) -> None:
    """Refuse metrics between points of one dimension, labels without `lambda_y`, and no cost.

    Raises:
        InputError: one of these.
    """
    plain = metric is None or isinstance(metric, Gaussian | Given | NoLabels)
    tree = isinstance(metric, Tree) and metric.add is None
    if metric is not None and (isinstance(metric, Continuous) or not (plain or tree)):
        raise InputError(
            f"ground=gromov compares no points of different datasets, as labels={metric.name} "
            f"does; take one of {MEASURED}"
        )
    if lambda_y is None and not isinstance(metric, NoLabels):
        raise InputError(
            "ground=gromov adds lambda_x E, a length to the fourth, and lambda_y W, which is "
            "whatever the class distances are; give lambda_y, or set labels=none"
        )
    if lambda_x == 0 and isinstance(metric, NoLabels):
        raise InputError("lambda_x is 0 and labels=none, so every cost is 0; raise lambda_x")


def gromov_table(datasets: Sequence[LabeledSamples], metric: LabelMetric) -> JointClassDistances:
    """Measure the table of all classes of some datasets, by any checked metric but `Given`."""
    names = [name for samples in datasets for name in class_names(samples)]
    if isinstance(metric, Gaussian):
        clouds = [cloud for samples in datasets for cloud in split_classes(samples)]
        return joint_table(datasets, gaussian_table(spectra(clouds, metric)))
    named = metric.by_names(names)
    zeros = torch.zeros(len(names), len(names), dtype=torch.float64)
    return joint_table(datasets, zeros if named is None else named)


def spectra(clouds: Sequence[ClassCloud], metric: Gaussian) -> Tensor:
    """Return the eigenvalues of class covariances (V, d), the largest first, padded with 0."""
    found = []
    for cloud in clouds:
        factor = covariance_factor(cloud, metric.unbiased)
        if metric.diagonal:
            values = factor.square().sum(0).sort(descending=True).values
        else:
            values = torch.linalg.svdvals(factor).square()
        found.append(values.cpu())
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def gaussian_table(eigenvalues: Tensor) -> Tensor:
    """Return the table (V, V) of Gaussians with eigenvalues (V, d), sorted and padded."""
    traces = eigenvalues.sum(1)
    gaps = torch.cdist(eigenvalues, eigenvalues, compute_mode="donot_use_mm_for_euclid_dist")
    return (4 * (traces[:, None] - traces).square() + 8 * gaps.square()).fill_diagonal_(0)
