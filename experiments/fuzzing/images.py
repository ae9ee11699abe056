"""Images of every mode of PIL in files of every kind, read by several readers.

They give the same numbers in [0, 1], or all refuse the file.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image

import otdd_flash as otdd
from experiments.fuzzing.verdict import Attempt

# What the datasets library reads too, and PIL writes.
ENDS = (
    "png", "apng", "jpg", "jfif", "tif", "bmp", "gif", "webp", "jp2", "pbm", "pgm", "ppm", "pcx",
    "tga", "sgi", "ico", "icns", "dds", "dib",
)  # fmt: skip
READERS = ("image_folder", "huggingface", "saved", "DatasetFolder")
DAMAGES = ("none", "none", "none", "cut", "flipped", "frames")


def image(random: np.random.Generator, folder: Path) -> Attempt:
    """One image in a file, maybe damaged, by two readers."""
    mode, end = _pick(random, Image.MODES), _pick(random, ENDS)
    orientation, damage = int(random.integers(1, 9)), _pick(random, DAMAGES)
    readers = ("image_folder", _pick(random, READERS[1:]))
    what = f"{mode} as {end}, orientation {orientation}, {damage}, {' and '.join(readers)}"
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / "data" / "a" / f"0.{end}"
    path.parent.mkdir(parents=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _write(path, mode, orientation, damage, random)
    except (OSError, ValueError, KeyError, RuntimeError):
        # PIL does not write every mode in every format.
        return image(random, folder)
    found = [_read(reader, path) for reader in readers]
    for reader, one in zip(readers, found, strict=True):
        if isinstance(one, str) and not one.startswith("refused"):
            return Attempt("image", what, "raised", f"{reader}: {one}")
    one, other = found
    if isinstance(one, str) or isinstance(other, str):
        alike = isinstance(one, str) and isinstance(other, str)
        return Attempt("image", what, "refused", None if alike else f"by one alone: {found}"[:300])
    outside = bool((one < 0).any() or (one > 1).any() or one.isnan().any())
    if outside or not torch.equal(one, other):
        return Attempt("image", what, "other numbers", f"{readers[1]} has others than {readers[0]}")
    return Attempt("image", what, "done")


def _write(
    path: Path, mode: str, orientation: int, damage: str, random: np.random.Generator
) -> None:
    height, width = (int(side) for side in random.integers(1, 20, 2))
    if mode.startswith("I;16"):
        bytes_ = random.integers(0, 65536, (height, width)).astype("<u2").tobytes()
        drawn = Image.frombytes(mode, (width, height), bytes_)
    elif mode in ("I", "F"):
        scale = _pick(random, (0.5, 1, 255, 1e6))
        values = random.random((height, width)) * float(scale)
        drawn = Image.fromarray(values.astype(np.int32 if mode == "I" else np.float32))
    else:
        bands = Image.getmodebands(mode)
        levels = random.integers(0, 256, (height, width, bands), dtype=np.uint8)
        drawn = Image.new(mode, (width, height))
        drawn.frombytes(levels.tobytes()[: len(drawn.tobytes())])
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"exif": exif} if path.suffix in (".png", ".jpg", ".tif") else {}
    if damage == "frames":
        options |= {
            "save_all": True,
            "append_images": [drawn.transpose(Image.Transpose.ROTATE_180)],
        }
    drawn.save(path, **options)
    content = bytearray(path.read_bytes())
    place = int(random.integers(len(content)))
    if damage == "cut":
        del content[place:]
    elif damage == "flipped":
        content[place] ^= 1 << int(random.integers(8))
    path.write_bytes(content)


def _read(reader: str, path: Path) -> torch.Tensor | str:
    """Features, or why there are none."""
    root = path.parents[1]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            match reader:
                case "saved":
                    table = datasets.Dataset.from_dict({"image": [str(path)], "label": [0]})
                    saved = root.with_name("saved")
                    table.cast_column("image", datasets.Image()).save_to_disk(saved)
                    data = otdd.load("huggingface", path=str(saved))
                case "DatasetFolder":
                    arguments = {"root": str(root), "extensions": [path.suffix]}
                    data = otdd.load("torchvision", dataset=reader, arguments=arguments)
                case _:
                    data = otdd.load(reader, path=str(root))
            return otdd.embed(data, otdd.extractors.pixels()).features
    except otdd.InputError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def _pick(random: np.random.Generator, choices: Any) -> Any:
    return choices[int(random.integers(len(choices)))]
