"""The check that both sides live in one feature space."""

from __future__ import annotations

from math import isqrt

from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples


def check_same_dimension(source: LabeledSamples, target: LabeledSamples) -> None:
    """Raise an `InputError` that names the ways out unless both feature dimensions agree."""
    if source.dim == target.dim:
        return
    raise InputError(
        f"{source.name} has {source.dim} features and {target.name} has {target.dim}, but both "
        f"must have the same number; images: extractor=pixels {_pixel_settings(source, target)}, "
        "or the same network for both (extractor=timm or torchvision); text: one extractor.model "
        "for both; tables: the same columns. extractor.pca cannot help, as it is fitted on both "
        "sides together"
    )


def _pixel_settings(source: LabeledSamples, target: LabeledSamples) -> str:
    """What makes pixels comparable; concrete if both dimensions can be those of square images."""
    sides = [_image_sides(source.dim), _image_sides(target.dim)]
    known = [side for side in sides if side is not None]
    if len(known) < len(sides):
        return "extractor.size=N"
    size = max(side for side, _ in known)
    one_kind = len({colour for _, colour in known}) == 1
    return f"extractor.size={size}" + ("" if one_kind else " extractor.grayscale=true")


def _image_sides(d: int) -> tuple[int, bool] | None:
    """Side and colour of the square image with d values, if there is one."""
    if isqrt(d) ** 2 == d:
        return isqrt(d), False
    if d % 3 == 0 and isqrt(d // 3) ** 2 == d // 3:
        return isqrt(d // 3), True
    return None
