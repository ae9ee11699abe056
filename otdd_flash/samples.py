"""Labelled feature vectors: what extractors return and what transport compares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.errors import InputError


@dataclass(frozen=True, eq=False)
class LabeledSamples:
    """A weighted, labelled point cloud.

    Args:
        features: (n, d) real matrix, n >= 1; types other than float32 and float64 become float32.
        labels: (n,) class indices in [0, V), or None for unlabelled data.
        class_names: V names, one per class index; none for unlabelled data.
        weights: (n,) non-negative masses, normalised here to sum to 1; None means uniform.
        name: what reports call the dataset.
        subset_hash: identifies which rows of the original dataset these are.

    Raises:
        InputError: shapes disagree, a value is not finite, a label is out of range, or all
            weights are 0.
    """

    features: Tensor
    labels: Tensor | None
    class_names: tuple[str, ...]
    weights: Tensor | None = None
    name: str = field(default="samples", kw_only=True)
    subset_hash: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        features = _as_features(self.features)
        n = features.shape[0]
        object.__setattr__(self, "features", features)
        names = () if self.labels is None else tuple(str(name) for name in self.class_names)
        object.__setattr__(self, "class_names", names)
        if self.labels is not None:
            labels = _as_class_indices(self.labels, n, self.class_names)
            object.__setattr__(self, "labels", labels.to(features.device))
        if self.weights is not None:
            weights = _as_masses(self.weights, n)
            object.__setattr__(self, "weights", weights.to(features.device))

    @classmethod
    def from_arrays(
        cls,
        features: Any,
        labels: Any,
        weights: Any = None,
        *,
        name: str = "samples",
    ) -> LabeledSamples:
        """Build samples from raw labels: integers or strings in any numbering, gaps allowed.

        Classes are the distinct labels in sorted order; their names are the labels as text.
        """
        indices, class_names = encode_labels(labels)
        return cls(features, torch.from_numpy(indices), class_names, weights, name=name)

    def __len__(self) -> int:
        return self.features.shape[0]

    @property
    def dim(self) -> int:
        """The feature dimension d."""
        return self.features.shape[1]

    @property
    def masses(self) -> Tensor:
        """The weights (n,), float64, summing to 1; uniform if none were given."""
        if self.weights is not None:
            return self.weights
        n = len(self)
        return torch.full((n,), 1.0 / n, dtype=torch.float64, device=self.features.device)

    @property
    def class_total(self) -> int:
        """The number of classes V; unlabelled data are one class."""
        return 1 if self.labels is None else len(self.class_names)

    @property
    def class_counts(self) -> Tensor:
        """Samples per class (V,), int64."""
        if self.labels is None:
            raise InputError(f"{self.name} has no labels; {HOW_TO_LABEL}")
        return torch.bincount(self.labels, minlength=len(self.class_names))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of features, labels, class names and weights, in row order."""
        digest = hashlib.sha256()
        for part in (self.features, self.labels, self.weights):
            digest.update(b"none" if part is None else _content(part))
        digest.update("\0".join(self.class_names).encode())
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> LabeledSamples:
        """The same samples on a device; these ones if they are there, as of a tensor."""
        features = self.features.to(device)
        if features is self.features:
            return self
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, features=features, labels=labels)

    def take(self, rows: Tensor, *, subset_hash: str | None = None) -> LabeledSamples:
        """The samples at the given row indices; weights are renormalised."""
        return replace(
            self,
            subset_hash=subset_hash,
            features=self.features[rows],
            labels=None if self.labels is None else self.labels[rows],
            weights=None if self.weights is None else self.weights[rows],
        )

    def keep_classes(self, keep: Sequence[int]) -> LabeledSamples:
        """Only the samples of these classes, which are renumbered in the order given."""
        if self.labels is None:
            raise InputError(f"{self.name} has no labels; {HOW_TO_LABEL}")
        renumber = torch.full((len(self.class_names),), -1, device=self.labels.device)
        renumber[list(keep)] = torch.arange(len(keep), device=self.labels.device)
        labels = renumber[self.labels]
        rows = torch.nonzero(labels >= 0).squeeze(1)
        return replace(
            self,
            subset_hash=None,
            features=self.features[rows],
            labels=labels[rows],
            class_names=tuple(self.class_names[c] for c in keep),
            weights=None if self.weights is None else self.weights[rows],
        )


HOW_TO_LABEL = (
    "label it with pseudo_labels=kmeans (on the command line source.pseudo_labels or "
    "target.pseudo_labels), or compare features alone with labels=none"
)


def encode_labels(labels: Any) -> tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]:
    """Map raw labels (integers or strings) to indices (n,) into their sorted distinct values.

    Returns:
        The indices and the class names (the distinct labels as text).

    Raises:
        InputError: the labels are not one-dimensional integers or strings.
    """
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if values.ndim != 1:
        raise InputError(f"labels must be one-dimensional, got shape {values.shape}")
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    if values.dtype.kind == "O" and all(isinstance(v, str) for v in values):
        values = values.astype(str)
    if values.dtype.kind not in "iubU":
        raise InputError(
            f"labels must be integers or strings, got {values.dtype} such as {values[:1].tolist()}"
            "; cut a continuous target into classes first"
        )
    distinct, indices = np.unique(values, return_inverse=True)
    return indices.astype(np.int64), tuple(str(value) for value in distinct)


def _as_features(values: Any) -> Tensor:
    try:
        features = torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise InputError(f"features must be a matrix (n, d) of real numbers: {error}") from None
    if features.is_complex():
        raise InputError(f"features must be real, got {features.dtype}; take parts or magnitudes")
    if features.dtype not in (torch.float32, torch.float64):
        features = features.to(torch.float32)
    if features.ndim != 2:
        raise InputError(f"features must be a matrix (n, d), got shape {tuple(features.shape)}")
    if features.shape[0] == 0 or features.shape[1] == 0:
        raise InputError(f"the dataset is empty: features have shape {tuple(features.shape)}")
    bad = ~torch.isfinite(features)
    if bool(bad.any()):
        row, column = (int(index) for index in torch.nonzero(bad)[0])
        raise InputError(
            f"features hold {int(bad.sum())} NaN or infinite values in {int(bad.any(1).sum())} "
            f"rows (first at row {row}, column {column}); remove those rows or impute them"
        )
    return features


def _as_class_indices(values: Any, n: int, class_names: tuple[str, ...]) -> Tensor:
    labels = torch.as_tensor(values)
    if labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise InputError(
            f"labels must be class indices, got {labels.dtype}; LabeledSamples.from_arrays numbers "
            "raw integer or string labels"
        )
    if labels.shape != (n,):
        raise InputError(f"labels must have shape ({n},) as features, got {tuple(labels.shape)}")
    labels = labels.to(torch.int64)
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(class_names):
        raise InputError(
            f"labels must lie in [0, {len(class_names)}), one per class name, got {low} to {high}; "
            "LabeledSamples.from_arrays numbers labels in any scheme"
        )
    return labels


def _as_masses(values: Any, n: int) -> Tensor:
    weights = torch.as_tensor(values).to(torch.float64)
    if weights.shape != (n,):
        raise InputError(f"weights must have shape ({n},) as features, got {tuple(weights.shape)}")
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise InputError("weights must be finite and non-negative")
    total = float(weights.sum())
    if total <= 0:
        raise InputError("weights must not all be zero")
    # Weights that sum to 1 but for rounding stay as they are: a copy then has the same fingerprint.
    return weights if abs(total - 1) < 1e-12 else weights / total


def _content(tensor: Tensor) -> bytes:
    array = tensor.detach().cpu().contiguous().numpy()
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()
