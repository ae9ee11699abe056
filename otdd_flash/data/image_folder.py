"""Folders of images with one subfolder per class, the source `image_folder`.

`data.registry` calls `read_image_folder`. A change must keep the order of rows (classes, folders
and files by name), because draws and the hash of a subset depend on it. Each file counts once in
its class, and images are decoded only on access, since they may exceed the memory. Links are
followed deliberately, as datasets are often linked from a store; notices report what is linked or
left out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from otdd_flash.data.dataset import LabeledDataset, LazyItems
from otdd_flash.data.images import extensions, open_image
from otdd_flash.data.request import Request, reading
from otdd_flash.errors import DataNotice, InputError, warn

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


@dataclass
class _Scan:
    """The content of a folder by kind: images, folders, links and other files, in name order."""

    images: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def add(self, folder: str, ends: tuple[str, ...]) -> None:
        """Add the content of a folder and of its subfolders; links inside are only listed."""
        self.folders.append(folder)
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
        for entry in sorted(shown, key=lambda entry: entry.name):
            if entry.is_symlink():
                self.links.append(entry.path)
            elif entry.is_dir():
                self.add(entry.path, ends)
            elif entry.is_file() and entry.name.lower().endswith(ends):
                self.images.append(entry.path)
            else:
                self.others.append(entry.path)


def _classes(folder: Path) -> dict[str, list[str]]:
    """List the images of each class by path; classes, folders and files in the order of names."""
    with os.scandir(folder) as entries:
        shown = [e for e in entries if e.is_dir() and not e.name.startswith(".")]
    if not shown:
        raise InputError(
            f"image_folder: {folder} has no class folder; put the images of each class into a "
            "folder of its name"
        )
    ends, scans = extensions(), {}
    for entry in sorted(shown, key=lambda entry: entry.name):
        scans[entry.name] = _Scan(links=[entry.path] if entry.is_symlink() else [])
        if not entry.is_symlink():
            scans[entry.name].add(entry.path, ends)
    repeated: list[str] = []
    outside: list[str] = []
    if any(scan.links for scan in scans.values()):
        repeated, outside = _follow(folder, scans, ends)
    others = [path for scan in scans.values() for path in scan.others]
    for paths, what in (
        (repeated, "links lead to what is counted where it lies, or around it, and are left out"),
        (outside, "links lead out of the folder and are followed"),
        (others, "files are no images by their names and are left out"),
    ):
        if paths:
            message = f"{folder.name}: {len(paths)} {what}, such as "
            message += os.path.relpath(paths[0], folder)
            warn(message, DataNotice)
    return {name: sorted(scan.images, key=os.path.split) for name, scan in scans.items()}


def _follow(
    folder: Path, scans: dict[str, _Scan], ends: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Add to each class the images that its links lead to.

    A file outside of the folder that two classes link to is in both.

    Returns:
        Links that repeat files or folders, and links that lead outside.
    """
    root = folder.resolve()
    lying = {
        os.path.realpath(path) for scan in scans.values() for path in (*scan.images, *scan.folders)
    } | {str(around) for around in (root, *root.parents)}
    repeated, outside = [], []
    for scan in scans.values():
        taken = set(lying)
        # The list grows during the loop: links inside linked folders are appended.
        for link in scan.links:
            real = os.path.realpath(link)
            if real in taken:
                repeated.append(link)
                continue
            reached = _Scan()
            if os.path.isdir(link):
                reached.add(link, ends)
            elif link.lower().endswith(ends) and (os.path.isfile(link) or not os.path.exists(link)):
                # A broken link is reported with its name when its image is read.
                reached.images.append(link)
            else:
                reached.others.append(link)
            if not Path(real).is_relative_to(root):
                outside.append(link)
            for image in reached.images:
                place = os.path.realpath(image)
                (repeated if place in taken else scan.images).append(image)
                taken.add(place)
            taken.update(map(os.path.realpath, reached.folders))
            scan.links += reached.links
            scan.others += reached.others
    return repeated, outside
