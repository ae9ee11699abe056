"""Labels of other kinds: several for a row, and numbers; how both are read and held.

Rows with several labels are rows of one class each, the class of all rows with the same labels:
`LabelSets` says which of the V labels are in each of the S distinct sets. So all that follows
classes, such as draws, layouts and files, follows sets. Numbers are float64 targets (n, q).

`samples` and `data.dataset` call `encode_rows`, `data.arrays` `split_text`; `labels.classes` and
`operators.label_costs` read the shares of a set.

A change must keep sets in an order that their members alone decide, as fingerprints hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.raw_labels import (
    columns_of,
    encode_labels,
    missing_labels,
    names_of_columns,
    raw_values,
    rows_shown,
)

# Between the labels of a set, in its name.
AND = "+"

HOW_TO_DROP = "leave those rows out of features and labels, or label them"


@dataclass(frozen=True, eq=False)
class LabelSets:
    """The distinct sets of labels of some rows.

    Attributes:
        names: of the V labels.
        members: (S, V) bool on the CPU, which labels each set has; at least one.
    """

    names: tuple[str, ...]
    members: Tensor

    @property
    def set_names(self) -> tuple[str, ...]:
        """A name of each set, its labels side by side."""
        return tuple(
            AND.join(self.names[label] for label in row.nonzero().squeeze(1).tolist())
            for row in self.members
        )

    @property
    def rows(self) -> list[list[int]]:
        """The members as lists of 0 and 1."""
        return list(self.members.int().tolist())

    @property
    def shares(self) -> Tensor:
        """The part that each label is of a set, (S, V) float64; rows sum to 1."""
        counts = self.members.double()
        return counts / counts.sum(1, keepdim=True)

    def take(self, sets: Sequence[int] | Tensor | NDArray[Any]) -> LabelSets:
        """Return some of the sets, with all labels."""
        return LabelSets(self.names, self.members[torch.as_tensor(sets)])

    def equals(self, other: LabelSets | None) -> bool:
        """Return whether both have the same labels and sets."""
        return (
            other is not None
            and self.names == other.names
            and torch.equal(self.members, other.members)
        )


def named_sets(members: Tensor | None, names: Sequence[str]) -> dict[str, Any]:
    """Return `class_names` and `label_sets` of samples, from stored members of sets, or None."""
    if members is None:
        return {"class_names": tuple(names), "label_sets": None}
    sets = LabelSets(tuple(names), members.bool())
    return {"class_names": sets.set_names, "label_sets": sets}


def sets_of(
    indicator: NDArray[np.bool_], names: Sequence[str]
) -> tuple[NDArray[np.int64], LabelSets]:
    """Return the index of each row's set (n,), and the distinct sets of an indicator (n, V).

    Sets without the first label come first, and so on. Every row must have a label.
    """
    packed, first, indices = np.unique(
        np.packbits(indicator, axis=1), axis=0, return_index=True, return_inverse=True
    )
    members = torch.from_numpy(np.ascontiguousarray(indicator[first], dtype=np.bool_))
    assert len(packed) == len(members)
    return indices.reshape(-1).astype(np.int64), LabelSets(tuple(names), members)


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
        """Return the sets of an indicator (n, V).

        Raises:
            InputError: a row has no label; the message names it.
        """
        without = np.asarray(~indicator.any(1))
        if count := int(without.sum()):
            raise InputError(
                f"{count} {'row has' if count == 1 else 'rows have'} no label, "
                f"{rows_shown(without)}; {HOW_TO_DROP}"
            )
        labels, sets = sets_of(indicator, names)
        return cls(labels, sets.set_names, sets)


def encode_rows(labels: Any) -> Encoded:
    """Read raw labels: of classes as `encode_labels`, several for a row, or numbers.

    Raises:
        InputError: they are none of these, some are missing, or a row has no label.
    """
    if (several := several_of(labels)) is not None:
        return Encoded.of_indicator(*several)
    values = raw_values(labels)
    if (targets := numbers_of(values)) is not None:
        return Encoded(None, (), targets=targets)
    return Encoded(*encode_labels(labels))


def numbers_of(values: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return raw floats (n,) with fractions, or any (n, q), as numbers (n, q); else None.

    Rows of probabilities are no numbers. Missing values are for the caller to refuse.
    """
    if values.dtype.kind != "f" or values.ndim not in (1, 2) or missing_labels(values).any():
        return None
    whole = values.ndim == 1 and bool((values == np.floor(values)).all())
    if whole or not np.isfinite(values).all() or values.shape[1:] == (0,):
        return None
    found = values.astype(np.float64).reshape(len(values), -1)
    shares = found.shape[1] > 1 and bool((found >= 0).all())
    return None if shares and np.allclose(found.sum(1), 1, 0, 1e-3) else found


def several_of(
    labels: Any, class_names: Sequence[str] | None = None
) -> tuple[NDArray[np.bool_], tuple[str, ...]] | None:
    """Return the indicator (n, V) and the names of the labels if rows can have several; else None.

    Args:
        labels: an indicator, a list or column of lists or sets, or anything else.
        class_names: names of labels that are indices; None: labels are told apart by their values.

    Raises:
        InputError: labels in lists are missing, of mixed types or beyond the names.
    """
    rows, names = _lists_of(labels), class_names
    if rows is None:
        if getattr(labels, "ndim", 2) != 2 or isinstance(labels, list | tuple):
            return None
        values = raw_values(labels)
        columns = names_of_columns(labels)
        names = columns if columns and values.shape[1:] == (len(columns),) else names
    else:
        # Indices of names are no indicator.
        plain = class_names is None and all(
            not isinstance(row, set | frozenset) and len(row) > 1 for row in rows
        )
        values = np.empty(0)
        if plain and len({len(row) for row in rows}) == 1:
            values = raw_values([list(row) for row in rows])
    wide = values.ndim == 2 and values.shape[1] > 1 and values.dtype.kind in "iubf"
    # Rows of 0 and 1 are an indicator, also in lists: labels 0 and 1 come as sets.
    if wide and bool(((values == 0) | (values == 1)).all()):
        if names is None or len(names) != values.shape[1]:
            names = list(map(str, range(values.shape[1])))
        return values.astype(np.bool_), tuple(map(str, names))
    # Lists of floats are numbers.
    numbers = wide and values.dtype.kind == "f"
    return None if rows is None or numbers else _of_lists(rows, class_names)


def _lists_of(labels: Any) -> list[Any] | None:
    """Return the rows of a list or column of lists or sets, a missing one empty; else None."""
    if isinstance(labels, Tensor):
        return None
    columns = columns_of(labels)
    if columns is not None:
        if len(columns) > 1 or columns[0].values.ndim > 2:
            return None
        (column,) = columns
        values: Any = [
            () if gone else row for row, gone in zip(column.values, column.missing, strict=True)
        ]
    elif isinstance(labels, list | tuple) or getattr(labels, "dtype", None) == np.dtype(object):
        values = list(labels)
    else:
        return None
    kinds = (list, tuple, set, frozenset, np.ndarray)
    rows = [() if row is None else row for row in values]
    several = [isinstance(row, kinds) and getattr(row, "ndim", 1) == 1 for row in rows]
    return rows if several and all(several) and any(map(len, rows)) else None


def _of_lists(
    rows: Sequence[Any], class_names: Sequence[str] | None
) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    each = [list(row) for row in rows]
    flat = [entry for row in each for entry in row]
    if class_names is None:
        indices, names = encode_labels(flat)
    else:
        names = tuple(map(str, class_names))
        indices = np.asarray(flat)
        if indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= len(names):
            raise InputError(f"labels in lists must be indices of {len(names)} names")
    indicator = np.zeros((len(each), len(names)), np.bool_)
    indicator[np.repeat(np.arange(len(each)), list(map(len, each))), indices] = True
    return indicator, names


def split_text(column: Any, separator: str) -> list[list[str]]:
    """Split the texts of a column into labels; missing and empty texts have none."""
    found = columns_of(column)
    assert found is not None
    texts = [
        "" if gone else str(text)
        for text, gone in zip(found[0].values, found[0].missing, strict=True)
    ]
    return [[part.strip() for part in text.split(separator) if part.strip()] for text in texts]
