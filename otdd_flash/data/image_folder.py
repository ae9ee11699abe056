"""Folders of images with one subfolder per class, the source `image_folder`.

`data.registry` calls `read_image_folder`. A change must keep the order of rows (classes, folders
and files by name), because draws and the hash of a subset depend on it. Each file counts once in
its class, and images are decoded only on access, since they may exceed the memory. Links are
followed deliberately, as datasets are often linked from a store; notices report what is linked or
left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from otdd_flash.data.dataset import LabeledDataset, LazyItems
from otdd_flash.data.images import extensions, open_image
from otdd_flash.data.request import Request, reading
from otdd_flash.errors import DataNotice, InputError, warn

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
