"""Raw images in whatever form a dataset holds them, brought to one form.

A raw image is a PIL image, or an array (h, w) or (h, w, c) with 1 to 4 channels: uint8, or float in
[0, 1]. Transparency is dropped, palettes are resolved, 16-bit images keep their depth.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from otdd_flash.errors import InputError


def unit_images(values: np.ndarray[Any, Any]) -> Tensor:
    """Images (b, h, w) or (b, h, w, c) as float32 (b, 1 or 3, h, w) with values in [0, 1].

    Raises:
        InputError: the shape or the type is not that of images, or floats lie outside [0, 1].
    """
    if values.ndim == 3:
        values = values[..., None]
    if values.ndim != 4 or not 1 <= values.shape[3] <= 4:
        raise InputError(
            f"images must be (h, w) or (h, w, c) with 1 to 4 channels, got {values.shape[1:]}; "
            "put channels last"
        )
    values = values[..., : 1 if values.shape[3] < 3 else 3]
    pixels = torch.from_numpy(np.array(values, dtype=np.float32)) / _full_scale(values)
    return pixels.permute(0, 3, 1, 2)


def image_array(item: Any) -> np.ndarray[Any, Any]:
    """One raw image as an array (h, w) or (h, w, c)."""
    if not isinstance(item, Image.Image):
        return np.asarray(item)
    match item.mode:
        case "L" | "RGB" | "F":
            return np.asarray(item)
        case "I" | "I;16" | "I;16L" | "I;16B" | "I;16N":
            return _sixteen_bit(np.asarray(item))
        case "1" | "LA":
            return np.asarray(item.convert("L"))
        case _:
            return np.asarray(item.convert("RGB"))


def rgb_image(item: Any) -> Image.Image:
    """One raw image as an 8-bit RGB PIL image; grey values are repeated in the three channels."""
    if isinstance(item, Image.Image) and not item.mode.startswith(("I", "F")):
        return item.convert("RGB")
    image = unit_images(image_array(item)[None])[0]
    levels = (image.expand(3, -1, -1).permute(1, 2, 0) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.numpy())


def _sixteen_bit(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # Some versions of PIL open a 16-bit file as 32-bit integers.
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise InputError(f"images must be at most 16 bits deep, got {low} to {high}; rescale them")
    return values.astype(np.uint16)


def _full_scale(values: np.ndarray[Any, Any]) -> float:
    """The value that stands for white."""
    match values.dtype:
        case np.uint8:
            return 255.0
        case np.uint16:
            return 65535.0
        case np.bool_:
            return 1.0
    if values.dtype.kind != "f":
        raise InputError(f"images must be uint8, or float in [0, 1], got {values.dtype}")
    low, high = float(values.min()), float(values.max())
    # NaN fails this test too.
    if not (low >= 0 and high <= 1):
        raise InputError(f"float images must lie in [0, 1], got {low:g} to {high:g}; rescale them")
    return 1.0
