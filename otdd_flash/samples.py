"""`LabeledSamples`: a weighted, labelled point cloud, the input of every transport problem.

Nearly every package imports it; `LabeledDataset.with_features` (`data.dataset`) makes samples of
the user's datasets. The module also checks features (`check_squares`), weights (`check_masses`) and
whether two samples fit together (`check_same_dimension`), and compares their content
(`same_content`). `displaced` makes derived copies without checks.

A change must respect that samples are valid by construction, that numbers are never rounded
silently, and that features stay where they are: in a file (`features.file_features`), in shared
memory, on a GPU. The user may change shared memory in place, so a fingerprint is used again only
while the mark of the tensors is the same: a checksum on a CPU, torch's count of in-place changes on
a GPU. Weights that already sum to 1 keep their bits, so that copies have equal fingerprints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import reduce
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otdd_flash.arguments import Index, Positive, check_fields, takes
from otdd_flash.checks import array, shown
from otdd_flash.devices import moved
from otdd_flash.eager import check_transforms, own_settings, untraced
from otdd_flash.errors import InputError, placed, prefixed
from otdd_flash.features.file_features import FileFeatures, row_blocks
from otdd_flash.fingerprint import Mark, fingerprint, mark_of
from otdd_flash.label_sets import HOW_TO_DROP, Encoded, LabelSets, encode_rows, several_of
from otdd_flash.raw_labels import (
    check_unrounded,
    missing_rows,
    names_of_columns,
    one_label_a_row,
    rows_shown,
)
from otdd_flash.real_numbers import dense, in_double, in_floating_point, real_tensor
from otdd_flash.shown import display

# Limits of `mass`; a product beyond them is clamped. LEAST_MASS is also the mass where all weights
# are 0 (`without_mass`).
LEAST_MASS, MOST_MASS = 1e-300, 1e300

NO_MASS = "weights must not all be zero"

BOTH_KINDS = "rows have labels or targets, and not both; leave one of them out"


@dataclass(frozen=True, eq=False, repr=False)
class LabeledSamples:
    """A weighted, labelled point cloud.

    Args:
        features: (n, d) real matrix, n >= 1. Types other than float32 and float64 become float32,
            or float64 for integers beyond 2^24 that float32 cannot hold. Numbers that float64 would
            round are refused. Tables of pandas and pyarrow may have any numeric types. Sparse
            matrices become dense.
        labels: (n,) class indices in [0, V), as integers or whole floats; an indicator (n, V) of 0
            and 1, for rows with several labels; or None for unlabelled data. An indicator with one
            label in each row becomes class indices.
        class_names: V names, one per class index; none for unlabelled data. If rows have several
            labels, each distinct set of labels becomes a class: `labels` then holds its index, and
            `class_names` the names of these sets.
        weights: (n,) non-negative masses, scaled here to sum to 1; those below 2^-1022 become 0.
            None means uniform.
        name: the dataset's name in reports.
        subset_hash: identifies which rows of the original dataset these are.
        mass: total mass of these rows within the dataset that they are a part of, by which the
            shards of several processes are joined. If `weights` are given, the mass is multiplied
            here by their sum.
        feature_names: d names. If both datasets of a comparison have names, their order is checked.
            None takes the column names of a table; other features have no names.
        label_sets: for rows with several labels, the labels in each set. An indicator in `labels`
            determines it. `class_names` are its names of sets.
        targets: (n, q) or (n,) numbers that `labels="continuous"` compares; `labels` is then None.

    Raises:
        InputError: shapes or names disagree; a value is not finite or has an imaginary part; a
            label is missing or out of range; there are both labels and targets; all weights are 0;
            or `label_sets` has other names.
    """

    features: Tensor
    labels: Tensor | None
    class_names: tuple[str, ...]
    weights: Tensor | None = None
    name: str = field(default="samples", kw_only=True)
    subset_hash: str | None = field(default=None, kw_only=True)
    mass: Positive = field(default=1.0, kw_only=True)
    feature_names: tuple[str, ...] | None = field(default=None, kw_only=True)
    label_sets: LabelSets | None = field(default=None, kw_only=True)
    targets: Tensor | None = field(default=None, kw_only=True)

    @untraced
    def __post_init__(self) -> None:
        # Without own settings, lists would become tensors of the user's default type, and inference
        # mode would make inference tensors.
        check_transforms("LabeledSamples", (self.features, self.labels, self.weights))
        with own_settings():
            self._prepare()

    def _prepare(self) -> None:
        if self.labels is None:
            # The dataclass is frozen; only its own preparation sets fields.
            object.__setattr__(self, "class_names", ())
        check_fields(self)
        columns = names_of_columns(self.features)
        features = _as_features(self.features)
        # A table's column of lists holds several features, which its one name does not name.
        if self.feature_names is None and columns and len(columns) == features.shape[1]:
            object.__setattr__(self, "feature_names", columns)
        if self.feature_names is not None and len(self.feature_names) != features.shape[1]:
            raise InputError(
                f"feature_names must be {features.shape[1]}, one a feature, got "
                f"{len(self.feature_names)}"
            )
        n = features.shape[0]
        object.__setattr__(self, "features", features)
        self._read_sets()
        if self.targets is not None:
            targets = _as_targets(self.targets, n)
            if self.labels is not None:
                raise InputError(BOTH_KINDS)
            object.__setattr__(self, "targets", targets.to(features.device))
        if self.labels is not None:
            labels = _as_class_indices(self.labels, n, self.class_names)
            object.__setattr__(self, "labels", labels.to(features.device))
        if self.weights is not None:
            weights, total = _as_masses(self.weights, n)
            object.__setattr__(self, "weights", weights.to(features.device))
            object.__setattr__(self, "mass", min(max(self.mass * total, LEAST_MASS), MOST_MASS))

    def _read_sets(self) -> None:
        """Read an indicator into sets or classes, and check that labels are of `label_sets`."""
        sets, names = self.label_sets, self.class_names
        if sets is not None and not isinstance(sets, LabelSets):
            raise InputError(f"label_sets must be LabelSets, got {shown(sets)}")
        if self.labels is None:
            object.__setattr__(self, "label_sets", None)
            return
        if _dimension(self.labels) != 2:
            if sets is not None and names != sets.set_names:
                raise InputError(
                    f"class_names must be those of label_sets, such as {sets.set_names[:2]}, got "
                    f"{names[:2]}; give both, or labels of classes with label_sets=None"
                )
            return
        if sets is not None and names == sets.set_names:
            # An indicator replaces labels of sets.
            names = sets.names
        if (several := several_of(self.labels, names)) is None:
            return
        if len(several[1]) != len(names):
            raise InputError(
                f"labels are an indicator of {len(several[1])} labels, and class_names has "
                f"{len(names)}; give one name a column"
            )
        found = Encoded.of_indicator(*several).of_samples()
        for name in ("labels", "class_names", "label_sets"):
            object.__setattr__(self, name, found[name])

    def __repr__(self) -> str:
        """Return name and sizes, without tensors."""
        rows, columns = self.features.shape
        classes = "no labels" if self.labels is None else f"{len(self.class_names)} classes"
        if self.label_sets is not None:
            classes = f"{len(self.label_names)} labels in {len(self.class_names)} sets"
        if self.targets is not None:
            classes = f"{self.targets.shape[1]} targets"
        return f"LabeledSamples({display(repr(self.name))}, {rows} x {columns}, {classes})"

    @classmethod
    def of(cls, given: SamplesOrArrays, name: str = "samples") -> LabeledSamples:
        """Return samples unchanged, or build them from features or (features, labels), detached.

        Args:
            given: the argument of an entry point, of a type that `arguments.samples` accepts.
            name: name of the argument for messages, and of samples that are made here.

        Raises:
            InputError: as for the parts of samples.
        """
        if isinstance(given, LabeledSamples):
            if given.without_mass:
                raise InputError(f"{name}: {NO_MASS}")
            return given.detached()
        with placed(name):
            if isinstance(given, tuple):
                return cls.from_arrays(*given, name=name).detached()
            return cls(given, None, (), name=name).detached()  # type: ignore[arg-type]

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
        floats count as integers. Rows with several labels are an indicator (n, V) of 0 and 1, or a
        list of lists or sets of labels; lists of equal length with only 0 and 1 are read as an
        indicator. Floats with fractions, (n,) or (n, q), become `targets`.
        """
        found, missing = encode_rows(labels)
        if missing.any():
            raise InputError(f"{missing_rows(missing)}; {HOW_TO_DROP}")
        return cls(features, weights=weights, name=name, **found.of_samples())

    def __len__(self) -> int:
        return self.features.shape[0]

    @property
    def dim(self) -> int:
        """The feature dimension d."""
        return self.features.shape[1]

    @property
    def masses(self) -> Tensor:
        """A copy of the weights (n,), float64, summing to 1; uniform if none were given."""
        if self.weights is not None:
            return self.weights.clone()
        n = len(self)
        return torch.full((n,), 1.0 / n, dtype=torch.float64, device=self.features.device)

    @property
    def without_mass(self) -> bool:
        """Whether all weights are 0, as those of one shard of several may be."""
        # Only then are the weights read: a mass of LEAST_MASS may also be a tiny sum.
        return self.weights is not None and self.mass == LEAST_MASS and not self.weights.any()

    @property
    def class_total(self) -> int:
        """The number of classes V; unlabelled data are one class."""
        return 1 if self.labels is None else len(self.class_names)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the V labels, of which a row may have several."""
        return self.class_names if self.label_sets is None else self.label_sets.names

    @property
    def members(self) -> Tensor | None:
        """Which labels each set has, (S, V) bool on the CPU; None where rows have one class."""
        return None if self.label_sets is None else self.label_sets.members

    @property
    def shares(self) -> Tensor:
        """The share of each label in each row, (n, V) float64; every row sums to 1."""
        if self.labels is None:
            return torch.ones(len(self), 1, dtype=torch.float64)
        of_sets = torch.eye(len(self.class_names), dtype=torch.float64)
        if self.label_sets is not None:
            of_sets = self.label_sets.shares
        return of_sets.to(self.labels.device)[self.labels]

    def label_counts(self, rows: Tensor | None = None) -> list[int]:
        """Count the rows that have each label (V,), among all rows or those of a mask (n,)."""
        assert self.labels is not None
        labels = self.labels if rows is None else self.labels[rows]
        counts = torch.bincount(labels, minlength=len(self.class_names)).cpu()
        if self.label_sets is not None:
            counts = counts @ self.label_sets.members.long()
        return list(counts.tolist())

    @property
    def class_counts(self) -> Tensor:
        """Samples per class (V,), int64."""
        if self.labels is None:
            raise needs_classes(self)
        return torch.bincount(self.labels, minlength=len(self.class_names))

    @property
    @untraced
    def fingerprint(self) -> str:
        """SHA-256 of features, labels, targets, class names and weights, in row order.

        It is the same on every device, and in every floating-point type that holds the numbers
        exactly. It is cached until the tensors are modified in place.
        """
        mark = mark_of(self)
        known: tuple[Mark, str] | None = self.__dict__.get("_fingerprint")
        if known is not None and known[0] == mark:
            return known[1]
        names, labels = self.class_names, self.labels
        if labels is not None and (sets := self.label_sets) is not None:
            # Sets that no row has are those of other rows.
            present, labels = torch.unique(labels, return_inverse=True)
            members = sets.members[present.cpu()].numpy()
            names = (*sets.names, "in sets", members.tobytes().hex())
        found = fingerprint(self.features, labels, self.weights, names, self.targets)
        self.__dict__["_fingerprint"] = mark, found
        return found

    def detached(self) -> LabeledSamples:
        """Return the samples without autograd and inference mode; themselves if unchanged."""
        parts = {name: getattr(self, name) for name in TENSORS}
        # Autograd cannot save inference tensors. Operations on features in files return plain ones.
        copied: dict[str, Any] = {
            name: part.clone()
            for name, part in parts.items()
            if part is not None and part.is_inference() and not isinstance(part, FileFeatures)
        }
        if not copied and not self.features.requires_grad:
            return self
        changed: dict[str, Any] = {"features": self.features.detach()} | copied
        return replace(self, **changed)

    # `takes` checks arguments by their annotations.
    @takes()
    def to(self, device: str | torch.device) -> LabeledSamples:
        """Return the samples on a device, without a copy if they are there."""
        try:
            place = torch.device(device)
        except RuntimeError:
            raise InputError(f"unknown device {str(device)!r}; such as cpu or cuda:0") from None
        features = moved(self.features, place)
        if features is self.features:
            return self
        # `__post_init__` moves the weights.
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
        # Reading a mapped file beyond its end would kill the process.
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
            targets=None if self.targets is None else self.targets[rows],
        )

    def keep_labels(self, keep: Sequence[int]) -> LabeledSamples:
        """Keep these of the V labels, in the given order, and the rows that have one of them."""
        if self.label_sets is None:
            return self.keep_classes(keep)
        assert self.labels is not None
        given = Encoded(self.labels.cpu().numpy(), self.class_names, self.label_sets)
        rows, found = given.kept(keep)
        kept = self if len(rows) == len(self) else self.take(torch.from_numpy(rows))
        return replace(kept, **found.of_samples())

    @takes()
    def keep_classes(self, keep: Sequence[Index]) -> LabeledSamples:
        """Keep the samples of these classes, which are renumbered in the given order.

        If no sample is dropped, features are not copied: they stay in files or in shared memory.
        """
        if self.labels is None:
            raise needs_classes(self)
        for c in keep:
            if c >= len(self.class_names):
                raise InputError(
                    f"{self.name} has no class {c}: it has {len(self.class_names)}, from 0"
                )
        # -1 marks the classes that are dropped.
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
            label_sets=None if self.label_sets is None else self.label_sets.take(list(keep)),
        )


def displaced(
    samples: LabeledSamples, features: Tensor, *, subset_hash: str | None = None
) -> LabeledSamples:
    """Return the samples with other features, without their link to rows of a dataset.

    Args:
        samples: n points.
        features: (n, d), of the same type and on the same device. Nothing is checked: the caller
            must know that they are finite.
        subset_hash: the link that the result has.
    """
    found = copy(samples)
    found.__dict__.pop("_fingerprint", None)
    # Past the frozen dataclass and its checks.
    for name, part in (("features", features), ("subset_hash", subset_hash)):
        object.__setattr__(found, name, part)
    return found


def unchecked(
    class_names: tuple[str, ...], features: Tensor, labels: Tensor | None, weights: Tensor | None
) -> LabeledSamples:
    """Return samples of the tensors of others on one device, which were checked and normalised."""
    found = displaced(LabeledSamples(torch.zeros(1, 1), None, ()), features)
    for name, part in (("labels", labels), ("class_names", class_names), ("weights", weights)):
        object.__setattr__(found, name, part)
    return found


# The parts of samples that are tensors, a row each.
TENSORS = ("features", "labels", "weights", "targets")

# Sums over a dataset of squares up to this stay finite in float64.
LARGEST_SQUARE = 1e300

# The types that `LabeledSamples.of` accepts.
Array = ArrayLike | Tensor
SamplesOrArrays = LabeledSamples | Tensor | NDArray[Any] | tuple[Array, Array]

HOW_TO_LABEL = (
    "label it with otdd_flash.data.with_pseudo_labels (on the command line "
    "source.pseudo_labels=kmeans or target.pseudo_labels=kmeans), or compare features alone with "
    "labels=none"
)


def needs_classes(samples: LabeledSamples) -> InputError:
    """Return the error for samples whose classes are asked for, and that have none."""
    if samples.targets is not None:
        whole = bool((samples.targets == samples.targets.floor()).all())
        return InputError(
            f"{samples.name} has numbers and no classes; labels=continuous compares them, or "
            + ("give classes as integers or text" if whole else "cut them into classes first")
        )
    return InputError(f"{samples.name} has no labels; {HOW_TO_LABEL}")


HOW_TO_SCALE = (
    "scale them, such as with extractor.standardize=true (in Python otdd.extractors.standardize)"
)


def check_squares(*sides: LabeledSamples) -> None:
    """Refuse features that are not finite, or whose squared distances overflow float64.

    Samples are finite when they are made; code that shares their memory may have changed them
    since.

    Raises:
        InputError: there are such features.
    """
    different = list(dict.fromkeys(sides))
    for side in different:
        if isinstance(side.features, FileFeatures):
            side.features.check()
    found = [largest_entry(side.features) for side in different]
    together = len({number.device for number in found}) == 1
    # One transfer for all that are on one device.
    numbers = torch.stack(found).tolist() if together else map(float, found)
    for side, largest in zip(different, numbers, strict=True):
        if not math.isfinite(largest):
            raise prefixed(side.name, _not_finite(side.features))
        # The largest possible squared distance is 4 d x^2. Both sides are divided by x, as x^2 may
        # overflow; LARGEST_SQUARE leaves a margin for sums over points and classes.
        if 4 * side.dim * largest > LARGEST_SQUARE / max(largest, 1.0):
            raise InputError(
                f"the features of {side.name} reach {largest:.1e}, whose squared distances "
                f"overflow float64; {HOW_TO_SCALE}"
            )


def check_same_dimension(source: LabeledSamples, target: LabeledSamples) -> None:
    """Refuse datasets with different numbers of features, or a name at different positions.

    Raises:
        InputError: their dimensions differ, or a common feature name has different positions.
    """
    if source.dim == target.dim:
        _check_same_order(source, target)
        return
    raise InputError(
        f"{source.name} has {source.dim} features and {target.name} has {target.dim}, but both "
        f"must have the same number; images: extractor=pixels {_pixel_settings(source, target)}, "
        "or the same network for both (extractor=timm or torchvision); text: one extractor.model "
        "for both; tables: the same columns. extractor.pca cannot help, as it is fitted on both "
        "sides together. Of datasets whose features do not match ground=gromov of dataset_distance "
        "and pairwise_distances compares the distances within each"
    )


def _check_same_order(source: LabeledSamples, target: LabeledSamples) -> None:
    """Refuse a column name at different positions, because features are compared by position."""
    if source.feature_names is None or target.feature_names is None:
        return
    places = {name: place for place, name in enumerate(target.feature_names)}
    for place, name in enumerate(source.feature_names):
        # A name that only one side has is no contradiction.
        if places.get(name, place) != place:
            raise InputError(
                f"the column {display(repr(name))} is number {place + 1} of {source.name} and "
                f"number {places[name] + 1} of {target.name}, and columns are compared by place; "
                "give both in one order: of tables target[list(source.columns)], of files the same "
                "source.features=[...] and target.features=[...] (input=[...] for huggingface), or "
                "arrays, which have no names"
            )


def _pixel_settings(source: LabeledSamples, target: LabeledSamples) -> str:
    """Return settings that give images one dimension.

    They have a number for N if both dimensions fit square images.
    """
    sides = [_image_sides(source.dim), _image_sides(target.dim)]
    known = [side for side in sides if side is not None]
    if len(known) < len(sides):
        return "extractor.size=N"
    size = max(side for side, _ in known)
    one_kind = len({colour for _, colour in known}) == 1
    return f"extractor.size={size}" + ("" if one_kind else " extractor.grayscale=true")


def _image_sides(d: int) -> tuple[int, bool] | None:
    """Return the side, and whether it has three channels, of the square image with d values.

    None if there is no such image.
    """
    if isqrt(d) ** 2 == d:
        return isqrt(d), False
    if d % 3 == 0 and isqrt(d // 3) ** 2 == d // 3:
        return isqrt(d // 3), True
    return None


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
    """Return the largest absolute value (), float64, or NaN if there is one, in one pass."""
    largest: Tensor = torch.linalg.vector_norm(features.detach(), ord=math.inf)
    return largest.double()


def all_finite(*values: Tensor) -> bool:
    """Return whether no entry of any tensor is NaN or infinite.

    The entries are read once, where `isfinite` takes five passes, and the host waits once for all.
    """
    first, *others = (largest_entry(each) for each in values)
    # `maximum` propagates NaN.
    return math.isfinite(float(reduce(lambda a, b: a.maximum(b.to(a.device)), others, first)))


def _not_finite(features: Tensor) -> InputError:
    bad = ~torch.isfinite(features)
    row, column = (int(index) for index in torch.nonzero(bad)[0])
    return InputError(
        f"features hold {int(bad.sum())} NaN or infinite values in {int(bad.any(1).sum())} "
        f"rows (first at row {row}, column {column}); remove those rows or impute them"
    )


def _dimension(labels: Any) -> int:
    try:
        return np.ndim(labels)
    except ValueError:
        raise InputError(
            "labels are lists of several lengths; LabeledSamples.from_arrays reads lists of labels"
        ) from None


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
    # Both ends in one transfer.
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
    """Check that labels in floats are whole numbers; return them within the range of int64."""
    if bool((missing := labels.isnan()).any()):
        raise InputError(
            f"{missing_rows(missing.cpu().numpy())}; leave those rows out of features and labels"
        )
    fractions = labels != labels.floor()
    if bool(fractions.any()):
        first = float(labels[fractions][0])
        raise InputError(
            f"labels must be class indices, got {first:g} "
            f"{rows_shown(fractions.cpu().numpy())}; give numbers as targets=, or cut them into "
            "classes first"
        )
    # The caller reports numbers beyond the range of integers as out of range.
    return labels.double().clamp(-(2.0**62), 2.0**62)


def _as_targets(values: Any, n: int) -> Tensor:
    """Return numbers (n, q), float64."""
    targets = in_double("targets", real_tensor("targets", values))
    if targets.ndim not in (1, 2) or len(targets) != n or targets.numel() == 0:
        raise InputError(f"targets must be ({n},) or ({n}, q), got {tuple(targets.shape)}")
    targets = targets.reshape(n, -1)
    if (bad := ~targets.isfinite().all(1)).any():
        raise InputError(f"targets must be finite numbers, {rows_shown(bad.cpu().numpy())} are not")
    # -0 is 0, also in a fingerprint.
    signed = (targets == 0) & targets.signbit()
    return targets + 0.0 if bool(signed.any()) else targets


def check_masses(weights: NDArray[np.float64]) -> None:
    """Refuse weights that are negative or not finite.

    Raises:
        InputError: there are such weights; the message names the rows.
    """
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        raise InputError(
            f"weights must be finite and not negative, got {weights[bad][0]:g} {rows_shown(bad)}; "
            "a weight of 0 leaves a row out"
        )


def _as_masses(values: Any, n: int) -> tuple[Tensor, float]:
    """Return masses that sum to 1, and the sum of the given weights."""
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
        # In units of the largest weight they are the same masses, and their sum is finite.
        unit = float(weights.max())
        weights = weights / unit
    total = float(weights.sum())
    # Weights that sum to 1 up to rounding keep their bits: a copy then has the same fingerprint.
    masses = weights if abs(total - 1) < 1e-12 else weights / total
    # Division by a subnormal mass would overflow.
    subnormal = (masses > 0) & (masses < torch.finfo(masses.dtype).tiny)
    return torch.where(subnormal, 0, masses) if bool(subnormal.any()) else masses, total * unit


def _may_be_shard() -> bool:
    """Return whether this is one of several processes, whose shard may have no mass at all.

    An error here would leave the other processes waiting.
    """
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def same_content(one: LabeledSamples, other: LabeledSamples) -> bool:
    """Return whether features, labels of any kind and weights agree row by row, in any type."""
    return one is other or (
        one.class_names == other.class_names
        and all(_equal(getattr(one, part), getattr(other, part)) for part in (*TENSORS, "members"))
    )


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    home = other.device
    if one.shape != other.shape:
        return False
    # Different point clouds nearly always differ in their first row, which is read faster than all.
    if one.dtype == other.dtype:
        return torch.equal(one[:1].to(home), other[:1]) and torch.equal(one.to(home), other)
    # Equal numbers in another type are equal content; PyTorch compares in the wider type.
    blocks = [slice(0, 1), *row_blocks(len(other), other[:1].nbytes)]
    return all(bool((one[rows].to(home) == other[rows]).all()) for rows in blocks)
