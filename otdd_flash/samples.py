"""Labelled feature vectors: what extractors return and what transport compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otdd_flash.arguments import Index, Positive, check_fields, takes
from otdd_flash.checks import array
from otdd_flash.devices import moved
from otdd_flash.eager import check_transforms, own_settings, untraced
from otdd_flash.errors import InputError, prefixed
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.fingerprint import Mark, fingerprint, mark_of
from otdd_flash.raw_labels import (
    check_unrounded,
    encode_labels,
    missing_rows,
    names_of_columns,
    one_label_a_row,
    rows_shown,
)
from otdd_flash.real_numbers import dense, in_double, in_floating_point, real_tensor
from otdd_flash.shown import display

# Bytes of features that are compared together.
BLOCK_BYTES = 1 << 24

# Between them a `mass` is known.
LEAST_MASS, MOST_MASS = 1e-300, 1e300

NO_MASS = "weights must not all be zero"


@dataclass(frozen=True, eq=False, repr=False)
class LabeledSamples:
    """A weighted, labelled point cloud.

    Args:
        features: (n, d) real matrix, n >= 1; types other than float32 and float64 become float32,
            and integers beyond 2^24, which that does not hold, float64. Numbers that float64 would
            round are refused. Tables of pandas and pyarrow are read with all types of numbers,
            sparse matrices made dense.
        labels: (n,) class indices in [0, V), also as whole floats, or None for unlabelled data.
        class_names: V names, one per class index; none for unlabelled data.
        weights: (n,) non-negative masses, normalised here to sum to 1, those below 2^-1022 to 0;
            None means uniform.
        name: what reports call the dataset.
        subset_hash: identifies which rows of the original dataset these are.
        mass: of these rows in what they are a part of; the sum of `weights` as given times it is
            kept. Shards of several processes are put together by it.
        feature_names: d names, by which datasets are compared where both have some; None takes the
            names of the columns of a table, and other features have none.

    Raises:
        InputError: shapes or names disagree, a value is not finite or has an imaginary part, a
            label is missing or out of range, or all weights are 0.
    """

    features: Tensor
    labels: Tensor | None
    class_names: tuple[str, ...]
    weights: Tensor | None = None
    name: str = field(default="samples", kw_only=True)
    subset_hash: str | None = field(default=None, kw_only=True)
    mass: Positive = field(default=1.0, kw_only=True)
    feature_names: tuple[str, ...] | None = field(default=None, kw_only=True)

    @untraced
    def __post_init__(self) -> None:
        # Numbers of lists are those of any default type, and memory that is shared is no inference
        # tensor.
        check_transforms("LabeledSamples", (self.features, self.labels, self.weights))
        with own_settings():
            self._prepare()

    def _prepare(self) -> None:
        if self.labels is None:
            object.__setattr__(self, "class_names", ())
        check_fields(self)
        columns = names_of_columns(self.features)
        features = _as_features(self.features)
        # A column of lists holds several features.
        if self.feature_names is None and columns and len(columns) == features.shape[1]:
            object.__setattr__(self, "feature_names", columns)
        if self.feature_names is not None and len(self.feature_names) != features.shape[1]:
            raise InputError(
                f"feature_names must be {features.shape[1]}, one a feature, got "
                f"{len(self.feature_names)}"
            )
        n = features.shape[0]
        object.__setattr__(self, "features", features)
        if self.labels is not None:
            labels = _as_class_indices(self.labels, n, self.class_names)
            object.__setattr__(self, "labels", labels.to(features.device))
        if self.weights is not None:
            weights, total = _as_masses(self.weights, n)
            object.__setattr__(self, "weights", weights.to(features.device))
            object.__setattr__(self, "mass", min(max(self.mass * total, LEAST_MASS), MOST_MASS))

    def __repr__(self) -> str:
        """Its name and sizes; tensors are asked for by name."""
        rows, columns = self.features.shape
        classes = "no labels" if self.labels is None else f"{len(self.class_names)} classes"
        return f"LabeledSamples({display(repr(self.name))}, {rows} x {columns}, {classes})"

    @classmethod
    def of(cls, given: SamplesOrArrays, name: str = "samples") -> LabeledSamples:
        """Return samples as they are, or from arrays or tensors: (features, labels) or features.

        What an entry point of samples returns are numbers, through which no gradient flows.

        Args:
            given: what an entry point was called with, of a type that `values.samples` accepts.
            name: of the argument, for messages; samples that are made here are called so as well.

        Raises:
            InputError: as for the parts of samples.
        """
        if isinstance(given, LabeledSamples):
            if given.without_mass:
                raise InputError(f"{name}: {NO_MASS}")
            return given.detached()
        try:
            if isinstance(given, tuple):
                return cls.from_arrays(*given, name=name).detached()
            return cls(given, None, (), name=name).detached()  # type: ignore[arg-type]
        except InputError as error:
            raise InputError(f"{name}: {error}") from error

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

        Classes are the distinct labels in sorted order; their names are the labels as text. Whole
        numbers in floats are integers.
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
        """The weights (n,), float64, summing to 1; uniform if none were given. A copy to keep."""
        if self.weights is not None:
            return self.weights.clone()
        n = len(self)
        return torch.full((n,), 1.0 / n, dtype=torch.float64, device=self.features.device)

    @property
    def without_mass(self) -> bool:
        """Whether all weights are 0, as those of one shard of several may be."""
        return self.weights is not None and self.mass == LEAST_MASS and not self.weights.any()

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

    @property
    @untraced
    def fingerprint(self) -> str:
        """SHA-256 of features, labels, class names and weights, in row order.

        The same wherever the features are, and in whatever type. Kept until they are changed in
        place.
        """
        mark = mark_of(self)
        known: tuple[Mark, str] | None = self.__dict__.get("_fingerprint")
        if known is not None and known[0] == mark:
            return known[1]
        found = fingerprint(self.features, self.labels, self.weights, self.class_names)
        self.__dict__["_fingerprint"] = mark, found
        return found

    def detached(self) -> LabeledSamples:
        """Return these samples outside of autograd and inference mode; themselves if they are."""
        parts = {"features": self.features, "labels": self.labels, "weights": self.weights}
        # Autograd cannot save what was made in inference mode. Files make plain tensors.
        copied: dict[str, Any] = {
            name: part.clone()
            for name, part in parts.items()
            if part is not None and part.is_inference() and not isinstance(part, FileFeatures)
        }
        if not copied and not self.features.requires_grad:
            return self
        changed: dict[str, Any] = {"features": self.features.detach()} | copied
        return replace(self, **changed)

    @takes()
    def to(self, device: str | torch.device) -> LabeledSamples:
        """Return the samples on a device; themselves if they are there, as a tensor does."""
        try:
            place = torch.device(device)
        except RuntimeError:
            raise InputError(f"unknown device {str(device)!r}; such as cpu or cuda:0") from None
        features = moved(self.features, place)
        if features is self.features:
            return self
        labels = None if self.labels is None else self.labels.to(place)
        return replace(self, features=features, labels=labels)

    def points_of(self, rows: slice | Tensor) -> Tensor:
        """Return features (k, d) of some rows, in memory, in float32 or float64.

        Raises:
            InputError: they are in a file that changed.
        """
        features = self.features
        if not isinstance(features, FileFeatures):
            return features[rows]
        # A part of a mapped file that is not there any more would end the process.
        features.check()
        return features[rows].to(torch.promote_types(features.dtype, torch.float32))

    @takes(rows=array("of row numbers"))
    def take(self, rows: Tensor, *, subset_hash: str | None = None) -> LabeledSamples:
        """Return the samples at the given row indices; weights are renormalised."""
        return replace(
            self,
            subset_hash=subset_hash,
            features=self.points_of(rows),
            labels=None if self.labels is None else self.labels[rows],
            weights=None if self.weights is None else self.weights[rows],
        )

    @takes()
    def keep_classes(self, keep: Sequence[Index]) -> LabeledSamples:
        """Keep the samples of these classes, which are renumbered in the given order.

        Where these are all samples, as where a class has none, features stay where they are: in
        files, and in memory that is shared.
        """
        if self.labels is None:
            raise InputError(f"{self.name} has no labels; {HOW_TO_LABEL}")
        for c in keep:
            if c >= len(self.class_names):
                raise InputError(
                    f"{self.name} has no class {c}: it has {len(self.class_names)}, from 0"
                )
        renumber = torch.full((len(self.class_names),), -1, device=self.labels.device)
        renumber[list(keep)] = torch.arange(len(keep), device=self.labels.device)
        labels = renumber[self.labels]
        rows = torch.nonzero(labels >= 0).squeeze(1)
        return replace(
            self,
            subset_hash=None,
            features=self.features if len(rows) == len(self) else self.points_of(rows),
            labels=labels[rows],
            class_names=tuple(self.class_names[c] for c in keep),
            weights=None if self.weights is None else self.weights[rows],
        )


def displaced(samples: LabeledSamples, features: Tensor) -> LabeledSamples:
    """Return the samples at other places, without their link to rows of a dataset.

    Args:
        samples: n points.
        features: (n, d) finite, of the same type and on the same device; nothing is checked.
    """
    found = copy(samples)
    found.__dict__.pop("_fingerprint", None)
    for name, part in (("features", features), ("subset_hash", None)):
        object.__setattr__(found, name, part)
    return found


# Of this, sums over a dataset stay finite in float64.
LARGEST_SQUARE = 1e300

# What `LabeledSamples.of` takes.
Array = ArrayLike | Tensor
SamplesOrArrays = LabeledSamples | Tensor | NDArray[Any] | tuple[Array, Array]

HOW_TO_LABEL = (
    "label it with otdd_flash.data.with_pseudo_labels (on the command line "
    "source.pseudo_labels=kmeans or target.pseudo_labels=kmeans), or compare features alone with "
    "labels=none"
)

HOW_TO_SCALE = (
    "scale them, such as with extractor.standardize=true (in Python otdd.extractors.standardize)"
)


def check_squares(*sides: LabeledSamples) -> None:
    """Raise an `InputError` unless features are finite and their squared distances fit float64.

    Samples are finite when they are made; what shares their memory may have changed since.
    """
    different = list(dict.fromkeys(sides))
    for side in different:
        if isinstance(side.features, FileFeatures):
            side.features.check()
    found = [largest_entry(side.features) for side in different]
    together = len({number.device for number in found}) == 1
    # Of one device, the host waits once.
    numbers = torch.stack(found).tolist() if together else map(float, found)
    for side, largest in zip(different, numbers, strict=True):
        if not math.isfinite(largest):
            raise prefixed(side.name, _not_finite(side.features))
        # The largest squared distance there can be, with room for sums over points and classes.
        if 4 * side.dim * largest > LARGEST_SQUARE / max(largest, 1.0):
            raise InputError(
                f"the features of {side.name} reach {largest:.1e}, whose squared distances "
                f"overflow float64; {HOW_TO_SCALE}"
            )


def _as_features(values: Any) -> Tensor:
    features = real_tensor("features", dense("features", values))
    if isinstance(features, FileFeatures):
        features.check()
    elif features.dtype not in (torch.float32, torch.float64):
        features = in_floating_point("features", features)
    if features.ndim != 2:
        way_out = "; flatten each row, as by features.reshape(len(features), -1)"
        if features.ndim == 3:
            way_out += ", unless these are several clouds, which are compared one pair at a time"
        raise InputError(
            f"features must be a matrix (n, d), got shape {tuple(features.shape)}"
            + (way_out if features.ndim else ", a single number")
        )
    if features.shape[0] == 0 or features.shape[1] == 0:
        raise InputError(f"the dataset is empty: features have shape {tuple(features.shape)}")
    if not all_finite(features):
        raise _not_finite(features)
    return features


def largest_entry(features: Tensor) -> Tensor:
    """The largest of all absolute values (), float64; NaN where there is one. Reads them once."""
    largest: Tensor = torch.linalg.vector_norm(features.detach(), ord=math.inf)
    return largest.double()


def all_finite(*values: Tensor) -> bool:
    """Whether no entry of one or more is NaN or infinite; one read, where `isfinite` takes five.

    Of several the host waits once.
    """
    first, *others = (largest_entry(each) for each in values)
    # NaN is larger than all.
    return math.isfinite(float(reduce(lambda a, b: a.maximum(b.to(a.device)), others, first)))


def _not_finite(features: Tensor) -> InputError:
    bad = ~torch.isfinite(features)
    row, column = (int(index) for index in torch.nonzero(bad)[0])
    return InputError(
        f"features hold {int(bad.sum())} NaN or infinite values in {int(bad.any(1).sum())} "
        f"rows (first at row {row}, column {column}); remove those rows or impute them"
    )


def _as_class_indices(values: Any, n: int, class_names: tuple[str, ...]) -> Tensor:
    labels = real_tensor("labels", values)
    if labels.shape != (n,):
        advice = ""
        if labels.ndim != 1:
            advice = f"; {one_label_a_row(values, labels.detach().cpu().double().numpy())}"
        raise InputError(
            f"labels must have shape ({n},) as features, got {tuple(labels.shape)}{advice}"
        )
    given = labels.dtype
    if given.is_floating_point:
        labels = _whole(labels)
    labels = labels.to(torch.int64)
    # Of both ends at once: a GPU is waited for.
    low, high = torch.stack(torch.aminmax(labels)).tolist()
    if low < 0 or high >= len(class_names):
        raise InputError(
            f"labels must lie in [0, {len(class_names)}), one per class name, got {low} to {high}; "
            "LabeledSamples.from_arrays numbers labels in any scheme"
        )
    if given.is_floating_point:
        check_unrounded(labels.cpu().numpy(), given)
    return labels


def _whole(labels: Tensor) -> Tensor:
    """Class indices that are whole numbers in floats."""
    if bool((missing := labels.isnan()).any()):
        raise InputError(
            f"{missing_rows(missing.cpu().numpy())}; leave those rows out of features and labels"
        )
    fractions = labels != labels.floor()
    if bool(fractions.any()):
        first = float(labels[fractions][0])
        raise InputError(
            f"labels must be class indices, got {first:g} "
            f"{rows_shown(fractions.cpu().numpy())}; cut a continuous target into classes first"
        )
    # What no integer can hold is out of range as well.
    return labels.double().clamp(-(2.0**62), 2.0**62)


def check_masses(weights: NDArray[np.float64]) -> None:
    """Raise an `InputError` that names the rows unless all weights are finite and not negative."""
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        raise InputError(
            f"weights must be finite and not negative, got {weights[bad][0]:g} {rows_shown(bad)}; "
            "a weight of 0 leaves a row out"
        )


def _as_masses(values: Any, n: int) -> tuple[Tensor, float]:
    """Masses that sum to 1, and what they summed to."""
    weights = in_double("weights", real_tensor("weights", values))
    if weights.shape != (n,):
        raise InputError(f"weights must have shape ({n},) as features, got {tuple(weights.shape)}")
    check_masses(weights.detach().cpu().numpy())
    if float(weights.max()) == 0:
        if not _may_be_shard():
            raise InputError(NO_MASS)
        return weights, 0.0
    unit = 1.0
    if not bool(torch.isfinite(weights.sum())):
        # In units of the largest they are the same masses, and their sum is finite.
        unit = float(weights.max())
        weights = weights / unit
    total = float(weights.sum())
    # Weights that sum to 1 but for rounding stay as they are: a copy then has the same fingerprint.
    masses = weights if abs(total - 1) < 1e-12 else weights / total
    # Nothing can be divided by subnormal ones.
    subnormal = (masses > 0) & (masses < torch.finfo(masses.dtype).tiny)
    return torch.where(subnormal, 0, masses) if bool(subnormal.any()) else masses, total * unit


def _may_be_shard() -> bool:
    """Whether this is one of several processes, whose shard may consist of rows without mass.

    An error here would leave the others waiting for it.
    """
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def same_content(one: LabeledSamples, other: LabeledSamples) -> bool:
    """Whether features, labels, class names and weights agree, row by row, in whatever type."""
    parts = ("features", "labels", "weights")
    return one is other or (
        one.class_names == other.class_names
        and all(_equal(getattr(one, part), getattr(other, part)) for part in parts)
    )


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    home = other.device
    if one.shape != other.shape:
        return False
    # Different clouds nearly always differ in their first row, which is read faster than all.
    if one.dtype == other.dtype:
        return torch.equal(one[:1].to(home), other[:1]) and torch.equal(one.to(home), other)
    # The same numbers in another type are the same content. PyTorch compares in the wider type.
    size = max(1, BLOCK_BYTES // max(1, other[:1].nbytes))
    blocks = [slice(0, 1), *(slice(first, first + size) for first in range(0, len(other), size))]
    return all(bool((one[rows].to(home) == other[rows]).all()) for rows in blocks)
