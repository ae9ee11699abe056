"""Features projected on the principal components of both datasets together."""

from __future__ import annotations

from dataclasses import replace

import torch

from otdd_flash.arguments.datasets import REDUCE_PCA
from otdd_flash.checks import takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.dimensions import check_same_dimension
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples, check_squares


@computes
@takes(REDUCE_PCA)
def reduce_pca(
    source: Samples, target: Samples, k: int, seed: int
) -> tuple[LabeledSamples, LabeledSamples]:
    """Project on the first k principal components, fitted on the n + m rows of both sides alike.

    Args:
        source: n samples with d features.
        target: m samples with d features.
        k: components to keep, at most min(n + m, d).
        seed: of scikit-learn's randomised solver, which it chooses for large inputs.

    Raises:
        InputError: the sides differ in dimension, or k is not in [1, min(n + m, d)].
    """
    source, target = as_samples(source, "source"), as_samples(target, "target")
    check_same_dimension(source, target)
    check_squares(source, target)
    most = min(len(source) + len(target), source.dim)
    if k > most:
        raise InputError(
            f"extractor.pca must be an integer from 1 to {most}, the smaller of the number of rows "
            f"and the feature dimension {source.dim}, got {k}"
        )
    from sklearn.decomposition import PCA

    x, y = source.features.cpu(), target.features.cpu()
    fitted = PCA(n_components=k, random_state=seed).fit(torch.cat([x, y]).numpy())

    def project(side: LabeledSamples) -> LabeledSamples:
        features = torch.from_numpy(fitted.transform(side.features.cpu().numpy()))
        return replace(side, features=features.to(side.features), feature_names=None)

    return project(source), project(target)
