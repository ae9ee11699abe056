"""A labelled dataset as it was read: raw inputs, class indices, optional weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otdd_flash.data.lazy_items import LazyItems
from otdd_flash.errors import InputError
from otdd_flash.samples import encode_labels

Modality = Literal["image", "text", "array"]


@dataclass(frozen=True, eq=False)
class LabeledDataset:
    """Inputs of n items before feature extraction.

    Args:
        inputs: one array with leading dimension n (images (n, h, w) or (n, h, w, c), usually uint8;
            matrices (n, d)), or a sequence of n PIL images, strings or vectors.
        labels: (n,) class indices in [0, V), or None for unlabelled data.
        class_names: V names, one per class index.
        weights: (n,) masses in any unit, or None for uniform ones.
        modality: what one item is.
        name: what reports call the dataset.
        subset_hash: SHA-256 of `rows`; computed where not given.
        rows: (n,) each item's row number in the original data; 0 to n - 1 where not given.

    Raises:
        InputError: there are no items, or lengths or label values disagree.
    """

    inputs: Sequence[Any] | NDArray[Any]
    labels: NDArray[np.int64] | None
    class_names: tuple[str, ...]
    weights: NDArray[np.float64] | None
    modality: Modality
    name: str
    subset_hash: str = ""
    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), kw_only=True)

    def __post_init__(self) -> None:
        n = len(self.inputs)
        if n == 0:
            raise InputError(f"{self.name} is empty: it has no rows")
        if self.modality not in get_args(Modality):
            raise InputError(f"modality must be one of {get_args(Modality)}, got {self.modality!r}")
        for what, values in (("labels", self.labels), ("weights", self.weights)):
            if values is not None and values.shape != (n,):
                raise InputError(
                    f"{self.name} has {n} inputs, but its {what} have shape {values.shape}"
                )
        if self.labels is not None:
            _check_range(self.labels, self.class_names, self.name)
        if len(self.rows) == 0:
            object.__setattr__(self, "rows", np.arange(n))
        if not self.subset_hash:
            object.__setattr__(self, "subset_hash", _hash_of(self.rows))

    @classmethod
    def from_raw(
        cls,
        inputs: Sequence[Any] | NDArray[Any],
        labels: ArrayLike | None,
        *,
        modality: Modality,
        name: str,
        class_names: Sequence[str] | None = None,
        weights: ArrayLike | None = None,
        rows: NDArray[np.int64] | None = None,
    ) -> LabeledDataset:
        """Build a dataset from labels as its source stores them.

        With `class_names` the labels are indices into them, and labels that are all negative mean
        an unlabelled split (a common convention for hidden test labels). Without, the classes are
        the distinct integer or string labels in sorted order.

        Raises:
            InputError: the labels are neither integers nor strings, miss values, or do not fit.
        """
        if len(inputs) == 0:
            raise InputError(f"{name} is empty: it has no rows")
        indices, names = _number(labels, class_names, name)
        masses = None if weights is None else _as_masses(weights, name)
        known_rows = np.arange(len(inputs)) if rows is None else rows
        return cls(inputs, indices, names, masses, modality, name, rows=known_rows)

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, rows: ArrayLike) -> LabeledDataset:
        """The items at these positions, in this order."""
        chosen = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            inputs=_take(self.inputs, chosen),
            labels=None if self.labels is None else self.labels[chosen],
            weights=None if self.weights is None else self.weights[chosen],
            rows=self.rows[chosen],
            subset_hash="",
        )


def concatenate(parts: Sequence[LabeledDataset], name: str) -> LabeledDataset:
    """The items of several splits of one dataset, one after the other; row numbers run on."""
    first = parts[0]
    if any((part.labels is None) != (first.labels is None) for part in parts):
        raise InputError(f"{name}: some splits have labels and others have none; load one split")
    if any(part.class_names != first.class_names for part in parts):
        raise InputError(f"{name}: the splits have different classes; load one split")
    return LabeledDataset(
        _join([part.inputs for part in parts]),
        None if first.labels is None else np.concatenate([_known(p.labels) for p in parts]),
        first.class_names,
        None if first.weights is None else np.concatenate([_known(p.weights) for p in parts]),
        first.modality,
        name,
    )


def _number(
    labels: ArrayLike | None, class_names: Sequence[str] | None, name: str
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    if labels is None:
        return None, ()
    values = np.asarray(labels)
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    _check_present(values, name)
    if class_names is None:
        return encode_labels(values)
    if values.dtype.kind not in "iub":
        raise InputError(f"{name}: labels must be class indices, got {values.dtype}")
    indices = values.astype(np.int64)
    if indices.size and int(indices.max()) < 0:
        return None, ()
    return indices, tuple(str(class_name) for class_name in class_names)


def _check_present(values: NDArray[Any], name: str) -> None:
    """Refuse missing labels: None, or the NaN by which tables mark them."""
    if values.dtype.kind == "f":
        missing = np.isnan(values)
    elif values.dtype.kind == "O":
        missing = np.array([v is None or v != v for v in values.ravel()], dtype=bool)
    else:
        return
    if missing.any():
        raise InputError(
            f"{name}: {int(missing.sum())} labels are missing (first at row "
            f"{int(np.argmax(missing))}); remove those rows or label them"
        )


def _check_range(labels: NDArray[np.int64], class_names: tuple[str, ...], name: str) -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(class_names):
        raise InputError(
            f"{name}: labels must lie in [0, {len(class_names)}), one per class name, "
            f"got {low} to {high}"
        )


def _as_masses(values: ArrayLike, name: str) -> NDArray[np.float64]:
    try:
        return np.asarray(values).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: weights must be numbers: {error}") from error


def _take(inputs: Sequence[Any] | NDArray[Any], rows: NDArray[np.int64]) -> Any:
    if isinstance(inputs, np.ndarray):
        return inputs[rows]
    if isinstance(inputs, LazyItems):
        return inputs.take(rows)
    return [inputs[row] for row in rows.tolist()]


def _join(parts: Sequence[Sequence[Any] | NDArray[Any]]) -> Any:
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return np.concatenate(arrays)
    return LazyItems.chain(parts)


def _known(values: NDArray[Any] | None) -> NDArray[Any]:
    if values is None:
        raise InputError("some splits have weights and others have none; load one split")
    return values


def _hash_of(rows: NDArray[np.int64]) -> str:
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
