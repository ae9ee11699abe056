"""Image datasets on disk: classes of torchvision.datasets, MNIST, USPS, IDX files; image folders.

`data.registry` calls the readers: `read_torchvision`, `read_mnist`, `read_fashion_mnist`,
`read_usps`, `read_idx_pair` for the source `idx`, the format of MNIST, gzipped or not, and
`read_image_folder` for folders of images with one subfolder per class. `data.given` uses
`known_labels` and `stored_images` for torchvision datasets that a user holds. torchvision takes
long to import, so it is imported in the functions that use it.

A change must respect that reading runs no code found in files (UNPICKLING) and opens no network
connection without `download`, because files may come from others. Images of folders, and those that
a torchvision class does not itself hold in memory, are not kept, since they may exceed it: items
are read on access. An IDX file whose length differs from its header is refused, because it is
damaged; its array is returned in native byte order, which torch requires.

The order of rows of a folder (classes, folders and files by name) must stay, because draws and the
hash of a subset depend on it. Each file counts once in its class. Links are followed deliberately,
as datasets are often linked from a store; notices report what is linked or left out.
"""

from __future__ import annotations

import gzip
import inspect
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.arguments import Word
from otdd_flash.data.dataset import (
    CHANNELS,
    LabeledDataset,
    LazyItems,
    Request,
    as_inputs,
    concatenate,
    reading,
)
from otdd_flash.data.images import extensions, open_image, plain_item
from otdd_flash.errors import DataNotice, InputError, choose, warn
from otdd_flash.offline import network

# Classes that unpickle any file. CIFAR10 and CIFAR100 unpickle too, but compare MD5 sums first.
UNPICKLING = ("LSUN", "LSUNClass")

# The base class, which has no items.
ABSTRACT = "VisionDataset"


def read_torchvision(
    request: Request, *, dataset: Word | None = None, arguments: Mapping[str, Any] | None = None
) -> LabeledDataset:
    """Read one of torchvision's datasets.

    Classes with a `train` argument get it from the split train, test or all. Classes with a `split`
    argument get the split itself, unless `arguments` holds one; for `all`, train and test are
    joined. Other classes have no splits.

    Args:
        request: the shared options.
        dataset: the class name, such as KMNIST, EMNIST, CIFAR10, SVHN, STL10.
        arguments: further constructor arguments, such as {split: letters} for EMNIST.

    Raises:
        InputError: no such class, files missing or damaged, constructor arguments that the class
            refuses, or a class that would run code found in files.
    """
    if not dataset:
        raise InputError("torchvision needs dataset=CLASS, such as dataset=KMNIST")
    return read_class(request, dataset, arguments=arguments)


def read_class(
    request: Request,
    class_name: str,
    *,
    class_names: Sequence[str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> LabeledDataset:
    """Read the requested split of one torchvision class; see `read_torchvision`.

    Args:
        request: the shared options.
        class_name: name in torchvision.datasets.
        class_names: names of the classes; None takes torchvision's.
        arguments: further constructor arguments.

    Raises:
        InputError: as for `read_torchvision`.
    """
    from torchvision import datasets

    if class_name in UNPICKLING:
        raise InputError(
            f"torchvision.datasets.{class_name} unpickles a file that it looks for in the working "
            "directory, which may run any code; export its images to a folder for each class and "
            "read them as image_folder"
        )
    classes = (name for name in datasets.__all__ if inspect.isclass(getattr(datasets, name)))
    known = tuple(name for name in classes if name != ABSTRACT)
    kind = getattr(datasets, choose("torchvision dataset", class_name, known))
    fixed = dict(arguments or {})
    accepted = _accepted(kind)
    choices: list[dict[str, Any]]
    if "train" in accepted and "train" not in fixed:
        choices = [{"train": part == "train"} for part in request.parts()]
    elif "split" in accepted and not fixed.keys() & {"train", "split"}:
        splits = ("train", "test") if request.split == "all" else (request.split,)
        choices = [{"split": split} for split in splits]
    else:
        # The class has no splits, or `arguments` holds one: another `split` is refused.
        request.one_part()
        choices = [{}]
    title = request.title if request.name != "torchvision" else f"{class_name} {request.split}"
    # The user's arguments win over the split.
    parts = [
        _as_dataset(_open(kind, request, {**choice, **fixed}), class_names, title)
        for choice in choices
    ]
    return parts[0] if len(parts) == 1 else concatenate(parts, title)


def _accepted(kind: Any) -> set[str]:
    """Return the names of the constructor's arguments, with those passed on to base classes."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        names.update(p.name for p in parameters)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            # No other arguments are passed on to its base classes.
            break
    return names


def _open(kind: Any, request: Request, arguments: dict[str, Any]) -> Any:
    accepted = _accepted(kind)
    if "download" in arguments:
        raise InputError("arguments={download: ...} of torchvision: set download=true beside it")
    shared: dict[str, Any] = {"root": str(request.root), "download": request.download}
    # torchvision's own loader converts every image to RGB in 8 bits.
    shared["loader"] = open_image
    shared = {key: value for key, value in shared.items() if key in accepted}
    _require_arguments(kind, {**shared, **arguments})
    try:
        with network(allowed=request.download):
            opened = kind(**{**shared, **arguments})
    except Exception as error:
        # Damaged files raise any error. Only these two may mean missing files, where a hint helps.
        hint = _hint(kind, request) if isinstance(error, RuntimeError | OSError) else ""
        raise InputError(
            f"{request.name}: torchvision.datasets.{kind.__name__} cannot read "
            f"{_folder(kind, request.root)}: {error or type(error).__name__}{hint}"
        ) from error
    _refuse_repeated(opened)
    return opened


def _refuse_repeated(opened: Any) -> None:
    """Refuse a folder whose links lead to the same images more than once, or in a circle."""
    from torchvision.datasets import DatasetFolder

    if not isinstance(opened, DatasetFolder):
        return
    real: dict[str, str] = {}
    places: set[tuple[str, str]] = set()
    for path, _ in opened.samples:
        folder, name = os.path.split(path)
        if folder not in real:
            real[folder] = os.path.realpath(folder)
        place = real[folder], name
        if place in places:
            raise InputError(
                f"torchvision.datasets.{type(opened).__name__} reaches {os.path.join(*place)} more "
                "than once, through links to folders; read it as image_folder, which counts each "
                "file once"
            )
        places.add(place)


def _require_arguments(kind: Any, given: Mapping[str, Any]) -> None:
    """Refuse a class with a required argument that was not given, such as EMNIST's split."""
    for name, parameter in inspect.signature(kind).parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and name not in given:
            # Some classes list the values of an argument, as EMNIST those of `split` in `splits`.
            known = getattr(kind, f"{name}s", None)
            among = f", one of: {', '.join(map(str, known))}" if isinstance(known, tuple) else ""
            raise InputError(
                f"torchvision.datasets.{kind.__name__} needs its argument {name}; give "
                f"arguments={{{name}: VALUE}}{among}"
            )


def _folder(kind: Any, root: Path) -> Path:
    # MNIST's subclasses store files below their own names, most others below `base_folder`.
    like_mnist = any(base.__name__ == "MNIST" for base in kind.__mro__)
    inside = f"{kind.__name__}/raw" if like_mnist else getattr(kind, "base_folder", "")
    return root.absolute() / str(inside)


def _hint(kind: Any, request: Request) -> str:
    if request.download:
        return ""
    folder = _folder(kind, request.root)
    if list(folder.glob("*-ubyte.gz")) and not list(folder.glob("*-ubyte")):
        return "; the files there are gzipped: unpack them with gunzip"
    return "; set data_root=DIR to the folder that holds the dataset, or download=true"


def _as_dataset(opened: Any, class_names: Sequence[str] | None, title: str) -> LabeledDataset:
    labels = known_labels(opened)
    if labels is None:
        # Every item is read once, as the dataset stores labels only with its images.
        labels = [int(opened[row][1]) for row in range(len(opened))]
    labels = np.asarray(labels)
    names = class_names if class_names is not None else getattr(opened, "classes", None)
    if names is not None and not all(isinstance(name, str) for name in names):
        names = [str(name) for name in names]
    # With names, even none, `from_raw` takes labels that are all negative for an unlabelled split.
    if names is None and labels.dtype.kind in "iu" and labels.size and labels.max() < 0:
        names = []
    return LabeledDataset.from_raw(
        stored_images(opened), labels, class_names=names, modality="image", name=title
    )


def known_labels(opened: Any) -> Any | None:
    """Return the labels (n,) that a dataset stores beside its items, or None."""
    # torchvision's classes use three names.
    for attribute in ("targets", "labels", "_labels"):
        values = getattr(opened, attribute, None)
        if values is not None and len(values) == len(opened):
            return values
    return None


def stored_images(opened: Any) -> NDArray[Any] | LazyItems:
    """Return the images of a dataset that has no transform: its array, or items read on access."""
    data = getattr(opened, "data", None)
    values = None if data is None or isinstance(data, list) else np.asarray(data)
    if values is None or values.dtype != np.uint8 or len(values) != len(opened):
        # `data` is no array of one uint8 image per item.
        return LazyItems(partial(_image, opened), np.arange(len(opened)))
    if values.ndim == 4 and values.shape[3] not in CHANNELS:
        # Channels come first, as in SVHN and STL10.
        return np.ascontiguousarray(values.transpose(0, 2, 3, 1))
    return values


def _image(opened: Any, row: int) -> Any:
    place = f"row {row} of torchvision.datasets.{type(opened).__name__}"
    with reading(Path(place)):
        return plain_item(opened[row][0], place)


def read_mnist(request: Request) -> LabeledDataset:
    """Read handwritten digits from `root/MNIST/raw` as uint8 images (n, 28, 28)."""
    return read_class(request, "MNIST", class_names=[str(digit) for digit in range(10)])


def read_fashion_mnist(request: Request) -> LabeledDataset:
    """Read clothing from `root/FashionMNIST/raw` as uint8 images (n, 28, 28)."""
    return read_class(request, "FashionMNIST")


# The third byte of the magic number is the element type; all are stored big-endian.
ELEMENT_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx_pair(
    request: Request, *, images: str | Path | None = None, labels: str | Path | None = None
) -> LabeledDataset:
    """Read a pair of IDX files.

    Args:
        request: the shared options.
        images: file of inputs (n, h, w), (n, h, w, c) or (n, d).
        labels: file of labels (n,); None for unlabelled data.

    Raises:
        InputError: a file is missing or damaged, or the lengths disagree.
    """
    request.one_part()
    path = request.locate("images", images)
    targets = None if labels is None else read_idx(request.locate("labels", labels))
    inputs, modality = as_inputs(read_idx(path), str(path))
    return LabeledDataset.from_raw(inputs, targets, modality=modality, name=path.name)


def read_idx(path: Path) -> NDArray[Any]:
    """Read the array in one IDX file, in native byte order.

    Raises:
        InputError: the file is unreadable, not IDX, or shorter or longer than its header says.
    """
    with reading(path):
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return _decode(content, path)


def _decode(content: bytes, path: Path) -> NDArray[Any]:
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in ELEMENT_TYPES:
        raise InputError(f"{path} is not an IDX file: it starts with {content[:4].hex(' ')!r}")
    rank = content[3]
    header = 4 + 4 * rank
    shape = struct.unpack(f">{rank}i", content[4:header])
    dtype = np.dtype(ELEMENT_TYPES[content[2]])
    expected = header + dtype.itemsize * math.prod(shape)
    if len(content) != expected:
        raise InputError(
            f"{path} is damaged: {len(content)} bytes, but its header {shape} needs {expected}"
        )
    values = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


ARCHIVES = {"train": "usps.bz2", "test": "usps.t.bz2"}

STEMS = {"train": "train", "test": "t10k"}


def read_usps(request: Request) -> LabeledDataset:
    """Read USPS, postal digits, as uint8 images (n, 16, 16).

    torchvision reads `root/usps.bz2` (and usps.t.bz2 for the test part) if these files exist.
    Otherwise the IDX files in `root/USPS/raw` are read, gzipped or not.

    Raises:
        InputError: neither exists and downloading is not allowed, or a file is damaged.
    """
    parts = request.parts()
    names = [str(digit) for digit in range(10)]
    archives = all((request.root / ARCHIVES[part]).exists() for part in parts)
    files = [[_idx_file(request, part, kind) for kind in ("images", "labels")] for part in parts]
    missing = [path for pair in files for path in pair if not path.exists()]
    if archives or (request.download and missing):
        return read_class(request, "USPS", class_names=names)
    if missing:
        raise InputError(
            f"{request.name} is not on disk: no {request.root.absolute() / ARCHIVES['train']}, and "
            f"no {missing[0]}; set data_root=DIR to the folder that holds it, or allow fetching it "
            "with download=true"
        )
    title = request.title
    splits = [
        LabeledDataset.from_raw(
            read_idx(images), read_idx(labels), class_names=names, modality="image", name=title
        )
        for images, labels in files
    ]
    return concatenate(splits, title)


def _idx_file(request: Request, part: str, kind: str) -> Path:
    rank = 3 if kind == "images" else 1
    plain = request.root.absolute() / "USPS" / "raw" / f"{STEMS[part]}-{kind}-idx{rank}-ubyte"
    packed = plain.with_name(f"{plain.name}.gz")
    return packed if packed.exists() and not plain.exists() else plain


# Paths in a folder by kind: images, folders, links and others, each in the order of names.
_Found = dict[str, list[str]]

# Names of folders that are splits and hold class folders.
SPLITS = ("train", "training", "test", "testing", "val", "valid", "validation", "dev")


def read_image_folder(request: Request, *, path: str | Path | None = None) -> LabeledDataset:
    """Read `path/CLASS/**/*.png` (and other image types), or `path/SPLIT/CLASS/**` if it exists.

    Images are decoded on access, as PIL images in the modes L, RGB, I;16 or F (see `data.images`).
    Names that begin with a dot are left out. Links are followed, also those that lead out of the
    folder; a notice counts these. Each file counts once in its class, under its own path rather
    than a link's. A link to a folder that contains the dataset is not followed.

    Args:
        request: the shared options. Its split is a subfolder of `path`. If all subfolders are named
            like splits (`SPLITS`) and hold folders themselves, `all` reads them together; otherwise
            `all`, and `train` without a subfolder of that name, mean `path` itself.
        path: the folder.

    Raises:
        InputError: no such folder or split, no class folders, or no images in them.
    """
    folder = request.locate("path", path)
    if not folder.is_dir():
        raise InputError(f"image_folder: path={path} is a file; name the folder of class folders")
    with reading(folder):
        chosen = _split_folders(folder, request.split)
        classes: dict[str, list[str]] = {}
        for part in chosen:
            for name, members in _classes(part).items():
                classes.setdefault(name, []).extend(members)
        classes = dict(sorted(classes.items()))
    files = [file for members in classes.values() for file in members]
    counts = [len(members) for members in classes.values()]
    return LabeledDataset.from_raw(
        LazyItems(open_image, np.array(files, dtype=object)),
        np.repeat(np.arange(len(counts)), counts),
        class_names=list(classes),
        modality="image",
        name=folder.name if chosen == [folder] else f"{folder.name} {request.split}",
    )


def _split_folders(folder: Path, split: str) -> list[Path]:
    """Return the folders whose subfolders are the classes of a split."""
    if split != "all" and (folder / split).is_dir():
        return [folder / split]
    inside = sorted(e for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))
    # A class folder that has the name of a split holds images, not folders.
    are_splits = bool(inside) and all(
        entry.name.lower() in SPLITS and any(further.is_dir() for further in entry.iterdir())
        for entry in inside
    )
    if split == "all" and are_splits:
        return inside
    if split in ("train", "all") and not are_splits:
        return [folder]
    names = ", ".join(entry.name for entry in inside) or "(none)"
    raise InputError(f"unknown split {split!r}: {folder} has the folders {names}")


def _scan(folder: str, ends: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """List a folder and its subfolders in the order of names; links are listed, not followed.

    Yields:
        The kind (image, folder, link or other) and the path.
    """
    yield "folder", folder
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in sorted(shown, key=lambda entry: entry.name):
        if entry.is_symlink():
            yield "link", entry.path
        elif entry.is_dir():
            yield from _scan(entry.path, ends)
        elif entry.is_file() and entry.name.lower().endswith(ends):
            yield "image", entry.path
        else:
            yield "other", entry.path


def _classes(folder: Path) -> dict[str, list[str]]:
    """List the images of each class by path; classes, folders and files in the order of names."""
    with os.scandir(folder) as entries:
        shown = [e for e in entries if e.is_dir() and not e.name.startswith(".")]
    if not shown:
        raise InputError(
            f"image_folder: {folder} has no class folder; put the images of each class into a "
            "folder of its name"
        )
    ends, found = extensions(), dict[str, _Found]()
    for entry in sorted(shown, key=lambda entry: entry.name):
        listed = [("link", entry.path)] if entry.is_symlink() else _scan(entry.path, ends)
        found[entry.name] = _by_kind(listed)
    repeated: list[str] = []
    outside: list[str] = []
    if any(paths["link"] for paths in found.values()):
        repeated, outside = _follow(folder, [*found.values()], ends)
    others = [path for paths in found.values() for path in paths["other"]]
    for paths, what in (
        (repeated, "links lead to what is counted where it lies, or around it, and are left out"),
        (outside, "links lead out of the folder and are followed"),
        (others, "files are no images by their names and are left out"),
    ):
        if paths:
            message = f"{folder.name}: {len(paths)} {what}, such as "
            message += os.path.relpath(paths[0], folder)
            warn(message, DataNotice)
    return {name: sorted(paths["image"], key=os.path.split) for name, paths in found.items()}


def _by_kind(listed: Iterable[tuple[str, str]]) -> _Found:
    found: _Found = {"image": [], "folder": [], "link": [], "other": []}
    for kind, path in listed:
        found[kind].append(path)
    return found


def _follow(
    folder: Path, classes: Sequence[_Found], ends: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Add to each class the images that its links lead to.

    A file outside of the folder that two classes link to is in both.

    Returns:
        Links that repeat files or folders, and links that lead outside.
    """
    root = folder.resolve()
    lying = {
        os.path.realpath(path) for found in classes for path in (*found["image"], *found["folder"])
    } | {str(around) for around in (root, *root.parents)}
    repeated, outside = [], []
    for found in classes:
        taken = set(lying)
        # The list grows during the loop: links inside linked folders are appended.
        for link in found["link"]:
            real = os.path.realpath(link)
            if real in taken:
                repeated.append(link)
                continue
            # A broken link is reported with its name when its image is read.
            image = link.lower().endswith(ends) and (
                os.path.isfile(link) or not os.path.exists(link)
            )
            listed = [("image" if image else "other", link)]
            reached = _by_kind(_scan(link, ends) if os.path.isdir(link) else listed)
            if not Path(real).is_relative_to(root):
                outside.append(link)
            for path in reached["image"]:
                place = os.path.realpath(path)
                (repeated if place in taken else found["image"]).append(path)
                taken.add(place)
            taken.update(map(os.path.realpath, reached["folder"]))
            found["link"] += reached["link"]
            found["other"] += reached["other"]
    return repeated, outside
