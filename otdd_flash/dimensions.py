"""The check that two datasets have equally many features, and common names at the same positions.

`operators.comparison`, `labels.classes`, `sliced.distances` and `extractors.linear_maps` call it.
Its error suggests settings of the extractor that make the dimensions equal, so a renamed setting
must be renamed here.
"""

from __future__ import annotations

from math import isqrt

from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import display


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
        "sides together"
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
