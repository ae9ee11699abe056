"""Labels of other kinds: several for a row, and numbers; how both are read and held.

Rows with several labels are rows of one class each, the class of all rows with the same labels:
`LabelSets` says which of the V labels are in each of the S distinct sets. So all that follows
classes, such as draws, layouts and files, follows sets. Numbers are float64 targets (n, q).

`samples` and `data.dataset` read labels by `encode_rows`; `data.arrays` calls `split_text`,
`labels.metrics` and `data.dataset` `named_numbers`, `flows.maps` `set_name`, and `shift.rows` makes
`Encoded` labels. `result`, `flows.result` and `ranking.index` restore sets by `named_sets`.
`samples`, `labels.pairs`, `operators.label_costs`, `shift.rows`, `unmatched` and `report.planes`
read the shares of labels in a set.

A change must keep sets in an order that their members alone decide, because fingerprints of samples
(`samples`) depend on that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.checks import shown
from otdd_flash.errors import InputError
from otdd_flash.raw_labels import (
    check_one_dimensional,
    columns_of,
    encode_labels,
    missing_labels,
    names_of_columns,
    raw_values,
    rounded,
    rows_shown,
    without_fractions,
)

# Between the labels of a set, in its name.
AND = "+"

# The text of a number: Python itself also reads blanks, underscores and names of infinities.
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)

HOW_TO_DROP = "leave those rows out of features and labels, or label them"


@dataclass(frozen=True, eq=False)
class LabelSets:
    """The distinct sets of labels of some rows.

    Attributes:
        names: of the V labels.
        members: (S, V) bool on the CPU, which labels each set has; at least one.

    Raises:
        InputError: members are no such tensor, or a set has no label.
    """

    names: tuple[str, ...]
    members: Tensor

    def __post_init__(self) -> None:
        members, count = self.members, len(self.names)
        if (
            not isinstance(members, Tensor)
            or members.dtype != torch.bool
            or (members.ndim != 2 or members.shape[1] != count)
        ):
            kind = getattr(members, "dtype", "")
            raise InputError(
                f"members must be (S, {count}) of bool, a column for each name, got "
                f"{shown(members)} {kind}".rstrip()
            )
        if (empty := ~members.any(1)).any():
            raise InputError(
                f"each set has a label, and number {int(empty.int().argmax())} has none"
            )

    @cached_property
    def set_names(self) -> tuple[str, ...]:
        """A name of each set, its labels side by side, whatever their order among `names`."""
        return tuple(
            set_name(self.names[label] for label in row.nonzero().squeeze(1).tolist())
            for row in self.members
        )

    @property
    def shares(self) -> Tensor:
        """The part that each label is of a set, (S, V) float64; rows sum to 1."""
        counts = self.members.double()
        return counts / counts.sum(1, keepdim=True)

    def take(self, sets: Sequence[int] | Tensor | NDArray[Any]) -> LabelSets:
        """Return some of the sets, with all labels."""
        return LabelSets(self.names, self.members[torch.as_tensor(sets)])


def set_name(labels: Iterable[str]) -> str:
    """Return the name of a set of labels; no two sets have one name."""
    written = (label.replace("\\", "\\\\").replace(AND, f"\\{AND}") for label in labels)
    return AND.join(sorted(written))


def named_sets(members: Tensor | None, names: Sequence[str]) -> dict[str, Any]:
    """Return `class_names` and `label_sets` of samples, from stored members of sets, or None."""
    if members is None:
        return {"class_names": tuple(names), "label_sets": None}
    sets = LabelSets(tuple(names), members.bool())
    return {"class_names": sets.set_names, "label_sets": sets}


class Encoded(NamedTuple):
    """Labels of n rows, of one kind.

    Attributes:
        labels: (n,) indices of classes, or of sets; None for numbers.
        class_names: names of the classes, or of the sets.
        label_sets: the sets of rows with several labels.
        targets: (n, q) float64 numbers.
    """

    labels: NDArray[np.int64] | None
    class_names: tuple[str, ...]
    label_sets: LabelSets | None = None
    targets: NDArray[np.float64] | None = None

    @classmethod
    def of_indicator(cls, indicator: NDArray[np.bool_], names: Sequence[str]) -> Encoded:
        """Return the sets of an indicator (n, V), or the V classes if every row has one label.

        Raises:
            InputError: a row has no label; the message names it.
        """
        without = np.asarray(~indicator.any(1))
        if count := int(without.sum()):
            raise InputError(
                f"{count} {'row has' if count == 1 else 'rows have'} no label, "
                f"{rows_shown(without)}; {HOW_TO_DROP}"
            )
        if bool((indicator.sum(1) == 1).all()):
            return cls(indicator.argmax(1).astype(np.int64), tuple(names))
        packed = np.packbits(indicator, axis=1)
        _, first, indices = np.unique(packed, axis=0, return_index=True, return_inverse=True)
        sets = LabelSets(tuple(names), torch.from_numpy(indicator[first].astype(np.bool_)))
        return cls(indices.reshape(-1).astype(np.int64), sets.set_names, sets)

    def of_samples(self) -> dict[str, Any]:
        """Return the labels as the fields of `LabeledSamples`, in tensors."""
        tensors = {
            name: None if part is None else torch.from_numpy(part)
            for name, part in (("labels", self.labels), ("targets", self.targets))
        }
        return {**self._asdict(), **tensors}

    def kept(self, keep: Sequence[int]) -> tuple[NDArray[np.int64], Encoded]:
        """Return the rows that have one of these labels, and their labels among these.

        Labels are renumbered in the given order, and rows of one class have one label.
        """
        assert self.labels is not None
        if self.label_sets is None:
            names = tuple(self.class_names[label] for label in keep)
            renumber = np.full(len(self.class_names), -1, dtype=np.int64)
            renumber[list(keep)] = np.arange(len(keep))
            labels = renumber[self.labels]
            rows = np.flatnonzero(labels >= 0)
            return rows, Encoded(labels[rows], names)
        indicator = self.label_sets.members.numpy()[self.labels][:, list(keep)]
        rows = np.flatnonzero(indicator.any(1))
        return rows, Encoded.of_indicator(
            indicator[rows], [self.label_sets.names[label] for label in keep]
        )


def encode_rows(
    labels: Any, class_names: Sequence[str] | None = None
) -> tuple[Encoded, NDArray[np.bool_]]:
    """Read raw labels: of classes as `encode_labels`, several for a row, or numbers.

    Args:
        labels: of n rows, as their source stores them.
        class_names: names of labels that are indices, of which a negative one is missing; if all
            are negative, the rows are unlabelled. None: classes are told apart by their values.

    Returns:
        The labels of the rows that have some, and which rows (n,) have none.

    Raises:
        InputError: they are none of these, or beyond the names.
    """
    if (several := several_of(labels, class_names)) is not None:
        indicator, names = several
        missing = np.asarray(~indicator.any(1))
        return Encoded.of_indicator(indicator[~missing], names), missing
    values = raw_values(rows_of_floats(labels))
    floats = values.ndim == 2 and values.dtype.kind == "f"
    if not floats or numbers_of(np.nan_to_num(values)) is None:
        check_one_dimensional(labels, values)
    missing = missing_labels(values)
    if values.ndim == 2:
        missing = np.asarray(missing.any(1))
    elif class_names is not None and values.dtype.kind == "i" and (values >= 0).any():
        missing = values < 0
    if missing.any():
        if missing.all():
            return Encoded(None, ()), missing
        values = raw_values(values[~missing])
    if class_names is not None:
        return _of_indices(values, class_names), missing
    if (targets := numbers_of(values)) is not None:
        return Encoded(None, (), targets=targets), missing
    return Encoded(*encode_labels(values)), missing


def _of_indices(values: NDArray[Any], class_names: Sequence[str]) -> Encoded:
    """Return indices of names as labels; if all are negative, there are none."""
    values = without_fractions(values)
    if values.dtype.kind not in "iub":
        raise InputError(f"labels must be class indices, got {values.dtype}")
    if values.size and int(values.max()) < 0:
        return Encoded(None, ())
    # Checked before the conversion, which could wrap the largest labels.
    check_range(values, len(class_names))
    return Encoded(values.astype(np.int64), tuple(map(str, class_names)))


def check_range(labels: NDArray[Any], count: int) -> None:
    """Refuse class indices that are not in [0, count).

    Raises:
        InputError: there are such indices.
    """
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= count:
        raise InputError(
            f"labels must lie in [0, {count}), one per class name, got {low} to {high}"
        )


def numbers_of(values: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return raw floats (n,) with fractions, or any (n, q), as numbers (n, q); else None.

    Whole floats are numbers only beyond the integers that their type holds. Rows of probabilities
    are none. Missing values are for the caller to refuse.
    """
    if values.dtype.kind != "f" or values.ndim not in (1, 2) or missing_labels(values).any():
        return None
    whole = values.ndim == 1 and bool((values == np.floor(values)).all())
    if not np.isfinite(values).all() or values.shape[1:] == (0,):
        return None
    if whole and not rounded(values):
        return None
    found = values.astype(np.float64).reshape(len(values), -1)
    shares = found.shape[1] > 1 and bool((found >= 0).all())
    return None if shares and np.allclose(found.sum(1), 1, 0, 1e-3) else found


def rows_of_floats(labels: Any) -> Any:
    """Return lists of floats of one length as an array (n, q), NaN where a row is missing.

    Labels of any other kind are returned as they are.
    """
    rows = _lists_of(labels)
    there = [row for row in rows or () if len(row)]
    if rows is None or len(there) == len(rows) or len({len(row) for row in there}) > 1:
        return labels
    if not all(isinstance(entry, float | np.floating) for row in there for entry in row):
        return labels
    return np.array([list(row) if len(row) else [np.nan] * len(there[0]) for row in rows])


def named_numbers(class_names: Sequence[str]) -> NDArray[np.float64] | None:
    """Return the numbers (V, 1) that classes are named by, as whole ones are; None for others.

    Raises:
        InputError: float64 rounds a whole number.
    """
    if any(NUMBER.fullmatch(name) is None for name in class_names):
        return None
    found = np.array(list(map(float, class_names)))
    if not np.isfinite(found).all():
        return None
    for name, number in zip(class_names, found.tolist(), strict=True):
        if name.lstrip("+-").isdigit() and int(name) != number:
            raise InputError(
                f"targets must be numbers that float64 holds, got {name}; round them to float64 "
                "yourself, or subtract a common number first"
            )
    return found[:, None]


def several_of(
    labels: Any, class_names: Sequence[str] | None = None
) -> tuple[NDArray[np.bool_], tuple[str, ...]] | None:
    """Return the indicator (n, V) and the names of the labels if rows can have several; else None.

    Args:
        labels: an indicator of 0 and 1, a list or column of lists or sets, or anything else. Lists
            of one length that hold nothing but 0 and 1 are an indicator.
        class_names: names of labels that are indices; None: labels are told apart by their values.

    Raises:
        InputError: labels in lists are missing, of mixed types or beyond the names, or they could
            be an indicator as well.
    """
    if (rows := _lists_of(labels)) is not None:
        hot = _listed_indicator(rows, class_names)
        if hot is None:
            return _of_lists([list(row) for row in rows], class_names)
        return hot, _names_of(hot, class_names)
    if getattr(labels, "ndim", 2) != 2 or isinstance(labels, list | tuple):
        return None
    values, names = raw_values(labels), names_of_columns(labels) or class_names
    if values.ndim != 2 or values.shape[1] == 1 or values.dtype.kind not in "iubf":
        return None
    if not bool(((values == 0) | (values == 1)).all()):
        return None
    return values.astype(np.bool_), _names_of(values, names)


def _names_of(indicator: NDArray[Any], names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the columns of an indicator, their numbers if there are no such names."""
    if names is None or len(names) != indicator.shape[1]:
        names = [str(label) for label in range(indicator.shape[1])]
    return tuple(map(str, names))


def _listed_indicator(
    rows: Sequence[Any], class_names: Sequence[str] | None
) -> NDArray[np.bool_] | None:
    """Return the indicator (n, V) that lists of one length V >= 2 are; else None.

    A missing row is empty, and has no label.

    Raises:
        InputError: integers 0 and 1 could be an indicator as well as labels.
    """
    there = [row for row in rows if len(row)]
    length = len(there[0])
    if length < 2 or any(isinstance(row, set | frozenset) or len(row) != length for row in there):
        return None
    kinds = {type(entry) for row in there for entry in row}
    if not all(issubclass(kind, int | float | np.bool_ | np.number) for kind in kinds):
        return None
    values = np.array([list(row) for row in there])
    if not bool(((values == 0) | (values == 1)).all()):
        return None
    if values.dtype.kind in "iu":
        # No label is twice in a set, and an indicator has as many columns as there are names.
        repeats = length > 2 or bool((values[:, 0] == values[:, 1]).any())
        fits = class_names is None or len(class_names) == length
        if not repeats and not fits:
            return None
        if not repeats or not fits:
            raise InputError(
                f"lists such as {values[0].tolist()} are labels or an indicator"
                + ("" if class_names is None else f" of {len(class_names)} names")
                + "; give an indicator as np.array(labels), with a column for each name, and "
                "labels by their names, or as sets"
            )
    indicator = np.zeros((len(rows), length), np.bool_)
    indicator[[len(row) > 0 for row in rows]] = values.astype(np.bool_)
    return indicator


def _lists_of(labels: Any) -> list[Any] | None:
    """Return the rows of a list or column of lists or sets, a missing one empty; else None."""
    if (columns := columns_of(labels)) is not None:
        found = zip(columns[0].values, columns[0].missing, strict=True)
        rows = [() if gone else row for row, gone in found] if len(columns) == 1 else []
    elif isinstance(labels, list | tuple) or getattr(labels, "dtype", None) == np.dtype(object):
        rows = [() if row is None else row for row in labels]
    else:
        return None
    kinds = (list, tuple, set, frozenset, np.ndarray)
    several = all(isinstance(row, kinds) and getattr(row, "ndim", 1) == 1 for row in rows)
    return rows if several and any(map(len, rows)) else None


def _of_lists(
    rows: Sequence[list[Any]], class_names: Sequence[str] | None
) -> tuple[NDArray[np.bool_], tuple[str, ...]] | None:
    flat = [entry for row in rows for entry in row]
    if any(isinstance(entry, float | np.floating) for entry in flat):
        # These are numbers.
        return None
    if class_names is None:
        gaps = np.array([None in row for row in rows])
        if gaps.any():
            raise InputError(f"labels in lists are missing, {rows_shown(gaps)}; {HOW_TO_DROP}")
        numbered = (int, np.integer)
        below = np.array([any(isinstance(e, numbered) and e < 0 for e in row) for row in rows])
        if below.any():
            first = min(entry for entry in rows[int(below.argmax())] if isinstance(entry, numbered))
            raise InputError(
                f"labels in lists must not be below 0, got {first} {rows_shown(below)}; leave out "
                "numbers that fill short lists up, or give labels as text"
            )
        indices, names = encode_labels(flat)
    else:
        indices, names = np.asarray(flat), tuple(map(str, class_names))
        _check_indices(rows, len(names))
    indicator = np.zeros((len(rows), len(names)), np.bool_)
    indicator[np.repeat(np.arange(len(rows)), list(map(len, rows))), indices] = True
    return indicator, names


def _check_indices(rows: Sequence[list[Any]], count: int) -> None:
    for row, labels in enumerate(rows):
        for label in labels:
            integer = isinstance(label, int | np.integer) and not isinstance(label, bool)
            if not integer or not 0 <= label < count:
                raise InputError(
                    f"labels in lists must be indices of {count} names, from 0, got "
                    f"{shown(label)} at row {row}; leave out numbers that fill short lists up"
                )


def split_text(column: Any, separator: str) -> list[list[str]]:
    """Split the texts of a column into labels; missing and empty texts have none."""
    found = columns_of(column)
    assert found is not None
    texts = [
        "" if gone else str(text)
        for text, gone in zip(found[0].values, found[0].missing, strict=True)
    ]
    return [[part.strip() for part in text.split(separator) if part.strip()] for text in texts]
