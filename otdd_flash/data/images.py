"""Images from files and from memory, converted to four PIL modes and to arrays.

Readers open files with `open_image` and extractors decode with `image_array`, so a folder gives the
same numbers through `image_folder`, torchvision or Hugging Face: turned upright by EXIF, in the
depth of the file, palettes resolved, transparency laid on white. A raw input is what a dataset
holds: a PIL image, an array or a tensor. `plain_image` brings a PIL image to one of the four modes
L, RGB, I;16 and F; `unit_images` scales by the range of the type to float32 in [0, 1].

    mode of PIL                                               becomes   white becomes
    1, L, LA, La                                              L         255
    P, PA, RGB, RGBA, RGBa, RGBX, CMYK, YCbCr, HSV, LAB       RGB       255
    I;16, I;16L, I;16B, I;16N; I from a PNG or PPM file       I;16      65535
    F, with values in [0, 1]                                  F         1

Other 32-bit integers are refused, as none of their values is white by agreement; so are several
frames, of which one would have to be chosen, but in the formats of `FIRST_IS_PICTURE`. PIL reads
several channels of 16 bits in 8 bits, which a notice reports. Colour profiles are not applied. An
array has the shape (h, w) or (h, w, c): uint8, uint16, bool or float in [0, 1], with alpha as the
last of 2 or 4 channels. A tensor has the shape (h, w) or (c, h, w), as torchvision makes them.

`data.given`, `data.hugging_face`, `data.image_datasets`, `extractors.embedding`,
`extractors.network`, `extractors.plain` and `extractors.vision_models` call it. A change of what an
image decodes to must raise DECODING, or features of the old decoding are taken from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

from otdd_flash.data.dataset import reading
from otdd_flash.errors import DataNotice, InputError, placed, warn

# Part of the key of cached features: a change of what an image decodes to must raise it. Another
# entry in NO_PICTURES or FIRST_IS_PICTURE need not: it only refuses or admits files.
DECODING = 2
# Formats that PIL renders with another program, or that hold measurements instead of a picture.
NO_PICTURES = ("EPS", "WMF", "FITS", "BUFR", "GRIB", "HDF5", "MPEG")
# Formats whose first frame is the picture; other frames are layers, sizes or previews.
FIRST_IS_PICTURE = ("MPO", "PSD", "ICO", "ICNS")
# Formats whose mode PIL knows from the header, without decoding the pixels.
MODE_IN_HEADER = ("PNG", "JPEG", "MPO", "TIFF", "BMP", "PPM", "WEBP")
TRANSPARENT_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
# Modes of 8 bits or fewer without transparency of their own.
EIGHT_BIT_MODES = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
# The value of white by type: u1 is uint8, u2 uint16, b1 bool.
WHITE = {"u1": 255.0, "u2": 65535.0, "b1": 1.0}
# Modes without colour; `I`, which is refused in most formats, is here for `any_colour`.
GREY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N", "F")


def extensions() -> tuple[str, ...]:
    """Return the file name endings of images, in lower case and with the dot."""
    known = Image.registered_extensions()
    return tuple(
        sorted(end for end, form in known.items() if form in Image.OPEN and form not in NO_PICTURES)
    )


def open_image(source: str | Path | bytes, where: str | Path | None = None) -> Image.Image:
    """Open an image file as one of the modes L, RGB, I;16 and F.

    Args:
        source: its path, or its content.
        where: its name in messages; None takes the path.

    Raises:
        InputError: it is unreadable, or its pixels cannot be used (see `plain_image`).
    """
    place = str(where or ("an image in memory" if isinstance(source, bytes) else source))
    # `reading` turns any error of PIL's into an `InputError`; `placed` puts the place before its
    # sentence.
    with reading(Path(place)):
        try:
            # The file is opened as a stream: if PIL opens it by its name, it may map it into
            # memory, and then swaps the sides of a TIFF that is to be turned.
            with (
                BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file,
                Image.open(file) as opened,
                placed(place),
            ):
                return plain_image(opened)
        except UnidentifiedImageError as error:
            raise InputError(
                f"cannot read {place}: it is damaged, empty or no image; leave it out"
            ) from error


def plain_item(item: Any, place: str) -> Any:
    """Convert a raw input that is a PIL image by `plain_image`; return other inputs unchanged.

    Raises:
        InputError: as for `plain_image`, with the place, such as its row.
    """
    if not isinstance(item, Image.Image):
        return item
    with reading(Path(place)), placed(place):
        return plain_image(item)


def plain_image(image: Image.Image) -> Image.Image:
    """Return an image upright and in one of the modes L, RGB, I;16 and F; see the table above.

    Raises:
        InputError: it has several frames or no pixels, its content vanishes on white, floats are
            outside [0, 1], or its mode has no value that is white by agreement.
    """
    kind = image.format
    if kind in NO_PICTURES:
        raise InputError(f"{kind} files hold no picture of pixels; save it as PNG")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and kind not in FIRST_IS_PICTURE:
        raise InputError(
            f"it has {frames} frames; save the one that is meant as an image by itself"
        )
    if 0 in image.size:
        raise InputError(f"an image of {image.width} x {image.height} has no pixels; leave it out")
    # Several channels of 16 bits: the decoder's arguments name them, the mode does not.
    if not image.mode.startswith("I") and ";16" in str(getattr(image, "tile", "")):
        warn("PIL reads images with several channels of 16 bits in 8 bits", DataNotice)
    image.load()
    # PIL puts the bits of a 12-bit TIFF into the low ones of 16; only tag 258 (BitsPerSample) tells
    # such a file.
    levels = 4095 if kind == "TIFF" and getattr(image, "tag_v2", {}).get(258) == (12,) else 65535
    deep = image.mode.startswith("I;16") or (image.mode == "I" and kind in ("PNG", "PPM"))
    # A turned image has lost its format, so `levels` and `deep` are found before.
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    mode = image.mode
    if deep:
        return _sixteen_bit(image, levels)
    if mode == "F":
        # `_full_scale` is called for its error, on floats outside [0, 1].
        _full_scale(np.asarray(image))
        return image
    if mode in TRANSPARENT_MODES or (mode in EIGHT_BIT_MODES and image.has_transparency_data):
        return _without_alpha(image)
    if mode == "LAB":
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        shown = ImageCms.applyTransform(image, ImageCms.buildTransform(*profiles, "LAB", "RGB"))
        assert shown is not None
        return shown
    if mode in EIGHT_BIT_MODES:
        plain = "L" if mode in GREY_MODES else "RGB"
        return image if mode == plain else image.convert(plain)
    what = "32-bit integers have" if mode == "I" else f"PIL's mode {mode} has"
    raise InputError(
        f"{what} no value that is white by agreement; save it with 16 bits or as floats in [0, 1]"
    )


def _sixteen_bit(image: Image.Image, white: int) -> Image.Image:
    # `key` is the one grey value that a PNG file declares transparent.
    values, key = np.asarray(image), image.info.get("transparency")
    if image.mode == "I;16" and white == 65535 and key is None:
        return image
    values = np.rint(values * (65535 / white)).astype(np.uint16)
    if key is not None:
        alpha = np.where(np.asarray(image) == key, 0, 65535).astype(np.uint16)
        values = _on_white(np.stack([values, alpha], 2))[..., 0]
    return Image.fromarray(values)


def _without_alpha(image: Image.Image) -> Image.Image:
    if image.mode in GREY_MODES:
        return Image.fromarray(_on_white(np.asarray(image.convert("LA")))[..., 0])
    return Image.fromarray(_on_white(np.asarray(image.convert("RGBA"))))


def image_array(item: Any) -> NDArray[Any]:
    """Return a raw image as an array (h, w) or (h, w, c), of which `unit_images` takes a batch.

    Raises:
        InputError: as for `plain_image`.
    """
    if isinstance(item, Tensor):
        # NumPy has no bfloat16.
        item = item.float() if item.dtype == torch.bfloat16 else item
        return np.asarray((item.movedim(0, -1) if item.ndim == 3 else item).numpy())
    return np.asarray(plain_image(item) if isinstance(item, Image.Image) else item)


def unit_images(values: NDArray[Any]) -> Tensor:
    """Scale images (b, h, w) or (b, h, w, c) to float32 (b, 1 or 3, h, w) in [0, 1].

    Raises:
        InputError: the shape or type is not that of images, floats are outside [0, 1], or the
            content of an image vanishes on white.
    """
    if values.ndim == 3:
        values = values[..., None]
    if values.ndim != 4 or not 1 <= values.shape[3] <= 4:
        raise InputError(
            f"images must be (h, w) or (h, w, c) with 1 to 4 channels, got {values.shape[1:]}; "
            "put channels last"
        )
    scale = _full_scale(values)
    if values.shape[3] in (2, 4):
        values = np.stack([_on_white(image) for image in values])
    pixels = torch.from_numpy(np.array(values, dtype=np.float32)) / scale
    return pixels.permute(0, 3, 1, 2)


def rgb_image(item: Any) -> Image.Image:
    """Return a raw image as an 8-bit RGB image of PIL, grey values in all three channels.

    Raises:
        InputError: as for `plain_image` and `unit_images`.
    """
    if isinstance(item, Image.Image):
        item = plain = plain_image(item)
        if plain.mode in ("L", "RGB"):
            return plain.convert("RGB")
    image = unit_images(image_array(item)[None])[0]
    levels = (image.expand(3, -1, -1).permute(1, 2, 0) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.numpy())


def any_colour(inputs: Sequence[Any]) -> bool:
    """Return whether any of these images has colour, reading only as far as needed.

    Of files only the headers are read, where the format allows it.
    """
    # Images that are read on demand (`data.dataset.LazyItems`) know their files.
    paths: list[str] | None = getattr(inputs, "paths", None)
    if paths is not None:
        return any(_file_has_colour(path) for path in paths)
    arrays = (image_array(plain_item(inputs[row], f"row {row}")) for row in range(len(inputs)))
    # Two channels are grey and alpha.
    return any(array.ndim == 3 and array.shape[2] > 2 for array in arrays)


def _file_has_colour(path: str) -> bool:
    # An unreadable file is reported later, when its pixels are read.
    with suppress(Exception), Image.open(path) as image:
        if image.format not in MODE_IN_HEADER:
            image.load()
        return image.mode not in GREY_MODES
    return False


def _on_white(values: NDArray[Any]) -> NDArray[Any]:
    """Lay an image (h, w, c + 1), whose last channel is alpha, on white: (h, w, c).

    Raises:
        InputError: only alpha had any content, as in a white drawing.
    """
    white = _full_scale(values)
    colour, alpha = values[..., :-1], values[..., -1:]
    if alpha.min() == white:
        return colour
    laid = white - (white - colour.astype(np.float64)) * (alpha / white)
    # The result is one colour all over, although alpha varies.
    if laid.min() == laid.max() and alpha.min() < alpha.max():
        raise InputError(
            "it is drawn in white on a transparent ground, so that nothing is seen of it on white; "
            "lay it on another colour and save it without transparency"
        )
    warn("images with transparency are laid on white", DataNotice)
    return (laid if values.dtype.kind == "f" else np.rint(laid)).astype(values.dtype)


def _full_scale(values: NDArray[Any]) -> float:
    """Return the value that stands for white.

    Raises:
        InputError: there is none, or floats are outside [0, 1].
    """
    # The type without its first character, which is the byte order.
    if (white := WHITE.get(values.dtype.str[1:])) is not None:
        return white
    if values.dtype.kind != "f":
        raise InputError(
            f"images must be uint8, uint16, or float in [0, 1], got {values.dtype}; convert them"
        )
    low, high = float(values.min()), float(values.max())
    # NaN fails this test too.
    if not (low >= 0 and high <= 1):
        raise InputError(
            f"float images must lie in [0, 1], got {low:g} to {high:g}; rescale them, or leave the "
            "Normalize of a transform out"
        )
    return 1.0
