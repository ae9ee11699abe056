"""Which columns of a Hugging Face table are inputs, labels and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from otdd_flash.data.dataset import Modality
from otdd_flash.data.request import chosen
from otdd_flash.data.table import find_label, find_weights, listed
from otdd_flash.errors import InputError
from otdd_flash.shown import listing

Kind = Literal["image", "text", "number", "class", "other"]


@dataclass(frozen=True)
class Columns:
    """The columns taken: several `inputs` only where they are numbers; and what was chosen."""

    inputs: tuple[str, ...]
    label: str | None
    weights: str | None
    modality: Modality
    choices: tuple[str, ...]


def choose_columns(
    features: Mapping[str, Any],
    inputs: str | Sequence[str] | None,
    label: str | None,
    weights: str | None,
    where: str,
) -> Columns:
    """Find the columns by their types, or check the ones that the user named.

    Without names: the label is the only ClassLabel, else the column with a usual name; the input is
    the only image column, else the only text column, else all numbers, if just one of these holds.

    Raises:
        InputError: no such column, or no single reading is possible; the message lists the columns.

    Warns:
        DataNotice: which columns were taken, where they are not named.
    """
    kinds = {column: _kind(feature) for column, feature in features.items()}
    named = [inputs] if isinstance(inputs, str) else list(inputs or ())
    for column in [*named, *([label] if label else [])]:
        if column not in kinds:
            raise InputError(f"{where} has no column {column!r}; {listed(tuple(kinds))}")
    weight_column = find_weights(tuple(kinds), weights, where)
    free = [column for column in kinds if column != weight_column and column not in named]
    choices = []
    if label is None:
        classes = [column for column in free if kinds[column] == "class"]
        label, why = find_label(classes or free, classes, where, kind="class labels")
        if label is not None:
            choices.append(f"labels are its column {label!r}, {why}")
    taken = named or _find_inputs({c: kinds[c] for c in free if c != label}, where)
    if not named:
        others = "column" if len(taken) == 1 else f"{len(taken)} columns"
        choices.append(f"inputs are its {others} of kind {kinds[taken[0]]}: {listing(taken, 10)}")
    return Columns(
        tuple(taken),
        label,
        weight_column,
        _modality(taken, kinds, where),
        chosen(where, choices, "label=COLUMN and input=COLUMN"),
    )


def _find_inputs(kinds: Mapping[str, Kind], where: str) -> list[str]:
    by_kind = {
        kind: [column for column in kinds if kinds[column] == kind]
        for kind in ("image", "text", "number")
    }
    if len(by_kind["image"]) == 1:
        return by_kind["image"]
    readings = [columns for columns in by_kind.values() if columns]
    if len(readings) == 1 and (by_kind["number"] or len(readings[0]) == 1):
        return readings[0]
    raise InputError(
        f"{where}: cannot tell which column is the input; choose with input=COLUMN; "
        f"{listed(tuple(kinds))}"
    )


def _modality(inputs: Sequence[str], kinds: Mapping[str, Kind], where: str) -> Modality:
    found = {kinds[column] for column in inputs}
    if found == {"number"}:
        return "array"
    if len(inputs) == 1 and found == {"image"}:
        return "image"
    if len(inputs) == 1 and found == {"text"}:
        return "text"
    described = ", ".join(f"{column} ({kinds[column]})" for column in inputs)
    raise InputError(
        f"{where}: the input must be one image column, one text column or columns of numbers, "
        f"got {described}"
    )


def _kind(feature: Any) -> Kind:
    """What a column of this feature type holds; nested lists count as their innermost values."""
    import datasets

    if isinstance(feature, datasets.ClassLabel):
        return "class"
    if isinstance(feature, datasets.Image):
        return "image"
    nested = getattr(feature, "feature", None)
    if nested is not None:
        return "number" if _kind(nested) == "number" else "other"
    dtype = str(getattr(feature, "dtype", ""))
    if isinstance(feature, datasets.Value) and "string" in dtype:
        return "text"
    return "number" if dtype.startswith(("int", "uint", "float", "bool", "decimal")) else "other"
